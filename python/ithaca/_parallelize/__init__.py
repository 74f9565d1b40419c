"""`parallelize`: a transformers model whose ranks follow a plan.

The model is called as before, on every rank with the same whole batch. Each rank cuts its sequences and tokens, in the order of
the plan, and computes them; the loss is that of the whole batch on every rank, and gradients are sums over the ranks. So an
ordinary loop, or the Trainer, trains as one process does.
"""

from __future__ import annotations

from typing import Any

from .._errors import IthacaError
from . import checks

__all__ = ["parallelize", "whole_logits", "whole_state"]


def parallelize(model: Any, plan: Any, *, broadcast: bool = True) -> Any:
    """Rewrites `model` in place for this rank of `plan`, and returns it. Make the optimizer afterwards.

    Under torchrun; the process group is made where there is none: NCCL for a model on a GPU, gloo otherwise. With `broadcast`,
    ranks start from the weights of rank 0.

    Raises `IthacaError` before any communication, on every rank alike, for a class of models that cannot be rewritten, a plan
    for another model or number of processes, a strategy or option that is not known here, and old libraries.
    """
    checks.versions()
    from .families import check, family_of
    from .layout import Layout

    if hasattr(model, "ithaca"):
        raise IthacaError.of("the model is parallelized already")
    family_of(model)
    layout = Layout.of(plan.document)
    checks.same_model(model.config, plan.model)
    check(model, layout)
    checks.dropout(model)
    recompute = ((plan.workload.get("training") or {}).get("options") or {}).get("recompute", "none")
    if recompute not in ("none", "full"):
        raise IthacaError.of(
            f"the plan computes activations again by `{recompute}`, and transformers knows `none` and `full`",
            'plan with recompute="full" or "none"',
        )
    checks.world(layout.ranks)
    return _rewritten(model, layout, recompute, broadcast)


def _rewritten(model: Any, layout: Any, recompute: str, broadcast: bool) -> Any:
    import torch
    import torch.distributed as dist

    from . import attention, batch, collectives, families, gradients

    device = next(model.parameters()).device
    if layout.ranks > 1 and not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank() if layout.ranks > 1 else 0
    groups = collectives.Groups(layout, rank)
    if broadcast and layout.ranks > 1:
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), 0)
    rewritten = families.rewrite(model, layout, groups)
    gradients.reduce_gradients(model, layout, groups, rewritten)
    attention.register()
    model.config._attn_implementation = attention.NAME
    movement = attention.Movement(groups.along(layout.context), layout.movement)
    cutter = batch.Cutter(model, layout, rank, groups.along(layout.heads), movement)
    model.register_forward_pre_hook(cutter, with_kwargs=True)
    model.loss_function = batch.Loss(groups.along(layout.batch + layout.sequence))
    model.config.use_cache = False
    if recompute == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.ithaca = Parallel(cutter, groups, rewritten)
    _for_trainer(model, layout.ranks)
    return model


class Parallel:
    """What a parallelized model knows of its layout."""

    def __init__(self, cutter: Any, groups: Any, rewritten: Any) -> None:
        self.cutter, self.groups, self.rewritten = cutter, groups, rewritten
        self.layout = cutter.layout
        self.tokens = groups.along(self.layout.batch + self.layout.sequence)
        self.weights = groups.along(self.layout.weights)

    def __deepcopy__(self, _: Any) -> "Parallel":
        return self


def _for_trainer(model: Any, ranks: int) -> None:
    """The Trainer reads these: batches are the same on all ranks, and neither the model nor its loss is to be changed.

    For it all ranks are those of one tensor-parallel model, which it leaves alone.
    """
    if ranks == 1:
        return
    from transformers.distributed import DistributedConfig

    if next(model.parameters()).device.type == "cpu":
        _accept_cpu()
    model._tp_size = ranks
    model.config.distributed_config = DistributedConfig(tp_size=ranks)
    if model.ithaca.rewritten.splits:
        plain = type(model).save_pretrained

        def save_pretrained(folder: Any, *args: Any, state_dict: Any = None, **kwargs: Any) -> Any:
            if state_dict is None or "lm_head.weight" in state_dict and len(state_dict["lm_head.weight"]) != model.config.vocab_size:
                raise IthacaError.of(
                    "each rank has a part of the weights",
                    "on every rank: state = ithaca.whole_state(model); on one: model.save_pretrained(folder, state_dict=state)",
                )
            return plain(model, folder, *args, state_dict=state_dict, **kwargs)

        model.save_pretrained = save_pretrained


def _accept_cpu() -> None:
    """accelerate knows meshes of GPUs only; what it does with one for this model is the same on CPUs: nothing."""
    try:
        from accelerate import DistributedType, ParallelismConfig
    except ImportError:
        return
    plain = ParallelismConfig._validate_accelerator
    if getattr(plain, "is_of_ithaca", False):
        return

    def validate(self: Any, accelerator: Any) -> None:
        try:
            plain(self, accelerator)
        except ValueError as error:
            if accelerator.distributed_type != DistributedType.MULTI_CPU or "only compatible" not in str(error):
                raise

    validate.is_of_ithaca = True  # type: ignore[attr-defined]
    ParallelismConfig._validate_accelerator = validate


def whole_logits(model: Any, logits: Any) -> Any:
    """The logits of the whole batch of the last call, tokens in their order, on every rank. A collective."""
    import torch

    parallel: Parallel = model.ithaca
    layout, (batch, length) = parallel.layout, parallel.cutter.last
    pieces = parallel.tokens.gathered(logits.detach())
    n_batch, n_sequence = layout.degree(layout.batch), layout.degree(layout.sequence)
    rows = [torch.cat(list(pieces[i * n_sequence : (i + 1) * n_sequence]), 1) for i in range(n_batch)]
    by_index = torch.cat(rows)
    whole = torch.empty_like(by_index)
    whole[:, layout.order.positions(by_index.shape[1])] = by_index
    return whole[:batch, :length]


def whole_state(model: Any, gradients: bool = False) -> dict[str, Any]:
    """The weights, or gradients, of the whole model by the names of the library, on every rank. A collective."""
    import torch

    parallel: Parallel = model.ithaca
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tensor = parameter.grad if gradients else parameter.detach()
        how = parallel.rewritten.splits.get(name)
        if tensor is None:
            continue
        if how is None:
            found[name] = tensor.clone()
            continue
        pieces = parallel.weights.gathered(tensor)
        ranges = [how.ranges(place) for place in range(parallel.weights.size)]
        size = max(end for each in ranges for _, end in each)
        shape = list(tensor.shape)
        shape[how.dim] = size
        whole = tensor.new_empty(shape)
        for piece, each in zip(pieces, ranges):
            at = 0
            for start, end in each:
                whole.narrow(how.dim, start, end - start).copy_(piece.narrow(how.dim, at, end - start))
                at += end - start
        found[name] = whole
    if not gradients:
        found |= {name: b.clone() for name, b in model.named_buffers() if name in model.state_dict()}
    return found
