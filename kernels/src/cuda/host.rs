//! The host as a device: the same kernels, compiled by a C++ compiler. Each launch runs synchronously as a grid of one
//! thread, or block by block where threads cooperate.
//!
//! It tests the runtime without a GPU: every launch is compared with the kernel's parameters by number and size, a wait
//! for an event that was never recorded is an error, and fresh memory is NaN. A held stream drops its work, and so does a
//! stream that waits for an event of it.

use std::alloc::{Layout, alloc, dealloc};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_int, c_uint, c_void};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use half::{bf16, f16};
use ithaca_ir::DType;
use ithaca_ir::ops::Unary;

use super::arguments::{Address, Arguments};
use super::device::{Activation, Device, Event, Form, Graph, Grid, Matrix, Product, Stream};
use super::error::CudaError;
use crate::oracle::unary::unary;
use ithaca_device::SOURCES;
use ithaca_device::catalogue::translation_unit;

/// The alignment of allocations in bytes, as on a GPU.
const ALIGNMENT: usize = 256;

/// The entry of a kernel. Parameters: addresses of the arguments, their sizes, their number, blocks, threads per block,
/// bytes of shared memory (zero for a grid of one thread). Returns 0, `-n - 1` if the kernel takes `n` arguments, or
/// `i + 1` if the size of argument `i` differs.
type Entry = unsafe extern "C" fn(*const *mut c_void, *const usize, usize, c_uint, c_uint, c_uint) -> c_int;

/// The most blocks of a grid: fewer than the work has, as may happen on a GPU.
const MOST_BLOCKS: u64 = 4;

/// Kernels compiled for the host, shared by any number of devices.
pub struct HostKernels {
    _library: libloading::Library,
    entries: BTreeMap<String, Entry>,
}

/// The host as a device.
pub struct Host {
    kernels: Arc<HostKernels>,
    memory: RefCell<BTreeMap<Address, Layout>>,
    next: Cell<u64>,
    recorded: RefCell<BTreeMap<Event, Instant>>,
    /// Streams that drop their work until they are resumed.
    held: RefCell<BTreeSet<Stream>>,
    /// Events that held streams would have recorded.
    pending: RefCell<BTreeSet<Event>>,
}

impl HostKernels {
    /// Compiles `kernels` with the C++ compiler `compiler`, the directory `headers` of substitutes for CUDA's headers, and these
    /// macros defined.
    ///
    /// # Errors
    /// [`CudaError::Compile`] with the compiler's log, [`CudaError::Failed`] where files or the library fail.
    pub fn compile(
        compiler: &str,
        headers: &Path,
        kernels: &BTreeSet<String>,
        macros: &[&str],
    ) -> Result<Self, CudaError> {
        let io = |call: &'static str| {
            move |error: std::io::Error| CudaError::Failed { call, detail: error.to_string() }
        };
        let directory = tempfile::tempdir().map_err(io("a temporary directory"))?;
        for (name, text) in SOURCES {
            fs::write(directory.path().join(name), text).map_err(io("write"))?;
        }
        let (source, library) = (directory.path().join("host.cpp"), directory.path().join("host.so"));
        fs::write(&source, text_of(kernels)).map_err(io("write"))?;
        let run = Command::new(compiler)
            .args(["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-isystem"])
            .arg(headers)
            .args(macros.iter().map(|name| format!("-D{name}")))
            .arg("-o")
            .arg(&library)
            .arg(&source)
            .output()
            .map_err(io("the C++ compiler"))?;
        if !run.status.success() {
            return Err(CudaError::Compile { log: String::from_utf8_lossy(&run.stderr).into_owned() });
        }
        let failed = |e: libloading::Error| CudaError::Failed { call: "dlopen", detail: e.to_string() };
        // SAFETY: the library of kernels has no initialisers.
        let library = unsafe { libloading::Library::new(&library) }.map_err(failed)?;
        let mut entries = BTreeMap::new();
        for (i, kernel) in kernels.iter().enumerate() {
            // SAFETY: the entry was written with this type.
            let entry = unsafe { library.get::<Entry>(format!("entry_{i}").as_bytes()) }.map_err(failed)?;
            entries.insert(kernel.clone(), *entry);
        }
        Ok(Self { _library: library, entries })
    }

    /// Whether all `kernels` were compiled.
    pub fn has(&self, kernels: &BTreeSet<String>) -> bool {
        kernels.iter().all(|kernel| self.entries.contains_key(kernel))
    }
}

impl Host {
    /// A device without allocations.
    pub fn new(kernels: Arc<HostKernels>) -> Self {
        Self {
            kernels,
            memory: RefCell::default(),
            next: Cell::new(0),
            recorded: RefCell::default(),
            held: RefCell::default(),
            pending: RefCell::default(),
        }
    }

    fn is_held(&self, stream: Stream) -> bool {
        self.held.borrow().contains(&stream)
    }

    fn next_handle(&self) -> u64 {
        self.next.set(self.next.get() + 1);
        self.next.get()
    }
}

/// The kernels and an entry for each, by number.
fn text_of(kernels: &BTreeSet<String>) -> String {
    let mut text =
        "#include <cstddef>\n#include <type_traits>\n#include <utility>\n".to_owned() + &translation_unit();
    text.push_str(
        "template <typename... P, size_t... I>\n\
         static void run(void (*kernel)(P...), void* const* a, std::index_sequence<I...>) {\n    \
         kernel(*static_cast<std::remove_const_t<P>*>(a[I])...);\n}\n\
         template <typename... P>\n\
         static int call(void (*kernel)(P...), void* const* a, const size_t* sizes, size_t n, unsigned blocks, \
         unsigned threads, unsigned shared) {\n    \
         if (n != sizeof...(P)) return -static_cast<int>(sizeof...(P)) - 1;\n    \
         const size_t expected[] = {sizeof(P)...};\n    \
         for (size_t i = 0; i < n; ++i)\n        if (expected[i] != sizes[i]) return static_cast<int>(i) + 1;\n    \
         struct : CudaOnHostCall {\n        \
         void (*kernel)(P...);\n        void* const* a;\n        \
         void operator()() override { run(kernel, a, std::index_sequence_for<P...>{}); }\n    } all;\n    \
         all.kernel = kernel, all.a = a;\n    \
         if (shared == 0) all();\n    else on_host::launch(blocks, threads, shared, all);\n    return 0;\n}\n",
    );
    for (i, kernel) in kernels.iter().enumerate() {
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "extern \"C\" int entry_{i}(void* const* a, const size_t* s, size_t n, unsigned b, unsigned t, unsigned m) {{ \
             return call(&kernel::{kernel}, a, s, n, b, t, m); }}"
        );
    }
    text
}

impl Device for Host {
    fn allocate(&self, bytes: u64) -> Result<Address, CudaError> {
        let too_much =
            |_| CudaError::Failed { call: "allocate", detail: format!("{bytes} bytes are too many") };
        let size = usize::try_from(bytes.max(1)).map_err(too_much)?;
        let layout = Layout::from_size_align(size, ALIGNMENT)
            .map_err(|e| CudaError::Failed { call: "allocate", detail: e.to_string() })?;
        // SAFETY: the layout is not empty.
        let memory = unsafe { alloc(layout) };
        if memory.is_null() {
            return Err(CudaError::Failed {
                call: "allocate",
                detail: format!("no memory of {bytes} bytes"),
            });
        }
        // SAFETY: the memory has `size` bytes. All ones is NaN in every float type.
        unsafe { memory.write_bytes(0xFF, size) };
        let at = Address(memory.expose_provenance() as u64);
        self.memory.borrow_mut().insert(at, layout);
        Ok(at)
    }

    fn allocate_on_host(&self, bytes: u64) -> Result<Address, CudaError> {
        self.allocate(bytes)
    }

    unsafe fn release_on_host(&self, at: Address) {
        // SAFETY: the caller guarantees the memory.
        unsafe { self.release(at) }
    }

    unsafe fn release(&self, at: Address) {
        if let Some(layout) = self.memory.borrow_mut().remove(&at) {
            // SAFETY: the memory was allocated here with this layout and is freed once.
            unsafe { dealloc(pointer(at), layout) };
        }
    }

    unsafe fn upload(&self, bytes: &[u8], to: Address) -> Result<(), CudaError> {
        // SAFETY: the caller guarantees the memory.
        unsafe { pointer(to).copy_from(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    unsafe fn download(&self, from: Address, bytes: &mut [u8]) -> Result<(), CudaError> {
        // SAFETY: the caller guarantees the memory.
        unsafe { pointer(from).copy_to(bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn stream(&self) -> Result<Stream, CudaError> {
        Ok(Stream(self.next_handle()))
    }

    fn event(&self) -> Result<Event, CudaError> {
        Ok(Event(self.next_handle()))
    }

    fn timed_event(&self) -> Result<Event, CudaError> {
        self.event()
    }

    fn elapsed(&self, from: Event, to: Event) -> Result<Duration, CudaError> {
        let recorded = self.recorded.borrow();
        match (recorded.get(&from), recorded.get(&to)) {
            (Some(from), Some(to)) => Ok(to.saturating_duration_since(*from)),
            (Some(_) | None, _) => Err(CudaError::Unrecorded),
        }
    }

    fn record(&self, stream: Stream, event: Event) -> Result<(), CudaError> {
        if self.is_held(stream) {
            self.recorded.borrow_mut().remove(&event);
            self.pending.borrow_mut().insert(event);
        } else {
            self.pending.borrow_mut().remove(&event);
            self.recorded.borrow_mut().insert(event, Instant::now());
        }
        Ok(())
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<(), CudaError> {
        if self.is_complete(event)? { Ok(()) } else { self.hold(stream) }
    }

    unsafe fn copy(&self, stream: Stream, from: Address, to: Address, bytes: u64) -> Result<(), CudaError> {
        if self.is_held(stream) {
            return Ok(());
        }
        let n = usize::try_from(bytes).unwrap_or(usize::MAX);
        // SAFETY: the caller guarantees the memory.
        unsafe { pointer(to).copy_from(pointer(from), n) };
        Ok(())
    }

    unsafe fn launch(
        &self,
        stream: Stream,
        kernel: &str,
        grid: Grid,
        mut arguments: Arguments,
    ) -> Result<(), CudaError> {
        let wrong = |why: String| Err(CudaError::Kernel { kernel: kernel.to_owned(), why });
        let Some(entry) = self.kernels.entries.get(kernel) else {
            return wrong("it was not compiled".to_owned());
        };
        let (pointers, sizes) = (arguments.pointers(), arguments.sizes());
        let (blocks, threads, shared_bytes) = match grid {
            Grid::Threads(_) => (1, 1, 0),
            Grid::Blocks { blocks, threads, shared_bytes } => {
                (c_uint::try_from(blocks.min(MOST_BLOCKS)).unwrap_or(1), threads, shared_bytes)
            }
        };
        let (values, n) = (pointers.as_ptr(), sizes.len());
        if self.is_held(stream) {
            return Ok(());
        }
        // SAFETY: the entry checks number and sizes; the caller guarantees the values.
        match unsafe { entry(values, sizes.as_ptr(), n, blocks, threads, shared_bytes) } {
            0 => Ok(()),
            n if n < 0 => wrong(format!("it takes {} arguments, the launch has {}", -n - 1, sizes.len())),
            i => wrong(format!("argument {} has a different size in the launch", i - 1)),
        }
    }

    unsafe fn multiply(&self, stream: Stream, product: &Product) -> Result<(), CudaError> {
        if self.is_held(stream) {
            return Ok(());
        }
        let Product {
            dtype,
            result,
            rows,
            columns,
            inner,
            batch,
            a,
            b,
            before,
            bias,
            bias_step,
            activation,
            c,
        } = *product;
        let before = (before.number() != 0).then_some(Matrix { at: before, ..c });
        let bias = (bias.number() != 0).then_some(Matrix { at: bias, leading: 0, step: bias_step, ..c });
        for i in 0..batch {
            for column in 0..columns {
                for row in 0..rows {
                    let mut wide = 0.0_f64;
                    let mut narrow = 0.0_f32;
                    for k in 0..inner {
                        // SAFETY: the caller guarantees the matrices.
                        let (x, y) = unsafe { (read(dtype, a, i, row, k), read(dtype, b, i, k, column)) };
                        match dtype {
                            DType::F64 => wide += x * y,
                            _ => narrow += x as f32 * y as f32,
                        }
                    }
                    let mut sum = if dtype == DType::F64 { wide } else { f64::from(narrow) };
                    // SAFETY: as above.
                    unsafe {
                        if let Some(before) = before {
                            sum += read(result, before, i, row, column);
                        }
                        if let Some(bias) = bias {
                            sum += read(result, bias, i, row, column);
                        }
                        sum = activated(activation, sum);
                        write(result, element(result, c, i, row, column), sum);
                    }
                }
            }
        }
        Ok(())
    }

    fn make_current(&self) -> Result<(), CudaError> {
        Ok(())
    }

    fn is_complete(&self, event: Event) -> Result<bool, CudaError> {
        match (self.recorded.borrow().contains_key(&event), self.pending.borrow().contains(&event)) {
            (true, _) => Ok(true),
            (false, true) => Ok(false),
            (false, false) => Err(CudaError::Unrecorded),
        }
    }

    fn hold(&self, stream: Stream) -> Result<(), CudaError> {
        self.held.borrow_mut().insert(stream);
        Ok(())
    }

    /// Dropped work stays dropped: the runtime resumes streams only to end a failed run.
    fn resume(&self) -> Result<(), CudaError> {
        self.held.borrow_mut().clear();
        let pending = std::mem::take(&mut *self.pending.borrow_mut());
        self.recorded.borrow_mut().extend(pending.into_iter().map(|event| (event, Instant::now())));
        Ok(())
    }

    /// Work is synchronous, so none is left.
    fn abandon(&self) {}

    fn begin_graph(&self, _: Stream) -> Result<(), CudaError> {
        Err(CudaError::Unsupported("a graph on the host".to_owned()))
    }

    fn end_graph(&self, stream: Stream) -> Result<Graph, CudaError> {
        self.begin_graph(stream).map(|()| Graph(0))
    }

    unsafe fn run_graph(&self, stream: Stream, _: Graph) -> Result<(), CudaError> {
        self.begin_graph(stream)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        for (&at, &layout) in self.memory.borrow().iter() {
            // SAFETY: the memory was allocated here with this layout and is freed once.
            unsafe { dealloc(pointer(at), layout) };
        }
    }
}

fn pointer(at: Address) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(usize::try_from(at.number()).unwrap_or(0))
}

/// The address of an element of matrix `i` of a batch.
/// The activation of a sum.
fn activated(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Identity => x,
        Activation::Relu => x.max(0.0),
        Activation::GeluTanh => unary(Unary::GeluTanh, x),
    }
}

fn element(dtype: DType, m: Matrix, i: i64, row: i64, column: i64) -> *mut u8 {
    let (down, right) = match m.form {
        Form::Plain => (row, column),
        Form::Transposed => (column, row),
    };
    let at = i * m.step + right * m.leading + down;
    pointer(m.at.offset(u64::try_from(at).unwrap_or(0) * dtype.bytes()))
}

/// # Safety
/// The element is memory of this device.
unsafe fn read(dtype: DType, m: Matrix, i: i64, row: i64, column: i64) -> f64 {
    let at = element(dtype, m, i, row, column);
    // SAFETY: the caller guarantees the memory.
    unsafe {
        match dtype {
            DType::F64 => at.cast::<f64>().read(),
            DType::F32 => f64::from(at.cast::<f32>().read()),
            DType::F16 => at.cast::<f16>().read().to_f64(),
            DType::BF16 => at.cast::<bf16>().read().to_f64(),
            DType::F8E4M3 | DType::I32 | DType::Bool => f64::NAN,
        }
    }
}

/// # Safety
/// The element is memory of this device.
unsafe fn write(dtype: DType, at: *mut u8, x: f64) {
    // SAFETY: the caller guarantees the memory.
    unsafe {
        match dtype {
            DType::F64 => at.cast::<f64>().write(x),
            DType::F32 => at.cast::<f32>().write(x as f32),
            DType::F16 => at.cast::<f16>().write(f16::from_f64(x)),
            DType::BF16 => at.cast::<bf16>().write(bf16::from_f64(x)),
            DType::F8E4M3 | DType::I32 | DType::Bool => {}
        }
    }
}
