//! The integration tests, one binary.

mod accounting;
mod accounting_movements;
mod attention;
mod book;
mod checks;
mod cli;
mod cuda;
mod decoding;
mod errors;
mod examples;
mod experts;
mod filetests;
mod fusion;
#[expect(unreachable_pub, reason = "the fuzz targets are a library of their own")]
#[path = "../../fuzz/src/lib.rs"]
mod fuzz;
mod fuzzed;
mod generate;
#[path = "../common/golden.rs"]
mod golden;
mod guide;
mod launch;
mod masks;
mod measured;
mod movements;
mod options;
mod passes;
#[path = "../../examples/snapshot/plan.rs"]
mod plan_snapshot;
#[path = "../common/port.rs"]
mod port;
mod prefetch;
mod proof;
mod random;
mod readme;
mod reference;
mod regressions;
#[path = "../common/require.rs"]
mod require;
mod rules;
mod saturate;
mod schedules;
#[path = "../common/slow_links.rs"]
mod slow_links;
mod steps;
mod text;
mod tidy;
mod tier;
mod torch;
mod training;
mod verdicts;
