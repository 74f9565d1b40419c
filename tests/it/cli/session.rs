//! The main job, command by command, and the commands around it.

use ithaca_ir::{schedule, text, verify};
use ithaca_kernels::store::{self, Stored};
use ithaca_kernels::tensor::Tensor;
use serde_json::Value;

use super::{line, listing, refused, repository, said, workplace};

const PLAN: &str = "plan examples/llama-3-8b --cluster dgx-h100 --gpus 8 --seq 131072";

#[test]
fn a_plan_is_the_same_every_time_and_from_everywhere() {
    let (here, there) = (workplace(), workplace());
    let first = said(here.path(), &format!("{PLAN} -o plan.json"));
    let again = said(here.path(), &format!("{PLAN} -o again.json"));
    said(there.path(), &format!("{PLAN} -o plan.json"));
    assert_eq!(first.replace("plan.json", "again.json"), again);
    let read = |path| std::fs::read(path).unwrap();
    let plan = read(here.path().join("plan.json"));
    assert!(plan == read(here.path().join("again.json")));
    assert!(plan == read(there.path().join("plan.json")));
    assert_eq!(said(here.path(), &format!("{PLAN} --json")).into_bytes(), plan);
    assert_eq!(said(here.path(), "diff plan.json again.json"), "no difference\n");
    // The name of the model's folder is not in the plan.
    let other = there.path().join("another-name");
    std::fs::create_dir(&other).unwrap();
    std::fs::copy(repository("examples/llama-3-8b/config.json"), other.join("config.json")).unwrap();
    let renamed = PLAN.replace("examples/llama-3-8b", "another-name");
    assert_ne!(renamed, PLAN);
    said(there.path(), &format!("{renamed} -o renamed.json"));
    assert!(plan == read(there.path().join("renamed.json")));
    said(there.path(), "plan --check plan.json another-name");
    insta::assert_snapshot!("plan", first);
    insta::assert_snapshot!("explain", said(here.path(), "explain plan.json"));
}

#[test]
fn a_plan_holds_what_its_schema_promises() {
    let folder = workplace();
    let plan: Value = serde_json::from_str(&said(folder.path(), &format!("{PLAN} --json"))).unwrap();
    assert_eq!(plan["model"]["digest"].as_str().unwrap().len(), 64);
    assert_eq!(plan["workload"]["dtype"], "bf16");
    assert_eq!(plan["gpus"], 8);
    let product: u64 = plan["mesh"].as_array().unwrap().iter().map(|a| a["size"].as_u64().unwrap()).product();
    assert_eq!(product, 8);
    let schema = std::fs::read_to_string(repository("docs/book/src/plan.schema.json")).unwrap();
    let schema: Value = serde_json::from_str(&schema).unwrap();
    let properties = schema["properties"].as_object().unwrap();
    for field in plan.as_object().unwrap().keys() {
        assert!(properties.contains_key(field), "{field} is not in the schema");
    }
    for field in schema["required"].as_array().unwrap() {
        assert!(plan.get(field.as_str().unwrap()).is_some(), "{field} is not in the plan");
    }
}

#[test]
fn every_target_is_emitted_and_reads_back() {
    let folder = workplace();
    let at = folder.path();
    said(at, &format!("{PLAN} -o plan.json"));
    let ir = said(at, "emit plan.json --target ir");
    let module = text::parse(&ir).unwrap();
    verify::verify(&module).unwrap();
    assert_eq!(text::print(&module), ir);
    let printed = said(at, "emit plan.json --target schedule");
    let parsed = schedule::parse(&printed).unwrap();
    schedule::verify(&parsed).unwrap();
    assert_eq!(schedule::print(&parsed), printed);
    let json: Value = serde_json::from_str(&said(at, "emit plan.json --target json")).unwrap();
    assert!(json.is_object());
    let dot = said(at, "emit plan.json --target dot");
    assert!(dot.starts_with("digraph") && dot.trim_end().ends_with('}'));
    assert_eq!(dot.matches('{').count(), dot.matches('}').count());

    let svg = said(at, "emit plan.json --target svg");
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    assert_eq!(svg.matches("<g ").count(), module.functions.len());
    let mermaid = said(at, "emit plan.json --target mermaid");

    let targets = [("ir", &ir), ("schedule", &printed), ("dot", &dot), ("svg", &svg), ("mermaid", &mermaid)];
    for (target, printed) in targets {
        assert_eq!(said(at, &format!("emit plan.json --target {target} -o file")), "wrote file\n");
        assert_eq!(&std::fs::read_to_string(at.join("file")).unwrap(), printed);
    }
    insta::assert_snapshot!("mermaid_of_llama_3_8b", mermaid);
    insta::assert_snapshot!("ir_of_llama_3_8b", ir);
    insta::assert_snapshot!("schedule_of_llama_3_8b", printed);
}

#[test]
fn the_cuda_folder_is_complete() {
    let folder = workplace();
    let at = folder.path();
    said(at, &format!("{PLAN} -o plan.json"));
    said(at, "emit plan.json --target cuda -o out");
    let files = listing(&at.join("out"));
    let names =
        files.iter().filter(|p| p.is_file()).map(|p| p.strip_prefix(at).unwrap().display().to_string());
    let names: Vec<String> = names.collect();
    for name in ["out/Makefile", "out/main.cu", "out/README.md"] {
        assert!(names.iter().any(|n| n == name), "{name} in {names:?}");
    }
    // Every quoted include is one of the files.
    for file in files.iter().filter(|p| p.is_file()) {
        let source = std::fs::read_to_string(file).unwrap();
        for include in source.lines().filter_map(|l| l.trim().strip_prefix("#include \"")) {
            let include = include.split('"').next().unwrap();
            let beside = file.parent().unwrap().join(include);
            assert!(beside.is_file() || at.join("out").join(include).is_file(), "{include} of {file:?}");
        }
    }
    // A second emission over the first changes nothing.
    let before: Vec<_> = files.iter().filter(|p| p.is_file()).map(|p| std::fs::read(p).unwrap()).collect();
    said(at, "emit plan.json --target cuda -o out");
    assert_eq!(listing(&at.join("out")), files);
    let after: Vec<_> = files.iter().filter(|p| p.is_file()).map(|p| std::fs::read(p).unwrap()).collect();
    assert!(before == after);
}

#[test]
fn collectives_are_cut_into_chunks_where_a_step_is_faster() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let model = repository("examples/llama-3-8b");
    let planned = |layout: &str| {
        said(at, &format!("plan {} --gpus 8 --seq 8192 --strategy {layout} -o plan.json", model.display()));
        let plan = std::fs::read_to_string(at.join("plan.json")).unwrap();
        let plan: serde_json::Value = serde_json::from_str(&plan).unwrap();
        let fuse = plan["options"]["fuse"].as_str().unwrap().to_owned();
        (fuse, plan["time"]["step_seconds"].as_f64().unwrap())
    };
    let (fuse, seconds) = planned("megatron-tp-sp");
    assert!(fuse.contains("overlap"), "{fuse}");
    let (fuse, whole) = planned("megatron-tp-sp --fuse fold+pack");
    assert!(fuse == "fold+pack" && seconds < 0.95 * whole, "{fuse}: {seconds} s, {whole} s");
    assert_eq!(planned("ring").0, "fold+pack");
}

#[test]
fn a_plan_runs_small_and_is_verified() {
    let folder = workplace();
    let at = folder.path();
    said(at, &format!("{PLAN} -o plan.json"));
    let run = said(at, "run plan.json --shrink");
    assert!(run.starts_with("llama-8.0b, ") && run.contains(" on 8 ranks ("), "{run}");
    assert!(run.contains("\npassed: no error is above"), "{run}");
    assert_eq!(run, said(at, "run plan.json --shrink"), "the same seed gives the same numbers");
    assert_ne!(run, said(at, "run plan.json --shrink --seed 1"));
    let verified = said(at, "verify plan.json");
    assert!(verified.contains("\npassed: no error is above"), "{verified}");
    said(at, "run plan.json --shrink -o outputs.safetensors");
    let held = said(at, "run plan.json --shrink --expect outputs.safetensors --tolerance 0");
    assert!(held.contains("0.000e0"), "{held}");
    let other = line(at, "run plan.json --shrink --seed 1 --expect outputs.safetensors");
    assert_eq!(other.code, 1, "{other:#?}");
    assert!(other.out.contains("FAILED"));
}

#[test]
fn differences_are_said_and_end_with_one() {
    let folder = workplace();
    let at = folder.path();
    said(at, &format!("{PLAN} -o a.json"));
    said(at, &format!("{PLAN} --strategy megatron-tp -o b.json"));
    let ran = line(at, "diff a.json b.json");
    assert_eq!((ran.code, ran.err.as_str()), (1, ""));
    for word in ["strategy", "ulysses", "megatron-tp"] {
        assert!(ran.out.contains(word), "{word} in {}", ran.out);
    }
    assert_eq!(line(at, "diff b.json b.json").code, 0);
}

#[test]
fn passes_are_watched() {
    let folder = workplace();
    let at = folder.path();
    let single = "plan examples/llama-3-8b --gpus 1 --seq 256 --strategy single -o one.json";
    said(at, single);
    let program = said(at, "emit one.json --target ir");
    // One device has no mesh and no layout; what `opt` takes is the whole program.
    let module = ithaca_passes::import::import(
        &serde_json::from_str(&std::fs::read_to_string(at.join("examples/llama-3-8b/config.json")).unwrap())
            .unwrap(),
        "llama-3-8b",
        &ithaca_passes::import::Workload::prefill(1, 256),
    )
    .unwrap();
    assert!(program.contains("@main"));
    std::fs::write(at.join("model.ith"), text::print(&module)).unwrap();

    assert_eq!(said(at, "opt model.ith"), text::print(&module), "no pass changes nothing");
    let pipeline = "--pipeline shard{strategy=ulysses,ulysses=4},lower-reshards";
    let plain = said(at, &format!("opt model.ith {pipeline}"));
    verify::verify(&text::parse(&plain).unwrap()).unwrap();

    let each = said(at, &format!("opt model.ith {pipeline} --verify-each"));
    let lines: Vec<&str> = each.lines().filter(|l| l.starts_with("// after")).collect();
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(lines.iter().all(|l| l.ends_with(": verified")), "{lines:?}");

    let after = said(at, &format!("opt model.ith {pipeline} --print-after shard"));
    assert!(after.contains("reshard") && after.ends_with(&plain));
    let all = said(at, &format!("opt model.ith {pipeline} --print-after all"));
    assert_eq!(all.matches("// after ").count(), 2);

    let timed = said(at, &format!("opt model.ith {pipeline} --timings"));
    for row in ["parse", "shard", "lower-reshards", "verification"] {
        assert!(timed.lines().any(|l| l.starts_with("//") && l.trim_end().contains(row)), "{row}: {timed}");
    }
    assert!(timed.ends_with(&plain), "times stand before the program and change nothing in it");

    let none = said(at, "opt model.ith --pipeline shard{strategy=ulysses,ulysses=4} --stop-after 0");
    let none = text::parse(&none).unwrap();
    assert_eq!((none.level, &none.functions), (module.level, &module.functions));
    let rewrites =
        (1..400).find(|n| said(at, &format!("opt model.ith {pipeline} --stop-after {n}")) == plain);
    assert!(rewrites.is_some_and(|n| n > 1), "some number of rewrites is enough: {rewrites:?}");

    assert_eq!(said(at, &format!("opt model.ith {pipeline} -o out.ith")), "");
    assert_eq!(std::fs::read_to_string(at.join("out.ith")).unwrap(), plain);
}

#[test]
fn lists_name_what_there_is() {
    let folder = workplace();
    for what in ["ops", "passes", "strategies", "models", "clusters"] {
        insta::assert_snapshot!(format!("list_{what}"), said(folder.path(), &format!("list {what}")));
    }
}

#[test]
fn list_alone_names_the_lists() {
    let folder = workplace();
    let lists = said(folder.path(), "list");
    for name in ["ops", "passes", "strategies", "models", "clusters"] {
        assert!(lists.contains(&format!("ithaca list {name} ")), "{lists}");
    }
}

#[test]
fn tokens_have_units() {
    let folder = workplace();
    assert_eq!(
        said(folder.path(), "plan examples/llama-3-8b --gpus 8 --seq 128k --strategy ulysses"),
        said(folder.path(), "plan examples/llama-3-8b --gpus 8 --seq 131072 --strategy ulysses"),
    );
}

#[test]
fn axes_of_the_mesh_imply_strategies() {
    let folder = workplace();
    let run = |options: &str| said(folder.path(), &format!("run examples/gpt2 --shrink {options}"));
    for (options, strategy) in [
        ("--strategy ulysses --mesh dp=2,ulysses=2 --batch 2", "data-parallel+ulysses"),
        ("--strategy ring --mesh ring=2,tp=2", "ring+megatron-tp"),
        ("--mesh tp=2", "megatron-tp"),
        ("--strategy megatron-tp-sp --mesh tp=2", "megatron-tp-sp"),
        (
            "--strategy ulysses --mesh pp=2,ulysses=2 --mode train --batch 2 --micro-batches 2",
            "pipeline+ulysses",
        ),
    ] {
        let out = run(options);
        assert!(out.starts_with(&format!("gpt2, {strategy} on ")), "{options}: {out}");
    }
    let refusal = refused(folder.path(), "run examples/gpt2 --shrink --mesh ulysses=2");
    assert!(refusal.contains("choose a strategy with `--strategy`"), "{refusal}");
}

#[test]
fn optional_inputs_are_zero() {
    let folder = workplace();
    let golden = repository("tests/goldens/bert");
    let inputs = store::open(golden.join("io.safetensors")).unwrap();
    let ids = inputs.read("input_ids").unwrap();
    let zeros = Tensor { shape: ids.shape.clone(), data: vec![0.0; ids.data.len()] };
    let write = |name: &str, tensors: &[(&str, Stored, &Tensor<f64>)]| {
        store::write(&folder.path().join(name), tensors).unwrap();
    };
    write("with.safetensors", &[("input_ids", Stored::I64, &ids), ("token_type_ids", Stored::I64, &zeros)]);
    write("without.safetensors", &[("input_ids", Stored::I64, &ids)]);
    let run = |inputs: &str| {
        let model = golden.display();
        said(folder.path(), &format!("run {model} --inputs {inputs}.safetensors -o {inputs}.out"))
    };
    run("with");
    assert!(run("without").contains("inputs from file, token_type_ids zero"));
    let read = |name: &str| std::fs::read(folder.path().join(name)).unwrap();
    assert_eq!(read("with.out"), read("without.out"));
}

#[test]
fn every_shell_has_completions() {
    let folder = workplace();
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = said(folder.path(), &format!("completions {shell}"));
        for word in ["plan", "emit", "--strategy"] {
            let word = if shell == "fish" { word.trim_start_matches("--") } else { word };
            assert!(script.contains(word), "{shell} completes {word}");
        }
    }
}

#[test]
fn every_command_shows_an_example() {
    let folder = workplace();
    let top = said(folder.path(), "--help");
    insta::assert_snapshot!("help", top);
    for command in
        ["plan", "emit", "export", "import", "run", "verify", "diff", "opt", "explain", "list", "completions"]
    {
        assert!(top.contains(&format!("\n  {command} ")), "{command} is listed");
        let help = said(folder.path(), &format!("{command} --help"));
        assert!(help.contains("Example"), "{command}");
        assert!(help.contains(&format!("  ithaca {command} ")), "{command}: {help}");
        assert_eq!(said(folder.path(), &format!("help {command}")), help);
        let longest = help.lines().map(|line| line.chars().count()).max();
        assert!(longest <= Some(120), "{command} has a line of {longest:?} columns");
    }
    for (command, headings) in [
        ("plan", ["Workload:", "Training:", "Cluster and mesh:", "Layout:", "Output:"]),
        ("run", ["Data:", "Comparison:", "Checkpoints:", "Device:", "Diagnosis:"]),
    ] {
        let help = said(folder.path(), &format!("{command} --help"));
        assert!(headings.iter().all(|heading| help.lines().any(|line| line == *heading)), "{help}");
    }
    assert!(said(folder.path(), "--version").starts_with("ithaca "));
}

/// A terminal whose rows are not known has columns all the same.
#[cfg(target_os = "linux")]
#[test]
fn lines_are_as_long_as_the_terminal_is_wide() {
    use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
    use rustix::termios::{Winsize, tcsetwinsize};
    use std::io::Read;
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY;
    let terminal = openpt(flags).unwrap();
    grantpt(&terminal).unwrap();
    unlockpt(&terminal).unwrap();
    tcsetwinsize(&terminal, Winsize { ws_row: 0, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    let end = ioctl_tiocgptpeer(&terminal, flags).unwrap();
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_ithaca"))
        .args(["list", "ops"])
        .stdout(end)
        .spawn()
        .unwrap();
    let mut printed = Vec::new();
    // Once the program has ended, there is nothing to read, which is an error.
    let _ = std::fs::File::from(terminal).read_to_end(&mut printed);
    assert!(child.wait().unwrap().success());
    let printed = String::from_utf8(printed).unwrap();
    assert!(printed.lines().count() > 100, "{printed}");
    let long = printed.lines().find(|line| line.trim_end().chars().count() > 80);
    assert_eq!(long, None);
}

#[test]
fn a_reader_that_leaves_early_is_no_error() {
    use std::process::{Command, Stdio};
    let folder = workplace();
    let mut child = Command::new(env!("CARGO_BIN_EXE_ithaca"))
        .args(PLAN.split_whitespace().chain(["--json"]))
        .current_dir(folder.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(output.stderr.is_empty());
}

#[test]
fn choices_of_a_plan_are_replayed_and_a_missing_or_impossible_one_is_named() {
    let folder = workplace();
    let at = folder.path();
    said(at, &format!("{PLAN} -o plan.json"));
    let text = std::fs::read_to_string(at.join("plan.json")).unwrap();
    let plan: Value = serde_json::from_str(&text).unwrap();
    let (topic, key) = ("reshards", "bf16[b s@ulysses h d] -> bf16[b s h@ulysses d]");
    assert_eq!(plan["choices"][topic][key], "all_to_all(axis=ulysses, split=h, concat=s)");
    let edited = |edit: &dyn Fn(&mut serde_json::Map<String, Value>)| {
        let mut plan = plan.clone();
        edit(plan["choices"][topic].as_object_mut().unwrap());
        std::fs::write(at.join("edited.json"), plan.to_string()).unwrap();
    };
    for (edit, says) in [
        (None, format!("records no choice of `{topic}` for `{key}`")),
        (Some("all_reduce(axis=ulysses)"), "it does not lead there".to_owned()),
    ] {
        edited(&|choices| match edit {
            None => drop(choices.remove(key)),
            Some(text) => choices[key] = text.into(),
        });
        for command in ["run edited.json --shrink", "verify edited.json", "explain edited.json"] {
            let refusal = refused(at, command);
            assert!(refusal.contains("[P05]") && refusal.contains(&says), "{command}: {refusal}");
        }
    }
}
