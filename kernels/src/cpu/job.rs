//! A run in three parts: loading the data of the ranks of this process, running them, and assembling the results.
//!
//! Ranks may run in one process or in several; the result of a rank is plain data, so it can be sent to the process that
//! assembles.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::Instant;

use ithaca_ir::Rank;
use ithaca_ir::schedule::{Content, FrameId, Schedule, used_streams};
use ithaca_ir::traffic::{Ledger, Traffic};

use super::communicator::{Communicator, Mailboxes};
use super::context::RunContext;
use super::execution::Execution;
use super::fault::FaultKind;
use super::memory::{ArenaShape, SourcePlan, SourceTensor, Sources, WrittenData, to_int};
use super::options::Options;
use super::panics::{guarded, joined};
use super::rank::{self, RankResult};
use super::timings::Timings;
use super::trace;
use crate::error::{RunError, first_failure};
use crate::store::TensorSource;
use crate::tensor::{Outputs, index};
use crate::updates::{self, Update};

/// Executes a schedule on as many threads as its mesh has ranks.
///
/// `weights` and `inputs` answer the buffers placed at `weight` and `input`; a state is zero where `weights` has none of
/// its name.
///
/// # Errors
/// [`RunError::Memory`] before anything is loaded, [`RunError::Store`] for a source, [`RunError::Rank`] for the first
/// rank, in order of ranks, whose task failed, [`RunError::ReplicasDiffer`] when ranks disagree about an output.
pub fn execute(
    schedule: &Schedule,
    weights: &dyn TensorSource,
    inputs: &dyn TensorSource,
    options: &Options,
) -> Result<Execution, RunError> {
    let ranks: Vec<Rank> = schedule.space.mesh.iter_ranks().collect();
    let job = Job::of(schedule)?;
    let loaded = job.load(&ranks, weights, inputs, options)?;
    let memory_bytes = loaded.memory_bytes;
    let used = used_streams(&schedule.frames);
    let streams = used.last().copied().unwrap_or_default().iter().count().saturating_sub(1).max(1);
    let mailboxes = Mailboxes::new(schedule.space.mesh.ranks(), streams, options.timeout);
    let parts = loaded.run(&mailboxes)?;
    job.assemble(&parts, weights, memory_bytes)
}

/// A schedule, with its arena and the tensors that it loads.
#[derive(Debug)]
pub struct Job<'a> {
    schedule: &'a Schedule,
    main: FrameId,
    arena: ArenaShape,
    plan: SourcePlan<'a>,
}

/// Ranks with their loaded data, ready to run.
#[derive(Debug)]
pub struct Loaded<'a> {
    schedule: &'a Schedule,
    arena: &'a ArenaShape,
    sources: Sources,
    /// Each rank with its copies of the written tensors.
    ranks: Vec<(Rank, WrittenData)>,
    options: Options,
    /// Bytes of arenas, weights, states and inputs of these ranks.
    pub memory_bytes: u64,
}

impl<'a> Job<'a> {
    /// Collects the tensors that a schedule loads.
    ///
    /// # Errors
    /// [`RunError::NoMain`]; [`RunError::Invalid`] for a schedule that contradicts itself.
    pub fn of(schedule: &'a Schedule) -> Result<Self, RunError> {
        let main = schedule.main().ok_or_else(|| RunError::NoMain(schedule.name.clone()))?;
        if schedule.frames[main].n_arguments != 0 {
            return Err(RunError::invalid("`main` has arguments"));
        }
        Ok(Self { schedule, main, arena: ArenaShape::of(schedule), plan: SourcePlan::of(schedule)? })
    }

    /// Loads only the tensors that `ranks` read.
    ///
    /// # Errors
    /// [`RunError::Memory`] before anything is loaded, for these ranks together; [`RunError::Store`].
    pub fn load(
        &self,
        ranks: &[Rank],
        weights: &dyn TensorSource,
        inputs: &dyn TensorSource,
        options: &Options,
    ) -> Result<Loaded<'_>, RunError> {
        if let Some(fault) = &options.fault {
            fault.check(self.schedule)?;
            if (fault.kind, options.timeout) == (FaultKind::Hang, None) {
                return Err(RunError::invalid("a fault of kind `hang` needs a timeout"));
            }
        }
        let memory_bytes = self.plan.check(ranks, &self.arena, options.memory_limit)?;
        let space = &self.schedule.space;
        let (sources, written) = self.plan.load(space, ranks, weights, inputs, options.storage)?;
        let ranks = ranks.iter().copied().zip(written).collect();
        let (schedule, arena, options) = (self.schedule, &self.arena, options.clone());
        Ok(Loaded { schedule, arena, sources, ranks, options, memory_bytes })
    }

    /// The schedule.
    pub(crate) fn schedule(&self) -> &'a Schedule {
        self.schedule
    }

    /// What is loaded, and where it belongs.
    pub(crate) fn plan(&self) -> &SourcePlan<'a> {
        &self.plan
    }

    /// The stored tensors of which a rank has a part.
    pub(crate) fn reads(&self, rank: Rank) -> BTreeSet<String> {
        self.plan.names_of(&self.schedule.space, rank)
    }

    /// Assembles the results of all ranks, in order of ranks; `before` has the tensors as stored before the run.
    ///
    /// # Errors
    /// [`RunError::ReplicasDiffer`] when ranks disagree about an output; [`RunError::Invalid`] when `parts` are not those
    /// of all ranks; [`RunError::Store`].
    pub fn assemble(
        &self,
        parts: &[RankResult],
        before: &dyn TensorSource,
        memory_bytes: u64,
    ) -> Result<Execution, RunError> {
        let (schedule, main) = (self.schedule, &self.schedule.frames[self.main]);
        let complete = |part: &RankResult| {
            part.outputs.len() == main.outputs.len() && part.written.len() == self.plan.written().count()
        };
        if !parts.iter().map(|part| part.rank).eq(schedule.space.mesh.iter_ranks()) {
            return Err(RunError::invalid("results must be those of all ranks, in order"));
        }
        if let Some(part) = parts.iter().find(|part| !complete(part)) {
            return Err(RunError::invalid(format!("rank {} has results of another schedule", part.rank.0)));
        }
        let mut peaks = self.plan.held(parts.len());
        for (peak, part) in peaks.iter_mut().zip(parts) {
            peak.arena = part.arena_used;
        }
        let mut timings = Timings::default();
        parts.iter().for_each(|part| timings.merge(&part.timings));
        let mut outputs = Outputs::new();
        for (i, output) in main.outputs.iter().enumerate() {
            let name = output.name.clone().unwrap_or_else(|| i.to_string());
            let Content::Tensor(ty) = &main.buffers[output.buffer].content else {
                return Err(RunError::invalid(format!("output `{name}` is a wire buffer")));
            };
            let local = |rank: Rank| Ok(Cow::Borrowed(parts[index(rank.0)].outputs[i].as_slice()));
            let tensor = crate::oracle::assemble(&schedule.space, &name, ty, local)?;
            outputs.insert(name, tensor);
        }
        let kept = self.kept(parts, before)?;
        let (spans, busy) =
            trace::spans(schedule, parts.iter().map(|part| (part.rank, part.spans.as_slice())))?;
        Ok(Execution { outputs, kept, traffic: busiest(parts), peaks, timings, memory_bytes, spans, busy })
    }

    /// The written tensors in their stored form; `before` has their earlier values.
    fn kept<'p>(&self, parts: &'p [RankResult], before: &dyn TensorSource) -> Result<Outputs<f32>, RunError> {
        let mut by_name: BTreeMap<String, Vec<Update<'_, f32>>> = BTreeMap::new();
        for (number, SourceTensor { binding, ty, layer, .. }) in self.plan.written().enumerate() {
            let numbers = |part: &'p RankResult| match part.written[number].as_slice() {
                data if ty.dtype.is_float() => Cow::Borrowed(data),
                data => Cow::Owned(data.iter().map(|&x| to_int(x) as f32).collect()),
            };
            let held = parts.iter().map(numbers).collect();
            by_name.entry(binding.stored_name(*layer)).or_default().push(Update { binding, ty, held });
        }
        updates::kept(&self.schedule.space, &by_name, before)
    }
}

impl Loaded<'_> {
    /// Runs the ranks, a thread for each stream of each; `communicator` connects them to the others.
    ///
    /// # Errors
    /// [`RunError::Rank`] for the first of them, in order, whose task failed; it has told `communicator`.
    pub fn run(self, communicator: &dyn Communicator) -> Result<Vec<RankResult>, RunError> {
        let Loaded { schedule, arena, sources, ranks, options, memory_bytes: _ } = self;
        let used = used_streams(&schedule.frames);
        let begun = Instant::now();
        let run_rank = |rank: Rank, written: WrittenData| {
            let ledger = Mutex::new(Ledger::default());
            let context = RunContext {
                schedule,
                shape: arena,
                sources: &sources,
                communicator,
                ledger: &ledger,
                options: &options,
                used: &used,
                begun,
            };
            let run = || rank::run(context, rank, written);
            let result = guarded(run);
            match &result {
                Ok(_) => communicator.finish(rank),
                Err(error) => communicator.fail(rank, error),
            }
            result
        };
        let results: Vec<Result<RankResult, RunError>> = std::thread::scope(|scope| {
            let spawn = |(rank, written): (Rank, WrittenData)| {
                let builder = std::thread::Builder::new().name(format!("rank {}", rank.0));
                let run_rank = &run_rank;
                builder.spawn_scoped(scope, move || run_rank(rank, written)).map_err(|source| {
                    let error = RunError::Thread { rank: rank.0, source };
                    communicator.fail(rank, &error);
                    error
                })
            };
            let threads: Vec<_> = ranks.into_iter().map(spawn).collect();
            threads.into_iter().map(|thread| thread.and_then(joined)).collect()
        });
        first_failure(results)
    }
}

/// The traffic of the busiest rank for each kind, ordered by kind, axis and phase.
fn busiest(parts: &[RankResult]) -> Vec<Traffic> {
    let mut rows = BTreeMap::new();
    for row in parts.iter().flat_map(|part| &part.traffic) {
        let most = rows.entry((&row.kind, &row.axis, row.phase)).or_insert_with(|| row.clone());
        most.count = most.count.max(row.count);
        most.bytes_sent_per_rank = most.bytes_sent_per_rank.max(row.bytes_sent_per_rank);
        most.filled_bytes_per_rank = most.filled_bytes_per_rank.max(row.filled_bytes_per_rank);
    }
    rows.into_values().collect()
}
