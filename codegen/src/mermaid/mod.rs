//! A module as a sequence diagram, in the language of Mermaid: the messages between ranks in order, with their bytes.
//!
//! Ranks are participants, grouped by their coordinates along all mesh axes but the last. A step is drawn phase by
//! phase: load, forward, backward, update. Loops over layers stay loops, runs of equal collectives are one line, and
//! repeated steps are a loop. Large meshes are drawn by some of their ranks, and a note states how many.
//!
//! Bytes are those that the busiest rank sends to others, as in plans.

mod load;
mod mesh;
mod repeat;
mod step;
mod steps;
mod write;

use ithaca_ir::Module;

/// The diagram of a per-rank module.
pub fn emit(module: &Module) -> String {
    let drawn = mesh::Drawn::of(&module.space.mesh);
    let steps = module.main().map(|main| steps::of_function(module, &drawn, main)).unwrap_or_default();
    write::diagram(module, &drawn, &load::of_module(module), &steps)
}

#[cfg(test)]
mod tests;
