//! The head and the loss in parts: loss and gradients of one part of the tokens are computed together, before those of the
//! next, so that only the logits of a part are ever there (Hsu et al., Liger kernel, arXiv 2410.10989; sequence tiling of
//! ALST, arXiv 2506.13996).
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
//! Part `i` of `C` has the tokens whose index is `i` modulo `C`. So a rank that holds some tokens in a row holds as many of
//! every part, whichever ranks there are, and takes them from what it holds; the loss does not ask for their order. The
//! gradient that flows into the loss is one, so gradients may be computed at once. Sums over tokens are taken over all parts
//! before they are reduced over ranks: what is sent is what is sent without parts.

use ithaca_ir::diagnostic::counted;
use ithaca_ir::entity::Entity;
use ithaca_ir::module::{FuncId, Function, Node, Output, ValueId};
use ithaca_ir::ops::{Binary, Binding, Loss, OpError, Random};
use ithaca_ir::rule::FactorKind;
use ithaca_ir::{Arena, Dim, DimId, FunctionBuilder, Module, Op, Part, Space, TensorType};

use super::active::Activity;
use super::joint::{Kept, Tape, copy_node, keep, wide};
use super::split::Halves;

/// The function that computes the loss, and its tokens in parts.
pub(super) struct Chunked {
    /// The function.
    pub(super) head: FuncId,
    tokens: DimId,
    parts: Vec<DimId>,
    kinds: Vec<Kind>,
}

/// What a value of the head is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// The same for all tokens.
    Shared,
    /// Of each token its own.
    Token,
    /// The same, drawn from a key by position: made of all tokens, and taken part by part.
    Drawn,
    /// A sum over tokens, or what is linear in one.
    Sum,
}

/// How the head of `module` is cut into `n` parts; declares the parts in `space`.
///
/// # Errors
/// `P57` when `loss` is no sum over tokens that a function of its own computes, or tokens do not divide.
pub(super) fn of(
    module: &Module,
    (main, loss): (FuncId, ValueId),
    n: u64,
    space: &mut Space,
) -> Result<Chunked, OpError> {
    let refuse =
        |what: &str| OpError::new("P57", format!("the loss cannot be computed in {n} parts: {what}"));
    let calls = || module.functions.values().flat_map(|f| &f.nodes);
    let made = module.functions[main].nodes.iter().find(|node| node.results.contains(&loss));
    let head = match made.map(|node| &node.op) {
        Some(Op::Call { callee, layers, scan: None, .. }) if layers.end - layers.start == 1 => *callee,
        _ => return Err(refuse("no function gives it to `@main`")),
    };
    let called = |node: &&Node| matches!(node.op, Op::Call { callee, .. } if callee == head);
    if calls().filter(called).count() != 1 || module.functions[head].outputs.len() != 1 {
        return Err(refuse("the function that gives it gives something else too, or runs twice"));
    }
    let function = &module.functions[head];
    let labels = function.nodes.iter().find_map(|node| match node.op {
        Op::Loss(Loss::CrossEntropy { .. }) => function.ty(node.operands[1]).dims.last().copied(),
        _ => None,
    });
    let tokens = labels.ok_or_else(|| refuse("its labels are those of no tokens"))?;
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
        let mut part = format!("{name}_{index}");
        while space.dim(&part).is_some() {
            part.push('_');
        }
        let of = Part { of: tokens, index, count: n, runs: size / n };
        space.dims.push(Dim { part: Some(of), ..Dim::new(part, size / n) })
    };
    let parts = (0..n).map(|index| part(space, index)).collect();
    Ok(Chunked { head, tokens, parts, kinds })
}

/// The kinds of a function's values.
///
/// # Errors
/// `P57` when tokens meet before the sum, or what it returns is not linear in a sum over tokens.
fn kinds(function: &Function, tokens: DimId) -> Result<Vec<Kind>, OpError> {
    let refuse = |node: &Node| {
        let message = format!(
            "the loss cannot be computed in parts: `{}` of `@{}` does not go token by token",
            node.op.name(),
            function.name
        );
        OpError::new("P57", message)
    };
    let of_type = |v: ValueId| if function.ty(v).has(tokens) { Kind::Token } else { Kind::Shared };
    let mut kinds = vec![Kind::Shared; function.values.len()];
    for &param in &function.params {
        kinds[param.index()] = of_type(param);
    }
    for node in &function.nodes {
        let by_token = |v: &ValueId| match kinds[v.index()] {
            Kind::Drawn => Kind::Token,
            kind => kind,
        };
        let of: Vec<Kind> = node.operands.iter().map(by_token).collect();
        let results: Vec<Kind> = node.results.iter().map(|&v| of_type(v)).collect();
        let kind = if of.contains(&Kind::Sum) {
            match (&node.op, &of[..]) {
                (Op::Cast { .. } | Op::Scale { .. }, [Kind::Sum])
                | (Op::Binary(Binary::Div), [Kind::Sum, Kind::Shared]) => Kind::Sum,
                _ => return Err(refuse(node)),
            }
        } else if of.contains(&Kind::Token) {
            match (&node.op, &results[..]) {
                (Op::Sum, [Kind::Shared]) => Kind::Sum,
                _ if goes_by_token(function, node, tokens) => Kind::Token,
                _ => return Err(refuse(node)),
            }
        } else {
            match (&node.op, results.iter().all(|&kind| kind == Kind::Shared)) {
                (Op::Random(Random::DropoutMask { .. }), false) => Kind::Drawn,
                (op, true) if !writes(op) => Kind::Shared,
                _ => return Err(refuse(node)),
            }
        };
        node.results.iter().for_each(|v| kinds[v.index()] = kind);
    }
    match function.outputs.iter().all(|o| kinds[o.value.index()] == Kind::Sum) {
        true => Ok(kinds),
        false => Err(OpError::new(
            "P57",
            format!(
                "the loss cannot be computed in parts: what `@{}` gives is no sum over tokens",
                function.name
            ),
        )),
    }
}

fn writes(op: &Op) -> bool {
    matches!(op, Op::Assign { .. } | Op::State(_) | Op::Call { .. })
}

/// Whether tokens are a parallel factor of every result.
fn goes_by_token(function: &Function, node: &Node, tokens: DimId) -> bool {
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

/// Gradients of one run of tokens, by old value.
struct Gradients<'a> {
    chunked: &'a Chunked,
    /// Of what differs from part to part.
    own: Tape,
    /// Of what all parts share, in full precision.
    shared: Tape,
}

impl Gradients<'_> {
    fn add(&mut self, b: &mut FunctionBuilder<'_>, old: ValueId, gradient: ValueId) -> Result<(), OpError> {
        match self.chunked.kinds[old.index()] {
            Kind::Token | Kind::Drawn | Kind::Sum => self.own.add(b, old, gradient),
            Kind::Shared => {
                let dtype = b.ty(gradient).dtype;
                let gradient = match wide(dtype) == dtype {
                    true => gradient,
                    false => b.push(Op::Cast { to: wide(dtype) }, &[gradient])?,
                };
                self.shared.add(b, old, gradient)
            }
        }
    }

    /// The adjoint of a node with these gradients of its results.
    fn adjoint(
        &mut self,
        b: &mut FunctionBuilder<'_>,
        node: &Node,
        map: &[Option<ValueId>],
        gradients: &[Option<ValueId>],
        is_active: impl Fn(ValueId) -> bool,
    ) -> Result<(), OpError> {
        if gradients.iter().all(Option::is_none) || !node.operands.iter().any(|&v| is_active(v)) {
            return Ok(());
        }
        let new = |v: &ValueId| map[v.index()].expect("what ran has values");
        let operands: Vec<ValueId> = node.operands.iter().map(new).collect();
        let results: Vec<ValueId> = node.results.iter().map(new).collect();
        let contributions = node.op.adjoint(b, &operands, &results, gradients)?;
        for (&operand, contribution) in node.operands.iter().zip(contributions) {
            if let Some(contribution) = contribution.filter(|_| is_active(operand)) {
                self.add(b, operand, contribution)?;
            }
        }
        Ok(())
    }
}

/// The head: its forward half gives the loss and, behind it, the gradients of its arguments; nothing is left to its backward
/// half.
///
/// # Errors
/// An operation that has no adjoint.
pub(super) fn halves(
    space: &Space,
    source: &Function,
    chunked: &Chunked,
    activity: &Activity,
    kept: impl Fn(&Binding) -> Kept,
) -> Result<Halves, OpError> {
    let none = Arena::new();
    let is_active = |v: ValueId| activity.is_active(chunked.head, v);
    let kind = |v: ValueId| chunked.kinds[v.index()];
    let kind_of = |node: &Node| node.results.first().map_or(Kind::Shared, |&v| kind(v));
    let sums_tokens =
        |node: &Node| kind_of(node) == Kind::Sum && node.operands.iter().any(|&v| kind(v) == Kind::Token);
    let mut b = FunctionBuilder::like(source, space, &none);
    let mut map: Vec<Option<ValueId>> = vec![None; source.values.len()];
    for &param in &source.params {
        map[param.index()] = Some(b.param(source.ty(param).clone(), source.values[param].name.as_deref()));
    }
    for node in source.nodes.iter().filter(|n| matches!(kind_of(n), Kind::Shared | Kind::Drawn)) {
        copy_node(&mut b, source, node, &mut map)?;
    }
    let mut gradients =
        Gradients { chunked, own: Tape::new(source.values.len()), shared: Tape::new(source.values.len()) };

    // What flows into the sums over tokens is known before they are: all behind them is linear.
    let output = source.outputs[0].value;
    let one = b.push_as(Op::Fill { value: 1.0 }, &[], source.ty(output).clone())?;
    gradients.own.set(output, one);
    for node in source.nodes.iter().rev().filter(|n| kind_of(n) == Kind::Sum && !sums_tokens(n)) {
        let Some(d) = gradients.own.of(node.result()) else { continue };
        let operand = node.operands[0];
        let d = match &node.op {
            Op::Binary(Binary::Div) => {
                let by = map[node.operands[1].index()].expect("what is shared was computed");
                b.push(Op::Binary(Binary::Div), &[d, by])?
            }
            Op::Cast { .. } => b.push(Op::Cast { to: source.ty(operand).dtype }, &[d])?,
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

    let by_token = |n: &&Node| kind_of(n) == Kind::Token || sums_tokens(n);
    let mut sums: Vec<Option<ValueId>> = vec![None; source.values.len()];
    let mut of_parts: Vec<Vec<Option<ValueId>>> = Vec::new();
    for &part in &chunked.parts {
        let mut own = map.clone();
        for v in source.values.ids() {
            let is_argument = kind(v) == Kind::Token && source.params.contains(&v);
            if let (true, Some(whole)) = (is_argument || kind(v) == Kind::Drawn, map[v.index()]) {
                own[v.index()] = Some(b.push(Op::Take { to: part }, &[whole])?);
            }
        }
        for node in source.nodes.iter().filter(by_token) {
            part_node(&mut b, source, node, (chunked.tokens, part), &mut own)?;
        }
        for node in source.nodes.iter().filter(|n| sums_tokens(n)) {
            let old = node.result();
            let new = own[old.index()].expect("the part was summed");
            sums[old.index()] = Some(match sums[old.index()] {
                None => new,
                Some(sum) => b.push(Op::Binary(Binary::Add), &[sum, new])?,
            });
        }
        gradients.own = Tape::new(source.values.len());
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

    for (slot, sum) in map.iter_mut().zip(&sums) {
        *slot = slot.or(*sum);
    }
    for node in source.nodes.iter().filter(|n| kind_of(n) == Kind::Sum && !sums_tokens(n)) {
        copy_node(&mut b, source, node, &mut map)?;
    }
    let mut weights: Vec<(&Binding, ValueId)> = Vec::new();
    for node in source.nodes.iter().rev().filter(|n| kind_of(n) == Kind::Shared) {
        let found: Vec<Option<ValueId>> = node.results.iter().map(|&r| gradients.shared.of(r)).collect();
        if let (Op::Param(binding), &[Some(gradient)]) = (&node.op, &found[..]) {
            match weights.iter_mut().find(|(known, _)| *known == binding) {
                None => weights.push((binding, gradient)),
                Some((_, sum)) => *sum = b.push(Op::Binary(Binary::Add), &[*sum, gradient])?,
            }
            continue;
        }
        let mut narrow = Vec::with_capacity(found.len());
        for (&result, gradient) in node.results.iter().zip(found) {
            narrow.push(match gradient {
                None => None,
                Some(gradient) => Some(in_type(&mut b, source.ty(result), gradient)?),
            });
        }
        gradients.adjoint(&mut b, node, &map, &narrow, is_active)?;
    }
    for (binding, gradient) in weights {
        keep(&mut b, binding, gradient, kept(binding))?;
    }

    let mut outputs = vec![Output { name: None, value: map[output.index()].expect("the loss was computed") }];
    let mut gives = Vec::new();
    for (i, &param) in source.params.iter().enumerate().filter(|&(_, &p)| is_active(p)) {
        let gradient = match kind(param) {
            Kind::Token | Kind::Drawn | Kind::Sum => {
                let parts: Option<Vec<ValueId>> = of_parts.iter().map(|part| part[i]).collect();
                match parts {
                    None => continue,
                    Some(parts) => b.push(Op::Join { to: chunked.tokens }, &parts)?,
                }
            }
            Kind::Shared => match gradients.shared.of(param) {
                None => continue,
                Some(gradient) => in_type(&mut b, source.ty(param), gradient)?,
            },
        };
        gives.push(i);
        outputs.push(Output { name: None, value: gradient });
    }
    let forward = pruned(space, &b.finish(outputs))?;
    let (seeds, sums, again) = (Vec::new(), Vec::new(), Vec::new());
    Ok(Halves { forward, backward: Function::default(), n_results: 1, seeds, sums, again, gives })
}

/// A gradient in the type of what it is a gradient of.
fn in_type(b: &mut FunctionBuilder<'_>, ty: &TensorType, gradient: ValueId) -> Result<ValueId, OpError> {
    match b.ty(gradient).dtype == ty.dtype {
        true => Ok(gradient),
        false => b.push(Op::Cast { to: ty.dtype }, &[gradient]),
    }
}

/// A node on one part of the tokens.
fn part_node(
    b: &mut FunctionBuilder<'_>,
    source: &Function,
    node: &Node,
    (tokens, part): (DimId, DimId),
    map: &mut [Option<ValueId>],
) -> Result<(), OpError> {
    let known = |v: &ValueId| map[v.index()].expect("what a node reads was put before it");
    let operands: Vec<ValueId> = node.operands.iter().map(known).collect();
    let declared: Vec<TensorType> = node
        .results
        .iter()
        .map(|&v| {
            let mut ty = source.ty(v).clone();
            ty.dims.iter_mut().filter(|d| **d == tokens).for_each(|d| *d = part);
            ty
        })
        .collect();
    let results = b.node(node.op.clone(), &operands, &declared)?;
    let at = b.space().dims[part].part.map_or(0, |part| part.index);
    for (&old, &new) in node.results.iter().zip(&results) {
        let name = source.values[old].name.as_deref().map(|name| format!("{name}_{at}"));
        b.name(new, name.as_deref());
        map[old.index()] = Some(new);
    }
    Ok(())
}

/// The function without what nobody reads.
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
    let mut map: Vec<Option<ValueId>> = vec![None; function.values.len()];
    for &param in &function.params {
        map[param.index()] =
            Some(b.param(function.ty(param).clone(), function.values[param].name.as_deref()));
    }
    for (node, _) in function.nodes.iter().zip(&runs).filter(|&(_, &runs)| runs) {
        copy_node(&mut b, function, node, &mut map)?;
    }
    let output = |o: &Output| Output {
        name: None,
        value: map[o.value.index()].expect("what is returned is computed"),
    };
    Ok(b.finish(function.outputs.iter().map(output).collect::<Vec<_>>()))
}
