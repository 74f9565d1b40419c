//! The checks of schedules: no false alarm on what the compiler makes, and no mutant that passes.

mod corpus;
mod facts;
mod mutants;
mod mutators;
mod order;
mod random;
mod ranks;
