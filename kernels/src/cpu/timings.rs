//! How long tasks of a run took, by kind.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// For each kind of work how often it was done, and how long that took.
///
/// An exchange takes as long as it waits for the others. Ranks on one core take time from each other.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timings {
    rows: BTreeMap<String, Timing>,
}

/// One kind of work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timing {
    /// Tasks.
    pub count: u64,
    /// Time of all of them.
    pub total: Duration,
}

impl Timings {
    /// Counts a task.
    pub(crate) fn add(&mut self, work: &str, took: Duration) {
        let row = self.rows.entry(work.to_owned()).or_default();
        row.count += 1;
        row.total += took;
    }

    /// Adds those of another rank, or of another step.
    pub fn merge(&mut self, other: &Timings) {
        for (work, timing) in &other.rows {
            let row = self.rows.entry(work.clone()).or_default();
            row.count += timing.count;
            row.total += timing.total;
        }
    }

    /// All kinds, the longest first; of equals the first by name.
    pub fn rows(&self) -> Vec<(&str, Timing)> {
        let mut rows: Vec<(&str, Timing)> =
            self.rows.iter().map(|(work, &timing)| (work.as_str(), timing)).collect();
        rows.sort_by_key(|(_, timing)| std::cmp::Reverse(timing.total));
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_counted_and_the_longest_comes_first() {
        let ms = Duration::from_millis;
        let mut timings = Timings::default();
        for (work, took) in [("add", 1), ("einsum", 5), ("add", 2)] {
            timings.add(work, ms(took));
        }
        let mut all = timings.clone();
        all.merge(&timings);
        let einsum = Timing { count: 2, total: ms(10) };
        assert_eq!(all.rows(), [("einsum", einsum), ("add", Timing { count: 4, total: ms(6) })]);
    }
}
