//! Runs the trial programs of rewrite rules by the oracle: every rank, in double precision.

use ithaca_ir::{Level, Module};
use ithaca_kernels::oracle;
use ithaca_kernels::store::RandomTensors;
use ithaca_passes::rules::{Evaluate, Evaluated};

/// The oracle as the evaluator of rules.
///
/// All values are in double precision, whatever their element type: a cast does not round.
#[derive(Clone, Copy, Debug, Default)]
pub struct Oracle;

impl Evaluate for Oracle {
    fn outputs(&self, module: &Module, sources: &Module, seed: u64) -> Result<Vec<Evaluated>, String> {
        let tensors = RandomTensors::of_module(sources, seed);
        let outputs = match module.level {
            Level::Program => oracle::run::<f64>(module, &tensors, &tensors),
            Level::Sharded | Level::PerRank => oracle::run_ranks::<f64>(module, &tensors, &tensors),
        };
        let outputs = outputs.map_err(|error| error.to_string())?;
        let evaluated = outputs.into_iter().map(|(name, tensor)| Evaluated {
            name,
            shape: tensor.shape.iter().map(|&n| n as u64).collect(),
            elements: tensor.data,
        });
        Ok(evaluated.collect())
    }
}
