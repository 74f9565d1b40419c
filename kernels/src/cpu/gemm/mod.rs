//! Matrix products in blocks that fit in caches (Goto and van de Geijn, Anatomy of High-Performance Matrix
//! Multiplication, 2008): both matrices are packed, and small products of [`simd`](super::simd) do the rest.

mod buffer;
mod einsum;
mod pack;
mod product;
mod vector;
mod view;

pub(super) use buffer::Buffer;
pub(super) use einsum::{accumulate, einsum};
pub use pack::Element;
pub(super) use pack::pack;
pub(super) use product::multiply;
pub(super) use view::View;

pub(super) use super::simd::Update;
