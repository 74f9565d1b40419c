"""Times our CPU kernels and another library's on the same cores, in turns, and prints the ratios.

    python kernels/benches/against.py torch|numpy [--rounds N] [NAME ...]

Each round times every workload once with each library, one after the other. The order changes from round to round, so
other load on the machine falls on both. A pause and a run that is not timed come before each: threads of OpenMP wait
actively for 200 ms after their work, and would take a core from the other library. The table gives medians, minima, and
the library's median divided by ours: above one we are faster. NumPy has matrix products in f32 only.
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

# Seconds after which the other library's threads sleep.
PAUSE = 0.3

ROOT = Path(__file__).resolve().parent.parent.parent


def start_worker():
    """The worker: a process that answers the name of a workload with seconds."""
    build = ["cargo", "bench", "--package", "ithaca-kernels", "--bench", "worker", "--no-run"]
    output = subprocess.run(build, cwd=ROOT, check=True, stderr=subprocess.PIPE, text=True).stderr
    path = re.findall(r"\((\S*worker-\S+)\)", output)[-1]
    pipe = subprocess.PIPE
    return subprocess.Popen([ROOT / path], stdin=pipe, stdout=pipe, text=True)


def ask(worker, line):
    worker.stdin.write(line + "\n")
    worker.stdin.flush()
    return worker.stdout.readline().strip()


class NumPy:
    def __init__(self):
        import numpy

        self.library, self.title = numpy, f"NumPy {numpy.__version__}"

    def workload(self, kind, storage, sizes):
        """A function that runs a workload once, or None where the library lacks it."""
        if (kind, storage) != ("matmul", "f32"):
            return None
        m, k, n = sizes
        random = self.library.random.default_rng(0)
        a, b = (random.standard_normal(shape, dtype="float32") for shape in ((m, k), (k, n)))
        c = self.library.empty((m, n), dtype="float32")
        return lambda: self.library.matmul(a, b, out=c)


class Torch:
    def __init__(self):
        import torch

        torch.set_num_threads(os.cpu_count())
        self.library, self.title = torch, f"PyTorch {torch.__version__}"

    def workload(self, kind, storage, sizes):
        """A function that runs a workload once, or None where the library lacks it."""
        torch = self.library
        dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[storage]
        if kind == "matmul":
            m, k, n = sizes
            a, b = torch.randn(m, k, dtype=dtype), torch.randn(k, n, dtype=dtype)
            c = torch.empty(m, n, dtype=dtype)
            return lambda: torch.matmul(a, b, out=c)
        batch, tokens, heads, kv_heads, width = sizes
        is_training = kind == "training"
        make = lambda h: torch.randn(batch, h, tokens, width, dtype=dtype, requires_grad=is_training)
        q, k, v = make(heads), make(kv_heads), make(kv_heads)
        d_o = torch.randn(batch, heads, tokens, width, dtype=dtype)
        attend = torch.nn.functional.scaled_dot_product_attention
        grouped = {"enable_gqa": True} if heads != kv_heads else {}

        def run():
            o = attend(q, k, v, is_causal=True, **grouped)
            if is_training:
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
    parser.add_argument("library", choices=("torch", "numpy"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("names", nargs="*", metavar="NAME")
    args = parser.parse_intermixed_args()
    library = {"torch": Torch, "numpy": NumPy}[args.library]()
    worker = start_worker()
    print(f"{date.today()}, {os.cpu_count()} cores of {processor()}, {ask(worker, '')}, {library.title}, "
          f"load {os.getloadavg()[0]:.1f}, {args.rounds} rounds")
    print(f"{'ms, median (least)':<34} {'ours':>18} {library.title.split()[0]:>18} {'ratio':>7} {'of least':>9}")
    for name in args.names or ask(worker, "names").split(","):
        kind, storage, *sizes = name.split(" ")
        run = library.workload(kind, storage, [int(size) for size in sizes])
        if run is None:
            continue
        times = {"ours": [], "theirs": []}
        turns = [("ours", lambda: float(ask(worker, name))), ("theirs", lambda: seconds(run))]
        for round in range(args.rounds + 2):
            for whose, turn in turns if round % 2 else reversed(turns):
                time.sleep(PAUSE)
                turn()
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
