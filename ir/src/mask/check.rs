//! Whether a mask fits the sequences of an attention.

use super::Mask;
use crate::dim::Dim;
use crate::ops::OpError;

/// How deep intersections and unions may nest; the text form reads as much.
const MAX_DEPTH: usize = 8;

/// Refuses a mask whose numbers are not those of its queries and keys: the valid ones, for padding is no token.
pub(crate) fn check(mask: &Mask, queries: &Dim, keys: &Dim) -> Result<(), OpError> {
    check_nested(mask, queries, keys, 0).map_err(|message| OpError::new("V25", message))
}

fn check_nested(mask: &Mask, queries: &Dim, keys: &Dim, depth: usize) -> Result<(), String> {
    let of = |dim: &Dim| format!("`{}` has {} tokens", dim.name, dim.valid);
    match mask {
        Mask::Full | Mask::Causal | Mask::Window { .. } => Ok(()),
        Mask::CausalAtEnd { queries: n_q, keys: n_k } => match (*n_q, *n_k) == (queries.valid, keys.valid) {
            true => Ok(()),
            false => Err(format!(
                "mask `causal` is for {n_q} queries and {n_k} keys, but {} and {}",
                of(queries),
                of(keys)
            )),
        },
        Mask::Prefix(n) => first_tokens("prefix", *n, keys),
        Mask::Sinks(n) => first_tokens("sinks", *n, keys),
        Mask::Global(n) => first_tokens("global", *n, keys),
        Mask::Documents(bounds) => documents(bounds, queries, keys),
        Mask::Blocks { size, rows } => blocks(*size, rows, queries, keys),
        Mask::All(masks) | Mask::Any(masks) => {
            if masks.len() < 2 {
                return Err("a mask joins fewer than two masks".to_owned());
            }
            if depth == MAX_DEPTH {
                return Err(format!("a mask nests deeper than {MAX_DEPTH} levels"));
            }
            masks.iter().try_for_each(|mask| check_nested(mask, queries, keys, depth + 1))
        }
    }
}

fn first_tokens(name: &str, n: u64, keys: &Dim) -> Result<(), String> {
    match (1..=keys.valid).contains(&n) {
        true => Ok(()),
        false => Err(format!(
            "mask `{name}({n})` must name from 1 to all {} tokens of `{}`",
            keys.valid, keys.name
        )),
    }
}

fn documents(bounds: &[u64], queries: &Dim, keys: &Dim) -> Result<(), String> {
    if bounds.first() != Some(&0) {
        let found = bounds.first().map_or("missing".to_owned(), u64::to_string);
        return Err(format!("the first bound of mask `documents` is {found}, not 0"));
    }
    if let Some(i) = bounds.windows(2).position(|pair| pair[0] >= pair[1]) {
        return Err(format!(
            "the bounds of mask `documents` must ascend, but {} comes after {}",
            bounds[i + 1],
            bounds[i]
        ));
    }
    let last = bounds[bounds.len() - 1];
    match [queries, keys].into_iter().find(|dim| dim.valid != last) {
        None => Ok(()),
        Some(dim) => Err(format!(
            "the documents of a mask end at token {last}, but `{}` has {} tokens",
            dim.name, dim.valid
        )),
    }
}

fn blocks(size: u64, rows: &[Vec<u64>], queries: &Dim, keys: &Dim) -> Result<(), String> {
    if size == 0 {
        return Err("the blocks of mask `blocks` have no token".to_owned());
    }
    let [n_rows, n_columns] = [queries, keys].map(|dim| dim.valid.div_ceil(size));
    if rows.len() as u64 > n_rows {
        return Err(format!(
            "mask `blocks` has {} rows, but the {} tokens of `{}` are {n_rows} blocks of {size}",
            rows.len(),
            queries.valid,
            queries.name
        ));
    }
    for (i, row) in rows.iter().enumerate() {
        if let Some(pair) = row.windows(2).find(|pair| pair[0] >= pair[1]) {
            return Err(format!(
                "row {i} of mask `blocks` must ascend, but {} comes after {}",
                pair[1], pair[0]
            ));
        }
        if let Some(last) = row.last().filter(|&&block| block >= n_columns) {
            return Err(format!(
                "row {i} of mask `blocks` has block {last}, but the {} tokens of `{}` are {n_columns} blocks of {size}",
                keys.valid, keys.name
            ));
        }
    }
    Ok(())
}
