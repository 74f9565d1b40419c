//! Arguments of kernels: numbers, addresses, and the structs that `kernels/cuda/*.cuh` declare, in their layout.

use std::ffi::c_void;
use std::mem::MaybeUninit;

/// An address in a device's memory; zero is none.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Address(pub(crate) u64);

impl Address {
    /// No address.
    pub const NONE: Address = Address(0);

    /// The address `bytes` further.
    pub fn offset(self, bytes: u64) -> Self {
        Address(self.0.wrapping_add(bytes))
    }

    /// The number.
    pub fn number(self) -> u64 {
        self.0
    }
}

/// What a kernel may take by value.
///
/// # Safety
/// The type has the size and the layout of the kernel's parameter, and an alignment of at most eight bytes.
pub unsafe trait Argument: Copy + 'static {}

/// Values that a kernel is launched with, in order of its parameters.
#[derive(Debug, Default)]
pub struct Arguments {
    values: Vec<(Box<[MaybeUninit<u64>]>, usize)>,
}

impl Arguments {
    /// Adds one.
    pub fn push<T: Argument>(&mut self, value: T) {
        const { assert!(align_of::<T>() <= 8, "arguments are aligned to eight bytes") };
        let mut memory = vec![MaybeUninit::<u64>::uninit(); size_of::<T>().div_ceil(8)].into_boxed_slice();
        // SAFETY: the memory is as large as the value and aligned to eight bytes, which the value asks for at most.
        unsafe { memory.as_mut_ptr().cast::<T>().write(value) };
        self.values.push((memory, size_of::<T>()));
    }

    /// Where each value lies, for a launch; valid while the arguments live.
    pub fn pointers(&mut self) -> Vec<*mut c_void> {
        self.values.iter_mut().map(|(memory, _)| memory.as_mut_ptr().cast()).collect()
    }

    /// The size of each, bytes.
    pub fn sizes(&self) -> Vec<usize> {
        self.values.iter().map(|(_, size)| *size).collect()
    }
}

/// The arguments of a launch, in order.
macro_rules! arguments {
    ($($value:expr),* $(,)?) => {{
        let mut arguments = $crate::cuda::arguments::Arguments::default();
        $(arguments.push($value);)*
        arguments
    }};
}
pub(crate) use arguments;

/// Dimensions of a tensor that a kernel takes at most.
pub const MOST_DIMS: usize = 10;

/// Ranks whose memory one kernel sums at most.
pub const MOST_MEMBERS: usize = 64;

/// `ithaca::Walk`: row-major indices of a shape, and where `K` tensors have each of them, in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Walk<const K: usize> {
    pub(super) n: i32,
    pub(super) extent: [i64; MOST_DIMS],
    pub(super) stride: [[i64; MOST_DIMS]; K],
}

impl<const K: usize> Default for Walk<K> {
    fn default() -> Self {
        Self { n: 0, extent: [0; MOST_DIMS], stride: [[0; MOST_DIMS]; K] }
    }
}

impl<const K: usize> Walk<K> {
    /// Elements.
    pub(super) fn size(&self) -> i64 {
        self.extent.iter().take(usize::try_from(self.n).unwrap_or(0)).product()
    }
}

/// `ithaca::Reals`: numbers whose storage a kernel is told.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Reals {
    pub(super) data: Address,
    /// 0 to 3: f64, f32, f16, bf16.
    pub(super) storage: i32,
}

/// `ithaca::kernel::Written`: results whose storage a kernel is told, numbered as for [`Reals`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Written {
    pub(super) data: Address,
    pub(super) storage: i32,
}

/// `ithaca::kernel::Sequence`: positions of tokens, three numbers for each run.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Sequence {
    pub(super) runs: Address,
    pub(super) n: i64,
}

/// `ithaca::kernel::Mask`: a band, or a table of strips.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Mask {
    pub(super) left: i64,
    pub(super) right: i64,
    pub(super) strips: Address,
}

/// `ithaca::kernel::Bias`: a bias by relative position.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Bias {
    pub(super) bounds: Address,
    pub(super) per_side: i64,
    pub(super) both_sides: bool,
    pub(super) table: Reals,
}

/// `ithaca::kernel::Dropout`: which weights are dropped.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Dropout {
    pub(super) rate: f64,
    pub(super) seed: u64,
    pub(super) key: Address,
}

/// `ithaca::kernel::Rows`: where the rows of a tensor `[front, tokens, heads, width]` begin.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rows {
    pub(super) front: i64,
    pub(super) token: i64,
    pub(super) head: i64,
    pub(super) token_run: i64,
    pub(super) token_block: i64,
    pub(super) head_run: i64,
    pub(super) head_block: i64,
}

/// `ithaca::kernel::AttentionShape`: what a rank holds of q, k and v, and how they score.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct AttentionShape {
    pub(super) front: i64,
    pub(super) queries: i64,
    pub(super) heads: i64,
    pub(super) keys: i64,
    pub(super) kv_heads: i64,
    pub(super) width: i64,
    pub(super) value_width: i64,
    pub(super) first_head: i64,
    pub(super) first_kv_head: i64,
    pub(super) group: i64,
    pub(super) dropped_head: i64,
    pub(super) sequences: Walk<1>,
    pub(super) first_sequence: i64,
    pub(super) query_positions: Sequence,
    pub(super) key_positions: Sequence,
    pub(super) valid_keys: i64,
    pub(super) mask: Mask,
    pub(super) scale: f64,
    pub(super) softcap: f64,
    pub(super) bias: Bias,
    pub(super) dropout: Dropout,
    pub(super) q: Rows,
    pub(super) k: Rows,
    pub(super) v: Rows,
    pub(super) o: Rows,
    pub(super) d_o: Rows,
    pub(super) dq: Rows,
    pub(super) dk: Rows,
    pub(super) dv: Rows,
}

/// `ithaca::kernel::Gradient`: what the backward pass of an attention gets beside q, k and v.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Gradient {
    pub(super) d_o: Reals,
    pub(super) lse: Reals,
    pub(super) delta: Reals,
}

/// `ithaca::kernel::Places`: the dimensions of a tensor with the positions held of each.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Places {
    pub(super) n: i32,
    pub(super) extent: [i64; MOST_DIMS],
    pub(super) stride: [i64; MOST_DIMS],
    pub(super) positions: [Sequence; MOST_DIMS],
}

/// `ithaca::kernel::Pieces`: parts of a tensor that lie one after another on a wire.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Pieces {
    pub(super) table: Address,
    pub(super) n: i64,
}

/// `ithaca::kernel::PiecesShape`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct PiecesShape {
    pub(super) outer: i64,
    pub(super) tokens: i64,
    pub(super) inner: i64,
}

/// `ithaca::kernel::Route`: how tokens choose experts.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Route {
    pub(super) experts: i64,
    pub(super) top: i64,
    pub(super) sigmoid: bool,
    pub(super) shares: bool,
    pub(super) scale: f64,
    pub(super) groups: i64,
    pub(super) kept: i64,
}

/// `ithaca::kernel::Slots`: where the tokens of a rank go.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Slots {
    pub(super) choices: Address,
    pub(super) top: i64,
    pub(super) groups: i64,
    pub(super) group: i64,
    pub(super) slots: i64,
    pub(super) first: i64,
    pub(super) held: i64,
    pub(super) width: i64,
}

/// `ithaca::kernel::Padding`: which rows are padding.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Padding {
    pub(super) n: i32,
    pub(super) positions: [Sequence; 2],
    pub(super) valid: [i64; 2],
    pub(super) step: [i64; 2],
    pub(super) extent: [i64; 2],
}

/// `ithaca::kernel::Labels`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Labels {
    pub(super) data: Address,
    pub(super) ignore: i64,
    pub(super) padding: Padding,
}

/// `ithaca::kernel::Vocabulary`: the part of it that a rank holds.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Vocabulary {
    pub(super) first: i64,
    pub(super) extent: i64,
    pub(super) columns: i64,
    pub(super) stride: i64,
}

/// `ithaca::kernel::AdamW`: constants of the optimizer.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct AdamW {
    pub(super) lr: f64,
    pub(super) beta1: f64,
    pub(super) beta2: f64,
    pub(super) eps: f64,
    pub(super) weight_decay: f64,
}

/// `ithaca::kernel::Members`: the same block in the memory of several ranks.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Members {
    pub(super) n: i64,
    pub(super) from: [Address; MOST_MEMBERS],
}

/// Marks types as arguments, and states their sizes in C++.
macro_rules! structs {
    ($($ty:ty: $name:literal;)*) => {
        $(
            // SAFETY: a `repr(C)` struct of numbers of at most eight bytes, declared as in the kernels' headers; its size
            // is asserted where they are compiled.
            unsafe impl Argument for $ty {}
        )*
    };
}

structs! {
    Walk<1>: "ithaca::Walk<1>";
    Walk<2>: "ithaca::Walk<2>";
    Walk<3>: "ithaca::Walk<3>";
    Reals: "ithaca::Reals";
    Written: "ithaca::kernel::Written";
    Sequence: "ithaca::kernel::Sequence";
    Mask: "ithaca::kernel::Mask";
    Bias: "ithaca::kernel::Bias";
    Dropout: "ithaca::kernel::Dropout";
    Rows: "ithaca::kernel::Rows";
    AttentionShape: "ithaca::kernel::AttentionShape";
    Gradient: "ithaca::kernel::Gradient";
    Places: "ithaca::kernel::Places";
    Pieces: "ithaca::kernel::Pieces";
    PiecesShape: "ithaca::kernel::PiecesShape";
    Route: "ithaca::kernel::Route";
    Slots: "ithaca::kernel::Slots";
    Padding: "ithaca::kernel::Padding";
    Labels: "ithaca::kernel::Labels";
    Vocabulary: "ithaca::kernel::Vocabulary";
    AdamW: "ithaca::kernel::AdamW";
    Members: "ithaca::kernel::Members";
    Address: "const void*";
    bool: "bool";
    i32: "int";
    i64: "int64_t";
    u64: "uint64_t";
    f64: "double";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_lie_where_they_say() {
        let mut arguments = arguments![3_i32, 7_i64, Reals { data: Address(9), storage: 2 }];
        assert_eq!(arguments.sizes(), [4, 8, 16]);
        let pointers = arguments.pointers();
        // SAFETY: the second value is an i64, and the arguments live.
        assert_eq!(unsafe { *pointers[1].cast::<i64>() }, 7);
        // SAFETY: the third value is what was pushed.
        assert_eq!(unsafe { *pointers[2].cast::<Reals>() }.data, Address(9));
    }
}
