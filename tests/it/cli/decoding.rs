//! `run --mode decode`: prompts of different lengths are continued, whole and in layouts, as the library continues them.

use std::path::Path;

use ithaca_kernels::store::{SafeTensorsFile, TensorSource, Tensors};
use ithaca_kernels::{Tensor, oracle};

use super::{line, refused, repository, said};
use crate::golden::{Golden, imported, names};
use crate::tier;

/// The library's tokens and the logits of every step, for prompts of 40 and 17 tokens in one batch.
#[test]
fn goldens_are_continued_as_the_library_continues_them() {
    let layouts = [
        "",
        "--chunk 7",
        "--context 300 --mesh dp=2",
        "--mesh tp=2",
        "--mesh tp=4 --chunk 16",
        "--mesh tp=8",
        "--mesh dcp=2",
        "--mesh dcp=4 --chunk 7",
        "--mesh tp=2,dcp=2",
        "--mesh tp=2,dcp=4",
        "--mesh dp=2,dcp=2",
        "--strategy decode-reduce --mesh cp=2",
        "--strategy decode-reduce --mesh cp=4 --chunk 7",
        "--strategy megatron-tp+decode-reduce --mesh tp=2,cp=2",
        "--strategy decode-reduce --mesh cp=2 --order contiguous",
        "--strategy decode-reduce --mesh cp=2 --order striped:4",
        "--mesh pp=2 --chunk 7",
        "--mesh pp=2 --micro-batches 2",
        "--mesh dp=2,pp=2,tp=2",
        "--mesh pp=2,dcp=2",
        "--strategy ring --mesh ring=2",
        "--page 16",
        "--page 4 --mesh tp=2,dcp=2 --chunk 7",
        "--page 16 --mesh dp=2,dcp=2",
        "--page 4 --mesh pp=2,tp=2 --micro-batches 2",
        "--strategy usp --mesh ring=2,ulysses=2 --chunk 7",
        "--strategy megatron-tp-sp --mesh tp=2",
    ];
    let models = [
        "llama-gqa",
        "gpt2",
        "mistral-swa",
        "qwen2",
        "olmo3",
        "deepseek-v3",
        "mixtral",
        "phi3-partial-window",
        "t5",
    ];
    let cases = models.into_iter().flat_map(|model| layouts.map(|layout| (model, layout)));
    // The latent model has four heads, and a head is never split. An encoder reads prompts whole.
    let cases = cases.filter(|case| *case != ("deepseek-v3", "--mesh tp=8"));
    let cases = cases.filter(|(model, layout)| *model != "t5" || !layout.contains("--chunk"));
    for (model, layout) in tier::one_in(23, cases) {
        // The learned positions of this model end at 256.
        let layout =
            layout.replace("--context 300", if model == "gpt2" { "--context 256" } else { "--context 300" });
        let dir = repository("tests/goldens").join(model);
        let io = "decode.safetensors";
        let args =
            format!("run . --mode decode --inputs {io} --expect {io} --steps 23 --tolerance 1e-5 {layout}");
        let out = said(&dir, &args);
        assert!(out.contains("passed: tolerance 1e-5"), "{model} {layout}: {out}");
    }
}

/// Caches of one layout are continued under another, with another capacity, and by further prompts.
#[test]
fn caches_are_saved_and_continued_under_another_layout() {
    let dir = repository("tests/goldens/llama-gqa");
    let folder = tempfile::tempdir().unwrap();
    let [first, second] = ["first", "second"].map(|name| folder.path().join(name).display().to_string());
    let expected = "--expect decode.safetensors --tolerance 1e-5";
    for args in [
        format!("--inputs decode.safetensors {expected} --steps 10 --mesh tp=2 --save-cache {first}"),
        format!("--prefix {first} {expected} --steps 5 --mesh dcp=4 --context 512 --save-cache {second}"),
        format!("--prefix {second} {expected} --steps 4 --mesh dp=2 --page 4 --save-cache {first}"),
        format!("--prefix {first} {expected} --steps 4 --strategy decode-reduce --mesh cp=2 --page 16"),
    ] {
        let out = said(&dir, &format!("run . --mode decode {args}"));
        assert!(out.contains("passed: tolerance 1e-5"), "{args}: {out}");
    }
    // The first token that is continued with is given as a prompt: the caches lack it.
    let line =
        |out: &str| out.lines().find(|line| line.starts_with("sequence 0: ")).unwrap()[12..].to_owned();
    let whole = line(&said(&dir, "run . --mode decode --prompt 1,2,3,4,5 --steps 4"));
    said(&dir, &format!("run . --mode decode --prompt 1,2,3,4,5 --steps 1 --save-cache {first}"));
    let second_token = whole.split(' ').nth(1).unwrap();
    let out = said(&dir, &format!("run . --mode decode --prefix {first} --prompt {second_token} --steps 2"));
    assert!(whole.ends_with(&line(&out)), "{whole}: {out}");
    let refusals = [
        format!("run . --mode decode --prefix {first} --prompt 1;2"),
        format!("run . --mode decode --prefix {first} --context 3 --steps 2"),
        format!("run ../qwen2 --mode decode --prefix {first}"),
        format!("run . --mode decode --prefix {first} --save x"),
        "run . --mode decode --prefix model.safetensors".to_owned(),
        "run . --prefix model.safetensors".to_owned(),
        "run ../t5 --mode decode --prompt 1,2,3 --chunk 2".to_owned(),
    ];
    let refusals = refusals.map(|request| refused(&dir, &request).replace(&first, "FILE"));
    insta::assert_snapshot!("caches_that_are_not_continued", refusals.join("\n"));
}

/// Of every family: logits of each step are those that a prefill of all tokens has there.
#[test]
fn continuations_have_the_logits_of_a_prefill_of_all_tokens() {
    let is_decoder = |name: &String| !name.starts_with("bert") && !name.starts_with("t5");
    for (i, name) in tier::one_in(4, names().into_iter().filter(is_decoder)).into_iter().enumerate() {
        let model = Golden::open(&name);
        let ids = model.io.read("input_ids").unwrap();
        let prompt = |row: usize, n: usize| ids.data[row * ids.shape[1]..][..n].to_vec();
        let mut prompts = [prompt(0, 9.min(ids.shape[1])), prompt(ids.shape[0] - 1, 4)];
        let text: Vec<String> =
            prompts.iter().map(|ids| ids.iter().map(f64::to_string).collect::<Vec<_>>().join(",")).collect();
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("out.safetensors");
        let layout = ["", "--chunk 4", "--mesh dp=2"][i % 3];
        let args = format!(
            "run . --mode decode --dtype f32 --prompt {} --steps 5 --stop none --unchecked {layout} -o {}",
            text.join(";"),
            file.display()
        );
        said(&repository("tests/goldens").join(&name), &args);
        let found = SafeTensorsFile::open(&file).unwrap();
        let (tokens, logits) = (found.read("tokens").unwrap(), found.read("step_logits").unwrap());
        let (steps, width) = (tokens.shape[1], logits.shape[2]);
        for (row, prompt) in prompts.iter_mut().enumerate() {
            let first = prompt.len() - 1;
            prompt.extend_from_slice(&tokens.data[row * steps..][..steps - 1]);
            let all = Tensor { shape: vec![1, prompt.len()], data: prompt.clone() };
            let all = Tensors::from_iter([("input_ids", all)]);
            let module = imported(&model.config, &name, &all);
            let whole = oracle::run::<f64>(&module, &model.weights, &all).unwrap();
            let expected = &whole["logits"].data[first * width..];
            let step = &logits.data[row * steps * width..][..steps * width];
            let scale = expected.iter().fold(0f64, |most, x| most.max(x.abs()));
            for (i, (found, expected)) in step.iter().zip(expected).enumerate() {
                let error = (found - expected).abs() / scale;
                assert!(error < 1e-5, "{name} {layout}, sequence {row}, step {}: {error:e}", i / width);
            }
        }
    }
}

/// Logits of the first token, after a prompt in parts that read what those before have written.
fn first_logits(dir: &Path, args: &str) -> Vec<f64> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("out.safetensors");
    let prompts = "--inputs decode.safetensors --chunk 7 --steps 1 --stop none --unchecked";
    said(dir, &format!("run . --mode decode {prompts} {args} -o {}", file.display()));
    let logits = SafeTensorsFile::open(&file).unwrap().read("step_logits").unwrap();
    let [steps, width] = [logits.shape[1], logits.shape[2]];
    logits.data.chunks(steps * width).flat_map(|of_sequence| of_sequence[..width].to_vec()).collect()
}

/// Pages in host memory are pages like others, whichever layer's step they are copied in, and may go on on devices.
#[test]
fn pages_in_host_memory_are_pages_like_others() {
    let layouts = [
        "--offload cache=20",
        "--offload cache=25 --mesh tp=2,dcp=2",
        "--offload cache=12 --mesh pp=2,tp=2",
        "--pages 32 --offload cache=30 --mesh dp=2",
        "--offload cache=9 --fuse none",
        "--offload cache=20 --strategy ring --mesh ring=2",
        "--offload cache=20 --strategy decode-reduce --mesh cp=2",
    ];
    let models = ["llama-gqa", "deepseek-v3", "mistral-swa", "gpt2", "mixtral"];
    let cases = models.into_iter().flat_map(|model| layouts.map(|layout| (model, layout)));
    for (model, layout) in tier::one_in(9, cases) {
        let dir = repository("tests/goldens").join(model);
        let io = "--inputs decode.safetensors --expect decode.safetensors --tolerance 1e-5 --chunk 7";
        let out = said(&dir, &format!("run . --mode decode {io} --steps 23 --page 4 {layout}"));
        assert!(out.contains("passed: tolerance 1e-5"), "{model} {layout}: {out}");
    }
    let dir = repository("tests/goldens/llama-gqa");
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache").display().to_string();
    let lines = |args: &str| {
        let out = said(&dir, &format!("run . --mode decode --unchecked --stop none {args}"));
        out.lines().find_map(|line| line.strip_prefix("sequence 0: ").map(str::to_owned)).unwrap()
    };
    let prompt = "--prompt 1,2,3,4,5,6,7,8,9";
    let whole = lines(&format!("{prompt} --steps 4"));
    for (first, then) in [
        ("--page 4 --offload cache=2 --cache-type f32", "--page 2 --offload cache=5 --mesh tp=2"),
        ("--page 4 --offload cache=2 --mesh dcp=2", ""),
        ("", "--page 4 --offload cache=1"),
    ] {
        let begun = lines(&format!("{prompt} --steps 2 {first} --save-cache {cache}"));
        let rest = lines(&format!("--prefix {cache} --steps 2 {then}"));
        assert_eq!(format!("{begun} {rest}"), whole, "{first}, then {then}");
    }
    let eight_bits = ["", "--offload cache=2", "--offload cache=2 --mesh tp=2"]
        .map(|more| lines(&format!("{prompt} --steps 3 --page 4 --cache-type f8e4m3 {more}")));
    assert!(eight_bits.iter().all(|tokens| *tokens == eight_bits[0]), "{eight_bits:?}");
}

/// A plan keeps as few pages in host memory as it needs, copies those of a layer during the layer before, and says so.
#[test]
fn plans_keep_pages_that_do_not_fit_in_host_memory() {
    let dir = repository("examples/llama-3-8b");
    let few = "plan . --mode decode --gpus 1 --context 32k --page 64";
    let args = &format!("{few} --batch 64");
    let json = |args: String| -> serde_json::Value { serde_json::from_str(&said(&dir, &args)).unwrap() };
    let plan = |more: &str| json(format!("{args} {more} --json"));
    let offloaded = plan("--offload cache");
    let pages = offloaded["workload"]["pages"]["host"].as_u64().unwrap();
    let bytes = |plan: &serde_json::Value, of: &str| plan["memory"][of].as_u64().unwrap_or(0);
    // Keys and values of 32 layers: 8 heads of 128 numbers of 2 bytes for 64 tokens.
    assert_eq!(bytes(&offloaded, "host"), pages * 64 * 32 * 2 * 8 * 128 * 2);
    assert!(bytes(&offloaded, "total") <= bytes(&offloaded, "usable"));
    assert_eq!(line(&dir, &format!("{args} --offload cache={}", pages - 1)).code, 2);
    assert_eq!(plan(&format!("--offload cache={pages}"))["memory"], offloaded["memory"]);
    assert!(
        offloaded["notes"]
            .to_string()
            .contains("2 of 2 copies from host memory made during the previous layer")
    );
    assert!(json(format!("{few} --offload cache --json"))["workload"]["pages"]["host"].is_null());
    insta::assert_snapshot!(
        [
            format!("{args} --cluster cpu --offload cache"),
            format!("{args} --offload weights"),
            format!("{args} --pages 8 --offload cache=8"),
            "run . --mode decode --prompt 1,2 --page 16 --offload cache".to_owned(),
            "run . --mode decode --prompt 1,2 --page 16 --offload cache=3".to_owned(),
        ]
        .map(|args| refused(&dir, &args))
        .join("\n")
    );
}

/// Caches of every type have the numbers of activations to within the precision of the type, and errors of their own.
#[test]
fn caches_have_types_of_their_own() {
    let layouts = [
        "",
        "--page 4 --mesh tp=2,dcp=2",
        "--mesh dcp=4",
        "--strategy ring --mesh ring=2",
        "--strategy decode-reduce --mesh cp=2 --page 16",
        "--mesh dp=2,pp=2,tp=2",
        "--mesh tp=8",
    ];
    for model in ["llama-gqa", "deepseek-v3", "mistral-swa", "gpt2"] {
        let dir = repository("tests/goldens").join(model);
        let expected = first_logits(&dir, "");
        let scale = expected.iter().fold(0f64, |most, x| most.max(x.abs()));
        let cases = layouts.into_iter().filter(|layout| (model, *layout) != ("deepseek-v3", "--mesh tp=8"));
        for layout in tier::one_in(8, cases) {
            let error = |dtype: &str| {
                let found = first_logits(&dir, &format!("--cache-type {dtype} {layout}"));
                found.iter().zip(&expected).fold(0f64, |most, (a, b)| most.max((a - b).abs())) / scale
            };
            let errors = ["f32", "f16", "bf16", "f8e4m3"].map(error);
            let of = format!("{model} {layout}: {errors:?}");
            assert!(errors[0] < 2e-6 && errors[1] < 2e-3 && errors[2] < 2e-2 && errors[3] < 0.15, "{of}");
            assert!(errors[1] > 1e-5 && errors[2] > errors[1] && errors[3] > errors[2], "{of}");
        }
    }
}

/// A plan has the bytes of caches of their type, scales included; a file of caches is continued with another type.
#[test]
fn caches_of_eight_bits_are_small_and_their_files_are_of_no_type() {
    let dir = repository("tests/goldens/llama-gqa");
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache").display().to_string();
    let states = |dtype: &str| {
        let args =
            format!("plan . --mode decode --context 64 --batch 2 --mesh tp=2 --cache-type {dtype} --json");
        let plan: serde_json::Value = serde_json::from_str(&said(&dir, &args)).unwrap();
        plan["memory"]["states"].as_u64().unwrap()
    };
    // Keys and values of two layers, of two heads a rank: rows of eight numbers, and a scale of each.
    let rows = 2 * 2 * 2 * 2 * 64;
    let [f32, f16, f8] = ["f32", "f16", "f8e4m3"].map(states);
    assert_eq!([f32 - f16, f32 - f8], [rows * 16, rows * 32 - rows * 12], "{f32} {f16} {f8}");
    let whole = said(&dir, "run . --mode decode --prompt 1,2,3,4,5 --steps 4 --cache-type f8e4m3");
    let line =
        |out: &str| out.lines().find(|line| line.starts_with("sequence 0: ")).unwrap()[12..].to_owned();
    for (first, then) in
        [("f8e4m3", "f8e4m3 --mesh dcp=2"), ("f8e4m3 --page 4", "f32"), ("bf16", "f8e4m3 --page 8")]
    {
        let out = said(
            &dir,
            &format!(
                "run . --mode decode --prompt 1,2,3,4,5 --steps 2 --cache-type {first} --save-cache {cache}"
            ),
        );
        let more = said(&dir, &format!("run . --mode decode --prefix {cache} --steps 2 --cache-type {then}"));
        assert_eq!(format!("{} {}", line(&out), line(&more)), line(&whole), "{first}, then {then}");
    }
    let refusals = [
        "run . --mode decode --prompt 1,2 --cache-type f4",
        "run . --mode decode --prompt 1,2 --cache-type f64",
        "run . --seq 8 --cache-type bf16",
    ];
    insta::assert_snapshot!(
        "types_of_caches_that_there_are_not",
        refusals.map(|args| refused(&dir, args)).join("\n")
    );
}

/// Layers with a sliding window hold, and are priced with, the tokens of the window and of a step; others all.
#[test]
fn caches_of_windows_have_the_tokens_of_the_window() {
    let plan = |model: &str, context: u64, more: &str| -> serde_json::Value {
        let args = format!(
            "plan examples/{model} --mode decode --context {context} --batch 2 --gpus 1 --json{more}"
        );
        serde_json::from_str(&said(&repository("."), &args)).unwrap()
    };
    let time = |plan: &serde_json::Value, name: &str| plan["time"][name].as_f64().unwrap();
    let states = |model: &str, context: u64| {
        let plan = plan(model, context, "");
        (plan["memory"]["states"].as_u64().unwrap(), time(&plan, "floor_seconds"))
    };
    // Keys and values of eight heads of 128, in two bytes; a window of 4096 tokens and a step of 512, in blocks of 16.
    let of_token = 2 * 8 * 128 * 2;
    let (at_32k, floor) = states("mistral-7b", 32768);
    assert_eq!(at_32k, 32 * 2 * 4608 * of_token + 2 * 4 * 2);
    assert_eq!(states("mistral-7b", 131_072), (at_32k, floor));
    assert!(states("mistral-7b", 4096).0 < at_32k);
    // Pages have all tokens, and a step reads those of the window.
    let [in_rings, in_pages] = ["", " --page 16"].map(|page| plan("mistral-7b", 32768, page));
    for name in ["floor_seconds", "step_seconds"] {
        let ratio = time(&in_pages, name) / time(&in_rings, name);
        assert!((0.98..1.01).contains(&ratio), "{name}: {ratio}");
    }
    // Gemma 2 has a window in every other of 42 layers, and heads of 256, in four bytes.
    let (more, less) = (states("gemma-2-9b", 32768).0, states("gemma-2-9b", 16384).0);
    assert_eq!(more - less, 21 * 2 * 16384 * 2 * 8 * 256 * 4);
}

/// Rings of a window are saved as the tokens that they have, and continued from there under another layout.
#[test]
fn rings_are_saved_and_continued() {
    for model in ["mistral-swa", "gemma2"] {
        let dir = repository("tests/goldens").join(model);
        let folder = tempfile::tempdir().unwrap();
        let cache = folder.path().join("cache").display().to_string();
        let line =
            |out: &str| out.lines().find(|line| line.starts_with("sequence 0: ")).unwrap()[12..].to_owned();
        let ids = (0..70).map(|i| (i * 7 % 60 + 3).to_string()).collect::<Vec<_>>().join(",");
        let run = format!("run . --mode decode --stop none --unchecked --prompt {ids}");
        let whole = line(&said(&dir, &format!("{run} --steps 9 --context 80")));
        for layout in ["", "--mesh tp=2", "--strategy decode-reduce --mesh cp=2", "--page 4", "--mesh dcp=2"]
        {
            let first =
                line(&said(&dir, &format!("{run} --chunk 5 --steps 4 {layout} --save-cache {cache}")));
            let then = format!(
                "run . --mode decode --stop none --unchecked --prefix {cache} --steps 5 --context 96 --mesh tp=2"
            );
            assert_eq!(format!("{first} {}", line(&said(&dir, &then))), whole, "{model} {layout}");
        }
    }
}

/// A finished sequence grows no more, and the run ends when all are finished.
#[test]
fn sequences_end_at_stop_tokens() {
    let dir = repository("tests/goldens/mistral-swa");
    let tokens = |args: &str| {
        let out = said(&dir, &format!("run . --mode decode --inputs decode.safetensors --steps 23 {args}"));
        assert!(out.contains("weights from file, prompts from file"), "{out}");
        let of = |row: usize| {
            let start = format!("sequence {row}: ");
            out.lines().find_map(|line| line.strip_prefix(&start)).unwrap().to_owned()
        };
        [of(0), of(1)]
    };
    let all = tokens("--stop none");
    let ids: Vec<&str> = all[0].split(' ').collect();
    let end = ids.iter().position(|&id| id == "2").expect("the first sequence has the token that ends texts");
    for layout in ["", "--mesh dp=2", "--mesh pp=2,tp=2 --page 4"] {
        let [first, second] = tokens(layout);
        assert_eq!(first, format!("{} (finished)", ids[..=end].join(" ")), "{layout}");
        assert_eq!(second, all[1], "{layout}");
    }
    // Both end.
    let other = all[1].split(' ').nth(2).unwrap();
    let [_, second] = tokens(&format!("--stop 2,{other}"));
    assert!(second.ends_with(&format!("{other} (finished)")) && second.split(' ').count() <= 4, "{second}");
    let args =
        "run . --mode decode --inputs decode.safetensors --expect decode.safetensors --steps 23 --stop 2";
    assert!(said(&dir, args).contains("passed: tolerance"));
    let refusal = refused(&dir, "run . --mode decode --prompt 1 --stop x");
    assert!(refusal.contains("`--stop` has `x`, which is no token id"), "{refusal}");
}

#[test]
fn prompts_that_do_not_fit_are_refused() {
    let dir = repository("tests/goldens/llama-gqa");
    let mut said = String::new();
    for request in [
        "run . --mode decode --prompt 1,2,3 --steps 5 --context 7",
        "run . --mode decode --prompt 1,x",
        "run . --mode decode --prompt 1;;2",
        "run . --mode decode --inputs model.safetensors",
        "run ../bert --mode decode --prompt 1,2",
        "run ../gpt2 --mode decode --prompt 1,2 --steps 300",
        "run . --mode decode --prompt 1,2,3;4 --steps 8 --page 4 --pages 5",
        "run . --mode decode --prompt 1,2,3 --page 4 --mesh dcp=8",
        "plan . --mode decode --context 64 --batch 2 --gpus 2 --mesh dp=2 --page 4 --pages 31",
        "run . --seq 8 --page 4",
        "plan . --mode decode --gpus 2",
        "plan . --mode decode --gpus 2 --context 1k --documents 1k",
    ] {
        said += &format!("$ ithaca {request}\n{}\n", refused(&dir, request));
    }
    insta::assert_snapshot!("prompts_that_do_not_fit", said);
    // An id outside the vocabulary is found where it is looked up.
    let ran = line(&dir, "run . --mode decode --prompt 1,999");
    assert!(ran.code == 2 && ran.err.contains("999"), "{ran:#?}");
}

/// A plan of decoding is emitted as a program that also has the step of prompts.
#[test]
fn plans_of_decoding_are_emitted_with_the_step_of_prompts() {
    let (dir, folder) = (repository("tests/goldens/llama-gqa"), tempfile::tempdir().unwrap());
    let [plan, prefill, out] = ["plan.json", "prefill.json", "out"].map(|name| folder.path().join(name));
    let [plan, prefill, out] = [&plan, &prefill, &out].map(|path| path.display());
    // In stages, too.
    said(&dir, &format!("plan . --mode decode --batch 4 --context 1k --mesh tp=2,pp=2 -o {plan}"));
    said(&dir, &format!("emit {plan} --target cuda -o {out}"));
    said(&dir, &format!("plan . --mode decode --gpus 4 --batch 4 --context 1k --mesh tp=2,dcp=2 -o {plan}"));
    said(&dir, &format!("emit {plan} --target cuda --chunk 64 -o {out}"));
    let main = std::fs::read_to_string(folder.path().join("out/main.cu")).unwrap();
    for part in [
        "namespace ranks_prompts {",
        "namespace whole_prompts {",
        "runtime/decode.hpp",
        "{\"input_ids\", {DType::I32, {4, 64}",
    ] {
        assert!(main.contains(part), "{part}");
    }
    said(&dir, &format!("plan . --gpus 2 --seq 64 -o {prefill}"));
    for request in [
        format!("emit {prefill} --target cuda --chunk 64 -o {out}"),
        format!("emit {plan} --target ir --chunk 64"),
    ] {
        let refusal = refused(&dir, &request);
        assert!(
            refusal.contains("`--chunk` goes with `--target cuda` or `torch` and a plan of decoding"),
            "{refusal}"
        );
    }
}

#[test]
fn a_large_model_is_shrunk_and_a_long_run_is_refused() {
    let root = repository("");
    let small = said(&root, "run examples/gemma-3-1b --mode decode --shrink --prompt 1,5,7 --steps 2");
    assert!(small.contains("outputs agree"), "{small}");
    let step = "tests/goldens/llama-gqa --mode train --seq 16";
    for command in ["run", "verify"] {
        let refusal = refused(&root, &format!("{command} {step} --steps 1000000000"));
        assert!(refusal.contains("error[C14]") && refusal.contains("1000000000 steps"), "{refusal}");
    }
}

/// The planner chooses micro-batches for stages, which a plan keeps; without stages they are said to do nothing.
#[test]
fn stages_compute_micro_batches_that_the_planner_chooses() {
    let root = repository("");
    let folder = tempfile::tempdir().unwrap();
    let plan = folder.path().join("plan.json").display().to_string();
    let request = "plan examples/llama-3-70b --gpus 8 --mode decode --context 16k --batch 64";
    let chosen = said(&root, &format!("{request} --mesh pp=8 -o {plan}"));
    assert!(chosen.contains("--micro-batches 8; chosen"), "{chosen}");
    assert!(
        chosen.contains("for each of 8 micro-batches") && chosen.contains("fits in this layout: 80 "),
        "{chosen}"
    );
    assert!(said(&root, &format!("verify {plan}")).contains("passed"));
    let idle = said(&root, &format!("{request} --micro-batches 8"));
    assert!(idle.contains("`--micro-batches` has no effect: the plan has no stages"), "{idle}");
}
