//! Which elements of a stored tensor a tensor of a rank has.

use ithaca_ir::ops::{Binding, source};
use ithaca_ir::{Rank, Space, TensorType};
use serde::{Deserialize, Serialize};

use crate::positions;
use crate::tensor::{Offsets, index, whole};

/// A part of a stored tensor.
///
/// The stored tensor is seen as `view`, cut to `window` and read in row-major order as `shape`; along each dimension of
/// that, `places` says which index each index of the part is. So a part is described as a binding and a layout are, in
/// plain numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// The stored tensor; a name with `{expert}` is that of many, stacked along a first dimension.
    pub of: String,
    /// Its whole shape.
    pub stored: Vec<u64>,
    /// The shape as which it is seen; `stored` when empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub view: Vec<u64>,
    /// First and one past the last index of each dimension of the view that are taken; all when empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub window: Vec<[u64; 2]>,
    /// The shape in which the window is read.
    pub shape: Vec<u64>,
    /// For each dimension of `shape` the indices that the part has, in its order.
    pub places: Vec<Vec<Run>>,
}

/// Indices of a part along a dimension: `(first, count, step)` are `first`, `first + step`, …; without a first they are
/// padding. A step of zero repeats one index, as copied heads do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run(pub Option<u64>, pub u64, pub u64);

impl Run {
    /// The index at `i` of the run; `None` for padding.
    fn at(self, i: u64) -> Option<u64> {
        self.0.map(|first| first + i * self.2)
    }
}

impl Part {
    /// The part of a weight or state on `rank`; `binding` names the stored tensor itself.
    pub(super) fn of(space: &Space, binding: &Binding, ty: &TensorType, rank: Rank) -> Self {
        let held = space.local_box(ty, rank);
        let along = ty.dims.iter().zip(held);
        Self {
            of: binding.name.clone(),
            stored: binding.stored_shape(space, ty),
            view: binding.view.clone(),
            window: binding.window.iter().map(|w| [w.start, w.end]).collect(),
            shape: ty.dims.iter().map(|&d| source::stored_size(space, d)).collect(),
            places: along.map(|(&d, range)| runs(&positions::loaded_from(space, d, range))).collect(),
        }
    }

    /// The shape of the part; that of a checked part does not overflow.
    pub fn extents(&self) -> Vec<u64> {
        self.places.iter().map(|runs| runs.iter().fold(0, |n: u64, run| n.saturating_add(run.1))).collect()
    }

    /// Checks that the numbers are consistent.
    ///
    /// # Errors
    /// The contradiction.
    pub(super) fn check(&self) -> Result<(), String> {
        let seen = if self.view.is_empty() { &self.stored } else { &self.view };
        let elements = product(&self.stored);
        if elements.is_none() || elements != product(seen) {
            return Err(format!("a tensor of shape {:?} cannot be seen as {seen:?}", self.stored));
        }
        let taken: Vec<u64> = if self.window.is_empty() {
            seen.clone()
        } else {
            self.window.iter().map(|[start, end]| end.saturating_sub(*start)).collect()
        };
        let inside = self.window.iter().zip(seen).all(|([start, end], n)| start <= end && end <= n);
        if taken.len() != seen.len() || !inside || product(&taken) != product(&self.shape) {
            return Err(format!("the window {:?} of {seen:?} is not {:?}", self.window, self.shape));
        }
        let fits = |(runs, &n): (&Vec<Run>, &u64)| {
            runs.iter().all(|&Run(first, count, step)| {
                let last = first.and_then(|f| f.checked_add(step.checked_mul(count.saturating_sub(1))?));
                count > 0 && (first.is_none() || last.is_some_and(|last| last < n))
            })
        };
        if self.places.len() != self.shape.len() || !self.places.iter().zip(&self.shape).all(fits) {
            return Err(format!("it has places outside of {:?}", self.shape));
        }
        match product(&self.extents()) {
            Some(_) => Ok(()),
            None => Err("it has more elements than can be".to_owned()),
        }
    }

    /// Calls `f` with each element of the part that is stored: its number in the part, and in the stored tensor.
    pub(super) fn each(&self, mut f: impl FnMut(usize, usize)) {
        if self.extents().contains(&0) {
            return;
        }
        let expand = |runs: &Vec<Run>| -> Vec<Option<usize>> {
            runs.iter().flat_map(|run| (0..run.1).map(|i| run.at(i).map(index))).collect()
        };
        let shape: Vec<usize> = self.shape.iter().map(|&n| index(n)).collect();
        let seen = if self.view.is_empty() { &self.stored } else { &self.view };
        // The offset of each element of the window in the stored tensor; empty without a window.
        let window: Vec<usize> = if self.window.is_empty() {
            Vec::new()
        } else {
            let part = self.window.iter().map(|&[start, end]| start..end).collect();
            Offsets::of_part(&whole(seen), &part).collect()
        };
        positions::each_place(self.places.iter().map(expand).collect(), &shape, |n, place| {
            if let Some(at) = place {
                f(n, window.get(at).copied().unwrap_or(at));
            }
        });
    }

    /// The part of the stored tensor's elements, `size` bytes each; padding is zero.
    pub(super) fn cut(&self, stored: &[u8], size: usize) -> Vec<u8> {
        let elements: usize = self.extents().into_iter().map(index).product();
        let mut out = vec![0; elements * size];
        self.each(|to, from| {
            out[to * size..(to + 1) * size].copy_from_slice(&stored[from * size..(from + 1) * size]);
        });
        out
    }
}

/// The elements of a shape, if they can be counted by the addresses of this machine.
pub(super) fn product(shape: &[u64]) -> Option<usize> {
    let elements = shape.iter().try_fold(1u64, |n, &m| n.checked_mul(m))?;
    usize::try_from(elements).ok().filter(|&n| n < usize::MAX / 16)
}

/// Indices as runs.
fn runs(places: &[Option<usize>]) -> Vec<Run> {
    let mut out: Vec<Run> = Vec::new();
    for place in places.iter().map(|p| p.map(|i| i as u64)) {
        match (out.last_mut(), place) {
            (Some(Run(None, count, _)), None) => *count += 1,
            (Some(Run(Some(first), count @ 1, step)), Some(i)) if i >= *first => {
                (*count, *step) = (2, i - *first);
            }
            (Some(Run(Some(first), count, step)), Some(i)) if *count > 1 && i == *first + *count * *step => {
                *count += 1;
            }
            (_, place) => out.push(Run(place, 1, 0)),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_become_runs_and_come_back() {
        let some = |list: &[usize]| list.iter().map(|&i| Some(i)).collect::<Vec<_>>();
        assert_eq!(runs(&some(&[4, 5, 6])), [Run(Some(4), 3, 1)]);
        assert_eq!(runs(&some(&[0, 0, 1, 1])), [Run(Some(0), 2, 0), Run(Some(1), 2, 0)]);
        assert_eq!(runs(&[Some(7), None, None]), [Run(Some(7), 1, 0), Run(None, 2, 0)]);
        for places in [some(&[0, 2, 4, 1, 3, 5]), some(&[3, 1, 2, 2, 9]), vec![None, Some(0), Some(0)]] {
            let back: Vec<_> =
                runs(&places).iter().flat_map(|r| (0..r.1).map(|i| r.at(i).map(index))).collect();
            assert_eq!(back, places);
        }
    }

    fn part() -> Part {
        Part {
            of: "w".to_owned(),
            stored: vec![4, 3],
            view: vec![2, 2, 3],
            window: vec![[0, 2], [1, 2], [0, 3]],
            shape: vec![2, 3],
            places: vec![vec![Run(Some(1), 1, 0), Run(None, 1, 0)], vec![Run(Some(1), 2, 1)]],
        }
    }

    #[test]
    fn a_part_is_cut_from_a_window_and_padded() {
        part().check().unwrap();
        assert_eq!(part().extents(), [2, 2]);
        assert_eq!(part().cut(&(0..12).collect::<Vec<u8>>(), 1), [10, 11, 0, 0]);
    }

    #[test]
    fn numbers_that_do_not_go_together_are_refused() {
        let wrong = [
            Part { stored: vec![4, 2], ..part() },
            Part { window: vec![[0, 2], [1, 3], [0, 3]], ..part() },
            Part { window: vec![[0, 2]], ..part() },
            Part { places: vec![vec![Run(Some(1), 2, 1)], vec![Run(Some(1), 2, 1)]], ..part() },
            Part { places: vec![vec![Run(Some(u64::MAX), 2, u64::MAX)]; 2], ..part() },
            Part { places: vec![vec![Run(None, u64::MAX, 0)]; 2], ..part() },
            Part { stored: vec![u64::MAX, 12], ..part() },
        ];
        for part in wrong {
            assert!(part.check().is_err(), "{part:?}");
        }
    }
}
