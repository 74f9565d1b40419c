//! A checkpoint: one safetensors file, or shards with an index that says which tensor is in which.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use indexmap::IndexMap;

use super::error::StoreError;
use super::file::{Raw, SafeTensorsFile};
use super::source::TensorSource;
use super::write::{About, Entry};
use crate::tensor::Tensor;

/// The file of a checkpoint that is not sharded.
pub const SINGLE: &str = "model.safetensors";

/// The index of a sharded checkpoint, `{"weight_map": {"tensor": "shard"}}`.
const INDEX: &str = "model.safetensors.index.json";

/// A checkpoint of one file or several.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    shards: Vec<SafeTensorsFile>,
    /// The shard of each tensor.
    of: BTreeMap<String, usize>,
}

/// Opens the tensors at `path`: a safetensors file, an index of shards, or a directory that has either.
///
/// # Errors
/// As [`Checkpoint::at`].
pub fn open(path: impl AsRef<Path>) -> Result<Box<dyn TensorSource>, StoreError> {
    Ok(Box::new(Checkpoint::at(path)?))
}

impl Checkpoint {
    /// Opens a safetensors file, an index of shards, or a directory that has either.
    ///
    /// # Errors
    /// As [`SafeTensorsFile::open`] and [`Checkpoint::open`]; a directory that has neither lacks `model.safetensors`.
    pub fn at(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        let path = path.as_ref();
        let index = path.join(INDEX);
        if path.extension().is_some_and(|e| e == "json") {
            Self::open(path)
        } else if path.is_dir() && !path.join(SINGLE).exists() && index.exists() {
            Self::open(index)
        } else if path.is_dir() {
            Ok(Self::single(SafeTensorsFile::open(path.join(SINGLE))?))
        } else {
            Ok(Self::single(SafeTensorsFile::open(path)?))
        }
    }

    /// The checkpoint that is one file.
    fn single(file: SafeTensorsFile) -> Self {
        let of = file.names().into_iter().map(|name| (name, 0)).collect();
        Self { path: file.path().to_owned(), shards: vec![file], of }
    }

    /// The metadata of the first file.
    pub fn about(&self) -> About {
        self.shards.first().map(SafeTensorsFile::about).unwrap_or_default()
    }

    /// Type and shape of a tensor.
    ///
    /// # Errors
    /// As [`SafeTensorsFile::entry`].
    pub fn entry(&self, name: &str) -> Result<Entry, StoreError> {
        self.shard(name)?.entry(name)
    }

    /// A tensor as its file has it.
    ///
    /// # Errors
    /// As [`SafeTensorsFile::raw`].
    pub fn raw(&self, name: &str) -> Result<Raw, StoreError> {
        self.shard(name)?.raw(name)
    }

    fn shard(&self, name: &str) -> Result<&SafeTensorsFile, StoreError> {
        match self.of.get(name) {
            Some(&i) => Ok(&self.shards[i]),
            None => Err(self.missing(name)),
        }
    }

    /// Opens an index and all its shards, in the same folder.
    ///
    /// # Errors
    /// [`StoreError::Io`] and [`StoreError::Corrupt`] for the index or a shard, [`StoreError::Missing`] for a tensor
    /// that its shard lacks.
    pub fn open(index: impl AsRef<Path>) -> Result<Self, StoreError> {
        let path = index.as_ref().to_owned();
        let corrupt = |reason: String| StoreError::Corrupt { path: path.clone(), format: "index", reason };
        let text = super::whole::read_document(&path).map_err(StoreError::io("open", &path))?;
        let json: serde_json::Value = serde_json::from_str(&text).map_err(|e| corrupt(e.to_string()))?;
        let map = json.get("weight_map").and_then(|m| m.as_object());
        let map = map.ok_or_else(|| corrupt("it has no `weight_map`".to_owned()))?;
        let mut shards: IndexMap<&str, SafeTensorsFile> = IndexMap::new();
        let mut of = BTreeMap::new();
        for (name, shard) in map {
            let shard =
                shard.as_str().ok_or_else(|| corrupt(format!("the shard of `{name}` is not a name")))?;
            if Path::new(shard).file_name().is_none_or(|f| f != shard) {
                return Err(corrupt(format!(
                    "the shard `{shard}` of `{name}` is not a file beside the index"
                )));
            }
            if !shards.contains_key(shard) {
                shards.insert(shard, SafeTensorsFile::open(path.with_file_name(shard))?);
            }
            let number = shards.get_index_of(shard).expect("it is open");
            if shards[number].shape(name).is_none() {
                return Err(shards[number].missing(name));
            }
            of.insert(name.clone(), number);
        }
        Ok(Self { path, shards: shards.into_values().collect(), of })
    }
}

impl TensorSource for Checkpoint {
    fn description(&self) -> String {
        self.path.display().to_string()
    }

    fn names(&self) -> Vec<String> {
        self.of.keys().cloned().collect()
    }

    fn shape(&self, name: &str) -> Option<Vec<u64>> {
        self.of.get(name).and_then(|&i| self.shards[i].shape(name))
    }

    fn read(&self, name: &str) -> Result<Tensor<f64>, StoreError> {
        self.shard(name)?.read(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Stored, write};

    #[test]
    fn shards_read_as_one() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (Tensor::new(vec![1], vec![1.0]), Tensor::new(vec![1], vec![2.0]));
        write(&dir.path().join("s1"), &[("a", Stored::F32, &a)]).unwrap();
        write(&dir.path().join("s2"), &[("b", Stored::F32, &b)]).unwrap();
        let index = dir.path().join(INDEX);
        std::fs::write(&index, r#"{"metadata": {}, "weight_map": {"a": "s1", "b": "s2"}}"#).unwrap();
        let source = open(dir.path()).unwrap();
        assert_eq!(source.names(), ["a", "b"]);
        assert_eq!(source.read("b").unwrap(), b);
        std::fs::write(&index, r#"{"weight_map": {"a": "s2"}}"#).unwrap();
        assert!(matches!(open(&index), Err(StoreError::Missing { .. })));
        std::fs::write(&index, r#"{"weight_map": {"a": "../s2"}}"#).unwrap();
        assert!(matches!(open(&index), Err(StoreError::Corrupt { .. })));
        std::fs::write(&index, "{").unwrap();
        assert!(matches!(open(&index), Err(StoreError::Corrupt { .. })));
    }
}
