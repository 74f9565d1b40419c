"""The small models that `make.py` makes, by name, and the settings of the buckets of T5."""

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
