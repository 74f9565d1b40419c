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
use ithaca_ir::verify::{Verified, verify};
use ithaca_ir::{AxisId, Diagnostic, Diagnostics, Module};
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

impl TwoLevel {
    /// The number of ranks of an axis that share a node, if it is more than one, fewer than all and equal in all nodes;
    /// otherwise the reason why the axis stays one.
    fn inside(&self, module: &Module, axis: AxisId, prices: &dyn Prices) -> Result<u64, String> {
        let (size, stride) = (module.space.mesh.size(axis), module.space.mesh.stride(axis));
        let name = &module.space.mesh.axes[axis].name;
        let inside = match (self.inside, prices.node_devices()) {
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
    fn in_levels(
        &self,
        module: &Module,
        axis: AxisId,
        inside: u64,
        prices: &dyn Prices,
    ) -> Result<Module, String> {
        if let Some(why) = split::obstacle(module, axis) {
            return Err(why.to_owned());
        }
        let two = split::split(module, axis, inside, &order::last_axes(module, axis));
        if let Err(found) = verify(&two) {
            return Err(format!("in two levels {}", found.first().map_or("", |d| d.message.as_str())));
        }
        if self.choose == Choose::Cheaper && seconds(&two, prices) >= seconds(module, prices) * (1.0 - 1e-9) {
            return Err("in two levels they would cost as much or more".to_owned());
        }
        Ok(two)
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
        let all = || module.space.mesh.axes.values().map(|axis| axis.name.clone()).collect();
        let names: Vec<String> = self.axis.clone().map_or_else(all, |only| vec![only]);
        let (mut skipped, mut is_noted) = (Vec::new(), false);
        for name in &names {
            let axis = module.space.mesh.axis(name).ok_or_else(|| format!("the mesh has no axis `{name}`"));
            let spans = axis.and_then(|axis| Ok((axis, self.inside(&module, axis, cx.prices)?)));
            let (axis, inside) = match spans {
                Ok(spans) => spans,
                Err(why) => {
                    skipped.push(why);
                    continue;
                }
            };
            is_noted = true;
            match self.in_levels(&module, axis, inside, cx.prices) {
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

/// The cost of all reshards of a step.
fn seconds(module: &Module, prices: &dyn Prices) -> f64 {
    let mut list = PriceList::new(&module.space, prices);
    let counts = module.run_counts();
    let functions = module.functions.values().zip(&counts);
    functions.map(|(function, &runs)| runs as f64 * list.of_layouts(function)).sum()
}
