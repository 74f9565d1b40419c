//! Options of a training step, as written in pipelines.

use std::fmt;

use ithaca_ir::Diagnostic;
use ithaca_ir::ops::structure::MAX_LAYERS;
use ithaca_ir::ops::{AdamW, MAX_PARTS};

/// The recomputation policy: the forward values that the backward pass recomputes instead of saving.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Recompute {
    /// Every value that a gradient needs is saved.
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

    /// The policy spelled `text`, as `full` or `full(every=4)`.
    pub fn parse(text: &str) -> Option<Self> {
        let every = text.strip_prefix("full(every=").and_then(|rest| rest.strip_suffix(')'));
        match every {
            Some(every) => {
                let every = every.parse().ok().filter(|every| (1..=MAX_LAYERS).contains(every))?;
                Some(Recompute::Full { every })
            }
            None => Self::ALL.into_iter().find(|r| r.name() == text),
        }
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

/// The order in which the stages of a pipeline run the micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum PipelineOrder {
    /// All forward passes, then all backward passes (Huang et al., arXiv 1811.06965).
    Gpipe,
    /// After a warm-up, alternates one forward and one backward pass, so stage `k` of `P` holds the saved values of at
    /// most `P − k` micro-batches (Narayanan et al., arXiv 2104.04473, section 2.2).
    #[default]
    OneForwardOneBackward,
    /// As `OneForwardOneBackward`, with several chunks of layers per stage (section 2.2 there).
    Interleaved,
}

impl PipelineOrder {
    /// Every order.
    pub const ALL: [PipelineOrder; 3] =
        [PipelineOrder::Gpipe, PipelineOrder::OneForwardOneBackward, PipelineOrder::Interleaved];

    /// The spelling in pipelines and flags.
    pub fn name(self) -> &'static str {
        match self {
            PipelineOrder::Gpipe => "gpipe",
            PipelineOrder::OneForwardOneBackward => "1f1b",
            PipelineOrder::Interleaved => "interleaved",
        }
    }

    /// The order spelled `name`.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|o| o.name() == name)
    }
}

impl fmt::Display for PipelineOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Whether a training step applies the program's dropout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum DropoutChoice {
    /// The program's dropout, as the model's configuration states.
    #[default]
    Config,
    /// No dropout, as in the library's `model.eval()`.
    Off,
}

impl DropoutChoice {
    /// Both.
    pub const ALL: [DropoutChoice; 2] = [DropoutChoice::Config, DropoutChoice::Off];

    /// The spelling in pipelines and flags.
    pub fn name(self) -> &'static str {
        match self {
            DropoutChoice::Config => "config",
            DropoutChoice::Off => "off",
        }
    }
}

/// The options of a training step.
#[derive(Clone, Debug, PartialEq)]
pub struct Training {
    /// The recomputation policy.
    pub recompute: Recompute,
    /// Parts of each rank's tokens whose loss and gradients are computed one after another.
    pub loss_chunks: u64,
    /// Micro-batches, whose gradients are summed before the update.
    pub micro_batches: u64,
    /// Stages of the pipeline; 1 means no pipeline.
    pub stages: u64,
    /// The order in which stages run micro-batches.
    pub pipeline: PipelineOrder,
    /// Chunks of layers per stage in interleaved order.
    pub chunks: u64,
    /// Whether dropout is applied.
    pub dropout: DropoutChoice,
    /// The optimizer; `None` computes gradients only.
    pub optimizer: Option<AdamW>,
    /// The largest global norm of the gradients; larger ones are scaled down to it.
    pub clip: Option<f64>,
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
            dropout: DropoutChoice::default(),
            optimizer: Some(ADAMW),
            clip: None,
        }
    }
}

/// AdamW with PyTorch's default constants.
pub const ADAMW: AdamW = AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 };

impl Training {
    /// Chunks of layers that the pipeline cuts the model into; 1 without a pipeline.
    pub fn n_chunks(&self) -> u64 {
        match self.pipeline {
            PipelineOrder::Gpipe | PipelineOrder::OneForwardOneBackward => self.stages,
            PipelineOrder::Interleaved => self.stages.saturating_mul(self.chunks),
        }
    }

    /// The options as pipeline text; default values are omitted.
    pub fn to_pipeline(&self) -> Vec<(String, String)> {
        let Self {
            recompute,
            loss_chunks,
            micro_batches,
            stages,
            pipeline,
            chunks,
            dropout,
            optimizer,
            clip,
        } = self;
        let standard = Self::default();
        let mut options = Vec::new();
        let mut set = |key: &str, value: String| options.push((key.to_owned(), value));
        if *recompute != standard.recompute {
            set("recompute", recompute.to_string());
        }
        if *loss_chunks != standard.loss_chunks {
            set("loss_chunks", loss_chunks.to_string());
        }
        if *micro_batches != standard.micro_batches {
            set("micro_batches", micro_batches.to_string());
        }
        if *stages != standard.stages {
            set("stages", stages.to_string());
        }
        if *pipeline != standard.pipeline {
            set("pipeline", pipeline.to_string());
        }
        if *chunks != standard.chunks {
            set("chunks", chunks.to_string());
        }
        if *dropout != standard.dropout {
            set("dropout", dropout.name().to_owned());
        }
        match optimizer {
            None => set("optimizer", "none".to_owned()),
            Some(adamw) => {
                for (key, value, usual) in constants(adamw) {
                    if value != usual {
                        set(key, format!("{value:?}"));
                    }
                }
            }
        }
        if let Some(clip) = clip {
            set("clip", format!("{clip:?}"));
        }
        options
    }

    /// The options of a pipeline.
    ///
    /// # Errors
    /// `P02` for an option that is unknown or out of range.
    pub fn from_pipeline(options: &[(String, String)]) -> Result<Self, Diagnostic> {
        let mut training = Self::default();
        for (key, value) in options {
            training.set(key, value)?;
        }
        Ok(training)
    }

    /// Sets the option `key`.
    ///
    /// # Errors
    /// `P02` when the option is unknown, or its value is out of range.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), Diagnostic> {
        let refused = |expected: &str| {
            let message = format!("option `{key}={value}` of `differentiate` is not {expected}");
            Diagnostic::new("P02", message)
        };
        match key {
            "recompute" => {
                let names = Recompute::ALL.map(Recompute::name).join(", ");
                let expected = format!("one of {names}, or full(every=K), K from 1 to {MAX_LAYERS}");
                self.recompute = Recompute::parse(value).ok_or_else(|| refused(&expected))?;
            }
            "loss_chunks" => {
                let n = value.parse().ok().filter(|&n: &u64| (1..=MAX_LOSS_CHUNKS).contains(&n));
                self.loss_chunks =
                    n.ok_or_else(|| refused(&format!("a whole number from 1 to {MAX_LOSS_CHUNKS}")))?;
            }
            "micro_batches" => {
                let n = value.parse().ok().filter(|&n: &u64| (1..=MAX_MICRO_BATCHES).contains(&n));
                self.micro_batches =
                    n.ok_or_else(|| refused(&format!("a whole number from 1 to {MAX_MICRO_BATCHES}")))?;
            }
            "stages" | "chunks" => {
                let n = value.parse().ok().filter(|&n: &u64| (1..=MAX_STAGES).contains(&n));
                let n = n.ok_or_else(|| refused(&format!("a whole number from 1 to {MAX_STAGES}")))?;
                *(if key == "stages" { &mut self.stages } else { &mut self.chunks }) = n;
            }
            "pipeline" => {
                let names = PipelineOrder::ALL.map(PipelineOrder::name).join(", ");
                self.pipeline =
                    PipelineOrder::parse(value).ok_or_else(|| refused(&format!("one of {names}")))?;
            }
            "dropout" => {
                let choice = DropoutChoice::ALL.into_iter().find(|d| d.name() == value);
                self.dropout = choice.ok_or_else(|| refused("config or off"))?;
            }
            "optimizer" => {
                self.optimizer = match value {
                    "none" => None,
                    "adamw" => Some(self.optimizer.unwrap_or(ADAMW)),
                    _ => return Err(refused("adamw or none")),
                };
            }
            "clip" => {
                self.clip =
                    Some(number(value, |x| x > 0.0).ok_or_else(|| refused("a norm, a number above zero"))?)
            }
            _ => return self.set_constant(key, value),
        }
        Ok(())
    }

    fn set_constant(&mut self, key: &str, value: &str) -> Result<(), Diagnostic> {
        // Without an optimizer the constant is still parsed, so an unknown name gets its own message.
        let mut none = ADAMW;
        let is_none = self.optimizer.is_none();
        let adamw = self.optimizer.as_mut().unwrap_or(&mut none);
        const NOT_NEGATIVE: &str = "a number that is zero or more";
        const FRACTION: &str = "a number from 0 to 1, 1 left out";
        let (constant, fits, expected): (&mut f64, fn(f64) -> bool, &str) = match key {
            "lr" => (&mut adamw.lr, |x| x >= 0.0, NOT_NEGATIVE),
            "beta1" => (&mut adamw.beta1, |x| (0.0..1.0).contains(&x), FRACTION),
            "beta2" => (&mut adamw.beta2, |x| (0.0..1.0).contains(&x), FRACTION),
            "eps" => (&mut adamw.eps, |x| x >= 0.0, NOT_NEGATIVE),
            "weight_decay" => (&mut adamw.weight_decay, |x| x >= 0.0, NOT_NEGATIVE),
            _ => {
                let message = format!("`differentiate` has no option `{key}`");
                return Err(Diagnostic::new("P02", message).help(format!("options: {OPTIONS}")));
            }
        };
        *constant = number(value, fits).ok_or_else(|| {
            Diagnostic::new("P02", format!("option `{key}={value}` of `differentiate` is not {expected}"))
        })?;
        if is_none {
            let message = format!(
                "option `{key}={value}` belongs to an optimizer, but the pipeline has `optimizer=none`"
            );
            return Err(Diagnostic::new("P02", message));
        }
        Ok(())
    }
}

/// The options, for the table of passes.
pub const OPTIONS: &str = "recompute=none|selective|full|full(every=K)|keep-attention, loss_chunks=C, micro_batches=N, stages=N, pipeline=gpipe|1f1b|interleaved, chunks=N, dropout=config|off, optimizer=adamw|none, \
                           lr=X, beta1=X, beta2=X, eps=X, weight_decay=X, clip=NORM";

/// The maximum number of parts of a loss: the maximum number of operands of `join`.
const MAX_LOSS_CHUNKS: u64 = MAX_PARTS as u64;

/// The maximum number of micro-batches.
const MAX_MICRO_BATCHES: u64 = 4096;

/// The maximum number of stages, and of chunks per stage.
const MAX_STAGES: u64 = 1024;

/// Each constant with its name and its default.
fn constants(adamw: &AdamW) -> [(&'static str, f64, f64); 5] {
    let AdamW { lr, beta1, beta2, eps, weight_decay } = *adamw;
    [
        ("lr", lr, ADAMW.lr),
        ("beta1", beta1, ADAMW.beta1),
        ("beta2", beta2, ADAMW.beta2),
        ("eps", eps, ADAMW.eps),
        ("weight_decay", weight_decay, ADAMW.weight_decay),
    ]
}

fn number(text: &str, fits: impl Fn(f64) -> bool) -> Option<f64> {
    text.parse().ok().filter(|&x: &f64| x.is_finite() && fits(x))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_print_as_they_are_read() {
        let text = |t: &Training| t.to_pipeline();
        assert!(text(&Training::default()).is_empty());
        let mut training = Training { recompute: Recompute::FULL, micro_batches: 4, ..Training::default() };
        training.set("lr", "0.25").unwrap();
        training.set("clip", "1").unwrap();
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
            ("recompute", "selective(every=2)"),
        ] {
            let refused = Training::default().set(key, value).unwrap_err();
            assert_eq!(refused.code, "P02");
            assert!(refused.message.contains(key), "{}", refused.message);
        }
    }
}
