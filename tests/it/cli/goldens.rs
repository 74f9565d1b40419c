//! Models of the HuggingFace library by `run` (the schedule in single precision) and `verify` (the per-rank program in double
//! precision), through the command line.

use ithaca_kernels::store::{self, SafeTensorsFile, Stored, TensorSource, Tensors};
use ithaca_kernels::{Tensor, oracle};

use super::{line, repository, said};
use crate::golden::{Golden, imported};

/// The goldens under every layout are tests of their own; here is what the commands say of them.
#[test]
fn run_and_verify_give_the_outputs_of_the_library() {
    for (golden, layout, output) in [
        ("llama-gqa", "", "logits"),
        ("gemma2", "--strategy ulysses+megatron-tp-sp --mesh ulysses=2,tp=2", "logits"),
        ("mixtral", "--strategy usp --mesh ring=2,ulysses=2", "logits"),
        ("bert", "--strategy ring --mesh ring=4", "last_hidden_state"),
    ] {
        let dir = repository("tests/goldens").join(golden);
        let io = "io.safetensors";
        for command in ["run", "verify"] {
            let args = format!("{command} . --inputs {io} --expect {io} --tolerance 1e-5 {layout}");
            let out = said(&dir, &args);
            assert!(out.contains(output) && out.contains("passed: tolerance 1e-5"), "{args}: {out}");
        }
    }
}

/// Zigzag, padding and a decoder of its own length: the last token is on another rank each time.
#[test]
fn the_last_token_has_the_logits_that_the_library_gives_it() {
    for (golden, layout) in [
        ("gpt2", "--strategy ring --mesh ring=4 --pad-sequence"),
        ("gemma2", "--strategy megatron-tp-sp --mesh tp=2"),
        ("t5", "--strategy ulysses --mesh ulysses=2"),
    ] {
        let dir = repository("tests/goldens").join(golden);
        let folder = tempfile::tempdir().unwrap();
        let all = SafeTensorsFile::open(dir.join("io.safetensors")).unwrap().read("logits").unwrap();
        let (width, tokens) = (all.shape[2], all.shape[1]);
        let last = all.data.chunks(width).skip(tokens - 1).step_by(tokens).flatten().copied().collect();
        let last = Tensor { shape: vec![all.shape[0], width], data: last };
        let file = folder.path().join("last.safetensors");
        store::write(&file, &[("logits", Stored::F32, &last)]).unwrap();
        let args = format!("run . --logits last --inputs io.safetensors --tolerance 1e-5 {layout} --expect");
        let out = said(&dir, &format!("{args} {}", file.display()));
        assert!(out.contains("passed: tolerance 1e-5"), "{args}: {out}");
        let ran = line(&dir, &format!("{args} io.safetensors"));
        assert!(ran.code == 1 && ran.out.contains("`--logits all` computes all"), "{ran:#?}");
    }
}

/// Each document alone, by the interpreter of the whole program; all of them packed, in layouts whose ranks hold parts of
/// several.
#[test]
fn packed_documents_have_the_logits_of_each_alone() {
    for (golden, layout) in [
        ("llama-gqa", "--strategy ring --mesh ring=2"),
        ("gemma2", "--strategy usp --mesh ring=2,ulysses=2 --pad-sequence"),
        ("mistral-swa", "--strategy sparse-fetch --mesh ring=2"),
        ("qwen3-rope-yarn-mscale", "--strategy megatron-cp-allgather --mesh cp=2"),
        ("deepseek-v3", "--strategy ulysses --mesh ulysses=2"),
    ] {
        let model = Golden::open(golden);
        let ids = model.io.read("input_ids").unwrap();
        let (batch, tokens) = (ids.shape[0], ids.shape[1]);
        let lengths = [1, tokens / 2, tokens - tokens / 2 - 1];
        let mut rows = vec![Vec::new(); batch];
        let (mut start, mut width) = (0, 0);
        for length in lengths {
            let part = ids.data.chunks(tokens).flat_map(|row| row[start..start + length].iter().copied());
            let part = Tensor { shape: vec![batch, length], data: part.collect() };
            let alone = Tensors::from_iter([("input_ids", part)]);
            let module = imported(&model.config, golden, &alone);
            let outputs = oracle::run::<f64>(&module, &model.weights, &alone).unwrap();
            let logits = &outputs["logits"];
            width = logits.shape[2];
            for (row, part) in rows.iter_mut().zip(logits.data.chunks(length * width)) {
                row.extend_from_slice(part);
            }
            start += length;
        }
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("alone.safetensors");
        let logits = Tensor { shape: vec![batch, tokens, width], data: rows.concat() };
        store::write(&file, &[("logits", Stored::F64, &logits)]).unwrap();
        let documents = lengths.map(|n| n.to_string()).join(",");
        let args = format!(
            "run . --inputs io.safetensors --documents {documents} --tolerance 1e-5 {layout} --expect {}",
            file.display()
        );
        let out = said(&repository("tests/goldens").join(golden), &args);
        assert!(out.contains("passed: tolerance 1e-5"), "{args}: {out}");
    }
}

#[test]
fn a_corrupted_expectation_fails() {
    let dir = repository("tests/goldens/llama-gqa");
    let folder = tempfile::tempdir().unwrap();
    let mut logits = SafeTensorsFile::open(dir.join("io.safetensors")).unwrap().read("logits").unwrap();
    let last = logits.data.len() - 1;
    for (wrong, word) in [(logits.data[last] + 0.01, "above tolerance"), (f64::NAN, "NaN")] {
        logits.data[last] = wrong;
        let file = folder.path().join("wrong.safetensors");
        store::write(&file, &[("logits", Stored::F32, &logits)]).unwrap();
        for command in ["run", "verify"] {
            let ran = line(&dir, &format!("{command} . --inputs io.safetensors --expect {}", file.display()));
            assert_eq!((ran.code, ran.err.as_str()), (1, ""), "{ran:#?}");
            assert!(ran.out.contains("FAILED") && ran.out.contains(word), "{ran:#?}");
        }
    }
}

#[test]
fn the_decoder_is_as_long_as_its_flag_says() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let model = repository("examples/flan-t5-xl");
    let model = model.display();
    let lengths = "--seq 512 --target-seq 128";
    let out = said(at, &format!("plan {model} --gpus 8 {lengths} --strategy ulysses -o plan.json"));
    assert!(out.contains("512 tokens and 128 of the target"), "{out}");
    let plan: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(at.join("plan.json")).unwrap()).unwrap();
    assert_eq!(plan["workload"]["target_sequence"], 128);
    assert!(said(at, "run plan.json --shrink").contains("passed"));
    assert!(said(at, "verify plan.json --shrink").contains("passed"));
    let padded = format!("plan {model} --gpus 8 --seq 512 --target-seq 100 --strategy ulysses");
    assert!(said(at, &padded).contains("sequence t is padded from 100 to 104 tokens (+4.00 %)"));
    let few = "--seq 512 --target-seq 7 --strategy ulysses --uneven-sequence";
    let few = line(at, &format!("plan {model} --gpus 8 {few}"));
    assert!(few.err.contains("t = 7 tokens") && few.err.contains("use --target-seq 8"), "{few:#?}");
    let llama = repository("examples/llama-3-8b");
    let llama = line(at, &format!("plan {} --gpus 8 {lengths}", llama.display()));
    assert!(llama.code == 2 && llama.err.contains("a llama has one sequence"), "{llama:#?}");
}

#[test]
fn a_plan_finds_the_weights_beside_the_model_it_was_made_from() {
    let goldens = repository("tests/goldens");
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let copy = at.join("model");
    std::fs::create_dir(&copy).unwrap();
    for file in ["config.json", "model.safetensors", "io.safetensors"] {
        std::fs::copy(goldens.join("llama-gqa").join(file), copy.join(file)).unwrap();
    }
    let io = SafeTensorsFile::open(copy.join("io.safetensors")).unwrap();
    let shape = io.shape("input_ids").unwrap();
    let (batch, seq) = (shape[0], shape[1]);
    said(
        at,
        &format!(
            "plan model --cluster cpu --gpus 2 --seq {seq} --batch {batch} --dtype f32 --strategy ulysses --logits all -o plan.json"
        ),
    );
    let run = "run plan.json --inputs model/io.safetensors --expect model/io.safetensors --tolerance 1e-5";
    let out = said(at, run);
    assert!(out.contains("weights from file, inputs from file"), "{out}");
    // From elsewhere, too: the path is relative to the plan.
    let elsewhere = tempfile::tempdir().unwrap();
    let (plan, io) = (at.join("plan.json"), copy.join("io.safetensors"));
    let (plan, io) = (plan.display(), io.display());
    let out = said(elsewhere.path(), &format!("run {plan} --inputs {io} --expect {io} --tolerance 1e-5"));
    assert!(out.contains("weights from file"), "{out}");
    // A description that changed since is another model, whose weights are not taken.
    let config = std::fs::read_to_string(copy.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    config["rms_norm_eps"] = serde_json::json!(0.5);
    std::fs::write(copy.join("config.json"), config.to_string()).unwrap();
    assert!(said(at, "run plan.json --inputs model/io.safetensors").contains("weights random"));
}
