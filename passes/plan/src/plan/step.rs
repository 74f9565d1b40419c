//! A compiled step as a plan states it: whole, or by two shorter ones.
//!
//! Once all stages of a pipeline are busy, each micro-batch adds to the time, the memory and the messages of a rank what the
//! one before it added. So the figures of a training step of many micro-batches are those of a step of few, and as often as needed
//! what a slightly longer one has more; nothing takes longer for more micro-batches.

use ithaca_layout::compile::Compiled;

use super::{Collective, Dimension, collectives, dimensions};
use crate::cluster::Cluster;
use crate::memory::{self, Memory, continued};
use crate::simulate::{Simulation, simulate, simulate_continued};

/// Micro-batches per stage of the two shorter steps: in the first few, stages wait for the first micro-batches.
const PER_STAGE: [u64; 2] = [4, 5];

/// How many times fewer micro-batches the two have together, at least.
const WORTH: u64 = 2;

/// A compiled step.
#[derive(Clone, Debug)]
pub struct Step {
    /// The program and its schedule; of a long step those of the longer of the two that stand for it.
    pub compiled: Compiled,
    shorter: Option<Shorter>,
}

/// What a long step is told from, beside the longer of two steps.
#[derive(Clone, Debug)]
struct Shorter {
    few: Compiled,
    /// The micro-batches of the two, and of the step.
    parts: [u64; 2],
    micro_batches: u64,
}

impl Shorter {
    /// How often the step has what the longer one has more than the shorter.
    fn times(&self) -> u64 {
        let [few, more] = self.parts;
        (self.micro_batches - more) / (more - few)
    }
}

/// The micro-batches of the two steps that stand for one of so many stages and micro-batches, if it is a long one.
fn parts(stages: u64, micro_batches: u64) -> Option<[u64; 2]> {
    let parts = PER_STAGE.map(|n| n.saturating_mul(stages));
    // What is added is added by a micro-batch of each stage.
    let is_whole = micro_batches.is_multiple_of(stages.max(1));
    let sum = parts[0].saturating_add(parts[1]);
    (stages > 1 && is_whole && sum.saturating_mul(WORTH) <= micro_batches).then_some(parts)
}

impl Step {
    /// A step that is compiled whole.
    pub fn whole(compiled: Compiled) -> Self {
        Self { compiled, shorter: None }
    }

    /// A training step of so many stages and micro-batches; `compile` compiles one of so many micro-batches of the same size.
    ///
    /// # Errors
    /// Those of `compile`.
    pub fn of<E>(
        (stages, micro_batches): (u64, u64),
        compile: impl Fn(u64) -> Result<Compiled, E>,
    ) -> Result<Self, E> {
        let Some(parts) = parts(stages, micro_batches) else { return compile(micro_batches).map(Self::whole) };
        let few = compile(parts[0])?;
        let compiled = compile(parts[1])?;
        Ok(Self { compiled, shorter: Some(Shorter { few, parts, micro_batches }) })
    }

    /// Whether a step of so many stages and micro-batches is told from shorter ones.
    pub fn is_long(stages: u64, micro_batches: u64) -> bool {
        parts(stages, micro_batches).is_some()
    }

    /// The micro-batches that are compiled for a step.
    pub fn n_compiled(stages: u64, micro_batches: u64) -> u64 {
        parts(stages, micro_batches).map_or(micro_batches, |[few, more]| few + more)
    }

    /// Its time.
    pub fn simulation(&self, cluster: &Cluster) -> Simulation {
        let schedule = &self.compiled.schedule;
        match &self.shorter {
            None => simulate(cluster, schedule),
            Some(s) => simulate_continued(cluster, [&s.few.schedule, schedule], s.times() as f64),
        }
    }

    /// Its memory.
    pub fn memory(&self, cluster: &Cluster) -> Memory {
        let memory = memory::of_schedule(cluster, &self.compiled.schedule);
        match &self.shorter {
            None => memory,
            Some(s) => memory.continued(&memory::of_schedule(cluster, &s.few.schedule), s.times()),
        }
    }

    /// Its dimensions.
    pub fn dimensions(&self) -> Vec<Dimension> {
        let mut all = dimensions(&self.compiled.per_rank.space);
        if let Some(s) = &self.shorter {
            for (dim, few) in all.iter_mut().zip(dimensions(&s.few.per_rank.space)) {
                dim.size = continued(few.size, dim.size, s.times());
                dim.valid = dim.valid.zip(few.valid).map(|(more, few)| continued(few, more, s.times()));
            }
        }
        all
    }

    /// Its collectives.
    pub fn collectives(&self) -> Vec<Collective> {
        let mut all = collectives(&self.compiled.per_rank);
        if let Some(s) = &self.shorter {
            let few = collectives(&s.few.per_rank);
            for row in &mut all {
                let is_same = |other: &&Collective| {
                    (&other.kind, &other.axis, &other.phase) == (&row.kind, &row.axis, &row.phase)
                };
                let Some(few) = few.iter().find(is_same) else { continue };
                let longer = |few: u64, more: u64| continued(few, more, s.times());
                row.count = longer(few.count, row.count);
                row.bytes_sent_per_rank = longer(few.bytes_sent_per_rank, row.bytes_sent_per_rank);
                let expected = few.expected_bytes_per_rank.zip(row.expected_bytes_per_rank);
                row.expected_bytes_per_rank = expected.map(|(few, more)| longer(few, more));
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
                let [compiled, whole] =
                    [s.parts[1], s.micro_batches].map(|n| format!("micro_batches={n}"));
                passes.replacen(&compiled, &whole, 1)
            }
        }
    }
}
