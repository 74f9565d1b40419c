//! Ithaca: a compiler for distributed attention.
//!
//! A model description, a cluster and a workload go in; a checked parallel plan and an executable schedule come out.
//! This package ties the others together: [`subject`] finds the subject of a command, [`commands`] runs the command;
//! [`api`] has commands as functions, for programs that embed Ithaca.
//! Only [`shell`] prints or reads the environment.

pub mod api;
pub mod cli;
pub mod codes;
pub mod commands;
pub mod error;
pub mod evaluate;
pub mod files;
pub mod ineffective;
pub mod job;
pub mod kind;
pub mod request;
pub mod shell;
pub mod shrink;
pub mod subject;

pub use ithaca_codegen as codegen;
pub use ithaca_ir as ir;
pub use ithaca_kernels as kernels;
pub use ithaca_passes as passes;
