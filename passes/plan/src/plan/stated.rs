//! Compares the stated figures of a plan with those of its program, so that an edited figure is refused.

use ithaca_differentiate::Training;
use ithaca_import::{self as import, Mode};
use ithaca_ir::{Diagnostic, Diagnostics};
use ithaca_layout::compile::Compiled;
use ithaca_layout::registry::Registry;
use serde_json::Value;

use super::{
    Change, Outcome, Plan, Step, Time, attention, diff, mesh_axes, passed_over, rounded, stages_left_out,
    why_chosen,
};

/// How far two times may be apart that are one time, in parts of the larger: a unit in the sixth digit, the last that a
/// plan writes.
const LAST_DIGIT: f64 = 1.1e-5;

/// The longest value that a message shows, characters.
const SHOWN: usize = 80;

impl Plan {
    /// The program and schedule of this plan, if its figures are theirs.
    ///
    /// # Errors
    /// `M33` for a stated figure that differs from the computed one.
    pub fn checked(&self, registry: &Registry, compiled: Compiled) -> Result<Compiled, Diagnostics> {
        let workload = self.workload_in_stages().map_err(|d| vec![d])?;
        let Training { stages, micro_batches, .. } = workload.training;
        if workload.mode != Mode::Train || !Step::is_long(stages, micro_batches) {
            let step = Step::whole(&self.cluster, compiled);
            self.check_stated(&step).map_err(|d| vec![d])?;
            return Ok(step.compiled);
        }
        let step = Step::of(&self.cluster, (workload.batch, &workload.training), |batch, training| {
            let training = training.clone();
            self.compiled(registry, &import::Workload { batch, training, ..workload.clone() })
        })?;
        self.check_stated(&step).map_err(|d| vec![d])?;
        Ok(compiled)
    }

    /// Checks that the figures of this plan are those of its program and schedule: dimensions, attention, collectives, memory,
    /// times and notes, and the figures of the chosen alternative.
    ///
    /// The times of the other alternatives are not computed again, but their differences to the chosen one are.
    ///
    /// # Errors
    /// `M33` with the quantity, the stated and the computed value.
    fn check_stated(&self, step: &Step) -> Result<(), Diagnostic> {
        let chosen = self.alternatives.iter().filter(|a| matches!(a.outcome, Outcome::Chosen { .. }));
        let chosen = chosen.count();
        let refuse =
            |what: String| Err(Diagnostic::new("M33", what).help("make the plan anew with `ithaca plan`"));
        if chosen != 1 {
            return refuse(format!(
                "{chosen} of the `alternatives` of the plan are chosen, and a plan is one"
            ));
        }
        let changes = diff(self, &self.computed(step)?);
        let Some(Change { path, left, right }) = changes.into_iter().find(is_visible) else { return Ok(()) };
        refuse(match (left, right) {
            (Some(stated), Some(computed)) => {
                format!("`{path}` of the plan is {}, but {} is computed", shown(&stated), shown(&computed))
            }
            (Some(stated), None) => format!("`{path}` of the plan is {}, but there is none", shown(&stated)),
            (None, computed) => {
                let computed = computed.as_ref().map_or_else(String::new, shown);
                format!("`{path}` of the plan is missing, and {computed} is computed")
            }
        })
    }

    /// This plan with computed figures in place of the stated ones.
    fn computed(&self, step: &Step) -> Result<Plan, Diagnostic> {
        let options = self.shard_options()?;
        let compiled = &step.compiled;
        let (simulation, memory) = (&step.simulation, step.memory.clone());
        let time = Time::of(&self.cluster, (&compiled.schedule, self.workload.micro_batches), simulation);
        let micro_batches = self.workload.to_import()?.training.micro_batches;
        let left_out = stages_left_out(&self.search, micro_batches, self.gpus);
        let left_out = passed_over(self.n_passed_over).into_iter().chain(left_out);
        let mut alternatives = self.alternatives.clone();
        for one in &mut alternatives {
            match &mut one.outcome {
                Outcome::Chosen { step_seconds, exposed_seconds, memory_bytes, reason } => {
                    (*step_seconds, *exposed_seconds) = (time.step_seconds, time.exposed_seconds);
                    *memory_bytes = memory.total;
                    *reason = why_chosen(simulation);
                    one.strategy = options.strategy_text();
                    one.mesh = mesh_axes(&options.mesh);
                }
                Outcome::Slower { step_seconds, slower_by_seconds, .. } => {
                    *slower_by_seconds = rounded(*step_seconds - time.step_seconds);
                }
                Outcome::OutOfMemory { .. } | Outcome::Refused { .. } => {}
            }
        }
        Ok(Plan {
            dimensions: step.dimensions(),
            attention: attention(&compiled.attention, &options),
            choices: compiled.choices.clone(),
            collectives: step.collectives(),
            memory,
            time,
            alternatives,
            notes: compiled.notes.iter().cloned().chain(left_out).collect(),
            ..self.clone()
        })
    }
}

/// Whether a difference is more than how the last digit was rounded.
fn is_visible(change: &Change) -> bool {
    match (&change.left, &change.right) {
        (Some(Value::Number(left)), Some(Value::Number(right))) if left.is_f64() && right.is_f64() => {
            match (left.as_f64(), right.as_f64()) {
                (Some(a), Some(b)) => (a - b).abs() > LAST_DIGIT * a.abs().max(b.abs()),
                _ => true,
            }
        }
        _ => true,
    }
}

/// A value as a message shows it.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(SHOWN) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}
