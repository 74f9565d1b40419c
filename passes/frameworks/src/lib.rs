//! Training and serving frameworks: which layouts each can run, and how it spells them.
//!
//! A framework is a row of functions: the rules that a layout must meet ([`check`]), the nearest layout that meets them
//! ([`nearest`]), the order in which it numbers ranks ([`Permutation`]), its names of the choices ([`settings`]) and the text
//! that it reads ([`export()`]). The planner asks the same rules when a plan is for one framework only. [`megatron_args`] reads a
//! Megatron-LM command line back.
//!
//! Guarantees: an export runs the layout of the plan, or states each difference. A choice that the framework lacks is refused
//! with the reason.
//!
//! Not here: reading plans, prices.

mod accelerate;
mod change;
mod comment;
mod context;
mod deepspeed;
mod export;
mod framework;
mod layout;
mod megatron;
pub mod megatron_args;
mod megatron_text;
mod nearest;
mod order;
mod rules;
mod schedule;
mod serving;
mod setting;
mod shell;
mod titan;
mod transformer_engine;

pub use change::{Change, Refusal};
pub use comment::Subject;
pub use export::{Export, export};
pub use framework::{Framework, check, prepare, settings};
pub use layout::{Axis, Layout, Role, TokenOrder, UnsupportedOption};
pub use nearest::nearest;
pub use order::Permutation;
pub use setting::{Setting, row};

#[cfg(test)]
mod tests;
