//! Computes the head and the loss in parts: loss and gradients of one part of the tokens are computed together, before
//! those of the next, so only one part's logits exist at a time (Hsu et al., Liger kernel, arXiv 2410.10989; sequence
//! tiling of ALST, arXiv 2506.13996).
//!
//! ```text
//! @head (%x, %labels, %count):
//!   %x0 = take %x {to=s_0}
//!   … logits of part 0, their sum of losses, their gradients for %x0 and for the weights …
//!   %x1 = take %x {to=s_1}
//!   … the same of part 1, gradients of weights added …
//!   %dx = join %dx0, %dx1 {to=s}
//!   return %loss, %dx
//! ```
//! Part `i` of `C` has the tokens whose index is `i` modulo `C`. A rank that holds consecutive tokens therefore holds
//! equally many tokens of every part, for any degree, and takes them from its own shard; the loss does not depend on
//! the order of tokens. The gradient of the loss is one, so gradients are computed in the forward pass. Sums over
//! tokens are accumulated over all parts before they are reduced over ranks, so parts add no communication.

use ithaca_ir::diagnostic::counted;
use ithaca_ir::entity::Entity;
use ithaca_ir::module::{FuncId, Function, Node, Output, ValueId};
use ithaca_ir::ops::{Binary, Binding, Loss, OpError, Random, cast};
use ithaca_ir::rule::FactorKind;
use ithaca_ir::{Arena, Dim, DimId, FunctionBuilder, Module, Op, Part, Space, TensorType};
use ithaca_pass::rebuild::ValueMap;

use super::active::Activity;
use super::options::GradientType;
use super::split::Halves;
use super::tape::{Accumulation, Forward, Tape, store_gradients};

/// The function that computes the loss, and the parts of its tokens.
pub(super) struct Chunked {
    /// The function.
    pub(super) head: FuncId,
    tokens: DimId,
    parts: Vec<DimId>,
    kinds: Vec<ValueKind>,
}

/// How a value of the head depends on tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ValueKind {
    /// The same for all tokens.
    Shared,
    /// Separate for each token.
    Token,
    /// Separate for each token and drawn from a key by position: computed for all tokens, then taken part by part.
    Drawn,
    /// A sum over tokens, or linear in one.
    Sum,
}

/// The function that computes the loss, if `main` gets it from a single call.
pub(super) fn head(module: &Module, (main, loss): (FuncId, ValueId)) -> Option<FuncId> {
    let made = module.functions[main].nodes.iter().find(|node| node.results.contains(&loss));
    match made.map(|node| &node.op) {
        Some(Op::Call { callee, layers, scan: None, .. }) if layers.end - layers.start == 1 => Some(*callee),
        _ => None,
    }
}

/// Splits the head of `module` into `n` parts; declares the parts in `space`.
///
/// # Errors
/// `P57` when `loss` is not a sum over tokens computed by a single function, or `n` does not divide the tokens.
pub(super) fn of(
    module: &Module,
    (main, loss): (FuncId, ValueId),
    n: u64,
    space: &mut Space,
) -> Result<Chunked, OpError> {
    let refuse =
        |what: &str| OpError::new("P57", format!("the loss cannot be computed in {n} parts: {what}"));
    let calls = || module.functions.values().flat_map(|f| &f.nodes);
    let missing = || refuse("`@main` does not get it from a single call of a function");
    let head = head(module, (main, loss)).ok_or_else(missing)?;
    let called = |node: &&Node| matches!(node.op, Op::Call { callee, .. } if callee == head);
    if calls().filter(called).count() != 1 || module.functions[head].outputs.len() != 1 {
        return Err(refuse("the function that returns it has other results or runs twice"));
    }
    let function = &module.functions[head];
    let labels = function.nodes.iter().find_map(|node| match node.op {
        Op::Loss(Loss::CrossEntropy { .. }) => function.ty(node.operands[1]).dims.last().copied(),
        _ => None,
    });
    let tokens = labels.ok_or_else(|| refuse("its labels have no dimension of tokens"))?;
    let kinds = kinds(function, tokens)?;
    let whole = &space.dims[tokens];
    let (name, size) = (whole.name.clone(), whole.size);
    if !size.is_multiple_of(n) || whole.granule != 1 {
        let legal: Vec<String> =
            (1..=size.min(64)).filter(|&n| size.is_multiple_of(n)).map(|n| n.to_string()).collect();
        let message = format!(
            "a sequence `{name}` of {} does not divide into {n} parts of the loss; parts that divide: {}, or a sequence of {} or {}",
            counted(size, "token"),
            legal.join(", "),
            (size / n * n).max(n),
            size.next_multiple_of(n)
        );
        return Err(OpError::new("P57", message));
    }
    let part = |space: &mut Space, index: u64| {
        let part = space.free_name(format!("{name}_{index}"));
        let of = Part { of: tokens, index, count: n, runs: size / n };
        space.dims.push(Dim { part: Some(of), ..Dim::new(part, size / n) })
    };
    let parts = (0..n).map(|index| part(space, index)).collect();
    Ok(Chunked { head, tokens, parts, kinds })
}

/// The kinds of a function's values.
///
/// # Errors
/// `P57` when an operation mixes tokens before the sum, or a result is not linear in a sum over tokens.
fn kinds(function: &Function, tokens: DimId) -> Result<Vec<ValueKind>, OpError> {
    let refuse = |node: &Node| {
        let message = format!(
            "the loss cannot be computed in parts: `{}` of `@{}` is not computed token by token",
            node.op.name(),
            function.name
        );
        OpError::new("P57", message)
    };
    let of_type = |v: ValueId| if function.ty(v).has(tokens) { ValueKind::Token } else { ValueKind::Shared };
    let mut kinds = vec![ValueKind::Shared; function.values.len()];
    for &param in &function.params {
        kinds[param.index()] = of_type(param);
    }
    for node in &function.nodes {
        let by_token = |v: &ValueId| match kinds[v.index()] {
            ValueKind::Drawn => ValueKind::Token,
            kind => kind,
        };
        let of: Vec<ValueKind> = node.operands.iter().map(by_token).collect();
        let results: Vec<ValueKind> = node.results.iter().map(|&v| of_type(v)).collect();
        let kind = if of.contains(&ValueKind::Sum) {
            match (&node.op, &of[..]) {
                (Op::Cast { .. } | Op::Scale { .. }, [ValueKind::Sum])
                | (Op::Binary(Binary::Div), [ValueKind::Sum, ValueKind::Shared]) => ValueKind::Sum,
                _ => return Err(refuse(node)),
            }
        } else if of.contains(&ValueKind::Token) {
            match (&node.op, &results[..]) {
                (Op::Sum, [ValueKind::Shared]) => ValueKind::Sum,
                _ if is_per_token(function, node, tokens) => ValueKind::Token,
                _ => return Err(refuse(node)),
            }
        } else {
            match (&node.op, results.iter().all(|&kind| kind == ValueKind::Shared)) {
                (Op::Random(Random::DropoutMask { .. }), false) => ValueKind::Drawn,
                (op, true) if !writes(op) => ValueKind::Shared,
                _ => return Err(refuse(node)),
            }
        };
        node.results.iter().for_each(|v| kinds[v.index()] = kind);
    }
    if function.outputs.iter().all(|o| kinds[o.value.index()] == ValueKind::Sum) {
        return Ok(kinds);
    }
    Err(OpError::new(
        "P57",
        format!(
            "the loss cannot be computed in parts: `@{}` does not return a sum over tokens",
            function.name
        ),
    ))
}

fn writes(op: &Op) -> bool {
    matches!(op, Op::Assign { .. } | Op::State(_) | Op::Call { .. })
}

/// Whether tokens are a parallel factor of every result.
fn is_per_token(function: &Function, node: &Node, tokens: DimId) -> bool {
    let (operands, results) = (function.operand_types(node), function.result_types(node));
    let Some(rule) = node.op.rule(&operands, &results) else { return false };
    let factor =
        |ty: &TensorType, factors: &[usize]| ty.position(tokens).and_then(|at| factors.get(at).copied());
    let of_results: Vec<Option<usize>> =
        results.iter().zip(&rule.results).map(|(ty, factors)| factor(ty, factors)).collect();
    let Some(&Some(first)) = of_results.first() else { return false };
    let alike = of_results.iter().all(|&f| f == Some(first));
    let mut read = operands.iter().zip(&rule.operands).filter_map(|(ty, factors)| factor(ty, factors));
    alike && read.all(|f| f == first) && rule.factors[first] == FactorKind::Parallel
}

/// Gradients of one part of the tokens, by old value.
struct Gradients<'a> {
    chunked: &'a Chunked,
    /// Of values that differ between parts.
    own: Tape,
    /// Of values that all parts share, in the type of gradients of weights.
    shared: Tape,
    dtype: GradientType,
}

impl Gradients<'_> {
    fn add(&mut self, b: &mut FunctionBuilder<'_>, old: ValueId, gradient: ValueId) -> Result<(), OpError> {
        match self.chunked.kinds[old.index()] {
            ValueKind::Token | ValueKind::Drawn | ValueKind::Sum => self.own.add(b, old, gradient),
            ValueKind::Shared => {
                let gradient = cast(b, gradient, self.dtype.of(b.ty(gradient).dtype))?;
                self.shared.add(b, old, gradient)
            }
        }
    }

    /// The adjoint of a node with these gradients of its results.
    fn adjoint(
        &mut self,
        b: &mut FunctionBuilder<'_>,
        node: &Node,
        map: &ValueMap<'_>,
        gradients: &[Option<ValueId>],
        is_active: impl Fn(ValueId) -> bool,
    ) -> Result<(), OpError> {
        let record = Forward::copied(node, map);
        record.adjoint(b, gradients, is_active, |b, old, part| self.add(b, old, part))
    }
}

/// The halves of the head: the forward half returns the loss, then the gradients of its arguments; the backward half is
/// empty.
///
/// # Errors
/// An operation without an adjoint.
pub(super) fn halves(
    space: &Space,
    source: &Function,
    chunked: &Chunked,
    activity: &Activity,
    (dtype, accumulation): (GradientType, impl Fn(&Binding) -> Accumulation),
) -> Result<Halves, OpError> {
    let none = Arena::new();
    let is_active = |v: ValueId| activity.is_active(chunked.head, v);
    let kind = |v: ValueId| chunked.kinds[v.index()];
    let kind_of = |node: &Node| node.results.first().map_or(ValueKind::Shared, |&v| kind(v));
    let sums_tokens = |node: &Node| {
        kind_of(node) == ValueKind::Sum && node.operands.iter().any(|&v| kind(v) == ValueKind::Token)
    };
    let mut b = FunctionBuilder::like(source, space, &none);
    let mut map = ValueMap::with_params(&mut b, source);
    for node in source.nodes.iter().filter(|n| matches!(kind_of(n), ValueKind::Shared | ValueKind::Drawn)) {
        map.copy(&mut b, node)?;
    }
    let tape = || Tape::new(source.values.len());
    let mut gradients = Gradients { chunked, own: tape(), shared: tape(), dtype };

    // The gradients of the sums over tokens are known before the sums: all later operations are linear.
    let output = source.outputs[0].value;
    let one = b.push_as(Op::Fill { value: 1.0 }, &[], source.ty(output).clone())?;
    gradients.own.set(output, one);
    for node in source.nodes.iter().rev().filter(|n| kind_of(n) == ValueKind::Sum && !sums_tokens(n)) {
        let Some(d) = gradients.own.of(node.result()) else { continue };
        let operand = node.operands[0];
        let d = match &node.op {
            Op::Binary(Binary::Div) => b.push(Op::Binary(Binary::Div), &[d, map[node.operands[1]]])?,
            Op::Cast { .. } => cast(&mut b, d, source.ty(operand).dtype)?,
            op => b.push(op.clone(), &[d])?,
        };
        gradients.own.add(&mut b, operand, d)?;
    }
    let seeds: Vec<(ValueId, ValueId)> = source
        .nodes
        .iter()
        .filter(|n| sums_tokens(n))
        .filter_map(|n| Some((n.result(), gradients.own.of(n.result())?)))
        .collect();

    let by_token = |n: &&Node| kind_of(n) == ValueKind::Token || sums_tokens(n);
    let mut sums = tape();
    let mut of_parts: Vec<Vec<Option<ValueId>>> = Vec::new();
    for &part in &chunked.parts {
        let mut own = map.clone();
        for v in source.values.ids() {
            let is_argument = kind(v) == ValueKind::Token && source.params.contains(&v);
            if let (true, Some(whole)) = (is_argument || kind(v) == ValueKind::Drawn, map.get(v)) {
                own.insert(v, b.push(Op::Take { to: part }, &[whole])?);
            }
        }
        for node in source.nodes.iter().filter(by_token) {
            part_node(&mut b, source, node, (chunked.tokens, part), &mut own)?;
        }
        for node in source.nodes.iter().filter(|n| sums_tokens(n)) {
            sums.add(&mut b, node.result(), own[node.result()])?;
        }
        gradients.own = tape();
        for &(sum, seed) in &seeds {
            gradients.own.set(sum, seed);
        }
        for node in source.nodes.iter().rev().filter(by_token) {
            let of_results: Vec<Option<ValueId>> =
                node.results.iter().map(|&r| gradients.own.of(r)).collect();
            gradients.adjoint(&mut b, node, &own, &of_results, is_active)?;
        }
        of_parts.push(source.params.iter().map(|&p| gradients.own.of(p)).collect());
    }

    for v in source.values.ids().filter(|&v| kind(v) == ValueKind::Sum) {
        sums.of(v).into_iter().for_each(|sum| map.insert(v, sum));
    }
    for node in source.nodes.iter().filter(|n| kind_of(n) == ValueKind::Sum && !sums_tokens(n)) {
        map.copy(&mut b, node)?;
    }
    let mut weights: Vec<(&Binding, ValueId)> = Vec::new();
    for node in source.nodes.iter().rev().filter(|n| kind_of(n) == ValueKind::Shared) {
        let found: Vec<Option<ValueId>> = node.results.iter().map(|&r| gradients.shared.of(r)).collect();
        if let (Op::Param(binding), &[Some(gradient)]) = (&node.op, &found[..]) {
            weights.push((binding, gradient));
            continue;
        }
        let mut narrow = Vec::with_capacity(found.len());
        for (&result, gradient) in node.results.iter().zip(found) {
            narrow.push(gradient.map(|g| cast(&mut b, g, source.ty(result).dtype)).transpose()?);
        }
        gradients.adjoint(&mut b, node, &map, &narrow, is_active)?;
    }
    store_gradients(&mut b, weights, (dtype, accumulation))?;

    let mut outputs = vec![Output { name: None, value: map[output] }];
    let mut returned = Vec::new();
    for (i, &param) in source.params.iter().enumerate().filter(|&(_, &p)| is_active(p)) {
        let gradient = match kind(param) {
            ValueKind::Token | ValueKind::Drawn | ValueKind::Sum => {
                let parts: Option<Vec<ValueId>> = of_parts.iter().map(|part| part[i]).collect();
                match parts {
                    None => continue,
                    Some(parts) => b.push(Op::Join { to: chunked.tokens }, &parts)?,
                }
            }
            ValueKind::Shared => match gradients.shared.of(param) {
                None => continue,
                Some(gradient) => cast(&mut b, gradient, source.ty(param).dtype)?,
            },
        };
        returned.push(i);
        outputs.push(Output { name: None, value: gradient });
    }
    let forward = pruned(space, &b.finish(outputs))?;
    let (seeds, sums, reused) = (Vec::new(), Vec::new(), Vec::new());
    Ok(Halves { forward, backward: Function::default(), n_results: 1, seeds, sums, reused, returned })
}

/// A node on one part of the tokens.
fn part_node(
    b: &mut FunctionBuilder<'_>,
    source: &Function,
    node: &Node,
    (tokens, part): (DimId, DimId),
    map: &mut ValueMap<'_>,
) -> Result<(), OpError> {
    let mut declared = map.declared(&node.results);
    let dims = declared.iter_mut().flat_map(|ty| &mut ty.dims);
    dims.filter(|d| **d == tokens).for_each(|d| *d = part);
    let results = b.node(node.op.clone(), &map.operands(node), &declared)?;
    let at = b.space().dims[part].part.map_or(0, |part| part.index);
    for (&old, &new) in node.results.iter().zip(&results) {
        let name = source.values[old].name.as_deref().map(|name| format!("{name}_{at}"));
        b.name(new, name.as_deref());
        map.insert(old, new);
    }
    Ok(())
}

/// The function without unused nodes.
fn pruned(space: &Space, function: &Function) -> Result<Function, OpError> {
    let mut read = vec![false; function.values.len()];
    for output in &function.outputs {
        read[output.value.index()] = true;
    }
    let mut runs = vec![false; function.nodes.len()];
    for (node, runs) in function.nodes.iter().zip(&mut runs).rev() {
        *runs = writes(&node.op) || node.results.iter().any(|v| read[v.index()]);
        if *runs {
            node.operands.iter().for_each(|v| read[v.index()] = true);
        }
    }
    let none = Arena::new();
    let mut b = FunctionBuilder::like(function, space, &none);
    let mut map = ValueMap::with_params(&mut b, function);
    for (node, _) in function.nodes.iter().zip(&runs).filter(|&(_, &runs)| runs) {
        map.copy(&mut b, node)?;
    }
    Ok(b.finish(map.outputs()))
}
