"""Ithaca: a compiler for distributed attention.

    plan = ithaca.plan("examples/llama-3-8b", gpus=8, seq=131072)
    model = ithaca.parallelize(model, plan)        # a transformers model, under torchrun
"""

from typing import Any

from ._errors import IthacaError
from ._ithaca import __version__
from ._plan import Plan, load, plan

__all__ = ["IthacaError", "Plan", "__version__", "load", "parallelize", "plan", "whole_logits", "whole_state"]


def parallelize(model: Any, plan: Plan, **options: Any) -> Any:
    """A transformers model whose ranks follow a plan, under torchrun. Needs torch and transformers.

    Every rank calls the model with the same whole batch; the loss is that of the whole batch, and gradients are summed over the
    ranks. `ithaca._parallelize` has the details.
    """
    from . import _parallelize

    return _parallelize.parallelize(model, plan, **options)


def whole_logits(model: Any, logits: Any) -> Any:
    """The logits of the whole batch of the last call, tokens in their order, on every rank. A collective."""
    from . import _parallelize

    return _parallelize.whole_logits(model, logits)


def whole_state(model: Any, gradients: bool = False) -> dict[str, Any]:
    """The weights, or gradients, of the whole model by the names of the library, on every rank. A collective."""
    from . import _parallelize

    return _parallelize.whole_state(model, gradients)
