//! Random numbers and dropout.

use crate::ops::declare::ops;

ops! {
    /// Operations that draw random numbers.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub enum Random {
        family Random {
            /// The key of a seed, one `i32`; a training step folds its number into it.
            Key {
                /// The seed of the key.
                seed: u64,
            } = "key", "-> key", Compute, Vector, Zero;
            /// A key for each whole number, which is `i32` or real.
            FoldIn = "fold_in", "key, number -> key", Compute, Vector, Zero;
            /// The key of the layer that runs: its number, folded into the key of all layers.
            LayerKey = "layer_key", "key -> key", Compute, Vector, Zero;
            /// One where an element is kept, drawn by its position along each dimension; one byte for each element.
            DropoutMask {
                /// The share of elements that are dropped.
                rate: f64,
                /// Distinguishes the mask from others that are drawn from the same key.
                seed: u64,
            } = "dropout_mask", "key -> any", Compute, Vector, Zero;
            /// x where the mask is one, divided by the share that is kept; zero elsewhere.
            Dropout {
                /// The share of elements that are dropped.
                rate: f64,
            } = "dropout", "x, x -> x", Compute, Vector, Results(2);
        }
    }
}
