//! Scaled dot-product attention, forward and backward, in plain loops.

mod backward;
mod extent;
mod forward;
mod score;
mod scores;

pub(crate) use backward::Gradient;
pub(super) use backward::attention_backward;
pub use extent::{Extent, joined};
pub(crate) use extent::{check, with_scales};
pub(super) use forward::attention;
pub(crate) use score::Bias;
pub(super) use scores::{scores, weigh};
