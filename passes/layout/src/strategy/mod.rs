//! Strategies: a name, the mesh axes that it uses, and the dimensions that they split.
//!
//! A strategy states only which axes split which role of dimension, outside attention and inside, and which movement brings
//! keys and queries together. Collectives follow from the layouts that do not match. Products are written with a plus:
//! each strategy adds its axes to one [`Placement`].

mod recipes;

pub use recipes::STRATEGIES;

use ithaca_ir::Diagnostic;
use ithaca_ir::diagnostic::nearest;
use ithaca_ir::layout::AxisList;
use ithaca_ir::mesh::{AxisId, Mesh};

/// The axes that split each role of dimension.
///
/// A strategy adds to it, in [`Strategy::place`]; [`heads_inside`](Self::heads_inside) and
/// [`sequence_inside`](Self::sequence_inside) serve sequence parallelism; other strategies set the fields.
/// Where layouts outside and inside attention differ, collectives follow.
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
    pub heads: AxisList,
    /// Axes that split caches of keys: key sequences that are no query sequences. Those that split weights too split heads
    /// outside of attention only.
    pub cache: AxisList,
    /// Axes that split the experts of a mixture, major to minor; those of them that split tokens do so everywhere else.
    pub experts: AxisList,
    /// The axis of the stages of a pipeline; it splits nothing.
    pub stages: AxisList,
    /// The movement that brings keys and queries together if the remaining axes split them inside attention: the name of
    /// a [`Movement`](crate::movement::Movement).
    pub movement: Option<String>,
    /// Further movements that strategies of the product requested; a product has one movement.
    pub contested: Vec<String>,
}

impl Placement {
    /// `axis` splits the sequence outside attention and heads inside.
    pub fn heads_inside(&mut self, axis: AxisId) {
        self.sequence.push(axis);
        self.heads.push(axis);
    }

    /// `axes`, major to minor, split the sequence outside attention and inside, where `movement` brings keys and
    /// queries together.
    pub fn sequence_inside(&mut self, axes: &[AxisId], movement: &str) {
        // Axes that split heads inside are the innermost, so that an all-to-all can trade them.
        let at = self.sequence.iter().position(|a| self.heads.contains(a)).unwrap_or(self.sequence.len());
        self.sequence.insert_many(at, axes.iter().copied());
        self.moves_by(movement);
    }

    /// `movement` brings keys and queries together.
    pub fn moves_by(&mut self, movement: &str) {
        match self.movement {
            None => self.movement = Some(movement.to_owned()),
            Some(_) => self.contested.push(movement.to_owned()),
        }
    }

    /// `axis` splits weights.
    pub fn weights_by(&mut self, axis: AxisId) {
        // Axes that split a cache inside attention are the innermost, so that heads can be gathered along them.
        let at = self.weights.iter().position(|a| self.cache.contains(a)).unwrap_or(self.weights.len());
        self.weights.insert(at, axis);
    }

    /// `axes`, major to minor, split experts, and tokens outside of them: those that split no tokens yet split the
    /// sequence where attention does not see it.
    pub fn experts_over(&mut self, axes: &[AxisId]) {
        for &axis in axes {
            if !self.token_axes().contains(&axis) {
                self.residual.push(axis);
            }
            self.experts.push(axis);
        }
    }

    /// Axes that split tokens outside of attention and experts, each dimension's from minor to major, as all-to-alls
    /// trade them.
    fn token_axes(&self) -> AxisList {
        self.residual_sequence().into_iter().rev().chain(self.batch.iter().rev().copied()).collect()
    }

    /// The layouts outside attention, which all layers of a program share.
    pub fn outside(&self) -> [AxisList; 6] {
        [&self.batch, &self.weights, &self.sequence, &self.residual, &self.experts, &self.stages]
            .map(Clone::clone)
    }

    /// Whether the ranks along an axis have the same weights and other tokens.
    pub fn holds_same_weights(&self, axis: AxisId) -> bool {
        (self.batch.contains(&axis) || self.sequence.contains(&axis)) && !self.weights.contains(&axis)
    }

    /// Axes that split the sequence of the residual stream.
    pub fn residual_sequence(&self) -> AxisList {
        self.sequence.iter().chain(&self.residual).copied().collect()
    }

    /// Axes that split heads inside attention.
    pub fn attention_heads(&self) -> AxisList {
        self.weights.iter().filter(|a| !self.cache.contains(a)).chain(&self.heads).copied().collect()
    }

    /// Axes that split the sequence inside attention.
    pub fn attention_sequence(&self) -> AxisList {
        self.sequence.iter().filter(|a| !self.heads.contains(a)).copied().collect()
    }
}

/// When the planner tries a strategy that the request does not name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Search {
    /// Always.
    Candidate,
    /// If a mask is more than causal and leaves blocks empty.
    Sparse,
    /// If the model has experts.
    Experts,
    /// If sequences are continued.
    Caches,
    /// If sequences are continued by many tokens at once.
    Prefix,
    /// Around other layouts of a training step, and of a step that continues sequences.
    Stages,
    /// Never: another strategy has the same layouts and movement, or is never slower.
    Named,
}

/// A way to distribute a transformer: the dimensions that each mesh axis splits, and the movement of attention.
///
/// Everything else follows from it: collectives between layouts, the backward pass, bytes, the price, the schedule. A
/// strategy has no state, so one of your own is a unit struct in a `static` place:
///
/// ```
/// use ithaca_ir::mesh::AxisId;
/// use ithaca_layout::registry::Registry;
/// use ithaca_layout::shard::{Placement, Strategy};
///
/// struct Gathered;
///
/// impl Strategy for Gathered {
///     fn name(&self) -> &'static str {
///         "gathered"
///     }
///     fn summary(&self) -> &'static str {
///         "sequence split everywhere, keys and values gathered"
///     }
///     fn legality(&self) -> &'static str {
///         "tokens % P = 0"
///     }
///     fn axes(&self) -> &'static [&'static str] {
///         &["cp"]
///     }
///     fn place(&self, axes: &[AxisId], placement: &mut Placement) {
///         placement.sequence_inside(axes, "gather");
///     }
/// }
///
/// let registry = Registry::default().with_strategy(&Gathered);
/// assert!(registry.strategy("gathered").is_some());
/// ```
pub trait Strategy: Sync {
    /// The name, as in `--strategy`.
    fn name(&self) -> &'static str;
    /// One sentence with its source.
    fn summary(&self) -> &'static str;
    /// The required divisibility, for the table of strategies; the rules themselves follow from the placement.
    fn legality(&self) -> &'static str;
    /// The axes of the mesh that it uses, by the field's names: `ulysses`, `ring`, `cp`, `outer`, `tp`, `dp`, `ep`, `pp`.
    /// Strategies of a product use different axes.
    fn axes(&self) -> &'static [&'static str];
    /// When the planner tries it unnamed.
    fn search(&self) -> Search {
        Search::Candidate
    }
    /// Whether it uses the axes by which the other strategies split tokens if the mesh has no axis of its own for it.
    fn shares_axes(&self) -> bool {
        false
    }
    /// Adds the axes of this strategy; `axes` are those of [`axes`](Self::axes), in that order.
    fn place(&self, axes: &[AxisId], placement: &mut Placement);
}

/// The placement of a product on a mesh; `also` are axes of the mesh that no strategy uses, but a sequence.
///
/// # Errors
/// `P11` when the mesh lacks an axis that a strategy uses, or has one that nothing uses, or one of size zero.
pub fn placement(
    strategies: &[&dyn Strategy],
    mesh: &Mesh,
    also: &[AxisId],
) -> Result<Placement, Diagnostic> {
    if let Some(axis) = mesh.axes.values().find(|axis| axis.size == 0) {
        return Err(Diagnostic::new("P11", format!("mesh axis `{}` has no ranks", axis.name))
            .help("an axis has 1 rank at least"));
    }
    let mut placement = Placement::default();
    let used: Vec<&str> = strategies.iter().flat_map(|s| s.axes()).copied().collect();
    // The known axis with the nearest name.
    let suggested = |refusal: Diagnostic| {
        let unknown = mesh.axes.values().map(|axis| axis.name.as_str()).filter(|name| !used.contains(name));
        let near = unknown.filter_map(|name| nearest(name, used.iter().copied())).next();
        near.iter().fold(refusal, |d, near| d.help(format!("did you mean axis `{near}`?")))
    };
    let mut taken: Vec<AxisId> = Vec::new();
    let mut sharing = Vec::new();
    for strategy in strategies {
        let axes: Option<Vec<AxisId>> =
            strategy.axes().iter().map(|name| axis_for(name, strategy.axes(), &used, mesh)).collect();
        if axes.is_none() && strategy.shares_axes() && strategies.len() > 1 {
            sharing.push(strategy);
            continue;
        }
        let Some(axes) = axes else {
            let mesh = match mesh.axes.len() {
                0 => "one device".to_owned(),
                _ => format!("`{mesh}`"),
            };
            let message = format!("strategy `{}` needs a mesh axis that {mesh} lacks", strategy.name());
            return Err(suggested(Diagnostic::new("P11", message)).help(expected_axes(&used)));
        };
        strategy.place(&axes, &mut placement);
        taken.extend(axes);
    }
    for strategy in sharing {
        let axes = placement.token_axes();
        strategy.place(&axes, &mut placement);
    }
    let names = || strategies.iter().map(|s| s.name()).collect::<Vec<_>>().join(", ");
    if let Some((_, axis)) = mesh.axes.iter().find(|(id, _)| !taken.contains(id) && !also.contains(id)) {
        let message = format!("mesh axis `{}={}` is used by none of: {}", axis.name, axis.size, names());
        return Err(suggested(Diagnostic::new("P11", message)).help(expected_axes(&used)));
    }
    if let (Some(first), Some(second)) = (&placement.movement, placement.contested.first()) {
        let message = format!("strategies {} bring two movements, `{first}` and `{second}`", names());
        return Err(Diagnostic::new("P10", message)
            .help("one movement serves an attention; name one strategy that has one"));
    }
    Ok(placement)
}

/// The axis of the mesh that serves as `name`. A strategy with one axis for its context takes it under any of the
/// field's names, so that layers of different strategies can share it.
fn axis_for(name: &str, own: &[&str], used: &[&str], mesh: &Mesh) -> Option<AxisId> {
    const CONTEXT: [&str; 3] = ["cp", "ring", "ulysses"];
    if let Some(axis) = mesh.axis(name) {
        return Some(axis);
    }
    let only = CONTEXT.contains(&name) && own.iter().filter(|a| CONTEXT.contains(a)).count() == 1;
    let free = CONTEXT.iter().filter(|other| !used.contains(other));
    free.filter(|_| only).find_map(|other| mesh.axis(other))
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
        if item.is_empty() {
            return Err(Diagnostic::new(
                "P12",
                format!("between two commas of mesh `{text}`, or beside one, is no axis"),
            )
            .help("as in `ulysses=4,tp=2`"));
        }
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
        Err(_) | Ok(0) => {
            format!("size `{size}` of mesh axis `{name}` is not a whole number from 1 to {MAX_RANKS}")
        }
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

/// The mesh axes that split the tokens of a sequence.
pub const CONTEXT_AXES: [&str; 4] = ["ulysses", "ring", "cp", "outer"];

/// The mesh axis of tensor parallelism.
pub const TENSOR_AXIS: &str = "tp";
/// The axis along which ranks that split weights split caches by their tokens.
pub const CONTEXT_AXIS: &str = "dcp";

/// The mesh axis of expert parallelism.
pub const EXPERT_AXIS: &str = "ep";

/// The strategy that splits experts over a part of the data-parallel ranks.
pub const EXPERT_COPIES: &str = "data-parallel-ep";

/// The mesh axis of stages of a pipeline.
pub const STAGE_AXIS: &str = "pp";

/// The mesh axis of data parallelism.
pub const DATA_AXIS: &str = "dp";

/// The most ranks that a mesh may have.
pub const MAX_RANKS: u64 = 1 << 20;
