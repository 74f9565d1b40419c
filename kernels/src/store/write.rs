//! Writes tensors: a file is whole when it is seen.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::error::StoreError;
use super::stored::Stored;
use super::whole::WholeFile;
use crate::tensor::{Tensor, index};
use safetensors::Dtype;
use serde_json::{Map, Value, json};

/// The metadata of a file.
pub type About = BTreeMap<String, String>;

/// A tensor of a file, without its elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The name.
    pub name: String,
    /// The element type.
    pub stored: Stored,
    /// The shape.
    pub shape: Vec<u64>,
}

impl Entry {
    /// The sort key of the tensors of a file: wide types first, so that all are aligned, then names.
    pub fn order(&self) -> (Reverse<Dtype>, &str) {
        (Reverse(self.stored.dtype()), &self.name)
    }

    /// Bytes of the elements.
    ///
    /// # Panics
    /// When they exceed the address space; a tensor in memory never does.
    pub fn bytes(&self) -> usize {
        self.shape.iter().map(|&n| index(n)).product::<usize>() * self.stored.bytes()
    }
}

/// A safetensors file in the making.
///
/// Nothing is seen at its path before [`finish`](Self::finish); dropped, it leaves nothing.
#[derive(Debug)]
pub struct Writer {
    path: PathBuf,
    out: BufWriter<WholeFile>,
    /// Where each tensor begins in the file, and its bytes; `None` once it is written.
    expected: Vec<Option<(u64, usize)>>,
    /// Where the next bytes are written.
    position: u64,
}

impl Writer {
    /// Begins a file of these tensors, in this order.
    ///
    /// # Errors
    /// [`StoreError::Io`] when the folder is missing or cannot be written to.
    pub fn create(path: &Path, about: &About, entries: &[Entry]) -> Result<Self, StoreError> {
        let io = StoreError::io("write", path);
        let mut header = Map::new();
        if !about.is_empty() {
            header.insert("__metadata__".to_owned(), json!(about));
        }
        let mut end = 0;
        for entry in entries {
            let (start, Entry { name, stored, shape }) = (end, entry);
            end += entry.bytes();
            let info = json!({"dtype": stored, "shape": shape, "data_offsets": [start, end]});
            header.insert(name.clone(), info);
        }
        let mut header = Value::Object(header).to_string().into_bytes();
        header.resize(header.len().next_multiple_of(8), b' ');
        let mut out = BufWriter::new(WholeFile::create(path).map_err(&io)?);
        out.write_all(&(header.len() as u64).to_le_bytes()).map_err(&io)?;
        out.write_all(&header).map_err(&io)?;
        let position = 8 + header.len() as u64;
        let mut start = position;
        let expected = entries.iter().map(|entry| {
            let bytes = entry.bytes();
            start += bytes as u64;
            Some((start - bytes as u64, bytes))
        });
        Ok(Self { path: path.to_owned(), out, expected: expected.collect(), position })
    }

    /// Writes the elements of the next tensor that is still to come, little-endian, row-major.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    ///
    /// # Panics
    /// When they are not as many bytes as its entry says: a bug of the caller.
    pub fn append(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        let next = self.expected.iter().position(Option::is_some).expect("a tensor is still to come");
        self.put(next, bytes)
    }

    /// Writes the elements of a tensor, by its place in the order.
    ///
    /// # Errors
    /// As [`append`](Self::append).
    ///
    /// # Panics
    /// As [`append`](Self::append), and when it was written before.
    pub fn put(&mut self, tensor: usize, bytes: &[u8]) -> Result<(), StoreError> {
        let (start, expected) = self.expected[tensor].take().expect("each tensor is written once");
        assert_eq!(bytes.len(), expected, "a tensor has the bytes that the header says");
        let io = StoreError::io("write", &self.path);
        if self.position != start {
            self.out.seek(SeekFrom::Start(start)).map_err(&io)?;
        }
        self.position = start + bytes.len() as u64;
        self.out.write_all(bytes).map_err(io)
    }

    /// Gives the file its name.
    ///
    /// # Errors
    /// [`StoreError::Io`]; nothing is left at the path then that was not there before.
    ///
    /// # Panics
    /// When tensors are still to come: a bug of the caller.
    pub fn finish(self) -> Result<(), StoreError> {
        assert!(self.expected.iter().all(Option::is_none), "all tensors of the header were written");
        let Self { path, out, expected: _, position: _ } = self;
        let file = out.into_inner().map_err(std::io::IntoInnerError::into_error);
        file.and_then(|file| file.keep().and_then(|()| file.finish())).map_err(StoreError::io("write", &path))
    }
}

/// Writes tensors to a safetensors file at `path`, each rounded to its stored type.
///
/// # Errors
/// [`StoreError::Io`]; nothing is left at `path` then that was not there before.
pub fn write(path: &Path, tensors: &[(&str, Stored, &Tensor<f64>)]) -> Result<(), StoreError> {
    write_about(path, &About::new(), tensors)
}

/// As [`write`](fn@write), with metadata.
///
/// # Errors
/// As [`write`](fn@write).
pub fn write_about(
    path: &Path,
    about: &About,
    tensors: &[(&str, Stored, &Tensor<f64>)],
) -> Result<(), StoreError> {
    let entry = |&(name, stored, tensor): &(&str, Stored, &Tensor<f64>)| Entry {
        name: name.to_owned(),
        stored,
        shape: tensor.shape.iter().map(|&n| n as u64).collect(),
    };
    let mut all: Vec<_> = tensors.iter().map(|t| (entry(t), t.2)).collect();
    all.sort_by(|a, b| a.0.order().cmp(&b.0.order()));
    let (entries, tensors): (Vec<Entry>, Vec<&Tensor<f64>>) = all.into_iter().unzip();
    let mut file = Writer::create(path, about, &entries)?;
    for (entry, tensor) in entries.iter().zip(tensors) {
        file.append(&entry.stored.encode(&tensor.data))?;
    }
    file.finish()
}

/// Says before long work whether a file could be written at `path` after it.
///
/// # Errors
/// [`StoreError::Io`] as [`Writer::create`] would have it.
pub fn check_writable(path: &Path) -> Result<(), StoreError> {
    WholeFile::check(path).map_err(StoreError::io("write", path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::SafeTensorsFile;

    #[test]
    fn a_file_is_seen_when_it_is_whole_and_says_what_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        let about: About = [("format".to_owned(), "pt".to_owned())].into();
        let entries = [Entry { name: "a".to_owned(), stored: Stored::BF16, shape: vec![2, 1] }];
        let dropped = Writer::create(&path, &about, &entries).unwrap();
        drop(dropped);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        let mut file = Writer::create(&path, &about, &entries).unwrap();
        file.append(&[1, 2, 3, 4]).unwrap();
        assert!(!path.exists());
        file.finish().unwrap();
        let file = SafeTensorsFile::open(&path).unwrap();
        assert_eq!((file.about(), file.raw("a").unwrap().bytes), (about, vec![1, 2, 3, 4]));
    }

    #[test]
    fn a_folder_that_is_not_there_is_an_error_with_the_path() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("absent/x.safetensors");
        let error = check_writable(&path).unwrap_err().to_string();
        assert!(error.contains("absent/x.safetensors"), "{error}");
        assert_eq!(Writer::create(&path, &About::new(), &[]).unwrap_err().to_string(), error);
    }
}
