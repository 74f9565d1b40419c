//! The text form of masks, as attributes.

use crate::mask::{Align, Mask};
use crate::ops::attr::{Attr, AttrError, Attrs, Names};
use crate::ops::attribute::{Refused, Value};

impl Value for Mask {
    const KIND: &'static str = "a mask";

    fn to_attr(&self, _: Names<'_>) -> Attr {
        to_attr(self)
    }

    fn from_attr(attr: Attr, _: Names<'_>) -> Result<Self, Refused> {
        from_attr(attr).map_err(Refused::Message)
    }
}

/// The mask as an attribute.
pub(super) fn to_attr(mask: &Mask) -> Attr {
    let int = |key: &str, n: u64| (key.to_owned(), Attr::Int(n));
    let call = |name: &str, args: Vec<(String, Attr)>| Attr::Call(name.to_owned(), args);
    let numbers = |name: &str, numbers: &[u64]| Attr::Numbers(name.to_owned(), numbers.to_vec());
    match mask {
        Mask::Full => Attr::Word("full".to_owned()),
        Mask::Causal => Attr::Word("causal".to_owned()),
        Mask::CausalAtEnd { queries, keys } => {
            call("causal", vec![int("queries", *queries), int("keys", *keys)])
        }
        Mask::Window { left, right } => {
            let sides = [left.map(|n| int("left", n)), right.map(|n| int("right", n))];
            call("window", sides.into_iter().flatten().collect())
        }
        Mask::Prefix(n) => numbers("prefix", &[*n]),
        Mask::Sinks(n) => numbers("sinks", &[*n]),
        Mask::Global(n) => numbers("global", &[*n]),
        Mask::GlobalAt(at) => numbers("global_at", at),
        Mask::Documents(bounds) => numbers("documents", bounds),
        Mask::DocumentPairs { queries, keys, causal } => {
            let bounds = |b: &[u64]| Attr::List(b.iter().map(|&n| Attr::Int(n)).collect());
            let sides = [("queries".to_owned(), bounds(queries)), ("keys".to_owned(), bounds(keys))];
            let causal = causal.map(|a| ("causal".to_owned(), Attr::Word(a.name().to_owned())));
            call("documents", sides.into_iter().chain(causal).collect())
        }
        Mask::Blocks { size, rows } => {
            let row = |row: &Vec<u64>| Attr::List(row.iter().map(|&block| Attr::Int(block)).collect());
            let rows = Attr::List(rows.iter().map(row).collect());
            call("blocks", vec![int("size", *size), ("rows".to_owned(), rows)])
        }
        Mask::All(masks) => Attr::All(masks.iter().map(to_attr).collect()),
        Mask::Any(masks) => Attr::Any(masks.iter().map(to_attr).collect()),
    }
}

/// The mask that an attribute spells.
///
/// # Errors
/// What is no mask, or which argument is missing, unknown or of the wrong kind.
pub(super) fn from_attr(attr: Attr) -> Result<Mask, AttrError> {
    match attr {
        Attr::Word(word) if word == "full" => Ok(Mask::Full),
        Attr::Word(word) if word == "causal" => Ok(Mask::Causal),
        Attr::Call(name, args) => call(&name, args),
        Attr::Numbers(name, numbers) => match (name.as_str(), numbers.as_slice()) {
            ("prefix", &[n]) => Ok(Mask::Prefix(n)),
            ("sinks", &[n]) => Ok(Mask::Sinks(n)),
            ("global", &[n]) => Ok(Mask::Global(n)),
            ("prefix" | "sinks" | "global", _) => {
                Err(format!("mask `{name}` takes one number of tokens, not {}", numbers.len()))
            }
            ("documents", _) => Ok(Mask::Documents(numbers)),
            ("global_at", _) => Ok(Mask::GlobalAt(numbers)),
            _ => Err(unknown(&Attr::Numbers(name, numbers))),
        },
        Attr::All(parts) => parts.into_iter().map(from_attr).collect::<Result<_, _>>().map(Mask::All),
        Attr::Any(parts) => parts.into_iter().map(from_attr).collect::<Result<_, _>>().map(Mask::Any),
        Attr::Int(_)
        | Attr::Float(_)
        | Attr::Text(_)
        | Attr::Word(_)
        | Attr::Func(_)
        | Attr::Range(..)
        | Attr::List(_) => Err(unknown(&attr)),
    }
}

fn call(name: &str, args: Vec<(String, Attr)>) -> Result<Mask, AttrError> {
    let mut args = Attrs::new(name, args);
    let mask = match name {
        "causal" => Mask::CausalAtEnd { queries: args.int("queries")?, keys: args.int("keys")? },
        "window" => {
            let mut side = |key: &str| match args.take(key) {
                None => Ok(None),
                Some(Attr::Int(n)) => Ok(Some(n)),
                Some(other) => Err(args.wrong(key, "a number of tokens", &other)),
            };
            Mask::Window { left: side("left")?, right: side("right")? }
        }
        "blocks" => Mask::Blocks { size: args.int("size")?, rows: rows(&mut args)? },
        "prefix" | "sinks" | "global" => return Err(format!("mask `{name}` takes one number of tokens")),
        "global_at" => return Err("mask `global_at` takes the positions of tokens".to_owned()),
        "documents" => {
            let [queries, keys] = [bounds(&mut args, "queries")?, bounds(&mut args, "keys")?];
            let causal = args.take("causal").map(|attr| {
                let found = Align::ALL.into_iter().find(|a| matches!(&attr, Attr::Word(w) if w == a.name()));
                found.ok_or_else(|| args.wrong("causal", "start or end", &attr))
            });
            Mask::DocumentPairs { queries, keys, causal: causal.transpose()? }
        }
        _ => return Err(unknown(&Attr::Word(name.to_owned()))),
    };
    args.finish()?;
    Ok(mask)
}

fn rows(args: &mut Attrs) -> Result<Vec<Vec<u64>>, AttrError> {
    let expected = "a list of blocks for each row, such as [[0], [0, 1]]";
    let wrong = |args: &Attrs, found: &Attr| args.wrong("rows", expected, found);
    let Attr::List(rows) = args.required("rows")? else {
        return Err(format!("attribute `rows` of `blocks` must be {expected}"));
    };
    let mut out = Vec::with_capacity(rows.len());
    for row in rows {
        let Attr::List(blocks) = row else { return Err(wrong(args, &row)) };
        let block = |attr: Attr| match attr {
            Attr::Int(n) => Ok(n),
            other => Err(wrong(args, &other)),
        };
        out.push(blocks.into_iter().map(block).collect::<Result<_, _>>()?);
    }
    Ok(out)
}

fn bounds(args: &mut Attrs, key: &str) -> Result<Vec<u64>, AttrError> {
    let expected = "the bounds of documents from 0, such as [0, 3, 8]";
    let attr = args.required(key)?;
    let Attr::List(numbers) = attr else { return Err(args.wrong(key, expected, &attr)) };
    let number = |attr: Attr| match attr {
        Attr::Int(n) => Ok(n),
        other => Err(args.wrong(key, expected, &other)),
    };
    numbers.into_iter().map(number).collect()
}

fn unknown(found: &Attr) -> AttrError {
    format!(
        "`{found}` is no mask: full, causal, window(…), prefix(n), sinks(n), global(n), global_at(…), \
         documents(…) and blocks(…), joined by `&` and `|`"
    )
}
