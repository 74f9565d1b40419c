//! The plan: the contents of `plan.json`, and how they are read, checked and written.
//!
//! A plan is self-contained: the model's configuration, the whole cluster profile and the request are in it, so that running,
//! verifying, emitting and planning again need no other file, and it is byte-identical from run to run and from every path of
//! the model. Its schema is published as
//! `docs/book/src/plan.schema.json`. Times are rounded to six significant digits, so that they print the same everywhere.

mod assumptions;
mod diff;
mod digest;
mod figures;
mod flops;
mod layout;
mod rates;
mod reason;
mod review;
mod stated;
mod step;
mod workload;

use std::collections::BTreeMap;

use ithaca_differentiate as differentiate;
use ithaca_import as import;
use ithaca_ir::{AxisId, Diagnostic, Diagnostics};
use ithaca_layout::compile::{self, Compiled};
use ithaca_layout::registry::Registry;
use ithaca_layout::shard::{self, ShardOptions, strategy};
use ithaca_pass::choices::Choices;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::cluster::Cluster;
use crate::memory::Memory;

pub use assumptions::model_assumptions;
pub use diff::{Change, diff};
pub use digest::digest;
pub use figures::{
    AttentionPlan, Collective, Communication, Dimension, Time, attention, collectives, dimensions, rounded,
};
pub use flops::model_flops;
use layout::read_options;
pub use layout::{
    Choice, Effort, MeshAxis, Narrowing, Search, layout_options, layout_text, mesh_axes, mesh_text,
};
pub use rates::Rates;
pub(crate) use reason::row;
pub use reason::why_chosen;
pub use review::{Review, ReviewOptions, Section, review};
pub use step::Step;
pub use workload::{Training, Workload};

/// The version of the document that this program reads and writes.
pub const VERSION: u32 = 6;

/// A parallel plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// The version of the document.
    pub version: u32,
    /// The model.
    pub model: Model,
    /// The cluster that times and memory were computed for.
    pub cluster: Cluster,
    /// What the model is asked to do.
    pub workload: Workload,
    /// Number of GPUs.
    pub gpus: u64,
    /// Which layouts the planner searched.
    pub search: Search,
    /// The strategy, or product of strategies, for example `ulysses+megatron-tp`.
    pub strategy: String,
    /// The mesh, major to minor.
    pub mesh: Vec<MeshAxis>,
    /// Options of the layout that are not as by default: those of `shard` in a pipeline beside strategy and mesh, and
    /// `fuse`.
    pub options: BTreeMap<String, String>,
    /// The dimensions of the per-rank program.
    pub dimensions: Vec<Dimension>,
    /// How the attention of each function is distributed.
    pub attention: Vec<AttentionPlan>,
    /// The passes that make the per-rank program, in text form.
    pub pipeline: String,
    /// What the passes chose by prices and bytes. Every use of the plan replays it.
    pub choices: Choices,
    /// What each rank sends in one step.
    pub collectives: Vec<Collective>,
    /// Memory of the busiest rank.
    pub memory: Memory,
    /// Time of a step.
    pub time: Time,
    /// FLOPs that the model needs for a step, whatever the layout: recomputation and padding do not count.
    pub model_flops: f64,
    /// What was tried, best first.
    pub alternatives: Vec<Alternative>,
    /// The number of legal layouts that were not compiled.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub n_passed_over: usize,
    /// What the user should know: copied heads, padding, dimensions that stay whole.
    pub notes: Vec<String>,
}

/// The note that so many candidates were not compiled.
pub fn passed_over(n: usize) -> Option<String> {
    (n > 0).then(|| {
        format!(
            "{n} layouts that cannot fit, or join strategies far from the best, were not compiled (`--effort high`)"
        )
    })
}

/// The note that pipelines of many stages were not tried in a search with so many micro-batches.
pub fn stages_left_out(search: &Search, micro_batches: u64, gpus: u64) -> Option<String> {
    let most = differentiate::MAX_CALLS / micro_batches.max(1);
    let is_tried = search.strategy.is_none()
        && search.mesh.is_none()
        && search.open.contains(&Choice::Pipeline)
        && !search.open.contains(&Choice::MicroBatches)
        && search.narrowing.allows("pipeline");
    (is_tried && most < gpus).then(|| {
        format!(
            "pipelines of more than {most} stages were not tried: {micro_batches} micro-batches through each are more than {} passes; \
             fewer and larger micro-batches allow more stages",
            differentiate::MAX_CALLS
        )
    })
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_zero(n: &usize) -> bool {
    *n == 0
}

/// The model of a plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// Its name.
    pub name: String,
    /// SHA-256 of the description, keys sorted and without spaces, in hexadecimal.
    pub digest: String,
    /// The whole description.
    pub config: serde_json::Value,
}

impl Model {
    /// The model that `config` describes; the digest is computed.
    pub fn new(name: impl Into<String>, config: serde_json::Value) -> Self {
        Self { name: name.into(), digest: digest(&config), config }
    }
}

/// A strategy on a mesh that was tried, and what came of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Alternative {
    /// The strategy.
    pub strategy: String,
    /// The mesh, major to minor.
    pub mesh: Vec<MeshAxis>,
    /// What the search chose of the training step beside the layout, as flags of the command line.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub flags: String,
    /// The layout in the names of the framework that the plan is for.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub settings: String,
    /// Other strategies and meshes with the same program, up to the order of the axes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub also: Vec<String>,
    /// What came of it.
    pub outcome: Outcome,
}

/// What came of an alternative.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "is", rename_all = "snake_case", deny_unknown_fields)]
pub enum Outcome {
    /// It is the plan.
    Chosen {
        /// Time of a step, seconds.
        step_seconds: f64,
        /// Communication that no kernel hides, seconds.
        exposed_seconds: f64,
        /// Memory of the busiest rank, bytes.
        memory_bytes: u64,
        /// Why it won.
        reason: String,
    },
    /// It runs, but takes longer; or as long, with more memory or a later name.
    Slower {
        /// Time of a step, seconds.
        step_seconds: f64,
        /// Communication that no kernel hides, seconds.
        exposed_seconds: f64,
        /// Memory of the busiest rank, bytes.
        memory_bytes: u64,
        /// Seconds more than the plan.
        slower_by_seconds: f64,
        /// What takes the time.
        reason: String,
    },
    /// It does not fit.
    OutOfMemory {
        /// Time of a step if it did fit, seconds.
        step_seconds: f64,
        /// Communication that no kernel hides, seconds.
        exposed_seconds: f64,
        /// Memory of the busiest rank, bytes.
        memory_bytes: u64,
        /// Bytes that a device lacks.
        over_bytes: u64,
        /// The largest part of the memory, in words.
        part: String,
        /// Its bytes.
        part_bytes: u64,
    },
    /// It is not legal.
    Refused {
        /// The rule.
        code: String,
        /// What does not divide.
        message: String,
        /// What to do.
        helps: Vec<String>,
        /// Options, each of which makes this alternative legal; checked.
        repairs: Vec<String>,
    },
}

impl Plan {
    /// The document, with a final newline.
    pub fn to_json(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("a plan has string keys and finite numbers");
        text.push('\n');
        text
    }

    /// Reads a document, with the strategies and movements of `registry`; `name` is shown in diagnostics.
    ///
    /// # Errors
    /// `M30` when it is not JSON or ends early, `M31` when a field is missing, unknown or of the wrong kind, `M32` for
    /// another version, `M33` when the digest is not that of the configuration, the mesh is not of as many ranks as
    /// there are GPUs, the pipeline is another layout's or the cluster is impossible; `P10`, `P11` for a strategy or mesh
    /// that does not exist; and whatever the model or the layout is refused for.
    pub fn from_json(registry: &Registry, name: &str, text: &str) -> Result<Plan, Diagnostic> {
        let value: serde_json::Value = serde_json::from_str(text).map_err(|e| {
            Diagnostic::new("M30", format!("`{name}` is not a plan: {e}"))
                .help("make it anew with `ithaca plan … -o plan.json`")
        })?;
        match value.get("version").map(serde_json::Value::as_u64) {
            Some(Some(v)) if v == u64::from(VERSION) => {}
            Some(Some(version)) => {
                let message = format!("`{name}` has `version` {version}, but this program reads {VERSION}");
                let help = if version < u64::from(VERSION) {
                    "make the plan anew with `ithaca plan … -o plan.json`"
                } else {
                    "read it with the version of Ithaca that wrote it, or make the plan anew with `ithaca plan … -o plan.json`"
                };
                return Err(Diagnostic::new("M32", message).help(help));
            }
            Some(None) => {
                return Err(Diagnostic::new("M32", format!("`version` of `{name}` is not a whole number")));
            }
            None => {
                let message = format!("`{name}` has no field `version`, which a plan has");
                return Err(
                    Diagnostic::new("M31", message).help("make it anew with `ithaca plan … -o plan.json`")
                );
            }
        }
        let plan: Plan = serde_path_to_error::deserialize(&value).map_err(|e| {
            let place = match e.path().to_string().as_str() {
                "." => String::new(),
                path => format!(", field `{path}`"),
            };
            Diagnostic::new("M31", format!("`{name}`{place}: {}", e.inner()))
        })?;
        plan.check(registry, name)?;
        Ok(plan)
    }

    fn check(&self, registry: &Registry, name: &str) -> Result<(), Diagnostic> {
        let refuse = |what: String| Err(Diagnostic::new("M33", format!("`{name}`: {what}")));
        let found = digest(&self.model.config);
        if found != self.model.digest {
            return refuse(format!("`model.digest` is not that of `model.config`, {found}"));
        }
        for (i, axis) in self.mesh.iter().enumerate() {
            if axis.size == 0 || self.mesh[..i].iter().any(|a| a.axis == axis.axis) {
                return refuse(format!("`mesh[{i}]` is empty or named twice"));
            }
        }
        let ranks = self.mesh.iter().try_fold(1u64, |n, a| n.checked_mul(a.size));
        if ranks != Some(self.gpus) {
            return refuse(format!("`mesh` does not multiply to `gpus`, {}", self.gpus));
        }
        let devices = self.cluster.devices();
        if self.gpus > devices {
            return refuse(format!("`gpus` is {}, but `cluster` has {devices} devices", self.gpus));
        }
        self.search.layout()?;
        let options = self.shard_options()?;
        let strategies = registry.product(&self.strategy)?;
        let own = options.attention.sequences.iter().flat_map(|(_, axes)| axes);
        let own: Vec<AxisId> = own.filter_map(|axis| options.mesh.axis(axis)).collect();
        strategy::placement(&strategies, &options.mesh, &own)?;
        let workload = self.workload_in_stages()?;
        // A step has passes before those of the layout, and a program in text form may.
        let module =
            import::program(&self.model.config, &self.model.name, &workload).map_err(ithaca_pass::first)?;
        let mut expected = module.pipeline.clone();
        expected.push(ithaca_pass::print(&compile::passes(registry, &options)));
        let expected = expected.join(",");
        if self.pipeline != expected {
            return refuse(format!("`pipeline` is not that of strategy, mesh and options, `{expected}`"));
        }
        self.cluster.check()?;
        let forward = import::import(&self.model.config, &self.model.name, &workload)?;
        let flops = rounded(model_flops(&forward, workload.mode));
        if flops != self.model_flops {
            return refuse(format!("`model_flops` is {}, but {flops} is computed", self.model_flops));
        }
        shard::check(registry, &module, &options).map(|_| ())
    }

    /// The per-rank program and the schedule of this plan, both checked and equal to its stated figures.
    ///
    /// # Errors
    /// As [`compile::replay`]; `M33` for a stated figure that differs from the computed one.
    pub fn compile(&self, registry: &Registry) -> Result<Compiled, Diagnostics> {
        let workload = self.workload_in_stages().map_err(|d| vec![d])?;
        let compiled = self.compiled(registry, &workload)?;
        self.checked(registry, compiled)
    }

    /// What this plan makes of a workload.
    fn compiled(&self, registry: &Registry, workload: &import::Workload) -> Result<Compiled, Diagnostics> {
        let options = self.shard_options().map_err(|d| vec![d])?;
        let module = import::program(&self.model.config, &self.model.name, workload)?;
        compile::replay(registry, &module, &options, &self.choices)
    }

    /// The workload of this plan's program, which has the stages of the mesh.
    ///
    /// # Errors
    /// As [`Workload::to_import`].
    pub fn workload_in_stages(&self) -> Result<import::Workload, Diagnostic> {
        let mut workload = self.workload.to_import()?;
        if let Some(axis) = self.mesh.iter().find(|axis| axis.axis == strategy::STAGE_AXIS) {
            workload.training.stages = axis.size;
        }
        Ok(workload)
    }

    /// The options with which the passes make this plan's program.
    ///
    /// # Errors
    /// `P02` for an option that is unknown or has a value that it does not take, `P12` for a malformed mesh.
    pub fn shard_options(&self) -> Result<ShardOptions, Diagnostic> {
        read_options(&self.strategy, &self.mesh, &self.options)
    }
}

/// The JSON schema of the document, as `docs/book/src/plan.schema.json` holds it.
pub fn schema() -> String {
    let schema = schemars::schema_for!(Plan);
    let mut text = serde_json::to_string_pretty(&schema).expect("a schema is JSON");
    text.push('\n');
    text
}
