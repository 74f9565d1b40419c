//! Parts of dimensions, taken, joined, cut and put side by side.

use ithaca_ir::DimId;

use super::view::{Cx, View, bits_of, place, signed, step};
use crate::argument::arguments;
use crate::error::LowerError;
use crate::structs::Walk;

/// The direction of a copy of a part.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    /// From the whole tensor.
    Out,
    /// Into the whole tensor.
    Into,
}

/// The walk along a dimension of a part and of the whole tensor, outer legs first: steps, and their strides in the two.
/// `block` is the length of a block of the part and the distance between blocks; `runs` is the length of a run of the part
/// and the distance between runs in the whole tensor.
fn legs(
    extent: i64,
    (part, whole): (i64, i64),
    block: Option<(i64, i64)>,
    runs: Option<(i64, i64)>,
) -> Result<Vec<(i64, i64, i64)>, LowerError> {
    let (each, run) = runs.unwrap_or((extent, extent));
    Ok(match block {
        None => vec![(extent / each.max(1), each * part, run * whole), (each, part, whole)],
        Some((len, block)) if len > 0 && each % len == 0 => vec![
            (extent / each.max(1), each / len * block, run * whole),
            (each / len, block, len * whole),
            (len, part, whole),
        ],
        Some((len, block)) if each > 0 && len % each == 0 => vec![
            (extent / len, block, len / each * run * whole),
            (len / each, each * part, run * whole),
            (each, part, whole),
        ],
        Some(_) => return LowerError::unsupported("a part in runs that blocks cut in pieces"),
    })
}

impl Cx<'_> {
    /// Copies the part at an index of each run of a dimension.
    fn copy_part(
        &self,
        direction: Direction,
        dim: DimId,
        whole: View<'_>,
        part: View<'_>,
    ) -> Result<(), LowerError> {
        let Some(cut) = self.space.dims[dim].part else {
            return LowerError::unsupported("a part of a dimension without parts");
        };
        let (lw, lp) = (self.local(whole.ty), self.local(part.ty));
        if lp.size == 0 {
            return Ok(());
        }
        let run = signed(self.space.size(cut.of) / cut.runs.max(1)).max(1);
        let each = run / signed(cut.count).max(1);
        let at = place(part.ty, dim)?;
        let inner = lw.strides[at];
        let mut walk = Walk::<2>::default();
        let order = |part: i64, whole: i64| match direction {
            Direction::Out => [part, whole],
            Direction::Into => [whole, part],
        };
        if part.cut().is_some() {
            let own = self.local_of(part);
            for (d, &extent) in own.extents.iter().enumerate() {
                let sides = (own.strides[d], lw.strides[d]);
                let block = part.cut().filter(|(place, ..)| *place == d).map(|(_, len, block)| (len, block));
                let runs = (d == at).then_some((each, run));
                for (steps, part, whole) in
                    legs(extent, sides, block, runs)?.into_iter().filter(|leg| leg.0 != 1)
                {
                    step(&mut walk, steps, order(part, whole))?;
                }
            }
        } else {
            let runs = lw.size / (run * inner);
            step(&mut walk, runs, order(each * inner, run * inner))?;
            step(&mut walk, each * inner, [1, 1])?;
        }
        let first = cut.index * u64::try_from(each * inner).unwrap_or(0);
        let there = whole.at.offset(first * part.ty.dtype.bytes());
        let [from, to] = match direction {
            Direction::Out => [there, part.at],
            Direction::Into => [part.at, there],
        };
        self.copy_box(part.ty.dtype, [from, to], walk)
    }

    /// One part of a dimension, within the indices that this rank holds.
    pub(crate) fn take(&self, to: DimId, x: View<'_>, z: View<'_>) -> Result<(), LowerError> {
        self.copy_part(Direction::Out, to, x, z)
    }

    /// The parts of a dimension become the dimension again.
    pub(crate) fn join(&self, to: DimId, parts: &[View<'_>], z: View<'_>) -> Result<(), LowerError> {
        let at = place(z.ty, to)?;
        parts.iter().try_for_each(|part| match part.ty.dims.get(at) {
            Some(&dim) => self.copy_part(Direction::Into, dim, z, *part),
            None => LowerError::unsupported("a part of fewer dimensions than the whole"),
        })
    }

    /// x followed by y along the last dimension.
    pub(crate) fn concat(&self, x: View<'_>, y: View<'_>, z: View<'_>) -> Result<(), LowerError> {
        let (lx, ly, lz) = (self.local(x.ty), self.local(y.ty), self.local(z.ty));
        let mut rows = self.walk(z.ty, |dim| z.ty.dims.last() != Some(&dim), [y.ty])?;
        let [wx, wy] = [&lx, &ly].map(|l| l.extents.last().copied().unwrap_or(1));
        let each = self.neighbours(z.ty.dtype, &[x.at, y.at, z.at], &[wx, wy]);
        rows.stride[0].iter_mut().for_each(|stride| *stride /= each);
        let (kernel, n) = (format!("concat<{}>", bits_of(z.ty.dtype, each)), lz.size / each);
        self.launch(&kernel, n, arguments![x.at, y.at, z.at, rows, n, wx / each, wy / each])
    }

    /// A window of the last dimension.
    pub(crate) fn cut(&self, start: u64, x: View<'_>, z: View<'_>) -> Result<(), LowerError> {
        let (lx, lz) = (self.local(x.ty), self.local(z.ty));
        let [wx, wz] = [&lx, &lz].map(|l| l.extents.last().copied().unwrap_or(1));
        let each = self.neighbours(z.ty.dtype, &[x.at, z.at], &[wx, wz, signed(start)]);
        let (kernel, n) = (format!("cut<{}>", bits_of(z.ty.dtype, each)), lz.size / each);
        self.launch(&kernel, n, arguments![x.at, z.at, n, wx / each, wz / each, signed(start) / each])
    }
}
