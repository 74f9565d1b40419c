//! `run --launch`: one process per rank of a plan, started by a launcher.

use std::time::Duration;

use ithaca_ir::Diagnostic;
use ithaca_ir::diagnostic::counted;
use ithaca_kernels::launch::{self, LaunchEnv};

use super::generate;
use super::run::{job, run_job};
use super::session::{CommandOutput, Session};
use crate::cli::RunArgs;
use crate::error::Result;

/// How long a process that cannot run waits for the others, to report its failure to them.
const REPORT_WAIT: Duration = Duration::from_secs(5);

/// Runs one rank; the process of rank 0 prints and writes, and all exit with its code.
pub(super) fn run(args: &RunArgs, session: &mut Session<'_>) -> Result<CommandOutput> {
    let env = LaunchEnv::of(session.environment)?;
    let timeout = Duration::from_secs(args.timeout);
    let decodes = generate::is_asked(args);
    let job = (!decodes).then(|| job(args, session)).transpose();
    let job = match job {
        Ok(job) => job,
        Err(failure) => {
            if let Ok(process) = launch::join(&env, timeout.min(REPORT_WAIT)) {
                process.fail(&failure.summary());
            }
            return Err(failure);
        }
    };
    let ranks = match &job {
        Some(job) => job.options.mesh.ranks(),
        None => generate::ranks(args)?,
    };
    if ranks != env.world {
        let processes = |n| match n {
            1 => "1 process".to_owned(),
            n => format!("{n} processes"),
        };
        let message = format!(
            "the plan has {}, and the run has {} (WORLD_SIZE)",
            counted(ranks, "rank"),
            processes(env.world)
        );
        return Err(Diagnostic::new("C17", message)
            .help(format!("start {}, one for each rank", processes(ranks)))
            .help("omit `--launch` to run all ranks in one process, a thread each")
            .into());
    }
    let process = launch::join(&env, timeout)?;
    let ran = match &job {
        Some(job) => run_job(job, args, session, Some(&process)),
        None => generate::run(args, session, Some(&process)),
    };
    match ran {
        Ok(done) => {
            let code = process.finish(done.code)?;
            Ok(CommandOutput { code, ..done })
        }
        Err(failure) => {
            process.fail(&failure.summary());
            Err(failure)
        }
    }
}
