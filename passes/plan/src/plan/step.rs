//! A compiled step as a plan states it: whole, or by shorter ones.
//!
//! Once all stages of a pipeline are busy, each micro-batch adds to the time, the memory and the messages of a rank what the
//! one before it added. So the figures of a training step of many micro-batches are those of a step of few, and as often as needed
//! what a slightly longer one has more; nothing takes longer for more micro-batches. A third step says whether that is so.

use ithaca_differentiate::Training;
use ithaca_layout::compile::Compiled;

use super::{Collective, Dimension, collectives, dimensions};
use crate::cluster::Cluster;
use crate::memory::{self, Memory};
use crate::simulate::{Simulation, simulate, simulate_continued};

/// Micro-batches per stage of the first of the shorter steps: before, stages wait for the first micro-batches. Where these wait for
/// longer, the next is tried.
const PER_STAGE: [u64; 3] = [4, 8, 16];

/// How many times fewer micro-batches these have together, at least.
const WORTH: u64 = 2;

/// A compiled step.
#[derive(Clone, Debug)]
pub struct Step {
    /// The program and its schedule; of a long step those of the longest of the steps that stand for it.
    pub compiled: Compiled,
    /// Its time.
    pub simulation: Simulation,
    /// Its memory.
    pub memory: Memory,
    shorter: Option<Shorter>,
}

/// What a long step is told from, beside the longest of the steps that stand for it.
#[derive(Clone, Debug)]
struct Shorter {
    second: Compiled,
    micro_batches: Parts,
}

/// The micro-batches of a long step.
#[derive(Clone, Copy, Debug)]
struct Parts {
    all: u64,
    shorter: [u64; 3],
}

impl Parts {
    /// Those of a step of so many stages, the first fewest; none if it is no long one.
    fn of(stages: u64, all: u64) -> impl Iterator<Item = Self> {
        // A micro-batch for each stage is added.
        let is_staged = stages > 1 && all.is_multiple_of(stages);
        PER_STAGE.into_iter().filter_map(move |first| {
            let shorter = [0, 1, 2].map(|more| (first + more).saturating_mul(stages));
            let sum = shorter.into_iter().fold(0, u64::saturating_add);
            (is_staged && sum.saturating_mul(WORTH) <= all).then_some(Self { all, shorter })
        })
    }

    /// How often the step has what the last of the shorter ones has more than the second.
    fn times(self) -> u64 {
        let [_, second, third] = self.shorter;
        (self.all - third) / (third - second)
    }

    /// What the step has of something of which the second and the third have so many.
    fn continued(self, second: u64, third: u64) -> u64 {
        third.saturating_add(third.saturating_sub(second).saturating_mul(self.times()))
    }
}

impl Step {
    /// A step that is compiled whole.
    pub fn whole(cluster: &Cluster, compiled: Compiled) -> Self {
        let schedule = &compiled.schedule;
        let (simulation, memory) =
            rayon::join(|| simulate(cluster, schedule), || memory::of_schedule(cluster, schedule));
        Self { compiled, simulation, memory, shorter: None }
    }

    /// A training step of `batch` sequences; `compile` compiles one of so many sequences and micro-batches.
    ///
    /// # Errors
    /// Those of `compile`.
    pub fn of<E: Send>(
        cluster: &Cluster,
        (batch, training): (u64, &Training),
        compile: impl Fn(u64, &Training) -> Result<Compiled, E> + Sync,
    ) -> Result<Self, E> {
        let all = training.micro_batches;
        let sequences = batch / all.max(1);
        let of = |micro_batches: u64| {
            compile(sequences * micro_batches, &Training { micro_batches, ..training.clone() })
        };
        let parts = Parts::of(training.stages, all).filter(|_| batch.is_multiple_of(all));
        for parts in parts {
            let [first, second, third] = parts.shorter;
            // The last takes as long as the others together.
            let (compiled, (first, second)) = rayon::join(|| of(third), || (of(first), of(second)));
            let [first, second, compiled] = [first?, second?, compiled?];
            let schedules = [&first, &second, &compiled].map(|compiled| &compiled.schedule);
            let (simulation, memory) = rayon::join(
                || simulate_continued(cluster, schedules, parts.times()),
                || memory::continued(cluster, schedules, parts.times()),
            );
            if let Some((simulation, memory)) = simulation.zip(memory) {
                let shorter = Some(Shorter { second, micro_batches: parts });
                return Ok(Self { compiled, simulation, memory, shorter });
            }
        }
        Ok(Self::whole(cluster, compile(batch, training)?))
    }

    /// Whether a step of so many stages and micro-batches may be told from shorter ones.
    pub fn is_long(stages: u64, micro_batches: u64) -> bool {
        Parts::of(stages, micro_batches).next().is_some()
    }

    /// The micro-batches that are compiled for a step, where it continues as it begins.
    pub fn n_compiled(stages: u64, micro_batches: u64) -> u64 {
        let fewest = Parts::of(stages, micro_batches).next();
        fewest.map_or(micro_batches, |parts| parts.shorter.into_iter().sum())
    }

    /// Its dimensions.
    pub fn dimensions(&self) -> Vec<Dimension> {
        let mut all = dimensions(&self.compiled.per_rank.space);
        if let Some(s) = &self.shorter {
            for (dim, second) in all.iter_mut().zip(dimensions(&s.second.per_rank.space)) {
                dim.size = s.micro_batches.continued(second.size, dim.size);
                let valid = dim.valid.zip(second.valid);
                dim.valid = valid.map(|(third, second)| s.micro_batches.continued(second, third));
            }
        }
        all
    }

    /// Its collectives.
    pub fn collectives(&self) -> Vec<Collective> {
        let mut all = collectives(&self.compiled.per_rank);
        if let Some(s) = &self.shorter {
            let before = collectives(&s.second.per_rank);
            for row in &mut all {
                let is_same = |other: &&Collective| {
                    (&other.kind, &other.axis, &other.phase) == (&row.kind, &row.axis, &row.phase)
                };
                let Some(second) = before.iter().find(is_same) else { continue };
                let continued = |second: u64, third: u64| s.micro_batches.continued(second, third);
                row.count = continued(second.count, row.count);
                row.bytes_sent_per_rank = continued(second.bytes_sent_per_rank, row.bytes_sent_per_rank);
                let expected = second.expected_bytes_per_rank.zip(row.expected_bytes_per_rank);
                row.expected_bytes_per_rank = expected.map(|(second, third)| continued(second, third));
            }
        }
        all
    }

    /// The passes that make it, in text form.
    pub fn pipeline(&self) -> String {
        let passes = self.compiled.schedule.pipeline.join(",");
        match &self.shorter {
            None => passes,
            Some(s) => {
                let Parts { all, shorter: [.., compiled] } = s.micro_batches;
                let [compiled, whole] = [compiled, all].map(|n| format!("micro_batches={n}"));
                passes.replacen(&compiled, &whole, 1)
            }
        }
    }
}

#[cfg(test)]
#[path = "step_tests.rs"]
mod tests;
