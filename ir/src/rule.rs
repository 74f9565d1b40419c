//! Factor rules: the role of each dimension in an operation, stated once, as einsum does.
//!
//! A rule names loop dimensions ("factors") and says for every operand and result which factor each of its dimensions
//! is. Propagation, resharding, cost and the verifier are written against rules and never against operations.

use smallvec::SmallVec;

use crate::dim::DimId;
use crate::layout::{AxisList, Layout, Move};
use crate::types::TensorType;

/// The ways in which ranks may share a factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FactorKind {
    /// Each rank computes its part; results are split in the same way.
    Parallel,
    /// Each rank sums its part; results are partial sums over the axes that split it.
    Sum,
    /// The key sequence of attention: split only by a movement.
    Softmax,
    /// Must stay whole on each rank.
    Whole,
}

/// Factors of one tensor, one per dimension; indices into [`FactorRule::factors`].
pub type Factors = SmallVec<[usize; 4]>;

/// The rule of one operation on operands of given dimensions.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct FactorRule {
    /// The kind of each factor.
    pub factors: SmallVec<[FactorKind; 8]>,
    /// For each operand, the factor of each dimension.
    pub operands: SmallVec<[Factors; 4]>,
    /// For each result, the factor of each dimension.
    pub results: SmallVec<[Factors; 1]>,
}

/// Why layouts do not fit a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RuleViolation {
    /// A dimension that must stay whole is split.
    NotWhole(DimId),
    /// A dimension is split otherwise than where it occurred before.
    Conflict(DimId),
    /// One axis splits two factors.
    AxisTwice(DimId),
    /// An operand is a sum still to be taken.
    Pending(usize),
    /// Operands have moved along an axis in different ways.
    Moved,
}

impl FactorRule {
    /// The rule of an operation that computes each element by itself: every dimension is parallel.
    pub fn parallel(operands: &[&TensorType], results: &[&TensorType]) -> Self {
        Self::by_name(operands, results, |_| FactorKind::Parallel)
    }

    /// The rule of an operation in which every dimension name is one factor: parallel when a result has it, else summed.
    pub fn by_name(
        operands: &[&TensorType],
        results: &[&TensorType],
        kind: impl Fn(DimId) -> FactorKind,
    ) -> Self {
        Self::by_factor(operands, results, |dim| (dim, kind(dim)))
    }

    /// The rule in which `factor` maps each dimension to the one that represents its factor, and to the kind of the factor.
    pub fn by_factor(
        operands: &[&TensorType],
        results: &[&TensorType],
        factor: impl Fn(DimId) -> (DimId, FactorKind),
    ) -> Self {
        let mut names: SmallVec<[DimId; 8]> = SmallVec::new();
        let mut factors: SmallVec<[FactorKind; 8]> = SmallVec::new();
        let mut number = |&dim: &DimId| {
            let (name, kind) = factor(dim);
            names.iter().position(|&known| known == name).unwrap_or_else(|| {
                names.push(name);
                factors.push(kind);
                names.len() - 1
            })
        };
        let operands = operands.iter().map(|ty| ty.dims.iter().map(&mut number).collect()).collect();
        let results = results.iter().map(|ty| ty.dims.iter().map(&mut number).collect()).collect();
        Self { factors, operands, results }
    }

    /// The axes that split each factor, from operands whose layouts must agree; and the layouts of the results.
    ///
    /// # Errors
    /// The first [`RuleViolation`] in order of operands and dimensions.
    pub fn results(&self, operands: &[&TensorType]) -> Result<SmallVec<[Layout; 1]>, RuleViolation> {
        // The result of parts that moved together has moved with them.
        let mut moved: SmallVec<[Move; 1]> = SmallVec::new();
        for m in operands.iter().flat_map(|ty| &ty.layout.moved) {
            match moved.iter().find(|seen| seen.axis == m.axis) {
                None => moved.push(*m),
                Some(seen) if seen != m => return Err(RuleViolation::Moved),
                Some(_) => {}
            }
        }
        moved.sort_unstable();
        let still = |ty: &&TensorType| {
            moved.iter().any(|m| {
                ty.layout.split.iter().flatten().any(|&a| a == m.axis) && !ty.layout.moved.contains(m)
            })
        };
        if operands.iter().any(still) {
            return Err(RuleViolation::Moved);
        }
        let mut axes: SmallVec<[Option<AxisList>; 8]> = self.factors.iter().map(|_| None).collect();
        for (i, (ty, factors)) in operands.iter().zip(&self.operands).enumerate() {
            if !ty.layout.partial.is_empty() {
                return Err(RuleViolation::Pending(i));
            }
            for ((&dim, &factor), split) in ty.dims.iter().zip(factors).zip(&ty.layout.split) {
                match self.factors[factor] {
                    FactorKind::Whole | FactorKind::Softmax if !split.is_empty() => {
                        return Err(RuleViolation::NotWhole(dim));
                    }
                    _ => {}
                }
                match &axes[factor] {
                    None => {
                        let taken = axes.iter().flatten().flatten().any(|a| split.contains(a));
                        if taken {
                            return Err(RuleViolation::AxisTwice(dim));
                        }
                        axes[factor] = Some(split.clone());
                    }
                    Some(seen) if seen != split => return Err(RuleViolation::Conflict(dim)),
                    Some(_) => {}
                }
            }
        }
        let result = |factors: &Factors| {
            let mut layout = self.layout_of(factors, &axes);
            if moved.iter().any(|m| !layout.split.iter().flatten().any(|&a| a == m.axis)) {
                // A sum over parts that moved, or of which some ranks have none, is no sum over all.
                return Err(RuleViolation::Moved);
            }
            layout.moved.clone_from(&moved);
            Ok(layout)
        };
        self.results.iter().map(result).collect()
    }

    /// Whether a result that lacks the factor is a sum over it: a factor that is parallel in one result may be summed in
    /// another, as tokens are in the gradient of a weight.
    fn leaves_partial(&self, factor: usize) -> bool {
        match self.factors[factor] {
            FactorKind::Sum | FactorKind::Parallel => true,
            FactorKind::Softmax | FactorKind::Whole => false,
        }
    }

    /// The layout of a tensor with these factors, when `axes` split the factors; summed factors leave it partial.
    pub fn layout_of(&self, factors: &Factors, axes: &[Option<AxisList>]) -> Layout {
        let of = |factor: usize| axes[factor].clone().unwrap_or_default();
        let mut partial: AxisList = (0..self.factors.len())
            .filter(|&f| self.leaves_partial(f) && !factors.contains(&f))
            .flat_map(of)
            .collect();
        partial.sort_unstable();
        Layout { split: factors.iter().map(|&f| of(f)).collect(), partial, ..Layout::default() }
    }
}
