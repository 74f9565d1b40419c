//! Cuts a program into the stages of a pipeline: consecutive chunks of layers of nearly equal cost.
//!
//! The cost of a layer is the FLOPs of its function. Other functions, such as the embedding and the head, add their
//! FLOPs to their chunk. Every chunk has at least one layer.

use ithaca_ir::diagnostic::counted;
use ithaca_ir::entity::Entity;
use ithaca_ir::module::{FuncId, Function, Layers};
use ithaca_ir::ops::{OpError, Stage};
use ithaca_ir::{FunctionBuilder, Module, Op};
use ithaca_pass::rebuild::ValueMap;

/// A program whose calls in `main` each belong to one chunk.
pub(super) struct Staged {
    pub(super) module: Module,
    /// For each node of `main` its chunk; `None` if it depends on no call.
    pub(super) chunks: Vec<Option<usize>>,
}

/// One layer of a call.
struct Unit {
    node: usize,
    layer: u64,
    flops: u128,
    is_layer: bool,
}

/// Splits the calls of `main` at the boundaries of `n` chunks.
///
/// # Errors
/// `P53` when there are fewer layers than chunks.
pub(super) fn cut(module: &Module, main: FuncId, n: usize) -> Result<Staged, OpError> {
    let function = &module.functions[main];
    let units = units(module, function);
    let n_layers = units.iter().filter(|u| u.is_layer).count();
    if n_layers < n {
        return Err(OpError::new(
            "P53",
            format!(
                "{n} chunks of a pipeline need a layer each, but the model has {}",
                counted(n_layers as u64, "layer")
            ),
        ));
    }
    let chunk_of = balance(&units, n);

    let mut cut = module.emptied(module.level);
    for (_, other) in module.functions.iter().filter(|&(id, _)| id != main) {
        cut.functions.push(other.clone());
    }
    let mut b = FunctionBuilder::like(function, &cut.space, &cut.functions);
    let mut map = ValueMap::new(function);
    let mut chunks: Vec<Option<usize>> = Vec::new();
    // The chunk that computes each new value.
    let mut computed_in: Vec<Option<usize>> = Vec::new();
    for (i, node) in function.nodes.iter().enumerate() {
        let Op::Call { callee, scan, .. } = &node.op else {
            map.copy(&mut b, node)?;
            let chunk = node.operands.iter().filter_map(|&v| computed_in[map[v].index()]).max();
            chunks.push(chunk);
            computed_in.resize(b.function().values.len(), chunk);
            continue;
        };
        let mut operands = map.operands(node);
        let own: Vec<(u64, usize)> = units
            .iter()
            .zip(&chunk_of)
            .filter(|(unit, _)| unit.node == i)
            .map(|(unit, &chunk)| (unit.layer, chunk))
            .collect();
        let mut results = Vec::new();
        for run in own.chunk_by(|a, b| a.1 == b.1) {
            let (Some(&(first, chunk)), Some(&(last, _))) = (run.first(), run.last()) else { continue };
            let layers: Layers = first..last + 1;
            let op = Op::Call { callee: *callee, layers, stride: 0, scan: *scan, stage: None };
            results = b.node(op, &operands, &[])?.to_vec();
            for (operand, &result) in operands.iter_mut().zip(&results) {
                *operand = result;
            }
            chunks.push(Some(chunk));
            computed_in.resize(b.function().values.len(), Some(chunk));
        }
        map.replace(&mut b, &node.results, &results);
    }
    let function = b.finish(map.outputs());
    cut.functions.push(function);
    Ok(Staged { module: cut, chunks })
}

/// The program with its calls in `n` stages of a pipeline, which run one after another.
///
/// # Errors
/// `P53` when there are fewer layers than stages.
pub fn in_stages(module: &Module, n: u64) -> Result<Module, OpError> {
    let Some(main) = module.functions.ids().next_back() else { return Ok(module.clone()) };
    let Staged { mut module, chunks } = cut(module, main, usize::try_from(n).unwrap_or(usize::MAX))?;
    for (node, chunk) in module.functions[main].nodes.iter_mut().zip(chunks) {
        if let (Op::Call { stage, .. }, Some(chunk)) = (&mut node.op, chunk) {
            *stage = Some(Stage::new(chunk as u64));
        }
    }
    Ok(module)
}

/// For each of `n` chunks of a program without stages the calls of `main`, by their number among the calls, with the layers of
/// each that are in the chunk; nothing where there are fewer layers than chunks.
pub fn chunks(module: &Module, n: usize) -> Option<Vec<Vec<(usize, u64)>>> {
    let main = module.functions.values().next_back()?;
    let units = units(module, main);
    if n == 0 || units.iter().filter(|u| u.is_layer).count() < n {
        return None;
    }
    let calls: Vec<usize> =
        (0..main.nodes.len()).filter(|&i| matches!(main.nodes[i].op, Op::Call { .. })).collect();
    let mut chunks: Vec<Vec<(usize, u64)>> = vec![Vec::new(); n];
    for (unit, chunk) in units.iter().zip(balance(&units, n)) {
        let call = calls.iter().position(|&node| node == unit.node)?;
        match chunks[chunk].last_mut() {
            Some((known, layers)) if *known == call => *layers += 1,
            Some(_) | None => chunks[chunk].push((call, 1)),
        }
    }
    Some(chunks)
}

/// The layers of each of `n` chunks of a program, embedding and head left out; nothing where the program has fewer layers.
pub fn chunk_layers(module: &Module, n: usize) -> Option<Vec<u64>> {
    let main = module.functions.values().next_back()?;
    let units = units(module, main);
    if n == 0 || units.iter().filter(|u| u.is_layer).count() < n {
        return None;
    }
    let mut layers = vec![0; n];
    for (unit, chunk) in units.iter().zip(balance(&units, n)) {
        layers[chunk] += u64::from(unit.is_layer);
    }
    Some(layers)
}

fn units(module: &Module, main: &Function) -> Vec<Unit> {
    let mut units = Vec::new();
    for (node, call) in main.nodes.iter().enumerate() {
        let Op::Call { callee, layers, .. } = &call.op else { continue };
        let callee = &module.functions[*callee];
        let flops = callee
            .nodes
            .iter()
            .map(|n| n.op.cost(&module.space, &callee.operand_types(n), &callee.result_types(n)).flops)
            .sum();
        let per_layer = |op: &Op| matches!(op, Op::Param(binding) if binding.is_per_layer());
        let is_layer = layers.end - layers.start > 1 || callee.nodes.iter().any(|n| per_layer(&n.op));
        units.extend(layers.clone().map(|layer| Unit { node, layer, flops, is_layer }));
    }
    units
}

/// The chunk of each unit: minimises the cost of the costliest of `n` consecutive chunks; each has a layer.
fn balance(units: &[Unit], n: usize) -> Vec<usize> {
    let mut flops: Vec<u128> = vec![0];
    let mut layers: Vec<usize> = vec![0];
    for (i, unit) in units.iter().enumerate() {
        flops.push(flops[i] + unit.flops);
        layers.push(layers[i] + usize::from(unit.is_layer));
    }
    // best[c][i]: the cost of the first i units in c + 1 chunks, and where the last of them starts.
    let mut best: Vec<Vec<Option<(u128, usize)>>> = Vec::new();
    for chunk in 0..n {
        let mut row = vec![None; units.len() + 1];
        for (end, slot) in row.iter_mut().enumerate().skip(1) {
            let starts = if chunk == 0 { 0..1 } else { 1..end };
            for start in starts.filter(|&start| layers[end] > layers[start]) {
                let before = match chunk {
                    0 => 0,
                    _ => match best[chunk - 1][start] {
                        Some((cost, _)) => cost,
                        None => continue,
                    },
                };
                let cost = before.max(flops[end] - flops[start]);
                // Ties go to the first cut: early stages hold the saved values of the most micro-batches.
                if slot.is_none_or(|(known, _)| cost < known) {
                    *slot = Some((cost, start));
                }
            }
        }
        best.push(row);
    }
    let mut chunks = vec![0; units.len()];
    let mut end = units.len();
    for chunk in (0..n).rev() {
        let (_, start) = best[chunk][end].expect("there are as many layers as chunks");
        chunks[start..end].fill(chunk);
        end = start;
    }
    chunks
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunks(costs: &[u128], n: usize) -> Vec<usize> {
        let last = costs.len() - 1;
        let unit =
            |(i, &flops): (usize, &u128)| Unit { node: i, layer: 0, flops, is_layer: i > 0 && i < last };
        balance(&costs.iter().enumerate().map(unit).collect::<Vec<_>>(), n)
    }

    #[test]
    fn embedding_and_head_count() {
        assert_eq!(chunks(&[0, 4, 4, 4, 4, 0], 2), [0, 0, 0, 1, 1, 1]);
        // A head as costly as two layers leaves the last stage fewer layers.
        assert_eq!(chunks(&[0, 4, 4, 4, 4, 4, 8], 2), [0, 0, 0, 0, 1, 1, 1]);
        assert_eq!(chunks(&[0, 1, 1, 1, 100], 3), [0, 0, 1, 2, 2]);
    }
}
