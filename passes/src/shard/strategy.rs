//! Strategies: a name, the mesh axes it uses, and where it puts things.
//!
//! A strategy says only which axes split which role of dimension, outside attention and inside. Collectives follow from
//! the layouts that do not match. Products are written with a plus: each strategy adds its axes to one [`Placement`].

use ithaca_ir::layout::AxisList;
use ithaca_ir::mesh::{AxisId, Mesh};
use ithaca_ir::{Diagnostic, Mesh as MeshType};

/// Which axes split what.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// Axes that split the sequences of the batch, everywhere.
    pub batch: AxisList,
    /// Axes that split the heads, the hidden width of the feed-forward network and the vocabulary of weights.
    pub weights: AxisList,
    /// Axes that split the sequence of every activation, and of inputs.
    pub sequence: AxisList,
    /// Axes that split the sequence further where no weight is split: the residual stream and norms.
    pub residual: AxisList,
    /// Axes of [`sequence`](Self::sequence) that split heads instead inside attention.
    pub heads_inside: AxisList,
}

impl Placement {
    /// Axes that split the sequence of the residual stream.
    pub fn residual_sequence(&self) -> AxisList {
        self.sequence.iter().chain(&self.residual).copied().collect()
    }

    /// Axes that split heads inside attention.
    pub fn attention_heads(&self) -> AxisList {
        self.weights.iter().chain(&self.heads_inside).copied().collect()
    }

    /// Axes that split the sequence inside attention.
    pub fn attention_sequence(&self) -> AxisList {
        self.sequence.iter().filter(|a| !self.heads_inside.contains(a)).copied().collect()
    }
}

/// A way to distribute a transformer.
pub trait Strategy {
    /// The name, as `--strategy` takes it.
    fn name(&self) -> &'static str;
    /// One sentence, with its source.
    fn summary(&self) -> &'static str;
    /// What must divide what.
    fn legality(&self) -> &'static str;
    /// The axes of the mesh that it uses.
    fn axes(&self) -> &'static [&'static str];
    /// Adds what this strategy splits; `axes` are those of [`axes`](Self::axes), in that order.
    fn place(&self, axes: &[AxisId], placement: &mut Placement);
}

/// Data parallelism: each rank has some of the sequences.
struct DataParallel;

impl Strategy for DataParallel {
    fn name(&self) -> &'static str {
        "data-parallel"
    }
    fn summary(&self) -> &'static str {
        "sequences of the batch split, weights whole; nothing is sent in a forward pass"
    }
    fn legality(&self) -> &'static str {
        "sequences of the batch % P = 0"
    }
    fn axes(&self) -> &'static [&'static str] {
        &[DATA_AXIS]
    }
    fn place(&self, axes: &[AxisId], placement: &mut Placement) {
        placement.batch.push(axes[0]);
    }
}

/// DeepSpeed-Ulysses: the sequence outside attention, heads inside.
struct Ulysses;

impl Strategy for Ulysses {
    fn name(&self) -> &'static str {
        "ulysses"
    }
    fn summary(&self) -> &'static str {
        "sequence split outside attention, heads inside; all-to-all in and out (Jacobs et al., arXiv 2309.14509)"
    }
    fn legality(&self) -> &'static str {
        "query heads % P = 0; key/value heads % P = 0, or P % key/value heads = 0 with copies; tokens % P = 0"
    }
    fn axes(&self) -> &'static [&'static str] {
        &["ulysses"]
    }
    fn place(&self, axes: &[AxisId], placement: &mut Placement) {
        placement.sequence.push(axes[0]);
        placement.heads_inside.push(axes[0]);
    }
}

/// Megatron tensor parallelism: column- then row-split weights.
struct MegatronTp;

impl Strategy for MegatronTp {
    fn name(&self) -> &'static str {
        "megatron-tp"
    }
    fn summary(&self) -> &'static str {
        "heads and feed-forward width split, activations whole; two all-reduces a layer (Shoeybi et al., arXiv 1909.08053)"
    }
    fn legality(&self) -> &'static str {
        "query heads % P = 0; key/value heads a multiple or a divisor of P; feed-forward width % P = 0"
    }
    fn axes(&self) -> &'static [&'static str] {
        &["tp"]
    }
    fn place(&self, axes: &[AxisId], placement: &mut Placement) {
        placement.weights.push(axes[0]);
    }
}

/// Megatron tensor and sequence parallelism: the residual stream is split by sequence.
struct MegatronTpSp;

impl Strategy for MegatronTpSp {
    fn name(&self) -> &'static str {
        "megatron-tp-sp"
    }
    fn summary(&self) -> &'static str {
        "as megatron-tp, the residual stream split by sequence; all-gather in, reduce-scatter out (Korthikanti et al., arXiv 2205.05198)"
    }
    fn legality(&self) -> &'static str {
        "as megatron-tp; tokens % P = 0"
    }
    fn axes(&self) -> &'static [&'static str] {
        &["tp"]
    }
    fn place(&self, axes: &[AxisId], placement: &mut Placement) {
        placement.weights.push(axes[0]);
        placement.residual.push(axes[0]);
    }
}

/// One device: nothing is split.
struct Single;

impl Strategy for Single {
    fn name(&self) -> &'static str {
        "single"
    }
    fn summary(&self) -> &'static str {
        "one device, nothing is split"
    }
    fn legality(&self) -> &'static str {
        "one GPU"
    }
    fn axes(&self) -> &'static [&'static str] {
        &[]
    }
    fn place(&self, _axes: &[AxisId], _placement: &mut Placement) {}
}

/// Every strategy, in the order of the documentation.
pub const STRATEGIES: &[&dyn Strategy] = &[&Single, &DataParallel, &Ulysses, &MegatronTp, &MegatronTpSp];

/// A product of strategies: the names between the plus signs.
///
/// # Errors
/// `P10` for an unknown name, and for two strategies that use the same axis.
pub fn product(text: &str) -> Result<Vec<&'static dyn Strategy>, Diagnostic> {
    let mut strategies: Vec<&'static dyn Strategy> = Vec::new();
    for name in text.split('+').map(str::trim) {
        let Some(&strategy) = STRATEGIES.iter().find(|s| s.name() == name) else {
            let known: Vec<&str> = STRATEGIES.iter().map(|s| s.name()).collect();
            return Err(Diagnostic::new("P10", format!("there is no strategy `{name}`"))
                .help(format!("strategies: {}; a product is written with a plus", known.join(", "))));
        };
        for other in &strategies {
            if let Some(axis) = strategy.axes().iter().find(|a| other.axes().contains(a)) {
                let message =
                    format!("strategies `{}` and `{}` both use axis `{axis}`", other.name(), strategy.name());
                return Err(Diagnostic::new("P10", message));
            }
        }
        strategies.push(strategy);
    }
    Ok(strategies)
}

/// The placement of a product on a mesh.
///
/// # Errors
/// `P11` when the mesh lacks an axis that a strategy uses, or has one that none uses, or one of size zero.
pub fn placement(strategies: &[&dyn Strategy], mesh: &MeshType) -> Result<Placement, Diagnostic> {
    let mut placement = Placement::default();
    let used: Vec<&str> = strategies.iter().flat_map(|s| s.axes()).copied().collect();
    if let Some(axis) = mesh.axes.values().find(|a| !used.contains(&a.name.as_str())) {
        let names: Vec<&str> = strategies.iter().map(|s| s.name()).collect();
        let message =
            format!("mesh axis `{}={}` is used by none of: {}", axis.name, axis.size, names.join(", "));
        return Err(Diagnostic::new("P11", message).help(expected_axes(&used)));
    }
    for strategy in strategies {
        let axes: Option<Vec<AxisId>> = strategy.axes().iter().map(|name| mesh.axis(name)).collect();
        match axes {
            Some(axes) => strategy.place(&axes, &mut placement),
            None => {
                let message = format!("strategy `{}` needs a mesh axis that `{mesh}` lacks", strategy.name());
                return Err(Diagnostic::new("P11", message).help(expected_axes(&used)));
            }
        }
    }
    Ok(placement)
}

fn expected_axes(used: &[&str]) -> String {
    match used {
        [] => "strategy `single` takes no mesh".to_owned(),
        _ => {
            let example: Vec<String> = used.iter().map(|a| format!("{a}=N")).collect();
            format!("the mesh of this strategy is `{}`, major to minor", example.join(","))
        }
    }
}

/// Reads a mesh as the command line writes it: `ulysses=4,tp=2`.
///
/// # Errors
/// `P12` for a malformed axis, a size that is not a positive number, or a name that occurs twice.
pub fn parse_mesh(text: &str) -> Result<Mesh, Diagnostic> {
    let mut axes: Vec<(String, u64)> = Vec::new();
    let items = text.split(',').map(str::trim).filter(|_| !text.trim().is_empty());
    for item in items {
        let Some((name, size)) = item.split_once('=') else {
            return Err(Diagnostic::new("P12", format!("mesh axis `{item}` has no size"))
                .help("as in `ulysses=4,tp=2`"));
        };
        add_axis(&mut axes, name.trim(), size.trim())?;
    }
    Ok(Mesh::new(axes))
}

/// Adds one axis to a mesh that is being read.
pub(super) fn add_axis(axes: &mut Vec<(String, u64)>, name: &str, size: &str) -> Result<(), Diagnostic> {
    let well_named = name.starts_with(|c: char| c.is_ascii_alphabetic())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    let ranks: u64 = axes.iter().map(|a| a.1).product();
    let problem = match size.parse::<u64>() {
        _ if !well_named => format!("`{name}` is not the name of a mesh axis"),
        Err(_) | Ok(0) => format!("size `{size}` of mesh axis `{name}` is not a positive number"),
        Ok(n) if ranks.checked_mul(n).is_none_or(|r| r > MAX_RANKS) => {
            format!("the mesh has more than {MAX_RANKS} ranks")
        }
        Ok(_) if axes.iter().any(|a| a.0 == name) => format!("mesh axis `{name}` is named twice"),
        Ok(n) => {
            axes.push((name.to_owned(), n));
            return Ok(());
        }
    };
    Err(Diagnostic::new("P12", problem).help("as in `ulysses=4,tp=2`, major to minor"))
}

/// The mesh axis of data parallelism.
pub const DATA_AXIS: &str = "dp";

/// The most ranks that a mesh may have.
pub const MAX_RANKS: u64 = 1 << 20;
