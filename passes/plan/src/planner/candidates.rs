//! Candidates: every strategy and every product of strategies, on every mesh.

use ithaca_ir::diagnostic::counted;
use ithaca_ir::{Diagnostic, Mesh};
use ithaca_layout::registry::Registry;
use ithaca_layout::shard::strategy::{
    CONTEXT_AXES, DATA_AXIS, EXPERT_AXIS, MAX_RANKS, STAGE_AXIS, Search, TENSOR_AXIS,
};
use ithaca_layout::shard::{ShardOptions, Strategy};

use crate::cluster::Cluster;
use crate::planner::request::{Request, Sparsity};

/// The candidates of a request, in a fixed order: by strategy, then by order of axes, then by sizes.
///
/// Every axis has more than one rank, since a strategy with an axis of one is one that lacks it; only where the request
/// names a strategy, and its axes have no such mesh, are axes of one tried.
///
/// # Errors
/// `P10`–`P12` for an unknown strategy or a wrong mesh, `P30` for a number of GPUs that the cluster or the mesh does not
/// have, `P34` where the framework that the plan is for can run none.
pub fn candidates(
    registry: &Registry,
    cluster: &Cluster,
    request: &Request,
) -> Result<Vec<ShardOptions>, Diagnostic> {
    check_gpus(cluster, request)?;
    let names: Vec<String> = match &request.strategy {
        Some(name) => vec![name.clone()],
        None => strategies(registry, request),
    };
    let mut found = Vec::new();
    let near = cluster.levels.first().is_none_or(|level| request.gpus <= level.ranks());
    let reach = if near { Reach::Near } else { Reach::Far };
    for name in &names {
        let product = registry.product(name)?;
        let axes: Vec<&str> = product.iter().flat_map(|s| s.axes()).copied().collect();
        // Without an axis of its own a strategy that shares takes those of the others.
        let others = product.iter().filter(|s| !s.shares_axes()).flat_map(|s| s.axes()).copied();
        let others: Vec<&str> = others.collect();
        let shares = !others.is_empty() && others.len() < axes.len();
        let of_axes = |axes: &[&str]| match (&request.mesh, &request.strategy) {
            (Some(mesh), Some(_)) => vec![mesh.clone()],
            (Some(mesh), None) if same_axes(mesh, axes) => vec![mesh.clone()],
            (Some(_), None) => Vec::new(),
            (None, named) => {
                // Data-parallel ranks do not talk in a forward pass, unless they have parts of the experts.
                let has_parts = shares && !axes.contains(&EXPERT_AXIS);
                let outermost = (!has_parts).then_some(DATA_AXIS);
                let meshes = meshes(Axes { names: axes, outermost }, request.gpus, reach);
                let any = named.is_some() && !meshes.iter().any(proper);
                meshes.into_iter().filter(|m| any || proper(m)).collect()
            }
        };
        let is_narrow = |mesh: &Mesh| {
            let most = request.narrowing.max_tp.unwrap_or(u64::MAX);
            mesh.axis(TENSOR_AXIS).is_none_or(|axis| mesh.size(axis) <= most)
        };
        let is_named = request.strategy.is_some();
        let has_own =
            is_named || request.mesh.is_some() || product.len() <= OWN_AXIS || !axes.contains(&EXPERT_AXIS);
        let mut meshes = if has_own { of_axes(&axes) } else { Vec::new() };
        if shares && !(is_named && request.mesh.is_some()) {
            meshes.extend(of_axes(&others));
        }
        found.extend(meshes.into_iter().filter(is_narrow).map(|mesh| ShardOptions {
            strategy: name.clone(),
            mesh,
            ..request.options.clone()
        }));
    }
    if let Sparsity::Some(functions) = &request.sparsity
        && request.strategy.is_none()
        && request.options.layers.is_empty()
    {
        found = with_sparse_layers(found, functions);
    }
    if found.is_empty() {
        return Err(no_candidate(request));
    }
    let Some(target) = &request.target else { return Ok(found) };
    let (admitted, refusals) = target.admitted(registry, found, request.stated(), request.mesh.as_ref());
    if admitted.is_empty() {
        let title = target.framework.title();
        let gpus = counted(request.gpus, "GPU");
        let diagnostic =
            Diagnostic::new(OF_FRAMEWORK, format!("{title} can run no layout of the request on {gpus}"));
        let reasons = refusals.into_iter().map(|refusal| refusal.reason).take(2);
        return Err(reasons.fold(diagnostic, Diagnostic::help));
    }
    Ok(admitted)
}

/// The code where the framework that a plan is for can run no candidate.
pub(super) const OF_FRAMEWORK: &str = "P34";

/// The most strategies of a product in which experts have an axis of their own: four axes and more are as many meshes as all
/// others together.
const OWN_AXIS: usize = 2;

/// After each candidate whose context is split by one axis, the same with layers of sparse masks that fetch visible tokens.
fn with_sparse_layers(found: Vec<ShardOptions>, functions: &[String]) -> Vec<ShardOptions> {
    const WHOLE: [&str; 2] = ["ring", "megatron-cp-allgather"];
    let mut all = Vec::with_capacity(2 * found.len());
    for options in found {
        let names: Vec<&str> = options.strategy.split('+').collect();
        let sparse = names.iter().any(|name| WHOLE.contains(name)).then(|| {
            let own = names.iter().map(|name| if WHOLE.contains(name) { "sparse-fetch" } else { name });
            let own = own.collect::<Vec<_>>().join("+");
            let layers = functions.iter().map(|f| (f.clone(), own.clone())).collect();
            ShardOptions { layers, ..options.clone() }
        });
        all.push(options);
        all.extend(sparse);
    }
    all
}

fn check_gpus(cluster: &Cluster, request: &Request) -> Result<(), Diagnostic> {
    let (gpus, most) = (request.gpus, cluster.devices().min(MAX_RANKS));
    if gpus == 0 {
        return Err(Diagnostic::new("P30", "a plan needs at least 1 GPU"));
    }
    if gpus > most {
        let message = format!("cluster `{}` has {}, not {gpus}", cluster.name, counted(most, "device"));
        return Err(Diagnostic::new("P30", message).help(format!("use at most {}", counted(most, "GPU"))));
    }
    match &request.mesh {
        Some(mesh) if mesh.ranks() != gpus => {
            let message = format!(
                "mesh `{mesh}` has {}, and there {} {}",
                counted(mesh.ranks(), "rank"),
                if gpus == 1 { "is" } else { "are" },
                counted(gpus, "GPU")
            );
            Err(Diagnostic::new("P30", message).help("the sizes of a mesh multiply to the GPUs"))
        }
        Some(_) | None => Ok(()),
    }
}

fn no_candidate(request: &Request) -> Diagnostic {
    let what = match (&request.strategy, &request.mesh) {
        (Some(name), _) => format!("strategy `{name}` has no mesh of {}", counted(request.gpus, "GPU")),
        (None, Some(mesh)) => format!("no strategy has the axes of mesh `{mesh}`"),
        (None, None) if !request.narrowing.is_none() => {
            let gpus = counted(request.gpus, "GPU");
            return Diagnostic::new("P30", format!("the strategies that are tried have no mesh of {gpus}"))
                .help("omit `--only`, `--without` or `--max-tp`, or allow more");
        }
        (None, None) => format!("no strategy has a mesh of {}", counted(request.gpus, "GPU")),
    };
    Diagnostic::new("P30", what).help("`ithaca list strategies` shows the axes of each")
}

/// Every strategy, then every product of strategies that share no axis, the smaller products first.
fn strategies(registry: &Registry, request: &Request) -> Vec<String> {
    let mut products: Vec<Vec<&dyn Strategy>> = vec![Vec::new()];
    let mut found: Vec<Vec<&dyn Strategy>> = Vec::new();
    let tried = |s: &&dyn Strategy| match s.search() {
        Search::Candidate => true,
        Search::Sparse => request.sparsity == Sparsity::All,
        Search::Experts => request.experts > 0,
        Search::Caches => request.continues.is_some(),
        Search::Prefix => request.continues.is_some_and(|tokens| tokens > 1),
        // The search of training steps puts its own around layouts; stages of a prefill are asked for by a mesh, or tried where
        // nothing else fits.
        Search::Stages => match &request.mesh {
            Some(mesh) => mesh.axis(STAGE_AXIS).is_some(),
            None => request.continues.is_some() || request.tries_stages,
        },
        Search::Named => request.narrowing.only.iter().any(|name| name == s.name()),
    };
    let allowed = |s: &&dyn Strategy| request.narrowing.allows(s.name());
    for strategy in registry.strategies().filter(tried).filter(allowed) {
        let idle = request.mesh.is_none() && request.batch == 1 && strategy.axes().contains(&DATA_AXIS);
        if strategy.axes().is_empty() {
            found.push(vec![strategy]);
        } else if !idle {
            // One strategy splits the context; products of two are strategies with names of their own.
            let context = |s: &dyn Strategy| s.axes().iter().any(|axis| CONTEXT_AXES.contains(axis));
            let disjoint = |product: &&Vec<&dyn Strategy>| {
                !product.iter().any(|s| {
                    let shared = s.axes().iter().any(|axis| strategy.axes().contains(axis));
                    shared || (context(*s) && context(strategy))
                })
            };
            let extended =
                products.iter().filter(disjoint).map(|product| [product.as_slice(), &[strategy]].concat());
            let extended: Vec<_> = extended.collect();
            found.extend(extended.iter().cloned());
            products.extend(extended);
        }
    }
    found.sort_by_key(Vec::len);
    let name = |product: Vec<&dyn Strategy>| product.iter().map(|s| s.name()).collect::<Vec<_>>().join("+");
    found.into_iter().map(name).collect()
}

/// Whether every axis has more than one rank.
fn proper(mesh: &Mesh) -> bool {
    mesh.axes.values().all(|a| a.size > 1)
}

fn same_axes(mesh: &Mesh, axes: &[&str]) -> bool {
    mesh.axes.len() == axes.len() && axes.iter().all(|a| mesh.axis(a).is_some())
}

/// The axes of meshes.
#[derive(Clone, Copy)]
struct Axes<'a> {
    names: &'a [&'a str],
    /// The one that is the outermost, if it is among them.
    outermost: Option<&'a str>,
}

/// The orders of `axes` with every factorisation of `gpus`; a strategy without axes is for one GPU.
fn meshes(axes: Axes<'_>, gpus: u64, reach: Reach) -> Vec<Mesh> {
    match axes.names {
        [] if gpus == 1 => vec![Mesh::single()],
        [] => Vec::new(),
        _ => orders(axes, reach).iter().flat_map(|order| sized(order, gpus)).collect(),
    }
}

/// The orders of `axes` that may differ in speed. Tensor-parallel ranks talk the most, so theirs is the innermost, or the
/// outermost of two. Where all ranks are neighbours alike, one order is enough.
fn orders<'a>(axes: Axes<'a>, reach: Reach) -> Vec<Vec<&'a str>> {
    let (outer, inner): (Vec<&str>, Vec<&str>) =
        axes.names.iter().partition(|&&name| Some(name) == axes.outermost);
    let orders = inner_orders(&inner, reach).into_iter();
    orders.map(|order| [outer.as_slice(), &order].concat()).collect()
}

/// The orders of axes of which none is the outermost.
fn inner_orders<'a>(axes: &[&'a str], reach: Reach) -> Vec<Vec<&'a str>> {
    let (tensor, context): (Vec<&str>, Vec<&str>) = axes.iter().partition(|&&a| a == TENSOR_AXIS);
    let inner = |context: Vec<&'a str>| [context.as_slice(), &tensor].concat();
    match (reach, axes) {
        (Reach::Near, _) => vec![inner(context)],
        (Reach::Far, [_, _]) if !tensor.is_empty() => {
            vec![inner(context.clone()), [tensor.as_slice(), &context].concat()]
        }
        (Reach::Far, _) => permutations(&context).into_iter().map(inner).collect(),
    }
}

/// The levels of the cluster that a mesh spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reach {
    /// All on the innermost level of the cluster.
    Near,
    /// On several levels.
    Far,
}

/// Every order of `items`.
fn permutations<'a>(items: &[&'a str]) -> Vec<Vec<&'a str>> {
    if items.len() <= 1 {
        return vec![items.to_vec()];
    }
    let mut all = Vec::new();
    for (i, &first) in items.iter().enumerate() {
        let rest: Vec<&str> = items.iter().enumerate().filter(|&(j, _)| j != i).map(|(_, &a)| a).collect();
        for mut order in permutations(&rest) {
            order.insert(0, first);
            all.push(order);
        }
    }
    all
}

fn sized(order: &[&str], gpus: u64) -> Vec<Mesh> {
    let sizes = factorisations(gpus, order.len());
    sizes.into_iter().map(|sizes| Mesh::new(order.iter().copied().zip(sizes))).collect()
}

/// Every way to write `n` as a product of `count` factors, in order.
fn factorisations(n: u64, count: usize) -> Vec<Vec<u64>> {
    if count == 1 {
        return vec![vec![n]];
    }
    let mut all = Vec::new();
    for first in (1..=n).filter(|&d| n.is_multiple_of(d)) {
        for mut rest in factorisations(n / first, count - 1) {
            rest.insert(0, first);
            all.push(rest);
        }
    }
    all
}
