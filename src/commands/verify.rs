//! `verify`: the per-rank program on virtual ranks against the whole one, in double precision.

use std::fmt::Write;

use ithaca_ir::diagnostic::counted;
use ithaca_ir::entity::Entity;
use ithaca_ir::{Diagnostic, Module, Op};
use ithaca_kernels::compare::{Judge, Smallest};
use ithaca_kernels::{Outputs, Storage, oracle};

use super::run::{Data, Expected, USUAL, all, heading, judge, lengths_of, steps};
use super::schedule_text;
use super::session::{Done, Session};
use crate::cli::VerifyArgs;
use crate::error::Result;
use crate::ineffective;
use crate::job::Job;
use crate::kind::Kind;
use crate::subject;

/// The largest absolute difference that double precision explains at these sizes.
const EXACT: f64 = 1e-9;

pub(super) fn verify(args: &VerifyArgs, session: &mut Session<'_>) -> Result<Done> {
    if Kind::of(&args.subject.subject)? == Kind::Schedule {
        return schedule_text::verify(args, session);
    }
    ineffective::verify(args)?;
    let lengths = args.subject.inputs.as_deref().map(lengths_of).transpose()?.flatten();
    let mut job = subject::job(session.registry, &args.subject, lengths)?;
    let mut shrunk = String::new();
    if let Some(reason) = too_large(&job).filter(|_| !args.subject.shrink) {
        // What is proven is the layout, which a small model of the same structure has too.
        let mut small = args.subject.clone();
        small.shrink = true;
        job = subject::job(session.registry, &small, lengths)?;
        let _ =
            writeln!(shrunk, "note: {reason}; a small model of the same structure is verified in its place");
    }
    ineffective::steps(args.steps, &job)?;
    (session.progress)("compiling");
    let compiled = job.compile()?;
    refuse_hours(&compiled.per_rank)?;
    let data = Data::open(&job, &args.subject, args.expect.as_deref())?;
    (session.progress)("running the whole program");
    let inputs = data.inputs();
    let mut smallest = Smallest::default();
    let run = |module, after: &mut dyn FnMut(&Outputs<f64>)| {
        let results = steps(args.steps, &data.weights(), |weights| {
            let results = oracle::step::<f64>(module, weights, inputs.as_ref(), Storage::Wide)?;
            after(&results.kept);
            Ok(results)
        });
        results.map(all)
    };
    let whole = run(job.reference(), &mut |kept| smallest.after(kept))?;
    (session.progress)("running the per-rank program");
    let ranks = run(&compiled.per_rank, &mut |_| {})?;
    let mut out = heading(&job, &compiled.notes, &data);
    out.push_str(&shrunk);
    out.push_str("per-rank program against the whole one\n");
    let after = Judge { reach: job.reach(args.steps), smallest: Some(&smallest) };
    let verdict = judge(&ranks, &Expected::Whole(&whole), after, EXACT)?;
    out.push_str(&verdict.text);
    let mut passed = verdict.passed;
    if let Some(path) = &args.expect {
        let expected = judge(&ranks, &Expected::<f64>::File(path), after, args.tolerance.unwrap_or(USUAL))?;
        out.push_str("per-rank program against the file\n");
        out.push_str(&expected.text);
        passed &= expected.passed;
    }
    Ok(Done { text: out, code: u8::from(!passed) })
}

/// Refuses what would take this machine hours; the figures are of two cores.
fn refuse_hours(ranks: &Module) -> Result<()> {
    /// Runs of operations, some five to ten thousand of which take a second in a small model.
    const MOST: u128 = 10_000_000;
    let mut runs: Vec<u128> = vec![0; ranks.functions.len()];
    if let Some(main) = ranks.main() {
        runs[main.index()] = 1;
    }
    let mut all = 0;
    // Callers stand behind what they call.
    for (id, function) in ranks.functions.iter().rev() {
        let own = runs[id.index()];
        all += own * function.nodes.len() as u128;
        for node in &function.nodes {
            if let Op::Call { callee, layers, .. } = &node.op {
                runs[callee.index()] += own * u128::from(layers.end - layers.start);
            }
        }
    }
    let n_ranks = ranks.space.mesh.ranks();
    let total = all * u128::from(n_ranks);
    if total <= MOST {
        return Ok(());
    }
    let message = format!(
        "{total} operations are half an hour and more where one processor plays all ranks: {} of {}",
        counted(all, "operation"),
        counted(n_ranks, "rank")
    );
    Err(Diagnostic::new("C14", message)
        .help("ask for a smaller mesh of the same strategies, with fewer micro-batches")
        .into())
}

/// Why a program is too large for the oracle's plain loops, if it is.
fn too_large(job: &Job) -> Option<String> {
    const FLOPS: u128 = 20_000_000_000;
    let flops = job.flops();
    (flops > FLOPS)
        .then(|| format!("the whole program takes {:.1e} FLOPs, more than plain loops can do", flops as f64))
}
