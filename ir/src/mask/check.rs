//! Whether a mask fits the sequences of an attention.

use crate::dim::Dim;
use crate::mask::Mask;
use crate::ops::error::OpError;

/// How deep intersections and unions may nest; the text form reads as much.
const MAX_DEPTH: usize = 8;

/// Refuses a mask whose numbers are not those of its queries and keys: the valid ones, for padding is no token.
pub(crate) fn check(mask: &Mask, queries: &Dim, keys: &Dim) -> Result<(), OpError> {
    check_nested(mask, queries, keys, 0).map_err(|message| OpError::new("V25", message))
}

fn check_nested(mask: &Mask, queries: &Dim, keys: &Dim, depth: usize) -> Result<(), String> {
    let of = |dim: &Dim| format!("`{}` has {} tokens", dim.name, dim.valid);
    match mask {
        Mask::Full | Mask::Window { .. } => Ok(()),
        Mask::Causal => aligned(queries, keys),
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
        Mask::GlobalAt(at) => global_at(at, keys),
        Mask::Documents(bounds) => [queries, keys].iter().try_for_each(|dim| documents(bounds, dim)),
        Mask::DocumentPairs { queries: of_q, keys: of_k, causal: _ } => {
            documents(of_q, queries)?;
            documents(of_k, keys)?;
            match of_q.len() == of_k.len() {
                true => Ok(()),
                false => Err(format!(
                    "mask `documents` has {} documents of queries and {} of keys",
                    of_q.len() - 1,
                    of_k.len() - 1
                )),
            }
        }
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

/// A bare `causal` says which query faces which key only where there are as many of both.
fn aligned(queries: &Dim, keys: &Dim) -> Result<(), String> {
    let (n_q, n_k) = (queries.valid, keys.valid);
    match n_q == n_k {
        true => Ok(()),
        false => Err(format!(
            "mask `causal` between the {n_q} tokens of `{}` and the {n_k} of `{}` does not say how they are aligned: \
             `causal(queries={n_q}, keys={n_k})` aligns their ends, `window(right=0)` their starts",
            queries.name, keys.name
        )),
    }
}

fn global_at(at: &[u64], keys: &Dim) -> Result<(), String> {
    if at.is_empty() {
        return Err("mask `global_at` names no token".to_owned());
    }
    ascending("the positions of mask `global_at`", at)?;
    let last = at[at.len() - 1];
    match last < keys.valid {
        true => Ok(()),
        false => Err(format!(
            "mask `global_at` has position {last}, but `{}` has {} tokens",
            keys.name, keys.valid
        )),
    }
}

fn documents(bounds: &[u64], dim: &Dim) -> Result<(), String> {
    if bounds.first() != Some(&0) {
        let found = bounds.first().map_or("missing".to_owned(), u64::to_string);
        return Err(format!("the first bound of mask `documents` is {found}, not 0"));
    }
    ascending("the bounds of mask `documents`", bounds)?;
    let last = bounds[bounds.len() - 1];
    match dim.valid == last {
        true => Ok(()),
        false => Err(format!(
            "the documents of a mask end at token {last}, but `{}` has {} tokens",
            dim.name, dim.valid
        )),
    }
}

fn ascending(what: &str, numbers: &[u64]) -> Result<(), String> {
    match numbers.windows(2).find(|pair| pair[0] >= pair[1]) {
        None => Ok(()),
        Some(pair) => Err(format!("{what} must ascend, but {} comes after {}", pair[1], pair[0])),
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
        ascending(&format!("row {i} of mask `blocks`"), row)?;
        if let Some(last) = row.last().filter(|&&block| block >= n_columns) {
            return Err(format!(
                "row {i} of mask `blocks` has block {last}, but the {} tokens of `{}` are {n_columns} blocks of {size}",
                keys.valid, keys.name
            ));
        }
    }
    Ok(())
}
