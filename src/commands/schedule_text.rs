//! `verify` for a schedule in text form: the checks without a program, and the comparison with a given program.

use std::path::Path;

use ithaca_ir::diagnostic::counted;
use ithaca_ir::schedule::Schedule;
use ithaca_ir::verify::verify as verify_program;
use ithaca_ir::{Diagnostic, Level, Module, schedule};
use ithaca_passes::cluster::Cluster;
use ithaca_passes::pass::{Context, Unwatched, run_passes};
use ithaca_passes::pipeline;

use super::session::{CommandOutput, Session};
use crate::cli::VerifyArgs;
use crate::error::Result;
use crate::files::TextFile;
use crate::kind::{self, ExpectedKind, Kind};
use crate::{ineffective, subject};

pub(super) fn verify(args: &VerifyArgs, session: &mut Session<'_>) -> Result<CommandOutput> {
    let program = args.program.as_deref();
    let kind = program.map(|path| kind::expect(path, ExpectedKind::Meaning)).transpose()?;
    ineffective::verify_schedule(args, kind)?;
    let path = &args.subject.subject;
    let file = TextFile::read(path)?;
    let parsed = schedule::parse(&file.text).map_err(|e| file.refuse(e))?;
    schedule::verify(&parsed).map_err(|e| file.refuse(e))?;
    let tasks = counted(parsed.frames.values().map(|frame| frame.tasks.len() as u64).sum::<u64>(), "task");
    let frames = counted(parsed.frames.len() as u64, "frame");
    let ranks = counted(parsed.space.mesh.ranks(), "rank");
    let mut out = format!(
        "{}\nschedule of {tasks} in {frames} on {ranks}: memory, collectives and order hold\n",
        parsed.name
    );
    let (Some(program), Some(kind)) = (program, kind) else {
        out.push_str(
            "not checked: that it computes its program (S18); add `--program FILE`, with the plan or the output of \
             `ithaca emit plan.json --target ir`\n",
        );
        return Ok(CommandOutput::success(out));
    };
    (session.progress)("compiling");
    let cluster = subject::cluster_of(&args.subject.layout, args.subject.workload.mode)?;
    let per_rank = per_rank(session, program, kind, &parsed, &cluster)?;
    schedule::verify_meaning(&parsed, verify_program(&per_rank)?).map_err(|e| file.refuse(e))?;
    out.push_str(&format!("it computes the program `{}` (S18)\n", program.display()));
    Ok(CommandOutput::success(out))
}

/// The per-rank program: that of a plan, the given one, or a whole program after the passes that the schedule names.
fn per_rank(
    session: &Session<'_>,
    path: &Path,
    kind: Kind,
    schedule: &Schedule,
    cluster: &Cluster,
) -> Result<Module> {
    if !matches!(kind, Kind::Program(_) | Kind::Text) {
        return Ok(subject::plan(session.registry, path)?.compile(session.registry)?.per_rank.into_module());
    }
    let module = TextFile::read(path)?.program()?;
    let module = match module.level {
        Level::PerRank => module,
        Level::Sharded | Level::Program => {
            // The passes that the module names have run.
            let names = schedule.pipeline.get(module.pipeline.len()..).unwrap_or_default().join(",");
            let passes = pipeline::parse_with(session.registry, &names)?;
            run_passes(module, &passes, &mut Context::new(cluster), &mut Unwatched)?
        }
    };
    match module.level {
        Level::PerRank => Ok(module),
        Level::Program | Level::Sharded => {
            let message = format!(
                "the passes of the schedule do not lower `{}` to a per-rank program: {}",
                path.display(),
                schedule.pipeline.join(",")
            );
            Err(Diagnostic::new("C03", message)
                .help("name a plan, or the output of `ithaca emit plan.json --target ir`")
                .into())
        }
    }
}
