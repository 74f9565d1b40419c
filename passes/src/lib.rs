//! Every pass under one roof: the crates of the passes, the pipelines that name them, and the table of their codes.
//!
//! | crate | from | to |
//! |---|---|---|
//! | [`import`] | a model's description and a workload | a program |
//! | [`differentiate`] | a program with a loss | a training step |
//! | `ithaca-layout` ([`shard`], [`reshard`], [`fuse`], [`mod@lower`], …) | a program | what one rank runs, and its schedule |
//! | [`frameworks`] | a layout | what Megatron-LM, vLLM and others read |
//! | `ithaca-plan` ([`simulate`](mod@simulate), [`planner`], …) | a cluster and a program | a plan |
//!
//! Each knows [`pass`], which says what a pass is, and only the crates above it in the table.

pub mod codes;
pub mod pipeline;

#[cfg(test)]
mod tests;

pub use ithaca_differentiate as differentiate;
pub use ithaca_frameworks as frameworks;
pub use ithaca_import as import;
pub use ithaca_layout::{
    compile, fuse, lower, lower_movements, movement, registry, reshard, rules, shard, strategy,
};
pub use ithaca_pass as pass;
pub use ithaca_pass::{rebuild, roles};
pub use ithaca_plan::{calibrate, cluster, cost, memory, plan, planner, proof, report, serve, simulate};
