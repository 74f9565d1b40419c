//! A proof on a small model is one of its plan: it has every collective of the plan, and none can be left out unseen.

use std::path::PathBuf;

use ithaca::error::Failure;
use ithaca::job::Large;
use ithaca::shrink;
use ithaca_ir::verify::verify;
use ithaca_ir::{Module, diagnostic};
use ithaca_passes::cluster::Cluster;
use ithaca_passes::differentiate::Training;
use ithaca_passes::fuse::Fusion;
use ithaca_passes::import::{Documents, Mode, Pages, Workload};
use ithaca_passes::proof::{n_collectives, same_collectives, same_operations};
use ithaca_passes::rebuild::rebuild;
use ithaca_passes::registry::Registry;
use ithaca_passes::shard::strategy::STAGE_AXIS;
use ithaca_passes::shard::{OrderChoice, STRATEGIES, ShardOptions, Zero, parse_mesh};
use serde_json::Value;

use crate::tier;

/// Example, strategy and mesh, mode with the batch, and other options.
pub(crate) type Described = (&'static str, &'static str, &'static str, &'static str);

pub(crate) const PLANS: &[Described] = &[
    ("llama-3-8b", "data-parallel+ulysses", "dp=8,ulysses=2", "train=16 zero=1"),
    ("llama-3-8b", "data-parallel", "dp=8", "train=16 zero=2 offload=optimizer"),
    ("phi-3-mini", "window-halo", "ring=8", ""),
    ("llama-3-8b", "ring", "ring=8", "order=striped:16"),
    ("llama-3-8b", "ring", "ring=8", "documents=16k,8k*2,4k*8,512*4"),
    ("llama-3-8b", "decode-context", "dcp=8", "decode=4"),
    ("llama-3-70b", "megatron-tp+decode-reduce", "cp=2,tp=8", "decode=8"),
    ("llama-3-70b", "megatron-tp+pipeline", "pp=2,tp=8", "decode=8"),
    ("llama-3-70b", "data-parallel+megatron-tp+decode-context", "dcp=2,dp=2,tp=2", "decode=8 page=16"),
    ("qwen3-8b", "usp", "ring=2,ulysses=2", "train=2 documents=10k,6k"),
    ("gemma-2-9b", "megatron-tp-sp", "tp=8", "train=8 recompute=full(every=4)"),
    ("llama-3-8b", "ulysses", "ulysses=8", ""),
    ("llama-3-8b", "ulysses", "ulysses=16", "train=1 zero=3"),
    ("llama-3-70b", "usp", "ring=4,ulysses=8", ""),
    ("llama-3-70b", "usp", "ring=2,ulysses=8", "train=1 zero=1"),
    ("llama-3-8b", "loongtrain", "outer=2,ring=2,ulysses=2", ""),
    ("llama-3-8b", "dist-flash", "ring=8", "train=1"),
    ("llama-3-8b", "rsa", "ring=4", ""),
    ("llama-3-8b", "pass-q", "ring=4", "train=1"),
    ("llama-3-8b", "megatron-cp-allgather", "cp=8", "train=1 zero=1"),
    ("qwen2.5-7b", "megatron-cp-allgather+megatron-tp", "cp=4,tp=2", ""),
    ("llama-3-8b", "megatron-cp-p2p", "cp=8", "train=1"),
    ("llama-3-8b", "megatron-cp-a2a", "cp=8", ""),
    ("llama-3-8b", "megatron-cp-a2a-p2p", "cp=2,ulysses=4", "train=1"),
    ("gemma-2-9b", "gspmd-2d", "cp=4,tp=2", "train=1"),
    ("phi-3-mini", "window-halo", "ring=16", "train=1 zero=1"),
    ("mistral-7b", "sparse-fetch", "ring=8", ""),
    ("mistral-7b", "window-halo", "ring=4", "order=contiguous"),
    ("gemma-2-9b", "sparse-fetch", "ring=8", "train=1"),
    ("mistral-7b", "ring", "ring=8", "order=striped:64 train=1"),
    ("llama-3-70b", "megatron-tp", "tp=8", "train=2 zero=1"),
    ("llama-3-8b", "megatron-tp-sp", "tp=8", "fuse=fold+overlap(chunks=2)"),
    ("llama-3-8b", "ulysses", "ulysses=8", "fuse=fold+overlap(chunks=4)"),
    ("llama-3-8b", "ulysses", "ulysses=16", "fuse=two-level(choose=cheaper)+fold+pack"),
    ("llama-3-8b", "data-parallel", "dp=16", "train=16 zero=3"),
    ("llama-3-8b", "data-parallel", "dp=64", "train=64 zero=2"),
    ("llama-3-8b", "data-parallel", "dp=8", "train=32 micro_batches=4"),
    ("llama-3-8b", "data-parallel+megatron-tp-sp", "dp=4,tp=4", "train=8 zero=3 recompute=full(every=3)"),
    ("llama-3-8b", "data-parallel", "dp=8", "train=32 micro_batches=4 zero=3:16777216"),
    ("llama-3-8b", "pipeline", "pp=4", "train=8 micro_batches=8"),
    ("llama-3-8b", "pipeline+megatron-tp", "pp=2,tp=4", "train=8 micro_batches=4 zero=1"),
    ("llama-3-8b", "data-parallel+pipeline+ulysses", "dp=2,pp=2,ulysses=2", "train=16 micro_batches=4"),
    (
        "gpt2",
        "pipeline+data-parallel",
        "pp=4,dp=2",
        "train=8 micro_batches=4 pipeline=zb-h1 stage_layers=3+4+4+1 zero=1 fuse=prefetch+fold+pack",
    ),
    ("mixtral-8x7b", "ulysses+ep", "ulysses=8", ""),
    ("qwen3-30b-a3b", "data-parallel+ep", "dp=8", "train=8"),
    ("qwen3-30b-a3b", "ep", "ep=8", ""),
    ("qwen3-30b-a3b", "data-parallel-ep", "dp=2,ep=4", "train=8 zero=1"),
    ("deepseek-v3", "megatron-tp-sp+ep", "tp=8", ""),
    ("t5-3b", "megatron-cp-allgather", "cp=4", ""),
    ("bert-large-uncased", "megatron-tp-sp", "tp=4", ""),
    ("gpt2", "ulysses", "ulysses=4", "train=1 zero=1"),
    ("qwen2.5-14b", "data-parallel+ring", "dp=4,ring=4", "train=4 loss_chunks=2 zero=1"),
];

/// Plans as [`PLANS`] that are proven on fewer ranks or micro-batches, with the most ranks that a proof may have.
const LARGE: &[(Described, u64)] = &[
    (("llama-3-70b", "data-parallel", "dp=64", "train=64 zero=3"), 2),
    (("llama-3.1-405b", "data-parallel+megatron-tp-sp+ring", "dp=8,ring=4,tp=16", ""), 128),
    (("gemma-3-27b", "data-parallel+megatron-cp-allgather", "dp=32,cp=2", "train=64 zero=3"), 8),
    (("llama-4-maverick", "data-parallel-ep", "dp=2,ep=128", "train=256 zero=3:65536"), 16),
    (
        (
            "deepseek-v3",
            "data-parallel+pipeline+ep",
            "pp=8,dp=8",
            "train=256 micro_batches=16 zero=1 recompute=full",
        ),
        64,
    ),
    (("t5-3b", "data-parallel", "dp=64", "train=64 zero=2"), 16),
    (("llama-3-8b", "pipeline+megatron-tp", "pp=4,tp=8", "train=64 micro_batches=64 zero=1"), 32),
];

/// Strategies for masks and workloads that no model's configuration states.
const OF_OTHER_PROGRAMS: [&str; 2] = ["single", "streaming"];

/// Both per-rank programs of a plan and of its proof, and notes on the proof.
pub(crate) struct Proof {
    pub(crate) plan: Module,
    pub(crate) small: Module,
    pub(crate) notes: Vec<String>,
}

fn config(example: &str) -> Value {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("examples").join(example);
    serde_json::from_str(&std::fs::read_to_string(folder.join("config.json")).unwrap()).unwrap()
}

pub(crate) fn proof((example, strategy, mesh, options): Described) -> Proof {
    let mesh = parse_mesh(mesh).unwrap();
    let mut layout =
        ShardOptions { strategy: strategy.to_owned(), mesh: mesh.clone(), ..ShardOptions::default() };
    let sequence = if ["gpt2", "bert-large-uncased", "t5-3b"].contains(&example) { 512 } else { 32_768 };
    let mut workload = Workload::prefill(8, sequence);
    let mut training: Vec<(String, String)> = Vec::new();
    let mut fusion = None;
    for (key, value) in options.split(' ').filter_map(|option| option.split_once('=')) {
        match key {
            "train" => (workload.mode, workload.batch) = (Mode::Train, value.parse().unwrap()),
            "zero" => layout.zero = value.parse().unwrap(),
            "page" => {
                workload.pages = Some(Pages { tokens: value.parse().unwrap(), count: None, host: None })
            }
            "decode" => workload = Workload::decode(value.parse().unwrap(), sequence),
            "documents" => {
                let documents = Documents::parse(value).unwrap();
                workload.sequence = documents.tokens();
                workload.documents = Some(documents);
            }
            "order" => layout.order = Some(OrderChoice::parse(value).unwrap()),
            "fuse" => fusion = Some(Fusion::parse(value).unwrap()),
            _ => training.push((key.to_owned(), value.to_owned())),
        }
    }
    if let Some(axis) = mesh.axis(STAGE_AXIS) {
        training.push(("stages".to_owned(), mesh.size(axis).to_string()));
    }
    layout.fusion = fusion.unwrap_or_else(|| Zero::usual_fusion(layout.zero));
    workload.training = Training::from_pipeline(&training).unwrap();
    let config = config(example);
    let large = Large { config: &config, name: example, workload: &workload };
    let named = |failure: &Failure| {
        format!("{example} {strategy} {}: {}", layout.mesh, diagnostic::render(&failure.diagnostics, None))
    };
    let cluster = Cluster::named("dgx-h100").unwrap();
    let job = large
        .job(&Registry::default(), (layout.clone(), cluster))
        .unwrap_or_else(|e| panic!("{}", named(&e)));
    let compiled = job.draft().unwrap_or_else(|e| panic!("{}", named(&e)));
    let small = shrink::job(&large, &job, &compiled.choices, &compiled.per_rank)
        .unwrap_or_else(|e| panic!("{}", named(&e)));
    let notes = small.notes.clone();
    let small = small.compile().unwrap();
    Proof { plan: compiled.per_rank.into_module(), small: small.per_rank.into_module(), notes }
}

/// The program without its `n`-th collective, whose operands take the places of its results; `None` if that breaks its types.
fn without(module: &Module, n: usize) -> Option<Module> {
    let mut seen = 0;
    let mutant = rebuild(module, |_, _, node, operands| {
        let is_it = node.op.is_communication() && seen == n;
        seen += usize::from(node.op.is_communication());
        Ok(is_it.then(|| operands.to_vec()))
    });
    mutant.ok().filter(|mutant| verify(mutant).is_ok())
}

#[test]
fn no_collective_of_a_plan_can_be_left_out_of_its_proof() {
    for plan in tier::one_in(14, PLANS.iter().copied()) {
        let Proof { plan: whole, small, .. } = proof(plan);
        assert!(n_collectives(&whole) > 0 && n_collectives(&small) == n_collectives(&whole), "{plan:?}");
        let nodes = small.functions.values().flat_map(|f| &f.nodes);
        let collectives = nodes.filter(|node| node.op.is_communication()).count();
        for n in 0..collectives {
            if let Some(mutant) = without(&small, n) {
                let refusal = same_collectives(&whole, &mutant).expect_err("a collective is missing");
                assert_eq!(refusal.code, "P06", "{plan:?}, collective {n}");
            }
        }
    }
}

#[test]
fn plans_of_many_ranks_are_proven_on_few() {
    for (plan, most) in tier::one_in(3, LARGE.iter().copied()) {
        let Proof { plan: whole, small, notes } = proof(plan);
        let [ranks, all] = [&small, &whole].map(|module| module.space.mesh.ranks());
        assert!(ranks <= most && ranks <= all && !notes.is_empty(), "{plan:?}: {ranks} ranks, {notes:?}");
        let nodes = small.functions.values().flat_map(|f| &f.nodes);
        for n in 0..nodes.filter(|node| node.op.is_communication()).count() {
            if let Some(mutant) = without(&small, n) {
                assert!(same_operations(&small, &mutant).is_err(), "{plan:?}, collective {n}");
            }
        }
    }
}

#[test]
fn every_strategy_has_a_plan_that_is_proven() {
    let has = |name: &str| PLANS.iter().any(|(_, strategy, _, _)| strategy.split('+').any(|s| s == name));
    for strategy in STRATEGIES.iter().map(|s| s.name()) {
        assert!(has(strategy) || OF_OTHER_PROGRAMS.contains(&strategy), "{strategy}");
    }
    assert!(PLANS.len() >= 40, "{}", PLANS.len());
}
