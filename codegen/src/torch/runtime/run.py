def groups(of):
    """Makes the process groups that there are not yet, in the same order on every rank."""
    for axes in of:
        if axes in here.groups:
            continue
        if isinstance(axes, str):
            # Transfers between stages, which wait for no others.
            here.groups[axes] = dist.new_group([here.process(rank) for rank in range(here.ranks)])
            continue
        for rank in range(here.ranks):
            members = sorted(here.along(rank, axes))
            if members[0] == rank:
                group = dist.new_group([here.process(member) for member in members])
                if here.rank in members:
                    here.groups[axes] = group


def step(program):
    """Runs a step; its outputs by name, with their types."""
    with torch.no_grad():
        results = program()
    for works, _ in SENT:
        for work in works:
            work.wait()
    SENT.clear()
    return results


def outputs_of(results):
    return [(name, text, x, {}) for name, (text, x) in results.items() if x is not None]


def compare(found, expected, tolerance, what):
    """Prints the largest error of each tensor; whether all are within the tolerance.

    A tensor that is zero but for rounding (the gradient of a bias of keys) has no relative error:
    its elements are within the rounding of the largest element of its kind."""
    right, common = True, sorted(found.keys() & expected.keys())
    scales = {}
    for name in common:
        if expected[name].numel():
            kind = name.partition(".")[0]
            scales[kind] = max(scales.get(kind, 0.0), float(expected[name].abs().max()))
    for name in common:
        a, b = found[name].double().flatten(), expected[name].double().flatten()
        same = a.shape == b.shape
        error = (a - b).norm() / b.norm().clamp(min=1e-30) if same else math.inf
        largest = float((a - b).abs().max()) if same and a.numel() else 0.0
        kind = name.partition(".")[0] if name.startswith("grad.") else name
        rounding = torch.finfo(found[name].dtype).eps if found[name].is_floating_point() else 0.0
        passed = bool(error <= tolerance or same and largest <= rounding * scales.get(kind, 0.0))
        right &= passed
        print(f"{name}: relative error {float(error):.2e}, largest {largest:.2e}: {'right' if passed else 'WRONG'}")
    if not common:
        raise SystemExit(f"{what} has none of the tensors {', '.join(sorted(found))}")
    return right


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True, help="a safetensors file, or a folder of them")
    parser.add_argument("--inputs", required=True, help="a safetensors file")
    parser.add_argument("--expect", help="a safetensors file with outputs, gradients or weights to compare with")
    parser.add_argument("--output", help="writes outputs, states and weights after the last step to this file")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="the largest relative error [default: 1e-4]")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--self-check", action="store_true", help="also runs the whole program on rank 0 and compares")
    parser.add_argument("--compile", action="store_true", help="compiles the functions of layers by torch.compile")
    parser.add_argument("--profile", metavar="FILE", help="writes the last step of rank 0 as a trace for Perfetto")
    return parser.parse_args()


def profiler(path, is_last):
    if not (path and is_last and here.rank == 0):
        return contextlib.nullcontext()
    return torch.profiler.profile()


def whole_program(steps):
    """The results of the whole program on this rank alone."""
    with within(WHOLE):
        for _ in range(steps):
            results = step(whole_main)
        return assembled(outputs_of(results) + kept())


def start(args):
    """Joins the ranks."""
    global WEIGHTS, DEVICE
    world, ranks = int(os.environ.get("WORLD_SIZE", "1")), 1 + max(map(RANKS.process, range(RANKS.ranks)))
    RANKS.join(int(os.environ.get("RANK", "0")))
    if world != ranks:
        raise SystemExit(f"this program has {ranks} ranks, and {world} run: torchrun --nproc-per-node {ranks}")
    if torch.cuda.is_available():
        # With fewer GPUs than ranks, NCCL 2.30.3 and later run several ranks on one.
        DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(DEVICE)
    WEIGHTS = Checkpoint(args.weights)
    if args.compile:
        for name in BLOCKS:
            globals()[name] = torch.compile(globals()[name], dynamic=False)
    with within(RANKS):
        if world > 1:
            dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")
            groups(AXES)


def finish(right):
    """Ends every rank with the verdict of rank 0."""
    if dist.is_initialized():
        verdict = [right]
        dist.broadcast_object_list(verdict, 0)
        right = verdict[0]
        dist.destroy_process_group()
    sys.exit(0 if right else 1)


def save(tensors, path):
    from safetensors.torch import save_file

    if path:
        save_file({name: x.contiguous() for name, x in tensors.items()}, path)


def main():
    global INPUTS
    args = arguments()
    start(args)
    INPUTS = Checkpoint(args.inputs)
    with within(RANKS):
        for i in range(args.steps):
            began = time.perf_counter()
            with profiler(args.profile, i == args.steps - 1) as trace:
                results = step(ranks_main)
                if DEVICE.type == "cuda":
                    torch.cuda.synchronize()
            if here.rank == 0:
                print(f"step {i}: {time.perf_counter() - began:.3f} s")
        if trace is not None:
            trace.export_chrome_trace(args.profile)
        right = True
        found = assembled(outputs_of(results) + (kept() if args.expect or args.output or args.self_check else []))
        if here.rank == 0:
            for name in results:
                if name in found and found[name].numel() == 1:
                    print(f"{name} {found[name].item():.6f}")
            save(found, args.output)
            if args.expect:
                expected = Checkpoint(args.expect)
                right &= compare(found, {name: expected[name] for name in found if name in expected}, args.tolerance, args.expect)
            if args.self_check:
                right &= compare(found, whole_program(args.steps), args.tolerance, "the whole program")
        finish(right)


DEVICE = torch.device("cpu")
