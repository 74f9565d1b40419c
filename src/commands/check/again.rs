//! `plan --check`: makes a plan again from the request that it records, and reviews the differences.

use std::path::Path;

use ithaca_ir::Diagnostic;
use ithaca_passes::import;
use ithaca_passes::plan::{self, ReviewOptions, review};

use super::super::session::{CommandOutput, Session};
use crate::cli::{self, PlanArgs};
use crate::error::Result;
use crate::request::PlanRequest;
use crate::subject;

pub(crate) fn again(path: &Path, args: &PlanArgs, session: &mut Session<'_>) -> Result<CommandOutput> {
    let given = cli::first_given(&args.workload).or(cli::first_given(&args.layout));
    if let Some(flag) = given.or(cli::first_given(&args.narrowing)).or(cli::first_given(&args.table)) {
        let message = format!("`{flag}` cannot be combined with `--check`: the plan records its request");
        return Err(Diagnostic::new("C00", message)
            .help("omit it, or make another plan and compare both with `ithaca diff`")
            .into());
    }
    let stated = subject::plan(session.registry, path)?;
    let mut request = PlanRequest::of_plan(&stated)?;
    if let Some(model) = &args.model {
        let model = subject::described(model)?;
        let name = import::described_name(&model.config, &request.workload.ignore)?;
        request.model = plan::Model::new(name, model.config);
    }
    (session.progress)("planning");
    let again = request.plan(session.registry)?;
    let review = review(&stated, &again, &ReviewOptions::default());
    let name = path.display();
    Ok(if review.changes.is_empty() {
        CommandOutput::success(format!("`{name}` is the plan that is chosen for its request\n"))
    } else {
        let text = format!(
            "`{name}` is no longer the plan that is chosen for its request:\n{}",
            review.text(session.width)
        );
        CommandOutput { text, code: 1 }
    })
}
