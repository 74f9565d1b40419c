//! Writes tensors: into a file beside, which then takes the name, so that no half-written file is ever seen.

use std::borrow::Cow;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::{View, serialize_to_file};

use super::StoreError;
use crate::tensor::Tensor;

/// The element type of a tensor in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// Double precision.
    F64,
    /// Single precision.
    F32,
    /// Half precision.
    F16,
    /// bfloat16.
    BF16,
    /// 64-bit integers.
    I64,
    /// 32-bit integers.
    I32,
}

struct Encoded<'a> {
    dtype: Dtype,
    shape: &'a [usize],
    bytes: Vec<u8>,
}

impl View for Encoded<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// Writes tensors to a safetensors file at `path`, each rounded to its stored type.
///
/// # Errors
/// [`StoreError::Io`]; nothing is left at `path` then that was not there before.
pub fn write(path: &Path, tensors: &[(&str, Stored, &Tensor<f64>)]) -> Result<(), StoreError> {
    let io = |source| StoreError::Io { action: "write", path: path.to_owned(), source };
    let directory = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let beside = tempfile::NamedTempFile::new_in(directory).map_err(io)?;
    let encoded = tensors.iter().map(|&(name, stored, tensor)| (name, encode(stored, tensor)));
    serialize_to_file(encoded, None, beside.path()).map_err(|e| io(std::io::Error::other(e.to_string())))?;
    beside.persist(path).map_err(|e| io(e.error))?;
    Ok(())
}

fn encode(stored: Stored, tensor: &Tensor<f64>) -> Encoded<'_> {
    fn each<const N: usize>(data: &[f64], f: impl Fn(f64) -> [u8; N]) -> Vec<u8> {
        data.iter().flat_map(|&x| f(x)).collect()
    }
    let data = &tensor.data;
    let (dtype, bytes) = match stored {
        Stored::F64 => (Dtype::F64, each(data, f64::to_le_bytes)),
        Stored::F32 => (Dtype::F32, each(data, |x| (x as f32).to_le_bytes())),
        Stored::F16 => (Dtype::F16, each(data, |x| half::f16::from_f64(x).to_le_bytes())),
        Stored::BF16 => (Dtype::BF16, each(data, |x| half::bf16::from_f64(x).to_le_bytes())),
        Stored::I64 => (Dtype::I64, each(data, |x| (x as i64).to_le_bytes())),
        Stored::I32 => (Dtype::I32, each(data, |x| (x as i32).to_le_bytes())),
    };
    Encoded { dtype, shape: &tensor.shape, bytes }
}
