//! `run`: what goes wrong on the way is named, nothing hangs, and what ran when is written down.

use ithaca_kernels::store::{self, SafeTensorsFile, Stored, TensorSource};
use serde_json::Value;

use super::{line, listing, refused, repository, said, workplace};

const RUN: &str = "run examples/gpt2 --seq 16 --strategy ulysses --mesh ulysses=2 --shrink";

#[test]
fn a_rank_that_fails_ends_the_run_and_is_named() {
    let folder = workplace();
    let error = refused(folder.path(), &format!("{RUN} --fault 1:block/3:1"));
    assert!(error.contains("[C13]"), "{error}");
    assert!(error.contains("rank 1 failed at task 3 of `block` at layer 1"), "{error}");
    // Somebody waits for it, and gives up.
    let error = refused(folder.path(), &format!("{RUN} --fault 1:block/3=hang --timeout 1"));
    assert!(error.contains("waits for rank 1, longer than the timeout"), "{error}");
}

#[test]
fn places_of_faults_that_are_none_are_refused() {
    let folder = workplace();
    for (fault, says) in [
        ("2:block/3", "ranks are 0 to 1"),
        ("1:blok/3", "there are "),
        ("1:block/3000", "has no task 3000: it has "),
        ("1:block/3:99", "it does for layers 0.."),
        ("block/3", "RANK:FRAME/TASK"),
        ("1:block", "it names no task"),
        ("1:block/3=crash", "there is no kind `crash`"),
    ] {
        let error = refused(folder.path(), &format!("{RUN} --fault {fault}"));
        assert!(error.contains("[C00]") && error.contains(says), "{fault}: {error}");
    }
}

#[test]
fn tokens_outside_the_vocabulary_have_a_code_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors", "io.safetensors"] {
        let from = repository("tests/goldens/llama-gqa").join(file);
        std::fs::copy(from, folder.path().join(file)).unwrap();
    }
    let path = folder.path().join("io.safetensors");
    let mut tokens = SafeTensorsFile::open(&path).unwrap().read("input_ids").unwrap();
    tokens.data[3] = 1e6;
    store::write(&path, &[("input_ids", Stored::I64, &tokens)]).unwrap();
    for layout in ["", "--strategy ulysses --mesh ulysses=2"] {
        for command in ["run", "verify"] {
            let error = refused(folder.path(), &format!("{command} . --inputs io.safetensors {layout}"));
            assert!(error.contains("error[C12]"), "{command} {layout}: {error}");
        }
    }
}

#[test]
fn nothing_that_a_shrunk_model_writes_is_nan() {
    let folder = workplace();
    let ran = said(folder.path(), &format!("{RUN} --mode train --train optimizer=none --look-for-nan"));
    assert!(ran.contains("passed"), "{ran}");
}

#[test]
fn plan_and_run_are_traced_alike() {
    let folder = workplace();
    let at = folder.path();
    said(at, "plan examples/gpt2 --gpus 2 --seq 16 --strategy ulysses --mesh ulysses=2 -o plan.json");
    let planned = said(at, "emit plan.json --target trace");
    said(at, "run plan.json --shrink --trace run.json");
    let measured = std::fs::read_to_string(at.join("run.json")).unwrap();
    let events = |text: &str, ph: &str| -> Vec<Value> {
        let trace: Value = serde_json::from_str(text).unwrap();
        let all = trace["traceEvents"].as_array().unwrap().clone();
        all.into_iter().filter(|e| e["ph"] == ph).collect()
    };
    let measured_tasks = events(&measured, "X");
    let fields = |event: &Value| event.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(fields(&measured_tasks[0]), fields(&events(&planned, "X")[0]));
    for rank in 0..2 {
        for stream in 0..2 {
            let own =
                measured_tasks.iter().filter(|e| (&e["pid"], &e["tid"]) == (&rank.into(), &stream.into()));
            assert!(own.count() > 0, "rank {rank}, stream {stream}");
        }
    }
    assert!(measured_tasks.iter().any(|e| e["name"].as_str().unwrap().starts_with("all_to_all $")));
    assert!(measured.contains("rank 1 (measured)"));
    // A step goes on where the one before ended.
    let train = "--mode train --train optimizer=none";
    let out = said(at, &format!("{RUN} {train} --steps 2 --trace steps.json"));
    assert!(out.contains("wrote steps.json"), "{out}");
    let steps = events(&std::fs::read_to_string(at.join("steps.json")).unwrap(), "X");
    let one = said(at, &format!("{RUN} {train} --trace one.json"));
    assert!(one.contains("wrote one.json"), "{one}");
    let one = events(&std::fs::read_to_string(at.join("one.json")).unwrap(), "X");
    let (shown, tasks): (Vec<&Value>, Vec<&Value>) = steps.iter().partition(|e| e["cat"] == "step");
    assert_eq!((tasks.len(), shown.len()), (2 * one.len(), 2 * 2), "each of two ranks shows two steps");
    for number in [1, 2] {
        let own = tasks.iter().filter(|e| e["args"]["step"] == number);
        assert_eq!(own.count(), one.len(), "step {number}");
    }
    // What an axis of one rank would carry is in neither.
    said(at, "plan examples/gpt2 --gpus 1 --seq 16 --strategy ulysses --mesh ulysses=1 -o one-rank.json");
    let planned = said(at, "emit one-rank.json --target trace");
    said(at, "run one-rank.json --shrink --trace one-rank-run.json");
    let measured = std::fs::read_to_string(at.join("one-rank-run.json")).unwrap();
    for trace in [planned, measured] {
        assert!(!events(&trace, "X").iter().any(|e| e["cat"] == "all_to_all"), "{trace}");
    }
    assert!(line(at, &format!("{RUN} --trace nowhere/run.json")).err.contains("[C01]"));
    assert_eq!(listing(at).iter().filter(|path| path.ends_with("run.json")).count(), 1);
}
