//! Random continuations: models, prompts, parts, layouts, pages, caches that are saved and continued. Tokens and logits are those of
//! one rank with caches of their own, each prompt at once.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use ithaca_kernels::Tensor;
use ithaca_kernels::store::{SafeTensorsFile, TensorSource};

use crate::cli::{Ran, line, repository};
use crate::fuzz::Choices;
use crate::golden::names;
use crate::tier;

/// An error beside the largest logit.
const TOLERANCE: f64 = 2e-5;

/// Layouts by strategy and mesh; the strategy may follow from the mesh.
const LAYOUTS: [&str; 27] = [
    "",
    "--mesh tp=2",
    "--mesh tp=4",
    "--mesh tp=8",
    "--mesh dcp=2",
    "--mesh dcp=3",
    "--mesh dcp=4",
    "--mesh tp=2,dcp=2",
    "--mesh dcp=2,tp=4",
    "--mesh dp=2",
    "--mesh dp=2,tp=2",
    "--mesh dp=2,dcp=2",
    "--mesh pp=2",
    "--mesh pp=2,tp=2",
    "--mesh dcp=2,pp=2",
    "--mesh dp=2,pp=2,tp=2",
    "--strategy decode-reduce --mesh cp=2",
    "--strategy decode-reduce --mesh cp=4",
    "--strategy megatron-tp+decode-reduce --mesh cp=2,tp=2",
    "--strategy ring --mesh ring=2",
    "--strategy ulysses --mesh ulysses=2",
    "--strategy usp --mesh ring=2,ulysses=2",
    "--strategy pass-q --mesh ring=2",
    "--strategy megatron-tp-sp --mesh tp=2",
    "--strategy megatron-cp-allgather --mesh cp=3",
    "--strategy ulysses+decode-context --mesh ulysses=2,dcp=2",
    "--mesh ep=2",
];

struct Case {
    model: String,
    prompts: Vec<Vec<usize>>,
    steps: u64,
    /// For how many of the steps caches are kept in a file before, and the layout under which they go on.
    resumed: Option<(u64, String)>,
    layout: String,
    /// The type of caches.
    cache: &'static str,
}

fn layout(choices: &mut Choices) -> String {
    let mut layout = choices.one_of(&LAYOUTS).to_owned();
    let more = [("--page", [4, 8, 16, 12]), ("--chunk", [1, 3, 7, 16]), ("--context", [64, 96, 120, 250])];
    for (option, values) in more {
        if choices.once_in(3) {
            write!(layout, " {option} {}", choices.one_of(&values)).unwrap();
        }
    }
    if layout.contains("--page") && choices.once_in(3) {
        write!(layout, " --offload cache={}", choices.one_of(&[2, 1, 4, 6])).unwrap();
    }
    if layout.contains("pp=") && choices.once_in(2) {
        write!(layout, " --micro-batches {}", choices.one_of(&[2, 4])).unwrap();
    }
    if layout.contains("cp=") && choices.once_in(6) {
        layout += choices.one_of(&[" --order contiguous", " --order striped:4", " --order striped"]);
    }
    layout
}

fn case(choices: &mut Choices) -> Case {
    let decoders: Vec<String> = names().into_iter().filter(|name| !name.starts_with("bert")).collect();
    let steps = 1 + choices.below(6) as u64;
    let before = choices.below(3) as u64;
    let resumed = (choices.once_in(4) && before < steps).then(|| (before.max(1), layout(choices)));
    let batch = choices.one_of(&[1, 2, 2, 3, 4]);
    let mut prompt = |_| {
        let most = if choices.once_in(3) { 40 } else { 9 };
        let n = 1 + choices.below(most);
        (0..n).map(|_| choices.below(64)).collect()
    };
    let prompts = (0..batch).map(&mut prompt).collect();
    Case {
        model: choices.one_of(&decoders),
        prompts,
        steps,
        resumed: resumed.filter(|(before, _)| *before < steps),
        layout: layout(choices),
        cache: if choices.once_in(3) { choices.one_of(&["f32", "f16", "bf16", "f8e4m3"]) } else { "" },
    }
}

/// Tokens and logits of steps, by sequence.
fn outputs(path: &str) -> [Tensor<f64>; 2] {
    let file = SafeTensorsFile::open(Path::new(path)).unwrap();
    ["tokens", "step_logits"].map(|name| file.read(name).unwrap())
}

/// Compares from step `first` on; a token may be another one where both have nearly the same logit.
fn compare(case: &str, found: &[Tensor<f64>; 2], whole: &[Tensor<f64>; 2], (first, tolerance): (usize, f64)) {
    let [batch, steps] = [found[0].shape[0], found[0].shape[1]];
    let (all, width) = (whole[0].shape[1], whole[1].shape[2]);
    assert_eq!((batch, first + steps), (whole[0].shape[0], all), "{case}");
    for sequence in 0..batch {
        for step in 0..steps {
            let (at, of) = (sequence * steps + step, sequence * all + first + step);
            let (a, b) = (&found[1].data[at * width..][..width], &whole[1].data[of * width..][..width]);
            let scale = b.iter().fold(0f64, |most, x| most.max(x.abs()));
            for (i, (a, b)) in a.iter().zip(b).enumerate() {
                let error = (a - b).abs() / scale;
                assert!(error < tolerance, "{case}: sequence {sequence}, step {step}, logit {i}: {error:e}");
            }
            let [token, expected] = [found[0].data[at], whole[0].data[of]].map(|token| token as usize);
            if token != expected {
                let gap = (b[token] - b[expected]).abs() / scale;
                assert!(gap < tolerance, "{case}: sequence {sequence}, step {step}: {token}, not {expected}");
                break;
            }
        }
    }
}

/// The code of a refusal.
fn code(ran: &Ran) -> String {
    let code = ran.err.strip_prefix("error[").and_then(|rest| rest.split(']').next());
    code.unwrap_or_else(|| panic!("{ran:#?}")).to_owned()
}

#[test]
fn random_continuations_are_those_of_one_rank() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let [whole, found, cache] = ["whole", "found", "cache"].map(path);
    let (mut ran, mut refused) = (0u64, BTreeMap::<String, u64>::new());
    for draw in tier::draws(12, 200) {
        let Case { model, prompts, steps, resumed, layout, cache: dtype } =
            case(&mut Choices::from_seed(draw));
        let dir = repository("tests/goldens").join(&model);
        let ids = |ids: &Vec<usize>| ids.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
        let prompts = prompts.iter().map(ids).collect::<Vec<_>>().join(";");
        // A number that is rounded to its other neighbour is another one.
        let (of_type, tolerance) = match dtype {
            "" => (String::new(), TOLERANCE),
            "f32" => ("--cache-type f32".to_owned(), TOLERANCE),
            "f16" => ("--cache-type f16".to_owned(), 1e-3),
            "bf16" => ("--cache-type bf16".to_owned(), 1e-2),
            dtype => (format!("--cache-type {dtype}"), 0.1),
        };
        let common = format!("run . --mode decode --dtype f32 --unchecked --stop none {of_type}");
        let of_case = format!("{common} --prompt {prompts}");
        let mut lines = vec![format!("{of_case} --steps {steps} {layout} -o {found}")];
        if let Some((before, then)) = &resumed {
            lines = vec![
                format!("{of_case} --steps {before} {layout} --save-cache {cache}"),
                format!("{common} --prefix {cache} --steps {} {then} -o {found}", steps - before),
            ];
        }
        let text = format!("ITHACA_SEED={draw}..{} {model}: {lines:?}", draw + 1);
        let failed = lines.iter().map(|args| line(&dir, args)).find(|ran| ran.code != 0);
        if let Some(failed) = failed {
            assert_eq!(failed.code, 2, "{text}: {failed:#?}");
            *refused.entry(code(&failed)).or_default() += 1;
            continue;
        }
        ran += 1;
        assert_eq!(line(&dir, &format!("{of_case} --steps {steps} -o {whole}")).code, 0, "{text}");
        let first = resumed.map_or(0, |(before, _)| 1 + before as usize);
        compare(&text, &outputs(&found), &outputs(&whole), (first, tolerance));
    }
    assert!(tier::is_replay() || ran > refused.values().sum(), "{ran} ran, refused: {refused:?}");
}
