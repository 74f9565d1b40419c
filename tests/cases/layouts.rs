//! Every strategy computes what the whole program does, on every golden: per-rank programs on virtual ranks in double
//! precision, and schedules on the runtime, whose counted bytes are those of the program. Once as laid out, and once
//! rewritten by equations.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};

use ithaca_ir::verify::verify;
use ithaca_ir::{Module, diagnostic, traffic};
use ithaca_kernels::{Outputs, compare, cpu, oracle};
use ithaca_passes::compile::{compile, passes};
use ithaca_passes::fuse::saturate::with_saturation;
use ithaca_passes::lower::lower;
use ithaca_passes::pass::{Context, Unwatched, Volume, run_passes};
use ithaca_passes::registry::Registry;
use ithaca_passes::shard::{OrderChoice, SequenceFit, ShardOptions, parse_mesh};
use libtest_mimic::Trial;

use crate::golden::{self, CLOSE, EXACT, Golden};
use crate::{is_chosen, report, trial};

/// A strategy, its mesh, and the order of tokens where it is not the strategy's own.
type Layout = (&'static str, &'static str, Option<OrderChoice>);

/// Layouts that leave every sequence whole inside attention.
const WHOLE: [Layout; 12] = [
    ("data-parallel", "dp=2", None),
    ("ulysses", "ulysses=2", None),
    ("ulysses", "ulysses=4", None),
    ("ulysses", "ulysses=8", None),
    ("megatron-tp", "tp=2", None),
    ("megatron-tp", "tp=4", None),
    ("megatron-tp-sp", "tp=2", None),
    ("megatron-tp-sp", "tp=4", None),
    ("ulysses+megatron-tp", "ulysses=2,tp=2", None),
    ("ulysses+megatron-tp", "tp=2,ulysses=2", None),
    ("ulysses+megatron-tp-sp", "ulysses=2,tp=2", None),
    ("data-parallel+ulysses+megatron-tp-sp", "dp=2,tp=2,ulysses=2", None),
];

/// Layouts that split it there: rotary angles, positions, masks and biases follow the tokens in every order, and layers of
/// other kinds agree on it.
const SPLIT: [Layout; 15] = [
    ("ring", "ring=4", None),
    ("ring", "ring=2", Some(OrderChoice::Zigzag)),
    ("ring", "ring=4", Some(OrderChoice::Striped(1))),
    ("ring", "ring=2", Some(OrderChoice::Striped(2))),
    ("ring+megatron-tp-sp", "ring=2,tp=2", None),
    ("megatron-cp-allgather", "cp=4", Some(OrderChoice::Zigzag)),
    ("megatron-cp-a2a-p2p", "cp=2,ulysses=2", None),
    ("rsa", "ring=2", Some(OrderChoice::Zigzag)),
    ("dist-flash", "ring=4", None),
    ("usp", "ulysses=2,ring=2", Some(OrderChoice::Striped(1))),
    ("loongtrain", "outer=2,ring=2,ulysses=2", None),
    ("gspmd-2d", "cp=2,tp=2", None),
    ("sparse-fetch", "ring=4", Some(OrderChoice::Zigzag)),
    ("window-halo", "ring=4", None),
    ("pass-q+data-parallel", "dp=2,ring=2", None),
];

/// Layouts whose degrees few lengths of goldens divide by, so that tokens are split unevenly.
const UNEVEN: [Layout; 10] = [
    ("usp", "ring=3,ulysses=2", None),
    ("ring+megatron-tp-sp", "ring=3,tp=2", None),
    ("ring", "ring=3", None),
    ("ring", "ring=3", Some(OrderChoice::Zigzag)),
    ("megatron-cp-allgather", "cp=3", None),
    ("loongtrain", "outer=2,ring=3,ulysses=2", None),
    ("rsa", "ring=3", None),
    ("dist-flash", "ring=3", None),
    ("sparse-fetch", "ring=3", None),
    ("pass-q", "ring=3", None),
];

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for (g, name) in golden::names().iter().enumerate() {
        for (l, layout) in WHOLE.into_iter().chain(SPLIT).enumerate().filter(|(l, _)| is_chosen(name, g, *l))
        {
            let options = options(layout);
            let title = format!("layouts::{name}::{}", title(layout));
            let legal = if l < WHOLE.len() { legal_whole } else { legal_split };
            trials.push(trial(name, title, move |golden| check(golden, &options, legal)));
        }
        for (_, layout) in UNEVEN.into_iter().enumerate().filter(|(l, _)| is_chosen(name, g, *l)) {
            let options = uneven(layout);
            let title = format!("layouts::{name}::uneven {}", title(layout));
            trials.push(trial(name, title, move |golden| check(golden, &options, legal_uneven)));
        }
        for (_, layout) in WHOLE.into_iter().enumerate().filter(|(l, _)| is_chosen(name, g, 2 * l + 1)) {
            let options = options(layout);
            let title = format!("saturated::{name}::{}", title(layout));
            trials.push(trial(name, title, move |golden| check_saturated(golden, &options)));
        }
    }
    // A rule that refuses too much would pass above.
    let split = SPLIT.map(|layout| (options(layout), title(layout)));
    let uneven = UNEVEN.map(|layout| (uneven(layout), format!("uneven {}", title(layout))));
    for (options, title) in split.into_iter().chain(uneven) {
        let few = if options.strategy == "window-halo" { 1 } else { 4 };
        let title = format!("layouts::suit_goldens::{title}");
        trials.push(Trial::test(title, move || {
            let mut goldens = golden::names().into_iter().map(|name| Golden::open(&name));
            let mut suited = 0;
            while suited < few {
                let Some(golden) = goldens.next() else {
                    return Err(format!("{suited} goldens only").into());
                };
                suited += usize::from(compile(&golden.module, &options, &Volume).is_ok());
            }
            Ok(())
        }));
    }
    trials
}

fn title((strategy, mesh, order): Layout) -> String {
    let order = order.map(|order| format!(" {order:?}").to_lowercase()).unwrap_or_default();
    format!("{strategy} {mesh}{order}")
}

fn options((strategy, mesh, order): Layout) -> ShardOptions {
    ShardOptions { order, ..ShardOptions::new(strategy, parse_mesh(mesh).unwrap()) }
}

fn uneven(layout: Layout) -> ShardOptions {
    ShardOptions { sequence: SequenceFit::Uneven, ..options(layout) }
}

/// What the whole program gives, computed once.
fn expected(golden: &Golden) -> Arc<Outputs<f64>> {
    type Known = Mutex<BTreeMap<String, Arc<OnceLock<Arc<Outputs<f64>>>>>>;
    static KNOWN: OnceLock<Known> = OnceLock::new();
    let mut known = KNOWN.get_or_init(Mutex::default).lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let cell = known.entry(golden.name.clone()).or_default().clone();
    drop(known);
    let run = || oracle::run::<f64>(&golden.module, &golden.weights, &golden.io).unwrap();
    cell.get_or_init(|| Arc::new(run())).clone()
}

/// Whether a layout is legal, by the rules as the systems state them: then it must be accepted, and refused otherwise.
fn legal_whole(module: &Module, options: &ShardOptions, _: Option<&str>) -> bool {
    let size = |dim: &str| module.space.dim(dim).map_or(1, |d| module.space.size(d));
    let axis = |name: &str| options.mesh.axis(name).map_or(1, |a| options.mesh.size(a));
    let (dp, u, t) = (axis("dp"), axis("ulysses"), axis("tp"));
    let kv = if module.space.dim("k").is_some() { size("k") } else { size("h") };
    let heads = u * t;
    size("h") % heads == 0
        && (kv % heads == 0 || heads.is_multiple_of(kv))
        && size("f") % t == 0
        && size("b") % dp == 0
}

/// What does not divide may be refused, and masks or biases that a movement is not for; nothing else.
fn legal_split(_: &Module, _: &ShardOptions, refused: Option<&str>) -> bool {
    !refused.is_some_and(|code| {
        ["P20", "P21", "P22", "P23", "P25", "P26"].contains(&code) || code.starts_with("P4")
    })
}

/// The same, and tokens that experts take in equal groups.
fn legal_uneven(module: &Module, options: &ShardOptions, refused: Option<&str>) -> bool {
    refused != Some("P29") && legal_split(module, options, refused)
}

fn check(
    golden: &Golden,
    options: &ShardOptions,
    legal: fn(&Module, &ShardOptions, Option<&str>) -> bool,
) -> Result<(), String> {
    let Golden { module, weights, io, .. } = golden;
    let compiled = compile(module, options, &Volume);
    let legal = legal(module, options, compiled.as_ref().err().map(|refusal| refusal[0].code));
    let compiled = match compiled {
        Ok(_) if !legal => return Err("compiled, though it is not legal".to_owned()),
        Ok(compiled) => compiled,
        Err(_) if !legal => return Ok(()),
        Err(refusal) => return Err(format!("refused: {}", diagnostic::render(&refusal, None))),
    };
    let mut wrong = Vec::new();
    let ranks = oracle::run_ranks::<f64>(&compiled.per_rank, weights, io).map_err(|e| e.to_string())?;
    let comparisons = compare::outputs(&ranks, &expected(golden));
    wrong.extend(
        comparisons.iter().filter(|c| !c.verdict.within(EXACT)).map(|c| format!("per-rank program: {c:?}")),
    );
    let run = cpu::execute(&compiled.schedule, weights, io, &cpu::Options::default());
    let run = run.map_err(|e| e.to_string())?;
    let comparisons = compare::with_source(&run.outputs, io).map_err(|e| e.to_string())?;
    wrong.extend(comparisons.iter().filter(|c| !c.verdict.within(CLOSE)).map(|c| format!("schedule: {c:?}")));
    let promised = traffic::of_module(&compiled.per_rank);
    if !traffic::agree(&promised, &run.traffic) {
        wrong.push(format!("sent {:?}, promised {promised:?}", run.traffic));
    }
    report(&wrong)
}

/// The same with saturation before and behind the choice of collectives.
fn check_saturated(golden: &Golden, options: &ShardOptions) -> Result<(), String> {
    let Golden { module, weights, io, .. } = golden;
    if !legal_whole(module, options, None) {
        return Ok(());
    }
    let passes = with_saturation(passes(&Registry::default(), options));
    let ranks = run_passes(module.clone(), &passes, &mut Context::new(&Volume), &mut Unwatched)
        .map_err(|refusal| diagnostic::render(&refusal, None))?;
    let found = oracle::run_ranks::<f64>(&ranks, weights, io).map_err(|e| e.to_string())?;
    let comparisons = compare::outputs(&found, &expected(golden));
    let mut wrong: Vec<String> = comparisons
        .iter()
        .filter(|c| !c.verdict.within(EXACT))
        .map(|c| format!("per-rank program: {c:?}"))
        .collect();
    let schedule = lower(verify(&ranks).unwrap()).unwrap();
    let run = cpu::execute(&schedule, weights, io, &cpu::Options::default()).map_err(|e| e.to_string())?;
    if !traffic::agree(&traffic::of_module(&ranks), &run.traffic) {
        wrong.push("the schedule sends other bytes than the program".to_owned());
    }
    report(&wrong)
}
