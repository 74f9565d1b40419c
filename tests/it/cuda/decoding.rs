//! Decoding on devices, on the host: attention whose queries stand behind tokens of a cache, and emitted programs that continue
//! the prompts of the goldens.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::process::Command;
use std::sync::Arc;

use ithaca_ir::schedule::Schedule;
use ithaca_ir::verify::verify;
use ithaca_ir::{DType, Module};
use ithaca_kernels::cuda::collectives::InProcess;
use ithaca_kernels::cuda::{self, Host, Options};
use ithaca_kernels::oracle;
use ithaca_kernels::store::{self, SafeTensorsFile, Stored, TensorSource, Tensors};
use ithaca_kernels::tensor::Tensor;
use ithaca_passes::compile::compile;
use ithaca_passes::fuse::prefetch::Prefetch;
use ithaca_passes::import::{self, Pages, Workload};
use ithaca_passes::lower::lower;
use ithaca_passes::pass::Volume;
use ithaca_passes::shard::ShardOptions;

use super::distributed::{module, noise};
use super::together::{self, Program, WHICH};
use super::{
    Steps, can_run, can_run_in_full, compare, device, emitted_steps, homes, make_without_warnings, options,
    root,
};
use crate::cli::{refused, said};
use crate::tier;

/// An attention over a cache.
#[derive(Clone, Copy)]
struct Case {
    dtype: DType,
    queries: usize,
    /// Tokens of the cache, and behind them their order.
    keys: &'static str,
    /// Query heads and key/value heads.
    heads: [usize; 2],
    /// Elements of a key and of a value.
    widths: [usize; 2],
    mask: &'static str,
    /// The attribute that the lengths belong to: `starts` or `ends`.
    lengths: &'static str,
    /// More attributes.
    extra: &'static str,
    /// The kernel that computes it.
    kernel: &'static str,
}

const STEP: Case = Case {
    dtype: DType::F32,
    queries: 3,
    keys: "200",
    heads: [4, 2],
    widths: [16, 16],
    mask: "causal",
    lengths: "starts",
    extra: "",
    kernel: "split_attention<",
};

/// Sequences of these tokens before the step, or in all.
const LENGTHS: [f64; 3] = [0.0, 41.0, 190.0];

fn program(case: &Case) -> (Module, Tensors) {
    let Case { dtype, queries, keys, heads: [h, k], widths: [d, e], mask, lengths, extra, .. } = *case;
    let text = format!(
        "ithaca 1 program\nmodel \"cache\"\ndim b = 3\ndim t = {queries}\ndim h = {h} granule {}\ndim k = {k}\ndim d = {d}\n\
         dim e = {e}\ndim c = {keys}\n\nfunc @main() {{\n  %q = input {{name=\"q\"}} : {dtype}[b t h d]\n  \
         %k = input {{name=\"k\"}} : {dtype}[b c k d]\n  %v = input {{name=\"v\"}} : {dtype}[b c k e]\n  \
         %start = input {{name=\"start\"}} : i32[b]\n  \
         %o, %l = attention %q, %k, %v, %start {{heads=h, kv_heads=k, queries=t, keys=c, width=d, mask={mask}, {extra}\
         scale=0.3, {lengths}=true, returns=with_lse}} : {dtype}[b t h e], f32[b t h]\n  return o = %o, lse = %l\n}}\n",
        h / k
    );
    let keys: usize = keys.split(' ').next().unwrap().parse().unwrap();
    let tensors = [
        ("q", noise(&[3, queries, h, d], 1)),
        ("k", noise(&[3, keys, k, d], 2)),
        ("v", noise(&[3, keys, k, e], 3)),
        ("start", Tensor::new(vec![3], LENGTHS.to_vec())),
    ];
    (module(&text), tensors.into_iter().collect())
}

#[test]
fn attention_over_caches_agrees_with_the_oracle() {
    if !can_run() {
        return;
    }
    let bf16 = Case { dtype: DType::BF16, ..STEP };
    let token = Case { queries: 1, keys: "1024", widths: [64, 64], heads: [8, 2], ..bf16 };
    let tiles = Case { kernel: "split_products<__nv_bfloat16, __nv_bfloat16, 8, 64>", ..token };
    let cases = [
        STEP,
        Case { keys: "1024 order striped(16)", mask: "window(left=30, right=0)", ..STEP },
        Case { widths: [6, 5], extra: "softcap=1.5, ", keys: "1000", ..STEP },
        Case { mask: "window(left=40, right=0) | sinks(3)", keys: "1000 order zigzag(4)", ..STEP },
        Case { dtype: DType::F64, queries: 1, widths: [256, 200], heads: [2, 1], ..STEP },
        tiles,
        // Elements of 16 bits in packs of eight, under a band, are multiplied by tensor cores.
        Case {
            keys: "1024 order striped(16)",
            widths: [128, 40],
            kernel: "split_products<__nv_bfloat16, __nv_bfloat16, 8, 128>",
            ..tiles
        },
        Case {
            heads: [12, 1],
            widths: [256, 24],
            mask: "window(left=200, right=0)",
            kernel: "split_products<__nv_bfloat16, __nv_bfloat16, 8, 256>",
            ..tiles
        },
        Case {
            queries: 4,
            heads: [6, 2],
            extra: "softcap=1.5, ",
            keys: "200 order zigzag(5)",
            kernel: "split_products<__nv_bfloat16, __nv_bfloat16, 16, 64>",
            ..tiles
        },
        Case {
            queries: 2,
            heads: [8, 1],
            widths: [80, 128],
            dtype: DType::F16,
            kernel: "split_products<__half, __half, 16, 128>",
            ..tiles
        },
        Case {
            queries: 5,
            heads: [6, 2],
            widths: [192, 136],
            keys: "200",
            kernel: "split_products<__nv_bfloat16, __nv_bfloat16, 8, 256>",
            ..tiles
        },
        Case { widths: [60, 64], ..token },
        Case { mask: "window(left=40, right=0) | sinks(3)", ..token },
        // More queries than parts of keys are worth.
        Case { queries: 20, kernel: "attention<", ..STEP },
        Case { queries: 20, widths: [64, 64], kernel: "flash<", ..bf16 },
        Case {
            queries: 17,
            widths: [40, 56],
            keys: "200 order zigzag(5)",
            heads: [2, 2],
            kernel: "flash<",
            ..bf16
        },
        Case { queries: 9, widths: [64, 64], mask: "window(left=50, right=0)", kernel: "flash<", ..bf16 },
        Case { queries: 20, mask: "full", lengths: "ends", kernel: "attention<", ..STEP },
        Case {
            keys: "200 order zigzag(5)",
            widths: [64, 64],
            mask: "full",
            lengths: "ends",
            kernel: "attention<",
            ..bf16
        },
    ];
    let programs = cases.map(|case| {
        let (whole, tensors) = program(&case);
        let schedule = lower(verify(&whole).unwrap()).unwrap();
        (case, schedule, whole, tensors)
    });
    let mut kernels = BTreeSet::new();
    for (case, schedule, ..) in &programs {
        let of_case = cuda::kernels_of(schedule, &cuda::Options::default()).unwrap();
        assert!(of_case.iter().any(|kernel| kernel.starts_with(case.kernel)), "{}: {of_case:?}", case.kernel);
        kernels.extend(of_case);
    }
    let kernels = device::compile(&kernels);
    for (case, schedule, whole, tensors) in &programs {
        let host = Host::new(Arc::clone(&kernels));
        let collectives = InProcess::new(&host, 1).unwrap();
        let run = cuda::execute_on(schedule, &host, &collectives, (tensors, tensors), &Options::default());
        let found = run.unwrap().outputs;
        for (output, expected) in oracle::run::<f64>(whole, tensors, tensors).unwrap() {
            let distance = device::distance(&found[&output].map(f64::from), &expected);
            let tolerance = if case.dtype == DType::F32 { 1e-6 } else { 1e-2 };
            let Case { dtype, queries, keys, mask, .. } = case;
            assert!(
                distance < tolerance,
                "{queries} of {keys}, {mask} in {dtype}: {output} is {distance:.1e} off"
            );
        }
    }
}

/// Keys in pages, of which a sequence lacks one before its query, and in a ring that holds the last ones, of 16 bits: on tensor cores.
#[test]
fn attention_in_pages_and_in_rings_agrees_with_the_oracle() {
    if !can_run() {
        return;
    }
    let text = "ithaca 1 program\nmodel \"cache\"\ndim b = 3\ndim t = 2\ndim h = 6 granule 3\ndim k = 2\ndim d = 64\n\
        dim c = 96\ndim r = 48\ndim page = 20\ndim slot = 16\ndim entry = 6\n\nfunc @main() {\n  \
        %q = input {name=\"q\"} : f16[b t h d]\n  \
        %k = input {name=\"k\"} : f16[page slot k d]\n  %v = input {name=\"v\"} : f16[page slot k d]\n  \
        %m = input {name=\"m\"} : f16[b r k d]\n  %n = input {name=\"n\"} : f16[b r k d]\n  \
        %start = input {name=\"start\"} : i32[b]\n  %pages = input {name=\"pages\"} : i32[b entry]\n  \
        %o = attend_pages %q, %k, %v, %start, %pages {heads=h, kv_heads=k, queries=t, keys=c, width=d, mask=causal, scale=0.1, \
        starts=true, pages=page, slots=slot} : f16[b t h d]\n  \
        %p = attention %q, %m, %n, %start {heads=h, kv_heads=k, queries=t, keys=r, width=d, \
        mask=window(left=31, right=0), scale=0.1, starts=true, wraps=true} : f16[b t h d]\n  \
        return o = %o, p = %p\n}\n";
    let pages = [[7, 2, -1, -1, -1, -1], [0, 19, 4, 5, 11, 3], [1, 6, -1, 9, 10, -1]];
    let pages = pages.concat().into_iter().map(f64::from).collect();
    let tensors: Tensors = [
        ("q", noise(&[3, 2, 6, 64], 1)),
        ("k", noise(&[20, 16, 2, 64], 2)),
        ("v", noise(&[20, 16, 2, 64], 3)),
        ("m", noise(&[3, 48, 2, 64], 4)),
        ("n", noise(&[3, 48, 2, 64], 5)),
        ("start", Tensor::new(vec![3], vec![19.0, 94.0, 70.0])),
        ("pages", Tensor::new(vec![3, 6], pages)),
    ]
    .into_iter()
    .collect();
    let whole = module(text);
    let schedule = lower(verify(&whole).unwrap()).unwrap();
    let kernels = cuda::kernels_of(&schedule, &Options::default()).unwrap();
    assert!(kernels.contains("split_products<__half, __half, 8, 64>"), "{kernels:?}");
    let host = Host::new(device::compile(&kernels));
    let collectives = InProcess::new(&host, 1).unwrap();
    let found = cuda::execute_on(&schedule, &host, &collectives, (&tensors, &tensors), &Options::default());
    let found = found.unwrap().outputs;
    for (output, expected) in oracle::run::<f64>(&whole, &tensors, &tensors).unwrap() {
        let distance = device::distance(&found[&output].map(f64::from), &expected);
        assert!(distance < 2e-3, "{output} is {distance:.1e} off");
    }
}

/// The steps of a token and of prompts.
struct Schedules {
    token: Schedule,
    prompts: Schedule,
}

impl Schedules {
    /// Of a model in a folder: in a layout and on one device.
    fn of(
        folder: &str,
        [batch, chunk, capacity]: [u64; 3],
        pages: Option<Pages>,
        layout: &ShardOptions,
    ) -> [Self; 2] {
        let mut steps = [Workload::decode(batch, capacity), Workload::cached(batch, chunk, capacity)];
        steps.iter_mut().for_each(|workload| workload.pages = pages);
        let config = std::fs::read_to_string(root().join(folder).join("config.json")).unwrap();
        let config = serde_json::from_str(&config).unwrap();
        let module = |workload: &Workload| import::program(&config, "model", workload).unwrap();
        let ranks = steps.each_ref().map(|workload| {
            let mut workload = workload.clone();
            workload.training.stages = layout.mesh.axis("pp").map_or(1, |axis| layout.mesh.size(axis));
            // Stages compute one batch of rows after another, and micro-batches of pages.
            workload.training.micro_batches = pages.map_or(1, |_| workload.training.stages);
            compile(&module(&workload), layout, &Volume).unwrap().schedule
        });
        let whole = steps.map(|workload| lower(verify(&module(&workload)).unwrap()).unwrap());
        [ranks, whole].map(|[token, prompts]| Schedules { token, prompts })
    }

    fn steps(&self) -> Steps<'_> {
        Steps { step: &self.token, prompts: Some(&self.prompts) }
    }
}

/// The library's tokens and the logits of every step, for prompts of 40 and 17 tokens in one batch.
#[test]
fn emitted_programs_continue_the_goldens_on_the_host() {
    if !can_run() {
        return;
    }
    let layouts = [
        ("single", &[][..], 40),
        ("megatron-tp", &[("tp", "2")], 40),
        ("megatron-tp", &[("tp", "4")], 7),
        ("decode-context", &[("dcp", "2")], 40),
        ("decode-context", &[("dcp", "4")], 16),
        ("megatron-tp+decode-context", &[("tp", "2"), ("dcp", "2")], 40),
        ("decode-reduce", &[("cp", "2")], 16),
        ("data-parallel", &[("dp", "2")], 40),
        ("ulysses", &[("ulysses", "2")], 40),
        ("ring", &[("ring", "2")], 16),
        ("megatron-tp+pipeline", &[("tp", "2"), ("pp", "2")], 16),
    ]
    .map(|layout| (layout, None));
    // Tokens of a page, and the pages for prompts of 40 and 17 tokens and 24 behind each, with one that is left.
    let paged = [
        (("single", &[][..], 16), Some((4, 28))),
        (("megatron-tp", &[("tp", "2")], 40), Some((16, 8))),
        (("decode-context", &[("dcp", "2")], 7), Some((4, 28))),
        (("data-parallel", &[("dp", "2")], 40), Some((16, 8))),
        (("megatron-tp+pipeline", &[("tp", "2"), ("pp", "2")], 16), Some((4, 28))),
    ]
    .map(|(layout, pages)| (layout, pages.map(|(tokens, count)| (tokens, count, None))));
    // Most of the pages are in host memory.
    let offloaded = [
        (("data-parallel", &[("dp", "2")][..], 40), Some((16, 8, Some(6)))),
        (("megatron-tp+pipeline", &[("tp", "2"), ("pp", "2")], 16), Some((4, 28, Some(12)))),
        (("megatron-tp", &[("tp", "2")], 16), Some((4, 28, Some(20)))),
    ];
    let layouts = layouts.into_iter().chain(paged).chain(offloaded);
    let models = ["llama-gqa", "gpt2", "mistral-swa", "qwen2", "llama4"];
    // Each layout has one model, and each model some of the layouts.
    let cases = models.into_iter().enumerate().flat_map(|(i, model)| {
        let of_model = layouts.clone().skip(i).step_by(models.len());
        of_model.map(move |layout| (model, layout))
    });
    // An encoder reads prompts whole, and has the first stages for itself; pages are on the device.
    let of_encoder = layouts.clone().filter(|((strategy, ..), pages)| {
        !strategy.contains("pipeline") && !matches!(pages, Some((.., Some(_))))
    });
    let of_encoder = of_encoder.map(|((strategy, axes, _), pages)| ("t5", ((strategy, axes, 40), pages)));
    let cases = cases.chain(of_encoder);
    let cases: Vec<_> = tier::one_in(13, cases)
        .into_iter()
        .map(|(model, ((strategy, axes, chunk), pages))| {
            let folder = format!("tests/goldens/{model}");
            let of = pages.map(|(tokens, count, host)| Pages { tokens, count: Some(count), host });
            let mut layout = options(strategy, axes);
            if of.is_some_and(|pages| pages.host.is_some()) {
                layout.fusion = layout.fusion.ahead(Prefetch::default());
            }
            let [ranks, whole] = Schedules::of(&folder, [2, chunk, 64], of, &layout);
            let name =
                format!("{model} under {strategy} {axes:?}, {chunk} tokens at a time, pages {pages:?}");
            (name, folder, ranks, whole)
        })
        .collect();
    let programs: Vec<Program<'_>> = cases
        .iter()
        .map(|(name, _, ranks, whole)| Program { name, ranks: ranks.steps(), reference: Some(whole.steps()) })
        .collect();
    let out = tempfile::tempdir().unwrap();
    together::write(&programs, out.path());
    let run = |i: usize, arguments: &[&OsStr]| {
        let run = Command::new("bash")
            .arg(root().join("tests/cuda/host/run.sh"))
            .arg(out.path())
            .arg(cases[i].2.token.space.mesh.ranks().to_string())
            .args(arguments)
            .env(WHICH, i.to_string())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&run.stdout) + String::from_utf8_lossy(&run.stderr);
        (run.status.code(), said.into_owned())
    };
    let files = |i: usize| {
        ["model", "decode"].map(|file| root().join(&cases[i].1).join(format!("{file}.safetensors")))
    };
    for (i, (name, ..)) in cases.iter().enumerate() {
        let ([weights, prompts], output) = (files(i), out.path().join(format!("out_{i}.safetensors")));
        let files = [("--weights", &weights), ("--inputs", &prompts), ("--output", &output)];
        let mut arguments = ["--steps", "23", "--self-check", "--timeout", "30"].map(OsStr::new).to_vec();
        arguments.extend((i % 2 == 0).then_some(OsStr::new("--graph")));
        arguments.extend(files.iter().flat_map(|(option, file)| [OsStr::new(option), file.as_os_str()]));
        let (status, said) = run(i, &arguments);
        assert!(status == Some(0) && said.contains("self-check step_logits"), "{name}: {said}");
        let [found, expected] = [output, prompts].map(|file| SafeTensorsFile::open(file).unwrap());
        assert_eq!(found.read("tokens").unwrap(), expected.read("tokens").unwrap(), "{name}");
        let error = compare(&found.read("step_logits").unwrap(), &expected.read("step_logits").unwrap());
        assert!(error < 1e-5, "{name}: error {error:.3e}");
    }
    let ([weights, prompts], unknown) = (files(0), out.path().join("unknown.safetensors"));
    let [mut ids, lengths] = ["prompt_ids", "prompt_lengths"]
        .map(|name| SafeTensorsFile::open(&prompts).unwrap().read(name).unwrap());
    ids.data[3] = 128.0;
    store::write(&unknown, &[("prompt_ids", Stored::I64, &ids), ("prompt_lengths", Stored::I64, &lengths)])
        .unwrap();
    for (file, steps, says) in [
        (&prompts, "25", "a prompt of 40 tokens and 25 steps do not fit a cache of 64"),
        (&weights, "1", "tensor `prompt_ids` is not in the file of inputs"),
        (&unknown, "1", "`prompt_ids` holds 128 at 3, but the model needs integers from 0 and below 128"),
    ] {
        let of_files = [("--weights", weights.as_os_str()), ("--inputs", file.as_os_str())];
        let mut arguments = vec![OsStr::new("--steps"), OsStr::new(steps)];
        arguments.extend(of_files.iter().flat_map(|(option, file)| [OsStr::new(option), file]));
        let (status, said) = run(0, &arguments);
        assert!(status == Some(2) && said.contains(says), "{says}: {said}");
    }
    let (status, said) = run(0, &["--random-weights", "1", "--steps", "2"].map(OsStr::new));
    assert!(status == Some(0) && said.contains("token 1: ") && said.contains("sequence 1: "), "{said}");
}

/// Ranks of prompts have the caches of ranks of tokens that are numbered otherwise, and nothing moves; or they are a pool of their
/// own, with other parts, which they send.
#[test]
fn prompts_have_a_layout_of_their_own_in_emitted_programs() {
    let root = root();
    let out = tempfile::tempdir().unwrap();
    let file = |name: &str| out.path().join(name).display().to_string();
    let [token, prompts, program] = ["token.json", "prompts.json", "program"].map(file);
    let plan =
        |args: &str, to: &str| said(root, &format!("plan tests/goldens/llama-gqa --batch 2 {args} -o {to}"));
    plan("--mode decode --context 64 --strategy megatron-tp --mesh tp=4", &token);
    let emit = format!("emit {token} --target cuda --prompts {prompts} -o {program}");
    for (args, says) in [
        ("--seq 16 --context 96 --strategy megatron-tp --mesh tp=4", "error[C04]: tokens of a cache"),
        ("--seq 16 --strategy megatron-tp --mesh tp=4", "error[C04]: tokens of a cache"),
    ] {
        plan(args, &prompts);
        let refusal = refused(root, &emit);
        assert!(refusal.contains(says), "{args}: {refusal}");
    }
    // An encoder would read a part of a prompt for the whole.
    let [t5_token, t5_prompts] = ["t5.json", "t5-prompts.json"].map(file);
    let of_t5 = "plan tests/goldens/t5 --batch 2 --context 64 --strategy megatron-tp --mesh tp=2";
    said(root, &format!("{of_t5} --mode decode -o {t5_token}"));
    said(root, &format!("{of_t5} --seq 16 -o {t5_prompts}"));
    let refusal =
        refused(root, &format!("emit {t5_token} --target cuda --prompts {t5_prompts} -o {program}"));
    assert!(refusal.contains("error[C04]: steps of prompts of 16 tokens in caches of 64"), "{refusal}");
    for (layout, processes, moves, ranks) in [
        ("ulysses+megatron-tp --mesh ulysses=2,tp=2", "{{0, 2, 1, 3}, {0, 1, 2, 3}}", false, "4"),
        ("decode-context --mesh dcp=2", "{{0, 1}, {2, 3, 4, 5}}", true, "6"),
    ] {
        plan(&format!("--seq 16 --context 64 --strategy {layout}"), &prompts);
        said(root, &emit);
        let main = std::fs::read_to_string(out.path().join("program/main.cu")).unwrap();
        let handover = main.split("Handover handover = ").nth(1).unwrap();
        assert!(handover.starts_with(&format!("{{{processes}, 1, {{")), "{layout}: {handover}");
        assert_eq!(handover.contains("cache.key.1"), moves, "{layout}: {handover}");
        if !can_run_in_full() {
            continue;
        }
        let [weights, io] =
            ["model", "decode"].map(|name| format!("tests/goldens/llama-gqa/{name}.safetensors"));
        let output = file("output.safetensors");
        let run = Command::new("bash")
            .current_dir(root)
            .args(["tests/cuda/host/run.sh", &program, ranks, "--weights", &weights, "--inputs", &io])
            .args(["--steps", "23", "--self-check", "--graph", "--output", &output])
            .output()
            .unwrap();
        assert!(run.status.success(), "{layout}: {}", String::from_utf8_lossy(&run.stderr));
        let [found, expected] =
            [output, root.join(io).display().to_string()].map(|file| SafeTensorsFile::open(file).unwrap());
        assert_eq!(found.read("tokens").unwrap(), expected.read("tokens").unwrap(), "{layout}");
        let error = compare(&found.read("step_logits").unwrap(), &expected.read("step_logits").unwrap());
        assert!(error < 1e-5, "{layout}: error {error:.3e}");
    }
}

/// For one architecture: another test compiles for all of them.
#[test]
fn nvcc_compiles_decoding_without_warnings() {
    if !tier::is_full_or_says_so() {
        return;
    }
    let Some((cuda, nccl)) = homes() else { return };
    let layout = options("megatron-tp+decode-context", &[("tp", "2"), ("dcp", "2")]);
    let [ranks, whole] = Schedules::of(
        "examples/llama-3-8b",
        [4, 512, 8192],
        Some(Pages { tokens: 16, count: None, host: None }),
        &layout,
    );
    let out = tempfile::tempdir().unwrap();
    super::write_files(&emitted_steps(ranks.steps(), Some(whole.steps())), out.path());
    make_without_warnings("decoding", out.path(), &["ARCH=90"], &cuda, &nccl);
}
