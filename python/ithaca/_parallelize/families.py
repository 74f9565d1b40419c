"""The models that can be rewritten: where their layers are, and how tensor parallelism splits them."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable

from torch import nn

from .._errors import IthacaError
from .collectives import Group, Groups
from .layout import Layout
from .linears import Head, RowParallel, TokenTable, cut, enters, leaves_gathered, leaves_split


@dataclasses.dataclass(frozen=True)
class Family:
    """Names of modules."""

    layers: str
    embedding: str
    norm: str
    positions: str | None  # the embedding of positions, if there is one
    attention: str
    queries: tuple[str, ...]  # one name: queries, keys and values in one weight
    projection: str
    mlp: str
    columns: tuple[str, ...]
    row: str
    head_norms: tuple[str, ...] = ()  # norms of heads: every rank sees some heads


_LLAMA = Family(
    "model.layers", "model.embed_tokens", "model.norm", None, "self_attn", ("q_proj", "k_proj", "v_proj"), "o_proj",
    "mlp", ("gate_proj", "up_proj"), "down_proj",
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": dataclasses.replace(_LLAMA, head_norms=("q_norm", "k_norm")),
    "SeedOssForCausalLM": _LLAMA,
    "SmolLM3ForCausalLM": _LLAMA,
    "GraniteForCausalLM": _LLAMA,
    "Ernie4_5ForCausalLM": _LLAMA,
    "ArceeForCausalLM": dataclasses.replace(_LLAMA, columns=("up_proj",)),
    "Exaone4ForCausalLM": dataclasses.replace(_LLAMA, head_norms=("q_norm", "k_norm")),
    "GPT2LMHeadModel": Family(
        "transformer.h", "transformer.wte", "transformer.ln_f", "transformer.wpe", "attn", ("c_attn",), "c_proj",
        "mlp", ("c_fc",), "c_proj",
    ),
}


def family_of(model: nn.Module) -> Family:
    """The family of a model. Raises for a class that is not known."""
    name = type(model).__name__
    if name not in FAMILIES:
        raise IthacaError.of(f"parallelize cannot rewrite the model class `{name}`", "it can rewrite " + ", ".join(FAMILIES))
    return FAMILIES[name]


@dataclasses.dataclass
class Split:
    """A parameter that ranks hold parts of."""

    dim: int
    ranges: Callable[[int], list[tuple[int, int]]]  # of a rank along `weights`
    copies: int = 1  # ranks next to each other that hold the same part


@dataclasses.dataclass
class Rewritten:
    """What became of the parameters, by name."""

    splits: dict[str, Split]
    partial: set[str]  # gradients that ranks along `weights` have parts of, though the parameter is whole


def check(model: nn.Module, layout: Layout) -> None:
    """Refuses degrees that the model's heads and widths do not allow."""
    config: Any = model.config
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    tp, inside = layout.degree(layout.weights), layout.degree(layout.heads)
    if heads % (tp * inside):
        raise IthacaError.of(f"{heads} query heads do not divide by the head degree {tp * inside}")
    local = max(kv_heads // tp, 1)
    for count, degree in ((kv_heads, tp), (local, inside)):
        if count % degree and degree % count:
            raise IthacaError.of(f"{count} key/value heads are neither a multiple nor a divisor of the head degree {degree}")
    if tp > 1:
        family = family_of(model)
        layer = model.get_submodule(family.layers)[0]
        row = getattr(getattr(layer, family.mlp), family.row).weight
        width = row.shape[1] if isinstance(getattr(getattr(layer, family.mlp), family.row), nn.Linear) else row.shape[0]
        if width % tp:
            raise IthacaError.of(f"the feed-forward width {width} does not divide by the degree {tp} of tensor parallelism")


def _even(size: int, of: int) -> Callable[[int], list[tuple[int, int]]]:
    return lambda place: [(place * size // of, (place + 1) * size // of)]


def rewrite(model: nn.Module, layout: Layout, groups: Groups) -> Rewritten:
    """Splits the weights over the ranks along `weights`."""
    done = Rewritten({}, set())
    group = groups.along(layout.weights)
    if group.size == 1:
        return done
    family, config, splits = family_of(model), model.config, layout.splits_residual
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    of_layers = family.layers

    def split(module: nn.Module, path: str, name: str, how: Split) -> None:
        """Cuts a parameter of a module in place."""
        tensor = getattr(module, name)
        setattr(module, name, cut(tensor, how.ranges(group.place), how.dim))
        done.splits[f"{path}.{name}"] = how

    def columns(module: nn.Module, path: str, ranges: Callable[[int], list[tuple[int, int]]], copies: int = 1) -> None:
        is_linear = isinstance(module, nn.Linear)
        split(module, path, "weight", Split(0 if is_linear else 1, ranges, copies))
        if module.bias is not None:
            split(module, path, "bias", Split(0, ranges, copies))
        size = sum(end - start for start, end in ranges(group.place))
        setattr(module, "out_features" if is_linear else "nf", size)

    def row(parent: nn.Module, path: str, name: str) -> None:
        module = getattr(parent, name)
        is_linear = isinstance(module, nn.Linear)
        dim = 1 if is_linear else 0
        how = Split(dim, _even(module.weight.shape[dim], group.size))
        weight = cut(module.weight, how.ranges(group.place), dim)
        setattr(parent, name, RowParallel(weight, module.bias, not is_linear, group, splits))
        done.splits[f"{path}.{name}.weight"] = how
        if splits and module.bias is not None:
            done.partial.add(f"{path}.{name}.bias")

    def of_kv_heads(place: int) -> list[tuple[int, int]]:
        if kv_heads >= group.size:
            return _even(kv_heads * width, group.size)(place)
        head = place * kv_heads // group.size
        return [(head * width, (head + 1) * width)]

    kv_copies = max(group.size // kv_heads, 1)
    for number, layer in enumerate(model.get_submodule(of_layers)):
        base = f"{of_layers}.{number}"
        attention, mlp = getattr(layer, family.attention), getattr(layer, family.mlp)
        path = f"{base}.{family.attention}"
        if len(family.queries) == 1:
            each, (of_part,) = heads * width, (_even(heads * width, group.size),)

            def packed(place: int, each: int = each, of_part: Any = of_part) -> list[tuple[int, int]]:
                (start, end), = of_part(place)
                return [(start + i * each, end + i * each) for i in range(3)]

            columns(getattr(attention, family.queries[0]), f"{path}.{family.queries[0]}", packed)
            attention.split_size = each // group.size
        else:
            q, k, v = family.queries
            columns(getattr(attention, q), f"{path}.{q}", _even(heads * width, group.size))
            for name in (k, v):
                columns(getattr(attention, name), f"{path}.{name}", of_kv_heads, kv_copies)
        row(attention, path, family.projection)
        enters(attention, group, splits)
        done.partial |= {f"{path}.{name}.weight" for name in family.head_norms if hasattr(attention, name)}
        path = f"{base}.{family.mlp}"
        for name in family.columns:
            module = getattr(mlp, name)
            outputs = module.weight.shape[0 if isinstance(module, nn.Linear) else 1]
            columns(module, f"{path}.{name}", _even(outputs, group.size))
        row(mlp, path, family.row)
        enters(mlp, group, splits)
        if splits:
            others = {name for name, _ in layer.named_parameters(prefix=base)}
            inside = {n for n in others if n.startswith((f"{base}.{family.attention}.", f"{base}.{family.mlp}."))}
            done.partial |= others - inside
    _ends(model, family, group, splits, done)
    return done


def _ends(model: nn.Module, family: Family, group: Group, splits: bool, done: Rewritten) -> None:
    """The embedding, the final norm and the head."""
    norm = model.get_submodule(family.norm)
    embedding, head = model.get_submodule(family.embedding), model.lm_head
    words = embedding.weight.shape[0]
    is_split = words % group.size == 0
    if splits:
        done.partial |= {f"{family.norm}.{name}" for name, _ in norm.named_parameters()}
        leaves_gathered(norm, group, is_alike=not is_split)
        for path in (family.positions, None if is_split else family.embedding):
            if path is not None:
                leaves_split(model.get_submodule(path), group)
    if not is_split:
        return
    how = Split(0, _even(words, group.size))
    is_tied = head.weight is embedding.weight
    of_table = cut(embedding.weight, how.ranges(group.place), 0)
    of_head = of_table if is_tied else cut(head.weight, how.ranges(group.place), 0)
    parent, _, name = family.embedding.rpartition(".")
    setattr(model.get_submodule(parent), name, TokenTable(of_table, how.ranges(group.place)[0][0], group, splits))
    model.lm_head = Head(of_head, group, splits)
    done.splits[f"{family.embedding}.weight"] = done.splits["lm_head.weight"] = how
