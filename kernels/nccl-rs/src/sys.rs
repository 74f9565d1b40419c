//! Types of NCCL's header, and the functions that are looked up in the library.

use std::ffi::{c_char, c_int, c_uint, c_void};

/// An opaque communicator.
pub type RawCommunicator = *mut c_void;
/// A `cudaStream_t`.
pub type RawStream = *mut c_void;

/// Bytes of a unique id.
pub const UNIQUE_ID_BYTES: usize = 128;

/// `NCCL_CONFIG_UNDEF_INT`: the library's own choice.
pub const UNDEFINED: c_int = c_int::MIN;

/// `NCCL_API_MAGIC`.
pub const API_MAGIC: c_uint = 0xcafe_beef;

/// The version whose configuration [`RawConfig`] is: 2.18.1, the first that splits communicators.
pub const CONFIG_VERSION: c_uint = 21_801;

/// `ncclUniqueId`: the id of a communicator, which every rank needs to join it. The bytes are opaque.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UniqueId {
    pub(crate) internal: [u8; UNIQUE_ID_BYTES],
}

impl UniqueId {
    /// The id that another rank sent as bytes.
    pub fn from_bytes(internal: [u8; UNIQUE_ID_BYTES]) -> Self {
        Self { internal }
    }

    /// The bytes to send to other ranks.
    pub fn bytes(&self) -> &[u8; UNIQUE_ID_BYTES] {
        &self.internal
    }
}

/// The start of `ncclConfig_t`, as far as NCCL 2.18 has it.
///
/// A library reads as many bytes as `size` says, older ones fewer, and treats fields newer than `version` as undefined.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RawConfig {
    /// Bytes of this struct.
    pub size: usize,
    /// [`API_MAGIC`].
    pub magic: c_uint,
    /// [`CONFIG_VERSION`].
    pub version: c_uint,
    /// Zero: calls return at once and complete in the background.
    pub blocking: c_int,
    /// Thread blocks in a cluster.
    pub cga_cluster_size: c_int,
    /// The fewest thread blocks of a kernel.
    pub min_ctas: c_int,
    /// The most.
    pub max_ctas: c_int,
    /// The network module.
    pub net_name: *const c_char,
    /// Whether splits share the resources of their parent.
    pub split_share: c_int,
    /// At the place of padding in 2.18; undefined.
    pub traffic_class: c_int,
}

impl Default for RawConfig {
    /// Calls do not block; everything else is the library's own choice.
    fn default() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: API_MAGIC,
            version: CONFIG_VERSION,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
            traffic_class: UNDEFINED,
        }
    }
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

impl DataType {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            DataType::I8 => 1,
            DataType::F16 | DataType::BF16 => 2,
            DataType::I32 | DataType::F32 => 4,
            DataType::F64 => 8,
        }
    }
}

/// `ncclSum` of `ncclRedOp_t`.
pub const SUM: c_int = 0;

/// Declares the table of functions and its loader.
macro_rules! functions {
    (
        required { $($(#[$doc:meta])* $field:ident: $symbol:literal fn($($arg:ty),*) -> $ret:ty;)* }
        optional { $($(#[$odoc:meta])* $ofield:ident: $osymbol:literal fn($($oarg:ty),*) -> $oret:ty;)* }
    ) => {
        /// The functions of the library.
        pub struct Functions {
            $($(#[$doc])* pub $field: unsafe extern "C" fn($($arg),*) -> $ret,)*
            $($(#[$odoc])* pub $ofield: Option<unsafe extern "C" fn($($oarg),*) -> $oret>,)*
        }

        impl Functions {
            /// Looks every function up.
            ///
            /// # Errors
            /// The loader's message for the first symbol that is missing and that NCCL 2.10 has.
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
                    $(
                        // SAFETY: as above.
                        $ofield: unsafe {
                            library
                                .get::<unsafe extern "C" fn($($oarg),*) -> $oret>($osymbol.as_bytes())
                                .ok()
                                .map(|found| *found)
                        },
                    )*
                })
            }
        }
    };
}

functions! {
    required {
        /// `ncclGetVersion(version)`.
        get_version: "ncclGetVersion" fn(*mut c_int) -> c_int;
        /// `ncclGetErrorString(status)`.
        get_error_string: "ncclGetErrorString" fn(c_int) -> *const c_char;
        /// `ncclGetUniqueId(id)`.
        get_unique_id: "ncclGetUniqueId" fn(*mut UniqueId) -> c_int;
        /// `ncclCommDestroy(comm)`.
        comm_destroy: "ncclCommDestroy" fn(RawCommunicator) -> c_int;
        /// `ncclCommAbort(comm)`.
        comm_abort: "ncclCommAbort" fn(RawCommunicator) -> c_int;
        /// `ncclCommGetAsyncError(comm, status)`.
        comm_get_async_error: "ncclCommGetAsyncError" fn(RawCommunicator, *mut c_int) -> c_int;
        /// `ncclAllReduce(send, recv, count, type, op, comm, stream)`.
        all_reduce: "ncclAllReduce"
            fn(*const c_void, *mut c_void, usize, c_int, c_int, RawCommunicator, RawStream) -> c_int;
        /// `ncclReduce(send, recv, count, type, op, root, comm, stream)`.
        reduce: "ncclReduce"
            fn(*const c_void, *mut c_void, usize, c_int, c_int, c_int, RawCommunicator, RawStream) -> c_int;
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
    optional {
        /// `ncclGetLastError(comm)`, since 2.13.
        get_last_error: "ncclGetLastError" fn(RawCommunicator) -> *const c_char;
        /// `ncclCommInitRankConfig(comm, ranks, id, rank, config)`, since 2.14.
        comm_init_rank_config: "ncclCommInitRankConfig"
            fn(*mut RawCommunicator, c_int, UniqueId, c_int, *mut RawConfig) -> c_int;
        /// `ncclCommFinalize(comm)`, since 2.14.
        comm_finalize: "ncclCommFinalize" fn(RawCommunicator) -> c_int;
        /// `ncclCommSplit(comm, color, key, new, config)`, since 2.18.
        comm_split: "ncclCommSplit"
            fn(RawCommunicator, c_int, c_int, *mut RawCommunicator, *mut RawConfig) -> c_int;
        /// `ncclAlltoAll(send, recv, count, type, comm, stream)`, since 2.28.
        all_to_all: "ncclAlltoAll"
            fn(*const c_void, *mut c_void, usize, c_int, RawCommunicator, RawStream) -> c_int;
    }
}
