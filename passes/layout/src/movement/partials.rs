//! Partial results on their way between ranks.

use ithaca_ir::{DType, Diagnostic};
use serde::{Deserialize, Serialize};

/// The element type in which partial results travel: outputs of some of the keys, and gradients of some of the queries or
/// keys. They are computed and summed in f32; each hop rounds them to the type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Partials {
    /// As they are computed.
    #[default]
    F32,
    /// bfloat16: half the bytes, and a relative error of 2⁻⁹ a hop.
    Bf16,
}

impl Partials {
    /// The partials spelled `f32` or `bf16`.
    ///
    /// # Errors
    /// `P02` for another spelling.
    pub fn parse(text: &str) -> Result<Self, Diagnostic> {
        match text {
            "f32" => Ok(Self::F32),
            "bf16" => Ok(Self::Bf16),
            _ => Err(Diagnostic::new("P02", format!("partial results do not travel in `{text}`"))
                .help("use f32 or bf16")),
        }
    }

    /// The spelling.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }

    /// The type of a partial result of type `computed` while it travels.
    pub(crate) fn wire(self, computed: DType) -> DType {
        match self {
            Self::Bf16 if computed.bytes() > DType::BF16.bytes() => DType::BF16,
            Self::F32 | Self::Bf16 => computed,
        }
    }
}
