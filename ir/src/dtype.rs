//! Element types.

use std::fmt;

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DType {
    /// IEEE double precision.
    F64,
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    BF16,
    /// Eight bits: four of exponent, three of mantissa, no infinity, 448 at most (E4M3 of the OCP 8-bit specification). Caches only.
    F8E4M3,
    /// 32-bit signed integer: token ids, positions.
    I32,
    /// One byte, zero or one: which elements dropout keeps.
    Bool,
}

// The long spellings are those of model configurations.
crate::spellings! {
    DType {
        F64 = "f64" | "fp64" | "float64",
        F32 = "f32" | "fp32" | "float32",
        F16 = "f16" | "fp16" | "float16" | "half",
        BF16 = "bf16" | "bfloat16",
        F8E4M3 = "f8e4m3" | "fp8_e4m3" | "float8_e4m3fn",
        I32 = "i32" | "int32",
        Bool = "bool",
    }
}

impl DType {
    /// Bytes per element.
    pub const fn bytes(self) -> u64 {
        match self {
            DType::F64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::F8E4M3 | DType::Bool => 1,
        }
    }

    /// Whether operations compute with elements of the type as they are; eight bits need a scale beside them.
    pub fn is_arithmetic(self) -> bool {
        self.is_float() && self != DType::F8E4M3
    }

    /// Whether the type holds real numbers.
    pub fn is_float(self) -> bool {
        match self {
            DType::F64 | DType::F32 | DType::F16 | DType::BF16 | DType::F8E4M3 => true,
            DType::I32 | DType::Bool => false,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
