//! `run --launch`: the ranks of a plan in processes of their own, which a launcher started.

use std::time::Duration;

use ithaca_ir::Diagnostic;
use ithaca_ir::diagnostic::counted;
use ithaca_kernels::launch::{self, LaunchEnv};

use super::run::{job, run_job};
use super::session::{Done, Session};
use crate::cli::RunArgs;
use crate::error::Result;

/// How long a process that cannot run waits for the others, to tell them.
const LAST_WORD: Duration = Duration::from_secs(5);

/// Runs one rank; the process of rank 0 prints and writes, and all exit with its code.
pub(super) fn run(args: &RunArgs, session: &mut Session<'_>) -> Result<Done> {
    let env = LaunchEnv::of(session.environment)?;
    let timeout = Duration::from_secs(args.timeout);
    let job = match job(args, session) {
        Ok(job) => job,
        Err(failure) => {
            if let Ok(process) = launch::join(&env, timeout.min(LAST_WORD)) {
                process.fail(&failure.summary());
            }
            return Err(failure);
        }
    };
    let ranks = job.options.mesh.ranks();
    if ranks != env.world {
        let processes = |n| match n {
            1 => "1 process".to_owned(),
            n => format!("{n} processes"),
        };
        let what = format!(
            "the plan has {}, and there {} {} (WORLD_SIZE)",
            counted(ranks, "rank"),
            if env.world == 1 { "is" } else { "are" },
            processes(env.world)
        );
        return Err(Diagnostic::new("C17", what)
            .help(format!("start {}, one for each rank", processes(ranks)))
            .help("leave `--launch` out to run all ranks in one process, a thread each")
            .into());
    }
    let process = launch::join(&env, timeout)?;
    match run_job(&job, args, session, Some(&process)) {
        Ok(done) => {
            let code = process.finish(done.code)?;
            Ok(Done { code, ..done })
        }
        Err(failure) => {
            process.fail(&failure.summary());
            Err(failure)
        }
    }
}
