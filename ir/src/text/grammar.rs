//! The grammar that modules and schedules share: the header, declarations of the space, types, attributes.
//!
//! Reading and writing are side by side, so that they cannot drift apart.

use std::fmt;
use std::ops::Range;

use crate::diagnostic::{Diagnostic, Span};
use crate::dim::{Dim, DimId, Fetched, Part};
use crate::dtype::DType;
use crate::layout::{At, AxisList, Move};
use crate::mesh::{Axis, AxisId};
use crate::ops::attr::{Attr, Attrs, FunctionNames, Names, Quoted};
use crate::ops::table::op::{Op, TABLE};
use crate::order::{Order, write_ranges};
use crate::phase::Phase;
use crate::space::Space;
use crate::text::cursor::{Cursor, Parsed, mistake, suggest, unknown};
use crate::text::lexer::Token;
use crate::types::TensorType;
use crate::verify::{check_axis, check_dim};

/// The version of the text form that this crate writes and reads.
pub const VERSION: u64 = 1;

/// How deep attributes may nest.
const MAX_DEPTH: usize = 16;

/// The largest number of attributes of an operation.
const MAX_ATTRS: usize = 64;

/// The text before functions or frames.
pub(crate) struct Header {
    /// The level, or `schedule`.
    pub(crate) kind: String,
    pub(crate) name: String,
    pub(crate) pipeline: Vec<String>,
    pub(crate) space: Space,
}

/// Writes a header.
pub(crate) fn write_header(
    out: &mut impl fmt::Write,
    kind: &str,
    name: &str,
    pipeline: &[String],
    space: &Space,
) -> fmt::Result {
    writeln!(out, "ithaca {VERSION} {kind}")?;
    writeln!(out, "model {}", Quoted(name))?;
    for line in pipeline {
        writeln!(out, "pipeline {}", Quoted(line))?;
    }
    if !space.mesh.axes.is_empty() {
        writeln!(out, "mesh {}", space.mesh)?;
    }
    for dim in space.dims.values() {
        let Dim { name, size, granule, valid, uneven, ragged, copies, order, fetched, part } = dim;
        write!(out, "dim {name} = {size}")?;
        if valid != size {
            write!(out, " valid {valid}")?;
        }
        if *granule != 1 {
            write!(out, " granule {granule}")?;
        }
        if *uneven {
            write!(out, " uneven")?;
        }
        if let Some(expected) = ragged {
            write!(out, " ragged {expected}")?;
        }
        if let Some(of) = copies {
            write!(out, " copies {}", space.dims[*of].name)?;
        }
        if *order != Order::Contiguous {
            write!(out, " order {order}")?;
        }
        if let Some(fetched) = fetched {
            write!(out, " fetches {} [", space.dims[fetched.of].name)?;
            for (i, part) in fetched.parts().iter().enumerate() {
                out.write_str(if i == 0 { "" } else { ", " })?;
                write_ranges(out, part)?;
            }
            out.write_str("]")?;
        }
        if let Some(Part { of, index, count, runs }) = *part {
            write!(out, " part {index} of {count} of {}", space.dims[of].name)?;
            if runs != 1 {
                write!(out, " in {runs} runs")?;
            }
        }
        writeln!(out)?;
    }
    Ok(())
}

/// Reads a header whose kind is one of `kinds`.
pub(crate) fn read_header(cx: &mut Cursor<'_>, kinds: &[&str]) -> Parsed<Header> {
    cx.keyword("ithaca")?;
    let span = cx.span();
    let version = cx.int()?;
    if version != VERSION {
        let message = format!("version {version} of the text form is not known");
        return Err(mistake("E04", message, span, format!("this program reads version {VERSION}")));
    }
    let (kind, span) = cx.word("a level")?;
    if !kinds.contains(&kind) {
        let message = format!("`{kind}` is not one of {}", kinds.join(", "));
        let diagnostic = mistake("E04", message, span, "the kind of the file");
        return Err(suggest(diagnostic, kind, kinds.iter().copied()));
    }
    cx.keyword("model")?;
    let mut header =
        Header { kind: kind.to_owned(), name: cx.string()?, pipeline: Vec::new(), space: Space::default() };
    while cx.eat(Token::Word("pipeline")) {
        header.pipeline.push(cx.string()?);
    }
    if cx.eat(Token::Word("mesh")) {
        read_mesh(cx, &mut header.space)?;
    }
    while cx.eat(Token::Word("dim")) {
        read_dim(cx, &mut header.space)?;
    }
    Ok(header)
}

fn read_mesh(cx: &mut Cursor<'_>, space: &mut Space) -> Parsed<()> {
    let axis = |cx: &mut Cursor<'_>| {
        let (name, span) = cx.word("the name of an axis")?;
        cx.expect('=')?;
        let axis = Axis { name: name.to_owned(), size: cx.int()? };
        let id = space.mesh.axes.push(axis);
        check_axis(space, id).map_err(|mistake| Box::new(mistake.at(span).label("this axis")))
    };
    cx.items(axis).map(|_| ())
}

fn read_dim(cx: &mut Cursor<'_>, space: &mut Space) -> Parsed<()> {
    let (name, span) = cx.word("the name of a dimension")?;
    cx.expect('=')?;
    let mut dim = Dim::new(name, cx.int()?);
    loop {
        if cx.eat(Token::Word("valid")) {
            dim.valid = cx.int()?;
        } else if cx.eat(Token::Word("granule")) {
            dim.granule = cx.int()?;
        } else if cx.eat(Token::Word("uneven")) {
            dim.uneven = true;
        } else if cx.eat(Token::Word("ragged")) {
            dim.ragged = Some(cx.int()?);
        } else if cx.eat(Token::Word("copies")) {
            dim.copies = Some(read_dim_name(cx, space)?);
        } else if cx.eat(Token::Word("order")) {
            dim.order = read_order(cx)?;
        } else if cx.eat(Token::Word("fetches")) {
            let of = read_dim_name(cx, space)?;
            cx.expect('[')?;
            let parts = cx.list(']', read_ranges)?;
            dim.fetched = Some(Fetched::new(of, parts));
        } else if cx.eat(Token::Word("part")) {
            dim.part = Some(read_part(cx, space)?);
        } else {
            break;
        }
    }
    let id = space.dims.push(dim);
    check_dim(space, id).map_err(|mistake| Box::new(mistake.at(span).label("this dimension")))
}

/// `0 of 2 of h in 4 runs`; one run when none are named.
fn read_part(cx: &mut Cursor<'_>, space: &Space) -> Parsed<Part> {
    let index = cx.int()?;
    cx.keyword("of")?;
    let count = cx.int()?;
    cx.keyword("of")?;
    let of = read_dim_name(cx, space)?;
    let mut runs = 1;
    if cx.eat(Token::Word("in")) {
        runs = cx.int()?;
        cx.keyword("runs")?;
    }
    Ok(Part { of, index, count, runs })
}

fn read_order(cx: &mut Cursor<'_>) -> Parsed<Order> {
    if cx.peek() == Token::Punct('[') {
        return read_ranges(cx).map(Order::Table);
    }
    let (name, span) = cx.word("a token order")?;
    let known = ["contiguous", "zigzag", "striped"];
    if !known.contains(&name) {
        return Err(unknown("token order", name, span, known));
    }
    if name == "contiguous" {
        return Ok(Order::Contiguous);
    }
    cx.expect('(')?;
    let parts = cx.int()?;
    let order = match name {
        "zigzag" => Order::Zigzag { parts },
        _ => {
            let block = if cx.eat(Token::Punct(',')) { cx.int()? } else { 1 };
            Order::Striped { parts, block }
        }
    };
    cx.expect(')')?;
    Ok(order)
}

/// `[0..2, 6..8]`.
fn read_ranges(cx: &mut Cursor<'_>) -> Parsed<Vec<Range<u64>>> {
    read_list(cx, Cursor::range)
}

fn read_list<'a, T>(cx: &mut Cursor<'a>, item: impl Fn(&mut Cursor<'a>) -> Parsed<T>) -> Parsed<Vec<T>> {
    cx.expect('[')?;
    cx.list(']', item)
}

fn read_dim_name(cx: &mut Cursor<'_>, space: &Space) -> Parsed<DimId> {
    let (name, span) = cx.word("a dimension")?;
    space
        .dim(name)
        .ok_or_else(|| unknown("dimension", name, span, space.dims.values().map(|d| d.name.as_str())))
}

fn axis_named(space: &Space, name: &str, span: Span) -> Parsed<AxisId> {
    let axes = &space.mesh.axes;
    space
        .mesh
        .axis(name)
        .ok_or_else(|| unknown("mesh axis", name, span, axes.values().map(|a| a.name.as_str())))
}

/// Reads an element type.
pub(crate) fn read_dtype(cx: &mut Cursor<'_>) -> Parsed<DType> {
    cx.choice("an element type", "element type", &DType::ALL, DType::name)
}

/// Reads `phase NAME`, where it is there.
pub(crate) fn read_phase(cx: &mut Cursor<'_>) -> Parsed<Phase> {
    if !cx.eat(Token::Word("phase")) {
        return Ok(Phase::default());
    }
    cx.choice("a phase of a step", "phase", &Phase::ALL, Phase::name)
}

/// An output with its name, and the place of the name, where it has one.
pub(crate) type Named<'a, T> = (Option<(&'a str, Span)>, T);

/// Reads `value, name = value}`, the outputs of a function or of a frame.
pub(crate) fn read_outputs<'a, T>(
    cx: &mut Cursor<'a>,
    mut value: impl FnMut(&mut Cursor<'a>) -> Parsed<T>,
) -> Parsed<Vec<Named<'a, T>>> {
    if cx.eat(Token::Punct('}')) {
        return Ok(Vec::new());
    }
    let outputs = cx.items(|cx| {
        let name = match cx.peek() {
            Token::Word(_) => Some(cx.word("a name")?),
            _ => None,
        };
        if name.is_some() {
            cx.expect('=')?;
        }
        Ok((name, value(cx)?))
    })?;
    cx.expect('}')?;
    Ok(outputs)
}

/// Reads a type.
pub(crate) fn read_type(cx: &mut Cursor<'_>, space: &Space) -> Parsed<TensorType> {
    let mut ty = TensorType::new(read_dtype(cx)?, []);
    cx.expect('[')?;
    while !cx.eat(Token::Punct(']')) {
        ty.dims.push(read_dim_name(cx, space)?);
        let mut axes = AxisList::new();
        match cx.peek() {
            Token::Sigil('@', name) => {
                let (_, span) = cx.next();
                axes.push(axis_named(space, name, span)?);
                read_move(cx, &mut ty, axes[0])?;
            }
            Token::Punct('@') => {
                cx.next();
                axes = read_axes(cx, space, |cx, axis| read_move(cx, &mut ty, axis))?;
            }
            _ => {}
        }
        ty.layout.split.push(axes);
    }
    ty.layout.moved.sort_unstable();
    if cx.eat(Token::Word("partial")) {
        ty.layout.partial = read_axes(cx, space, |_, _| Ok(()))?;
        ty.layout.partial.sort_unstable();
    }
    if cx.eat(Token::Word("on")) {
        let axis = read_axis(cx, space)?;
        cx.expect('=')?;
        ty.layout.at = Some(At { axis, coordinate: cx.int()? });
    }
    Ok(ty)
}

/// Reads `+1` and `+1(0..2)` after the name of an axis.
fn read_move(cx: &mut Cursor<'_>, ty: &mut TensorType, axis: AxisId) -> Parsed<()> {
    if !cx.eat(Token::Punct('+')) {
        return Ok(());
    }
    let by = cx.int()?;
    let mut only = None;
    if cx.eat(Token::Punct('(')) {
        let Range { start, end } = cx.range()?;
        only = Some((start, end));
        cx.expect(')')?;
    }
    ty.layout.moved.push(Move { axis, by, only });
    Ok(())
}

fn read_axis(cx: &mut Cursor<'_>, space: &Space) -> Parsed<AxisId> {
    let (name, span) = cx.word("a mesh axis")?;
    axis_named(space, name, span)
}

/// Reads `(a, b)`; `after` reads the text after the name of each axis.
fn read_axes<'a>(
    cx: &mut Cursor<'a>,
    space: &Space,
    mut after: impl FnMut(&mut Cursor<'a>, AxisId) -> Parsed<()>,
) -> Parsed<AxisList> {
    cx.expect('(')?;
    let axes = cx.items(|cx| {
        let axis = read_axis(cx, space)?;
        after(cx, axis).map(|()| axis)
    })?;
    cx.expect(')')?;
    Ok(axes.into())
}

/// Writes ` {key=value, …}`, and nothing when there are no attributes.
pub(crate) fn write_attrs<K: fmt::Display>(out: &mut impl fmt::Write, attrs: &[(K, Attr)]) -> fmt::Result {
    for (i, (key, value)) in attrs.iter().enumerate() {
        write!(out, "{}{key}={value}", if i == 0 { " {" } else { ", " })?;
    }
    out.write_str(if attrs.is_empty() { "" } else { "}" })
}

/// Reads `{key=value, …}` if it is there.
pub(crate) fn read_attrs(cx: &mut Cursor<'_>) -> Parsed<Vec<(String, Attr)>> {
    if cx.eat(Token::Punct('{')) { read_pairs(cx, '}', 0) } else { Ok(Vec::new()) }
}

fn read_pairs(cx: &mut Cursor<'_>, close: char, depth: usize) -> Parsed<Vec<(String, Attr)>> {
    let mut pairs: Vec<(String, Attr)> = Vec::new();
    cx.list(close, |cx| {
        let (key, span) = cx.word("the name of an attribute")?;
        if pairs.iter().any(|(k, _)| k == key) {
            return Err(twice("attribute", key, span));
        }
        if pairs.len() == MAX_ATTRS {
            return Err(mistake("E09", format!("more than {MAX_ATTRS} attributes"), span, "one too many"));
        }
        cx.expect('=')?;
        pairs.push((key.to_owned(), read_attr(cx, depth)?));
        Ok(())
    })?;
    Ok(pairs)
}

/// The attribute that `text` spells and nothing else, for tests of what attributes mean.
#[cfg(test)]
pub(crate) fn parse_attr(text: &str) -> Parsed<Attr> {
    let mut cx = Cursor::new(text, crate::text::Notation::Module);
    let attr = read_attr(&mut cx, 0)?;
    match cx.peek() {
        Token::End => Ok(attr),
        _ => Err(cx.unexpected("the end")),
    }
}

/// `a & b | c`: of the two signs `&` binds more tightly.
fn read_attr(cx: &mut Cursor<'_>, depth: usize) -> Parsed<Attr> {
    cx.chain('|', Attr::Any, |cx| cx.chain('&', Attr::All, |cx| read_plain_attr(cx, depth)))
}

fn read_plain_attr(cx: &mut Cursor<'_>, depth: usize) -> Parsed<Attr> {
    if depth == MAX_DEPTH {
        let message = format!("attributes nest deeper than {MAX_DEPTH} levels");
        return Err(mistake("E09", message, cx.span(), "the first that is too deep"));
    }
    Ok(match cx.peek() {
        Token::Int(_) => {
            let first = cx.int()?;
            if cx.eat(Token::Dots) { Attr::Range(first, cx.int()?) } else { Attr::Int(first) }
        }
        Token::Float(_) => Attr::Float(cx.float()?),
        Token::Text(_) => Attr::Text(cx.string()?),
        Token::Sigil('@', name) => {
            cx.next();
            Attr::Func(name.to_owned())
        }
        Token::Word(word) => {
            cx.next();
            if !cx.eat(Token::Punct('(')) {
                Attr::Word(word.to_owned())
            } else if matches!(cx.peek(), Token::Int(_)) {
                Attr::Numbers(word.to_owned(), cx.list(')', Cursor::int)?)
            } else {
                Attr::Call(word.to_owned(), read_pairs(cx, ')', depth + 1)?)
            }
        }
        Token::Punct('(') => {
            cx.next();
            let inner = read_attr(cx, depth + 1)?;
            cx.expect(')')?;
            inner
        }
        Token::Punct('[') => Attr::List(read_list(cx, |cx| read_attr(cx, depth + 1))?),
        Token::Sigil(..)
        | Token::Dots
        | Token::Arrow
        | Token::Punct(_)
        | Token::Sign(_)
        | Token::Bad(_)
        | Token::End => return Err(cx.unexpected("the value of an attribute")),
    })
}

/// The operation called `name` with these attributes; `span` is the place of its name.
pub(crate) fn make_op(
    name: &str,
    span: Span,
    attrs: Vec<(String, Attr)>,
    space: &Space,
    functions: &dyn FunctionNames,
) -> Parsed<Op> {
    match Op::from_attrs(name, Attrs::new(name, attrs), Names { space, functions }) {
        Some(Ok(op)) => Ok(op),
        Some(Err(message)) => Err(mistake("E08", message, span, "the attributes of this operation")),
        None => {
            let diagnostic = mistake("E05", format!("there is no operation `{name}`"), span, "unknown");
            Err(suggest(diagnostic, name, TABLE.iter().map(|row| row.name)))
        }
    }
}

/// The diagnostic for a name that is defined a second time.
pub(crate) fn twice(what: &str, name: &str, span: Span) -> Box<Diagnostic> {
    mistake("E07", format!("{what} `{name}` is there already"), span, "defined a second time")
}
