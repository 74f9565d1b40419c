//! Pipelines by the command line: checkpoints that are cut by stage, resumed under another plan and back, small models,
//! pictures.

use ithaca_kernels::store::{SafeTensorsFile, TensorSource, shards};
use serde_json::json;

use super::checkpoints::{TOLERANCE, bytes, same_tensors};
use super::{line, repository, said};
use crate::tier;

const STEP: &str = "run . --mode train --seq 16 --batch 8 --train clip=1.0";
const STAGES: &str = "--strategy pipeline+ulysses --mesh pp=2,ulysses=2 --micro-batches 4";
const RING: &str = "--strategy ring --mesh ring=4";
const DP_ULYSSES: &str = "--strategy data-parallel+ulysses --mesh dp=2,ulysses=2";

/// A folder with the configuration of a model of four layers whose embedding is tied.
fn tiny() -> tempfile::TempDir {
    let config = json!({
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 32,
        "tie_word_embeddings": true, "torch_dtype": "float32",
    });
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    folder
}

#[test]
fn a_pipeline_that_is_resumed_is_the_uninterrupted_one_bit_for_bit() {
    for order in tier::one_in(4, ["interleaved", "gpipe", "zb-h1", "1f1b"]) {
        let folder = tiny();
        let at = folder.path();
        let step = format!("{STEP} {STAGES} --pipeline {order}");
        said(at, &format!("{step} --steps 4 --save whole.safetensors"));
        said(at, &format!("{step} --steps 2 --save half.safetensors"));
        said(at, &format!("{step} --steps 2 --resume half.safetensors --save there.safetensors"));
        assert!(bytes(at, "whole.safetensors") == bytes(at, "there.safetensors"), "{order}");
    }
}

#[test]
fn a_pipeline_is_resumed_under_other_plans_and_they_under_it() {
    let folder = tiny();
    let at = folder.path();
    said(at, &format!("{STEP} {RING} --steps 6 --save whole.safetensors"));
    said(at, &format!("{STEP} {STAGES} --steps 2 --save two.safetensors"));
    for (name, layout) in [("ring", RING), ("dp", DP_ULYSSES)] {
        said(at, &format!("{STEP} {layout} --steps 2 --resume two.safetensors --save four-{name}"));
        let there = format!("{STEP} {STAGES} --steps 2 --resume four-{name}");
        let out = said(at, &format!("{there} --save six-{name}"));
        assert!(out.contains(&format!("resumed from four-{name} after step 4")), "{out}");
        let [whole, six] = ["whole.safetensors".to_owned(), format!("six-{name}")]
            .map(|file| SafeTensorsFile::open(at.join(file)).unwrap());
        assert_eq!(whole.names(), six.names());
        let norm = |data: &[f64]| data.iter().map(|x| x * x).sum::<f64>().sqrt();
        for name in whole.names() {
            let (a, b) = (whole.read(&name).unwrap(), six.read(&name).unwrap());
            let difference: Vec<f64> = a.data.iter().zip(&b.data).map(|(a, b)| a - b).collect();
            assert!(norm(&difference) <= TOLERANCE * norm(&a.data), "{name}");
        }
    }
}

#[test]
fn a_rank_is_cut_the_layers_of_its_stage() {
    let folder = tiny();
    let at = folder.path();
    said(at, &format!("{STEP} {STAGES} --steps 2 --save two.safetensors"));
    for (i, layout) in [
        STAGES.to_owned(),
        format!("{STAGES} --pipeline interleaved"),
        "--strategy data-parallel+pipeline --mesh dp=2,pp=2 --micro-batches 2 --zero 3".to_owned(),
    ]
    .iter()
    .enumerate()
    {
        let cut = format!("shard-weights . --mode train {layout} --weights two.safetensors -o shards{i}");
        let out = said(at, &cut);
        assert!(!out.contains("left out"), "{layout}: {out}");
        said(at, &format!("merge-weights shards{i} -o joined{i}.safetensors"));
        same_tensors(at, "two.safetensors", &format!("joined{i}.safetensors"));
        let file = |rank| SafeTensorsFile::open(at.join(format!("shards{i}")).join(shards::rank_file(rank)));
        let layers = |rank| -> Vec<u64> {
            let names = file(rank).unwrap().names();
            let of_layer = names.iter().filter_map(|name| name.strip_prefix("model.layers."));
            let mut layers: Vec<u64> = of_layer.map(|rest| rest[..1].parse().unwrap()).collect();
            layers.dedup();
            layers
        };
        let expected: [&[u64]; 4] = match i {
            0 => [&[0, 1], &[0, 1], &[2, 3], &[2, 3]],
            1 => [&[0, 2], &[0, 2], &[1, 3], &[1, 3]],
            _ => [&[0, 1], &[2, 3], &[0, 1], &[2, 3]],
        };
        for (rank, expected) in (0..).zip(expected) {
            assert_eq!(layers(rank), expected, "{layout}, rank {rank}");
        }
    }
}

#[test]
fn small_models_have_layers_for_every_stage() {
    let cases = [
        ("examples/llama-3-8b", "--mesh pp=2,ulysses=2 --pipeline interleaved"),
        ("examples/llama-3-8b", "--mesh pp=4,ulysses=2 --pipeline 1f1b"),
    ];
    for (model, layout) in tier::one_in(2, cases) {
        let run = "--mode train --train optimizer=none --shrink --strategy pipeline+ulysses --micro-batches 4 --batch 4";
        let ran = line(&repository("."), &format!("run {model} {run} {layout}"));
        assert_eq!(ran.code, 0, "{model} {layout}: {ran:#?}");
    }
}

#[test]
fn pictures_and_reasons_show_stages() {
    let folder = tiny();
    let at = folder.path();
    said(
        at,
        &format!(
            "plan . --mode train --seq 16 --batch 8 {STAGES} --pipeline 1f1b --zero 0 --recompute none -o plan.json"
        ),
    );
    // The last stage waits for the others to begin.
    let explained = said(at, "explain plan.json");
    assert!(explained.contains("of another stage (bubble)"), "{explained}");
    assert!(explained.contains("in which the rank waits for other stages"), "{explained}");
    let drawn = said(at, "emit plan.json --target mermaid");
    for expected in [
        "box pp=0",
        "box pp=1",
        "loop 2 layers: @block on pp=0",
        "loop 2 layers: @block.backward on pp=1",
        "r0->>r2: permute over pp",
        "r2->>r0: permute over pp",
        "Note over r2,r3: @head",
    ] {
        assert!(drawn.contains(expected), "{expected}: {drawn}");
    }
    // What goes back is in the backward pass, what goes on in the forward pass.
    let mut section = "";
    for line in drawn.lines() {
        if let Some(title) =
            ["LOAD", "FORWARD", "BACKWARD", "UPDATE"].iter().find(|t| line.ends_with(&format!(": {t}")))
        {
            section = title;
        }
        if line.contains("r0->>r2: permute over pp") {
            assert!(["FORWARD", "UPDATE"].contains(&section), "{section}: {line}");
        }
        if line.contains("r2->>r0: permute over pp") {
            assert!(["FORWARD", "BACKWARD", "UPDATE"].contains(&section), "{section}: {line}");
        }
    }
    assert!(said(at, "emit plan.json --target cuda -o out").contains("files to out"));
    let drawn = said(at, "emit plan.json --target svg");
    assert!(drawn.contains("stage 1") && drawn.contains("on pp=0"), "{drawn}");
}

/// Ranks that one processor would play for hours are refused with their number and that of what they run.
#[test]
fn a_cluster_is_proven_on_few_ranks() {
    let asked = "verify examples/llama-3-8b --mode train --gpus 2048 --seq 8192 --batch 2048 --micro-batches 32 \
                 --strategy data-parallel+pipeline+megatron-tp-sp --mesh dp=64,pp=4,tp=8 --zero 1 --shrink";
    let proof = said(&repository(""), asked);
    for part in ["2 micro-batches in place of 32", "in place of `dp=64,pp=4,tp=8`", "\npassed"] {
        assert!(proof.contains(part), "{part}: {proof}");
    }
}

/// A ring has as many steps as ranks, so it has no smaller one with the same operations.
#[test]
fn a_long_ring_is_not_played_by_one_processor() {
    let asked = "verify examples/llama-3-8b --gpus 1024 --seq 1m --strategy ring --mesh ring=1024 --shrink";
    let refusal = super::refused(&repository(""), asked);
    assert!(refusal.contains("error[C14]") && refusal.contains("1024 ranks"), "{refusal}");
}
