import argparse
import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import re
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F


@dataclasses.dataclass(frozen=True)
class Dim:
    """A named dimension over all ranks."""

    size: int
    granule: int = 1  # elements that stay together when the dimension is split
    valid: int | None = None  # elements that carry data, the others are padding; all of them when None
    order: tuple = ()  # the position that each index has, by zigzag, striped or table; an index is its own where there is none
    copies: str | None = None  # the dimension of which this one repeats each element
    fetched: tuple | None = None  # (dimension, for each part its ranges of indices of that dimension)
    part: tuple | None = None  # (dimension, index, count, runs): one of several equal parts, cut rank by rank

    @property
    def data(self):
        return self.size if self.valid is None else self.valid


@dataclasses.dataclass(frozen=True)
class Type:
    """Element type, dimensions, the mesh axes that split each, and where parts have moved to."""

    dtype: torch.dtype
    dims: tuple
    split: tuple
    moved: tuple  # (axis, by, first and end coordinate of the ranks that hold anything, or None)
    on: tuple | None  # (axis, coordinate) of the ranks that hold the value; all when None


DTYPES = dict(f64=torch.float64, f32=torch.float32, f16=torch.float16, bf16=torch.bfloat16, i32=torch.int32,
              bool=torch.bool)


@functools.cache
def parse(text):
    """The type that a text such as `bf16[b s@ulysses m] on pp=1` spells."""
    dtype, dims, on = re.fullmatch(r"(\w+)\[(.*?)\](?: partial\([^)]*\))?(?: on (\S+))?", text).groups()
    names, split, moved = [], [], []
    for word in dims.split():
        name, _, axes = word.partition("@")
        names.append(name)
        axes = axes[1:-1] if axes.startswith("(") else axes
        split.append([])
        for seat in filter(None, axes.split(",")):
            axis, by, start, end = re.fullmatch(r"([^+]+)(?:\+(\d+))?(?:\((\d+)\.\.(\d+)\))?", seat).groups()
            split[-1].append(axis)
            if by is not None:
                moved.append((axis, int(by), None if start is None else (int(start), int(end))))
    if on:
        axis, _, coordinate = on.partition("=")
        on = (axis, int(coordinate))
    return Type(DTYPES[dtype], tuple(names), tuple(map(tuple, split)), tuple(moved), on or None)


class Space:
    """A mesh of ranks, axes major to minor, and the dimensions of the tensors on it."""

    def __init__(self, mesh, dims, processes=None):
        self.mesh, self.dims, self.rank = mesh, dims, 0
        self.ranks = math.prod(mesh.values())
        self.processes = processes  # that of each rank; its own number where there are none
        self.groups = {}  # process groups of this rank, by the axes along which its members differ
        self.stored = {}  # weights, states and inputs that this rank holds, by their place in files
        self.assigned = set()  # those that a step wrote
        self.lazy = functools.cache(self.positions_of)

    def process(self, rank):
        return rank if self.processes is None else self.processes[rank]

    def join(self, process):
        """Gives a process its rank; None where it has none."""
        self.rank = next((rank for rank in range(self.ranks) if self.process(rank) == process), None)

    def stride(self, axis):
        names = list(self.mesh)
        return math.prod(self.mesh[name] for name in names[names.index(axis) + 1:])

    def coordinate(self, rank, axis):
        return rank // self.stride(axis) % self.mesh[axis]

    def moved_to(self, rank, axis, coordinate):
        return rank + (coordinate - self.coordinate(rank, axis)) * self.stride(axis)

    def along(self, rank, axes):
        """The ranks that differ from `rank` along these axes only."""
        ranks = [rank]
        for axis in dict.fromkeys(axes):
            ranks = [self.moved_to(r, axis, c) for r in ranks for c in range(self.mesh[axis])]
        return ranks

    def holds(self, ty, rank):
        return ty.on is None or self.coordinate(rank, ty.on[0]) == ty.on[1]

    def owner(self, ty, rank):
        """The rank to which the part that `rank` holds belongs; None where it holds nothing."""
        owner = rank
        for axis, by, only in ty.moved:
            c = self.coordinate(rank, axis)
            if only is not None and not only[0] <= c < only[1]:
                return None
            owner = self.moved_to(owner, axis, (c + by) % self.mesh[axis])
        return owner

    def holder(self, ty, owner):
        """The rank that holds the part of `owner`; None where nobody does."""
        holder = owner
        for axis, by, only in ty.moved:
            c = (self.coordinate(owner, axis) - by) % self.mesh[axis]
            if only is not None and not only[0] <= c < only[1]:
                return None
            holder = self.moved_to(holder, axis, c)
        return holder

    def range(self, dim, axes, rank):
        """The indices of a dimension that a rank holds: whole granules, the first ranks one more where they do not divide."""
        of = self.dims[dim]
        if of.fetched and axes:
            i = 0
            for axis in axes:
                i = i * self.mesh[axis] + self.coordinate(rank, axis)
            sizes = [sum(end - start for start, end in part) for part in of.fetched[1]]
            return sum(sizes[:i]), sum(sizes[:i + 1])
        start, end = 0, -(-of.size // of.granule)
        for axis in axes:
            each, more = divmod(end - start, self.mesh[axis])
            i = self.coordinate(rank, axis)
            start += i * each + min(i, more)
            end = start + each + (i < more)
        return start * of.granule, min(end * of.granule, of.size)

    @functools.cache
    def box(self, ty, rank):
        """For each dimension, the indices that a rank holds."""
        if not self.holds(ty, rank):
            return tuple((0, 0) for _ in ty.dims)
        owner, away = self.owner(ty, rank), {axis for axis, _, _ in ty.moved}
        return tuple(
            (0, 0) if owner is None and away.intersection(axes) else self.range(dim, axes, rank if owner is None else owner)
            for dim, axes in zip(ty.dims, ty.split))

    def shape(self, ty):
        return [end - start for start, end in self.box(ty, self.rank)]

    def positions_of(self, dim, start, end):
        """The positions of the indices from `start` to `end`, by the dimension's own order or that of the one it is fetched from."""
        of = self.dims[dim]
        if of.fetched:
            source, parts = of.fetched
            where = torch.cat([torch.arange(*range_) for part in parts for range_ in part])
            whole = self.lazy(source, 0, self.dims[source].size)
            return whole[where[start:end]]
        if not of.order:
            return torch.arange(start, end)
        kind, *given = of.order
        if kind == "table":
            return torch.cat([torch.arange(*run) for run in given[0]])[start:end]
        index = torch.arange(start, end)
        if kind == "zigzag":
            each = of.size // (2 * given[0])
            chunk = index // each
            return torch.where(chunk % 2 == 0, chunk // 2, 2 * given[0] - 1 - chunk // 2) * each + index % each
        parts, block = given
        stripes = of.size // (parts * block)
        i = index // block
        return (i % stripes * parts + i // stripes) * block + index % block

    def positions(self, dim, range_):
        return self.lazy(dim, *range_)


here = None  # the space of the program that runs


@contextlib.contextmanager
def within(space):
    """Runs a program of another space."""
    global here
    before, here = here, space
    try:
        yield
    finally:
        here = before


def on(axis, coordinate):
    """Whether this rank belongs to a stage of the pipeline."""
    return here.coordinate(here.rank, axis) == coordinate


@functools.cache
def held(space, ty, dim):
    """The positions of the indices of a dimension that this rank holds."""
    return space.positions(dim, space.box(ty, space.rank)[ty.dims.index(dim)])
