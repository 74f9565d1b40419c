//! Types of NCCL's header, and the functions that are looked up in the library.

use std::ffi::{c_char, c_int, c_void};

/// An opaque communicator.
pub type RawCommunicator = *mut c_void;
/// A `cudaStream_t`.
pub type RawStream = *mut c_void;

/// Bytes of a unique id.
pub const UNIQUE_ID_BYTES: usize = 128;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawUniqueId {
    /// Opaque bytes.
    pub internal: [c_char; UNIQUE_ID_BYTES],
}

/// `ncclDataType_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataType {
    /// 8-bit signed integers.
    I8 = 0,
    /// 32-bit signed integers.
    I32 = 2,
    /// IEEE half precision.
    F16 = 6,
    /// IEEE single precision.
    F32 = 7,
    /// IEEE double precision.
    F64 = 8,
    /// bfloat16.
    BF16 = 9,
}

/// `ncclRedOp_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// Sum.
    Sum = 0,
    /// Maximum.
    Max = 2,
}

/// Declares the table of functions and its loader.
macro_rules! functions {
    ($($(#[$doc:meta])* $field:ident: $symbol:literal fn($($arg:ty),*) -> $ret:ty;)*) => {
        /// The functions, as they lie in the library.
        pub struct Functions {
            $($(#[$doc])* pub $field: unsafe extern "C" fn($($arg),*) -> $ret,)*
        }

        impl Functions {
            /// Looks every function up.
            ///
            /// # Errors
            /// The loader's message for the first symbol that is missing.
            ///
            /// # Safety
            /// The library must be NCCL, and must stay loaded for as long as the table is used.
            pub unsafe fn load(library: &libloading::Library) -> Result<Self, libloading::Error> {
                Ok(Self {
                    $(
                        // SAFETY: the caller vouches for the library, and the types are those of its header.
                        $field: unsafe {
                            *library.get::<unsafe extern "C" fn($($arg),*) -> $ret>($symbol.as_bytes())?
                        },
                    )*
                })
            }
        }
    };
}

functions! {
    /// `ncclGetVersion(version)`.
    get_version: "ncclGetVersion" fn(*mut c_int) -> c_int;
    /// `ncclGetErrorString(status)`.
    get_error_string: "ncclGetErrorString" fn(c_int) -> *const c_char;
    /// `ncclGetUniqueId(id)`.
    get_unique_id: "ncclGetUniqueId" fn(*mut RawUniqueId) -> c_int;
    /// `ncclCommInitRank(comm, ranks, id, rank)`.
    comm_init_rank: "ncclCommInitRank" fn(*mut RawCommunicator, c_int, RawUniqueId, c_int) -> c_int;
    /// `ncclCommDestroy(comm)`.
    comm_destroy: "ncclCommDestroy" fn(RawCommunicator) -> c_int;
    /// `ncclCommAbort(comm)`.
    comm_abort: "ncclCommAbort" fn(RawCommunicator) -> c_int;
    /// `ncclCommGetAsyncError(comm, status)`.
    comm_get_async_error: "ncclCommGetAsyncError" fn(RawCommunicator, *mut c_int) -> c_int;
    /// `ncclAllReduce(send, recv, count, type, op, comm, stream)`.
    all_reduce: "ncclAllReduce"
        fn(*const c_void, *mut c_void, usize, c_int, c_int, RawCommunicator, RawStream) -> c_int;
    /// `ncclAllGather(send, recv, count, type, comm, stream)`.
    all_gather: "ncclAllGather"
        fn(*const c_void, *mut c_void, usize, c_int, RawCommunicator, RawStream) -> c_int;
    /// `ncclReduceScatter(send, recv, count, type, op, comm, stream)`.
    reduce_scatter: "ncclReduceScatter"
        fn(*const c_void, *mut c_void, usize, c_int, c_int, RawCommunicator, RawStream) -> c_int;
    /// `ncclSend(send, count, type, peer, comm, stream)`.
    send: "ncclSend" fn(*const c_void, usize, c_int, c_int, RawCommunicator, RawStream) -> c_int;
    /// `ncclRecv(recv, count, type, peer, comm, stream)`.
    recv: "ncclRecv" fn(*mut c_void, usize, c_int, c_int, RawCommunicator, RawStream) -> c_int;
    /// `ncclGroupStart()`.
    group_start: "ncclGroupStart" fn() -> c_int;
    /// `ncclGroupEnd()`.
    group_end: "ncclGroupEnd" fn() -> c_int;
}
