//! Which layers functions run for, where calls nest.
//!
//! A call runs for its `layers`, further by `stride` for each layer of its caller: a group of four layers calls
//! `layers=0..4, stride=4`, and runs for layers 8 to 11 as group 2. With a stride of zero, as most calls have it, the layers
//! are the same whoever calls.

use crate::entity::Entity;
use crate::handles::{Layers, MAX_LAYERS};
use crate::module::Module;
use crate::ops::table::op::Op;

/// The layers of a call that a function makes while it runs for layer `caller`.
pub fn shifted(layers: &Layers, stride: u64, caller: u64) -> Layers {
    let by = stride.saturating_mul(caller);
    layers.start.saturating_add(by)..layers.end.saturating_add(by)
}

/// The layers of a call whose caller runs for `callers`: ascending ranges that do not meet, up to the most layers that a
/// model has.
pub fn called(callers: &[Layers], layers: &Layers, stride: u64) -> Vec<Layers> {
    if stride == 0 {
        return vec![layers.clone()];
    }
    let all = callers.iter().cloned().flatten().map(|caller| shifted(layers, stride, caller));
    union(all.take_while(|l| l.end <= MAX_LAYERS).collect())
}

/// The same layers as ascending ranges that do not meet.
pub fn union(mut ranges: Vec<Layers>) -> Vec<Layers> {
    ranges.sort_by_key(|r| (r.start, r.end));
    let mut union: Vec<Layers> = Vec::new();
    for range in ranges {
        match union.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            Some(_) | None => union.push(range),
        }
    }
    union
}

impl Module {
    /// For each function the layers that it runs for, as ascending ranges that do not meet; `main` runs for layer 0, and a
    /// function that nobody calls for none.
    pub fn layers_of_functions(&self) -> Vec<Vec<Layers>> {
        let mut layers: Vec<Vec<Layers>> = vec![Vec::new(); self.functions.len()];
        if let Some(main) = self.main() {
            layers[main.index()].push(0..1);
        }
        // Callers come after their callees.
        for (id, function) in self.functions.iter().rev() {
            let own = union(std::mem::take(&mut layers[id.index()]));
            for node in &function.nodes {
                if let Op::Call { callee, layers: range, stride, scan: _, stage: _ } = &node.op
                    && let Some(ranges) = layers.get_mut(callee.index())
                {
                    ranges.extend(called(&own, range, *stride));
                }
            }
            layers[id.index()] = own;
        }
        layers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The layers that a call runs for, called by layers `callers`.
    fn by(callers: Layers, layers: Layers, stride: u64) -> Vec<(u64, u64)> {
        let called = called(&[callers.start..callers.end, callers], &layers, stride);
        called.into_iter().map(|l| (l.start, l.end)).collect()
    }

    #[test]
    fn groups_of_layers_make_up_the_layers() {
        assert_eq!(by(0..8, 0..4, 4), [(0, 32)]);
        assert_eq!(by(1..3, 1..3, 4), [(5, 7), (9, 11)]);
        assert_eq!(by(0..8, 3..4, 0), [(3, 4)]);
        assert_eq!(shifted(&(1..3), 4, 2), 9..11);
    }

    #[test]
    fn overlapping_ranges_unite() {
        assert_eq!(union(vec![20..21, 0..10, 5..12]), [0..12, 20..21]);
    }

    #[test]
    fn layers_that_no_model_has_are_left_out() {
        assert_eq!(by(0..2, 0..1, u64::MAX), [(0, 1)]);
    }
}
