//! Limits of sizes, and what a workload must not ask for.

use ithaca_ir::diagnostic::counted;
use ithaca_ir::ops::structure::MAX_LAYERS;
use ithaca_ir::{Diagnostic, Dim};

use crate::workload::Workload;

/// Elements of all heads together.
pub(super) fn check_heads(heads: u64, head_dim: u64) -> Result<u64, Diagnostic> {
    let wide = heads.saturating_mul(head_dim);
    match wide > Dim::MAX_SIZE {
        true => Err(Diagnostic::new(
            "M04",
            format!("{heads} heads of {head_dim} elements are more than {}", Dim::MAX_SIZE),
        )),
        false => Ok(wide),
    }
}

pub(super) fn tokens(batch: u64, sequence: u64) -> u128 {
    u128::from(batch) * u128::from(sequence)
}

/// Bounds tensors (what they are, rows, columns), so that counts of elements, bytes and FLOPs stay far from overflow.
pub(super) fn check_elements(tensors: &[(&str, u128, u64)]) -> Result<(), Diagnostic> {
    const MAX_ELEMENTS: u128 = 1 << 48;
    for &(what, rows, columns) in tensors {
        if rows * u128::from(columns) > MAX_ELEMENTS {
            return Err(Diagnostic::new(
                "M04",
                format!("{what} are {rows} × {columns} elements, more than {MAX_ELEMENTS}"),
            ));
        }
    }
    Ok(())
}

/// Refuses a sequence beyond the learned positions, of which `field` says that there are `n`.
pub(super) fn check_positions(field: &str, n: u64, workload: &Workload) -> Result<(), Diagnostic> {
    if workload.sequence <= n {
        return Ok(());
    }
    Err(Diagnostic::new(
        "M08",
        format!(
            "a sequence of {}, but `{field}` is {n}: positions beyond have no embedding",
            counted(workload.sequence, "token")
        ),
    )
    .help(format!("ask for at most {}", counted(n, "token")))
    .repairs([format!("--seq {n}")]))
}

/// Refuses a length of targets for a model that has one sequence only.
pub(super) fn check_no_target(model_type: &str, workload: &Workload) -> Result<(), Diagnostic> {
    match workload.target_sequence {
        None => Ok(()),
        Some(n) => Err(Diagnostic::new(
            "M10",
            format!("a target sequence of {}, but a {model_type} has one sequence", counted(n, "token")),
        )
        .help("only models with an encoder and a decoder have a target sequence, as t5 has")),
    }
}

/// The number of layers, checked.
pub(crate) fn check_layers(field: &str, n: u64) -> Result<u64, Diagnostic> {
    match n {
        1..=MAX_LAYERS => Ok(n),
        _ => Err(Diagnostic::new("M04", format!("`{field}` is {n}; expected 1 to {MAX_LAYERS} layers"))),
    }
}
