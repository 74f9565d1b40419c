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
//!
//! ```
//! use ithaca_passes::cluster::Cluster;
//! use ithaca_passes::compile::compile;
//! use ithaca_passes::import::{Workload, import};
//! use ithaca_passes::shard::{ShardOptions, parse_mesh};
//!
//! let config = serde_json::json!({
//!     "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
//!     "num_attention_heads": 8, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
//!     "max_position_embeddings": 512, "vocab_size": 100, "hidden_act": "silu", "torch_dtype": "bfloat16",
//! });
//! let program = import(&config, "a small llama", &Workload::prefill(1, 512)).expect("a known family");
//! let options = ShardOptions::new("ulysses", parse_mesh("ulysses=4").expect("a mesh"));
//! let prices = Cluster::named("dgx-h100").expect("a profile");
//! let compiled = compile(&program, &options, &prices).expect("8 and 4 heads divide by 4");
//! assert_eq!(compiled.schedule.space.mesh.ranks(), 4);
//! ```

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
