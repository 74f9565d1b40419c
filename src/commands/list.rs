//! `list`: operations, passes, strategies, models and clusters, from the tables in the code.

use std::fmt::Write;

use clap::ValueEnum;
use ithaca_ir::ops::TABLE;
use ithaca_ir::wrap::wrapped;
use ithaca_passes::cluster::{self, Cluster};
use ithaca_passes::pipeline::PASSES;
use ithaca_passes::shard::table;

use super::session::{Done, Session};
use crate::cli::Listing;
use crate::error::Result;

pub(super) fn list(listing: Option<Listing>, session: &Session<'_>) -> Result<Done> {
    let mut out = String::new();
    // Writing to a string cannot fail.
    match listing {
        None => {
            for value in Listing::value_variants().iter().filter_map(ValueEnum::to_possible_value) {
                let help = value.get_help().map(ToString::to_string).unwrap_or_default();
                let _ = writeln!(out, "ithaca list {:<12} {help}", value.get_name());
            }
        }
        Some(Listing::Ops) => {
            for row in TABLE {
                let _ = writeln!(out, "{:<15} {:<40} {}", row.name, row.signature, row.summary);
            }
        }
        Some(Listing::Passes) => {
            for pass in PASSES {
                let _ =
                    writeln!(out, "{:<15} {}\n{:<15} options: {}", pass.name, pass.summary, "", pass.options);
            }
            for pass in session.registry.passes() {
                let _ = writeln!(out, "{:<15} a pass that this program adds", pass.name());
            }
        }
        Some(Listing::Strategies) => {
            out.push_str(&table::strategies(session.registry, session.width));
            let fit = "Tokens that do not divide are padded, or split unevenly: `--uneven-sequence`. A zigzag of a length that does \
                       not divide has chunks of two lengths.";
            out.push_str(&wrapped(fit, session.width, 0));
            out.push_str("\nProducts are written with a plus: ulysses+megatron-tp --mesh ulysses=4,tp=2\n");
        }
        Some(Listing::Models) => {
            for (family, summary) in ithaca_passes::import::families() {
                let _ = writeln!(out, "{family:<15} {summary}");
            }
        }
        Some(Listing::Clusters) => {
            for name in cluster::names() {
                let cluster = Cluster::named(name)?;
                let _ = writeln!(out, "{name:<15} {}", cluster.summary);
            }
        }
    }
    Ok(Done::success(out))
}
