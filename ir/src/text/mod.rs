//! Text form of modules: print → parse → print is the identity, and parsing what was printed gives an equal module.
//!
//! The grammar is in `docs/book/src/text.md`. Schedules share everything but the outermost layer, see
//! [`crate::schedule::parse`].

pub(crate) mod cursor;
pub(crate) mod grammar;
pub(crate) mod lexer;
pub(crate) mod read;
pub(crate) mod show;
mod write;

pub use crate::identifier::is_identifier;
pub use cursor::{Cursor, Parsed};
pub use grammar::VERSION;
#[cfg(test)]
pub(crate) use grammar::parse_attr;
pub use lexer::{Notation, Token};
pub use read::parse;
pub use show::{TypeText, show};
pub use write::print;
