//! The data of a report about a plan: everything that its page draws, computed once, here.
//!
//! Figures come from the plan where it states them (time, memory, bytes, alternatives), and from the simulation, the memory and the
//! prices of its schedule where it does not: the runs of tasks, memory over time, who sends to whom, kernels. Sums of those equal the
//! figures of the plan, and tests compare them.

mod alternatives;
mod kernels;
mod memory;
mod timeline;
mod traffic;

use ithaca_ir::schedule::Schedule;
use ithaca_ir::timeline::Timeline;
use ithaca_ir::units::{bytes, seconds};
use serde::Serialize;

use crate::cluster::Cluster;
use crate::plan::{Outcome, Plan, Rates, layout_text};
use crate::simulate;

pub use alternatives::{Alternatives, Refusal, Row, TooLarge};
pub use kernels::{Kernel, Kernels};
pub use memory::{MemoryOverTime, Part};
pub use timeline::{Lane, RankRow, Steps};
pub use traffic::{Flow, Traffic};

/// Runs of tasks that a page lists, about.
const LISTED: usize = 9_000;

/// The data of a page.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The name of the model.
    pub model: String,
    /// The answer in a sentence.
    pub answer: String,
    /// The figures that matter most.
    pub figures: Vec<Figure>,
    /// What was tried.
    pub alternatives: Alternatives,
    /// One step, run by run.
    pub timeline: Steps,
    /// Memory over the step.
    pub memory: Option<MemoryOverTime>,
    /// Who sends how much to whom.
    pub traffic: Traffic,
    /// Kernels against the limits of the accelerator.
    pub kernels: Kernels,
    /// What the user should know.
    pub notes: Vec<String>,
    /// Names and values of the layout and the passes.
    pub details: Vec<Figure>,
}

/// A figure with its name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Figure {
    /// The name.
    pub name: String,
    /// The value, with its unit.
    pub value: String,
    /// More about it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub detail: String,
}

impl Figure {
    fn new(name: &str, value: impl Into<String>, detail: impl Into<String>) -> Self {
        Self { name: name.to_owned(), value: value.into(), detail: detail.into() }
    }
}

impl Report {
    /// The data of a plan, and of the schedule that it compiles to.
    pub fn new(plan: &Plan, schedule: &Schedule) -> Self {
        let cluster: &Cluster = &plan.cluster;
        let rates = Rates::of(plan);
        let steps: Timeline = simulate::timeline(cluster, schedule, LISTED).unwrap_or_default();
        Self {
            model: plan.model.name.clone(),
            answer: answer(plan, &rates),
            figures: figures(plan, &rates),
            alternatives: Alternatives::new(plan, &rates),
            memory: MemoryOverTime::new(cluster, schedule, &steps),
            timeline: Steps::new(schedule, &steps, plan.time.step_seconds),
            traffic: Traffic::new(plan, schedule),
            kernels: Kernels::new(plan, schedule),
            notes: plan.notes.iter().cloned().chain(plan.assumptions()).collect(),
            details: details(plan),
        }
    }
}

/// The answer in a sentence.
fn answer(plan: &Plan, rates: &Rates) -> String {
    let layout = layout_text(&plan.strategy, &plan.mesh);
    let (time, memory) = (&plan.time, &plan.memory);
    let share = 100.0 * time.exposed_seconds / time.step_seconds;
    let among = plan.alternatives.iter().filter(|a| matches!(a.outcome, Outcome::Slower { .. })).count();
    let among = match among {
        0 => String::new(),
        1 => ", and is faster than another layout that fits".to_owned(),
        n => format!(", and is faster than {n} other layouts that fit"),
    };
    let rate = if rates.decodes {
        format!("each sequence gets {:.1} tokens a second", 1.0 / time.step_seconds)
    } else {
        format!("{:.1} % of the peak FLOP/s do useful work", 100.0 * rates.utilization(time.step_seconds))
    };
    format!(
        "With {layout} a step takes {}{among}: {rate}, {share:.1} % of the time is exposed communication, and a GPU needs {} of {} \
         of memory.",
        seconds(time.step_seconds),
        bytes(memory.total),
        bytes(memory.usable),
    )
}

fn figures(plan: &Plan, rates: &Rates) -> Vec<Figure> {
    let (time, memory) = (&plan.time, &plan.memory);
    let step = time.step_seconds;
    let per_gpu = rates.tokens_per_gpu(step);
    let mut figures = vec![
        Figure::new("Step", seconds(step), format!("kernels {}", seconds(time.compute_seconds))),
        Figure::new(
            "Throughput",
            format!("{per_gpu:.0} tokens/s per GPU"),
            format!("{:.0} tokens/s in all", per_gpu * plan.gpus as f64),
        ),
    ];
    figures.push(if rates.decodes {
        let floor = time
            .floor_seconds
            .map(|floor| format!("{:.2} times as long as to read weights and caches once", step / floor));
        Figure::new("For a user", format!("{:.1} tokens/s", 1.0 / step), floor.unwrap_or_default())
    } else {
        let utilization = format!("{:.1} %", 100.0 * rates.utilization(step));
        Figure::new("Utilization", utilization, "model FLOPs of the peak (MFU)")
    });
    let share = 100.0 * time.exposed_seconds / step;
    figures.push(Figure::new(
        "Exposed communication",
        seconds(time.exposed_seconds),
        format!("{share:.1} % of the step"),
    ));
    let used = 100.0 * memory.total as f64 / memory.usable.max(1) as f64;
    figures.push(Figure::new(
        "Memory of a GPU",
        bytes(memory.total),
        format!("{used:.0} % of {} usable", bytes(memory.usable)),
    ));
    if let Some(price) = rates.price_per_million_tokens(&plan.cluster, step) {
        figures.push(Figure::new("Price", format!("{price:.3} USD"), "for a million tokens"));
    }
    figures
}

fn details(plan: &Plan) -> Vec<Figure> {
    let mut details = vec![
        Figure::new("Layout", layout_text(&plan.strategy, &plan.mesh), ""),
        Figure::new("GPUs", format!("{} x {}", plan.gpus, plan.cluster.accelerator.name), ""),
    ];
    details.extend(plan.options.iter().map(|(key, value)| Figure::new(key, value, "")));
    for one in &plan.attention {
        let name = format!("attention of @{}", one.function);
        details.push(Figure::new(&name, format!("{}, movement {}", one.strategy, one.movement), ""));
    }
    if let Some(training) = &plan.workload.training {
        details.extend(training.options.iter().map(|(key, value)| Figure::new(key, value, "")));
    }
    details.push(Figure::new("Passes", &plan.pipeline, ""));
    details
}
