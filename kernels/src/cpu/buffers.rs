//! The location of buffers for one rank: in its arena, in its weights and states, or in the data that ranks share.

use std::ops::Range;

use ithaca_ir::layout::At;
use ithaca_ir::ops::{Scan, structure};
use ithaca_ir::schedule::{Buffer, BufferId, Content, FrameId, Place, Task};
use ithaca_ir::strided::Strided;
use ithaca_ir::{Rank, TensorType};

use super::claims::{self, MemoryRange};
use super::context::RunContext;
use super::memory::Location;
use super::wire_rows;
use crate::error::RunError;
use crate::tensor::{extents, index};

/// The elements of a buffer on one rank.
#[derive(Clone, Debug)]
pub(super) enum Area<'a> {
    /// Read-only elements that ranks share.
    Shared(&'a [f32]),
    /// Elements of the rank's own memory.
    Private(MemoryRange),
}

/// Rows of a tensor in another buffer: their range in the dense tensor and their range in the buffer.
pub(super) type Rows = Vec<(Range<usize>, Range<usize>)>;

/// For each argument and result of a call, the elements of a layer's slice; `None` where all layers share the buffer.
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
            Content::Wire { .. } => Err(RunError::invalid(format!(
                "`{}` is a wire buffer where a tensor is expected",
                buffer.name
            ))),
        }
    }

    /// Whether the rank has a buffer.
    pub(super) fn holds(&self, scope: &Scope<'_>, id: BufferId) -> bool {
        let schedule = self.context.schedule;
        schedule.frames[scope.frame].at(id).is_none_or(|at| at.has(&schedule.space.mesh, self.rank))
    }

    pub(super) fn locate(&self, scope: &Scope<'_>, id: BufferId) -> Result<Location, RunError> {
        let buffer = self.buffer(scope, id)?;
        let found = match &buffer.place {
            Place::Frame(offset) => Some(Location::Arena(scope.base + self.context.shape.slot(*offset)?)),
            Place::Inside { whole, .. } => {
                let start = self.part(scope, id)?.map_or(0, |strided| index(strided.start));
                Some(self.locate(scope, *whole)?.further(start))
            }
            Place::Argument(i) => scope.arguments.get(*i).copied(),
            Place::Result(i) => scope.results.get(*i).copied(),
            Place::Weight(_) | Place::Input(_) | Place::State(_) => {
                self.context.sources.find((scope.frame, id, scope.layer, scope.at), self.rank)
            }
        };
        found.ok_or_else(|| RunError::invalid(format!("buffer `{}` has no place", buffer.name)))
    }

    /// Where a tensor is that is in a wire, or in another tensor; `None` for one that is not.
    fn strided(&self, scope: &Scope<'_>, id: BufferId) -> Result<Option<Strided>, RunError> {
        if !matches!(self.buffer(scope, id)?.place, Place::Inside { .. }) {
            return Ok(None);
        }
        let schedule = self.context.schedule;
        let strided = schedule.frames[scope.frame].strided(&schedule.space, id);
        let missing = || RunError::invalid("a tensor is placed in a buffer that does not have its region");
        strided.map(Some).ok_or_else(missing)
    }

    /// Where a tensor is that is one piece of another tensor.
    pub(super) fn part(&self, scope: &Scope<'_>, id: BufferId) -> Result<Option<Strided>, RunError> {
        let Place::Inside { whole, .. } = self.buffer(scope, id)?.place else { return Ok(None) };
        let is_tensor = matches!(self.buffer(scope, whole)?.content, Content::Tensor(_));
        Ok(self.strided(scope, id)?.filter(|strided| is_tensor && strided.cut.is_none()))
    }

    /// The rows of a tensor in its wire, or in the tensor of which it is several pieces; `None` for one that is dense.
    pub(super) fn rows(&self, scope: &Scope<'_>, id: BufferId) -> Result<Option<Rows>, RunError> {
        let (strided, Content::Tensor(ty)) = (self.strided(scope, id)?, &self.buffer(scope, id)?.content)
        else {
            return Ok(None);
        };
        if self.part(scope, id)?.is_some() {
            return Ok(None);
        }
        let shape = extents(&self.context.schedule.space.local_box(ty, self.rank));
        Ok(strided.map(|strided| wire_rows::rows(&strided, &shape)))
    }

    /// The number of elements of a buffer on the rank.
    pub(super) fn length(&self, scope: &Scope<'_>, id: BufferId) -> Result<usize, RunError> {
        Ok(match &self.buffer(scope, id)?.content {
            Content::Tensor(ty) => {
                extents(&self.context.schedule.space.local_box(ty, self.rank)).iter().product()
            }
            Content::Wire { elements, .. } => index(*elements),
        })
    }

    /// Those elements; for a tensor in a wire, or in pieces in another, the whole of it.
    pub(super) fn area(&self, scope: &Scope<'_>, id: BufferId) -> Result<Area<'a>, RunError> {
        let n = match self.buffer(scope, id)?.place {
            Place::Inside { whole, .. } if self.part(scope, id)?.is_none() => self.length(scope, whole)?,
            _ => self.length(scope, id)?,
        };
        Ok(match self.locate(scope, id)? {
            Location::Arena(start) => {
                Area::Private(MemoryRange { part: claims::ARENA, range: start..start + n })
            }
            Location::Written(number, start) => {
                Area::Private(MemoryRange { part: claims::written(number), range: start..start + n })
            }
            Location::Shared(part, start) => {
                let data = self.context.sources.part(part).get(start..start + n);
                Area::Shared(data.ok_or_else(|| self.outside(scope, id))?)
            }
        })
    }

    /// The elements that the area of a buffer occupies: in the arena an element takes the slots of its type, those of one piece of
    /// another tensor in the slots of that one.
    pub(super) fn footprint(
        &self,
        scope: &Scope<'_>,
        id: BufferId,
        extent: &MemoryRange,
    ) -> Result<MemoryRange, RunError> {
        let MemoryRange { part, range } = extent.clone();
        Ok(match part {
            claims::ARENA if self.part(scope, id)?.is_none() => {
                let dtype = self.buffer(scope, id)?.dtype();
                let end = range.start + self.context.shape.slots_of(range.len(), dtype);
                MemoryRange { part, range: range.start..end }
            }
            _ => MemoryRange { part, range },
        })
    }

    /// The slices of the layers of a call.
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

    /// The error of a buffer that ends outside its memory.
    pub(super) fn outside(&self, scope: &Scope<'_>, id: BufferId) -> RunError {
        let frame = &self.context.schedule.frames[scope.frame];
        RunError::invalid(format!(
            "buffer `{}` of `{}` is not as large as its content",
            frame.buffers[id].name, frame.name
        ))
    }
}
