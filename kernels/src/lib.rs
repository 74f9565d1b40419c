//! Running programs on this machine: the oracle, the runtime of schedules, and the tensors they read and write.
//!
//! - [`oracle`] interprets modules in plain loops; all other results are compared with it.
//! - [`cpu`] executes a schedule with a thread for each stream of each rank, in the buffers and by the collectives that it
//!   names.
//! - [`launch`] connects ranks in processes of their own, over TCP.
//! - [`store`] reads weights and inputs, [`compare`] compares them with expected ones, [`step_checker`] with a whole program.
//!
//! Architecture invariant: this crate knows the language and no pass; its input is a schedule or a module.
//!
//! ```
//! use ithaca_kernels::oracle;
//! use ithaca_kernels::store::RandomTensors;
//!
//! let source = r#"
//! ithaca 1 program
//! model "a sum"
//! dim s = 8
//!
//! func @main() {
//!   %x = input {name="x"} : f32[s]
//!   %y = add %x, %x : f32[s]
//!   %z = add %y, %x : f32[s]
//!   return y = %y, z = %z
//! }
//! "#;
//! let module = ithaca_ir::text::parse(source).expect("the text is well formed");
//! let random = RandomTensors::of_module(&module, 7);
//! let outputs = oracle::run::<f64>(&module, &random, &random).expect("a whole program");
//! assert!((outputs["z"].data[3] - 1.5 * outputs["y"].data[3]).abs() < 1e-12);
//! ```

pub mod tensor;

pub mod real;

pub mod store;

pub mod cuda;

pub mod error;

pub mod source;

pub mod persistent;

pub mod handover;

mod assemble;

mod digest;

mod updates;

mod positions;

pub mod storage;

pub mod oracle;

pub mod cpu;

pub mod launch;

pub mod compare;

pub mod step_checker;

pub use error::RunError;
pub use real::Real;
pub use storage::Storage;
pub use tensor::{Outputs, Tensor};
