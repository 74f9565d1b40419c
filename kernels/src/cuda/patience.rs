//! How long something is waited for, and how often it is looked at: nothing here waits inside a library that cannot be told
//! to stop.

use std::time::{Duration, Instant};

/// For so long a look follows the other at once: most tasks are over by then.
const EAGER: Duration = Duration::from_millis(2);

/// The longest time between two looks.
const RARE: Duration = Duration::from_millis(1);

/// A wait, looked at again and again.
pub(super) struct Patience {
    longest: Option<Duration>,
    since: Instant,
}

impl Patience {
    /// A wait that begins now, and may last so long without anything going on.
    pub(super) fn new(longest: Option<Duration>) -> Self {
        Self { longest, since: Instant::now() }
    }

    /// Something went on.
    pub(super) fn renew(&mut self) {
        self.since = Instant::now();
    }

    /// Lets some time pass before the next look.
    ///
    /// # Errors
    /// How long it has been where that is longer than allowed.
    pub(super) fn pause(&self) -> Result<(), Duration> {
        let waited = self.since.elapsed();
        if self.longest.is_some_and(|longest| waited >= longest) {
            return Err(waited);
        }
        if waited < EAGER {
            std::thread::yield_now();
        } else {
            let left = self.longest.map_or(RARE, |longest| longest.saturating_sub(waited));
            std::thread::sleep(RARE.min(left));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_ends_where_nothing_goes_on() {
        let mut patience = Patience::new(Some(Duration::from_millis(20)));
        for _ in 0..10 {
            patience.pause().unwrap();
            patience.renew();
        }
        let waited = loop {
            if let Err(waited) = patience.pause() {
                break waited;
            }
        };
        assert!(waited >= Duration::from_millis(20));
        assert!(Patience::new(None).pause().is_ok());
    }
}
