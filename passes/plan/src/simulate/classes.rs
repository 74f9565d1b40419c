//! The ranks that are simulated: one for each combination of coordinates that may make a difference.
//!
//! Along most axes all ranks do the same at the same time. They differ along axes that split a sequence which a masked
//! attention reads, along which parts travel or tokens are fetched, and that split something unevenly. Ranks that differ
//! along other axes only are taken to be alike.

use ithaca_ir::schedule::{Content, Schedule, Work};
use ithaca_ir::{AxisId, Mask, Mesh, Rank, Space, TensorType};

use crate::cluster::Cluster;

/// Representatives of all ranks.
#[derive(Clone, Debug)]
pub(super) struct Classes {
    mesh: Mesh,
    /// The axes along which ranks differ, major to minor; in a sample those of stages first.
    axes: Vec<AxisId>,
    ranks: Vec<Rank>,
    /// Every how many combinations of a stage one is simulated; one when the simulation is exact.
    step: usize,
    /// Number of all combinations of a stage; of all combinations when the simulation is exact.
    all: usize,
    /// How many of them are simulated.
    simulated: usize,
}

/// Ranks that are simulated at most, but for the last one of a sample, and one of each stage.
const RANKS: usize = 64;

impl Classes {
    /// Those of the group of ranks that crosses the most levels of the cluster: where groups fit no node, the others wait for it.
    pub(super) fn of(cluster: &Cluster, schedule: &Schedule) -> Self {
        let mesh = &schedule.space.mesh;
        let [axes, stages] = axes(schedule);
        let first = farthest(cluster, mesh, &axes);
        Self::along((mesh, first), axes, &stages, RANKS)
    }

    /// All combinations, if there are at most `most`.
    pub(super) fn all(schedule: &Schedule, most: usize) -> Option<Self> {
        let [axes, stages] = axes(schedule);
        let classes = Self::along((&schedule.space.mesh, Rank(0)), axes, &stages, most);
        classes.is_exact().then_some(classes)
    }

    /// A sample has ranks of each stage: one waits for the next.
    fn along((mesh, first): (&Mesh, Rank), mut axes: Vec<AxisId>, stages: &[AxisId], most: usize) -> Self {
        let degree = |axes: &[AxisId]| usize::try_from(mesh.degree(axes)).unwrap_or(usize::MAX);
        let (mut all, mut step, mut n_stages) = (degree(&axes), 1, 1);
        if all > most {
            // Stable: other axes stay major to minor.
            axes.sort_by_key(|axis| !stages.contains(axis));
            n_stages = degree(stages);
            all /= n_stages;
            step = all.div_ceil((most / n_stages).max(1));
        }
        let group = mesh.group_along(first, &axes);
        let last = all - 1;
        let within: Vec<usize> = (0..all).step_by(step).chain((last % step != 0).then_some(last)).collect();
        let ranks = (0..n_stages).flat_map(|stage| within.iter().map(move |i| stage * all + i));
        let ranks = ranks.map(|i| group[i]).collect();
        Self { mesh: mesh.clone(), axes, ranks, step, all, simulated: within.len() }
    }

    /// The ranks, by their combination of coordinates.
    pub(super) fn ranks(&self) -> &[Rank] {
        &self.ranks
    }

    /// Whether every combination is simulated.
    pub(super) fn is_exact(&self) -> bool {
        self.step == 1
    }

    /// The number of a rank's combination of coordinates, all combinations counted.
    pub(super) fn combination(&self, rank: Rank) -> usize {
        usize::try_from(self.mesh.coordinate_along(rank, &self.axes)).unwrap_or(usize::MAX)
    }

    /// The simulated rank that represents `rank`; in a sample the next one beyond, seen from the `from`-th.
    pub(super) fn standing_for(&self, rank: Rank, from: usize) -> usize {
        let combination = self.combination(rank);
        let (stage, i) = (combination / self.all, combination % self.all);
        let from = from % self.simulated;
        let is_beyond = i > from * self.step || i == self.all - 1;
        let within = if is_beyond { i.div_ceil(self.step).min(self.simulated - 1) } else { i / self.step };
        stage * self.simulated + within
    }

    /// The simulated ranks in the group of the `c`-th along `axes`, itself left out.
    pub(super) fn group(&self, c: usize, axes: &[AxisId]) -> Vec<usize> {
        let fixed: Vec<AxisId> = self.axes.iter().copied().filter(|a| !axes.contains(a)).collect();
        let place = |c: usize| self.mesh.coordinate_along(self.ranks[c], &fixed);
        (0..self.ranks.len()).filter(|&other| other != c && place(other) == place(c)).collect()
    }
}

/// Groups that are looked at for the one that crosses the most levels, and ranks of each.
const LOOKED_AT: usize = 64;

/// The first rank of the group along some axes whose neighbours are the farthest from each other.
fn farthest(cluster: &Cluster, mesh: &Mesh, axes: &[AxisId]) -> Rank {
    let others: Vec<AxisId> = mesh.axes.ids().filter(|axis| !axes.contains(axis)).collect();
    let crossed = |first: &Rank| -> usize {
        let group = mesh.group_along(*first, axes);
        group.windows(2).take(LOOKED_AT).map(|pair| cluster.level_between(pair[0], pair[1])).sum()
    };
    let firsts = mesh.group_along(Rank(0), &others).into_iter().take(LOOKED_AT);
    // The first of several.
    firsts.rev().max_by_key(crossed).unwrap_or(Rank(0))
}

/// The axes along which ranks have different work, and those of them that are stages.
fn axes(schedule: &Schedule) -> [Vec<AxisId>; 2] {
    let space = &schedule.space;
    let (mut axes, mut stages) = (Vec::new(), Vec::new());
    for frame in schedule.frames.values() {
        for buffer in frame.buffers.values() {
            if let Content::Tensor(ty) = &buffer.content {
                axes.extend(uneven_axes(space, ty));
            }
        }
        stages.extend(frame.stages().iter().map(|at| at.axis));
        for task in &frame.tasks {
            let operand = |i: usize| match task.reads.get(i).map(|&b| &frame.buffers[b].content) {
                Some(Content::Tensor(ty)) => Some(ty),
                Some(Content::Wire { .. }) | None => None,
            };
            match &task.work {
                Work::Compute(op) => {
                    let found = operand(1).and_then(|k| op.attention_of(k));
                    if let Some((a, keys)) = found.filter(|(a, _)| a.mask != Mask::Full) {
                        axes.extend(operand(0).into_iter().flat_map(|q| q.axes_of(a.queries)));
                        axes.extend(keys);
                    }
                }
                Work::Pack(t) | Work::Exchange(t) | Work::Unpack(t) => {
                    let types = t.parcels().iter().flat_map(|p| [&p.from, &p.to]);
                    axes.extend(types.flat_map(|ty| uneven_axes(space, ty)));
                }
                Work::Copy | Work::Call { .. } => {}
            }
        }
    }
    axes.extend(&stages);
    [axes, stages].map(|mut axes| {
        axes.retain(|&a| space.mesh.size(a) > 1);
        axes.sort_unstable();
        axes.dedup();
        axes
    })
}

/// Axes along which ranks hold different amounts of a type, or parts of others.
fn uneven_axes(space: &Space, ty: &TensorType) -> Vec<AxisId> {
    let moved = ty.layout.moved.iter().map(|m| m.axis);
    let ragged = ty.dims.iter().zip(&ty.layout.split).filter(|&(&d, axes)| {
        !axes.is_empty()
            && (space.dims[d].fetched.is_some() || !space.dims[d].divides_evenly(space.mesh.degree(axes)))
    });
    moved.chain(ragged.flat_map(|(_, axes)| axes.iter().copied())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_has_the_first_and_the_last_rank() {
        let mesh = Mesh::new([("ring", 100), ("u", 2)]);
        let axes = vec![mesh.axis("ring").unwrap()];
        let classes = Classes::along((&mesh, Rank(0)), axes, &[], RANKS);
        assert!(!classes.is_exact());
        assert_eq!((classes.ranks()[0], *classes.ranks().last().unwrap()), (Rank(0), Rank(198)));
        // Every second one is simulated; neighbours are those beyond.
        assert_eq!(classes.ranks()[5], Rank(20));
        assert_eq!(classes.standing_for(Rank(22), 5), 6);
        assert_eq!(classes.standing_for(Rank(18), 5), 4);
        assert_eq!(classes.standing_for(Rank(0), 50), 0);
    }

    #[test]
    fn a_sample_has_ranks_of_every_stage() {
        let mesh = Mesh::new([("cp", 8), ("pp", 16)]);
        let [cp, pp] = ["cp", "pp"].map(|a| mesh.axis(a).unwrap());
        let classes = Classes::along((&mesh, Rank(0)), vec![cp, pp], &[pp], RANKS);
        // Of each stage the ranks 0, 2, 4, 6 and 7 of `cp`.
        assert_eq!(classes.ranks()[..6], [0, 32, 64, 96, 112, 1].map(Rank));
        assert_eq!(classes.ranks().len(), 80);
        for (c, &rank) in classes.ranks().iter().enumerate() {
            assert_eq!(classes.standing_for(rank, c), c, "{rank:?}");
        }
        let next = mesh.with_coordinate(Rank(32), pp, 1);
        assert_eq!(classes.standing_for(next, 1), 6);
        assert_eq!(classes.group(1, &[pp]).len(), 15);
    }

    #[test]
    fn groups_that_fit_no_node_are_simulated_on_two() {
        let cluster = Cluster::named("dgx-h100").unwrap();
        for (data, ranks, first) in [(4, 5, 5), (4, 4, 0), (2, 16, 0), (6, 3, 6)] {
            let mesh = Mesh::new([("dp", data), ("cp", ranks)]);
            assert_eq!(farthest(&cluster, &mesh, &[mesh.axis("cp").unwrap()]), Rank(first), "{mesh}");
        }
    }

    #[test]
    fn groups_are_along_axes() {
        let mesh = Mesh::new([("o", 2), ("r", 3), ("u", 2)]);
        let [o, r] = ["o", "r"].map(|a| mesh.axis(a).unwrap());
        let classes = Classes::along((&mesh, Rank(0)), vec![o, r], &[], RANKS);
        assert!(classes.is_exact());
        assert_eq!(classes.ranks(), [0, 2, 4, 6, 8, 10].map(Rank));
        assert_eq!(classes.group(1, &[r]), [0, 2]);
        assert_eq!(classes.group(1, &[o]), [4]);
        assert!(classes.group(1, &[mesh.axis("u").unwrap()]).is_empty());
        assert_eq!(classes.standing_for(Rank(7), 0), 3);
    }
}
