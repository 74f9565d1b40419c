//! The order in which a framework numbers ranks, beside that of the mesh.
//!
//! The price of a plan holds for its mesh: rank `r` on GPU `r`, the last axis fastest. A framework has an order of its own, stated as
//! roles, fastest first; axes of a role keep their order.

use std::fmt::Write;

use crate::layout::{Axis, Layout, Role};

/// Which rank of the framework each rank of the mesh is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Permutation {
    /// The axes as the framework numbers them, fastest first, each with its stride in the mesh.
    axes: Vec<(Axis, u64)>,
    ranks: u64,
}

impl Permutation {
    /// The order of `roles`, fastest first; axes of other roles are slowest.
    pub(crate) fn new(layout: &Layout, roles: &[Role]) -> Self {
        let mut stride = 1;
        let mut strided: Vec<(Axis, u64)> = Vec::new();
        for axis in layout.axes.iter().rev() {
            strided.push((axis.clone(), stride));
            stride *= axis.size;
        }
        let place = |axis: &Axis| roles.iter().position(|role| *role == axis.role).unwrap_or(roles.len());
        strided.sort_by_key(|(axis, _)| place(axis));
        Self { axes: strided, ranks: stride }
    }

    /// The order of the mesh itself.
    pub(crate) fn of_mesh(layout: &Layout) -> Self {
        Self::new(layout, &[])
    }

    /// Whether both number ranks alike.
    pub fn is_identity(&self) -> bool {
        self.axes.windows(2).all(|pair| pair[0].1 < pair[1].1)
    }

    /// The names of the axes as the framework numbers them, major to minor.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.axes.iter().rev().map(|(axis, _)| axis.name.as_str())
    }

    /// The rank of the mesh that is the framework's rank `rank`.
    pub fn of_framework(&self, rank: u64) -> u64 {
        let (mut rest, mut mesh) = (rank, 0);
        for (axis, stride) in &self.axes {
            mesh += rest % axis.size * stride;
            rest /= axis.size;
        }
        mesh
    }

    /// The framework's rank of each rank of the mesh.
    pub fn to_framework(&self) -> Vec<u64> {
        let mut ranks = vec![0; usize::try_from(self.ranks).unwrap_or(0)];
        for rank in 0..self.ranks {
            ranks[usize::try_from(self.of_framework(rank)).unwrap_or(0)] = rank;
        }
        ranks
    }

    /// The groups of the framework's ranks along axes of these roles, in order of their first ranks.
    pub fn groups(&self, roles: &[Role]) -> Vec<Vec<u64>> {
        let mut strides = Vec::new();
        let mut stride = 1;
        for (axis, _) in &self.axes {
            strides.push((axis, stride));
            stride *= axis.size;
        }
        let mut offsets = vec![0];
        for (axis, stride) in strides.iter().filter(|(axis, _)| roles.contains(&axis.role)) {
            offsets = (0..axis.size).flat_map(|i| offsets.iter().map(move |o| o + i * stride)).collect();
        }
        let is_first = |rank: &u64| {
            strides
                .iter()
                .filter(|(axis, _)| roles.contains(&axis.role))
                .all(|(axis, stride)| (rank / stride).is_multiple_of(axis.size))
        };
        (0..self.ranks).filter(is_first).map(|first| offsets.iter().map(|o| first + o).collect()).collect()
    }

    /// The axes, fastest first, as `tp=2, cp=4`.
    pub fn axes(&self) -> String {
        let mut text = String::new();
        for (i, (axis, _)) in self.axes.iter().enumerate() {
            // Writing to a string cannot fail.
            let _ = write!(text, "{}{}={}", if i > 0 { ", " } else { "" }, axis.name, axis.size);
        }
        text
    }

    /// How ranks are numbered, in a sentence, and what the launcher must do where the mesh numbers them otherwise.
    pub fn sentence(&self, framework: &str) -> String {
        if self.axes.len() < 2 {
            return format!("ranks of {framework} are those of the plan");
        }
        if self.is_identity() {
            return format!("ranks of {framework} are those of the plan: {}, fastest first", self.axes());
        }
        let ranks = self.to_framework();
        let list = if ranks.len() <= 64 {
            let ranks: Vec<String> = ranks.iter().map(u64::to_string).collect();
            format!("; GPUs 0 to {} of the plan have the ranks {}", ranks.len() - 1, ranks.join(" "))
        } else {
            let terms: Vec<String> = self
                .axes
                .iter()
                .map(|(a, stride)| format!("{} (GPU / {stride} % {})", a.name, a.size))
                .collect();
            format!("; the rank of a GPU of the plan has the digits {}", terms.join(", "))
        };
        format!(
            "{framework} numbers ranks {}, fastest first, and the mesh of the plan otherwise: start each process with this RANK on \
             its GPU, or groups span other links than those of the price{list}",
            self.axes()
        )
    }
}
