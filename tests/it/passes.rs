//! Passes on one small program, text in and text out: where they fire, what they make; where they decline, why. What
//! they make computes what the program did.

use ithaca_ir::verify::verify;
use ithaca_ir::{Module, diagnostic, schedule, text};
use ithaca_kernels::store::RandomTensors;
use ithaca_kernels::{compare, oracle};
use ithaca_passes::lower::lower;
use ithaca_passes::pass::{Context, Unwatched, Volume, run_passes};
use ithaca_passes::pipeline;

use crate::filetests::files;

fn program() -> Module {
    let (_, source) = files("passes").into_iter().find(|(path, _)| path.ends_with("block.ith")).unwrap();
    text::parse(&source).unwrap()
}

/// The module after a pipeline, or the refusal, as text.
fn after(pipeline: &str) -> Result<Module, String> {
    let refused = |d: Vec<ithaca_ir::Diagnostic>| diagnostic::render(&d, None);
    let passes = pipeline::parse(pipeline).map_err(|d| refused(vec![d]))?;
    run_passes(program(), &passes, &mut Context::new(&Volume), &mut Unwatched).map_err(refused)
}

/// Compares a laid-out module with the program, in double precision.
fn check_equal(module: &Module) {
    let program = program();
    let random = RandomTensors::of_module(&program, 7);
    let whole = oracle::run::<f64>(&program, &random, &random).unwrap();
    let ranks = oracle::run_ranks::<f64>(module, &random, &random).unwrap();
    for comparison in compare::outputs(&ranks, &whole) {
        assert!(comparison.verdict.within(1e-10), "{:?}: {comparison:?}", module.pipeline);
    }
}

/// Everything but the functions that the test does not look at.
fn function(module: &Module, name: &str) -> String {
    let printed = text::print(module);
    let start = printed.find(&format!("func @{name}(")).unwrap();
    let end = printed[start..].find("\n}\n").unwrap();
    printed[start..start + end + 3].to_owned()
}

#[test]
fn shard_marks_changes_of_layout() {
    let sharded = after("shard{strategy=ulysses,ulysses=2}").unwrap();
    check_equal(&sharded);
    insta::assert_snapshot!("shard_ulysses", function(&sharded, "block"));
}

#[test]
fn each_strategy_has_its_collectives() {
    for (name, pipeline) in [
        ("ulysses", "shard{strategy=ulysses,ulysses=2},lower-reshards"),
        ("ulysses_copied_heads", "shard{strategy=ulysses,ulysses=8},lower-reshards"),
        ("megatron_tp", "shard{strategy=megatron-tp,tp=2},lower-reshards"),
        ("megatron_tp_copied_heads", "shard{strategy=megatron-tp,tp=4},lower-reshards"),
        ("megatron_tp_sp", "shard{strategy=megatron-tp-sp,tp=2},lower-reshards"),
        ("product", "shard{strategy=ulysses+megatron-tp-sp,ulysses=2,tp=4},lower-reshards"),
        ("data_parallel", "shard{strategy=data-parallel,dp=2},lower-reshards"),
    ] {
        let module = after(pipeline).unwrap();
        check_equal(&module);
        insta::assert_snapshot!(name, function(&module, "block"));
    }
}

#[test]
fn passes_decline_with_the_rule() {
    let mut refusals = String::new();
    for pipeline in [
        "shard{strategy=ulysses,ulysses=3}",
        "shard{strategy=ulysses,ulysses=3,heads=uneven}",
        "shard{strategy=megatron-tp,tp=16}",
        "shard{strategy=megatron-tp-sp,tp=8,sequence=pad,ulysses=2}",
        "shard{strategy=data-parallel,dp=3}",
        "shard{strategy=nothing}",
        "shard{strategy=ulysses,ulysses=2},shard{strategy=ulysses,ulysses=2}",
        "lower-reshards",
        "lower-reshards{fast=yes}",
        "shard",
        "shard{strategy=ulysses",
        "crease",
    ] {
        let refusal = after(pipeline).expect_err(pipeline);
        refusals += &format!("{pipeline}\n{refusal}\n");
    }
    insta::assert_snapshot!("declined", refusals);
}

#[test]
fn lowering_gives_tasks_events_and_offsets() {
    let module = after("shard{strategy=ulysses,ulysses=2},lower-reshards").unwrap();
    let lowered = lower(verify(&module).unwrap()).unwrap();
    schedule::verify(&lowered).unwrap();
    insta::assert_snapshot!("schedule", schedule::print(&lowered));
}
