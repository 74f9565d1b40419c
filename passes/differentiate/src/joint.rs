//! The joint function of a function and its gradient: the forward nodes, then the nodes that compute gradients of
//! arguments and weights from gradients of results.
//!
//! `split` then decides on this function which forward values are saved and which are recomputed.

use ithaca_ir::module::{FuncId, Function};
use ithaca_ir::ops::OpError;
use ithaca_ir::{Arena, FunctionBuilder, Space};
use ithaca_pass::rebuild::ValueMap;

use super::split::Joint;
use super::step::{Cx, Run};
use super::tape::store_gradients;

/// The joint function of the `main` of `cx`.
///
/// # Errors
/// An operation without an adjoint.
pub(super) fn joint(
    cx: &Cx<'_>,
    space: &Space,
    functions: &Arena<FuncId, Function>,
) -> Result<Joint, OpError> {
    let source = cx.function();
    let mut b = FunctionBuilder::like(source, space, functions);
    let known = ValueMap::with_params(&mut b, source);
    let mut seeds = Vec::new();
    for (i, output) in source.outputs.iter().enumerate() {
        if cx.activity.is_active(cx.main, output.value) {
            let name = source.values[output.value].name.as_deref().map(|name| format!("d_{name}"));
            seeds.push((i, b.param(source.ty(output.value).clone(), name.as_deref())));
        }
    }
    let mut run = Run::new(cx, known);
    for i in 0..source.nodes.len() {
        cx.forward(&mut b, &mut run, i, None)?;
    }
    let n_forward = b.function().nodes.len();
    for &(i, seed) in &seeds {
        run.tape.add(&mut b, source.outputs[i].value, seed)?;
    }
    for i in (0..source.nodes.len()).rev() {
        cx.backward(&mut b, &mut run, i, None)?;
    }
    let Run { map, tape, weights, deferred, .. } = run;
    Cx::store_deferred(&mut b, deferred)?;
    store_gradients(&mut b, weights, (cx.gradients, |binding| (cx.accumulation)(cx.main, binding)))?;
    let gradients = source.params.iter().map(|&p| tape.of(p)).collect();
    Ok(Joint { function: b.finish([]), outputs: map.outputs(), n_forward, seeds, gradients })
}
