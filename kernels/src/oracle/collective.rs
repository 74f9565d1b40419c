//! Collectives on virtual ranks: every rank's part of the result, assembled from the parts of the others.
//!
//! [`boxes::exchange`] gives the sender of each element; a `reshard` needs only boxes.

use std::rc::Rc;

use ithaca_ir::boxes::{self, Exchange, intersect};
use ithaca_ir::{Op, Rank, Space, TensorType};

use super::value::Value;
use crate::error::RunError;
use crate::real::Real;
use crate::tensor::{Tensor, extents, index, merge_block, read_block, read_part, write_part};

/// Runs `op`, a collective or a `reshard`, on the parts of all ranks, in order of ranks.
///
/// Sums are taken in order of the group.
///
/// # Errors
/// [`RunError::Invalid`] when ranks hold values of different kinds, or `op` does not change a layout.
pub fn communicate<T: Real>(
    space: &Space,
    op: &Op,
    from: &TensorType,
    to: &TensorType,
    held: &[Rc<Value<T>>],
) -> Result<Vec<Rc<Value<T>>>, RunError> {
    if let Ok(parts) = held.iter().map(|v| v.elements().real()).collect::<Result<Vec<_>, _>>() {
        let results = carry_out(space, op, from, to, &parts, T::ZERO, |x, y| x + y)?;
        return Ok(results.into_iter().map(|t| Rc::new(Value::Real(t))).collect());
    }
    let parts = held.iter().map(|v| v.elements().int()).collect::<Result<Vec<_>, _>>();
    let parts = parts.map_err(|_| RunError::invalid("ranks hold values of different kinds"))?;
    let results = carry_out(space, op, from, to, &parts, 0, i32::wrapping_add)?;
    Ok(results.into_iter().map(|t| Rc::new(Value::Int(t))).collect())
}

fn carry_out<E: Copy>(
    space: &Space,
    op: &Op,
    from: &TensorType,
    to: &TensorType,
    held: &[&[E]],
    zero: E,
    add: impl Fn(E, E) -> E + Copy,
) -> Result<Vec<Tensor<E>>, RunError> {
    let sums = match op {
        Op::ReduceScatter { .. } | Op::AllReduce { .. } | Op::FetchSum { .. } => true,
        Op::AllToAll { .. } | Op::AllGather { .. } | Op::Permute | Op::Fetch { .. } => false,
        Op::Reshard => return Ok(reshard(space, from, to, held, zero, add)),
        _ => return Err(RunError::invalid(format!("`{}` is not a collective", op.name()))),
    };
    let exchanges: Vec<Exchange> =
        space.mesh.iter_ranks().map(|rank| boxes::exchange(space, op, from, to, rank)).collect();
    // The elements that `peer` sends to `rank`, in the order of receipt.
    let sent = |peer: Rank, rank: Rank| -> Vec<E> {
        if !space.holds(from, peer) {
            return Vec::new();
        }
        let Exchange { group, send, .. } = &exchanges[index(peer.0)];
        let blocks = group.iter().zip(send).find(|&(&member, _)| member == rank);
        let has = space.local_box(from, peer);
        blocks.map_or_else(Vec::new, |(_, block)| read_block(&has, held[index(peer.0)], block))
    };
    let result = |rank: Rank| {
        if !space.holds(to, rank) {
            return Ok(Tensor::new(vec![0], Vec::new()));
        }
        let wanted = space.local_box(to, rank);
        let mut result = Tensor::filled(extents(&wanted), zero);
        let Exchange { group, recv, .. } = &exchanges[index(rank.0)];
        for (&peer, block) in group.iter().zip(recv) {
            let elements = sent(peer, rank);
            if elements.len() as u64 != boxes::block_elements(block) {
                return Err(RunError::invalid(format!(
                    "rank {} sends {} elements in `{}` where rank {} expects {}",
                    peer.0,
                    elements.len(),
                    op.name(),
                    rank.0,
                    boxes::block_elements(block)
                )));
            }
            let merge = |there: E, arrived: E| if sums { add(there, arrived) } else { arrived };
            merge_block(&wanted, &mut result.data, block, &elements, merge);
        }
        Ok(result)
    };
    space.mesh.iter_ranks().map(result).collect()
}

/// Assembles and redistributes: over the axes that are summed, every summand once; over the others, the parts of the
/// ranks with the same pending coordinates.
fn reshard<E: Copy>(
    space: &Space,
    from: &TensorType,
    to: &TensorType,
    held: &[&[E]],
    zero: E,
    add: impl Fn(E, E) -> E,
) -> Vec<Tensor<E>> {
    let mesh = &space.mesh;
    let kept = &to.layout.partial;
    let taken: Vec<_> = from.layout.partial.iter().copied().filter(|a| !kept.contains(a)).collect();
    let coordinates =
        |rank: Rank, axes: &[_]| -> Vec<u64> { axes.iter().map(|&a| mesh.coordinate(rank, a)).collect() };
    let result = |rank: Rank| {
        if !space.holds(to, rank) {
            return Tensor::new(vec![0], Vec::new());
        }
        let wanted = space.local_box(to, rank);
        let mut summands: std::collections::BTreeMap<Vec<u64>, Vec<E>> = Default::default();
        let n: usize = extents(&wanted).iter().product();
        let holders = mesh.iter_ranks().filter(|&s| space.holds(from, s));
        for source in holders.filter(|&s| coordinates(s, kept) == coordinates(rank, kept)) {
            let summand = summands.entry(coordinates(source, &taken)).or_insert_with(|| vec![zero; n]);
            let has = space.local_box(from, source);
            let part = intersect(&has, &wanted);
            write_part(&wanted, summand, &part, &read_part(&has, held[index(source.0)], &part));
        }
        let mut summands = summands.into_values();
        let first = summands.next().unwrap_or_else(|| vec![zero; n]);
        let sum = summands.fold(first, |sum, y| sum.into_iter().zip(y).map(|(x, y)| add(x, y)).collect());
        Tensor::new(extents(&wanted), sum)
    };
    mesh.iter_ranks().map(result).collect()
}
