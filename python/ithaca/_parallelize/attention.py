"""Attention of local queries over keys and values that rotate or are gathered.

Heads trade places with the sequence before and after it where the plan splits heads. Blocks of scores are merged by their
log-sum-exp; the backward pass computes them again from it (FlashAttention, arXiv 2205.14135; ring: arXiv 2310.01889).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable

import torch

from .._errors import IthacaError
from .collectives import Group, exchange

NAME = "ithaca"

# The most scores that are in memory at once.
SCORES = 1 << 26


@dataclasses.dataclass
class Tokens:
    """Tokens of a forward pass, as every rank knows them."""

    positions: torch.Tensor  # by index of the whole sequence
    documents: torch.Tensor | None  # [batch, position]: the number of the document; one document when None
    valid: torch.Tensor | None  # [batch, position]: whether a key is no padding; all are when None

    def chunk(self, place: int, of: int) -> torch.Tensor:
        """The positions of one of several chunks."""
        return self.positions.chunk(of)[place]


@dataclasses.dataclass
class Seen:
    """Which keys a query sees."""

    tokens: Tokens
    window: int | None

    def blocks(self, queries: torch.Tensor, keys: torch.Tensor, area: int) -> Any:
        """Ranges of queries and of keys that see each other, each with its mask; `area` is the number of scores of a pair of
        tokens."""
        for q in _ranges(queries, max(1, SCORES // max(1, area * len(keys)))):
            for k in _ranges(keys, len(keys)):
                first_q, last_q = int(queries[q].min()), int(queries[q].max())
                first_k, last_k = int(keys[k].min()), int(keys[k].max())
                if first_k > last_q or (self.window is not None and last_k <= first_q - self.window):
                    continue
                is_full = last_k <= first_q and (self.window is None or first_k > last_q - self.window)
                yield q, k, self.mask(queries[q], keys[k], is_full)

    def mask(self, queries: torch.Tensor, keys: torch.Tensor, is_full: bool) -> torch.Tensor | None:
        """[batch or 1, 1, 1, query, key], or None where all see all."""
        tokens, mask = self.tokens, None
        if not is_full:
            apart = queries[:, None] - keys
            mask = apart >= 0
            if self.window is not None:
                mask = mask & (apart < self.window)
            mask = mask[None]
        if tokens.documents is not None:
            same = tokens.documents[:, queries, None] == tokens.documents[:, None, keys]
            mask = same if mask is None else mask & same
        if tokens.valid is not None:
            valid = tokens.valid[:, None, keys]
            mask = valid.expand(-1, len(queries), -1) if mask is None else mask & valid
        return None if mask is None else mask[:, None, None]


def _ranges(positions: torch.Tensor, most: int) -> list[slice]:
    """Runs of neighbouring positions, of at most `most` tokens; all tokens where runs are many."""
    ends = (torch.nonzero(positions[1:] - positions[:-1] != 1).flatten() + 1).tolist()
    bounds = [0, *ends, len(positions)] if len(ends) < 4 else [0, len(positions)]
    pairs = zip(bounds, bounds[1:])
    return [slice(at, min(at + most, end)) for start, end in pairs for at in range(start, end, most)]


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _scores(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    return scores if mask is None else scores.masked_fill(~mask, float("-inf"))


class Movement:
    """How keys and values reach queries: the pieces of `kv` in turn, and the way back of their gradients."""

    def __init__(self, group: Group, kind: str) -> None:
        self.group, self.kind = group, kind

    def forward(self, kv: torch.Tensor, use: Callable[[torch.Tensor, int], None]) -> None:
        group = self.group
        if self.kind == "gather":
            for place, piece in enumerate(group.gathered(kv)):
                use(piece, place)
            return
        for step in range(group.size):
            came, works = group.rotation(kv) if step + 1 < group.size else (kv, [])
            use(kv, (group.place - step) % group.size)
            for work in works:
                work.wait()
            kv = came

    def backward(self, kv: torch.Tensor, use: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
        """The gradient of this rank's piece, of which every use returns a part."""
        group = self.group
        if self.kind == "gather":
            return group.scattered(torch.stack([use(piece, place) for place, piece in enumerate(group.gathered(kv))]))
        grad: torch.Tensor | None = None
        for step in range(group.size):
            came, works = group.rotation(kv) if step + 1 < group.size else (kv, [])
            found = use(kv, (group.place - step) % group.size)
            grad = found if grad is None else grad + found
            for work in works:
                work.wait()
            if group.size > 1:
                grad, works = group.rotation(grad)
                for work in works:
                    work.wait()
            kv = came
        assert grad is not None
        return grad


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, movement: Movement, seen: Seen, scale: float
    ) -> torch.Tensor:
        group = movement.group
        queries = seen.tokens.chunk(group.place, group.size)
        batch, heads, length, _ = q.shape
        # [batch, key/value heads, queries per key/value head, token, width]
        wide = _wide(q).unflatten(1, (k.shape[1], -1))
        out = wide.new_zeros(*wide.shape[:-1], v.shape[-1])
        lse = wide.new_full(wide.shape[:-1], float("-inf"))

        def use(kv: torch.Tensor, place: int) -> None:
            keys, values = (_wide(x).unsqueeze(2) for x in kv.unbind(0))
            for i, j, mask in seen.blocks(queries, seen.tokens.chunk(place, group.size), batch * heads):
                scores = _scores(wide[:, :, :, i], keys[:, :, :, j], mask, scale)
                here = torch.logsumexp(scores, -1)
                both = torch.logaddexp(lse[:, :, :, i], here)
                # A row that has seen no key has lse -inf; it weighs nothing.
                base = both.masked_fill(both == float("-inf"), 0.0)[..., None]
                before = torch.exp(lse[:, :, :, i, None] - base)
                out[:, :, :, i] = out[:, :, :, i] * before + torch.matmul(torch.exp(scores - base), values[:, :, :, j])
                lse[:, :, :, i] = both

        movement.forward(torch.stack([k, v]), use)
        ctx.movement, ctx.seen, ctx.scale = movement, seen, scale
        ctx.save_for_backward(q, k, v, out, lse)
        return out.flatten(1, 2).to(q.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        movement, seen, scale = ctx.movement, ctx.seen, ctx.scale
        group = movement.group
        queries = seen.tokens.chunk(group.place, group.size)
        wide, grad = (_wide(x).unflatten(1, (k.shape[1], -1)) for x in (q, grad))
        delta = (grad * out).sum(-1, keepdim=True)
        lse = lse.masked_fill(lse == float("-inf"), float("inf"))[..., None]
        grad_q = torch.zeros_like(wide)
        area = q.shape[0] * q.shape[1]

        def use(kv: torch.Tensor, place: int) -> torch.Tensor:
            keys, values = (_wide(x).unsqueeze(2) for x in kv.unbind(0))
            found = torch.zeros_like(kv, dtype=wide.dtype)
            for i, j, mask in seen.blocks(queries, seen.tokens.chunk(place, group.size), area):
                scores = _scores(wide[:, :, :, i], keys[:, :, :, j], mask, scale)
                weights = torch.exp(scores - lse[:, :, :, i])
                found[1][:, :, j] += torch.matmul(weights.transpose(-1, -2), grad[:, :, :, i]).sum(2)
                of_weights = torch.matmul(grad[:, :, :, i], values[:, :, :, j].transpose(-1, -2))
                of_scores = weights * (of_weights - delta[:, :, :, i]) * scale
                grad_q[:, :, :, i] += torch.matmul(of_scores, keys[:, :, :, j])
                found[0][:, :, j] += torch.matmul(of_scores.transpose(-1, -2), wide[:, :, :, i]).sum(2)
            return found

        grad_k, grad_v = movement.backward(torch.stack([k, v]), use).to(k.dtype).unbind(0)
        return grad_q.flatten(1, 2).to(q.dtype), grad_k, grad_v, None, None, None


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    ithaca: Any = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of transformers: [batch, head, token, width] in, [batch, token, head, width] out."""
    if ithaca is None:
        raise IthacaError.of("a part of a parallelized model was called; call the model itself, with its inputs as keywords")
    if dropout:
        raise IthacaError.of(f"attention has dropout {dropout}, and ranks would drop different scores", "load the model without dropout")
    for name in ("softcap", "s_aux"):
        if others.get(name) is not None:
            raise IthacaError.of(f"parallelize lacks the argument `{name}` of attention")
    heads: Group = ithaca.heads
    if heads.size > 1:
        copies = heads.size // key.shape[1]
        if copies > 1:
            key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
        query, key, value = (exchange(x, heads, 1, 2) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = _Attend.apply(query, key, value, ithaca.movement, Seen(ithaca.tokens, sliding_window), scale)
    out = exchange(out, heads, 2, 1)
    return out.transpose(1, 2).contiguous(), None


def no_mask(*_: Any, **__: Any) -> None:
    """The mask function of transformers: `attend` makes masks of positions, documents and padding."""
    return None


def register() -> None:
    """Registers the attention and the mask under one name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, no_mask)
