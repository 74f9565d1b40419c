//! Programs and layouts that once were refused or computed wrongly.

use ithaca_ir::{Module, text};
use ithaca_kernels::store::RandomTensors;
use ithaca_kernels::{compare, oracle};
use ithaca_passes::compile::compile;
use ithaca_passes::pass::Volume;
use ithaca_passes::shard::{ShardOptions, parse_mesh};

/// Attention over another sequence, in `main` alone, with no norm that would tell the residual stream.
const CROSS: &str = r#"ithaca 1 program
model "cross attention"
dim b = 2
dim s = 16
dim t = 24
dim m = 24
dim h = 8 granule 4
dim k = 2
dim d = 6

func @main() {
  %x = input {name="x"} : f64[b s m]
  %c = input {name="context"} : f64[b t m]
  %wq = param {name="wq"} : f64[h d m]
  %wk = param {name="wk"} : f64[k d m]
  %wv = param {name="wv"} : f64[k d m]
  %wo = param {name="wo"} : f64[h d m]
  %q = einsum %x, %wq : f64[b s h d]
  %k = einsum %c, %wk : f64[b t k d]
  %v = einsum %c, %wv : f64[b t k d]
  %a = attention %q, %k, %v {heads=h, kv_heads=k, queries=s, keys=t, width=d, mask=full, scale=0.4} : f64[b s h d]
  %o = einsum %a, %wo : f64[b s m]
  %y = add %x, %o : f64[b s m]
  return y = %y
}
"#;

/// How far ranks are from the whole program under a layout.
fn check(program: &Module, strategy: &str, mesh: &str) {
    let tensors = RandomTensors::of_module(program, 7);
    let whole = oracle::run::<f64>(program, &tensors, &tensors).unwrap();
    let options = ShardOptions::new(strategy, parse_mesh(mesh).unwrap());
    let compiled = compile(program, &options, &Volume)
        .unwrap_or_else(|refusal| panic!("{strategy} {mesh} is legal, but: {}", refusal[0]));
    let ranks = oracle::run_ranks::<f64>(&compiled.per_rank, &tensors, &tensors).unwrap();
    for comparison in compare::outputs(&ranks, &whole) {
        assert!(comparison.verdict.within(1e-9), "{strategy} {mesh}: {comparison:?}");
    }
}

#[test]
fn a_program_of_main_alone_is_split_by_tensor_parallelism() {
    let program = text::parse(CROSS).unwrap();
    for (strategy, mesh) in [("megatron-tp", "tp=2"), ("megatron-tp-sp", "tp=2"), ("data-parallel", "dp=2")] {
        check(&program, strategy, mesh);
    }
}

#[test]
fn heads_loaded_in_copies_are_copied_further() {
    let program = text::parse(CROSS).unwrap();
    for strategy in ["ulysses+megatron-tp", "ulysses+megatron-tp-sp"] {
        for mesh in ["ulysses=2,tp=4", "tp=4,ulysses=2"] {
            check(&program, strategy, mesh);
        }
    }
}

#[test]
fn outputs_are_not_expected_of_random_weights() {
    let golden = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/llama-gqa");
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(golden.join("config.json"), folder.path().join("config.json")).unwrap();
    let io = golden.join("io.safetensors");
    for command in ["run", "verify"] {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_ithaca"))
            .arg(command)
            .args([folder.path(), "--inputs".as_ref(), &io, "--expect".as_ref(), &io])
            .output()
            .unwrap();
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{command}: {message}");
        assert!(message.contains("need the weights of the model"), "{command}: {message}");
    }
}
