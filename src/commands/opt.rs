//! `opt`: passes over a program in text form.

use std::cell::Cell;
use std::fmt::Write;
use std::time::{Duration, Instant};

use ithaca_ir::{Diagnostic, Module, Op, Space, TensorType, text};
use ithaca_passes::cluster::Cluster;
use ithaca_passes::fuse::saturate::{self, Saturate};
use ithaca_passes::pass::{Context, Instrument, Pass, Prices, options, run_passes};
use ithaca_passes::pipeline;
use ithaca_passes::rules::{self, ApplyRules};

use super::session::{CommandOutput, Session};
use crate::cli::{DEFAULT_CLUSTER, OptArgs};
use crate::error::{Failure, Result};
use crate::evaluate::Oracle;
use crate::kind::{self, ExpectedKind};
use crate::{files, ineffective, subject};

pub(super) fn opt(args: &OptArgs, session: &Session<'_>) -> Result<CommandOutput> {
    let cluster = subject::cluster(args.cluster.as_deref().unwrap_or(DEFAULT_CLUSTER))?;
    let prices = WatchedPrices { cluster: &cluster, was_asked: Cell::new(false) };
    let passes = passes(args, session)?;
    ineffective::opt(args, passes.len())?;
    let file = kind::read(&args.file, ExpectedKind::Program)?;
    let started = Instant::now();
    let module = text::parse(&file.text).map_err(|e| file.refuse(e))?;
    let parsed = started.elapsed();
    ithaca_ir::verify::verify(&module).map_err(|e| file.refuse(e))?;
    if let Some(pass) = &args.print_after {
        let known = pass == "all" || passes.iter().any(|p| p.name() == pass);
        if !known {
            let message = format!("`--print-after {pass}`: the pipeline has no pass `{pass}`");
            let names = passes.iter().map(|p| p.name()).chain(["all"]);
            return Err(Diagnostic::new("P02", message).names("passes", pass, names).into());
        }
    }
    let mut watch = Watch { args, text: String::new(), rows: vec![("parse".to_owned(), parsed)] };
    let mut cx = Context::new(&prices).stop_after(args.stop_after);
    let started = Instant::now();
    let module = run_passes(module, &passes, &mut cx, &mut watch)?;
    let total = started.elapsed() + parsed;
    let mut out = watch.text;
    for note in cx.notes() {
        let _ = writeln!(out, "// note: {note}");
    }
    if let Some(name) = args.cluster.as_ref().filter(|_| !prices.was_asked.get()) {
        let _ = writeln!(out, "// note: `--cluster {name}` has no effect: no pass asked for a price");
    }
    if args.timings {
        out.push_str(&timings(&watch.rows, total));
    }
    let printed = text::print(&module);
    match &args.output {
        Some(path) => files::write(path, printed.as_bytes())?,
        None => out.push_str(&printed),
    }
    Ok(CommandOutput::success(out))
}

/// The passes of the pipeline. The rules of `--rules` are applied at `rules` or `saturate{rules=added}`, else at the end.
fn passes(args: &OptArgs, session: &Session<'_>) -> Result<Vec<Box<dyn Pass>>> {
    let stages = pipeline::parse_stages(&args.pipeline)?;
    let Some(path) = &args.rules else {
        if stages.iter().any(is_place_of_rules) {
            return Err(Failure::usage("the pipeline has a stage `rules`, and `--rules` names no file"));
        }
        return Ok(pipeline::parse_with(session.registry, &args.pipeline)?);
    };
    let file = kind::read(path, ExpectedKind::Rules)?;
    let rules = rules::parse(&file.text).and_then(|rules| rules::check(rules, &Oracle));
    let rules = rules.map_err(|e| file.refuse(e))?;
    let mut passes: Vec<Box<dyn Pass>> = Vec::new();
    let mut placed = false;
    for stage in &stages {
        if is_place_of_rules(stage) {
            placed = true;
            passes.push(Box::new(ApplyRules::new(rules.clone())));
        } else if let Some(pass) = awaiting_rules(stage)? {
            placed = true;
            passes.push(Box::new(pass.with_rules(rules.clone())));
        } else {
            let options: Vec<String> = stage.options.iter().map(|(k, v)| format!("{k}={v}")).collect();
            let text = format!("{}{{{}}}", stage.name, options.join(","));
            passes.extend(pipeline::parse_with(session.registry, &text)?);
        }
    }
    if !placed {
        passes.push(Box::new(ApplyRules::new(rules)));
    }
    Ok(passes)
}

/// The pass of a stage `saturate` that uses the rules of a file.
fn awaiting_rules(stage: &pipeline::Stage) -> Result<Option<Saturate>> {
    match stage.name.as_str() {
        "saturate" => {
            let saturate: Saturate = options::read(&stage.name, saturate::OPTIONS, &stage.options)?;
            Ok(Some(saturate).filter(Saturate::awaits_rules))
        }
        _ => Ok(None),
    }
}

fn is_place_of_rules(stage: &pipeline::Stage) -> bool {
    stage.name == "rules" && stage.options.is_empty()
}

/// The prices of a cluster, and whether a pass asked for one.
struct WatchedPrices<'a> {
    cluster: &'a Cluster,
    was_asked: Cell<bool>,
}

impl Prices for WatchedPrices<'_> {
    fn collective_seconds(&self, space: &Space, op: &Op, from: &TensorType, to: &TensorType) -> f64 {
        self.was_asked.set(true);
        self.cluster.collective_seconds(space, op, from, to)
    }

    fn op_seconds(&self, space: &Space, op: &Op, operands: &[&TensorType], results: &[&TensorType]) -> f64 {
        self.was_asked.set(true);
        self.cluster.op_seconds(space, op, operands, results)
    }

    fn node_devices(&self) -> Option<u64> {
        self.was_asked.set(true);
        self.cluster.node_devices()
    }
}

/// Collects the output of `--print-after`, `--verify-each` and `--timings`.
struct Watch<'a> {
    args: &'a OptArgs,
    text: String,
    rows: Vec<(String, Duration)>,
}

impl Instrument for Watch<'_> {
    fn after(&mut self, pass: &dyn Pass, module: &Module, took: Duration) {
        self.rows.push((pass.name().to_owned(), took));
        if self.args.verify_each {
            let verdict = match ithaca_ir::verify::verify(module) {
                Ok(_) => "verified".to_owned(),
                Err(errors) => format!("broken: {}", errors[0]),
            };
            let _ = writeln!(self.text, "// after {pass}: {verdict}");
        }
        if self.args.print_after.as_deref().is_some_and(|p| p == "all" || p == pass.name()) {
            let _ = writeln!(self.text, "// after {pass}:\n{}", text::print(module));
        }
    }
}

/// The table of passes: cumulative time, own time, and share.
fn timings(rows: &[(String, Duration)], total: Duration) -> String {
    let mut table = "// total ms   self ms  share  pass\n".to_owned();
    let ms = |d: Duration| d.as_secs_f64() * 1e3;
    let mut sum = Duration::ZERO;
    for (name, took) in rows {
        sum += *took;
        let share = 100.0 * took.as_secs_f64() / total.as_secs_f64().max(f64::MIN_POSITIVE);
        let _ = writeln!(table, "// {:>8.3}  {:>8.3}  {share:>4.0}%  {name}", ms(sum), ms(*took));
    }
    let verification = ms(total.saturating_sub(sum));
    let _ = writeln!(table, "// {:>8.3}  {verification:>8.3}         verification", ms(total));
    table
}
