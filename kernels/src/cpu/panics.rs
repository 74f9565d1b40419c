//! Panics of tasks as errors.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::thread::ScopedJoinHandle;

use crate::error::RunError;

/// Calls `f`; a panic becomes [`RunError::Panicked`].
pub(crate) fn guarded<T>(f: impl FnOnce() -> Result<T, RunError>) -> Result<T, RunError> {
    std::panic::catch_unwind(AssertUnwindSafe(f))
        .unwrap_or_else(|panic| Err(RunError::Panicked(panic_message(&*panic))))
}

/// The result of a thread; a panic becomes [`RunError::Panicked`].
pub(super) fn joined<T>(thread: ScopedJoinHandle<'_, Result<T, RunError>>) -> Result<T, RunError> {
    thread.join().unwrap_or_else(|panic| Err(RunError::Panicked(panic_message(&*panic))))
}

/// The message of a panic.
fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "without a message".to_owned())
}
