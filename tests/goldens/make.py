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

HERE = pathlib.Path(__file__).parent

# The prefix of the text part of a model of text and images.
TEXT = "language_model."

# The label of a token that has none.
IGNORED = -100

COMMON = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=256,
    attention_dropout=0.0,
)

NEOX = {key: value for key, value in COMMON.items() if key != "num_key_value_heads"}

DEEPSEEK = dict(vocab_size=128, hidden_size=64, intermediate_size=40, moe_intermediate_size=16, num_attention_heads=4,
                num_key_value_heads=4, kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10,
                max_position_embeddings=256, attention_dropout=0.0)

# name: (class, configuration, batch, sequence)
MODELS = {
    "llama-biases-one-kv-head": (
        "Llama",
        dict(COMMON, num_key_value_heads=1, attention_bias=True, mlp_bias=True, hidden_act="gelu_pytorch_tanh",
             rms_norm_eps=1e-3, rope_parameters=dict(rope_type="default", rope_theta=500.0)),
        1, 48,
    ),
    "llama-rope-linear": (
        "Llama",
        dict(COMMON, num_key_value_heads=8, head_dim=8, hidden_act="relu",
             rope_parameters=dict(rope_type="linear", rope_theta=1000.0, factor=4.0)),
        1, 48,
    ),
    "llama-rope-llama3": (
        "Llama",
        dict(COMMON, head_dim=16, tie_word_embeddings=True,
             rope_parameters=dict(rope_type="llama3", rope_theta=5000.0, factor=8.0, low_freq_factor=1.0,
                                  high_freq_factor=4.0, original_max_position_embeddings=64)),
        2, 40,
    ),
    "llama-rope-yarn": (
        "Llama",
        dict(COMMON, head_dim=16,
             rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0,
                                  original_max_position_embeddings=64)),
        2, 40,
    ),
    "qwen3-rope-yarn-mscale": (
        "Qwen3",
        dict(COMMON, head_dim=16, attention_bias=True, num_hidden_layers=2,
             rope_parameters=dict(rope_type="yarn", rope_theta=2000.0, factor=8.0, beta_fast=16, beta_slow=2,
                                  mscale=0.7, mscale_all_dim=1.3, truncate=False,
                                  original_max_position_embeddings=512)),
        1, 48,
    ),
    "mistral-window-head-dim": (
        "Mistral",
        dict(COMMON, head_dim=16, sliding_window=7, num_key_value_heads=2,
             rope_parameters=dict(rope_type="default", rope_theta=100.0)),
        2, 40,
    ),
    "mistral-no-window": (
        "Mistral",
        dict(COMMON, head_dim=4, sliding_window=None, hidden_act="gelu"),
        1, 33,
    ),
    "qwen2-tied-mixed-windows": (
        "Qwen2",
        dict(COMMON, num_hidden_layers=4, tie_word_embeddings=True, use_sliding_window=True,
             sliding_window=5,
             layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"]),
        1, 40,
    ),
    "qwen2-late-windows": (
        "Qwen2",
        dict(COMMON, num_hidden_layers=3, use_sliding_window=True, sliding_window=9,
             max_window_layers=1, num_key_value_heads=2,
             rope_parameters=dict(rope_type="default", rope_theta=1000000.0)),
        1, 40,
    ),
    "qwen3-head-dim": (
        "Qwen3",
        dict(COMMON, head_dim=16, tie_word_embeddings=True, rms_norm_eps=1e-5,
             rope_parameters=dict(rope_type="default", rope_theta=1000000.0)),
        2, 40,
    ),
    "phi3-fused": (
        "Phi3",
        dict(COMMON, pad_token_id=0, rms_norm_eps=1e-4),
        2, 40,
    ),
    "phi3-partial-window": (
        "Phi3",
        dict(COMMON, pad_token_id=0, head_dim=16, sliding_window=11, num_key_value_heads=2,
             rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.75)),
        1, 40,
    ),
    "gpt2-inner-gelu": (
        "GPT2",
        dict(vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_inner=80, n_positions=64, activation_function="gelu",
             layer_norm_epsilon=1e-3, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=False),
        1, 64,
    ),
    "gpt2-scaled-by-layer": (
        "GPT2",
        dict(vocab_size=128, n_embd=64, n_layer=3, n_head=8, n_inner=64, n_positions=48,
             scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True, resid_pdrop=0.0, embd_pdrop=0.0,
             attn_pdrop=0.0),
        2, 40,
    ),
    "olmo2": (
        "Olmo2",
        dict(COMMON, pad_token_id=0, eos_token_id=1, rms_norm_eps=1e-3,
             rope_parameters=dict(rope_type="default", rope_theta=500.0)),
        2, 40,
    ),
    "olmo2-biases-head-dim": (
        "Olmo2",
        dict(COMMON, pad_token_id=0, eos_token_id=1, num_key_value_heads=2, head_dim=16, attention_bias=True,
             tie_word_embeddings=True, hidden_act="gelu"),
        1, 48,
    ),
    "starcoder2-window": (
        "Starcoder2",
        dict(COMMON, bos_token_id=0, eos_token_id=1, num_key_value_heads=2, sliding_window=9, norm_epsilon=1e-3,
             rope_parameters=dict(rope_type="default", rope_theta=1000.0)),
        2, 40,
    ),
    "starcoder2-no-bias": (
        "Starcoder2",
        dict(COMMON, bos_token_id=0, eos_token_id=1, use_bias=False, tie_word_embeddings=False, hidden_act="relu"),
        1, 48,
    ),
    "gpt-neox": (
        "GPTNeoX",
        dict(NEOX, layer_norm_eps=1e-3,
             rope_parameters=dict(rope_type="default", rope_theta=300.0, partial_rotary_factor=0.25)),
        2, 40,
    ),
    "gpt-neox-serial": (
        "GPTNeoX",
        dict(NEOX, use_parallel_residual=False, attention_bias=False, tie_word_embeddings=True,
             hidden_act="gelu_new",
             rope_parameters=dict(rope_type="linear", rope_theta=1000.0, factor=2.0, partial_rotary_factor=1.0)),
        1, 48,
    ),
    "seed-oss": (
        "SeedOss",
        dict(COMMON, head_dim=16, num_key_value_heads=2, attention_out_bias=True, mlp_bias=True, residual_dropout=0.0,
             rope_parameters=dict(rope_type="default", rope_theta=500.0)),
        2, 40,
    ),
    "smollm3": (
        "SmolLM3",
        dict(COMMON, num_hidden_layers=5, pad_token_id=0, bos_token_id=1, eos_token_id=2, no_rope_layer_interval=3,
             use_sliding_window=True, sliding_window=7, no_rope_layers=[1, 0, 1, 0, 1],
             layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention",
                          "full_attention"],
             rope_parameters=dict(rope_type="default", rope_theta=500.0)),
        2, 40,
    ),
    "gemma": (
        "Gemma",
        dict(COMMON, head_dim=16, num_key_value_heads=1, rms_norm_eps=1e-3, hidden_size=72,
             rope_parameters=dict(rope_type="default", rope_theta=500.0)),
        2, 40,
    ),
    "granite": (
        "Granite",
        dict(COMMON, num_key_value_heads=2, attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
             embedding_multiplier=3.5, attention_multiplier=0.21, residual_multiplier=0.4, logits_scaling=1.7,
             rope_parameters=dict(rope_type="default", rope_theta=500.0)),
        2, 40,
    ),
    "arcee": (
        "Arcee",
        dict(COMMON, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-3,
             rope_parameters=dict(rope_type="yarn", rope_theta=500.0, factor=4.0, original_max_position_embeddings=64)),
        1, 48,
    ),
    "ernie4-5": (
        "Ernie4_5",
        dict(COMMON, head_dim=16, num_key_value_heads=2, use_bias=True, rms_norm_eps=1e-3,
             rope_parameters=dict(rope_type="default", rope_theta=300.0)),
        2, 40,
    ),
    "olmo3": (
        "Olmo3",
        dict(COMMON, num_hidden_layers=4, pad_token_id=0, eos_token_id=1, rms_norm_eps=1e-3, sliding_window=7,
             layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
             rope_parameters=dict(
                 sliding_attention=dict(rope_type="default", rope_theta=500000.0),
                 full_attention=dict(rope_type="yarn", rope_theta=500000.0, factor=4.0,
                                     original_max_position_embeddings=64))),
        2, 40,
    ),
    "exaone4": (
        "Exaone4",
        dict(COMMON, num_hidden_layers=4, num_key_value_heads=2, rms_norm_eps=1e-3, sliding_window=7,
             sliding_window_pattern=3, tie_word_embeddings=True,
             rope_parameters=dict(rope_type="default", rope_theta=500.0)),
        2, 40,
    ),
    "minimax-m2": (
        "MiniMaxM2",
        dict(COMMON, head_dim=16, num_key_value_heads=2, intermediate_size=16, num_local_experts=8,
             num_experts_per_tok=4, rms_norm_eps=1e-3,
             rope_parameters=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5)),
        4, 32,
    ),
    "glm4-moe": (
        "Glm4Moe",
        dict(COMMON, num_hidden_layers=3, head_dim=16, num_key_value_heads=2, attention_bias=True, use_qk_norm=True,
             first_k_dense_replace=1, n_routed_experts=8, num_experts_per_tok=4, n_group=1, topk_group=1,
             n_shared_experts=2, moe_intermediate_size=16, routed_scaling_factor=1.5, rms_norm_eps=1e-3,
             rope_parameters=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5)),
        4, 32,
    ),
    "gemma2": (
        "Gemma2",
        dict(COMMON, num_hidden_layers=3, head_dim=16, sliding_window=7, query_pre_attn_scalar=20,
             attn_logit_softcapping=1.5, final_logit_softcapping=2.0, rms_norm_eps=1e-3, hidden_size=72,
             rope_parameters=dict(rope_type="default", rope_theta=500.0)),
        2, 40,
    ),
    "gemma2-uncapped-biases": (
        "Gemma2",
        dict(COMMON, head_dim=8, attention_bias=True, attn_logit_softcapping=None, final_logit_softcapping=None,
             tie_word_embeddings=False, query_pre_attn_scalar=5, sliding_window=5, num_key_value_heads=1,
             layer_types=["full_attention", "sliding_attention"]),
        1, 48,
    ),
    "gemma3": (
        "Gemma3",
        dict(COMMON, num_hidden_layers=3, head_dim=16, sliding_window=7, query_pre_attn_scalar=20, rms_norm_eps=1e-3,
             layer_types=["sliding_attention", "sliding_attention", "full_attention"],
             rope_parameters=dict(
                 sliding_attention=dict(rope_type="default", rope_theta=300.0),
                 full_attention=dict(rope_type="linear", rope_theta=5000.0, factor=4.0))),
        2, 40,
    ),
    "glm4": (
        "Glm4",
        dict(COMMON, head_dim=16, num_key_value_heads=2, pad_token_id=0, eos_token_id=1, rms_norm_eps=1e-3,
             rope_parameters=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5)),
        2, 40,
    ),
    "mistral3": (
        "Mistral3",
        dict(tie_word_embeddings=False,
             text_config=dict(COMMON, model_type="mistral", head_dim=16, num_key_value_heads=2, sliding_window=None,
                              rope_parameters=dict(rope_type="default", rope_theta=500.0)),
             vision_config=dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                                image_size=28, patch_size=14)),
        2, 40,
    ),
    "llama-ignored-labels": (
        "Llama",
        dict(COMMON, vocab_size=64, hidden_size=32, head_dim=4),
        2, 32,
    ),
    "qwen2-tied-ignored-labels": (
        "Qwen2",
        dict(COMMON, vocab_size=96, hidden_size=32, num_key_value_heads=2, tie_word_embeddings=True),
        4, 16,
    ),
    "mixtral": (
        "Mixtral",
        dict(COMMON, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2, bos_token_id=0, eos_token_id=1,
             rope_parameters=dict(rope_type="default", rope_theta=1000.0)),
        4, 32,
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        dict(COMMON, num_hidden_layers=3, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=3, head_dim=16,
             decoder_sparse_step=1, mlp_only_layers=[1], norm_topk_prob=False),
        4, 32,
    ),
    "gpt-oss": (
        "GptOss",
        dict(COMMON, num_hidden_layers=3, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2, head_dim=16,
             sliding_window=7, swiglu_limit=0.9, rms_norm_eps=1e-3,
             rope_parameters=dict(rope_type="yarn", rope_theta=1000.0, factor=4.0, beta_fast=8, beta_slow=1,
                                  truncate=False, original_max_position_embeddings=64)),
        4, 32,
    ),
    "llama4": (
        "Llama4",
        dict(COMMON, num_hidden_layers=4, intermediate_size=24, intermediate_size_mlp=40, num_local_experts=4,
             num_experts_per_tok=1, interleave_moe_layer_step=2, head_dim=16, no_rope_layers=[1, 0, 0, 1],
             attention_chunk_size=7, floor_scale=5, attn_scale=0.3, rms_norm_eps=1e-3,
             rope_parameters=dict(rope_type="llama3", rope_theta=5000.0, factor=8.0, low_freq_factor=1.0,
                                  high_freq_factor=4.0, original_max_position_embeddings=64)),
        4, 32,
    ),
    "deepseek-v3": (
        "DeepseekV3",
        dict(DEEPSEEK, num_hidden_layers=3, first_k_dense_replace=1, n_routed_experts=8, num_experts_per_tok=3,
             n_group=4, topk_group=2, n_shared_experts=2, routed_scaling_factor=2.5, norm_topk_prob=True,
             q_lora_rank=24,
             rope_parameters=dict(rope_type="yarn", rope_theta=1000.0, factor=4.0, beta_fast=8, beta_slow=1,
                                  mscale=0.8, mscale_all_dim=1.2, original_max_position_embeddings=64)),
        4, 32,
    ),
    "deepseek-v3-whole-queries": (
        "DeepseekV3",
        dict(DEEPSEEK, num_hidden_layers=2, first_k_dense_replace=0, n_routed_experts=4, num_experts_per_tok=2,
             n_group=1, topk_group=1, n_shared_experts=1, routed_scaling_factor=1.0, norm_topk_prob=False,
             q_lora_rank=None, attention_bias=True, rope_interleave=False,
             rope_parameters=dict(rope_type="default", rope_theta=500.0)),
        2, 40,
    ),
}

# Classes of models and of configurations that are not called as their models are.
CLASSES = {"GPT2": "GPT2LMHeadModel", "Mistral3": "Mistral3ForConditionalGeneration"}
CONFIGURATIONS = {"Gemma3": "Gemma3TextConfig", "Llama4": "Llama4TextConfig"}

# Tokens without a label, by model: sequence and range of positions. One sequence has none, ranges are of all lengths.
UNLABELLED = {
    "llama-ignored-labels": [(0, 0, 5), (0, 13, 14), (1, 16, 32)],
    "qwen2-tied-ignored-labels": [(0, 15, 16), (1, 4, 9), (2, 0, 16)],
}

T5 = dict(vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_heads=8, num_layers=2, dropout_rate=0.0)

BERT = dict(vocab_size=64, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=8,
            max_position_embeddings=48, type_vocab_size=3, layer_norm_eps=1e-3, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0)

# name: (class, configuration, batch, sequence, sequence of the decoder)
OTHERS = {
    "t5": (
        "T5ForConditionalGeneration",
        dict(T5, relative_attention_num_buckets=10, relative_attention_max_distance=20),
        2, 40, 24,
    ),
    "t5-gated-own-head": (
        "T5ForConditionalGeneration",
        dict(T5, vocab_size=64, d_model=48, d_kv=12, d_ff=40, num_heads=4, num_layers=1, num_decoder_layers=2,
             feed_forward_proj="gated-gelu", tie_word_embeddings=False, layer_norm_epsilon=1e-3),
        1, 160, 16,
    ),
    "bert": ("BertModel", BERT, 2, 40, None),
    "bert-masked-lm": (
        "BertForMaskedLM",
        dict(BERT, hidden_size=48, num_attention_heads=4, hidden_act="gelu_new"),
        1, 48, None,
    ),
    "bert-masked-lm-own-head": (
        "BertForMaskedLM",
        dict(BERT, hidden_act="relu", tie_word_embeddings=False, num_hidden_layers=1),
        2, 24, None,
    ),
}

# Sides, number of buckets, distance from which on all keys share the last.
BUCKETS = [
    (sides, buckets, distance)
    for buckets, distance in [(32, 128), (32, 256), (32, 1000), (8, 20), (10, 20), (64, 128), (5, 9), (33, 2000)]
    for sides in ("both", "before")
]


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
