//! How long compiling takes: from a description to a schedule, text in and out, and a search for a plan.

mod example;
mod median;

use std::hint::black_box;

use ithaca::ir::text;
use ithaca::ir::verify::verify;
use ithaca::passes::cluster::Cluster;
use ithaca::passes::compile::compile;
use ithaca::passes::import::{Workload, import};
use ithaca::passes::planner::{self, Program, Request};
use ithaca::passes::shard::{ShardOptions, parse_mesh};

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
        let config = example::config(model);
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
    let config = example::config("llama-3-70b");
    median::report("plan with search, llama-3-70b on 64 GPUs", || {
        let workload = Workload::prefill(1, 131_072);
        let module = import(black_box(&config), "llama-3-70b", &workload).expect("imports");
        let program = Program::new(verify(&module).expect("a verified program"), &cluster);
        planner::rank(&program, &cluster, &Request::new(64)).expect("a plan")
    });
}

/// A function of 100 000 operations.
fn texts() {
    let mut source =
        "ithaca 1 program\nmodel \"long\"\ndim s = 64\ndim m = 16\n\nfunc @main() {\n".to_owned();
    source += "%0 = input {name=\"x\"} : f32[s m]\n";
    for i in 1..100_000 {
        source += &match i % 2 {
            0 => format!("%{i} = add %{}, %0 : f32[s m]\n", i - 1),
            _ => format!("%{i} = scale %{} {{factor=0.5}} : f32[s m]\n", i - 1),
        };
    }
    let module = text::parse(&(source + "return y = %99999\n}\n")).expect("a program");
    let printed = text::print(&module);
    median::report("print 100000 operations", || text::print(black_box(&module)));
    median::report("parse 100000 operations", || text::parse(black_box(&printed)).expect("parses"));
}

fn main() {
    schedules();
    search();
    texts();
}
