//! Options without effect are refused or noted, with the reason.

use super::{refused, repository, said, workplace};
use crate::tier;

#[test]
fn options_without_meaning_are_refused() {
    let folder = workplace();
    let at = folder.path();
    let run = "run examples/gpt2 --shrink";
    let train = "run examples/gpt2 --shrink --mode train";
    let io = "tests/goldens/gpt2/io.safetensors";
    for (arguments, says) in [
        (format!("{run} --steps 3"), "`--steps 3` are steps of training"),
        ("verify examples/gpt2 --shrink --steps 3".to_owned(), "`--steps 3` are steps of training"),
        (format!("{run} --collectives nccl"), "`--collectives` goes with `--device cuda`"),
        (format!("{run} --collectives in-process"), "`--collectives` goes with `--device cuda`"),
        (format!("{run} --unchecked --tolerance 1"), "no outputs are expected"),
        (format!("{run} --offload optimizer"), "`--offload optimizer` is an option of training"),
        (format!("{run} --shift-labels"), "`--shift-labels` is an option of training"),
        (format!("{run} --train lr=1"), "`--train` is an option of training"),
        (format!("{run} --ignore-field banana"), "does not have"),
        (format!("{run} --strategy single --gpus 8"), "is for 1 GPU"),
        (format!("{train} --train chunks=3"), "add `--pipeline interleaved`"),
        (format!("{train} --pipeline interleaved"), "the layout has no stages"),
        (format!("{train} --pipeline gpipe"), "the layout has no stages"),
        (format!("{train} --train lr=1 --train lr=2"), "set the same option twice"),
        (format!("{train} --micro-batches 2 --train micro_batches=2"), "set the same option twice"),
        (format!("{train} --train lr=1 --train optimizer=none"), "optimizer=none"),
        (
            format!("{train} --strategy pipeline --mesh pp=2 --batch 2 --micro-batches 2 --train stages=4"),
            "contradicts `pp=2` of the mesh",
        ),
        ("verify examples/gpt2 --shrink --tolerance 1".to_owned(), "no outputs are expected"),
        (
            "plan examples/gpt2 --gpus 2 --seq 64 --shift-labels".to_owned(),
            "`--shift-labels` is an option of training",
        ),
        (
            "plan examples/gpt2 --gpus 2 --seq 64 --mode train --train chunks=3".to_owned(),
            "add `--pipeline interleaved`",
        ),
        ("plan examples/gpt2 --gpus 2 --seq 64 --ignore-field banana".to_owned(), "does not have"),
        (format!("{run} --cluster cpu"), "one device has no collectives"),
        (format!("{run} --strategy ring --mesh ring=1 --cluster cpu"), "one device has no collectives"),
        ("verify examples/gpt2 --shrink --cluster cpu".to_owned(), "one device has no collectives"),
        (
            "verify examples/gpt2 --shrink --program examples".to_owned(),
            "`--program` names the program of a schedule",
        ),
    ] {
        let refusal = refused(at, &arguments);
        assert!(refusal.contains("[C0") || refusal.contains("[P02]"), "{arguments}: {refusal}");
        assert!(refusal.contains(says), "{arguments}: {refusal}");
    }
    said(at, "plan examples/gpt2 --mode decode --context 32 --batch 2 --gpus 2 -o decode.json");
    for (option, says) in [
        ("--steps 3", "or `--mode decode` for tokens"),
        ("--prompt 1;2", "a plan is one step"),
        ("--chunk 4", "a plan is one step"),
    ] {
        let refusal = refused(at, &format!("run decode.json --shrink {option}"));
        assert!(refusal.contains(says), "{option}: {refusal}");
    }
    let both = format!("run tests/goldens/gpt2 --inputs {io} --seed 7");
    assert!(refused(&repository(""), &both).contains("both are read from files"));
    let schedule = "verify tests/files/roundtrip/schedule.ith";
    said(&repository(""), schedule);
    for flag in ["--seq 8", "--strategy ring", "--shrink", "--seed 1", "--tolerance 1", "--steps 2"] {
        let refusal = refused(&repository(""), &format!("{schedule} {flag}"));
        assert!(refusal.contains("has no meaning for a schedule"), "{flag}: {refusal}");
    }
    // Prices say how a whole program is laid out, and nothing of what is laid out.
    let refusal = refused(&repository(""), &format!("{schedule} --cluster cpu"));
    assert!(refusal.contains("`--cluster` has no meaning for a schedule"), "{refusal}");
}

#[test]
fn options_that_a_layout_has_no_use_for_are_noted() {
    let folder = workplace();
    let at = folder.path();
    let ulysses = "--strategy ulysses --mesh ulysses=2";
    for (options, says) in [
        ("--order zigzag".to_owned(), "order zigzag has no effect"),
        ("--zero 3".to_owned(), "ZeRO stage 3 has no effect"),
        ("--uneven-heads".to_owned(), "`--uneven-heads` has no effect: nothing splits heads"),
        (format!("{ulysses} --uneven-heads"), "`--uneven-heads` has no effect: heads divide by"),
        (format!("{ulysses} --pad-heads"), "`--pad-heads` has no effect: heads divide by"),
        (format!("{ulysses} --pad-sequence"), "`--pad-sequence` has no effect"),
        (format!("{ulysses} --movement rotate"), "`--movement rotate` has no effect"),
        (
            "--strategy ring --mesh ring=2 --cross-movement gather".to_owned(),
            "`--cross-movement gather` has no effect",
        ),
        (format!("{ulysses} --fuse two-level+pack"), "share a node"),
        ("--fuse two-level+pack".to_owned(), "the mesh has no axes"),
        ("--fuse overlap(chunks=4)".to_owned(), "`overlap` has no effect"),
        (format!("{ulysses} --fuse overlap(chunks=64)"), "chunks, not 64"),
        (format!("{ulysses} --fuse prefetch+pack"), "`prefetch` has no effect"),
        ("--fuse pack".to_owned(), "`--fuse pack` has no effect: one device has no collectives"),
        ("--storage typed".to_owned(), "`--storage typed` has no effect"),
    ] {
        let out = said(at, &format!("run examples/gpt2 --shrink {options}"));
        assert!(out.contains("note: ") && out.contains(says), "{options}: {out}");
    }
}

#[test]
fn a_cluster_says_what_one_device_takes() {
    let folder = workplace();
    let at = folder.path();
    let plan = |cluster: &str| said(at, &format!("plan examples/gpt2 --gpus 1 --seq 64 --cluster {cluster}"));
    assert_ne!(plan("dgx-h100").lines().nth(3), plan("l20-pcie").lines().nth(3));
}

#[test]
fn dropout_that_is_none_is_noted() {
    let folder = workplace();
    let at = folder.path();
    let says = "note: `--train dropout=off` has no effect: the configuration drops nothing\n";
    for (model, is_noted) in tier::one_in(2, [("llama-3-8b", true), ("gpt2", false)]) {
        let of = format!("examples/{model} --mode train --train dropout=off");
        for arguments in [format!("run {of} --shrink"), format!("plan {of} --gpus 8 --seq 64 --batch 8")] {
            let out = said(at, &arguments);
            assert_eq!(out.contains(says), is_noted, "{arguments}: {out}");
        }
    }
}

#[test]
fn prices_that_nobody_asks_for_are_noted() {
    let at = repository("tests/files/passes");
    let opt = |pipeline: &str| said(&at, &format!("opt ulysses.ith --cluster cpu --pipeline={pipeline}"));
    let says = "// note: `--cluster cpu` has no effect: no pass asked for a price";
    let laid_out = "shard{strategy=ulysses,ulysses=4},lower-movements,lower-reshards";
    assert!(opt("shard{strategy=ulysses,ulysses=4}").contains(says));
    assert!(!opt(laid_out).contains(says));
}

#[test]
fn options_of_passes_need_passes() {
    let at = repository("tests/files/passes");
    for flag in ["--print-after all", "--verify-each", "--stop-after 3", "--cluster cpu"] {
        let refusal = refused(&at, &format!("opt ulysses.ith {flag}"));
        assert!(refusal.contains("[C00]") && refusal.contains("no pass is named"), "{flag}: {refusal}");
        said(&at, &format!("opt ulysses.ith {flag} --pipeline shard{{strategy=ulysses,ulysses=4}}"));
    }
}

#[test]
fn names_that_are_not_there_are_refused_before_the_search() {
    let folder = workplace();
    let at = folder.path();
    let plan = "plan examples/llama-3-8b --gpus 8 --seq 8k";
    let step = "--seq 64 --strategy ring --mesh ring=2";
    let movements = "= help: movements: gather, rotate, ";
    for (arguments, says) in [
        (format!("{plan} --movement foo"), ["error[P47]: there is no movement `foo`", movements]),
        (format!("{plan} --strategy ring --movement foo"), ["error[P47]", movements]),
        (format!("{plan} --cross-movement gathr"), ["did you mean `gather`?", movements]),
        (format!("{plan} --movement gather(group=2)"), ["error[P47]", "no option `group`"]),
        (format!("{plan} --mode train --movement foo"), ["error[P47]", movements]),
        (
            "plan examples/llama-3-8b --gpus 8 --mode decode --context 8k --movement foo".to_owned(),
            ["error[P47]", movements],
        ),
        (format!("verify examples/gpt2 --shrink {step} --movement foo"), ["error[P47]", movements]),
        (format!("run examples/gpt2 --shrink {step} --movement foo"), ["error[P47]", movements]),
        (format!("{plan} --layer-strategy blok=ring"), ["error[P13]", "functions with attention: block"]),
        (format!("{plan} --layer-strategy block=foo"), ["error[P10]: there is no strategy `foo`", "ring"]),
        (format!("{plan} --sequence-axes q=cp"), ["error[P13]: there is no sequence `q`", "sequences: s"]),
        (format!("{plan} --sequence-axes s=foo"), ["error[P11]: sequence `s`", "axes: cp, dcp, dp"]),
        (
            format!("{plan} --mesh cp=8 --sequence-axes s=foo"),
            ["axis `foo`, which mesh `cp=8` lacks", "axes: cp"],
        ),
        (
            format!("{plan} --expert-bound 3"),
            ["error[M10]: an expert bound of 3", "leave `--expert-bound` out"],
        ),
        (format!("{plan} --capacity 1.5"), ["error[M10]: a capacity of 1.5", "leave `--capacity` out"]),
    ] {
        let refusal = refused(at, &arguments);
        assert!(says.iter().all(|says| refusal.contains(says)), "{arguments}: {refusal}");
        assert!(!refusal.contains("works:"), "{arguments}: {refusal}");
    }
}
