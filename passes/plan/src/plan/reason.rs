//! Why a plan was chosen, in words and figures.

use ithaca_ir::units::seconds;

use crate::simulate::Simulation;

/// Why a plan was chosen: it takes the least time; and the part of that time that is communication.
pub fn why_chosen(simulation: &Simulation) -> String {
    match simulation.most_exposed() {
        None => "least step time; no communication is exposed".to_owned(),
        Some((key, time)) => {
            let part = 100.0 * simulation.exposed() / simulation.seconds;
            let row = row(key);
            format!(
                "least step time; {part:.1} % of it is exposed communication, most in {row}: {}",
                seconds(time.exposed)
            )
        }
    }
}

/// A row of collectives as messages name it.
pub(crate) fn row((kind, axis): &(&'static str, String)) -> String {
    match axis.as_str() {
        "" => (*kind).to_owned(),
        axis => format!("{kind} over {axis}"),
    }
}
