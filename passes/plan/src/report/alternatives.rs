//! What was tried: plans that fit, layouts that do not fit, and layouts that are refused, these by reason.

use serde::Serialize;

use crate::plan::{Alternative, Outcome, Plan, Rates, layout_text};

/// What was tried.
#[derive(Clone, Debug, Serialize)]
pub struct Alternatives {
    /// Whether a step decodes, so that rates are those of users and not utilization.
    pub decodes: bool,
    /// Usable memory of a device, bytes.
    pub usable: u64,
    /// Plans that fit, the fastest first.
    pub rows: Vec<Row>,
    /// Layouts that do not fit.
    pub too_large: Vec<TooLarge>,
    /// Layouts that are refused, by reason.
    pub refused: Vec<Refusal>,
}

/// A plan that fits.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Strategy and mesh.
    pub layout: String,
    /// What else was chosen, as flags.
    pub flags: String,
    /// Whether it is the plan.
    pub is_chosen: bool,
    /// Whether no other is both faster and smaller.
    pub is_frontier: bool,
    /// Seconds of a step.
    pub step: f64,
    /// Tokens per second and GPU.
    pub tokens: f64,
    /// Model FLOPs utilization, or tokens per second of a user in decoding.
    pub rate: f64,
    /// Seconds of exposed communication.
    pub exposed: f64,
    /// Bytes of the busiest rank.
    pub memory: u64,
    /// Why it won, or takes longer.
    pub reason: String,
    /// Other layouts with the same program.
    pub also: Vec<String>,
}

/// A layout that does not fit.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TooLarge {
    /// Strategy, mesh and flags.
    pub layout: String,
    /// Seconds of a step, if it did fit.
    pub step: f64,
    /// Bytes of the busiest rank.
    pub memory: u64,
    /// Bytes that a device lacks.
    pub over: u64,
    /// The largest part of the memory, and its bytes.
    pub part: (String, u64),
}

/// Layouts that are refused for one reason.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Refusal {
    /// The code of the rule.
    pub code: String,
    /// The reason.
    pub message: String,
    /// What to do.
    pub helps: Vec<String>,
    /// The layouts, each with the options that make it legal.
    pub layouts: Vec<(String, Vec<String>)>,
}

impl Alternatives {
    pub(super) fn new(plan: &Plan, rates: &Rates) -> Self {
        let mut all = Self {
            decodes: rates.decodes,
            usable: plan.memory.usable,
            rows: Vec::new(),
            too_large: Vec::new(),
            refused: Vec::new(),
        };
        plan.alternatives.iter().for_each(|alternative| all.add(alternative, rates));
        // From the fastest on, each that is smaller than all before is on the frontier.
        let mut order: Vec<usize> = (0..all.rows.len()).collect();
        let key = |i: &usize| (all.rows[*i].step, all.rows[*i].memory);
        order.sort_by(|a, b| key(a).partial_cmp(&key(b)).expect("times are numbers"));
        let mut least = u64::MAX;
        for i in order {
            let memory = all.rows[i].memory;
            all.rows[i].is_frontier = memory < least;
            least = least.min(memory);
        }
        all
    }

    fn add(&mut self, alternative: &Alternative, rates: &Rates) {
        let Alternative { strategy, mesh, flags, settings, also, outcome } = alternative;
        let stated = [settings.as_str(), flags.as_str()].into_iter().filter(|text| !text.is_empty());
        let flags = stated.collect::<Vec<_>>().join("; ");
        let layout = layout_text(strategy, mesh);
        match outcome {
            Outcome::Chosen { step_seconds, exposed_seconds, memory_bytes, reason }
            | Outcome::Slower { step_seconds, exposed_seconds, memory_bytes, reason, slower_by_seconds: _ } => {
                self.rows.push(Row {
                    layout,
                    flags,
                    is_chosen: matches!(outcome, Outcome::Chosen { .. }),
                    is_frontier: false,
                    step: *step_seconds,
                    tokens: rates.tokens_per_gpu(*step_seconds),
                    rate: if rates.decodes { 1.0 / step_seconds } else { rates.utilization(*step_seconds) },
                    exposed: *exposed_seconds,
                    memory: *memory_bytes,
                    reason: reason.clone(),
                    also: also.clone(),
                })
            }
            Outcome::OutOfMemory {
                step_seconds,
                exposed_seconds: _,
                memory_bytes,
                over_bytes,
                part,
                part_bytes,
            } => self.too_large.push(TooLarge {
                layout: format!("{layout} {flags}").trim_end().to_owned(),
                step: *step_seconds,
                memory: *memory_bytes,
                over: *over_bytes,
                part: (part.clone(), *part_bytes),
            }),
            Outcome::Refused { code, message, helps, repairs } => {
                let known = self.refused.iter_mut().find(|r| (&r.code, &r.message) == (code, message));
                let one = (layout, repairs.clone());
                match known {
                    Some(refusal) => refusal.layouts.push(one),
                    None => self.refused.push(Refusal {
                        code: code.clone(),
                        message: message.clone(),
                        helps: helps.clone(),
                        layouts: vec![one],
                    }),
                }
            }
        }
    }
}
