//! Layouts that do not divide: uneven heads and padded sequences compute the same, and every refusal names repairs that
//! work when they are fed back into the command line.

use std::path::Path;

use clap::Parser;
use ithaca::cli::{Cli, Command};
use ithaca_ir::verify::verify;
use ithaca_ir::{Diagnostic, Module, traffic};
use ithaca_kernels::compare::Verdict;
use ithaca_kernels::store::RandomTensors;
use ithaca_kernels::{Storage, compare, cpu, oracle};
use ithaca_passes::cluster::Cluster;
use ithaca_passes::compile::compile;
use ithaca_passes::import::{ExpertBound, Workload, import};
use ithaca_passes::movement::Partials;
use ithaca_passes::pass::Volume;
use ithaca_passes::planner::{self, Program, Ranked, Refusal, Request};
use ithaca_passes::registry::Registry;
use ithaca_passes::shard::{HeadSplit, SequenceFit, ShardOptions, parse_mesh};
use serde_json::{Value, json};

use crate::attention::case::Case;
use crate::tier;

/// A tiny model of a family with these heads.
fn model(family: &str, heads: u64, kv_heads: u64) -> Value {
    match family {
        "gpt2" => json!({
            "model_type": "gpt2", "n_embd": heads * 8, "n_head": heads, "n_layer": 2, "n_positions": 128, "vocab_size": 96
        }),
        _ => json!({
            "model_type": family, "hidden_size": heads * 8, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "head_dim": 8, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 96, "dtype": "float32"
        }),
    }
}

fn program(family: &str, heads: u64, kv_heads: u64, tokens: u64) -> Module {
    import(&model(family, heads, kv_heads), family, &Workload::prefill(2, tokens)).unwrap()
}

fn options(strategy: &str, mesh: &str, heads: HeadSplit, sequence: SequenceFit) -> ShardOptions {
    ShardOptions { heads, sequence, ..ShardOptions::new(strategy, parse_mesh(mesh).unwrap()) }
}

/// Compiles, runs both ways, and compares with the whole program; the per-rank program is given back.
fn equals_whole(module: &Module, options: &ShardOptions) -> Module {
    let case = format!("{} {} on {}", module.name, options.strategy, options.mesh);
    let compiled = compile(module, options, &Volume).unwrap_or_else(|d| panic!("{case}: {d:?}"));
    let tensors = RandomTensors::of_module(module, 3);
    let whole = oracle::run::<f64>(module, &tensors, &tensors).unwrap();
    let ranks = oracle::run_ranks::<f64>(&compiled.per_rank, &tensors, &tensors)
        .unwrap_or_else(|e| panic!("{case}: {e}"));
    for row in compare::outputs(&ranks, &whole) {
        assert!(row.verdict.within(1e-9), "{case}: {row:?}");
    }
    let run = cpu::execute(&compiled.schedule, &tensors, &tensors, &cpu::Options::default())
        .unwrap_or_else(|e| panic!("{case}: {e}"));
    for (name, tensor) in &run.outputs {
        assert_eq!(tensor.shape, whole[name].shape, "{case}: outputs are cut back");
    }
    for row in compare::outputs(&run.outputs, &whole) {
        assert!(row.verdict.within(1e-3), "{case}: {row:?}");
    }
    assert_eq!(run.traffic, ithaca_ir::traffic::of_module(&compiled.per_rank), "{case}");
    compiled.per_rank.into_module()
}

#[test]
fn uneven_heads_compute_the_same() {
    for (family, heads, kv_heads, degree) in [
        ("llama", 7, 7, 4),
        ("llama", 28, 4, 3),
        ("qwen2", 14, 7, 4),
        ("gpt2", 12, 12, 8),
        ("gpt2", 12, 12, 5),
    ] {
        let module = program(family, heads, kv_heads, 4 * degree);
        equals_whole(
            &module,
            &options("ulysses", &format!("ulysses={degree}"), HeadSplit::Uneven, SequenceFit::Auto),
        );
        let tensor = options("megatron-tp", &format!("tp={degree}"), HeadSplit::Uneven, SequenceFit::Auto);
        match compile(&module, &tensor, &Volume) {
            Ok(_) => drop(equals_whole(&module, &tensor)),
            // The feed-forward width has no uneven split.
            Err(d) => assert_eq!(d[0].code, "P22", "{family} {heads}/{kv_heads} on {degree}: {d:?}"),
        }
    }
}

#[test]
fn uneven_heads_are_dealt_by_group_and_leave_no_rank_without() {
    let module = program("llama", 28, 7, 16);
    let per_rank =
        equals_whole(&module, &options("ulysses", "ulysses=4", HeadSplit::Uneven, SequenceFit::Auto));
    let space = &per_rank.space;
    let axis = space.mesh.axis("ulysses").unwrap();
    for (name, expected) in [("k", [2, 2, 2, 1]), ("h", [8, 8, 8, 4])] {
        let dim = space.dim(name).unwrap();
        let dealt = space.mesh.iter_ranks().map(|rank| space.range(dim, &[axis], rank));
        assert_eq!(dealt.map(|r| r.end - r.start).collect::<Vec<_>>(), expected, "{name}");
    }
}

/// Three ranks have 21, 20 and 20 tokens.
#[test]
fn sequences_that_do_not_divide_are_split_unevenly() {
    for (strategy, mesh) in [
        ("ulysses", "ulysses=2"),
        ("ring", "ring=3"),
        ("megatron-cp-allgather", "cp=3"),
        ("usp", "ring=3,ulysses=2"),
        ("ring+megatron-tp-sp", "ring=3,tp=2"),
    ] {
        let module = program("llama", 8, 4, 61);
        let options = options(strategy, mesh, HeadSplit::Even, SequenceFit::Uneven);
        let per_rank = equals_whole(&module, &options);
        let dim = &per_rank.space.dims[per_rank.space.dim("s").unwrap()];
        assert_eq!((dim.size, dim.valid, dim.uneven), (61, 61, true), "{strategy}");
    }
}

#[test]
fn sequences_that_do_not_divide_are_padded_and_cut_back() {
    for (family, heads, kv_heads) in [("llama", 8, 4), ("mistral", 8, 8), ("gpt2", 8, 8)] {
        for tokens in [61, 63, 33] {
            let module = program(family, heads, kv_heads, tokens);
            let layouts = [
                ("ulysses", "ulysses=2"),
                ("ulysses", "ulysses=4"),
                ("ulysses", "ulysses=8"),
                ("megatron-tp", "tp=2"),
                ("megatron-tp-sp", "tp=4"),
                ("ulysses+megatron-tp", "ulysses=2,tp=2"),
                ("ulysses+megatron-tp-sp", "tp=2,ulysses=2"),
            ];
            for (strategy, mesh) in tier::one_in(4, layouts) {
                equals_whole(&module, &options(strategy, mesh, HeadSplit::Even, SequenceFit::Pad));
            }
        }
    }
}

#[test]
fn heads_are_padded_to_the_fewest_that_divide() {
    for (heads, kv_heads, degree, expected) in [
        (28, 4, 8, [("h", 32), ("k_copies", 8)]),
        (71, 1, 8, [("h", 72), ("k_copies", 8)]),
        (28, 4, 6, [("h", 42), ("k", 6)]),
        (7, 7, 8, [("h", 8), ("h", 8)]),
    ] {
        let module = program("llama", heads, kv_heads, 4 * degree);
        let mesh = format!("ulysses={degree}");
        let padded = equals_whole(&module, &options("ulysses", &mesh, HeadSplit::Pad, SequenceFit::Auto));
        let sizes = expected.map(|(name, _)| (name, padded.space.size(padded.space.dim(name).unwrap())));
        assert_eq!(sizes, expected);
    }
}

#[test]
fn both_at_once() {
    let module = program("llama", 28, 4, 62);
    equals_whole(&module, &options("ulysses", "ulysses=3", HeadSplit::Uneven, SequenceFit::Pad));
    let module = program("llama", 7, 7, 61);
    equals_whole(&module, &options("ulysses", "ulysses=4", HeadSplit::Uneven, SequenceFit::Pad));
}

#[test]
fn refusals_name_the_quantity_and_what_allows_it() {
    for (module, strategy, mesh, code, words) in [
        (program("llama", 7, 7, 64), "ulysses", "ulysses=4", "P20", &["7 query heads", "4"][..]),
        (program("llama", 12, 4, 63), "ulysses", "ulysses=3", "P21", &["4 key/value heads", "3"]),
        (program("llama", 8, 8, 3), "ulysses", "ulysses=4", "P23", &["3 tokens", "4", "--pad-sequence"]),
        (program("llama", 10, 10, 60), "megatron-tp", "tp=5", "P22", &["= 96", "5"]),
    ] {
        let refusal =
            compile(&module, &options(strategy, mesh, HeadSplit::Even, SequenceFit::Uneven), &Volume);
        let refusal: Diagnostic = refusal.expect_err(strategy).remove(0);
        assert_eq!(refusal.code, code, "{refusal:?}");
        let text = refusal.render(None);
        for word in words {
            assert!(text.contains(word), "{word} in {text}");
        }
    }
}

/// Every folder of `examples/`, with its description.
fn examples() -> Vec<(String, Value)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let mut found = Vec::new();
    for entry in std::fs::read_dir(root).unwrap() {
        let folder = entry.unwrap().path();
        if let Ok(text) = std::fs::read_to_string(folder.join("config.json")) {
            let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
            found.push((name, serde_json::from_str(&text).unwrap()));
        }
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    found
}

/// Plans by the words of a command line, as `ithaca plan MODEL` does.
fn plan(module: &dyn Fn(u64) -> Module, words: &[String]) -> Result<Ranked, Box<Refusal>> {
    let line = ["ithaca", "plan", "model"].into_iter().map(str::to_owned).chain(words.iter().cloned());
    let Command::Plan(args) = Cli::try_parse_from(line).unwrap_or_else(|e| panic!("{words:?}: {e}")).command
    else {
        panic!("the line says `plan`")
    };
    let cluster = Cluster::named(args.layout.cluster.as_deref().unwrap_or("dgx-h100")).unwrap();
    let (mesh, gpus) = ithaca::subject::mesh(&args.layout).unwrap();
    let options = ithaca::subject::layout_options(&Registry::default(), &args.layout, mesh.as_ref()).unwrap();
    let module = module(args.workload.seq.unwrap());
    let request = Request {
        gpus: gpus.unwrap(),
        batch: 1,
        experts: planner::experts(&module),
        strategy: args.layout.strategy,
        mesh,
        options,
        ..Request::default()
    };
    planner::rank(&Program::new(verify(&module).unwrap(), &cluster), &cluster, &request)
}

/// The words of a request with those of a repair in place of the options that it names.
fn repaired(words: &[String], repair: &str) -> Vec<String> {
    let repair: Vec<&str> = repair.split_whitespace().collect();
    let mut words = words.to_vec();
    for flag in repair.iter().filter(|w| w.starts_with("--")) {
        if let Some(at) = words.iter().position(|w| w == flag) {
            let takes_value = words.get(at + 1).is_some_and(|w| !w.starts_with("--"));
            words.drain(at..at + 1 + usize::from(takes_value));
        }
    }
    words.extend(repair.into_iter().map(str::to_owned));
    words
}

/// A request gives a plan, or a refusal each of whose repairs gives one; says whether it was refused.
fn plan_or_repairs(name: &str, module: &dyn Fn(u64) -> Module, words: &[String]) -> bool {
    match plan(module, words) {
        Ok(_) => false,
        Err(refusal) => {
            let Diagnostic { repairs, code, message, .. } = &refusal.diagnostic;
            assert!(!repairs.is_empty(), "{name} {words:?}: {code} {message} has no repair");
            for repair in repairs {
                let again = repaired(words, repair);
                if let Err(refusal) = plan(module, &again) {
                    panic!("{name} {words:?}: repair `{repair}` is refused: {:?}", refusal.diagnostic);
                }
            }
            true
        }
    }
}

fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

/// Tokens to ask a model for: as many as have a position, where positions are learned.
fn longest(config: &Value) -> u64 {
    match config["model_type"].as_str() {
        Some("gpt2") => 1024,
        Some("bert") => 512,
        _ => 8192,
    }
}

/// As the command line has it.
fn prefill(tokens: u64) -> Workload {
    Workload { expert_bound: Some(ExpertBound::default()), ..Workload::prefill(1, tokens) }
}

#[test]
fn every_example_has_a_plan_or_repairs_that_work() {
    for (name, config) in examples() {
        let tokens = longest(&config);
        let module = |tokens| import(&config, &name, &prefill(tokens)).unwrap();
        for gpus in tier::one_in(3, [3, 8, 64]) {
            plan_or_repairs(&name, &module, &words(&format!("--gpus {gpus} --seq {tokens}")));
        }
    }
}

#[test]
fn every_strategy_has_a_plan_or_repairs_that_work() {
    let mut refused = 0;
    for (name, config) in examples() {
        let tokens = longest(&config);
        let module = |tokens| import(&config, &name, &prefill(tokens)).unwrap();
        let strategies = ["ulysses", "megatron-tp", "megatron-tp-sp", "ulysses+megatron-tp-sp"];
        for strategy in tier::one_in(4, strategies) {
            for gpus in tier::one_in(2, [3, 8, 6]) {
                let line = format!("--gpus {gpus} --seq {tokens} --strategy {strategy}");
                refused += usize::from(plan_or_repairs(&name, &module, &words(&line)));
            }
        }
    }
    assert!(refused > tier::count(4, 10) as usize, "28 heads on 8 ranks and the like are refused");
}

/// 28 query heads and 7 key/value heads on 2 ranks become 32 and 8, and nobody sees the padding.
#[test]
fn heads_are_padded_by_group_and_cut_back() {
    let mut case = Case::new("ulysses", &[("ulysses", 2)], 8);
    (case.kv_heads, case.group) = (7, 4);
    let whole = case.whole();
    assert_eq!(case.per_rank(&whole).unwrap_err()[0].code, "P21");
    case.options.push("heads=pad");
    let per_rank = case.per_rank(&whole).unwrap();
    let size = |name: &str| {
        let dim = per_rank.space.dim(name).unwrap();
        (per_rank.space.dims[dim].size, per_rank.space.dims[dim].valid)
    };
    assert_eq!((size("h"), size("k")), ((32, 28), (8, 7)));
    let sources = RandomTensors::of_module(&whole, 3);
    let expected = oracle::run::<f64>(&whole, &sources, &sources).unwrap();
    let found = oracle::run_ranks::<f64>(&per_rank, &sources, &sources).unwrap();
    for (name, expected) in &expected {
        assert_eq!(found[name].shape, expected.shape, "{name}");
        let worst =
            found[name].data.iter().zip(&expected.data).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max);
        assert!(worst < 1e-12, "{name}: {worst}");
    }
}

#[test]
fn partial_results_travel_in_the_type_that_is_asked_for() {
    // Rounded to bf16 once on the way to each of three other ranks, or once on the way home.
    const HOPS: f64 = 4.0;
    let module = program("llama", 8, 2, 64);
    let tensors = RandomTensors::of_module(&module, 3);
    let whole = oracle::run::<f64>(&module, &tensors, &tensors).unwrap();
    for strategy in ["pass-q", "dist-flash"] {
        let [wide, narrow] = [Partials::F32, Partials::Bf16].map(|partials| {
            let options =
                ShardOptions { partials, ..ShardOptions::new(strategy, parse_mesh("ring=4").unwrap()) };
            let per_rank = compile(&module, &options, &Volume).unwrap().per_rank;
            let ranks = oracle::step::<f64>(&per_rank, &tensors, &tensors, Storage::AsTyped).unwrap();
            let Verdict::Distance { relative, .. } = compare::outputs(&ranks.outputs, &whole)[0].verdict
            else {
                panic!("{strategy}: no distance")
            };
            let sent = traffic::of_module(&per_rank).iter().map(|t| t.bytes_sent_per_rank).sum::<u64>();
            (relative, sent)
        });
        assert!(wide.0 < 1e-5 && narrow.0 > 1e-5, "{strategy}: {wide:?}, {narrow:?}");
        assert!(narrow.0 < HOPS / 512.0, "{strategy}: {narrow:?}");
        assert!(narrow.1 < wide.1, "{strategy}: {narrow:?}, {wide:?}");
    }
}
