//! Attention over caches in pages: over the tokens that are gathered from them, as it is defined.

use ithaca_ir::ops::Attention;
use ithaca_ir::ops::attention::TABLE;
use ithaca_ir::{DimId, Op, Space, TensorType};

use super::cache::gather_pages;
use super::value::{Elements, LocalOp, Operand, ResultSpec};
use crate::error::RunError;
use crate::real::Real;

/// `of` the operands of the attention that `attend_pages` with these operands is.
///
/// # Errors
/// [`RunError::Invalid`] for operands that do not fit, which a verified program does not have; those of `of`.
pub(crate) fn with_gathered<T: Real, R>(
    space: &Space,
    (attention, paged): (&Attention, [DimId; 2]),
    operands: &[Operand<'_, T>],
    of: impl FnOnce(&[Operand<'_, T>]) -> Result<R, RunError>,
) -> Result<R, RunError> {
    let types: Vec<&TensorType> = operands.iter().map(|operand| operand.ty).collect();
    let types = attention.gathered(space, paged, &types).map_err(|error| RunError::invalid(error.message))?;
    let op = Op::Cache(attention.gather(paged));
    let table = &operands[TABLE];
    let entries = space.size(table.ty.dims[1]);
    let others = operands.iter().enumerate().filter(|(i, _)| *i != TABLE).map(|(_, operand)| operand);
    let others: Vec<_> = others.zip(&types).collect();
    let mut tokens = Vec::with_capacity(types.len());
    for &(operand, ty) in &others {
        if operand.ty.dims == ty.dims {
            tokens.push(None);
            continue;
        }
        // Ranks that split tokens have a part of each page.
        let (slots, rest) = (&operand.region[1], &operand.region[2..]);
        let held = slots.start * entries..slots.end * entries;
        let region = [table.region[0].clone(), held].into_iter().chain(rest.iter().cloned()).collect();
        let results = [ResultSpec { ty, region }];
        let paged_operands = [operand.clone(), table.clone()];
        let call = LocalOp { space, op: &op, operands: &paged_operands, results: &results };
        let gathered = gather_pages(&call, (paged[1], attention.keys), None)?;
        let [ResultSpec { region, .. }] = results;
        tokens.push(Some((region, gathered)));
    }
    let seen = others.iter().zip(&tokens).map(|(&(operand, ty), tokens)| match tokens {
        None => operand.clone(),
        Some((region, data)) => Operand { ty, region: region.clone(), elements: Elements::Real(data) },
    });
    of(&seen.collect::<Vec<_>>())
}
