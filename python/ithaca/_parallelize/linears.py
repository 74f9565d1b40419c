"""Layers whose weights are split over ranks.

A column-parallel layer has some of the outputs, a row-parallel one some of the inputs; the table of tokens is split by rows.
Weights are `[out, in]`, or `[in, out]` in GPT-2's Conv1D.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .collectives import Group, copy, gather, gather_alike, part, scatter, total


def cut(tensor: torch.Tensor, ranges: list[tuple[int, int]], dim: int) -> nn.Parameter:
    """Ranges of a dimension as a parameter."""
    parts = [tensor.detach().narrow(dim, start, end - start) for start, end in ranges]
    return nn.Parameter(torch.cat(parts, dim).clone(), requires_grad=tensor.requires_grad)


class RowParallel(nn.Module):
    """Multiplies some of the inputs; the products are summed over the ranks, and split by sequence on request."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, is_transposed: bool, group: Group, splits: bool) -> None:
        super().__init__()
        self.weight, self.bias, self.is_transposed, self.group, self.splits = weight, bias, is_transposed, group, splits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.weight if self.is_transposed else F.linear(x, self.weight)
        x = scatter(x, self.group, 1) if self.splits else total(x, self.group)
        return x if self.bias is None else x + self.bias


class TokenTable(nn.Module):
    """An embedding of which this rank has some rows."""

    def __init__(self, weight: nn.Parameter, start: int, group: Group, splits: bool) -> None:
        super().__init__()
        self.weight, self.start, self.group, self.splits = weight, start, group, splits

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        local = ids - self.start
        is_here = (local >= 0) & (local < len(self.weight))
        x = F.embedding(local.masked_fill(~is_here, 0), self.weight) * is_here[..., None]
        return scatter(x, self.group, 1) if self.splits else total(x, self.group)


class Head(nn.Module):
    """A head that computes the logits of some tokens of the vocabulary; all ranks get all logits."""

    def __init__(self, weight: nn.Parameter, group: Group, splits: bool) -> None:
        super().__init__()
        self.weight, self.group, self.splits = weight, group, splits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # With `splits` the final norm has gathered `x`, and its gradient is summed there.
        x = x if self.splits else copy(x, self.group)
        return gather_alike(F.linear(x, self.weight), self.group, 2)


def enters(module: nn.Module, group: Group, splits: bool) -> None:
    """Before a block of split layers: its input is the same on every rank, gathered where it is split by sequence."""

    def hook(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        move = (lambda x: gather(x, group, 1)) if splits else (lambda x: copy(x, group))
        if args:
            return (move(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": move(kwargs["hidden_states"])}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def leaves_split(module: nn.Module, group: Group) -> None:
    """After a module that all ranks compute alike: each goes on with its part of the sequence."""
    module.register_forward_hook(lambda _, __, x: part(x, group, 1))


def leaves_gathered(module: nn.Module, group: Group, is_alike: bool) -> None:
    """After the last module that works on parts of the sequence; the ranks go on alike, or with parts of the head."""
    move = gather_alike if is_alike else gather
    module.register_forward_hook(lambda _, __, x: move(x, group, 1))
