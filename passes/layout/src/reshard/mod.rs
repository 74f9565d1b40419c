//! `lower-reshards`: each change of layout becomes the cheapest sequence of collectives.
//!
//! ```text
//! %1 = reshard %0 : bf16[b s h@u d]         // from bf16[b s@u h d]
//! ```
//! becomes
//! ```text
//! %1 = all_to_all %0 {axis=u, split=h, concat=s} : bf16[b s h@u d]
//! ```

mod search;

pub use search::{Step, convert};
use search::{read, write};

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use ithaca_ir::entity::Entity;
use ithaca_ir::layout::Layout;
use ithaca_ir::module::{Level, Module, Node, ValueId};
use ithaca_ir::ops::OpError;
use ithaca_ir::text::show;
use ithaca_ir::verify::Verified;
use ithaca_ir::{DType, Diagnostic, Diagnostics, DimId, Op, Space, TensorType};
use ithaca_pass::choices::{Choice, Topic, impossible};
use ithaca_pass::rebuild::rebuild;
use ithaca_pass::{Context, Pass};

/// The pass.
#[derive(Clone, Copy, Debug, Default)]
pub struct LowerReshards;

/// Conversions so far, by element type, dimensions and both layouts.
type Found = BTreeMap<(DType, Vec<DimId>, Layout, Layout), Vec<Step>>;

impl Pass for LowerReshards {
    fn name(&self) -> &'static str {
        "lower-reshards"
    }

    fn run(&self, module: Verified<'_>, cx: &mut Context<'_>) -> Result<Module, Diagnostics> {
        let module = module.module();
        if module.level == Level::Program {
            let message =
                "`lower-reshards` needs a sharded program, and this one is not laid out over a mesh";
            return Err(vec![Diagnostic::new("P03", message).help("run `shard` first")]);
        }
        let mut found = Found::new();
        let mut level = Level::PerRank;
        let passed = passed_on(module);
        let mut skipped = passed.iter();
        let lowered = rebuild(module, |b, function, node, operands| {
            if node.op != Op::Reshard {
                return Ok(None);
            }
            let is_passed_on = skipped.next().copied().unwrap_or(false);
            if !cx.rewrite() {
                level = Level::Sharded;
                return Ok(None);
            }
            if is_passed_on {
                return Ok(Some(vec![operands[0]]));
            }
            let (from, to) = (&b.ty(operands[0]).clone(), function.ty(node.result()));
            // The stages of a pipeline convert alike.
            let at = from.layout.at.filter(|_| from.layout.at == to.layout.at);
            let (from, to) = match at {
                None => (from.clone(), to.clone()),
                Some(_) => (from.located(None), to.located(None)),
            };
            let key = (from.dtype, from.dims.to_vec(), from.layout.clone(), to.layout.clone());
            let steps = match found.entry(key) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => new.insert(choose(b.space(), &from, &to, cx)?),
            };
            let mut value = operands[0];
            for step in steps.iter() {
                let ty = if at.is_some() { step.to.located(at) } else { step.to.clone() };
                value = b.push_as(step.op.clone(), &[value], ty)?;
            }
            Ok(Some(vec![value]))
        })?;
        Ok(Module { level, ..lowered })
    }
}

/// For each reshard in order, whether only another reshard reads its result: the two are one conversion.
fn passed_on(module: &Module) -> Vec<bool> {
    let mut passed = Vec::new();
    for function in module.functions.values() {
        let mut readers: Vec<Vec<&Op>> = vec![Vec::new(); function.values.len()];
        for node in &function.nodes {
            node.operands.iter().for_each(|v| readers[v.index()].push(&node.op));
        }
        let returned = |v: ValueId| function.outputs.iter().any(|output| output.value == v);
        let reshards = function.nodes.iter().filter(|node| node.op == Op::Reshard).map(Node::result);
        passed.extend(reshards.map(|v| readers[v.index()] == [&Op::Reshard] && !returned(v)));
    }
    passed
}

/// The conversion, by prices or as it was recorded.
fn choose(
    space: &Space,
    from: &TensorType,
    to: &TensorType,
    cx: &mut Context<'_>,
) -> Result<Vec<Step>, OpError> {
    let key = format!("{} -> {}", show(space, from), show(space, to));
    match cx.choose(Topic::Reshards, key.as_str())? {
        Choice::ByPrice(prices) => {
            let steps = convert(space, from, to, prices);
            cx.record(write(space, &steps));
            Ok(steps)
        }
        Choice::Recorded(text) => read(space, from, to, text)
            .ok_or_else(|| impossible(Topic::Reshards, &key, text, "it does not lead there")),
    }
}
