//! Two tensors side by side, and a window of one.

use crate::dim::DimId;
use crate::ops::declare::ops;

ops! {
    /// Operations on parts of a dimension.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Window {
        family Elementwise {
            /// The elements of x and then those of y along the last dimension; y may lack dimensions of x.
            Concat {
                /// The last dimension of the result, as long as those of the operands together.
                over: DimId,
            } = "concat", "x a, x b -> x c", Compute, Vector, Zero;
            /// A window of the last dimension.
            Cut {
                /// The last dimension of the result.
                to: DimId,
                /// The first element of the window.
                start: u64,
            } = "cut", "x c -> x a", Compute, Vector, Zero;
        }
    }
}
