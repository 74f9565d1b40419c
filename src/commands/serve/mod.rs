//! `plan --mode serve`: the layouts, batches and GPUs that answer requests at a rate.

mod document;
mod points;
mod sizes;
mod text;

use std::fmt::Write;
use std::path::Path;

use ithaca_codegen::report;
use ithaca_ir::Diagnostic;
use ithaca_ir::diagnostic::counted;
use ithaca_ir::units::seconds;
use ithaca_passes::import::STEP;
use ithaca_passes::planner::View;
use ithaca_passes::serve::{Demand, Deployment, Outcome, search};

use super::session::{CommandOutput, Session};
use crate::cli::{self, LayoutArgs, NarrowingArgs, PlanArgs, WorkloadArgs};
use crate::error::Result;
use crate::kind::{self, ExpectedKind};
use crate::{files, subject};
use document::{Document, Steps};
use points::{LARGEST_REPLICA, Pricer};

pub(super) fn serve(args: &PlanArgs, view: &View, session: &mut Session<'_>) -> Result<CommandOutput> {
    check_given(args)?;
    let (demand, file) = demand(args)?;
    for path in file.into_iter().chain(args.report.as_deref()) {
        files::check_file(path)?;
    }
    let model = args.model.as_deref().expect("the model is required without `--check`");
    let model = subject::model(model)?;
    let name = model.name.clone();
    (session.progress)("planning");
    let pricer = Pricer::new(session.registry, model, args, &demand)?;
    let demand = Demand { gpus: demand.gpus.min(pricer.devices()), ..demand };
    let mut replicas = pricer.replicas(&demand)?;
    let mut outcome = search(&demand, &replicas);
    if outcome.meets.is_empty() && demand.token_seconds.is_some() {
        // What comes near may take longer for a token than the target.
        replicas = pricer.replicas(&Demand { token_seconds: None, ..demand })?;
        outcome = search(&demand, &replicas);
    }
    if outcome.meets.is_empty() && demand.gpus < pricer.devices() {
        // Larger replicas may do with fewer GPUs.
        let all = Demand { gpus: pricer.devices(), ..demand };
        let fewest = search(&all, &pricer.replicas(&all)?).meets.into_iter().next();
        outcome.large = fewest.or(outcome.large);
    }
    let dtype = pricer.dtype(&demand)?;
    let steps = Steps {
        model: &name,
        config: &pricer.model.config,
        cluster: &pricer.decoding,
        prompts: &pricer.prompts,
        usual: pricer.usual,
        dtype: &dtype,
        cache_type: pricer.cache_type(),
        encodes_prompts: pricer.encodes_prompts,
    };
    let Some(document) = Document::new(steps, &demand, &outcome, args) else {
        let illegal = if replicas.is_empty() { pricer.illegal(&demand)? } else { None };
        let refusal = match illegal {
            Some(rule) => illegal_layouts(&demand, args, rule),
            None => refusal(&demand, &outcome, &pricer, (args, replicas.is_empty())),
        };
        return Err(refusal.into());
    };
    let json = format!("{:#}\n", document.to_value());
    if let Some(path) = file {
        files::write(path, json.as_bytes())?;
    }
    if let Some(path) = &args.report {
        files::write(path, drawn(&document).as_bytes())?;
    }
    if args.json {
        return Ok(CommandOutput::success(json));
    }
    let mut out = text::answer(&document, view);
    for path in file.into_iter().chain(args.report.as_deref()) {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "wrote {}", path.display());
    }
    Ok(CommandOutput::success(out))
}

/// The page about the deployments in a file.
///
/// # Errors
/// `C01` for a file that cannot be read, `C05` for one that does not describe deployments.
pub(super) fn page(path: &Path) -> Result<String> {
    let file = kind::read(path, ExpectedKind::Reported)?;
    let document: Document = serde_json::from_str(&file.text).map_err(|e| {
        let refusal =
            Diagnostic::new("C05", format!("`{}` does not describe deployments: {e}", path.display()));
        refusal.help("write it again: `ithaca plan MODEL --mode serve … -o deployments.json`")
    })?;
    Ok(drawn(&document))
}

fn drawn(document: &Document) -> String {
    report::serving(&format!("{}: serving", document.model), &document.to_value())
}

/// Refuses options that the search of a deployment does not take.
fn check_given(args: &PlanArgs) -> Result<()> {
    let workload = WorkloadArgs {
        mode: None,
        dtype: None,
        cache_type: None,
        expert_bound: None,
        ignore_fields: Vec::new(),
        ..args.workload.clone()
    };
    let layout = LayoutArgs {
        cluster: None,
        attention_kernel: None,
        runtime: None,
        gpus: None,
        ..args.layout.clone()
    };
    let of_framework = args.narrowing.framework.map(|_| "--for".to_owned());
    let flag = cli::first_given(&workload).or(cli::first_given(&layout)).or(of_framework);
    let Some(flag) = flag else { return Ok(()) };
    let message =
        format!("`{flag}` cannot be combined with `--mode serve`, which chooses batches and layouts");
    let help =
        "narrow it by `--only`, `--without`, `--max-tp` and `--gpus`; lengths are `--input` and `--output`";
    Err(Diagnostic::new("C00", message).help(help).into())
}

/// The demand, and the file to write.
fn demand(args: &PlanArgs) -> Result<(Demand, Option<&Path>)> {
    let serving = &args.serving;
    let file = args.output.as_deref();
    // `--output 256` is a number of tokens.
    let as_tokens = || file.and_then(|path| cli::tokens(path.to_str()?).ok());
    let (output, file) = match serving.output_tokens {
        Some(tokens) => (Some(tokens), file),
        None => match as_tokens() {
            Some(tokens) => (Some(tokens), None),
            None => (None, file),
        },
    };
    let missing = |flag: &str, what: &str, example: &str| {
        Diagnostic::new("C00", format!("{what} is missing")).help(format!("add it, as in `{flag} {example}`"))
    };
    let rate = serving.rate.ok_or_else(|| missing("--rate", "the number of requests a second", "10"))?;
    let input = serving.input.ok_or_else(|| missing("--input", "the number of tokens of a prompt", "2k"))?;
    let output = output.ok_or_else(|| {
        let refusal = missing("--output", "the number of tokens of an answer", "256");
        match file {
            Some(path) => refusal
                .help(format!("`--output {}` is a file: it is no whole number above zero", path.display())),
            None => refusal,
        }
    })?;
    let target = |ms: Option<f64>| ms.map(|ms| ms / 1e3);
    let demand = Demand {
        rate,
        input,
        output,
        first_token_seconds: target(serving.ttft),
        token_seconds: target(serving.tpot),
        gpus: args.layout.gpus.unwrap_or(u64::MAX),
    };
    Ok((demand, file))
}

/// That no layout is legal, with the rule that the first breaks.
fn illegal_layouts(demand: &Demand, args: &PlanArgs, rule: Diagnostic) -> Diagnostic {
    let most = demand.gpus.min(LARGEST_REPLICA);
    let message = format!("no layout of a replica of up to {} is legal", counted(most, "GPU"));
    // Options of a layout cannot be combined with `--mode serve`.
    let helps = rule.helps.into_iter().filter(|help| !help.contains("`--"));
    let helps = std::iter::once(rule.message).chain(helps);
    let helps = helps.chain(wider(args));
    helps.fold(Diagnostic::new("P33", message), Diagnostic::help)
}

/// That an option narrows the search, where one does.
fn wider(args: &PlanArgs) -> Option<String> {
    let narrowing = NarrowingArgs { effort: None, ..args.narrowing.clone() };
    cli::first_given(&narrowing).map(|flag| format!("leave `{flag}` out, which narrows the search"))
}

/// Why nothing meets the demand, with what would.
fn refusal(
    demand: &Demand,
    outcome: &Outcome,
    pricer: &Pricer<'_>,
    (args, nothing_fits): (&PlanArgs, bool),
) -> Diagnostic {
    let Demand { rate, input, output, gpus, .. } = demand;
    let gpus = counted(*gpus, "GPU");
    if nothing_fits {
        let message = format!("no layout on up to {gpus} has memory for the model and a request");
        let refusal = Diagnostic::new("P33", message);
        return match &outcome.large {
            Some(large) => refusal.repairs([relaxed(demand, large)]),
            None => refusal.help(wider(args).unwrap_or_else(|| "use a cluster of larger GPUs".to_owned())),
        };
    }
    let message = format!(
        "no deployment on {gpus} answers {rate} requests a second of {input} tokens by {output} within the targets"
    );
    let near = |found: Option<&Deployment>, words: &dyn Fn(&Deployment) -> String| {
        let found = found?;
        let repair = (found.gpus <= pricer.devices()).then(|| relaxed(demand, found));
        Some((format!("{}: {}", words(found), document::words(found)), repair))
    };
    let kept =
        |target: Option<f64>, flag: &str| target.map_or_else(String::new, |_| format!(" if `{flag}` is met"));
    let is_one_met = outcome.late.is_some() || outcome.slow.is_some();
    let found = [
        near(outcome.large.as_ref(), &|d| {
            let most = pricer.devices();
            let lacks = if d.gpus > most { format!(", and the cluster has {most}") } else { String::new() };
            format!("{} meet them{lacks}", counted(d.gpus, "GPU"))
        }),
        near(outcome.late.as_ref(), &|d| {
            let first = seconds(d.first_token_seconds);
            format!("the first token takes {first} at least{}", kept(demand.token_seconds, "--tpot"))
        }),
        near(outcome.slow.as_ref(), &|d| {
            let further = seconds(d.token_seconds);
            format!(
                "each further token takes {further} at least{}",
                kept(demand.first_token_seconds, "--ttft")
            )
        }),
        near(outcome.far.as_ref().filter(|_| !is_one_met), &|d| {
            let [first, further] = [d.first_token_seconds, d.token_seconds].map(seconds);
            format!("nearest to both targets is a first token in {first} and each further one in {further}")
        }),
    ];
    let (helps, repairs): (Vec<String>, Vec<Option<String>>) = found.into_iter().flatten().unzip();
    let in_parts = (pricer.has_rings && *input > STEP).then(|| {
        format!(
            "caches of sliding windows have room for steps of {STEP} tokens, so prompts are computed in parts"
        )
    });
    helps
        .into_iter()
        .chain(in_parts)
        .fold(Diagnostic::new("P33", message), Diagnostic::help)
        .repairs(repairs.into_iter().flatten())
}

/// The options with which a deployment meets the demand.
fn relaxed(demand: &Demand, deployment: &Deployment) -> String {
    let missed = |flag: &str, most: Option<f64>, seconds: f64| {
        let is_missed = most.is_some_and(|most| seconds > most);
        is_missed.then(|| format!("{flag} {:.0}", (seconds * 1e3).ceil()))
    };
    let Deployment { first_token_seconds, token_seconds, gpus, .. } = deployment;
    let flags = [
        (*gpus > demand.gpus).then(|| format!("--gpus {gpus}")),
        missed("--ttft", demand.first_token_seconds, *first_token_seconds),
        missed("--tpot", demand.token_seconds, *token_seconds),
    ];
    flags.into_iter().flatten().collect::<Vec<_>>().join(" ")
}
