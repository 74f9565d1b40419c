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
use crate::cuda::moments::Moments;
use crate::cuda::options::{Clock, Options};
use crate::cuda::rank::Seat;
use crate::cuda::watch::{Run, Watch};

/// One run of a frame.
pub(super) struct Scope {
    pub(super) frame: FrameId,
    /// Bytes from the start of the arena.
    pub(super) base: u64,
    pub(super) layer: u64,
    /// The ranks that run the frame, by number of their seats.
    pub(super) seats: Vec<usize>,
    pub(super) at: Option<At>,
    /// For each seat, those that do not run the frame included, the addresses of its arguments.
    pub(super) arguments: Vec<Vec<Address>>,
    pub(super) results: Vec<Vec<Address>>,
}

/// Whether what is issued is done.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Recording {
    /// It is.
    Off,
    /// It becomes part of a graph.
    On,
}

/// A schedule on the ranks of a process.
pub(in crate::cuda) struct Steps<'a> {
    pub(in crate::cuda) schedule: &'a Schedule,
    pub(in crate::cuda) program: &'a DeviceProgram,
    pub(in crate::cuda) plan: &'a SourcePlan<'a>,
    pub(in crate::cuda) collectives: &'a dyn Collectives,
    pub(in crate::cuda) seats: Vec<Seat<'a>>,
    pub(in crate::cuda) clock: Clock,
    pub(super) fault: Option<Fault>,
    pub(super) look_for_nan: LookForNan,
    /// What each rank sent, by number of its seat.
    pub(in crate::cuda) ledgers: Vec<Ledger>,
    pub(in crate::cuda) timings: Timings,
    /// When tasks ran, where streams are timed.
    pub(in crate::cuda) moments: Moments,
    /// Where the issue is: a rank and its task.
    pub(super) here: Option<(Rank, Run)>,
    pub(super) watch: Watch,
    /// How what is issued comes to run.
    pub(super) recording: Recording,
}

impl<'a> Steps<'a> {
    pub(in crate::cuda) fn new(
        schedule: &'a Schedule,
        program: &'a DeviceProgram,
        plan: &'a SourcePlan<'a>,
        collectives: &'a dyn Collectives,
        seats: Vec<Seat<'a>>,
        options: &Options,
    ) -> Self {
        let watch = Watch::new(seats.len(), options.timeout);
        let ledgers = seats.iter().map(|_| Ledger::default()).collect();
        Self {
            schedule,
            program,
            plan,
            collectives,
            seats,
            clock: options.clock,
            fault: options.fault.clone(),
            look_for_nan: options.look_for_nan,
            here: None,
            watch,
            recording: Recording::Off,
            ledgers,
            timings: Timings::default(),
            moments: Moments::default(),
        }
    }

    pub(super) fn rank(&self, seat: usize) -> Rank {
        self.seats[seat].rank
    }

    /// Whether the rank of a seat is at one of some places; it is where there is no list.
    pub(super) fn is_at(&self, seat: usize, places: Option<&[At]>) -> bool {
        let (mesh, rank) = (&self.program.mesh, self.rank(seat));
        places.is_none_or(|places| places.iter().any(|at| at.has(mesh, rank)))
    }
}
