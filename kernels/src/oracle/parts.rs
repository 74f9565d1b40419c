//! Parts of a dimension, taken and joined: strided copies of a rank's part.

use ithaca_ir::boxes::Region;
use ithaca_ir::{DimId, Part, Space, TensorType};

use crate::error::RunError;
use crate::tensor::{extents, index};

/// How a local tensor that has a dimension is seen to cut that into parts: `[outer, count, inner]`, the runs that the rank
/// holds being outer, the elements of a run's part inner.
struct Cut {
    outer: usize,
    count: usize,
    inner: usize,
}

impl Cut {
    /// The cut of the dimension at `at` of a tensor that holds `region`, as `part` is declared.
    fn new(space: &Space, part: Part, region: &Region, at: usize) -> Result<Self, RunError> {
        let shape = extents(region);
        let run = index(space.size(part.of) / part.runs.max(1)).max(1);
        let count = index(part.count);
        if !shape[at].is_multiple_of(run) || !run.is_multiple_of(count) {
            return Err(RunError::invalid(format!(
                "a rank holds {} elements of `{}`, which are no runs of {run}",
                shape[at], space.dims[part.of].name
            )));
        }
        let before: usize = shape[..at].iter().product();
        let after: usize = shape[at + 1..].iter().product();
        Ok(Self { outer: before * (shape[at] / run), count, inner: run / count * after })
    }

    /// The offset of part `i` of a run in the tensor.
    fn block(&self, run: usize, i: usize) -> std::ops::Range<usize> {
        let start = (run * self.count + i) * self.inner;
        start..start + self.inner
    }
}

fn part_of(space: &Space, dim: DimId) -> Result<Part, RunError> {
    space.dims[dim].part.ok_or_else(|| RunError::invalid("`take` of a dimension that is not a part"))
}

/// The part `to` of `x`, which holds `region` of `ty`.
pub(super) fn take<E: Copy>(
    space: &Space,
    to: DimId,
    (ty, region): (&TensorType, &Region),
    x: &[E],
) -> Result<Vec<E>, RunError> {
    let part = part_of(space, to)?;
    let at = ty.position(part.of).ok_or_else(|| RunError::invalid("`take` lacks its dimension"))?;
    let cut = Cut::new(space, part, region, at)?;
    let mut out = Vec::with_capacity(cut.outer * cut.inner);
    for run in 0..cut.outer {
        out.extend_from_slice(&x[cut.block(run, index(part.index))]);
    }
    Ok(out)
}

/// The parts of `to`, joined into `region` of `ty`.
pub(super) fn join<E: Copy>(
    space: &Space,
    to: DimId,
    (first, parts): (&TensorType, &[&[E]]),
    (ty, region): (&TensorType, &Region),
) -> Result<Vec<E>, RunError> {
    let at = ty.position(to).ok_or_else(|| RunError::invalid("`join` lacks its dimension"))?;
    let cut = Cut::new(space, part_of(space, first.dims[at])?, region, at)?;
    if parts.len() != cut.count || parts.iter().any(|part| part.len() != cut.outer * cut.inner) {
        return Err(RunError::invalid("`join` has parts that do not make up its result"));
    }
    let mut out = Vec::with_capacity(cut.outer * cut.count * cut.inner);
    for run in 0..cut.outer {
        for part in parts {
            out.extend_from_slice(&part[run * cut.inner..(run + 1) * cut.inner]);
        }
    }
    Ok(out)
}
