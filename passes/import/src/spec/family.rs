//! Families of decoders.

/// A family of decoders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    Phi3,
    Gemma2,
    Olmo2,
    Starcoder2,
    GptNeox,
    Gpt2,
    Mixtral,
    Qwen3Moe,
    DeepseekV3,
}

impl Family {
    /// Every family.
    pub(crate) const ALL: [Family; 13] = [
        Family::Llama,
        Family::Mistral,
        Family::Qwen2,
        Family::Qwen3,
        Family::Phi3,
        Family::Gemma2,
        Family::Olmo2,
        Family::Starcoder2,
        Family::GptNeox,
        Family::Gpt2,
        Family::Mixtral,
        Family::Qwen3Moe,
        Family::DeepseekV3,
    ];

    /// The family's `model_type`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Family::Llama => "llama",
            Family::Mistral => "mistral",
            Family::Qwen2 => "qwen2",
            Family::Qwen3 => "qwen3",
            Family::Phi3 => "phi3",
            Family::Gemma2 => "gemma2",
            Family::Olmo2 => "olmo2",
            Family::Starcoder2 => "starcoder2",
            Family::GptNeox => "gpt_neox",
            Family::Gpt2 => "gpt2",
            Family::Mixtral => "mixtral",
            Family::Qwen3Moe => "qwen3_moe",
            Family::DeepseekV3 => "deepseek_v3",
        }
    }
}
