//! The interface of a device: memory, streams, events, launches and matrix products.
//!
//! [`Gpu`](super::gpu::Gpu) is a GPU, [`Host`](super::host::Host) is this machine with the kernels compiled by a C++
//! compiler.

use std::time::Duration;

pub use ithaca_device::{Activation, Form};

use super::arguments::{Address, Arguments};
use super::error::CudaError;

/// The handle of a stream, an in-order queue of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stream(pub u64);

/// The handle of an event, a point in a stream that other streams wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Event(pub u64);

/// The handle of a recorded step.
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
/// Each stream runs its work in order of issue. [`upload`](Self::upload) and [`download`](Self::download) are synchronous,
/// but do not wait for streams.
pub trait Device {
    /// Allocates memory filled with NaN, aligned to 256 bytes.
    ///
    /// # Errors
    /// The device's.
    fn allocate(&self, bytes: u64) -> Result<Address, CudaError>;

    /// Allocates memory of the host that kernels read and write, filled and aligned as [`allocate`](Self::allocate) does.
    ///
    /// # Errors
    /// The device's.
    fn allocate_on_host(&self, bytes: u64) -> Result<Address, CudaError>;

    /// Frees memory of the host.
    ///
    /// # Safety
    /// As [`release`](Self::release).
    unsafe fn release_on_host(&self, at: Address);

    /// Frees memory.
    ///
    /// # Safety
    /// The memory was allocated here, and neither running nor later work uses it.
    unsafe fn release(&self, at: Address);

    /// Copies bytes to the device.
    ///
    /// # Errors
    /// The device's.
    ///
    /// # Safety
    /// `to` has this many bytes of device memory, and no running work uses them.
    unsafe fn upload(&self, bytes: &[u8], to: Address) -> Result<(), CudaError>;

    /// Copies bytes from the device.
    ///
    /// # Errors
    /// The device's.
    ///
    /// # Safety
    /// `from` has this many bytes of device memory, and no running work writes them.
    unsafe fn download(&self, from: Address, bytes: &mut [u8]) -> Result<(), CudaError>;

    /// Creates a stream.
    ///
    /// # Errors
    /// The device's.
    fn stream(&self) -> Result<Stream, CudaError>;

    /// Creates an event.
    ///
    /// # Errors
    /// The device's.
    fn event(&self) -> Result<Event, CudaError>;

    /// Creates an event with a timestamp.
    ///
    /// # Errors
    /// The device's.
    fn timed_event(&self) -> Result<Event, CudaError>;

    /// The time between two complete events with timestamps; zero if the second completed first.
    ///
    /// # Errors
    /// The device's.
    fn elapsed(&self, from: Event, to: Event) -> Result<Duration, CudaError>;

    /// Records an event, which completes when all work issued to the stream before is done.
    ///
    /// # Errors
    /// The device's.
    fn record(&self, stream: Stream, event: Event) -> Result<(), CudaError>;

    /// Makes later work of the stream wait for the last recording of the event.
    ///
    /// # Errors
    /// The device's.
    fn wait(&self, stream: Stream, event: Event) -> Result<(), CudaError>;

    /// Copies bytes within the device; the ranges do not overlap.
    ///
    /// # Errors
    /// The device's.
    ///
    /// # Safety
    /// Both addresses have this many bytes of device memory until the copy is done.
    unsafe fn copy(&self, stream: Stream, from: Address, to: Address, bytes: u64) -> Result<(), CudaError>;

    /// Launches a kernel, by its [name](ithaca_device::catalogue).
    ///
    /// # Errors
    /// The device's; [`CudaError::Kernel`] for a kernel that was not compiled.
    ///
    /// # Safety
    /// The arguments match the kernel's parameters, and their addresses have the memory that it uses until it is done.
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
    /// The matrices are memory of this device until the product is done.
    unsafe fn multiply(&self, stream: Stream, product: &Product) -> Result<(), CudaError>;

    /// Makes this device the current device of the thread, for libraries that use it.
    ///
    /// # Errors
    /// The device's.
    fn make_current(&self) -> Result<(), CudaError>;

    /// Whether the last recording of an event is complete. Does not block.
    ///
    /// # Errors
    /// The device's, asynchronous errors since the last call included.
    fn is_complete(&self, event: Event) -> Result<bool, CudaError>;

    /// Holds a stream: later work does not begin before [`resume`](Self::resume). Used to inject a hang.
    ///
    /// # Errors
    /// The device's.
    fn hold(&self, stream: Stream) -> Result<(), CudaError>;

    /// Resumes all held streams.
    ///
    /// # Errors
    /// The device's.
    fn resume(&self) -> Result<(), CudaError>;

    /// Marks the device as stuck: issued work may never end. Its memory is kept until the process ends, because freeing
    /// waits for that work.
    fn abandon(&self);

    /// Begins to record the work issued to `stream` and to streams that wait for it, instead of running it.
    ///
    /// # Errors
    /// The device's; [`CudaError::Unsupported`] where a device has no graphs.
    fn begin_graph(&self, stream: Stream) -> Result<(), CudaError>;

    /// Ends recording; `stream` has waited for every stream of the graph.
    ///
    /// # Errors
    /// As [`begin_graph`](Self::begin_graph).
    fn end_graph(&self, stream: Stream) -> Result<Graph, CudaError>;

    /// Runs a graph.
    ///
    /// # Errors
    /// As [`begin_graph`](Self::begin_graph).
    ///
    /// # Safety
    /// The recorded addresses are still allocated.
    unsafe fn run_graph(&self, stream: Stream, graph: Graph) -> Result<(), CudaError>;
}
