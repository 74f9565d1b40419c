//! Properties of the text form and of the verifier, on random programs.

use ithaca_ir::text::{parse, print};
use ithaca_ir::{Module, text, verify};
use ithaca_passes::compile::compile;
use ithaca_passes::differentiate::Training;
use ithaca_passes::fuse::Fusion;
use ithaca_passes::import::{Mode, Pages, Workload, program as step_of};
use ithaca_passes::pass::Volume;
use ithaca_passes::shard::ShardOptions;
use ithaca_passes::shard::strategy::parse_mesh;

use crate::attention::draw;
use crate::fuzz::Choices;
use crate::generate::{Precision, distribute, mesh, program};
use crate::tier;

fn survives_printing(module: &Module) {
    if let Err(diagnostics) = verify::verify(module) {
        panic!("{diagnostics:#?}\n{}", text::print(module));
    }
    let printed = text::print(module);
    let parsed = match text::parse(&printed) {
        Ok(parsed) => parsed,
        Err(diagnostics) => panic!("{diagnostics:#?}\n{printed}"),
    };
    assert_eq!(parsed, *module);
    assert_eq!(text::print(&parsed), printed);
}

#[test]
fn programs_print_as_they_parse() {
    tier::check(100, 400, |choices| survives_printing(&program(choices, Precision::Mixed)));
}

#[test]
fn distributed_programs_print_as_they_parse() {
    tier::check(100, 400, |choices| {
        let mesh = mesh(choices);
        let module = program(choices, Precision::Only(ithaca_ir::DType::F64));
        survives_printing(&distribute(&module, mesh, choices));
    });
}

#[test]
fn text_that_means_nothing_is_refused() {
    tier::check(200, 400, |choices| {
        let mut text = "ithaca 1 program\nmodel \"m\"\ndim a = 4\nfunc @main() {\n".to_owned();
        for _ in 0..choices.below(20) {
            let line = (0..choices.below(40)).map(|_| char::from(b' ' + choices.below(95) as u8));
            text.extend(line.chain(['\n']));
        }
        assert!(text::parse(&text).is_err(), "{text}");
    });
}

/// Training steps of models that have, together, what training and experts add; one is laid out, and one is a sink alone.
fn training() -> Vec<Module> {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens");
    let step = |name: &str| {
        let text = std::fs::read_to_string(root.join(name).join("config.json")).unwrap();
        let config: serde_json::Value = serde_json::from_str(&text).unwrap();
        let training = Training { micro_batches: 2, clip: Some(1.0), ..Training::default() };
        let workload = Workload { mode: Mode::Train, training, ..Workload::prefill(2, 32) };
        step_of(&config, name, &workload).unwrap_or_else(|d| panic!("{name}: {d:?}"))
    };
    let mut modules: Vec<Module> =
        ["llama-gqa", "gpt2", "olmo2", "mixtral", "deepseek-v3", "gpt-oss", "llama4", "bert-masked-lm"]
            .map(step)
            .into();
    let options = ShardOptions::new("megatron-tp", parse_mesh("tp=2").unwrap());
    modules.push(compile(&modules[0], &options, &Volume).unwrap().per_rank.into_module());
    let packed = ShardOptions {
        fusion: Fusion::PACK,
        ..ShardOptions::new("ulysses", parse_mesh("ulysses=2").unwrap())
    };
    modules.push(compile(&modules[0], &packed, &Volume).unwrap().per_rank.into_module());
    let sink = "ithaca 1 program\nmodel \"sink\"\ndim s = 4\ndim h = 2\ndim e = 3\n\nfunc @main() {\n  \
                %o = input {name=\"o\"} : f32[s h e]\n  %before = input {name=\"before\"} : f32[s h]\n  \
                %lse = input {name=\"lse\"} : f32[s h]\n  \
                %d_o, %d_lse, %d_logits = sink_backward %o, %o, %before, %lse : f32[s h e], f32[s h], f32[h]\n  \
                return d_o = %d_o, d_lse = %d_lse, d_logits = %d_logits\n}\n";
    modules.push(parse(sink).unwrap());
    modules.extend(decoding());
    modules.push(parse(include_str!("../files/roundtrip/random.ith")).unwrap());
    modules
}

/// Steps that continue sequences, whole and laid out.
fn decoding() -> Vec<Module> {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/llama-gqa");
    let text = std::fs::read_to_string(root.join("config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_str(&text).unwrap();
    let pages = |host| Some(Pages { tokens: 8, count: None, host });
    let options = ShardOptions {
        fusion: Fusion::PACK,
        ..ShardOptions::new("megatron-tp+decode-context", parse_mesh("tp=2,dcp=2").unwrap())
    };
    let both = |pages| {
        let workload = Workload { pages, ..Workload::decode(2, 32) };
        let module = step_of(&config, "llama-gqa", &workload).unwrap();
        let laid_out = compile(&module, &options, &Volume).unwrap().per_rank.into_module();
        [module, laid_out]
    };
    [None, pages(Some(3)), pages(None)].into_iter().flat_map(both).collect()
}

#[test]
fn random_programs_use_every_operation() {
    let mut seen = std::collections::BTreeSet::new();
    let mut pending = 0;
    for seed in 0..300 {
        let mut choices = Choices::from_seed(seed);
        let mesh = mesh(&mut choices);
        let module = program(&mut choices, Precision::Mixed);
        let distributed = distribute(&module, mesh, &mut choices);
        for function in distributed.functions.values() {
            seen.extend(function.nodes.iter().map(|n| n.op.name()));
            pending += function.values.values().filter(|v| !v.ty.layout.partial.is_empty()).count();
        }
    }
    // Parts of attention, and what carries them, come with movements.
    for case in (0..300).map(draw::case) {
        let program = case.whole();
        let modules = [case.per_rank(&program).ok(), Some(program)];
        for function in modules.iter().flatten().flat_map(|m| m.functions.values()) {
            seen.extend(function.nodes.iter().map(|n| n.op.name()));
        }
    }
    for module in training() {
        assert_eq!(parse(&print(&module)).unwrap(), module);
        for function in module.functions.values() {
            seen.extend(function.nodes.iter().map(|n| n.op.name()));
        }
    }
    let unused: Vec<&str> =
        ithaca_ir::ops::TABLE.iter().map(|row| row.name).filter(|n| !seen.contains(n)).collect();
    assert!(unused.is_empty(), "never generated: {unused:?}");
    assert!(pending > 50, "only {pending} values are pending sums");
}
