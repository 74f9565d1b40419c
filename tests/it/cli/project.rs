//! `init` and `check`, and the script of the action that runs `check`.

use std::path::Path;
use std::process::Command;

use super::{line, refused, repository, said, workplace};

const PROJECT: &str = "\
plans = \"plans\"

[models]
llama = \"examples/llama-3-8b\"
qwen = \"examples/qwen2.5-7b/config.json\"

[clusters]
h100 = { cluster = \"dgx-h100\", gpus = 4 }

[workloads]
prompt = { seq = \"8k\", only = [\"ulysses\", \"ring\"] }
fixed = { seq = 4096, strategy = \"megatron-tp\", models = [\"llama\"] }
";

fn write(folder: &Path, text: &str) {
    std::fs::write(folder.join("ithaca.toml"), text).unwrap();
}

#[test]
fn a_file_is_written_and_its_plans_are_checked() {
    let folder = workplace();
    let at = folder.path();
    let out = said(at, "init examples/llama-3-8b");
    assert!(out.starts_with("wrote ithaca.toml: "), "{out}");
    assert!(refused(at, "init").contains("error[C01]: `ithaca.toml` exists"));
    let program = repository("examples/attention.ith");
    let of_program = refused(workplace().path(), &format!("init {}", program.display()));
    assert!(of_program.contains("is a program in text form"), "{of_program}");
    let ran = line(at, "check");
    assert_eq!(ran.code, 1, "{ran:#?}");
    assert_eq!(
        ran.out,
        "llama-3-8b h100 prompt: not committed\n1 plan: 1 not committed\n\
         `ithaca check --bless` writes the plans\n"
    );
    assert!(!at.join("plans").exists(), "only --bless writes");
    assert!(said(at, "check --bless").ends_with("wrote plans/llama-3-8b/h100/prompt.json\n"));
    assert_eq!(said(at, "check"), "llama-3-8b h100 prompt: as committed\n1 plan: 1 as committed\n");
    assert!(said(at, "plan --check plans/llama-3-8b/h100/prompt.json").contains("is the plan"));
    // A file that names no model yet says so.
    std::fs::remove_file(at.join("ithaca.toml")).unwrap();
    said(at, "init");
    assert!(refused(at, "check").contains("error[C30]: `[models]` is empty"));
}

#[test]
fn every_plan_of_the_file_is_compared() {
    let folder = workplace();
    let at = folder.path();
    write(at, PROJECT);
    said(at, "check --update");
    let names = ["llama/h100/prompt", "llama/h100/fixed", "qwen/h100/prompt"];
    let read = |name: &str| std::fs::read_to_string(at.join(format!("plans/{name}.json"))).unwrap();
    let before = names.map(read);
    assert!(said(at, "check").ends_with("3 plans: 3 as committed\n"));
    // One differs, one is gone, one is not named any more.
    write(at, &PROJECT.replace("4096", "8192").replace("prompt", "prompts"));
    let ran = line(at, "check");
    assert_eq!(ran.code, 1, "{ran:#?}");
    insta::assert_snapshot!("differing", ran.out);
    assert_eq!(names.map(read), before, "a check writes nothing");
    // What is not named stays for its owner to delete.
    assert_eq!(line(at, "check --bless").code, 1);
    for model in ["llama", "qwen"] {
        std::fs::remove_file(at.join(format!("plans/{model}/h100/prompt.json"))).unwrap();
    }
    said(at, "check");
    // A plan that cannot be read is an error, and is written anew where that is asked.
    std::fs::write(at.join("plans/llama/h100/fixed.json"), "{").unwrap();
    let refusal = refused(at, "check");
    assert!(refusal.contains("error[") && refusal.contains("llama h100 fixed: "), "{refusal}");
    said(at, "check --bless");
    said(at, "check");
}

#[test]
fn mistakes_of_the_file_are_reported_together() {
    let folder = workplace();
    let at = folder.path();
    let wrong = PROJECT
        .replace("gpus = 4", "gpu = 4, seq = 1")
        .replace("\"examples/llama-3-8b\"", "\"nowhere\"")
        .replace("seq = \"8k\"", "seq = \"8x\", mode = \"trian\", uneven-heads = 3")
        .replace("models = [\"llama\"]", "models = [\"lama\"]")
        .replace("plans = ", "plan = ");
    write(at, &wrong);
    insta::assert_snapshot!("mistakes", refused(at, "check"));
    write(at, &PROJECT.replace("[models]", "[models"));
    assert!(refused(at, "check").contains("error[C30]: not TOML"));
    assert!(refused(at, "check other.toml").contains("error[C01]"));
    write(at, "");
    let refusal = refused(at, "check");
    for table in ["models", "clusters", "workloads"] {
        assert!(refusal.contains(&format!("the table `[{table}]` is missing")), "{refusal}");
    }
    // A request that nothing satisfies names its entry and its line; the others are checked.
    write(at, &PROJECT.replace("models = [\"llama\"]", "mesh = \"ulysses=3\""));
    let refusal = refused(at, "check");
    assert!(refusal.contains("llama h100 fixed: ") && refusal.contains("ithaca.toml:"), "{refusal}");
}

#[cfg(unix)]
#[test]
fn the_action_writes_the_review_to_the_summary() {
    let folder = workplace();
    let at = folder.path();
    write(at, PROJECT);
    said(at, "check --bless");
    let script = |summary: &str| {
        let ran = Command::new("bash")
            .arg(repository("action/check.sh"))
            .env("ITHACA", env!("CARGO_BIN_EXE_ithaca"))
            .env("GITHUB_STEP_SUMMARY", at.join(summary))
            .current_dir(at)
            .output()
            .unwrap();
        (ran.status.code().unwrap(), std::fs::read_to_string(at.join(summary)).unwrap())
    };
    let (code, summary) = script("same.md");
    assert!(code == 0 && summary.starts_with("### Plans are as committed\n"), "{summary}");
    // A changed model: half of the layers.
    let config = at.join("examples/llama-3-8b/config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    let changed = text.replace("\"num_hidden_layers\": 32", "\"num_hidden_layers\": 16");
    assert_ne!(text, changed);
    std::fs::write(&config, changed).unwrap();
    let (code, summary) = script("changed.md");
    assert!(code == 1 && summary.starts_with("### Plans differ from those committed\n"), "{summary}");
    assert!(
        summary.contains("\nmodel        ") && summary.contains("llama h100 prompt: differs\n"),
        "{summary}"
    );
    std::fs::write(&config, "{").unwrap();
    let (code, summary) = script("broken.md");
    assert!(code == 2 && summary.contains("error[C02]"), "{summary}");
}

#[test]
fn the_action_and_the_hooks_name_what_exists() {
    let action = std::fs::read_to_string(repository("action.yml")).unwrap();
    for script in ["action/install.sh", "action/check.sh"] {
        assert!(action.contains(&format!("$GITHUB_ACTION_PATH/{script}")), "{script}");
        assert!(repository(script).is_file());
    }
    let hooks = std::fs::read_to_string(repository(".pre-commit-hooks.yaml")).unwrap();
    assert!(hooks.contains("entry: ithaca check\n") && hooks.contains("ithaca plan --check "));
}
