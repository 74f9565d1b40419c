class Pending:
    """The results of a collective that may still be under way."""

    def __init__(self, works, finish):
        self.works, self.finish = works, finish

    def wait(self):
        for work in self.works:
            work.wait()
        return self.finish()


SENT = []  # messages that this rank sent to other stages and need not wait for before the end of the step


def intersect(a, b):
    return tuple((max(x, y), max(x, y, min(m, n))) for (x, m), (y, n) in zip(a, b))


def elements(box):
    return math.prod(end - start for start, end in box)


def relative(box, within):
    return tuple(slice(start - first, end - first) for (start, end), (first, _) in zip(box, within))


@functools.cache
def blocks(space, kind, axes, start, end):
    """The members of the group of a collective, and for each the boxes that this rank sends to it and receives from it."""
    rank = space.rank
    group = sorted(space.along(rank, axes), key=space.process)  # as process groups number them
    if start.on != end.on:
        group = [r for r in group if space.holds(start, r) or space.holds(end, r)]
    some = lambda box: [box] if elements(box) > 0 else []
    if kind in ("fetch", "fetch_sum"):
        of, into = (start, end) if kind == "fetch" else (end, start)
        give = [fetched(space, of, into, rank, peer) for peer in group]
        take = [fetched(space, of, into, peer, rank) for peer in group]
        give, take = [[a for a, _ in b] for b in give], [[b for _, b in t] for t in take]
        return (group, give, take) if kind == "fetch" else (group, take, give)
    if kind == "permute":
        if start.on != end.on:
            goes = lambda giver, taker: space.holds(start, giver) and space.holds(end, taker)
            give = [some(space.box(start, rank)) if goes(rank, peer) else [] for peer in group]
            take = [some(space.box(start, peer)) if goes(peer, rank) else [] for peer in group]
            return group, give, take
        if start.split == end.split:
            owner, wanted = space.owner(start, rank), space.owner(end, rank)
            receiver = None if owner is None else space.holder(end, owner)
            sender = None if wanted is None else space.holder(start, wanted)
            give = [[space.box(start, rank)] if peer == receiver else [] for peer in group]
            take = [[space.box(end, rank)] if peer == sender else [] for peer in group]
            return group, give, take
        sources = serving(space, start, end, group)
        give = [some(space.box(start, rank)) if sources[peer] == rank else [] for peer in group]
        take = [some(space.box(end, rank)) if sources[rank] == peer else [] for peer in group]
        return group, give, take
    mine, wanted = space.box(start, rank), space.box(end, rank)
    give = [some(intersect(mine, space.box(end, peer))) for peer in group]
    take = [some(intersect(space.box(start, peer), wanted)) for peer in group]
    return group, give, take


def serving(space, start, end, group):
    """For each member the member from which it gets its block: itself where it has it, else the holders in turn."""
    holders, served, source = collections.defaultdict(list), collections.Counter(), {}
    for peer in group:
        holders[space.box(start, peer)].append(peer)
    for peer in group:
        wanted = space.box(end, peer)
        if wanted == space.box(start, peer):
            source[peer] = peer
        else:
            having = holders.get(wanted)
            source[peer] = having[served[wanted] % len(having)] if having else None
            served[wanted] += 1
    return source


def fetched(space, of, into, giver, taker):
    """The tokens of `giver` that `taker` needs: where they are, and where they go."""
    at = next(i for i, dim in enumerate(into.dims) if space.dims[dim].fetched)
    parts = space.dims[into.dims[at]].fetched[1]
    i = 0
    for axis in into.split[at]:
        i = i * space.mesh[axis] + space.coordinate(taker, axis)
    first = sum(end - start for part in parts[:i] for start, end in part)
    has, pairs = space.box(of, giver), []
    for start, end in parts[i]:
        low, high = max(start, has[at][0]), min(end, has[at][1])
        if low < high:
            to = (first + low - start, first + high - start)
            pair = tuple(has[:at] + (range_,) + has[at + 1:] for range_ in ((low, high), to))
            pairs += [pair] if elements(pair[0]) > 0 else []
        first += end - start
    return pairs


def collective(kind, axes, parcels, group=None, adjoint=False):
    """Starts a collective of tensors, each with its type before and after; `wait` of the result gives them.

    The adjoint takes gradients back: from the type after to that before."""
    space, process_group = here, here.groups[group or axes]
    parcels = [(x, parse(start), parse(end)) for x, start, end in parcels]
    if kind == "all_reduce":
        return reduced(process_group, [x for x, _, _ in parcels])
    if adjoint:
        plans = [blocks(space, kind, axes, end, start) for _, start, end in parcels]
        plans = [(peers, take, give) for peers, give, take in plans]
    else:
        plans = [blocks(space, kind, axes, start, end) for _, start, end in parcels]
    peers = plans[0][0]
    dtype = parcels[0][1].dtype
    device = next((x.device for x, _, _ in parcels if x is not None), DEVICE)
    send = [[x[relative(box, space.box(start, space.rank))].reshape(-1)
             for (x, start, _), (_, give, _) in zip(parcels, plans) for box in give[i]] for i in range(len(peers))]
    counts = [sum(elements(box) for _, _, take in plans for box in take[i]) for i in range(len(peers))]
    sums = adjoint or kind in ("reduce_scatter", "fetch_sum")

    def results(parts):
        results, offsets = [], [0] * len(peers)
        for (_, _, end), (_, _, take) in zip(parcels, plans):
            if not space.holds(end, space.rank):
                results.append(None)
                continue
            own = space.box(end, space.rank)
            y = torch.zeros([b - a for a, b in own], dtype=dtype, device=device)
            for i, boxes in enumerate(take):
                for box in boxes:
                    n = elements(box)
                    block = parts[i][offsets[i]:offsets[i] + n].view([b - a for a, b in box])
                    offsets[i] += n
                    place = y[relative(box, own)]
                    place.add_(block) if sums else place.copy_(block)
            results.append(y)
        return results[0] if len(results) == 1 else results

    start_of = point_to_point if kind == "permute" else at_once
    works, received = start_of("all_to_all" if adjoint else kind, process_group, peers, send, counts, dtype, device)
    if kind == "permute" and not any(counts):
        # Who only sends has no result to wait for.
        SENT.append((works, send))
        return Pending([], lambda: results(received()))
    return Pending(works, lambda: results(received()))


def flat(parts, dtype, device):
    return torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=device)


def at_once(kind, members, group, send, counts, dtype, device):
    """One call for all members: the message of each, or the sum of what all sent to this rank."""
    packed = [flat(parts, dtype, device) for parts in send]
    wire = torch.uint8 if dtype == torch.bool else dtype
    if kind == "all_gather" and len(set(counts)) == 1:
        arrived = torch.empty(sum(counts), dtype=wire, device=device)
        work = dist.all_gather_into_tensor(arrived, packed[0].to(wire), members, async_op=True)
    elif kind == "reduce_scatter" and len({x.numel() for x in packed}) == 1:
        arrived = torch.empty(counts[0], dtype=wire, device=device)
        work = dist.reduce_scatter_tensor(arrived, torch.cat(packed), group=members, async_op=True)
        nothing = torch.zeros_like(arrived)
        return [work], lambda: [arrived] + [nothing] * (len(group) - 1)
    else:
        arrived = torch.empty(sum(counts), dtype=wire, device=device)
        outgoing = torch.cat(packed).to(wire)
        work = dist.all_to_all_single(arrived, outgoing, counts, [x.numel() for x in packed], members, async_op=True)
    return [work], lambda: arrived.to(dtype).split(counts)


def point_to_point(kind, members, group, send, counts, dtype, device):
    """Whole blocks from rank to rank."""
    transfers, arrived = [], []
    for peer, parts, n in zip(group, send, counts):
        if peer == here.rank:
            arrived.append(flat(parts, dtype, device).clone())
            continue
        arrived.append(torch.empty(n, dtype=dtype, device=device))
        if n:
            transfers.append(dist.P2POp(dist.irecv, arrived[-1], here.process(peer), members))
        if parts:
            transfers.append(dist.P2POp(dist.isend, flat(parts, dtype, device), here.process(peer), members))
    works = dist.batch_isend_irecv(transfers) if transfers else []
    keep = [transfer.tensor for transfer in transfers]
    return works, lambda: (arrived, keep)[0]


def reduced(members, tensors):
    """Sums over the members of a group."""
    whole = torch.cat([x.reshape(-1) for x in tensors])
    work = dist.all_reduce(whole, group=members, async_op=True)

    def results():
        parts = whole.split([x.numel() for x in tensors])
        parts = [part.view(x.shape) for part, x in zip(parts, tensors)]
        return parts[0] if len(parts) == 1 else parts

    return Pending([work], results)


def all_to_all(axes, *parcels):
    return collective("all_to_all", axes, parcels)


def all_gather(axes, *parcels):
    return collective("all_gather", axes, parcels)


def reduce_scatter(axes, *parcels):
    return collective("reduce_scatter", axes, parcels)


def all_reduce(axes, *parcels):
    return collective("all_reduce", axes, parcels)


def permute(axes, *parcels, group=None):
    return collective("permute", axes, parcels, group)


def fetch(axes, *parcels):
    return collective("fetch", axes, parcels)


def fetch_sum(axes, *parcels):
    return collective("fetch_sum", axes, parcels)


def local_slice(x, start, end):
    """This rank's part of a tensor of which it holds more."""
    start, end = parse(start), parse(end)
    return x[relative(here.box(end, here.rank), here.box(start, here.rank))]
