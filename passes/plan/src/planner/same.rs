//! Candidates with the same program are one plan: the first by rank stays and names the others.
//!
//! Two candidates have the same program if their ranks compute and hold the same for as long and send the same messages along
//! axes of the same names and sizes. Then only the order of the axes differs, on links that are alike.

use ithaca_differentiate::Training;

use crate::plan::{self, MeshAxis, rounded};
use crate::planner::outcomes::{Outline, Priced};

/// Merges the candidates with the same program, which are sorted by rank.
pub(super) fn merge(sorted: &mut Vec<Priced>) {
    let mut kept: Vec<Priced> = Vec::with_capacity(sorted.len());
    // Candidates with the same program have the same step and memory, so they are neighbours.
    let mut neighbours = 0;
    for candidate in sorted.drain(..) {
        let is_neighbour = |other: &Priced| {
            rounded(other.simulation.seconds) == rounded(candidate.simulation.seconds)
                && other.memory.total == candidate.memory.total
        };
        if !kept.last().is_some_and(is_neighbour) {
            neighbours = kept.len();
        }
        let traits = (neighbours < kept.len()).then(|| Traits::of(&candidate));
        let same = kept[neighbours..].iter_mut().find(|other| Some(Traits::of(other)) == traits);
        match same {
            Some(other) => other.also.push(plan::layout_text(
                &candidate.options.strategy_text(),
                &plan::mesh_axes(&candidate.options.mesh),
            )),
            None => kept.push(candidate),
        }
    }
    *sorted = kept;
}

/// What candidates with the same program share.
#[derive(PartialEq)]
struct Traits {
    training: Option<Training>,
    axes: Vec<MeshAxis>,
    compute: f64,
    exposed: f64,
    outline: Outline,
}

impl Traits {
    fn of(candidate: &Priced) -> Self {
        let mut axes = plan::mesh_axes(&candidate.options.mesh);
        axes.sort();
        Self {
            training: candidate.training.clone(),
            axes,
            compute: rounded(candidate.simulation.compute),
            exposed: rounded(candidate.simulation.exposed()),
            outline: candidate.outline().into_owned(),
        }
    }
}
