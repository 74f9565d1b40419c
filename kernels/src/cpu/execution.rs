//! The results and measurements of a run.

use ithaca_ir::Mesh;
use ithaca_ir::layout::At;
use ithaca_ir::timeline::Span;
use ithaca_ir::traffic::Traffic;

use super::memory::Peak;
use super::timings::Timings;
use crate::tensor::Outputs;

/// The results and measurements of a run.
#[derive(Clone, Debug)]
pub struct Execution {
    /// The outputs of `main`, assembled from all ranks and cut to the valid part.
    pub outputs: Outputs<f32>,
    /// Every weight and state that the schedule writes, assembled from all ranks, under its stored name and in its
    /// stored shape, in order of names; [`Layered`](crate::store::Layered) over the weights the next step reads
    /// it.
    pub kept: Outputs<f32>,
    /// The traffic, counted when it was sent, in bytes of the schedule's element types.
    pub traffic: Vec<Traffic>,
    /// The measured peak of each rank, in order of ranks.
    pub peaks: Vec<Peak>,
    /// How long tasks took, of all ranks together.
    pub timings: Timings,
    /// Bytes of memory that arenas, weights, states and inputs took on this machine.
    pub memory_bytes: u64,
    /// When tasks ran, seconds from when the ranks of a process began, if requested: in order of ranks, the
    /// compute stream first.
    pub spans: Vec<Span>,
    /// For each span the seconds in which its thread was on a processor, without the helpers of a kernel; of a GPU its length.
    pub busy: Vec<f64>,
}

impl Execution {
    /// The most that a rank of a place used, kind by kind; of all ranks where there is no place.
    pub fn peak_at(&self, mesh: &Mesh, at: Option<At>) -> Peak {
        let here =
            mesh.iter_ranks().zip(&self.peaks).filter(|(rank, _)| at.is_none_or(|at| at.has(mesh, *rank)));
        here.fold(Peak::default(), |most, (_, peak)| most.or(peak))
    }
}
