//! Checkpoints by the command line: training that is saved and resumed, weights that are cut for ranks and joined.

use std::path::Path;

use ithaca_kernels::store::{About, Checkpoint, SafeTensorsFile, Stored, TensorSource, shards};
use ithaca_kernels::{Tensor, store};
use serde_json::{Value, json};

use super::{line, refused, repository, said};
use crate::tier;

/// What the order of sums leaves of ten steps in single precision: `‖a − b‖ / ‖b‖` of each tensor.
pub(super) const TOLERANCE: f64 = 1e-5;

const STEP: &str = "run . --mode train --seq 16 --batch 4 --train clip=1.0";
const RING: &str = "--strategy ring --mesh ring=4";
const DP_ULYSSES: &str = "--strategy data-parallel+ulysses --mesh dp=2,ulysses=2";

/// A folder with a tiny model's configuration; its weights are random, and the same every time.
fn tiny(dtype: &str) -> tempfile::TempDir {
    let config = json!({
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 32,
        "tie_word_embeddings": false, "torch_dtype": dtype,
    });
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    folder
}

/// A folder with what a golden has.
fn golden(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors", "io.safetensors"] {
        let from = repository("tests/goldens").join(name).join(file);
        std::fs::copy(from, folder.path().join(file)).unwrap();
    }
    folder
}

pub(super) fn bytes(folder: &Path, file: &str) -> Vec<u8> {
    std::fs::read(folder.join(file)).unwrap()
}

/// That `b` has the tensors of `a`, bit for bit.
pub(super) fn same_tensors(folder: &Path, a: &str, b: &str) {
    let [a, b] = [a, b].map(|file| SafeTensorsFile::open(folder.join(file)).unwrap());
    assert_eq!(a.names(), b.names());
    for name in a.names() {
        assert_eq!(a.raw(&name).unwrap(), b.raw(&name).unwrap(), "{name}");
    }
}

#[test]
fn training_that_is_resumed_under_another_plan_ends_where_it_would_have() {
    let folder = tiny("float32");
    let at = folder.path();
    said(at, &format!("{STEP} {RING} --steps 10 --save whole.safetensors"));
    said(at, &format!("{STEP} {DP_ULYSSES} --steps 5 --save five.safetensors"));
    let out = said(at, &format!("{STEP} {RING} --steps 5 --resume five.safetensors --save ten.safetensors"));
    assert!(out.contains("resumed from five.safetensors after step 5"), "{out}");
    let [whole, ten] =
        ["whole", "ten"].map(|f| SafeTensorsFile::open(at.join(format!("{f}.safetensors"))).unwrap());
    assert_eq!(whole.names(), ten.names());
    assert!(whole.names().iter().all(|name| !name.starts_with("grad.")), "gradients are not kept");
    let norm = |data: &[f64]| data.iter().map(|x| x * x).sum::<f64>().sqrt();
    for name in whole.names() {
        let (a, b) = (whole.read(&name).unwrap(), ten.read(&name).unwrap());
        let difference: Vec<f64> = a.data.iter().zip(&b.data).map(|(a, b)| a - b).collect();
        let error = norm(&difference) / norm(&a.data);
        assert!(error <= TOLERANCE, "{name}: {error:e}");
    }
}

#[test]
fn training_that_is_resumed_under_its_plan_is_the_uninterrupted_one_bit_for_bit() {
    let kinds = [("float32", ""), ("bfloat16", "--storage typed"), ("bfloat16", "")];
    for (dtype, storage) in tier::one_in(2, kinds) {
        let folder = tiny(dtype);
        let at = folder.path();
        let step = format!("{STEP} {DP_ULYSSES} --zero 2 {storage}");
        // Where states are changes no number.
        said(at, &format!("{step} --offload optimizer --steps 4 --save offloaded.safetensors"));
        let ran = |args: &str| said(at, &format!("{step} {args}"));
        ran("--steps 4 --save whole.safetensors");
        ran("--steps 2 --save half.safetensors");
        ran("--steps 2 --resume half.safetensors --save there.safetensors");
        for other in ["there.safetensors", "offloaded.safetensors"] {
            assert!(bytes(at, "whole.safetensors") == bytes(at, other), "{dtype} {storage} {other}");
        }
        let saved = SafeTensorsFile::open(at.join("half.safetensors")).unwrap();
        let weight = saved.entry("model.layers.0.self_attn.q_proj.weight").unwrap();
        let narrow = dtype == "bfloat16" && !storage.is_empty();
        assert_eq!(weight.stored, if narrow { Stored::BF16 } else { Stored::F32 });
    }
}

#[test]
fn a_checkpoint_of_training_is_cut_joined_and_resumed() {
    let folder = tiny("float32");
    let at = folder.path();
    said(at, &format!("{STEP} {DP_ULYSSES} --steps 2 --save two.safetensors"));
    for (i, layout) in [
        "--strategy data-parallel+ulysses --mesh dp=2,ulysses=2 --zero 1",
        "--strategy data-parallel+ulysses --mesh dp=2,ulysses=2 --zero 2",
        "--strategy data-parallel+ulysses --mesh dp=2,ulysses=2 --zero 3",
        "--strategy megatron-tp-sp --mesh tp=2",
    ]
    .iter()
    .enumerate()
    {
        let out = said(
            at,
            &format!("shard-weights . --mode train {layout} --weights two.safetensors -o shards{i}"),
        );
        assert!(!out.contains("left out"), "{layout}: {out}");
        said(at, &format!("merge-weights shards{i} -o joined{i}.safetensors"));
        same_tensors(at, "two.safetensors", &format!("joined{i}.safetensors"));
        let size = |file: &str| std::fs::metadata(at.join(file)).unwrap().len();
        let part = size(&format!("shards{i}/rank-00000.safetensors"));
        assert!(part < size("two.safetensors"), "{layout}: a rank has {part} bytes");
    }
    said(at, &format!("{STEP} {RING} --resume joined2.safetensors --save three"));
    said(at, &format!("{STEP} {RING} --resume two.safetensors --save also-three"));
    assert!(bytes(at, "three") == bytes(at, "also-three"));
    // A plan without an optimizer takes the weights alone.
    let out =
        said(at, "shard-weights . --strategy megatron-tp --mesh tp=2 --weights two.safetensors -o prefill");
    assert!(out.contains("do not belong to the plan and are omitted"), "{out}");
}

#[test]
fn weights_are_cut_and_joined_under_every_plan() {
    let cases = [
        ("llama-gqa", "--strategy data-parallel --mesh dp=2"),
        ("llama-gqa", "--strategy ulysses --mesh ulysses=8"),
        ("llama-gqa", "--strategy ulysses+megatron-tp-sp --mesh ulysses=2,tp=2"),
        ("phi3-fused", "--strategy megatron-tp --mesh tp=3 --uneven-heads"),
        ("phi3-fused", "--strategy megatron-tp --mesh tp=3 --pad-heads"),
        ("gpt-neox", "--strategy megatron-tp --mesh tp=3 --pad-heads"),
        ("llama-gqa", "--strategy ulysses --mesh ulysses=3 --pad-heads"),
        ("qwen2-late-windows", "--strategy megatron-tp --mesh tp=6 --pad-heads"),
        ("llama-biases-one-kv-head", "--strategy megatron-tp --mesh tp=4"),
        ("qwen2-tied-mixed-windows", "--strategy megatron-tp-sp --mesh tp=4"),
        ("gpt2", "--strategy megatron-tp --mesh tp=2"),
        ("gpt-neox", "--strategy megatron-tp --mesh tp=4"),
        ("phi3-fused", "--strategy megatron-tp-sp --mesh tp=2"),
        ("phi3-fused", "--mode train --strategy data-parallel+megatron-tp --mesh dp=2,tp=2 --zero 3"),
        ("bert", "--strategy ulysses --mesh ulysses=2"),
        ("t5", "--strategy megatron-tp --mesh tp=2"),
        ("mixtral", "--strategy ep --mesh ep=4"),
        ("qwen3-moe", "--strategy ep --mesh ep=2"),
        ("deepseek-v3", "--strategy ep --mesh ep=4"),
    ];
    let mut wrong = Vec::new();
    for (name, layout) in cases {
        let folder = golden(name);
        let at = folder.path();
        let cut = line(at, &format!("shard-weights . {layout} --weights . -o shards"));
        if cut.code != 0 {
            wrong.push(format!("{name} {layout}: {}", cut.err));
            continue;
        }
        if cut.out.contains("left out") {
            wrong.push(format!("{name} {layout}: {}", cut.out));
        }
        said(at, "merge-weights shards -o joined.safetensors");
        same_tensors(at, "model.safetensors", "joined.safetensors");
        let [model, joined] = ["model", "joined"]
            .map(|name| SafeTensorsFile::open(at.join(format!("{name}.safetensors"))).unwrap());
        assert_eq!(joined.about(), model.about());
        if bytes(at, "model.safetensors") != bytes(at, "joined.safetensors") {
            wrong.push(format!("{name} {layout}: other bytes"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn joined_weights_run() {
    let folder = golden("llama-gqa");
    let at = folder.path();
    said(at, "shard-weights . --strategy megatron-tp --mesh tp=2 --weights model.safetensors -o shards");
    std::fs::remove_file(at.join("model.safetensors")).unwrap();
    said(at, "merge-weights shards -o model.safetensors");
    said(at, "run . --inputs io.safetensors --expect io.safetensors --strategy ring --mesh ring=4");
}

#[test]
fn experts_that_are_stored_as_one_tensor_stay_so() {
    let folder = golden("mixtral");
    let at = folder.path();
    let file = SafeTensorsFile::open(at.join("model.safetensors")).unwrap();
    let experts = ".block_sparse_moe.experts.";
    let mut tensors: Vec<(String, Tensor<f64>)> = Vec::new();
    for name in file.names().iter().filter(|name| !name.contains(experts)) {
        tensors.push((name.replace(".block_sparse_moe.", ".mlp."), file.read(name).unwrap()));
    }
    let layers = file.names().iter().filter(|name| name.ends_with("q_proj.weight")).count();
    for layer in 0..layers {
        for (fused, matrices) in [("gate_up_proj", &["w1", "w3"][..]), ("down_proj", &["w2"])] {
            let mut data = Vec::new();
            let mut shape = Vec::new();
            for expert in 0..4 {
                for matrix in matrices {
                    let name = format!("model.layers.{layer}{experts}{expert}.{matrix}.weight");
                    let tensor = file.read(&name).unwrap();
                    shape = vec![4, tensor.shape[0] * matrices.len(), tensor.shape[1]];
                    data.extend(tensor.data);
                }
            }
            tensors.push((format!("model.layers.{layer}.mlp.experts.{fused}"), Tensor::new(shape, data)));
        }
    }
    let stored: Vec<_> = tensors.iter().map(|(name, t)| (name.as_str(), Stored::F32, t)).collect();
    store::write(&at.join("model.safetensors"), &stored).unwrap();
    let out = said(at, "shard-weights . --strategy ep --mesh ep=2 -o shards");
    assert!(!out.contains("left out"), "{out}");
    said(at, "merge-weights shards -o joined.safetensors");
    same_tensors(at, "model.safetensors", "joined.safetensors");
}

#[test]
fn what_no_rank_takes_of_a_tensor_is_kept_beside() {
    let program = r#"ithaca 1 program
model "a third of a fused tensor"
dim b = 2
dim s = 4
dim h = 4
dim d = 6
dim m = 5

func @main() {
  %x = input {name="x"} : f32[b s m]
  %w = param {name="qkv", stored=[72, 5], view=[4, 3, 6, 5], window=[0..4, 1..2, 0..6, 0..5]} : f32[h d m]
  %q = einsum %x, %w : f32[b s h d]
  %o = attention %q, %q, %q {heads=h, kv_heads=h, queries=s, keys=s, width=d, mask=causal, scale=0.25} : f32[b s h d]
  return o = %o
}
"#;
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    std::fs::write(at.join("third.ith"), program).unwrap();
    let qkv = Tensor::new(vec![72, 5], (0..360).map(f64::from).collect());
    store::write(&at.join("model.safetensors"), &[("qkv", Stored::BF16, &qkv)]).unwrap();
    said(
        at,
        "shard-weights third.ith --strategy megatron-tp --mesh tp=2 --weights model.safetensors -o shards",
    );
    let part = SafeTensorsFile::open(at.join("shards").join(shards::rank_file(1))).unwrap();
    assert_eq!(part.shape("qkv").unwrap(), [2, 6, 5]);
    said(at, "merge-weights shards -o joined.safetensors");
    same_tensors(at, "model.safetensors", "joined.safetensors");
    std::fs::remove_file(at.join("shards").join(shards::REST)).unwrap();
    refused(at, "merge-weights shards -o again.safetensors");
}

/// Rewrites the header of a safetensors file.
fn edit(path: &Path, change: impl FnOnce(&mut Value)) {
    let file = std::fs::read(path).unwrap();
    let length = u64::from_le_bytes(file[..8].try_into().unwrap());
    let (header, data) = file[8..].split_at(usize::try_from(length).unwrap());
    let mut header: Value = serde_json::from_slice(header).unwrap();
    change(&mut header);
    let header = header.to_string().into_bytes();
    let mut all = (header.len() as u64).to_le_bytes().to_vec();
    all.extend(header);
    all.extend(data);
    std::fs::write(path, all).unwrap();
}

/// Changes what a rank's file says of its parts.
fn edit_parts(path: &Path, change: impl FnOnce(&mut Value)) {
    edit(path, |header| {
        let text = &mut header["__metadata__"]["ithaca.shard"];
        let mut shard: Value = serde_json::from_str(text.as_str().unwrap()).unwrap();
        change(&mut shard);
        *text = shard.to_string().into();
    });
}

#[test]
fn parts_that_do_not_go_together_are_refused() {
    let folder = golden("llama-gqa");
    let at = folder.path();
    let cut = |layout: &str, out: &str| said(at, &format!("shard-weights . {layout} -o {out}"));
    let (tp, dp) = ("--strategy megatron-tp --mesh tp=2", "--strategy data-parallel --mesh dp=2");
    let fresh = |layout: &str| {
        if at.join("shards").exists() {
            std::fs::remove_dir_all(at.join("shards")).unwrap();
        }
        cut(layout, "shards");
        at.join("shards").join(shards::rank_file(1))
    };
    let join = || refused(at, "merge-weights shards -o joined.safetensors");
    let name = "model.layers.1.self_attn.q_proj.weight";

    let file = fresh(tp);
    let whole = std::fs::read(&file).unwrap();
    std::fs::write(&file, &whole[..whole.len() - 4]).unwrap();
    let err = join();
    assert!(err.contains("C10") && err.contains("cut off"), "{err}");
    std::fs::remove_file(&file).unwrap();
    let err = join();
    assert!(err.contains("C10") && err.contains("rank-00001.safetensors"), "{err}");

    let file = fresh(tp);
    edit_parts(&file, |shard| {
        shard["parts"].as_object_mut().unwrap().remove(name).unwrap();
    });
    let err = join();
    assert!(err.contains("C15") && err.contains(name) && err.contains("[32, 0]"), "{err}");

    let file = fresh(dp);
    let mut changed = std::fs::read(&file).unwrap();
    *changed.last_mut().unwrap() ^= 1;
    std::fs::write(&file, changed).unwrap();
    let err = join();
    assert!(err.contains("C15") && err.contains("other bits"), "{err}");

    let file = fresh(tp);
    cut(dp, "others");
    std::fs::copy(at.join("others").join(shards::rank_file(1)), &file).unwrap();
    let err = join();
    assert!(err.contains("C15") && err.contains("belongs to the plan"), "{err}");

    let file = fresh(tp);
    std::fs::copy(at.join("shards").join(shards::rank_file(0)), &file).unwrap();
    assert!(join().contains("rank 0 of 2"));

    // Files that are none of parts, and numbers that no file has.
    let file = fresh(tp);
    std::fs::copy(at.join("model.safetensors"), &file).unwrap();
    assert!(join().contains("C15"));
    for (pointer, value) in [
        ("shape", json!([64, 1u64 << 40])),
        ("places", json!([[[0, 1u64 << 60, 1]], [[0, 64, 1]]])),
        ("stored", json!([1u64 << 60, 1u64 << 60])),
        ("of", json!("unknown")),
    ] {
        let file = fresh(tp);
        edit_parts(&file, |shard| shard["parts"][name][pointer] = value);
        assert!(join().contains("C15"), "{pointer}");
    }
    for text in ["", "{}", "[]", "{\"version\": 99}", "{\"version\": 1}"] {
        std::fs::write(at.join("shards").join(shards::INDEX), text).unwrap();
        assert!(join().contains("C15"), "{text}");
    }
    std::fs::remove_file(at.join("shards").join(shards::INDEX)).unwrap();
    assert!(join().contains("C10"));
    refused(at, "merge-weights absent -o joined.safetensors");
}

#[test]
fn an_index_that_asks_for_more_than_files_have_is_refused() {
    let folder = golden("llama-gqa");
    let at = folder.path();
    said(at, "shard-weights . --strategy megatron-tp --mesh tp=2 -o shards");
    let index = at.join("shards").join(shards::INDEX);
    let text = std::fs::read_to_string(&index).unwrap();
    for (name, shape) in [
        ("huge", json!([1u64 << 50])),
        ("stack.{expert}", json!([1u64 << 50, 0])),
        ("stack.{expert}", json!([])),
        ("wide", json!([1u64 << 60, 1u64 << 60])),
    ] {
        let mut document: Value = serde_json::from_str(&text).unwrap();
        document["tensors"][name] = json!({"dtype": "F32", "shape": shape});
        std::fs::write(&index, document.to_string()).unwrap();
        assert!(refused(at, "merge-weights shards -o joined.safetensors").contains("C15"), "{name}");
    }
}

#[test]
fn folders_that_cannot_be_written_are_left_as_they_are() {
    let folder = golden("llama-gqa");
    let at = folder.path();
    let cut = "shard-weights . --strategy megatron-tp --mesh tp=2";
    assert!(refused(at, &format!("{cut} -o absent/shards")).contains("C10"));
    assert!(refused(at, &format!("{cut} -o .")).contains("C01"));
    assert!(refused(at, &format!("{cut} -o config.json")).contains("C01"));
    assert!(refused(at, &format!("{cut} --weights absent -o shards")).contains("C10"));
    assert!(refused(at, &format!("{cut} --weights io.safetensors -o shards")).contains("C10"));
    said(at, &format!("{cut} -o shards"));
    assert!(refused(at, &format!("{cut} -o shards")).contains("C01"));
    refused(at, "merge-weights shards -o absent/joined.safetensors");
    refused(at, "merge-weights shards -o shards");
    assert!(refused(at, "run . --seq 16 --weights shards").contains("merge-weights"));
    let run = "run . --inputs io.safetensors --mode train";
    assert!(refused(at, &format!("{run} --save absent/x.safetensors")).contains("C10"));
    // The model itself is not replaced unless it is named.
    assert!(refused(at, &format!("{run} --save .")).contains("C01"));
    assert!(refused(at, "run . --inputs io.safetensors --save x.safetensors").contains("C16"));
    std::fs::create_dir(at.join("saved")).unwrap();
    said(at, &format!("{run} --save saved"));
    assert!(at.join("saved/model.safetensors").exists());
    said(at, &format!("{run} --resume saved --save saved/"));
}

/// What becomes of a tensor, and of its name.
type Change<'a> = dyn Fn(&str, Tensor<f64>) -> Option<(String, Tensor<f64>)> + 'a;

#[test]
fn what_training_cannot_continue_from_is_refused() {
    let folder = tiny("float32");
    let at = folder.path();
    said(at, &format!("{STEP} --save one.safetensors"));
    let checkpoint = Checkpoint::at(at.join("one.safetensors")).unwrap();
    let name = "model.layers.1.mlp.up_proj.weight";
    let moment = format!("optimizer.exp_avg.{name}");
    let rewrite = |change: &Change<'_>| {
        let tensors: Vec<(String, Tensor<f64>)> = checkpoint
            .names()
            .iter()
            .filter_map(|name| change(name, checkpoint.read(name).unwrap()))
            .collect();
        let stored: Vec<_> = tensors.iter().map(|(name, t)| (name.as_str(), Stored::F32, t)).collect();
        store::write_about(&at.join("other.safetensors"), &checkpoint.about(), &stored).unwrap();
        let err = refused(at, &format!("{STEP} {RING} --resume other.safetensors --save out.safetensors"));
        assert!(err.contains("C16"), "{err}");
        err
    };
    let err = rewrite(&|n, t| (n != moment).then(|| (n.to_owned(), t)));
    assert!(err.contains(&moment), "{err}");
    let err = rewrite(&|n, t| (n != name).then(|| (n.to_owned(), t)));
    assert!(err.contains(name), "{err}");
    let err = rewrite(&|n, t| (!n.starts_with("optimizer.")).then(|| (n.to_owned(), t)));
    assert!(err.contains("--weights"), "{err}");
    let err = rewrite(&|n, t| Some((if n == name { "unheard.of".to_owned() } else { n.to_owned() }, t)));
    assert!(err.contains("`unheard.of`"), "{err}");
    let err = rewrite(&|n, mut t| {
        if n == moment {
            t.shape.reverse();
        }
        Some((n.to_owned(), t))
    });
    assert!(err.contains(&moment) && err.contains("[16, 24]"), "{err}");

    let another: About = [("ithaca.checkpoint".to_owned(), "2".to_owned())].into();
    store::write_about(&at.join("other.safetensors"), &another, &[]).unwrap();
    assert!(refused(at, &format!("{STEP} --resume other.safetensors")).contains("version 2"));
    let whole = bytes(at, "one.safetensors");
    for n in [0, 7, 100, whole.len() / 2, whole.len() - 1] {
        std::fs::write(at.join("other.safetensors"), &whole[..n]).unwrap();
        assert!(refused(at, &format!("{STEP} --resume other.safetensors")).contains("C10"), "cut at {n}");
    }
    assert!(refused(at, &format!("{STEP} --resume absent.safetensors")).contains("C10"));
    assert!(refused(at, "run . --seq 16 --resume one.safetensors").contains("C16"));
}
