//! The cluster, the mesh and the layout that the arguments of a command name.

use std::collections::BTreeSet;
use std::path::Path;

use ithaca_ir::diagnostic::counted;
use ithaca_ir::ops::Movement;
use ithaca_ir::{Diagnostic, Mesh};
use ithaca_passes::cluster::{self, Cluster};
use ithaca_passes::fuse::Fusion;
use ithaca_passes::movement::Partials;
use ithaca_passes::registry::Registry;
use ithaca_passes::shard::{
    AttentionChoice, HeadSplit, OrderChoice, Prune, SequenceFit, ShardOptions, Zero, parse_axes, parse_mesh,
    parse_movement,
};

use crate::cli::{self, DEFAULT_CLUSTER, LayoutArgs};
use crate::error::{Failure, Result};
use crate::ineffective;
use crate::kind::{self, ExpectedKind};

/// A cluster: a built-in profile's name, or the path of a file.
///
/// # Errors
/// `C01` for a missing file, `C05` for another kind of file, `M20` and `M21` for a file that does not describe a cluster,
/// `M22` for an unknown name.
pub fn cluster(name: &str) -> Result<Cluster> {
    let path = Path::new(name);
    let is_path = name.contains(['/', '\\']) || path.extension().is_some_and(|e| e == "toml");
    let is_other = || path.exists() && !cluster::names().contains(&name);
    if !is_path && !is_other() {
        return Ok(Cluster::named(name)?);
    }
    let file = kind::read(path, ExpectedKind::Cluster)?;
    Cluster::parse(name, &file.text).map_err(|refusal| file.refuse(vec![refusal]))
}

/// The cluster that arguments name, or the default, with the attention kernel that they name and the runtime of the mode.
///
/// # Errors
/// As [`cluster()`], and `M22` for a kernel that the cluster does not list and a runtime whose figures it lacks.
pub fn cluster_of(args: &LayoutArgs, mode: Option<cli::Mode>) -> Result<Cluster> {
    let mut cluster = cluster(args.cluster.as_deref().unwrap_or(DEFAULT_CLUSTER))?;
    if let Some(name) = &args.attention_kernel {
        cluster = cluster.with_attention_kernel(name)?;
    }
    let usual = if mode == Some(cli::Mode::Decode) { cluster.decoding_runtime() } else { cluster.runtime };
    let runtime = args.runtime.as_deref().map_or(Ok(usual), |text| usual.changed(text))?;
    Ok(cluster.with_runtime(runtime)?)
}

/// The mesh that arguments name, and the number of GPUs; they must agree.
///
/// # Errors
/// `C00` for a mesh without axes, `P12` for a malformed one, `C04` when it has another number of ranks than GPUs.
pub fn mesh(args: &LayoutArgs) -> Result<(Option<Mesh>, Option<u64>)> {
    if args.mesh.as_deref().is_some_and(|mesh| mesh.trim().is_empty()) {
        let refusal = Diagnostic::new("C00", "`--mesh` is empty");
        return Err(refusal
            .help("name axes, as in `--mesh ulysses=4,tp=2`, or omit it for one device")
            .into());
    }
    let mesh = args.mesh.as_deref().map(parse_mesh).transpose()?;
    if let (Some(mesh), Some(gpus)) = (&mesh, args.gpus)
        && mesh.ranks() != gpus
    {
        let message = format!("mesh `{mesh}` has {}, but `--gpus` is {gpus}", counted(mesh.ranks(), "rank"));
        let help = format!("use `--gpus {}`, or a mesh of {}", mesh.ranks(), counted(gpus, "rank"));
        return Err(Diagnostic::new("C04", message).help(help).into());
    }
    let gpus = args.gpus.or(mesh.as_ref().map(Mesh::ranks));
    Ok((mesh, gpus))
}

/// The layout of arguments: strategy and mesh, or one device.
pub(super) fn layout(
    registry: &Registry,
    args: &LayoutArgs,
    mode: Option<cli::Mode>,
) -> Result<(ShardOptions, Cluster)> {
    let cluster = cluster_of(args, mode)?;
    let (mesh, gpus) = mesh(args)?;
    let strategy = args.strategy.clone();
    let (strategy, mesh) = match (strategy, mesh, gpus) {
        (None, None, None | Some(1)) => ("single".to_owned(), Mesh::single()),
        (named, Some(mesh), _) => (strategy_for(registry, named, &mesh, args)?, mesh),
        (Some(strategy), None, gpus) => {
            let mesh = only_mesh(registry, &strategy, gpus)?;
            (strategy, mesh)
        }
        (None, None, Some(gpus)) => {
            let message = format!("{gpus} GPUs need a layout, and no option names one");
            return Err(Diagnostic::new("C00", message)
                .help("name one with `--strategy` and `--mesh`, or make a plan with `ithaca plan`")
                .into());
        }
    };
    ineffective::layout(args, &mesh)?;
    let mut options = ShardOptions { strategy, ..layout_options(registry, args, Some(&mesh))? };
    let cluster = cluster.spread(mesh.ranks());
    options.mesh = mesh;
    Ok((options, cluster))
}

/// The strategy on a mesh, completed by what axes of the mesh imply.
fn strategy_for(
    registry: &Registry,
    named: Option<String>,
    mesh: &Mesh,
    args: &LayoutArgs,
) -> Result<String> {
    let implied = registry.with_implied(named.as_deref(), mesh, &own_axes(args)?);
    let is_complete = |name: &String| {
        let strategies = registry.product(name).unwrap_or_default();
        mesh.axes.values().all(|axis| strategies.iter().any(|s| s.axes().contains(&axis.name.as_str())))
    };
    let strategy = match (named, implied) {
        (None, implied) => implied.filter(is_complete),
        (Some(_), implied) => implied,
    };
    strategy.ok_or_else(|| {
        let known: BTreeSet<&str> = registry.strategies().flat_map(|s| s.axes().iter().copied()).collect();
        if let Some(axis) = mesh.axes.values().find(|axis| !known.contains(axis.name.as_str())) {
            let refusal =
                Diagnostic::new("C00", format!("no strategy has the axis `{}` of mesh `{mesh}`", axis.name));
            return refusal.names("axes", &axis.name, known).into();
        }
        let refusal = Diagnostic::new("C00", format!("mesh `{mesh}` has axes that several strategies use"));
        refusal
            .help("choose a strategy with `--strategy`; `ithaca list strategies` shows the axes of each")
            .into()
    })
}

/// The strategy of a request to the planner, completed by what axes of its mesh imply; `None` asks for all.
///
/// # Errors
/// As [`layout_options`].
pub fn requested_strategy(
    registry: &Registry,
    args: &LayoutArgs,
    mesh: Option<&Mesh>,
) -> Result<Option<String>> {
    match (&args.strategy, mesh) {
        (Some(named), Some(mesh)) => Ok(registry.with_implied(Some(named.as_str()), mesh, &own_axes(args)?)),
        (named, _) => Ok(named.clone()),
    }
}

/// The mesh axes that sequences have of their own.
fn own_axes(args: &LayoutArgs) -> Result<Vec<String>> {
    Ok(sequence_axes(args)?.into_iter().flat_map(|(_, axes)| axes).collect())
}

fn sequence_axes(args: &LayoutArgs) -> Result<Vec<(String, Vec<String>)>> {
    let items = args.sequence_axes.iter().flat_map(|list| list.split(','));
    let pairs = items.map(|item| {
        let (dim, axes) = pair("sequence-axes", item, "DIM=AXIS[+AXIS]")?;
        Ok((dim, parse_axes(&axes)))
    });
    pairs.collect()
}

/// The axes of sequences, if they are axes of the mesh, or of strategies where the mesh is searched.
///
/// # Errors
/// `P11` for another axis.
fn known_axes(
    registry: &Registry,
    sequences: Vec<(String, Vec<String>)>,
    mesh: Option<&Mesh>,
) -> Result<Vec<(String, Vec<String>)>> {
    let known: BTreeSet<&str> = match mesh {
        Some(mesh) => mesh.axes.values().map(|axis| axis.name.as_str()).collect(),
        None => registry.strategies().flat_map(|s| s.axes().iter().copied()).collect(),
    };
    for (dim, axes) in &sequences {
        if let Some(axis) = axes.iter().find(|axis| !known.contains(axis.as_str())) {
            let of = mesh.map_or_else(|| "no strategy has".to_owned(), |mesh| format!("mesh `{mesh}` lacks"));
            let message = format!("sequence `{dim}` is to be split by axis `{axis}`, which {of}");
            return Err(Diagnostic::new("P11", message)
                .names("axes", axis, known)
                .help(format!("or name the axis in the mesh too: `--mesh` with `{axis}=2`"))
                .into());
        }
    }
    Ok(sequences)
}

/// The two sides of `KEY=VALUE`.
fn pair(flag: &str, item: &str, form: &str) -> Result<(String, String)> {
    let sides = item.split_once('=').map(|(key, value)| (key.trim(), value.trim()));
    let (key, value) = sides
        .filter(|(key, value)| !key.is_empty() && !value.is_empty())
        .ok_or_else(|| Failure::usage(format!("`--{flag} {item}` is not {form}")))?;
    Ok((key.to_owned(), value.to_owned()))
}

/// The options of a layout on `mesh`, without strategy and mesh.
///
/// # Errors
/// `P02` for an unknown token order, fusion or ZeRO stage, and for text that is no movement; `P10` for an unknown strategy of a
/// layer, `P47` for an unknown movement, `P11` for an unknown axis of a sequence; `C00` for a malformed pair.
pub fn layout_options(registry: &Registry, args: &LayoutArgs, mesh: Option<&Mesh>) -> Result<ShardOptions> {
    let zero = args.zero.as_deref().map(Zero::parse).transpose()?.unwrap_or_default();
    let order = args.order.as_deref().filter(|&order| order != "auto");
    let own_axes = own_axes(args)?;
    let movement = |text: &String| -> Result<Movement> {
        let movement = parse_movement(text)?;
        registry.check_movement(&movement)?;
        Ok(movement)
    };
    let layers = args.layer_strategies.iter().map(|item| {
        let (layer, named) = pair("layer-strategy", item, "FUNCTION=NAME")?;
        registry.product(&named)?;
        let completed = mesh.and_then(|mesh| registry.with_implied(Some(named.as_str()), mesh, &own_axes));
        Ok((layer, completed.unwrap_or(named)))
    });
    Ok(ShardOptions {
        heads: match (args.uneven_heads, args.pad_heads) {
            (true, _) => HeadSplit::Uneven,
            (false, true) => HeadSplit::Pad,
            (false, false) => HeadSplit::Even,
        },
        sequence: match (args.uneven_sequence, args.pad_sequence) {
            (true, _) => SequenceFit::Uneven,
            (false, true) => SequenceFit::Pad,
            (false, false) => SequenceFit::Auto,
        },
        order: order.map(OrderChoice::parse).transpose()?,
        prune: if args.prune { Prune::Required } else { Prune::Allowed },
        zero,
        layers: layers.collect::<Result<_>>()?,
        attention: AttentionChoice {
            movement: args.movement.as_ref().map(movement).transpose()?,
            cross_movement: args.cross_movement.as_ref().map(movement).transpose()?,
            sequences: known_axes(registry, sequence_axes(args)?, mesh)?,
        },
        partials: args.partials.as_deref().map_or(Ok(Partials::default()), Partials::parse)?,
        fusion: args.fuse.as_deref().map_or(Ok(zero.usual_fusion()), Fusion::parse)?,
        ..ShardOptions::default()
    })
}

/// The mesh of a strategy with one axis.
fn only_mesh(registry: &Registry, strategy: &str, gpus: Option<u64>) -> Result<Mesh> {
    let strategies = registry.product(strategy)?;
    let axes: Vec<&str> = strategies.iter().flat_map(|s| s.axes()).copied().collect();
    match (axes.as_slice(), gpus) {
        ([], None | Some(1)) => Ok(Mesh::single()),
        ([], Some(n)) => {
            let message = format!("strategy `{strategy}` is for 1 GPU, but `--gpus` is {n}");
            Err(Diagnostic::new("C04", message).help("omit `--gpus`, or name another strategy").into())
        }
        ([axis], Some(gpus)) => Ok(Mesh::new([(*axis, gpus)])),
        _ => Err(Failure::usage(format!("strategy `{strategy}` needs `--mesh {}=N`", axes.join("=N,")))),
    }
}
