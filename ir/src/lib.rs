//! The language of Ithaca: distributed attention programs at their three levels.
//!
//! - **Program** (global): operations on whole tensors with named dimensions, see [`module`].
//! - **Per-rank program**: the same operations, every value with a [`layout`], every communication a collective.
//! - **Schedule**: tasks on streams, events and buffers at fixed offsets, see [`schedule`].
//!
//! Architecture invariant: this crate knows no device, no cluster, no file and no clock, and every other crate of
//! the workspace depends on it. A module that [`verify`](fn@verify::verify) accepts satisfies every numbered invariant.
//!
//! ```
//! use ithaca_ir::{text, traffic, verify};
//!
//! // One rank of two: its half of the tokens becomes half of the heads.
//! let source = r#"
//! ithaca 1 per_rank
//! model "an exchange"
//! mesh ulysses=2
//! dim s = 8
//! dim h = 4
//!
//! func @main() {
//!   %x = input {name="x"} : f32[s@ulysses h]
//!   %y = all_to_all %x {axis=ulysses, split=h, concat=s} : f32[s h@ulysses]
//!   return y = %y
//! }
//! "#;
//! let module = text::parse(source).expect("the text is well formed");
//! verify::verify(&module).expect("the layouts agree");
//! // 4 tokens of 4 heads are 64 bytes, and each rank keeps half of them.
//! assert_eq!(traffic::of_module(&module)[0].bytes_sent_per_rank, 32);
//! ```

pub mod boxes;
pub mod builder;
pub mod codes;
pub mod diagnostic;
pub mod dim;
pub mod dtype;
pub mod entity;
pub mod handles;
pub mod handover;
mod identifier;
pub mod layers;
pub mod layout;
pub mod mask;
pub mod mesh;
pub mod message;
pub mod module;
pub mod ops;
pub mod order;
pub mod phase;
pub mod rule;
pub mod schedule;
pub mod space;
mod spelling;
pub mod strided;
pub mod text;
pub mod timeline;
pub mod traffic;
pub mod types;
pub mod units;
pub mod verify;
pub mod wrap;

pub use builder::FunctionBuilder;
pub use diagnostic::{Diagnostic, Diagnostics, Source, Span};
pub use dim::{Dim, DimId, Fetched, Part};
pub use dtype::DType;
pub use entity::Arena;
pub use handles::{FuncId, ValueId};
pub use layout::Layout;
pub use mask::Mask;
pub use mesh::{Axes, Axis, AxisId, Mesh, Rank};
pub use module::{Function, Level, Module, Node, Output, Value};
pub use ops::Op;
pub use order::Order;
pub use phase::Phase;
pub use space::Space;
pub use types::TensorType;
