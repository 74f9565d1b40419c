//! `shard-weights`: splits a checkpoint into one file for each rank of a plan.

use std::fmt::Write;

use ithaca_ir::diagnostic::counted;
use ithaca_ir::ops::MAX_PARTS;
use ithaca_ir::{Diagnostic, schedule};
use ithaca_kernels::store::shards::{self, Identity};
use ithaca_kernels::store::{Checkpoint, check_writable};
use ithaca_passes::plan::digest;
use ithaca_passes::registry::Registry;
use ithaca_passes::shard::OrderChoice;
use num_integer::lcm;

use super::session::{CommandOutput, Session};
use crate::cli::{ShardWeightsArgs, SubjectArgs};
use crate::error::{Failure, Result};
use crate::kind;
use crate::subject::{self, Lengths};

/// The most names that a note lists.
const LISTED: usize = 3;

pub(super) fn shard_weights(args: &ShardWeightsArgs, session: &mut Session<'_>) -> Result<CommandOutput> {
    if !args.output.is_dir() {
        check_writable(&args.output)?;
    }
    let subject = SubjectArgs {
        subject: args.subject.clone(),
        workload: args.workload.clone(),
        layout: args.layout.clone(),
        inputs: None,
        weights: args.weights.clone(),
        shrink: false,
        seed: None,
    };
    let job = subject::job(session.registry, &subject, Some(small(session.registry, args)?))?;
    let weights = job.weights.as_ref().ok_or_else(|| {
        Failure::from(
            Diagnostic::new(
                "C00",
                format!("`{}` has no weights beside it, and no option names them", args.subject.display()),
            )
            .help("add `--weights PATH`"),
        )
    })?;
    kind::expect_tensors(weights)?;
    let checkpoint = Checkpoint::at(weights)?;
    (session.progress)("compiling");
    let compiled = job.compile()?;
    let identity = Identity {
        plan: digest(&schedule::print(&compiled.schedule).into()),
        model: job.title.clone(),
        strategy: job.options.strategy.clone(),
        mesh: job.options.mesh.to_string(),
    };
    (session.progress)("splitting");
    let shards::Cut { tensors, bytes, left_out } =
        shards::cut(&compiled.schedule, &checkpoint, identity, &args.output)?;
    let (least, most) = (bytes.iter().min(), bytes.iter().max());
    let each = match (least, most) {
        (Some(least), Some(most)) if least < most => format!("{least} to {most} bytes"),
        (_, most) => counted(*most.unwrap_or(&0), "byte"),
    };
    let mut out = format!("{}: {}, {each} each\n", job.heading(), counted(tensors as u64, "tensor"));
    // Writing to a string cannot fail.
    for note in job.notes.iter().chain(&compiled.notes) {
        let _ = writeln!(out, "note: {note}");
    }
    if !left_out.is_empty() {
        let names: Vec<String> = left_out.iter().take(LISTED).map(|name| format!("`{name}`")).collect();
        let more = if left_out.len() > LISTED { ", …" } else { "" };
        let _ = writeln!(
            out,
            "note: {} tensors of the checkpoint do not belong to the plan and are omitted: {}{more}",
            left_out.len(),
            names.join(", ")
        );
    }
    let _ = writeln!(out, "wrote {}", args.output.display());
    Ok(CommandOutput::success(out))
}

/// A workload that every layout of this many ranks divides; the shards of weights do not depend on it.
///
/// The number of tokens is a multiple of all parts that the options ask for: loss chunks, blocks of a striped order, groups
/// of a capacity.
fn small(registry: &Registry, args: &ShardWeightsArgs) -> Result<Lengths> {
    let (mesh, ranks) = subject::mesh(&args.layout)?;
    let ranks = ranks.unwrap_or(1);
    let anything = Lengths { batch: 1, sequence: 1, target: None };
    let workload = subject::workload(&args.workload, Some(anything))?;
    let options = subject::layout_options(registry, &args.layout, mesh.as_ref())?;
    let block = match options.order {
        Some(OrderChoice::Striped(block)) => block,
        Some(OrderChoice::Contiguous | OrderChoice::Zigzag | OrderChoice::Balanced) | None => 1,
    };
    let groups = workload.capacity.map_or(1, |capacity| capacity.groups());
    let parts = [workload.training.loss_chunks.min(MAX_PARTS as u64), block, groups];
    let tokens = parts.into_iter().fold(4, |all, n| lcm(all, n.max(1)));
    Ok(Lengths {
        batch: ranks.saturating_mul(workload.training.micro_batches),
        sequence: ranks.saturating_mul(tokens),
        target: None,
    })
}
