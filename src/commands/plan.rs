//! `plan`: chooses a layout, and says why.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::rc::Rc;

use ithaca_ir::Diagnostic;
use ithaca_ir::diagnostic::counted;
use ithaca_ir::verify::{VerifiedModule, verify};
use ithaca_passes::differentiate::Training;
use ithaca_passes::import::{self, Logits, Mode, Workload};
use ithaca_passes::plan::{self, Plan};
use ithaca_passes::planner::{self, Program, Request};
use ithaca_passes::shard::strategy::STAGE_AXIS;

use super::session::{Done, Session};
use crate::cli::PlanArgs;
use crate::error::{Failure, Result};
use crate::{files, ineffective, subject};

/// The most pipeline stages that are tried unless a mesh names more.
const MOST_STAGES: u64 = 256;

pub(super) fn plan(args: &PlanArgs, session: &mut Session<'_>) -> Result<Done> {
    let cluster = subject::cluster_of(&args.layout)?;
    let (mesh, gpus) = subject::mesh(&args.layout)?;
    let gpus = gpus.ok_or_else(|| {
        Failure::from(
            Diagnostic::new("C00", "the number of GPUs is missing").help("add it, as in `--gpus 8`"),
        )
    })?;
    let model = subject::model(&args.model)?;
    // The program has one stage; the mesh of a candidate sets the number of its stages.
    let mut workload = subject::grouped(subject::workload(&args.workload, None)?, gpus);
    if workload.training.stages > 1 {
        let n = workload.training.stages;
        let message =
            format!("`--train stages={n}` sets the number of stages, and the mesh of a plan sets it");
        return Err(Diagnostic::new("C00", message)
            .help(format!("use the mesh, as in `--strategy pipeline --mesh pp={n}`"))
            .into());
    }
    ineffective::ignored(&args.workload.ignore_fields, &model.config)?;
    if args.workload.logits.is_none()
        && workload.mode == Mode::Prefill
        && import::predicts_next(&model.config, &workload.ignore)?
    {
        workload.logits = Logits::Last;
    }
    let stages = ineffective::stages_of(session.registry, &args.layout, mesh.as_ref(), &workload.training);
    if workload.mode == Mode::Train {
        ineffective::pipeline(&args.workload, &workload.training, stages)?;
    }
    (session.progress)("importing");
    let module = import::program(&model.config, &model.name, &workload)?;
    let options = subject::layout_options(session.registry, &args.layout, mesh.as_ref())?;
    let strategy = subject::requested_strategy(session.registry, &args.layout, mesh.as_ref())?;
    let stages = match (workload.mode, workload.training.micro_batches) {
        (Mode::Train, 2..) => (2..=MOST_STAGES).collect(),
        _ => Vec::new(),
    };
    let as_configured = |workload: &Workload| import::program(&model.config, &model.name, workload);
    let ineffective_dropout = ineffective::training_notes(&workload, &module, as_configured)?;
    let request = Request {
        gpus,
        batch: workload.batch,
        strategy,
        mesh,
        options,
        chooses_fusion: args.layout.fuse.is_none(),
        sparsity: planner::Sparsity::of(&module),
        experts: planner::experts(&module),
        stages,
    };
    (session.progress)("planning");
    // Many candidates have the same number of stages.
    let programs = RefCell::new(BTreeMap::new());
    let in_stages = |stages: u64| {
        if let Some(module) = programs.borrow().get(&stages) {
            return Ok(Rc::clone(module));
        }
        let training = Training { stages, ..workload.training.clone() };
        let module = import::program(&model.config, &model.name, &Workload { training, ..workload.clone() })?;
        let module = Rc::new(VerifiedModule::new(module)?);
        programs.borrow_mut().insert(stages, Rc::clone(&module));
        Ok(module)
    };
    let program = Program {
        registry: session.registry.clone(),
        of_stages: (workload.mode == Mode::Train).then_some(&in_stages),
        ..Program::new(verify(&module)?, &cluster)
    };
    let ranked = planner::rank(&program, &cluster, &request).map_err(|refusal| Failure {
        context: (!refusal.alternatives.is_empty()).then(|| planner::table(&refusal.alternatives)),
        ..Failure::from(refusal.diagnostic)
    })?;
    let workload = subject::staged(workload.clone(), &ranked.chosen.options.mesh);
    let described = plan::Model::new(model.name, model.path, model.config);
    let plan = ranked.into_plan(&cluster, described, plan::Workload::of(&workload, &module));
    let json = plan.to_json();
    let mut out = if args.json { json.clone() } else { summary(&plan) };
    if !args.json && args.workload.pipeline.is_some() && !plan.mesh.iter().any(|axis| axis.axis == STAGE_AXIS)
    {
        out.push_str("note: `--pipeline` has no effect: the plan has no stages\n");
    }
    if let Some(note) = ineffective_dropout.filter(|_| !args.json) {
        let _ = writeln!(out, "note: {note}");
    }
    if let Some(path) = &args.output {
        files::write(path, json.as_bytes())?;
        if !args.json {
            let _ = writeln!(out, "wrote {}", path.display());
        }
    }
    Ok(Done::success(out))
}

/// The plan for a terminal: the request, the ranked table, the notes.
pub(super) fn summary(plan: &Plan) -> String {
    let mut out = heading(plan);
    out.push('\n');
    out.push_str(&planner::table(&plan.alternatives));
    out.push('\n');
    // Writing to a string cannot fail.
    for note in &plan.notes {
        let _ = writeln!(out, "note: {note}");
    }
    out
}

/// One line: the model, the workload and the cluster.
pub(super) fn heading(plan: &Plan) -> String {
    let plan::Workload { batch, sequence, target_sequence, dtype, mode, .. } = &plan.workload;
    let target = target_sequence.map(|n| format!(" and {n} of the target")).unwrap_or_default();
    format!(
        "{}: {} of {batch} x {sequence} tokens{target} in {dtype} on {} of {} ({})\n",
        plan.model.name,
        mode.name(),
        counted(plan.gpus, "GPU"),
        plan.cluster.name,
        plan.cluster.accelerator.name,
    )
}
