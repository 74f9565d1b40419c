//! The language of Ithaca: distributed attention programs at their three levels.
//!
//! - **Program** (global): operations on whole tensors with named dimensions, see [`module`].
//! - **Per-rank program**: the same operations, every value with a [`layout`], every communication a collective.
//! - **Schedule**: tasks on streams, events and buffers at fixed offsets, see [`schedule`].
//!
//! Architecture invariant: this crate knows no device, no cluster, no file and no clock, and every other crate of
//! the workspace depends on it. A module that [`verify`](fn@verify::verify) accepts satisfies every numbered invariant.

pub mod boxes;
pub mod builder;
pub mod codes;
pub mod diagnostic;
pub mod dim;
pub mod dtype;
pub mod entity;
pub mod handles;
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
pub use mesh::{Axis, AxisId, Mesh, Rank};
pub use module::{Function, Level, Module, Node, Output, Value};
pub use ops::Op;
pub use order::Order;
pub use phase::Phase;
pub use space::Space;
pub use types::TensorType;
