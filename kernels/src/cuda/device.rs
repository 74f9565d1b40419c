//! What the runtime asks of a device: memory, streams, events, launches and matrix products.
//!
//! [`Gpu`](super::gpu::Gpu) is a GPU, [`Host`](super::host::Host) is this machine with the kernels compiled by a C++
//! compiler.

use std::time::Duration;

pub use ithaca_device::Form;

use super::arguments::{Address, Arguments};
use super::error::CudaError;

/// A queue of a device, as its number; of a GPU the handle of the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stream(pub u64);

/// A point in a queue that others wait for, as its number; of a GPU the handle of the event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Event(pub u64);

/// A recorded step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Graph(pub u64);

/// A matrix product on one rank.
pub type Product = ithaca_device::Product<Address, i64>;

/// A matrix of a product on one rank.
pub type Matrix = ithaca_device::Matrix<Address, i64>;

/// The threads of a launch on one rank.
pub type Grid = ithaca_device::Grid<u64>;

/// A device, used by one thread.
///
/// Work goes to streams, in order of issue within each; [`upload`](Self::upload) and [`download`](Self::download) are
/// done when they return, and wait for nothing else.
pub trait Device {
    /// New memory, filled with bits that are no number, aligned to 256 bytes.
    ///
    /// # Errors
    /// The device's.
    fn allocate(&self, bytes: u64) -> Result<Address, CudaError>;

    /// Gives memory back.
    ///
    /// # Safety
    /// It was allocated here, nothing runs that uses it, and nobody uses it afterwards.
    unsafe fn release(&self, at: Address);

    /// Copies bytes to the device.
    ///
    /// # Errors
    /// The device's.
    ///
    /// # Safety
    /// There are as many bytes of this device's memory at `to`, and nothing that runs uses them.
    unsafe fn upload(&self, bytes: &[u8], to: Address) -> Result<(), CudaError>;

    /// Copies bytes from the device.
    ///
    /// # Errors
    /// The device's.
    ///
    /// # Safety
    /// There are as many bytes of this device's memory at `from`, and nothing that runs writes them.
    unsafe fn download(&self, from: Address, bytes: &mut [u8]) -> Result<(), CudaError>;

    /// A new stream.
    ///
    /// # Errors
    /// The device's.
    fn stream(&self) -> Result<Stream, CudaError>;

    /// A new event.
    ///
    /// # Errors
    /// The device's.
    fn event(&self) -> Result<Event, CudaError>;

    /// A new event that keeps when it happens.
    ///
    /// # Errors
    /// The device's.
    fn timed_event(&self) -> Result<Event, CudaError>;

    /// The time from one such event to another; none where the second happened first. Both have happened.
    ///
    /// # Errors
    /// The device's.
    fn elapsed(&self, from: Event, to: Event) -> Result<Duration, CudaError>;

    /// The event happens when everything issued to the stream is done.
    ///
    /// # Errors
    /// The device's.
    fn record(&self, stream: Stream, event: Event) -> Result<(), CudaError>;

    /// What is issued to the stream from now on waits for the event as it was last recorded.
    ///
    /// # Errors
    /// The device's.
    fn wait(&self, stream: Stream, event: Event) -> Result<(), CudaError>;

    /// Copies bytes within the device; the parts do not overlap.
    ///
    /// # Errors
    /// The device's.
    ///
    /// # Safety
    /// There are as many bytes of this device's memory at both, until the stream has come past the copy.
    unsafe fn copy(&self, stream: Stream, from: Address, to: Address, bytes: u64) -> Result<(), CudaError>;

    /// Launches a kernel, by its [name](ithaca_device::catalogue).
    ///
    /// # Errors
    /// The device's; a name that was not compiled.
    ///
    /// # Safety
    /// The arguments are those of the kernel, and their addresses have the memory that it uses, until the stream has
    /// come past it.
    unsafe fn launch(
        &self,
        stream: Stream,
        kernel: &str,
        grid: Grid,
        arguments: Arguments,
    ) -> Result<(), CudaError>;

    /// Multiplies matrices.
    ///
    /// # Errors
    /// The device's.
    ///
    /// # Safety
    /// The matrices are memory of this device, until the stream has come past the product.
    unsafe fn multiply(&self, stream: Stream, product: &Product) -> Result<(), CudaError>;

    /// Makes this thread one that uses the device: what libraries do on "the current device" they do here.
    ///
    /// # Errors
    /// The device's.
    fn enter(&self) -> Result<(), CudaError>;

    /// Whether an event has happened as it was last recorded. Nothing here waits: who waits looks again.
    ///
    /// # Errors
    /// The device's, among them what failed since the last call.
    fn has_happened(&self, event: Event) -> Result<bool, CudaError>;

    /// Holds a stream: what is issued to it from now on does not begin before [`let_go`](Self::let_go). A fault on request.
    ///
    /// # Errors
    /// The device's.
    fn hold(&self, stream: Stream) -> Result<(), CudaError>;

    /// Lets all streams go on that are held.
    ///
    /// # Errors
    /// The device's.
    fn let_go(&self) -> Result<(), CudaError>;

    /// Says that something that was issued may never end. Nothing that it may use is given back until the process ends, for
    /// to give it back would be to wait.
    fn abandon(&self);

    /// Begins to record what is issued to `stream`, and to streams that wait for it, instead of doing it.
    ///
    /// # Errors
    /// The device's; [`CudaError::Unsupported`] where a device records nothing.
    fn begin_graph(&self, stream: Stream) -> Result<(), CudaError>;

    /// Ends recording; every stream that was drawn in has been waited for by `stream`.
    ///
    /// # Errors
    /// As [`begin_graph`](Self::begin_graph).
    fn end_graph(&self, stream: Stream) -> Result<Graph, CudaError>;

    /// Does what was recorded.
    ///
    /// # Errors
    /// As [`begin_graph`](Self::begin_graph).
    ///
    /// # Safety
    /// The memory that was recorded is still there.
    unsafe fn run_graph(&self, stream: Stream, graph: Graph) -> Result<(), CudaError>;
}
