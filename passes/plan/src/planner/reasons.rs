//! Why a candidate won or lost, in words and figures.

use ithaca_ir::Diagnostic;
use ithaca_ir::units::{bytes, seconds};
use ithaca_layout::shard::ShardOptions;

use crate::plan::{self, Alternative, Outcome, rounded, row, why_chosen};
use crate::planner::tried::Priced;

/// A candidate that fits, beside the winner.
pub(super) fn ranked(priced: &Priced, winner: &Priced) -> Alternative {
    let Priced { options, simulation, memory, .. } = priced;
    let step_seconds = rounded(simulation.seconds);
    let exposed_seconds = rounded(simulation.exposed());
    let memory_bytes = memory.total;
    let outcome = if priced.options == winner.options {
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
    alternative(options, outcome)
}

/// A candidate that does not fit by `over` bytes.
pub(super) fn too_large(priced: &Priced, over: u64) -> Alternative {
    let Priced { options, simulation, memory, .. } = priced;
    let largest = memory.largest.first();
    let outcome = Outcome::OutOfMemory {
        step_seconds: rounded(simulation.seconds),
        exposed_seconds: rounded(simulation.exposed()),
        memory_bytes: memory.total,
        over_bytes: over,
        tensor: largest.map_or_else(String::new, |h| h.name.clone()),
        tensor_bytes: largest.map_or(0, |h| h.bytes),
    };
    alternative(options, outcome)
}

/// A candidate that is not legal.
pub(super) fn refused(options: &ShardOptions, diagnostic: &Diagnostic, repairs: Vec<String>) -> Alternative {
    let Diagnostic { code, message, helps, .. } = diagnostic;
    let (message, helps) = (message.clone(), helps.clone());
    alternative(options, Outcome::Refused { code: (*code).to_owned(), message, helps, repairs })
}

fn alternative(options: &ShardOptions, outcome: Outcome) -> Alternative {
    Alternative { strategy: options.strategy_text(), mesh: plan::mesh_axes(&options.mesh), outcome }
}

fn why_slower(priced: &Priced, winner: &Priced) -> String {
    let (this, best) = (&priced.simulation, &winner.simulation);
    let more = rounded(this.seconds) - rounded(best.seconds);
    if more <= 0.0 {
        return if priced.memory.total > winner.memory.total {
            format!("as fast, with {} more memory", bytes(priced.memory.total - winner.memory.total))
        } else {
            "as fast and as large; the winner comes first by name".to_owned()
        };
    }
    let exposed = this.exposed() - best.exposed();
    let compute = this.compute - best.compute;
    let percent = 100.0 * more / best.seconds;
    let mut causes = Vec::new();
    if exposed > 0.0 {
        let most =
            this.most_exposed().map(|(key, time)| format!(", {} in {}", seconds(time.exposed), row(key)));
        causes.push((exposed, format!("{} more exposed{}", seconds(exposed), most.unwrap_or_default())));
    }
    if compute > 0.0 {
        causes.push((compute, format!("{} more compute", seconds(compute))));
    }
    causes.retain(|c| c.0 >= 0.01 * more);
    causes.sort_by(|a, b| b.0.total_cmp(&a.0));
    let causes: Vec<String> = causes.into_iter().map(|c| c.1).collect();
    format!("{percent:.1} % slower: {}", causes.join("; "))
}
