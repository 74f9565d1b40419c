//! A module as a sequence diagram, in the language of Mermaid: the messages between ranks in order, with their bytes.
//!
//! Ranks are participants, grouped by their coordinates along all mesh axes but the last. A step is drawn phase by
//! phase: load, forward, backward, update. Loops over layers stay loops, runs of equal collectives are one line, and
//! repeated steps are a loop. Large meshes are drawn by some of their ranks, and a note states how many.
//!
//! A diagram stays below the 50 000 characters that Mermaid takes.
//!
//! Bytes are those that the busiest rank holds, or sends to others, as in plans.

mod load;
mod mesh;
mod repeat;
mod step;
mod steps;
mod write;

use ithaca_ir::Module;

/// The longest text that Mermaid draws unless it is configured otherwise (`maxTextSize`), characters.
const MOST: usize = 50_000;

/// The diagram of a per-rank module. One that would be too long for Mermaid has equal steps and functions once, and a note that says so.
pub fn emit(module: &Module) -> String {
    let drawn = mesh::Drawn::of(&module.space.mesh);
    let load = load::of_module(module);
    let steps = module.main().map(|main| steps::of_function(module, &drawn, main)).unwrap_or_default();
    let whole = write::diagram(module, &drawn, &load, &steps, None);
    if whole.len() < MOST {
        return whole;
    }
    let note =
        "equal steps of micro-batches are drawn where they first occur, and a function by its first call";
    write::diagram(module, &drawn, &load, &repeat::once(steps), Some(note))
}

#[cfg(test)]
mod tests;
