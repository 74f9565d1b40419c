//! Parts of a dimension, taken and joined: strided copies of a rank's part.

use std::ops::Range;

use ithaca_ir::boxes::Region;
use ithaca_ir::{DimId, Part, Space};

use super::value::{Elements, LocalOp, ResultSpec, Value};
use crate::error::RunError;
use crate::real::Real;
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

    /// The elements of part `i` of a run in the tensor.
    fn block(&self, run: usize, i: usize) -> Range<usize> {
        let start = (run * self.count + i) * self.inner;
        start..start + self.inner
    }
}

fn part_of(space: &Space, dim: DimId) -> Result<Part, RunError> {
    space.dims[dim].part.ok_or_else(|| RunError::invalid("`take` of a dimension that is not a part"))
}

/// The part `to` of the operand.
pub(super) fn take<T: Real>(call: &LocalOp<'_, T>, to: DimId) -> Result<Value<T>, RunError> {
    let x = &call.operands[0];
    let part = part_of(call.space, to)?;
    let at = x.ty.position(part.of).ok_or_else(|| call.invalid("lacks its dimension"))?;
    let cut = Cut::new(call.space, part, &x.region, at)?;
    let shape = call.shape();
    if shape.iter().product::<usize>() != cut.outer * cut.inner {
        return Err(call.invalid("gives another shape than its type"));
    }
    Ok(x.elements.gather(shape, (0..cut.outer).flat_map(|run| cut.block(run, index(part.index)))))
}

/// The operands, which are the parts of `to`, joined.
pub(super) fn join<T: Real>(call: &LocalOp<'_, T>, to: DimId) -> Result<Value<T>, RunError> {
    let ResultSpec { ty, region } = call.result();
    let at = ty.position(to).ok_or_else(|| call.invalid("lacks its dimension"))?;
    let cut = Cut::new(call.space, part_of(call.space, call.operands[0].ty.dims[at])?, region, at)?;
    let parts: Vec<Elements<'_, T>> = call.operands.iter().map(|operand| operand.elements).collect();
    let size = cut.outer * cut.inner;
    if parts.len() != cut.count || parts.iter().any(|part| part.n() != size) {
        return Err(call.invalid("has parts that do not make up its result"));
    }
    let all = Elements::concatenated(vec![cut.count * size], &parts)?;
    let block = |run: usize, part: usize| part * size + run * cut.inner..part * size + (run + 1) * cut.inner;
    let runs = (0..cut.outer).flat_map(|run| (0..cut.count).map(move |part| (run, part)));
    Ok(all.elements().gather(call.shape(), runs.flat_map(|(run, part)| block(run, part))))
}
