//! Arguments that make no sense, and places that cannot be written to.

use std::path::Path;

use serde_json::Value;

use super::{ithaca, line, listing, refused, said, workplace};

#[test]
fn numbers_that_count_nothing() {
    let folder = workplace();
    let at = folder.path();
    let plan = "plan examples/llama-3-8b --gpus 8 --seq 1024";
    said(at, plan);
    for number in [
        "-1",
        "0",
        "1.5",
        "NaN",
        "inf",
        "99999999999999999999",
        "9223372036854775807",
        "x",
        "",
        "1e3",
        "0x10",
    ] {
        for flag in ["--seq", "--batch", "--gpus"] {
            let mut arguments: Vec<&str> = "plan examples/llama-3-8b --strategy ulysses".split(' ').collect();
            for (name, sound) in [("--seq", "1024"), ("--batch", "1"), ("--gpus", "8")] {
                arguments.extend([name, if name == flag { number } else { sound }]);
            }
            let ran = ithaca(at, &arguments);
            assert_eq!((ran.code, ran.out.as_str()), (2, ""), "{flag} {number}: {ran:#?}");
            assert!(ran.err.contains("error"), "{flag} {number}: {ran:#?}");
            assert!(ran.err.contains(flag.trim_start_matches('-')) || ran.err.contains(number), "{ran:#?}");
        }
        let mut sound = "run examples/gpt2 --shrink --seq 16".split(' ').collect::<Vec<_>>();
        if number != "0"
            && number != "1.5"
            && number != "99999999999999999999"
            && number != "9223372036854775807"
            && number != "1e3"
        {
            sound.extend(["--tolerance", number]);
            assert_eq!(ithaca(at, &sound).code, 2, "--tolerance {number}");
        }
    }
    for huge in ["1099511627776", "1000000000000"] {
        refused(at, &format!("plan examples/llama-3-8b --gpus 8 --seq {huge}"));
        refused(at, &format!("plan examples/llama-3-8b --gpus 8 --seq 64 --batch {huge}"));
        refused(at, &format!("plan examples/llama-3-8b --gpus {huge} --seq 64"));
    }
}

#[test]
fn layouts_that_are_none() {
    let folder = workplace();
    let at = folder.path();
    let mut said = String::new();
    for layout in [
        "--gpus 8 --strategy ulysses --mesh ulysses=4",
        "--gpus 8 --mesh ulysses=4,tp=4",
        "--strategy ulysses --mesh ulysses=4,ulysses=2",
        "--strategy ulysses --mesh ulysses=0",
        "--strategy ulysses --mesh ulysses=-2",
        "--strategy ulysses --mesh ulysses",
        "--strategy ulysses --mesh =4",
        "--strategy ulysses --mesh ulysses=99999999999999999999",
        "--strategy ulysses --mesh ulysses=4,,",
        "--strategy ulysses --mesh tp=4",
        "--strategy ulysses --mesh ulysses=2,ring=2",
        "--strategy ulysses --mesh ulyses=2",
        "--strategy ulyses --mesh ulysses=2",
        "--strategy ulysses+megatron-tp --mesh ulysses=4",
        "--strategy megatron-tp+megatron-tp-sp --mesh tp=4",
        "--strategy ulysses+ulysses --mesh ulysses=4",
        "--strategy unheard-of --gpus 8",
        "--strategy ulysses+ --gpus 8",
        "--strategy + --gpus 8",
        "--strategy single --gpus 8",
        "--mesh rings=8",
        "--gpus 8 --cluster unheard-of",
        "--gpus 8 --cluster dgx-h10",
        "--gpus 100000000",
        "--gpus 8 --dtype i32",
        "--gpus 8 --dtype unheard-of",
        "--gpus 8 --mode train --micro-batches 3",
        "--gpus 8 --mode train --recompute some",
        "--gpus 8 --mode decode",
        "--gpus 8 --ignore-field hidden_size",
        "",
    ] {
        said += &format!(
            "$ {layout}\n{}\n",
            refused(at, &format!("plan examples/llama-3-8b --seq 1024 {layout}"))
        );
    }
    insta::assert_snapshot!("layouts_that_are_none", said);
}

#[test]
fn requests_that_nothing_satisfies_say_what_would() {
    let folder = workplace();
    let at = folder.path();
    let mut said = String::new();
    for request in [
        "plan examples/qwen2.5-7b --gpus 8 --seq 4096 --strategy ulysses",
        "plan examples/llama-3-8b --gpus 8 --seq 7 --strategy ulysses --uneven-sequence",
        "plan examples/llama-3-8b --gpus 1 --seq 131072 --logits all --cluster l20-pcie",
        "plan examples/gpt2 --gpus 2 --seq 4096",
        "plan examples/gpt2 --gpus 2 --documents 512*2",
        "plan examples/llama-4-scout --gpus 8 --documents 512*2",
        "plan examples/llama-3-8b --gpus 8 --seq 8192 --documents 4k,4000",
        "plan examples/llama-3-8b --gpus 8 --documents 4x",
        "plan examples/llama-3-8b --gpus 8 --documents lengths.txt",
        "plan examples/llama-3-8b --gpus 8 --documents 4k*2 --mode train --shift-labels",
    ] {
        said += &format!("$ ithaca {request}\n{}\n", refused(at, request));
    }
    insta::assert_snapshot!("requests_that_nothing_satisfies", said);
}

#[test]
fn words_that_clap_does_not_know() {
    let folder = workplace();
    let at = folder.path();
    for arguments in [
        "plan",
        "unheard-of",
        "plan examples/gpt2 --unheard-of",
        "plan examples/gpt2 --gpus 2 --seq 64 --mode dream",
        "emit plan.json",
        "emit plan.json --target pdf",
        "list unheard-of",
        "completions tcsh",
        "run",
        "diff one.json",
        "--error-format xml list ops",
        "plan examples/gpt2 --gpus 2 --gpus 2 --seq 64",
    ] {
        refused(at, arguments);
    }
    assert_eq!(line(at, "").code, 2);
}

#[test]
fn subjects_and_flags_that_do_not_go_together() {
    let folder = workplace();
    let at = folder.path();
    said(at, "plan examples/llama-3-8b --gpus 8 --seq 1024 -o plan.json");
    for arguments in [
        "run examples/gpt2",
        "run examples/gpt2 --seq 16 --gpus 8",
        "run examples/gpt2 --seq 16 --mesh ulysses=2",
        "run examples/gpt2 --seq 16 --strategy ulysses",
        "run examples/gpt2 --seq 16 --strategy ulysses --gpus 4 --mesh ulysses=2",
        "run examples/gpt2 --seq 16 --strategy ulysses --mesh ulysses=2 --shrink --timeout 0",
        "emit plan.json --target cuda",
        "opt plan.json",
        "run plan.json --shrink --weights plan.json",
        "run plan.json --shrink --inputs plan.json",
        "explain examples/gpt2/config.json",
        "emit examples/gpt2/config.json --target ir",
        // What a plan settles is not asked again.
        "run plan.json --shrink --seq 64",
        "run plan.json --shrink --gpus 4",
        "run plan.json --shrink --strategy megatron-tp",
        "run plan.json --shrink --mesh tp=8",
        "run plan.json --shrink --batch 2",
        "run plan.json --shrink --dtype f32",
        "run plan.json --shrink --uneven-heads",
        "verify plan.json --cluster cpu",
    ] {
        refused(at, arguments);
    }
}

#[test]
fn pipelines_that_are_none() {
    let folder = workplace();
    let at = folder.path();
    let source = super::repository("tests/files/roundtrip/llama_ulysses.ith");
    std::fs::copy(source, at.join("model.ith")).unwrap();
    for pipeline in [
        "unheard-of",
        "shard",
        "shard{",
        "shard{strategy}",
        "shard{strategy=}",
        "shard{strategy=unheard-of}",
        "shard{strategy=ulysses}",
        "shard{strategy=ulysses,ulysses=0}",
        "shard{strategy=ulysses,ulysses=2,ulysses=2}",
        "shard{strategy=ulysses,tp=2}",
        "shard{strategy=ulysses,ulysses=2,heads=many}",
        "lower-reshards{x=1}",
        ",",
        "lower-reshards,",
        "lower-reshards}",
    ] {
        refused(at, &format!("opt model.ith --pipeline {pipeline}"));
    }
    refused(at, "opt model.ith --print-after shard");
    refused(at, "opt model.ith --stop-after -1");
}

#[test]
fn places_that_cannot_be_written_to() {
    let folder = workplace();
    let at = folder.path();
    let plan = "plan examples/llama-3-8b --gpus 8 --seq 1024";
    said(at, &format!("{plan} -o plan.json"));
    std::fs::create_dir_all(at.join("taken/inside")).unwrap();
    std::fs::write(at.join("file"), "kept").unwrap();
    for place in ["nowhere/out", "taken", "file/out", "/proc/nowhere/out"] {
        refused(at, &format!("{plan} -o {place}"));
        refused(at, &format!("emit plan.json --target ir -o {place}"));
        refused(at, &format!("run plan.json --shrink -o {place}"));
        std::fs::copy(super::repository("tests/files/roundtrip/llama_ulysses.ith"), at.join("model.ith"))
            .unwrap();
        refused(at, &format!("opt model.ith -o {place}"));
    }
    refused(at, "emit plan.json --target cuda -o file");
    refused(at, "emit plan.json --target cuda -o file/out");
    assert_eq!(std::fs::read_to_string(at.join("file")).unwrap(), "kept");
    read_only(at);
}

/// A folder without the right to write; the superuser has it everywhere, so nothing can be shown then.
#[cfg(unix)]
#[expect(clippy::print_stderr, reason = "a test that cannot show anything says so")]
fn read_only(at: &Path) {
    use std::os::unix::fs::PermissionsExt;
    let folder = at.join("closed");
    std::fs::create_dir(&folder).unwrap();
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o555)).unwrap();
    if std::fs::write(folder.join("probe"), "").is_ok() {
        eprintln!("skipped: this user may write to every folder");
        return;
    }
    refused(at, "emit plan.json --target ir -o closed/out");
    refused(at, "emit plan.json --target cuda -o closed/out");
    assert!(listing(&folder).is_empty());
}

#[cfg(not(unix))]
fn read_only(_at: &Path) {}

#[test]
fn a_refusal_leaves_the_old_file_as_it_was() {
    let folder = workplace();
    let at = folder.path();
    std::fs::write(at.join("plan.json"), "old").unwrap();
    refused(at, "plan examples/qwen2.5-7b --gpus 8 --seq 4096 --strategy ulysses -o plan.json");
    assert_eq!(std::fs::read_to_string(at.join("plan.json")).unwrap(), "old");
    let before = listing(at);
    said(at, "plan examples/llama-3-8b --gpus 8 --seq 4096 -o plan.json");
    assert_eq!(listing(at), before, "nothing is left beside");
}

#[test]
fn errors_as_json_are_an_object_per_line() {
    let folder = workplace();
    let at = folder.path();
    std::fs::write(at.join("cut.ith"), "ithaca 1 program @x\nfunc @main(").unwrap();
    for (arguments, code) in [
        ("plan nowhere --gpus 2 --seq 64", "C01"),
        ("plan examples/gpt2 --gpus 2", "C00"),
        ("plan examples/gpt2 --gpus -2 --seq 64", "C00"),
        ("plan examples/gpt2 --unheard-of", "C00"),
        ("plan examples/qwen2.5-7b --gpus 8 --seq 4096 --strategy ulysses", "P20"),
        ("opt cut.ith", "E0"),
    ] {
        let arguments: Vec<&str> = arguments.split(' ').collect();
        for flags in [&["--error-format", "json"][..], &["--error-format=json"]] {
            for at_the_end in [false, true] {
                let all = if at_the_end {
                    [&arguments[..], flags].concat()
                } else {
                    [flags, &arguments[..]].concat()
                };
                let ran = ithaca(at, &all);
                assert_eq!((ran.code, ran.out.as_str()), (2, ""), "{all:?}: {ran:#?}");
                assert!(!ran.err.is_empty());
                for line in ran.err.lines() {
                    let object: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
                    assert!(object["code"].as_str().unwrap().starts_with(code), "{line}");
                    assert!(!object["message"].as_str().unwrap().is_empty(), "{line}");
                }
            }
        }
    }
}

#[test]
fn a_file_that_does_not_exist_is_named_with_its_neighbour() {
    let folder = workplace();
    let at = folder.path();
    std::fs::write(at.join("train.sh"), "pretrain.py --bf16").unwrap();
    let import = "import --from megatron --gpus 8";
    for (arguments, says) in [
        (format!("{import} tran.sh"), "`tran.sh`: No such file"),
        (format!("{import} tran.sh --cluster dgx-h100"), "did you mean `train.sh`?"),
        (
            format!("{import} train.sh --cluster dgx-h100"),
            "name the options of `ithaca import` before the file",
        ),
        ("plan examples/gpt --gpus 2 --seq 64".to_owned(), "did you mean `examples/gpt2`?"),
    ] {
        let refusal = refused(at, &arguments);
        assert!(refusal.contains(says), "{arguments}: {refusal}");
    }
}

#[test]
fn chunks_that_no_pipeline_has_are_refused_with_their_limit() {
    let folder = workplace();
    let plan = "plan examples/gpt2 --seq 64 --mode train --pipeline interleaved";
    for (options, says) in [
        (
            "--gpus 4 --batch 8 --mesh pp=4 --train chunks=9",
            "36 chunks of a pipeline are more than the model has: 12 layers",
        ),
        (
            "--gpus 4 --batch 8 --mesh pp=4 --train chunks=9",
            "at most 3 chunks each, as in `--train chunks=3`",
        ),
        ("--gpus 2 --batch 8 --train chunks=99", "198 chunks of a pipeline"),
        (
            "--gpus 8 --batch 12 --mesh dp=2,pp=4",
            "6 sequences of each pipeline are not divisible by 4 stages",
        ),
    ] {
        let refusal = refused(folder.path(), &format!("{plan} {options}"));
        assert!(refusal.contains(says), "{options}: {refusal}");
    }
}

/// A device has no end, and a pipe nobody who writes.
#[test]
fn devices_pipes_and_large_files_are_not_read() {
    let folder = workplace();
    let at = folder.path();
    let pipe = at.join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let large = std::fs::File::create(at.join("large.json")).unwrap();
    large.set_len(300 << 20).unwrap();
    let config = format!("{{\"model_type\": \"llama\"{}}}", " ".repeat(17 << 20));
    std::fs::write(at.join("config.json"), config).unwrap();
    for (args, says) in [
        ("explain /dev/zero", "`/dev/zero` is a device or a pipe"),
        ("explain pipe", "is a device or a pipe"),
        ("verify /dev/zero", "is a device or a pipe"),
        ("plan /dev/zero --gpus 2 --seq 16", "is a device or a pipe"),
        ("plan examples/gpt2 --gpus 2 --seq 16 --cluster /dev/zero", "is a device or a pipe"),
        ("opt pipe --pipeline lower-reshards", "is a device or a pipe"),
        ("plan examples/gpt2 --gpus 2 --seq 16 --documents /dev/zero", "is a device or a pipe"),
        ("plan config.json --gpus 2 --seq 16", "has more than 16 MiB"),
        ("run examples/gpt2 --shrink --seq 16 --weights pipe", "is a device or a pipe"),
        ("run examples/gpt2 --shrink --seq 16 --weights /dev/zero", "is a device or a pipe"),
    ] {
        let said = refused(at, args);
        assert!(said.contains(says), "{args}: {said}");
    }
    refused(at, "explain large.json");
}

#[test]
fn names_cannot_change_what_a_terminal_shows() {
    let folder = workplace();
    let at = folder.path();
    let name = "\u{1b}[2J\u{202e}x";
    let said = refused(at, &format!("explain {name}"));
    assert!(!said.contains('\u{1b}') && !said.contains('\u{202e}') && said.contains("\\u{1b}"), "{said}");
}

/// Neither through a link nor in the way of a folder is anything written, nor are folders made for it.
#[cfg(unix)]
#[test]
fn an_output_that_is_blocked_changes_nothing() {
    let folder = workplace();
    let at = folder.path();
    said(at, "plan examples/llama-3-8b --gpus 8 --seq 1024 -o plan.json");
    let emit = |out: &str| refused(at, &format!("emit plan.json --target cuda -o {out}"));
    std::fs::create_dir_all(at.join("elsewhere")).unwrap();
    std::fs::create_dir_all(at.join("linked")).unwrap();
    std::os::unix::fs::symlink("../elsewhere", at.join("linked/runtime")).unwrap();
    assert!(emit("linked").contains("leads out of the folder"));
    std::fs::write(at.join("elsewhere/victim"), "mine").unwrap();
    std::fs::create_dir_all(at.join("file-linked")).unwrap();
    std::os::unix::fs::symlink("../elsewhere/victim", at.join("file-linked/main.cu")).unwrap();
    assert!(emit("file-linked").contains("leads out of the folder"));
    assert_eq!(std::fs::read_to_string(at.join("elsewhere/victim")).unwrap(), "mine");
    std::fs::create_dir_all(at.join("blocked/main.cu")).unwrap();
    assert!(emit("blocked").contains("is a folder, where a file is to be written"));
    let names = |folder: &str| {
        let entries = std::fs::read_dir(at.join(folder)).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!((names("blocked"), names("linked")), (vec!["main.cu".to_owned()], vec!["runtime".to_owned()]));
    assert_eq!(names("elsewhere"), ["victim"]);
    // A link to the folder itself is where the user wants the files.
    std::fs::create_dir_all(at.join("real")).unwrap();
    std::os::unix::fs::symlink("real", at.join("name")).unwrap();
    said(at, "emit plan.json --target cuda -o name");
    said(at, "emit plan.json --target cuda -o name");
    assert!(at.join("real/main.cu").exists());
}
