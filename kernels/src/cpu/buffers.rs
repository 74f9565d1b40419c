//! Where buffers lie for one rank: in its arena, in what it has of weights and states, or in what all ranks share.

use std::ops::Range;

use ithaca_ir::layout::At;
use ithaca_ir::ops::{Scan, structure};
use ithaca_ir::schedule::{Buffer, BufferId, Content, FrameId, Place, Task};
use ithaca_ir::{DType, Rank, TensorType};

use super::claims::{self, Extent};
use super::context::RunContext;
use super::memory::Found;
use super::wire_rows;
use crate::error::RunError;
use crate::tensor::{extents, index};

/// Where a buffer begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Location {
    /// At this element of the arena.
    Arena(usize),
    /// In a part of the sources, at an element.
    Shared(usize, usize),
    /// In the rank's copy of the n-th written weight or state, at an element.
    Written(usize, usize),
}

impl Location {
    /// The location `n` elements further.
    pub(super) fn further(self, n: usize) -> Location {
        match self {
            Location::Arena(start) => Location::Arena(start + n),
            Location::Shared(part, start) => Location::Shared(part, start + n),
            Location::Written(number, start) => Location::Written(number, start + n),
        }
    }
}

/// The elements of a buffer that a rank has.
#[derive(Clone, Debug)]
pub(super) enum Area<'a> {
    /// Read-only elements that ranks share.
    Shared(&'a [f32]),
    /// Elements of the rank's own memory.
    Private(Extent),
}

/// Elements of a dense tensor, and where in a wire they lie.
pub(super) type Rows = Vec<(Range<usize>, Range<usize>)>;

/// For each argument and each result of a call the elements of a layer's slice; `None` for those that all layers have
/// alike.
pub(super) struct Strides {
    pub(super) reads: Vec<Option<usize>>,
    pub(super) writes: Vec<Option<usize>>,
}

/// One run of a frame.
pub(super) struct Scope<'a> {
    pub(super) frame: FrameId,
    /// The element of the arena where the frame starts.
    pub(super) base: usize,
    pub(super) layer: u64,
    /// The ranks that run the frame, this one among them.
    pub(super) at: Option<At>,
    pub(super) arguments: &'a [Location],
    pub(super) results: &'a [Location],
}

/// The buffers of a rank.
#[derive(Clone, Copy)]
pub(super) struct Buffers<'a> {
    pub(super) context: RunContext<'a>,
    pub(super) rank: Rank,
}

impl<'a> Buffers<'a> {
    pub(super) fn buffer(&self, scope: &Scope<'_>, id: BufferId) -> Result<&'a Buffer, RunError> {
        let buffers = &self.context.schedule.frames[scope.frame].buffers;
        buffers.get(id).ok_or_else(|| RunError::invalid(format!("there is no buffer {id:?}")))
    }

    pub(super) fn tensor_type(&self, scope: &Scope<'_>, id: BufferId) -> Result<&'a TensorType, RunError> {
        let buffer = self.buffer(scope, id)?;
        match &buffer.content {
            Content::Tensor(ty) => Ok(ty),
            Content::Wire { .. } => {
                Err(RunError::invalid(format!("`{}` is a wire buffer where a tensor belongs", buffer.name)))
            }
        }
    }

    /// Whether the rank has a buffer of its frame.
    pub(super) fn holds(&self, scope: &Scope<'_>, id: BufferId) -> bool {
        let schedule = self.context.schedule;
        schedule.frames[scope.frame].at(id).is_none_or(|at| at.has(&schedule.space.mesh, self.rank))
    }

    pub(super) fn locate(&self, scope: &Scope<'_>, id: BufferId) -> Result<Location, RunError> {
        let buffer = self.buffer(scope, id)?;
        let found = match &buffer.place {
            Place::Frame(offset) => Some(Location::Arena(scope.base + self.context.shape.slot(*offset)?)),
            Place::Wire { wire, .. } => Some(self.wire(scope, *wire)?),
            Place::Argument(i) => scope.arguments.get(*i).copied(),
            Place::Result(i) => scope.results.get(*i).copied(),
            Place::Weight(_) | Place::Input(_) | Place::State(_) => {
                self.context.sources.find((scope.frame, id, scope.layer, scope.at), self.rank).map(|found| {
                    match found {
                        Found::Shared(part) => Location::Shared(part, 0),
                        Found::Written(number) => Location::Written(number, 0),
                    }
                })
            }
        };
        found.ok_or_else(|| RunError::invalid(format!("buffer `{}` has no place", buffer.name)))
    }

    /// Where a wire begins in which a tensor lies.
    fn wire(&self, scope: &Scope<'_>, wire: BufferId) -> Result<Location, RunError> {
        match self.buffer(scope, wire)?.place {
            Place::Frame(offset) => Ok(Location::Arena(scope.base + self.context.shape.slot(offset)?)),
            _ => Err(RunError::invalid("a tensor lies in what is no wire")),
        }
    }

    /// Where the elements of a tensor are in its wire, as rows: those of the dense tensor and those of the wire. None for a
    /// tensor that lies in no wire.
    pub(super) fn rows(&self, scope: &Scope<'_>, id: BufferId) -> Result<Option<Rows>, RunError> {
        let schedule = self.context.schedule;
        let (Place::Wire { .. }, Content::Tensor(ty)) =
            (&self.buffer(scope, id)?.place, &self.buffer(scope, id)?.content)
        else {
            return Ok(None);
        };
        let strided = schedule.frames[scope.frame].strided(&schedule.space, id);
        let strided =
            strided.ok_or_else(|| RunError::invalid("a tensor lies in a wire that has no such part"))?;
        Ok(Some(wire_rows::rows(&strided, &extents(&schedule.space.local_box(ty, self.rank)))))
    }

    /// Elements that the rank has of a buffer.
    pub(super) fn length(&self, scope: &Scope<'_>, id: BufferId) -> Result<usize, RunError> {
        Ok(match &self.buffer(scope, id)?.content {
            Content::Tensor(ty) => {
                extents(&self.context.schedule.space.local_box(ty, self.rank)).iter().product()
            }
            Content::Wire { elements, .. } => index(*elements),
        })
    }

    /// Where those elements are: of what lies in a wire, all of the wire.
    pub(super) fn area(&self, scope: &Scope<'_>, id: BufferId) -> Result<Area<'a>, RunError> {
        let n = match self.buffer(scope, id)?.place {
            Place::Wire { wire, .. } => self.length(scope, wire)?,
            _ => self.length(scope, id)?,
        };
        Ok(match self.locate(scope, id)? {
            Location::Arena(start) => Area::Private(Extent { part: claims::ARENA, range: start..start + n }),
            Location::Written(number, start) => {
                Area::Private(Extent { part: claims::written(number), range: start..start + n })
            }
            Location::Shared(part, start) => {
                let data = self.context.sources.part(part).get(start..start + n);
                Area::Shared(data.ok_or_else(|| self.outside(scope, id))?)
            }
        })
    }

    /// What an area keeps others from: in the arena an element has as many slots as its type takes.
    pub(super) fn footprint(&self, extent: &Extent, dtype: DType) -> Extent {
        let Extent { part, range } = extent.clone();
        match part {
            claims::ARENA => {
                let end = range.start + self.context.shape.slots_of(range.len(), dtype);
                Extent { part, range: range.start..end }
            }
            _ => Extent { part, range },
        }
    }

    /// The slices that layers of a call have.
    pub(super) fn strides(
        &self,
        scope: &Scope<'_>,
        task: &Task,
        callee: FrameId,
        scan: Option<&Scan>,
    ) -> Result<Strides, RunError> {
        let mut strides =
            Strides { reads: vec![None; task.reads.len()], writes: vec![None; task.writes.len()] };
        let Some(scan) = scan else { return Ok(strides) };
        let schedule = self.context.schedule;
        for buffer in schedule.frames[callee].buffers.values() {
            let Content::Tensor(ty) = &buffer.content else { continue };
            let n: usize = extents(&schedule.space.local_box(ty, self.rank)).iter().product();
            match buffer.place {
                Place::Argument(i) if i < task.reads.len() => {
                    let here = self.tensor_type(scope, task.reads[i])?;
                    strides.reads[i] = structure::is_sliced(Some(scan), i, here, ty).then_some(n);
                }
                Place::Result(i) if i < task.writes.len() => {
                    strides.writes[i] = (i >= scan.carried).then_some(n);
                }
                _ => {}
            }
        }
        Ok(strides)
    }

    /// The refusal of a buffer that ends outside of what it lies in.
    pub(super) fn outside(&self, scope: &Scope<'_>, id: BufferId) -> RunError {
        let frame = &self.context.schedule.frames[scope.frame];
        RunError::invalid(format!(
            "buffer `{}` of `{}` is not as large as its content",
            frame.buffers[id].name, frame.name
        ))
    }
}
