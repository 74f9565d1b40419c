//! A GPU, through the driver API. NVRTC compiles the kernels, cuBLASLt multiplies matrices.
//!
//! [`Host`](super::host::Host) tests the parts that all devices share, such as the order of launches; the calls of this
//! module run on GPUs only.

mod product;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_int, c_uint};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use cudarc::driver::DriverError;
use cudarc::driver::{result, sys};

use super::arguments::{Address, Arguments};
use super::available;
use super::compile::{Architecture, compile};
use super::device::{Device, Event, Graph, Grid, Product, Stream};
use super::error::{CudaError, Part, Unavailable};

use product::{Products, ignore};

/// Threads of a block for kernels that take any block.
const BLOCK: c_uint = 256;

/// Bytes of shared memory that a kernel may use without an attribute (CUDA C++ Programming Guide, 21.7.3).
const SHARED_UNASKED: u32 = 48 * 1024;

/// The most blocks of a grid; kernels take any grid.
const MOST_BLOCKS: u64 = 1 << 20;

/// A GPU, with its context.
pub struct Gpu {
    device: sys::CUdevice,
    context: sys::CUcontext,
    architecture: Architecture,
    name: String,
    functions: RefCell<BTreeMap<String, sys::CUfunction>>,
    modules: RefCell<Vec<sys::CUmodule>>,
    graphs: RefCell<Vec<sys::CUgraphExec>>,
    streams: RefCell<Vec<sys::CUstream>>,
    events: RefCell<Vec<sys::CUevent>>,
    products: Products,
    gate: RefCell<Option<Gate>>,
    is_abandoned: Cell<bool>,
}

/// A word in pinned host memory that held streams wait for. The host can set it whatever the GPU does.
struct Gate(std::ptr::NonNull<AtomicU32>);

impl Gate {
    fn new() -> Result<Self, CudaError> {
        // SAFETY: the word is written before anything reads it.
        let word = unsafe { result::malloc_host(size_of::<AtomicU32>(), sys::CU_MEMHOSTALLOC_PORTABLE) }
            .map_err(failed("cuMemHostAlloc"))?;
        let word = std::ptr::NonNull::new(word.cast::<AtomicU32>()).ok_or_else(|| CudaError::Failed {
            call: "cuMemHostAlloc",
            detail: "it returned no memory".to_owned(),
        })?;
        // SAFETY: the memory was just allocated with the size of a word.
        unsafe { word.write(AtomicU32::new(0)) };
        Ok(Self(word))
    }

    fn open(&self) {
        // SAFETY: the word lives as long as this.
        unsafe { self.0.as_ref() }.store(1, Ordering::Release);
    }
}

impl Gpu {
    /// Opens the GPU with the number `ordinal`.
    ///
    /// # Errors
    /// [`Unavailable`] without the driver, cuBLASLt or the GPU; the driver's.
    pub fn open(ordinal: usize) -> Result<Self, CudaError> {
        let n = available::gpus()?;
        if ordinal >= n {
            let why = vec![format!("GPU {ordinal} was requested, the driver has {n}")];
            return Err(Unavailable { part: Part::Gpu, why }.into());
        }
        available::cublas_lt()?;
        let ordinal = c_int::try_from(ordinal).expect("it is below the number of GPUs, which is an int");
        let device = result::device::get(ordinal).map_err(failed("cuDeviceGet"))?;
        let attribute = |attribute| {
            // SAFETY: the device is one of the driver's.
            let value = unsafe { result::device::get_attribute(device, attribute) };
            value.map(|value| u32::try_from(value).unwrap_or(0)).map_err(failed("cuDeviceGetAttribute"))
        };
        let architecture = Architecture {
            major: attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            minor: attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        };
        let name = result::device::get_name(device).map_err(failed("cuDeviceGetName"))?;
        // SAFETY: the device is one of the driver's; its context is released on drop.
        let context =
            unsafe { result::primary_ctx::retain(device) }.map_err(failed("cuDevicePrimaryCtxRetain"))?;
        // SAFETY: the context was just made.
        unsafe { result::ctx::set_current(context) }.map_err(failed("cuCtxSetCurrent"))?;
        let products = Products::new().inspect_err(|_| {
            // SAFETY: the context was retained above and is not used.
            let _ = unsafe { result::primary_ctx::release(device) };
        })?;
        Ok(Self {
            device,
            context,
            architecture,
            name,
            functions: RefCell::default(),
            modules: RefCell::default(),
            graphs: RefCell::default(),
            streams: RefCell::default(),
            events: RefCell::default(),
            products,
            gate: RefCell::default(),
            is_abandoned: Cell::new(false),
        })
    }

    /// The name that the driver reports.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its architecture.
    pub fn architecture(&self) -> Architecture {
        self.architecture
    }

    /// Compiles kernels for this GPU and loads them.
    ///
    /// # Errors
    /// [`Unavailable`] without NVRTC, the compiler's and the driver's.
    pub fn load(&self, kernels: &BTreeSet<String>) -> Result<(), CudaError> {
        let compiled = compile(kernels, self.architecture)?;
        self.make_current()?;
        // SAFETY: the image is a whole module, and the driver copies it.
        let module = unsafe { result::module::load_data(compiled.cubin.as_ptr().cast()) }
            .map_err(failed("cuModuleLoadData"))?;
        self.modules.borrow_mut().push(module);
        for (kernel, lowered) in compiled.names {
            // SAFETY: the module is loaded.
            let function = unsafe { result::module::get_function(module, lowered) }
                .map_err(failed("cuModuleGetFunction"))?;
            self.functions.borrow_mut().insert(kernel, function);
        }
        Ok(())
    }

    fn new_event(&self, flags: sys::CUevent_flags) -> Result<Event, CudaError> {
        self.make_current()?;
        let event = result::event::create(flags).map_err(failed("cuEventCreate"))?;
        self.events.borrow_mut().push(event);
        Ok(Event(event.expose_provenance() as u64))
    }
}

impl Device for Gpu {
    fn allocate(&self, bytes: u64) -> Result<Address, CudaError> {
        self.make_current()?;
        let size = usize::try_from(bytes.max(1)).unwrap_or(usize::MAX);
        // SAFETY: the memory is not read before it is filled.
        let at = unsafe { result::malloc_sync(size) }.map_err(failed("cuMemAlloc"))?;
        // SAFETY: the memory was just allocated. All ones is NaN in every float type.
        unsafe { result::memset_d8_sync(at, 0xFF, size) }.map_err(failed("cuMemsetD8"))?;
        settle()?;
        Ok(Address(at))
    }

    fn allocate_on_host(&self, bytes: u64) -> Result<Address, CudaError> {
        self.make_current()?;
        let size = usize::try_from(bytes.max(1)).unwrap_or(usize::MAX);
        // SAFETY: the memory is not read before it is filled. It is page-aligned.
        let at = unsafe { result::malloc_host(size, 0) }.map_err(failed("cuMemHostAlloc"))?;
        // SAFETY: the memory was just allocated. All ones is NaN in every float type.
        unsafe { at.cast::<u8>().write_bytes(0xFF, size) };
        // With unified addressing kernels use the address that it has here.
        Ok(Address(at.expose_provenance() as u64))
    }

    unsafe fn release_on_host(&self, at: Address) {
        if !self.is_abandoned.get() && self.make_current().is_ok() {
            let at = std::ptr::with_exposed_provenance_mut(usize::try_from(at.number()).unwrap_or(0));
            // SAFETY: the caller guarantees the memory; a failure cannot be reported from here.
            let _ = unsafe { result::free_host(at) };
        }
    }

    unsafe fn release(&self, at: Address) {
        if !self.is_abandoned.get() && self.make_current().is_ok() {
            // SAFETY: the caller guarantees the memory; a failure cannot be reported from here.
            let _ = unsafe { result::free_sync(at.number()) };
        }
    }

    unsafe fn upload(&self, bytes: &[u8], to: Address) -> Result<(), CudaError> {
        self.make_current()?;
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller guarantees the memory.
        unsafe { result::memcpy_htod_sync(to.number(), bytes) }.map_err(failed("cuMemcpyHtoD"))?;
        settle()
    }

    unsafe fn download(&self, from: Address, bytes: &mut [u8]) -> Result<(), CudaError> {
        self.make_current()?;
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller guarantees the memory.
        unsafe { result::memcpy_dtoh_sync(bytes, from.number()) }.map_err(failed("cuMemcpyDtoH"))
    }

    fn stream(&self) -> Result<Stream, CudaError> {
        self.make_current()?;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(failed("cuStreamCreate"))?;
        self.streams.borrow_mut().push(stream);
        Ok(Stream(stream.expose_provenance() as u64))
    }

    fn event(&self) -> Result<Event, CudaError> {
        self.new_event(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    fn timed_event(&self) -> Result<Event, CudaError> {
        self.new_event(sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn elapsed(&self, from: Event, to: Event) -> Result<Duration, CudaError> {
        self.make_current()?;
        // SAFETY: both were created here with timestamps and live as long as this.
        let milliseconds = unsafe { result::event::elapsed(raw_event(from), raw_event(to)) };
        let seconds = f64::from(milliseconds.map_err(failed("cuEventElapsedTime"))?) / 1e3;
        Ok(Duration::try_from_secs_f64(seconds).unwrap_or_default())
    }

    fn record(&self, stream: Stream, event: Event) -> Result<(), CudaError> {
        self.make_current()?;
        // SAFETY: both were created here and live as long as this.
        unsafe { result::event::record(raw_event(event), raw_stream(stream)) }
            .map_err(failed("cuEventRecord"))
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<(), CudaError> {
        self.make_current()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both were created here and live as long as this.
        unsafe { result::stream::wait_event(raw_stream(stream), raw_event(event), flags) }
            .map_err(failed("cuStreamWaitEvent"))
    }

    unsafe fn copy(&self, stream: Stream, from: Address, to: Address, bytes: u64) -> Result<(), CudaError> {
        self.make_current()?;
        let n = usize::try_from(bytes).unwrap_or(usize::MAX);
        // SAFETY: the caller guarantees the memory.
        unsafe { result::memcpy_dtod_async(to.number(), from.number(), n, raw_stream(stream)) }
            .map_err(failed("cuMemcpyDtoDAsync"))
    }

    unsafe fn launch(
        &self,
        stream: Stream,
        kernel: &str,
        grid: Grid,
        mut arguments: Arguments,
    ) -> Result<(), CudaError> {
        self.make_current()?;
        let Some(&function) = self.functions.borrow().get(kernel) else {
            return Err(CudaError::Kernel {
                kernel: kernel.to_owned(),
                why: "it was not compiled".to_owned(),
            });
        };
        let (blocks, threads, shared_bytes) = match grid {
            Grid::Threads(threads) => (threads.div_ceil(u64::from(BLOCK)), BLOCK, 0),
            Grid::Blocks { blocks, threads, shared_bytes } => (blocks, threads, shared_bytes),
        };
        let blocks = c_uint::try_from(blocks.clamp(1, MOST_BLOCKS)).expect("at most 2^20 blocks");
        let failed =
            |error: DriverError| CudaError::Kernel { kernel: kernel.to_owned(), why: error.to_string() };
        if shared_bytes > SHARED_UNASKED {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let bytes = c_int::try_from(shared_bytes).unwrap_or(c_int::MAX);
            // SAFETY: the function is of a loaded module.
            unsafe { result::function::set_function_attribute(function, attribute, bytes) }
                .map_err(failed)?;
        }
        let mut pointers = arguments.pointers();
        let (grid, block) = ((blocks, 1, 1), (threads, 1, 1));
        // SAFETY: the function is of a loaded module; the caller guarantees the arguments, which the driver copies.
        unsafe {
            result::launch_kernel(function, grid, block, shared_bytes, raw_stream(stream), &mut pointers)
        }
        .map_err(failed)
    }

    unsafe fn multiply(&self, stream: Stream, product: &Product) -> Result<(), CudaError> {
        self.make_current()?;
        // SAFETY: the caller guarantees the matrices, and the stream was created here.
        unsafe { self.products.multiply(raw_stream(stream), product) }
    }

    fn make_current(&self) -> Result<(), CudaError> {
        // SAFETY: the context is retained for as long as this lives.
        unsafe { result::ctx::set_current(self.context) }.map_err(failed("cuCtxSetCurrent"))
    }

    fn is_complete(&self, event: Event) -> Result<bool, CudaError> {
        self.make_current()?;
        // SAFETY: the event was created here and lives as long as this.
        match unsafe { result::event::query(raw_event(event)) } {
            Ok(()) => Ok(true),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(failed("cuEventQuery")(error)),
        }
    }

    fn hold(&self, stream: Stream) -> Result<(), CudaError> {
        self.make_current()?;
        let mut gate = self.gate.borrow_mut();
        if gate.is_none() {
            *gate = Some(Gate::new()?);
        }
        let Some(Gate(word)) = &*gate else { return Ok(()) };
        let at = word.as_ptr().expose_provenance() as u64;
        let flags = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as c_uint;
        // SAFETY: with unified addressing the GPU reads pinned memory at its address here, and it lives as long as this.
        unsafe { sys::cuStreamWaitValue32_v2(raw_stream(stream), at, 1, flags) }
            .result()
            .map_err(failed("cuStreamWaitValue32"))
    }

    fn resume(&self) -> Result<(), CudaError> {
        // An open gate stays open: streams that are held later wait at a new gate.
        if let Some(gate) = self.gate.borrow_mut().take() {
            gate.open();
            // Streams may still read the word, so it is never freed.
        }
        Ok(())
    }

    fn abandon(&self) {
        self.is_abandoned.set(true);
    }

    fn begin_graph(&self, stream: Stream) -> Result<(), CudaError> {
        self.make_current()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream was created here.
        unsafe { result::stream::begin_capture(raw_stream(stream), mode) }
            .map_err(failed("cuStreamBeginCapture"))
    }

    fn end_graph(&self, stream: Stream) -> Result<Graph, CudaError> {
        self.make_current()?;
        // SAFETY: the stream was created here and is being captured.
        let graph = unsafe { result::stream::end_capture(raw_stream(stream)) }
            .map_err(failed("cuStreamEndCapture"))?;
        // SAFETY: the graph was just captured.
        let instantiated = unsafe { result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0)) };
        // SAFETY: the instantiated graph does not need the captured one.
        unsafe { result::graph::destroy(graph) }.map_err(failed("cuGraphDestroy"))?;
        let instantiated = instantiated.map_err(failed("cuGraphInstantiate"))?;
        self.graphs.borrow_mut().push(instantiated);
        Ok(Graph(instantiated.expose_provenance() as u64))
    }

    unsafe fn run_graph(&self, stream: Stream, graph: Graph) -> Result<(), CudaError> {
        self.make_current()?;
        let graph = std::ptr::with_exposed_provenance_mut(address(graph.0));
        // SAFETY: the graph was created here; the caller guarantees the memory.
        unsafe { result::graph::launch(graph, raw_stream(stream)) }.map_err(failed("cuGraphLaunch"))
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // Work that may never end is left to the end of the process, because waiting for it would hang.
        if self.is_abandoned.get() || self.make_current().is_err() {
            return;
        }
        let _ = result::ctx::synchronize();
        self.products.close();
        // SAFETY: all handles were created here, and neither running nor later work uses them. A failure cannot be reported
        // from here.
        unsafe {
            self.graphs.borrow().iter().for_each(|&graph| ignore(result::graph::exec_destroy(graph)));
            self.events.borrow().iter().for_each(|&event| ignore(result::event::destroy(event)));
            self.streams.borrow().iter().for_each(|&stream| ignore(result::stream::destroy(stream)));
            self.modules.borrow().iter().for_each(|&module| ignore(result::module::unload(module)));
            ignore(result::primary_ctx::release(self.device));
        }
    }
}

/// Waits for calls without a stream. Fills and the end of a copy to the device may run after the call has returned (CUDA
/// Driver API, "API synchronization behavior"), and non-blocking streams do not wait for them.
fn settle() -> Result<(), CudaError> {
    // SAFETY: the default stream always exists.
    unsafe { result::stream::synchronize(std::ptr::null_mut()) }.map_err(failed("cuStreamSynchronize"))
}

fn address(number: u64) -> usize {
    usize::try_from(number).unwrap_or(0)
}

fn raw_stream(stream: Stream) -> sys::CUstream {
    std::ptr::with_exposed_provenance_mut(address(stream.0))
}

fn raw_event(event: Event) -> sys::CUevent {
    std::ptr::with_exposed_provenance_mut(address(event.0))
}

/// The error of a call to the driver.
fn failed(call: &'static str) -> impl Fn(DriverError) -> CudaError {
    move |error| CudaError::Failed { call, detail: error.to_string() }
}
