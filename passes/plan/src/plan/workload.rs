//! The workload that a plan states, and that of an import for which it stands.

use std::collections::BTreeMap;

use ithaca_differentiate as differentiate;
use ithaca_import::{self as import, Mode};
use ithaca_ir::{DType, Diagnostic, Module, Op};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The workload of the model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// Prefill, train or decode.
    pub mode: Mode,
    /// Sequences.
    pub batch: u64,
    /// Tokens of each sequence; of the encoder's, where there is one beside the decoder.
    pub sequence: u64,
    /// Tokens of each sequence of the decoder, where that was said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_sequence: Option<u64>,
    /// Element type of weights and activations.
    pub dtype: String,
    /// How many tokens an expert takes, where that is bounded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<import::Capacity>,
    /// Without a capacity, how many tokens an expert has slots for; all when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expert_bound: Option<import::ExpertBound>,
    /// Tokens that the cache of a sequence has room for, where sequences are continued.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<u64>,
    /// The pages that caches are in; each sequence has room of its own when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pages: Option<import::Pages>,
    /// The most tokens of a step, for which caches of windows have room, where that was said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// Element type of caches, where it is not that of activations.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_type: Option<String>,
    /// Lengths of the documents that are packed into each sequence, as in `8192 4096*3`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub documents: Option<import::Documents>,
    /// The tokens whose logits a prefill returns.
    #[serde(default, skip_serializing_if = "returns_all")]
    pub logits: import::Logits,
    /// The options of a training step, where the mode is train.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub training: Option<Training>,
    /// Micro-batches of a forward pass in stages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub micro_batches: Option<u64>,
    /// Fields of the description that were declared to have no influence.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ignore: Vec<String>,
}

/// Whether logits are those of all tokens, as plans that do not state them mean.
fn returns_all(logits: &import::Logits) -> bool {
    *logits == import::Logits::All
}

/// The options of a training step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Training {
    /// Which label belongs to which token.
    pub labels: import::Labels,
    /// Options of `differentiate` that are not as by default.
    pub options: BTreeMap<String, String>,
}

impl Workload {
    /// The workload that `module` was imported for, as a plan writes it: an element type that was left to the
    /// description is that of the module's weights, or of its inputs.
    pub fn of(workload: &import::Workload, module: &Module) -> Self {
        let training = || Training {
            labels: workload.labels,
            options: workload.training.to_pipeline().into_iter().collect(),
        };
        // The loss is summed in a wider type than the model has.
        let mut nodes = module.functions.values().flat_map(|f| f.nodes.iter().map(move |n| (f, n)));
        let mut of_weights = || {
            nodes.find_map(|(f, n)| {
                let dtype = f.ty(n.result()).dtype;
                let is_value =
                    matches!(n.op, Op::Param(_)) || (matches!(n.op, Op::Input(_)) && dtype.is_float());
                is_value.then_some(dtype)
            })
        };
        let dtype = workload.dtype.or_else(&mut of_weights).unwrap_or(DType::F32);
        Self {
            mode: workload.mode,
            batch: workload.batch,
            sequence: workload.sequence,
            target_sequence: workload.target_sequence,
            dtype: dtype.name().to_owned(),
            capacity: workload.capacity,
            expert_bound: workload.expert_bound,
            cache: workload.cache,
            pages: workload.pages,
            step: workload.step,
            cache_type: workload.cache_type.map(|dtype| dtype.name().to_owned()),
            documents: workload.documents.clone(),
            logits: workload.logits,
            training: (workload.mode == Mode::Train).then(training),
            micro_batches: Some(workload.training.micro_batches)
                .filter(|&n| n > 1 && workload.training.stages > 1 && workload.mode != Mode::Train),
            ignore: workload.ignore.clone(),
        }
    }

    /// The workload for an import.
    ///
    /// # Errors
    /// `M33` for an element type that there is not.
    pub fn to_import(&self) -> Result<import::Workload, Diagnostic> {
        let Self {
            mode,
            batch,
            sequence,
            target_sequence,
            dtype,
            capacity,
            expert_bound,
            cache,
            pages,
            step,
            cache_type,
            documents,
            logits,
            training,
            micro_batches,
            ignore,
        } = self;
        let parsed = |field: &str, name: &str| {
            let unknown = || Diagnostic::new("M33", format!("`workload.{field}`: there is no `{name}`"));
            DType::parse(name).ok_or_else(unknown)
        };
        let dtype = parsed("dtype", dtype)?;
        let cache_type = cache_type.as_deref().map(|name| parsed("cache_type", name)).transpose()?;
        let labels = training.as_ref().map_or_else(import::Labels::default, |t| t.labels);
        let options: Vec<_> = training.iter().flat_map(|t| t.options.clone()).collect();
        let mut training = differentiate::Training::from_pipeline(&options)?;
        training.micro_batches = micro_batches.unwrap_or(training.micro_batches);
        Ok(import::Workload {
            capacity: *capacity,
            expert_bound: *expert_bound,
            cache: *cache,
            pages: *pages,
            step: *step,
            cache_type,
            documents: documents.clone(),
            logits: *logits,
            labels,
            training,
            batch: *batch,
            sequence: *sequence,
            target_sequence: *target_sequence,
            dtype: Some(dtype),
            mode: *mode,
            ignore: ignore.clone(),
        })
    }
}
