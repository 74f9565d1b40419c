"""Refusals, before any collective and on every rank alike."""

from __future__ import annotations

import os
import re
from typing import Any

from .._errors import IthacaError

TORCH, TRANSFORMERS = (2, 8), (5, 0)

# Fields that do not change what a model computes.
_OF_FILES = {
    "_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache", "initializer_range",
    "bos_token_id", "eos_token_id", "pad_token_id", "distributed_config", "tie_encoder_decoder", "pretraining_tp",
    "_attn_implementation_autoset", "return_dict", "output_hidden_states", "output_attentions", "task_specific_params",
}


def versions() -> None:
    """Old libraries."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise IthacaError.of(
            f"parallelize needs torch and transformers, and {error.name} is not installed", "pip install torch transformers"
        ) from error
    for module, least in ((torch, TORCH), (transformers, TRANSFORMERS)):
        found = tuple(int(n) for n in re.findall(r"\d+", module.__version__)[:2])
        if found < least:
            needed = ".".join(map(str, least))
            raise IthacaError.of(f"parallelize needs {module.__name__} {needed} or later, and {module.__version__} is installed")


def same_model(config: Any, planned: dict[str, Any]) -> None:
    """A plan for another model."""
    from transformers import AutoConfig

    fields = dict(planned["config"])
    kind = fields.pop("model_type", None)
    if kind != config.model_type:
        raise IthacaError.of(f"the plan is for a model of type `{kind}`, and the model is of type `{config.model_type}`")
    expected, found = AutoConfig.for_model(kind, **fields).to_dict(), config.to_dict()
    different = sorted(
        name for name in expected.keys() | found.keys()
        if name not in _OF_FILES and expected.get(name) != found.get(name)
    )
    if different:
        shown = [f"`{n}` is {found.get(n)!r}, planned {expected.get(n)!r}" for n in different[:3]]
        raise IthacaError.of(
            f"the plan is for another model (digest {planned['digest'][:12]}): " + "; ".join(shown),
            "plan again: ithaca.plan(model.config, …)",
        )


def world(ranks: int) -> None:
    """Another number of processes than the plan has ranks."""
    import torch.distributed as dist

    size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if size != ranks:
        raise IthacaError.of(
            f"the plan has {ranks} ranks, and {size} {'process runs' if size == 1 else 'processes run'}", f"start it with `torchrun --nproc-per-node {ranks}` or more nodes"
        )


def dropout(model: Any) -> None:
    """Ranks with other tokens cannot draw what one process draws."""
    import torch

    for name, module in model.named_modules():
        # Some models drop by a function, with a rate of their own.
        share = module.p if isinstance(module, torch.nn.Dropout) else getattr(module, "residual_dropout", 0.0)
        if share > 0:
            raise IthacaError.of(
                f"`{name}` drops {share:.0%} in training, which ranks cannot do as one process does",
                "load the model with all dropout probabilities 0",
            )
