//! One of several processes: it checks that all run the same schedule, runs its rank, and exits as the others do.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use ithaca_ir::Rank;
use ithaca_ir::schedule::{Content, Schedule, Stream};

use super::connections::Connections;
use super::error::{LaunchError, Phase};
use super::frame::{Kind, Limits, SMALL, malformed};
use crate::cpu::{Communicator, Execution, Job, Options, RankResult};
use crate::digest::fnv1a;
use crate::error::RunError;
use crate::store::TensorSource;
use crate::tensor::{Outputs, Tensor};

/// The time for which open connections are waited for at the end.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// One of several processes that run the ranks of a schedule, connected to all the others.
///
/// Dropping it reports a failure to the others; [`finish`](Self::finish) ends the run.
#[derive(Debug)]
pub struct Process {
    connections: Connections,
    local_rank: Option<u64>,
    /// The stored tensors of which each process reads a part, in any run on which all agreed.
    reads: RefCell<BTreeMap<u64, BTreeSet<String>>>,
    has_ended: bool,
}

/// A run on which all processes agree, of the ranks of all of them or of some in a row.
#[derive(Debug)]
pub struct Agreement<'p> {
    process: &'p Process,
    job: Job<'p>,
    members: Members<'p>,
}

/// The processes of a run: rank 0 is the process `first`.
#[derive(Debug)]
struct Members<'p> {
    connections: &'p Connections,
    first: u64,
    ranks: u64,
}

impl Members<'_> {
    /// The rank of a process.
    fn rank(&self, process: u64) -> Option<Rank> {
        process.checked_sub(self.first).filter(|&rank| rank < self.ranks).map(Rank)
    }

    fn process(&self, rank: Rank) -> Rank {
        Rank(rank.0 + self.first)
    }
}

impl Communicator for Members<'_> {
    fn send(&self, stream: Stream, from: Rank, to: Rank, block: Vec<f32>) -> Result<(), RunError> {
        self.connections.send(stream, self.process(from), self.process(to), block)
    }

    fn receive(&self, stream: Stream, to: Rank, from: Rank) -> Result<Vec<f32>, RunError> {
        self.connections.receive(stream, self.process(to), self.process(from))
    }

    fn check(&self) -> Result<(), RunError> {
        self.connections.check()
    }

    fn finish(&self, rank: Rank) {
        self.connections.finish(self.process(rank));
    }

    fn fail(&self, rank: Rank, error: &RunError) {
        self.connections.fail(self.process(rank), error);
    }
}

/// The result of a step in one process.
#[derive(Clone, Debug)]
pub enum Step {
    /// Rank 0: the assembled results of all ranks.
    Full(Execution),
    /// Another rank: the updated tensors that it reads in the next step, if there is one.
    Local(Outputs<f32>),
}

/// Whether another step follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextStep {
    /// Another step reads the weights and states that this one updates.
    Continues,
    /// This is the last step.
    Last,
}

impl Process {
    pub(super) fn new(connections: Connections, local_rank: Option<u64>) -> Self {
        Self { connections, local_rank, reads: RefCell::default(), has_ended: false }
    }

    /// Its number among the processes of its machine, which is that of its GPU: the launcher's variable, else the rank.
    pub fn local_rank(&self) -> u64 {
        self.local_rank.unwrap_or(self.connections.rank().0)
    }

    /// The rank that runs here.
    pub fn rank(&self) -> Rank {
        self.connections.rank()
    }

    /// Whether this is rank 0, which assembles, compares, writes and prints.
    pub fn is_first(&self) -> bool {
        self.connections.rank() == Rank(0)
    }

    /// Checks that all processes run the same `schedule` with the same `settings`, given as names and values. A process may run
    /// steps of several schedules. Rank 0 of this one is the process `first`.
    ///
    /// # Errors
    /// [`LaunchError::Refused`] when two differ, naming them; [`RunError::RemoteFailure`] and [`RunError::Lost`] when another
    /// fails; as [`Job::of`].
    pub fn agree<'p>(
        &'p self,
        schedule: &'p Schedule,
        first: u64,
        options: &Options,
        settings: &[(&str, String)],
    ) -> Result<Agreement<'p>, RunError> {
        let job = Job::of(schedule)?;
        self.connections.raise_limits(limits(schedule, self.connections.world(), options));
        let connections = &self.connections;
        let digest = |text: &str| fnv1a(text.bytes());
        let mut digests = vec![("schedule".to_owned(), digest(&ithaca_ir::schedule::print(schedule)))];
        digests.extend(settings.iter().map(|(name, value)| ((*name).to_owned(), digest(value))));
        if self.is_first() {
            for other in connections.others() {
                let theirs: Vec<(String, u64)> = connections.message(other, Kind::Agree, Phase::Agreeing)?;
                if theirs == digests {
                    continue;
                }
                let different = digests.iter().zip(&theirs).find(|(ours, theirs)| ours != theirs);
                let setting = different.map_or("run", |((name, _), _)| name);
                let other = connections.describe(other);
                let why =
                    format!("{other} has another {setting} than rank 0: start all with the same arguments");
                connections.abort(&why);
                return Err(LaunchError::Refused(why).into());
            }
            connections.send_to_all(Kind::Agree, &());
        } else {
            connections.send_frame(0, Kind::Agree, &digests);
            connections.message::<()>(0, Kind::Agree, Phase::Agreeing)?;
        }
        let members = Members { connections, first, ranks: schedule.space.mesh.ranks() };
        for other in connections.others() {
            let of_rank = members.rank(other).map(|rank| job.reads(rank));
            self.reads.borrow_mut().entry(other).or_default().extend(of_rank.into_iter().flatten());
        }
        Ok(Agreement { process: self, job, members })
    }

    /// Whether another process is known to have failed.
    pub fn has_failed(&self) -> bool {
        self.connections.check().is_err()
    }

    /// Bytes that rank 0 makes and sends to all ranks. Every process must call it equally often.
    ///
    /// # Errors
    /// Those of `make`, on rank 0; [`RunError::RemoteFailure`] and [`RunError::Lost`] when another rank fails.
    pub fn shared(&self, make: impl FnOnce() -> Result<Vec<u8>, RunError>) -> Result<Vec<u8>, RunError> {
        if self.is_first() {
            let made = make()?;
            self.connections.send_to_all(Kind::Shared, &made);
            return Ok(made);
        }
        self.connections.message(0, Kind::Shared, Phase::Running)
    }

    /// Ends the run: rank 0 sends the exit code of every process, the others wait for it.
    ///
    /// # Errors
    /// [`RunError::RemoteFailure`] or [`RunError::Lost`] when a rank fails before rank 0 has sent the exit code.
    pub fn finish(mut self, code: u8) -> Result<u8, RunError> {
        let exit_code = self.exit_code(code);
        match &exit_code {
            Ok(_) => self.connections.send_to_all(Kind::Finalize, &()),
            Err(error) => self.connections.abort(&error.to_string()),
        }
        self.connections.close(CLOSE_TIMEOUT);
        self.has_ended = true;
        exit_code
    }

    fn exit_code(&self, code: u8) -> Result<u8, RunError> {
        if self.is_first() {
            self.connections.send_to_all(Kind::ExitCode, &code);
            return Ok(code);
        }
        self.connections.message(0, Kind::ExitCode, Phase::Collecting)
    }

    /// Ends the run with an error, which is sent to the others unless a failure has been sent before.
    pub fn fail(mut self, why: &str) {
        self.connections.abort(why);
        self.connections.close(CLOSE_TIMEOUT);
        self.has_ended = true;
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !self.has_ended {
            self.connections.abort("it ended without a message");
            self.connections.close(CLOSE_TIMEOUT);
        }
    }
}

impl<'p> Agreement<'p> {
    /// The process.
    pub fn process(&self) -> &'p Process {
        self.process
    }

    /// Runs one step. Every process must call it equally often, with the same `next`.
    ///
    /// Only the parts of weights and inputs that this rank holds are read; the limit of memory is this rank's. A process without a
    /// rank waits for the others.
    ///
    /// # Errors
    /// As [`cpu::execute`](crate::cpu::execute) on rank 0; on others the error of their rank. A failure of another rank
    /// is [`RunError::RemoteFailure`] or [`RunError::Lost`].
    pub fn step(
        &self,
        weights: &dyn TensorSource,
        inputs: &dyn TensorSource,
        options: &Options,
        next: NextStep,
    ) -> Result<Step, RunError> {
        let connections = &self.process.connections;
        let Some(rank) = self.rank() else { return self.gather(Vec::new(), 0, weights, next) };
        let loaded = self.job.load(&[rank], weights, inputs, options)?;
        let memory_bytes = loaded.memory_bytes;
        let parts = loaded.run(&self.members).map_err(|error| connections.with_cause(error))?;
        self.gather(parts, memory_bytes, weights, next)
    }

    /// As [`step`](Self::step), where `run` runs this rank on another runtime; it gives the rank's results and the bytes of its
    /// memory.
    ///
    /// # Errors
    /// As [`step`](Self::step); those of `run`, unless another rank failed first.
    pub fn step_by(
        &self,
        weights: &dyn TensorSource,
        next: NextStep,
        run: impl FnOnce(&Job<'_>, Rank) -> Result<(RankResult, u64), RunError>,
    ) -> Result<Step, RunError> {
        let connections = &self.process.connections;
        let Some(rank) = self.rank() else { return self.gather(Vec::new(), 0, weights, next) };
        let (part, memory_bytes) =
            run(&self.job, rank).map_err(|error| connections.with_first_cause(error))?;
        self.gather(vec![part], memory_bytes, weights, next)
    }

    /// The rank that this process runs.
    fn rank(&self) -> Option<Rank> {
        self.members.rank(self.process.rank().0)
    }

    /// Sends this rank's results to process 0, which assembles those of all.
    fn gather(
        &self,
        mut parts: Vec<RankResult>,
        mut memory_bytes: u64,
        weights: &dyn TensorSource,
        next: NextStep,
    ) -> Result<Step, RunError> {
        let connections = &self.process.connections;
        if !self.process.is_first() {
            for part in &parts {
                connections.send_frame(0, Kind::Result, &(part, memory_bytes));
            }
            return self.updates(next).map(Step::Local);
        }
        for other in connections.others().filter(|&other| self.members.rank(other).is_some()) {
            let (part, bytes): (RankResult, u64) =
                connections.message(other, Kind::Result, Phase::Collecting)?;
            memory_bytes += bytes;
            parts.push(part);
        }
        let execution = self.job.assemble(&parts, weights, memory_bytes)?;
        if next == NextStep::Continues {
            let reads = self.process.reads.borrow();
            for other in connections.others() {
                for name in reads.get(&other).into_iter().flatten() {
                    if let Some(tensor) = execution.kept.get(name) {
                        connections.send_frame(other, Kind::Update, &Some((name, tensor)));
                    }
                }
                connections.send_frame(other, Kind::Update, &None::<()>);
            }
        }
        Ok(Step::Full(execution))
    }

    /// Receives the updates of rank 0 for the next step.
    fn updates(&self, next: NextStep) -> Result<Outputs<f32>, RunError> {
        let mut kept = Outputs::new();
        if next == NextStep::Last {
            return Ok(kept);
        }
        let next = || self.process.connections.message(0, Kind::Update, Phase::Collecting);
        while let Some((name, tensor)) = next()? {
            let tensor: Tensor<f32> = tensor;
            let elements = tensor.shape.iter().try_fold(1usize, |all, &n| all.checked_mul(n));
            if elements != Some(tensor.data.len()) {
                return Err(malformed());
            }
            kept.insert(name, tensor);
        }
        Ok(kept)
    }
}

/// The largest frames of a run: a block is at most as large as the largest buffer, the results of a rank fit in its
/// memory, and a whole tensor in the memory of all ranks.
fn limits(schedule: &Schedule, world: u64, options: &Options) -> Limits {
    let buffers = schedule.frames.values().flat_map(|frame| frame.buffers.values());
    let elements = buffers.map(|buffer| match &buffer.content {
        Content::Tensor(ty) => schedule.space.shape(ty).iter().fold(1, |all: u64, &n| all.saturating_mul(n)),
        Content::Wire { elements, .. } => *elements,
    });
    let tensors = options.memory_limit.saturating_mul(2).saturating_mul(world).saturating_add(SMALL);
    Limits { block: elements.max().unwrap_or(0).saturating_mul(4), tensors }
}
