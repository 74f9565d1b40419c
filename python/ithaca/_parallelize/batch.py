"""The tokens of a rank: every rank is called with the whole batch, and cuts its part in the plan's order.

Labels are shifted before the cut. The loss of a rank is the sum over its labels divided by the number of labels of all ranks;
the loss that the model returns is the sum of these.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
import torch.nn.functional as F

from .._errors import IthacaError
from .attention import Movement, Tokens
from .collectives import Group, total
from .layout import Layout

IGNORED = -100

# Inputs that say again what positions say, in the form of one backend.
_OF_BACKENDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


@dataclasses.dataclass
class Share:
    """What attention and the loss of one forward pass need."""

    tokens: Tokens
    heads: Group
    movement: Movement
    items: torch.Tensor  # labels of all ranks


@dataclasses.dataclass
class Cutter:
    """Cuts batches."""

    model: Any
    layout: Layout
    rank: int
    heads: Group
    movement: Movement
    last: tuple[int, int] = (0, 0)  # sequences and tokens of the last batch

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        """The hook before `forward`."""
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        inputs = {**dict(zip(names, args)), **kwargs}
        inputs = {name: value for name, value in inputs.items() if value is not None}
        for name in ("inputs_embeds", "cache", "past_key_values", "encoder_hidden_states", "token_type_ids"):
            if name in inputs:
                raise IthacaError.of(f"parallelize lacks the input `{name}`")
        if inputs.get("use_cache"):
            raise IthacaError.of("a parallelized model keeps no cache", "call it with use_cache=False")
        if not isinstance(inputs.get("logits_to_keep", 0), int) or inputs.pop("logits_to_keep", 0):
            raise IthacaError.of("parallelize returns the logits of all tokens of a rank; omit `logits_to_keep`")
        if any(name in inputs for name in _OF_BACKENDS) and "position_ids" not in inputs:
            raise IthacaError.of("packed documents are read from `position_ids`, which are missing beside " + ", ".join(_OF_BACKENDS))
        for name in _OF_BACKENDS:
            inputs.pop(name, None)
        return (), self.cut(inputs)

    def cut(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs of this rank."""
        layout = self.layout
        ids: torch.Tensor = inputs.pop("input_ids")
        batch, length = self.last = (ids.shape[0], ids.shape[1])
        mask = inputs.pop("attention_mask", None)
        if mask is not None and (mask.dim() != 2 or mask.shape != ids.shape):
            raise IthacaError.of(f"the attention mask has shape {list(mask.shape)}, expected {list(ids.shape)}: one value per token")
        positions = inputs.pop("position_ids", None)
        documents = None
        if positions is None:
            positions = torch.arange(length, device=ids.device).expand(batch, -1)
        else:
            positions = positions.expand(batch, -1)
            if mask is None:
                # As transformers reads them: a document starts where a position is not the next one.
                starts = positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1
                documents = starts.cumsum(1) if bool(starts.any()) else None
        labels, shifted = inputs.pop("labels", None), inputs.pop("shift_labels", None)
        if labels is not None and shifted is None:
            shifted = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        valid = None if mask is None or bool(mask.all()) else mask.bool()
        if valid is not None and shifted is not None:
            sees_none = valid.cumsum(1) == 0
            if bool((sees_none & (shifted != IGNORED)).any()):
                raise IthacaError.of(
                    "padding that sees no key has a label, and transformers computes its loss from weights that mean nothing",
                    f"give padding, and the first token after padding on the left, the label {IGNORED}",
                )
        rows = -batch % layout.degree(layout.batch)
        columns = -length % layout.multiple
        pad = lambda x, value: F.pad(x, (0, columns, 0, rows), value=value)
        if columns:
            tail = positions[:, -1:] + 1 + torch.arange(columns, device=ids.device)
            positions = torch.cat([positions, tail], 1)
        positions = F.pad(positions, (0, 0, 0, rows))
        ids = pad(ids, 0)
        shifted = None if shifted is None else pad(shifted, IGNORED)
        # Padding is behind all tokens, which do not see it: a document of its own, and valid.
        documents = None if documents is None else pad(documents, -1)
        valid = None if valid is None else pad(valid, True)
        order = layout.order.positions(ids.shape[1]).to(ids.device)
        of_batch, n_batch = layout.coordinate(self.rank, layout.batch), layout.degree(layout.batch)
        of_sequence, n_sequence = layout.coordinate(self.rank, layout.sequence), layout.degree(layout.sequence)
        mine = order.chunk(n_sequence)[of_sequence]
        sequences = lambda x: x.chunk(n_batch)[of_batch]
        local = lambda x: sequences(x)[:, mine].contiguous()
        tokens = Tokens(
            order, None if documents is None else sequences(documents), None if valid is None else sequences(valid)
        )
        items = torch.zeros((), device=ids.device) if shifted is None else (shifted != IGNORED).sum()
        inputs |= {"input_ids": local(ids), "position_ids": local(positions), "use_cache": False}
        if shifted is not None:
            inputs["labels"] = local(shifted)
        inputs["ithaca"] = Share(tokens, self.heads, self.movement, items)
        return inputs


@dataclasses.dataclass
class Loss:
    """The loss function of a parallelized model."""

    ranks: Group  # those that have other tokens

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: Any = None,
        ithaca: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        items = ithaca.items if num_items_in_batch is None else num_items_in_batch
        wide = logits if logits.dtype == torch.float64 else logits.float()
        of_rank = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return total(of_rank / items, self.ranks)
