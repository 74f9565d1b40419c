//! The attributes of sources and assignments.

use std::ops::Range;

use crate::ops::declare::{attributes, words};

attributes! {
    /// The place of a source's elements in a file of tensors.
    ///
    /// The stored tensor is seen as `view`, cut to `window` and read in row-major order as the dimensions of the type, at
    /// their valid sizes; a dimension that copies another reads that one and repeats. So `q_proj.weight` stored
    /// `[4096, 4096]` is bound to `[h d m]`, one third of a fused `c_attn.weight` is a window, and where queries, keys and
    /// values alternate head by head, one of them is a window of the view `[h, 3, d, m]`.
    ///
    /// A name with `{expert}` is that of many tensors, one for each index of the first stored dimension; `stored`, `view`
    /// and `window` apply to their stack.
    #[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
    pub struct Binding {
        /// The name of the stored tensor; `{layer}` stands for the layer of the call, `{layer+1}` for the one after it, `{expert}`
        /// for the index of an expert.
        pub name: String,
        /// The stored shape; the shape of the type when left out.
        pub stored: Vec<u64> = Vec::new(),
        /// The shape as which the stored elements are seen, row-major as they are; `stored` when left out.
        pub view: Vec<u64> = Vec::new(),
        /// The range of each dimension of the view that is read; everything when left out.
        pub window: Vec<Range<u64>> = Vec::new(),
        /// An index of the last dimension of the type reads the element this many places further on, as labels do that are
        /// the tokens themselves.
        pub ahead: u64 = 0,
        /// The value in padding, and beyond the end.
        pub fill: i64 = 0,
        /// Whether the state is in the memory of the host: a copy (`upload`) is read, and an assigned value is copied there.
        pub host: bool = false,
    }
}

words! {
    /// The kind of tensor that an assignment writes.
    #[derive(PartialOrd, Ord, Hash)]
    pub enum Target {
        /// A weight, as `param` reads it.
        Param = "param",
        /// A state, as `state` reads it.
        State = "state",
    }
}
