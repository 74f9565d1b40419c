//! The answer of the planner: the table, its repairs, and the review of plans.

use serde_json::Value;

use super::{line, refused, repository, said, workplace};
use crate::tier;

const PLAN: &str = "plan examples/llama-3-8b --gpus 8 --seq 8192";

/// The commands that a refusal offers.
fn offered(refusal: &str) -> Vec<&str> {
    let commands = refusal.lines().map(str::trim).filter(|line| line.starts_with("ithaca "));
    commands.collect()
}

#[test]
fn repairs_work_as_they_are_printed() {
    let root = repository("");
    let requests = [
        "plan examples/qwen2.5-7b --gpus 8 --seq 4096 --strategy ulysses",
        "plan examples/llama-3-8b --seq 7 --strategy=ulysses --mesh ulysses=8 --uneven-sequence",
        "plan examples/llama-3-8b --gpus 8 --seq 4096 --strategy single",
        "plan examples/gpt2 --gpus 2 --seq 4096 --logits all",
        "plan examples/llama-3-8b --mode train --seq 8192 --batch 8 --micro-batches 4 --pipeline interleaved \
         --train chunks=2 --strategy pipeline+megatron-tp-sp --mesh pp=2,tp=2 --zero 0 --recompute none",
        "run examples/gpt2 --shrink --gpus 5 --strategy ulysses",
        "plan examples/llama-3-8b --gpus 1 --mode train --batch 1 --seq 4096",
    ];
    for request in tier::one_in(2, requests) {
        let refusal = refused(&root, request);
        let commands = offered(&refusal);
        assert!(!commands.is_empty(), "{request}: {refusal}");
        for command in commands {
            let ran = line(&root, command.strip_prefix("ithaca ").unwrap());
            assert_eq!(ran.code, 0, "{request}\n{command}: {ran:#?}");
        }
    }
}

/// A layout that is among the best only with chunks is found as it is where it is given.
#[test]
fn layouts_that_need_chunks_are_found() {
    let seconds = |more: &str| {
        let plan =
            said(&repository(""), &format!("plan examples/llama-3-70b --gpus 4 --seq 16k --json{more}"));
        let plan: Value = serde_json::from_str(&plan).unwrap();
        plan["time"]["step_seconds"].as_f64().unwrap()
    };
    let (found, given) = (seconds(""), seconds(" --mesh tp=4"));
    assert!(found <= given, "{found} s, and {given} s with `--mesh tp=4`");
}

/// Batches that are cut into chunks, and weights whose width is not that of all heads, divide as they do in the large model.
#[test]
fn small_models_are_laid_out_as_the_large_ones_are() {
    for request in [
        "examples/llama-3-8b --mode train --strategy megatron-tp --mesh tp=2 --seq 64 --batch 4 --fuse overlap",
        "examples/gpt-oss-120b --mode train --strategy usp --mesh ring=3,ulysses=2 --seq 60 --zero 3:1000",
        // Steps of tokens lack the weights of the encoder.
        "examples/t5-3b --mode decode --prompt 5,7,9;2,9 --steps 2 --mesh tp=2",
    ] {
        let out = said(&repository("."), &format!("run {request} --shrink"));
        assert!(out.contains("passed"), "{request}: {out}");
    }
}

/// Numbers of GPUs and of sequences that divide badly: what a note offers takes the time that it says, or less.
#[test]
fn faster_requests_nearby_are_noted() {
    let root = repository("");
    let seconds = |args: &str| -> f64 {
        let plan: Value = serde_json::from_str(&said(&root, &format!("{args} --json"))).unwrap();
        plan["time"]["step_seconds"].as_f64().unwrap()
    };
    for (request, options) in [
        ("--gpus 9 --seq 8k --batch 8", &["--gpus 8", "--batch 9"][..]),
        ("--gpus 6 --mode decode --batch 16 --context 8k", &["--gpus 4", "--batch 18"]),
        ("--gpus 8 --seq 8k --batch 8", &[]),
        ("--gpus 9 --seq 8k --batch 8 --strategy ring", &[]),
    ] {
        let args = format!("plan examples/llama-3-8b {request}");
        let notes = said(&root, &args);
        let offers = notes.lines().filter(|line| line.contains(" in place of "));
        let offered: Vec<&str> = offers.map(|line| line.rsplit('`').nth(1).unwrap()).collect();
        assert_eq!(offered, options, "{notes}");
        for option in options {
            let (flag, _) = option.split_once(' ').unwrap();
            let kept: Vec<&str> = request.split(' ').collect();
            let at = kept.iter().position(|word| *word == flag).unwrap();
            let changed = request.replace(&format!("{flag} {}", kept[at + 1]), option);
            assert!(
                seconds(&format!("plan examples/llama-3-8b {changed}")) < 0.95 * seconds(&args),
                "{option}"
            );
        }
    }
}

#[test]
fn repairs_that_would_be_refused_are_not_offered() {
    let root = repository("");
    let qwen = "run tests/goldens/qwen2-late-windows --mode train --seed 157321 --shrink --seq 64 --batch 4 \
                --order contiguous --fuse overlap --strategy megatron-tp+sparse-fetch --mesh tp=3,ring=1";
    for (request, code, n) in [
        ("plan examples/gpt2 --mode train --seq 2048 --batch 3 --micro-batches 2 --gpus 2", "M08", 0),
        ("plan examples/gpt2 --seq 2048 --gpus 2 --strategy rsa+ring", "M08", 0),
        ("plan examples/gpt2 --seq 2048 --gpus 2", "M08", 1),
        ("run tests/goldens/bert --mode train --mesh tp=2 --batch 1 --seq 64", "M08", 0),
        ("verify tests/goldens/bert --mode train --mesh tp=2 --batch 1 --seq 64", "M08", 0),
        ("verify tests/goldens/bert --mesh tp=2 --batch 1 --seq 64", "M08", 1),
        ("run tests/goldens/bert-masked-lm --mode decode --prompt 1,5,7", "M09", 0),
        ("run tests/goldens/t5 --mode decode --prompt 1,2,3,4,5 --page 4 --offload cache=1", "M09", 0),
        ("run tests/goldens/t5 --mode decode --prompt 1,2,3 --target-seq 5", "M09", 0),
        ("run tests/goldens/llama-gqa --mode decode --prompt 1,5,7 --steps 2 --page 1000", "M09", 1),
        ("run tests/goldens/bert-masked-lm --mode decode --seq 16", "M09", 1),
        (qwen, "P20", 2),
    ] {
        let refusal = refused(&root, request);
        assert!(refusal.contains(&format!("error[{code}]")), "{request}: {refusal}");
        let commands = offered(&refusal);
        assert_eq!(commands.len(), n, "{request}: {refusal}");
        for command in commands {
            let ran = line(&root, command.strip_prefix("ithaca ").unwrap());
            assert_eq!(ran.code, 0, "{request}\n{command}: {ran:#?}");
        }
    }
}

#[test]
fn refusals_for_memory_say_what_would_be_less() {
    let root = repository("");
    let decode = "run tests/goldens/llama-gqa --mode decode --prompt 1,2 --steps 1000000000";
    for request in [decode.to_owned(), format!("{decode} --shrink")] {
        let refusal = refused(&root, &request);
        assert!(refusal.contains("error[C11]") && refusal.contains("fewer `--steps`"), "{refusal}");
        assert!(!refusal.contains("--shrink"), "{refusal}");
    }
    let large =
        "plan examples/llama-3.1-405b --mode train --seq 1k --batch 8 --gpus 8 --strategy megatron-tp";
    let refusal = refused(&root, large);
    assert!(refusal.contains("nor do `--seq` and `--batch`"), "{refusal}");
    let refusal = refused(&root, "plan examples/llama-3-8b --mode decode --context 8k --page 8193 --gpus 8");
    assert!(refusal.contains("a page of 8193 tokens in caches of 8192"), "{refusal}");
    assert_eq!(offered(&refusal).len(), 1, "{refusal}");
}

#[test]
fn a_program_in_text_form_is_planned_with_its_own_workload() {
    let root = repository("");
    let folder = workplace();
    let plan = folder.path().join("plan.json").display().to_string();
    let out = said(&root, &format!("plan examples/attention.ith --gpus 4 -o {plan}"));
    assert!(out.starts_with("attention: prefill of 1 x 120 tokens in f32"), "{out}");
    assert!(said(&root, &format!("run {plan}")).contains("passed"));
    assert!(said(&root, &format!("plan --check {plan}")).contains("is the plan that is chosen"));
    for (request, reason) in [
        ("plan examples/attention.ith --gpus 4 --seq 8", "has its own workload"),
        (&format!("run {plan} --shrink"), "has fixed sizes"),
        (&format!("export {plan} --to megatron"), "has no configuration of a model"),
    ] {
        let refusal = refused(&root, request);
        assert!(refusal.contains(reason), "{request}: {refusal}");
    }
    // Passes have run before: rules, as here, or those of a training step.
    let rewritten = folder.path().join("rewritten.ith").display().to_string();
    said(
        &root,
        &format!(
            "opt examples/attention.ith --pipeline rules --rules examples/rules/algebra.rules -o {rewritten}"
        ),
    );
    assert!(std::fs::read_to_string(&rewritten).unwrap().contains("pipeline \"rules"));
    said(&root, &format!("plan {rewritten} --gpus 2 -o {plan}"));
    assert!(said(&root, &format!("verify {plan}")).contains("passed"));
    // One sequence has no data-parallel ranks.
    let refusal = refused(&root, "plan examples/gpt2 --seq 64 --gpus 8 --mesh dp=2,tp=4");
    assert!(refusal.contains("does not divide by the data-parallel degree 2"), "{refusal}");
}

#[test]
fn ranks_that_send_nothing_prove_no_communication() {
    let run = "run tests/goldens/llama-gqa --seq 16 --batch 2";
    for (layout, verdict) in [
        ("--strategy data-parallel --mesh dp=2", "ranks send nothing: there is no communication"),
        ("--strategy single", "nothing is split: there is no communication"),
    ] {
        let out = said(&repository(""), &format!("{run} {layout}"));
        assert!(out.contains(verdict), "{out}");
    }
}

#[test]
fn the_table_shows_as_much_as_is_asked() {
    let root = repository("");
    let plans = |options: &str| {
        let out = said(&root, &format!("plan examples/qwen2.5-7b --gpus 8 --seq 8192 {options}"));
        (out.matches(" GiB\n").count(), out.contains("refused["), out)
    };
    let (some, _, out) = plans("");
    assert!(some == 10 && out.contains(" slower plans are not shown (--all)"), "{out}");
    assert_eq!(plans("--top 3").0, 3);
    let (all, refused_each, out) = plans("--all");
    assert!(all > 10 && refused_each && !out.contains("not shown"), "{out}");
    // The last of both counts.
    assert_eq!(plans("--top 3 --all").0, all);
    assert_eq!(plans("--all --top 3").0, 3);
    let (_, _, out) = plans("--top 1 --why-not");
    assert!(out.contains("ulysses ulysses=8: refused[P20]"), "{out}");
    let refusal = refused(&root, &format!("{PLAN} --top 0"));
    assert!(refusal.contains("error[C00]: `--top 0` shows no plan"), "{refusal}");
    // Of a refused request no layout is shown that was not asked for.
    let asked = "plan examples/qwen2.5-7b --gpus 8 --seq 8192 --strategy ulysses";
    assert!(refused(&root, asked).starts_with("error[P20]"));
    assert!(refused(&root, &format!("{asked} --why-not")).starts_with("ulysses ulysses=8: refused[P20]"));
}

#[test]
fn a_search_is_narrowed() {
    let root = repository("");
    let tried = |options: &str| said(&root, &format!("{PLAN} --all {options}"));
    let out = tried("--only ulysses,megatron-tp --max-tp 2");
    assert!(out.contains("ulysses ulysses=8") && out.contains("ulysses+megatron-tp ulysses=4,tp=2"), "{out}");
    assert!(!out.contains("ring=") && !out.contains("tp=4") && !out.contains("tp=8"), "{out}");
    assert!(!tried("--without ulysses,usp").contains("ulysses="));
    // A strategy that is tried only by name.
    assert!(tried("--only dist-flash").contains("dist-flash "));
    for (options, error) in [
        ("--only ulyses", "did you mean `ulysses`"),
        ("--only ulysses+ring", "list them, as in `--only ulysses,ring`"),
        ("--only data-parallel", "the strategies that are tried have no mesh of 8 GPUs"),
    ] {
        let refusal = refused(&root, &format!("{PLAN} {options}"));
        assert!(refusal.contains(error), "{refusal}");
    }
    let folder = workplace();
    said(folder.path(), &format!("{PLAN} --only ring -o plan.json"));
    let checked = said(folder.path(), "plan --check plan.json");
    assert!(checked.contains("is the plan that is chosen for its request"), "{checked}");
}

#[test]
fn a_plan_is_reviewed() {
    let folder = workplace();
    let at = folder.path();
    said(at, &format!("{PLAN} -o a.json"));
    said(at, &format!("{PLAN} --strategy megatron-tp -o b.json"));
    let diff = |options: &str| line(at, &format!("diff a.json b.json {options}"));
    let ran = diff("");
    assert_eq!(ran.code, 1);
    insta::assert_snapshot!("review", ran.out);
    assert_eq!(diff("--only workload,model").out, "no difference\n");
    said(at, &format!("{} --strategy megatron-tp -o longer.json", PLAN.replace("8192", "8320")));
    let longer = "diff b.json longer.json --only time";
    assert_eq!((line(at, longer).code, line(at, &format!("{longer} --tolerance 5%")).code), (1, 0));
    assert_eq!(diff("--only time").out.lines().next().unwrap().split(' ').next(), Some("time"));
    assert!(diff("--all").out.contains("time.step_seconds: "));
    assert!(diff("--only search --alternatives").out.contains("alternatives "));
    let refusal = refused(at, "diff a.json b.json --only layuot");
    assert!(refusal.contains("did you mean `layout`?"), "{refusal}");
    for tolerance in ["x", "-1%", "100%", ""] {
        assert_eq!(super::ithaca(at, ["diff", "a.json", "b.json", "--tolerance", tolerance]).code, 2);
    }
}

#[test]
fn a_plan_is_checked_against_its_own_request() {
    let folder = workplace();
    let at = folder.path();
    said(at, &format!("{PLAN} --strategy megatron-tp -o plan.json"));
    said(
        at,
        &format!(
            "{} --strategy megatron-tp -o other.json",
            PLAN.replace("examples/", "./examples/../examples/")
        ),
    );
    let read = |name: &str| std::fs::read_to_string(at.join(name)).unwrap();
    assert_eq!(read("plan.json"), read("other.json"), "the path of the model is not in the plan");
    said(at, "plan --check plan.json");
    said(at, "plan --check plan.json examples/llama-3-8b");
    // The same plan, had all strategies been asked for.
    let mut plan: Value = serde_json::from_str(&read("plan.json")).unwrap();
    plan["search"].as_object_mut().unwrap().remove("strategy");
    std::fs::write(at.join("free.json"), plan.to_string()).unwrap();
    let ran = line(at, "plan --check free.json");
    assert!(ran.code == 1 && ran.out.contains("\nlayout       megatron-tp tp=8 -> "), "{ran:#?}");
    let ran = line(at, "plan --check plan.json examples/qwen2.5-7b");
    assert_eq!(ran.code, 2, "28 heads do not divide by 8: {ran:#?}");
    plan["version"] = 3.into();
    std::fs::write(at.join("old.json"), plan.to_string()).unwrap();
    let refusal = refused(at, "plan --check old.json");
    assert!(refusal.contains("error[M32]") && refusal.contains("make the plan anew"), "{refusal}");
    let refusal = refused(at, "plan --check plan.json --seq 64");
    assert!(refusal.contains("`--seq` cannot be combined with `--check`"), "{refusal}");
}

/// A search in which layouts grow from the best gives the plan of one that compiles all.
#[test]
fn searches_that_grow_find_the_best() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("plan.json");
    for model in tier::one_in(2, ["llama-3-8b", "mixtral-8x7b"]) {
        let dir = repository(&format!("examples/{model}"));
        let [grown, whole] = ["low", "high"].map(|effort| -> Value {
            let request = "plan . --mode decode --gpus 16 --batch 64 --context 8k";
            said(&dir, &format!("{request} --effort {effort} -o {}", file.display()));
            serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap()
        });
        assert!(grown["n_passed_over"].as_u64() > Some(100), "{model}: {}", grown["n_passed_over"]);
        assert_eq!(whole.get("n_passed_over"), None, "{model}");
        for field in ["strategy", "mesh", "time"] {
            assert_eq!(grown[field], whole[field], "{model}");
        }
    }
}

/// A plan says how many layouts its search passed over, and is read again.
#[test]
fn plans_of_large_searches_are_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("plan.json").display().to_string();
    let dir = repository("examples/llama-3.1-405b");
    said(&dir, &format!("plan . --gpus 2048 --seq 131072 -o {file}"));
    let explained = said(&dir, &format!("explain {file}"));
    assert!(explained.contains("were not compiled (`--effort high`)"), "{explained}");
}

/// Another layout would not help where the framework lacks the model.
#[test]
fn exports_of_other_models_offer_no_search_of_layouts() {
    let folder = workplace();
    let at = folder.path();
    let plan = |model: &str, args: &str| {
        let model = repository("tests/goldens").join(model);
        said(at, &format!("plan {} {args} --gpus 2 -o plan.json", model.display()))
    };
    plan("t5", "--mode decode --batch 2 --context 64");
    let refusal = refused(at, "export plan.json --to vllm");
    assert!(refusal.starts_with("error[P34]: t5 is not a decoder"), "{refusal}");
    assert!(!refusal.contains("= help"), "{refusal}");
    plan("llama-gqa", "--mode train --seq 64 --batch 2 --strategy dist-flash --mesh ring=2");
    let refusal = refused(at, "export plan.json --to megatron");
    assert!(refusal.contains("`ithaca plan … --for megatron` searches"), "{refusal}");
}
