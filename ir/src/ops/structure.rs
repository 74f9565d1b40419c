//! Functions, loops over layers, and reshards.

pub use crate::handles::MAX_LAYERS;

use smallvec::smallvec;

use crate::dim::DimId;
use crate::handles::{FuncId, Layers};
use crate::layout::{At, AxisList};
use crate::module::Function;
use crate::ops::check::only;
use crate::ops::context::{Context, Types};
use crate::ops::error::{OpError, bail, ensure};
use crate::ops::table::structure::{Scan, ScanOrder, Stage};
use crate::space::Space;
use crate::types::TensorType;

impl ScanOrder {
    /// The layers, in the order in which they run.
    pub fn layers(self, layers: &Layers) -> impl Iterator<Item = u64> + use<> {
        let Layers { start, end } = *layers;
        (start..end).map(move |layer| match self {
            ScanOrder::Ascending => layer,
            ScanOrder::Descending => end - 1 - (layer - start),
        })
    }
}

/// Whether each layer of a call gets its own slice of argument `index`, of type `argument`.
pub fn is_sliced(scan: Option<&Scan>, index: usize, argument: &TensorType, parameter: &TensorType) -> bool {
    scan.is_some_and(|scan| index >= scan.carried && is_stack(argument, scan.over, parameter))
}

/// Whether a tensor is, on whatever ranks, a stack of `item` along `over`.
fn is_stack(ty: &TensorType, over: DimId, item: &TensorType) -> bool {
    let (of, one) = (&ty.layout, &item.layout);
    ty.dims.split_first() == Some((&over, &item.dims[..]))
        && of.split.split_first().is_some_and(|(first, rest)| first.is_empty() && *rest == one.split[..])
        && (ty.dtype, &of.partial, &of.moved, None) == (item.dtype, &one.partial, &one.moved, one.at)
}

/// The type of `over`-many of `ty`, stacked.
pub fn stacked(ty: &TensorType, over: DimId) -> TensorType {
    let mut ty = ty.clone();
    ty.dims.insert(0, over);
    ty.layout.split.insert(0, AxisList::new());
    ty
}

pub(super) fn infer_call(
    cx: Context<'_>,
    callee: FuncId,
    layers: &Layers,
    (scan, stage): (Option<&Scan>, Option<Stage>),
    operands: &[&TensorType],
) -> Result<Types, OpError> {
    let Some(function) = cx.functions.get(callee) else {
        bail!("V15", "a function may call only functions that stand before it");
    };
    let name = &function.name;
    if layers.start >= layers.end || layers.end > MAX_LAYERS {
        bail!("V18", "a call runs over layers {}..{}; it needs 1 to {MAX_LAYERS}", layers.start, layers.end);
    }
    ensure!(
        operands.len() == function.params.len(),
        "V14",
        "`@{name}` takes {} arguments, not {}",
        function.params.len(),
        operands.len()
    );
    let at = stage.and_then(Stage::at);
    if let Some(At { axis, coordinate }) = at
        && cx.space.mesh.axes.get(axis).is_none_or(|axis| coordinate >= axis.size)
    {
        bail!("V33", "no rank runs stage {coordinate} of `@{name}`");
    }
    if let Some(i) = operands.iter().position(|ty| ty.layout.at.is_some() && ty.layout.at != at) {
        bail!("V33", "argument {i} of `@{name}` is on ranks that do not run the call; a permute is missing");
    }
    for (i, (&param, &operand)) in function.params.iter().zip(operands).enumerate() {
        let wanted = function.ty(param);
        ensure!(
            is_taken(scan, i, operand, wanted),
            "V14",
            "argument {i} of `@{name}` has another type than its parameter"
        );
    }
    let mut results: Types = function.outputs.iter().map(|o| function.ty(o.value).clone()).collect();
    if let Some(scan) = scan {
        let n_layers = layers.end - layers.start;
        if cx.space.size(scan.over) != n_layers || scan.carried > results.len() {
            let message = format!(
                "a call of `@{name}` over {n_layers} layers hands on {} of {} results and stacks the others along `{}` of {}",
                scan.carried,
                results.len(),
                cx.space.dims[scan.over].name,
                cx.space.size(scan.over)
            );
            return Err(OpError::new("V18", message));
        }
        for result in &mut results[scan.carried..] {
            *result = stacked(result, scan.over);
        }
    }
    let n_carried = scan.map_or(results.len(), |scan| scan.carried);
    if layers.end - layers.start > 1 {
        let is_argument = |i: usize, ty: &TensorType| operands.get(i).is_some_and(|of| of.is_anywhere(ty));
        if let Some(i) = (0..n_carried).find(|&i| !is_argument(i, &results[i])) {
            let message = format!(
                "result {i} of `@{name}` must have the type of argument {i} to run over several layers"
            );
            return Err(OpError::new("V14", message));
        }
    }
    results.iter_mut().for_each(|ty| ty.layout.at = at);
    Ok(results)
}

/// Whether a call may pass argument `i` for a parameter.
fn is_taken(scan: Option<&Scan>, i: usize, argument: &TensorType, parameter: &TensorType) -> bool {
    argument.is_anywhere(parameter) || is_sliced(scan, i, argument, parameter)
}

/// Whether `function` takes arguments and gives results of these types, as where a call of it with this `scan` is legal.
pub(crate) fn has_signature<'t>(
    function: &Function,
    scan: Option<&Scan>,
    arguments: impl ExactSizeIterator<Item = &'t TensorType>,
    results: impl ExactSizeIterator<Item = &'t TensorType>,
) -> bool {
    let n_carried = scan.map_or(usize::MAX, |scan| scan.carried);
    let is_result = |i: usize, ty: &TensorType, output: &TensorType| match scan {
        Some(scan) if i >= n_carried => is_stack(ty, scan.over, output),
        _ => ty.is_anywhere(output),
    };
    arguments.len() == function.params.len()
        && results.len() == function.outputs.len()
        && function
            .params
            .iter()
            .zip(arguments)
            .enumerate()
            .all(|(i, (&param, ty))| is_taken(scan, i, ty, function.ty(param)))
        && function
            .outputs
            .iter()
            .zip(results)
            .enumerate()
            .all(|(i, (o, ty))| is_result(i, ty, function.ty(o.value)))
}

pub(super) fn infer_reshard(
    space: &Space,
    x: &TensorType,
    declared: &[TensorType],
) -> Result<Types, OpError> {
    let ty = only("reshard", declared)?;
    if ty.dims != x.dims || ty.dtype != x.dtype {
        bail!("V03", "`reshard` changes the layout only");
    }
    if let Some(&axis) = ty.layout.partial.iter().find(|a| !x.layout.partial.contains(a)) {
        let name = &space.mesh.axes[axis].name;
        bail!("V16", "`reshard` cannot leave a sum over `{name}` that x has not pending");
    }
    Ok(smallvec![ty.clone()])
}
