//! Assumptions of a plan that no option states: one line for each that holds.

use ithaca_import::{Documents, Logits, Mode, facts, predicts_next, program_text, stored_weights};
use ithaca_ir::DType;
use ithaca_ir::diagnostic::counted;
use ithaca_ir::units::bytes;
use serde_json::Value;

use super::{Plan, Workload};

/// Assumptions of steps of a model that no option states; `dtype` is the element type of weights and activations, `longest` the
/// tokens of the longest sequence.
pub fn model_assumptions(config: &Value, dtype: &str, longest: u64) -> Vec<String> {
    let all = [long_sequence(config, longest), single_precision(config, dtype), converted(config, dtype)];
    all.into_iter().flatten().collect()
}

/// Sequences longer than those of the training of the model; learned positions are refused instead.
fn long_sequence(config: &Value, longest: u64) -> Option<String> {
    let most = config.get("max_position_embeddings")?.as_u64()?;
    (longest > most).then(|| {
        format!(
            "sequences of {longest} tokens exceed `max_position_embeddings`, {most}, of the configuration"
        )
    })
}

/// A configuration in single precision, or without an element type, which is the same.
fn single_precision(config: &Value, dtype: &str) -> Option<String> {
    let stated = ["dtype", "torch_dtype"].into_iter().find_map(|key| config.get(key)?.as_str());
    let stated = stated.map(|name| name.trim_start_matches("torch."));
    if dtype != DType::F32.name() || program_text(config).is_some() {
        return None;
    }
    match stated {
        Some("float32") => Some(
            "weights and activations are f32, as in the configuration; `--dtype bf16` changes that"
                .to_owned(),
        ),
        None => Some(
            "weights and activations are f32: the configuration has no element type; `--dtype bf16` sets one"
                .to_owned(),
        ),
        Some(_) => None,
    }
}

/// Weights that a checkpoint stores in fewer bits.
fn converted(config: &Value, dtype: &str) -> Option<String> {
    let stored = stored_weights(config)?;
    Some(format!(
        "weights are {dtype}, in memory and in prices: those of the checkpoint, `{stored}`, are converted"
    ))
}

impl Plan {
    /// Assumptions that no option states.
    pub fn assumptions(&self) -> Vec<String> {
        let Workload { dtype, sequence, documents, target_sequence, cache, .. } = &self.workload;
        let source = documents.as_ref().map_or(*sequence, Documents::longest);
        let longest = source.max(target_sequence.unwrap_or(0)).max(cache.unwrap_or(0));
        let of_plan = [self.experts(), self.logits(), self.whole_pages(), self.spread_ranks()];
        model_assumptions(&self.model.config, dtype, longest)
            .into_iter()
            .chain(of_plan.into_iter().flatten())
            .collect()
    }

    /// Tokens that experts drop; the bound of those that drop none is among the notes of the layout.
    fn experts(&self) -> Option<String> {
        let is_mixture = self.dimensions.iter().any(|dim| dim.name == "e");
        let capacity = self.workload.capacity.filter(|_| is_mixture)?;
        let factor = capacity.permille as f64 / 1000.0;
        Some(format!("experts drop tokens beyond {factor} times their even share (`--capacity`)"))
    }

    /// Caches in pages keep tokens outside of sliding windows.
    fn whole_pages(&self) -> Option<String> {
        self.workload.pages?;
        let has_window = facts(&self.model.config, &self.workload.ignore).is_ok_and(|facts| facts.has_window);
        has_window
            .then(|| "caches in pages hold all tokens, those of layers with sliding windows too".to_owned())
    }

    /// Devices of racks that ranks leave, so that all racks are alike.
    fn spread_ranks(&self) -> Option<String> {
        let level = self.cluster.levels.iter().find(|level| level.used.is_some())?;
        let (ranks, name) = (level.ranks(), &level.name);
        (self.gpus > ranks).then(|| {
            let devices = level.devices.value;
            format!(
                "{ranks} of the {devices} GPUs of each block of `{name}` are used, so that blocks are alike"
            )
        })
    }

    /// Logits that a prefill keeps or leaves out.
    fn logits(&self) -> Option<String> {
        let Workload { mode: Mode::Prefill, logits, batch, sequence, .. } = &self.workload else {
            return None;
        };
        if !predicts_next(&self.model.config, &self.workload.ignore).unwrap_or(false) {
            return None;
        }
        match logits {
            Logits::Last => {
                Some("logits are those of the last token of each sequence (`--logits all`)".to_owned())
            }
            Logits::All => {
                let vocabulary = self.dimensions.iter().find(|dim| dim.name == "v")?;
                let size = DType::parse(&self.workload.dtype)?.bytes();
                let whole =
                    batch.saturating_mul(*sequence).saturating_mul(vocabulary.size).saturating_mul(size);
                Some(format!(
                    "the logits of {} are kept, {} over all ranks (`--logits last` keeps one for each sequence)",
                    counted(batch.saturating_mul(*sequence), "token"),
                    bytes(whole)
                ))
            }
        }
    }
}
