//! Attention of a sharded program, whose keys and queries are yet to visit each other.
//!
//! A movement says how the parts of a sequence meet, and every movement computes the same function: that of whole
//! sequences. So the oracle puts the sequences together, computes, and cuts the result.

use std::rc::Rc;

use ithaca_ir::mesh::AxisId;
use ithaca_ir::ops::Attention;
use ithaca_ir::{DimId, Op, Space, TensorType};

use super::collective::communicate;
use super::ranks::{RankValues, compute_all};
use super::value::Value;
use crate::error::RunError;
use crate::real::Real;

/// Operands and results of an attention, by which dimensions are put together.
pub(super) struct WholeAttention<'a> {
    attention: &'a Attention,
    /// For each operand, the dimension that a rank must see whole.
    operands: Vec<Option<DimId>>,
    /// For each result the same; the rank's part is cut out again.
    results: Vec<Option<DimId>>,
}

/// How to compute `op` if it is an attention with a movement.
///
/// # Errors
/// [`RunError::Unsupported`] where its keys are fetched, as they are when its movement has been carried out.
pub(super) fn whole_attention<'a>(
    space: &Space,
    op: &'a Op,
    types: &[TensorType],
) -> Option<Result<WholeAttention<'a>, RunError>> {
    let (attention, backward) = match op {
        Op::Attention(a) => (a, false),
        Op::AttentionBackward(a) => (a, true),
        _ => return None,
    };
    attention.movement.as_ref()?;
    if space.dims[attention.keys].fetched.is_some() {
        return Some(Err(RunError::Unsupported("a movement of keys that are fetched".to_owned())));
    }
    // Forward, a rank has the queries that it answers; backward, every query may move every key's gradient.
    let queries = backward.then_some(attention.queries);
    let keys = Some(attention.keys);
    let of_operand = |i: usize| match i {
        i if attention.is_of_keys(i) => keys,
        0 | 3 | 4 | 5 if backward => queries,
        _ => None,
    };
    let results = if backward { vec![queries, keys, keys, None] } else { vec![None, None] };
    let operands = (0..types.len()).map(of_operand).collect();
    Some(Ok(WholeAttention { attention, operands, results }))
}

impl WholeAttention<'_> {
    /// Every rank's part of every result.
    pub(super) fn compute<T: Real>(
        &self,
        space: &Space,
        op: &Op,
        types: &[TensorType],
        results: &[TensorType],
        operands: &[&RankValues<T>],
    ) -> Result<Vec<RankValues<T>>, RunError> {
        let mut whole_types = Vec::with_capacity(types.len());
        let mut whole: Vec<RankValues<T>> = Vec::with_capacity(types.len());
        for ((ty, held), dim) in types.iter().zip(operands).zip(&self.operands) {
            let together = put_together(ty, *dim);
            whole.push(reshard(space, ty, &together, held)?);
            whole_types.push(together);
        }
        // Where every rank has all queries, a sum over them is taken on each.
        let mut taken: Vec<AxisId> = types[0].axes_of(self.attention.queries).to_vec();
        taken.retain(|_| self.operands[0].is_some());
        let together = |(ty, dim): (&TensorType, &Option<DimId>)| {
            let mut ty = put_together(ty, *dim);
            ty.layout.partial.retain(|axis| !taken.contains(axis));
            ty
        };
        let result_types: Vec<TensorType> = results.iter().zip(&self.results).map(together).collect();
        let alone = Attention { movement: None, ..self.attention.clone() };
        let alone = match op {
            Op::AttentionBackward(_) => Op::AttentionBackward(alone),
            _ => Op::Attention(alone),
        };
        let whole: Vec<&RankValues<T>> = whole.iter().collect();
        let mut computed = compute_all(space, &alone, &whole_types, &result_types, &whole)?;
        for (held, ty) in computed.iter_mut().zip(results) {
            let pending: Vec<AxisId> =
                ty.layout.partial.iter().copied().filter(|axis| taken.contains(axis)).collect();
            summand_of_first(space, held, &pending);
        }
        let cut = computed.iter().zip(&result_types).zip(results);
        cut.map(|((held, together), ty)| reshard(space, together, ty, held)).collect()
    }
}

/// The type with `dim` whole on every rank, and every part of it where it belongs.
fn put_together(ty: &TensorType, dim: Option<DimId>) -> TensorType {
    let mut ty = ty.clone();
    if let Some(i) = dim.and_then(|dim| ty.position(dim)) {
        let axes = std::mem::take(&mut ty.layout.split[i]);
        ty.layout.moved.retain(|m| !axes.contains(&m.axis));
    }
    ty
}

/// Makes of sums that every rank along `axes` has taken summands: the first rank's is the sum, those of the others zero.
fn summand_of_first<T: Real>(space: &Space, held: &mut RankValues<T>, axes: &[AxisId]) {
    for (rank, value) in space.mesh.iter_ranks().zip(held) {
        if space.mesh.coordinate_along(rank, axes) == 0 {
            continue;
        }
        if let Value::Real(tensor) = Rc::make_mut(value) {
            tensor.data.fill(T::ZERO);
        }
    }
}

fn reshard<T: Real>(
    space: &Space,
    from: &TensorType,
    to: &TensorType,
    held: &[Rc<Value<T>>],
) -> Result<RankValues<T>, RunError> {
    if from == to { Ok(held.to_vec()) } else { communicate(space, &Op::Reshard, from, to, held) }
}
