"""What a plan says about ranks: axes and their roles, the token order, this rank's place."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import torch

from .._errors import IthacaError

# The role of each axis of a strategy, in the order of the axes: they split the sequences of the batch, heads inside
# attention, the sequence everywhere (keys and values rotate or are gathered), or weights.
ROLES: dict[str, tuple[tuple[str, str], ...]] = {
    "single": (),
    "data-parallel": (("dp", "batch"),),
    "ulysses": (("ulysses", "heads"),),
    "ring": (("ring", "rotate"),),
    "usp": (("ring", "rotate"), ("ulysses", "heads")),
    "megatron-cp-allgather": (("cp", "gather"),),
    "megatron-cp-p2p": (("cp", "rotate"),),
    "megatron-cp-a2a": (("cp", "heads"),),
    "megatron-cp-a2a-p2p": (("cp", "rotate"), ("ulysses", "heads")),
    "gspmd-2d": (("cp", "gather"), ("tp", "weights")),
    "megatron-tp": (("tp", "weights"),),
    "megatron-tp-sp": (("tp", "weights"),),
}


@dataclasses.dataclass(frozen=True)
class Order:
    """The position that each index of the sequence has."""

    kind: str = "contiguous"
    parts: int = 1
    block: int = 1

    @staticmethod
    def parse(text: str | None) -> "Order":
        if text is None:
            return Order()
        found = re.fullmatch(r"(zigzag|striped)\((\d+)(?:,\s*(\d+))?\)", text)
        if found is None:
            raise IthacaError.of(
                f"token order `{text}` is a table for one length, and parallelize takes any length",
                'plan with order="zigzag", "striped" or "contiguous"',
            )
        kind, parts, block = found.groups()
        return Order(kind, int(parts), int(block or 1))

    @property
    def multiple(self) -> int:
        """A length is a multiple of this."""
        return {"contiguous": 1, "zigzag": 2 * self.parts, "striped": self.parts * self.block}[self.kind]

    def positions(self, size: int) -> torch.Tensor:
        """The position of each index."""
        index = torch.arange(size)
        if self.kind == "contiguous":
            return index
        if self.kind == "zigzag":
            each = size // (2 * self.parts)
            chunk = index // each
            return torch.where(chunk % 2 == 0, chunk // 2, 2 * self.parts - 1 - chunk // 2) * each + index % each
        stripes = size // (self.parts * self.block)
        i = index // self.block
        return (i % stripes * self.parts + i // stripes) * self.block + index % self.block


def _check_options(options: dict[str, str]) -> None:
    """Refuses options of a layout that change what ranks hold. Those of fusion and of reading do not."""
    if options.get("zero", "0") != "0":
        raise IthacaError.of(
            f"the plan splits optimizer states (ZeRO stage {options['zero']}), and parallelize keeps them whole", "plan with zero=0"
        )
    plain = {"heads": "even", "sequence": "pad", "partials": "f32"}
    for name, value in options.items():
        is_of_part = name.startswith(("strategy.", "sequence."))
        if is_of_part or plain.get(name, value) != value:
            raise IthacaError.of(f"parallelize lacks the option `{name}={value}` of the plan's layout")


@dataclasses.dataclass(frozen=True)
class Layout:
    """The mesh, axes by role (major to minor), the order of tokens."""

    mesh: dict[str, int]
    batch: tuple[str, ...]
    sequence: tuple[str, ...]  # all that split the sequence outside attention, major to minor
    context: tuple[str, ...]  # those that split it inside attention too
    heads: tuple[str, ...]  # those that split heads there instead
    weights: tuple[str, ...]
    movement: str  # of keys and values along `context`: rotate or gather
    splits_residual: bool  # whether `weights` split the residual stream by sequence
    order: Order

    @staticmethod
    def of(document: dict[str, Any]) -> "Layout":
        """The layout of a plan. Raises where parallelize lacks a part of it."""
        mesh = {axis["axis"]: int(axis["size"]) for axis in document["mesh"]}
        names = document["strategy"].split("+")
        unknown = [name for name in names if name not in ROLES]
        if unknown:
            raise IthacaError.of(
                f"parallelize has no strategy `{unknown[0]}`",
                "it has " + ", ".join(name for name in ROLES if name != "single") + ", and products of these",
            )
        roles: dict[str, list[str]] = {role: [] for role in ("batch", "heads", "rotate", "gather", "weights")}
        sequence: list[str] = []
        for axis, role in itertools.chain.from_iterable(ROLES[name] for name in names):
            roles[role].append(axis)
            if role in ("heads", "rotate", "gather"):
                sequence.append(axis)
        context = roles["rotate"] + roles["gather"]
        if len(context) > 1:
            raise IthacaError.of(f"`{document['strategy']}` moves keys and values along {' and '.join(context)}; one axis is known")
        movement = "gather" if roles["gather"] else "rotate"
        movements = {"rotate": {"rotate", "local"}, "gather": {"gather", "local"}}[movement]
        for attention in document["attention"]:
            if context and attention["movement"] not in movements:
                raise IthacaError.of(
                    f"parallelize has no movement `{attention['movement']}`, which `{attention['function']}` has",
                    f'plan with movement="{movement}"',
                )
        _check_options(document.get("options") or {})
        ordered = [d for d in document["dimensions"] if d.get("order")]
        order = Order.parse(ordered[0]["order"] if ordered else None)
        return Layout(
            mesh, tuple(roles["batch"]), tuple(sequence), tuple(context), tuple(roles["heads"]), tuple(roles["weights"]),
            movement, "megatron-tp-sp" in names, order,
        )

    @property
    def ranks(self) -> int:
        return self.degree(self.mesh)

    def degree(self, axes: Any) -> int:
        """The ranks along axes."""
        product = 1
        for axis in axes:
            product *= self.mesh.get(axis, 1)
        return product

    def coordinate(self, rank: int, axes: tuple[str, ...]) -> int:
        """The place of a rank along axes, the first of them major."""
        coordinates, rest = {}, rank
        for axis in reversed(self.mesh):
            rest, coordinates[axis] = divmod(rest, self.mesh[axis])
        place = 0
        for axis in axes:
            place = place * self.mesh.get(axis, 1) + coordinates.get(axis, 0)
        return place

    def group(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that differ from `rank` along these axes only, by their place along them."""
        fixed = tuple(axis for axis in self.mesh if axis not in axes)
        same = [r for r in range(self.ranks) if self.coordinate(r, fixed) == self.coordinate(rank, fixed)]
        return tuple(sorted(same, key=lambda r: self.coordinate(r, axes)))

    @property
    def multiple(self) -> int:
        """The length of a sequence is padded to a multiple of this."""
        shares = self.degree(self.sequence) * (self.degree(self.weights) if self.splits_residual else 1)
        multiple, other = shares, self.order.multiple
        while multiple % other:
            multiple += shares
        return multiple
