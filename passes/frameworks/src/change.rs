//! Refusals, and changes of a layout.

use ithaca_differentiate::{GradientType, PipelineOrder, Recompute};
use ithaca_layout::shard::Zero;

use crate::layout::{Layout, Role, TokenOrder, UnsupportedOption};

/// A choice of a layout that a framework cannot run.
#[derive(Clone, Debug, PartialEq)]
pub struct Refusal {
    /// The choice and why the framework cannot run it.
    pub reason: String,
    /// The nearest choice that it can run, where there is one.
    pub change: Option<Change>,
}

/// A change of a layout.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// Another token order.
    Order(TokenOrder),
    /// Another movement of attention.
    Movement(&'static str),
    /// One ring over all ranks that split tokens inside attention.
    OneRing,
    /// Ranks that split heads inside attention split its tokens.
    HeadsToTokens(&'static str),
    /// Ranks that split tokens inside attention split heads.
    TokensToHeads,
    /// Ranks with this role get another.
    Role(Role, Role),
    /// Other activations are recomputed.
    Recompute(Recompute),
    /// The loss in one part.
    WholeLoss,
    /// Gradients summed in another type.
    Gradients(GradientType),
    /// Another order of the pipeline.
    Pipeline(PipelineOrder),
    /// Stages of as many layers.
    EvenStages,
    /// Another ZeRO stage.
    Zero(Zero),
    /// The residual stream split by sequence, or not.
    SequenceParallel(bool),
    /// Sequences padded to a length.
    Sequence(u64),
    /// Without a choice that no framework has.
    Without(UnsupportedOption),
    /// Experts split over the ranks that split tokens and weights.
    ExpertsOverAll,
    /// Experts split over the ranks that split weights.
    ExpertsOverWeights,
}

impl Change {
    /// The layout with the change.
    #[must_use]
    pub fn apply(&self, layout: &Layout) -> Layout {
        let mut layout = layout.clone();
        match self {
            Change::Order(order) => layout.order = order.clone(),
            Change::Movement(name) => layout.movement = Some((*name).to_owned()),
            Change::OneRing => {
                let ring = layout.degree(Role::Tokens);
                let mut rest = layout.axes.iter_mut().filter(|axis| axis.role == Role::Tokens).rev();
                if let Some(inner) = rest.next() {
                    inner.size = ring;
                }
                for axis in rest {
                    axis.size = 1;
                }
                layout.axes.retain(|axis| axis.size > 1);
            }
            Change::HeadsToTokens(movement) => {
                layout.movement = Some((*movement).to_owned());
                layout.order = TokenOrder::Zigzag;
                set_role(&mut layout, Role::Heads, Role::Tokens);
            }
            Change::TokensToHeads => {
                layout.movement = None;
                layout.order = TokenOrder::Contiguous;
                set_role(&mut layout, Role::Tokens, Role::Heads);
            }
            Change::Role(from, to) => {
                set_role(&mut layout, *from, *to);
                let moves = |role: Role| matches!(role, Role::Tokens | Role::Cache | Role::DecodeContext);
                if !layout.axes.iter().any(|axis| moves(axis.role)) {
                    layout.movement = None;
                }
            }
            Change::Recompute(policy) => layout.training.recompute = *policy,
            Change::WholeLoss => layout.training.loss_chunks = 1,
            Change::Gradients(gradients) => layout.training.gradients = *gradients,
            Change::Pipeline(order) => layout.training.pipeline = *order,
            Change::EvenStages => layout.chunk_layers.clear(),
            Change::Zero(zero) => layout.zero = *zero,
            Change::SequenceParallel(is_split) => layout.sequence_parallel = *is_split,
            Change::Sequence(tokens) => layout.sequence = *tokens,
            Change::Without(option) => layout.unsupported.retain(|other| other != option),
            Change::ExpertsOverAll => {
                for axis in &mut layout.axes {
                    axis.splits_experts = axis.role != Role::Stages;
                }
            }
            Change::ExpertsOverWeights => {
                for axis in &mut layout.axes {
                    axis.splits_experts = matches!(axis.role, Role::Tensor | Role::DecodeContext);
                }
            }
        }
        layout
    }

    /// The change in words.
    pub fn text(&self) -> String {
        let role = |role: &Role| match role {
            Role::Tensor => "weights",
            Role::DecodeContext => "weights, and caches by tokens",
            Role::Heads => "heads",
            Role::Tokens => "tokens",
            Role::Cache => "caches by tokens",
            Role::Data => "the batch",
            Role::Experts => "experts only",
            Role::Stages => "layers",
        };
        match self {
            Change::Order(TokenOrder::Contiguous) => "tokens in contiguous order".to_owned(),
            Change::Order(TokenOrder::Zigzag) => "tokens in zigzag order".to_owned(),
            Change::Order(TokenOrder::Striped(block)) => format!("tokens dealt in blocks of {block}"),
            Change::Order(TokenOrder::Other(text)) => format!("tokens in order {text}"),
            Change::Movement("rotate") => "one ring for keys and values".to_owned(),
            Change::Movement("gather") => "keys and values gathered".to_owned(),
            Change::Movement(name) => format!("the movement `{name}`"),
            Change::OneRing => "one ring over all ranks that split tokens".to_owned(),
            Change::HeadsToTokens("gather") => {
                "tokens split in place of heads, keys and values gathered".to_owned()
            }
            Change::HeadsToTokens(_) => {
                "tokens split in place of heads, one ring for keys and values".to_owned()
            }
            Change::TokensToHeads => "heads split in place of tokens inside attention".to_owned(),
            Change::Role(from, to) => format!("ranks that split {} split {}", role(from), role(to)),
            Change::Recompute(policy) => format!("recomputation `{policy}`"),
            Change::WholeLoss => "the loss in one part".to_owned(),
            Change::Gradients(GradientType::Full) => "gradients summed in f32".to_owned(),
            Change::Gradients(GradientType::Weights) => {
                "gradients summed in the type of the weights".to_owned()
            }
            Change::Pipeline(order) => format!("the order `{}` of the pipeline", order.name()),
            Change::EvenStages => "the framework's own cut of the layers".to_owned(),
            Change::Zero(zero) => format!("ZeRO {zero}"),
            Change::SequenceParallel(true) => {
                "the residual stream split by sequence over the ranks that split weights".to_owned()
            }
            Change::SequenceParallel(false) => {
                "the residual stream whole on the ranks that split weights".to_owned()
            }
            Change::Sequence(tokens) => format!("sequences padded to {tokens} tokens"),
            Change::Without(option) => format!("no {}", option.name()),
            Change::ExpertsOverAll => "experts split over all ranks of a stage".to_owned(),
            Change::ExpertsOverWeights => "experts split over the ranks that split weights".to_owned(),
        }
    }
}

fn set_role(layout: &mut Layout, from: Role, to: Role) {
    for axis in layout.axes.iter_mut().filter(|axis| axis.role == from) {
        axis.role = to;
    }
}

impl UnsupportedOption {
    /// The choice in words.
    pub fn name(&self) -> String {
        match self {
            UnsupportedOption::UnevenHeads => "different numbers of heads on ranks".to_owned(),
            UnsupportedOption::PaddedHeads => "padded heads".to_owned(),
            UnsupportedOption::UnevenSequence => "different numbers of tokens on ranks".to_owned(),
            UnsupportedOption::LayerStrategies => "strategies of single layers".to_owned(),
            UnsupportedOption::Movement(text) => format!("movement `{text}`"),
            UnsupportedOption::SequenceAxes => "mesh axes of single sequences".to_owned(),
            UnsupportedOption::NarrowPartials => "partial results in bf16".to_owned(),
            UnsupportedOption::Documents => "documents packed by the plan".to_owned(),
            UnsupportedOption::Capacity => "capacity of experts".to_owned(),
            UnsupportedOption::PersistentWeights => {
                "weights outside layers whole beside split ones".to_owned()
            }
        }
    }
}
