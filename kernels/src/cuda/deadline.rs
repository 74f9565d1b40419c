//! Polling with a timeout. The runtime never blocks inside a library, because such a wait cannot be interrupted.

use std::time::{Duration, Instant};

/// Polls follow each other without sleep for this long: most tasks end earlier.
const SPIN_TIME: Duration = Duration::from_millis(2);

/// The longest time between two polls.
const MAX_INTERVAL: Duration = Duration::from_millis(1);

/// The time limit of a wait that polls.
pub(super) struct Deadline {
    timeout: Option<Duration>,
    since: Instant,
}

impl Deadline {
    /// A wait that begins now and expires after `timeout` without progress.
    pub(super) fn new(timeout: Option<Duration>) -> Self {
        Self { timeout, since: Instant::now() }
    }

    /// Restarts the timeout after progress.
    pub(super) fn extend(&mut self) {
        self.since = Instant::now();
    }

    /// Sleeps or yields until the next poll.
    ///
    /// # Errors
    /// The time waited, once it reaches the timeout.
    pub(super) fn pause(&self) -> Result<(), Duration> {
        let waited = self.since.elapsed();
        if self.timeout.is_some_and(|timeout| waited >= timeout) {
            return Err(waited);
        }
        if waited < SPIN_TIME {
            std::thread::yield_now();
        } else {
            let left = self.timeout.map_or(MAX_INTERVAL, |timeout| timeout.saturating_sub(waited));
            std::thread::sleep(MAX_INTERVAL.min(left));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_expires_without_progress() {
        let mut deadline = Deadline::new(Some(Duration::from_millis(20)));
        for _ in 0..10 {
            deadline.pause().unwrap();
            deadline.extend();
        }
        let waited = loop {
            if let Err(waited) = deadline.pause() {
                break waited;
            }
        };
        assert!(waited >= Duration::from_millis(20));
        assert!(Deadline::new(None).pause().is_ok());
    }
}
