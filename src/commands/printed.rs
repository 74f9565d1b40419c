//! The parts of a printed plan that commands share: the request in a line, notes, and how much of a table is shown.

use ithaca_ir::Diagnostic;
use ithaca_ir::diagnostic::counted;
use ithaca_ir::units;
use ithaca_ir::wrap::wrapped;
use ithaca_passes::import::Mode;
use ithaca_passes::plan::{self, Plan};
use ithaca_passes::planner::{Refusals, Rows, View};

use super::session::Session;
use crate::cli::TableArgs;
use crate::error::Result;

/// The plans in a table unless the command line asks for more.
const TOP: usize = 10;

/// How much of the alternatives a table shows.
pub(super) fn view(args: TableArgs, session: &Session<'_>) -> Result<View> {
    let TableArgs { top, all, why_not } = args;
    let rows = match top {
        Some(0) => {
            return Err(Diagnostic::new("C00", "`--top 0` shows no plan")
                .help("use `--top 1` or more, or `--json`, which prints no table")
                .into());
        }
        Some(n) => Rows::Top(usize::try_from(n).unwrap_or(usize::MAX)),
        None if all => Rows::All,
        None => Rows::Top(TOP),
    };
    let refusals = if all || why_not { Refusals::Each } else { Refusals::Summed };
    Ok(View { width: session.width, rows, refusals })
}

/// A note in lines of a width.
pub(super) fn noted(text: &str, width: usize) -> String {
    wrapped(&format!("note: {text}"), width, "note: ".len()) + "\n"
}

/// The lines of a text in lines of a width, further lines below the words of the first.
pub(super) fn in_width(text: &str, width: usize) -> String {
    let fitted = |line: &str| {
        let indent = line.len() - line.trim_start().len();
        if line.chars().count() <= width { line.to_owned() } else { wrapped(line, width, indent + 2) }
    };
    text.lines().map(|line| fitted(line) + "\n").collect()
}

/// The model under this name, the workload and the cluster.
pub(super) fn heading(plan: &Plan, name: &str, width: usize) -> String {
    let plan::Workload {
        batch, sequence, target_sequence, documents, dtype, mode, cache, cache_type, ..
    } = &plan.workload;
    let target = target_sequence.map(|n| format!(" and {n} of the target")).unwrap_or_default();
    let documents =
        documents.as_ref().map(|d| format!(" ({})", counted(d.count(), "document"))).unwrap_or_default();
    let of = match (mode, cache) {
        (Mode::Decode, Some(context)) => {
            let of_type = cache_type.as_ref().map(|dtype| format!(" of {dtype}")).unwrap_or_default();
            format!("a token of each of {batch} x {context} tokens{target} in caches{of_type},")
        }
        // Its price is that of the last tokens that the caches have room for.
        (_, Some(context)) => match context.saturating_sub(*sequence) {
            0 => format!("{batch} x {sequence} tokens{target} into caches,"),
            cached => format!("{batch} x {sequence} tokens{target} after {cached} cached tokens,"),
        },
        (_, None) => format!("{batch} x {sequence} tokens{documents}{target}"),
    };
    let text = format!(
        "{name}: {} of {of} in {dtype} on {} of {} ({})",
        mode.name(),
        counted(plan.gpus, "GPU"),
        plan.cluster.name,
        plan.cluster.accelerator.name,
    );
    wrapped(&text, width, 2) + "\n"
}

/// The states that a rank has in host memory, with the time to copy them; nothing where all are on the device.
pub(super) fn host_memory(plan: &Plan) -> Option<String> {
    let host = plan.memory.host;
    let link = plan.cluster.accelerator.host_bandwidth.as_ref();
    let link = link.map_or_else(String::new, |rate| {
        let seconds = units::seconds(host as f64 / rate.value);
        let back = if plan.workload.mode == Mode::Train { ", and as long back" } else { "" };
        format!(", {seconds} to copy them{back} at {:.0} GB/s ({})", rate.value / 1e9, rate.source)
    });
    let what = match plan.workload.pages.and_then(|pages| pages.host) {
        Some(pages) => format!("caches, of {} in all", counted(pages, "page")),
        None => {
            let ranks = plan.gpus.min(plan.cluster.devices_per_node.value);
            let all = units::bytes(host.saturating_mul(ranks));
            let of = plan.memory.host_usable.map_or_else(String::new, |usable| {
                format!(" of {} usable", units::bytes(usable.saturating_mul(ranks)))
            });
            format!("optimizer states, {all}{of} on a machine of {}", counted(ranks, "GPU"))
        }
    };
    (host > 0).then(|| format!("host memory of a rank: {} of {what}{link}", units::bytes(host)))
}
