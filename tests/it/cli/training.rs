//! Training by the command line: every model's step agrees with the whole one, options belong together, and a pipeline that
//! does not fit has repairs.

use serde_json::{Value, json};

use super::{refused, repository, said};
use crate::tier;

/// Biases of keys have gradients that are rounding alone, of which AdamW makes whole steps.
#[test]
fn steps_of_models_whose_gradients_vanish_pass() {
    let root = repository("");
    let cases = [
        ("tests/goldens/gpt2", ""),
        ("tests/goldens/gpt2", "--strategy ring+megatron-tp --mesh ring=2,tp=2"),
        ("tests/goldens/gpt-neox", "--strategy ulysses --mesh ulysses=4"),
        ("tests/goldens/olmo2-biases-head-dim", "--strategy megatron-tp-sp --mesh tp=2"),
        ("tests/goldens/t5", "--target-seq 12 --strategy ring --mesh ring=2"),
        ("examples/bert-large-uncased --shrink", ""),
        ("examples/bert-large-uncased --shrink", "--strategy megatron-tp --mesh tp=2 --storage typed"),
    ];
    for (model, layout) in tier::one_in(3, cases) {
        for seed in 0..tier::count(1, 2) {
            let args = format!("{model} --mode train --seq 16 --batch 2 --steps 2 --seed {seed} {layout}");
            for command in ["run", "verify"] {
                if command == "run" || !layout.contains("--storage") {
                    let out = said(&root, &format!("{command} {args}"));
                    assert!(out.contains(": no error is above ") && !out.contains("FAILED"), "{args}: {out}");
                }
            }
        }
    }
}

/// The layouts that come nearest by estimates do not fit; others do.
#[test]
fn a_step_that_hardly_fits_is_found() {
    if tier::is_full_or_says_so() {
        let plan =
            "plan examples/llama-3-70b --mode train --cluster rtx-4090-pcie --gpus 64 --seq 4k --batch 64";
        said(&repository(""), plan);
    }
}

#[test]
fn refusals_for_lack_of_memory_come_soon() {
    let asked = "plan examples/llama-3-70b --mode train --gpus 8 --strategy data-parallel --mesh dp=8 --batch 8 \
                 --seq 131072";
    // Trying all layouts of all numbers of GPUs would take many minutes.
    for (options, code) in tier::one_in(2, [("", "P32"), ("--micro-batches 4", "P25")]) {
        let refusal = refused(&repository(""), &format!("{asked} {options}"));
        assert!(refusal.contains(&format!("error[{code}]")), "{options}: {refusal}");
    }
}

/// An option that is stated by its key is as fixed as by its flag.
#[test]
fn options_of_a_step_are_fixed_by_key_as_by_flag() {
    let root = repository("");
    let plan = |options: &str| {
        let asked = "plan tests/goldens/llama-gqa --mode train --seq 64 --batch 8 --mesh dp=2 --top 1 --json";
        serde_json::from_str::<Value>(&said(&root, &format!("{asked} {options}"))).unwrap()["workload"].take()
    };
    for (key, flag) in [
        ("recompute=full", "--recompute full"),
        ("micro_batches=2", "--micro-batches 2"),
        ("loss_chunks=2", "--loss-chunks 2"),
    ] {
        assert_eq!(plan(&format!("--train {key}")), plan(flag), "{key}");
    }
}

/// A plan whose groups of ranks straddle nodes is chosen again for its request, at the same prices.
#[test]
fn a_plan_on_part_of_a_node_is_chosen_again() {
    let folder = tempfile::tempdir().unwrap();
    let model = repository("examples/mistral-7b");
    let only = "--only pipeline,data-parallel,ulysses,megatron-cp-allgather";
    let asked = format!("plan {} --mode train --gpus 20 --seq 8k --batch 32 {only}", model.display());
    said(folder.path(), &format!("{asked} --top 1 -o plan.json"));
    assert!(said(folder.path(), "plan --check plan.json").contains("is the plan that is chosen"));
}

/// Where sequences do not divide among all GPUs, a framework runs stages.
#[test]
fn stages_are_tried_for_a_framework() {
    let asked = "plan tests/goldens/llama-gqa --mode train --gpus 6 --seq 4096 --batch 7 --for megatron --top 1 --json";
    let plan: Value = serde_json::from_str(&said(&repository(""), asked)).unwrap();
    assert!(plan["strategy"].as_str().unwrap().starts_with("pipeline"), "{}", plan["strategy"]);
}

/// States of the optimizer in host memory leave the device but for those of the weights at work, and are proven there.
#[test]
fn states_of_the_optimizer_are_in_host_memory() {
    let root = repository("");
    let layouts = [
        "",
        "--mesh dp=2",
        "--mesh dp=2,tp=2 --zero 1 --train clip=1",
        "--mesh dp=2 --zero 2 --micro-batches 2",
        "--mesh dp=2 --zero 1 --fuse prefetch+fold+pack",
        "--strategy ulysses --mesh ulysses=2 --zero 3",
        "--mesh pp=2,dp=2 --zero 1 --micro-batches 2",
    ];
    for layout in tier::one_in(3, layouts) {
        let args = "tests/goldens/llama-gqa --mode train --seq 16 --batch 4 --steps 3 --offload optimizer";
        for command in ["run", "verify"] {
            let out = said(&root, &format!("{command} {args} {layout}"));
            assert!(out.contains(": no error is above ") && !out.contains("FAILED"), "{layout}: {out}");
        }
    }
    // Several weights are windows of one stored tensor.
    let windows =
        "run tests/goldens/deepseek-v3-whole-queries --mode train --seq 16 --batch 2 --dtype bf16 --steps 2";
    let out = said(&root, &format!("{windows} --offload optimizer"));
    assert!(out.contains(": no error is above "), "{out}");
    let args = "plan examples/llama-3-8b --gpus 4 --mode train --batch 4 --seq 4096 --mesh dp=4 --zero 1 \
                --recompute full --micro-batches 1 --loss-chunks 1 --json";
    let memory = |more: &str| -> Value {
        let plan: Value = serde_json::from_str(&said(&root, &format!("{args} {more}"))).unwrap();
        plan["memory"].clone()
    };
    let (on_device, offloaded) = (memory(""), memory("--offload optimizer"));
    let bytes = |memory: &Value, of: &str| memory[of].as_u64().unwrap_or(0);
    // The count of steps, a number, stays on the device.
    assert_eq!(bytes(&offloaded, "host"), bytes(&on_device, "optimizer") - 4);
    assert_eq!(bytes(&offloaded, "optimizer"), 4);
    assert_eq!(bytes(&on_device, "host"), 0);
    assert_eq!(
        bytes(&offloaded, "arena"),
        bytes(&on_device, "arena"),
        "an update needs less than the passes"
    );
    for (args, reason) in [
        ("plan examples/llama-3-8b --gpus 2 --mode train --seq 64 --cluster cpu", "no `host_bandwidth`"),
        ("plan examples/llama-3-8b --gpus 2 --seq 64", "is an option of training"),
        ("run tests/goldens/llama-gqa --mode train --seq 16 --train optimizer=none", "needs an optimizer"),
    ] {
        let refusal = refused(&root, &format!("{args} --offload optimizer"));
        assert!(refusal.contains(reason), "{args}: {refusal}");
    }
    // Moments and weights of 405 billion parameters, 12 bytes of each, on two machines of 2 TB.
    let large = "plan examples/llama-3.1-405b --cluster dgx-b200 --mode train --seq 1k --batch 16 --offload optimizer";
    let layout = "--strategy data-parallel+megatron-tp-sp --mesh dp=2,tp=8 --zero 3";
    let refusal = refused(&root, &format!("{large} {layout} --micro-batches 8 --recompute full"));
    assert!(refusal.contains("P32") && refusal.contains("of host memory"), "{refusal}");
    let folder = tempfile::tempdir().unwrap();
    let plan = folder.path().join("plan.json").display().to_string();
    said(&root, &format!("{args} --offload optimizer -o {plan}"));
    let explained = said(&root, &format!("explain {plan}"));
    for text in ["copy over to_host", "upload over host", "host memory of a rank: 22.4", "offload=optimizer"]
    {
        assert!(explained.contains(text), "{text}: {explained}");
    }
    let refusal =
        refused(&root, &format!("emit {plan} --target torch -o {}", folder.path().join("x").display()));
    assert!(refusal.contains("states in host memory have no form in PyTorch"), "{refusal}");
    assert!(said(&root, &format!("export {plan} --to deepspeed")).contains("offload_optimizer"));
}

#[test]
fn stages_and_parts_are_compared_with_the_plain_step() {
    let options = "--mode train --seq 16 --batch 4 --micro-batches 2 --recompute full --loss-chunks 2 \
                   --strategy pipeline+ulysses --mesh pp=2,ulysses=2";
    for command in ["run", "verify"] {
        let out = said(&repository(""), &format!("{command} tests/goldens/llama-gqa {options}"));
        assert!(out.contains("passed") && !out.contains("FAILED"), "{command}: {out}");
    }
}

#[test]
fn options_that_would_do_nothing_are_refused() {
    let root = repository("");
    let golden = "run tests/goldens/llama-gqa --seq 16";
    for option in ["--recompute full", "--loss-chunks 2", "--train clip=1"] {
        let refusal = refused(&root, &format!("{golden} {option}"));
        assert!(refusal.contains("--mode train"), "{option}: {refusal}");
    }
    let refusal = refused(&root, &format!("{golden} --batch 2 --micro-batches 2"));
    assert!(refusal.contains("--mesh pp=2"), "{refusal}");
    let refusal = refused(&root, &format!("{golden} --mode train --train optimizer=none --train lr=1"));
    assert!(refusal.contains("optimizer=none"), "{refusal}");
    let refusal = refused(&root, "plan examples/llama-3-8b --mode train --gpus 4 --seq 64 --train stages=2");
    assert!(refusal.contains("--mesh pp=2"), "{refusal}");
}

#[test]
fn checkpoints_are_cut_for_plans_whatever_lengths_they_have() {
    let folder = tempfile::tempdir().unwrap();
    let golden = repository("tests/goldens/llama-gqa");
    for (i, options) in [
        "--strategy ulysses --mesh ulysses=2 --loss-chunks 3",
        "--strategy ulysses --mesh ulysses=2 --loss-chunks 5 --micro-batches 3",
        "--strategy ring --mesh ring=3 --order striped:5",
    ]
    .into_iter()
    .enumerate()
    {
        let out = said(
            folder.path(),
            &format!("shard-weights {} --mode train {options} -o cut{i}", golden.display()),
        );
        assert!(out.contains(&format!("wrote cut{i}")), "{options}: {out}");
    }
}

#[test]
fn numbers_that_do_not_fit_have_numbers_that_do() {
    let plan = "plan examples/llama-3-8b --mode train --gpus 8 --seq 8k --batch 8";
    for (options, says) in [
        ("--context 8k", ["error[M09]: `--context 8192`", "use `--mode decode`"]),
        (
            "--mesh dp=8 --micro-batches 3",
            ["that divide it: 1; 3 divide a batch of 24", "on 8 data-parallel ranks"],
        ),
        ("--micro-batches 3", ["that divide it: 1, 2, 4, 8; 3 divide a batch of 9", "error[P52]"]),
        (
            "--mesh pp=2,dp=4 --micro-batches 4",
            ["a micro-batch of 2 sequences, of a batch b of 8 in 4 micro-batches", "micro-batches: 1, 2\n"],
        ),
        (
            "--mesh pp=4,dp=2 --train stage_layers=8+8+8+9",
            ["states 33 layers, but the model has 32 layers", "32 in all, as in `stage_layers="],
        ),
        (
            "--mesh pp=4,dp=2 --pipeline 1f1b --train stage_layers=16+16",
            ["states the layers of 2 chunks, and the pipeline has 4", "each of 4 chunks, 32 in all"],
        ),
        (
            "--mesh pp=8 --train stage_layers=8+8+8+6",
            ["states the layers of 4 chunks, and the pipeline has 8", "each of 8 chunks, 32 in all"],
        ),
        (
            "--train stage_layers=12+10+10",
            ["states the layers of 3 stages, by which 8 GPUs are not divisible", "use `--gpus 9`"],
        ),
    ] {
        let refusal = refused(&repository(""), &format!("{plan} {options}"));
        assert!(says.iter().all(|says| refusal.contains(says)), "{options}: {refusal}");
    }
}

#[test]
fn stated_layers_of_stages_fix_their_number() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().join("plan.json");
    let plan =
        "plan examples/llama-3-8b --mode train --gpus 8 --seq 8k --batch 8 --train stage_layers=9+8+8+7 -o";
    said(&repository(""), &format!("{plan} {}", at.display()));
    let plan: Value = serde_json::from_slice(&std::fs::read(at).unwrap()).unwrap();
    assert_eq!(plan["mesh"][0], json!({"axis": "pp", "size": 4}));
}

#[test]
fn modules_for_autograd_have_their_states_on_the_device() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().join("plan.json");
    let plan = "plan examples/llama-3-8b --mode train --seq 8k --batch 8 --mesh tp=8 --strategy megatron-tp-sp --zero 0 \
                --micro-batches 1 --offload optimizer -o";
    said(&repository(""), &format!("{plan} {}", at.display()));
    let refusal = refused(&repository(""), &format!("emit {} --target torch --autograd", at.display()));
    assert!(refusal.contains("error[S44]: the plan has states in host memory"), "{refusal}");
}
