//! Whether a mask fits the sequences of an attention.

use crate::dim::Dim;
use crate::mask::Mask;
use crate::ops::error::{OpError, ensure};

/// How deep intersections and unions may nest; the text form reads as much.
const MAX_DEPTH: usize = 8;

/// Refuses a mask whose numbers are not those of its queries and keys: the valid ones, for padding is no token.
pub(crate) fn check(mask: &Mask, queries: &Dim, keys: &Dim) -> Result<(), OpError> {
    check_nested(mask, queries, keys, 0)
}

fn check_nested(mask: &Mask, queries: &Dim, keys: &Dim, depth: usize) -> Result<(), OpError> {
    let of = |dim: &Dim| format!("`{}` has {} tokens", dim.name, dim.valid);
    match mask {
        Mask::Full | Mask::Window { .. } => {}
        Mask::Causal => aligned(queries, keys)?,
        Mask::CausalAtEnd { queries: n_q, keys: n_k } => ensure!(
            (*n_q, *n_k) == (queries.valid, keys.valid),
            "V25",
            "mask `causal` is for {n_q} queries and {n_k} keys, but {} and {}",
            of(queries),
            of(keys)
        ),
        Mask::Prefix(n) => first_tokens("prefix", *n, keys)?,
        Mask::Sinks(n) => first_tokens("sinks", *n, keys)?,
        Mask::Global(n) => first_tokens("global", *n, keys)?,
        Mask::GlobalAt(at) => global_at(at, keys)?,
        Mask::Chunks(size) => ensure!(*size > 0, "V25", "the chunks of mask `chunks` have no token"),
        Mask::Documents(bounds) => [queries, keys].iter().try_for_each(|dim| documents(bounds, dim))?,
        Mask::DocumentPairs { queries: of_q, keys: of_k, causal: _ } => {
            documents(of_q, queries)?;
            documents(of_k, keys)?;
            let [n_q, n_k] = [of_q, of_k].map(|bounds| bounds.len() - 1);
            ensure!(n_q == n_k, "V25", "mask `documents` has {n_q} documents of queries and {n_k} of keys");
        }
        Mask::Blocks { size, rows } => blocks(*size, rows, queries, keys)?,
        Mask::All(masks) | Mask::Any(masks) => {
            ensure!(masks.len() >= 2, "V25", "a mask joins fewer than two masks");
            ensure!(depth != MAX_DEPTH, "V25", "a mask nests deeper than {MAX_DEPTH} levels");
            masks.iter().try_for_each(|mask| check_nested(mask, queries, keys, depth + 1))?;
        }
    }
    Ok(())
}

fn first_tokens(name: &str, n: u64, Dim { name: dim, valid, .. }: &Dim) -> Result<(), OpError> {
    let fits = (1..=*valid).contains(&n);
    ensure!(fits, "V25", "mask `{name}({n})` must name from 1 to all {valid} tokens of `{dim}`");
    Ok(())
}

/// A bare `causal` says which query faces which key only where there are as many of both.
fn aligned(queries: &Dim, keys: &Dim) -> Result<(), OpError> {
    let (n_q, n_k) = (queries.valid, keys.valid);
    ensure!(
        n_q == n_k,
        "V25",
        "mask `causal` between the {n_q} tokens of `{}` and the {n_k} of `{}` does not say how they are aligned: \
         `causal(queries={n_q}, keys={n_k})` aligns their ends, `window(right=0)` their starts",
        queries.name,
        keys.name
    );
    Ok(())
}

fn global_at(at: &[u64], Dim { name, valid, .. }: &Dim) -> Result<(), OpError> {
    let last = at.last().copied().unwrap_or(0);
    ensure!(!at.is_empty(), "V25", "mask `global_at` names no token");
    ascending("the positions of mask `global_at`", at)?;
    ensure!(last < *valid, "V25", "mask `global_at` has position {last}, but `{name}` has {valid} tokens");
    Ok(())
}

fn documents(bounds: &[u64], Dim { name, valid, .. }: &Dim) -> Result<(), OpError> {
    let found = bounds.first().map_or("missing".to_owned(), u64::to_string);
    ensure!(found == "0", "V25", "the first bound of mask `documents` is {found}, not 0");
    ascending("the bounds of mask `documents`", bounds)?;
    let last = bounds[bounds.len() - 1];
    ensure!(
        *valid == last,
        "V25",
        "the documents of a mask end at token {last}, but `{name}` has {valid} tokens"
    );
    Ok(())
}

fn ascending(what: &str, numbers: &[u64]) -> Result<(), OpError> {
    let turn = numbers.windows(2).find(|pair| pair[0] >= pair[1]).unwrap_or(&[]);
    ensure!(turn.is_empty(), "V25", "{what} must ascend, but {} comes after {}", turn[1], turn[0]);
    Ok(())
}

fn blocks(size: u64, rows: &[Vec<u64>], queries: &Dim, keys: &Dim) -> Result<(), OpError> {
    ensure!(size != 0, "V25", "the blocks of mask `blocks` have no token");
    let [n_rows, n_columns] = [queries, keys].map(|dim| dim.valid.div_ceil(size));
    let tokens = |dim: &Dim| format!("the {} tokens of `{}`", dim.valid, dim.name);
    let n = rows.len() as u64;
    ensure!(
        n <= n_rows,
        "V25",
        "mask `blocks` has {n} rows, but {} are {n_rows} blocks of {size}",
        tokens(queries)
    );
    for (i, row) in rows.iter().enumerate() {
        ascending(&format!("row {i} of mask `blocks`"), row)?;
        let last = row.last().copied().unwrap_or(0);
        ensure!(
            row.is_empty() || last < n_columns,
            "V25",
            "row {i} of mask `blocks` has block {last}, but {} are {n_columns} blocks of {size}",
            tokens(keys)
        );
    }
    Ok(())
}
