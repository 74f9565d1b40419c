"""Gradients summed over the ranks that hold the same parameter, and their norm."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .collectives import Group, Groups
from .families import Rewritten
from .layout import Layout

# Parameters of which ranks hold parts, each with the group of its parts and the number of copies of each part.
_PARTS: "weakref.WeakKeyDictionary[nn.Parameter, tuple[Group, int]]" = weakref.WeakKeyDictionary()


def reduce_gradients(model: nn.Module, layout: Layout, groups: Groups, rewritten: Rewritten) -> None:
    """Sums each gradient as it arrives, before it is accumulated: several backward passes add up."""
    tokens = layout.batch + layout.sequence
    weights = groups.along(layout.weights)
    for name, parameter in model.named_parameters():
        how = rewritten.splits.get(name)
        if name in rewritten.partial:
            group = groups.along(tokens + layout.weights)
        elif how is not None and how.copies > 1:
            group = groups.of(_with_copies(layout, tokens, how.copies))
        else:
            group = groups.along(tokens)
        if how is not None:
            _PARTS[parameter] = (weights, how.copies)
        if group.size > 1 and parameter.requires_grad:
            parameter.register_hook(group.sum)
    if rewritten.splits:
        _patch_norm()


def _with_copies(layout: Layout, tokens: tuple[str, ...], copies: int) -> set[tuple[int, ...]]:
    """The ranks with the same part of a parameter that `copies` ranks next to each other along `weights` hold."""
    parts: dict[tuple[int, ...], list[int]] = {}
    fixed = tuple(axis for axis in layout.mesh if axis not in tokens and axis not in layout.weights)
    for rank in range(layout.ranks):
        key = (layout.coordinate(rank, layout.weights) // copies, layout.coordinate(rank, fixed))
        parts.setdefault(key, []).append(rank)
    return {tuple(part) for part in parts.values()}


def _patch_norm() -> None:
    """Makes the norm that `torch.nn.utils.clip_grad_norm_` clips by that of whole gradients."""
    from torch.nn.utils import clip_grad

    plain = clip_grad._get_total_norm
    if getattr(plain, "is_of_ithaca", False):
        return

    def of_whole(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> torch.Tensor:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        parts = {id(p.grad): part for p, part in _PARTS.items() if p.grad is not None}
        mine = [(t, *parts[id(t)]) for t in tensors if id(t) in parts]
        if not mine:
            return plain(tensors, norm_type, *args, **kwargs)
        group, is_largest = mine[0][1], float(norm_type) == float("inf")
        norms = [(torch.linalg.vector_norm(t.float(), norm_type), copies) for t, _, copies in mine]
        if is_largest:
            split = torch.stack([norm for norm, _ in norms]).max()
            dist.all_reduce(split, dist.ReduceOp.MAX, group=group.handle)
        else:
            split = group.sum(torch.stack([norm**norm_type / copies for norm, copies in norms]).sum()) ** (1 / norm_type)
        whole = [t for t in tensors if id(t) not in parts]
        both = [split] + ([plain(whole, norm_type, *args, **kwargs).to(split)] if whole else [])
        return torch.linalg.vector_norm(torch.stack(both), norm_type)

    of_whole.is_of_ithaca = True  # type: ignore[attr-defined]
    clip_grad._get_total_norm = of_whole
    clip_grad.get_total_norm = of_whole
    torch.nn.utils.get_total_norm = of_whole
