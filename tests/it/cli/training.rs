//! Training by the command line: every model's step agrees with the whole one, options belong together, and a pipeline that
//! does not fit has repairs.

use super::{line, refused, repository, said};
use crate::tier;

#[test]
fn steps_of_models_whose_gradients_vanish_agree() {
    let root = repository("");
    // Biases of keys have gradients that are rounding alone, of which AdamW makes whole steps.
    for (golden, layout) in [
        ("gpt2", ""),
        ("gpt2", "--strategy ring+megatron-tp --mesh ring=2,tp=2"),
        ("gpt-neox", "--strategy ulysses --mesh ulysses=4"),
        ("olmo2-biases-head-dim", "--strategy megatron-tp-sp --mesh tp=2"),
    ] {
        let out = said(
            &root,
            &format!("run tests/goldens/{golden} --mode train --seq 16 --batch 2 --steps 2 {layout}"),
        );
        let verdict = if layout.is_empty() { "no communication to prove; outputs agree" } else { "passed" };
        assert!(out.ends_with(&format!("{verdict}: tolerance 1e-4\n")), "{golden} {layout}: {out}");
    }
}

/// The second step of AdamW begins with weights that differ where gradients of the first were rounding alone, so in single
/// precision its gradients may be a thousandth apart; in double precision nothing is.
#[test]
fn what_an_optimizer_makes_of_rounding_is_told_from_what_is_wrong() {
    let root = repository("");
    for (golden, seed) in [("t5", 0), ("t5-gated-own-head", 15)] {
        let options = format!(
            "--mode train --seq 48 --target-seq 12 --seed {seed} --strategy ring --mesh ring=3 --steps 2"
        );
        let out = said(&root, &format!("verify tests/goldens/{golden} {options}"));
        assert!(out.ends_with("passed: tolerance 1e-9\n"), "{golden}: {out}");
        let ran = line(&root, &format!("run tests/goldens/{golden} {options} --tolerance 1e-3"));
        assert!(ran.code == 0 || ran.out.contains("`ithaca verify --steps 2`"), "{golden}: {ran:#?}");
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
    for option in ["--recompute full", "--micro-batches 2", "--loss-chunks 2", "--train clip=1"] {
        let refusal = refused(&root, &format!("{golden} {option}"));
        assert!(refusal.contains("--mode train"), "{option}: {refusal}");
    }
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
