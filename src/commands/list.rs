//! `list`: what there is, from the tables in the code.

use std::fmt::Write;

use ithaca_ir::ops::TABLE;
use ithaca_passes::cluster::{self, Cluster};
use ithaca_passes::pipeline::PASSES;
use ithaca_passes::shard::table;

use super::{Done, Session};
use crate::cli::{ListArgs, Listing};
use crate::error::Result;

pub(super) fn list(args: &ListArgs, session: &Session<'_>) -> Result<Done> {
    let mut out = String::new();
    // Writing to a string cannot fail.
    match args.what {
        Listing::Ops => {
            for row in TABLE {
                let _ = writeln!(out, "{:<15} {:<40} {}", row.name, row.signature, row.summary);
            }
        }
        Listing::Passes => {
            for pass in PASSES {
                let _ =
                    writeln!(out, "{:<15} {}\n{:<15} options: {}", pass.name, pass.summary, "", pass.options);
            }
            for pass in session.registry.passes() {
                let _ = writeln!(out, "{:<15} a pass of this program's own", pass.name());
            }
        }
        Listing::Strategies => {
            out.push_str(&table::strategies(session.registry));
            out.push_str("Products are written with a plus: ulysses+megatron-tp --mesh ulysses=4,tp=2\n");
        }
        Listing::Models => {
            for (family, summary) in ithaca_passes::import::FAMILIES {
                let _ = writeln!(out, "{family:<15} {summary}");
            }
        }
        Listing::Clusters => {
            for name in cluster::names() {
                let cluster = Cluster::named(name)?;
                let _ = writeln!(out, "{name:<15} {}", cluster.summary);
            }
        }
    }
    Ok(Done::said(out))
}
