//! Files that are missing, cut, or say what cannot be: each is a diagnostic, and none is believed.

use std::path::Path;

use ithaca_kernels::Tensor;
use ithaca_kernels::store::{self, SafeTensorsFile, Stored, TensorSource};
use ithaca_passes::plan::Plan;
use ithaca_passes::registry::Registry;
use serde_json::{Value, json};

use super::{refused, repository, said, workplace};
use crate::tier;

/// A copy of a golden that may be spoilt.
fn golden(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors", "io.safetensors"] {
        std::fs::copy(repository("tests/goldens").join(name).join(file), folder.path().join(file)).unwrap();
    }
    folder
}

const RUN: &str = "run . --inputs io.safetensors --expect io.safetensors";

#[test]
fn files_that_are_missing_or_folders() {
    let folder = workplace();
    let at = folder.path();
    std::fs::create_dir(at.join("empty")).unwrap();
    for arguments in [
        "plan nowhere --gpus 2 --seq 64",
        "plan empty --gpus 2 --seq 64",
        "plan examples/gpt2/nowhere.json --gpus 2 --seq 64",
        "plan examples/gpt2 --gpus 2 --seq 64 --cluster nowhere.toml",
        "plan examples/gpt2 --gpus 2 --seq 64 --cluster ./empty",
        "emit nowhere.json --target ir",
        "emit empty --target ir",
        "run nowhere --seq 64",
        "run nowhere.json",
        "run nowhere.ith",
        "run empty --seq 64",
        "run examples/gpt2 --inputs nowhere.safetensors",
        "run examples/gpt2 --inputs empty",
        "run examples/gpt2 --seq 16 --shrink --weights nowhere",
        "run examples/gpt2 --seq 16 --shrink --weights empty",
        "run examples/gpt2 --seq 16 --shrink --expect nowhere.safetensors",
        "verify nowhere.json",
        "verify empty --seq 64",
        "explain nowhere.json",
        "explain empty",
        "diff nowhere.json nowhere.json",
        "opt nowhere.ith",
        "opt empty",
    ] {
        refused(at, arguments);
    }
}

#[test]
fn checkpoints_cut_anywhere() {
    for (file, arguments) in [
        ("model.safetensors", RUN),
        ("io.safetensors", RUN),
        ("io.safetensors", "run . --seq 32 --expect io.safetensors"),
    ] {
        let folder = golden("llama-gqa");
        let path = folder.path().join(file);
        let whole = std::fs::read(&path).unwrap();
        for cut in [0, 1, 7, 8, 9, 40, 1000, whole.len() / 2, whole.len() - 1] {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let err = refused(folder.path(), arguments);
            assert!(err.contains(file), "{file} cut at {cut}: {err}");
        }
        // A header that claims to be longer than anything.
        let mut claims = whole.clone();
        claims[..8].fill(0xff);
        std::fs::write(&path, &claims).unwrap();
        refused(folder.path(), arguments);
    }
}

/// Writes a checkpoint anew with one tensor changed or left out.
fn rewrite(path: &Path, name: &str, change: impl Fn(Tensor<f64>) -> Option<(Stored, Tensor<f64>)>) {
    let file = SafeTensorsFile::open(path).unwrap();
    let mut tensors = Vec::new();
    for other in file.names() {
        let tensor = file.read(&other).unwrap();
        if other == name {
            tensors.extend(change(tensor).map(|(stored, tensor)| (other.clone(), stored, tensor)))
        } else {
            tensors.push((other.clone(), Stored::F32, tensor))
        }
    }
    let tensors: Vec<_> = tensors.iter().map(|(n, s, t)| (n.as_str(), *s, t)).collect();
    store::write(path, &tensors).unwrap();
}

#[test]
fn checkpoints_that_are_another_models() {
    let name = "model.layers.0.self_attn.q_proj.weight";
    let missing = golden("llama-gqa");
    rewrite(&missing.path().join("model.safetensors"), name, |_| None);
    assert!(refused(missing.path(), RUN).contains(name));

    let wrong = golden("llama-gqa");
    rewrite(&wrong.path().join("model.safetensors"), name, |t| {
        let shape = vec![t.shape[1], t.shape[0] / 2, 2];
        Some((Stored::F32, Tensor { shape, data: t.data }))
    });
    let err = refused(wrong.path(), RUN);
    assert!(err.contains(name) && err.contains("64"), "{err}");

    let short = golden("llama-gqa");
    rewrite(&short.path().join("model.safetensors"), name, |t| {
        let rows = t.shape[0] - 1;
        Some((
            Stored::F32,
            Tensor { shape: vec![rows, t.shape[1]], data: t.data[..rows * t.shape[1]].to_vec() },
        ))
    });
    assert!(refused(short.path(), RUN).contains(name));

    // Tokens that the vocabulary has not, and tokens that are no whole numbers.
    for token in [-1.0, 128.0, 1e9] {
        let folder = golden("llama-gqa");
        let ids = folder.path().join("io.safetensors");
        let mut tokens = SafeTensorsFile::open(&ids).unwrap().read("input_ids").unwrap();
        tokens.data[3] = token;
        store::write(&ids, &[("input_ids", Stored::I64, &tokens)]).unwrap();
        refused(folder.path(), "run . --inputs io.safetensors");
        refused(folder.path(), "verify . --inputs io.safetensors");
    }
    let folder = golden("llama-gqa");
    let ids = folder.path().join("io.safetensors");
    let mut tokens = SafeTensorsFile::open(&ids).unwrap().read("input_ids").unwrap();
    tokens.data[3] = 1.5;
    store::write(&ids, &[("input_ids", Stored::F32, &tokens)]).unwrap();
    refused(folder.path(), "run . --inputs io.safetensors");
    refused(folder.path(), "verify . --inputs io.safetensors");
    // Expectations of something else, or of another length.
    store::write(&ids, &[("something", Stored::F32, &tokens)]).unwrap();
    refused(folder.path(), "run . --seq 32 --expect io.safetensors");
}

#[test]
fn configurations_that_are_none() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let base: Value = serde_json::from_str(
        &std::fs::read_to_string(repository("examples/llama-3-8b/config.json")).unwrap(),
    )
    .unwrap();
    let mut texts: Vec<Vec<u8>> = ["", "{", "[]", "null", "3", "\"llama\"", "{}", "not json", "\u{0}"]
        .map(|t| t.as_bytes().to_vec())
        .into();
    texts.push(vec![0xff, 0xfe, 0x00]);
    texts.push("[".repeat(100_000).into_bytes());
    for (field, values) in [
        (
            "num_hidden_layers",
            [
                json!(1_000_000_000),
                json!(-1),
                json!(0),
                json!(1.5),
                json!("32"),
                json!(u64::MAX),
                Value::Null,
            ],
        ),
        (
            "hidden_size",
            [json!(0), json!(-4096), json!(4097), json!(1e300), json!([4096]), json!(u64::MAX), json!(true)],
        ),
        (
            "num_attention_heads",
            [json!(0), json!(-32), json!(33), json!(0.5), json!({}), json!(u64::MAX), json!("a")],
        ),
        (
            "num_key_value_heads",
            [json!(0), json!(-8), json!(5), json!(64), json!({}), json!(u64::MAX), json!("a")],
        ),
        (
            "vocab_size",
            [json!(0), json!(-1), json!(1.5), json!("x"), json!([]), json!(u64::MAX), json!(true)],
        ),
        (
            "rms_norm_eps",
            [json!(-1.0), json!("x"), json!([]), json!({}), json!(true), json!("nan"), json!("inf")],
        ),
        ("rope_theta", [json!(0), json!(-1.0), json!("x"), json!([]), json!({}), json!(true), json!("inf")]),
        (
            "model_type",
            [json!("unheard_of"), json!(1), json!([]), json!({}), json!(true), json!(""), Value::Null],
        ),
        (
            "hidden_act",
            [json!("unheard_of"), json!(1), json!([]), json!({}), json!(true), json!(""), json!("softplus")],
        ),
    ] {
        for value in values {
            let mut config = base.clone();
            config[field] = value;
            texts.push(config.to_string().into_bytes());
        }
    }
    for text in texts {
        std::fs::write(at.join("config.json"), &text).unwrap();
        let shown = String::from_utf8_lossy(&text[..text.len().min(1500)]).into_owned();
        for arguments in ["plan . --gpus 2 --seq 64", "run . --shrink", "verify config.json --seq 64"] {
            let before = refused_or_shown(at, arguments, &shown);
            assert!(!before.is_empty());
        }
    }
}

/// As [`refused`], with the configuration in the message.
fn refused_or_shown(at: &Path, arguments: &str, shown: &str) -> String {
    let ran = super::line(at, arguments);
    assert_eq!((ran.code, ran.out.as_str()), (2, ""), "{arguments}: {ran:#?}\n{shown}");
    ran.err
}

#[test]
fn configurations_cut_anywhere() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let config = std::fs::read_to_string(repository("examples/gpt2/config.json")).unwrap();
    for cut in (0..config.trim_end().len()).step_by(29) {
        std::fs::write(at.join("config.json"), &config[..cut]).unwrap();
        refused(at, "plan . --gpus 2 --seq 64");
    }
}

#[test]
fn programs_cut_anywhere() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    for file in ["llama_ulysses", "schedule"] {
        let source =
            std::fs::read_to_string(repository(&format!("tests/files/roundtrip/{file}.ith"))).unwrap();
        let len = source.trim_end().len();
        for cut in (0..len).step_by(len / 40).filter(|&i| source.is_char_boundary(i)) {
            std::fs::write(at.join("cut.ith"), &source[..cut]).unwrap();
            for arguments in ["opt cut.ith", "opt cut.ith -o out.ith", "run cut.ith", "verify cut.ith"] {
                refused(at, arguments);
            }
        }
        // Whole, but a schedule or laid out already: neither is a program to run.
        std::fs::write(at.join("cut.ith"), &source).unwrap();
        refused(at, "run cut.ith");
        refused(at, "opt cut.ith --pipeline shard{strategy=ulysses,ulysses=2}");
    }
    std::fs::write(at.join("cut.ith"), [0xff, 0xfe]).unwrap();
    refused(at, "opt cut.ith");
}

/// A plan of a small workload, as text.
fn plan(at: &Path) -> String {
    said(
        at,
        "plan examples/llama-3-8b --gpus 8 --seq 1024 --strategy ulysses+megatron-tp --mesh ulysses=4,tp=2 --json",
    )
}

const READERS: [&str; 4] =
    ["emit plan.json --target ir", "run plan.json --shrink", "explain plan.json", "verify plan.json"];

#[test]
fn plans_cut_anywhere() {
    let folder = workplace();
    let at = folder.path();
    let text = plan(at);
    for cut in tier::one_in(7, 0..text.trim_end().len()) {
        if let Some(part) = text.get(..cut) {
            assert!(Plan::from_json(&Registry::default(), "plan.json", part).is_err(), "cut at {cut}");
        }
    }
    for cut in (0..text.trim_end().len()).step_by(text.len() / 12) {
        std::fs::write(at.join("plan.json"), &text.as_bytes()[..cut]).unwrap();
        for reader in READERS {
            refused(at, reader);
        }
        refused(at, "diff plan.json plan.json");
    }
}

#[test]
fn fields_of_plans_that_are_missing_or_of_another_kind() {
    let folder = workplace();
    let plan: Value = serde_json::from_str(&plan(folder.path())).unwrap();
    let read = |plan: &Value| Plan::from_json(&Registry::default(), "plan.json", &plan.to_string());
    read(&plan).unwrap();
    for field in plan.as_object().unwrap().keys() {
        let mut without = plan.clone();
        without.as_object_mut().unwrap().remove(field);
        let error = read(&without).expect_err(field);
        assert!(error.message.contains(field.as_str()), "{}", error.message);
        for value in
            [json!(null), json!("x"), json!(-1), json!(1.5), json!([3]), json!({"x": 1}), json!(true)]
        {
            let mut changed = plan.clone();
            changed[field] = value.clone();
            if changed[field] == plan[field] {
                continue;
            }
            assert!(read(&changed).is_err(), "{field} = {value}");
        }
    }
    let mut more = plan.clone();
    more["surprise"] = json!(1);
    assert!(read(&more).is_err());
}

#[test]
fn plans_that_contradict_themselves() {
    let folder = workplace();
    let at = folder.path();
    let plan: Value = serde_json::from_str(&plan(at)).unwrap();
    let axis = |name: &str, size: u64| json!({"axis": name, "size": size});
    let edits: &[(&str, Value)] = &[
        ("/version", json!(1)),
        ("/version", json!(0)),
        ("/gpus", json!(4)),
        ("/gpus", json!(0)),
        ("/mesh/0/size", json!(0)),
        ("/mesh/0/size", json!(2)),
        ("/mesh/0/size", json!(u64::MAX)),
        ("/mesh/0/axis", json!("tp")),
        ("/mesh/0/axis", json!("ring")),
        ("/mesh/0/axis", json!("")),
        ("/mesh", json!([])),
        ("/mesh", json!([axis("ulysses", 2), axis("tp", 4)])),
        ("/mesh", json!([axis("ulysses", 4), axis("tp", 2), axis("ring", 1)])),
        ("/mesh", json!([axis("ulysses", 8)])),
        ("/strategy", json!("ulysses")),
        ("/strategy", json!("unheard-of")),
        ("/strategy", json!("")),
        ("/strategy", json!("ulysses+ulysses")),
        ("/strategy", json!("ulysses+megatron-tp-sp")),
        ("/options", json!({"heads": "uneven"})),
        ("/options", json!({"sequence": "pad"})),
        ("/options", json!({"zero": "9"})),
        ("/pipeline", json!("")),
        ("/pipeline", json!("shard{strategy=ulysses,ulysses=8},lower-reshards")),
        ("/workload/sequence", json!(0)),
        ("/workload/sequence", json!(1u64 << 50)),
        ("/workload/batch", json!(0)),
        ("/workload/dtype", json!("i32")),
        ("/workload/dtype", json!("f7")),
        ("/workload/mode", json!("dream")),
        ("/model/digest", json!("0")),
        ("/model/config/num_hidden_layers", json!(31)),
        ("/cluster/name", json!(7)),
    ];
    for (pointer, value) in edits {
        let mut edited = plan.clone();
        *edited.pointer_mut(pointer).unwrap_or_else(|| panic!("a plan has {pointer}")) = value.clone();
        std::fs::write(at.join("plan.json"), edited.to_string()).unwrap();
        for reader in READERS {
            let ran = super::line(at, reader);
            assert_eq!((ran.code, ran.out.as_str()), (2, ""), "{pointer} = {value}, {reader}: {ran:#?}");
        }
    }
    // What a plan states is what its program gives, or it is another program's plan.
    let stated: &[(&str, Value)] = &[
        ("/collectives", json!([])),
        ("/collectives/0/bytes_sent_per_rank", json!(7)),
        ("/dimensions/0/size", json!(7)),
        ("/attention/0/movement", json!("rotate")),
        ("/attention/0/strategy", json!("ring")),
        ("/memory/total", json!(7)),
        ("/memory/usable", json!(7)),
        ("/memory/largest/0/bytes", json!(7)),
        ("/time/step_seconds", json!(7.5)),
        ("/time/exposed_seconds", json!(7.5)),
        ("/time/communication", json!([])),
        ("/notes", json!(["all is well"])),
        ("/alternatives", json!([])),
        ("/alternatives/0/outcome/step_seconds", json!(7.5)),
        ("/alternatives/0/outcome/memory_bytes", json!(7)),
        ("/alternatives/0/outcome/reason", json!("because")),
        ("/cluster/accelerator/reserve_fraction/value", json!(0.5)),
        ("/cluster/accelerator/memory_bandwidth/value", json!(7e11)),
    ];
    for (pointer, value) in stated {
        let mut edited = plan.clone();
        *edited.pointer_mut(pointer).unwrap_or_else(|| panic!("a plan has {pointer}")) = value.clone();
        std::fs::write(at.join("plan.json"), edited.to_string()).unwrap();
        refused(at, "emit plan.json --target ir");
        refused(at, "emit plan.json --target cuda -o out");
        for reader in ["run plan.json --shrink", "verify plan.json", "explain plan.json"] {
            let ran = super::line(at, reader);
            assert_eq!((ran.code, ran.out.as_str()), (2, ""), "{pointer}, {reader}: {ran:#?}");
            let field = pointer.split('/').nth(1).filter(|&field| field != "cluster").unwrap_or("");
            assert!(
                ran.err.contains("error[M33]") && ran.err.contains(field),
                "{pointer}, {reader}: {ran:#?}"
            );
        }
    }
}
