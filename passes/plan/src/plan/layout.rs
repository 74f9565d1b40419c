//! A layout and a search of layouts as a plan writes them: strategy, mesh and options in the words of the command line.

use std::collections::BTreeMap;

use ithaca_frameworks::Framework;
use ithaca_ir::{Diagnostic, Mesh};
use ithaca_layout::fuse::Fusion;
use ithaca_layout::movement::Partials;
use ithaca_layout::shard::ShardOptions;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// An axis of the mesh.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MeshAxis {
    /// The name.
    pub axis: String,
    /// Ranks along it.
    pub size: u64,
}

/// What the planner searched: the layouts that the options of the command line left open.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Search {
    /// The only strategy or product; all were tried when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strategy: Option<String>,
    /// The only mesh, major to minor; all of as many ranks as GPUs were tried when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mesh: Option<Vec<MeshAxis>>,
    /// What was left out of all layouts.
    #[serde(default, skip_serializing_if = "is_default")]
    pub narrowing: Narrowing,
    /// Options of every layout that are not as by default, as in `options` of the plan.
    pub options: BTreeMap<String, String>,
    /// Whether chunks of collectives and two-level collectives were chosen by price.
    pub chooses_fusion: bool,
    /// What was chosen of a training step beside its layout.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub open: Vec<Choice>,
}

fn is_default(narrowing: &Narrowing) -> bool {
    *narrowing == Narrowing::default()
}

/// An option of a training step that a search may choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Choice {
    /// The ZeRO stage.
    Zero,
    /// The weights that stay whole at ZeRO 3, where several micro-batches need them.
    Persistent,
    /// The activations that are computed again.
    Recompute,
    /// The number of micro-batches.
    MicroBatches,
    /// The order of a pipeline, with its chunks of layers.
    Pipeline,
    /// The parts of the loss.
    LossChunks,
}

/// What a search of all layouts leaves out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Narrowing {
    /// The strategies that are tried, alone and joined; every one if empty.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub only: Vec<String>,
    /// Strategies that are not tried.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub without: Vec<String>,
    /// The most ranks of tensor parallelism.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tp: Option<u64>,
    /// The framework that must be able to run a layout.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub framework: Option<Framework>,
    /// How many of the layouts that are not far from the best are compiled.
    #[serde(skip_serializing_if = "Effort::is_normal")]
    pub effort: Effort,
}

/// How long a search of many layouts may take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Effort {
    /// Fewer layouts are compiled.
    Low,
    /// Those that are near the best, or that come from such.
    #[default]
    Normal,
    /// Every product of strategies, and four times as many training steps.
    High,
}

impl Effort {
    /// Every effort, with its name.
    pub const ALL: [(&str, Effort); 3] =
        [("low", Effort::Low), ("normal", Effort::Normal), ("high", Effort::High)];

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
    fn is_normal(&self) -> bool {
        *self == Self::Normal
    }

    /// A limit of a search, `n` at normal effort.
    pub fn of(self, n: usize) -> usize {
        match self {
            Effort::Low => n.div_ceil(4),
            Effort::Normal => n,
            Effort::High => 4 * n,
        }
    }
}

impl Narrowing {
    /// Whether no strategy is left out.
    pub fn is_none(&self) -> bool {
        *self == Self { effort: self.effort, ..Self::default() }
    }

    /// Whether a strategy may be tried.
    pub fn allows(&self, strategy: &str) -> bool {
        let names = |list: &[String]| list.iter().any(|name| name == strategy);
        (self.only.is_empty() || names(&self.only)) && !names(&self.without)
    }
}

impl Search {
    /// The mesh, if there is only one.
    pub fn mesh(&self) -> Option<Mesh> {
        let axes = self.mesh.as_ref()?;
        Some(Mesh::new(axes.iter().map(|a| (a.axis.clone(), a.size))))
    }

    /// The options of every layout.
    ///
    /// # Errors
    /// `P02` for an option that is unknown or has a value that it does not take.
    pub fn layout(&self) -> Result<ShardOptions, Diagnostic> {
        // Options are read together with a strategy; a search has none of its own.
        let read = read_options("single", &[], &self.options)?;
        let ShardOptions { strategy, mesh, .. } = ShardOptions::default();
        Ok(ShardOptions { strategy, mesh, ..read })
    }
}

/// The layout of a strategy on a mesh with options as [`layout_options`] writes them.
pub(super) fn read_options(
    strategy: &str,
    mesh: &[MeshAxis],
    options: &BTreeMap<String, String>,
) -> Result<ShardOptions, Diagnostic> {
    let strategy = ("strategy".to_owned(), strategy.to_owned());
    let axes = mesh.iter().map(|a| (a.axis.clone(), a.size.to_string()));
    let others = options.iter().filter(|(key, _)| ![FUSE, PARTIALS].contains(&key.as_str()));
    let others = others.map(|(key, value)| (key.clone(), value.clone()));
    let pairs: Vec<(String, String)> = std::iter::once(strategy).chain(axes).chain(others).collect();
    let fusion = options.get(FUSE).map_or(Ok(Fusion::NONE), |text| Fusion::parse(text))?;
    let partials = options.get(PARTIALS).map_or(Ok(Partials::default()), |text| Partials::parse(text))?;
    Ok(ShardOptions { fusion, partials, ..ShardOptions::from_pipeline(&pairs)? })
}

/// The option for the passes after `shard`.
const FUSE: &str = "fuse";

/// The option of `lower-movements`.
const PARTIALS: &str = "partials";

/// The options of a layout that are not as by default, as a plan writes them.
pub fn layout_options(options: &ShardOptions) -> BTreeMap<String, String> {
    let fusion = (options.fusion != Fusion::NONE).then(|| (FUSE.to_owned(), options.fusion.to_string()));
    let partials = options.partials;
    let partials =
        (partials != Partials::default()).then(|| (PARTIALS.to_owned(), partials.name().to_owned()));
    options.departures().into_iter().chain(fusion).chain(partials).collect()
}

/// The axes of a mesh, as a plan writes them.
pub fn mesh_axes(mesh: &Mesh) -> Vec<MeshAxis> {
    mesh.axes.values().map(|a| MeshAxis { axis: a.name.clone(), size: a.size }).collect()
}

/// A strategy and its mesh as the command line spells them: `usp ring=2,ulysses=4`.
pub fn layout_text(strategy: &str, mesh: &[MeshAxis]) -> String {
    if mesh.is_empty() { strategy.to_owned() } else { format!("{strategy} {}", mesh_text(mesh)) }
}

/// A mesh as the command line spells it: `ring=2,tp=4`.
pub fn mesh_text(mesh: &[MeshAxis]) -> String {
    let axes: Vec<String> = mesh.iter().map(|a| format!("{}={}", a.axis, a.size)).collect();
    axes.join(",")
}
