"""Logits, loss and gradients of the small models under plans, against the files that transformers made in one process."""

import pytest
import torch

import ithaca
from models import expected, model, plan
from ranks import results

LAYOUTS = [
    ("data-parallel", "dp=2", {}),
    ("ulysses", "ulysses=2", {}),
    ("ring", "ring=4", dict(order="contiguous")),
    ("ring", "ring=2", dict(order="zigzag")),
    ("ring", "ring=4", dict(order="striped")),
    ("megatron-cp-allgather", "cp=4", dict(order="zigzag")),
    ("usp", "ring=2,ulysses=2", dict(order="zigzag")),
    ("megatron-tp", "tp=2", {}),
    ("megatron-tp-sp", "tp=4", {}),
    ("ulysses+megatron-tp-sp", "ulysses=2,tp=2", {}),
    ("data-parallel+ring", "dp=2,ring=2", dict(order="zigzag")),
    ("data-parallel+usp+megatron-tp", "dp=2,ring=2,tp=2,ulysses=1", {}),
    ("usp+megatron-tp-sp", "tp=2,ring=2,ulysses=2", dict(order="zigzag")),
]
GOLDENS = ["llama-gqa", "qwen2", "mistral-swa", "gpt2", "seed-oss", "smollm3", "granite", "ernie4-5", "arcee",
           "exaone4"]


def errors(golden, planned):
    """The largest errors of logits, loss and each gradient, relative to the largest element of its kind."""
    io = expected(golden)
    parallel = ithaca.parallelize(model(golden), planned)
    out = parallel(input_ids=io["input_ids"], shift_labels=io["labels"])
    out.loss.backward()
    logits = ithaca.whole_logits(parallel, out.logits)
    gradients = ithaca.whole_state(parallel, gradients=True)
    largest = max(float(t.abs().max()) for name, t in io.items() if name.startswith("grad."))
    found = {
        "logits": float((logits - io["logits"]).abs().max() / io["logits"].abs().max()),
        "loss": float((out.loss.detach() - io["loss"]).abs()),
    }
    for name, gradient in io.items():
        if name.startswith("grad."):
            found[name] = float((gradients[name[5:]] - gradient).abs().max()) / largest
    return found



@pytest.mark.parametrize("golden", GOLDENS)
@pytest.mark.parametrize(("strategy", "mesh", "options"), LAYOUTS, ids=[f"{s}-{m}-{o.get('order', '')}" for s, m, o in LAYOUTS])
def test_equals_one_process(golden, strategy, mesh, options):
    batch = expected(golden)["input_ids"].shape[0]
    if "dp=2" in mesh and batch % 2:
        pytest.skip("one sequence")
    planned = plan(golden, strategy, mesh, **options)
    for found in results(planned.gpus, errors, golden, planned):
        wrong = {name: error for name, error in found.items() if not error < 1e-5}
        assert not wrong


@pytest.mark.parametrize("golden", ["llama-biases-one-kv-head", "qwen3-head-dim", "qwen2-tied-mixed-windows"])
@pytest.mark.parametrize(
    ("strategy", "mesh"), [("megatron-tp-sp", "tp=4"), ("ulysses+megatron-tp", "ulysses=2,tp=2"), ("ring", "ring=2")]
)
def test_further_models(golden, strategy, mesh):
    planned = plan(golden, strategy, mesh)
    for found in results(planned.gpus, errors, golden, planned):
        assert not {name: error for name, error in found.items() if not error < 1e-5}


def loss_and_gradients(golden, planned, batch):
    """The same of any batch, in one process where there is no plan."""
    of = model(golden)
    if planned is None:
        # With a cache, transformers takes documents for one.
        out = of(**batch, use_cache=False)
        out.loss.backward()
        return out.loss.detach(), out.logits.detach(), {n: p.grad for n, p in of.named_parameters()}
    ithaca.parallelize(of, planned)
    out = of(**batch)
    out.loss.backward()
    return out.loss.detach(), ithaca.whole_logits(of, out.logits), ithaca.whole_state(of, gradients=True)


def batch_of(kind, golden):
    """Inputs of odd length, and of documents or padding."""
    torch.manual_seed(11)
    length, sequences = 45, 3
    ids = torch.randint(0, 128, (sequences, length))
    labels = ids.clone()
    labels[0, 5:9] = -100
    batch = dict(input_ids=ids, labels=labels)
    if kind in ("left", "right"):
        mask = torch.ones_like(ids)
        for row, n in enumerate((0, 7, 20)):
            (mask[row, :n] if kind == "left" else mask[row, length - n :]).zero_()
        labels[mask == 0] = -100
        if kind == "left":
            # Padding would predict it.
            labels[mask.cumsum(1) == 1] = -100
        batch["attention_mask"] = mask
        # Positions as a tokenizer with padding on the left makes them.
        batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    if kind == "documents":
        lengths = [(10, 30, 5), (45,), (1, 22, 22)]
        batch["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    return batch


SHAPES = [
    ("data-parallel", "dp=2", {}),
    ("ulysses+megatron-tp-sp", "ulysses=2,tp=2", {}),
    ("ring", "ring=4", dict(order="zigzag")),
    ("ring", "ring=2", dict(order="striped")),
    ("megatron-cp-allgather", "cp=2", dict(order="zigzag")),
]


@pytest.mark.parametrize("kind", ["odd", "left", "right", "documents"])
@pytest.mark.parametrize("golden", ["llama-gqa", "mistral-swa"])
@pytest.mark.parametrize(("strategy", "mesh", "options"), SHAPES, ids=[s for s, _, _ in SHAPES])
def test_padding_and_documents(kind, golden, strategy, mesh, options):
    batch = batch_of(kind, golden)
    (loss, logits, gradients), = results(1, loss_and_gradients, golden, None, batch)
    real = batch.get("attention_mask", torch.ones(1)).bool().expand(logits.shape[:2])
    planned = plan(golden, strategy, mesh, **options)
    for found_loss, found_logits, found in results(planned.gpus, loss_and_gradients, golden, planned, batch):
        assert float((found_loss - loss).abs()) < 1e-5
        assert float((found_logits - logits)[real].abs().max() / logits.abs().max()) < 1e-5
        largest = max(float(g.abs().max()) for g in gradients.values())
        wrong = {n: float((found[n] - g).abs().max()) / largest for n, g in gradients.items()}
        assert not {n: e for n, e in wrong.items() if not e < 1e-5}
