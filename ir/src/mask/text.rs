//! The text form of masks, as attributes.

use crate::mask::Mask;
use crate::ops::attr::{Attr, AttrError, Attrs, Names};
use crate::ops::attribute::{Attribute, Refused, Value, Written};

/// The kind of the rows of a mask of blocks, in messages.
const ROWS: &str = "a list of blocks for each row, such as [[0], [0, 1]]";

impl Value for Mask {
    const KIND: &'static str = "a mask";

    fn to_attr(&self, names: Names<'_>) -> Attr {
        let numbers = |name: &str, numbers: &[u64]| Attr::Numbers(name.to_owned(), numbers.to_vec());
        let each = |masks: &[Mask]| masks.iter().map(|mask| mask.to_attr(names)).collect();
        let mut args = Written::new();
        let name = match self {
            Mask::Full => return Attr::Word("full".to_owned()),
            Mask::Causal => return Attr::Word("causal".to_owned()),
            Mask::Prefix(n) => return numbers("prefix", &[*n]),
            Mask::Sinks(n) => return numbers("sinks", &[*n]),
            Mask::Global(n) => return numbers("global", &[*n]),
            Mask::GlobalAt(at) => return numbers("global_at", at),
            Mask::Chunks(size) => return numbers("chunks", &[*size]),
            Mask::Documents(bounds) => return numbers("documents", bounds),
            Mask::All(masks) => return Attr::All(each(masks)),
            Mask::Any(masks) => return Attr::Any(each(masks)),
            Mask::CausalAtEnd { queries, keys } => {
                queries.write("queries", None, names, &mut args);
                keys.write("keys", None, names, &mut args);
                "causal"
            }
            Mask::Window { left, right } => {
                left.write("left", Some(&None), names, &mut args);
                right.write("right", Some(&None), names, &mut args);
                "window"
            }
            Mask::DocumentPairs { queries, keys, causal } => {
                queries.write("queries", None, names, &mut args);
                keys.write("keys", None, names, &mut args);
                causal.write("causal", Some(&None), names, &mut args);
                "documents"
            }
            Mask::Blocks { size, rows } => {
                size.write("size", None, names, &mut args);
                rows.write("rows", None, names, &mut args);
                "blocks"
            }
        };
        Attr::Call(name.to_owned(), args.into_iter().map(|(key, attr)| (key.to_owned(), attr)).collect())
    }

    fn from_attr(attr: Attr, names: Names<'_>) -> Result<Self, Refused> {
        let each = |parts: Vec<Attr>| -> Result<Vec<Mask>, Refused> {
            parts.into_iter().map(|part| Mask::from_attr(part, names)).collect()
        };
        match attr {
            Attr::Word(word) if word == "full" => Ok(Mask::Full),
            Attr::Word(word) if word == "causal" => Ok(Mask::Causal),
            Attr::Call(name, args) => Ok(call(&name, args, names)?),
            Attr::Numbers(name, numbers) => match (name.as_str(), numbers.as_slice()) {
                ("prefix", &[n]) => Ok(Mask::Prefix(n)),
                ("sinks", &[n]) => Ok(Mask::Sinks(n)),
                ("global", &[n]) => Ok(Mask::Global(n)),
                ("chunks", &[n]) => Ok(Mask::Chunks(n)),
                ("prefix" | "sinks" | "global" | "chunks", _) => {
                    let n = numbers.len();
                    Err(format!("mask `{name}` takes one number of tokens, not {n}").into())
                }
                ("documents", _) => Ok(Mask::Documents(numbers)),
                ("global_at", _) => Ok(Mask::GlobalAt(numbers)),
                _ => Err(unknown(&Attr::Numbers(name, numbers)).into()),
            },
            Attr::All(parts) => each(parts).map(Mask::All),
            Attr::Any(parts) => each(parts).map(Mask::Any),
            other => Err(unknown(&other).into()),
        }
    }
}

/// The mask that `name(key=value, …)` spells.
fn call(name: &str, args: Vec<(String, Attr)>, names: Names<'_>) -> Result<Mask, AttrError> {
    let mut args = Attrs::new(name, args);
    let mask = match name {
        "causal" => Mask::CausalAtEnd {
            queries: Attribute::read(&mut args, "queries", None, names)?,
            keys: Attribute::read(&mut args, "keys", None, names)?,
        },
        "window" => Mask::Window {
            left: Attribute::read(&mut args, "left", Some(None), names)?,
            right: Attribute::read(&mut args, "right", Some(None), names)?,
        },
        "blocks" => Mask::Blocks {
            size: Attribute::read(&mut args, "size", None, names)?,
            rows: Attribute::read(&mut args, "rows", None, names)
                .map_err(|error: String| error.replace(<Vec<Vec<u64>> as Attribute>::KIND, ROWS))?,
        },
        "documents" => Mask::DocumentPairs {
            queries: Attribute::read(&mut args, "queries", None, names)?,
            keys: Attribute::read(&mut args, "keys", None, names)?,
            causal: Attribute::read(&mut args, "causal", Some(None), names)?,
        },
        "prefix" | "sinks" | "global" | "chunks" => {
            return Err(format!("mask `{name}` takes one number of tokens"));
        }
        "global_at" => return Err("mask `global_at` takes the positions of tokens".to_owned()),
        _ => return Err(unknown(&Attr::Word(name.to_owned()))),
    };
    args.finish()?;
    Ok(mask)
}

fn unknown(found: &Attr) -> AttrError {
    format!(
        "`{found}` is not a mask: full, causal, window(…), prefix(n), sinks(n), global(n), global_at(…), \
         chunks(n), documents(…) and blocks(…), joined by `&` and `|`"
    )
}
