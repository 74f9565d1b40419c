//! The state of a lowering, the addresses of buffers, and the records of all ranks from the work of one.

use ithaca_ir::layout::At;
use ithaca_ir::schedule::{self, BufferId, Content, FrameId, Place, Schedule};
use ithaca_ir::strided::Strided;
use ithaca_ir::{Rank, Space, TensorType};

use super::axes::{splitting_axes, uneven_axes};
use super::buffers::{Alignments, Sources};
use super::options::Options;
use crate::address::Region;
use crate::argument::Pointer;
use crate::error::LowerError;
use crate::merge::{self, Span, Tables, Traced};
use crate::ops::trace::{Shared, Trace};
use crate::ops::view::{Cx, View, signed};
use crate::record::Record;
use crate::value::Choice;

/// The state of a lowering.
pub(super) struct Lowering<'a> {
    pub(super) schedule: &'a Schedule,
    pub(super) options: Options,
    pub(super) alignments: Alignments,
    pub(super) sources: Sources,
    /// For each frame the number of its first event.
    pub(super) first_events: Vec<usize>,
    pub(super) tables: Tables,
    /// Bytes of the workspace that a task uses at most.
    pub(super) workspace: i64,
}

/// A frame while it is lowered.
#[derive(Clone, Copy)]
pub(super) struct In<'a> {
    pub(super) id: FrameId,
    pub(super) frame: &'a schedule::Frame,
}

/// The work of a task, for one rank.
pub(super) type OnRank<'f> = &'f dyn Fn(Cx<'_>) -> Result<(), LowerError>;

impl<'a> Lowering<'a> {
    pub(super) fn space(&self) -> &'a Space {
        &self.schedule.space
    }

    /// The pointer to a buffer.
    pub(super) fn locate(&self, of: In<'a>, id: BufferId) -> Result<Pointer, LowerError> {
        let Some(buffer) = of.frame.buffers.get(id) else {
            return LowerError::invalid(format!("there is no buffer {id:?}"));
        };
        let found = match &buffer.place {
            Place::Frame(offset) => Some(Pointer { region: Region::Frame, bytes: signed(*offset) }),
            Place::Inside { whole, .. } => match of.frame.strided(self.space(), id) {
                Some(strided) => {
                    Some(self.locate(of, *whole)?.offset(strided.start * buffer.dtype().bytes()))
                }
                None => None,
            },
            Place::Argument(i) => Some(Pointer { region: Region::Argument(*i), bytes: 0 }),
            Place::Result(i) => Some(Pointer { region: Region::Result(*i), bytes: 0 }),
            Place::Weight(_) | Place::Input(_) | Place::State(_) => {
                let source = self.sources.find(of.id, id);
                source.map(|source| Pointer { region: Region::Source(source), bytes: 0 })
            }
        };
        match found {
            Some(found) => Ok(found),
            None => LowerError::invalid(format!("buffer `{}` has no place", buffer.name)),
        }
    }

    /// The tensor in a buffer.
    pub(super) fn tensor(&self, of: In<'a>, id: BufferId) -> Result<&'a TensorType, LowerError> {
        match of.frame.buffers.get(id).map(|buffer| (&buffer.content, &buffer.name)) {
            Some((Content::Tensor(ty), _)) => Ok(ty),
            Some((Content::Wire { .. }, name)) => {
                LowerError::invalid(format!("`{name}` is a wire buffer where a tensor belongs"))
            }
            None => LowerError::invalid(format!("there is no buffer {id:?}")),
        }
    }

    /// Buffers with their types; `strided` has the layout of those in wires.
    pub(super) fn views<'v>(
        &self,
        of: In<'a>,
        buffers: &[BufferId],
        strided: &'v [Option<Strided>],
    ) -> Result<Vec<View<'v>>, LowerError>
    where
        'a: 'v,
    {
        let view = |(&b, strided): (&BufferId, &'v Option<Strided>)| {
            let strided = strided.as_ref().filter(|strided| strided.cut.is_some());
            Ok(View { ty: self.tensor(of, b)?, at: self.locate(of, b)?, strided })
        };
        buffers.iter().zip(strided).map(view).collect()
    }

    /// The records of work on tensors of these types on all ranks of a place.
    pub(super) fn by_size_or_place(
        &mut self,
        of: In<'a>,
        at: Option<At>,
        types: &[&TensorType],
        work: OnRank<'_>,
    ) -> Result<Choice<Vec<Record>>, LowerError> {
        let (space, mesh) = (self.space(), &self.space().mesh);
        let narrow = Span::of(mesh, types.iter().flat_map(|ty| uneven_axes(space, ty)));
        let wide = Span::of(mesh, types.iter().flat_map(|ty| splitting_axes(ty)));
        if narrow != wide {
            let shared = Shared::default();
            let traces = self.traces(of, [at; 2], &narrow, &shared, work)?;
            if !traces.iter().flatten().any(Trace::depends_on_place) {
                return Ok(self.merged(&narrow, traces));
            }
        }
        self.traced(of, [at; 2], &wide, work)
    }

    /// The records of work for the ranks of a span.
    pub(super) fn traced(
        &mut self,
        of: In<'a>,
        places: [Option<At>; 2],
        span: &Span,
        work: OnRank<'_>,
    ) -> Result<Choice<Vec<Record>>, LowerError> {
        let shared = Shared::default();
        let traces = self.traces(of, places, span, &shared, work)?;
        Ok(self.merged(span, traces))
    }

    /// The trace of each rank of a span; `None` for ranks of other places.
    pub(super) fn traces(
        &self,
        of: In<'a>,
        places: [Option<At>; 2],
        span: &Span,
        shared: &Shared,
        work: OnRank<'_>,
    ) -> Result<Vec<Option<Trace>>, LowerError> {
        let space = self.space();
        let [arguments_aligned, results_aligned] = self.alignments.of_frame(of.id);
        let on_rank = |rank: Rank| -> Result<Option<Trace>, LowerError> {
            let runs = places.iter().any(|place| place.is_none_or(|at| at.has(&space.mesh, rank)));
            if !runs {
                return Ok(None);
            }
            let trace = Trace::default();
            work(Cx { space, rank, trace: &trace, shared, arguments_aligned, results_aligned })?;
            Ok(Some(trace))
        };
        span.ranks(&space.mesh, self.start_of(places, span)).map(on_rank).collect()
    }

    pub(super) fn merged(&mut self, span: &Span, traces: Vec<Option<Trace>>) -> Choice<Vec<Record>> {
        let used = traces.iter().flatten().map(Trace::workspace).max().unwrap_or(0);
        self.workspace = self.workspace.max(used);
        let traced = |trace: Trace| {
            let (records, lists) = trace.into_parts();
            Traced { records, lists }
        };
        merge::records(span, traces.into_iter().map(|trace| trace.map(traced)), &mut self.tables)
    }

    /// The rank from which a span starts.
    pub(super) fn start_of(&self, places: [Option<At>; 2], span: &Span) -> Rank {
        let at = places[0].filter(|at| !span.axes().contains(&at.axis));
        merge::rank_at(&self.space().mesh, at)
    }
}

/// The buffer, where it is the only one.
pub(super) fn only(buffers: &[BufferId]) -> Result<BufferId, LowerError> {
    match buffers {
        [buffer] => Ok(*buffer),
        _ => LowerError::invalid(format!("it has {} buffers instead of one", buffers.len())),
    }
}
