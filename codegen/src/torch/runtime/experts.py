def scored(logits, scoring):
    return torch.sigmoid(wide(logits)) if scoring == "sigmoid" else torch.softmax(wide(logits), -1)


def route(logits, bias=None, *, top, scoring, gates, scale=1.0, groups=None):
    """The experts of each token, the best first, and their weights; a bias affects the choice only."""
    values = scored(logits, scoring)
    worth = values if bias is None else values + wide(bias)
    if groups:
        kept, count = groups
        grouped = worth.unflatten(-1, (count, -1))
        best = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
        chosen = torch.sort(best, dim=-1, descending=True, stable=True).indices[..., :kept]
        allowed_groups = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, chosen, True)
        worth = grouped.masked_fill(~allowed_groups[..., None], -math.inf).flatten(-2)
    choices = torch.sort(worth, dim=-1, descending=True, stable=True).indices[..., :top]
    weights = values.gather(-1, choices)
    if gates == "shares":
        weights = weights / (weights.sum(-1, keepdim=True) + SHARE_EPS)
    return (weights * scale).to(logits.dtype), choices.to(torch.int32)


SHARE_EPS = 1e-20  # keeps a division by a sum of scores defined


def route_backward(logits, choices, d, *, scoring, gates, scale=1.0):
    """The gradient of the logits, the choice being fixed."""
    values, choices, d = scored(logits, scoring), choices.long(), wide(d) * scale
    chosen = values.gather(-1, choices)
    if gates == "shares":
        total = chosen.sum(-1, keepdim=True) + SHARE_EPS
        d = (d - (d * chosen / total).sum(-1, keepdim=True)) / total
    d = torch.zeros_like(values).scatter_add_(-1, choices, d)
    if scoring == "sigmoid":
        return (d * values * (1 - values)).to(logits.dtype)
    return ((d - (d * values).sum(-1, keepdim=True)) * values).to(logits.dtype)


def token_groups(shape, each):
    """The number of groups of tokens, and the group of each token."""
    rows, columns = each
    across = shape[1] // columns
    group = torch.arange(shape[0])[:, None] // rows * across + torch.arange(shape[1]) // columns
    return shape[0] // rows * across, group.flatten().to(DEVICE)


def deal(choices, each, experts, slots, bound=None):
    """The slot of each choice, `expert · slots + slot` in order within the token's group; −1 without one."""
    groups, group = token_groups(choices.shape, each)
    chosen = choices.reshape(-1, choices.shape[-1]).long()
    key = (group[:, None] * experts + chosen).flatten()
    order = torch.sort(key, stable=True)
    count = torch.bincount(key, minlength=groups * experts)
    first = torch.cumsum(count, 0) - count
    slot = torch.empty_like(key)
    slot[order.indices] = torch.arange(len(key), device=key.device) - first[order.values]
    if bound is not None and int(count.max()) > slots:
        raise SystemExit(f"expert {int(count.argmax()) % experts} was chosen by {int(count.max())} tokens of a group and has "
                         f"slots for {slots}: plan with a larger --expert-bound")
    place = torch.where(slot < slots, chosen.flatten() * slots + slot, -1)
    return place.view(choices.shape).to(torch.int32)


def rows_of(places, text, each):
    """For each choice the row of its slot among those that this rank holds, −1 without one; and the number of rows."""
    ty = parse(text)
    first, end = here.box(ty, here.rank)[0]
    slots = here.dims[ty.dims[3]].size
    groups, group = token_groups(places.shape, each)
    place = places.reshape(-1, places.shape[-1]).long()
    expert = torch.div(place, slots, rounding_mode="floor")
    rows = ((expert - first) * groups + group[:, None]) * slots + place % slots
    return torch.where((place >= 0) & (expert >= first) & (expert < end), rows, -1), (end - first) * groups * slots


def dispatch(places, x, gates=None, *, text, each):
    """Every token in its slots, times its gates; zero in a slot without a token."""
    rows, n = rows_of(places, text, each)
    tokens = x.reshape(len(rows), -1)
    out = torch.zeros(n + 1, tokens.shape[1], dtype=x.dtype, device=x.device)
    for i in range(rows.shape[1]):
        part = tokens if gates is None else tokens * gates.reshape(len(rows), -1)[:, i, None]
        out.index_add_(0, torch.where(rows[:, i] >= 0, rows[:, i], n), part.to(x.dtype))
    return out[:n].view(here.shape(parse(text)))


def slot_rows(rows, y):
    """The slots of one choice of all tokens; zeros where there is none."""
    y = y.reshape(-1, y.shape[-1])
    found = y.index_select(0, rows.clamp(min=0)) if len(y) else y.new_zeros(len(rows), y.shape[-1])
    return found.masked_fill((rows < 0)[:, None], 0.0)


def combine(places, y, gates=None, *, text, each):
    """Every token sums its slots, times its gates."""
    rows, _ = rows_of(places, text, each)
    total = 0
    for i in range(rows.shape[1]):
        part = wide(slot_rows(rows[:, i], y))
        total = total + (part if gates is None else part * wide(gates).reshape(len(rows), -1)[:, i, None])
    return total.to(y.dtype).view(*places.shape[:-1], y.shape[-1])


def slot_products(places, y, x, *, text, each):
    """The product of a token with each of its slots."""
    rows, _ = rows_of(places, text, each)
    tokens = wide(x).reshape(len(rows), -1)
    products = [(wide(slot_rows(rows[:, i], y)) * tokens).sum(-1) for i in range(rows.shape[1])]
    return torch.stack(products, -1).to(x.dtype).view(places.shape)
