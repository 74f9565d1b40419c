# Training by PyTorch's own differentiation. A step on all ranks is one function of every rank's copies of the weights, and a
# collective is linear: its adjoint returns gradients to the ranks that sent the values, which add them. Where ranks hold the same
# loss, each starts with its share of the gradient; a weight's gradient is the sum over the ranks that hold the same part of it.
NOTHING = -1e30  # the lse of a query that sees no key; -inf would have no gradient


class Arrived(torch.autograd.Function):
    """The results of a collective."""

    @staticmethod
    def forward(ctx, finish, adjoint, *sent):
        ctx.adjoint = adjoint
        results = finish()
        return tuple(results) if isinstance(results, list) else results

    @staticmethod
    def backward(ctx, *gradients):
        back = ctx.adjoint(gradients)
        return None, None, *(back if isinstance(back, list) else [back])


def with_adjoint(start_of, kind, axes, parcels, group=None):
    """A collective whose results have gradients."""
    values = [x for x, _, _ in parcels]
    pending = start_of(kind, axes, [(x.detach(), start, end) for x, start, end in parcels], group)
    if not any(x.requires_grad for x in values):
        return pending

    def adjoint(gradients):
        back = [(d.contiguous(), end, start) for d, (_, start, end) in zip(gradients, parcels)]
        return start_of(kind, axes, back, group, adjoint=True).wait()

    return Pending([], lambda: Arrived.apply(pending.wait, adjoint, *values))


class Attended(torch.autograd.Function):
    """Attention of the keys that this rank holds, with lse, whose backward pass computes probabilities again."""

    @staticmethod
    def forward(ctx, attend, types, given, q, k, v, *more):
        o, lse = attend(q, k, v, *more, types=types, returns="part", **given)
        lse = lse.clamp(min=NOTHING)
        ctx.types, ctx.given, ctx.n_more = types, given, len(more)
        ctx.save_for_backward(q, k, v, o, lse, *more)
        return o, lse

    @staticmethod
    def backward(ctx, d_o, d_lse):
        q, k, v, o, lse, *more = ctx.saved_tensors
        delta = (d_o * o).sum(-1) - d_lse
        gradients = attention_backward(q, k, v, d_o, lse, delta, *more, types=ctx.types, **ctx.given)
        rest = [*gradients[3:], *[None] * ctx.n_more][:ctx.n_more]
        return None, None, None, *gradients[:3], *rest


def attention_with_adjoint(attend, q, k, v, *more, types, returns="output", parts=False, **given):
    o, lse = Attended.apply(attend, types, given, q, k, v, *more)
    if returns == "part":
        return (o.unsqueeze(0), lse.unsqueeze(0)) if parts else (o, lse)
    return o.to(q.dtype) if returns == "output" else (o.to(q.dtype), lse)


def trainable(read, name, text, **place):
    x = read(name, text, **place)
    return x.requires_grad_() if x.is_floating_point() else x


def trained_weights():
    """The weights that this rank holds parts of: `(name, type, tensor, place)`."""
    return [(key[1], text, x, place) for key, (x, text, place) in here.stored.items() if key[0] == "param" and x.requires_grad]


def held_alike(text):
    """The axes along which ranks hold the same part of a tensor."""
    split = {axis for axes in parse(text).split for axis in axes}
    return tuple(axis for axis, n in here.mesh.items() if n > 1 and axis not in split)


def descend(program, optimizer=None):
    """A step: the loss, gradients, and the update of the weights. Returns outputs, gradients and the optimizer."""
    results = program()
    text, loss = results["loss"]
    (loss / here.ranks).sum().backward()
    for works, _ in SENT:
        for work in works:
            work.wait()
    SENT.clear()
    weights = trained_weights()
    with torch.no_grad():
        squares = torch.zeros([], device=DEVICE)
        groups(dict.fromkeys(axes for _, text, _, _ in weights if (axes := held_alike(text))))
        for _, text, x, _ in weights:
            x.grad = torch.zeros_like(x) if x.grad is None else x.grad
            if axes := held_alike(text):
                dist.all_reduce(x.grad, group=here.groups[axes])
            n = math.prod(here.mesh[axis] for axis in axes)
            squares += wide(x.grad).square().sum() / n
        if CLIP and here.ranks > 1:
            dist.all_reduce(squares)
        for _, _, x, _ in weights if CLIP else ():
            x.grad *= clip_factor(squares, CLIP)
    gradients = [("grad." + name, text, x.grad.clone(), place) for name, text, x, place in weights]
    optimizer = optimizer or torch.optim.AdamW([x for _, _, x, _ in weights], **ADAMW)
    optimizer.step()
    optimizer.zero_grad()
    outputs = [(name, text, x.detach(), {}) for name, (text, x) in results.items() if x is not None]
    return outputs, gradients, optimizer


def descended(program, steps):
    """Outputs and gradients of the last of some steps, and the weights after it, as files have them; on rank 0."""
    optimizer = None
    for i in range(steps):
        began = time.perf_counter()
        outputs, gradients, optimizer = descend(program, optimizer)
        if here.rank == 0:
            print(f"step {i}: loss {float(outputs[0][2]):.6f}, {time.perf_counter() - began:.3f} s")
    return assembled(outputs + gradients + trained_weights())


def train():
    global INPUTS, collective, attention, weight
    args = arguments()
    start(args)
    INPUTS = Checkpoint(args.inputs)
    # From here on the values that these return have gradients.
    collective, attention, weight = (functools.partial(f, of) for f, of in (
        (with_adjoint, collective), (attention_with_adjoint, attention), (trainable, weight)))
    with within(RANKS):
        found, right = descended(ranks_main, args.steps), True
        if here.rank == 0:
            save(found, args.output)
            if args.expect:
                expected = Checkpoint(args.expect)
                right &= compare(found, {name: expected[name] for name in found if name in expected}, args.tolerance, args.expect)
            if args.self_check:
                with within(WHOLE):
                    whole = descended(whole_main, args.steps)
                right &= compare(found, whole, args.tolerance, "the whole program")
        finish(right)
