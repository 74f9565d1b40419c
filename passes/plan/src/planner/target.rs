//! The framework that a plan is for: which candidates it can run, and their names there.

use ithaca_differentiate::Training;
use ithaca_frameworks::{Framework, Layout, Refusal, check, prepare, row, settings};
use ithaca_import::{Facts, Mode, Workload};
use ithaca_ir::{Diagnostic, Mesh};
use ithaca_layout::registry::Registry;
use ithaca_layout::shard::strategy::STAGE_AXIS;
use ithaca_layout::shard::{ShardOptions, Zero};

/// The framework that a plan is for, with what its rules ask of the model and the workload.
#[derive(Clone, Debug, PartialEq)]
pub struct Target {
    /// The framework.
    pub framework: Framework,
    /// The model.
    pub facts: Facts,
    /// The workload, without stages.
    pub workload: Workload,
}

/// Which parts of a training step a candidate states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stated {
    /// All of them.
    Whole,
    /// The layout, and the ZeRO stage where it is not chosen later, as the others are.
    Layout(Option<Zero>),
}

impl Target {
    /// The candidates that the framework can run, with the token order that it has and, unless the request names one, the order of
    /// axes; the refusals of one of the others.
    pub(super) fn admitted(
        &self,
        registry: &Registry,
        candidates: Vec<ShardOptions>,
        stated: Stated,
        named_mesh: Option<&Mesh>,
    ) -> (Vec<ShardOptions>, Vec<Refusal>) {
        let (mut admitted, mut refusals): (Vec<ShardOptions>, Vec<Refusal>) = (Vec::new(), Vec::new());
        // Layouts that break a rule of their own, which refuses them later.
        let mut illegal = Vec::new();
        for options in candidates {
            let mut options = prepare(self.framework, options);
            let Ok(mut layout) = self.layout(registry, &options, None) else {
                illegal.push(options);
                continue;
            };
            let order = self.framework.order(&layout);
            if !order.is_identity() && named_mesh.is_none() {
                let sized = |name: &str| Some((name.to_owned(), options.mesh.size(options.mesh.axis(name)?)));
                options.mesh = Mesh::new(order.names().filter_map(sized));
                layout = match self.layout(registry, &options, None) {
                    Ok(layout) => layout,
                    Err(_) => continue,
                };
            }
            let refused = match stated {
                Stated::Whole => self.refusals(&layout),
                Stated::Layout(zero) => self.refusals_of_any(&layout, zero),
            };
            if !refused.is_empty() {
                if refusals.is_empty() || refused.len() < refusals.len() {
                    refusals = refused;
                }
            } else if !admitted.contains(&options) {
                admitted.push(options);
            }
        }
        if !admitted.is_empty() || refusals.is_empty() {
            admitted.extend(illegal);
        }
        (admitted, refusals)
    }

    /// A layout in the terms of frameworks; the training step is that of the workload when `None`.
    pub(super) fn layout(
        &self,
        registry: &Registry,
        options: &ShardOptions,
        training: Option<&Training>,
    ) -> Result<Layout, Diagnostic> {
        let stages = options.mesh.axis(STAGE_AXIS).map_or(1, |axis| options.mesh.size(axis));
        let training = Training { stages, ..training.unwrap_or(&self.workload.training).clone() };
        let workload = Workload { training, ..self.workload.clone() };
        Layout::new(registry, options, &workload, &self.facts, None)
    }

    /// Why the framework cannot run a layout on GPUs in the order of its mesh.
    pub(super) fn refusals(&self, layout: &Layout) -> Vec<Refusal> {
        let mut refusals = check(self.framework, layout, &self.facts);
        let order = self.framework.order(layout);
        if !order.is_identity() {
            let reason = format!("{} numbers ranks {}, fastest first", self.framework.title(), order.axes());
            refusals.push(Refusal { reason, change: None });
        }
        refusals
    }

    /// As [`refusals`](Self::refusals) of a layout whose training step is chosen later: those that it has with every choice.
    fn refusals_of_any(&self, layout: &Layout, zero: Option<Zero>) -> Vec<Refusal> {
        if self.workload.mode != Mode::Train {
            return self.refusals(layout);
        }
        // As many micro-batches as there can be.
        let most = (layout.batch / layout.data().max(1)).max(1);
        let micro_batches = match layout.training.micro_batches {
            1 => most,
            n => n,
        };
        let training = Training { micro_batches, ..layout.training.clone() };
        let with = |zero: Zero| self.refusals(&Layout { zero, training: training.clone(), ..layout.clone() });
        let all: Vec<Vec<Refusal>> = match zero {
            Some(zero) => vec![with(zero)],
            None => Zero::ALL.into_iter().map(with).collect(),
        };
        all.into_iter().min_by_key(Vec::len).unwrap_or_default()
    }

    /// The settings of a layout in a line.
    pub(super) fn names(
        &self,
        registry: &Registry,
        options: &ShardOptions,
        training: Option<&Training>,
    ) -> String {
        self.layout(registry, options, training)
            .map(|layout| row(&settings(self.framework, &layout, &self.facts), self.framework.is_command()))
            .unwrap_or_default()
    }
}
