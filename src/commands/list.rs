//! `list`: operations, passes, strategies, models and clusters, from the tables in the code.

use std::fmt::Write;

use clap::ValueEnum;
use ithaca_ir::ops::TABLE;
use ithaca_ir::wrap::wrapped;
use ithaca_passes::cluster::{self, Cluster};
use ithaca_passes::pipeline::PASSES;
use ithaca_passes::shard::table;

use super::session::{CommandOutput, Session};
use crate::cli::Listing;
use crate::error::Result;

pub(super) fn list(listing: Option<Listing>, session: &Session<'_>) -> Result<CommandOutput> {
    let mut out = String::new();
    // Writing to a string cannot fail. Each arm returns the column of the text beside a name.
    let indent = match listing {
        None => {
            for value in Listing::value_variants().iter().filter_map(ValueEnum::to_possible_value) {
                let help = value.get_help().map(ToString::to_string).unwrap_or_default();
                let _ = writeln!(out, "ithaca list {:<12} {help}", value.get_name());
            }
            25
        }
        Some(Listing::Ops) => {
            for row in TABLE {
                let _ = writeln!(out, "{:<22} {}\n{:<22} {}", row.name, row.signature, "", row.summary);
            }
            23
        }
        Some(Listing::Passes) => {
            for pass in PASSES {
                let _ =
                    writeln!(out, "{:<15} {}\n{:<15} options: {}", pass.name, pass.summary, "", pass.options);
            }
            for pass in session.registry.passes() {
                let _ = writeln!(out, "{:<15} a pass that this program adds", pass.name());
            }
            16
        }
        Some(Listing::Strategies) => {
            out.push_str(&table::strategies(session.registry, session.width));
            let fit = "Tokens that do not divide are padded, or split unevenly: `--uneven-sequence`. A zigzag of a length that does \
                       not divide has chunks of two lengths.";
            let _ = writeln!(out, "{}", wrapped(fit, session.width, 0));
            out.push_str("Products are written with a plus: ulysses+megatron-tp --mesh ulysses=4,tp=2\n");
            0
        }
        Some(Listing::Models) => {
            for (family, summary) in ithaca_passes::import::families() {
                let _ = writeln!(out, "{family:<15} {summary}");
            }
            16
        }
        Some(Listing::Clusters) => {
            for name in cluster::names() {
                let cluster = Cluster::named(name)?;
                let _ = writeln!(out, "{name:<15} {}", cluster.summary);
            }
            16
        }
    };
    Ok(CommandOutput::success(
        out.lines().map(|line| wrapped(line, session.width, indent) + "\n").collect::<String>(),
    ))
}
