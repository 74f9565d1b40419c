class Pages:
    """The pages of each sequence, −1 where it has none yet: a sequence is given pages as it grows."""

    def __init__(self, sequences):
        self.tokens, self.count, self.groups, entries = PAGES or (0, 0, 1, 0)
        self.taken, self.lengths = [0] * self.groups, [0] * sequences
        self.table = torch.full([sequences, entries], -1, dtype=torch.int32)

    def grow(self, more):
        """Gives sequences pages for so many more tokens each."""
        each = self.count // self.groups
        for i, n in enumerate(more if self.tokens else []):
            group, had = i * self.groups // len(more), -(-self.lengths[i] // self.tokens)
            self.lengths[i] += n
            for entry in range(had, -(-self.lengths[i] // self.tokens)):
                if self.taken[group] == each:
                    raise SystemExit(f"the sequences need more than {self.count} pages of {self.tokens} tokens, for which the "
                                     "program was emitted")
                self.table[i, entry] = group * each + self.taken[group]
                self.taken[group] += 1
        return self.table


class Given(dict):
    """Inputs of a step."""

    path = "the inputs of the step"


def one_step(space, program, inputs):
    """A step of a program that decodes: the token after it of each sequence and its logits, on process 0."""
    global INPUTS
    INPUTS = inputs
    for key in [key for key in space.stored if key[0] == "input"]:
        del space.stored[key]
    with within(space):
        whole = assembled(outputs_of(step(program)) if here.rank is not None else [])
    return whole.get("token"), whole.get("logits")


def is_first_process():
    return os.environ.get("RANK", "0") == "0"


def indices_of_move(pieces, side, space, ty, longest):
    """For each dimension the indices of a move in the part of its sender (0) or of its receiver (1). Of a cache only the places of the
    first tokens move, of which the longest prompt has so many."""
    of_dims = [torch.cat([(torch.arange(count)[:, None] * steps[side] + first[side] + torch.arange(length)).reshape(-1)
                          for *first, length, count, steps in of_dim]) for of_dim in pieces]
    with within(space):
        if len(of_dims) > 2 and PAGES is None and stored_size(ty.dims[1]) == CONTEXT:
            tokens = places(ty.dims[1], space.box(ty, space.rank)[1])
            of_dims[1] = of_dims[1][tokens[of_dims[1]] < longest]
    return of_dims


def narrowed_by_move(x, of_dims):
    """A view of a part that is cut where indices are side by side; and the other dimensions."""
    scattered = []
    for dim, at in enumerate(of_dims):
        if len(at) == 0 or torch.equal(at, torch.arange(int(at[0]), int(at[0]) + len(at))):
            x = x.narrow(dim, int(at[0]) if len(at) else 0, len(at))
        else:
            scattered.append(dim)
    return x, scattered


def cut_by_move(x, of_dims):
    """The elements of its sender's part that a move has."""
    x, scattered = narrowed_by_move(x, of_dims)
    for dim in scattered:
        x = x.index_select(dim, of_dims[dim].to(x.device))
    return x.contiguous()


def put_by_move(x, of_dims, part):
    """Writes the elements that a move brings into the part of its receiver."""
    x, scattered = narrowed_by_move(x, of_dims)
    if not scattered:
        x.copy_(part)
    elif len(scattered) == 1:
        x.index_copy_(scattered[0], of_dims[scattered[0]].to(x.device), part)
    else:
        index = [(at if dim in scattered else torch.arange(len(at))).to(x.device) for dim, at in enumerate(of_dims)]
        x[torch.meshgrid(*index, indexing="ij")] = part


def state_key(name, sizes, micro_batch):
    """Where a state of these sizes is kept: the whole of it, or the sequences of a micro-batch `(index, count)`."""
    if micro_batch is None:
        return "state", name, "None", "None"
    index, count = micro_batch
    view = (sizes[0] // count, count, *sizes[1:])
    window = tuple((index, index + 1) if i == 1 else (0, n) for i, n in enumerate(view))
    return "state", name, str(view), str(window)


def hand_over(of_prompts, of_tokens, i, longest):
    """Moves states from where prompts have left them to the ranks that continue them; others stay where they are."""
    moved = {name for names, *_ in HANDOVER for name in names}
    for where, stored in of_prompts.stored.items():
        if where[0] == "state" and where[1] not in moved:
            of_tokens.stored[where] = stored
    for names, micro_batches, text, rounds in HANDOVER:
        ty, moves = parse(text), rounds[i]
        with within(of_tokens):
            sizes = [stored_size(dim) for dim in ty.dims]
        sizes[0] *= micro_batches[1][1] if micro_batches[1] else 1
        for name in names:
            left = state_key(name, [sizes[0] // ROUNDS, *sizes[1:]], micro_batches[0])
            read = state_key(name, sizes, micro_batches[1])
            if read not in of_tokens.stored and any(move[1] == of_tokens.rank for move in itertools.chain(*rounds)):
                empty = torch.zeros(of_tokens.shape(ty), dtype=ty.dtype, device=DEVICE)
                of_tokens.stored[read] = (empty, text, {})
            transfers, arrived = [], []
            for giver, taker, pieces in moves:
                gives, takes, transfer = giver == of_prompts.rank, taker == of_tokens.rank, None
                if gives:
                    x, own, _ = of_prompts.stored[left]
                    part = cut_by_move(x, indices_of_move(pieces, 0, of_prompts, parse(own), longest))
                    transfer = dist.isend, part, of_tokens.process(taker)
                if takes:
                    at = indices_of_move(pieces, 1, of_tokens, ty, longest)
                    if not gives:
                        part = torch.empty([len(of_dim) for of_dim in at], dtype=ty.dtype, device=DEVICE)
                        transfer = dist.irecv, part, of_prompts.process(giver)
                    arrived.append((at, part))
                if gives != takes and part.numel() > 0:
                    transfers.append(dist.P2POp(*transfer))
            for work in dist.batch_isend_irecv(transfers) if transfers else []:
                work.wait()
            for at, part in arrived:
                put_by_move(of_tokens.stored[read][0], at, part)


def generate(spaces, programs, prompts, lengths, steps, forced=None):
    """The tokens `[sequence step]` that follow prompts, and their logits; with `forced`, those that follow its tokens."""
    (of_prompts, of_tokens), (prompt_program, token_program) = spaces, programs
    is_whole = forced is not None
    rounds, moves = 1 if is_whole else ROUNDS, not is_whole and HANDOVER is not None
    if not moves:
        of_tokens.stored = of_prompts.stored
    sequences = len(lengths)
    chunk, pages = of_prompts.dims[CHUNK].data, Pages(sequences)
    first, each = [None] * sequences, sequences // rounds
    for i in range(rounds):
        rows = range(i * each, (i + 1) * each)
        for start in range(0, max(lengths[row] for row in rows), chunk):
            more = [min(max(lengths[row] - start, 0), chunk) for row in rows]
            ids = torch.zeros([each, chunk], dtype=torch.int32)
            part = prompts[rows.start:rows.stop, start:start + chunk]
            ids[:, :part.shape[1]] = part
            table = pages.grow(more)
            inputs = Given(input_ids=ids, new_tokens=torch.tensor(more, dtype=torch.int32), pages=table)
            began = time.perf_counter()
            token, logits = one_step(of_prompts, prompt_program, inputs)
            if is_first_process() and not is_whole:
                print(f"prompts, tokens from {start}: {time.perf_counter() - began:.3f} s")
            for at, row in enumerate(rows):
                if token is not None and start < lengths[row] <= start + chunk:
                    first[row] = (token[at], logits[at])
        if moves:
            hand_over(of_prompts, of_tokens, i, max(lengths[row] for row in rows))
            if rounds > 1:
                of_prompts.stored = {where: stored for where, stored in of_prompts.stored.items() if where[0] != "state"}
    found, last = [first], None
    for i in range(steps):
        inputs = Given(new_tokens=torch.ones(sequences, dtype=torch.int32), pages=pages.grow([1] * sequences))
        if is_whole:
            for key, (x, text, place) in list(of_tokens.stored.items()):
                if key[:2] == ("state", "cache.token"):
                    of_tokens.stored[key] = (forced[:, i].to(x), text, place)
        began = time.perf_counter()
        token, logits = one_step(of_tokens, token_program, inputs)
        last = time.perf_counter() - began
        found.append([(token[j], logits[j]) for j in range(sequences)] if token is not None else None)
    if not is_first_process():
        return None
    if last is not None and not is_whole:
        print(f"a token: {last:.4f} s")
    return {"tokens": torch.stack([torch.stack([token for token, _ in column]) for column in found], 1),
            "step_logits": torch.stack([torch.stack([logits for _, logits in column]) for column in found], 1)}


def decode():
    args = arguments()
    start(args)
    file = Checkpoint(args.inputs)
    prompts, lengths = file["prompt_ids"].to(torch.int32), file["prompt_lengths"].flatten().tolist()
    PROMPTS.join(int(os.environ.get("RANK", "0")))
    if (PROMPTS.mesh, PROMPTS.processes) == (RANKS.mesh, RANKS.processes):
        PROMPTS.groups = RANKS.groups
    if dist.is_initialized():
        with within(PROMPTS):
            groups(PROMPT_AXES)
    if len(lengths) != SEQUENCES or len(prompts) != SEQUENCES:
        raise SystemExit(f"{args.inputs} has {len(lengths)} prompts, and the program was emitted for {SEQUENCES}")
    if min(lengths) < 1 or max(lengths) > prompts.shape[1]:
        raise SystemExit(f"{args.inputs}: a prompt of {min(lengths)} to {max(lengths)} tokens among {prompts.shape[1]}")
    if max(lengths) + args.steps > CONTEXT:
        raise SystemExit(f"a prompt of {max(lengths)} tokens and {args.steps} steps do not fit a cache of {CONTEXT}")
    with within(RANKS):
        found = generate((PROMPTS, RANKS), (prompts_main, ranks_main), prompts, lengths, args.steps)
        right = True
        if found is not None:
            for i, tokens in enumerate(found["tokens"].tolist()):
                print(f"sequence {i}:", *tokens)
            save(found, args.output)
            if args.expect:
                expected = Checkpoint(args.expect)
                n = args.steps + 1
                right &= compare(found, {name: expected[name][:, :n] for name in found if name in expected}, args.tolerance,
                                 args.expect)
            if args.self_check:
                with within(WHOLE):
                    alone = generate((WHOLE_PROMPTS, WHOLE), (whole_prompts_main, whole_main), prompts, lengths, args.steps,
                                     found["tokens"])
                right &= compare(found, alone, args.tolerance, "the whole program")
        finish(right)
