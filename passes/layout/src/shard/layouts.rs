//! Which layouts an operation demands of its operands, from its factor rule.
//!
//! Every factor takes the axes that its operands bring: weights first, then the others in order; the longer list wins
//! where one extends the other; an axis serves one factor only. What an operand has otherwise must be resharded.

use ithaca_ir::TensorType;
use ithaca_ir::layout::{AxisList, Layout};
use ithaca_ir::rule::{FactorKind, FactorRule};

/// An operand as it is found.
#[derive(Clone, Debug)]
pub struct Found<'a> {
    /// Its type.
    pub ty: &'a TensorType,
    /// The layout to count with in place of its own: that of a pending sum once it is taken.
    pub layout: Layout,
    /// Whether it is a weight, which is better left where it is.
    pub weight: bool,
}

/// The layouts that operands must have, in order. `result` is the layout that the first result is wanted in, as far as
/// operands can give it: the gradient of a weight is best made where the weight is.
pub fn demand(rule: &FactorRule, operands: &[Found<'_>], result: Option<&Layout>) -> Vec<Layout> {
    let mut axes: Vec<AxisList> = vec![AxisList::new(); rule.factors.len()];
    for (&factor, split) in rule.results.iter().take(1).flatten().zip(result.iter().flat_map(|r| &r.split)) {
        match rule.factors[factor] {
            FactorKind::Parallel if rule.operands.iter().any(|o| o.contains(&factor)) => {
                extend(&mut axes, factor, split);
            }
            FactorKind::Parallel | FactorKind::Whole | FactorKind::Softmax | FactorKind::Sum => {}
        }
    }
    let (weights, others): (Vec<usize>, Vec<usize>) = (0..operands.len()).partition(|&i| operands[i].weight);
    for i in weights.into_iter().chain(others) {
        for (&factor, split) in rule.operands[i].iter().zip(&operands[i].layout.split) {
            match rule.factors[factor] {
                FactorKind::Whole | FactorKind::Softmax => {}
                FactorKind::Parallel | FactorKind::Sum => extend(&mut axes, factor, split),
            }
        }
    }
    let layout = |factors: &[usize]| Layout {
        split: factors.iter().map(|&f| axes[f].clone()).collect(),
        ..Layout::default()
    };
    rule.operands.iter().map(|factors| layout(factors)).collect()
}

/// Extends the axes of `factor` by `wanted` as far as it continues them and no other factor has the axis.
fn extend(axes: &mut [AxisList], factor: usize, wanted: &AxisList) {
    if !wanted.starts_with(&axes[factor]) {
        return;
    }
    for &axis in &wanted[axes[factor].len()..] {
        if axes.iter().any(|taken| taken.contains(&axis)) {
            return;
        }
        axes[factor].push(axis);
    }
}
