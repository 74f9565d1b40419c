//! A module as a picture: the graph of each function, in layers from its arguments down to its results.
//!
//! The vertices are those of [`crate::dot`], drawn in the same styles: collectives are filled and bold, states are
//! green. The types of a vertex's results are below its name.
//!
//! A picture fits a page: of a function with many vertices those that do alike are one, with their number (`fold`), and its title says
//! so. Functions are in rows.
//!
//! Layers, order and positions follow the method of Sugiyama, Tagawa and Toda (Methods for visual understanding of
//! hierarchical system structures, 1981), simplified for an acyclic graph in a known order.

mod fold;
mod layers;
mod order;
mod place;
mod write;

use ithaca_ir::{Function, Module};

use crate::dot;
use write::Panel;

/// The picture of a module: its functions in rows.
pub fn emit(module: &Module) -> String {
    let runs = module.run_counts();
    let panels = module.functions.values().zip(runs).filter(|(_, runs)| *runs > 0);
    let panels = panels.map(|(function, runs)| {
        let times = if runs == 1 { String::new() } else { format!(", {runs} times") };
        panel(module, function, &times)
    });
    write::document(module, panels.collect())
}

/// The picture of one function as an element without styles of its own, for a page that has them.
pub fn function(module: &Module, function: &Function) -> String {
    write::element(&panel(module, function, ""))
}

/// The graph of a function; of a large one vertices that do alike are drawn once.
fn panel(module: &Module, function: &Function, times: &str) -> Panel {
    let (graph, note) = fold::folded(dot::dataflow(module, function));
    let mut layers = layers::of_graph(&graph);
    order::untangle(&mut layers);
    let placed = place::place(&graph, &layers);
    write::panel(&format!("@{}{times}{note}", function.name), &graph, &layers, &placed)
}

#[cfg(test)]
mod tests;
