//! Why a plan was chosen, in words and figures.

use ithaca_ir::units::seconds;

use crate::simulate::Simulation;

/// Why a plan was chosen: it takes the least time; and the part of that time that is communication.
pub fn why_chosen(simulation: &Simulation) -> String {
    match simulation.most_exposed() {
        None => "chosen: no communication is exposed".to_owned(),
        Some((key, time)) => {
            let part = 100.0 * simulation.exposed() / simulation.seconds;
            format!("chosen: {part:.1} % exposed, {} in {}", seconds(time.exposed), row(key))
        }
    }
}

/// A row of collectives as messages name it.
pub(crate) fn row((kind, axis): &(&'static str, String)) -> String {
    match axis.as_str() {
        "" => (*kind).to_owned(),
        axis => format!("{kind}/{axis}"),
    }
}
