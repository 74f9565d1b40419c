//! The movements that come with Ithaca.

use super::{Movement, balance, fetch, gather, reduce, rotate, two_pass};

/// Every movement, in the order of the documentation.
pub const MOVEMENTS: &[&dyn Movement] = &[
    &gather::Gather,
    &rotate::Rotate,
    &rotate::RotateQueries,
    &two_pass::TwoPass,
    &balance::Balance,
    &fetch::Fetch,
    &fetch::Halo,
    &fetch::Streaming,
    &reduce::Reduce,
];
