//! The parts of the memory of a rank, in words.

use ithaca_ir::units;

use super::Memory;

/// Parts below this share of the whole are not worth a word.
const LEAST: f64 = 0.02;

impl Memory {
    /// The parts with their bytes, largest first, in words that need no knowledge of the schedule.
    pub fn parts(&self) -> Vec<(&'static str, u64)> {
        let Memory { parameters, gradients, optimizer, states, arena, communication, scores, .. } = *self;
        let (saved, inputs, outputs) = (self.saved, self.inputs, self.outputs);
        let mut parts = vec![
            ("parameters", parameters),
            ("gradients", gradients),
            ("optimizer states", optimizer),
            ("other states", states),
            ("activations saved for the backward pass", saved),
            ("outputs", outputs),
            ("communication buffers", communication),
            ("activations in use", arena.saturating_sub(saved + outputs + communication)),
            ("scores of attention", scores),
            ("inputs", inputs),
        ];
        parts.retain(|(_, bytes)| *bytes > 0);
        parts.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        parts
    }

    /// The parts that matter, as text: `optimizer states 98.55 GiB, gradients 32.83 GiB`.
    pub fn in_words(&self) -> String {
        let matters = |(_, bytes): &&(&str, u64)| *bytes as f64 >= LEAST * self.total as f64;
        let parts = self.parts();
        let parts = parts.iter().filter(matters);
        parts.map(|(name, size)| format!("{name} {}", units::bytes(*size))).collect::<Vec<_>>().join(", ")
    }
}
