//! The integration tests, one binary.

mod accounting;
mod accounting_movements;
mod attention;
mod checks;
mod cli;
mod cuda;
mod equivalence;
mod errors;
mod examples;
mod experts;
mod filetests;
mod fusion;
mod generate;
mod goldens;
mod guide;
mod launch;
mod masks;
mod options;

mod passes;
mod prefetch;
mod random;
mod readme;
mod reference;
mod regressions;
mod rules;
mod saturate;
mod schedules;
mod steps;
mod text;
mod tidy;
mod training;
