//! Builds the replacement of a match: new operations with their types, or the reason of a refusal.

use std::collections::{BTreeMap, BTreeSet};

use ithaca_ir::ops::{Attrs, Context};
use ithaca_ir::text::show;
use ithaca_ir::{Layout, Level, Op, Space, TensorType, ValueId};

use super::matching::{Bindings, Program, value};
use super::syntax::{App, Pattern, Rest, Rule};

/// New operations in order, and the values of the replaced results.
#[derive(Debug, Default)]
pub(crate) struct Replacement {
    pub(crate) nodes: Vec<NewNode>,
    pub(crate) results: Vec<Place>,
}

/// An operation to add.
#[derive(Debug)]
pub(crate) struct NewNode {
    pub(crate) op: Op,
    pub(crate) operands: Vec<Place>,
    /// The types of its results.
    pub(crate) types: Vec<TensorType>,
}

/// An existing value, or a result of a new operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Value(ValueId),
    New(usize, usize),
}

impl Place {
    /// The value of the place: an existing one, or one of the results of new operations.
    pub(crate) fn of<T: Copy>(self, existing: impl FnOnce(ValueId) -> T, results: &[Vec<T>]) -> T {
        match self {
            Place::Value(value) => existing(value),
            Place::New(node, i) => results[node][i],
        }
    }
}

/// Why a match is not replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RewriteFailure {
    /// The replacement breaks an invariant here.
    Illegal(String),
    /// The replacement has results of other types.
    TypeMismatch(String),
}

/// The context of a replacement.
#[derive(Clone, Copy)]
pub(crate) struct Site<'a> {
    pub(crate) cx: Context<'a>,
    pub(crate) level: Level,
    pub(crate) program: &'a dyn Program,
}

/// The replacement of a match whose results have the types `wanted`.
///
/// Inference gives the types of new operations. For `einsum`, `reshard` and `permute` the last operation has the types
/// of the replaced results; an operation below it has the layout of that result for common dimensions, and the other
/// dimensions keep their layout. A reshard that changes nothing is not made.
pub(crate) fn replacement(
    rule: &Rule,
    bindings: &Bindings,
    site: Site<'_>,
    wanted: &[TensorType],
) -> Result<Replacement, RewriteFailure> {
    let Some(first) = wanted.first() else {
        return Err(RewriteFailure::Illegal("there is no result".to_owned()));
    };
    let mut maker =
        ReplacementBuilder { bindings, site, made: BTreeMap::new(), replacement: Replacement::default() };
    let mut results = Vec::new();
    for (i, pattern) in rule.right.iter().enumerate() {
        let app = match pattern {
            Pattern::Value(name) => {
                results.push(Place::Value(bindings.values[&name.text]));
                continue;
            }
            Pattern::App(app) => app,
        };
        let like = wanted.get(i).unwrap_or(first);
        match maker.app(app, &ExpectedType { like, is_result: true })? {
            Place::New(node, 0) if rule.right.len() == 1 && wanted.len() > 1 && app.result == 0 => {
                results.extend((0..maker.replacement.nodes[node].types.len()).map(|i| Place::New(node, i)));
            }
            place => results.push(place),
        }
    }
    let space = site.cx.space;
    let spelled = |types: &[TensorType]| {
        let types: Vec<String> = types.iter().map(|ty| show(space, ty).to_string()).collect();
        types.join(", ")
    };
    let types: Vec<TensorType> =
        results.iter().map(|&place| maker.ty(place)).collect::<Result<_, RewriteFailure>>()?;
    if types != wanted {
        let message = format!("the replacement gives {} in place of {}", spelled(&types), spelled(wanted));
        return Err(RewriteFailure::TypeMismatch(message));
    }
    maker.replacement.results = results;
    Ok(maker.replacement)
}

/// The expected type of a new value.
#[derive(Clone, Copy)]
struct ExpectedType<'a> {
    like: &'a TensorType,
    /// Whether the type must match, or only the layout.
    is_result: bool,
}

struct ReplacementBuilder<'a> {
    bindings: &'a Bindings,
    site: Site<'a>,
    /// The operations made so far; equal patterns become one operation.
    made: BTreeMap<String, Place>,
    replacement: Replacement,
}

impl ReplacementBuilder<'_> {
    fn ty(&self, place: Place) -> Result<TensorType, RewriteFailure> {
        match place {
            Place::Value(v) => Ok(self.site.program.type_of(v).clone()),
            Place::New(node, i) => {
                let node = &self.replacement.nodes[node];
                let illegal = || RewriteFailure::Illegal(format!("`{}` has no result {i}", node.op.name()));
                node.types.get(i).cloned().ok_or_else(illegal)
            }
        }
    }

    /// The requested result of an operation.
    fn app(&mut self, app: &App, expected: &ExpectedType<'_>) -> Result<Place, RewriteFailure> {
        let meant = |place: Place| match place {
            Place::New(node, _) => Place::New(node, app.result),
            Place::Value(v) => Place::Value(v),
        };
        let key = app.key();
        if let Some(&place) = self.made.get(&key) {
            return Ok(meant(place));
        }
        let mut operands = Vec::new();
        for pattern in &app.operands {
            operands.push(match pattern {
                Pattern::Value(name) => Place::Value(self.bindings.values[&name.text]),
                Pattern::App(app) => {
                    self.app(app, &ExpectedType { like: expected.like, is_result: false })?
                }
            });
        }
        let types: Vec<TensorType> =
            operands.iter().map(|&place| self.ty(place)).collect::<Result<_, RewriteFailure>>()?;
        let op = self.op(app)?;
        let like = app.like.as_ref().map(|name| self.site.program.type_of(self.bindings.values[&name.text]));
        let expected = like.map_or(*expected, |like| ExpectedType { like, is_result: false });
        let results = self.types_of(&op, &types, &expected)?;
        let moves = matches!(op, Op::Reshard | Op::Permute) && !expected.is_result;
        let place = if moves && results == types {
            operands[0]
        } else {
            self.replacement.nodes.push(NewNode { op, operands, types: results });
            Place::New(self.replacement.nodes.len() - 1, 0)
        };
        self.made.insert(key, place);
        Ok(meant(place))
    }

    fn op(&self, app: &App) -> Result<Op, RewriteFailure> {
        let mut attrs = Vec::new();
        for (key, term) in &app.attrs {
            let computed = value(term, self.bindings);
            let attr =
                computed.ok_or_else(|| RewriteFailure::Illegal(format!("`{term}` is no number here")))?;
            attrs.push((key.text.clone(), attr));
        }
        if let Rest::Bound(name) = &app.rest {
            for (key, attr) in &self.bindings.rests[&name.text] {
                if !attrs.iter().any(|(known, _)| known == key) {
                    attrs.push((key.clone(), attr.clone()));
                }
            }
        }
        match Op::from_attrs(&app.op, Attrs::new(app.op.as_str(), attrs), self.site.cx.names()) {
            Some(Ok(op)) => Ok(op),
            Some(Err(message)) => Err(RewriteFailure::Illegal(message)),
            None => Err(RewriteFailure::Illegal(format!("there is no operation `{}`", app.op))),
        }
    }

    fn types_of(
        &self,
        op: &Op,
        operands: &[TensorType],
        expected: &ExpectedType<'_>,
    ) -> Result<Vec<TensorType>, RewriteFailure> {
        let illegal = |message: String| Err(RewriteFailure::Illegal(message));
        let reshards = matches!(op, Op::Reshard);
        let admitted = match self.site.level {
            Level::Program => !op.is_layout_change(),
            Level::Sharded => true,
            Level::PerRank => !reshards,
        };
        if !admitted {
            let level = self.site.level.name();
            return illegal(format!("`{}` is not legal in a {level} program", op.name()));
        }
        let declared: Vec<TensorType> = match (op, operands) {
            _ if expected.is_result => vec![expected.like.clone()],
            (Op::Reshard | Op::Permute, [x]) => vec![laid_out_like(x, expected.like)],
            (Op::Einsum, [x, y]) => vec![self.product(x, y, expected.like)],
            _ => Vec::new(),
        };
        let cx = self.site.cx;
        let refs: Vec<&TensorType> = operands.iter().collect();
        match op.infer(cx, &refs, &declared) {
            Err(error) => illegal(error.message),
            Ok(types) => match types.iter().find(|ty| !is_sound(cx.space, ty)) {
                Some(ty) => illegal(format!("{} is no type", show(cx.space, ty))),
                None => Ok(types.into_vec()),
            },
        }
    }

    /// The product of `x` and `y` over the dimensions that no other value of the match has.
    fn product(&self, x: &TensorType, y: &TensorType, like: &TensorType) -> TensorType {
        let operands = [x, y];
        let elsewhere = |d| {
            let mut types = self.bindings.values.values().map(|&v| self.site.program.type_of(v));
            types.any(|ty| ty.has(d) && !operands.contains(&ty))
        };
        let own = |d| x.has(d) || y.has(d);
        let mut dims: Vec<_> = like.dims.iter().copied().filter(|&d| own(d)).collect();
        for d in x.dims.iter().chain(&y.dims).copied().filter(|&d| elsewhere(d)) {
            if !dims.contains(&d) {
                dims.push(d);
            }
        }
        TensorType::new(x.dtype, dims)
    }
}

/// `x` with the layout and the pending sums of `like` for common dimensions.
fn laid_out_like(x: &TensorType, like: &TensorType) -> TensorType {
    let mut layout = Layout::whole(x.dims.len());
    for (i, &d) in x.dims.iter().enumerate() {
        layout.split[i] = if like.has(d) { like.axes_of(d).into() } else { x.layout.split[i].clone() };
    }
    layout.partial = x.layout.partial.iter().copied().filter(|a| like.layout.partial.contains(a)).collect();
    x.with_layout(layout)
}

/// Whether dimensions and axes are distinct, and every split is legal.
fn is_sound(space: &Space, ty: &TensorType) -> bool {
    let (dims, axes): (BTreeSet<_>, BTreeSet<_>) = (ty.dims.iter().collect(), ty.layout.axes().collect());
    dims.len() == ty.dims.len()
        && axes.len() == ty.layout.axes().count()
        && ty.dims.iter().zip(&ty.layout.split).all(|(&d, axes)| space.can_split(d, axes))
}
