//! A process of several: agrees with the others on what is run, runs its rank, and ends as they do.

use std::time::Duration;

use ithaca_ir::Rank;
use ithaca_ir::schedule::{Content, Schedule};

use super::bytes::{Reader, Writer, malformed};
use super::digest::digest;
use super::error::LaunchError;
use super::frame::{Kind, Limits, SMALL};
use super::mesh::{Mesh, Patience};
use super::part;
use crate::cpu::{Execution, Job, Options, RankResult};
use crate::error::RunError;
use crate::store::TensorSource;
use crate::tensor::Outputs;

/// How long others may take to hear the last word.
const FAREWELL: Duration = Duration::from_secs(2);

/// One of several processes that run the ranks of a schedule, connected to all the others.
///
/// Dropped, it tells the others that it failed; [`finish`](Self::finish) is the way to end well.
#[derive(Debug)]
pub struct Process {
    mesh: Mesh,
    local_rank: Option<u64>,
    has_ended: bool,
}

/// What all processes have agreed to run.
#[derive(Debug)]
pub struct Agreed<'p> {
    process: &'p Process,
    job: Job<'p>,
}

/// What a step gave a process.
#[derive(Clone, Debug)]
pub enum Step {
    /// Rank 0: what all ranks have, put together.
    Whole(Execution),
    /// Another rank: of what was kept, the tensors that it reads in the next step, if there is one.
    Part(Outputs<f32>),
}

/// Whether there will be another step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// On what this one keeps.
    Another,
    /// This one was the last.
    End,
}

impl Process {
    pub(super) fn new(mesh: Mesh, local_rank: Option<u64>) -> Self {
        Self { mesh, local_rank, has_ended: false }
    }

    /// Its number among the processes of its machine, which is that of its GPU: as the launcher says, or the rank, as on a single
    /// machine.
    pub fn local_rank(&self) -> u64 {
        self.local_rank.unwrap_or(self.mesh.rank().0)
    }

    /// The rank that runs here.
    pub fn rank(&self) -> Rank {
        self.mesh.rank()
    }

    /// Whether this is rank 0, which puts together, compares, writes and prints.
    pub fn is_first(&self) -> bool {
        self.mesh.rank() == Rank(0)
    }

    /// Makes sure that all run the same: `schedule`, and what else is said of the run, each under its name.
    ///
    /// # Errors
    /// [`LaunchError::Refused`] when two do not, naming them; [`RunError::Told`] and [`RunError::Lost`] when another
    /// fails; as [`Job::of`].
    pub fn agree<'p>(
        &'p self,
        schedule: &'p Schedule,
        options: &Options,
        said: &[(&str, String)],
    ) -> Result<Agreed<'p>, RunError> {
        let job = Job::of(schedule)?;
        self.mesh.allow(limits(schedule, self.mesh.world(), options));
        let text = ithaca_ir::schedule::print(schedule);
        let mut digests = vec![("schedule", digest([text.as_str()]))];
        digests.extend(said.iter().map(|(name, value)| (*name, digest([value.as_str()]))));
        if self.is_first() {
            for other in self.mesh.others() {
                // Compiling comes to an end by itself.
                let (_, body) = self.mesh.message(other, &[Kind::Agree], Patience::Unlimited)?;
                let mut input = Reader::new(&body);
                let theirs = input.list(|input| Ok((input.text()?, input.number()?)))?;
                let ours = digests.iter().map(|&(name, digest)| (name.to_owned(), digest));
                let different = ours.zip(&theirs).find(|(ours, theirs)| ours != *theirs);
                let different = match different {
                    Some(((name, _), _)) => Some(name),
                    None => (theirs.len() != digests.len()).then(|| "run".to_owned()),
                };
                if let Some(what) = different {
                    let other = self.mesh.named(other);
                    let why =
                        format!("{other} has another {what} than rank 0: start all with the same arguments");
                    self.mesh.abort(&why);
                    return Err(LaunchError::Refused(why).into());
                }
            }
            self.mesh.others().for_each(|other| self.mesh.tell(other, Kind::Agree, Vec::new()));
        } else {
            let mut body = Writer::new();
            body.number(digests.len() as u64);
            for (name, digest) in digests {
                body.text(name).number(digest);
            }
            self.mesh.tell(0, Kind::Agree, body.into_bytes());
            // Rank 0 waits for the slowest to compile.
            self.mesh.message(0, &[Kind::Agree], Patience::Unlimited)?;
        }
        Ok(Agreed { process: self, job })
    }

    /// Whether another process is known to have failed.
    pub fn has_failed(&self) -> bool {
        self.mesh.has_failed()
    }

    /// What rank 0 makes, on all ranks: each has to call it as often.
    ///
    /// # Errors
    /// Those of `make`, on rank 0; [`RunError::Told`] and [`RunError::Lost`] when another rank fails.
    pub fn shared(&self, make: impl FnOnce() -> Result<Vec<u8>, RunError>) -> Result<Vec<u8>, RunError> {
        if self.is_first() {
            let made = make()?;
            self.mesh.others().for_each(|other| self.mesh.tell(other, Kind::Shared, made.clone()));
            return Ok(made);
        }
        // Rank 0 may have to put the step before together.
        Ok(self.mesh.message(0, &[Kind::Shared], Patience::Unlimited)?.1)
    }

    /// Ends well: rank 0 says with which code every process exits, the others wait for that.
    ///
    /// # Errors
    /// [`RunError::Told`] or [`RunError::Lost`] when rank 0, or a rank before it has said so, fails after all.
    pub fn finish(mut self, code: u8) -> Result<u8, RunError> {
        let verdict = self.verdict(code);
        match &verdict {
            Ok(_) => self.mesh.others().for_each(|other| self.mesh.tell(other, Kind::Bye, Vec::new())),
            Err(error) => self.mesh.abort(&error.to_string()),
        }
        self.mesh.close(FAREWELL);
        self.has_ended = true;
        verdict
    }

    fn verdict(&self, code: u8) -> Result<u8, RunError> {
        if self.is_first() {
            self.mesh.others().for_each(|other| self.mesh.tell(other, Kind::Verdict, vec![code]));
            return Ok(code);
        }
        let (_, body) = self.mesh.message(0, &[Kind::Verdict], Patience::Unlimited)?;
        body.first().copied().ok_or_else(malformed)
    }

    /// Ends badly: tells the others why, if they have not been told yet.
    pub fn fail(mut self, why: &str) {
        self.mesh.abort(why);
        self.mesh.close(FAREWELL);
        self.has_ended = true;
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !self.has_ended {
            self.mesh.abort("it ended without a word");
            self.mesh.close(FAREWELL);
        }
    }
}

impl<'p> Agreed<'p> {
    /// The process.
    pub fn process(&self) -> &'p Process {
        self.process
    }

    /// Runs one step; every process has to call it as often, and with the same `then`.
    ///
    /// Weights and inputs are read as far as this rank holds them; the limit of memory is this rank's.
    ///
    /// # Errors
    /// As [`cpu::execute`](crate::cpu::execute) on rank 0; on others what their rank failed of. Failures of others show
    /// as [`RunError::Told`] in their words, or as [`RunError::Lost`].
    pub fn step(
        &self,
        weights: &dyn TensorSource,
        inputs: &dyn TensorSource,
        options: &Options,
        then: Then,
    ) -> Result<Step, RunError> {
        let mesh = &self.process.mesh;
        let loaded = self.job.load(&[mesh.rank()], weights, inputs, options)?;
        let memory_bytes = loaded.memory_bytes;
        let parts = loaded.run(mesh).map_err(|error| mesh.explained(error))?;
        self.put_together(parts, memory_bytes, weights, then)
    }

    /// As [`step`](Self::step), where `run` runs this rank on a runtime of its own; it gives the rank's results and the bytes
    /// of its memory.
    ///
    /// # Errors
    /// As [`step`](Self::step); those of `run`, unless another rank failed first.
    pub fn step_by(
        &self,
        weights: &dyn TensorSource,
        then: Then,
        run: impl FnOnce(&Job<'_>) -> Result<(RankResult, u64), RunError>,
    ) -> Result<Step, RunError> {
        let mesh = &self.process.mesh;
        let (part, memory_bytes) = run(&self.job).map_err(|error| mesh.cause_of(error))?;
        self.put_together(vec![part], memory_bytes, weights, then)
    }

    /// Sends this rank's results to rank 0, which puts those of all together.
    fn put_together(
        &self,
        mut parts: Vec<RankResult>,
        mut memory_bytes: u64,
        weights: &dyn TensorSource,
        then: Then,
    ) -> Result<Step, RunError> {
        let mesh = &self.process.mesh;
        if !self.process.is_first() {
            for part in &parts {
                mesh.tell(0, Kind::Part, part::encode(part, memory_bytes));
            }
            return self.next(then).map(Step::Part);
        }
        for other in mesh.others() {
            let (_, body) = mesh.message(other, &[Kind::Part], Patience::Limited)?;
            let (part, bytes) = part::decode(&body)?;
            memory_bytes += bytes;
            parts.push(part);
        }
        let execution = self.job.assemble(&parts, weights, memory_bytes)?;
        if then == Then::Another {
            for other in mesh.others() {
                for name in self.job.reads(Rank(other)) {
                    if let Some(tensor) = execution.kept.get(&name) {
                        mesh.tell(other, Kind::Kept, part::encode_tensor(&name, tensor));
                    }
                }
                mesh.tell(other, Kind::KeptEnd, Vec::new());
            }
        }
        Ok(Step::Whole(execution))
    }

    /// What rank 0 hands on to the next step.
    fn next(&self, then: Then) -> Result<Outputs<f32>, RunError> {
        let mut kept = Outputs::new();
        if then == Then::End {
            return Ok(kept);
        }
        let expected = [Kind::Kept, Kind::KeptEnd];
        // Rank 0 waits for the slowest rank first.
        while let (Kind::Kept, body) = self.process.mesh.message(0, &expected, Patience::Unlimited)? {
            kept.extend([part::decode_tensor(&body)?]);
        }
        Ok(kept)
    }
}

/// How large frames of a run may be: a block is no larger than some buffer, and what a rank has lies in its memory, of
/// which a whole tensor may be that of all.
fn limits(schedule: &Schedule, world: u64, options: &Options) -> Limits {
    let buffers = schedule.frames.values().flat_map(|frame| frame.buffers.values());
    let elements = buffers.map(|buffer| match &buffer.content {
        Content::Tensor(ty) => schedule.space.shape(ty).iter().fold(1, |all: u64, &n| all.saturating_mul(n)),
        Content::Wire { elements, .. } => *elements,
    });
    let tensors = options.memory_limit.saturating_mul(2).saturating_mul(world).saturating_add(SMALL);
    Limits { block: elements.max().unwrap_or(0).saturating_mul(4), tensors }
}
