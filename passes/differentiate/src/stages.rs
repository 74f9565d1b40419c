//! Cuts a program into the stages of a pipeline: consecutive chunks of layers of nearly equal cost.
//!
//! The cost of a layer is the FLOPs of its function. Other functions, such as the embedding and the head, add their
//! FLOPs to their chunk. Every chunk has at least one layer; where there are fewer layers than chunks, the embedding and the head may
//! be chunks of their own. A training option may state the layers of each chunk instead.

use ithaca_ir::diagnostic::counted;
use ithaca_ir::entity::Entity;
use ithaca_ir::module::{FuncId, Function, Layers};
use ithaca_ir::ops::{OpError, Stage};
use ithaca_ir::{FunctionBuilder, Module, Op};
use ithaca_pass::rebuild::ValueMap;

use super::{PipelineOrder, Training};

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

/// Splits the calls of `main` at the boundaries of the chunks.
///
/// # Errors
/// `P53` when there are fewer calls than chunks, and when the stated layers are not those of the chunks.
pub(super) fn cut(module: &Module, main: FuncId, training: &Training) -> Result<Staged, OpError> {
    let function = &module.functions[main];
    let units = units(module, function);
    let chunk_of = chunks_of(&units, training)?;

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

/// The program with its calls in the stages of a pipeline, which run one after another.
///
/// # Errors
/// `P53` when there are fewer calls than stages, and when the stated layers are not those of the stages.
pub fn in_stages(module: &Module, training: &Training) -> Result<Module, OpError> {
    let Some(main) = module.functions.ids().next_back() else { return Ok(module.clone()) };
    let forward = Training { pipeline: PipelineOrder::default(), ..training.clone() };
    let Staged { mut module, chunks } = cut(module, main, &forward)?;
    for (node, chunk) in module.functions[main].nodes.iter_mut().zip(chunks) {
        if let (Op::Call { stage, .. }, Some(chunk)) = (&mut node.op, chunk) {
            *stage = Some(Stage::new(chunk as u64));
        }
    }
    Ok(module)
}

/// For each chunk of a program without stages the calls of `main`, by their number among the calls, with the layers of each that
/// are in the chunk.
///
/// # Errors
/// As [`in_stages`].
pub fn chunks(module: &Module, training: &Training) -> Result<Vec<Vec<(usize, u64)>>, OpError> {
    let (units, chunk_of) = cut_units(module, training)?;
    let mut chunks: Vec<Vec<(usize, u64)>> = vec![Vec::new(); chunk_of.last().map_or(0, |last| last + 1)];
    // The call of a unit, and its number among the calls.
    let mut call: Option<(usize, usize)> = None;
    for (unit, chunk) in units.iter().zip(chunk_of) {
        let number = match call {
            Some((node, number)) if node == unit.node => number,
            Some((_, number)) => number + 1,
            None => 0,
        };
        call = Some((unit.node, number));
        match chunks[chunk].last_mut() {
            Some((known, layers)) if *known == number => *layers += 1,
            Some(_) | None => chunks[chunk].push((number, 1)),
        }
    }
    Ok(chunks)
}

/// The layers of each chunk of a program without stages, embedding and head left out.
///
/// # Errors
/// As [`in_stages`].
pub fn chunk_layers(module: &Module, training: &Training) -> Result<Vec<u64>, OpError> {
    let (units, chunk_of) = cut_units(module, training)?;
    Ok(layers_of(&units, &chunk_of))
}

fn layers_of(units: &[Unit], chunk_of: &[usize]) -> Vec<u64> {
    let mut layers = vec![0; chunk_of.last().map_or(0, |last| last + 1)];
    for (unit, &chunk) in units.iter().zip(chunk_of) {
        layers[chunk] += u64::from(unit.is_layer);
    }
    layers
}

fn cut_units(module: &Module, training: &Training) -> Result<(Vec<Unit>, Vec<usize>), OpError> {
    let units = module.functions.values().next_back().map_or_else(Vec::new, |main| units(module, main));
    let chunk_of = chunks_of(&units, training)?;
    Ok((units, chunk_of))
}

/// The chunk of each unit.
fn chunks_of(units: &[Unit], training: &Training) -> Result<Vec<usize>, OpError> {
    let (n, stated) = (training.n_chunks(), &training.stage_layers);
    let n_layers = units.iter().filter(|u| u.is_layer).count() as u64;
    let refused = |message: String| Err(OpError::new("P53", message));
    let of_model = || counted(n_layers, "layer");
    let n_units = units.len() as u64;
    if n_units < n {
        return refused(format!(
            "{n} chunks of a pipeline are more than the model has: {}, or {n_units} parts with embedding and head",
            of_model()
        ));
    }
    // Without a pipeline nothing is cut, whatever is stated.
    if stated.is_empty() || training.stages <= 1 {
        return Ok(balance(units, usize::try_from(n).unwrap_or(usize::MAX)));
    }
    let text = |layers: &[u64]| layers.iter().map(u64::to_string).collect::<Vec<_>>().join("+");
    let refused = |message: String| {
        let usual = layers_of(units, &balance(units, usize::try_from(n).unwrap_or(usize::MAX)));
        let help = format!(
            "state a number for each of {}, {n_layers} in all, as in `stage_layers={}`",
            counted(n, "chunk"),
            text(&usual)
        );
        refused(message).map_err(|refusal| refusal.help(help))
    };
    if stated.len() as u64 != n {
        return refused(format!(
            "`stage_layers={}` states the layers of {}, and the pipeline has {n}",
            text(stated),
            counted(stated.len() as u64, "chunk")
        ));
    }
    let sum = stated.iter().fold(0, |sum: u64, n| sum.saturating_add(*n));
    if sum != n_layers {
        return refused(format!(
            "`stage_layers={}` states {}, but the model has {}",
            text(stated),
            counted(sum, "layer"),
            of_model()
        ));
    }
    let chunk_of = stated_chunks(units, stated);
    let is_empty = |chunk: &usize| !chunk_of.contains(chunk);
    if let Some(chunk) = (0..stated.len()).find(is_empty) {
        return refused(format!("`stage_layers={}` leaves chunk {chunk} without any work", text(stated)));
    }
    Ok(chunk_of)
}

/// The chunk of each unit where the layers of each are stated. Units before the layers are in the first chunk, units after them in the
/// last one, and a unit between two layers in the chunk of the first of these.
fn stated_chunks(units: &[Unit], stated: &[u64]) -> Vec<usize> {
    let layers = stated.iter().enumerate().flat_map(|(chunk, &n)| (0..n).map(move |_| chunk));
    let mut layers = layers.peekable();
    let mut chunk = 0;
    let place = |unit: &Unit| {
        match layers.peek() {
            Some(&next) if unit.is_layer => {
                chunk = next;
                layers.next();
            }
            Some(_) => {}
            None => chunk = stated.len() - 1,
        }
        chunk
    };
    units.iter().map(place).collect()
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

/// The chunk of each unit: minimises the cost of the costliest of `n` consecutive chunks; each has a layer if there are as many, and a
/// unit otherwise.
fn balance(units: &[Unit], n: usize) -> Vec<usize> {
    let mut flops: Vec<u128> = vec![0];
    let mut needed: Vec<usize> = vec![0];
    let has_layers = units.iter().filter(|unit| unit.is_layer).count() >= n;
    for (i, unit) in units.iter().enumerate() {
        flops.push(flops[i] + unit.flops);
        needed.push(needed[i] + usize::from(unit.is_layer || !has_layers));
    }
    // best[c][i]: the cost of the first i units in c + 1 chunks, and where the last of them starts.
    let mut best: Vec<Vec<Option<(u128, usize)>>> = Vec::new();
    for chunk in 0..n {
        let mut row = vec![None; units.len() + 1];
        for (end, slot) in row.iter_mut().enumerate().skip(1) {
            let starts = if chunk == 0 { 0..1 } else { 1..end };
            for start in starts.filter(|&start| needed[end] > needed[start]) {
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
        let (_, start) = best[chunk][end].expect("there are as many units as chunks");
        chunks[start..end].fill(chunk);
        end = start;
    }
    chunks
}

#[cfg(test)]
mod tests {
    use super::*;

    fn units(costs: &[u128]) -> Vec<Unit> {
        let last = costs.len() - 1;
        let unit =
            |(i, &flops): (usize, &u128)| Unit { node: i, layer: 0, flops, is_layer: i > 0 && i < last };
        costs.iter().enumerate().map(unit).collect()
    }

    fn chunks(costs: &[u128], n: usize) -> Vec<usize> {
        balance(&units(costs), n)
    }

    #[test]
    fn embedding_and_head_count() {
        assert_eq!(chunks(&[0, 4, 4, 4, 4, 0], 2), [0, 0, 0, 1, 1, 1]);
        // A head as costly as two layers leaves the last stage fewer layers.
        assert_eq!(chunks(&[0, 4, 4, 4, 4, 4, 8], 2), [0, 0, 0, 0, 1, 1, 1]);
        assert_eq!(chunks(&[0, 1, 1, 1, 100], 3), [0, 0, 1, 2, 2]);
        // With fewer layers than chunks the costly head is the first to be a chunk of its own.
        assert_eq!(chunks(&[0, 1, 1, 1, 100], 4), [0, 0, 1, 2, 3]);
        assert_eq!(chunks(&[0, 1, 1, 1], 4), [0, 1, 2, 3]);
    }

    #[test]
    fn stated_layers_are_kept() {
        let units = units(&[0, 4, 4, 4, 4, 8]);
        let cut = |stages: u64, stage_layers: &[u64]| {
            let stage_layers = stage_layers.to_vec();
            chunks_of(&units, &Training { stages, stage_layers, ..Training::default() })
        };
        assert_eq!(cut(2, &[3, 1]).unwrap(), [0, 0, 0, 0, 1, 1]);
        assert_eq!(cut(2, &[]).unwrap(), [0, 0, 0, 0, 1, 1]);
        assert_eq!(cut(3, &[1, 1, 2]).unwrap(), [0, 0, 1, 2, 2, 2]);
        assert_eq!(cut(1, &[1, 3]).unwrap(), [0; 6]);
        assert_eq!(cut(4, &[0, 2, 2, 0]).unwrap(), [0, 1, 1, 2, 2, 3]);
        assert_eq!(cut(6, &[]).unwrap(), [0, 1, 2, 3, 4, 5]);
        let wrong: [(u64, &[u64]); 6] = [
            (3, &[2, 2]),
            (2, &[2, 3]),
            (2, &[u64::MAX, u64::MAX]),
            (7, &[]),
            (3, &[2, 0, 2]),
            (4, &[4, 0, 0, 0]),
        ];
        for (stages, layers) in wrong {
            assert_eq!(cut(stages, layers).unwrap_err().code, "P53");
        }
        let help = "state a number for each of 3 chunks, 4 in all, as in `stage_layers=1+2+1`";
        assert_eq!(cut(3, &[2, 2]).unwrap_err().help.unwrap(), help);
        assert_eq!(cut(3, &[2, 2, 2]).unwrap_err().help.unwrap(), help);
        assert_eq!(cut(3, &[1, 2, 1]).unwrap(), cut(3, &[]).unwrap());
    }
}
