//! Operations: one closed enum, declared in one table, one file per family.
//!
//! Everything that a pass may want to know of an operation is a method of [`Op`]: its declaration ([`info`](Op::info)), its
//! attributes, its result types ([`infer`](Op::infer)), its factor rule ([`rule`](Op::rule)) and its work
//! ([`cost`](Op::cost)). A new operation is a declaration in the table, and functions in its family's file.

mod adjoint;
pub mod attention;
pub mod attr;
pub(crate) mod attribute;
pub mod cache;
mod check;
pub mod coalesced;
pub mod collective;
pub(crate) mod context;
mod cost;
pub(crate) mod declare;
mod elementwise;
pub(crate) mod error;
pub mod experts;
mod fused;
mod gradient;
mod gradients;
mod infer;
pub(crate) mod info;
mod linear;
mod loss;
mod norm;
mod optimizer;
mod partial;
mod parts;
pub mod random;
mod reference;
mod repeat;
mod results;
mod rotary;
mod rotate_append;
mod rule;
mod sink;
pub mod source;
pub mod state;
pub mod structure;
pub(crate) mod table;
mod window;

pub use attention::AttentionDims;
pub use attr::{Attr, Attrs};
pub use cache::{Cache, RotateAppend};
pub use check::sums_in;
pub use context::{Context, Types};
pub use cost::Cost;
pub use error::OpError;
pub use gradients::{Gradients, cast};
pub use info::{AttrInfo, Class, Family, Flops, OpInfo, Unit};
pub use reference::reference;
pub use rotate_append::Appended;
pub use table::attention::{Attention, Dropout, Keyed, Movement, RelativeBias, Returns, Sides};
pub use table::elementwise::{Binary, Unary};
pub use table::experts::Experts;
pub use table::fused::Fused;
pub use table::op::{MAX_COALESCED, MAX_PARTS, Op, TABLE};
pub use table::random::Random;
pub use table::rotary::{Direction, Pairs, Rotary, Scaling};
pub use table::source::{Binding, Target};
pub use table::structure::{Scan, ScanOrder, Stage};
pub use table::training::{AdamW, Gradient, Loss, Optimizer};
pub use table::window::Window;
