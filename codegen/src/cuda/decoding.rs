//! Programs that decode: a step of prompts and one of a token, which share weights and states.

use ithaca_device::{DeviceProgram, Source, SourceFile};
use ithaca_ir::Diagnostic;
use ithaca_ir::handover::Handover;

/// The command line of these programs, by file.
pub(super) const DRIVER: (&str, &str) = ("decode.hpp", include_str!("runtime/decode.hpp"));

/// The part of the program's own description.
pub(super) const README: &str = "
## Decoding

The program continues prompts by the largest logit: steps of prompts, or of parts of them that are too long for one step, then
`--steps` steps of a token. `--inputs` has `prompt_ids` `[sequence token]` and `prompt_lengths` `[sequence]`, `--output` is
given `tokens` `[sequence step]` and `step_logits` `[sequence step vocabulary]`. Caches, lengths and tokens stay on the GPU.
`--self-check` lets one GPU continue the same tokens and compares the logits of each step.
";

/// The namespace of the step of prompts, beside that of the step of a token.
pub(super) fn prompts_of(namespace: &str) -> String {
    format!("{namespace}_prompts")
}

/// The call that runs the program.
pub(super) fn drive(handover: Option<&Handover>, has_reference: bool) -> String {
    let pair =
        |name: &str, more: String| format!("{{{}::program(), {name}::program(){more}}}", prompts_of(name));
    let list = |ranks: &[u64]| ranks.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
    let own = handover.map_or_else(String::new, |handover| format!(", {{{}}}", list(&handover.processes[0])));
    let (ranks, whole) = (pair("ranks", own), pair("whole", String::new()));
    match has_reference {
        true => format!("decode(argc, argv, {ranks}, ithaca::Continuing{whole})"),
        false => format!("decode(argc, argv, {ranks}, std::nullopt)"),
    }
}

/// Checks that the steps of prompts leave the states that the steps of a token continue.
///
/// # Errors
/// `S40` for a state that is laid out otherwise.
pub(super) fn check_states(step: &DeviceProgram, prompts: &DeviceProgram) -> Result<(), Diagnostic> {
    let states = |program: &'_ DeviceProgram| -> Vec<Source> {
        let is_state =
            |source: &&Source| source.file == SourceFile::States && !source.binding.is_of_next_layer();
        program.sources.values().filter(is_state).cloned().collect()
    };
    let left = states(prompts);
    let is_left = |state: &Source| {
        let same = |other: &Source| {
            other.binding.name == state.binding.name
                && other.held == state.held
                && other.layers == state.layers
                && other.stored == state.stored
        };
        left.iter().any(same)
    };
    match states(step).into_iter().find(|state| !is_left(state)) {
        None => Ok(()),
        Some(state) => {
            let name = &state.binding.name;
            let message =
                format!("state `{name}` is laid out otherwise in a step of prompts than in one of a token");
            Err(Diagnostic::new("S40", message).help(
                "lay out both alike, as without options that fuse, or use `ithaca run`, which moves states",
            ))
        }
    }
}
