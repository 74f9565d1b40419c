//! Threads within a kernel.
//!
//! A rank is a thread already, so a kernel takes more only where there are fewer ranks than cores; the thread of its
//! collectives mostly waits, and is not counted. Threads compute disjoint parts of a
//! result, each in one order: results do not depend on the number of threads.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// How many threads a kernel may use, the one that calls it included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Threads(NonZeroUsize);

/// Floating-point operations for each thread of a kernel: about ten times the cost of starting one.
pub const WORTH_A_THREAD: usize = 40_000_000;

impl Threads {
    /// Only the thread that calls.
    pub const ONE: Threads = Threads(NonZeroUsize::MIN);

    /// This many, at least one.
    pub fn new(n: usize) -> Self {
        NonZeroUsize::new(n).map_or(Self::ONE, Self)
    }

    /// The cores per rank when `ranks` compute on this machine at a time.
    pub fn beside(ranks: u64) -> Self {
        static CORES: OnceLock<usize> = OnceLock::new();
        let cores = *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, NonZeroUsize::get));
        let ranks = usize::try_from(ranks).unwrap_or(usize::MAX).max(1);
        Self::new(cores / ranks)
    }

    /// How many.
    pub fn count(self) -> usize {
        self.0.get()
    }

    /// As many of them as so many operations are worth.
    pub(super) fn worth(self, operations: usize) -> Self {
        Self::new(self.count().min(operations / WORTH_A_THREAD))
    }

    /// `f` of each item, in order of the items; a free thread takes the next. `scratch` creates the buffers that a thread
    /// reuses.
    pub(super) fn map<I: Send, S, R: Send>(
        self,
        items: Vec<I>,
        scratch: impl Fn() -> S + Sync,
        f: impl Fn(&mut S, I) -> R + Sync,
    ) -> Vec<R> {
        let helpers = self.count().min(items.len()).saturating_sub(1);
        if helpers == 0 {
            let mut own = scratch();
            return items.into_iter().map(|item| f(&mut own, item)).collect();
        }
        let mut results: Vec<Option<R>> = items.iter().map(|_| None).collect();
        let queue = Mutex::new(items.into_iter().zip(&mut results));
        let own_core = cores::current();
        let n_started = AtomicUsize::new(0);
        let work = || {
            let mut own = scratch();
            loop {
                let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some((item, result)) = next else { break };
                *result = Some(f(&mut own, item));
            }
        };
        let help = || {
            cores::leave(own_core);
            n_started.fetch_add(1, Ordering::Relaxed);
            work();
        };
        std::thread::scope(|scope| {
            // Where a thread cannot be started, the running ones do its work.
            let spawn = |_: &usize| std::thread::Builder::new().spawn_scoped(scope, help).is_ok();
            let n_spawned = (0..helpers).filter(spawn).count();
            cores::yield_until(|| n_started.load(Ordering::Relaxed) == n_spawned);
            work();
        });
        drop(queue);
        results
            .into_iter()
            .map(|r| r.expect("every item was taken, and a panic has been passed on"))
            .collect()
    }
}

/// Keeps a kernel's threads on cores of their own.
///
/// Linux may queue a new thread behind the thread that started it, on the same core, and move it to an idle core only
/// milliseconds later: a product of 3 ms then takes as long as with one thread.
mod cores {
    use std::time::{Duration, Instant};

    /// The time within which new threads start where a core is idle.
    const START: Duration = Duration::from_micros(200);

    /// The core of this thread, where the system says it.
    pub(super) fn current() -> Option<usize> {
        #[cfg(target_os = "linux")]
        return Some(rustix::thread::sched_getcpu());
        #[cfg(not(target_os = "linux"))]
        None
    }

    /// Moves this thread to another core than `core` if it is there and may run elsewhere.
    pub(super) fn leave(core: Option<usize>) {
        #[cfg(target_os = "linux")]
        if core == current()
            && let Some(core) = core
            && let Ok(mut allowed) = rustix::thread::sched_getaffinity(None)
        {
            allowed.unset(core);
            if allowed.count() > 0 {
                // A thread that stays where it is computes the same.
                let _ = rustix::thread::sched_setaffinity(None, &allowed);
            }
        }
        #[cfg(not(target_os = "linux"))]
        let _ = core;
    }

    /// Gives this core to threads that wait for it until `has_started`, or until it takes too long.
    pub(super) fn yield_until(has_started: impl Fn() -> bool) {
        let begun = Instant::now();
        while !has_started() && begun.elapsed() < START {
            std::thread::yield_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_in_order_of_items() {
        for threads in [Threads::ONE, Threads::new(3), Threads::new(100)] {
            let squares = threads.map((0..50).collect(), || (), |(), i: usize| i * i);
            assert_eq!(squares, (0..50).map(|i| i * i).collect::<Vec<_>>());
        }
    }

    #[test]
    fn as_many_ranks_as_cores_leave_one_thread_each() {
        assert_eq!(Threads::beside(u64::MAX), Threads::ONE);
        assert_eq!(Threads::new(0), Threads::ONE);
        assert_eq!(Threads::new(8).worth(10), Threads::ONE);
    }
}
