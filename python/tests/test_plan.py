"""Plans from Python: the same as those of the command line, and exceptions in place of exit codes."""

import json
import pathlib
import pickle
import signal
import threading
import time

import pytest

import ithaca

ROOT = pathlib.Path(__file__).resolve().parents[2]
LLAMA = ROOT / "examples/llama-3-8b"


@pytest.fixture(scope="module")
def plan():
    return ithaca.plan(LLAMA, cluster="dgx-h100", gpus=8, seq=131072)


def test_the_plan_of_the_readme(plan):
    assert (plan.strategy, plan.mesh, plan.gpus) == ("ulysses", {"ulysses": 8}, 8)
    assert 2.0 < plan.step_seconds < 2.1
    assert plan.layout["attention"][0]["movement"] == "local"
    assert "ulysses ulysses=8" in repr(plan).replace("=8,", "=8")


def test_alternatives_are_rows(plan):
    rows = plan.alternatives
    assert rows[0]["outcome"] == "chosen" and rows[0]["strategy"] == "ulysses" and rows[0]["mesh"] == "ulysses=8"
    assert rows[1]["outcome"] == "slower" and rows[1]["step_seconds"] > rows[0]["step_seconds"]
    assert all(not isinstance(value, (dict, list)) for row in rows for value in row.values())


def test_models_are_paths_dicts_and_configurations(plan):
    config = json.loads((LLAMA / "config.json").read_text())
    of_dict = ithaca.plan(config, cluster="dgx-h100", gpus=8, seq="128k")
    assert of_dict.model["digest"] == plan.model["digest"]
    assert of_dict.step_seconds == plan.step_seconds
    with pytest.raises(ithaca.IthacaError, match="cannot be written as JSON"):
        ithaca.plan({**config, "rope_theta": float("nan")}, gpus=8)


def test_choices_are_lists_or_sets(plan):
    of_set = ithaca.plan(LLAMA, gpus=8, seq=131072, only={"ulysses", "ring"})
    assert (of_set.strategy, of_set.mesh) == (plan.strategy, plan.mesh)


def test_a_wrong_choice_names_the_choices(plan):
    with pytest.raises(ithaca.IthacaError) as refusal:
        plan.emit("nope")
    assert "possible values: " in "".join(refusal.value.helps)


def test_a_configuration_of_transformers(plan):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(LLAMA)
    of_config = ithaca.plan(config, gpus=8, seq=131072)
    assert of_config.step_seconds == plan.step_seconds


def test_saves_and_loads(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    for again in (ithaca.load(tmp_path / "plan.json"), pickle.loads(pickle.dumps(plan)), ithaca.Plan.from_json(plan.to_json())):
        assert again.to_json() == plan.to_json()


def test_explains_and_emits(plan, tmp_path):
    assert "communication of a step" in plan.explain(top=2)
    assert "all_to_all" in plan.emit("ir")
    files = plan.emit("cuda", tmp_path / "out")
    assert isinstance(files, dict) and (tmp_path / "out" / "Makefile").exists()


def test_exports(tmp_path):
    plan = ithaca.plan(LLAMA, gpus=8, seq=8192, strategy="megatron-tp-sp")
    text = plan.export("megatron", tmp_path / "megatron.sh")
    assert "--tensor-model-parallel-size 8" in text and (tmp_path / "megatron.sh").read_text() == text
    with pytest.raises(ithaca.IthacaError) as refused:
        ithaca.plan(LLAMA, gpus=8, seq=8192, strategy="dist-flash").export("megatron")
    assert refused.value.code == "P34"


def test_verifies():
    plan = ithaca.plan(ROOT / "tests/goldens/llama-gqa", gpus=2, seq=64, strategy="ring")
    assert "passed" in plan.verify()


def test_refusals_have_repairs_that_work():
    model = ROOT / "examples/qwen2.5-7b"
    with pytest.raises(ithaca.IthacaError) as refused:
        ithaca.plan(model, gpus=8, seq=8192, strategy="ulysses")
    error = refused.value
    assert error.code == "P20" and error.message.startswith("28 query heads")
    assert len(error.repairs) > 1
    for repair in error.repairs:
        assert ithaca.plan(model, **repair).gpus > 0


def test_unknown_keywords_and_values():
    with pytest.raises(TypeError, match="did you mean `strategy`"):
        ithaca.plan(LLAMA, gpus=8, seq=1024, strategie="ring")
    with pytest.raises(ithaca.IthacaError, match="many") as refused:
        ithaca.plan(LLAMA, gpus="many", seq=1024)
    assert refused.value.code == "C00"
    with pytest.raises(ithaca.IthacaError) as refused:
        ithaca.plan("/nowhere", gpus=8, seq=1024)
    assert refused.value.code == "C01"
    with pytest.raises(TypeError, match="is no model"):
        ithaca.plan(3, gpus=8, seq=1024)


def test_a_call_can_be_interrupted():
    """A search of many seconds ends with the signal, and other threads run meanwhile."""
    main, ran = threading.main_thread().ident, []

    def interrupt():
        for _ in range(5):
            time.sleep(0.05)
            ran.append(time.monotonic())
        signal.pthread_kill(main, signal.SIGINT)

    # A shell has its background jobs ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            while True:
                ithaca.plan(ROOT / "examples/llama-3.1-405b", mode="train", gpus=16384, seq=8192, batch=2048)
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(ran) == 5
