//! Rules that several frameworks have, and the list of refusals that they add to.

use ithaca_differentiate::{GradientType, Offload, PipelineOrder, Recompute};
use ithaca_import::{Facts, Mode};
use ithaca_ir::DType;
use ithaca_layout::shard::Zero;

use crate::change::{Change, Refusal};
use crate::layout::{Layout, Role};

/// Refusals as they are collected.
pub(crate) struct Rules<'a> {
    pub(crate) layout: &'a Layout,
    pub(crate) facts: &'a Facts,
    /// The name of the framework in sentences.
    pub(crate) title: &'static str,
    pub(crate) refusals: Vec<Refusal>,
}

impl Rules<'_> {
    /// Refuses a choice, if `is_broken`.
    pub(crate) fn refuse(
        &mut self,
        is_broken: bool,
        reason: impl FnOnce() -> String,
        change: impl Into<Option<Change>>,
    ) {
        if is_broken {
            self.refusals.push(Refusal { reason: reason(), change: change.into() });
        }
    }

    /// Refuses choices that no framework has.
    pub(crate) fn unsupported(&mut self) {
        let title = self.title;
        for option in self.layout.unsupported.clone() {
            let reason = format!("the plan has {}, and {title} has none", option.name());
            self.refuse(true, || reason, Change::Without(option));
        }
    }

    /// The settings that the framework exports keep the states of the optimizer on the devices.
    pub(crate) fn keeps_states(&mut self) {
        let title = self.title;
        self.refuse(
            self.layout.mode == Mode::Train && self.layout.training.offload == Offload::Optimizer,
            || {
                format!(
                    "the plan has the states of the optimizer in host memory, and exports to {title} do not"
                )
            },
            None,
        );
    }

    /// The framework sums gradients in f32.
    pub(crate) fn sums_in_f32(&mut self) {
        let (layout, title) = (self.layout, self.title);
        self.refuse(
            layout.gradients() == Some(layout.dtype),
            || format!("gradients of the plan are summed in {}, and {title} sums them in f32", layout.dtype),
            Change::Gradients(GradientType::Full),
        );
    }

    /// The framework trains; it computes whole sequences otherwise.
    pub(crate) fn trains(&mut self) {
        let title = self.title;
        let decodes = self.layout.mode == Mode::Decode || self.layout.cache.is_some();
        self.refuse(
            decodes,
            || {
                format!(
                    "the plan continues sequences from caches, and {title} here trains; export it to a server"
                )
            },
            None,
        );
        self.refuse(
            !self.facts.is_decoder,
            || format!("{} is not a decoder, and exports to {title} are for decoders", self.facts.family),
            None,
        );
        let only_experts = self.layout.degree(Role::Experts) > 1;
        self.refuse(
            only_experts,
            || format!("ranks of the plan split experts only, and {title} splits experts over ranks that split tokens or weights"),
            None,
        );
        let is_split = self.layout.mode != Mode::Train && self.layout.zero != Zero::Off;
        self.refuse(
            is_split,
            || {
                format!(
                    "a prefill of the plan splits weights by ZeRO {}, and {title} does so in training only",
                    self.layout.zero
                )
            },
            Change::Zero(Zero::Off),
        );
        let is_wide = self.layout.dtype == DType::F64;
        self.refuse(is_wide, || format!("the plan computes in f64, and {title} does not"), None);
    }

    /// Query heads, and key/value heads or their copies, divide over the ranks that split weights.
    pub(crate) fn tensor_heads(&mut self, copies: Copies) {
        let (tensor, title) = (self.layout.tensor(), self.title);
        let (heads, kv) = (self.facts.heads, self.facts.kv_heads.max(1));
        self.refuse(
            !heads.is_multiple_of(tensor),
            || format!("{heads} query heads are not divisible by tensor degree {tensor}, as {title} needs"),
            None,
        );
        let is_copied = copies == Copies::Allowed && tensor.is_multiple_of(kv);
        let is_latent = self.facts.is_latent;
        self.refuse(
            !is_latent && !kv.is_multiple_of(tensor) && !is_copied,
            || match copies {
                Copies::Allowed => format!("{kv} key/value heads are no multiple and no divisor of tensor degree {tensor}, as {title} needs"),
                Copies::Refused => format!("{kv} key/value heads are not divisible by tensor degree {tensor}, as {title} needs"),
            },
            None,
        );
    }

    /// The experts divide over the ranks that split them.
    pub(crate) fn experts(&mut self) {
        let (degree, title) = (self.layout.experts(), self.title);
        let Some(experts) = self.facts.experts else { return };
        self.refuse(
            !experts.count.is_multiple_of(degree),
            || {
                format!(
                    "{} experts are not divisible by expert degree {degree}, as {title} needs",
                    experts.count
                )
            },
            None,
        );
    }

    /// Sequences are a multiple of `of`, which `what` names.
    pub(crate) fn sequence(&mut self, of: u64, what: &str) {
        let (tokens, title) = (self.layout.sequence, self.title);
        self.refuse(
            self.layout.mode != Mode::Decode && !tokens.is_multiple_of(of),
            || format!("sequences of {tokens} tokens are not divisible by {what}, as {title} needs"),
            Change::Sequence(tokens.next_multiple_of(of.max(1))),
        );
    }

    /// Every rank has the same number of sequences in each micro-batch.
    pub(crate) fn batch(&mut self) {
        let (batch, title) = (self.layout.batch, self.title);
        let share = self.layout.data() * self.layout.micro_batches();
        self.refuse(
            !batch.is_multiple_of(share),
            || format!("{batch} sequences are not divisible by {share}, micro-batches times data-parallel ranks, as {title} needs"),
            None,
        );
    }

    /// Keys and queries of split tokens meet by one of `movements`, the first of which is nearest to others; `has` is the
    /// predicate of the framework in sentences.
    pub(crate) fn movement(&mut self, movements: &[&'static str], has: &str) {
        let (layout, title) = (self.layout, self.title);
        let movement = layout.movement.as_deref().unwrap_or_default();
        self.refuse(
            layout.degree(Role::Tokens) > 1 && !movements.contains(&movement),
            || format!("keys and queries of the plan meet by `{movement}`, and {title} {has}"),
            movements.first().map(|movement| Change::Movement(movement)),
        );
    }

    /// Stages run micro-batches in one of `orders`, the first of which is nearest to others.
    pub(crate) fn pipeline(&mut self, orders: &[PipelineOrder]) {
        let (order, title) = (self.layout.training.pipeline, self.title);
        let is_staged = self.layout.stages() > 1 && self.layout.mode == Mode::Train;
        self.refuse(
            is_staged && !orders.contains(&order),
            || {
                let names: Vec<&str> = orders.iter().map(|order| order.name()).collect();
                format!(
                    "the pipeline of the plan is in order `{}`, and {title} has {}",
                    order.name(),
                    names.join(", ")
                )
            },
            orders.first().map(|order| Change::Pipeline(*order)),
        );
    }

    /// Activations are recomputed by a policy that the framework has; else `nearest` is.
    pub(crate) fn recompute(
        &mut self,
        has: impl Fn(Recompute) -> bool,
        nearest: impl Fn(Recompute) -> Recompute,
    ) {
        let (policy, title) = (self.layout.training.recompute, self.title);
        let is_other = self.layout.mode == Mode::Train && !has(policy);
        self.refuse(
            is_other,
            || format!("the plan recomputes by `{policy}`, and {title} does not"),
            Change::Recompute(nearest(policy)),
        );
    }

    /// Activations of a layer are recomputed in full or not at all.
    pub(crate) fn full_recompute(&mut self) {
        self.recompute(
            |policy| matches!(policy, Recompute::None | Recompute::FULL),
            |policy| if policy == Recompute::Selective { Recompute::None } else { Recompute::FULL },
        );
    }

    /// The loss is computed whole.
    pub(crate) fn whole_loss(&mut self) {
        let (parts, title) = (self.layout.training.loss_chunks, self.title);
        let is_cut = self.layout.mode == Mode::Train && parts > 1;
        self.refuse(
            is_cut,
            || format!("the plan computes the loss in {parts} parts, and {title} in one"),
            Change::WholeLoss,
        );
    }

    /// Chunks of a pipeline have as many layers.
    pub(crate) fn even_stages(&mut self) {
        let (layers, title) = (self.layout.chunk_layers.clone(), self.title);
        let is_uneven = !self.layout.is_even();
        self.refuse(
            is_uneven,
            || {
                format!(
                    "stages of the plan have {}, and {title} cuts layers by a rule of its own",
                    counts(&layers)
                )
            },
            Change::EvenStages,
        );
    }
}

/// The layers of stages in a message: each number, or of many stages the runs of equal ones.
fn counts(layers: &[u64]) -> String {
    const MOST: usize = 8;
    let joined = |numbers: Vec<String>| numbers.join(", ");
    if layers.len() <= MOST {
        return format!("{} layers", joined(layers.iter().map(u64::to_string).collect()));
    }
    let runs: Vec<&[u64]> = layers.chunk_by(|a, b| a == b).collect();
    let shown = runs.iter().take(MOST).map(|run| format!("{}*{}", run[0], run.len())).collect();
    let rest = if runs.len() > MOST { ", …" } else { "" };
    format!("{}{rest} layers (layers*stages, {} in all)", joined(shown), layers.len())
}

/// Whether a framework copies key/value heads where there are fewer than ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Copies {
    Allowed,
    Refused,
}
