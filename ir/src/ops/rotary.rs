//! Rotary position embedding (Su et al., arXiv 2104.09864), with the frequency scalings that models use.

use std::f64::consts::PI;

use crate::dtype::DType;
use crate::ops::check::{need_float, unplaced};
use crate::ops::error::{OpError, bail, ensure};
use crate::ops::table::rotary::{Direction, Pairs, Rotary, Scaling};
use crate::space::Space;
use crate::types::TensorType;

impl Pairs {
    /// The places of pair `i` of `width` elements.
    pub fn places(self, i: usize, width: usize) -> (usize, usize) {
        match self {
            Pairs::Halves => (i, i + width / 2),
            Pairs::Neighbours => (2 * i, 2 * i + 1),
        }
    }
}

impl Direction {
    /// The other way.
    pub fn inverse(self) -> Self {
        match self {
            Direction::Forward => Direction::Inverse,
            Direction::Inverse => Direction::Forward,
        }
    }

    /// The sign of the angle.
    pub fn sign(self) -> f64 {
        match self {
            Direction::Forward => 1.0,
            Direction::Inverse => -1.0,
        }
    }
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
                    // Without frequencies between the bounds there is a step.
                    let ramp = (turns - low) / (high - low);
                    let keep = if high > low { ramp.clamp(0.0, 1.0) } else { f64::from(turns >= high) };
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
    ensure!(positions.dtype == DType::I32, "V04", "`rotary` takes i32 positions, not {}", positions.dtype);
    let over = &space.dims[rotary.over];
    if !x.has(rotary.over) || positions.dims.iter().any(|&d| !x.has(d) || d == rotary.over) {
        bail!("V05", "`rotary` needs `{}` in x, and positions over dimensions of x", over.name);
    }
    if rotary.width == 0 || !rotary.width.is_multiple_of(2) || rotary.width > over.size {
        let message = format!(
            "`rotary` rotates {} of the {} elements of `{}`; it must be even",
            rotary.width, over.size, over.name
        );
        return Err(OpError::new("V05", message));
    }
    Ok(unplaced(x))
}
