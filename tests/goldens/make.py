"""Makes the small random models under this directory with the transformers library.

    python tests/goldens/make.py [NAME ...]

Needs torch and transformers (made with versions 2.15 and 5.23, on a CPU). Each directory holds `config.json`,
`model.safetensors` (weights by the library's names) and `io.safetensors`: `input_ids`, `labels`, `logits`, `loss`
(the mean cross-entropy of `labels`, which are not shifted) and, for the models made with them, `grad.<parameter>`.

The scale of the random weights is raised above the library's default, so that attention is far from uniform and every
detail of positions, windows and scales shows in the logits.
"""

import json
import pathlib
import sys

import torch
import transformers
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).parent

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
}

GRADIENTS = {"qwen3-head-dim", "phi3-fused", "gpt2-inner-gelu"}


def make(name):
    family, settings, batch, sequence = MODELS[name]
    torch.manual_seed(sum(name.encode()))
    config = getattr(transformers, f"{family}Config")(**settings)
    # `eager` is the library's plain arithmetic.
    config._attn_implementation = "eager"
    model_class = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    model = getattr(transformers, model_class)(config).float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                # Norms of Gemma add one to their weight.
                base = 0.0 if key.endswith("bias") or family == "Gemma2" else 1.0
                parameter.copy_(base + 0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    input_ids = torch.randint(0, config.vocab_size, (batch, sequence))
    labels = torch.randint(0, config.vocab_size, (batch, sequence))
    logits = model(input_ids=input_ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    tensors = dict(input_ids=input_ids, labels=labels, logits=logits.detach(), loss=loss.detach().reshape(1))
    if name in GRADIENTS:
        loss.backward()
        tensors.update({f"grad.{k}": p.grad.clone() for k, p in model.named_parameters()})
    directory = HERE / name
    directory.mkdir(exist_ok=True)
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, directory / "io.safetensors")
    sizes = [f.stat().st_size for f in directory.iterdir()]
    print(f"{name}: {sum(sizes)} bytes, logits up to {logits.abs().max():.2f}, loss {loss.item():.4f}")


if __name__ == "__main__":
    for name in sys.argv[1:] or MODELS:
        make(name)
