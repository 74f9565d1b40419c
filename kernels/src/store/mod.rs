//! Where weights and inputs come from: tensors by name.
//!
//! A source answers with `f64` whatever it stores, so that nothing is lost before the reader rounds: every stored
//! element type that is accepted fits exactly, 64-bit integers up to 2^53.

pub(crate) mod error;
mod source;

mod checkpoint;
mod file;
mod layered;
mod memory;
mod microscaled;
mod random;
mod renamed;
mod scaled;
mod stored;
mod whole;
mod write;

pub mod shards;
pub mod training;

pub use error::StoreError;
pub use source::TensorSource;

pub use checkpoint::{Checkpoint, SINGLE, open};
pub use file::{Raw, SafeTensorsFile};
pub use layered::Layered;
pub use memory::Tensors;
pub use random::RandomTensors;
pub use renamed::{MODEL_PREFIXES, Renamed};
pub use stored::Stored;
pub use whole::WholeFile;
pub use write::{About, Entry, Writer, check_writable, write, write_about};
