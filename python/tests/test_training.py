"""Ten steps under plans, by an ordinary loop and by the Trainer, against one process."""

import os

import pytest
import torch

import ithaca
from models import model, plan
from ranks import results

GOLDEN, STEPS, BATCH, LENGTH = "llama-gqa", 10, 4, 32

# Adam divides by the size of a gradient: with its usual 1e-8, a gradient that is rounding moves a weight as far as any other.
EPSILON = 1e-5

PLANS = [
    ("data-parallel", "dp=4", {}),
    ("ulysses", "ulysses=4", {}),
    ("ring", "ring=2", dict(order="zigzag")),
    ("megatron-cp-allgather", "cp=4", dict(order="zigzag")),
    ("megatron-tp-sp", "tp=2", {}),
    ("usp+megatron-tp", "ring=2,ulysses=2,tp=2", {}),
]
IDS = [strategy for strategy, _, _ in PLANS]


def data():
    """Sequences of a seed; some labels are ignored, not as many in each."""
    torch.manual_seed(5)
    rows = []
    for i in range(STEPS * BATCH * 2):
        ids = torch.randint(0, 128, (LENGTH,))
        labels = ids.clone()
        labels[: i % 7] = -100
        rows.append(dict(input_ids=ids, labels=labels))
    return rows


def stack(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def weights(trained, planned):
    return ithaca.whole_state(trained) if planned else {n: p.detach().clone() for n, p in trained.named_parameters()}


def loop(planned, clips=True, **changes):
    """Losses and weights of an ordinary loop, with gradients clipped and accumulated over two batches."""
    rows, trained = data(), model(GOLDEN)
    if planned:
        trained = ithaca.parallelize(trained, planned)
    trained.train()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3, eps=EPSILON)
    losses = []
    for step in range(STEPS):
        for half in range(2):
            at = (2 * step + half) * BATCH
            loss = trained(**stack(rows[at : at + BATCH])).loss
            (loss / 2).backward()
            losses.append(float(loss.detach()))
        if clips:
            torch.nn.utils.clip_grad_norm_(trained.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, weights(trained, planned)


def by_trainer(planned, folder):
    """Losses and weights of the Trainer, with its own clipping and accumulation."""
    import transformers

    # One process has no launcher.
    if not planned:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    trained = model(GOLDEN)
    if planned:
        trained = ithaca.parallelize(trained, planned)
    settings = transformers.TrainingArguments(
        output_dir=folder, max_steps=STEPS, per_device_train_batch_size=BATCH, gradient_accumulation_steps=2, learning_rate=1e-3,
        adam_epsilon=EPSILON, max_grad_norm=0.5, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, seed=3,
    )
    trainer = transformers.Trainer(model=trained, args=settings, train_dataset=data(), data_collator=stack)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], weights(trained, planned)


def compare(found, expected, of_losses):
    for losses, state in found:
        assert len(losses) == len(expected[0])
        assert max(abs(a - b) for a, b in zip(losses, expected[0])) < of_losses
        wrong = {n: float((state[n] - w).abs().max()) for n, w in expected[1].items()}
        assert not {n: e for n, e in wrong.items() if not e < 1e-5}


@pytest.fixture(scope="module")
def looped():
    return results(1, loop, None)[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return results(1, by_trainer, None, str(tmp_path_factory.mktemp("one")))[0]


@pytest.mark.parametrize(("strategy", "mesh", "options"), PLANS, ids=IDS)
def test_loop(looped, strategy, mesh, options):
    planned = plan(GOLDEN, strategy, mesh, batch=BATCH, seq=LENGTH, **options)
    compare(results(planned.gpus, loop, planned), looped, 1e-5)


@pytest.mark.parametrize(("strategy", "mesh", "options"), PLANS, ids=IDS)
def test_trainer(trained, strategy, mesh, options, tmp_path):
    planned = plan(GOLDEN, strategy, mesh, batch=BATCH, seq=LENGTH, **options)
    # The Trainer rounds the losses that it logs.
    compare(results(planned.gpus, by_trainer, planned, str(tmp_path)), trained, 1e-4)


def test_recomputed(looped):
    planned = plan(GOLDEN, "ring", "ring=2", order="zigzag", recompute="full")
    compare(results(2, loop, planned), looped, 1e-5)
