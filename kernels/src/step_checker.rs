//! Checks a step of ranks by its error, beside the error that one rank has in the same precision.
//!
//! The exact result is that of the whole program in double precision; its distance from the ranks' result is the ranks' error.
//! Rounding has errors too, and how large they are depends on the program: a sum of large numbers may be zero. So the whole
//! program is run in the precision of the ranks as well, also with other roundings ([`Rounding::Random`]), and a tensor is
//! wrong where its error is out of proportion to these ([`StepChecker::proportion`]). No size of an error is right or wrong by itself.
//! Ranks in double precision are compared with runs in single precision, whose errors are larger by the ratio of the units: the
//! exact result shows no error of its own precision.
//!
//! Steps are checked one by one, each from the weights and states with which the ranks began it, and an update from the gradients
//! that the ranks left: errors neither add up from step to step, nor does an optimizer turn those of a gradient into steps.

use ithaca_ir::Module;
use rayon::iter::{IntoParallelIterator, ParallelIterator};

use crate::Outputs;
use crate::compare::{Mismatch, each_pair};
use crate::error::RunError;
use crate::oracle::{Interpreted, Results, StepOptions, step_with};
use crate::real::Real;
use crate::storage::{Rounding, Storage};
use crate::store::{TensorSource, Tensors};
use crate::tensor::Tensor;

/// The samples of one rank's error that are always taken, the first without a seed.
const SAMPLES: u64 = 2;

/// All samples; they are taken before a tensor is called wrong whose error might be due to few of them.
const ALL_SAMPLES: u64 = 24;

/// The chance that all samples are so small that a right tensor is called wrong before all were taken.
const CHANCE: f64 = 1e-6;

/// An error so many times too large is not due to `n` samples that happen to be small: one is `x` times too small with chance 1/x.
fn beyond_chance(n: u64) -> f64 {
    CHANCE.powf(-1.0 / n as f64)
}

/// The errors of ranks that add up `parts` parts of each sum are at most this many times those of one rank, per root of `parts`.
const MARGIN: f64 = 6.0;

/// A whole program, by which steps of ranks are checked.
#[derive(Clone, Copy, Debug)]
pub struct StepChecker<'a> {
    /// The whole program.
    pub program: &'a Module,
    /// How the ranks store values.
    pub storage: Storage,
    /// The number of parts in which the ranks take a sum that one rank takes at once, each rounded by itself.
    pub parts: u64,
}

/// How a tensor compares.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorResult {
    /// The tensor's name.
    pub name: String,
    /// The errors, if both have one shape, and every element is finite in both or −∞ in both.
    pub errors: Result<Errors, Mismatch>,
}

/// The errors of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Errors {
    /// The error of the ranks.
    pub ranks: Size,
    /// The largest error of one rank in the same precision, at least half a unit in the last place.
    pub one_rank: Size,
}

/// The size of an error.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Size {
    /// That of the element with the largest error.
    pub largest: f64,
    /// The Euclidean norm over that of the exact tensor; the norm itself where that is zero.
    pub relative: f64,
}

impl Size {
    fn scaled(self, by: f64) -> Size {
        Size { largest: by * self.largest, relative: by * self.relative }
    }

    fn max(self, other: Size) -> Size {
        Size { largest: self.largest.max(other.largest), relative: self.relative.max(other.relative) }
    }
}

impl TensorResult {
    /// The error of the ranks as a multiple of one rank's, by norm or by the largest element, whichever is more; infinite where
    /// there is none.
    pub fn ratio(&self) -> f64 {
        let over = |error: f64, of: f64| if error == 0.0 { 0.0 } else { error / of };
        self.errors.as_ref().map_or(f64::INFINITY, |Errors { ranks, one_rank }| {
            over(ranks.largest, one_rank.largest).max(over(ranks.relative, one_rank.relative))
        })
    }
}

impl StepChecker<'_> {
    /// The largest ratio of errors that is due to rounding: errors of random signs in `n` parts add up to √n of one.
    pub fn proportion(&self) -> f64 {
        MARGIN * (self.parts.max(1) as f64).sqrt()
    }

    /// Whether a tensor is right.
    pub fn accepts(&self, result: &TensorResult) -> bool {
        result.ratio() <= self.proportion()
    }

    /// Compares the results of a step from `before`, in the order of the whole program's: outputs, then weights and states.
    ///
    /// # Errors
    /// Those of the whole program.
    pub fn step<T: Interpreted>(
        &self,
        (before, inputs): (&dyn TensorSource, &dyn TensorSource),
        found: &Results<T>,
    ) -> Result<Vec<TensorResult>, RunError> {
        let gradients = Tensors::from(&found.kept);
        let exact =
            || self.run::<f64>((before, inputs), &gradients, Rounding::Sources(self.storage)).map(all);
        let sample = |seed: u64| {
            let rounding = match seed {
                0 => Rounding::Nearest(self.storage),
                seed => Rounding::Random(self.storage, seed),
            };
            self.run::<f32>((before, inputs), &gradients, rounding).map(all)
        };
        let (exact, first) =
            rayon::join(exact, || (0..SAMPLES).into_par_iter().map(sample).collect::<Vec<_>>());
        let exact = exact?;
        let found: std::collections::BTreeMap<&String, &Tensor<T>> =
            found.outputs.iter().chain(&found.kept).collect();
        let mut rows: Vec<TensorResult> =
            exact.iter().map(|(name, exact)| compared::<T>(name, exact, &found)).collect();
        let compare = |rows: &mut Vec<TensorResult>, sample: &Outputs<f32>| {
            for row in rows {
                let error = difference(&sample[&row.name], &exact[&row.name]);
                if let (Ok(errors), Ok(error)) = (&mut row.errors, error) {
                    errors.one_rank = errors.one_rank.max(error.scaled(T::EPSILON / <f32 as Real>::EPSILON));
                }
            }
        };
        for sample in first {
            compare(&mut rows, &sample?);
        }
        let part = |row: &TensorResult| row.ratio() / self.proportion();
        for taken in SAMPLES..ALL_SAMPLES {
            let worst = rows.iter().map(part).fold(0.0, f64::max);
            if worst <= 1.0 || worst >= beyond_chance(taken) {
                break;
            }
            compare(&mut rows, &sample(taken)?);
        }
        Ok(rows)
    }

    fn run<T: Interpreted>(
        &self,
        (before, inputs): (&dyn TensorSource, &dyn TensorSource),
        gradients: &Tensors,
        rounding: Rounding,
    ) -> Result<Results<T>, RunError> {
        let options = StepOptions { rounding, gradients: Some(gradients) };
        step_with(self.program, before, inputs, &options)
    }
}

/// Outputs, weights and states.
fn all<T: Interpreted>(results: Results<T>) -> Outputs<T> {
    let Results { mut outputs, kept } = results;
    outputs.extend(kept);
    outputs
}

/// A tensor of the ranks beside the exact one, of which one rank has half a unit in the last place as an error so far.
fn compared<T: Interpreted>(
    name: &str,
    exact: &Tensor<f64>,
    found: &std::collections::BTreeMap<&String, &Tensor<T>>,
) -> TensorResult {
    let found = found.get(&name.to_owned()).ok_or(Mismatch::Missing);
    let errors = found.and_then(|found| difference(found, exact)).map(|ranks| {
        let half = T::EPSILON / 2.0;
        let largest = exact.data.iter().filter(|x| x.is_finite()).fold(0.0, |a: f64, x| a.max(x.abs()));
        // A tensor of zeros has no last place.
        let relative = if largest > 0.0 { half } else { 0.0 };
        Errors { ranks, one_rank: Size { largest: half * largest, relative } }
    });
    TensorResult { name: name.to_owned(), errors }
}

/// The error of a tensor.
fn difference<T: Interpreted>(found: &Tensor<T>, exact: &Tensor<f64>) -> Result<Size, Mismatch> {
    let (mut largest, mut squares, mut norm) = (0f64, 0f64, 0f64);
    each_pair(found, exact, |found, exact| {
        let error = (found - exact).abs();
        largest = largest.max(error);
        squares += error * error;
        norm += exact * exact;
    })?;
    let relative = if norm > 0.0 { (squares / norm).sqrt() } else { squares.sqrt() };
    Ok(Size { largest, relative })
}
