//! Gradients of look-ups in a table, where ranks that split tokens hold other rows of it, or the same.
//!
//! Each rank adds its own tokens to all rows, and the sum over ranks is scattered, or taken whole if the table is; or each
//! rank receives all tokens and adds to the rows that it holds. The first sends rows of the table, the second of tokens:
//!
//! ```text
//! %d_table = embed_backward %ids, %dy : bf16[v m] sum tp     // ids [b s@tp], dy [b s@tp m]; then a reduce-scatter
//! %d_table = embed_backward %ids, %dy : bf16[v@tp m]         // ids [b s], dy [b s m], gathered
//! ```
//! The faster by the cluster's prices is taken. Where the ranks have all tokens anyway, rows of their own cost nothing.
//! Gradients of tokens that are sums over replicas, as of learned positions, stay pending if the sum over micro-batches does.

use ithaca_ir::layout::{AxisList, Layout};
use ithaca_ir::module::{Node, ValueId};
use ithaca_ir::ops::OpError;
use ithaca_ir::text::show;
use ithaca_ir::{AxisId, DimId, TensorType};
use ithaca_pass::Prices;
use ithaca_pass::choices::{Choice, Topic, impossible};

use super::rewriter::Rewriter;
use crate::reshard::convert;

/// The choice of tokens that stay, as it is recorded.
const TOKENS: &str = "tokens";

/// The choice of rows that stay.
const ROWS: &str = "rows";

impl Rewriter<'_, '_> {
    /// The gradient of a table, looked up along `over`, from ids and the gradients of tokens.
    pub(super) fn embed_backward(
        &mut self,
        node: &Node,
        over: DimId,
        operands: &[ValueId],
    ) -> Result<Vec<ValueId>, OpError> {
        let mut table = self.unplaced_results(node);
        let mut own_tokens = self.demanded(node, operands, &table)?;
        if self.stays_pending(node.result(), operands[1], &own_tokens[1]) {
            own_tokens[1].partial.clone_from(&self.b.ty(operands[1]).layout.partial);
        }
        let all_rows = table[0].clone();
        let row = all_rows.position(over);
        let rows: AxisList =
            self.preferred(node).zip(row).map_or(AxisList::new(), |(l, i)| l.split[i].clone());
        table[0] = all_rows.clone().split(over, rows.iter().copied());
        // Ranks along these axes hold the same weights, or other rows of them.
        let along = |axis: &AxisId| rows.contains(axis) || self.placement.residual.contains(axis);
        let mut all_tokens = own_tokens.clone();
        let splits = all_tokens.iter_mut().flat_map(|layout| &mut layout.split);
        splits.for_each(|split| split.retain(|axis| !along(axis)));

        let mut pending = all_rows.layout.clone();
        pending.partial = own_tokens.iter().flat_map(Layout::axes).filter(along).collect();
        pending.partial.sort_unstable();
        pending.partial.dedup();
        if own_tokens != all_tokens {
            let key = format!("@{} {}", self.source.name, show(self.b.space(), &all_rows));
            let is_by_tokens = match self.cx.choose(Topic::Lookups, key.as_str())? {
                Choice::ByPrice(prices) => {
                    let by_tokens = self.lookup_seconds(node, operands, &own_tokens, &all_rows, prices)
                        + self.conversion_seconds(&all_rows.with_layout(pending), &table[0], prices);
                    let by_rows = self.lookup_seconds(node, operands, &all_tokens, &table[0], prices);
                    self.cx.record(if by_tokens < by_rows { TOKENS } else { ROWS });
                    by_tokens < by_rows
                }
                Choice::Recorded(TOKENS) => true,
                Choice::Recorded(ROWS) => false,
                Choice::Recorded(other) => {
                    let why = "a gradient is computed by `tokens` or by `rows`";
                    return Err(impossible(Topic::Lookups, &key, other, why));
                }
            };
            if is_by_tokens {
                (all_tokens, table[0]) = (own_tokens, all_rows);
            }
        }
        let moved = self.reshard_all(operands, all_tokens)?;
        Ok(self.b.node(node.op.clone(), &moved, &table)?.to_vec())
    }

    /// Seconds of a gradient of the type `table`, whose operands are first brought to `layouts`.
    fn lookup_seconds(
        &self,
        node: &Node,
        operands: &[ValueId],
        layouts: &[Layout],
        table: &TensorType,
        prices: &dyn Prices,
    ) -> f64 {
        let at = operands.first().and_then(|&v| self.b.ty(v).layout.at);
        let moved = |(&v, layout): (&ValueId, &Layout)| self.b.ty(v).with_layout(layout.clone());
        let moved: Vec<TensorType> = operands.iter().zip(layouts).map(moved).collect();
        let arrives =
            |&(&v, to): &(&ValueId, &TensorType)| self.known(v, &to.layout.clone().located(at)).is_none();
        let arriving = operands.iter().zip(&moved).filter(arrives);
        let arrive: f64 =
            arriving.map(|(&v, to)| self.conversion_seconds(&self.b.ty(v).located(None), to, prices)).sum();
        let types: Vec<&TensorType> = moved.iter().collect();
        arrive + prices.op_seconds(self.b.space(), &node.op, &types, &[table])
    }

    pub(super) fn conversion_seconds(&self, from: &TensorType, to: &TensorType, prices: &dyn Prices) -> f64 {
        let space = self.b.space();
        let steps = convert(space, from, to, prices);
        let before = std::iter::once(from).chain(steps.iter().map(|step| &step.to));
        before
            .zip(&steps)
            .map(|(from, step)| prices.collective_seconds(space, &step.op, from, &step.to))
            .sum()
    }
}
