//! The comparison of a per-rank program on virtual ranks with its whole program, in double precision.

use ithaca_ir::diagnostic::counted;
use ithaca_ir::{Diagnostic, Module};
use ithaca_kernels::{Storage, oracle};

use super::run::{Data, all, heading, steps, tensors};
use super::session::{CommandOutput, Session};
use super::verdict::{AgainstWhole, DEFAULT_TOLERANCE, against_file};
use crate::cli::VerifyArgs;
use crate::error::Result;
use crate::job::{self, Job};

/// Compares the per-rank program of a job with its whole program; `about` follows the heading.
pub(super) fn prove(
    job: &Job,
    args: &VerifyArgs,
    session: &mut Session<'_>,
    about: &str,
) -> Result<CommandOutput> {
    (session.progress)("compiling");
    let compiled = job.compile()?;
    refuse_minutes(&compiled.per_rank, args.steps)?;
    let data = Data::open(job, &args.subject, args.expect.as_deref())?;
    let inputs = data.inputs();
    let mut against_whole = AgainstWhole::new(&[(job, &compiled.per_rank)], Storage::Wide);
    let ranks = steps(args.steps, &data.weights(), |weights| {
        (session.progress)("running the per-rank program");
        let results = oracle::step::<f64>(&compiled.per_rank, weights, inputs.as_ref(), Storage::Wide)?;
        (session.progress)("running the whole program");
        against_whole.step(0, (weights, inputs.as_ref()), &results)?;
        Ok(results)
    })?;
    let mut out = heading(job, &compiled.notes, (&data, session.width));
    out.push_str(about);
    out.push_str("per-rank program against the whole program\n");
    let verdict = against_whole.report(session.width);
    out.push_str(&verdict.text);
    let mut passed = verdict.passed;
    if let Some(path) = &args.expect {
        let tolerance = args.tolerance.unwrap_or(DEFAULT_TOLERANCE);
        let expected = against_file(&all(ranks), &tensors(path)?, tolerance, session.width)?;
        out.push_str("per-rank program against the file\n");
        out.push_str(&expected.text);
        passed &= expected.passed;
    }
    Ok(CommandOutput { text: out, code: u8::from(!passed) })
}

/// Refuses programs that take minutes; the limit was measured on two cores.
pub(super) fn refuse_minutes(ranks: &Module, steps: u64) -> Result<()> {
    /// The most operations; forty thousand of a small model take a second.
    const MOST: u128 = 5_000_000;
    let all = job::operations(ranks);
    if all.saturating_mul(u128::from(steps)) <= MOST {
        return Ok(());
    }
    let message = format!(
        "the comparison has {} on all of {} in {}, and one processor is given at most {MOST}, minutes",
        counted(all, "operation"),
        counted(ranks.space.mesh.ranks(), "rank"),
        counted(steps, "step")
    );
    Err(Diagnostic::new("C14", message)
        .help("use a smaller mesh of the same strategies, fewer micro-batches, and fewer `--steps`")
        .into())
}
