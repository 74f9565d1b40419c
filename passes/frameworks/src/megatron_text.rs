//! The texts of exports to Megatron-LM, a shell script, and to NeMo, a Python function.

use std::fmt::Write;

use ithaca_import::{Facts, Mode};
use ithaca_ir::DType;
use ithaca_layout::shard::Zero;

use crate::comment::{Subject, commented};
use crate::layout::Layout;
use crate::megatron;
use crate::setting::{Setting, Settings, python};
use crate::shell;

/// A script that starts `pretrain_gpt.py`.
pub(crate) fn script(layout: &Layout, facts: &Facts, subject: &Subject, notes: &[String]) -> String {
    let (mut parallel, mut others) = (Settings::default(), Settings::default());
    megatron::settings(layout, facts, &mut parallel);
    megatron::workload(layout, facts, &mut others);
    megatron::optimizer(layout, &mut others);
    let has_architecture = megatron::architecture(layout, facts, &mut others);
    let mut out = String::from("#!/usr/bin/env bash\n");
    out += &commented(notes, "# ");
    out += "# Data, tokenizer and checkpoints are arguments of this script.\n";
    if !has_architecture {
        let _ = writeln!(
            out,
            "# So is the architecture of {}, which no flags of a common decoder describe.",
            subject.model
        );
    }
    out += "set -euo pipefail\n";
    let is_fsdp = layout.mode == Mode::Train && matches!(layout.zero, Zero::Gradients | Zero::Parameters);
    if layout.tensor() * layout.context() > 1 && !is_fsdp {
        // Megatron-LM refuses to start without it up to Hopper, and with it under its FSDP.
        out += "export CUDA_DEVICE_MAX_CONNECTIONS=1\n";
    }
    let head = format!("exec {} pretrain_gpt.py", shell::torchrun(layout, subject));
    out + &shell::command(&head, &[&parallel.0, &others.0])
}

/// The section of NeMo's configuration that has a setting, and its name there.
fn place(setting: &Setting) -> Option<String> {
    let name = setting.key.replace('-', "_");
    Some(match name.as_str() {
        "num_virtual_stages_per_pipeline_rank" => "model.virtual_pipeline_model_parallel_size".to_owned(),
        "micro_batch_size" | "global_batch_size" => format!("train.{name}"),
        "use_distributed_optimizer" | "data_parallel_sharding_strategy" | "grad_reduce_in_fp32" => {
            format!("ddp.{name}")
        }
        "megatron_fsdp_main_grads_dtype" | "megatron_fsdp_grad_comm_dtype" => format!("ddp.{name}"),
        "use_megatron_fsdp" | "use_tp_pp_dp_mapping" => format!("dist.{name}"),
        "ckpt_format" => format!("checkpoint.{name}"),
        "no_gradient_accumulation_fusion" => "model.gradient_accumulation_fusion".to_owned(),
        "max_position_embeddings" => return None,
        _ => format!("model.{name}"),
    })
}

/// The settings of NeMo.
pub(crate) fn nemo_settings(layout: &Layout, facts: &Facts, is_whole: bool) -> Vec<Setting> {
    let mut set = Settings::default();
    megatron::settings(layout, facts, &mut set);
    if is_whole {
        set.set("micro-batch-size", layout.micro_batch());
        set.set("global-batch-size", layout.batch);
        set.set("seq-length", layout.sequence);
        set.flag("bf16", layout.dtype == DType::BF16);
        set.flag("fp16", layout.dtype == DType::F16);
        if let Some(dtype) = layout.gradients() {
            set.set("grad-reduce-in-fp32", dtype == DType::F32);
        }
        for (key, dtype) in megatron::fsdp_types(layout) {
            set.set(
                key,
                match dtype {
                    DType::BF16 => "torch.bfloat16",
                    DType::F16 => "torch.float16",
                    _ => "torch.float32",
                },
            );
        }
    }
    let value = |s: &Setting| if s.key.starts_with("no-") { false.into() } else { s.value.clone() };
    set.0.iter().filter_map(|s| Some(Setting { key: place(s)?, value: value(s) })).collect()
}

/// A function that sets a `ConfigContainer`.
pub(crate) fn nemo(layout: &Layout, facts: &Facts, notes: &[String]) -> String {
    let mut out = commented(notes, "# ");
    out += "\n\ndef configure(config):\n    \"\"\"Sets the layout in a megatron.bridge.training.config.ConfigContainer.\"\"\"\n";
    let settings = nemo_settings(layout, facts, true);
    if settings.iter().any(is_torch) {
        out += "    import torch\n\n";
    }
    for setting in settings {
        let text = setting.value.as_str().filter(|_| is_torch(&setting)).map(str::to_owned);
        let _ =
            writeln!(out, "    config.{} = {}", setting.key, text.unwrap_or_else(|| python(&setting.value)));
    }
    out + "    return config\n"
}

/// Whether a value is an expression of PyTorch.
fn is_torch(setting: &Setting) -> bool {
    setting.value.as_str().is_some_and(|text| text.starts_with("torch."))
}
