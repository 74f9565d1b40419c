"""What parallelize refuses, before any collective and on every rank alike."""

import sys

import pytest
import torch

import ithaca
from models import GOLDENS, model, plan
from ranks import run


def refused(n, function, *arguments):
    """The one message with which every rank refuses."""
    found = run(n, function, *arguments)
    assert all(not passed and result[0] == "IthacaError" for passed, result in found), found
    messages = {result[1] for _, result in found}
    assert len(messages) == 1
    return messages.pop()


def of(golden, planned, **changes):
    ithaca.parallelize(model(golden, **changes), planned)


def of_class(planned):
    import transformers

    config = transformers.AutoConfig.from_pretrained(GOLDENS / "gemma2")
    ithaca.parallelize(transformers.AutoModelForCausalLM.from_config(config), planned)


def with_old(planned, library):
    of = model("llama-gqa")
    setattr(sys.modules[library], "__version__", "1.9.0")
    ithaca.parallelize(of, planned)


def call(planned, **inputs):
    parallel = ithaca.parallelize(model("llama-gqa"), planned)
    parallel(input_ids=torch.zeros(2, 8, dtype=torch.long), **inputs)


def test_another_class():
    assert "class `Gemma2ForCausalLM`" in refused(2, of_class, plan("llama-gqa", "ring", "ring=2"))


def test_a_plan_for_another_model():
    message = refused(2, of, "llama-biases-one-kv-head", plan("llama-gqa", "ring", "ring=2"))
    assert "another model" in message and "attention_bias" in message
    assert "type `llama`" in refused(2, of, "qwen2", plan("llama-gqa", "ring", "ring=2"))


def test_another_number_of_processes():
    assert "4 ranks, and 2 processes" in refused(2, of, "llama-gqa", plan("llama-gqa", "ring", "ring=4"))


@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_old_libraries(library):
    assert "1.9.0 is installed" in refused(2, with_old, plan("llama-gqa", "ring", "ring=2"), library)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (dict(strategy="dist-flash", mesh="ring=2"), "dist-flash"),
        (dict(strategy="pipeline", mesh="pp=2"), "pipeline"),
        (dict(strategy="data-parallel", mesh="dp=2", zero=1), "ZeRO stage 1"),
        (dict(strategy="ring", mesh="ring=2", recompute="selective"), "selective"),
        (dict(strategy="ring", mesh="ring=2", movement="gather"), "movement `gather`"),
    ],
)
def test_another_layout(options, word):
    assert word in refused(2, of, "llama-gqa", plan("llama-gqa", **options))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("inputs_embeds", torch.zeros(2, 8, 64)),
        ("use_cache", True),
        ("attention_mask", torch.ones(2, 1, 8, 8)),
        ("logits_to_keep", 1),
        ("cu_seq_lens_q", torch.tensor([0, 8])),
    ],
)
def test_inputs(name, value):
    assert name.split("_")[0] in refused(2, called, plan("llama-gqa", "ring", "ring=2"), name, value)


def called(planned, name, value):
    call(planned, **{name: value})


def test_padding_that_has_labels():
    mask = torch.ones(2, 8)
    mask[0, :3] = 0
    inputs = dict(attention_mask=mask, labels=torch.zeros(2, 8, dtype=torch.long))
    assert "sees no key" in refused(2, calls, plan("llama-gqa", "ring", "ring=2"), inputs)


def calls(planned, inputs):
    call(planned, **inputs)


def with_dropout(planned):
    ithaca.parallelize(model("llama-gqa", attention_dropout=0.1), planned).train()(input_ids=torch.zeros(2, 8, dtype=torch.long))


def test_dropout():
    planned = plan("llama-gqa", "ring", "ring=2")
    assert "dropout" in refused(2, with_dropout, planned)


def saved(planned, folder):
    ithaca.parallelize(model("llama-gqa"), planned).save_pretrained(folder)


def test_parts_are_not_saved_as_the_whole(tmp_path):
    assert "part of the weights" in refused(2, saved, plan("llama-gqa", "megatron-tp", "tp=2"), str(tmp_path))
