//! Parts of expressions of PyTorch: sums of products, operands in the order of others, attributes, functions and types.

use ithaca_ir::ops::attr::Names;
use ithaca_ir::ops::{Attr, Unary};
use ithaca_ir::{DType, DimId, Node, TensorType};

use super::function::Scope;
use super::python::{literal, real, string, tuple};

impl Scope<'_> {
    /// The names of a type's dimensions.
    pub(super) fn dims(&self, ty: &TensorType) -> String {
        let names: Vec<&str> = ty.dims.iter().map(|&d| self.module.space.dims[d].name.as_str()).collect();
        names.join(" ")
    }

    /// A sum of products, dimensions as letters: their own names where these are letters.
    pub(super) fn einsum(
        &self,
        operands: &[&TensorType],
        result: &TensorType,
        variables: &[String],
    ) -> String {
        let mut letters: Vec<(DimId, char)> = Vec::new();
        let all =
            || operands.iter().flat_map(|ty| ty.dims.iter().copied()).chain(result.dims.iter().copied());
        let own = |d: DimId| match self.module.space.dims[d].name.as_bytes() {
            [c] if c.is_ascii_alphabetic() => Some(char::from(*c)),
            _ => None,
        };
        let taken: Vec<char> = all().filter_map(own).collect();
        for d in all() {
            if letters.iter().all(|(known, _)| *known != d) {
                let is_free = |c: &char| !taken.contains(c) && letters.iter().all(|(_, used)| used != c);
                let letter = own(d).or_else(|| ('a'..='z').chain('A'..='Z').find(is_free));
                letters.push((d, letter.unwrap_or('_')));
            }
        }
        let word = |ty: &TensorType| -> String {
            ty.dims
                .iter()
                .filter_map(|d| letters.iter().find(|(known, _)| known == d))
                .map(|(_, c)| *c)
                .collect()
        };
        let inputs: Vec<String> = operands.iter().map(|ty| word(ty)).collect();
        let wider = if operands[0].dtype == result.dtype {
            String::new()
        } else {
            format!(", dtype={}", dtype(result.dtype))
        };
        format!("einsum(\"{}->{}\", {}{wider})", inputs.join(","), word(result), variables.join(", "))
    }

    /// An operand with its dimensions where those of another have them.
    pub(super) fn aligned(&self, variable: &str, ty: &TensorType, like: &TensorType) -> String {
        if like.dims.ends_with(&ty.dims) {
            return variable.to_owned();
        }
        let places: Vec<usize> = ty.dims.iter().filter_map(|&d| like.position(d)).collect();
        if !places.is_sorted() {
            return format!("align({variable}, {}, {})", string(&self.dims(ty)), string(&self.dims(like)));
        }
        let first = like.dims.iter().position(|&d| ty.has(d)).unwrap_or_default();
        let index = like.dims[first..].iter().map(|&d| if ty.has(d) { ":" } else { "None" });
        format!("{variable}[{}]", index.collect::<Vec<_>>().join(", "))
    }

    /// The attributes of an operation as keyword arguments, but for some.
    pub(super) fn attributes(&self, node: &Node, without: &[&str]) -> String {
        let names = Names { space: &self.module.space, functions: &self.module.functions };
        let attrs = node.op.attrs(names);
        let kept = attrs.iter().filter(|(key, _)| !without.contains(key));
        let one = |(key, value): &(&str, Attr)| {
            // Scalings have arguments, or none.
            let value = match value {
                Attr::Word(word) if *key == "scaling" => format!("({}, {{}})", string(word)),
                value => literal(value),
            };
            format!(", {key}={value}")
        };
        kept.map(one).collect()
    }
}

/// The places of the dimensions that a tensor has and another lacks.
pub(super) fn lacks(of: &TensorType, other: &TensorType) -> String {
    let places = of.dims.iter().enumerate().filter(|(_, d)| !other.has(**d));
    tuple(places.map(|(i, _)| i.to_string()))
}

/// The bounds of a clamp, those that there are.
pub(super) fn bounds(min: Option<f64>, max: Option<f64>) -> String {
    let stated = [("min", min), ("max", max)].into_iter();
    let words = stated.filter_map(|(name, bound)| bound.map(|bound| format!("{name}={}", real(bound))));
    words.collect::<Vec<_>>().join(", ")
}

pub(super) fn unary(f: Unary, x: &str) -> String {
    match f {
        Unary::Silu => format!("F.silu({x})"),
        Unary::Gelu => format!("F.gelu({x})"),
        Unary::GeluTanh => format!("F.gelu({x}, approximate=\"tanh\")"),
        Unary::QuickGelu => format!("quick_gelu({x})"),
        Unary::Relu => format!("F.relu({x})"),
        Unary::Tanh => format!("torch.tanh({x})"),
        Unary::Relu2 => format!("relu2({x})"),
        Unary::Symlog => format!("symlog({x})"),
    }
}

pub(super) fn dtype(of: DType) -> &'static str {
    match of {
        DType::F64 => "torch.float64",
        DType::F32 => "torch.float32",
        DType::F16 => "torch.float16",
        DType::BF16 => "torch.bfloat16",
        DType::F8E4M3 => "torch.float8_e4m3fn",
        DType::I32 => "torch.int32",
        DType::Bool => "torch.bool",
    }
}
