//! Files of another kind than a command reads: each is named for what it is, with the command that takes it.

use std::path::Path;

use ithaca_kernels::Tensor;
use ithaca_kernels::store::{self, Stored};

use super::{line, refused, repository, said, workplace};

/// Files of every kind by name, each with its words in messages.
const KINDS: [(&str, &str); 17] = [
    ("plan.json", "is a plan"),
    ("schedule.sched", "is a schedule in text form"),
    ("schedule.json", "is a schedule as JSON"),
    ("trace.json", "is a timeline"),
    ("config.json", "is the configuration of a model"),
    ("ranks.ith", "is a per-rank program in text form"),
    ("sharded.ith", "is a sharded program in text form"),
    ("whole.ith", "is a whole program in text form"),
    ("tensors.safetensors", "is a safetensors file"),
    ("index.json", "is the index of a checkpoint"),
    ("empty", "is empty"),
    ("folder", "is a folder"),
    ("bytes", "is a file that is not text"),
    ("pytorch_model.bin", "as PyTorch writes checkpoints"),
    ("notes.txt", "is text in no form that Ithaca reads, and not JSON"),
    ("cluster.toml", "is a cluster file"),
    ("rules.txt", "is a file of rewrite rules"),
];

/// Makes all of [`KINDS`].
fn make(at: &Path) {
    said(at, "plan examples/gpt2 --gpus 2 --seq 64 --strategy ring --mesh ring=2 -o plan.json");
    said(at, "emit plan.json --target schedule -o schedule.sched");
    said(at, "emit plan.json --target json -o schedule.json");
    said(at, "emit plan.json --target trace -o trace.json");
    said(at, "emit plan.json --target ir -o ranks.ith");
    let copy = |from: &str, to: &str| std::fs::copy(repository(from), at.join(to)).unwrap();
    copy("examples/gpt2/config.json", "config.json");
    copy("tests/files/passes/ring.ith", "whole.ith");
    copy("examples/rules/algebra.rules", "rules.txt");
    copy("passes/plan/clusters/dgx-h100.toml", "cluster.toml");
    said(at, "opt whole.ith --pipeline shard{strategy=ring,ring=4} -o sharded.ith");
    let tensor = Tensor { shape: vec![2], data: vec![1.0, 2.0] };
    store::write(&at.join("tensors.safetensors"), &[("x", Stored::F32, &tensor)]).unwrap();
    std::fs::create_dir(at.join("folder")).unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(at.join(name), bytes).unwrap();
    write("index.json", br#"{"weight_map": {"x": "tensors.safetensors"}}"#);
    write("empty", b" \n");
    write("bytes", &[0xff, 0xfe, 0, 1, 2, 3, 4, 5, 6]);
    write("pytorch_model.bin", b"PK\x03\x04 and more");
    write("notes.txt", b"remember the milk\n");
}

#[test]
fn files_of_another_kind_are_named() {
    let folder = workplace();
    let at = folder.path();
    make(at);
    // Each command, what it asks for, and the files that it takes, or whose contents it judges itself.
    let commands: [(&str, &[&str]); 13] = [
        ("explain @", &["plan.json"]),
        ("emit @ --target ir", &["plan.json"]),
        ("diff plan.json @", &["plan.json"]),
        ("diff @ plan.json", &["plan.json"]),
        ("plan @ --gpus 2 --seq 64", &["config.json", "whole.ith", "folder"]),
        ("plan config.json --gpus 2 --seq 64 --cluster @", &["cluster.toml", "notes.txt"]),
        ("run @ --shrink", &["plan.json", "config.json", "whole.ith", "folder"]),
        (
            "verify @ --shrink",
            &["plan.json", "config.json", "whole.ith", "folder", "schedule.sched", "ranks.ith"],
        ),
        ("shard-weights @ -o out", &["plan.json", "config.json", "whole.ith", "folder"]),
        ("merge-weights @ -o out", &["folder"]),
        ("opt @", &["ranks.ith", "sharded.ith", "whole.ith", "notes.txt"]),
        ("opt whole.ith --rules @", &["rules.txt", "notes.txt"]),
        ("verify schedule.sched --program @", &["plan.json", "ranks.ith", "sharded.ith", "whole.ith"]),
    ];
    for (command, takes) in commands {
        for (file, is) in KINDS.iter().filter(|(file, _)| !takes.contains(file)) {
            let arguments = command.replace('@', file);
            let refusal = refused(at, &arguments);
            assert!(refusal.contains("[C05]") || refusal.contains("[C03]"), "{arguments}: {refusal}");
            assert!(refusal.contains(is), "{arguments}: {refusal}");
            assert!(refusal.contains(&format!("`{file}`")), "{arguments}: {refusal}");
        }
    }
    for flag in ["--inputs", "--weights", "--expect", "--resume"] {
        let takes = ["tensors.safetensors", "index.json", "folder", "empty", "bytes"];
        let train = if flag == "--resume" { " --mode train" } else { "" };
        for (file, is) in KINDS.iter().filter(|(file, _)| !takes.contains(file)) {
            let arguments = format!("run config.json --shrink{train} {flag} {file}");
            let refusal = refused(at, &arguments);
            assert!(refusal.contains("[C05]") && refusal.contains(is), "{arguments}: {refusal}");
        }
    }
}

#[test]
fn messages_say_which_command_takes_what_was_given() {
    let folder = workplace();
    let at = folder.path();
    make(at);
    for (arguments, says) in [
        ("run schedule.sched", "`ithaca verify schedule.sched --program plan.json` checks it"),
        ("run ranks.ith", "`ithaca verify ranks.ith --program PROGRAM` compares it with a whole program"),
        ("run ranks.ith", "name its plan, or the whole program that it was made from"),
        ("verify ranks.ith --seed 1", "add `--program FILE`"),
        ("verify sharded.ith", "`ithaca opt sharded.ith` runs passes over it"),
        (
            "explain config.json",
            "`ithaca plan config.json --gpus 8 --seq 8192 -o plan.json` makes a plan for it",
        ),
        ("emit examples/gpt2 --target ir", "makes a plan for its model"),
        ("plan plan.json --gpus 2 --seq 64", "`ithaca explain plan.json` explains it"),
        ("plan config.json --gpus 2 --seq 64 --cluster plan.json", "`ithaca list clusters`"),
        ("plan tensors.safetensors --gpus 2 --seq 64", "`--weights`, `--inputs` or `--expect`"),
        ("opt plan.json", "`ithaca emit plan.json --target ir` writes one"),
        ("merge-weights folder -o out", "name the folder that `ithaca shard-weights` wrote"),
        ("run config.json --shrink --weights pytorch_model.bin", "convert it to safetensors"),
    ] {
        let refusal = refused(at, arguments);
        assert!(refusal.contains(says), "{arguments}: {refusal}");
    }
}

#[test]
fn what_a_file_is_does_not_depend_on_its_name() {
    let folder = workplace();
    let at = folder.path();
    make(at);
    for (from, to) in [
        ("plan.json", "plan"),
        ("config.json", "model.txt"),
        ("whole.ith", "whole.json"),
        ("cluster.toml", "mine"),
        ("schedule.sched", "schedule.json"),
    ] {
        std::fs::copy(at.join(from), at.join(to)).unwrap();
    }
    // Comments may stand before a program or a schedule.
    let schedule = std::fs::read_to_string(at.join("schedule.sched")).unwrap();
    std::fs::write(at.join("said.ith"), format!("// As it was.\n\n{schedule}")).unwrap();
    for arguments in [
        "explain plan",
        "run plan --shrink",
        "run model.txt --shrink",
        "run whole.json",
        "plan model.txt --gpus 2 --seq 64 --cluster mine",
        "verify schedule.json",
        "verify said.ith --program plan",
    ] {
        said(at, arguments);
    }
}

#[test]
fn schedules_are_checked_against_their_program() {
    let folder = workplace();
    let at = folder.path();
    make(at);
    let alone = said(at, "verify schedule.sched");
    assert!(alone.contains("memory, collectives and order hold"), "{alone}");
    assert!(alone.contains("not checked: that it computes its program (S18)"), "{alone}");
    assert!(alone.contains("`--program FILE`"), "{alone}");
    for program in ["plan.json", "ranks.ith"] {
        let out = said(at, &format!("verify schedule.sched --program {program}"));
        assert!(out.contains(&format!("it computes the program `{program}` (S18)")), "{out}");
        assert!(!out.contains("not checked"), "{out}");
    }

    // A program of one's own is laid out by the passes that the schedule names.
    said(
        at,
        "opt whole.ith --pipeline shard{strategy=ring,ring=4},lower-movements,lower-reshards -o own.ith",
    );
    let own = std::fs::read_to_string(at.join("own.ith")).unwrap();
    let module = ithaca_ir::text::parse(&own).unwrap();
    let verified = ithaca_ir::verify::verify(&module).unwrap();
    let schedule = ithaca_passes::lower::lower(verified).unwrap();
    std::fs::write(at.join("own.sched"), ithaca_ir::schedule::print(&schedule)).unwrap();
    for program in ["own.ith", "whole.ith", "sharded.ith", "whole.ith --cluster cpu"] {
        let out = said(at, &format!("verify own.sched --program {program}"));
        assert!(out.contains("(S18)") && !out.contains("not checked"), "{program}: {out}");
    }

    // Another program's schedule holds together, and is found out.
    let text = std::fs::read_to_string(at.join("schedule.sched")).unwrap();
    let other = text.replacen("compute: add", "compute: mul", 1);
    assert_ne!(text, other);
    std::fs::write(at.join("other.sched"), other).unwrap();
    said(at, "verify other.sched");
    for program in ["plan.json", "ranks.ith"] {
        let refusal = refused(at, &format!("verify other.sched --program {program}"));
        assert!(refusal.contains("[S18]"), "{refusal}");
    }
    let refusal = refused(at, "verify schedule.sched --program whole.ith");
    assert!(refusal.contains("[S18]") && refusal.contains("the program 1 function"), "{refusal}");
    let refusal = refused(at, "verify schedule.sched --program own.ith");
    assert!(refusal.contains("mesh `ring=2`") && refusal.contains("mesh `ring=4`"), "{refusal}");
}

#[test]
fn per_rank_programs_are_checked_and_compared_with_a_whole_program() {
    let folder = workplace();
    let at = folder.path();
    make(at);
    let alone = said(at, "verify ranks.ith");
    assert!(alone.contains("on 2 ranks: types and layouts hold") && alone.contains("not checked"), "{alone}");
    said(
        at,
        "opt whole.ith --pipeline shard{strategy=ring,ring=4},lower-movements,lower-reshards -o own.ith",
    );
    let proven = said(at, "verify own.ith --program whole.ith");
    assert!(proven.contains("\npassed: no error is above") && !proven.contains("not checked"), "{proven}");

    // By hand: keys and values of another step are attended to, in layouts that fit.
    let text = std::fs::read_to_string(at.join("own.ith")).unwrap();
    let hand = text.replacen("causal", "full", 1);
    assert_ne!(text, hand);
    std::fs::write(at.join("hand.ith"), hand).unwrap();
    let ran = line(at, "verify hand.ith --program whole.ith");
    assert!(ran.code == 1 && ran.out.contains("FAILED"), "{ran:#?}");

    // A collective that is left out leaves types that do not fit.
    let n = text.lines().position(|line| line.contains(" = permute ")).unwrap();
    let without = text.lines().enumerate().filter(|(i, _)| *i != n).map(|(_, line)| format!("{line}\n"));
    std::fs::write(at.join("without.ith"), without.collect::<String>()).unwrap();
    refused(at, "verify without.ith --program whole.ith");
}
