//! How long compiling takes: from a description to a schedule, text in and out, and a search for a plan.

mod median;

use std::hint::black_box;
use std::path::Path;

use ithaca::ir::module::Level;
use ithaca::ir::{Arena, DType, Dim, FunctionBuilder, Module, Op, Output, Space, TensorType, ops, text};
use ithaca::passes::cluster::Cluster;
use ithaca::passes::compile::compile;
use ithaca::passes::import::{Workload, import};
use ithaca::passes::planner::{self, Program, Request};
use ithaca::passes::shard::{ShardOptions, parse_mesh};
use serde_json::Value;

fn config(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples").join(name).join("config.json");
    serde_json::from_str(&std::fs::read_to_string(path).expect("an example")).expect("JSON")
}

/// Import, shard, choose collectives, lower, verify between all of them.
fn schedules() {
    let cluster = Cluster::named("dgx-h100").expect("a built-in profile");
    let cases = [
        ("llama-3-8b on 8 ranks", "llama-3-8b", 1, "ulysses", "ulysses=8"),
        (
            "llama-3.1-405b on 1024 ranks",
            "llama-3.1-405b",
            8,
            "data-parallel+ulysses+megatron-tp-sp",
            "dp=8,ulysses=16,tp=8",
        ),
    ];
    for (title, model, batch, strategy, mesh) in cases {
        let config = config(model);
        let options = ShardOptions::new(strategy, parse_mesh(mesh).expect("a mesh"));
        median::report(&format!("import to schedule, {title}"), || {
            let workload = Workload::prefill(batch, 131_072);
            let module = import(black_box(&config), model, &workload).expect("imports");
            compile(&module, &options, &cluster).expect("compiles")
        });
    }
}

/// Every strategy and mesh for 64 GPUs, import included.
fn search() {
    let cluster = Cluster::named("dgx-h100").expect("a built-in profile");
    let config = config("llama-3-70b");
    median::report("plan with search, llama-3-70b on 64 GPUs", || {
        let workload = Workload::prefill(1, 131_072);
        let module = import(black_box(&config), "llama-3-70b", &workload).expect("imports");
        let program = Program::new(&module, &cluster);
        planner::rank(&program, &cluster, &Request::new(64)).expect("a plan")
    });
}

/// A function of 100 000 operations.
fn texts() {
    let module = long_module(100_000);
    let printed = text::print(&module);
    median::report("print 100000 operations", || text::print(black_box(&module)));
    median::report("parse 100000 operations", || text::parse(black_box(&printed)).expect("parses"));
}

fn long_module(n: usize) -> Module {
    let mut space = Space::default();
    let s = space.dims.push(Dim::new("s", 64));
    let m = space.dims.push(Dim::new("m", 16));
    let none = Arena::new();
    let mut b = FunctionBuilder::new("main", &space, &none);
    let input = Op::Input(ops::Binding::named("x"));
    let x = b.push_as(input, &[], TensorType::new(DType::F32, [s, m])).expect("an input");
    let mut y = x;
    for i in 1..n {
        y = match i % 2 {
            0 => b.add(y, x),
            _ => b.push(Op::Scale { factor: 0.5 }, &[y]),
        }
        .expect("types agree");
    }
    let main = b.finish([Output { name: Some("y".into()), value: y }]);
    let functions = std::iter::once(main).collect();
    Module { level: Level::Program, name: "long".into(), pipeline: Vec::new(), space, functions }
}

fn main() {
    schedules();
    search();
    texts();
}
