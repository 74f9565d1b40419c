//! What a plan of decoding means for those who wait for tokens, and how many of them there can be.

use ithaca_ir::DType;
use ithaca_ir::diagnostic::counted;
use ithaca_ir::units::{bytes, seconds};
use ithaca_passes::import::{self, Mode, Workload};
use ithaca_passes::memory;
use ithaca_passes::plan::{self, Plan};
use ithaca_passes::registry::Registry;
use ithaca_passes::shard::ShardOptions;
use ithaca_passes::shard::strategy::STAGE_AXIS;

use crate::error::{Failure, Result};
use crate::job::{self, Large};
use crate::request::PlanRequest;
use crate::subject;

/// Sequences beyond which no more are sought.
const MOST: u64 = 1 << 20;

/// The floor of a plan of decoding; in stages, which run one after another, it is the sum of theirs.
fn floor_text(plan: &Plan, (floor, [weights, of_caches]): (f64, [u64; 2]), of: &str) -> String {
    let times = plan.time.step_seconds / floor;
    if plan.mesh.iter().any(|axis| axis.axis == STAGE_AXIS && axis.size > 1) {
        return format!(
            "floor: {} to read the weights{of} and caches of a GPU of each stage once, one stage after another; the step takes {times:.2} times as long",
            seconds(floor)
        );
    }
    format!(
        "floor: {} to read the weights ({}){of} and caches ({}) of a GPU once; the step takes {times:.2} times as long",
        seconds(floor),
        bytes(weights),
        caches(of_caches, plan.memory.host),
    )
}

/// The rates, the floor, the caches and the largest batch of a plan of decoding; nothing of other plans.
pub(super) fn summary(registry: &Registry, request: &PlanRequest, plan: &Plan) -> Result<Vec<String>> {
    let floor = plan.time.floor_seconds.zip(plan.time.floor_bytes);
    let (Mode::Decode, Some(floor)) = (plan.workload.mode, floor) else { return Ok(Vec::new()) };
    let step = plan.time.step_seconds;
    let batch = plan.workload.batch;
    let layout = (&plan.shard_options()?, plan.workload.micro_batches.unwrap_or(1));
    let largest = largest_batch(registry, request, layout)?;
    let each =
        plan.workload.micro_batches.map_or_else(String::new, |n| format!(", for each of {n} micro-batches"));
    let least = if largest >= MOST { "at least " } else { "" };
    let config = &request.model.config;
    let facts =
        import::program_text(config).is_none().then(|| import::facts(config, &request.workload.ignore));
    let has_experts = facts.transpose()?.is_some_and(|facts| facts.experts.is_some());
    let chosen = if has_experts { ", of experts those that some token chooses" } else { "" };
    let mut lines = vec![
        format!(
            "time per token: {}, so {:.1} tokens/s for each sequence and {:.0} for all",
            seconds(step),
            1.0 / step,
            batch as f64 / step
        ),
        floor_text(
            plan,
            floor,
            &[chosen, &each, if has_experts || !each.is_empty() { "," } else { "" }].concat(),
        ),
        format!("largest batch that fits in this layout: {least}{}", counted(largest, "sequence")),
    ];
    let encoder = encoder_bytes(request)?;
    if encoder > 0 {
        lines.push(format!(
            "the encoder, which reads prompts, is left out: its weights are {} more, over all GPUs that have them",
            bytes(encoder)
        ));
    }
    Ok(lines)
}

/// The bytes of weights that steps of prompts read and steps of tokens do not.
fn encoder_bytes(request: &PlanRequest) -> Result<u64> {
    let (model, tokens) = (&request.model, &request.workload);
    if !import::encodes_prompts(&model.config, &tokens.ignore)? {
        return Ok(0);
    }
    let prompts = Workload { mode: Mode::Prefill, ..tokens.clone() };
    let of = |workload: &Workload| -> Result<(u64, u64)> {
        let module = import::program(&model.config, &model.name, workload)?;
        let dtype = plan::Workload::of(workload, &module).dtype;
        let bytes = DType::parse(&dtype).map(DType::bytes);
        let bytes = bytes.ok_or_else(|| Failure::usage(format!("`{dtype}` is no element type")))?;
        Ok((import::parameters(&module), bytes))
    };
    let [(all, bytes), (some, _)] = [of(&prompts)?, of(tokens)?];
    Ok(all.saturating_sub(some) * bytes)
}

/// The caches of a rank, and those of them in host memory.
fn caches(device: u64, host: u64) -> String {
    match host {
        0 => bytes(device),
        host => format!("{}, and {} in host memory", bytes(device), bytes(host)),
    }
}

/// The most sequences that fit in a layout, a multiple of the groups of ranks that share a micro-batch.
pub(super) fn largest_batch(
    registry: &Registry,
    request: &PlanRequest,
    (options, micro_batches): (&ShardOptions, u64),
) -> Result<u64> {
    let unit = job::sequence_groups(registry, options)? * micro_batches;
    let has_pages =
        |batch: u64| request.workload.pages_needed(batch).is_none_or(|(needed, all)| needed <= all);
    let fits = |groups: u64| -> bool {
        if !has_pages(groups * unit) {
            return false;
        }
        let mut workload = Workload { batch: groups * unit, ..request.workload.clone() };
        workload.training.micro_batches = micro_batches;
        let workload = subject::staged(workload, &options.mesh);
        let model = &request.model;
        let large = Large { config: &model.config, name: &model.name, workload: &workload };
        let compiled =
            large.job(registry, (options.clone(), request.cluster.clone())).and_then(|job| job.draft());
        compiled.is_ok_and(|c| memory::of_schedule(&request.cluster, &c.schedule).over().is_none())
    };
    let (mut most, mut over) = (request.workload.batch / unit, MOST / unit);
    // Memory is nearly proportional, so doubling ends soon.
    for groups in std::iter::successors(Some(2 * most.max(1)), |groups| Some(2 * groups)) {
        if groups * unit >= MOST {
            break;
        }
        if !fits(groups) {
            over = groups;
            break;
        }
        most = groups;
    }
    while over - most > 1 {
        let middle = u64::midpoint(most, over);
        *(if fits(middle) { &mut most } else { &mut over }) = middle;
    }
    Ok(most * unit)
}
