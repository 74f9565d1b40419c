//! `two-level`: an axis that spans nodes becomes two axes, one across nodes and one inside, so each collective along it
//! becomes one collective per level.
//!
//! ```text
//! mesh u=16
//! %1 = reshard %0 : bf16[b s h@u d]                            // from bf16[b s@u h d]
//! ```
//! becomes, with eight consecutive ranks in a node,
//! ```text
//! mesh u_across=2,u_inside=8
//! %1 = reshard %0 : bf16[b s h@u_across@u_inside d]            // from bf16[b s@u_inside@u_across h d]
//! ```
//! `lower-reshards` turns this into an all-to-all across nodes and one inside. Only layouts change: ranks keep their
//! numbers, and the order of the two axes decides which part of a tensor a rank holds.
//!
//! The order of the two axes makes two-level collectives possible. A collective takes axes from the end of one
//! dimension's list and appends them to another's, so dimensions that exchange parts have opposite orders. A dimension
//! that is gathered, or over which sums are scattered, ends in the axis across nodes: parts are smallest when they
//! cross nodes, and the network carries as much as for one collective of all ranks.
//!
//! An axis stays one if parts move along it step by step, tokens are fetched along it, or it has pipeline stages.

mod order;
mod split;

use ithaca_ir::module::Level;
use ithaca_ir::ops::OpError;
use ithaca_ir::verify::{Verified, verify};
use ithaca_ir::{AxisId, Diagnostic, Diagnostics, Module};
use ithaca_pass::choices::{Choice, Topic, impossible};
use ithaca_pass::{Context, Pass, Prices, options};
use serde::{Deserialize, Serialize};

use super::saturate::PriceList;
use crate::strategy::MAX_RANKS;

/// The axes to split.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Choose {
    /// All axes that span nodes.
    #[default]
    Always,
    /// The axes whose collectives cost less when split, by the cluster's prices.
    Cheaper,
}

/// The pass.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TwoLevel {
    /// The axes to split.
    pub choose: Choose,
    /// The only axis to consider, by name; all axes if `None`.
    pub axis: Option<String>,
    /// The ranks of an axis that share a node; the cluster's value if `None`.
    #[serde(deserialize_with = "options::optional_whole::<_, 2, MAX_RANKS>")]
    pub inside: Option<u64>,
}

/// Options, as `list passes` shows them.
pub const OPTIONS: &str = "choose=always|cheaper, axis=NAME, inside=N";

/// The recorded choice of collectives in two levels.
const TWO: &str = "two";

/// The recorded choice of whole collectives.
const ONE: &str = "whole";

/// The recorded number of devices where no cluster states it.
const UNKNOWN: &str = "unknown";

impl TwoLevel {
    /// The number of ranks of an axis that share a node, if it is more than one, fewer than all and equal in all nodes;
    /// otherwise the reason why the axis stays one.
    fn inside(&self, module: &Module, axis: AxisId, node_devices: Option<u64>) -> Result<u64, String> {
        let (size, stride) = (module.space.mesh.size(axis), module.space.mesh.stride(axis));
        let name = &module.space.mesh.axes[axis].name;
        let inside = match (self.inside, node_devices) {
            (Some(inside), _) => inside,
            (None, Some(devices)) if devices.is_multiple_of(stride) => devices / stride,
            (None, Some(devices)) => {
                return Err(format!(
                    "neighbours along `{name}` are {stride} ranks apart, and a node has {devices}"
                ));
            }
            (None, None) => return Err("no cluster says how many ranks share a node".to_owned()),
        };
        match () {
            () if inside <= 1 => Err(format!("no two of the {size} ranks along `{name}` share a node")),
            () if inside >= size => Err(format!("all {size} ranks along `{name}` share a node")),
            () if !size.is_multiple_of(inside) => {
                Err(format!("{size} ranks along `{name}` do not divide into nodes of {inside}"))
            }
            () => Ok(inside),
        }
    }

    /// The module with the axis in two levels, or the reason why it stays one.
    ///
    /// # Errors
    /// `P05` for a choice that the record does not have.
    fn in_levels(
        &self,
        module: &Module,
        axis: AxisId,
        inside: u64,
        cx: &mut Context<'_>,
    ) -> Result<Result<Module, String>, OpError> {
        if let Some(why) = split::obstacle(module, axis) {
            return Ok(Err(why.to_owned()));
        }
        let two = split::split(module, axis, inside, &order::last_axes(module, axis));
        if let Err(found) = verify(&two) {
            return Ok(Err(format!("in two levels {}", found.first().map_or("", |d| d.message.as_str()))));
        }
        let is_chosen = match self.choose {
            Choose::Always => true,
            Choose::Cheaper => {
                let name = &module.space.mesh.axes[axis].name;
                match cx.choose(Topic::Levels, name.as_str())? {
                    Choice::ByPrice(prices) => {
                        let is_cheaper = seconds(&two, prices) < seconds(module, prices) * (1.0 - 1e-9);
                        cx.record(if is_cheaper { TWO } else { ONE });
                        is_cheaper
                    }
                    Choice::Recorded(TWO) => true,
                    Choice::Recorded(ONE) => false,
                    Choice::Recorded(other) => {
                        let why = "collectives are `whole` or in `two` levels";
                        return Err(impossible(Topic::Levels, name, other, why));
                    }
                }
            }
        };
        Ok(if is_chosen { Ok(two) } else { Err("in two levels they would cost as much or more".to_owned()) })
    }
}

impl Pass for TwoLevel {
    fn name(&self) -> &'static str {
        "two-level"
    }

    fn options(&self) -> Vec<(String, String)> {
        options::write(self)
    }

    fn run(&self, module: Verified<'_>, cx: &mut Context<'_>) -> Result<Module, Diagnostics> {
        let module = module.module();
        if module.level != Level::Sharded {
            let message = "`two-level` needs a sharded program with reshards, but this one is per-rank";
            return Err(vec![Diagnostic::new("P03", message).help("run it before `lower-reshards`")]);
        }
        let mut module = module.clone();
        let node_devices = node_devices(cx)?;
        let all = || module.space.mesh.axes.values().map(|axis| axis.name.clone()).collect();
        let names: Vec<String> = self.axis.clone().map_or_else(all, |only| vec![only]);
        let (mut skipped, mut is_noted) = (Vec::new(), false);
        for name in &names {
            let axis = module.space.mesh.axis(name).ok_or_else(|| format!("the mesh has no axis `{name}`"));
            let spans = axis.and_then(|axis| Ok((axis, self.inside(&module, axis, node_devices)?)));
            let (axis, inside) = match spans {
                Ok(spans) => spans,
                Err(why) => {
                    skipped.push(why);
                    continue;
                }
            };
            is_noted = true;
            match self.in_levels(&module, axis, inside, cx)? {
                Err(why) => cx.note(format!("collectives along `{name}` stay whole: {why}")),
                Ok(two) if cx.rewrite() => {
                    let nodes = module.space.mesh.size(axis) / inside;
                    cx.note(format!("`{name}` in two levels: {nodes} nodes, {inside} ranks in each"));
                    module = two;
                }
                Ok(_) => {}
            }
        }
        if !is_noted {
            let why = if skipped.is_empty() { "the mesh has no axes".to_owned() } else { skipped.join("; ") };
            cx.note(format!("`two-level` has no effect: {why}"));
        }
        Ok(module)
    }
}

/// Devices of a node: a fact of the cluster, recorded with the choices.
fn node_devices(cx: &mut Context<'_>) -> Result<Option<u64>, OpError> {
    const KEY: &str = "devices of a node";
    match cx.choose(Topic::Levels, KEY)? {
        Choice::ByPrice(prices) => {
            let devices = prices.node_devices();
            cx.record(devices.map_or_else(|| UNKNOWN.to_owned(), |devices| devices.to_string()));
            Ok(devices)
        }
        Choice::Recorded(UNKNOWN) => Ok(None),
        Choice::Recorded(text) => match text.parse() {
            Ok(devices) => Ok(Some(devices)),
            Err(_) => Err(impossible(Topic::Levels, KEY, text, "it is not a whole number")),
        },
    }
}

/// The cost of all reshards of a step.
fn seconds(module: &Module, prices: &dyn Prices) -> f64 {
    let mut list = PriceList::new(&module.space, prices);
    let counts = module.run_counts();
    let functions = module.functions.values().zip(&counts);
    functions.map(|(function, &runs)| runs as f64 * list.of_layouts(function)).sum()
}
