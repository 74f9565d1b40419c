//! `verify` of a schedule in text form: by the checks that need no program, and against the program that is given.

use std::path::Path;

use ithaca_ir::diagnostic::counted;
use ithaca_ir::schedule::Schedule;
use ithaca_ir::verify::verify as verify_program;
use ithaca_ir::{Diagnostic, Level, Module, schedule, text};
use ithaca_passes::cluster::Cluster;
use ithaca_passes::pass::{Context, Unwatched, run_passes};
use ithaca_passes::pipeline;

use super::session::{Done, Session};
use crate::cli::VerifyArgs;
use crate::error::{Failure, Result};
use crate::kind::{self, Kind, Wanted};
use crate::{files, ineffective, subject};

pub(super) fn verify(args: &VerifyArgs, session: &mut Session<'_>) -> Result<Done> {
    let program = args.program.as_deref();
    let kind = program.map(|path| kind::expect(path, Wanted::Meaning)).transpose()?;
    ineffective::verify_schedule(args, kind)?;
    let path = &args.subject.subject;
    let source = files::read_text(path)?;
    let name = path.display().to_string();
    let in_file = |diagnostics| Failure::in_source(diagnostics, &name, &source);
    let parsed = schedule::parse(&source).map_err(in_file)?;
    schedule::verify(&parsed).map_err(in_file)?;
    let tasks = counted(parsed.frames.values().map(|frame| frame.tasks.len() as u64).sum::<u64>(), "task");
    let frames = counted(parsed.frames.len() as u64, "frame");
    let ranks = counted(parsed.space.mesh.ranks(), "rank");
    let mut out = format!(
        "{}\nschedule of {tasks} in {frames} on {ranks}: memory, collectives and order hold\n",
        parsed.name
    );
    let (Some(program), Some(kind)) = (program, kind) else {
        out.push_str(
            "not checked: that it computes what its program says (S18); `--program FILE` names that, the plan or what \
             `ithaca emit plan.json --target ir` writes\n",
        );
        return Ok(Done::success(out));
    };
    (session.progress)("compiling");
    let cluster = subject::cluster_of(&args.subject.layout)?;
    let per_rank = per_rank(session, program, kind, &parsed, &cluster)?;
    schedule::verify_meaning(&parsed, verify_program(&per_rank)?).map_err(in_file)?;
    out.push_str(&format!("it computes what `{}` says (S18)\n", program.display()));
    Ok(Done::success(out))
}

/// What one rank is to compute, by a plan, by a program of one rank, or by a whole one under the passes that the schedule
/// names.
fn per_rank(
    session: &Session<'_>,
    path: &Path,
    kind: Kind,
    schedule: &Schedule,
    cluster: &Cluster,
) -> Result<Module> {
    if !matches!(kind, Kind::Program(_) | Kind::Text) {
        return Ok(subject::plan(session.registry, path)?.compile(session.registry)?.per_rank);
    }
    let source = files::read_text(path)?;
    let name = path.display().to_string();
    let in_file = |diagnostics| Failure::in_source(diagnostics, &name, &source);
    let module = text::parse(&source).map_err(in_file)?;
    verify_program(&module).map_err(in_file)?;
    let module = match module.level {
        Level::PerRank => module,
        Level::Sharded | Level::Program => {
            // Those that it names already have run.
            let names = schedule.pipeline.get(module.pipeline.len()..).unwrap_or_default().join(",");
            let passes = pipeline::parse_with(session.registry, &names)?;
            run_passes(module, &passes, &mut Context::new(cluster), &mut Unwatched)?
        }
    };
    match module.level {
        Level::PerRank => Ok(module),
        Level::Program | Level::Sharded => {
            let message = format!(
                "the passes that the schedule names make no per-rank program of `{name}`: {}",
                schedule.pipeline.join(",")
            );
            Err(Diagnostic::new("C03", message)
                .help("name a plan, or the program that `ithaca emit plan.json --target ir` writes")
                .into())
        }
    }
}
