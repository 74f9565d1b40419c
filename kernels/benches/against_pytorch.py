"""Times our kernels and PyTorch's on the same cores, in turns, and prints the ratios.

    python kernels/benches/against_pytorch.py [--rounds N] [NAME ...]

Each round runs every workload once with each library, one after the other, who comes first changing from round to
round, so that whatever else the machine does falls on both. Printed are the medians, the least times, and PyTorch's
median divided by ours: above one we are faster.
"""

import argparse
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent


def ours():
    """The worker, a process that answers each name with seconds."""
    build = ["cargo", "bench", "--package", "ithaca-kernels", "--bench", "worker", "--no-run"]
    said = subprocess.run(build, cwd=ROOT, check=True, capture_output=True, text=True).stderr
    path = re.findall(r"\((\S*worker-\S+)\)", said)[-1]
    pipe = subprocess.PIPE
    return subprocess.Popen([ROOT / path], stdin=pipe, stdout=pipe, text=True)


def ask(worker, line):
    worker.stdin.write(line + "\n")
    worker.stdin.flush()
    return worker.stdout.readline().strip()


def theirs(name):
    """A function that runs a workload once in PyTorch."""
    what, storage, *sizes = name.split(" ")
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[storage]
    sizes = [int(size) for size in sizes]
    if what == "matmul":
        m, k, n = sizes
        a, b = torch.randn(m, k, dtype=dtype), torch.randn(k, n, dtype=dtype)
        c = torch.empty(m, n, dtype=dtype)
        return lambda: torch.matmul(a, b, out=c)
    batch, tokens, heads, kv_heads, width = sizes
    training = what == "training"
    make = lambda h: torch.randn(batch, h, tokens, width, dtype=dtype, requires_grad=training)
    q, k, v = make(heads), make(kv_heads), make(kv_heads)
    d_o = torch.randn(batch, heads, tokens, width, dtype=dtype)
    attend = torch.nn.functional.scaled_dot_product_attention
    grouped = {"enable_gqa": True} if heads != kv_heads else {}

    def run():
        o = attend(q, k, v, is_causal=True, **grouped)
        if training:
            torch.autograd.grad(o, (q, k, v), d_o)

    return run


def seconds(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def processor():
    try:
        info = Path("/proc/cpuinfo").read_text()
        return re.search(r"model name\s*:\s*(.*)", info).group(1)
    except (OSError, AttributeError):
        return platform.processor()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("names", nargs="*", metavar="NAME")
    args = parser.parse_args()
    torch.set_num_threads(os.cpu_count())
    worker = ours()
    names = args.names or ask(worker, "names").split(",")
    print(f"{date.today()}, {os.cpu_count()} cores of {processor()}, {ask(worker, '')}, PyTorch {torch.__version__}, "
          f"load {os.getloadavg()[0]:.1f}, {args.rounds} rounds")
    print(f"{'ms, median (least)':<34} {'ours':>18} {'PyTorch':>18} {'ratio':>7} {'of least':>9}")
    for name in names:
        run = theirs(name)
        times = {"ours": [], "theirs": []}
        turns = [("ours", lambda: float(ask(worker, name))), ("theirs", lambda: seconds(run))]
        for round in range(args.rounds + 2):
            for whose, turn in turns if round % 2 else reversed(turns):
                took = turn()
                # The first two rounds touch memory for the first time.
                if round >= 2:
                    times[whose].append(took * 1e3)
        middle = {whose: statistics.median(t) for whose, t in times.items()}
        least = {whose: min(t) for whose, t in times.items()}
        cell = lambda whose: f"{middle[whose]:.1f} ({least[whose]:.1f})"
        ratio, of_least = (x["theirs"] / x["ours"] for x in (middle, least))
        print(f"{name:<34} {cell('ours'):>18} {cell('theirs'):>18} {ratio:>7.2f} {of_least:>9.2f}", flush=True)
    worker.stdin.close()
    worker.wait()


if __name__ == "__main__":
    sys.exit(main())
