//! Checkpoints of training, from which a run continues.
//!
//! One safetensors file with every weight of the program and every state of its optimizer (moments, weights in full
//! precision, the count of steps) under their stored names; no gradients, which every step computes. So it is a
//! checkpoint of the model as well, and independent of the plan of the run. Numbers are stored bit for bit as in the run: in
//! their own type, or in single precision where the run did not round narrow types.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use ithaca_ir::DType;
use ithaca_ir::ops::{Target, state};
use ithaca_ir::schedule::Schedule;

use super::checkpoint::{Checkpoint, SINGLE};
use super::error::StoreError;
use super::source::TensorSource;
use super::stored::Stored;
use super::write::{About, write_about};
use crate::error::RunError;
use crate::persistent;
use crate::storage::Storage;
use crate::tensor::{Outputs, Tensor};

/// The metadata key of checkpoints of training.
const KEY: &str = "ithaca.checkpoint";

/// The version that is read and written.
const VERSION: &str = "1";

/// How many names a message lists.
const LISTED: usize = 3;

/// Why training could not be saved or resumed.
#[derive(Debug, thiserror::Error)]
pub enum TrainingError {
    /// A tensor or a file could not be read or written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The schedule contradicts itself.
    #[error(transparent)]
    Schedule(#[from] RunError),
    /// The program updates nothing.
    #[error("the program is not a training step: it writes neither weights nor states of an optimizer")]
    NoTraining,
    /// A folder whose model was not saved by training.
    #[error("{} is not a checkpoint of training, and is not replaced by one unless it is named", .0.display())]
    Model(PathBuf),
    /// Another version.
    #[error("{} is a checkpoint of version {found}; version {VERSION} is read", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: String,
    },
    /// Tensors that the program does not have.
    #[error("{} has {} that the program does not have: {}", path.display(), tensors(names.len()), listed(names))]
    Unknown {
        /// The file.
        path: PathBuf,
        /// Their names.
        names: Vec<String>,
    },
    /// Tensors that the program needs.
    #[error("{} lacks {} that the program continues from: {}", path.display(), tensors(names.len()), listed(names))]
    Lacks {
        /// The file.
        path: PathBuf,
        /// Their names.
        names: Vec<String>,
    },
}

fn tensors(n: usize) -> String {
    if n == 1 { "a tensor".to_owned() } else { format!("{n} tensors") }
}

fn listed(names: &[String]) -> String {
    let shown = names.iter().take(LISTED).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    if names.len() > LISTED { format!("{shown}, …") } else { shown }
}

/// A checkpoint of training that goes with a program.
#[derive(Debug)]
pub struct Resumed {
    /// Weights and states; weights that the program does not change may be missing.
    pub tensors: Checkpoint,
    /// Steps that were taken, if the optimizer counts them.
    pub step: Option<u64>,
}

/// The file of a checkpoint named `path`: the path itself, or `model.safetensors` in it if it is a folder.
///
/// # Errors
/// Before any work is done: [`TrainingError::NoTraining`], [`TrainingError::Model`] for a folder with another model, and
/// [`StoreError::Io`] where nothing can be written.
pub fn target(path: &Path, schedule: &Schedule) -> Result<PathBuf, TrainingError> {
    check_training(schedule)?;
    let is_folder = path.is_dir() || path.as_os_str().to_string_lossy().ends_with('/');
    let file = if is_folder { path.join(SINGLE) } else { path.to_owned() };
    super::check_writable(&file)?;
    if is_folder && file.exists() {
        let of_training = Checkpoint::at(&file).is_ok_and(|c| c.about().contains_key(KEY));
        if !of_training {
            return Err(TrainingError::Model(file));
        }
    }
    Ok(file)
}

/// Writes the checkpoint after a run of `schedule`: its `updated` tensors, and the weights that it did not change, from
/// `before`.
///
/// # Errors
/// [`StoreError`]; `path` is then unchanged.
pub fn save(
    path: &Path,
    schedule: &Schedule,
    updated: &Outputs<f32>,
    before: &dyn TensorSource,
    storage: Storage,
) -> Result<(), TrainingError> {
    let mut tensors: BTreeMap<String, (Stored, Tensor<f64>)> = BTreeMap::new();
    for one in persistent::tensors(schedule)?.iter().filter(|one| !one.is_gradient()) {
        for (name, _) in one.stored(&schedule.space) {
            if tensors.contains_key(&name) {
                continue;
            }
            let tensor = match updated.get(&name) {
                Some(tensor) => tensor.map(f64::from),
                // The run had it in single precision.
                None => before.read(&name)?.map(|x| f64::from(x as f32)),
            };
            tensors.insert(name, (held_as(one.ty.dtype, storage), tensor));
        }
    }
    let about: About = [(KEY, VERSION), ("format", "pt")].map(|(k, v)| (k.to_owned(), v.to_owned())).into();
    let tensors: Vec<_> = tensors.iter().map(|(name, (stored, t))| (name.as_str(), *stored, t)).collect();
    Ok(write_about(path, &about, &tensors)?)
}

/// The stored type of a run's values of type `dtype`.
fn held_as(dtype: DType, storage: Storage) -> Stored {
    match (storage, dtype) {
        (Storage::Wide, DType::F16 | DType::BF16 | DType::F8E4M3) => Stored::F32,
        (Storage::Wide | Storage::AsTyped, dtype) => Stored::of(dtype),
    }
}

/// Opens a checkpoint for a program to continue from.
///
/// # Errors
/// [`TrainingError`]: names that the program does not have, states or trained weights that are missing,
/// [`StoreError::Shape`] where one has another shape.
pub fn resume(path: &Path, schedule: &Schedule) -> Result<Resumed, TrainingError> {
    check_training(schedule)?;
    let file = Checkpoint::at(path)?;
    if let Some(found) = file.about().get(KEY).filter(|&version| version != VERSION) {
        return Err(TrainingError::Version { path: path.to_owned(), found: found.clone() });
    }
    let mut known = BTreeSet::new();
    let mut lacks = BTreeSet::new();
    for one in persistent::tensors(schedule)?.iter().filter(|one| !one.is_gradient()) {
        for (name, expected) in one.stored(&schedule.space) {
            match file.shape(&name) {
                Some(found) if found != expected => {
                    let store = file.description();
                    return Err(StoreError::Shape { store, name, found, expected }.into());
                }
                None if one.target == Target::State || one.is_written => {
                    lacks.insert(name.clone());
                }
                Some(_) | None => {}
            }
            known.insert(name);
        }
    }
    let unknown: Vec<String> = file.names().into_iter().filter(|name| !known.contains(name)).collect();
    if !unknown.is_empty() {
        return Err(TrainingError::Unknown { path: path.to_owned(), names: unknown });
    }
    if !lacks.is_empty() {
        return Err(TrainingError::Lacks { path: path.to_owned(), names: lacks.into_iter().collect() });
    }
    let step = match file.shape(state::STEP) {
        Some(_) => file.read(state::STEP)?.data.first().map(|&step| step as u64),
        None => None,
    };
    Ok(Resumed { tensors: file, step })
}

fn check_training(schedule: &Schedule) -> Result<(), TrainingError> {
    let lasting = persistent::tensors(schedule)?;
    if lasting.iter().any(|one| one.is_written && !one.is_gradient()) {
        Ok(())
    } else {
        Err(TrainingError::NoTraining)
    }
}
