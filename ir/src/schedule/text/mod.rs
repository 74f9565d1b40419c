//! Text form of schedules: print → parse → print is the identity.
//!
//! Header, types and attributes are those of modules; the grammar is in `docs/book/src/text.md`.

mod read;
mod write;

pub use read::parse;
pub use write::print;
