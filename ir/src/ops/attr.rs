//! Attributes: what an operation carries beside operands, in the form that text and tables share.
//!
//! [`Op::attrs`] and [`Op::from_attrs`] are inverse to each other; the printer and the parser know nothing else.

mod attention;
mod coalesced;
mod experts;
pub(crate) mod training;

use std::fmt;

use crate::dim::DimId;
use crate::dtype::DType;
use crate::entity::Arena;
use crate::mesh::AxisId;
use crate::module::{FuncId, Function};
use crate::ops::{Binary, Binding, Op, Pairs, Rotary, Scaling, Turn, Unary};
use crate::space::Space;

/// The value of an attribute.
#[derive(Clone, Debug, PartialEq)]
pub enum Attr {
    /// A whole number.
    Int(u64),
    /// A real number.
    Float(f64),
    /// A quoted string.
    Text(String),
    /// A bare word: a dimension, an axis, a choice.
    Word(String),
    /// A function, `@name`.
    Func(String),
    /// `start..end`.
    Range(u64, u64),
    /// `[a, b]`.
    List(Vec<Attr>),
    /// `name(key=value, …)`.
    Call(String, Vec<(String, Attr)>),
    /// `name(1, 2, …)`.
    Numbers(String, Vec<u64>),
    /// `a & b & …`.
    All(Vec<Attr>),
    /// `a | b | …`.
    Any(Vec<Attr>),
}

impl fmt::Display for Attr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Attr::Int(n) => write!(f, "{n}"),
            // The shortest form that reads back as the same number, and reads back as a real one.
            Attr::Float(x) => write!(f, "{x:?}"),
            Attr::Text(s) => write!(f, "{}", Quoted(s)),
            Attr::Word(w) => f.write_str(w),
            Attr::Func(name) => write!(f, "@{name}"),
            Attr::Range(a, b) => write!(f, "{a}..{b}"),
            Attr::List(items) => {
                f.write_str("[")?;
                for (i, item) in items.iter().enumerate() {
                    write!(f, "{}{item}", if i == 0 { "" } else { ", " })?;
                }
                f.write_str("]")
            }
            Attr::Call(name, args) => {
                write!(f, "{name}(")?;
                for (i, (key, value)) in args.iter().enumerate() {
                    write!(f, "{}{key}={value}", if i == 0 { "" } else { ", " })?;
                }
                f.write_str(")")
            }
            Attr::Numbers(name, numbers) => {
                write!(f, "{name}(")?;
                for (i, n) in numbers.iter().enumerate() {
                    write!(f, "{}{n}", if i == 0 { "" } else { ", " })?;
                }
                f.write_str(")")
            }
            Attr::All(parts) => write_chain(f, " & ", parts),
            Attr::Any(parts) => write_chain(f, " | ", parts),
        }
    }
}

/// Parts that are chains themselves stand in parentheses, whether they need them or not.
fn write_chain(f: &mut fmt::Formatter<'_>, sign: &str, parts: &[Attr]) -> fmt::Result {
    for (i, part) in parts.iter().enumerate() {
        f.write_str(if i == 0 { "" } else { sign })?;
        match part {
            Attr::All(_) | Attr::Any(_) => write!(f, "({part})")?,
            Attr::Int(_)
            | Attr::Float(_)
            | Attr::Text(_)
            | Attr::Word(_)
            | Attr::Func(_)
            | Attr::Range(..)
            | Attr::List(_)
            | Attr::Call(..)
            | Attr::Numbers(..) => write!(f, "{part}")?,
        }
    }
    Ok(())
}

/// A string in quotes, with `"`, `\` and control characters escaped.
pub struct Quoted<'a>(pub &'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("\"")?;
        for c in self.0.chars() {
            match c {
                '"' => f.write_str("\\\"")?,
                '\\' => f.write_str("\\\\")?,
                '\n' => f.write_str("\\n")?,
                c if c.is_control() => write!(f, "\\u{{{:x}}}", u32::from(c))?,
                c => write!(f, "{c}")?,
            }
        }
        f.write_str("\"")
    }
}

/// What names in attributes refer to.
#[derive(Clone, Copy)]
pub struct Names<'a> {
    /// Dimensions and axes.
    pub space: &'a Space,
    /// Functions.
    pub functions: &'a Arena<FuncId, Function>,
}

/// Attributes as written, taken one by one; what is left over is an error.
#[derive(Clone, Debug)]
pub struct Attrs {
    op: String,
    items: Vec<(String, Attr)>,
}

/// What is wrong with attributes.
pub type AttrError = String;

impl Attrs {
    /// The attributes of the operation called `op`.
    pub fn new(op: impl Into<String>, items: Vec<(String, Attr)>) -> Self {
        Self { op: op.into(), items }
    }

    pub(crate) fn has(&self, key: &str) -> bool {
        self.items.iter().any(|(k, _)| k == key)
    }

    pub(crate) fn optional(&mut self, key: &str) -> Option<Attr> {
        let i = self.items.iter().position(|(k, _)| k == key)?;
        Some(self.items.remove(i).1)
    }

    pub(crate) fn required(&mut self, key: &str) -> Result<Attr, AttrError> {
        self.optional(key).ok_or_else(|| format!("`{}` lacks attribute `{key}`", self.op))
    }

    pub(crate) fn wrong(&self, key: &str, expected: &str, found: &Attr) -> AttrError {
        format!("attribute `{key}` of `{}` must be {expected}, not `{found}`", self.op)
    }

    pub(crate) fn int(&mut self, key: &str) -> Result<u64, AttrError> {
        match self.required(key)? {
            Attr::Int(n) => Ok(n),
            other => Err(self.wrong(key, "a whole number", &other)),
        }
    }

    pub(crate) fn float(&mut self, key: &str) -> Result<f64, AttrError> {
        match self.required(key)? {
            Attr::Float(x) => Ok(x),
            Attr::Int(n) => Ok(n as f64),
            other => Err(self.wrong(key, "a number", &other)),
        }
    }

    pub(crate) fn optional_float(&mut self, key: &str) -> Result<Option<f64>, AttrError> {
        match self.items.iter().any(|(k, _)| k == key) {
            true => self.float(key).map(Some),
            false => Ok(None),
        }
    }

    pub(crate) fn text(&mut self, key: &str) -> Result<String, AttrError> {
        match self.required(key)? {
            Attr::Text(s) => Ok(s),
            other => Err(self.wrong(key, "a quoted string", &other)),
        }
    }

    pub(crate) fn word(&mut self, key: &str) -> Result<String, AttrError> {
        match self.required(key)? {
            Attr::Word(w) => Ok(w),
            other => Err(self.wrong(key, "a word", &other)),
        }
    }

    pub(crate) fn flag(&mut self, key: &str) -> Result<bool, AttrError> {
        match self.word(key)?.as_str() {
            "true" => Ok(true),
            "false" => Ok(false),
            other => Err(self.wrong(key, "true or false", &Attr::Word(other.to_owned()))),
        }
    }

    pub(crate) fn dim(&mut self, key: &str, names: Names<'_>) -> Result<DimId, AttrError> {
        let word = self.word(key)?;
        names.space.dim(&word).ok_or_else(|| format!("`{word}` is not a declared dimension"))
    }

    pub(crate) fn optional_dim(&mut self, key: &str, names: Names<'_>) -> Result<Option<DimId>, AttrError> {
        match self.items.iter().any(|(k, _)| k == key) {
            true => self.dim(key, names).map(Some),
            false => Ok(None),
        }
    }

    fn dims(&mut self, key: &str, names: Names<'_>) -> Result<Vec<DimId>, AttrError> {
        let expected = "a list of dimensions";
        let items = match self.required(key)? {
            Attr::List(items) => items,
            other => return Err(self.wrong(key, expected, &other)),
        };
        let dim = |item: Attr| match &item {
            Attr::Word(word) => {
                names.space.dim(word).ok_or_else(|| format!("`{word}` is not a declared dimension"))
            }
            other => Err(self.wrong(key, expected, other)),
        };
        items.into_iter().map(dim).collect()
    }

    /// A list of sizes, empty when absent.
    fn sizes(&mut self, key: &str) -> Result<Vec<u64>, AttrError> {
        let expected = "a list of sizes";
        let items = match self.optional(key) {
            None => return Ok(Vec::new()),
            Some(Attr::List(items)) => items,
            Some(other) => return Err(self.wrong(key, expected, &other)),
        };
        let size = |item: Attr| match item {
            Attr::Int(n) => Ok(n),
            other => Err(self.wrong(key, expected, &other)),
        };
        items.into_iter().map(size).collect()
    }

    fn axis(&mut self, key: &str, names: Names<'_>) -> Result<AxisId, AttrError> {
        let word = self.word(key)?;
        names.space.mesh.axis(&word).ok_or_else(|| format!("`{word}` is not an axis of the mesh"))
    }

    pub(crate) fn finish(self) -> Result<(), AttrError> {
        match self.items.first() {
            None => Ok(()),
            Some((key, _)) => Err(format!("`{}` has no attribute `{key}`", self.op)),
        }
    }
}

impl Op {
    /// The attributes, in the order of the table.
    pub fn attrs(&self, names: Names<'_>) -> Vec<(&'static str, Attr)> {
        let dim = |d: DimId| Attr::Word(names.space.dims[d].name.clone());
        let axis = |a: AxisId| Attr::Word(names.space.mesh.axes[a].name.clone());
        match self {
            Op::Param(binding) | Op::Input(binding) | Op::State(binding) => binding_attrs(binding),
            Op::Assign { target, binding } => {
                let mut attrs = vec![("target", Attr::Word(target.name().to_owned()))];
                attrs.extend(binding_attrs(binding));
                attrs
            }
            Op::Fill { value } => vec![("value", Attr::Float(*value))],
            Op::Gradient(g) => training::gradient_attrs(g, names),
            Op::Loss(l) => training::loss_attrs(l, names),
            Op::Optimizer(o) => training::optimizer_attrs(o),
            Op::Experts(e) => experts::experts_attrs(e, names),
            Op::Window(w) => experts::window_attrs(w, names),
            Op::Positions
            | Op::Einsum
            | Op::Sum
            | Op::Expand
            | Op::Unary(_)
            | Op::Binary(_)
            | Op::Reshard
            | Op::Permute => Vec::new(),
            Op::Embed { over, padding } => training::embed_attrs(*over, *padding, names),
            Op::Scale { factor } => vec![("factor", Attr::Float(*factor))],
            Op::Cast { to } => vec![("to", Attr::Word(to.name().to_owned()))],
            Op::RmsNorm { over, eps, offset } => {
                let mut attrs = vec![("over", dim(*over)), ("eps", Attr::Float(*eps))];
                if *offset != 0.0 {
                    attrs.push(("offset", Attr::Float(*offset)));
                }
                attrs
            }
            Op::RmsScale { over, eps } => {
                let over = over.iter().map(|&d| dim(d)).collect();
                vec![("over", Attr::List(over)), ("eps", Attr::Float(*eps))]
            }
            Op::LayerNorm { over, eps } => vec![("over", dim(*over)), ("eps", Attr::Float(*eps))],
            Op::Softmax { over } => vec![("over", dim(*over))],
            Op::Random(r) => training::random_attrs(r),
            Op::Rotary(rotary) => {
                let mut attrs = vec![
                    ("over", dim(rotary.over)),
                    ("width", Attr::Int(rotary.width)),
                    ("theta", Attr::Float(rotary.theta)),
                    ("scaling", scaling_attr(&rotary.scaling)),
                ];
                match rotary.pairs {
                    Pairs::Halves => {}
                    Pairs::Neighbours => attrs.push(("pairs", Attr::Word("neighbours".to_owned()))),
                }
                match rotary.turn {
                    Turn::Forth => {}
                    Turn::Back => attrs.push(("turn", Attr::Word("back".to_owned()))),
                }
                attrs
            }
            Op::Attention(a) | Op::AttentionBackward(a) => attention::attrs(a, names),
            Op::Merge | Op::Accumulate | Op::Sink => Vec::new(),
            Op::MergeParts { over } => vec![("over", dim(*over))],
            Op::RowLse { over, parts } => {
                let mut attrs = vec![("over", dim(*over))];
                attrs.extend(parts.map(|parts| ("parts", dim(parts))));
                attrs
            }
            Op::Scores { attention: a, columns } | Op::Weigh { attention: a, columns } => {
                let mut attrs = attention::attrs(a, names);
                attrs.push(("columns", dim(*columns)));
                attrs
            }
            Op::Take { to } | Op::Join { to } | Op::Fetch { to } => vec![("to", dim(*to))],
            Op::FetchSum { from } => vec![("from", dim(*from))],
            Op::Repeat { from, to } | Op::SumCopies { from, to } => {
                vec![("from", dim(*from)), ("to", dim(*to))]
            }
            Op::Call { callee, layers, stride, scan, stage } => {
                let name = names.functions.get(*callee).map_or("?", |f| f.name.as_str());
                let mut attrs = vec![
                    ("callee", Attr::Func(name.to_owned())),
                    ("layers", Attr::Range(layers.start, layers.end)),
                ];
                attrs.extend(training::stride_attrs(*stride));
                attrs.extend(scan.iter().flat_map(|scan| training::scan_attrs(scan, names)));
                attrs.extend(stage.iter().flat_map(|stage| training::stage_attrs(*stage, names)));
                attrs
            }
            Op::AllToAll { axis: a, split, concat } => {
                vec![("axis", axis(*a)), ("split", dim(*split)), ("concat", dim(*concat))]
            }
            Op::AllGather { axis: a, dim: d }
            | Op::Slice { axis: a, dim: d }
            | Op::ReduceScatter { axis: a, dim: d } => vec![("axis", axis(*a)), ("dim", dim(*d))],
            Op::AllReduce { axis: a } => vec![("axis", axis(*a))],
            Op::Coalesced(members) => coalesced::attrs(members, names),
        }
    }

    /// The operation called `name` with these attributes.
    ///
    /// # Errors
    /// Which attribute is missing, unknown or of the wrong kind; `None` when no operation has the name.
    pub fn from_attrs(name: &str, mut attrs: Attrs, names: Names<'_>) -> Option<Result<Op, AttrError>> {
        if !crate::ops::TABLE.iter().any(|row| row.name == name) {
            return None;
        }
        let op = read_op(name, &mut attrs, names);
        Some(op.and_then(|op| attrs.finish().map(|()| op)))
    }
}

fn read_op(name: &str, attrs: &mut Attrs, names: Names<'_>) -> Result<Op, AttrError> {
    if let Some(f) = Unary::ALL.into_iter().find(|f| f.name() == name) {
        return Ok(Op::Unary(f));
    }
    if let Some(f) = Binary::ALL.into_iter().find(|f| f.name() == name) {
        return Ok(Op::Binary(f));
    }
    Ok(match name {
        "param" => Op::Param(read_binding(attrs)?),
        "input" => Op::Input(read_binding(attrs)?),
        "state" => Op::State(read_binding(attrs)?),
        "assign" => Op::Assign { target: training::read_target(attrs)?, binding: read_binding(attrs)? },
        "fill" => Op::Fill { value: attrs.float("value")? },
        "positions" => Op::Positions,
        "einsum" => Op::Einsum,
        "sum" => Op::Sum,
        "expand" => Op::Expand,
        "embed" => {
            let (over, padding) = training::read_embed(attrs, names)?;
            Op::Embed { over, padding }
        }
        "scale" => Op::Scale { factor: attrs.float("factor")? },
        "cast" => {
            let word = attrs.word("to")?;
            Op::Cast { to: DType::parse(&word).ok_or_else(|| format!("`{word}` is not an element type"))? }
        }
        "rms_norm" => Op::RmsNorm {
            over: attrs.dim("over", names)?,
            eps: attrs.float("eps")?,
            offset: attrs.optional_float("offset")?.unwrap_or(0.0),
        },
        "rms_scale" => Op::RmsScale { over: attrs.dims("over", names)?, eps: attrs.float("eps")? },
        "layer_norm" => Op::LayerNorm { over: attrs.dim("over", names)?, eps: attrs.float("eps")? },
        "softmax" => Op::Softmax { over: attrs.dim("over", names)? },
        "rotary" => Op::Rotary(Rotary {
            over: attrs.dim("over", names)?,
            width: attrs.int("width")?,
            theta: attrs.float("theta")?,
            scaling: read_scaling(attrs)?,
            pairs: match attrs.optional("pairs") {
                None => Pairs::Halves,
                Some(Attr::Word(word)) if word == "neighbours" => Pairs::Neighbours,
                Some(other) => return Err(attrs.wrong("pairs", "neighbours, or left out", &other)),
            },
            turn: match attrs.optional("turn") {
                None => Turn::Forth,
                Some(Attr::Word(word)) if word == "back" => Turn::Back,
                Some(other) => return Err(attrs.wrong("turn", "back, or left out", &other)),
            },
        }),
        "attention" => Op::Attention(attention::read(attrs, names)?),
        "attention_backward" => Op::AttentionBackward(attention::read(attrs, names)?),
        "merge" => Op::Merge,
        "merge_parts" => Op::MergeParts { over: attrs.dim("over", names)? },
        "accumulate" => Op::Accumulate,
        "sink" => Op::Sink,
        "scores" => {
            Op::Scores { attention: attention::read(attrs, names)?, columns: attrs.dim("columns", names)? }
        }
        "row_lse" => {
            Op::RowLse { over: attrs.dim("over", names)?, parts: attrs.optional_dim("parts", names)? }
        }
        "weigh" => {
            Op::Weigh { attention: attention::read(attrs, names)?, columns: attrs.dim("columns", names)? }
        }
        "take" => Op::Take { to: attrs.dim("to", names)? },
        "join" => Op::Join { to: attrs.dim("to", names)? },
        "fetch" => Op::Fetch { to: attrs.dim("to", names)? },
        "fetch_sum" => Op::FetchSum { from: attrs.dim("from", names)? },
        "sum_copies" => Op::SumCopies { from: attrs.dim("from", names)?, to: attrs.dim("to", names)? },
        "repeat" => Op::Repeat { from: attrs.dim("from", names)?, to: attrs.dim("to", names)? },
        "call" => {
            let callee = match attrs.required("callee")? {
                Attr::Func(name) => names
                    .functions
                    .iter()
                    .find(|(_, f)| f.name == name)
                    .map(|(id, _)| id)
                    .ok_or_else(|| format!("no function `@{name}` stands before this call"))?,
                other => return Err(attrs.wrong("callee", "a function", &other)),
            };
            let layers = match attrs.optional("layers") {
                None => 0..1,
                Some(Attr::Range(a, b)) => a..b,
                Some(other) => return Err(attrs.wrong("layers", "a range such as 0..32", &other)),
            };
            let scan = training::read_scan(attrs, names)?;
            let stride = training::read_stride(attrs)?;
            Op::Call { callee, layers, stride, scan, stage: training::read_stage(attrs, names)? }
        }
        "reshard" => Op::Reshard,
        "all_to_all" => Op::AllToAll {
            axis: attrs.axis("axis", names)?,
            split: attrs.dim("split", names)?,
            concat: attrs.dim("concat", names)?,
        },
        "all_gather" => Op::AllGather { axis: attrs.axis("axis", names)?, dim: attrs.dim("dim", names)? },
        "slice" => Op::Slice { axis: attrs.axis("axis", names)?, dim: attrs.dim("dim", names)? },
        "reduce_scatter" => {
            Op::ReduceScatter { axis: attrs.axis("axis", names)?, dim: attrs.dim("dim", names)? }
        }
        "all_reduce" => Op::AllReduce { axis: attrs.axis("axis", names)? },
        "permute" => Op::Permute,
        "coalesced" => coalesced::read(attrs, names)?,
        _ => {
            if let Some(op) = experts::read(name, attrs, names)? {
                return Ok(op);
            }
            return training::read(name, attrs, names);
        }
    })
}

fn binding_attrs(binding: &Binding) -> Vec<(&'static str, Attr)> {
    let mut attrs = vec![("name", Attr::Text(binding.name.clone()))];
    for (key, sizes) in [("stored", &binding.stored), ("view", &binding.view)] {
        if !sizes.is_empty() {
            attrs.push((key, Attr::List(sizes.iter().map(|&n| Attr::Int(n)).collect())));
        }
    }
    if !binding.window.is_empty() {
        attrs.push((
            "window",
            Attr::List(binding.window.iter().map(|r| Attr::Range(r.start, r.end)).collect()),
        ));
    }
    if binding.ahead != 0 {
        attrs.push(("ahead", Attr::Int(binding.ahead)));
    }
    if binding.fill != 0 {
        attrs.push(("fill", training::label(binding.fill)));
    }
    attrs
}

fn read_binding(attrs: &mut Attrs) -> Result<Binding, AttrError> {
    let name = attrs.text("name")?;
    let (stored, view) = (attrs.sizes("stored")?, attrs.sizes("view")?);
    let mut window = Vec::new();
    match attrs.optional("window") {
        None => {}
        Some(Attr::List(items)) => {
            for item in items {
                match item {
                    Attr::Range(a, b) => window.push(a..b),
                    other => return Err(attrs.wrong("window", "a list of ranges", &other)),
                }
            }
        }
        Some(other) => return Err(attrs.wrong("window", "a list of ranges", &other)),
    }
    let ahead = if attrs.has("ahead") { attrs.int("ahead")? } else { 0 };
    let fill = if attrs.has("fill") { training::read_label(attrs, "fill")? } else { 0 };
    Ok(Binding { name, stored, view, window, ahead, fill })
}

fn scaling_attr(scaling: &Scaling) -> Attr {
    let call = |name: &str, args: &[(&str, f64)]| {
        Attr::Call(name.to_owned(), args.iter().map(|&(k, v)| (k.to_owned(), Attr::Float(v))).collect())
    };
    match *scaling {
        Scaling::None => Attr::Word("none".to_owned()),
        Scaling::Linear { factor } => call("linear", &[("factor", factor)]),
        Scaling::Llama3 { factor, low, high, original } => {
            call("llama3", &[("factor", factor), ("low", low), ("high", high), ("original", original)])
        }
        Scaling::Yarn { factor, beta_fast, beta_slow, original, attention, truncate } => {
            let args = [
                ("factor", factor),
                ("beta_fast", beta_fast),
                ("beta_slow", beta_slow),
                ("original", original),
                ("attention", attention),
            ];
            let Attr::Call(name, mut args) = call("yarn", &args) else {
                unreachable!("call makes a call");
            };
            args.push(("truncate".to_owned(), Attr::Word(truncate.to_string())));
            Attr::Call(name, args)
        }
    }
}

fn read_scaling(attrs: &mut Attrs) -> Result<Scaling, AttrError> {
    let attr = attrs.required("scaling")?;
    let (name, args) = match attr {
        Attr::Word(w) if w == "none" => return Ok(Scaling::None),
        Attr::Call(name, args) => (name, args),
        other => return Err(attrs.wrong("scaling", "none, linear(…), llama3(…) or yarn(…)", &other)),
    };
    let mut args = Attrs::new(name.as_str(), args);
    let scaling = match name.as_str() {
        "linear" => Scaling::Linear { factor: args.float("factor")? },
        "llama3" => Scaling::Llama3 {
            factor: args.float("factor")?,
            low: args.float("low")?,
            high: args.float("high")?,
            original: args.float("original")?,
        },
        "yarn" => Scaling::Yarn {
            factor: args.float("factor")?,
            beta_fast: args.float("beta_fast")?,
            beta_slow: args.float("beta_slow")?,
            original: args.float("original")?,
            attention: args.float("attention")?,
            truncate: args.flag("truncate")?,
        },
        other => return Err(format!("`{other}` is not a scaling of `rotary`")),
    };
    args.finish()?;
    Ok(scaling)
}
