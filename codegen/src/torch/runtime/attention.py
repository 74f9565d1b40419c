ROWS = 1024  # queries whose scores are in memory at once


def allowed(mask, q, k):
    """Which keys a query sees, by position; queries and keys broadcast."""
    kind, *given = mask
    if kind == "full":
        return torch.ones_like(q - k, dtype=torch.bool)
    if kind == "causal":
        return k <= q + (given[1] - given[0] if given else 0)
    if kind == "window":
        left, right = given
        low = torch.ones_like(q - k, dtype=torch.bool) if left is None else k >= q - left
        return low if right is None else low & (k <= q + right)
    if kind == "prefix":
        return (k < given[0]).expand_as(q - k)
    if kind == "sinks":
        return (k < given[0]) & (k <= q)
    if kind == "global":
        return (k < given[0]) | (q < given[0])
    if kind == "global_at":
        at = torch.tensor(given[0], device=q.device)
        return torch.isin(k, at) | torch.isin(q, at)
    if kind == "chunks":
        return q // given[0] == k // given[0]
    if kind == "documents":
        of_q, of_k = (torch.tensor(bounds, device=q.device) for bounds in (given[0], given[-2]))
        d, e = (torch.searchsorted(bounds, x, right=True) for bounds, x in ((of_q, q.contiguous()), (of_k, k.contiguous())))
        both = (d == e) & (d >= 1) & (d < min(len(of_q), len(of_k)))
        if given[-1] is None:
            return both
        start = d.clamp(1, len(of_q) - 1)
        last = min(len(of_k) - 1, len(of_q) - 1)
        ends = (of_k - of_q[:len(of_k)])[(start - 1 if given[-1] == "start" else start).clamp(max=last)]
        return both & (k - q <= ends)
    if kind == "blocks":
        size, rows = given
        n = 1 + max([0] + [block for row in rows for block in row])
        table = torch.zeros(len(rows) + 1, n + 1, dtype=torch.bool)
        for i, row in enumerate(rows):
            table[i, list(row)] = True
        return table.to(q.device)[(q // size).clamp(max=len(rows)), (k // size).clamp(max=n)]
    masks = [allowed(part, q, k) for part in given]
    return functools.reduce(torch.logical_and if kind == "all" else torch.logical_or, masks)


class Roles:
    """The queries and keys that this rank holds: `q` is `[… queries heads width]`, `k` is `[… keys kv_heads width]`."""

    def __init__(self, q_type, k_type):
        self.q, self.k = parse(q_type), parse(k_type)
        heads, kv_heads, keys = self.q.dims[-2], self.k.dims[-2], self.k.dims[-3]
        self.queries = held(here, self.q, self.q.dims[-3]).to(DEVICE)
        self.keys = held(here, self.k, keys).to(DEVICE)
        of = here.dims[keys].fetched
        self.data = self.keys < here.dims[of[0] if of else keys].data
        group = max(here.dims[heads].size // here.dims[kv_heads].size, 1)
        held_heads, held_kv = (here.box(ty, here.rank)[-2] for ty in (self.q, self.k))
        self.served_by = (torch.arange(*held_heads) // group - held_kv[0]).to(DEVICE)
        part, index = here.dims[heads].part, torch.arange(*held_heads)
        if part:
            each = max(here.dims[heads].size // part[3], 1)
            index = (index // each * part[2] + part[1]) * each + index % each
        self.head_numbers = index.to(DEVICE)
        sequences = torch.zeros([], dtype=torch.long)
        for dim, range_ in zip(self.q.dims[:-3], here.box(self.q, here.rank)):
            sequences = sequences[..., None] * here.dims[dim].size + torch.arange(*range_)
        self.sequences = sequences.flatten().to(DEVICE)

    def serve(self, x):
        """Keys or values of each query head, heads before tokens."""
        x = x.transpose(-2, -3)
        regular = torch.arange(len(self.served_by), device=x.device)
        if torch.equal(self.served_by, regular):
            return x
        return x.index_select(-3, self.served_by)

    def take_back(self, x, n):
        """The adjoint of `serve`, for `n` key/value heads."""
        out = torch.zeros(*x.shape[:-3], n, *x.shape[-2:], dtype=x.dtype, device=x.device)
        return out.index_add_(x.dim() - 3, self.served_by, x).transpose(-2, -3)


@functools.lru_cache(maxsize=None)
def roles_in(space, q_type, k_type):
    return Roles(q_type, k_type)


def bucket(offset, buckets, max_distance, sides):
    """The bucket of a key that many positions after its query (T5)."""
    if sides == "both":
        n = buckets // 2
        first, distance = torch.where(offset > 0, n, 0), offset.abs()
    else:
        n, first, distance = buckets, 0, (-offset).clamp(min=0)
    exact = max(n // 2, 1)
    scaled = torch.log(distance.float().clamp(min=1) / exact) / torch.log(torch.tensor(max_distance / exact).float())
    far = (exact + (scaled * (n - exact)).clamp(min=0).long()).clamp(max=n - 1)
    return first + torch.where(distance < exact, distance, far)


class Scores:
    """The scores of some of the queries, and what a backward pass needs of them."""

    def __init__(self, roles, rows, q, k, given, bias_table, lengths):
        queries = roles.queries[rows]
        q_at, k_at = queries[:, None], roles.keys[None, :]
        if lengths is not None:
            lengths = lengths.long().flatten()[:, None, None, None]
        if given.get("starts"):
            q_at = q_at + lengths
        data = roles.data & (k_at < lengths) if given.get("ends") else roles.data
        if given.get("ring"):
            tokens, step = given["ring"]
            end = lengths + step
            k_at = k_at + (end // tokens - (k_at >= end % tokens).long()) * tokens
            data = data & (k_at >= 0)
        self.seen = allowed(given["mask"], q_at, k_at) & data
        product = given["scale"] * (q @ k.transpose(-1, -2))
        self.slope = None
        if given.get("softcap") is not None:
            tanh = torch.tanh(product / given["softcap"])
            product, self.slope = given["softcap"] * tanh, 1 - tanh.square()
        if given.get("bias"):
            buckets, max_distance, sides = given["bias"]
            apart = k_at - q_at
            apart = apart[:, 0] if apart.dim() > 2 else apart
            self.bucket = bucket(apart, here.dims[buckets].size, max_distance, sides)
            product = product + wide(bias_table)[self.bucket].movedim(-1, -3)
        self.value = product.masked_fill(~self.seen, -math.inf)


def operands_of(q, k, v, roles):
    """Queries, keys and values with one dimension in front, heads before tokens, at least in single precision."""
    q, k, v = (x.flatten(0, -4) if x.dim() > 3 else x.unsqueeze(0) for x in (q, k, v))
    return wide(q).transpose(1, 2), roles.serve(wide(k)), roles.serve(wide(v))


def optional_operands(more, given):
    """The bias, the first positions or ends, and the key of dropout among the operands behind q, k and v."""
    more = list(more)
    table = more.pop(0) if given.get("bias") else None
    lengths = more.pop(0) if given.get("starts") or given.get("ends") else None
    return table, lengths, more.pop(0) if more else None


def attention(q, k, v, *more, types, returns="output", parts=False, **given):
    """Attention of the queries and keys of this rank; with lse, and both in single precision as a part, as `returns` says."""
    roles = roles_in(here, *types)
    table, lengths, key = optional_operands(more, given)
    plain = not any(given.get(name) for name in ("softcap", "bias", "dropout")) and lengths is None
    if plain and returns == "output" and q.shape[-3] * k.shape[-3]:
        return library_attention(q, k, v, roles, given)
    shape = (*q.shape[:-1], v.shape[-1])
    qs, ks, vs = operands_of(q, k, v, roles)
    o = torch.zeros(*qs.shape[:-1], v.shape[-1], dtype=qs.dtype, device=q.device)
    lse = torch.full(qs.shape[:-1], -math.inf, dtype=qs.dtype, device=q.device)
    is_fused = plain and q.device.type == "cpu" and ks.shape[-1] == vs.shape[-1]
    for first in range(0, qs.shape[2] if ks.shape[2] else 0, ROWS):
        rows = slice(first, first + ROWS)
        if is_fused:
            o[:, :, rows], lse[:, :, rows] = fused_attention(qs[:, :, rows], ks, vs, roles, rows, given)
            continue
        scores = Scores(roles, rows, qs[:, :, rows], ks, given, table, lengths)
        lse[:, :, rows] = torch.logsumexp(scores.value, -1)
        weights = torch.exp(scores.value - lse[:, :, rows, None]).nan_to_num(0.0)
        if given.get("dropout"):
            weights = weights * kept_weights(roles, rows, given["dropout"], key)
        o[:, :, rows] = weights @ vs
    o, lse = o.transpose(1, 2).reshape(shape), lse.transpose(1, 2).reshape(shape[:-1]).contiguous()
    if returns == "part":
        return (o.unsqueeze(0), lse.unsqueeze(0)) if parts else (o, lse)
    return o.to(q.dtype) if returns == "output" else (o.to(q.dtype), lse)


def fused_attention(q, k, v, roles, rows, given):
    """Output and lse by PyTorch's kernel for processors, for which a row that sees no key has the lse 0."""
    seen = allowed(given["mask"], roles.queries[rows, None], roles.keys[None, :]) & roles.data
    bias = torch.zeros_like(seen, dtype=q.dtype).masked_fill(~seen, -math.inf)
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias, scale=given["scale"])
    is_empty = ~seen.any(-1)
    return o.masked_fill(is_empty[:, None], 0.0), lse.masked_fill(is_empty, -math.inf)


def library_attention(q, k, v, roles, given):
    """Attention by PyTorch's own kernels, where nothing but the output is wanted."""
    shape = (*q.shape[:-1], v.shape[-1])
    q, k, v = (x.flatten(0, -4) if x.dim() > 3 else x.unsqueeze(0) for x in (q, k, v))
    q, k, v = q.transpose(1, 2), roles.serve(k), roles.serve(v)
    order = torch.arange(q.shape[2], device=q.device)
    is_causal = given["mask"] == ("causal",) and torch.equal(roles.queries, roles.keys) \
        and torch.equal(roles.queries - roles.queries[0], order) and bool(roles.data.all())
    if is_causal:
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=given["scale"])
    else:
        parts = []
        for first in range(0, q.shape[2], ROWS):
            rows = slice(first, first + ROWS)
            seen = allowed(given["mask"], roles.queries[rows, None], roles.keys[None, :]) & roles.data
            part = F.scaled_dot_product_attention(q[:, :, rows], k, v, attn_mask=seen, scale=given["scale"])
            parts.append(part.masked_fill(~seen.any(-1)[:, None], 0.0))
        o = torch.cat(parts, 2)
    return o.transpose(1, 2).reshape(shape)


def attention_backward(q, k, v, d_o, lse, delta, *more, types, **given):
    """Gradients for q, k, v and the bias, by the probabilities that lse gives again."""
    roles = roles_in(here, *types)
    table, lengths, key = optional_operands(more, given)
    qs, ks, vs = operands_of(q, k, v, roles)
    d_o, lse, delta = (wide(x) for x in (d_o, lse, delta))
    d_o = (d_o.flatten(0, -4) if d_o.dim() > 3 else d_o.unsqueeze(0)).transpose(1, 2)
    lse, delta = ((x.flatten(0, -3) if x.dim() > 2 else x.unsqueeze(0)).transpose(1, 2) for x in (lse, delta))
    dq, dk, dv = (torch.zeros_like(x) for x in (qs, ks, vs))
    d_table = torch.zeros_like(wide(table)) if table is not None else None
    for first in range(0, qs.shape[2] if ks.shape[2] else 0, ROWS):
        rows = slice(first, first + ROWS)
        scores = Scores(roles, rows, qs[:, :, rows], ks, given, table, lengths)
        p = torch.exp(scores.value - lse[:, :, rows, None]).nan_to_num(0.0)
        p = p.masked_fill(torch.isneginf(lse[:, :, rows, None]), 0.0)
        chosen = kept_weights(roles, rows, given["dropout"], key) if given.get("dropout") else 1.0
        dv += (p * chosen).transpose(-1, -2) @ d_o[:, :, rows]
        ds = p * (chosen * (d_o[:, :, rows] @ vs.transpose(-1, -2)) - delta[:, :, rows, None])
        if table is not None:
            index = scores.bucket.expand(ds.shape[-2:]).flatten()
            d_table.index_add_(0, index, ds.sum(0).movedim(0, -1).flatten(0, 1))
        ds = given["scale"] * (ds if scores.slope is None else ds * scores.slope)
        dq[:, :, rows] += ds @ ks
        dk += ds.transpose(-1, -2) @ qs[:, :, rows]
    n = k.shape[-2]
    dq = dq.transpose(1, 2).reshape(q.shape).to(q.dtype)
    dk, dv = (roles.take_back(x, n).reshape(like.shape).to(like.dtype) for x, like in ((dk, k), (dv, v)))
    return (dq, dk, dv) if table is None else (dq, dk, dv, d_table)


def share(part, whole):
    """The weight of a part in a sum of exponentials; zero of nothing."""
    return torch.where(torch.isneginf(part), 0.0, torch.exp(part - whole))


def merge(o, lse, more_o, more_lse):
    """Outputs of two sets of keys become that of their union; a second part of nothing changes nothing."""
    if more_o is None or more_o.numel() == 0:
        return o, lse
    both = torch.logaddexp(lse, more_lse)
    return share(lse, both)[..., None] * o + share(more_lse, both)[..., None] * more_o, both


def merge_parts(o, lse):
    """Outputs of many sets of keys, along the first dimension, become that of their union."""
    whole = torch.logsumexp(lse, 0)
    return (share(lse, whole)[..., None] * o).sum(0), whole


def accumulate(x, y):
    return x if y is None or y.numel() == 0 else x + y


def sink(o, lse, logits):
    """A learned logit for each head enters the denominator of the softmax."""
    after = torch.logaddexp(lse, wide(logits).expand_as(lse))
    return share(lse, after)[..., None] * o, after


def sink_backward(o, d_o, before, after, lacks):
    """Gradients of `sink` for o, lse and the logits, which sum over the dimensions that they lack."""
    part = share(before, after)
    d_before = (1 - part) * (d_o * o).sum(-1)
    return part[..., None] * d_o, d_before, -total(d_before, lacks)


def scores(q, k, types, columns, **given):
    """Scaled, capped and masked scores of the keys that this rank holds."""
    roles = roles_in(here, *types)
    front = q.shape[:-3]
    qs, ks, _ = operands_of(q, k, k, roles)
    value = Scores(roles, slice(None), qs, ks, given, None, None).value
    value = F.pad(value, (0, columns - value.shape[-1]), value=-math.inf)
    return value.transpose(1, 2).reshape(*front, q.shape[-3], q.shape[-2], columns)


def weigh(value, lse, v, types, to, **given):
    """`Σ exp(scores − lse) · v` over the keys that this rank holds."""
    roles = roles_in(here, *types)
    vs = roles.serve(wide(v.flatten(0, -4) if v.dim() > 3 else v.unsqueeze(0)))
    p = share(value, lse[..., None])[..., :v.shape[-3]]
    p = p.flatten(0, -4) if p.dim() > 3 else p.unsqueeze(0)
    o = (p.transpose(1, 2) @ vs).transpose(1, 2)
    return o.reshape(*lse.shape, v.shape[-1]).to(parse(to).dtype)
