//! A device that does nothing and keeps the names of what is launched.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::time::Duration;

use super::arguments::{Address, Arguments};
use super::device::{Device, Event, Graph, Grid, Product, Stream};
use super::error::CudaError;

/// The names of the kernels that were launched.
#[derive(Debug, Default)]
pub struct Recorder {
    kernels: RefCell<BTreeSet<String>>,
    next: Cell<u64>,
}

impl Recorder {
    /// Everything launched so far.
    pub fn kernels(self) -> BTreeSet<String> {
        self.kernels.into_inner()
    }

    /// A number that was not given before; zero is none.
    fn fresh(&self, apart: u64) -> u64 {
        let next = self.next.get() + apart.next_multiple_of(256).max(256);
        self.next.set(next);
        next
    }
}

impl Device for Recorder {
    fn allocate(&self, bytes: u64) -> Result<Address, CudaError> {
        let end = self.fresh(bytes);
        Ok(Address(end - bytes.next_multiple_of(256).max(256) + 256))
    }

    unsafe fn release(&self, _: Address) {}

    unsafe fn upload(&self, _: &[u8], _: Address) -> Result<(), CudaError> {
        Ok(())
    }

    unsafe fn download(&self, _: Address, _: &mut [u8]) -> Result<(), CudaError> {
        Ok(())
    }

    fn stream(&self) -> Result<Stream, CudaError> {
        Ok(Stream(self.fresh(1)))
    }

    fn event(&self) -> Result<Event, CudaError> {
        Ok(Event(self.fresh(1)))
    }

    fn timed_event(&self) -> Result<Event, CudaError> {
        self.event()
    }

    fn elapsed(&self, _: Event, _: Event) -> Result<Duration, CudaError> {
        Ok(Duration::ZERO)
    }

    fn record(&self, _: Stream, _: Event) -> Result<(), CudaError> {
        Ok(())
    }

    fn wait(&self, _: Stream, _: Event) -> Result<(), CudaError> {
        Ok(())
    }

    unsafe fn copy(&self, _: Stream, _: Address, _: Address, _: u64) -> Result<(), CudaError> {
        Ok(())
    }

    unsafe fn launch(&self, _: Stream, kernel: &str, _: Grid, _: Arguments) -> Result<(), CudaError> {
        if !self.kernels.borrow().contains(kernel) {
            self.kernels.borrow_mut().insert(kernel.to_owned());
        }
        Ok(())
    }

    unsafe fn multiply(&self, _: Stream, _: &Product) -> Result<(), CudaError> {
        Ok(())
    }

    fn enter(&self) -> Result<(), CudaError> {
        Ok(())
    }

    fn has_happened(&self, _: Event) -> Result<bool, CudaError> {
        Ok(true)
    }

    fn hold(&self, _: Stream) -> Result<(), CudaError> {
        Ok(())
    }

    fn let_go(&self) -> Result<(), CudaError> {
        Ok(())
    }

    fn abandon(&self) {}

    fn begin_graph(&self, _: Stream) -> Result<(), CudaError> {
        Ok(())
    }

    fn end_graph(&self, _: Stream) -> Result<Graph, CudaError> {
        Ok(Graph(0))
    }

    unsafe fn run_graph(&self, _: Stream, _: Graph) -> Result<(), CudaError> {
        Ok(())
    }
}
