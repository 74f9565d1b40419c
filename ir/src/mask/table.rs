//! A mask as kernels take it: two numbers where it is a band, else a table of its strips.

use crate::dim::Dim;
use crate::mask::{Bound, Mask};

impl Mask {
    /// The number of positions before and after the query that are seen, where that is the whole mask and both ends
    /// lie on their own side of the query; -1 is unbounded.
    pub fn band(&self) -> Option<[i64; 2]> {
        let side = |bound: Option<i128>| match bound {
            // A bound beyond the longest sequence does not bound.
            None => Some(-1),
            Some(n) if n > i128::from(Dim::MAX_SIZE) => Some(-1),
            Some(n) => i64::try_from(n).ok().filter(|&n| n >= 0),
        };
        let (low, high) = self.offsets()?;
        Some([side(low.map(|low| -low))?, side(high)?])
    }

    /// A [band](Self::band) within chunks, and the tokens of a chunk, where that is the whole mask.
    pub fn band_in_chunks(&self) -> Option<([i64; 2], u64)> {
        let Mask::All(masks) = self else { return None };
        let is_chunks = |mask: &&Mask| matches!(mask, Mask::Chunks(_));
        let (chunks, others): (Vec<&Mask>, Vec<&Mask>) = masks.iter().partition(is_chunks);
        let [Mask::Chunks(size)] = chunks.as_slice() else { return None };
        let band = Mask::All(others.into_iter().cloned().collect()).band()?;
        Some((band, *size))
    }

    /// The strips over `n_queries` and `n_keys` positions.
    ///
    /// The table is the number of strips; then for each the first query, the query after the last, and where its runs
    /// start and end, counted in runs; then for each run its start and its end, each as a factor of the query, 0 or 1,
    /// and a summand. Positions are below 2^41, so they are exact.
    pub fn table(&self, n_queries: u64, n_keys: u64) -> Vec<f64> {
        let strips = self.strips(0..n_queries, 0..n_keys);
        let mut head = vec![strips.len() as f64];
        let mut runs = Vec::new();
        for strip in &strips {
            let first = runs.len() / 4;
            for bound in strip.runs.iter().flat_map(|run| [run.start, run.end]) {
                runs.extend(match bound {
                    Bound::At(key) => [0.0, key as f64],
                    Bound::Beside(distance) => [1.0, distance as f64],
                });
            }
            let numbers = [strip.queries.start as f64, strip.queries.end as f64];
            head.extend(numbers.into_iter().chain([first as f64, (runs.len() / 4) as f64]));
        }
        head.extend(runs);
        head
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bands_are_two_numbers_and_other_masks_a_table() {
        assert_eq!(Mask::Causal.band(), Some([-1, 0]));
        assert_eq!(Mask::Full.band(), Some([-1, -1]));
        // The diagonal is beside the query.
        assert_eq!(Mask::CausalAtEnd { queries: 4, keys: 2 }.band(), None);
        assert_eq!(Mask::Prefix(2).band(), None);
        assert_eq!(Mask::Causal.band_in_chunks(), None);
        let chunks = Mask::All(vec![Mask::Causal, Mask::Chunks(4)]);
        assert_eq!((chunks.band(), chunks.band_in_chunks()), (None, Some(([-1, 0], 4))));
        assert_eq!(Mask::Prefix(2).table(4, 4), [1.0, 0.0, 4.0, 0.0, 1.0, 0.0, 0.0, 0.0, 2.0]);
    }
}
