//! Rotary position embedding (Su et al., arXiv 2104.09864), with the frequency scalings that models use.

use std::f64::consts::PI;

use crate::dim::DimId;
use crate::ops::elementwise::need_float;
use crate::ops::{OpError, unplaced};
use crate::space::Space;
use crate::types::TensorType;

/// Attributes of `rotary`.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotary {
    /// The dimension whose pairs are rotated.
    pub over: DimId,
    /// Elements that are rotated, even; those behind pass through.
    pub width: u64,
    /// Base of the frequencies.
    pub theta: f64,
    /// How frequencies are stretched beyond the trained length.
    pub scaling: Scaling,
    /// Which elements turn together.
    pub pairs: Pairs,
    /// Which way pairs turn.
    pub turn: Turn,
}

/// Which elements turn together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Pairs {
    /// Element `i` of the first half of the width and element `i` of the second.
    #[default]
    Halves,
    /// Elements `2i` and `2i + 1`.
    Neighbours,
}

impl Pairs {
    /// The places of pair `i` of `width` elements.
    pub fn places(self, i: usize, width: usize) -> (usize, usize) {
        match self {
            Pairs::Halves => (i, i + width / 2),
            Pairs::Neighbours => (2 * i, 2 * i + 1),
        }
    }
}

/// Which way pairs turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Turn {
    /// By the angle of their position.
    #[default]
    Forth,
    /// By the opposite angle: the adjoint.
    Back,
}

impl Turn {
    /// The other way.
    pub fn inverse(self) -> Self {
        match self {
            Turn::Forth => Turn::Back,
            Turn::Back => Turn::Forth,
        }
    }

    /// The sign of the angle.
    pub fn sign(self) -> f64 {
        match self {
            Turn::Forth => 1.0,
            Turn::Back => -1.0,
        }
    }
}

/// Stretching of rotary frequencies.
#[derive(Clone, Debug, PartialEq)]
pub enum Scaling {
    /// None.
    None,
    /// Every frequency divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3.1: long wavelengths divided, short ones kept, a ramp between.
    Llama3 {
        /// The divisor of long wavelengths.
        factor: f64,
        /// Wavelengths above `original / low` are divided.
        low: f64,
        /// Wavelengths below `original / high` are kept.
        high: f64,
        /// The trained length, tokens.
        original: f64,
    },
    /// YaRN (Peng et al., arXiv 2309.00071): a ramp over pair indices, and scores sharpened by `attention`.
    Yarn {
        /// The divisor of slow pairs.
        factor: f64,
        /// Pairs that turn more often than this within `original` are kept.
        beta_fast: f64,
        /// Pairs that turn less often than this within `original` are divided.
        beta_slow: f64,
        /// The trained length, tokens.
        original: f64,
        /// Factor of cosine and sine.
        attention: f64,
        /// Whether the ramp's ends are rounded outward to whole pairs.
        truncate: bool,
    },
}

impl Rotary {
    /// The angle per position of each pair, `width / 2` of them, in radians.
    pub fn frequencies(&self) -> Vec<f64> {
        let half = self.width / 2;
        let base = (0..half).map(|i| self.theta.powf(-((2 * i) as f64) / self.width as f64));
        match self.scaling {
            Scaling::None => base.collect(),
            Scaling::Linear { factor } => base.map(|f| f / factor).collect(),
            Scaling::Llama3 { factor, low, high, original } => base
                .map(|f| {
                    let turns = original * f / (2.0 * PI);
                    let keep = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                    f * (keep + (1.0 - keep) / factor)
                })
                .collect(),
            Scaling::Yarn { factor, beta_fast, beta_slow, original, truncate, .. } => {
                // The pair that turns `beta` times within the trained length.
                let pair = |beta: f64| {
                    self.width as f64 * (original / (beta * 2.0 * PI)).ln() / (2.0 * self.theta.ln())
                };
                let (mut first, mut last) = (pair(beta_fast), pair(beta_slow));
                if truncate {
                    (first, last) = (first.floor(), last.ceil());
                }
                first = first.max(0.0);
                last = last.min(self.width as f64 - 1.0);
                if first == last {
                    last += 0.001;
                }
                let keep = |i: usize| 1.0 - ((i as f64 - first) / (last - first)).clamp(0.0, 1.0);
                base.enumerate().map(|(i, f)| f * (keep(i) + (1.0 - keep(i)) / factor)).collect()
            }
        }
    }

    /// The factor of cosine and sine.
    pub fn amplitude(&self) -> f64 {
        match self.scaling {
            Scaling::None | Scaling::Linear { .. } | Scaling::Llama3 { .. } => 1.0,
            Scaling::Yarn { attention, .. } => attention,
        }
    }
}

pub(super) fn infer(rotary: &Rotary, space: &Space, operands: &[&TensorType]) -> Result<TensorType, OpError> {
    let [x, positions] = [operands[0], operands[1]];
    need_float("rotary", x.dtype)?;
    if positions.dtype != crate::DType::I32 {
        return Err(OpError::new("V04", format!("`rotary` takes i32 positions, not {}", positions.dtype)));
    }
    let over = &space.dims[rotary.over];
    if !x.has(rotary.over) || positions.dims.iter().any(|&d| !x.has(d) || d == rotary.over) {
        return Err(OpError::new(
            "V05",
            format!("`rotary` needs `{}` in x, and positions over dimensions of x", over.name),
        ));
    }
    if rotary.width == 0 || !rotary.width.is_multiple_of(2) || rotary.width > over.size {
        return Err(OpError::new(
            "V05",
            format!(
                "`rotary` rotates {} of the {} elements of `{}`; it must be even",
                rotary.width, over.size, over.name
            ),
        ));
    }
    Ok(unplaced(x))
}
