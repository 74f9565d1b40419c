//! `verify`: compares the per-rank program on virtual ranks with the whole program, in double precision.

use std::fmt::Write;

use ithaca_ir::Level;
use ithaca_passes::import;
use ithaca_passes::plan::Plan;

use super::printed::in_width;
use super::prove::prove;
use super::run::lengths_of;
use super::session::{CommandOutput, Session};
use super::{per_rank_text, schedule_text};
use crate::cli::{SubjectArgs, VerifyArgs};
use crate::error::Result;
use crate::ineffective;
use crate::job::Job;
use crate::kind::Kind;
use crate::{shrink, subject};

pub(super) fn verify(args: &VerifyArgs, session: &mut Session<'_>) -> Result<CommandOutput> {
    let done = verified(args, session)?;
    Ok(CommandOutput { text: in_width(&done.text, session.width), ..done })
}

fn verified(args: &VerifyArgs, session: &mut Session<'_>) -> Result<CommandOutput> {
    match Kind::of(&args.subject.subject)? {
        Kind::Schedule => return schedule_text::verify(args, session),
        Kind::Program(Level::PerRank) => return per_rank_text::verify(args, session),
        _ => {}
    }
    ineffective::verify(args)?;
    let lengths = args.subject.inputs.as_deref().map(lengths_of).transpose()?.flatten();
    let registry = session.registry;
    proved(args, session, |subject| subject::job(registry, subject, lengths))
}

/// Proves the layout of a plan; its path is not used.
///
/// # Errors
/// Those of the plan and of the options.
pub(crate) fn of_plan(plan: &Plan, args: &VerifyArgs, session: &mut Session<'_>) -> Result<CommandOutput> {
    let registry = session.registry;
    proved(args, session, |subject| subject::job_of_plan(registry, plan.clone(), subject))
}

fn proved(
    args: &VerifyArgs,
    session: &mut Session<'_>,
    job_of: impl Fn(&SubjectArgs) -> Result<Job>,
) -> Result<CommandOutput> {
    let (job, shrunk) = provable(args, job_of)?;
    prove(&job, args, session, &shrunk)
}

/// Compiles the job of the arguments, for a plan or a model.
///
/// # Errors
/// Those of the arguments and of the job.
pub(super) fn replay(args: &VerifyArgs, session: &Session<'_>) -> Result<()> {
    ineffective::verify(args)?;
    let lengths = args.subject.inputs.as_deref().map(lengths_of).transpose()?.flatten();
    let (job, _) = provable(args, |subject| subject::job(session.registry, subject, lengths))?;
    job.compile()?;
    Ok(())
}

/// The job, or that of a small model, with a note that says so.
fn provable(args: &VerifyArgs, job_of: impl Fn(&SubjectArgs) -> Result<Job>) -> Result<(Job, String)> {
    let mut job = job_of(&args.subject)?;
    let mut shrunk = String::new();
    if let Some(reason) = too_large(&job).filter(|_| !args.subject.shrink) {
        // The proof is of the layout, and a small model of the same structure has the same layout.
        let mut small = args.subject.clone();
        small.shrink = true;
        job = job_of(&small)?;
        let _ = writeln!(shrunk, "note: {reason}; a small model of the same structure is verified instead");
    }
    ineffective::steps(args.steps, &job.program)?;
    Ok((job, shrunk))
}

/// Why a program is too large for the plain loops of the oracle, if it is.
fn too_large(job: &Job) -> Option<String> {
    const FLOPS: u128 = 20_000_000_000;
    let (flops, held) = (job.flops(), import::held(&job.program));
    if flops > FLOPS {
        return Some(format!("the whole program takes {:.1e} FLOPs, too many for plain loops", flops as f64));
    }
    (held > shrink::MOST_ELEMENTS).then(|| {
        format!("the whole program holds {:.1e} elements, too many in double precision", held as f64)
    })
}
