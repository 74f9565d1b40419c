//! Micro-batches of sequences in a forward pass of several stages: while a stage computes one of them, the others compute
//! others.
//!
//! ```text
//! @main:
//!   %x = call %ids {callee=@block, stage=0}      %ids0 = take %ids {to=b_0}
//!   %y = call %x {callee=@block, stage=1}        %x0 = call %ids0 {callee=@block.0, stage=0}
//!                                                %ids1 = take %ids {to=b_1}
//!                                                %x1 = call %ids1 {callee=@block.1, stage=0}
//!                                                %y0 = call %x0 {callee=@block.0, stage=1}
//!                                                %y1 = call %x1 {callee=@block.1, stage=1}
//!                                                %y = join %y0, %y1 {to=b}
//! ```
//! Micro-batch `i` of `n` has the sequences whose index is `i` modulo `n`, so that a rank that holds consecutive sequences takes
//! its own of each. A cache of a micro-batch is a window of the whole one, under the name of the whole one.

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{FuncId, Function, ValueId};
use ithaca_ir::ops::{Binding, OpError, source};
use ithaca_ir::{Arena, Dim, DimId, FunctionBuilder, Module, Op, Part, TensorType};
use ithaca_pass::rebuild::ValueMap;
use ithaca_pass::roles::Roles;

/// A program of `n` micro-batches, from that of one of them in stages.
///
/// # Errors
/// `P52` where calls depend on more than one sequence at a time in a way that micro-batches would change.
pub fn in_micro_batches(module: &Module, n: u64) -> Result<Module, OpError> {
    let Some((_, main)) = module.functions.iter().next_back() else { return Ok(module.clone()) };
    let batches: Vec<DimId> = Roles::of(module).batches.into_iter().collect();
    let [whole] = batches[..] else {
        let message =
            format!("micro-batches split one batch of sequences, and the program has {}", batches.len());
        return Err(OpError::new("P52", message));
    };
    let mut split = module.emptied(module.level);
    let Dim { name, size: each, .. } = module.space.dims[whole].clone();
    let dim = &mut split.space.dims[whole];
    (dim.size, dim.valid) = (each * n, each * n);
    let mut parts = Vec::new();
    for index in 0..n {
        let name = split.space.free_name(format!("{name}_{index}"));
        let part = Some(Part { of: whole, index, count: n, runs: each });
        parts.push(split.space.dims.push(Dim { part, ..Dim::new(name, each) }));
    }
    let cx = Cx { whole, parts };
    let mut copies: Vec<Vec<FuncId>> = Vec::new();
    for function in module.functions.values().take(module.functions.len() - 1) {
        let depends = function.values.values().any(|value| value.ty.has(whole));
        let of_function = if depends {
            let copy = |i| cx.copy(&split, function, &copies, i);
            (0..cx.parts.len()).map(copy).collect::<Result<Vec<_>, _>>()?
        } else {
            vec![function.clone()]
        };
        copies.push(of_function.into_iter().map(|copy| split.functions.push(copy)).collect());
    }
    let main = cx.main(&split, main, &copies)?;
    split.functions.push(main);
    Ok(split)
}

/// The batch and its parts.
struct Cx {
    whole: DimId,
    parts: Vec<DimId>,
}

/// The values of `main` under construction, of all sequences and of each micro-batch, by old value.
struct Values<'a> {
    whole: ValueMap<'a>,
    parts: Vec<ValueMap<'a>>,
}

/// The copy of a function for micro-batch `i`.
fn of_part(copies: &[FuncId], i: usize) -> FuncId {
    copies.get(i).copied().unwrap_or(copies[0])
}

impl Cx {
    /// The function for micro-batch `i`.
    fn copy(
        &self,
        module: &Module,
        function: &Function,
        copies: &[Vec<FuncId>],
        i: usize,
    ) -> Result<Function, OpError> {
        let mut copy = function.clone();
        copy.name = free_name(&module.functions, &format!("{}.{i}", function.name));
        let new = |dim: &mut DimId| {
            if *dim == self.whole {
                *dim = self.parts[i];
            }
        };
        copy.retype(|ty| ty.dims.iter_mut().for_each(new));
        for node in &mut copy.nodes {
            node.op.each_dim_mut(&mut { new });
            match &mut node.op {
                Op::Call { callee, .. } => *callee = of_part(&copies[callee.index()], i),
                Op::State(binding) => self.window(module, binding, function.ty(node.results[0]), i)?,
                Op::Assign { binding, .. } => {
                    self.window(module, binding, function.ty(node.operands[0]), i)?;
                }
                _ => {}
            }
        }
        Ok(copy)
    }

    /// Makes the binding of a state that has sequences one of micro-batch `i`.
    fn window(
        &self,
        module: &Module,
        binding: &mut Binding,
        ty: &TensorType,
        i: usize,
    ) -> Result<(), OpError> {
        if !ty.has(self.whole) {
            return Ok(());
        }
        if ty.dims.first() != Some(&self.whole) || !binding.stored.is_empty() {
            let message = format!("state `{}` is not stored with the batch first", binding.name);
            return Err(OpError::new("P52", message));
        }
        binding.stored = ty.dims.iter().map(|&d| source::stored_size(&module.space, d)).collect();
        let n = self.parts.len() as u64;
        binding.view =
            [binding.stored[0] / n, n].into_iter().chain(binding.stored[1..].iter().copied()).collect();
        binding.window = binding.view.iter().map(|&size| 0..size).collect();
        binding.window[1] = i as u64..i as u64 + 1;
        Ok(())
    }

    /// `main`, which calls each function for each micro-batch: of a stage all that the first needs, then all that the second needs.
    fn main(&self, module: &Module, source: &Function, copies: &[Vec<FuncId>]) -> Result<Function, OpError> {
        let mut b = FunctionBuilder::like(source, &module.space, &module.functions);
        let mut values =
            Values { whole: ValueMap::new(source), parts: vec![ValueMap::new(source); self.parts.len()] };
        let stage = |i: usize| match &source.nodes[i].op {
            Op::Call { stage, .. } => Some(*stage),
            _ => None,
        };
        let mut i = 0;
        while i < source.nodes.len() {
            let run =
                (i..source.nodes.len()).take_while(|&j| stage(j).is_some() && stage(j) == stage(i)).count();
            if run == 0 {
                self.node(&mut b, &mut values, i)?;
            }
            for part in 0..self.parts.len() {
                for call in i..i + run {
                    self.call(&mut b, &mut values, (call, part), copies)?;
                }
            }
            i += run.max(1);
        }
        let outputs: Vec<ValueId> = source.outputs.iter().map(|o| o.value).collect();
        for value in outputs {
            self.joined(&mut b, &mut values, value)?;
        }
        Ok(b.finish(values.whole.outputs()))
    }

    /// A node that is no call, on all sequences.
    fn node(&self, b: &mut FunctionBuilder<'_>, values: &mut Values<'_>, i: usize) -> Result<(), OpError> {
        let node = &values.whole.source.nodes[i];
        for &operand in &node.operands {
            self.joined(b, values, operand)?;
        }
        values.whole.copy(b, node)
    }

    /// A call for one micro-batch.
    fn call(
        &self,
        b: &mut FunctionBuilder<'_>,
        values: &mut Values<'_>,
        (i, part): (usize, usize),
        copies: &[Vec<FuncId>],
    ) -> Result<(), OpError> {
        let source = values.whole.source;
        let node = &source.nodes[i];
        let mut op = node.op.clone();
        let Op::Call { callee, .. } = &mut op else { return Ok(()) };
        *callee = of_part(&copies[callee.index()], part);
        let mut operands = Vec::with_capacity(node.operands.len());
        for &operand in &node.operands {
            if !source.ty(operand).has(self.whole) {
                operands.push(values.whole[operand]);
                continue;
            }
            let known = values.parts[part].get(operand);
            let taken = || b.push(Op::Take { to: self.parts[part] }, &[values.whole[operand]]);
            let value = known.map_or_else(taken, Ok)?;
            values.parts[part].insert(operand, value);
            operands.push(value);
        }
        let results = b.node(op, &operands, &[])?;
        for (&old, &new) in node.results.iter().zip(&results) {
            if !source.ty(old).has(self.whole) {
                let message = "a call returns a value of all sequences, which micro-batches do not have";
                return Err(OpError::new("P52", message));
            }
            values.parts[part].insert(old, new);
        }
        Ok(())
    }

    /// Makes the whole of a value whose parts are known.
    fn joined(
        &self,
        b: &mut FunctionBuilder<'_>,
        values: &mut Values<'_>,
        old: ValueId,
    ) -> Result<(), OpError> {
        if values.whole.get(old).is_none() {
            let parts: Vec<ValueId> = values.parts.iter().map(|parts| parts[old]).collect();
            let whole = b.push(Op::Join { to: self.whole }, &parts)?;
            values.whole.replace(b, &[old], &[whole]);
        }
        Ok(())
    }
}

/// A name for a function that none has.
fn free_name(functions: &Arena<FuncId, Function>, name: &str) -> String {
    let is_free = |name: &str| functions.values().all(|f| f.name != name);
    let numbered = (0..).map(|i| if i == 0 { name.to_owned() } else { format!("{name}.{i}") });
    numbered.into_iter().find(|name| is_free(name)).expect("some number is free")
}

#[cfg(test)]
mod tests {
    use ithaca_ir::text;
    use ithaca_ir::verify::verify;

    use super::*;
    use crate::{Training, in_stages};

    /// A step of two sequences that continues caches in two layers.
    const STEP: &str = r#"ithaca 1 program
model "m"
dim b = 2
dim m = 6
dim v = 8

func @block(%x: f32[b m]) {
  %w = param {name="{layer}.w"} : f32[m]
  %y = rms_norm %x, %w {over=m, eps=1e-6} : f32[b m]
  %cache = state {name="cache.{layer}"} : f32[b m]
  %z = add %cache, %y : f32[b m]
  assign %z {target=state, name="cache.{layer}"}
  return %z
}

func @main() {
  %ids = input {name="ids"} : i32[b]
  %table = param {name="table"} : f32[v m]
  %x = embed %table, %ids {over=v} : f32[b m]
  %y = call %x {callee=@block, layers=0..2} : f32[b m]
  %z = scale %y {factor=0.5} : f32[b m]
  return z = %z
}
"#;

    #[test]
    fn stages_call_functions_of_each_micro_batch_and_their_results_are_joined() {
        let staged =
            in_stages(&text::parse(STEP).unwrap(), &Training { stages: 2, ..Training::default() }).unwrap();
        let module = in_micro_batches(&staged, 3).unwrap();
        verify(&module).unwrap();
        assert_eq!(module.space.size(module.space.dim("b").unwrap()), 6);
        let main = &module.functions[module.main().unwrap()];
        let lines = main.nodes.iter().map(|node| match &node.op {
            Op::Call { callee, stage: Some(stage), .. } => {
                format!("{} {}", module.functions[*callee].name, stage.number)
            }
            op => op.name().to_owned(),
        });
        let calls = |stage| (0..3).map(move |i| format!("block.{i} {stage}"));
        let first = calls(0).flat_map(|call| ["take".to_owned(), call]);
        let expected =
            ["input", "param", "embed"].map(str::to_owned).into_iter().chain(first).chain(calls(1));
        let expected = expected.chain(["join", "scale"].map(str::to_owned));
        assert_eq!(lines.collect::<Vec<_>>(), expected.collect::<Vec<_>>());
        let of_last = &module.functions[module.function("block.2").unwrap()];
        let states = of_last.nodes.iter().filter_map(|node| match &node.op {
            Op::State(binding) | Op::Assign { binding, .. } => Some(binding),
            _ => None,
        });
        for Binding { name, stored, view, window, .. } in states {
            assert_eq!(
                (name.as_str(), &stored[..], &view[..]),
                ("cache.{layer}", &[6, 6][..], &[2, 3, 6][..])
            );
            assert_eq!(window[..], [0..2, 2..3, 0..6]);
        }
    }
}
