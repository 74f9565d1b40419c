//! How often functions run and for which layers, where calls nest.
//!
//! A call runs for its `layers`, further by `stride` for each layer of its caller: a group of four layers calls
//! `layers=0..4, stride=4`, and runs for layers 8 to 11 as group 2. With a stride of zero, as most calls have it, the layers
//! are the same whoever calls.

use std::collections::BTreeMap;

use crate::entity::Entity;
use crate::handles::{Layers, MAX_LAYERS};
use crate::layout::At;
use crate::module::Module;
use crate::ops::table::op::Op;
use crate::ops::table::structure::Stage;
use crate::order::joined;

/// The layers of a call that a function makes while it runs for layer `caller`.
pub fn shifted(layers: &Layers, stride: u64, caller: u64) -> Layers {
    let by = stride.saturating_mul(caller);
    layers.start.saturating_add(by)..layers.end.saturating_add(by)
}

/// The layers of a call whose caller runs for `callers`: ascending ranges that do not meet, up to the most layers that a
/// model has.
pub fn called(callers: &[Layers], layers: &Layers, stride: u64) -> Vec<Layers> {
    if stride == 0 {
        return vec![layers.clone()];
    }
    let all = callers.iter().cloned().flatten().map(|caller| shifted(layers, stride, caller));
    joined(all.take_while(|l| l.end <= MAX_LAYERS).collect())
}

/// A call of a function or of a frame, by its number.
pub(crate) struct Call<'a> {
    pub(crate) callee: usize,
    pub(crate) layers: &'a Layers,
    pub(crate) stride: u64,
    pub(crate) stage: Option<Stage>,
}

/// The runs of a function by the ranks of one place.
#[derive(Clone, Debug, Default)]
pub(crate) struct Runs {
    /// The layers, as ascending ranges that do not touch.
    pub(crate) layers: Vec<Layers>,
    /// How often it runs in one run of `main`; layers count.
    pub(crate) count: u64,
}

/// For each of `n` functions its runs, by the ranks that run it: all of them where there is no place. `main` runs for layer
/// 0, and a function that nobody calls does not run. Callees come before their callers.
pub(crate) fn runs_by_place<'a, C: IntoIterator<Item = Call<'a>>>(
    n: usize,
    main: Option<usize>,
    calls: impl Fn(usize) -> C,
) -> Vec<BTreeMap<Option<At>, Runs>> {
    let mut all: Vec<BTreeMap<Option<At>, Runs>> = vec![BTreeMap::new(); n];
    for caller in (0..n).rev() {
        if main == Some(caller) {
            all[caller].insert(None, Runs { layers: std::iter::once(0..1).collect(), count: 1 });
        }
        for runs in all[caller].values_mut() {
            runs.layers = joined(std::mem::take(&mut runs.layers));
        }
        let own = all[caller].clone();
        for Call { callee, layers, stride, stage } in calls(caller) {
            let Some(callee) = all.get_mut(callee) else { continue };
            for (&at, runs) in &own {
                let there = callee.entry(stage.and_then(Stage::at).or(at)).or_default();
                there.layers.extend(called(&runs.layers, layers, stride));
                let more = runs.count.saturating_mul(layers.end.saturating_sub(layers.start));
                there.count = there.count.saturating_add(more);
            }
        }
    }
    all
}

/// For each function or frame the layers of its runs, with the ranks that run it.
pub(crate) fn by_place(runs: Vec<BTreeMap<Option<At>, Runs>>) -> Vec<Vec<(Layers, Option<At>)>> {
    let layers = |(at, runs): (Option<At>, Runs)| runs.layers.into_iter().map(move |layers| (layers, at));
    runs.into_iter().map(|of_one| of_one.into_iter().flat_map(layers).collect()).collect()
}

impl Module {
    fn runs(&self) -> Vec<BTreeMap<Option<At>, Runs>> {
        runs_by_place(self.functions.len(), self.main().map(Entity::index), |caller| {
            self.functions[Entity::new(caller)].nodes.iter().filter_map(|node| match &node.op {
                Op::Call { callee, layers, stride, stage, scan: _ } => {
                    Some(Call { callee: callee.index(), layers, stride: *stride, stage: *stage })
                }
                _ => None,
            })
        })
    }

    /// For each function the ranks that run it, with how often they do in one run of `main`; layers count. All ranks
    /// do where there is no place.
    pub fn runs_by_place(&self) -> Vec<BTreeMap<Option<At>, u64>> {
        let counts = |runs: BTreeMap<_, Runs>| runs.into_iter().map(|(at, runs)| (at, runs.count)).collect();
        self.runs().into_iter().map(counts).collect()
    }

    /// How often each function runs in one run of `main`, indexed by function; layers count.
    pub fn run_counts(&self) -> Vec<u64> {
        let sum =
            |runs: &BTreeMap<_, Runs>| runs.values().fold(0, |n: u64, runs| n.saturating_add(runs.count));
        self.runs().iter().map(sum).collect()
    }

    /// For each function the layers that it runs for, as ascending ranges that do not touch; `main` runs for layer 0, and a
    /// function that nobody calls for none.
    pub fn layers_of_functions(&self) -> Vec<Vec<Layers>> {
        let layers =
            |runs: BTreeMap<_, Runs>| joined(runs.into_values().flat_map(|runs| runs.layers).collect());
        self.runs().into_iter().map(layers).collect()
    }

    /// As [`Self::layers_of_functions`], for each group of ranks that runs a function; all ranks where there is no place.
    pub fn layers_by_place(&self) -> Vec<Vec<(Layers, Option<At>)>> {
        by_place(self.runs())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The layers that a call runs for, called by layers `callers`.
    fn by(callers: Layers, layers: Layers, stride: u64) -> Vec<(u64, u64)> {
        let called = called(&[callers.start..callers.end, callers], &layers, stride);
        called.into_iter().map(|l| (l.start, l.end)).collect()
    }

    #[test]
    fn groups_of_layers_make_up_the_layers() {
        assert_eq!(by(0..8, 0..4, 4), [(0, 32)]);
        assert_eq!(by(1..3, 1..3, 4), [(5, 7), (9, 11)]);
        assert_eq!(by(0..8, 3..4, 0), [(3, 4)]);
        assert_eq!(shifted(&(1..3), 4, 2), 9..11);
    }

    #[test]
    fn layers_that_no_model_has_are_left_out() {
        assert_eq!(by(0..2, 0..1, u64::MAX), [(0, 1)]);
    }
}
