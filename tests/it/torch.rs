//! Emitted PyTorch modules: every strategy has one, and every name that it reads is defined in it. What modules compute is compared by
//! `tests/torch/check.py`, which needs PyTorch.

use std::process::Command;

use ithaca_codegen::torch::{Steps, emit};

use crate::cli::{repository, said};
use crate::proof::{PLANS, Proof, proof};
use crate::tier;

#[test]
fn modules_define_what_they_read() {
    let dir = tempfile::tempdir().unwrap();
    let mut files = Vec::new();
    for (i, plan) in tier::one_in(9, PLANS.iter().copied()).into_iter().enumerate() {
        let Proof { small, .. } = proof(plan);
        let steps = Steps { step: &small, prompts: None, handover: None };
        let module = match emit(steps, steps) {
            Ok(module) => module,
            // PyTorch has no states in host memory.
            Err(refusal) if plan.3.contains("offload=") => {
                assert!(refusal.iter().all(|d| d.code == "S43"), "{plan:?}: {refusal:?}");
                continue;
            }
            Err(refusal) => panic!("{plan:?}: {refusal:?}"),
        };
        let path = dir.path().join(format!("program{i}.py"));
        std::fs::write(&path, module).unwrap();
        files.push(path);
    }
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/torch/names.py");
    let Ok(ran) = Command::new("python3").arg(script).args(&files).output() else { return };
    let said = [ran.stdout, ran.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    assert!(ran.status.success(), "{said}");
}

/// Stages of an encoder have no caches of the decoder, which steps of tokens have on other ranks: they are handed over.
#[test]
fn caches_of_a_decoder_leave_the_stages_of_its_encoder() {
    let root = repository(".");
    let folder = tempfile::tempdir().unwrap();
    let [plan, program] = ["plan.json", "program"].map(|name| folder.path().join(name).display().to_string());
    let layout = "--strategy pipeline --mesh pp=2 --batch 2 --context 64";
    said(&root, &format!("plan tests/goldens/t5 --mode decode {layout} -o {plan}"));
    for (target, file, constant) in
        [("torch", "", "HANDOVER = ["), ("cuda", "/main.cu", "Handover handover = {")]
    {
        let _ = std::fs::remove_file(&program);
        said(&root, &format!("emit {plan} --target {target} -o {program}"));
        let text = std::fs::read_to_string(program.clone() + file).unwrap();
        let moves = text.split(constant).nth(1).unwrap();
        assert!(moves.contains("\"cache.cross_key.0\""), "{target}: {moves}");
    }
}
