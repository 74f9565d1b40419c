//! The checks of movements: those that apply to every movement, and those of the built-in ones.

use ithaca_ir::ops::MAX_PARTS;
use ithaca_ir::{Diagnostic, Mask};

use super::{Movement, Reach, Site, Visits};

/// The option of `gather` for the number of groups of heads.
pub(super) const GROUPS: &str = "groups";

/// Checks that `movement` has the options that are stated, each once.
///
/// # Errors
/// `P47` for another option, and for one that occurs twice.
pub(crate) fn check_options(movement: &dyn Movement, stated: &[(String, u64)]) -> Result<(), Diagnostic> {
    let name = movement.name();
    for (i, (option, n)) in stated.iter().enumerate() {
        let known = movement.options();
        if !known.iter().any(|(key, _)| key == option) {
            let message = format!("movement `{name}` has no option `{option}`, which is {n} here");
            let help = match known {
                [] => format!("write `movement={name}`"),
                [(first, _), ..] => format!("write `movement={name}` or `movement={name}({first}=…)`"),
            };
            return Err(Diagnostic::new("P47", message).help(help));
        }
        if stated[..i].iter().any(|(key, _)| key == option) {
            return Err(Diagnostic::new(
                "P47",
                format!("option `{option}` of movement `{name}` occurs twice"),
            ));
        }
    }
    Ok(())
}

/// Checks that `movement` supports the attention at `site`.
///
/// # Errors
/// Those of [`check_options`], `P41` for queries on axes outside the movement's reach, and the errors of
/// the movement itself.
pub(crate) fn admit(movement: &dyn Movement, site: &Site<'_>) -> Result<(), Diagnostic> {
    check_options(movement, site.options)?;
    let name = movement.name();
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
    movement.check(site)?;
    let by_positions = matches!(movement.visits(site), Visits::Fetch | Visits::TwoPass(_));
    if site.attention.starts && by_positions {
        let message = format!(
            "movement `{name}` needs to know the positions of queries, which stand behind tokens of a cache"
        );
        return Err(
            Diagnostic::new("P41", message).help("`gather`, `rotate`, `rotate-q` and `reduce` do not")
        );
    }
    Ok(())
}

/// Groups that divide the key/value heads of every rank.
pub(super) fn groups(site: &Site<'_>) -> Result<(), Diagnostic> {
    let groups = site.option(GROUPS).unwrap_or(1);
    if groups == 1 {
        return Ok(());
    }
    if site.attention.scaled {
        let message = "movement `gather` in groups of heads takes no caches that have scales";
        return Err(Diagnostic::new("P47", message).help("write `gather` for all heads at once"));
    }
    if groups == 0 {
        return Err(Diagnostic::new("P47", "movement `gather` has 1 group of heads or more, not 0")
            .help("write `gather` for all heads at once"));
    }
    let dim = &site.space.dims[site.attention.kv_heads];
    let degree = site.space.mesh.degree(site.head_axes);
    if !dim.divides_evenly(degree) {
        let message = format!(
            "{} key/value heads are not the same number on each of {degree} ranks, so they have no {groups} equal groups",
            dim.size / dim.granule
        );
        return Err(Diagnostic::new("P47", message)
            .help("write `movement=gather`, or use a head degree that divides"));
    }
    let held = dim.size / dim.granule / degree;
    let legal = |n: u64| n != 0 && n <= MAX_PARTS as u64 && held.is_multiple_of(n);
    if legal(groups) {
        return Ok(());
    }
    let message = format!(
        "movement `gather` in {groups} groups needs a multiple of {groups} key/value heads on a rank, and there are {held}"
    );
    let numbers: Vec<String> =
        (1..=held.min(MAX_PARTS as u64)).filter(|&n| legal(n)).map(|n| n.to_string()).collect();
    Err(Diagnostic::new("P47", message).help(format!("legal numbers of groups: {}", numbers.join(", "))))
}

/// Scores that are plain rows.
pub(super) fn two_pass(site: &Site<'_>) -> Result<(), Diagnostic> {
    let a = site.attention;
    let found = a.bias.map(|_| "a learned bias").or(a.dropout.map(|_| "dropout"));
    let found = found.or(a.ends.then_some("ends of sequences"));
    match found {
        None => Ok(()),
        Some(obstacle) => {
            let message =
                format!("movement `two-pass` keeps plain rows of scores, and this attention has {obstacle}");
            Err(Diagnostic::new("P46", message).help("strategy `ring` computes it"))
        }
    }
}

/// Causal attention along one axis, in contiguous order.
pub(super) fn balance(site: &Site<'_>) -> Result<(), Diagnostic> {
    if site.axes.len() > 1 {
        let message = format!("movement `balance` goes along one axis, not along {}", site.axes_text());
        return Err(Diagnostic::new("P41", message).help("strategy `loongtrain` takes two"));
    }
    site.need_contiguous("balance", "strategy `ring` balances by the order itself")?;
    let n = site.blocks();
    let later = (0..n).flat_map(|q| (q + 1..n).map(move |k| (q, k))).find(|&(q, k)| site.pairs(q, k) > 0);
    match later {
        None => Ok(()),
        Some((q, k)) => {
            let message = format!(
                "movement `balance` is for causal masks, but queries of block {q} see {} pairs of block {k}",
                site.pairs(q, k)
            );
            Err(Diagnostic::new("P43", message).help("strategy `ring` takes any mask"))
        }
    }
}

/// A window that is bounded on both sides, in contiguous order.
pub(super) fn halo(site: &Site<'_>) -> Result<(), Diagnostic> {
    site.need_contiguous("halo", "strategy `sparse-fetch` takes any order")?;
    match site.attention.mask.offsets() {
        Some((Some(_), Some(_))) => Ok(()),
        _ => Err(Diagnostic::new(
            "P44",
            "movement `halo` needs a mask that is a sliding window alone, bounded on both sides",
        )
        .help("strategy `sparse-fetch` takes any mask, `streaming` a window with sinks")),
    }
}

/// A window with sinks, in contiguous order.
pub(super) fn streaming(site: &Site<'_>) -> Result<(), Diagnostic> {
    site.need_contiguous("streaming", "strategy `sparse-fetch` takes any order")?;
    if has_sinks(&site.attention.mask) && has_window(&site.attention.mask) {
        return Ok(());
    }
    Err(Diagnostic::new("P44", "movement `streaming` needs a mask of sinks and a sliding window")
        .help("as `causal & (window(left=1023) | sinks(4))`; strategy `sparse-fetch` takes any mask"))
}

fn has_sinks(mask: &Mask) -> bool {
    match mask {
        Mask::Sinks(_) | Mask::Prefix(_) => true,
        Mask::All(masks) | Mask::Any(masks) => masks.iter().any(has_sinks),
        _ => false,
    }
}

fn has_window(mask: &Mask) -> bool {
    match mask {
        Mask::Window { left: Some(_), .. } => true,
        Mask::All(masks) | Mask::Any(masks) => masks.iter().any(has_window),
        _ => false,
    }
}

/// Keys of another sequence than the queries, on ranks that share queries.
pub(super) fn reduce(site: &Site<'_>) -> Result<(), Diagnostic> {
    let name = &site.space.dims[site.attention.keys].name;
    if site.attention.queries == site.attention.keys {
        let message = format!(
            "movement `reduce` needs a cache of keys, but `{name}` is the sequence of the queries too"
        );
        return Err(
            Diagnostic::new("P45", message).help("strategies `ring` and `megatron-cp-allgather` split both")
        );
    }
    let shared = site.axes.iter().all(|axis| site.query_axes.contains(axis));
    if !shared || site.axes.is_empty() {
        return Ok(());
    }
    let message = format!(
        "movement `reduce` needs ranks with the same queries and other keys, but all axes of `{name}`, {}, split the queries too",
        site.axes_text()
    );
    Err(Diagnostic::new("P45", message)
        .help("movement `gather` serves queries on any axes")
        .help("or give one of the sequences an axis of its own: `--sequence-axes`"))
}
