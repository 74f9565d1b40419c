//! `plan --mode decode` and `plan --mode serve`: what those see who size a cluster that serves a model.

use super::{line, refused, repository, said};
use crate::tier;

#[test]
fn plans_of_decoding_say_what_users_wait_for() {
    let plan = "plan examples/llama-3-70b --mode decode --gpus 8 --batch 64 --context 8k --top 2";
    insta::assert_snapshot!("plan_of_decoding", said(&repository("."), plan));
    // The largest batch fits, and one sequence more does not.
    let out = said(&repository("."), plan);
    let largest = out.lines().find_map(|line| line.strip_prefix("largest batch that fits in this layout: "));
    let largest: u64 = largest.unwrap().split(' ').next().unwrap().parse().unwrap();
    let layout = "--strategy megatron-tp --mesh tp=8";
    let of_batch =
        |batch: u64| format!("plan examples/llama-3-70b --mode decode --batch {batch} --context 8k {layout}");
    said(&repository("."), &of_batch(largest));
    let refusal = refused(&repository("."), &of_batch(largest + 1));
    assert!(refusal.starts_with("error[P32]"), "{refusal}");
}

#[test]
fn deployments_answer_requests_at_a_rate() {
    let serve = "plan examples/llama-3-8b --mode serve --rate 40 --input 1k --output 128 --gpus 8";
    insta::assert_snapshot!("deployments", said(&repository("."), serve));
    // GPUs without an all-reduce of their own, on which stages compute several prompts at once.
    let staged = "plan examples/qwen2.5-14b --mode serve --rate 4 --input 2k --output 64 --gpus 4 --cluster rtx-4090-pcie";
    let requests = tier::one_in(2, [serve, staged]).into_iter();
    let plans: Vec<_> = requests
        .map(|request| {
            let document = said(&repository("."), &format!("{request} --json"));
            let document: serde_json::Value = serde_json::from_str(&document).unwrap();
            commands(&document)
        })
        .collect();
    let micro = |of: &Vec<String>| of[1].contains("--micro-batches 4");
    assert!(plans.get(1).is_none_or(micro), "{plans:?}");
    // The commands make plans that take as long as the deployment assumes, and a program of both.
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).display().to_string();
    for of in &plans {
        assert_eq!(of.len(), 3, "{of:?}");
        run_all(of, &file);
        assert!(std::fs::read_to_string(file("serve.py")).unwrap().contains("HANDOVER = ["));
    }
}

/// The commands of an answer.
fn commands(document: &serde_json::Value) -> Vec<String> {
    let commands = document["commands"].as_array().unwrap().iter();
    commands.map(|c| c.as_str().unwrap().to_owned()).collect()
}

/// Runs commands that write files, which are placed elsewhere, and returns the output of the last.
fn run_all(commands: &[String], file: &dyn Fn(&str) -> String) -> String {
    let run = |command: &String| {
        let mut command = command.strip_prefix("ithaca ").unwrap().to_owned();
        for name in ["decode.json", "prompts.json", "serve.py"] {
            command = command.replace(name, &file(name));
        }
        said(&repository("."), &command)
    };
    commands.iter().map(run).last().unwrap()
}

/// Half of the bytes of caches hold twice the sequences, for a server that has attention on them.
#[test]
fn deployments_with_caches_of_eight_bits() {
    if !tier::is_full_or_says_so() {
        return;
    }
    let serve = |more: &str| {
        let serve = "plan examples/llama-3-8b --mode serve --rate 30 --input 16k --output-tokens 1k --json";
        let document = said(&repository("."), &format!("{serve} {more}"));
        serde_json::from_str::<serde_json::Value>(&document).unwrap()
    };
    let [wide, narrow] = ["", "--cache-type f8e4m3"].map(serve);
    let gpus = |document: &serde_json::Value| document["chosen"]["gpus"].as_u64().unwrap();
    assert!(gpus(&narrow) < gpus(&wide), "{} {}", gpus(&narrow), gpus(&wide));
    let note = |document: &serde_json::Value| document["notes"][0].as_str().unwrap().to_owned();
    assert!(note(&narrow).contains("exceed `max_position_embeddings`"), "{}", note(&narrow));
    let folder = tempfile::tempdir().unwrap();
    let server = run_all(&commands(&narrow), &|name| folder.path().join(name).display().to_string());
    assert!(server.contains("--kv-cache-dtype fp8_e4m3"), "{server}");
}

/// A model that fits on three GPUs and not on two; and fewer GPUs than that for the refusal, which names the fewest that do.
#[test]
fn deployments_need_no_power_of_two() {
    let serve = |gpus: u64| {
        format!("plan examples/llama-4-scout --mode serve --rate 0.5 --input 2k --output 256 --gpus {gpus}")
    };
    let out = said(&repository("."), &serve(3));
    assert!(out.contains("\n3 GPUs: 1 x pipeline pp=3, "), "{out}");
    let refusal = refused(&repository("."), &serve(2));
    assert!(refusal.contains("--gpus 3"), "{refusal}");
}

/// Caches of windows have room for prompts in parts only.
#[test]
fn deployments_of_models_with_windows_have_commands_that_work() {
    if !tier::is_full_or_says_so() {
        return;
    }
    let serve =
        "plan examples/mistral-7b --mode serve --rate 20 --input 8k --output-tokens 256 --gpus 16 --json";
    let document: serde_json::Value = serde_json::from_str(&said(&repository("."), serve)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).display().to_string();
    run_all(&commands(&document), &file);
    let plan = |args: &str| said(&repository("."), &format!("plan examples/mistral-7b --gpus 1 {args}"));
    plan(&format!("--seq 2k --context 8448 -o {}", file("prompts.json")));
    plan(&format!("--mode decode --context 8448 -o {}", file("decode.json")));
    let emit = format!("emit {} --prompts {} --target torch", file("decode.json"), file("prompts.json"));
    let refusal = refused(&repository("."), &emit);
    assert!(refusal.contains("so `--seq` of the plan of prompts is at most 512"), "{refusal}");
}

#[test]
fn demands_that_nothing_meets_say_what_would() {
    let serve = "plan examples/llama-3-8b --mode serve --gpus 2";
    let demands = [
        "--rate 4 --input 1k --output 128 --ttft 5",
        "--rate 400 --input 1k --output 128",
        "--rate 4 --input 1k --output 128 --tpot 1 --ttft 3",
        "--rate 4 --output 128",
        "--rate 4 --input 1k --output 128 --batch 4",
    ];
    let demands = tier::one_in(2, demands).into_iter();
    let refusals: Vec<_> =
        demands.map(|demand| refused(&repository("."), &format!("{serve} {demand}"))).collect();
    if tier::is_full() {
        insta::assert_snapshot!("demands_that_nothing_meets", refusals.join("\n"));
    }
    for repair in
        refusals.iter().flat_map(|text| text.lines()).filter_map(|l| l.trim().strip_prefix("ithaca "))
    {
        assert_eq!(line(&repository("."), repair).code, 0, "{repair}");
    }
}

#[test]
fn requests_that_no_layout_serves_say_why() {
    let gpt2 = "plan examples/gpt2 --mode serve --rate 2 --gpus 1";
    for lengths in ["--input 900 --output-tokens 200", "--input 4k --output-tokens 256"] {
        let refusal = refused(&repository("."), &format!("{gpt2} {lengths}"));
        assert!(refusal.starts_with("error[M08]"), "{refusal}");
        let shorter = refusal.split('`').find(|text| text.starts_with("--input ")).unwrap();
        said(&repository("."), &format!("{gpt2} {shorter}"));
    }
    let odd = serde_json::json!({
        "model_type": "llama", "hidden_size": 1600, "intermediate_size": 5504, "num_hidden_layers": 2,
        "num_attention_heads": 25, "num_key_value_heads": 5, "head_dim": 64, "vocab_size": 32001
    });
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), odd.to_string()).unwrap();
    let serve = "plan . --mode serve --rate 50 --input 1k --output-tokens 100 --only megatron-tp";
    let refusal = refused(folder.path(), serve);
    let says = ["no layout of a replica of up to 128 GPUs is legal", "25 query heads", "leave `--only` out"];
    assert!(says.iter().all(|says| refusal.contains(says)), "{refusal}");
}

/// A layout that needs fewer pages in host memory than another may be slower.
#[test]
fn pages_in_host_memory_are_those_of_the_fastest_layout() {
    if !tier::is_full_or_says_so() {
        return;
    }
    let seconds = |layout: &str| {
        let plan = "plan examples/gpt-oss-20b --mode decode --gpus 4 --context 128k --batch 80 --page 64 --offload cache --json";
        let plan = said(&repository("."), &format!("{plan} {layout}"));
        let plan: serde_json::Value = serde_json::from_str(&plan).unwrap();
        plan["time"]["step_seconds"].as_f64().unwrap()
    };
    let [searched, named] = ["", "--mesh tp=4"].map(seconds);
    assert!(searched <= 1.01 * named, "{searched} {named}");
}

/// A strategy is searched on the meshes that the search over all strategies tries, where experts take the ranks of other axes, too.
#[test]
fn experts_share_axes_where_only_the_strategy_is_named() {
    let plan = "plan examples/gpt-oss-120b --mode decode --gpus 8 --batch 32 --context 128k --strategy data-parallel+ep";
    let out = said(&repository("."), plan);
    assert!(out.contains("\ndata-parallel+ep dp=8 "), "{out}");
    let in_pages = said(&repository("."), &format!("{plan} --mesh dp=8 --page 64"));
    let note = "note: caches in pages hold all tokens, those of layers with sliding windows too";
    assert!(in_pages.contains(note) && !out.contains(note), "{in_pages}");
}
