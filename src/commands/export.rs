//! `export`: a plan in the words of another framework.

use std::fmt::Write;

use ithaca_ir::{Diagnostic, Diagnostics};
use ithaca_passes::differentiate;
use ithaca_passes::frameworks::{self, Export, Layout, Refusal, Role, Subject, TokenOrder};
use ithaca_passes::import;
use ithaca_passes::plan::{self, Plan};
use ithaca_passes::shard::{ShardOptions, parse_mesh};

use super::printed::noted;
use super::session::{CommandOutput, Session};
use crate::cli::ExportArgs;
use crate::error::{Failure, Result};
use crate::{files, subject};

pub(super) fn export(args: &ExportArgs, session: &mut Session<'_>) -> Result<CommandOutput> {
    let plan = subject::plan(session.registry, &args.plan)?;
    let Export { text, notes } = exported(&plan, args, session)?;
    let Some(path) = &args.output else { return Ok(CommandOutput::success(text)) };
    files::write(path, text.as_bytes())?;
    let mut out: String = notes.iter().map(|note| noted(note, session.width)).collect();
    // Writing to a string cannot fail.
    let _ = writeln!(out, "wrote {}", path.display());
    Ok(CommandOutput::success(out))
}

/// A plan in the words of the framework that arguments name; their paths are not read.
///
/// # Errors
/// `P34` for each reason for which the framework cannot run the plan.
pub(crate) fn exported(plan: &Plan, args: &ExportArgs, session: &Session<'_>) -> Result<Export> {
    let facts = import::facts(&plan.model.config, &plan.workload.ignore)?;
    let layout = layout(plan, &facts, session)?;
    let refusals = frameworks::check(args.to, &layout, &facts);
    let (layout, changed) = if refusals.is_empty() {
        (layout, Vec::new())
    } else {
        let nearest = frameworks::nearest(args.to, &layout, &facts);
        match nearest {
            Ok(nearest) if args.nearest => nearest,
            other => {
                // What is refused on one GPU, and has no change, is refused in every layout.
                let single = ShardOptions::new("single", parse_mesh("")?);
                let single =
                    Layout::new(session.registry, &single, &plan.workload.to_import()?, &facts, None);
                let always = single.map_or_else(|_| Vec::new(), |of| frameworks::check(args.to, &of, &facts));
                let is_always = |of: &&Refusal| always.iter().any(|other| other.reason == of.reason);
                let has_layouts = !refusals.iter().filter(is_always).any(|of| of.change.is_none());
                return Err(refused(args, refusals, (has_layouts, other.is_ok())));
            }
        }
    };
    let model = match args.name.as_deref() {
        Some(name) => name.to_owned(),
        None => plan.model.name.clone(),
    };
    let Plan { strategy, mesh, workload, .. } = plan;
    let of = format!("{} of {} x {} tokens", workload.mode.name(), workload.batch, workload.sequence);
    let subject = Subject {
        plan: format!("{model}: {of} by {}", plan::layout_text(strategy, mesh)),
        model,
        node: plan.cluster.devices_per_node.value,
    };
    let mut export = frameworks::export(args.to, &layout, &facts, &subject, &changed);
    if !changed.is_empty() {
        export.notes.push("time and memory of the plan are not those of this layout".to_owned());
    }
    Ok(export)
}

/// The layout of a plan in the terms of frameworks.
fn layout(plan: &Plan, facts: &import::Facts, session: &Session<'_>) -> Result<Layout> {
    let workload = plan.workload_in_stages()?;
    let options = plan.shard_options()?;
    let layout = Layout::new(session.registry, &options, &workload, facts, None)?;
    let caches = layout.degree(Role::Cache) * layout.degree(Role::DecodeContext) > 1;
    let dimension = plan.dimensions.iter().find(|dim| dim.name == if caches { "kv" } else { "s" });
    let order = match dimension.and_then(|dim| dim.order.as_deref()) {
        None => TokenOrder::Contiguous,
        Some(text) if text.starts_with("zigzag") => TokenOrder::Zigzag,
        Some(text) => {
            let block = text.strip_prefix("striped(").and_then(|rest| rest.strip_suffix(')'));
            let block = block.map(|inner| inner.split_once(',').map_or("1", |(_, block)| block.trim()));
            block
                .and_then(|block| block.parse().ok())
                .map_or_else(|| TokenOrder::Other(text.to_owned()), TokenOrder::Striped)
        }
    };
    let layout = Layout { order, ..layout };
    if layout.stages() == 1 {
        return Ok(layout);
    }
    let forward = import::import(&plan.model.config, &plan.model.name, &plan.workload.to_import()?)?;
    let layers = differentiate::chunk_layers(&forward, &workload.training).map_err(Diagnostic::from)?;
    Ok(layout.cut(layers))
}

/// All refusals of an export; the last has the repairs, where the framework can run the model in another layout.
fn refused(args: &ExportArgs, refusals: Vec<Refusal>, (has_layouts, has_nearest): (bool, bool)) -> Failure {
    let title = args.to.title();
    let n = refusals.len();
    let mut diagnostics: Diagnostics = Vec::new();
    for (i, Refusal { reason, change }) in refusals.into_iter().enumerate() {
        let mut diagnostic = Diagnostic::new("P34", reason);
        if let Some(change) = change {
            diagnostic = diagnostic.help(format!("nearest: {}", change.text()));
        }
        if i + 1 == n && has_layouts {
            diagnostic =
                diagnostic.help(format!("`ithaca plan … --for {}` searches what {title} can run", args.to));
            if has_nearest {
                diagnostic = diagnostic.repairs(["--nearest".to_owned()]);
            }
        }
        diagnostics.push(diagnostic);
    }
    Failure { diagnostics, source: None, context: None }
}
