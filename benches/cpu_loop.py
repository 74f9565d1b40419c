"""Closes the loop on this machine: calibrates a profile, predicts steps of a model that was not measured, and times them.

    python benches/cpu_loop.py [--profile FILE] [--rounds N]

Without `--profile` it first runs `ithaca calibrate --device cpu`. Each layout is planned with the profile, and the plan
runs as `ithaca run PLAN --timings` runs it. Where there are as many ranks as cores or more, a step takes the processor time
of its tasks over the cores: other load on the machine stretches wall time, and not that. All layouts take turns, and the
least of the rounds counts.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ITHACA = ROOT / "target/release/ithaca"

# No size of it is that of a model that calibration runs.
MODEL = {
    "model_type": "llama",
    "hidden_size": 448,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 56,
    "intermediate_size": 1216,
    "num_hidden_layers": 4,
    "vocab_size": 3000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}

PREFILL = ["--seq", "1024", "--logits", "all"]
TRAIN = ["--mode", "train", "--seq", "512", "--batch", "4"]

LAYOUTS = [
    ("usp, ring=2,ulysses=2", PREFILL, ["--strategy", "usp", "--mesh", "ring=2,ulysses=2"]),
    ("ulysses=4", PREFILL, ["--strategy", "ulysses", "--mesh", "ulysses=4"]),
    ("ring=4", PREFILL, ["--strategy", "ring", "--mesh", "ring=4"]),
    ("megatron-tp, tp=4", PREFILL, ["--strategy", "megatron-tp", "--mesh", "tp=4"]),
    ("megatron-tp-sp, tp=2", PREFILL, ["--strategy", "megatron-tp-sp", "--mesh", "tp=2"]),
    ("training, data-parallel, dp=4", TRAIN, ["--strategy", "data-parallel", "--mesh", "dp=4"]),
]


def ithaca(*arguments):
    done = subprocess.run([ITHACA, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"ithaca {' '.join(map(str, arguments))}\n{done.stdout}{done.stderr}")
    return done.stdout


def step(plan):
    """Seconds of one step of a plan: the processor time of all tasks over the cores."""
    table = ithaca("run", plan, "--unchecked", "--timings").partition("processor")[2]
    rows = (line.split() for line in table.splitlines()[1:])
    return sum(float(row[1]) for row in rows if len(row) > 4 and row[3].endswith("%")) / os.cpu_count()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        profile = args.profile
        if profile is None:
            profile = folder / "this-machine.toml"
            print(ithaca("calibrate", "--device", "cpu", "-o", profile))
        (folder / "config.json").write_text(json.dumps(MODEL))
        plans = []
        for number, (name, workload, layout) in enumerate(LAYOUTS):
            plan = folder / f"{number}.json"
            ithaca("plan", folder, "--cluster", profile, *workload, *layout, "-o", plan)
            plans.append((name, plan, json.loads(plan.read_text())["time"]["step_seconds"], []))
        for _ in range(args.rounds):
            for _, plan, _, times in plans:
                times.append(step(plan))
    print(f"{date.today()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, least of {args.rounds} rounds")
    print(f"{'layout':<32} {'predicted':>10} {'measured':>10} {'error':>8}")
    errors = []
    for name, _, predicted, times in plans:
        error = predicted / min(times) - 1
        errors.append(abs(error))
        print(f"{name:<32} {predicted * 1e3:>7.1f} ms {min(times) * 1e3:>7.1f} ms {100 * error:>+6.1f} %")
    print(f"median of the errors {100 * statistics.median(errors):.1f} %")


if __name__ == "__main__":
    sys.exit(main())
