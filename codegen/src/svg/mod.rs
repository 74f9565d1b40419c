//! A module as a picture: the graph of each function, in layers from its arguments down to its results.
//!
//! The vertices are those of [`crate::dot`], drawn in the same styles: collectives are filled and bold, states are
//! green. The types of a vertex's results are below its name.
//!
//! Layers, order and positions follow the method of Sugiyama, Tagawa and Toda (Methods for visual understanding of
//! hierarchical system structures, 1981), simplified for an acyclic graph in a known order.

mod layers;
mod order;
mod place;
mod write;

use ithaca_ir::Module;

use crate::dot;

/// The picture of a module.
pub fn emit(module: &Module) -> String {
    let runs = module.run_counts();
    let panels = module.functions.values().zip(runs).map(|(function, runs)| {
        let graph = dot::dataflow(module, function);
        let mut layers = layers::of_graph(&graph);
        order::untangle(&mut layers);
        let placed = place::place(&graph, &layers);
        let times = if runs == 1 { String::new() } else { format!(", {runs} times") };
        write::panel(&format!("@{}{times}", function.name), &graph, &layers, &placed)
    });
    write::document(module, panels.collect())
}

#[cfg(test)]
mod tests;
