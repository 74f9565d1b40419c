//! Why a candidate won or lost, in words and figures.

use ithaca_ir::Diagnostic;
use ithaca_ir::units::{bytes, seconds};
use ithaca_layout::shard::ShardOptions;

use crate::plan::{self, Alternative, Outcome, rounded, row, why_chosen};
use crate::planner::outcomes::Priced;
use crate::simulate::{CommTime, Simulation};

/// A candidate that fits, beside the winner.
pub(super) fn ranked(priced: &Priced, winner: &Priced) -> Alternative {
    let Priced { options, simulation, memory, .. } = priced;
    let step_seconds = rounded(simulation.seconds);
    let exposed_seconds = rounded(simulation.exposed());
    let memory_bytes = memory.total;
    let outcome = if (&priced.options, &priced.training) == (&winner.options, &winner.training) {
        Outcome::Chosen { step_seconds, exposed_seconds, memory_bytes, reason: why_chosen(simulation) }
    } else {
        Outcome::Slower {
            step_seconds,
            exposed_seconds,
            memory_bytes,
            slower_by_seconds: rounded(step_seconds - rounded(winner.simulation.seconds)),
            reason: why_slower(priced, winner),
        }
    };
    Alternative { also: priced.also.clone(), flags: priced.flags.clone(), ..alternative(options, outcome) }
}

/// A candidate that does not fit by `over` bytes.
pub(super) fn too_large(priced: &Priced, over: u64) -> Alternative {
    let Priced { options, simulation, memory, .. } = priced;
    let parts = memory.parts();
    let (part, part_bytes) = parts.first().copied().unwrap_or_default();
    let outcome = Outcome::OutOfMemory {
        step_seconds: rounded(simulation.seconds),
        exposed_seconds: rounded(simulation.exposed()),
        memory_bytes: memory.total,
        over_bytes: over,
        part: part.to_owned(),
        part_bytes,
    };
    Alternative { flags: priced.flags.clone(), ..alternative(options, outcome) }
}

/// A candidate that is not legal.
pub(super) fn refused(options: &ShardOptions, diagnostic: &Diagnostic, repairs: Vec<String>) -> Alternative {
    let Diagnostic { code, message, helps, .. } = diagnostic;
    let (message, helps) = (message.clone(), helps.clone());
    alternative(options, Outcome::Refused { code: (*code).to_owned(), message, helps, repairs })
}

fn alternative(options: &ShardOptions, outcome: Outcome) -> Alternative {
    Alternative {
        strategy: options.strategy_text(),
        mesh: plan::mesh_axes(&options.mesh),
        flags: String::new(),
        settings: String::new(),
        also: Vec::new(),
        outcome,
    }
}

/// The parts of the step that differ from the winner's, with their signs: they add up to the difference of the steps.
fn why_slower(priced: &Priced, winner: &Priced) -> String {
    let (this, best) = (&priced.simulation, &winner.simulation);
    let more = rounded(this.seconds) - rounded(best.seconds);
    if more <= 0.0 {
        return if priced.memory.total > winner.memory.total {
            format!("as fast, {} more memory", bytes(priced.memory.total - winner.memory.total))
        } else {
            "as fast and as large; later by name".to_owned()
        };
    }
    let exposed = this.exposed() - best.exposed();
    let compute = this.compute - best.compute;
    let idle = (this.seconds - best.seconds) - exposed - compute;
    let longest = if exposed > 0.0 { more_exposed(this, best) } else { String::new() };
    let mut parts = vec![
        (exposed, format!("exposed{longest}")),
        (compute, "compute".to_owned()),
        (idle, "idle".to_owned()),
    ];
    // The rest is below the digits of the difference.
    parts.retain(|(seconds, _)| seconds.abs() >= 0.005 * more);
    parts.sort_by(|a, b| b.0.total_cmp(&a.0));
    let part = |(part, what): &(f64, String)| {
        let sign = if *part < 0.0 { '-' } else { '+' };
        format!("{sign}{} {what}", seconds(part.abs()))
    };
    parts.iter().map(part).collect::<Vec<_>>().join(", ")
}

/// The row of collectives whose exposed time is most above the winner's.
fn more_exposed(this: &Simulation, best: &Simulation) -> String {
    let above = |key: &(&'static str, String), time: &CommTime| {
        time.exposed - best.communication.get(key).map_or(0.0, |other| other.exposed)
    };
    let rows = this.communication.iter().map(|(key, time)| (above(key, time), key));
    let most = rows.max_by(|a, b| a.0.total_cmp(&b.0));
    most.map_or_else(String::new, |(_, key)| format!(" {}", row(key)))
}
