//! A plan as a snapshot in a test of your own: `tests/plan.rs` of a package with the dev-dependencies `ithaca` and `insta`.

use std::path::Path;

use ithaca::error::Failure;
use ithaca::passes::cluster::Cluster;
use ithaca::passes::import::Workload;
use ithaca::passes::plan::{Model, Plan, layout_text};
use ithaca::passes::planner::Request;
use ithaca::passes::registry::Registry;
use ithaca::request::PlanRequest;
use ithaca::subject;

const GPUS: u64 = 8;

fn plan() -> Result<Plan, Failure> {
    let model = subject::model(Path::new("examples/llama-3-8b"))?;
    let request = PlanRequest {
        model: Model::new(model.name, model.config),
        cluster: Cluster::named("dgx-h100")?,
        workload: Workload::prefill(1, 32_768),
        gpus: GPUS,
        search: Request::new(GPUS).search(),
    };
    request.plan(&Registry::default())
}

#[test]
fn the_plan_is_the_one_that_was_reviewed() {
    let plan = plan().unwrap_or_else(|failure| panic!("{}", failure.render()));
    let mut text = format!("{}\n", layout_text(&plan.strategy, &plan.mesh));
    for row in &plan.collectives {
        text += &format!("{} over {}: {} bytes\n", row.kind, row.axis, row.bytes_sent_per_rank);
    }
    text += &format!("memory: {:.1} GiB", plan.memory.total as f64 / (1_u64 << 30) as f64);
    insta::assert_snapshot!(text, @r"
    megatron-cp-allgather cp=8
    all_gather over cp: 3758096384 bytes
    memory: 16.0 GiB
    ");
}
