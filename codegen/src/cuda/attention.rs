//! What an emitted program says of an attention: roles, positions, mask, and how scores are made.

use ithaca_ir::ops::{Attention, Dropout, Keyed, Sides};
use ithaca_ir::{Diagnostic, DimId, TensorType};

use super::names;
use super::program::Context;

/// Initializers of `struct Attention` for operands of which `rows` has the queries and `columns` has the keys.
pub(super) fn describe(
    cx: &mut Context<'_>,
    a: &Attention,
    rows: &TensorType,
    columns: &TensorType,
) -> Result<String, Diagnostic> {
    if let Some(movement) = &a.movement {
        let message = format!(
            "the schedule has an attention with movement `{}`, which has no emitted form",
            movement.name
        );
        return Err(Diagnostic::new("S40", message).help("run `lower-movements` before lowering"));
    }
    let one_run = |dim: DimId| {
        let degree = cx.schedule.space.mesh.degree(rows.axes_of(dim));
        cx.schedule.space.dims[dim].part.is_none_or(|part| part.runs == degree)
    };
    if a.dropout.is_some() && !one_run(a.heads) {
        let message = "the schedule has an attention with dropout over parts of heads of several ranks at once, \
                       which has no emitted form";
        return Err(Diagnostic::new("S40", message));
    }
    let [queries, keys] = [(rows, a.queries), (columns, a.keys)].map(|(ty, dim)| sequence(cx, ty, dim));
    let mut fields = vec![
        cx.dim(a.heads).to_owned(),
        cx.dim(a.kv_heads).to_owned(),
        cx.dim(a.keys).to_owned(),
        queries?,
        keys?,
        mask(cx, a),
        names::double(a.scale),
        names::double(a.softcap.unwrap_or(0.0)),
    ];
    let buckets = match &a.bias {
        None => "{}".to_owned(),
        Some(bias) => {
            let n = cx.schedule.space.size(bias.buckets);
            let (table, per_side) = cx.tables.buckets(bias, n);
            let both = match bias.sides {
                Sides::Both => "true",
                Sides::Before => "false",
            };
            format!("{{device.table({table}), {per_side}, {both}}}")
        }
    };
    match &a.dropout {
        None if a.bias.is_none() => {}
        None => fields.push(buckets),
        Some(dropout) => fields.extend([buckets, drops(dropout)?]),
    }
    Ok(format!("{{{}}}", fields.join(", ")))
}

/// The elements of a query and of a value, for which kernels on tensor cores are chosen where the program is compiled.
pub(super) fn widths(cx: &Context<'_>, queries: &TensorType, values: &TensorType) -> String {
    let width = |ty: &TensorType| ty.dims.last().map_or(0, |&dim| cx.schedule.space.size(dim));
    format!("{}, {}", width(queries), width(values))
}

/// The positions of a dimension of a tensor, as this rank holds it.
pub(super) fn sequence(cx: &mut Context<'_>, ty: &TensorType, dim: DimId) -> Result<String, Diagnostic> {
    let Some(place) = ty.position(dim) else {
        let message =
            format!("the schedule has a tensor without `{}`, whose positions are asked for", cx.dim(dim));
        return Err(Diagnostic::new("S40", message));
    };
    Ok(format!("device.sequence({})", cx.tables.sequence(ty, place)))
}

/// One band is two numbers; any other mask is a table of its strips.
fn mask(cx: &mut Context<'_>, a: &Attention) -> String {
    match a.mask.band() {
        Some([left, right]) => format!("band({left}, {right})"),
        None => {
            let space = &cx.schedule.space;
            let [queries, keys] = [a.queries, a.keys].map(|d| space.size(space.sequence(d)));
            format!("strips(device.table({}))", cx.tables.mask(&a.mask, queries, keys))
        }
    }
}

fn drops(dropout: &Dropout) -> Result<String, Diagnostic> {
    match dropout.keyed {
        Keyed::Position => Ok(format!("{{{}, {}u}}", names::double(dropout.rate), dropout.seed)),
        Keyed::Stream => {
            let message = "dropout of an emitted attention is keyed by the order in which a device computes: the ranks \
                           would drop other weights than one device does, and backward other ones than forward";
            Err(Diagnostic::new("S42", message)
                .help("key it by position: dropout=uniform(…, keyed=position)"))
        }
    }
}
