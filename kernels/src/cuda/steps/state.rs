//! The state of a run, and one run of a frame.

use ithaca_device::DeviceProgram;
use ithaca_ir::Rank;
use ithaca_ir::layout::At;
use ithaca_ir::schedule::{FrameId, Schedule};
use ithaca_ir::traffic::Ledger;

use crate::cpu::memory::SourcePlan;
use crate::cpu::{Fault, LookForNan, Timings};
use crate::cuda::arguments::Address;
use crate::cuda::collectives::Collectives;
use crate::cuda::options::{Clock, Options};
use crate::cuda::rank::LocalRank;
use crate::cuda::timestamps::Timestamps;
use crate::cuda::watch::{Run, Watch};

/// One run of a frame.
pub(super) struct Scope {
    pub(super) frame: FrameId,
    /// Bytes from the start of the arena.
    pub(super) base: u64,
    pub(super) layer: u64,
    /// The local ranks that run the frame.
    pub(super) locals: Vec<usize>,
    pub(super) at: Option<At>,
    /// The addresses of the arguments for every local rank, including those that do not run the frame.
    pub(super) arguments: Vec<Vec<Address>>,
    pub(super) results: Vec<Vec<Address>>,
}

/// Whether issued work runs or becomes part of a graph.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Recording {
    /// Issued work runs.
    Off,
    /// Issued work becomes part of a graph.
    On,
}

/// The execution of a schedule on the ranks of a process.
pub(in crate::cuda) struct Steps<'a> {
    pub(in crate::cuda) schedule: &'a Schedule,
    pub(in crate::cuda) program: &'a DeviceProgram,
    pub(in crate::cuda) plan: &'a SourcePlan<'a>,
    pub(in crate::cuda) collectives: &'a dyn Collectives,
    pub(in crate::cuda) locals: Vec<LocalRank<'a>>,
    pub(in crate::cuda) clock: Clock,
    pub(super) fault: Option<Fault>,
    pub(super) look_for_nan: LookForNan,
    /// The traffic of each local rank.
    pub(in crate::cuda) ledgers: Vec<Ledger>,
    pub(in crate::cuda) timings: Timings,
    /// The times of tasks, where streams are timed.
    pub(in crate::cuda) timestamps: Timestamps,
    /// The current position of the issue: a rank and its task.
    pub(super) here: Option<(Rank, Run)>,
    pub(super) watch: Watch,
    pub(super) recording: Recording,
}

impl<'a> Steps<'a> {
    pub(in crate::cuda) fn new(
        schedule: &'a Schedule,
        program: &'a DeviceProgram,
        plan: &'a SourcePlan<'a>,
        collectives: &'a dyn Collectives,
        locals: Vec<LocalRank<'a>>,
        options: &Options,
    ) -> Self {
        let watch = Watch::new(locals.len(), options.timeout);
        let ledgers = locals.iter().map(|_| Ledger::default()).collect();
        Self {
            schedule,
            program,
            plan,
            collectives,
            locals,
            clock: options.clock,
            fault: options.fault.clone(),
            look_for_nan: options.look_for_nan,
            here: None,
            watch,
            recording: Recording::Off,
            ledgers,
            timings: Timings::default(),
            timestamps: Timestamps::default(),
        }
    }

    pub(super) fn rank(&self, local: usize) -> Rank {
        self.locals[local].rank
    }

    /// Whether a local rank is at one of `places`; `None` includes all ranks.
    pub(super) fn is_at(&self, local: usize, places: Option<&[At]>) -> bool {
        let (mesh, rank) = (&self.program.mesh, self.rank(local));
        places.is_none_or(|places| places.iter().any(|at| at.has(mesh, rank)))
    }
}
