MULTIPLIERS = (-0x40a7b892e31b1a47, -0x6b2fb644ecceee15)  # of 64 bits, as numbers with a sign


def shifted(x, by):
    """The bits of `x` moved right, zeros behind them."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def mix(state, word):
    """A number of 64 bits drawn from a state and a word."""
    x = (state ^ word) + -0x61c8864680b583eb
    x = (x ^ shifted(x, 30)) * MULTIPLIERS[0]
    x = (x ^ shifted(x, 27)) * MULTIPLIERS[1]
    return x ^ shifted(x, 31)


def number(n):
    return torch.tensor(n if n < 1 << 63 else n - (1 << 64), dtype=torch.int64, device=DEVICE)


def is_below(drawn, rate):
    return shifted(drawn, 11).double() < rate * 2.0**53


def cut(x):
    return shifted(x, 34).to(torch.int32)


def key(seed):
    return cut(mix(number(0), number(seed)))


def fold_in(of, n):
    """A key for each whole number."""
    n = n.double().round().long() if n.is_floating_point() else n.long()
    return cut(mix(mix(number(0), of.long()), n))


def layer_key(of, layer):
    return fold_in(of, number(layer))


def origin(dim, index):
    """The indices of the dimension that a dimension is a part of."""
    part = here.dims[dim].part
    if not part:
        return index
    each = max(here.dims[dim].size // part[3], 1)
    return (index // each * part[2] + part[1]) * each + index % each


def dropout_mask(of, text, rate, seed):
    """Which elements are kept, drawn by position along each dimension."""
    ty, drawn = parse(text), mix(number(seed), of.long())
    for dim in ty.dims:
        drawn = mix(drawn[..., None], origin(dim, held(here, ty, dim)).to(DEVICE))
    return ~is_below(drawn, rate)


def dropout(x, mask, rate):
    return torch.where(mask, x * (1 / (1 - rate)), 0).to(x.dtype)


def kept_weights(roles, rows, given, of):
    """The factors of attention weights under dropout: zero, or one over the share that is kept."""
    rate, seed = given
    state = number(seed) if of is None else mix(number(seed), of.long())
    drawn = mix(state, roles.sequences)[:, None, None, None]
    drawn = mix(drawn, roles.head_numbers[:, None, None])
    drawn = mix(mix(drawn, roles.queries[rows][:, None]), roles.keys)
    return torch.where(is_below(drawn, rate), 0.0, 1 / (1 - rate))
