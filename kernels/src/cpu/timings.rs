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
    /// Time in which their threads were on a processor, without the helpers of a kernel; of a GPU their time.
    pub busy: Duration,
}

/// The time that this thread has been on a processor; where the system does not say it, `otherwise`.
pub(super) fn busy(otherwise: impl FnOnce() -> Duration) -> Duration {
    #[cfg(target_os = "linux")]
    {
        let _ = otherwise;
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        let (seconds, nanoseconds) = (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec));
        Duration::new(seconds.unwrap_or_default(), nanoseconds.unwrap_or_default())
    }
    #[cfg(not(target_os = "linux"))]
    otherwise()
}

impl Timings {
    /// Counts a task.
    pub(crate) fn add(&mut self, work: &str, took: Duration, busy: Duration) {
        let row = self.rows.entry(work.to_owned()).or_default();
        row.count += 1;
        row.total += took;
        row.busy += busy;
    }

    /// Adds those of another rank, or of another step.
    pub fn merge(&mut self, other: &Timings) {
        for (work, timing) in &other.rows {
            let row = self.rows.entry(work.clone()).or_default();
            row.count += timing.count;
            row.total += timing.total;
            row.busy += timing.busy;
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
            timings.add(work, ms(took), ms(1));
        }
        let mut all = timings.clone();
        all.merge(&timings);
        let einsum = Timing { count: 2, total: ms(10), busy: ms(2) };
        assert_eq!(all.rows(), [("einsum", einsum), ("add", Timing { count: 4, total: ms(6), busy: ms(4) })]);
    }
}
