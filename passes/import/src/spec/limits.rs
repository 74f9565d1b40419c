//! Limits of sizes and workloads.

use ithaca_ir::diagnostic::counted;
use ithaca_ir::ops::structure::MAX_LAYERS;
use ithaca_ir::{Diagnostic, Dim};

use crate::workload::Workload;

/// Elements of all heads together, or of the hidden layers of all experts.
pub(super) fn check_width(n: u64, what: &str, each: u64) -> Result<u64, Diagnostic> {
    let wide = n.saturating_mul(each);
    if wide > Dim::MAX_SIZE {
        let message = format!("{n} {what} of {each} elements are more than {}", Dim::MAX_SIZE);
        return Err(Diagnostic::new("M04", message));
    }
    Ok(wide)
}

pub(super) fn tokens(batch: u64, sequence: u64) -> u128 {
    u128::from(batch) * u128::from(sequence)
}

/// Checks tensors (name, rows, columns) against a bound that keeps counts of elements, bytes and FLOPs far from
/// overflow.
pub(super) fn check_elements(tensors: &[(&str, u128, u64)]) -> Result<(), Diagnostic> {
    const MAX_ELEMENTS: u128 = 1 << 48;
    for &(what, rows, columns) in tensors {
        if rows * u128::from(columns) > MAX_ELEMENTS {
            let message = format!("{what} are {rows} × {columns} elements, more than {MAX_ELEMENTS}");
            return Err(Diagnostic::new("M04", message));
        }
    }
    Ok(())
}

/// Refuses a sequence longer than the `n` learned positions that `field` states.
pub(super) fn check_positions(field: &str, n: u64, workload: &Workload) -> Result<(), Diagnostic> {
    let (tokens, flag) =
        workload.cache.map_or((workload.sequence, "--seq"), |capacity| (capacity, "--context"));
    if tokens <= n {
        return Ok(());
    }
    let length = counted(tokens, "token");
    let message = format!("a sequence of {length}, but `{field}` is {n}: later positions have no embedding");
    Err(Diagnostic::new("M08", message)
        .help(format!("ask for at most {}", counted(n, "token")))
        .repairs([format!("{flag} {n}")]))
}

/// Refuses a target length for a model with one sequence.
pub(super) fn check_no_target(model_type: &str, workload: &Workload) -> Result<(), Diagnostic> {
    match workload.target_sequence {
        None => Ok(()),
        Some(n) => Err(Diagnostic::new(
            "M10",
            format!("a target sequence of {}, but a {model_type} has one sequence", counted(n, "token")),
        )
        .help("only models with an encoder and a decoder, as t5, have a target sequence")),
    }
}

/// The number of layers, checked.
pub(crate) fn check_layers(field: &str, n: u64) -> Result<u64, Diagnostic> {
    match n {
        1..=MAX_LAYERS => Ok(n),
        _ => Err(Diagnostic::new("M04", format!("`{field}` is {n}; expected 1 to {MAX_LAYERS} layers"))),
    }
}
