//! One file in the safetensors format: a JSON header, then the tensors.
//!
//! Only the header is held in memory; a tensor is read on request.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use safetensors::tensor::{Metadata, TensorInfo};

use super::error::StoreError;
use super::source::TensorSource;
use super::stored::Stored;
use super::write::{About, Entry};
use crate::tensor::{Tensor, index};

/// The longest header that is read, bytes; the format's own limit.
const MAX_HEADER: u64 = 100_000_000;

/// Bytes of the length in front of the header.
const LENGTH_BYTES: u64 = 8;

/// An open safetensors file.
#[derive(Debug)]
pub struct SafeTensorsFile {
    path: PathBuf,
    metadata: Metadata,
    data_start: u64,
}

/// A tensor as a file has it, bit for bit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Raw {
    /// The element type.
    pub stored: Stored,
    /// The shape.
    pub shape: Vec<u64>,
    /// The elements, little-endian, row-major.
    pub bytes: Vec<u8>,
}

impl SafeTensorsFile {
    /// Opens a file and checks its header against its length.
    ///
    /// # Errors
    /// [`StoreError::Io`] when it cannot be opened or read, [`StoreError::Corrupt`] when it is cut off or not of the
    /// format.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        let path = path.as_ref();
        let corrupt =
            |reason: String| StoreError::Corrupt { path: path.to_owned(), format: "safetensors", reason };
        let io = StoreError::io("open", path);
        // A pipe would wait for its writer when it is opened.
        let about = std::fs::metadata(path).map_err(&io)?;
        if about.is_dir() {
            return Err(io(std::io::Error::from(std::io::ErrorKind::IsADirectory)));
        }
        if !about.is_file() {
            return Err(corrupt("it is a device or a pipe, and not a file".to_owned()));
        }
        let mut file = File::open(path).map_err(&io)?;
        if about.len() < LENGTH_BYTES {
            return Err(corrupt(format!(
                "it has {} bytes, fewer than the 8 of a header's length",
                about.len()
            )));
        }
        let mut length = [0; LENGTH_BYTES as usize];
        file.read_exact(&mut length).map_err(&io)?;
        let length = u64::from_le_bytes(length);
        if length > MAX_HEADER || length > about.len() - LENGTH_BYTES {
            return Err(corrupt(format!("its header claims {length} bytes of a file of {}", about.len())));
        }
        let mut header = vec![0; usize::try_from(length).expect("a header fits in memory")];
        file.read_exact(&mut header).map_err(&io)?;
        let metadata: Metadata = serde_json::from_slice(&header)
            .map_err(|e| corrupt(format!("its header does not parse: {e}")))?;
        let data_start = LENGTH_BYTES + length;
        let expected = data_start.saturating_add(metadata.data_len() as u64);
        if expected != about.len() {
            return Err(corrupt(format!(
                "its header describes {expected} bytes, but the file has {}; it may be cut off",
                about.len()
            )));
        }
        Ok(Self { path: path.to_owned(), metadata, data_start })
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The metadata of the file.
    pub fn about(&self) -> About {
        self.metadata.metadata().iter().flatten().map(|(key, value)| (key.clone(), value.clone())).collect()
    }

    /// Type and shape of a tensor.
    ///
    /// # Errors
    /// [`StoreError::Missing`], [`StoreError::UnsupportedType`].
    pub fn entry(&self, name: &str) -> Result<Entry, StoreError> {
        let info = self.info(name)?;
        let stored = Stored::parse(info.dtype).ok_or_else(|| StoreError::UnsupportedType {
            store: self.description(),
            name: name.to_owned(),
            dtype: info.dtype.to_string(),
        })?;
        Ok(Entry { name: name.to_owned(), stored, shape: info.shape.iter().map(|&n| n as u64).collect() })
    }

    /// A tensor as the file has it.
    ///
    /// # Errors
    /// As [`entry`](Self::entry), and [`StoreError::Io`].
    pub fn raw(&self, name: &str) -> Result<Raw, StoreError> {
        let Entry { name: _, stored, shape } = self.entry(name)?;
        let io = StoreError::io("read", &self.path);
        let (start, end) = self.info(name)?.data_offsets;
        let mut bytes = vec![0; end - start];
        let mut file = File::open(&self.path).map_err(&io)?;
        file.seek(SeekFrom::Start(self.data_start + start as u64)).map_err(&io)?;
        file.read_exact(&mut bytes).map_err(&io)?;
        Ok(Raw { stored, shape, bytes })
    }

    fn info(&self, name: &str) -> Result<&TensorInfo, StoreError> {
        self.metadata.info(name).ok_or_else(|| self.missing(name))
    }
}

impl TensorSource for SafeTensorsFile {
    fn description(&self) -> String {
        self.path.display().to_string()
    }

    fn names(&self) -> Vec<String> {
        let mut names = self.metadata.offset_keys();
        names.sort_unstable();
        names
    }

    fn shape(&self, name: &str) -> Option<Vec<u64>> {
        self.metadata.info(name).map(|info| info.shape.iter().map(|&n| n as u64).collect())
    }

    fn read(&self, name: &str) -> Result<Tensor<f64>, StoreError> {
        let Raw { stored, shape, bytes } = self.raw(name)?;
        Ok(Tensor::new(shape.iter().map(|&n| index(n)).collect(), stored.decode(&bytes)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Stored, write};

    fn sample(dir: &Path) -> PathBuf {
        let path = dir.join("x.safetensors");
        let half = Tensor::new(vec![3], vec![0.5, -2.0, 65504.0]);
        let ids = Tensor::new(vec![2, 1], vec![7.0, -1.0]);
        write(
            &path,
            &[("half", Stored::F16, &half), ("brain", Stored::BF16, &half), ("ids", Stored::I32, &ids)],
        )
        .unwrap();
        path
    }

    #[test]
    fn what_is_written_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let file = SafeTensorsFile::open(sample(dir.path())).unwrap();
        assert_eq!(file.names(), ["brain", "half", "ids"]);
        assert_eq!(file.shape("ids"), Some(vec![2, 1]));
        assert_eq!(file.read("half").unwrap().data, [0.5, -2.0, 65504.0]);
        assert_eq!(file.read("brain").unwrap().data, [0.5, -2.0, 65536.0]);
        assert_eq!(file.read("ids").unwrap().data, [7.0, -1.0]);
    }

    #[test]
    fn a_file_cut_anywhere_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let bytes = std::fs::read(sample(dir.path())).unwrap();
        let cut = dir.path().join("cut.safetensors");
        for n in 0..bytes.len() {
            std::fs::write(&cut, &bytes[..n]).unwrap();
            assert!(matches!(SafeTensorsFile::open(&cut), Err(StoreError::Corrupt { .. })), "cut at {n}");
        }
    }

    #[test]
    fn garbage_and_absence_are_errors_with_the_path() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bad.safetensors");
        std::fs::write(&path, [0xff; 64]).unwrap();
        let error = SafeTensorsFile::open(path).unwrap_err().to_string();
        assert!(error.contains("bad.safetensors"), "{error}");
        let absent = SafeTensorsFile::open(dir.path().join("absent")).unwrap_err();
        assert!(matches!(absent, StoreError::Io { action: "open", .. }));
        assert!(matches!(SafeTensorsFile::open(dir.path()), Err(StoreError::Io { .. })));
    }

    #[test]
    fn a_missing_tensor_is_named_with_the_nearest() {
        let dir = tempfile::tempdir().unwrap();
        let file = SafeTensorsFile::open(sample(dir.path())).unwrap();
        let error = file.read("brian").unwrap_err().to_string();
        assert!(error.contains("no tensor `brian`; it has `brain`"), "{error}");
    }
}
