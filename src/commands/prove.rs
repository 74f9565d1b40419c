//! The comparison of a per-rank program on virtual ranks with its whole program, in double precision.

use ithaca_ir::diagnostic::counted;
use ithaca_ir::{Diagnostic, Module};
use ithaca_kernels::compare::{Judge, Smallest};
use ithaca_kernels::{Outputs, Storage, oracle};

use super::run::{DEFAULT_TOLERANCE, Data, Expected, all, heading, judge, steps};
use super::session::{Done, Session};
use crate::cli::VerifyArgs;
use crate::error::Result;
use crate::job::Job;

/// The largest absolute rounding error of double precision at these sizes.
const EXACT: f64 = 1e-9;

/// Compares the per-rank program of a job with its whole program; `about` follows the heading.
pub(super) fn prove(job: &Job, args: &VerifyArgs, session: &mut Session<'_>, about: &str) -> Result<Done> {
    (session.progress)("compiling");
    let compiled = job.compile()?;
    refuse_hours(&compiled.per_rank)?;
    let data = Data::open(job, &args.subject, args.expect.as_deref())?;
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
    let mut out = heading(job, &compiled.notes, &data);
    out.push_str(about);
    out.push_str("per-rank program against the whole program\n");
    let after = Judge { reach: job.reach(args.steps), smallest: Some(&smallest) };
    let verdict = judge(&ranks, &Expected::Whole(&whole), after, EXACT)?.of_layout(&compiled.per_rank);
    out.push_str(&verdict.text);
    let mut passed = verdict.passed;
    if let Some(path) = &args.expect {
        let expected =
            judge(&ranks, &Expected::<f64>::File(path), after, args.tolerance.unwrap_or(DEFAULT_TOLERANCE))?;
        out.push_str("per-rank program against the file\n");
        out.push_str(&expected.text);
        passed &= expected.passed;
    }
    Ok(Done { text: out, code: u8::from(!passed) })
}

/// Refuses programs that take hours; the limit was measured on two cores.
pub(super) fn refuse_hours(ranks: &Module) -> Result<()> {
    /// The most operations; five to ten thousand of a small model take a second.
    const MOST: u128 = 10_000_000;
    let runs = ranks.run_counts().into_iter().zip(ranks.functions.values());
    let all: u128 = runs.map(|(n, function)| u128::from(n) * function.nodes.len() as u128).sum();
    let n_ranks = ranks.space.mesh.ranks();
    let total = all * u128::from(n_ranks);
    if total <= MOST {
        return Ok(());
    }
    let message = format!(
        "the run has {total} operations, {} on each of {}, which take more than half an hour on one processor",
        counted(all, "operation"),
        counted(n_ranks, "rank")
    );
    Err(Diagnostic::new("C14", message)
        .help("use a smaller mesh of the same strategies, and fewer micro-batches")
        .into())
}
