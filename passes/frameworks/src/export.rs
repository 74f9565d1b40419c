//! Exports: the text that a framework reads, with notes.

use ithaca_import::Facts;

use crate::change::Refusal;
use crate::comment::Subject;
use crate::framework::Framework;
use crate::layout::Layout;
use crate::setting::{Settings, tree};
use crate::{accelerate, deepspeed, megatron, megatron_text, serving, titan, transformer_engine};

/// An export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// The text of the file.
    pub text: String,
    /// Differences from the plan, calls that the file does not make, and the order of ranks.
    pub notes: Vec<String>,
}

/// The export of a layout that the framework can run; `changed` are the choices of the plan that it has not.
pub fn export(
    framework: Framework,
    layout: &Layout,
    facts: &Facts,
    subject: &Subject,
    changed: &[Refusal],
) -> Export {
    let mut notes: Vec<String> = changed
        .iter()
        .filter_map(|refusal| {
            Some(format!("difference: {}; here: {}", refusal.reason, refusal.change.as_ref()?.text()))
        })
        .collect();
    notes.extend(match framework {
        Framework::Megatron | Framework::Nemo => megatron::notes(layout, facts),
        Framework::Deepspeed => deepspeed::notes(layout, facts),
        Framework::Accelerate => accelerate::notes(layout),
        Framework::Vllm | Framework::Sglang | Framework::TensorrtLlm => {
            serving::notes(layout, framework.title())
        }
        Framework::Torchtitan | Framework::TransformerEngine => Vec::new(),
    });
    let order = framework.order(layout);
    notes.push(order.sentence(framework.title()));
    let head = format!("{}, for {}.", subject.plan, framework.title());
    let comments: Vec<String> = std::iter::once(head).chain(notes.iter().cloned()).collect();
    let text = match framework {
        Framework::Megatron => megatron_text::script(layout, facts, subject, &comments),
        Framework::Nemo => megatron_text::nemo(layout, facts, &comments),
        Framework::Deepspeed => {
            let mut set = Settings::default();
            // Keys that DeepSpeed does not know are ignored.
            set.set("_notes", comments.clone());
            deepspeed::workload(layout, &mut set);
            deepspeed::settings(layout, facts, &mut set);
            let text = serde_json::to_string_pretty(&tree(&set.0));
            text.expect("settings have string keys and finite numbers") + "\n"
        }
        Framework::Torchtitan => titan::text(layout, facts, &comments),
        Framework::Accelerate => accelerate::text(layout, facts, &comments),
        Framework::Vllm => serving::vllm_text(layout, facts, subject, &comments),
        Framework::Sglang => serving::sglang_text(layout, facts, subject, &comments),
        Framework::TensorrtLlm => serving::tensorrt_llm_text(layout, facts, &comments),
        Framework::TransformerEngine => transformer_engine::text(layout, &order, &comments),
    };
    Export { text, notes }
}
