//! Integers that depend on the rank, as C++ expressions.
//!
//! `c` has the coordinates of the rank, `in.layer` is the current layer. A number that is not affine in the coordinates is an
//! entry of a static array.

use std::cell::{Cell, RefCell};

use ithaca_device::{Choice, Int, Varying};
use ithaca_ir::entity::Entity;
use ithaca_ir::layout::At;
use ithaca_ir::{AxisId, Mesh};

use super::names::Names;

/// The names of coordinates, and the static arrays that expressions use.
pub(super) struct Numbers<'a> {
    pub(super) mesh: &'a Mesh,
    /// For each axis the field of `c`.
    pub(super) fields: Vec<String>,
    arrays: RefCell<Vec<Vec<i64>>>,
    /// Whether an expression used `c` since this was last cleared.
    uses_coordinates: Cell<bool>,
}

impl<'a> Numbers<'a> {
    pub(super) fn new(mesh: &'a Mesh) -> Self {
        let mut names = Names::default();
        let fields = mesh.axes.values().map(|axis| names.fresh("", &axis.name)).collect();
        Self { mesh, fields, arrays: RefCell::default(), uses_coordinates: Cell::new(false) }
    }

    /// The static arrays, one statement each.
    pub(super) fn arrays(&self) -> Vec<String> {
        let statement = |(i, values): (usize, &Vec<i64>)| {
            let values: Vec<String> = values.iter().map(i64::to_string).collect();
            format!("static const int64_t kByRank{i}[] = {{{}}};", values.join(", "))
        };
        self.arrays.borrow().iter().enumerate().map(statement).collect()
    }

    /// Whether an expression used `c` since the last call.
    pub(super) fn take_uses_coordinates(&self) -> bool {
        self.uses_coordinates.replace(false)
    }

    /// The coordinate along an axis.
    fn coordinate(&self, axis: AxisId) -> String {
        self.uses_coordinates.set(true);
        format!("c.{}", self.fields[axis.index()])
    }

    /// The number of the combination of coordinates along `axes`, the last axis fastest.
    fn index(&self, axes: &[AxisId]) -> String {
        let mut terms = Vec::new();
        for (i, &axis) in axes.iter().enumerate() {
            let stride = self.mesh.degree(&axes[i + 1..]);
            let coordinate = self.coordinate(axis);
            terms.push(if stride == 1 { coordinate } else { format!("{coordinate} * {stride}") });
        }
        terms.join(" + ")
    }

    /// The entry of a table for the coordinates along `axes`.
    fn entry(&self, axes: &[AxisId], values: &[i64]) -> String {
        if let &[axis] = axes
            && let Some(rotation) = Rotation::of(values)
        {
            let Rotation { by, step } = rotation;
            let turned = format!("({} + {by}) % {}", self.coordinate(axis), values.len());
            return if step == 1 { turned } else { format!("{turned} * {step}") };
        }
        let mut arrays = self.arrays.borrow_mut();
        let array = arrays.iter().position(|known| known == values).unwrap_or_else(|| {
            arrays.push(values.to_vec());
            arrays.len() - 1
        });
        format!("kByRank{array}[{}]", self.index(axes))
    }

    /// The terms of an integer, without its constant.
    fn terms(&self, varying: &Varying) -> Vec<String> {
        let Varying { base: _, per_layer, per_axis, axes, values } = varying;
        let mut terms = Vec::new();
        let times = |factor: i64, of: String| if factor == 1 { of } else { format!("{of} * {factor}") };
        for &(axis, factor) in per_axis {
            let coordinate = self.coordinate(axis);
            terms.push(times(factor, coordinate));
        }
        if !axes.is_empty() {
            let (lowest, shifted) = self.lowered(axes, values);
            terms.push(shifted);
            if lowest != 0 {
                terms.push(lowest.to_string());
            }
        }
        if *per_layer != 0 {
            terms.push(times(*per_layer, "in.layer".to_owned()));
        }
        terms
    }

    /// A table entry as a constant and an expression: rotations count from their lowest value.
    fn lowered(&self, axes: &[AxisId], values: &[i64]) -> (i64, String) {
        let lowest = values.iter().copied().min().unwrap_or(0);
        let shifted: Vec<i64> = values.iter().map(|value| value - lowest).collect();
        if axes.len() == 1 && Rotation::of(&shifted).is_some() {
            (lowest, self.entry(axes, &shifted))
        } else {
            (0, self.entry(axes, values))
        }
    }

    /// An integer.
    pub(super) fn int(&self, int: &Int) -> String {
        match int {
            Int::Const(value) => value.to_string(),
            Int::Varying(varying) => {
                let mut terms = self.terms(varying);
                if varying.base != 0 || terms.is_empty() {
                    terms.push(varying.base.to_string());
                }
                sum(&terms)
            }
        }
    }

    /// `base` with an integer added.
    pub(super) fn plus(&self, base: &str, int: &Int) -> String {
        match int {
            Int::Const(0) => base.to_owned(),
            Int::Const(value) => format!("{base} + {value}"),
            Int::Varying(_) => {
                let offset = self.int(int);
                if offset.contains(' ') && (offset.contains(" + ") || offset.contains(" - ")) {
                    format!("{base} + ({offset})")
                } else {
                    sum(&[base.to_owned(), offset])
                }
            }
        }
    }

    /// The condition that the rank is at one of these places.
    pub(super) fn is_at(&self, places: &[At]) -> String {
        let one = |at: &At| format!("{} == {}", self.coordinate(at.axis), at.coordinate);
        places.iter().map(one).collect::<Vec<_>>().join(" || ")
    }

    /// The number of the alternative of a choice.
    pub(super) fn chosen<T>(&self, choice: &Choice<T>) -> String {
        let chosen: Vec<i64> =
            choice.chosen.iter().map(|&number| i64::try_from(number).unwrap_or(i64::MAX)).collect();
        let affine = chosen.iter().enumerate().all(|(i, &value)| usize::try_from(value) == Ok(i));
        if affine { self.index(&choice.axes) } else { self.entry(&choice.axes, &chosen) }
    }

    /// The condition under which the second of two alternatives is chosen, if it is short.
    pub(super) fn second_is_chosen<T>(&self, choice: &Choice<T>) -> Option<String> {
        let [axis] = *choice.axes.as_slice() else { return None };
        if choice.alternatives.len() != 2 {
            return None;
        }
        let is_second = |i: &usize| choice.chosen[*i] == 1;
        let n = choice.chosen.len();
        let ones: Vec<usize> = (0..n).filter(is_second).collect();
        let coordinate = self.coordinate(axis);
        match ones.as_slice() {
            [one] => Some(format!("{coordinate} == {one}")),
            ones if ones.len() + 1 == n => {
                let zero = (0..n).find(|i| !is_second(i))?;
                Some(format!("{coordinate} != {zero}"))
            }
            [first, .., last] if last - first + 1 == ones.len() && *first == 0 => {
                Some(format!("{coordinate} < {}", last + 1))
            }
            [first, .., last] if last - first + 1 == ones.len() && last + 1 == n => {
                Some(format!("{coordinate} >= {first}"))
            }
            _ => None,
        }
    }
}

/// Values `(i + by) % n * step` for `i` below `n`.
struct Rotation {
    by: usize,
    step: i64,
}

impl Rotation {
    fn of(values: &[i64]) -> Option<Self> {
        let n = values.len();
        let zero = values.iter().position(|&value| value == 0)?;
        let by = (n - zero) % n;
        let step = values[(zero + 1) % n];
        let turns = |(i, &value): (usize, &i64)| {
            i64::try_from((i + by) % n).is_ok_and(|turned| turned.checked_mul(step) == Some(value))
        };
        (n > 2 && step != 0 && by != 0 && values.iter().enumerate().all(turns)).then_some(Self { by, step })
    }
}

/// Terms as a sum; negative terms are subtracted.
fn sum(terms: &[String]) -> String {
    let mut out = String::new();
    for term in terms {
        match term.strip_prefix('-') {
            _ if out.is_empty() => out.push_str(term),
            Some(positive) => {
                out.push_str(" - ");
                out.push_str(positive);
            }
            None => {
                out.push_str(" + ");
                out.push_str(term);
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(int: Varying) -> String {
        let mesh = Mesh::new([("outer", 2), ("ring", 4)]);
        Numbers::new(&mesh).int(&int.into_int())
    }

    #[test]
    fn integers_are_affine_rotated_or_looked_up() {
        let [outer, ring] = [0, 1].map(AxisId::new);
        let affine = Varying { base: 8, per_layer: 64, per_axis: vec![(ring, 4096)], ..Varying::default() };
        assert_eq!(printed(affine), "c.ring * 4096 + in.layer * 64 + 8");
        let falling = Varying { base: 3, per_axis: vec![(ring, -1)], ..Varying::default() };
        assert_eq!(printed(falling), "c.ring * -1 + 3");
        let by_ring =
            |values: &[i64]| Varying { axes: vec![ring], values: values.to_vec(), ..Varying::default() };
        assert_eq!(printed(by_ring(&[1, 2, 3, 0])), "(c.ring + 1) % 4");
        assert_eq!(printed(by_ring(&[35, 5, 15, 25])), "(c.ring + 3) % 4 * 10 + 5");
        assert_eq!(printed(by_ring(&[3, 3, 2, 2])), "kByRank0[c.ring]");
        let both =
            Varying { axes: vec![outer, ring], values: vec![5, 1, 7, 2, 9, 4, 3, 8], ..Varying::default() };
        assert_eq!(printed(both), "kByRank0[c.outer * 4 + c.ring]");
    }
}
