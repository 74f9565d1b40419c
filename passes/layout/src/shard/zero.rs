//! ZeRO: the parts of parameters, gradients and optimizer states on ranks that split tokens (Rajbhandari et al., arXiv
//! 1910.02054).
//!
//! Ranks that hold other tokens hold the same weights, so one dimension of each tensor can be split among them further
//! than tensor parallelism does: the first that divides, else one that does not, in parts that differ by one. What a stage
//! splits is all that is said here; the collectives follow from layouts, as everywhere:
//!
//! - without ZeRO gradients are all-reduced and every rank makes the same step;
//! - stages 1 and 2 reduce-scatter gradients, make the step on shards, and all-gather new weights;
//! - stage 3 gathers weights where they are used, forward and backward, and keeps none of it;
//! - stage 3 with *persistent* weights does so with those of layers that have more than a number of elements. The others
//!   are whole on every rank and gathered once a step, after the update, as at stage 2: DeepSpeed's
//!   `stage3_param_persistence_threshold`, and beside it the weights outside layers, such as those of embedding and head,
//!   which no other layer computes beside.
//!
//! Without ZeRO and at stage 1 each rank sums the gradients of its own micro-batches, whole, and they are reduced once,
//! with the last micro-batch. From stage 2 on no rank holds a whole gradient: each micro-batch's is reduced as soon as it
//! is made.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use ithaca_ir::module::{Function, Node};
use ithaca_ir::ops::{Binding, Target, state};
use ithaca_ir::{Diagnostic, Module, Op};

use crate::fuse::Fusion;
use crate::fuse::prefetch::Prefetch;

/// What is split over ranks that hold the same weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Zero {
    /// Nothing.
    #[default]
    Off,
    /// States of the optimizer, and gradients (see the module).
    Optimizer,
    /// Gradients too.
    Gradients,
    /// Parameters too.
    Parameters,
    /// Parameters of layers that have more than this number of elements; the others are persistent.
    ParametersAbove(u64),
}

impl Zero {
    /// Every stage, with no persistent weights.
    pub const ALL: [Zero; 4] = [Zero::Off, Zero::Optimizer, Zero::Gradients, Zero::Parameters];

    /// The number of the stage.
    pub fn stage(self) -> u64 {
        match self {
            Zero::Off => 0,
            Zero::Optimizer => 1,
            Zero::Gradients => 2,
            Zero::Parameters | Zero::ParametersAbove(_) => 3,
        }
    }

    /// The stage with no persistent weights.
    #[must_use]
    pub fn without_persistent(self) -> Self {
        match self {
            Zero::ParametersAbove(_) => Zero::Parameters,
            Zero::Off | Zero::Optimizer | Zero::Gradients | Zero::Parameters => self,
        }
    }

    /// Whether a weight of so many elements stays whole although the stage splits weights.
    pub fn keeps(self, weight: WeightSize) -> bool {
        match self {
            Zero::ParametersAbove(most) => !weight.is_per_layer || weight.elements <= most,
            Zero::Off | Zero::Optimizer | Zero::Gradients | Zero::Parameters => false,
        }
    }

    /// The fusion of a plan that asks for none: coalesced messages, folded into kernels, and prefetched weights where
    /// ranks hold parts of them.
    pub fn usual_fusion(self) -> Fusion {
        let usual = Fusion::PACK.folded();
        match self {
            Zero::Off | Zero::Optimizer | Zero::Gradients => usual,
            Zero::Parameters | Zero::ParametersAbove(_) => usual.ahead(Prefetch::default()),
        }
    }

    /// The stage spelled `0` to `3`, `3:ELEMENTS`, or `3:none`, which is 3 where nothing may be chosen.
    ///
    /// # Errors
    /// `P02` for another text.
    pub fn parse(text: &str) -> Result<Self, Diagnostic> {
        text.parse().map_err(|_| {
            Diagnostic::new("P02", format!("there is no ZeRO stage {text}"))
                .help("0 splits nothing, 1 and 2 states of the optimizer and gradients, 3 parameters too")
                .help("3:ELEMENTS splits parameters of layers that have more elements, 3:none all of them")
        })
    }

    /// Whether each rank sums the gradients of its micro-batches before they are reduced.
    pub(super) fn keeps_sums(self) -> bool {
        self <= Zero::Optimizer
    }

    /// Whether the stage splits the tensor under `binding`, unless it is a persistent weight.
    pub(super) fn splits(self, target: Target, binding: &Binding) -> bool {
        let of_optimizer = [state::FIRST_MOMENT, state::SECOND_MOMENT, state::MASTER];
        match target {
            Target::Param => self >= Zero::Parameters,
            Target::State if state::is_gradient(&binding.name) => self >= Zero::Optimizer,
            Target::State => {
                self >= Zero::Optimizer && of_optimizer.iter().any(|p| binding.name.starts_with(p))
            }
        }
    }
}

impl fmt::Display for Zero {
    /// The number of the stage, and that of persistent elements: `3`, `3:65536`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Zero::ParametersAbove(most) => write!(f, "{}:{most}", self.stage()),
            Zero::Off | Zero::Optimizer | Zero::Gradients | Zero::Parameters => write!(f, "{}", self.stage()),
        }
    }
}

impl FromStr for Zero {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let read = match text.split_once(':') {
            Some(("3", "none")) => Some(Zero::Parameters),
            Some(("3", most)) => most.parse().ok().map(Zero::ParametersAbove),
            Some(_) => None,
            None => {
                text.parse().ok().and_then(|stage: u64| Self::ALL.into_iter().find(|z| z.stage() == stage))
            }
        };
        read.ok_or("a stage from 0 to 3, 3:ELEMENTS or 3:none")
    }
}

/// The size of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightSize {
    /// Elements of the whole tensor, of one layer.
    pub elements: u64,
    /// Whether every layer has one.
    pub is_per_layer: bool,
}

impl WeightSize {
    /// The sizes of the weights of a program, by name.
    pub fn all(module: &Module) -> BTreeMap<String, WeightSize> {
        let nodes = module.functions.values().flat_map(|f| f.nodes.iter().map(move |n| (f, n)));
        let size = |(function, node): (&Function, &Node)| {
            let Op::Param(binding) = &node.op else { return None };
            let shape = module.space.shape(function.ty(node.result()));
            let size = WeightSize { elements: shape.iter().product(), is_per_layer: binding.is_per_layer() };
            Some((binding.name.clone(), size))
        };
        nodes.filter_map(size).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_print_as_they_are_read() {
        for zero in Zero::ALL.into_iter().chain([0, 65_536].map(Zero::ParametersAbove)) {
            assert_eq!(Zero::parse(&zero.to_string()).unwrap(), zero);
        }
        for wrong in ["", "4", "2:0", "3:", "3:many", "3:-1", "three"] {
            assert_eq!(Zero::parse(wrong).unwrap_err().code, "P02", "{wrong}");
        }
    }
}
