//! Draws cases: strategies with their axes from the registry, and attentions that mostly suit them.

use ithaca_ir::mask::Align;
use ithaca_ir::ops::{Dropout, Keyed, Sides};
use ithaca_ir::{DType, Mask};
use ithaca_passes::shard::{STRATEGIES, Strategy};

use super::case::{Buckets, Case, Extent};
use crate::fuzz::Choices;

/// The most ranks of a mesh.
const MAX_RANKS: u64 = 16;

/// The most tokens of a sequence.
const MAX_TOKENS: u64 = 48;

/// The strategies that distribute attention; experts are laid out by themselves, and stages are those of a program.
pub(crate) fn strategies() -> Vec<&'static dyn Strategy> {
    STRATEGIES
        .iter()
        .copied()
        .filter(|s| !["ep", "data-parallel-ep", "pipeline"].contains(&s.name()))
        .collect()
}

/// Whether queries attend to a cache, which is split.
fn decodes(strategy: &str) -> bool {
    ["decode-reduce", "decode-context"].contains(&strategy)
}

/// The case that `seed` determines.
pub(crate) fn case(seed: u64) -> Case {
    let choices = &mut Choices::from_seed(seed);
    // Every strategy in turn, so that none is left to chance.
    let all = strategies();
    let first = all[seed as usize % all.len()];
    let mut strategies = vec![first];
    for _ in 0..choices.below(3) {
        let other = choices.one_of(&["data-parallel", "megatron-tp", "megatron-tp-sp", "ulysses"]);
        let other = STRATEGIES.iter().find(|s| s.name() == other).copied();
        let free = |axis: &&str| strategies.iter().all(|s| !s.axes().contains(axis));
        if let Some(other) = other.filter(|s| s.axes().iter().all(free)) {
            strategies.push(other);
        }
    }
    let names: Vec<&str> = strategies.iter().map(|s| s.name()).collect();
    let mut mesh: Vec<(&'static str, u64)> = Vec::new();
    let mut ranks = 1;
    // The axes of the strategy itself have the first choice of sizes.
    for axis in strategies.iter().flat_map(|s| s.axes()) {
        let fits: Vec<u64> =
            [2, 4, 3, 8, 1, 5, 6, 7, 16].into_iter().filter(|n| n * ranks <= MAX_RANKS).collect();
        let usual = fits.len().min(3);
        let size = if choices.once_in(3) { choices.one_of(&fits) } else { choices.one_of(&fits[..usual]) };
        ranks *= size;
        mesh.push((axis, size));
    }
    for i in (1..mesh.len()).rev() {
        mesh.swap(i, choices.below(i + 1));
    }
    let name = first.name();
    let mut case = attention(choices, name, &mesh);
    case.strategy = names.join("+");
    case.mesh = mesh;
    case.options = options(choices, name);
    depart(choices, &mut case, ranks);
    case
}

/// Sometimes another movement than the strategy's, and an axis of its own for the keys of cross-attention.
fn depart(choices: &mut Choices, case: &mut Case, ranks: u64) {
    let gathers = ["megatron-cp-allgather", "gspmd-2d"].iter().any(|name| case.strategy.starts_with(name));
    if choices.once_in(if gathers { 2 } else { 12 }) {
        let axis = |name: &str| case.mesh.iter().find(|a| a.0 == name).map_or(1, |a| a.1);
        let heads = axis("tp") * axis("ulysses");
        let (groups, option) = choices.one_of(&[
            (2, "movement=gather(groups=2)"),
            (2, "movement=gather(groups=2)"),
            (3, "movement=gather(groups=3)"),
            (1, "movement=gather(groups=1)"),
        ]);
        if !choices.once_in(8) {
            case.kv_heads = case.kv_heads.next_multiple_of(groups * heads);
        }
        case.options.push(option);
    }
    let Some(keys) = case.keys.filter(|_| choices.once_in(2)) else { return };
    // The mask knows how many keys there are, so the axis suits them.
    let suits = |n: &u64| n * ranks <= MAX_RANKS && (keys.is_multiple_of(*n) || ranks.is_multiple_of(3));
    let sizes: Vec<u64> = [2, 3, 4].into_iter().filter(suits).collect();
    let Some(_) = sizes.first() else { return };
    let size = choices.one_of(&sizes);
    let at = choices.below(case.mesh.len() + 1);
    case.mesh.insert(at, ("enc", size));
    let movements = [
        "cross-movement=gather",
        "cross-movement=reduce",
        "cross-movement=gather(groups=2)",
        "prune=allowed",
    ];
    case.options.push(choices.one_of(&movements));
    // Beside its own axis the keys may have one that splits the queries too.
    let shared = case.mesh.iter().map(|a| a.0).find(|name| ["ring", "cp"].contains(name));
    case.options.push(match shared.filter(|_| choices.once_in(3)) {
        None => "sequence.s=enc",
        Some("ring") => choices.one_of(&["sequence.s=enc+ring", "sequence.s=ring+enc"]),
        Some(_) => choices.one_of(&["sequence.s=enc+cp", "sequence.s=cp+enc"]),
    });
    if choices.once_in(6) {
        case.options.push("sequence.t=none");
    }
}

fn options(choices: &mut Choices, strategy: &str) -> Vec<&'static str> {
    let orders = [None, None, Some("order=contiguous"), Some("order=zigzag"), Some("order=striped")];
    // Some take tokens in a row only, and one has too few queries for anything else.
    let in_a_row = ["dist-flash", "window-halo", "streaming"].contains(&strategy);
    let suits = (in_a_row || decodes(strategy)) && !choices.once_in(8);
    let order = choices.one_of(if suits { &orders[..3] } else { &orders });
    let heads = choices.once_in(3).then_some("heads=uneven");
    let sequence = choices.one_of(&[None, None, Some("sequence=pad"), Some("sequence=uneven")]);
    [order, heads, sequence].into_iter().flatten().collect()
}

fn attention(choices: &mut Choices, strategy: &str, mesh: &[(&'static str, u64)]) -> Case {
    let axis = |name: &str| mesh.iter().find(|a| a.0 == name).map_or(1, |a| a.1);
    let ranks: u64 = mesh.iter().map(|a| a.1).product();
    let tokens = ranks / axis("dp");
    let decodes = decodes(strategy);
    let queries = if decodes { choices.one_of(&[1, 2, 3, 5]) } else { length(choices, tokens) };
    let crosses = choices.once_in(if strategy == "dist-flash" { 8 } else { 3 });
    let keys = if decodes || crosses { Some(length(choices, tokens)) } else { None };
    let inside = if strategy == "megatron-cp-a2a" { axis("cp") } else { axis("ulysses") };
    let degree = inside * axis("tp");
    let heads: Vec<u64> = [degree, degree, 2 * degree, degree / 2, 1, 2, 3, degree, 4, 5]
        .into_iter()
        .filter(|n| (1..=16).contains(n))
        .collect();
    let kv_heads = choices.one_of(&heads);
    let groups: Vec<u64> =
        [1, 2, degree / kv_heads, 3, 4].into_iter().filter(|n| (1..=16).contains(n)).collect();
    let group = choices.one_of(&groups);
    let n_keys = keys.unwrap_or(queries);
    let parts = axis("ring") * axis("cp") * axis("outer");
    let mask = match choices.below(8) {
        0 => any_mask(choices, queries, n_keys, 2),
        1 | 2 if queries == n_keys => packed(choices, queries, 2 * parts),
        _ => fitting_mask(choices, strategy, queries, n_keys),
    };
    let extra = choices.below(10);
    let extent = choices.one_of(&[
        Extent::Backward,
        Extent::Backward,
        Extent::Backward,
        Extent::Forward,
        if decodes { Extent::Forward } else { Extent::Backward },
        Extent::Output,
    ]);
    Case {
        batch: axis("dp") * choices.one_of(&[1, 1, 1, 2]),
        queries,
        keys,
        kv_heads,
        group,
        width: choices.one_of(&[2, 1, 3, 4]),
        value_width: choices.one_of(&[None, None, Some(1), Some(3)]),
        mask,
        scale: choices.one_of(&[0.5, 4.0, 20.0]),
        softcap: (extra == 1).then_some(0.7),
        bias: (extra == 2).then(|| bias(choices)),
        dropout: matches!(extra, 3 | 4).then(|| Dropout {
            rate: choices.one_of(&[0.25, 0.5]),
            seed: choices.below(100) as u64,
            keyed: Keyed::Position,
        }),
        key: (extra == 4).then(|| choices.below(100) as u64),
        sink: extent != Extent::Output && choices.once_in(5),
        dtype: choices.one_of(&[DType::F32, DType::BF16, DType::F64, DType::F16]),
        extent,
        ..Case::new(strategy, mesh, queries)
    }
}

/// Mostly a multiple of twice the degree, which every order of tokens divides.
fn length(choices: &mut Choices, degree: u64) -> u64 {
    let n = match choices.below(8) {
        0..5 => 2 * degree * (1 + choices.below(3) as u64),
        5 | 6 => degree * (1 + choices.below(4) as u64),
        _ => 1 + choices.below(MAX_TOKENS as usize) as u64,
    };
    if n <= MAX_TOKENS { n } else { 2 * degree }
}

fn bias(choices: &mut Choices) -> Buckets {
    Buckets {
        n: choices.one_of(&[4, 8]),
        max_distance: choices.one_of(&[8, 16]),
        sides: choices.one_of(&[Sides::Both, Sides::Before]),
    }
}

/// A mask that the strategy is made for, with random numbers.
fn fitting_mask(choices: &mut Choices, strategy: &str, n_q: u64, n_k: u64) -> Mask {
    let mut below = |n: u64| choices.below(n.max(1) as usize) as u64;
    let window = Mask::Window { left: Some(below(n_k)), right: Some(below(3)) };
    let sinks = Mask::Sinks(1 + below(n_k.min(4)));
    let causal = if n_q == n_k { Mask::Causal } else { Mask::CausalAtEnd { queries: n_q, keys: n_k } };
    match strategy {
        "window-halo" => window,
        "streaming" => Mask::All(vec![causal, Mask::Any(vec![window, sinks])]),
        "dist-flash" if below(2) == 0 => Mask::All(vec![causal, any_mask(choices, n_q, n_k, 1)]),
        "dist-flash" => causal,
        _ => match below(3) {
            0 => causal,
            _ => any_mask(choices, n_q, n_k, 2),
        },
    }
}

/// Causal documents, most often of lengths that zigzag inside each document divides.
fn packed(choices: &mut Choices, n: u64, step: u64) -> Mask {
    let inner = (1..n).filter(|i| i % step == 0 && !choices.once_in(3));
    let mut bounds = vec![0];
    bounds.extend(inner.collect::<Vec<_>>());
    bounds.push(n);
    Mask::All(vec![Mask::Documents(bounds), Mask::Causal])
}

/// A mask of `n_q` queries and `n_k` keys that nests joins at most `depth` deep.
fn any_mask(choices: &mut Choices, n_q: u64, n_k: u64, depth: u64) -> Mask {
    let mut below = |n: u64| choices.below(n.max(1) as usize) as u64;
    let n = n_q.min(n_k);
    match below(if depth > 0 { 16 } else { 12 }) {
        0 => Mask::Full,
        1 if n_q == n_k => Mask::Causal,
        1 | 2 => Mask::CausalAtEnd { queries: n_q, keys: n_k },
        3 => {
            let mut side = || (below(4) > 0).then(|| below(n + 2));
            Mask::Window { left: side(), right: side() }
        }
        4 => Mask::Prefix(1 + below(n)),
        11 => Mask::Chunks(1 + below(n)),
        5 => Mask::Sinks(1 + below(n)),
        6 => Mask::Global(1 + below(n)),
        7 if n_q == n_k => {
            let mut bounds = vec![0];
            bounds.extend((1..n).filter(|_| below(4) == 0));
            bounds.push(n);
            Mask::Documents(bounds)
        }
        7 | 8 => {
            let size = 1 + below(5);
            let columns = n_k.div_ceil(size);
            let n_rows = below(n_q.div_ceil(size) + 1);
            let mut row = || (0..columns).filter(|_| below(2) == 0).collect();
            Mask::Blocks { size, rows: (0..n_rows).map(|_| row()).collect() }
        }
        9 => Mask::GlobalAt(chosen(choices, n, 1 + n / 4)),
        10 => {
            let documents = 1 + below(n.min(5));
            let mut bounds = |n: u64| [vec![0], chosen(choices, n - 1, documents - 1), vec![n]].concat();
            let bounds = [bounds(n_q), bounds(n_k)].map(|mut bounds| {
                // Between the first and the last bound.
                let n = bounds.len();
                bounds[1..n - 1].iter_mut().for_each(|b| *b += 1);
                bounds
            });
            let [queries, keys] = bounds;
            Mask::DocumentPairs {
                queries,
                keys,
                causal: choices.one_of(&[None, Some(Align::Start), Some(Align::End)]),
            }
        }
        i => {
            let parts = (0..2 + below(2)).collect::<Vec<_>>();
            let parts = parts.iter().map(|_| any_mask(choices, n_q, n_k, depth - 1)).collect();
            if i % 2 == 0 { Mask::All(parts) } else { Mask::Any(parts) }
        }
    }
}

/// `count` numbers below `n`, ascending.
fn chosen(choices: &mut Choices, n: u64, count: u64) -> Vec<u64> {
    let mut left: Vec<u64> = (0..n).collect();
    while left.len() as u64 > count {
        left.remove(choices.below(left.len()));
    }
    left
}
