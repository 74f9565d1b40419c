//! Text form of modules: print → parse → print is the identity, and parsing what was printed gives an equal module.
//!
//! The grammar stands in `docs/text.md`. Schedules share everything but the outermost layer, see
//! [`crate::schedule::parse`].

pub(crate) mod cursor;
pub(crate) mod grammar;
pub(crate) mod lexer;
mod read;
mod write;

pub use cursor::closest;
#[cfg(test)]
pub(crate) use grammar::parse_attr;
pub use grammar::{TypeText, VERSION};
pub use lexer::is_identifier;
pub(crate) use read::check_length;
pub use read::parse;
pub use write::print;

use crate::space::Space;
use crate::types::TensorType;

/// A type as the text form spells it, for messages.
pub fn show<'a>(space: &'a Space, ty: &'a TensorType) -> TypeText<'a> {
    TypeText { space, ty }
}
