class Pages:
    """The pages of each sequence, −1 where it has none yet: a sequence is given pages as it grows."""

    def __init__(self, sequences):
        self.tokens, self.count, self.groups, entries = PAGES or (0, 0, 1, 0)
        self.taken, self.lengths = [0] * self.groups, [0] * sequences
        self.table = torch.full([sequences, entries], -1, dtype=torch.int32)

    def grow(self, more):
        """Gives sequences pages for so many more tokens each."""
        each = self.count // self.groups
        for i, n in enumerate(more if self.tokens else []):
            group, had = i * self.groups // len(more), -(-self.lengths[i] // self.tokens)
            self.lengths[i] += n
            for entry in range(had, -(-self.lengths[i] // self.tokens)):
                if self.taken[group] == each:
                    raise SystemExit(f"the sequences need more than {self.count} pages of {self.tokens} tokens, for which the "
                                     "program was emitted")
                self.table[i, entry] = group * each + self.taken[group]
                self.taken[group] += 1
        return self.table


class Given(dict):
    """Inputs of a step."""

    path = "the inputs of the step"


def one_step(space, program, inputs):
    """A step of a program that decodes: the token after it of each sequence and its logits, on process 0."""
    global INPUTS
    INPUTS = inputs
    for key in [key for key in space.stored if key[0] == "input"]:
        del space.stored[key]
    with within(space):
        whole = assembled(outputs_of(step(program)) if here.rank is not None else [])
    return whole.get("token"), whole.get("logits")


def is_first():
    return os.environ.get("RANK", "0") == "0"


def indices(pieces, side):
    """The indices of pieces in a part of a sender, or of a receiver: lists of `(from, to, length, count, steps)`."""
    return torch.cat([(torch.arange(count)[:, None] * steps[side] + first[side] + torch.arange(length)).reshape(-1)
                      for *first, length, count, steps in pieces]).to(DEVICE)


def state_key(name, sizes, micro_batch):
    """Where a state of these sizes is kept: the whole of it, or the sequences of a micro-batch `(index, count)`."""
    if micro_batch is None:
        return "state", name, "None", "None"
    index, count = micro_batch
    view = (sizes[0] // count, count, *sizes[1:])
    window = tuple((index, index + 1) if i == 1 else (0, n) for i, n in enumerate(view))
    return "state", name, str(view), str(window)


def hand_over(of_prompts, of_tokens, i):
    """Moves states from where prompts have left them to the ranks that continue them; others stay where they are."""
    moved = {name for names, *_ in HANDOVER for name in names}
    for where, stored in of_prompts.stored.items():
        if where[0] == "state" and where[1] not in moved:
            of_tokens.stored[where] = stored
    outgoing, incoming = collections.defaultdict(list), collections.defaultdict(list)
    for names, micro_batches, text, rounds in HANDOVER:
        ty, moves = parse(text), rounds[i]
        with within(of_tokens):
            sizes = [stored_size(dim) for dim in ty.dims]
        sizes[0] *= micro_batches[1][1] if micro_batches[1] else 1
        for name in names:
            left = state_key(name, [sizes[0] // ROUNDS, *sizes[1:]], micro_batches[0])
            read = state_key(name, sizes, micro_batches[1])
            if read not in of_tokens.stored and any(move[1] == of_tokens.rank for move in itertools.chain(*rounds)):
                empty = torch.zeros(of_tokens.shape(ty), dtype=ty.dtype, device=DEVICE)
                of_tokens.stored[read] = (empty, text, {})
            for giver, taker, pieces in moves:
                if giver == of_prompts.rank:
                    x = of_prompts.stored[left][0]
                    for dim, of_dim in enumerate(pieces):
                        x = x.index_select(dim, indices(of_dim, 0))
                    outgoing[of_tokens.process(taker)].append(x.reshape(-1).view(torch.uint8))
                if taker == of_tokens.rank:
                    incoming[of_prompts.process(giver)].append((read, [indices(of_dim, 1) for of_dim in pieces]))
    process, transfers, messages = int(os.environ.get("RANK", "0")), [], {}
    for peer, parts in sorted(outgoing.items()):
        if peer == process:
            messages[peer] = torch.cat(parts)
        else:
            transfers.append(dist.P2POp(dist.isend, torch.cat(parts), peer))
    bytes_of = lambda where, index: math.prod(map(len, index)) * of_tokens.stored[where][0].element_size()
    for peer, parts in sorted(incoming.items()):
        if peer != process:
            messages[peer] = torch.empty(sum(bytes_of(*part) for part in parts), dtype=torch.uint8, device=DEVICE)
            transfers.append(dist.P2POp(dist.irecv, messages[peer], peer))
    for work in dist.batch_isend_irecv(transfers) if transfers else []:
        work.wait()
    for peer, parts in incoming.items():
        offset = 0
        for where, index in parts:
            x, end = of_tokens.stored[where][0], offset + bytes_of(where, index)
            part = messages[peer][offset:end].clone().view(x.dtype).view([len(i) for i in index])
            x[torch.meshgrid(*index, indexing="ij") if index else ()] = part
            offset = end


def generate(spaces, programs, prompts, lengths, steps, forced=None):
    """The tokens `[sequence step]` that follow prompts, and their logits; with `forced`, those that follow its tokens."""
    (of_prompts, of_tokens), (prompt_program, token_program) = spaces, programs
    is_whole = forced is not None
    rounds, moves = 1 if is_whole else ROUNDS, not is_whole and HANDOVER is not None
    if not moves:
        of_tokens.stored = of_prompts.stored
    sequences = len(lengths)
    chunk, pages = of_prompts.dims[CHUNK].data, Pages(sequences)
    first, each = [None] * sequences, sequences // rounds
    for i in range(rounds):
        rows = range(i * each, (i + 1) * each)
        for start in range(0, max(lengths[row] for row in rows), chunk):
            more = [min(max(lengths[row] - start, 0), chunk) for row in rows]
            ids = torch.zeros([each, chunk], dtype=torch.int32)
            part = prompts[rows.start:rows.stop, start:start + chunk]
            ids[:, :part.shape[1]] = part
            table = pages.grow(more)
            inputs = Given(input_ids=ids, new_tokens=torch.tensor(more, dtype=torch.int32), pages=table)
            began = time.perf_counter()
            token, logits = one_step(of_prompts, prompt_program, inputs)
            if is_first() and not is_whole:
                print(f"prompts, tokens from {start}: {time.perf_counter() - began:.3f} s")
            for at, row in enumerate(rows):
                if token is not None and start < lengths[row] <= start + chunk:
                    first[row] = (token[at], logits[at])
        if moves:
            hand_over(of_prompts, of_tokens, i)
            if rounds > 1:
                of_prompts.stored = {where: stored for where, stored in of_prompts.stored.items() if where[0] != "state"}
    found, last = [first], None
    for i in range(steps):
        inputs = Given(new_tokens=torch.ones(sequences, dtype=torch.int32), pages=pages.grow([1] * sequences))
        if is_whole:
            for key, (x, text, place) in list(of_tokens.stored.items()):
                if key[:2] == ("state", "cache.token"):
                    of_tokens.stored[key] = (forced[:, i].to(x), text, place)
        began = time.perf_counter()
        token, logits = one_step(of_tokens, token_program, inputs)
        last = time.perf_counter() - began
        found.append([(token[j], logits[j]) for j in range(sequences)] if token is not None else None)
    if not is_first():
        return None
    if last is not None and not is_whole:
        print(f"a token: {last:.4f} s")
    return {"tokens": torch.stack([torch.stack([token for token, _ in column]) for column in found], 1),
            "step_logits": torch.stack([torch.stack([logits for _, logits in column]) for column in found], 1)}


def decode():
    args = arguments()
    start(args)
    file = Checkpoint(args.inputs)
    prompts, lengths = file["prompt_ids"].to(torch.int32), file["prompt_lengths"].flatten().tolist()
    PROMPTS.join(int(os.environ.get("RANK", "0")))
    if (PROMPTS.mesh, PROMPTS.processes) == (RANKS.mesh, RANKS.processes):
        PROMPTS.groups = RANKS.groups
    if dist.is_initialized():
        with within(PROMPTS):
            groups(PROMPT_AXES)
    if len(lengths) != SEQUENCES or len(prompts) != SEQUENCES:
        raise SystemExit(f"{args.inputs} has {len(lengths)} prompts, and the program was emitted for {SEQUENCES}")
    if min(lengths) < 1 or max(lengths) > prompts.shape[1]:
        raise SystemExit(f"{args.inputs}: a prompt of {min(lengths)} to {max(lengths)} tokens among {prompts.shape[1]}")
    if max(lengths) + args.steps > CONTEXT:
        raise SystemExit(f"a prompt of {max(lengths)} tokens and {args.steps} steps do not fit a cache of {CONTEXT}")
    with within(RANKS):
        found = generate((PROMPTS, RANKS), (prompts_main, ranks_main), prompts, lengths, args.steps)
        right = True
        if found is not None:
            for i, tokens in enumerate(found["tokens"].tolist()):
                print(f"sequence {i}:", *tokens)
            save(found, args.output)
            if args.expect:
                expected = Checkpoint(args.expect)
                n = args.steps + 1
                right &= compare(found, {name: expected[name][:, :n] for name in found if name in expected}, args.tolerance,
                                 args.expect)
            if args.self_check:
                with within(WHOLE):
                    alone = generate((WHOLE_PROMPTS, WHOLE), (whole_prompts_main, whole_main), prompts, lengths, args.steps,
                                     found["tokens"])
                right &= compare(found, alone, args.tolerance, "the whole program")
        finish(right)
