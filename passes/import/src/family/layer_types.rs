//! Kinds of block by the type of each layer, as `layer_types` states: full attention and sliding windows.

use ithaca_ir::{Diagnostic, Mask};

use crate::spec::{Kind, window};

/// Causal attention.
pub(super) const FULL: &str = "full_attention";
/// Causal attention within a window of tokens.
pub(super) const SLIDING: &str = "sliding_attention";
/// The supported types; parameters may be given for types that no layer has.
pub(super) const TYPES: &[&str] = &[FULL, SLIDING];

/// The kinds of block, in order of first appearance, and the kind of each layer.
///
/// `width` is the width of the window, or a message that says which field lacks; `kind` makes a kind from its label,
/// type and mask.
///
/// # Errors
/// `M07` when the list's length differs from the number of layers or a layer slides without a window, `M05` for an
/// unknown type, and the errors of `kind`.
pub(super) fn by_type(
    types: &[&str],
    layers: u64,
    width: Result<u64, &str>,
    kind: impl Fn(String, &str, Mask) -> Result<Kind, Diagnostic>,
) -> Result<(Vec<Kind>, Vec<usize>), Diagnostic> {
    if types.len() as u64 != layers {
        return Err(Diagnostic::new(
            "M07",
            format!("`layer_types` has {} entries, but `num_hidden_layers` is {layers}", types.len()),
        ));
    }
    let mut present: Vec<&str> = Vec::new();
    let mut kinds = Vec::new();
    let mut of_layers = Vec::new();
    for &ty in types {
        if let Some(known) = present.iter().position(|&p| p == ty) {
            of_layers.push(known);
            continue;
        }
        let (label, mask) = match (ty, width) {
            (FULL, _) => ("full", Mask::Causal),
            (SLIDING, Ok(n)) => ("window", window(n)),
            (SLIDING, Err(missing)) => {
                let message =
                    format!("`layer_types` has sliding_attention, but the model has no window: {missing}");
                return Err(Diagnostic::new("M07", message));
            }
            (other, _) => {
                return Err(Diagnostic::new("M05", format!("type of layer \"{other}\" is not supported"))
                    .help(format!("`layer_types` may hold {FULL} and {SLIDING}")));
            }
        };
        of_layers.push(present.len());
        present.push(ty);
        kinds.push(kind(label.to_owned(), ty, mask)?);
    }
    Ok((kinds, of_layers))
}
