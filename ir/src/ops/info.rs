//! The facts that an operation declares: the family, class and cost of an operation, its operands and attributes.

use std::ops::RangeInclusive;

use crate::diagnostic::counted;

/// A group of similar operations, a section of the reference page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    /// The origins of values.
    Source,
    /// Products of matrices, sums and look-ups.
    Linear,
    /// Element by element.
    Elementwise,
    /// Normalisation over a dimension.
    Norm,
    /// Random numbers and dropout.
    Random,
    /// Attention and its parts.
    Attention,
    /// Caches of keys and values, and generated tokens.
    Cache,
    /// Mixtures of experts.
    Experts,
    /// The loss, gradients and the optimizer.
    Training,
    /// Functions.
    Structure,
    /// Changes of layout: communication and slices.
    Layout,
}

impl Family {
    /// Every family, in the order of the reference page.
    pub const ALL: [Family; 11] = [
        Family::Source,
        Family::Linear,
        Family::Elementwise,
        Family::Norm,
        Family::Random,
        Family::Attention,
        Family::Cache,
        Family::Experts,
        Family::Training,
        Family::Structure,
        Family::Layout,
    ];
}

/// The relation of an operation to the rest of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// Each rank computes its results from its own operands.
    Compute,
    /// Changes a layout, and no rank communicates.
    Layout,
    /// Changes a layout, and ranks communicate.
    Collective,
    /// Reads or writes tensors that outlive the step, or runs a function.
    Effect,
}

/// The part of a device that limits the arithmetic of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Unit {
    /// The operation is not a kernel.
    NoKernel,
    /// Matrix units, as products of matrices use them.
    Matmul,
    /// Matrix units, as attention uses them.
    Attention,
    /// Vector units, whatever the element type in memory.
    Vector,
}

/// The FLOPs of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flops {
    /// None: the operation only moves elements.
    Zero,
    /// This many for each element of each result.
    Results(u32),
    /// This many for each element of each operand.
    Operands(u32),
    /// This many for each element of the first operand.
    FirstOperand(u32),
    /// This many for each element of the largest operand or result.
    Largest(u32),
    /// A function of types and attributes, see [`Op::cost`](crate::Op::cost).
    Own,
}

/// A declared attribute.
#[derive(Clone, Copy, Debug)]
pub struct AttrInfo {
    /// The name in the text form.
    pub name: &'static str,
    /// The values it takes, as messages describe them.
    pub kind: &'static str,
    /// The value when left out, as the source code spells it; none for a required attribute.
    pub default: Option<&'static str>,
    /// Its documentation.
    pub meaning: &'static str,
    /// The attributes that a struct of attributes has in the place of this one.
    pub parts: &'static [AttrInfo],
}

/// The declaration of an operation.
#[derive(Clone, Debug)]
pub struct OpInfo {
    /// The name in the text form.
    pub name: &'static str,
    /// The family.
    pub family: Family,
    /// The class.
    pub class: Class,
    /// The part of a device that its kernel uses.
    pub unit: Unit,
    /// The FLOPs of its kernel.
    pub flops: Flops,
    /// The number of operands.
    pub operands: RangeInclusive<usize>,
    /// The least number of results.
    pub results: usize,
    /// The dimensions of operands and results, in the notation of einsum; `(…)` is optional.
    pub signature: &'static str,
    /// Attributes, in the order of the text form.
    pub attrs: &'static [AttrInfo],
    /// The documentation.
    pub summary: &'static str,
}

impl OpInfo {
    /// The number of operands, for messages: `2 operands`, `1 to 3 operands`.
    pub fn operand_count(&self) -> String {
        let (least, most) = (*self.operands.start(), *self.operands.end());
        if least == most { counted(least as u64, "operand") } else { format!("{least} to {most} operands") }
    }

    /// The names of the attributes, in the order of the text form.
    pub fn attr_names(&self) -> impl Iterator<Item = &'static str> {
        self.attrs().into_iter().map(|attr| attr.name)
    }

    /// The attributes, structs of attributes taken apart.
    pub fn attrs(&self) -> Vec<&'static AttrInfo> {
        fn apart(attr: &'static AttrInfo) -> Vec<&'static AttrInfo> {
            if attr.parts.is_empty() { vec![attr] } else { attr.parts.iter().flat_map(apart).collect() }
        }
        self.attrs.iter().flat_map(apart).collect()
    }
}

/// The number of tensors on one side of a signature.
#[derive(Clone, Copy)]
struct Count {
    required: usize,
    optional: usize,
}

/// The number of operands that a signature shows. Where it ends in `…`, `most` is the largest number.
pub(super) const fn operands(signature: &str, most: usize) -> RangeInclusive<usize> {
    let Count { required, optional } = count(signature.as_bytes(), 0);
    RangeInclusive::new(required, if most > 0 { most } else { required + optional })
}

/// The least number of results that a signature shows.
pub(super) const fn results(signature: &str) -> usize {
    let signature = signature.as_bytes();
    let mut i = 0;
    while signature[i] != b'>' {
        i += 1;
    }
    count(signature, i + 1).required
}

/// Counts the items from `start` to `->` or to the end.
const fn count(signature: &[u8], start: usize) -> Count {
    let mut count = Count { required: 0, optional: 0 };
    let (mut i, mut in_item) = (start, false);
    while i < signature.len() && signature[i] != b'-' {
        match signature[i] {
            b',' => in_item = false,
            b' ' => {}
            // The first byte of `…`, which stands for any number of items.
            0xe2 if !in_item => in_item = true,
            first => {
                if !in_item && first == b'(' && signature[i + 1] != b')' && is_whole_item(signature, i) {
                    count.optional += 1;
                } else if !in_item {
                    count.required += 1;
                }
                in_item = true;
            }
        }
        i += 1;
    }
    count
}

/// Whether the parenthesis at `open` is closed at the end of the item: `(r h)`, but not `(p) b s`.
const fn is_whole_item(signature: &[u8], open: usize) -> bool {
    let mut i = open;
    while signature[i] != b')' {
        i += 1;
    }
    i += 1;
    while i < signature.len() && signature[i] == b' ' {
        i += 1;
    }
    i == signature.len() || signature[i] == b',' || signature[i] == b'-'
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_are_counted() {
        for (signature, most, least_operands, most_operands, n_results) in [
            ("-> any", 0, 0, 0, 1),
            ("any ->", 0, 1, 1, 0),
            ("x, m -> x", 0, 2, 2, 1),
            ("b s h d, b t k d, b t k e, (r h), (key) -> b s h e, (b s h)", 0, 3, 5, 1),
            ("b s h c -> (p) b s h", 0, 1, 1, 1),
            ("hp, … -> h", 256, 1, 256, 1),
            ("… -> …", 64, 0, 64, 0),
            ("x, y, … -> x, y, …", 64, 2, 64, 2),
        ] {
            assert_eq!(operands(signature, most), least_operands..=most_operands, "{signature}");
            assert_eq!(results(signature), n_results, "{signature}");
        }
    }
}
