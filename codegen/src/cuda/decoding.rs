//! Programs that decode: a step of prompts and one of a token, which share weights and states.

use ithaca_device::{DeviceProgram, Source, SourceFile};
use ithaca_ir::Diagnostic;
use ithaca_ir::handover::{Handover, MicroBatch, Pieces};

use super::{lines, names};

/// The command line of these programs.
pub(super) const DRIVE: &[(&str, &str)] = &[
    ("decode.hpp", include_str!("runtime/decode.hpp")),
    ("decode.cu", include_str!("runtime/decode.cu")),
    ("handover.hpp", include_str!("runtime/handover.hpp")),
];

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
pub(super) fn drive(has_handover: bool, has_reference: bool) -> String {
    let pair =
        |name: &str, more: String| format!("{{{}::program(), {name}::program(){more}}}", prompts_of(name));
    let own = if has_handover { ", handover".to_owned() } else { String::new() };
    let (ranks, whole) = (pair("ranks", own), pair("whole", String::new()));
    if has_reference {
        format!("decode(argc, argv, {ranks}, ithaca::Continuing{whole})")
    } else {
        format!("decode(argc, argv, {ranks}, std::nullopt)")
    }
}

/// The constant that says where states go.
pub(super) fn handover(handover: &Handover) -> String {
    fn braced(items: impl IntoIterator<Item = String>) -> String {
        format!("{{{}}}", Vec::from_iter(items).join(", "))
    }
    let pieces = |p: &Pieces| {
        let Pieces { first, count, steps: [from, to] } = p;
        format!("{{{{{}, {}}}, {}, {count}, {{{from}, {to}}}}}", first.from, first.to, first.len)
    };
    let processes = handover.processes.iter().map(|of| braced(of.iter().map(u64::to_string)));
    let mut out = String::new();
    lines::push(
        &mut out,
        0,
        &format!(
            "static const ithaca::Handover handover = {{{}, {}, {{",
            braced(processes),
            handover.rounds.len()
        ),
    );
    for (states, rounds) in handover.alike() {
        let names = braced(states.iter().map(|state| names::string(&state.name)));
        let micro_batch = |of: &Option<MicroBatch>| of.map_or("-1".to_owned(), |of| of.index.to_string());
        let micro_batches = braced(states[0].micro_batches.iter().map(micro_batch));
        lines::push(&mut out, 1, &format!("{{{names}, {micro_batches}, {{"));
        for moves in rounds {
            lines::push(&mut out, 2, "{");
            for m in moves {
                let dims = braced(m.pieces.iter().map(|of_dim| braced(of_dim.iter().map(pieces))));
                lines::push(&mut out, 3, &format!("{{{{{}, {}}}, {dims}}},", m.from, m.to));
            }
            lines::push(&mut out, 2, "},");
        }
        lines::push(&mut out, 1, "}},");
    }
    lines::push(&mut out, 0, "}};");
    out.push('\n');
    out
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
                && other.resident == state.resident
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
            Err(Diagnostic::new("S40", message)
                .help("lay out both alike, as without options that fuse, or hand states over"))
        }
    }
}
