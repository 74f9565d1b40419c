//! Handles of functions and values, and ranges of layers.

use std::ops::Range;

use crate::entity;

entity!(
    /// A value of a [`Function`](crate::Function).
    ValueId, "%"
);
entity!(
    /// A function of a [`Module`](crate::Module).
    FuncId, "@"
);

/// The layers a call runs over, as `{layer}` in the names of parameters.
pub type Layers = Range<u64>;

/// The largest number of layers of a call.
pub const MAX_LAYERS: u64 = 65_536;
