//! `verify` for a per-rank program in text form, perhaps written by hand: the checks without a program, and the comparison with
//! a given whole program.

use ithaca_ir::Module;
use ithaca_ir::diagnostic::counted;
use ithaca_ir::verify::VerifiedModule;
use ithaca_passes::compile::{Compiled, verify_schedule};
use ithaca_passes::lower::{Packing, lower_with};
use ithaca_passes::pass::choices::Choices;
use ithaca_passes::shard::ShardOptions;

use super::prove::{prove, refuse_minutes};
use super::run::lengths_of;
use super::session::{CommandOutput, Session};
use crate::cli::{SubjectArgs, VerifyArgs};
use crate::error::Result;
use crate::files::TextFile;
use crate::job::Job;
use crate::{ineffective, subject};

pub(super) fn verify(args: &VerifyArgs, session: &mut Session<'_>) -> Result<CommandOutput> {
    ineffective::verify_per_rank(args)?;
    let path = &args.subject.subject;
    let file = TextFile::read(path)?;
    let compiled = compiled(&file, file.program()?)?;
    let mut out = said(&compiled.per_rank);
    let Some(program) = &args.program else {
        out.push_str(
            "not checked: that it computes a whole program; add `--program FILE`, with a plan, a model or a whole program\n",
        );
        return Ok(CommandOutput::success(out));
    };
    refuse_minutes(&compiled.per_rank, args.steps)?;
    let whole = SubjectArgs { subject: program.clone(), ..args.subject.clone() };
    let lengths = whole.inputs.as_deref().map(lengths_of).transpose()?.flatten();
    let job = subject::job(session.registry, &whole, lengths)?;
    ineffective::steps(args.steps, &job.program)?;
    let mesh = compiled.per_rank.space.mesh.clone();
    let options = ShardOptions { strategy: format!("`{}`", path.display()), mesh, ..ShardOptions::default() };
    let job = Job { options, plan: None, compiled: Some(Box::new(compiled)), ..job };
    let proof = prove(&job, args, session, "")?;
    Ok(CommandOutput { text: out + &proof.text, code: proof.code })
}

/// The program with its schedule, both checked.
fn compiled(file: &TextFile, per_rank: Module) -> Result<Compiled> {
    let per_rank = VerifiedModule::new(per_rank).map_err(|e| file.refuse(e))?;
    let schedule = lower_with(per_rank.verified(), Packing::default()).map_err(|e| file.refuse(e))?;
    let choices = Choices::default();
    let compiled = Compiled { schedule, attention: Vec::new(), notes: Vec::new(), choices, per_rank };
    verify_schedule(&compiled)?;
    Ok(compiled)
}

/// What was checked of a program by itself.
fn said(per_rank: &Module) -> String {
    let nodes = per_rank.functions.values().flat_map(|f| &f.nodes);
    let n_collectives = nodes.filter(|node| node.op.is_communication());
    format!(
        "{}\nper-rank program of {} and {} on {}: types and layouts hold, and memory, collectives and order of its schedule\n",
        per_rank.name,
        counted(per_rank.functions.len() as u64, "function"),
        counted(n_collectives.count() as u64, "collective"),
        counted(per_rank.space.mesh.ranks(), "rank"),
    )
}
