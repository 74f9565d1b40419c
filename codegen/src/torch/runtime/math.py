def einsum(equation, *operands, dtype=None):
    """Sum of products by the letters of dimensions, in a wider type where one is given."""
    if dtype is not None:
        operands = [x.to(dtype) for x in operands]
    return torch.einsum(equation, *operands)


def align(y, dims, like):
    """`y` with its dimensions in the order of `like` and one element along those that it lacks."""
    dims, like = dims.split(), like.split()
    y = y.permute([dims.index(dim) for dim in like if dim in dims])
    for i, dim in enumerate(like):
        y = y if dim in dims else y.unsqueeze(i)
    return y


def expand(y, dims, like, text):
    return align(y, dims, like).expand(here.shape(parse(text))).contiguous()


def fill(value, text):
    ty = parse(text)
    return torch.full(here.shape(ty), value, dtype=ty.dtype, device=DEVICE)


def positions(padding, text):
    """The position of each token that this rank holds, and a number for padding."""
    ty = parse(text)
    of = here.dims[ty.dims[0]]
    where = held(here, ty, ty.dims[0])
    data = here.dims[of.fetched[0]].data if of.fetched else of.data
    return torch.where(where < data, where, padding).to(DEVICE, torch.int32)


def select(x, text, over, position):
    """The elements at one position of a dimension; zeros where another rank has it."""
    ty = parse(text)
    found = (held(here, ty, over) == position).nonzero().flatten()
    at = ty.dims.index(over)
    return x.select(at, int(found[0])) if len(found) else torch.zeros_like(x.select(at, 0))


def embed(table, ids, text, over):
    """Rows of a table; zeros where another rank has the row."""
    ty = parse(text)
    start, end = here.box(ty, here.rank)[ty.dims.index(over)]
    wrong = (ids < 0) | (ids >= here.dims[over].data)
    if wrong.any():
        raise SystemExit(f"token {int(ids[wrong][0])} is none of {here.dims[over].data}")
    mine = (ids >= start) & (ids < end)
    rows = F.embedding(torch.where(mine, ids - start, 0), table.flatten(1)).view(*ids.shape, *table.shape[1:])
    return rows * mine.view(*ids.shape, *[1] * (table.dim() - 1)).to(rows.dtype)


def embed_backward(ids, d, text, over, ids_dims, d_dims, padding=None):
    """Each row of this rank sums the gradients of the tokens that looked it up."""
    ty = parse(text)
    start, end = here.box(ty, here.rank)[ty.dims.index(over)]
    ids_dims, d_dims = ids_dims.split(), d_dims.split()
    d = d.permute([d_dims.index(dim) for dim in ids_dims + [dim for dim in ty.dims if dim != over]])
    mine = (ids >= start) & (ids < end) & (ids != (-1 if padding is None else padding))
    out = torch.zeros(here.shape(ty), dtype=d.dtype, device=d.device)
    return out.index_add_(0, (ids[mine] - start).long(), d[mine])


def quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


def relu2(x):
    return F.relu(x).square()


def symlog(x):
    return torch.sign(x) * torch.log1p(x.abs())


def slope(of, x):
    """The derivative of a function of one element."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        function = dict(silu=F.silu, gelu=F.gelu, gelu_tanh=functools.partial(F.gelu, approximate="tanh"),
                        quick_gelu=quick_gelu, relu=F.relu, tanh=torch.tanh, relu2=relu2,
                        symlog=symlog)[of]
        y = function(x)
        return y.detach(), torch.autograd.grad(y.sum(), x)[0]


def unary_backward(x, d, of):
    return d * slope(of, x)[1]


def gated_backward(x, y, d, c=0, *, of, limit=math.inf):
    value, derivative = slope(of, x.clamp(max=limit))
    factor = y.clamp(-limit, limit) + c
    return torch.where(x > limit, 0.0, d * factor * derivative), torch.where(y.abs() > limit, 0.0, d * value)


def log_add_exp(x, y):
    return torch.logaddexp(x, y)


def concat(x, y, x_dims, y_dims):
    """`x` and then `y` along the last dimension, `y` repeated along the dimensions that it lacks."""
    y = align(y, y_dims, x_dims.rsplit(" ", 1)[0] + " " + y_dims.rsplit(" ", 1)[-1])
    return torch.cat([x, y.expand(*x.shape[:-1], y.shape[-1])], -1)


def wide(x):
    """At least single precision."""
    return x if x.dtype == torch.float64 else x.float()


def total(x, over):
    """The sum over some dimensions, which may be none."""
    return x.sum(over) if over else x


def rms_norm(x, w, over, eps, offset=0.0):
    y = wide(x)
    y = y * torch.rsqrt(y.square().mean(over, keepdim=True) + eps)
    return (y * (wide(w) + offset)).to(x.dtype)


def rms_norm_backward(x, w, d, over, eps, lacks, offset=0.0):
    """Gradients of `rms_norm`; that of the weight sums over the dimensions that it lacks."""
    y, g = wide(x), wide(d) * (wide(w) + offset)
    root = torch.sqrt(y.square().mean(over, keepdim=True) + eps)
    pull = (g * y).sum(over, keepdim=True) / (y.shape[over] * root**3)
    return (g / root - y * pull).to(x.dtype), total(wide(d) * y / root, lacks).to(w.dtype)


def rms_scale(x, squares, w, n, eps):
    return (wide(x) * torch.rsqrt(wide(squares) / n + eps) * wide(w)).to(x.dtype)


def rms_scale_backward(x, squares, w, d, n, eps, lacks):
    """Gradients of `rms_scale`; `lacks` are the dimensions over which those of the squares and of the weight sum."""
    y, d, root = wide(x), wide(d), torch.sqrt(wide(squares) / n + eps)
    d_squares = -total(d * y * wide(w) / (2 * n * root**3), lacks[0])
    return (d * wide(w) / root).to(x.dtype), d_squares.to(squares.dtype), total(d * y / root, lacks[1]).to(w.dtype)


def layer_norm(x, w, b, over, eps):
    y = wide(x)
    y = (y - y.mean(over, keepdim=True)) * torch.rsqrt(y.var(over, correction=0, keepdim=True) + eps)
    return (y * wide(w) + wide(b)).to(x.dtype)


def add_rms_norm(x, y, w, over, eps, offset):
    both = x + y
    return both, rms_norm(both, w, over, eps, offset)


def add_layer_norm(x, y, w, b, over, eps):
    both = x + y
    return both, layer_norm(both, w, b, over, eps)


def layer_norm_backward(x, w, d, over, eps, lacks):
    y, d = wide(x), wide(d)
    root = torch.sqrt(y.var(over, correction=0, keepdim=True) + eps)
    unit, g = (y - y.mean(over, keepdim=True)) / root, d * wide(w)
    dx = (g - g.mean(over, keepdim=True) - unit * (g * unit).mean(over, keepdim=True)) / root
    return dx.to(x.dtype), total(d * unit, lacks).to(w.dtype), total(d, lacks).to(w.dtype)


def softmax_backward(y, d, over):
    return y * (d - (y * d).sum(over, keepdim=True))


def frequencies(width, theta, scaling):
    """The angle per position of each pair of a rotary embedding."""
    base = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    kind, given = scaling
    if kind == "none":
        return base
    factor = given["factor"]
    if kind == "linear":
        return base / factor
    if kind == "llama3":
        turns = given["original"] * base / (2 * math.pi)
        keep = ((turns - given["low"]) / (given["high"] - given["low"])).clamp(0, 1)
    else:
        pair = lambda beta: width * math.log(given["original"] / (beta * 2 * math.pi)) / (2 * math.log(theta))
        first, last = pair(given["beta_fast"]), pair(given["beta_slow"])
        if given["truncate"] == "true":
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0.0), min(last, width - 1.0)
        last += 0.001 if first == last else 0.0
        keep = 1 - ((torch.arange(width // 2, dtype=torch.float64) - first) / (last - first)).clamp(0, 1)
    return base * (keep + (1 - keep) / factor)


def rotary(x, at, dims, at_dims, over, width, theta, scaling, pairs="halves", turn="forward"):
    """Rotates pairs of the first `width` elements of a dimension by the angle of the position."""
    angle = at.to(torch.float64)[..., None] * frequencies(width, theta, scaling).to(x.device)
    angle = -angle if turn == "back" else angle
    amplitude = scaling[1].get("attention", 1.0)
    axis = dims.split().index(over)
    order = [dim for dim in dims.split() if dim != over] + [over]
    sin, cos = (align((amplitude * f(angle)).to(wide(x).dtype), at_dims + " " + over, " ".join(order))
                for f in (torch.sin, torch.cos))
    y = wide(x).movedim(axis, -1)
    turned, rest = y[..., :width], y[..., width:]
    if pairs == "halves":
        a, b = turned.chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    return torch.cat([turned, rest], -1).movedim(-1, axis).to(x.dtype).contiguous()


def repeat(x, start, end, source, to):
    """Each element of a dimension several times, as far as this rank holds the copies."""
    start, end = parse(start), parse(end)
    times = here.dims[to].size // here.dims[source].size
    at = end.dims.index(to)
    index = torch.arange(*here.box(end, here.rank)[at]) // times - here.box(start, here.rank)[at][0]
    return x.index_select(at, index.to(x.device))


def sum_copies(x, start, end, source, to):
    """Each element of a dimension is the sum of its copies that this rank holds."""
    start, end = parse(start), parse(end)
    times = here.dims[source].size // here.dims[to].size
    at = end.dims.index(to)
    index = torch.arange(*here.box(start, here.rank)[at]) // times - here.box(end, here.rank)[at][0]
    out = torch.zeros(here.shape(end), dtype=x.dtype, device=x.device)
    return out.index_add_(at, index.to(x.device), x)


def runs_of(part, n):
    """How `n` elements that a rank holds are cut into parts: runs, parts, elements of a part."""
    of, _, count, runs = part
    run = max(here.dims[of].size // runs, 1)
    return [n // run, count, run // count]


def take(x, text, to):
    """One of several equal parts of a dimension, of the elements that this rank holds."""
    part, at = here.dims[to].part, parse(text).dims.index(here.dims[to].part[0])
    return x.unflatten(at, runs_of(part, x.shape[at])).select(at + 1, part[1]).flatten(at, at + 1).contiguous()


def join(*parts, text, to, first):
    """The parts of a dimension, in order, as the dimension again."""
    at = parse(text).dims.index(to)
    n = sum(x.shape[at] for x in parts)
    runs, _, inner = runs_of(here.dims[first].part, n)
    return torch.stack([x.unflatten(at, [runs, inner]) for x in parts], at + 1).flatten(at, at + 2)


def columns(text, over):
    """Which columns that this rank holds carry data."""
    return (held(here, parse(text), over) < here.dims[over].data).to(DEVICE)


def counted(labels, text, ignore):
    """Which labels count: those that are not ignored, of tokens that are no padding."""
    ty, counts = parse(text), labels != ignore
    for i, dim in enumerate(ty.dims):
        of = here.dims[dim].fetched[0] if here.dims[dim].fetched else dim
        data = (held(here, ty, dim) < here.dims[of].data).to(labels.device)
        counts = counts & data.view([-1] + [1] * (labels.dim() - i - 1))
    return counts


def row_lse(x, text, over, parts=None):
    """The logarithm of the sum of exponentials over the columns of this rank that are no padding."""
    ty = parse(text)
    at = ty.dims.index(over)
    hidden = ~columns(text, over).view([-1] + [1] * (x.dim() - at - 1))
    lse = torch.logsumexp(wide(x).masked_fill(hidden, -math.inf), at)
    return lse if parts is None else lse.unsqueeze(0)


def pick(x, labels, text, labels_text, over, ignore):
    """The logit of each label; zero where it is ignored or another rank has it."""
    ty = parse(text)
    start, end = here.box(ty, here.rank)[ty.dims.index(over)]
    mine = counted(labels, labels_text, ignore) & (labels >= start) & (labels < end)
    index = torch.where(mine, labels - start, 0).long()
    found = wide(x).gather(-1, index.unsqueeze(-1)).squeeze(-1)
    return torch.where(mine, found, 0)


def valid(labels, text, ignore, to):
    return counted(labels, text, ignore).to(parse(to).dtype)


def cross_entropy(x, labels, text, labels_text, over, ignore):
    """Negative log-likelihood of each label, and the logarithm of the sum of exponentials."""
    lse = row_lse(x, text, over)
    counts = counted(labels, labels_text, ignore)
    return torch.where(counts, lse - pick(x, labels, text, labels_text, over, ignore), 0), lse


def cross_entropy_backward(x, labels, lse, d, text, labels_text, over, ignore):
    ty = parse(text)
    start, end = here.box(ty, here.rank)[ty.dims.index(over)]
    counts = counted(labels, labels_text, ignore)
    mine = counts & (labels >= start) & (labels < end)
    share = torch.exp(wide(x) - lse.unsqueeze(-1)) * columns(text, over)
    share.scatter_add_(-1, torch.where(mine, labels - start, 0).long().unsqueeze(-1), -mine.unsqueeze(-1).to(share.dtype))
    return (share * torch.where(counts, d, 0).unsqueeze(-1)).to(x.dtype)


def adamw(w, g, m, v, step, clip, lr, beta1, beta2, eps, weight_decay):
    """A step of AdamW: weights and moments."""
    # On the device, for a compiled block: the number of the step is a tensor.
    g, t = g.to(w.dtype) * clip, torch.as_tensor(step, device=w.device).double()
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    root = v.sqrt() / (1 - beta2**t).sqrt() + eps
    return w * (1 - lr * weight_decay) - lr * (m / (1 - beta1**t)) / root, m, v


def clip_factor(squares, max_norm):
    return (max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
