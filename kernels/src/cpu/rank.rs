//! One rank: its memory, and a thread for each of its streams.

use std::sync::PoisonError;

use ithaca_ir::Rank;
use ithaca_ir::entity::Entity;
use ithaca_ir::schedule::Stream;
use ithaca_ir::traffic::Traffic;
use serde::{Deserialize, Serialize};

use super::buffers::{Area, Buffers, Scope};
use super::claims::{ARENA, Memory};
use super::context::RunContext;
use super::memory::{WrittenData, to_int};
use super::panics::{guarded, joined};
use super::stream::{StreamExecutor, StreamResult};
use super::sync::StreamSync;
use super::timings::Timings;
use super::trace::TaskSpan;
use crate::error::{RunError, first_failure};
use crate::tensor::index;

/// The results and measurements of one rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankResult {
    /// The rank.
    pub rank: Rank,
    /// Its part of each output of `main`, empty where it has no part; integers as numbers.
    pub outputs: Vec<Vec<f32>>,
    /// Its part of each weight and state that the schedule writes, in the runtime's order; integers as the bits of a float.
    pub written: Vec<Vec<f32>>,
    /// The end of its arena as far as it was written, bytes of the schedule.
    pub arena_used: u64,
    /// How long its tasks took.
    pub timings: Timings,
    /// Its traffic.
    pub traffic: Vec<Traffic>,
    /// When its tasks ran, if requested.
    pub spans: Vec<TaskSpan>,
}

/// Runs `main` on `rank`, which starts with `written` as its copies of the written tensors.
pub(super) fn run(context: RunContext<'_>, rank: Rank, written: WrittenData) -> Result<RankResult, RunError> {
    let RunContext { schedule, shape, communicator, .. } = context;
    let main = schedule.main().ok_or_else(|| RunError::NoMain(schedule.name.clone()))?;
    // Elements that were never written are NaN, so that they cannot pass for results.
    let memory = Memory::new(vec![f32::NAN; index(shape.slots)], written);
    let sync = StreamSync::default();
    let buffers = Buffers { context, rank };
    let scope = Scope { frame: main, base: 0, layer: 0, at: None, arguments: &[], results: &[] };
    let execute = |stream: Stream| {
        let executor = StreamExecutor::new(buffers, stream, (&memory, &sync));
        let result = guarded(|| executor.main(&scope));
        if let Err(error) = &result {
            // Other streams may wait for this one, or compute for long while other ranks wait.
            sync.stop();
            if !error.is_stopped() {
                communicator.fail(rank, error);
            }
        }
        result
    };
    let used = context.used[main.index()];
    Stream::ALL.into_iter().filter(|&stream| !used.has(stream)).for_each(|stream| memory.leave(stream));
    let results: Vec<Result<StreamResult, RunError>> = std::thread::scope(|threads| {
        let execute = &execute;
        let spawn = |stream: Stream| {
            let builder = std::thread::Builder::new().name(format!("rank {} {stream}", rank.0));
            builder.spawn_scoped(threads, move || execute(stream)).map_err(|source| {
                sync.stop();
                RunError::Thread { rank: rank.0, source }
            })
        };
        let others: Vec<_> = used.iter().filter(|&stream| stream != Stream::Compute).map(spawn).collect();
        let compute = execute(Stream::Compute);
        std::iter::once(compute).chain(others.into_iter().map(|other| other.and_then(joined))).collect()
    });
    let (mut arena_used, mut timings, mut spans) = (0, Timings::default(), Vec::new());
    for result in first_failure(results)? {
        arena_used = arena_used.max(result.arena_used);
        timings.merge(&result.timings);
        spans.extend(result.spans);
    }
    let (arena, written) = memory.into_parts();
    let outputs = schedule.frames[main].outputs.iter().map(|output| {
        if !buffers.holds(&scope, output.buffer) {
            return Ok(Vec::new());
        }
        let data = match buffers.area(&scope, output.buffer)? {
            Area::Shared(data) => Some(data),
            Area::Private(extent) if extent.part == ARENA => arena.get(extent.range),
            Area::Private(extent) => written.get(extent.part - 1).and_then(|data| data.get(extent.range)),
        };
        let data = data.ok_or_else(|| buffers.outside(&scope, output.buffer))?;
        Ok(if schedule.frames[main].buffers[output.buffer].dtype().is_float() {
            data.to_vec()
        } else {
            data.iter().map(|&x| to_int(x) as f32).collect()
        })
    });
    let outputs = outputs.collect::<Result<_, RunError>>()?;
    let traffic = context.ledger.lock().unwrap_or_else(PoisonError::into_inner).rows();
    Ok(RankResult { rank, outputs, written, arena_used, timings, traffic, spans })
}
