//! The table of frameworks.

use std::fmt;
use std::str::FromStr;

use ithaca_import::Facts;
use ithaca_layout::shard::strategy::CONTEXT_AXES;
use ithaca_layout::shard::{OrderChoice, ShardOptions};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::change::Refusal;
use crate::layout::Layout;
use crate::order::Permutation;
use crate::rules::Rules;
use crate::setting::{Setting, Settings};
use crate::{accelerate, deepspeed, megatron, megatron_text, serving, titan, transformer_engine};

/// A framework that runs layouts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Framework {
    /// Megatron-LM.
    Megatron,
    /// DeepSpeed.
    Deepspeed,
    /// torchtitan.
    Torchtitan,
    /// accelerate.
    Accelerate,
    /// NeMo (Megatron-Bridge).
    Nemo,
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
    /// TensorRT-LLM.
    TensorrtLlm,
    /// TransformerEngine.
    TransformerEngine,
}

ithaca_ir::spellings! {
    Framework {
        Megatron = "megatron",
        Deepspeed = "deepspeed",
        Torchtitan = "torchtitan",
        Accelerate = "accelerate",
        Nemo = "nemo",
        Vllm = "vllm",
        Sglang = "sglang",
        TensorrtLlm = "tensorrt-llm",
        TransformerEngine = "transformer-engine",
    }
}

impl Framework {
    /// The name in sentences.
    pub fn title(self) -> &'static str {
        match self {
            Framework::Megatron => "Megatron-LM",
            Framework::Deepspeed => "DeepSpeed",
            Framework::Torchtitan => "torchtitan",
            Framework::Accelerate => "accelerate",
            Framework::Nemo => "NeMo",
            Framework::Vllm => "vLLM",
            Framework::Sglang => "SGLang",
            Framework::TensorrtLlm => "TensorRT-LLM",
            Framework::TransformerEngine => "TransformerEngine",
        }
    }

    /// The rank of the framework that each rank of the mesh is.
    pub fn order(self, layout: &Layout) -> Permutation {
        match self {
            Framework::Megatron | Framework::Nemo => megatron::order(layout),
            Framework::Deepspeed => Permutation::new(layout, &deepspeed::ORDER),
            Framework::Torchtitan => Permutation::new(layout, &titan::ORDER),
            Framework::Accelerate => Permutation::new(layout, &accelerate::ORDER),
            Framework::Vllm | Framework::Sglang | Framework::TensorrtLlm => {
                Permutation::new(layout, &serving::ORDER)
            }
            Framework::TransformerEngine => Permutation::of_mesh(layout),
        }
    }

    /// Whether settings are flags of a command line.
    pub fn is_command(self) -> bool {
        match self {
            Framework::Megatron | Framework::Vllm | Framework::Sglang => true,
            Framework::Deepspeed
            | Framework::Torchtitan
            | Framework::Accelerate
            | Framework::Nemo
            | Framework::TensorrtLlm
            | Framework::TransformerEngine => false,
        }
    }
}

impl fmt::Display for Framework {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Framework {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::parse(text).ok_or_else(|| Self::ALL.map(Self::name).join(", "))
    }
}

/// The choices of a layout that a framework cannot run, each with the nearest that it can.
pub fn check(framework: Framework, layout: &Layout, facts: &Facts) -> Vec<Refusal> {
    let mut rules = Rules { layout, facts, title: framework.title(), refusals: Vec::new() };
    match framework {
        Framework::Megatron | Framework::Nemo => megatron::check(&mut rules),
        Framework::Deepspeed => deepspeed::check(&mut rules),
        Framework::Torchtitan => titan::check(&mut rules),
        Framework::Accelerate => accelerate::check(&mut rules),
        Framework::Vllm => serving::vllm(&mut rules),
        Framework::Sglang => serving::sglang(&mut rules),
        Framework::TensorrtLlm => serving::tensorrt_llm(&mut rules),
        Framework::TransformerEngine => transformer_engine::check(&mut rules),
    }
    rules.refusals
}

/// The settings of a layout, in the names of a framework.
pub fn settings(framework: Framework, layout: &Layout, facts: &Facts) -> Vec<Setting> {
    let mut set = Settings::default();
    match framework {
        Framework::Megatron => megatron::settings(layout, facts, &mut set),
        Framework::Nemo => return megatron_text::nemo_settings(layout, facts, false),
        Framework::Deepspeed => deepspeed::settings(layout, facts, &mut set),
        Framework::Torchtitan => titan::settings(layout, facts, &mut set),
        Framework::Accelerate => accelerate::settings(layout, facts, &mut set),
        Framework::Vllm => serving::vllm_settings(layout, facts, &mut set),
        Framework::Sglang => serving::sglang_settings(layout, facts, &mut set),
        Framework::TensorrtLlm => serving::tensorrt_llm_settings(layout, facts, &mut set),
        Framework::TransformerEngine => transformer_engine::settings(layout, &mut set),
    }
    set.0
}

/// Options of a layout that a search tries for a framework: the token order is the framework's where none is asked for.
#[must_use]
pub fn prepare(framework: Framework, options: ShardOptions) -> ShardOptions {
    let splits = |axis: &str| CONTEXT_AXES.contains(&axis) && axis != "ulysses";
    let moves = options.mesh.axes.values().any(|axis| axis.size > 1 && splits(&axis.name));
    let order = match framework {
        Framework::Megatron
        | Framework::Nemo
        | Framework::TransformerEngine
        | Framework::Torchtitan
        | Framework::Accelerate
        | Framework::Vllm => Some(OrderChoice::Zigzag),
        Framework::Deepspeed | Framework::Sglang | Framework::TensorrtLlm => None,
    };
    match (options.order, order) {
        (None, Some(order)) if moves => ShardOptions { order: Some(order), ..options },
        _ => options,
    }
}
