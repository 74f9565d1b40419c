//! Repairs: changes of a request that nothing satisfies. Each was tried, and gives a plan.

use ithaca_differentiate::{GradientType, Offload, Training};
use ithaca_ir::Diagnostic;
use ithaca_ir::diagnostic::counted;
use ithaca_ir::units;
use ithaca_layout::shard::{HeadSplit, SequenceFit, ShardOptions};

use crate::cluster::Cluster;
use crate::memory::Memory;
use crate::planner::candidates::{OF_FRAMEWORK, candidates};
use crate::planner::compiler::Compiler;
use crate::planner::explore::{self, Blocks};
use crate::planner::outcomes::{Outcomes, Priced};
use crate::planner::request::{Request, Steps};
use crate::planner::search::Search;

/// How many numbers of GPUs are tried on each side of the one asked for.
const NEARBY: u64 = 64;

/// The effort for the numbers of GPUs on both sides together.
const EFFORT_NEARBY: u64 = 48;

/// Options that make a refused candidate legal on its own mesh.
pub(super) fn of_candidate(compiler: &dyn Compiler, options: &ShardOptions) -> Vec<String> {
    let mut repairs = Vec::new();
    for (heads, sequence, text) in relaxations(options.heads, options.sequence) {
        let relaxed = ShardOptions { heads, sequence, ..options.clone() };
        // Both are worth saying only where neither is enough alone.
        if (repairs.is_empty() || !text.contains(' ')) && compiler.check(&relaxed).is_ok() {
            repairs.push(text.to_owned());
        }
    }
    repairs
}

/// Looser options than these, with their spelling on the command line.
fn relaxations(heads: HeadSplit, sequence: SequenceFit) -> Vec<(HeadSplit, SequenceFit, &'static str)> {
    let (uneven, pad) = (HeadSplit::Uneven, SequenceFit::Pad);
    match (heads, sequence) {
        (HeadSplit::Even, SequenceFit::Uneven) => vec![
            (uneven, sequence, "--uneven-heads"),
            (HeadSplit::Pad, sequence, "--pad-heads"),
            (heads, pad, "--pad-sequence"),
            (uneven, pad, "--uneven-heads --pad-sequence"),
        ],
        (HeadSplit::Even, SequenceFit::Auto | SequenceFit::Pad) => {
            vec![(uneven, sequence, "--uneven-heads"), (HeadSplit::Pad, sequence, "--pad-heads")]
        }
        (HeadSplit::Uneven | HeadSplit::Pad, SequenceFit::Uneven) => vec![(heads, pad, "--pad-sequence")],
        (HeadSplit::Uneven | HeadSplit::Pad, SequenceFit::Auto | SequenceFit::Pad) => Vec::new(),
    }
}

/// Changes that make a layout legal: options, another layout of as many GPUs, or the same strategy on fewer.
///
/// Every one was checked; flags add to those of `options`, layouts replace theirs.
pub fn repairs(compiler: &dyn Compiler, cluster: &Cluster, options: &ShardOptions) -> Vec<String> {
    let ShardOptions { strategy, mesh, .. } = options;
    let mut repairs = of_candidate(compiler, options);
    let legal = |gpus: u64, strategy: Option<&String>| {
        let of = Request { strategy: strategy.cloned(), options: options.clone(), ..Request::new(gpus) };
        let candidates = candidates(&compiler.registry(), cluster, &of).unwrap_or_default();
        let found = candidates.into_iter().find(|c| compiler.check(c).is_ok());
        found.map(|c| format!("--strategy {} --mesh {}", c.strategy, c.mesh))
    };
    repairs.extend(legal(mesh.ranks(), None));
    if repairs.is_empty() {
        repairs.extend((2..mesh.ranks().min(MOST_TRIED)).rev().find_map(|gpus| legal(gpus, Some(strategy))));
    }
    repairs
}

/// GPUs for which layouts are tried to repair a request, at most: a ring of thousands takes seconds to price.
const MOST_SEARCHED: u64 = 512;

/// From how many GPUs on fewer are tried, one by one.
const MOST_TRIED: u64 = 1025;

/// Why nothing satisfies the request, with repairs.
pub(super) fn refusal(
    compiler: &dyn Compiler,
    cluster: &Cluster,
    request: &Request,
    (tried, blocks): (&Outcomes, &Blocks),
) -> Diagnostic {
    // A movement that is named wrong is so in every layout; its help says what is right.
    if let ([], [(_, only)]) = (tried.too_large.as_slice(), tried.refused.as_slice())
        && only.code == "P47"
    {
        return only.clone();
    }
    let mut repairs = Vec::new();
    if !tried.too_large.is_empty() {
        repairs.extend(smaller_states(compiler, cluster, request, blocks));
    }
    repairs.extend(if request.is_search_of_steps() {
        of_steps(compiler, cluster, request, (tried, blocks))
    } else {
        of_request(&Search::new(compiler, cluster), request, tried)
    });
    let diagnostic = match (tried.too_large.first(), tried.refused.as_slice()) {
        (Some((priced, over)), _) => {
            let flags = match priced.flags.as_str() {
                "" => String::new(),
                flags => format!(" with `{flags}`"),
            };
            let memory = &priced.memory;
            let host = memory.host_usable.filter(|_| memory.lacks_host_memory());
            let (usable, place) = match host {
                Some(usable) => (usable, " of host memory each"),
                None => (memory.usable, " usable"),
            };
            let message = format!(
                "no plan fits {} of {}{place}: {}{flags} is nearest and lacks {}",
                counted(request.gpus, "GPU"),
                units::bytes(usable),
                layout(&priced.options),
                units::bytes(*over),
            );
            let needs = match host {
                Some(_) => format!("it needs {} of host memory for each GPU", units::bytes(memory.host)),
                None => format!("it needs {}: {}", units::bytes(memory.total), memory.in_words()),
            };
            Diagnostic::new("P32", message).help(needs)
        }
        (None, [(_, only)]) => only.clone(),
        (None, refused) => {
            let message = format!("no strategy and mesh is legal on {}", counted(request.gpus, "GPU"));
            let mut messages: Vec<&str> = refused.iter().map(|(_, d)| d.message.as_str()).collect();
            messages.dedup();
            let helps = messages.into_iter().take(2);
            helps.fold(Diagnostic::new("P31", message), Diagnostic::help)
        }
    };
    let nothing = repairs.is_empty();
    let diagnostic = Diagnostic { repairs, ..diagnostic };
    match nothing && diagnostic.helps.len() < 2 {
        true if !tried.too_large.is_empty() => diagnostic.help(format!(
            "no number of GPUs{} was found to help; {}",
            of_those_tried(cluster, request),
            smaller(cluster, request, tried)
        )),
        true => diagnostic.help("no other number of GPUs, option or strategy was found to help"),
        false => diagnostic,
    }
}

/// Up to how many GPUs were tried, where the cluster has more.
fn of_those_tried(cluster: &Cluster, request: &Request) -> String {
    let mut tried = doubled(request.gpus, cluster);
    tried.truncate(if request.is_search_of_steps() { STEPS } else { usize::MAX });
    match tried.last() {
        Some(most) if *most < cluster.devices() => format!(" up to {most}"),
        _ => String::new(),
    }
}

/// What would help where no number of GPUs does.
fn smaller(cluster: &Cluster, request: &Request, tried: &Outcomes) -> String {
    let length = if request.continues.is_some() { "--context" } else { "--seq" };
    let lasts = |Memory { parameters, gradients, optimizer, .. }: &Memory| parameters + gradients + optimizer;
    if tried.too_large.first().is_some_and(|(priced, _)| priced.memory.lacks_host_memory()) {
        return format!(
            "nor do `{length}` and `--batch`, on which states in host memory do not depend; use more machines, or keep the states on the GPUs"
        );
    }
    let least = tried.too_large.iter().map(|(priced, _)| lasts(&priced.memory)).min();
    match least.filter(|&least| least > cluster.usable_bytes()) {
        Some(least) => format!(
            "nor do `{length}` and `--batch`: what does not depend on them takes {}; use a smaller model, or GPUs of more memory",
            units::bytes(least)
        ),
        None => format!("use a smaller `{length}` or `--batch`"),
    }
}

/// Changes of the states of a training step with which it fits.
fn smaller_states(
    compiler: &dyn Compiler,
    cluster: &Cluster,
    request: &Request,
    blocks: &Blocks,
) -> Vec<String> {
    let Some(Steps { training, open }) = &request.steps else { return Vec::new() };
    let fits = |training: Training| {
        let steps = Some(Steps { training, open: open.clone() });
        explore::fits(compiler, cluster, &Request { steps, ..request.clone() }, blocks)
    };
    let mut repairs = Vec::new();
    if cluster.accelerator.host_bandwidth.is_some()
        && training.optimizer.is_some()
        && training.offload != Offload::Optimizer
        && fits(Training { offload: Offload::Optimizer, ..training.clone() })
    {
        repairs.push("--offload optimizer".to_owned());
    }
    if training.gradients == GradientType::Full
        && fits(Training { gradients: GradientType::Weights, ..training.clone() })
    {
        repairs.push("--train gradients=weights".to_owned());
    }
    repairs
}

/// The best step of any layout for a request that names one, as options.
fn best_step(
    compiler: &dyn Compiler,
    cluster: &Cluster,
    request: &Request,
    blocks: &Blocks,
) -> Option<String> {
    let free = Request { strategy: None, mesh: None, ..request.clone() };
    let tried = explore::explore(compiler, cluster, &free, blocks).ok()?;
    let best = tried.fits.into_iter().min_by(Priced::cmp_rank)?;
    let ShardOptions { strategy, mesh, .. } = &best.options;
    Some(format!("--strategy {strategy} --mesh {mesh} {}", best.flags).trim_end().to_owned())
}

/// A refusal of the request itself, before any candidate was tried, with repairs.
pub(super) fn malformed(
    compiler: &dyn Compiler,
    cluster: &Cluster,
    request: &Request,
    diagnostic: Diagnostic,
) -> Diagnostic {
    // The help names the strategies; a search of steps would be the answer itself.
    if diagnostic.code == "P10" && request.is_search_of_steps() {
        return diagnostic;
    }
    let free = Request { strategy: None, mesh: None, ..request.clone() };
    let with_gpus = |n: u64| Request { gpus: n, ..request.clone() };
    let ranks = request.mesh.as_ref().map(ithaca_ir::Mesh::ranks);
    let numbers = ranks.into_iter().chain([cluster.devices()]);
    let numbers = numbers.filter(|&n| n != request.gpus && n <= MOST_SEARCHED);
    let search = Search::new(compiler, cluster);
    let number = numbers.filter(|&n| search.works(&with_gpus(n))).map(|n| format!("--gpus {n}"));
    let best = if request.is_search_of_steps() && diagnostic.code == OF_FRAMEWORK {
        best_step(compiler, cluster, request, &Blocks::default())
    } else {
        search.best(&free)
    };
    let mut repairs: Vec<String> = number.take(1).chain(best).collect();
    if repairs.is_empty() {
        repairs.extend(elsewhere(&search, request));
    }
    Diagnostic { repairs, ..diagnostic }
}

/// Another strategy on more GPUs, for a request that no single change repairs.
fn elsewhere(search: &Search<'_>, request: &Request) -> Option<String> {
    by_doubling(search, request.gpus, |gpus| {
        let free = Request { gpus, strategy: None, mesh: None, ..request.clone() };
        search.best(&free).map(|options| format!("--gpus {gpus} {options}"))
    })
}

/// The first answer for a power of two of GPUs above these. If a layout does not fit, each of twice the GPUs
/// holds half of it at best, so numbers that are too small by this bound are skipped; untried layouts count half.
fn by_doubling(search: &Search<'_>, gpus: u64, ask: impl Fn(u64) -> Option<String>) -> Option<String> {
    let usable = search.cluster().usable_bytes();
    let mut known: Option<(u64, u64)> = None;
    doubled(gpus, search.cluster()).into_iter().find_map(|n| {
        if known.is_some_and(|(of, bytes)| bytes / (n / of) / 2 > usable) {
            return None;
        }
        let answer = ask(n);
        known = search.least().map(|bytes| (n, bytes)).or(known);
        answer
    })
}

/// Powers of two above a number of GPUs, up to the size of the cluster and the limit of a search.
fn doubled(gpus: u64, cluster: &Cluster) -> Vec<u64> {
    let doubled = std::iter::successors(gpus.checked_next_power_of_two(), |n| n.checked_mul(2));
    let most = cluster.devices().min(MOST_SEARCHED);
    doubled.filter(|&n| n > gpus).take_while(|&n| n <= most).collect()
}

/// How a layout is named in a message: the strategy, and the mesh where there is one.
fn layout(options: &ShardOptions) -> String {
    let ShardOptions { strategy, mesh, .. } = options;
    if mesh.axes.is_empty() { format!("`{strategy}`") } else { format!("`{strategy}` on `{mesh}`") }
}

/// How often the GPUs are doubled and the batch is halved for a repair.
const STEPS: usize = 4;

/// Changes of a search of training steps, the nearest of each kind.
fn of_steps(
    compiler: &dyn Compiler,
    cluster: &Cluster,
    request: &Request,
    (tried, blocks): (&Outcomes, &Blocks),
) -> Vec<String> {
    let works = |request: &Request| explore::fits(compiler, cluster, request, blocks);
    let mut repairs = Vec::new();
    if request.strategy.is_some() || request.mesh.is_some() {
        repairs.extend(best_step(compiler, cluster, request, blocks));
    }
    if tried.too_large.is_empty() {
        for (heads, sequence, text) in relaxations(request.options.heads, request.options.sequence) {
            let options = ShardOptions { heads, sequence, ..request.options.clone() };
            if repairs.is_empty() && works(&Request { options, ..request.clone() }) {
                repairs.push(text.to_owned());
            }
        }
    }
    // A smaller batch has smaller activations, and nothing else.
    let lasts = |memory: &Memory| memory.total - memory.arena - memory.scores - memory.inputs;
    let nearest = tried.too_large.first().map_or(0, |(nearest, _)| lasts(&nearest.memory));
    // Each of twice the GPUs holds half of what lasts, at best.
    let may_hold = |&gpus: &u64| nearest / (gpus / request.gpus).max(1) <= cluster.usable_bytes();
    let more = doubled(request.gpus, cluster).into_iter().take(STEPS).filter(may_hold);
    let with_gpus = |&gpus: &u64| works(&Request { gpus, mesh: None, ..request.clone() });
    if request.mesh.is_none() {
        repairs.extend({ more }.find(with_gpus).map(|gpus| format!("--gpus {gpus}")));
    }
    if nearest > cluster.usable_bytes() {
        return repairs;
    }
    let less =
        std::iter::successors(Some(request.batch), |batch| (batch % 2 == 0).then_some(batch / 2)).skip(1);
    let with_batch = |&batch: &u64| works(&Request { batch, ..request.clone() });
    repairs.extend(less.take(STEPS).find(with_batch).map(|batch| format!("--batch {batch}")));
    repairs
}

fn of_request(search: &Search<'_>, request: &Request, tried: &Outcomes) -> Vec<String> {
    let mut repairs = Vec::new();
    if request.strategy.is_some() || request.mesh.is_some() {
        let free = Request { strategy: None, mesh: None, ..request.clone() };
        repairs.extend(search.best(&free));
    }
    let before = repairs.len();
    for (heads, sequence, text) in relaxations(request.options.heads, request.options.sequence) {
        let options = ShardOptions { heads, sequence, ..request.options.clone() };
        let relaxed = Request { options, ..request.clone() };
        let is_worth_it = repairs.len() == before || !text.contains(' ');
        if is_worth_it && search.works_unlike(&relaxed, request) {
            repairs.push(text.to_owned());
        }
    }
    repairs.extend(other_gpus(search, request, tried));
    // With a mesh, other strategies on more GPUs have been tried.
    if repairs.is_empty() && request.strategy.is_some() && request.mesh.is_none() {
        repairs.extend(elsewhere(search, request));
    }
    repairs
}

/// The nearest numbers of GPUs below and above for which there is a plan. Where memory is missing, fewer GPUs
/// do not help, and more are tried by doubling.
fn other_gpus(search: &Search<'_>, request: &Request, tried: &Outcomes) -> Vec<String> {
    let gpus = request.gpus;
    let repair = |n: u64| -> Option<String> {
        let other = Request { gpus: n, mesh: None, ..request.clone() };
        match &request.mesh {
            // The mesh has to change with the GPUs, so the repair names a new one.
            Some(_) => {
                let free = Request { strategy: None, ..other };
                search.best(&free).map(|options| format!("--gpus {n} {options}"))
            }
            None => search.works(&other).then(|| format!("--gpus {n}")),
        }
    };
    let by_doubling = || by_doubling(search, gpus, repair);
    if !tried.too_large.is_empty() {
        return by_doubling().into_iter().collect();
    }
    let nearby = gpus.saturating_sub(NEARBY).max(1)..gpus;
    let halved = std::iter::successors(nearby.start.checked_ilog2().map(|bits| 1 << bits), |n| Some(n / 2));
    let halved = halved.take_while(|&n| n > 0);
    let below = search.sparing(EFFORT_NEARBY, || nearby.rev().chain(halved).find_map(repair));
    let most = (gpus + NEARBY).min(search.cluster().devices());
    let above = search.sparing(EFFORT_NEARBY, || (gpus + 1..=most).find_map(repair));
    below.into_iter().chain(above.or_else(by_doubling)).collect()
}
