"""Feeds exports of plans to the parsers of the frameworks that they are for.

    python tests/frameworks/check.py PATH/TO/ithaca [--megatron CHECKOUT] [--only FRAMEWORK] [WORD ...]

Plans every line of cases.txt beside this script that contains all WORDs for each framework in turn, exports the plan, and lets the
framework's own code read the export. A framework that is not installed is named and skipped:

    pip install --no-deps megatron-core deepspeed torchtitan accelerate vllm sglang

The package megatron-core has no parser of arguments: its TransformerConfig takes them, and its RankGenerator is compared with the
mesh of the plan. With `--megatron`, a checkout of Megatron-LM, its whole parser reads the script.
"""

import argparse
import importlib.util
import itertools
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import typing
import warnings

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TRAINERS = ["megatron", "nemo", "deepspeed", "torchtitan", "accelerate"]
SERVERS = ["vllm", "sglang"]


def flags_of(script, command):
    """The flags of a script behind its command, as `{name: value}`; a list for several values, True for none."""
    text = "\n".join(line for line in script.read_text().splitlines() if not line.startswith("#"))
    words = shlex.split(text.replace("\\\n", " "))
    at = max(i for i, word in enumerate(words) if word == command)
    return as_flags(words[at + 1:])


def as_flags(words):
    flags, name = {}, None
    for word in words:
        if word == "$@":
            break
        if word.startswith("--"):
            name = word
            flags[name] = []
        elif name:
            flags[name].append(word)
    return {name: True if not values else values[0] if len(values) == 1 else values for name, values in flags.items()}


def module_of(path):
    spec = importlib.util.spec_from_file_location(path.stem.replace("-", "_"), path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def groups(mesh, names):
    """The ranks along axes of these names, from a mesh whose last axis is fastest."""
    sizes = [axis["size"] for axis in mesh]
    strides = [1] * len(mesh)
    for i in range(len(mesh) - 2, -1, -1):
        strides[i] = strides[i + 1] * sizes[i + 1]
    inside = [i for i, axis in enumerate(mesh) if axis["axis"] in names]
    outside = [i for i in range(len(mesh)) if i not in inside]
    found = set()
    for base in itertools.product(*(range(sizes[i]) for i in outside)):
        start = sum(c * strides[i] for c, i in zip(base, outside))
        found.add(frozenset(
            start + sum(c * strides[i] for c, i in zip(at, inside))
            for at in itertools.product(*(range(sizes[i]) for i in inside))))
    return found


def megatron_core():
    from megatron.core.parallel_state import RankGenerator
    from megatron.core.transformer.transformer_config import TransformerConfig

    renamed = {"--num-attention-heads": "num_attention_heads", "--num-query-groups": "num_query_groups"}

    def check(plan, path):
        flags = flags_of(path, "pretrain_gpt.py")
        if "--num-layers" not in flags:
            flags.update(as_flags(architecture(plan["model"]["config"])))
        number = lambda name: int(flags.get(name, 1))
        fields = {f for f in TransformerConfig.__dataclass_fields__}
        taken = {}
        for name, value in flags.items():
            field = renamed.get(name, name[2:].replace("-", "_"))
            if field in fields and field not in ("params_dtype", "cp_comm_type"):
                kind = TransformerConfig.__dataclass_fields__[field].type
                kinds = typing.get_args(kind) or (kind,)
                if value is True:
                    taken[field] = True
                elif isinstance(value, list):
                    taken[field] = [int(v) if v.isdigit() else v for v in value]
                elif str not in kinds and list in [typing.get_origin(k) or k for k in kinds]:
                    taken[field] = [value]
                else:
                    taken[field] = int(value) if re.fullmatch(r"\d+", value) else value
        taken["gated_linear_unit"] = taken.pop("swiglu", True)
        taken.pop("normalization", None)
        for name in ("attention_dropout", "hidden_dropout"):
            taken[name] = 0.0
        if "--num-experts" in flags:
            taken["num_moe_experts"] = number("--num-experts")
        kind = flags.get("--cp-comm-type")
        if kind:
            taken["cp_comm_type"] = kind
        taken["pipeline_dtype"] = __import__("torch").bfloat16
        chunks = number("--num-virtual-stages-per-pipeline-rank")
        if chunks > 1:
            taken["virtual_pipeline_model_parallel_size"] = chunks
        config = TransformerConfig(add_bias_linear=False, **taken)
        assert config.num_layers == number("--num-layers")
        tp, cp, pp = (number(f"--{n}-parallel-size") for n in ("tensor-model", "context", "pipeline-model"))
        dp = plan["gpus"] // (tp * cp * pp)
        order = "tp-cp-ep-pp-dp" if "--use-tp-pp-dp-mapping" in flags else "tp-cp-ep-dp-pp"
        ranks = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
        axes = {"tp": ["tp"], "cp": ["ring", "cp", "ulysses", "outer"], "dp": ["dp", "ep"], "pp": ["pp"]}
        for name, ours in axes.items():
            theirs = {frozenset(group) for group in ranks.get_ranks(name)}
            assert theirs == groups(plan["mesh"], ours), f"groups of {name} differ"

    return check


def megatron_whole(checkout):
    from types import SimpleNamespace

    import torch
    import typing_extensions

    typing.override = getattr(typing, "override", typing_extensions.override)
    sys.path.insert(0, checkout)
    from megatron.training import arguments

    # No GPU is asked for its architecture, and TransformerEngine is not there to fuse.
    arguments.get_device_arch_version = lambda: 9
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0)

    def check(plan, path):
        text = path.read_text()
        words = shlex.split("\n".join(l for l in text.splitlines() if not l.startswith("#")).replace("\\\n", " "))
        words = words[words.index("pretrain_gpt.py") + 1:-1]
        os.environ.update(WORLD_SIZE=str(plan["gpus"]), RANK="0")
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
        if "CUDA_DEVICE_MAX_CONNECTIONS=1" in text:
            os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        extra = ["--tokenizer-type", "NullTokenizer", "--train-iters", "10", "--no-rope-fusion"]
        if "--num-layers" not in words:
            extra += architecture(plan["model"]["config"])
        sys.argv = ["pretrain_gpt.py", *words, *extra, *([] if "--lr" in words else ["--lr", "1e-4"])]
        args = arguments.parse_args()
        arguments.validate_args(args)
        assert args.sequence_parallel == ("--sequence-parallel" in words), "--sequence-parallel was dropped"
        arguments.core_transformer_config_from_args(args)

    return check


def architecture(config):
    """Sizes of a model whose architecture the export leaves to its user."""
    heads = config["num_attention_heads"]
    flags = ["--num-layers", config["num_hidden_layers"], "--hidden-size", config["hidden_size"], "--num-attention-heads", heads,
             "--vocab-size", config["vocab_size"], "--group-query-attention",
             "--num-query-groups", config.get("num_key_value_heads", heads), "--position-embedding-type", "rope"]
    if "kv_lora_rank" in config:
        flags = flags[:8] + ["--multi-latent-attention", "--position-embedding-type", "rope", "--num-experts", config["n_routed_experts"]]
    return [str(flag) for flag in flags]


def nemo():
    from types import SimpleNamespace

    from megatron.core.transformer.transformer_config import TransformerConfig

    of_provider = {"seq_length", "bf16", "fp16"}

    def check(plan, path):
        sections = {name: SimpleNamespace() for name in ("model", "train", "ddp", "dist", "checkpoint")}
        module_of(path).configure(SimpleNamespace(**sections))
        fields = set(TransformerConfig.__dataclass_fields__) | of_provider
        unknown = set(vars(sections["model"])) - fields
        assert not unknown, f"a model provider has no {unknown}"

    return check


def deepspeed():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed.comm as comm
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config
    from deepspeed.runtime.config import DeepSpeedConfig

    class Groups:
        def __init__(self, size):
            self.size = size

        def get_data_parallel_world_size(self):
            return self.size

    def check(plan, path):
        config = json.loads(path.read_text())
        split = config.get("sequence_parallel_size", 1) * config.get("tensor_parallel", {}).get("autotp_size", 1)
        split *= next((axis["size"] for axis in plan["mesh"] if axis["axis"] == "pp"), 1)
        comm.get_rank, comm.get_world_size = (lambda *_: 0), (lambda *_: plan["gpus"])
        read = DeepSpeedConfig(config, mpu=Groups(plan["gpus"] // split))
        assert read.train_batch_size == plan["workload"]["batch"]
        if "expert_parallel" in config:
            assert parse_autoep_config(config["expert_parallel"]).enabled

    return check


def torchtitan():
    import inspect

    from torch.distributed.pipelining import schedules
    from torchtitan.distributed.parallel_dims import ParallelDims
    from torchtitan.trainer import Trainer

    def check(plan, path):
        module = module_of(path)
        config = module.configure(Trainer.Config())
        config.__post_init__()
        p = config.parallelism
        p.__post_init__()
        known = dict(
            dp_replicate=p.data_parallel_replicate_degree, dp_shard=p.data_parallel_shard_degree, cp=p.context_parallel_degree,
            tp=p.tensor_parallel_degree, pp=p.pipeline_parallel_degree, ep=p.expert_parallel_degree, world_size=plan["gpus"],
            spmd_backend=p.spmd_backend, enable_sequence_parallel=p.enable_sequence_parallel)
        taken = inspect.signature(ParallelDims).parameters
        ParallelDims(**{name: value for name, value in known.items() if name in taken})
        if hasattr(module, "SCHEDULE"):
            rows = module.SCHEDULE.splitlines()
            actions = {i: [schedules._Action.from_str(cell) for cell in row.split(",")] for i, row in enumerate(rows)}
            micro_batches = config.training.local_batch_size // p.pipeline_parallel_microbatch_size
            schedules._validate_schedule(actions, len(rows), len(rows), micro_batches)
        elif p.pipeline_parallel_degree > 1:
            schedules.get_schedule_class(p.pipeline_parallel_schedule)

    return check


def accelerate():
    import accelerate as package

    package.Accelerator = lambda **arguments: arguments

    def check(plan, path):
        arguments = module_of(path).accelerator()
        config = arguments["parallelism_config"]
        replicas = plan["gpus"] // config.total_size
        assert config.total_size * replicas == plan["gpus"] and (replicas == 1 or config.sp_size > 1), repr(config)

    return check


def vllm():
    from vllm.config import ParallelConfig

    names = {"tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size", "prefill-context-parallel-size",
             "decode-context-parallel-size", "cp-kv-cache-interleave-size"}

    def check(plan, path):
        flags = flags_of(path, "$MODEL")
        taken = {name[2:].replace("-", "_"): int(value) for name, value in flags.items() if name[2:] in names}
        others = {"--dtype", "--max-model-len", "--max-num-seqs", "--block-size", "--enable-expert-parallel"}
        unknown = {name for name in flags if name[2:] not in names} - others
        assert not unknown, unknown
        experts = "--enable-expert-parallel" in flags
        config = ParallelConfig(enable_expert_parallel=experts, distributed_executor_backend="mp", nnodes=1, **taken)
        assert config.world_size * config.data_parallel_size == plan["gpus"], config.world_size

    return check


def sglang():
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)

    def check(plan, path):
        flags = flags_of(path, "--model-path" if False else "sglang.launch_server")
        words = []
        for name, value in flags.items():
            words += [name, *([] if value is True else [value] if isinstance(value, str) else value)]
        args = parser.parse_args(words)
        assert args.tp_size * args.pp_size * args.dp_size == plan["gpus"]

    return check


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("ithaca")
    parser.add_argument("--megatron")
    parser.add_argument("--only")
    parser.add_argument("words", nargs="*")
    options = parser.parse_intermixed_args()
    ithaca = str(pathlib.Path(options.ithaca).resolve())
    warnings.simplefilter("ignore")
    makers = {"megatron": (lambda: megatron_whole(options.megatron)) if options.megatron else megatron_core,
              "nemo": nemo, "deepspeed": deepspeed, "torchtitan": torchtitan, "accelerate": accelerate, "vllm": vllm,
              "sglang": sglang}
    lines = [line for line in (pathlib.Path(__file__).parent / "cases.txt").read_text().splitlines()
             if line and not line.startswith("#") and all(word in line for word in options.words)]
    wrong = 0
    for name, maker in makers.items():
        if options.only and name != options.only:
            continue
        try:
            check = maker()
        except ImportError as error:
            print(f"{name}: not installed ({error})", flush=True)
            continue
        right, refused = 0, 0
        for line in lines:
            is_training, is_decoding = "--mode train" in line, "--mode decode" in line
            if name in SERVERS and is_training or name in TRAINERS and is_decoding:
                continue
            with tempfile.TemporaryDirectory() as folder:
                plan, out = pathlib.Path(folder) / "plan.json", pathlib.Path(folder) / "export.py"
                commands = [[ithaca, "plan", *shlex.split(line), "--for", name, "-o", str(plan)],
                            [ithaca, "export", str(plan), "--to", name, "-o", str(out)]]
                failed = None
                for command in commands:
                    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
                    if done.returncode:
                        failed = command[1], done.stderr.strip().splitlines()[0]
                        break
                if failed and failed[0] == "plan":
                    refused += 1
                    print(f"refused: {name}: {line}: {failed[1]}", flush=True)
                    continue
                try:
                    assert failed is None, f"plan --for {name} made a plan that export refuses: {failed}"
                    check(json.loads(plan.read_text()), out)
                    right += 1
                except (Exception, SystemExit) as error:
                    wrong += 1
                    text = out.read_text() if out.exists() else ""
                    print(f"WRONG: {name}: {line}: {type(error).__name__}: {str(error)[-600:]}\n{text}", flush=True)
        print(f"{name}: {right} taken, {refused} requests refused by the planner", flush=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
