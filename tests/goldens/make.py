"""Makes the small random models under this directory with the transformers library.

    python tests/goldens/make.py [NAME ...]
    python tests/goldens/make.py gradients
    python tests/goldens/make.py decode NAME ...

Needs torch and transformers (made with versions 2.15 and 5.23 or 5.24, on a CPU). Each directory holds `config.json`,
`model.safetensors` (weights by the library's names) and `io.safetensors`: `input_ids`, `labels`, `logits`, `loss`
(the mean cross-entropy of `labels`, which are not shifted; where some are -100, the mean is over the others) and
`grad.<parameter>` for every tensor of `model.safetensors` that the model uses. T5 has `decoder_input_ids` too, and BERT
`token_type_ids`; BERT without the head of a language model has `last_hidden_state` and `pooler_output` in place of
`labels`, `logits`, `loss` and gradients. Some have `decode.safetensors`: `prompt_ids` of two prompts, padded behind their
`prompt_lengths`, the 24 `tokens` that the library chooses after each by the largest logit, with a cache, and `step_logits`; `decode`
computes them from the files as they stand. `gradients` computes what directories lack, from the files as they stand.

The scale of the random weights is raised above the library's default, so that attention is far from uniform and every
detail of positions, windows and scales shows in the logits.
"""

import json
import pathlib
import sys
import tempfile

import torch
import transformers
from safetensors.torch import load_file, save_file

from models import BUCKETS, CLASSES, CONFIGURATIONS, MODELS, OTHERS, UNLABELLED

HERE = pathlib.Path(__file__).parent

# The prefix of the text part of a model of text and images.
TEXT = "language_model."

# The label of a token that has none.
IGNORED = -100


def model_of(family, model_class, settings):
    """A model with random weights."""
    config = getattr(transformers, CONFIGURATIONS.get(family, f"{family}Config"))(**settings)
    # `eager` is the library's plain arithmetic.
    config._attn_implementation = "eager"
    model = getattr(transformers, model_class)(config).float().eval()
    if family == "T5" and not config.scale_decoder_outputs:
        # Published models of version 1.1 have a table of their own; the library ties it in every model that it makes.
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                # Norms of Gemma add one to their weight.
                base = 0.0 if key.endswith("bias") or family in ("Gemma", "Gemma2", "Gemma3") else 1.0
                parameter.copy_(base + 0.2 * torch.randn_like(parameter))
            else:
                scale = 1.0 if "relative_attention_bias" in key else 0.1
                # Routers decide clearly, so that no choice hangs on the last digit.
                scale = 0.5 if key.endswith(("mlp.gate.weight", "router.weight")) else scale
                parameter.copy_(scale * torch.randn_like(parameter))
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn_like(buffer))
    return model


def save(name, model, tensors):
    directory = HERE / name
    directory.mkdir(exist_ok=True)
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, directory / "io.safetensors")
    sizes = [f.stat().st_size for f in directory.iterdir()]
    ranges = {k: f"{v.abs().max():.2f}" for k, v in tensors.items() if not k.startswith("grad.")}
    print(f"{name}: {sum(sizes)} bytes, at most {ranges}")


def loss_of(logits, labels):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def make(name):
    family, settings, batch, sequence = MODELS[name]
    torch.manual_seed(sum(name.encode()))
    model = model_of(family, CLASSES.get(family, f"{family}ForCausalLM"), settings)
    vocab_size = model.config.get_text_config().vocab_size
    input_ids = torch.randint(0, vocab_size, (batch, sequence))
    labels = torch.randint(0, vocab_size, (batch, sequence))
    for row, start, end in UNLABELLED.get(name, []):
        labels[row, start:end] = IGNORED
    with torch.no_grad():
        logits = model(input_ids=input_ids, use_cache=False).logits
    loss = loss_of(logits, labels)
    save(name, model, dict(input_ids=input_ids, labels=labels, logits=logits, loss=loss.reshape(1)))


def make_other(name):
    model_class, settings, batch, sequence, target = OTHERS[name]
    torch.manual_seed(sum(name.encode()))
    model = model_of("T5" if target else "Bert", model_class, settings)
    config = model.config
    inputs = dict(input_ids=torch.randint(0, config.vocab_size, (batch, sequence)))
    if target:
        inputs["decoder_input_ids"] = torch.randint(0, config.vocab_size, (batch, target))
    else:
        inputs["token_type_ids"] = torch.randint(0, config.type_vocab_size, (batch, sequence))
    with torch.no_grad():
        outputs = model(**inputs)
    if model_class == "BertModel":
        expected = dict(last_hidden_state=outputs.last_hidden_state, pooler_output=outputs.pooler_output)
    else:
        labels = torch.randint(0, config.vocab_size, outputs.logits.shape[:2])
        loss = loss_of(outputs.logits, labels)
        expected = dict(labels=labels, logits=outputs.logits, loss=loss.reshape(1))
    save(name, model, dict(inputs, **expected))


def load(directory):
    """The model of a directory, in the library's plain arithmetic."""
    config = transformers.AutoConfig.from_pretrained(directory)
    model_class = getattr(transformers, config.architectures[0])
    model = model_class.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()
    if config.model_type == "t5" and not config.scale_decoder_outputs:
        head = load_file(directory / "model.safetensors")["lm_head.weight"]
        model.lm_head.weight = torch.nn.Parameter(head)
    return model


def stored_gradients(model):
    """Gradients by the names of the file, with tied parameters once; those of parameters that nothing uses are left out.

    The library itself names them: it saves a model that has gradients in place of weights.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            used = parameter.grad is not None
            parameter.data = parameter.grad.clone() if used else torch.full_like(parameter, torch.nan)
        # Biases of routers are saved, too, and have no gradient.
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.fill_(torch.nan)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        gradients = load_file(pathlib.Path(folder) / "model.safetensors")
    used = {key: gradient for key, gradient in gradients.items() if not gradient.isnan().all()}
    # Of a model of text and images there is the text part.
    return {f"grad.{key.removeprefix(TEXT)}": gradient for key, gradient in used.items()}


def add_gradients(directory):
    """Adds gradients to `io.safetensors` where there is a loss and no gradient; nothing else changes."""
    tensors = load_file(directory / "io.safetensors")
    if "loss" not in tensors or any(key.startswith("grad.") for key in tensors):
        return
    model = load(directory)
    inputs = {key: tensors[key] for key in ("input_ids", "decoder_input_ids", "token_type_ids") if key in tensors}
    logits = model(**inputs).logits
    loss = loss_of(logits, tensors["labels"])
    # That the stored numbers come out again says that model, inputs and loss are those of the files.
    torch.testing.assert_close(logits.detach(), tensors["logits"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss.detach().reshape(1), tensors["loss"], rtol=1e-6, atol=1e-6)
    loss.backward()
    gradients = stored_gradients(model)
    stored = load_file(directory / "model.safetensors")
    stored = {key.removeprefix(TEXT): tensor for key, tensor in stored.items()}
    strange = [key for key in gradients if stored[key.removeprefix("grad.")].shape != gradients[key].shape]
    assert not strange, strange
    tensors.update(gradients)
    save_file({k: v.contiguous() for k, v in tensors.items()}, directory / "io.safetensors")
    print(f"{directory.name}: {len(gradients)} gradients, {(directory / 'io.safetensors').stat().st_size} bytes")


def add_tokens(directory):
    """Adds `decode.safetensors`: two prompts, each continued by itself with a cache."""
    torch.manual_seed(7)
    model = load(directory)
    lengths, steps = (40, 17), 24
    prompts = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    tokens = torch.zeros(len(lengths), steps, dtype=torch.int64)
    logits = []
    for row, length in enumerate(lengths):
        prompts[row, :length] = torch.randint(0, model.config.get_text_config().vocab_size, (length,))
        ids, past, of_steps, more, tokens_of = prompts[row : row + 1, :length], None, [], {}, "input_ids"
        if model.config.is_encoder_decoder:
            with torch.no_grad():
                more = dict(encoder_outputs=model.get_encoder()(input_ids=ids))
            # Those of the library's own generation, where the configuration names no first token.
            first = getattr(model.config, "decoder_start_token_id", None)
            ids = torch.tensor([[model.config.pad_token_id if first is None else first]])
            tokens_of = "decoder_input_ids"
        for step in range(steps):
            with torch.no_grad():
                out = model(**{tokens_of: ids}, **more, past_key_values=past, use_cache=True)
            past = out.past_key_values
            of_steps.append(out.logits[0, -1])
            ids = out.logits[:, -1].argmax(-1, keepdim=True)
            tokens[row, step] = ids
        logits.append(torch.stack(of_steps))
    found = dict(prompt_ids=prompts, prompt_lengths=torch.tensor(lengths), tokens=tokens,
                 step_logits=torch.stack(logits).contiguous())
    save_file(found, directory / "decode.safetensors")
    print(f"{directory.name}: {tokens.tolist()}")


def make_buckets():
    """The bucket of every relative position, by the library, for some settings."""
    bucket = transformers.models.t5.modeling_t5.T5Attention._relative_position_bucket
    offsets = torch.arange(-2000, 2001)
    tables = []
    for sides, buckets, distance in BUCKETS:
        found = bucket(offsets, bidirectional=sides == "both", num_buckets=buckets, max_distance=distance)
        first, last = offsets[0].item(), found[0].item()
        starts = [[first, last]]
        for offset, value in zip(offsets.tolist(), found.tolist()):
            if value != last:
                starts.append([offset, value])
                last = value
        tables.append(dict(sides=sides, buckets=buckets, max_distance=distance, end=2001, starts=starts))
    text = ",\n".join(json.dumps(table) for table in tables)
    (HERE / "t5-buckets.json").write_text(f"[\n{text}\n]\n")
    print(f"t5-buckets: {len(tables)} tables")


if __name__ == "__main__":
    if sys.argv[1:2] == ["decode"]:
        for name in sys.argv[2:]:
            add_tokens(HERE / name)
        sys.exit()
    for name in sys.argv[1:] or [*MODELS, *OTHERS, "t5-buckets"]:
        if name == "t5-buckets":
            make_buckets()
        elif name == "gradients":
            for directory in sorted(HERE.iterdir()):
                if (directory / "io.safetensors").is_file():
                    add_gradients(directory)
        else:
            (make_other if name in OTHERS else make)(name)
            add_gradients(HERE / name)
