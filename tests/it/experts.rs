//! Mixtures of experts over ranks: every layout of attention with every layout of experts computes what the whole program
//! does, tokens reach experts by all-to-alls, and what is not legal is refused.

use std::path::Path;

use ithaca_ir::{Module, Op, Space, TensorType, message, traffic};
use ithaca_kernels::store::{Layered, Renamed, TensorSource, Tensors};
use ithaca_kernels::tensor::Tensor;
use ithaca_kernels::{compare, cpu, oracle};
use ithaca_passes::compile::compile;
use ithaca_passes::differentiate::Training;
use ithaca_passes::import::{Capacity, ExpertBound, Mode, Workload, import, program};
use ithaca_passes::pass::{Prices, Volume};
use ithaca_passes::shard::{ShardOptions, parse_mesh};

use crate::golden::{CLOSE, EXACT, Golden, workload};
use crate::tier;

const LAYOUTS: [(&str, &str); 16] = [
    ("ep", "ep=2"),
    ("ep", "ep=4"),
    ("ulysses+ep", "ulysses=2,ep=2"),
    ("ulysses+ep", "ulysses=4"),
    ("data-parallel+ep", "dp=2"),
    ("data-parallel+ep", "dp=2,ep=2"),
    ("data-parallel-ep", "dp=1,ep=2"),
    ("data-parallel-ep+megatron-tp-sp", "dp=1,ep=2,tp=2"),
    ("data-parallel+ulysses+ep", "dp=2,ulysses=2"),
    ("ring", "ring=4"),
    ("ring+ep", "ring=4"),
    ("ring+ep", "ring=2,ep=2"),
    ("usp+ep", "ring=2,ulysses=2"),
    ("megatron-cp-allgather+ep", "cp=4"),
    ("megatron-tp-sp+ep", "tp=2,ep=2"),
    ("megatron-tp-sp+ep", "tp=2"),
];

const NAMES: [&str; 4] = ["mixtral", "qwen3-moe", "deepseek-v3", "deepseek-v3-whole-queries"];

fn options(strategy: &str, mesh: &str) -> ShardOptions {
    ShardOptions::new(strategy, parse_mesh(mesh).unwrap())
}

#[test]
fn layouts_of_attention_and_experts_are_chosen_apart() {
    let mut failures = Vec::new();
    for name in NAMES {
        let Golden { module, weights, io, .. } = Golden::open(name);
        let (weights, io) = (&weights, &io);
        let whole = oracle::run::<f64>(&module, weights, io).unwrap();
        for (strategy, mesh) in tier::one_in(3, LAYOUTS) {
            let mut fail = |what: String| failures.push(format!("{name}, {strategy} {mesh}: {what}"));
            let compiled = match compile(&module, &options(strategy, mesh), &Volume) {
                Ok(compiled) => compiled,
                Err(refusal) => {
                    fail(format!("refused: {}", refusal[0]));
                    continue;
                }
            };
            let ranks = oracle::run_ranks::<f64>(&compiled.per_rank, weights, io).unwrap();
            for comparison in compare::outputs(&ranks, &whole) {
                if !comparison.verdict.within(EXACT) {
                    fail(format!("per-rank program: {comparison:?}"));
                }
            }
            let run = cpu::execute(&compiled.schedule, weights, io, &cpu::Options::default()).unwrap();
            for comparison in compare::with_source(&run.outputs, io).unwrap() {
                if !comparison.verdict.within(CLOSE) {
                    fail(format!("schedule: {comparison:?}"));
                }
            }
            if !traffic::agree(&traffic::of_module(&compiled.per_rank), &run.traffic) {
                fail("other bytes than were promised".to_owned());
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

/// Of a layer with experts over the ranks that split its tokens, two all-to-alls move slots, one each way; each sends
/// `(P − 1) / P` of the slots of a rank's tokens.
#[test]
fn tokens_reach_experts_and_return_by_all_to_alls() {
    let Golden { module, .. } = Golden::open("mixtral");
    let compiled = compile(&module, &options("ring+ep", "ring=4"), &Volume).unwrap();
    let rows = traffic::of_module(&compiled.per_rank);
    let text = format!("{rows:?}");
    let exchange = rows.iter().find(|row| row.kind == "all_to_all").unwrap_or_else(|| panic!("{text}"));
    let (layers, experts, tokens, hidden, bytes, ranks) = (2, 4, 4 * 32, 64, 4, 4);
    assert_eq!(exchange.count, 2 * layers, "{text}");
    let slots = experts * (tokens / ranks) * hidden * bytes;
    // A count of filled slots for each expert of another rank.
    let counts = (ranks - 1) * 4;
    assert_eq!(exchange.bytes_sent_per_rank, 2 * layers * (slots * (ranks - 1) / ranks + counts), "{text}");
}

/// A run sends the slots that tokens fill: here all tokens choose the first two experts of four, which are on the first two
/// ranks.
#[test]
fn a_run_sends_filled_slots() {
    let Golden { weights, io, .. } = Golden::open("mixtral");
    let (module, routers) = crowded("2");
    let weights = Layered::new(&routers, &weights);
    let compiled = compile(&module, &options("ring+ep", "ring=4"), &Volume).unwrap();
    let run = cpu::execute(&compiled.schedule, &weights, &io, &cpu::Options::default()).unwrap();
    assert!(traffic::agree(&traffic::of_module(&compiled.per_rank), &run.traffic), "{:?}", run.traffic);
    let exchange = run.traffic.iter().find(|row| row.kind == "all_to_all").unwrap();
    // The first rank sends its tokens to the second expert, and the first expert's results to all others.
    let (layers, tokens, row, counts) = (2, 4 * 32 / 4, 64 * 4, 3 * 4);
    assert_eq!(exchange.filled_bytes_per_rank, Some(layers * ((1 + 3) * tokens * row + 2 * counts)));
    assert!(exchange.filled_bytes_per_rank < Some(exchange.bytes_sent_per_rank), "{exchange:?}");
}

/// Where counts would take longer than the empty slots, all slots are sent, and no counts.
#[test]
fn all_slots_are_sent_where_counts_cost_more() {
    struct DearCounts;
    impl Prices for DearCounts {
        fn collective_seconds(&self, space: &Space, op: &Op, from: &TensorType, to: &TensorType) -> f64 {
            let counts = if message::counts_rows(space, op, from, to) { 1e9 } else { 0.0 };
            Volume.collective_seconds(space, op, from, to) + counts
        }
    }
    let Golden { module, weights, io, .. } = Golden::open("mixtral");
    let compiled = compile(&module, &options("ring+ep", "ring=4"), &DearCounts).unwrap();
    let run = cpu::execute(&compiled.schedule, &weights, &io, &cpu::Options::default()).unwrap();
    let logits = compare::with_source(&run.outputs, &io).unwrap();
    assert!(logits.iter().all(|comparison| comparison.verdict.within(CLOSE)), "{logits:?}");
    assert!(traffic::agree(&traffic::of_module(&compiled.per_rank), &run.traffic), "{:?}", run.traffic);
    let exchange = run.traffic.iter().find(|row| row.kind == "all_to_all").unwrap();
    let (layers, experts, tokens, row) = (2, 4, 4 * 32 / 4, 64 * 4);
    assert_eq!(exchange.bytes_sent_per_rank, 2 * layers * experts * tokens * row * 3 / 4);
    assert_eq!(exchange.filled_bytes_per_rank, None);
}

#[test]
fn experts_that_do_not_divide_and_models_without_are_refused() {
    let refusal = |name: &str, strategy: &str, mesh: &str| {
        let Golden { module, .. } = Golden::open(name);
        compile(&module, &options(strategy, mesh), &Volume).unwrap_err()[0].to_string()
    };
    let text = refusal("mixtral", "ep", "ep=8");
    assert!(text.contains("4 experts (e) do not divide by the expert degree 8 (ep=8)"), "{text}");
    let text = refusal("llama-gqa", "ulysses+ep", "ulysses=2");
    assert!(text.contains("no experts to split over ulysses=2"), "{text}");
    let text = refusal("mixtral", "ep", "ulysses=2");
    assert!(text.contains("needs a mesh axis"), "{text}");
}

/// The golden `mixtral` whose experts take a bounded number of tokens.
fn bounded(capacity: &str) -> Module {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/mixtral");
    let config = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let capacity = Some(Capacity::parse(capacity).unwrap());
    let workload = Workload { capacity, ..Workload::prefill(4, 32) };
    import(&serde_json::from_str(&config).unwrap(), "mixtral", &workload).unwrap()
}

/// What is dropped is part of the program: the same tokens, whoever computes them.
#[test]
fn tokens_are_dropped_alike_whole_and_distributed() {
    let Golden { module: dropless, weights, io, .. } = Golden::open("mixtral");
    let (weights, io) = (&weights, &io);
    let module = bounded("0.75/8");
    let whole = oracle::run::<f64>(&module, weights, io).unwrap();
    let all = oracle::run::<f64>(&dropless, weights, io).unwrap();
    let differ = compare::outputs(&whole, &all);
    assert!(differ.iter().any(|c| !c.verdict.within(1e-3)), "nothing was dropped");
    for (strategy, mesh) in LAYOUTS {
        let compiled = compile(&module, &options(strategy, mesh), &Volume)
            .unwrap_or_else(|d| panic!("{strategy} {mesh}: {}", d[0]));
        let ranks = oracle::run_ranks::<f64>(&compiled.per_rank, weights, io).unwrap();
        for comparison in compare::outputs(&ranks, &whole) {
            assert!(comparison.verdict.within(EXACT), "{strategy} {mesh}: {comparison:?}");
        }
    }
    // With room for all, nothing is.
    let roomy = oracle::run::<f64>(&bounded("4/2"), weights, io).unwrap();
    for comparison in compare::outputs(&roomy, &all) {
        assert!(comparison.verdict.within(EXACT), "{comparison:?}");
    }
}

/// A model with this bound, and routers whose weights are zero: each sends every token to the first experts.
fn crowded(bound: &str) -> (Module, Tensors) {
    let Golden { config, weights, io, .. } = Golden::open("mixtral");
    let expert_bound = Some(ExpertBound::parse(bound).unwrap());
    let module = program(&config, "mixtral", &Workload { expert_bound, ..workload(&io) }).unwrap();
    let routers = weights.names().into_iter().filter(|name| name.ends_with("gate.weight"));
    let routers: Tensors = routers
        .map(|name| {
            let shape = weights.shape(&name).unwrap().iter().map(|&n| n as usize).collect::<Vec<_>>();
            let zeros = vec![0.0; shape.iter().product()];
            (name, Tensor::new(shape, zeros))
        })
        .collect();
    assert!(!routers.names().is_empty());
    (module, routers)
}

/// Half of the experts have all 128 tokens and slots for 64 of them.
#[test]
fn a_bound_that_tokens_exceed_ends_the_run() {
    let Golden { weights, io, .. } = Golden::open("mixtral");
    let (module, routers) = crowded("1");
    let weights = Layered::new(&routers, &weights);
    let says = "expert 1 was chosen by 128 of 128 tokens and has slots for 64; `--expert-bound 2.00` has slots for all of \
                them, `--capacity` drops tokens";
    let refused = oracle::run::<f64>(&module, &weights, &io).unwrap_err().to_string();
    assert!(refused.contains(says), "{refused}");
    let compiled = compile(&module, &options("megatron-tp", "tp=2"), &Volume).unwrap();
    let refused = cpu::execute(&compiled.schedule, &weights, &io, &cpu::Options::default());
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains(says) && refused.contains("rank "), "{refused}");
    // Where a rank has 32 tokens, experts have slots for all.
    let compiled = compile(&module, &options("ulysses+ep", "ulysses=4"), &Volume).unwrap();
    let run = cpu::execute(&compiled.schedule, &weights, &io, &cpu::Options::default()).unwrap();
    let whole = oracle::run::<f64>(&crowded("2").0, &weights, &io).unwrap();
    for comparison in compare::outputs(&run.outputs, &whole) {
        assert!(comparison.verdict.within(CLOSE), "{comparison:?}");
    }
}

/// Slots are as many as the bound says for the tokens of a rank, and so are the bytes that are sent.
#[test]
fn slots_follow_the_bound() {
    let Golden { config, .. } = Golden::open("qwen3-moe");
    // Of 512 tokens of a rank, 3 of 8 experts each; there are never more slots than tokens.
    for (bound, slots) in [("2", 384), ("2.5", 480), ("3", 512)] {
        let workload =
            Workload { expert_bound: Some(ExpertBound::parse(bound).unwrap()), ..Workload::prefill(1, 2048) };
        let module = program(&config, "qwen3-moe", &workload).unwrap();
        let compiled = compile(&module, &options("ring+ep", "ring=4"), &Volume).unwrap();
        let rows = traffic::of_module(&compiled.per_rank);
        let exchange = rows.iter().find(|row| row.kind == "all_to_all").unwrap();
        let (experts, hidden) = (8, 64);
        let sent = experts * slots * hidden * 4 * 3 / 4 + experts / 4 * 3 * 4;
        assert_eq!(exchange.bytes_sent_per_rank, exchange.count * sent, "{exchange:?}");
    }
}

#[test]
fn layouts_that_tear_groups_are_refused() {
    let refusal = |capacity: &str, strategy: &str, mesh: &str| {
        compile(&bounded(capacity), &options(strategy, mesh), &Volume).unwrap_err()[0].to_string()
    };
    let text = refusal("1", "ulysses+ep", "ulysses=2");
    assert!(text.contains("1 groups of 32 tokens share slots of experts, but 2 ranks split"), "{text}");
    let text = refusal("1/4", "ring+ep", "ring=4");
    assert!(text.contains("the order of tokens over ranks tears them"), "{text}");
    assert!(Capacity::parse("1/5").is_ok());
    // Without groups the capacity has those that layouts of the ranks need.
    for (strategy, mesh) in LAYOUTS {
        let options = options(strategy, mesh);
        let capacity = Capacity::parse("1.25").unwrap().for_ranks(options.mesh.ranks(), 32);
        let laid_out = compile(&bounded(&capacity.to_string()), &options, &Volume);
        assert!(laid_out.is_ok(), "{strategy} {mesh}: {}", laid_out.unwrap_err()[0]);
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/llama-gqa");
    let config = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let capacity = Some(Capacity::parse("1.25").unwrap());
    let workload = Workload { capacity, ..Workload::prefill(1, 32) };
    let refused = import(&serde_json::from_str(&config).unwrap(), "llama", &workload).unwrap_err();
    assert_eq!(refused.code, "M10");
}

/// A golden as a training step.
fn training(name: &str, options: &[(&str, &str)]) -> Module {
    let Golden { config, io, .. } = Golden::open(name);
    let mut training = Training::default();
    for (key, value) in options {
        training.set(key, value).unwrap();
    }
    let workload = Workload { mode: Mode::Train, training, ..workload(&io) };
    program(&config, name, &workload).unwrap()
}

#[test]
fn gradients_agree_with_the_librarys_whatever_the_layout() {
    for name in NAMES {
        let Golden { weights, io, .. } = Golden::open(name);
        let module = training(name, &[("optimizer", "none")]);
        for (strategy, mesh) in [
            ("ep", "ep=4"),
            ("ulysses+ep", "ulysses=4"),
            ("data-parallel+ulysses+ep", "dp=2,ulysses=2"),
            ("ring+ep", "ring=4"),
        ] {
            let compiled = compile(&module, &options(strategy, mesh), &Volume)
                .unwrap_or_else(|d| panic!("{name}, {strategy} {mesh}: {}", d[0]));
            let run = cpu::execute(&compiled.schedule, &weights, &io, &cpu::Options::default());
            let kept = run.unwrap().kept;
            let expected = Renamed::new(&io, &[]).asked(kept.keys().cloned());
            let rows = compare::with_source(&kept, &expected).unwrap();
            assert!(rows.len() == kept.len() && rows.len() > 30, "{name}: {} of {}", rows.len(), kept.len());
            for row in rows {
                assert!(row.verdict.within(1e-4), "{name}, {strategy} {mesh}: {row:?}");
            }
        }
    }
}

/// The library keeps what corrects the choice beside the parameters, and no optimizer changes it.
#[test]
fn what_takes_part_in_the_choice_alone_is_not_trained() {
    let module = training("deepseek-v3", &[]);
    let written: Vec<&str> = module
        .functions
        .values()
        .flat_map(|f| &f.nodes)
        .filter_map(
            |n| if let Op::Assign { binding, .. } = &n.op { Some(binding.name.as_str()) } else { None },
        )
        .collect();
    assert!(written.iter().any(|name| name.ends_with("mlp.gate.weight")), "{written:?}");
    assert!(written.iter().all(|name| !name.ends_with("e_score_correction_bias")), "{written:?}");
}
