# The leading parts of names that checkpoints of bare models lack; the text part of a model of text and images has more.
PREFIXES = ("transformer.", "model.", "gpt_neox.", "bert.")
# The tensors that have the matrices of all experts, and which of how many parts of an expert's rows.
FUSED = {"gate_proj": ("gate_up_proj", 0, 2), "w1": ("gate_up_proj", 0, 2), "up_proj": ("gate_up_proj", 1, 2),
         "w3": ("gate_up_proj", 1, 2), "down_proj": ("down_proj", 0, 1), "w2": ("down_proj", 0, 1)}


def other_names(name):
    """The names under which a checkpoint may have a tensor, each with `(expert, part, parts)` in a tensor of all experts."""
    names = [name, *(name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix))]
    names += [prefix + name for prefix in PREFIXES] + ["language_model." + name]
    if name.startswith("model."):
        names.append("model.language_model." + name.removeprefix("model."))
    names = [alias for one in names for alias in (one, one.replace(".block_sparse_moe.", ".mlp."))]
    yield from ((one, None) for one in names)
    for one in names:
        module, _, rest = one.partition(".experts.")
        expert, _, matrix = rest.partition(".")
        if matrix.removesuffix(".weight") in FUSED:
            fused, part, parts = FUSED[matrix.removesuffix(".weight")]
            yield f"{module}.experts.{fused}", (int(expert), part, parts)


class Checkpoint:
    """Tensors by name: a safetensors file, or all those of a folder."""

    def __init__(self, path):
        from safetensors import safe_open

        path = pathlib.Path(path)
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files:
            raise SystemExit(f"{path}: no safetensors file in the folder")
        self.path, self.files = path, {}
        for file in files:
            with safe_open(file, "pt") as tensors:
                self.files.update((name, file) for name in tensors.keys())

    def find(self, name):
        return next((found for found in other_names(name) if found[0] in self.files), None)

    def __contains__(self, name):
        return self.find(name) is not None

    def __getitem__(self, name):
        from safetensors import safe_open

        found = self.find(name)
        if found is None:
            raise SystemExit(f"{self.path}: no tensor `{name}`")
        stored, window = found
        with safe_open(self.files[stored], "pt") as tensors:
            if window is None:
                return tensors.get_tensor(stored)
            expert, part, parts = window
            return tensors.get_slice(stored)[expert].chunk(parts)[part]


WEIGHTS, INPUTS = None, None


def stored_size(dim):
    of = here.dims[dim]
    return here.dims[of.copies].data if of.copies else of.data


def places(dim, range_):
    """For each index of a range, where a file has its element; −1 where it has none."""
    of = here.dims[dim]
    if of.copies:
        times = of.size // here.dims[of.copies].size
        index = torch.arange(*range_) // times
        where = here.positions(of.copies, (0, here.dims[of.copies].size))[index]
    elif of.fetched or not of.order:
        where = torch.arange(*range_)
    else:
        where = here.positions(dim, range_)
    return torch.where(where < stored_size(dim), where, -1)


def members(name, n):
    return [name.replace("{expert}", str(i)) for i in range(n)] if "{expert}" in name else [name]


def loaded(source, name, text, stored=(), view=(), window=(), ahead=0, fill=0):
    """This rank's part of a stored tensor."""
    ty = parse(text)
    sizes = [stored_size(dim) for dim in ty.dims]
    shape = list(stored) or sizes
    names = members(name, shape[0] if shape else 1)
    parts = [source[part] for part in names]
    x = torch.stack(parts) if "{expert}" in name else parts[0]
    if list(x.shape) != shape:
        raise SystemExit(f"`{name}` has shape {list(x.shape)} in {source.path}, and the program reads {shape}")
    x = x.reshape(list(view) or shape)
    x = x[tuple(slice(*range_) for range_ in window)] if window else x
    x = x.reshape(sizes)
    if ahead:
        end = torch.full_like(x[..., :ahead], fill)
        x = torch.cat([x[..., ahead:], end], -1)
    for i, (dim, range_) in enumerate(zip(ty.dims, here.box(ty, here.rank))):
        where = places(dim, range_)
        x = x.index_select(i, where.clamp(min=0))
        if (where < 0).any():
            x = x.masked_fill((where < 0).view([-1] + [1] * (x.dim() - i - 1)), fill)
    return x.to(DEVICE, ty.dtype).contiguous()


def weight(name, text, **place):
    """This rank's part of a weight, read from the checkpoint when it is first used."""
    key = ("param", name, str(place.get("view")), str(place.get("window")))
    if key not in here.stored:
        here.stored[key] = (loaded(WEIGHTS, name, text, **place), text, place)
    return here.stored[key][0]


def given(name, text, **place):
    """This rank's part of a model input."""
    key = ("input", name, text, str(place))
    if key not in here.stored:
        here.stored[key] = (loaded(INPUTS, name, text, **place), text, place)
    return here.stored[key][0]


def state(name, text, **place):
    """This rank's part of what the step before left under a name: zeros before the first, the weight for its copy in full precision."""
    key = ("state", name, str(place.get("view")), str(place.get("window")))
    if key not in here.stored:
        if members(name, 1)[0] in WEIGHTS:
            x = loaded(WEIGHTS, name, text, **place)
        elif name.startswith("optimizer.master."):
            x = loaded(WEIGHTS, name.removeprefix("optimizer.master."), text, **place)
        else:
            x = torch.zeros(here.shape(parse(text)), dtype=parse(text).dtype, device=DEVICE)
        here.stored[key] = (x, text, place)
    return here.stored[key][0]


def assign(kind, x, name, text, **place):
    key = (kind, name, str(place.get("view")), str(place.get("window")))
    here.stored[key] = (x, text, place)
    here.assigned.add(key)


def put(whole, x, ty, box):
    """Writes a rank's part of a tensor where files have it."""
    for i, (dim, range_) in enumerate(zip(ty.dims, box)):
        where = places(dim, range_)
        x = x.index_select(i, (where >= 0).nonzero().flatten())
    index = [places(dim, range_) for dim, range_ in zip(ty.dims, box)]
    index = torch.meshgrid(*[where[where >= 0] for where in index], indexing="ij") if index else ()
    whole[tuple(index)] = x


def everywhere(item):
    """What each rank has, on process 0."""
    if not dist.is_initialized() or here.ranks == 1 and here.processes is None:
        return [item]
    items = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(item, items)
    return items and [items[here.process(rank)] for rank in range(here.ranks)]


def assembled(parts):
    """The tensors of which ranks hold parts, each `(name, type, tensor, place)`, as files have them; on process 0."""
    mine = []
    for name, text, x, place in parts:
        ty = parse(text)
        # One of the ranks that hold the same part sends it.
        first = min(r for r in range(here.ranks) if here.holds(ty, r) and here.box(ty, r) == here.box(ty, here.rank)) \
            if here.holds(ty, here.rank) else None
        if first == here.rank:
            mine.append((name, text, x.detach().cpu(), place))
    all_parts, whole = everywhere(mine), {}
    for rank, of_rank in enumerate(all_parts or []):
        for name, text, x, place in of_rank:
            ty = parse(text)
            sizes = [stored_size(dim) for dim in ty.dims]
            shape = list(place.get("stored") or ()) or sizes
            if name not in whole:
                whole[name] = torch.zeros(shape, dtype=ty.dtype)
            window = place.get("window") or [(0, n) for n in place.get("view") or shape]
            seen = whole[name].view(place.get("view") or shape)[tuple(slice(*range_) for range_ in window)]
            part = seen.reshape(sizes).clone()
            put(part, x, ty, here.box(ty, rank))
            seen.copy_(part.view(seen.shape))
    for name in [name for name in whole if "{expert}" in name]:
        stack = whole.pop(name)
        whole.update(zip(members(name, len(stack)), stack))
    return whole


def kept():
    """The weights and states that steps assigned on this rank."""
    return [(key[1], text, x, place) for key, (x, text, place) in here.stored.items() if key in here.assigned]
