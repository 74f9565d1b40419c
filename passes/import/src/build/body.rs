//! A program under construction, and the parts that functions of all models share: weights as the library stores them,
//! products, norms, rotary positions, residual branches.

use std::ops::{Deref, DerefMut, Range};

use ithaca_ir::entity::Arena;
use ithaca_ir::module::Output;
use ithaca_ir::ops::{Binary, Binding, Cache, Direction, OpError, Rotary, Unary, cast, sums_in};
use ithaca_ir::{
    DType, DimId, FuncId, Function, FunctionBuilder, Level, Module, Op, Space, TensorType, ValueId,
};

use super::dims::PageDims;
use super::drops::{Drops, Key};
use crate::spec::{Growth, NormForm, RotarySpec};
use crate::workload::Logits;

/// A part of a program, or the invariant of the language that it would break.
pub(super) type Built<T> = Result<T, OpError>;

/// A program under construction.
pub(super) struct Program {
    pub(super) space: Space,
    pub(super) tensors: Tensors,
    pub(super) drops: Drops,
    functions: Arena<FuncId, Function>,
}

/// The storage of a model's tensors: heads and head width form one stored dimension.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tensors {
    /// The element type of weights and activations.
    pub(super) dtype: DType,
    /// The element type of caches.
    pub(super) cache: DType,
    /// Dimensions of query heads and key/value heads.
    pub(super) heads: [DimId; 2],
    /// The dimension of a head's width.
    pub(super) width: DimId,
    /// Whether matrices are stored `[input, output]`.
    pub(super) input_major: bool,
}

impl Program {
    pub(super) fn new(space: Space, tensors: Tensors, drops: Drops) -> Self {
        Self { space, tensors, drops, functions: Arena::new() }
    }

    /// Adds a function whose body `write` builds; it returns the outputs.
    pub(super) fn function<O: IntoIterator<Item = Output>>(
        &mut self,
        name: impl Into<String>,
        write: impl FnOnce(&mut Body<'_>) -> Built<O>,
    ) -> Built<FuncId> {
        let builder = FunctionBuilder::new(name, &self.space, &self.functions);
        let mut body =
            Body { builder, tensors: self.tensors, drops: &self.drops, key: None, continued: None };
        let outputs = write(&mut body)?;
        let function = body.builder.finish(outputs);
        Ok(self.functions.push(function))
    }

    /// The program, called `name`.
    pub(super) fn finish(self, name: &str) -> Module {
        let Self { space, functions, .. } = self;
        Module { level: Level::Program, name: name.to_owned(), pipeline: Vec::new(), space, functions }
    }
}

/// A function of a model under construction.
pub(super) struct Body<'a> {
    builder: FunctionBuilder<'a>,
    pub(super) tensors: Tensors,
    pub(super) drops: &'a Drops,
    /// The key of the function's dropout.
    pub(super) key: Key,
    /// Where the function continues sequences.
    pub(super) continued: Option<Continued>,
}

impl<'a> Deref for Body<'a> {
    type Target = FunctionBuilder<'a>;

    fn deref(&self) -> &Self::Target {
        &self.builder
    }
}

impl DerefMut for Body<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.builder
    }
}

/// The number of tokens of each sequence before a step and after it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Continued {
    pub(super) start: ValueId,
    pub(super) end: ValueId,
    /// The pages of each sequence, of caches in pages.
    pub(super) table: Option<(ValueId, PageDims)>,
}

/// A matrix from dimensions `from` to dimensions `to`, with or without a bias.
#[derive(Clone, Copy)]
pub(super) struct Linear<'a> {
    /// The name of the module that holds `weight` and `bias`.
    pub(super) name: &'a str,
    pub(super) to: &'a [DimId],
    pub(super) from: &'a [DimId],
    pub(super) bias: bool,
}

/// A part of a stored tensor.
#[derive(Clone, Debug, Default)]
pub(super) struct Stored {
    /// The stored shape.
    pub(super) shape: Vec<u64>,
    /// The shape in which the window is taken; the stored one when empty.
    pub(super) view: Vec<u64>,
    /// The part that the weight is; all of it when empty.
    pub(super) window: Vec<Range<u64>>,
}

impl Stored {
    /// A window of a tensor of this shape.
    pub(super) fn part<const N: usize>(shape: [u64; N], window: [Range<u64>; N]) -> Self {
        Self { shape: shape.to_vec(), view: Vec::new(), window: window.to_vec() }
    }

    /// The same window of a tensor that is stored in another shape.
    pub(super) fn in_tensor<const N: usize>(self, stored: [u64; N]) -> Self {
        Self { view: self.shape, shape: stored.to_vec(), ..self }
    }
}

impl Body<'_> {
    /// A parameter of the model's element type.
    pub(super) fn stream(&mut self, dims: &[DimId], name: &str) -> ValueId {
        let ty = self.ty_of(dims);
        self.param(ty, Some(name))
    }

    fn ty_of(&self, dims: &[DimId]) -> TensorType {
        TensorType::new(self.tensors.dtype, dims.iter().copied())
    }

    /// The input `name` of `@main`: token ids.
    pub(super) fn input(&mut self, name: &str, dims: [DimId; 2]) -> Built<ValueId> {
        let ids = self.push_as(Op::Input(Binding::named(name)), &[], TensorType::new(DType::I32, dims))?;
        self.name(ids, Some(name));
        Ok(ids)
    }

    /// The positions of tokens.
    pub(super) fn positions(&mut self, tokens: DimId) -> Built<ValueId> {
        let positions = match self.continued {
            None => self.push_as(Op::Positions { padding: 0 }, &[], TensorType::new(DType::I32, [tokens]))?,
            Some(Continued { start, end, .. }) => {
                self.push(Op::Cache(Cache::TokenPositions { rows: tokens }), &[start, end])?
            }
        };
        self.name(positions, Some("positions"));
        Ok(positions)
    }

    /// A weight whose stored shape follows from its dimensions; heads and head width are one stored dimension.
    pub(super) fn weight(&mut self, name: &str, dims: &[DimId]) -> Built<ValueId> {
        let mut shape: Vec<u64> = Vec::new();
        let mut heads = None;
        for &dim in dims {
            let size = self.space().size(dim);
            match heads.take() {
                Some(n) if dim == self.tensors.width => {
                    shape.pop();
                    shape.push(n * size);
                }
                _ => shape.push(size),
            }
            if self.tensors.heads.contains(&dim) {
                heads = Some(size);
            }
        }
        self.stored(name, Stored { shape, ..Stored::default() }, dims)
    }

    /// A weight that is a part of a stored tensor.
    pub(super) fn stored(&mut self, name: &str, stored: Stored, dims: &[DimId]) -> Built<ValueId> {
        let Stored { shape, view, window } = stored;
        let ty = self.ty_of(dims);
        // An empty shape means the shape of the type.
        let stored = if shape == self.space().shape(&ty) { Vec::new() } else { shape };
        self.builder.weight(Binding { stored, view, window, ..Binding::named(name) }, ty)
    }

    /// Rows of the embedding's table `name`, selected by `ids`.
    pub(super) fn embed(
        &mut self,
        name: &str,
        dims: [DimId; 2],
        padding: Option<u64>,
        ids: ValueId,
    ) -> Built<ValueId> {
        let table = self.weight(name, &dims)?;
        self.push(Op::Embed { over: dims[0], padding }, &[table, ids])
    }

    /// The tokens of `x` whose logits are returned: all, or the last along `tokens`.
    pub(super) fn with_logits(&mut self, logits: Logits, x: ValueId, tokens: DimId) -> Built<ValueId> {
        match (logits, self.continued) {
            (Logits::All, _) => Ok(x),
            (Logits::Last, Some(Continued { start, end, .. })) => {
                self.push(Op::Cache(Cache::LastToken { over: tokens }), &[x, start, end])
            }
            (Logits::Last, None) => {
                let position = self.space().size(tokens) - 1;
                self.push(Op::Select { over: tokens, position }, &[x])
            }
        }
    }

    /// Ones.
    pub(super) fn one(&mut self, dims: &[DimId]) -> Built<ValueId> {
        let (scalar, ty) = (self.ty_of(&[]), self.ty_of(dims));
        let one = self.push_as(Op::Fill { value: 1.0 }, &[], scalar)?;
        if dims.is_empty() { Ok(one) } else { self.push_as(Op::Expand, &[one], ty) }
    }

    /// The sum of products over the dimensions that both have; the other dimensions of `x` come first.
    pub(super) fn product(&mut self, x: ValueId, weight: ValueId) -> Built<ValueId> {
        let (x_dims, weight_dims) = (&self.ty(x).dims, &self.ty(weight).dims);
        let kept = x_dims.iter().filter(|d| !weight_dims.contains(d));
        let new = weight_dims.iter().filter(|d| !x_dims.contains(d));
        let dims: Vec<DimId> = kept.chain(new).copied().collect();
        self.einsum(x, weight, &dims)
    }

    /// A matrix applied to `x`.
    pub(super) fn linear(&mut self, x: ValueId, linear: Linear<'_>) -> Built<ValueId> {
        let Linear { name, to, from, bias } = linear;
        let dims = if self.tensors.input_major { [from, to] } else { [to, from] };
        let weight = self.weight(&format!("{name}.weight"), &dims.concat())?;
        let y = self.product(x, weight)?;
        if !bias {
            return Ok(y);
        }
        let bias = self.weight(&format!("{name}.bias"), to)?;
        self.add(y, bias)
    }

    /// `activation(gate) · up`.
    pub(super) fn gated(&mut self, activation: Unary, gate: ValueId, up: ValueId) -> Built<ValueId> {
        let gate = self.push(Op::Unary(activation), &[gate])?;
        self.push(Op::Binary(Binary::Mul), &[gate, up])
    }

    /// The norm of module `name`.
    pub(super) fn norm(
        &mut self,
        (form, eps): (NormForm, f64),
        x: ValueId,
        name: &str,
        over: DimId,
    ) -> Built<ValueId> {
        let weight = self.weight(&format!("{name}.weight"), &[over])?;
        match form {
            NormForm::Rms { offset } => self.push(Op::RmsNorm { over, eps, offset }, &[x, weight]),
            NormForm::Layer => {
                let bias = self.weight(&format!("{name}.bias"), &[over])?;
                self.push(Op::LayerNorm { over, eps }, &[x, weight, bias])
            }
        }
    }

    /// Queries and keys, rotated by the positions of their tokens if there are rotary positions.
    pub(super) fn rotate(
        &mut self,
        rotary: Option<&RotarySpec>,
        (over, tokens): (DimId, DimId),
        [q, k]: [ValueId; 2],
    ) -> Built<[ValueId; 2]> {
        let Some(RotarySpec { width, theta, scaling, pairs }) = rotary.cloned() else { return Ok([q, k]) };
        let positions = self.positions(tokens)?;
        let op = Op::Rotary(Rotary { over, width, theta, scaling, pairs, turn: Direction::Forward });
        Ok([self.push(op.clone(), &[q, positions])?, self.push(op, &[k, positions])?])
    }

    /// `x` times a number; x itself for 1.
    pub(super) fn times(&mut self, x: ValueId, factor: f64) -> Built<ValueId> {
        if factor == 1.0 { Ok(x) } else { self.push(Op::Scale { factor }, &[x]) }
    }

    /// Queries that grow with their positions.
    pub(super) fn grown(&mut self, q: ValueId, growth: Growth, tokens: DimId) -> Built<ValueId> {
        let (dtype, wide) = (self.tensors.dtype, sums_in(self.tensors.dtype));
        let positions = self.positions(tokens)?;
        let positions = cast(self, positions, wide)?;
        let mut number = |value: f64| self.push_as(Op::Fill { value }, &[], TensorType::new(wide, []));
        let (one, step) = (number(1.0)?, number(growth.step as f64)?);
        let ordinal = self.add(positions, one)?;
        let steps = self.push(Op::Binary(Binary::Div), &[ordinal, step])?;
        let whole = self.push(Op::Cast { to: DType::I32 }, &[steps])?;
        let whole = cast(self, whole, wide)?;
        let logarithm = self.push(Op::Unary(Unary::Symlog), &[whole])?;
        let factor = self.push(Op::Scale { factor: growth.scale }, &[logarithm])?;
        let factor = self.add(factor, one)?;
        self.name(factor, Some("growth"));
        let q = cast(self, q, wide)?;
        let grown = self.push(Op::Binary(Binary::Mul), &[q, factor])?;
        cast(self, grown, dtype)
    }

    /// The only output of a function, named `name` within it.
    pub(super) fn returns(&mut self, value: ValueId, name: &str) -> Built<[Output; 1]> {
        self.name(value, Some(name));
        Ok([Output { name: None, value }])
    }

    /// The output `name` of the model.
    pub(super) fn result(&mut self, value: ValueId, name: &str) -> Output {
        self.name(value, Some(name));
        Output { name: Some(name.to_owned()), value }
    }
}
