//! `explain`: communication, time and memory of a plan, and its alternatives.

pub(crate) mod overlap;
mod prefix;

use std::fmt::Write;

use ithaca_ir::Module;
use ithaca_ir::schedule::Stream;
use ithaca_ir::units::{bytes, seconds};
use ithaca_passes::compile::Compiled;
use ithaca_passes::import;
use ithaca_passes::movement::Partials;
use ithaca_passes::plan::{Collective, Plan, Rates, layout_text};
use ithaca_passes::planner::{View, table};
use ithaca_passes::registry::Registry;
use ithaca_passes::simulate::discrete;

use super::printed::{heading, host_memory, in_width, view};
use super::session::{CommandOutput, Session};
use crate::cli::{ExplainArgs, TableArgs};
use crate::error::Result;
use crate::subject;

pub(super) fn explain(args: &ExplainArgs, session: &mut Session<'_>) -> Result<CommandOutput> {
    let plan = subject::plan(session.registry, &args.plan)?;
    Ok(CommandOutput::success(explained(&plan, args.table, session)?))
}

/// The explanation of a plan.
///
/// # Errors
/// Those of the table's options and of the plan.
pub(crate) fn explained(plan: &Plan, table: TableArgs, session: &mut Session<'_>) -> Result<String> {
    let registry = session.registry;
    let view = view(table, session)?;
    (session.progress)("compiling");
    let compiled = plan.compile(registry)?;
    let program = import::program(&plan.model.config, &plan.model.name, &plan.workload_in_stages()?)?;
    let of_step = (&program, plan.shard_options()?.partials);
    let text = format!("{}\n{}", text(registry, plan, &compiled, of_step), alternatives(plan, &view));
    Ok(heading(plan, &plan.model.name, view.width) + &in_width(&text, view.width))
}

fn text(
    registry: &Registry,
    plan: &Plan,
    compiled: &Compiled,
    (program, partials): (&Module, Partials),
) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(out, "\nlayout: {}", layout_text(&plan.strategy, &plan.mesh));
    for name in plan.strategy.split('+') {
        if let Some(strategy) = registry.strategy(name) {
            let _ = writeln!(out, "  {name}: {}\n  legal where: {}", strategy.summary(), strategy.legality());
        }
    }
    for note in plan.notes.iter().chain(&plan.assumptions()) {
        let _ = writeln!(out, "  note: {note}");
    }
    let _ = writeln!(out, "passes: {}", plan.pipeline);

    out.push_str("\ncommunication of a step, on the busiest rank:\n");
    if plan.collectives.is_empty() {
        out.push_str("  none\n");
    }
    for row in &plan.collectives {
        let Collective { kind, axis, phase, count, bytes_sent_per_rank: most, expected_bytes_per_rank } = row;
        let sent = match expected_bytes_per_rank {
            Some(expected) => {
                let [expected, most] = [*expected, *most].map(bytes);
                format!("{expected} sent as expected, {most} if all slots of experts are filled")
            }
            None => format!("{} sent", bytes(*most)),
        };
        let _ = writeln!(out, "  {count} {kind} over {axis} ({phase}): {sent}");
    }
    if !plan.time.communication.is_empty() {
        out.push_str("its time, all phases together:\n");
    }
    for t in &plan.time.communication {
        let (all, exposed) = (seconds(t.seconds), seconds(t.exposed_seconds));
        let _ = writeln!(out, "  {} over {}: {all}, {exposed} of it exposed", t.kind, t.axis);
    }

    let (time, rates) = (&plan.time, Rates::of(plan));
    let _ = writeln!(
        out,
        "\ntime of a step: {}, kernels {}, exposed communication{} {}",
        seconds(time.step_seconds),
        seconds(time.compute_seconds),
        if compiled.schedule.stages().is_empty() { "" } else { " and bubble" },
        seconds(time.exposed_seconds)
    );
    if let Some(floor) = time.floor_seconds {
        let _ = writeln!(out, "weights and caches, each read once: {}", seconds(floor));
    }
    let _ = writeln!(
        out,
        "throughput: {:.0} tokens/s per GPU; model FLOPs utilization (MFU) {:.1} %",
        rates.tokens_per_gpu(time.step_seconds),
        100.0 * rates.utilization(time.step_seconds)
    );
    if let Some(price) = rates.price_per_million_tokens(&plan.cluster, time.step_seconds) {
        let _ = writeln!(out, "price: {price:.3} USD for a million tokens (`price_per_hour` of the cluster)");
    }
    let kernel = &plan.cluster.accelerator.attention_kernel;
    let _ = writeln!(out, "attention kernel: {} ({})", kernel.value, kernel.source);
    for level in &plan.cluster.levels {
        let nodes = plan.gpus / plan.cluster.devices_per_node.value.max(1);
        if let Some(loss) = level.scale_loss.as_ref().filter(|_| nodes > 2) {
            let percent = 100.0 * loss.value;
            let _ = writeln!(
                out,
                "{}: {percent:.0} % of the bandwidth lost with each doubling beyond two nodes ({})",
                level.name, loss.source
            );
        }
    }
    if let Some(text) = prefix::text(program, partials) {
        out.push_str(&text);
    }
    out.push_str(&simulated(plan, compiled));
    let (memory, accelerator) = (&plan.memory, &plan.cluster.accelerator);
    let _ = writeln!(
        out,
        "memory of a rank: {} of {} usable: {}",
        bytes(memory.total),
        bytes(memory.usable),
        memory.in_words()
    );
    let (whole, reserve) = (&accelerator.memory_bytes, &accelerator.reserve_fraction);
    let _ = writeln!(
        out,
        "{:.0} % of {} are reserved ({})",
        100.0 * reserve.value,
        bytes(whole.value),
        reserve.source
    );
    if let Some(text) = host_memory(plan) {
        let _ = writeln!(out, "{text}");
    }
    let _ = writeln!(out, "largest tensors:");
    for held in &memory.largest {
        let times = if held.count > 1 { format!(" in {} layers", held.count) } else { String::new() };
        let _ = writeln!(out, "  {} {}{times}", bytes(held.bytes), held.name);
    }
    out
}

fn alternatives(plan: &Plan, view: &View) -> String {
    let table = table(&plan.alternatives, &Rates::of(plan), view);
    format!(
        "alternatives when the plan was made:\n{table}\nfigures of the cluster and their sources: `cluster` in the plan"
    )
}

/// The event-by-event simulation of the step, on the rank that ends last.
fn simulated(plan: &Plan, compiled: &Compiled) -> String {
    let mut out = String::new();
    let Some(outcome) = discrete::simulate(&plan.cluster, &compiled.schedule, discrete::Record::Overlaps)
    else {
        return "not simulated event by event: too many ranks differ\n".to_owned();
    };
    let Some(class) = outcome.last() else { return out };
    let busy = |stream: Stream| format!("{:.1} %", 100.0 * class.time.occupancy(stream));
    let others = class.time.streams.keys().filter(|&&stream| stream != Stream::Comm);
    let others: String = others.map(|&stream| format!(", `{stream}` {}", busy(stream))).collect();
    let _ = writeln!(
        out,
        "event by event: {} on rank {}, which ends last\n  streams busy: `compute` {}, `comm` {}{others}",
        seconds(class.time.seconds),
        class.rank,
        busy(Stream::Compute),
        busy(Stream::Comm)
    );
    let bubble = overlap::bubble(&compiled.schedule, &class.overlaps);
    if bubble > 0.0 {
        let _ = writeln!(out, "  bubble: {}, in which the rank waits for other stages", seconds(bubble));
    }
    out.push_str(&overlap::text(&compiled.schedule, &class.overlaps));
    out
}
