//! Checks that apply to every movement: its options, the axes of queries and keys, and its own rules.

use ithaca_ir::Diagnostic;

use super::{Movement, Reach, Site};

/// Checks that `movement` supports the attention at `site`.
///
/// # Errors
/// `P47` for an unknown or repeated option, `P41` for queries on axes outside the movement's reach, and the errors of
/// the movement itself.
pub(crate) fn admit(movement: &dyn Movement, site: &Site<'_>) -> Result<(), Diagnostic> {
    let name = movement.name();
    for (i, (option, n)) in site.options.iter().enumerate() {
        let known = movement.options();
        if !known.iter().any(|(key, _)| key == option) {
            let message = format!("movement `{name}` has no option `{option}`, which is {n} here");
            let help = match known {
                [] => format!("write `movement={name}`"),
                [(first, _), ..] => format!("write `movement={name}` or `movement={name}({first}=…)`"),
            };
            return Err(Diagnostic::new("P47", message).help(help));
        }
        if site.options[..i].iter().any(|(key, _)| key == option) {
            return Err(Diagnostic::new(
                "P47",
                format!("option `{option}` of movement `{name}` stands twice"),
            ));
        }
    }
    if movement.reach() == Reach::SameAxes && site.query_axes != site.axes {
        let dims = &site.space.dims;
        let (queries, keys) = (&dims[site.attention.queries].name, &dims[site.attention.keys].name);
        let split = |dim: &str, axes: String| {
            if axes.is_empty() { format!("`{dim}` is whole") } else { format!("`{dim}` is split by {axes}") }
        };
        let message = format!(
            "movement `{name}` brings blocks of keys to blocks of queries on the same axes, but queries {} and keys {}",
            split(queries, site.space.mesh.degrees_text(site.query_axes)),
            split(keys, site.axes_text()),
        );
        return Err(Diagnostic::new("P41", message)
            .help("`gather` and `reduce` serve queries on any axes: `--cross-movement gather`")
            .help("or split both sequences by the same axes"));
    }
    movement.check(site)
}
