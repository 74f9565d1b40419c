//! Running programs on this machine: the oracle, the runtime of schedules, and the tensors they read and write.
//!
//! - [`oracle`] interprets modules in plain loops; everything else is judged by it.
//! - [`cpu`] executes a schedule with a thread for each stream of each rank, in the buffers and by the collectives that it
//!   names.
//! - [`launch`] joins ranks in processes of their own, over TCP.
//! - [`store`] is where weights and inputs come from, [`compare`] how outputs are judged.
//!
//! Architecture invariant: this crate knows the language and no pass; a schedule or a module is all it is given.

pub mod tensor;

pub mod real;

pub mod store;

pub mod cuda;

pub mod error;

pub mod source;

pub mod lasting;

mod assemble;

mod kept;

mod place;

pub mod storage;

pub mod oracle;

pub mod cpu;

pub mod launch;

pub mod compare;

pub use error::RunError;
pub use real::Real;
pub use storage::Storage;
pub use tensor::{Outputs, Tensor};
