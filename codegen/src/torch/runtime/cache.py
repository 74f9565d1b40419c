def slots_of(ty, dim):
    """For each position of a dimension, its index among those that this rank holds; −1 where another has it."""
    where = held(here, ty, dim)
    index = torch.full([here.dims[dim].size], -1)
    index[where] = torch.arange(len(where))
    return index.to(DEVICE)


def token_positions(start, end, text, rows):
    """The position of each token of a step; zero behind the new ones."""
    at = start.long()[:, None] + held(here, parse(text), rows).to(DEVICE)
    return torch.where(at < end[:, None], at, 0).to(torch.int32)


def append(cache, x, start, end, cache_type, x_type, over, rows, wraps=False):
    """Writes the new rows of each sequence into its cache, as far as this rank has their places; a ring wraps."""
    at = start.long()[:, None] + held(here, parse(x_type), rows).to(DEVICE)
    place = at % here.dims[over].data if wraps else at.clamp(max=here.dims[over].size - 1)
    slot = slots_of(parse(cache_type), over)[place]
    sequence, row = ((at < end[:, None]) & (slot >= 0)).nonzero(as_tuple=True)
    cache[sequence, slot[sequence, row]] = x[sequence, row].to(cache.dtype)
    return cache


def pages_of(at, table, ty, pages, slots):
    """The page and the slot of each token of each sequence on this rank; the page is −1 where it has none."""
    size = here.dims[slots].size
    slot = slots_of(ty, slots)[at % size]
    page = table.long().gather(1, (at // size).clamp(max=table.shape[1] - 1))
    local = slots_of(ty, pages)[page.clamp(min=0)]
    return torch.where((page >= 0) & (slot >= 0), local, -1), slot


def append_pages(cache, x, start, end, table, cache_type, x_type, pages, slots, rows):
    """Writes the new rows of each sequence into its pages, as far as this rank has their places."""
    at = start.long()[:, None] + held(here, parse(x_type), rows).to(DEVICE)
    page, slot = pages_of(at, table, parse(cache_type), pages, slots)
    sequence, row = ((at < end[:, None]) & (page >= 0)).nonzero(as_tuple=True)
    cache[page[sequence, row], slot[sequence, row]] = x[sequence, row].to(cache.dtype)
    return cache


def rotate_append(keys, values, k, v, start, end, table, q, cache_type, x_type, text, q_type, over, slots, rows, wraps=False,
                  pages=None, **rotation):
    """Writes new rows of keys, rotated, and of values into their caches; and rotates queries, if there are some."""
    at = token_positions(start, end, text, rows)
    k, q = (x if x is None else rotary(x, at, " ".join(parse(ty).dims), " ".join(parse(text).dims), over, **rotation)
            for x, ty in ((k, x_type), (q, q_type)))
    for cache, x in ((keys, k), (values, v)):
        if pages is None:
            append(cache, x, start, end, cache_type, x_type, slots, rows, wraps)
        else:
            append_pages(cache, x, start, end, table, cache_type, x_type, pages, slots, rows)
    return (keys, values) if q is None else (keys, values, q)


def gather_pages(cache, table, cache_type, text, pages, slots, over):
    """The tokens of each sequence from its pages; zeros where it has none."""
    at = held(here, parse(text), over).to(DEVICE).expand(len(table), -1)
    page, slot = pages_of(at, table, parse(cache_type), pages, slots)
    rows = cache[page.clamp(min=0), slot.clamp(min=0)]
    return rows.masked_fill((page < 0).view(*page.shape, *[1] * (rows.dim() - 2)), 0.0)


def last_token(x, start, end, text, over):
    """The row of each sequence's last new token; zeros without one, or where another rank has it."""
    last = end.long() - start.long() - 1
    index = torch.where(last >= 0, slots_of(parse(text), over)[last.clamp(min=0)], -1)
    rows = x[torch.arange(len(index), device=x.device), index.clamp(min=0)]
    return rows.masked_fill((index < 0).view(-1, *[1] * (rows.dim() - 1)), 0.0)


def argmax(x, given_places=None, *, text, over, parts=False):
    """The place of the largest element, the first of equal ones, or what the second operand has there; and the element."""
    ty = parse(text)
    at, data = ty.dims.index(over), columns(text, over)
    where = held(here, ty, over).to(x.device)
    x = x.movedim(at, -1).masked_fill(~data, -math.inf)
    largest = x.max(-1, keepdim=True).values
    first = torch.where((x == largest) & data, where, here.dims[over].size).min(-1, keepdim=True)
    place = first.values.squeeze(-1) if given_places is None else \
        given_places.movedim(at, -1).gather(-1, first.indices).squeeze(-1)
    place, largest = place.to(torch.int32), largest.squeeze(-1)
    return (place.unsqueeze(0), largest.unsqueeze(0)) if parts else (place, largest)
