//! `report`: a plan, or deployments, as a page to look at.

use std::path::Path;

use ithaca_codegen::{report, svg};
use ithaca_ir::Module;
use ithaca_ir::module::Function;
use ithaca_ir::ops::Op;
use ithaca_passes::compile::Compiled;
use ithaca_passes::plan::Plan;
use ithaca_passes::report::Report;
use ithaca_passes::simulate::discrete;
use serde::Serialize;

use super::explain::overlap;
use super::printed::heading;
use super::serve;
use super::session::{CommandOutput, Session};
use crate::cli::ReportArgs;
use crate::error::Result;
use crate::kind::{self, ExpectedKind, Kind};
use crate::{files, subject};

/// The most functions that are drawn.
const DRAWN: usize = 4;
/// The most rows of collectives.
const ROWS: usize = 30;

/// What the page shows.
#[derive(Serialize)]
struct Document {
    /// The request in a line.
    request: String,
    #[serde(flatten)]
    report: Report,
    /// Why collectives are exposed, as `explain` says, on the rank that ends last.
    exposed: Vec<overlap::Row>,
}

pub(super) fn report(args: &ReportArgs, session: &mut Session<'_>) -> Result<CommandOutput> {
    files::check_file(&args.output)?;
    if kind::expect(&args.plan, ExpectedKind::Reported)? == Kind::Deployments {
        files::write(&args.output, serve::page(&args.plan)?.as_bytes())?;
    } else {
        let plan = subject::plan(session.registry, &args.plan)?;
        write(&plan, &args.output, session)?;
    }
    Ok(CommandOutput::success(format!("wrote {}\n", args.output.display())))
}

/// Writes the page of a plan.
pub(super) fn write(plan: &Plan, path: &Path, session: &mut Session<'_>) -> Result<()> {
    (session.progress)("compiling");
    let compiled = plan.compile(session.registry)?;
    (session.progress)("writing the report");
    files::write(path, page(plan, &compiled).as_bytes())
}

fn page(plan: &Plan, compiled: &Compiled) -> String {
    let Compiled { per_rank, schedule, .. } = compiled;
    let record = discrete::Record::Overlaps;
    let outcome = discrete::simulate(&plan.cluster, schedule, record);
    let last = outcome.as_ref().and_then(discrete::Outcome::last);
    let mut exposed = last.map(|class| overlap::rows(schedule, &class.overlaps)).unwrap_or_default();
    exposed.truncate(ROWS);
    let request = heading(plan, &plan.model.name, usize::MAX).trim_end().to_owned();
    let document = Document { request, report: Report::new(plan, schedule), exposed };
    let data = serde_json::to_value(&document).expect("a document has string keys and finite numbers");
    let drawn = drawn(per_rank).into_iter().map(|function| report::Drawing {
        title: format!("@{}", function.name),
        svg: svg::function(per_rank, function),
    });
    let title = format!("{}: {}", plan.model.name, plan.workload.mode.name());
    report::page(&title, &data, &drawn.collect::<Vec<_>>())
}

/// The kinds of layers: functions with attention, and that which runs most often if none has any.
fn drawn(module: &Module) -> Vec<&Function> {
    let has_attention = |function: &&Function| {
        let is_attention = |op: &Op| matches!(op, Op::Attention(_) | Op::AttentionBackward(_));
        function.nodes.iter().any(|node| is_attention(&node.op))
    };
    let mut drawn: Vec<&Function> = module.functions.values().filter(has_attention).take(DRAWN).collect();
    if drawn.is_empty() {
        let runs = module.run_counts();
        let most = module.functions.values().zip(runs).max_by_key(|(_, runs)| *runs);
        drawn.extend(most.map(|(function, _)| function));
    }
    drawn
}
