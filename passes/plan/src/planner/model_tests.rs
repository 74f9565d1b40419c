//! The planner on real model descriptions: every request is answered by a plan, or by repairs that give one.

use ithaca_import::{self as import, Workload};
use ithaca_ir::Module;
use ithaca_ir::verify::verify;
use ithaca_layout::fuse::Fusion;
use ithaca_layout::registry::Registry;
use ithaca_layout::shard::{HeadSplit, SequenceFit};
use serde_json::{Value, json};

use super::*;
use crate::plan::Outcome;

pub(super) fn llama(hidden: u64, inner: u64, layers: u64, heads: u64, kv_heads: u64) -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_act": "silu",
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
        "attention_bias": false, "tie_word_embeddings": false, "vocab_size": 128_256
    })
}

fn llama_8b() -> Value {
    llama(4096, 14336, 32, 32, 8)
}

fn llama_70b() -> Value {
    llama(8192, 28672, 80, 64, 8)
}

fn llama_405b() -> Value {
    llama(16384, 53248, 126, 128, 8)
}

/// Heads 28/4, as Qwen2.5-7B has them.
fn narrow() -> Value {
    llama(3584, 18944, 28, 28, 4)
}

fn program(config: &Value, sequence: u64) -> Module {
    let workload = Workload { batch: 1, ..Workload::prefill(1, sequence) };
    import::import(config, "model", &workload).unwrap_or_else(|d| panic!("{}", d.render(None)))
}

fn ranked(config: &Value, sequence: u64, request: &Request) -> Result<Ranked, Box<Refusal>> {
    let (module, cluster) = (program(config, sequence), Cluster::named("dgx-h100").unwrap());
    rank(&Program::new(verify(&module).unwrap(), &cluster), &cluster, request)
}

/// The request with a repair's options in place of its own.
fn repaired(request: &Request, repair: &str) -> Request {
    let mut request = request.clone();
    let mut words = repair.split_whitespace();
    while let Some(word) = words.next() {
        match word {
            "--gpus" => request.gpus = words.next().unwrap().parse().unwrap(),
            "--strategy" => {
                request.strategy = words.next().map(str::to_owned);
                request.mesh = None;
            }
            "--mesh" => request.mesh = Some(ithaca_layout::shard::parse_mesh(words.next().unwrap()).unwrap()),
            "--uneven-heads" => request.options.heads = HeadSplit::Uneven,
            "--pad-sequence" => request.options.sequence = SequenceFit::Pad,
            other => panic!("{other} in {repair}"),
        }
    }
    request
}

#[test]
fn every_model_and_number_of_gpus_has_a_plan_or_a_repair_that_gives_one() {
    for (name, config) in [("8b", llama_8b()), ("28/4", narrow()), ("70b", llama_70b())] {
        for gpus in [1, 2, 3, 4, 6, 8, 16, 64] {
            let request = Request::new(gpus);
            match ranked(&config, 8192, &request) {
                Ok(ranked) => assert_eq!(ranked.chosen.options.mesh.ranks(), gpus),
                Err(refusal) => {
                    let Diagnostic { message, repairs, .. } = &refusal.diagnostic;
                    assert!(!repairs.is_empty(), "{name} on {gpus}: {message}");
                    for repair in repairs {
                        let again = ranked(&config, 8192, &repaired(&request, repair));
                        assert!(again.is_ok(), "{name} on {gpus}: {repair} of {message}");
                    }
                }
            }
        }
    }
}

/// FACTS of DeepSpeed-Ulysses: (P−1)/P · N/P · D · e · (2·Hq + 2·Hkv′) bytes a layer, four all-to-alls.
#[test]
fn ulysses_sends_what_its_paper_says() {
    for (p, hkv) in [(2, 8), (4, 8), (8, 8), (16, 16), (32, 32)] {
        let request = Request { strategy: Some("ulysses".into()), ..Request::new(p) };
        let n = 65_536;
        let ranked = ranked(&llama_8b(), n, &request).unwrap();
        let rows = plan::collectives(&ranked.step.compiled.per_rank);
        let row = rows.iter().find(|r| r.kind == "all_to_all").unwrap();
        assert_eq!(row.count, 4 * 32, "{rows:?}");
        let layer = n / p * 128 * 2 * (2 * 32 + 2 * hkv) / p * (p - 1);
        assert_eq!(row.bytes_sent_per_rank, 32 * layer, "degree {p}");
    }
}

/// DeepSpeed-Ulysses, section 3.2: with as many key/value heads as query heads, Megatron with sequence parallelism sends
/// P times the bytes of Ulysses; embedding and head add 2 to the 128 collectives of the layers.
#[test]
fn megatron_sends_p_times_the_bytes_of_ulysses() {
    let config = llama(4096, 14336, 32, 32, 32);
    for p in [2, 4, 8] {
        let bytes = |strategy: &str| -> u64 {
            let request = Request { strategy: Some(strategy.into()), ..Request::new(p) };
            let ranked = ranked(&config, 16_384, &request).unwrap();
            let rows = plan::collectives(&ranked.step.compiled.per_rank);
            rows.iter().map(|r| r.bytes_sent_per_rank).sum()
        };
        let ratio = bytes("megatron-tp-sp") as f64 / bytes("ulysses") as f64;
        assert!((ratio / p as f64 - 1.0).abs() < 0.03, "degree {p}: {ratio}");
    }
}

/// GPT-175B on H100 at 32K tokens: TP32, across nodes, is slower than TP8 with context parallelism inside the same
/// GPUs (Megatron-Core documentation: 0.85 against 1.20 of TP8).
#[test]
fn tensor_parallelism_across_nodes_loses_to_a_product() {
    let ranked = ranked(&llama_70b(), 32_768, &Request::new(64)).unwrap();
    let chosen = &ranked.chosen.options;
    let tensor = chosen.mesh.axis("tp").map_or(1, |axis| chosen.mesh.size(axis));
    assert!(tensor <= 8 && chosen.mesh.axes.len() > 1, "{} {}", chosen.strategy, chosen.mesh);
    let wide = ranked.alternatives.iter().position(|a| a.strategy == "megatron-tp").unwrap();
    assert!(wide > 3, "tp=64 is rank {wide}");
}

/// The rows of a table compare steps with the fusion that suits each, not a step in chunks with one of whole collectives.
#[test]
fn the_first_rows_are_the_best_steps_of_their_layouts() {
    let mut free = Request { chooses_fusion: true, ..Request::new(8) };
    free.options.fusion = Fusion::PACK.folded();
    let rows = |request: &Request| ranked(&llama_8b(), 8192, request).unwrap().alternatives;
    let seconds = |row: &plan::Alternative| match row.outcome {
        Outcome::Chosen { step_seconds, .. } | Outcome::Slower { step_seconds, .. } => step_seconds,
        ref other => panic!("{other:?}"),
    };
    let all = rows(&free);
    for (row, strategy) in all.iter().zip(["megatron-cp-allgather", "ulysses"]) {
        let alone = rows(&Request { strategy: Some(strategy.into()), ..free.clone() });
        assert_eq!((row.strategy.as_str(), seconds(row)), (strategy, seconds(&alone[0])));
    }
}

#[test]
fn weights_that_do_not_fit_are_split_further() {
    let refusal = ranked(&llama_405b(), 8192, &Request::new(4)).unwrap_err();
    assert_eq!(refusal.diagnostic.code, "P32");
    assert_eq!(refusal.diagnostic.repairs, ["--gpus 16"], "{}", refusal.diagnostic);
}

#[test]
fn many_gpus_are_refused_with_as_many_as_are_legal() {
    // A prime that does not divide heads, and more ranks than tokens that may not be padded.
    let mut request = Request::new(1009);
    request.options.sequence = SequenceFit::Uneven;
    let Err(refusal) = ranked(&llama_405b(), 1008, &request) else { panic!("1009 GPUs are legal") };
    assert_eq!(refusal.diagnostic.code, "P31");
    assert_eq!(refusal.diagnostic.repairs, ["--gpus 1008", "--gpus 1024"], "{}", refusal.diagnostic);
    // Padded they are legal, and all weights on each rank do not fit.
    let padded = ranked(&llama_405b(), 8192, &Request::new(1009)).map_err(|refusal| refusal.diagnostic.code);
    assert_eq!(padded.err(), Some("P32"));
}

/// All-to-all is what Ulysses is, at every length and on every cluster, where a ring would start faster too (A100, as
/// Galvatron measured it).
#[test]
fn ulysses_is_all_to_all_everywhere() {
    let module = program(&llama_8b(), 1024);
    for name in crate::cluster::names() {
        let cluster = Cluster::named(name).unwrap();
        for gpus in [2, 8, 16, 32] {
            let request = Request { strategy: Some("ulysses".into()), ..Request::new(gpus) };
            let compiler = Program::new(verify(&module).unwrap(), &cluster);
            let options = candidates(&Registry::default(), &cluster, &request).unwrap().remove(0);
            let rows = plan::collectives(&compiler.draft(&options).unwrap().per_rank);
            let kinds: Vec<(&str, u64)> = rows.iter().map(|r| (r.kind.as_str(), r.count)).collect();
            assert_eq!(kinds, [("all_to_all", 4 * 32)], "{name} {gpus}");
        }
    }
}

#[test]
fn parameters_are_those_of_the_model() {
    let ranked = ranked(&llama_8b(), 8192, &Request { strategy: Some("ulysses".into()), ..Request::new(2) });
    // 8 030 261 248 parameters of two bytes, whole on every rank.
    assert_eq!(ranked.unwrap().chosen.memory.parameters, 2 * 8_030_261_248);
}
