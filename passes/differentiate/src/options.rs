//! Options of a training step, and their spelling in pipelines.

use std::fmt;
use std::str::FromStr;

use ithaca_ir::ops::structure::MAX_LAYERS;
use ithaca_ir::ops::{AdamW, MAX_PARTS, sums_in};
use ithaca_ir::{DType, Diagnostic, TensorType};
use ithaca_pass::options;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The activations that the backward pass computes again instead of storing them in the forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Recompute {
    /// None: every value that a gradient needs is stored.
    #[default]
    None,
    /// Attention: its results are recomputed from q, k and v (Korthikanti et al., arXiv 2205.05198).
    Selective,
    /// Each function: only its arguments are saved; of layers, those of each group of `every` (Chen et al., arXiv
    /// 1604.06174; "uniform" in Megatron-LM).
    Full {
        /// Layers that are recomputed together.
        every: u64,
    },
    /// Each function except its attention, whose results are saved, so no attention is computed twice (DistFlashAttn,
    /// arXiv 2310.03294).
    KeepAttention,
}

impl Recompute {
    /// Recomputes each function separately.
    pub const FULL: Recompute = Recompute::Full { every: 1 };

    /// Every policy, with one layer per group.
    pub const ALL: [Recompute; 4] =
        [Recompute::None, Recompute::Selective, Recompute::FULL, Recompute::KeepAttention];

    /// The spelling in pipelines and flags, without options.
    pub fn name(self) -> &'static str {
        match self {
            Recompute::None => "none",
            Recompute::Selective => "selective",
            Recompute::Full { .. } => "full",
            Recompute::KeepAttention => "keep-attention",
        }
    }
}

impl FromStr for Recompute {
    type Err = String;

    /// The policy spelled `text`, as `full` or `full(every=4)`.
    fn from_str(text: &str) -> Result<Self, String> {
        let every = text.strip_prefix("full(every=").and_then(|rest| rest.strip_suffix(')'));
        let policy = match every {
            Some(every) => {
                let every = every.parse().ok().filter(|every| (1..=MAX_LAYERS).contains(every));
                every.map(|every| Recompute::Full { every })
            }
            None => Self::ALL.into_iter().find(|r| r.name() == text),
        };
        policy.ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            format!("one of {names}, or full(every=K), K from 1 to {MAX_LAYERS}")
        })
    }
}

impl fmt::Display for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Recompute::Full { every } if *every != 1 => write!(f, "full(every={every})"),
            Recompute::None | Recompute::Selective | Recompute::Full { .. } | Recompute::KeepAttention => {
                f.write_str(self.name())
            }
        }
    }
}

/// The order in which stages of a pipeline run micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PipelineOrder {
    /// All forward passes, then all backward passes (Huang et al., arXiv 1811.06965).
    Gpipe,
    /// After a warm-up one forward and one backward pass in turn, so that stage `k` of `P` holds the activations of at most
    /// `P − k` micro-batches (Narayanan et al., arXiv 2104.04473, section 2.2).
    #[default]
    #[serde(rename = "1f1b")]
    OneForwardOneBackward,
    /// As `OneForwardOneBackward`, with several chunks of layers per stage (section 2.2 there).
    Interleaved,
    /// As `OneForwardOneBackward`, with gradients of weights computed apart and later, while a stage would wait: schedule
    /// ZB-H1 (Qi et al., arXiv 2401.10241, section 2.3). A stage holds the activations of at most `P` micro-batches.
    ZbH1,
}

ithaca_ir::spellings! {
    PipelineOrder {
        Gpipe = "gpipe",
        OneForwardOneBackward = "1f1b",
        Interleaved = "interleaved",
        ZbH1 = "zb-h1",
    }
}

impl PipelineOrder {
    /// Whether a stage computes gradients of weights apart from those of arguments.
    pub(super) fn defers_weights(self) -> bool {
        match self {
            PipelineOrder::Gpipe | PipelineOrder::OneForwardOneBackward | PipelineOrder::Interleaved => false,
            PipelineOrder::ZbH1 => true,
        }
    }
}

/// The dropout of a training step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DropoutChoice {
    /// The dropout of the program, as in the configuration of the model.
    #[default]
    Config,
    /// No dropout, as in `model.eval()` of the library.
    Off,
}

/// The type in which the gradients of weights are summed and kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GradientType {
    /// That of sums: f32 for weights in bf16 or f16.
    #[default]
    Full,
    /// That of the weights: half the memory, and each sum is rounded (`--grad-reduce-in-bf16` of Megatron-LM).
    Weights,
}

impl GradientType {
    /// The type for weights of this type.
    pub fn of(self, weights: DType) -> DType {
        match self {
            GradientType::Full => sums_in(weights),
            GradientType::Weights => weights,
        }
    }

    /// The gradient of a weight.
    pub(super) fn tensor(self, weight: &TensorType) -> TensorType {
        TensorType { dtype: self.of(weight.dtype), ..weight.clone() }
    }
}

/// The states that are in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Offload {
    /// None.
    #[default]
    None,
    /// Those of the optimizer: moments, and weights in full precision (ZeRO-Offload; Ren et al., arXiv 2101.06840).
    Optimizer,
}

/// The options of a training step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Training {
    /// The activations that are computed again.
    #[serde(with = "options::text")]
    pub recompute: Recompute,
    /// Parts of each rank's tokens whose loss and gradients are computed one after another.
    #[serde(deserialize_with = "options::whole::<_, 1, MAX_LOSS_CHUNKS>")]
    pub loss_chunks: u64,
    /// Micro-batches, whose gradients are summed before the update.
    #[serde(deserialize_with = "options::whole::<_, 1, MAX_MICRO_BATCHES>")]
    pub micro_batches: u64,
    /// Stages of a pipeline; 1 without a pipeline.
    #[serde(deserialize_with = "options::whole::<_, 1, MAX_STAGES>")]
    pub stages: u64,
    /// The order in which stages run micro-batches.
    pub pipeline: PipelineOrder,
    /// Chunks of layers per stage in interleaved order.
    #[serde(deserialize_with = "options::whole::<_, 1, MAX_STAGES>")]
    pub chunks: u64,
    /// The layers of each stage, in interleaved order of each chunk; empty for stages of nearly equal FLOPs. Without a
    /// pipeline it has no effect.
    #[serde(deserialize_with = "stage_layers")]
    pub stage_layers: Vec<u64>,
    /// Whether dropout is applied.
    pub dropout: DropoutChoice,
    /// The type in which gradients are summed and kept.
    pub gradients: GradientType,
    /// The optimizer; `None` computes gradients only.
    #[serde(serialize_with = "write_optimizer", deserialize_with = "read_optimizer")]
    pub optimizer: Option<AdamW>,
    /// The largest global norm of the gradients; larger ones are scaled down to it.
    #[serde(deserialize_with = "norm")]
    pub clip: Option<f64>,
    /// The states that are in host memory.
    pub offload: Offload,
}

impl Default for Training {
    /// One batch, no recomputation, PyTorch's AdamW, no clipping.
    fn default() -> Self {
        Self {
            recompute: Recompute::None,
            loss_chunks: 1,
            micro_batches: 1,
            stages: 1,
            pipeline: PipelineOrder::default(),
            chunks: 2,
            stage_layers: Vec::new(),
            dropout: DropoutChoice::default(),
            gradients: GradientType::default(),
            optimizer: Some(ADAMW),
            clip: None,
            offload: Offload::default(),
        }
    }
}

/// AdamW with PyTorch's default constants.
pub const ADAMW: AdamW = AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 };

impl Training {
    /// Chunks of layers that the pipeline cuts the model into; 1 without a pipeline.
    pub fn n_chunks(&self) -> u64 {
        match self.pipeline {
            PipelineOrder::Gpipe | PipelineOrder::OneForwardOneBackward | PipelineOrder::ZbH1 => self.stages,
            PipelineOrder::Interleaved => self.stages.saturating_mul(self.chunks),
        }
    }

    /// The stages whose layers are stated, if they are.
    pub fn stated_stages(&self) -> Option<u64> {
        let chunks = self.stage_layers.len() as u64;
        let stages = match self.pipeline {
            PipelineOrder::Gpipe | PipelineOrder::OneForwardOneBackward | PipelineOrder::ZbH1 => chunks,
            PipelineOrder::Interleaved => (chunks / self.chunks.max(1)).max(1),
        };
        (chunks > 0).then_some(stages)
    }

    /// The options as pipeline text; default values are omitted.
    pub fn to_pipeline(&self) -> Vec<(String, String)> {
        let mut written = options::write(self);
        let constants = self.optimizer.map(|adamw| options::write(&Constants::from(adamw)));
        let at = written.iter().position(|(key, _)| key == "clip").unwrap_or(written.len());
        written.splice(at..at, constants.unwrap_or_default());
        written
    }

    /// Reads the options of a pipeline.
    ///
    /// # Errors
    /// `P02` for an option that is unknown or out of range, and for a constant of AdamW beside `optimizer=none`.
    pub fn from_pipeline(options: &[(String, String)]) -> Result<Self, Diagnostic> {
        let [constants, others] = options::split::<Constants>(options);
        let mut training: Self = options::read(PASS, OPTIONS, &others)?;
        let read: Constants = options::read(PASS, OPTIONS, &constants)?;
        match (&mut training.optimizer, constants.first()) {
            (Some(adamw), _) => *adamw = read.into(),
            (None, Some((key, value))) => {
                let message = format!(
                    "option `{key}={value}` is a constant of AdamW, and `optimizer=none` excludes it"
                );
                return Err(Diagnostic::new("P02", message));
            }
            (None, None) => {}
        }
        if training.offload == Offload::Optimizer && training.optimizer.is_none() {
            let message = "option `offload=optimizer` needs an optimizer, and `optimizer=none` excludes it";
            return Err(Diagnostic::new("P02", message));
        }
        Ok(training)
    }

    /// Sets the option `key`.
    ///
    /// # Errors
    /// `P02` when the option is unknown, or its value is out of range.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), Diagnostic> {
        let mut options = self.to_pipeline();
        options.retain(|(known, _)| known != key);
        options.push((key.to_owned(), value.to_owned()));
        *self = Self::from_pipeline(&options)?;
        Ok(())
    }
}

/// The name of the pass.
const PASS: &str = "differentiate";

/// The constants of the optimizer, which a pipeline has beside the other options.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Constants {
    #[serde(deserialize_with = "not_negative")]
    lr: f64,
    #[serde(deserialize_with = "fraction")]
    beta1: f64,
    #[serde(deserialize_with = "fraction")]
    beta2: f64,
    #[serde(deserialize_with = "not_negative")]
    eps: f64,
    #[serde(deserialize_with = "not_negative")]
    weight_decay: f64,
}

impl Default for Constants {
    fn default() -> Self {
        ADAMW.into()
    }
}

impl From<AdamW> for Constants {
    fn from(AdamW { lr, beta1, beta2, eps, weight_decay }: AdamW) -> Self {
        Self { lr, beta1, beta2, eps, weight_decay }
    }
}

impl From<Constants> for AdamW {
    fn from(Constants { lr, beta1, beta2, eps, weight_decay }: Constants) -> Self {
        Self { lr, beta1, beta2, eps, weight_decay }
    }
}

fn not_negative<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    options::number(deserializer, |x| x >= 0.0, "a number that is zero or more")
}

fn fraction<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    options::number(deserializer, |x| (0.0..1.0).contains(&x), "a number from 0 to 1, 1 excluded")
}

fn stage_layers<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u64>, D::Error> {
    let layers = Vec::<u64>::deserialize(deserializer)
        .ok()
        .filter(|layers| layers.iter().any(|&n| n > 0) && layers.iter().all(|&n| n <= MAX_LAYERS));
    layers.ok_or_else(|| Error::custom("the layers of each stage, as in `8+8+8+6` or `0+8+8+0`"))
}

fn norm<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    options::number(deserializer, |x| x > 0.0, "a norm, a number above zero").map(Some)
}

/// The names of optimizers.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum OptimizerName {
    Adamw,
    None,
}

fn read_optimizer<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<AdamW>, D::Error> {
    Ok(match OptimizerName::deserialize(deserializer)? {
        OptimizerName::Adamw => Some(ADAMW),
        OptimizerName::None => None,
    })
}

fn write_optimizer<S: Serializer>(optimizer: &Option<AdamW>, serializer: S) -> Result<S::Ok, S::Error> {
    let name = if optimizer.is_some() { OptimizerName::Adamw } else { OptimizerName::None };
    name.serialize(serializer)
}

/// The options, for the table of passes.
pub const OPTIONS: &str = "recompute=none|selective|full|full(every=K)|keep-attention, loss_chunks=C, micro_batches=N, stages=N, pipeline=gpipe|1f1b|interleaved|zb-h1, chunks=N, stage_layers=N+N+…, dropout=config|off, gradients=full|weights, optimizer=adamw|none, \
                           lr=X, beta1=X, beta2=X, eps=X, weight_decay=X, clip=NORM, offload=none|optimizer";

/// The maximum number of parts of a loss: the maximum number of operands of `join`.
const MAX_LOSS_CHUNKS: u64 = MAX_PARTS as u64;

/// The maximum number of micro-batches.
const MAX_MICRO_BATCHES: u64 = 4096;

/// The maximum number of stages, and of chunks per stage.
const MAX_STAGES: u64 = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_print_as_they_are_read() {
        let text = |t: &Training| t.to_pipeline();
        assert!(text(&Training::default()).is_empty());
        let mut training = Training { recompute: Recompute::FULL, micro_batches: 4, ..Training::default() };
        training.set("lr", "0.25").unwrap();
        training.set("gradients", "weights").unwrap();
        training.set("clip", "1").unwrap();
        training.set("stage_layers", "8+8+7").unwrap();
        assert_eq!(Training::from_pipeline(&text(&training)).unwrap(), training);
        for every in [1, 2, 7] {
            let recompute = Recompute::Full { every };
            let training = Training { recompute, loss_chunks: every, ..Training::default() };
            assert_eq!(Training::from_pipeline(&text(&training)).unwrap(), training);
        }
        let none = Training { optimizer: None, ..Training::default() };
        assert_eq!(Training::from_pipeline(&text(&none)).unwrap(), none);
    }

    #[test]
    fn what_is_out_of_range_is_refused() {
        for (key, value) in [
            ("beta1", "1"),
            ("micro_batches", "0"),
            ("clip", "nan"),
            ("recompute", "some"),
            ("speed", "1"),
            ("loss_chunks", "257"),
            ("recompute", "full(every=0)"),
            ("stage_layers", "0+0"),
            ("stage_layers", "8,8"),
            ("recompute", "selective(every=2)"),
        ] {
            let refused = Training::default().set(key, value).unwrap_err();
            assert_eq!(refused.code, "P02");
            assert!(refused.message.contains(key), "{}", refused.message);
        }
    }
}
