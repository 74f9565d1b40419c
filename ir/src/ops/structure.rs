//! Functions and reshards.

use smallvec::smallvec;

use crate::module::{FuncId, Layers};
use crate::ops::{Context, OpError, Types, source};
use crate::space::Space;
use crate::types::TensorType;

/// The most layers that one call may run over.
pub const MAX_LAYERS: u64 = 65_536;

pub(super) fn infer_call(
    cx: Context<'_>,
    callee: FuncId,
    layers: &Layers,
    operands: &[&TensorType],
) -> Result<Types, OpError> {
    let Some(function) = cx.functions.get(callee) else {
        return Err(OpError::new("V15", "a function may call only functions that stand before it"));
    };
    let name = &function.name;
    if layers.start >= layers.end || layers.end > MAX_LAYERS {
        return Err(OpError::new(
            "V18",
            format!("a call runs over layers {}..{}; it needs 1 to {MAX_LAYERS}", layers.start, layers.end),
        ));
    }
    if operands.len() != function.params.len() {
        return Err(OpError::new(
            "V14",
            format!("`@{name}` takes {} arguments, not {}", function.params.len(), operands.len()),
        ));
    }
    for (i, (&param, &operand)) in function.params.iter().zip(operands).enumerate() {
        if function.ty(param) != operand {
            return Err(OpError::new(
                "V14",
                format!("argument {i} of `@{name}` has another type than its parameter"),
            ));
        }
    }
    let results: Types = function.outputs.iter().map(|o| function.ty(o.value).clone()).collect();
    if layers.end - layers.start > 1 {
        let carried = results.iter().enumerate().find(|&(i, ty)| operands.get(i) != Some(&ty));
        if let Some((i, _)) = carried {
            return Err(OpError::new(
                "V14",
                format!(
                    "result {i} of `@{name}` must have the type of argument {i} to run over several layers"
                ),
            ));
        }
    }
    Ok(results)
}

pub(super) fn infer_reshard(
    space: &Space,
    x: &TensorType,
    declared: &[TensorType],
) -> Result<Types, OpError> {
    let ty = source::only("reshard", declared)?;
    if ty.dims != x.dims || ty.dtype != x.dtype {
        return Err(OpError::new("V03", "`reshard` changes the layout only"));
    }
    if let Some(&axis) = ty.layout.partial.iter().find(|a| !x.layout.partial.contains(a)) {
        let name = &space.mesh.axes[axis].name;
        return Err(OpError::new(
            "V16",
            format!("`reshard` cannot leave a sum over `{name}` that x has not pending"),
        ));
    }
    Ok(smallvec![ty.clone()])
}
