//! `emit`: a plan as code.

use std::path::PathBuf;

use ithaca_codegen::{cuda, dot, json, mermaid, svg, trace};
use ithaca_ir::diagnostic::counted;
use ithaca_ir::verify::verify;
use ithaca_ir::{Diagnostic, schedule, text};
use ithaca_passes::import;
use ithaca_passes::lower::lower;
use ithaca_passes::simulate;

use super::session::{Done, Session};
use crate::cli::{EmitArgs, Target};
use crate::error::Result;
use crate::{files, subject};

pub(super) fn emit(args: &EmitArgs, session: &mut Session<'_>) -> Result<Done> {
    let plan = subject::plan(session.registry, &args.plan)?;
    (session.progress)("compiling");
    let compiled = plan.compile(session.registry)?;
    let contents = match args.target {
        Target::Ir => text::print(&compiled.per_rank),
        Target::Schedule => schedule::print(&compiled.schedule),
        Target::Json => json::emit(&compiled.schedule),
        Target::Dot => dot::emit(&compiled.per_rank),
        Target::Svg => svg::emit(&compiled.per_rank),
        Target::Mermaid => mermaid::emit(&compiled.per_rank),
        Target::Trace => trace::emit("simulated", &simulate::timeline(&plan.cluster, &compiled.schedule)),
        Target::Cuda => {
            let Some(folder) = &args.output else {
                let refusal =
                    Diagnostic::new("C00", "`--target cuda` writes a folder, and no option names one");
                return Err(refusal.help("add it, as in `-o out/`").into());
            };
            (session.progress)("compiling the reference");
            let program = import::program(&plan.model.config, &plan.model.name, &plan.workload.to_import()?)?;
            // One device needs no layout, and has no stages.
            let reference = lower(verify(&program)?)?;
            let emitted =
                cuda::emit(schedule::verify(&compiled.schedule)?, Some(schedule::verify(&reference)?))?;
            let list: Vec<(PathBuf, Vec<u8>)> =
                emitted.into_iter().map(|f| (PathBuf::from(f.path), f.contents.into_bytes())).collect();
            files::write_all(folder, &list)?;
            return Ok(Done::success(format!(
                "wrote {} to {}\n",
                counted(list.len() as u64, "file"),
                folder.display()
            )));
        }
    };
    match &args.output {
        Some(path) => {
            files::write(path, contents.as_bytes())?;
            Ok(Done::success(format!("wrote {}\n", path.display())))
        }
        None => Ok(Done::success(contents)),
    }
}
