//! Ithaca: a compiler for distributed attention.
//!
//! A model description, a cluster and a workload go in; a checked parallel plan and an executable schedule come out.
//! This package ties the others together: [`subject`] finds the subject of a command, [`commands`] runs the command;
//! [`api`] has commands as functions, for programs that embed Ithaca.
//! Only [`shell`] prints or reads the environment.
//!
//! ```
//! use ithaca::passes::cluster::Cluster;
//! use ithaca::passes::import::Workload;
//! use ithaca::passes::plan::Model;
//! use ithaca::passes::planner::Request;
//! use ithaca::passes::registry::Registry;
//! use ithaca::request::PlanRequest;
//!
//! let config = serde_json::json!({
//!     "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
//!     "num_attention_heads": 8, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
//!     "max_position_embeddings": 8192, "vocab_size": 1000, "hidden_act": "silu", "torch_dtype": "bfloat16",
//! });
//! let request = PlanRequest {
//!     model: Model::new("a small llama", config),
//!     cluster: Cluster::named("dgx-h100").expect("a profile"),
//!     workload: Workload::prefill(1, 8192),
//!     gpus: 4,
//!     search: Request::new(4).search(),
//! };
//! let plan = request.plan(&Registry::default()).unwrap_or_else(|failure| panic!("{}", failure.render()));
//! assert_eq!(plan.mesh.iter().map(|axis| axis.size).product::<u64>(), 4);
//! ```

pub mod api;
pub mod cli;
pub mod codes;
pub mod commands;
pub mod error;
pub mod evaluate;
pub mod exit_codes;
pub mod files;
mod host_pages;
pub mod ineffective;
pub mod job;
pub mod kind;
pub mod project;
pub mod request;
pub mod shell;
pub mod shrink;
pub mod subject;

pub use ithaca_codegen as codegen;
pub use ithaca_ir as ir;
pub use ithaca_kernels as kernels;
pub use ithaca_passes as passes;
