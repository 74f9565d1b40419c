"""Collectives along axes of the mesh, with their adjoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .layout import Layout


class Group:
    """The ranks that share a collective with this one, by their place along its axes."""

    def __init__(self, ranks: tuple[int, ...], rank: int, handle: Any) -> None:
        self.ranks, self.size, self.place, self.handle = ranks, len(ranks), ranks.index(rank), handle

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks."""
        if self.size == 1:
            return x
        x = x.contiguous().clone()
        dist.all_reduce(x, group=self.handle)
        return x

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, stacked by place."""
        if self.size == 1:
            return x.unsqueeze(0)
        whole = x.new_empty(self.size, *x.shape)
        dist.all_gather_into_tensor(whole.view(-1), x.contiguous().view(-1), group=self.handle)
        return whole

    def scattered(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of the item at this place."""
        if self.size == 1:
            return x[0]
        part = x.new_empty(x.shape[1:])
        dist.reduce_scatter_tensor(part.view(-1), x.contiguous().view(-1), group=self.handle)
        return part

    def exchanged(self, x: torch.Tensor) -> torch.Tensor:
        """Item `i` goes to place `i`; the items that came, by the place of their senders."""
        if self.size == 1:
            return x
        x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out.view(-1), x.view(-1), group=self.handle)
        return out

    def rotation(self, x: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        """Starts to send a tensor to the next place; the tensor of the previous one, and the work to wait for."""
        came = torch.empty_like(x)
        after, before = self.ranks[(self.place + 1) % self.size], self.ranks[self.place - 1]
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, x, after, self.handle), dist.P2POp(dist.irecv, came, before, self.handle),
        ])
        return came, works


class Groups:
    """The groups of a layout, made by every rank in the same order."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self.layout, self.rank = layout, rank
        self.handles: dict[tuple[int, ...], Any] = {}

    def along(self, axes: tuple[str, ...]) -> Group:
        return self.of({self.layout.group(r, axes) for r in range(self.layout.ranks)})

    def of(self, parts: set[tuple[int, ...]]) -> Group:
        """The part of a partition of the ranks that has this one."""
        own = next(part for part in parts if self.rank in part)
        for part in sorted(parts):
            if len(part) > 1 and part not in self.handles:
                self.handles[part] = dist.new_group(list(part), sort_ranks=False)
        return Group(own, self.rank, self.handles.get(own))


_Run = Callable[[torch.Tensor, Group], torch.Tensor]


class _Collective(torch.autograd.Function):
    """A collective, whose gradient is computed by its adjoint."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, run: _Run, adjoint: _Run) -> torch.Tensor:
        ctx.group, ctx.adjoint = group, adjoint
        return run(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.adjoint(grad, ctx.group), None, None, None


def _apply(x: torch.Tensor, group: Group, run: _Run, adjoint: _Run) -> torch.Tensor:
    return x if group.size == 1 else _Collective.apply(x, group, run, adjoint)


def _exchange(x: torch.Tensor, group: Group, split: int, join: int) -> torch.Tensor:
    return torch.cat(group.exchanged(torch.stack(x.chunk(group.size, split))).unbind(0), join)


def _split(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    return x.chunk(group.size, dim)[group.place].contiguous()


def _join(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    return torch.cat(group.gathered(x).unbind(0), dim)


def _sum_split(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    return group.scattered(torch.stack(x.chunk(group.size, dim)))


def exchange(x: torch.Tensor, group: Group, split: int, join: int) -> torch.Tensor:
    """Splits one dimension over the group and joins another."""
    return _apply(x, group, partial(_exchange, split=split, join=join), partial(_exchange, split=join, join=split))


def copy(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The same tensor on every rank; its gradient is the sum of theirs."""
    return _apply(x, group, lambda x, _: x.view_as(x), lambda grad, group: group.sum(grad))


def total(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over the ranks, on every rank; its gradient is the same on every rank."""
    return _apply(x, group, lambda x, group: group.sum(x), lambda grad, _: grad)


def gather(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """Joins parts; ranks go on differently, so the gradient of a part is the sum of theirs."""
    return _apply(x, group, partial(_join, dim=dim), partial(_sum_split, dim=dim))


def gather_alike(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """Joins parts; ranks go on alike, so the gradient of a part is a part of the gradient."""
    return _apply(x, group, partial(_join, dim=dim), partial(_split, dim=dim))


def scatter(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """A part of the sum over the ranks."""
    return _apply(x, group, partial(_sum_split, dim=dim), partial(_join, dim=dim))


def part(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """A part of a tensor that every rank has; the gradient is joined on every rank."""
    return _apply(x, group, partial(_split, dim=dim), partial(_join, dim=dim))
