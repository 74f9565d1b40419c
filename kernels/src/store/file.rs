//! One file in the safetensors format: a JSON header, then the tensors.
//!
//! Only the header is held in memory; a tensor is read when it is asked for.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::Metadata;

use super::{StoreError, TensorSource};
use crate::tensor::Tensor;

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

impl SafeTensorsFile {
    /// Opens a file and checks its header against its length.
    ///
    /// # Errors
    /// [`StoreError::Io`] when it cannot be opened or read, [`StoreError::Corrupt`] when it is cut off or not of the
    /// format.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        let path = path.as_ref().to_owned();
        let corrupt =
            |reason: String| StoreError::Corrupt { path: path.clone(), format: "safetensors", reason };
        let io = |source| StoreError::Io { action: "open", path: path.clone(), source };
        let mut file = File::open(&path).map_err(io)?;
        let about = file.metadata().map_err(io)?;
        if about.is_dir() {
            return Err(io(std::io::Error::from(std::io::ErrorKind::IsADirectory)));
        }
        if about.len() < LENGTH_BYTES {
            return Err(corrupt(format!(
                "it has {} bytes, fewer than the 8 of a header's length",
                about.len()
            )));
        }
        let mut length = [0; LENGTH_BYTES as usize];
        file.read_exact(&mut length).map_err(io)?;
        let length = u64::from_le_bytes(length);
        if length > MAX_HEADER || length > about.len() - LENGTH_BYTES {
            return Err(corrupt(format!("its header claims {length} bytes of a file of {}", about.len())));
        }
        let mut header = vec![0; usize::try_from(length).expect("a header fits in memory")];
        file.read_exact(&mut header).map_err(io)?;
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
        Ok(Self { path, metadata, data_start })
    }

    /// Where the file lies.
    pub fn path(&self) -> &Path {
        &self.path
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
        let info = self.metadata.info(name).ok_or_else(|| StoreError::missing(self, name))?;
        let io = |source| StoreError::Io { action: "read", path: self.path.clone(), source };
        let (start, end) = info.data_offsets;
        let mut bytes = vec![0; end - start];
        let mut file = File::open(&self.path).map_err(io)?;
        file.seek(SeekFrom::Start(self.data_start + start as u64)).map_err(io)?;
        file.read_exact(&mut bytes).map_err(io)?;
        let data = decode(info.dtype, &bytes).ok_or_else(|| StoreError::UnsupportedType {
            store: self.description(),
            name: name.to_owned(),
            dtype: info.dtype.to_string(),
        })?;
        Ok(Tensor::new(info.shape.clone(), data))
    }
}

/// Little-endian elements as numbers; `None` for a type that is not supported.
fn decode(dtype: Dtype, bytes: &[u8]) -> Option<Vec<f64>> {
    fn each<const N: usize>(bytes: &[u8], f: impl Fn([u8; N]) -> f64) -> Option<Vec<f64>> {
        Some(bytes.as_chunks::<N>().0.iter().map(|&b| f(b)).collect())
    }
    match dtype {
        Dtype::F64 => each(bytes, f64::from_le_bytes),
        Dtype::F32 => each(bytes, |b| f64::from(f32::from_le_bytes(b))),
        Dtype::F16 => each(bytes, |b| half::f16::from_le_bytes(b).to_f64()),
        Dtype::BF16 => each(bytes, |b| half::bf16::from_le_bytes(b).to_f64()),
        Dtype::I64 => each(bytes, |b| i64::from_le_bytes(b) as f64),
        Dtype::I32 => each(bytes, |b| f64::from(i32::from_le_bytes(b))),
        // The crate's enum is open; what is not listed is refused by name.
        _ => None,
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
        let error = SafeTensorsFile::open(&path).unwrap_err().to_string();
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
