//! The attribute of several collectives that travel as one message: a list of them.

use super::{Attr, AttrError, Attrs, Names};
use crate::ops::Op;
use crate::ops::coalesced::may_coalesce;

/// `ops=[all_to_all(axis=u, split=h, concat=s), permute]`.
pub(super) fn attrs(members: &[Op], names: Names<'_>) -> Vec<(&'static str, Attr)> {
    let member = |op: &Op| {
        let attrs: Vec<_> = op.attrs(names).into_iter().map(|(k, v)| (k.to_owned(), v)).collect();
        match attrs.is_empty() {
            true => Attr::Word(op.name().to_owned()),
            false => Attr::Call(op.name().to_owned(), attrs),
        }
    };
    vec![("ops", Attr::List(members.iter().map(member).collect()))]
}

pub(super) fn read(attrs: &mut Attrs, names: Names<'_>) -> Result<Op, AttrError> {
    let expected = "a list of collectives";
    let items = match attrs.required("ops")? {
        Attr::List(items) => items,
        other => return Err(attrs.wrong("ops", expected, &other)),
    };
    let member = |item: Attr| {
        let (name, args) = match &item {
            Attr::Word(name) => (name, Vec::new()),
            Attr::Call(name, args) => (name, args.clone()),
            other => return Err(attrs.wrong("ops", expected, other)),
        };
        // Read by name before attributes, so that a list in a list is refused and not followed.
        match name.as_str() {
            "all_to_all" | "all_gather" | "reduce_scatter" | "all_reduce" | "permute" => {}
            other => return Err(format!("`{other}` cannot be coalesced with other collectives")),
        }
        let op = Op::from_attrs(name, Attrs::new(name.as_str(), args), names);
        op.unwrap_or_else(|| Err(attrs.wrong("ops", expected, &item)))
    };
    let members: Vec<Op> = items.into_iter().map(member).collect::<Result<_, _>>()?;
    debug_assert!(members.iter().all(may_coalesce), "only collectives that may be coalesced are read");
    Ok(Op::Coalesced(members))
}
