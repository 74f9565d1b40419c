"""The small models of tests/goldens, and plans for them."""

import functools
import json
import pathlib
import warnings

import torch
import transformers
from safetensors.torch import load_file

import ithaca

GOLDENS = pathlib.Path(__file__).resolve().parents[2] / "tests/goldens"

warnings.filterwarnings("ignore", message="Converting a tensor")
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

# Ranks are forked from this process, and would import these one by one.
for _name in ("Llama", "Mistral", "Qwen2", "Qwen3", "SeedOss", "SmolLM3", "GPT2", "Gemma2", "Granite", "Ernie4_5", "Arcee", "Exaone4"):
    getattr(transformers, "GPT2LMHeadModel" if _name == "GPT2" else f"{_name}ForCausalLM")
from transformers import Trainer, TrainingArguments  # noqa: E402, F401


def model(golden, **changes):
    """A model in single precision, by the library's plain arithmetic."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        GOLDENS / golden, attn_implementation="eager", dtype=torch.float32, **changes
    )


def expected(golden):
    """Inputs and what they give."""
    return load_file(GOLDENS / golden / "io.safetensors")


@functools.lru_cache(maxsize=None)
def plan(golden, strategy, mesh, **options):
    """The plan of a training step that does nothing beside its layout."""
    batch, seq = expected(golden)["input_ids"].shape
    if strategy == "single":
        options |= dict(gpus=1)
    options = dict(dict(batch=batch, seq=seq, zero=0, recompute="none", micro_batches=1, loss_chunks=1), **options)
    return ithaca.plan(GOLDENS / golden, cluster="dgx-h100", mode="train", strategy=strategy, mesh=mesh, **options)
