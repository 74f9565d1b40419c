"""Runs emitted PyTorch modules of small models on the CPU and compares them with the files of the models.

    python tests/torch/check.py PATH/TO/ithaca [WORD ...]

Every line of tests/gpu/strategies.txt and of lines.txt beside this script that contains all WORDs is planned, emitted and run,
a process per rank, by gloo: a prefill by its logits, a training step by its loss and gradients, by our backward pass (train) and
by PyTorch's (autograd), decoding by its tokens and logits. Options after `|` are those of a plan of prompts. Needs torch and safetensors.
"""

import importlib.util
import io
import json
import multiprocessing
import os
import pathlib
import re
import socket
import struct
import subprocess
import sys
import tempfile
import traceback

TESTS = pathlib.Path(__file__).resolve().parent.parent
WORKERS = 8
STEPS = 23  # of decoding

# The file beside a model that has the inputs and what they give, by mode.
FILES = {"prefill": "io.safetensors", "train": "io.safetensors", "autograd": "io.safetensors", "decode": "decode.safetensors"}

# Options of `emit`, by mode.
EMIT = {"autograd": ["--autograd"], "decode": ["--chunk", "16"]}


def shapes(path):
    """The shapes of the tensors of a safetensors file."""
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


def cases():
    """Each `(mode, folder, options)` of the lists."""
    for path in (TESTS / "gpu/strategies.txt", TESTS / "torch/lines.txt"):
        for line in path.read_text().splitlines():
            if line and not line.startswith("#") and not line.startswith("program"):
                modes, subject, *options = line.split()
                for mode in modes.split(","):
                    yield mode, subject, options


def emitted(ithaca, case, folder):
    """The module of a case and its number of ranks, or why there is none."""
    mode, subject, options = case
    of = shapes(TESTS / subject / FILES[mode])
    batch, sequence = of["prompt_ids" if mode == "decode" else "input_ids"]
    workload = ["--mode", "train" if mode == "autograd" else mode, "--batch", str(batch)]
    if mode == "autograd" and "--zero" not in options:
        # The search takes ZeRO where it costs nothing, and PyTorch's backward pass has none.
        workload += ["--zero", "0"]
    workload += ["--context", str(sequence + STEPS + 1)] if mode == "decode" else ["--seq", str(sequence)]
    if "decoder_input_ids" in of:
        workload += ["--target-seq", str(of["decoder_input_ids"][1])]
    if mode == "prefill":
        workload += ["--logits", "all"]
    if "--strategy" not in options:
        options = ["--strategy", "single", "--mesh", "dp=1", *options]
    how = EMIT.get(mode, [])
    if mode == "decode" and json.loads((TESTS / subject / "config.json").read_text()).get("is_encoder_decoder"):
        how = []  # prompts are read whole
    plan, program = folder / "plan.json", folder / f"program{abs(hash(str(case)))}.py"
    commands = []
    if "|" in options:
        # Prompts have a plan of their own.
        at = options.index("|")
        options, own, prompts = options[:at], options[at + 1:], folder / "prompts.json"
        lengths = ["--seq", str(sequence), "--context", str(sequence + STEPS + 1)]
        lengths += [] if "--batch" in own else ["--batch", str(batch)]
        commands.append(["plan", TESTS / subject, *lengths, *own, "-o", prompts])
        how = ["--prompts", prompts]
    commands += [["plan", TESTS / subject, *workload, *options, "-o", plan],
                 ["emit", plan, "--target", "torch", "-o", program, *how]]
    for command in commands:
        done = subprocess.run([ithaca, *map(str, command)], capture_output=True, text=True, check=False)
        if done.returncode:
            return None, done.stderr.strip().splitlines()[0]
    return program, int(re.search(r"--nproc-per-node (\d+)", program.read_text())[1])


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def worker(rank, connection):
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        program, ranks, port, mode, subject = job
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        data = TESTS / subject
        file = str(data / FILES[mode])
        sys.argv = [str(program), "--weights", str(data / "model.safetensors"), "--inputs", file, "--expect", file,
                    "--tolerance", "2e-5"] + (["--steps", str(STEPS)] if mode == "decode" else [])
        sys.stdout = out = io.StringIO()
        try:
            spec = importlib.util.spec_from_file_location(program.stem, program)
            module = importlib.util.module_from_spec(spec)
            sys.modules[program.stem] = module
            spec.loader.exec_module(module)
            getattr(module, {"decode": "decode", "autograd": "train"}.get(mode, "main"))()
            status = 0
        except SystemExit as end:
            status = end.code
        except BaseException:
            status = traceback.format_exc()
        finally:
            # The next case starts anew, however this one ended.
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
        connection.send((status, out.getvalue()))


def main():
    ithaca, words = str(pathlib.Path(sys.argv[1]).resolve()), sys.argv[2:]
    context = multiprocessing.get_context("spawn")
    workers = []
    for rank in range(WORKERS):
        connection, other = context.Pipe()
        process = context.Process(target=worker, args=(rank, other), daemon=True)
        process.start()
        workers.append(connection)
    right, refused, wrong = 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for case in (case for case in cases() if all(word in str(case) for word in words)):
            name = " ".join([case[0], case[1], *case[2]])
            program, ranks = emitted(ithaca, case, pathlib.Path(folder))
            if program is None:
                refused += 1
                print(f"refused: {name}: {ranks}", flush=True)
                continue
            port = free_port()
            for connection in workers[:ranks]:
                connection.send((program, ranks, port, case[0], case[1]))
            answers = []
            for connection in workers[:ranks]:
                answers.append(connection.recv() if connection.poll(90) else ("no answer", ""))
            if all(status == 0 for status, _ in answers):
                right += 1
                continue
            wrong += 1
            status = next(status for status, _ in answers if status not in (0,))
            lines = [line for line in answers[0][1].splitlines() if "WRONG" in line][:4]
            print(f"WRONG: {name}: {str(status).strip()[-600:]}\n  " + "\n  ".join(lines), flush=True)
            if any(status == "no answer" for status, _ in answers):
                break
    print(f"{right} right, {wrong} wrong, {refused} refused")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
