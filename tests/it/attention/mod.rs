//! Distributed attention against the whole: random cases of every strategy, precision, and one file for each row of the
//! table of strategies.

pub(crate) mod case;
mod check;
mod dense;
pub(crate) mod draw;
mod models;
mod precision;
mod property;
mod refusals;
mod table;
