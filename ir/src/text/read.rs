//! Parses modules.

use std::collections::HashMap;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::diagnostic::{Diagnostic, Diagnostics, Span};
use crate::entity::{Arena, Entity};
use crate::handles::{FuncId, ValueId};
use crate::module::{Function, Level, Module, Node, Output, Value};
use crate::text::cursor::{Cursor, Parsed, mistake, unknown};
use crate::text::grammar::{
    Header, make_op, read_attrs, read_header, read_outputs, read_phase, read_type, twice,
};
use crate::text::lexer::{Notation, Token};
use crate::types::TensorType;

/// The most bytes of a text, so that every place in it has a span.
const MAX_BYTES: usize = u32::MAX as usize;

/// Reads the text form. Text that it accepts is well formed and every name in it is known;
/// [`verify`](fn@crate::verify::verify) checks the rest.
///
/// # Errors
/// The first mistake: an `E` diagnostic, or `V22` and `V23` for a dimension or a mesh that cannot be.
pub fn parse(text: &str) -> Result<Module, Diagnostics> {
    parse_module(text).map_err(|diagnostic| vec![*diagnostic])
}

/// Refuses a text that spans cannot point into.
pub(crate) fn check_length(text: &str) -> Parsed<()> {
    if text.len() <= MAX_BYTES {
        Ok(())
    } else {
        Err(Box::new(Diagnostic::new(
            "E10",
            format!("a text of {} bytes is longer than {MAX_BYTES} bytes", text.len()),
        )))
    }
}

fn parse_module(text: &str) -> Parsed<Module> {
    check_length(text)?;
    let mut cx = Cursor::new(text, Notation::Module);
    let levels = [Level::Program, Level::Sharded, Level::PerRank].map(Level::name);
    let Header { kind, name, pipeline, space } = read_header(&mut cx, &levels)?;
    let level = Level::parse(&kind).expect("the header admits the names of levels only");
    let mut module = Module { level, name, pipeline, space, functions: Arena::new() };
    let mut names: HashMap<&str, FuncId> = HashMap::new();
    while cx.peek() != Token::End {
        if cx.keyword("func").is_err() {
            return Err(cx.unexpected(if module.functions.is_empty() {
                "a declaration or `func`"
            } else {
                "`func`"
            }));
        }
        let (name, span) = cx.sigil('@', "the name of the function, `@name`")?;
        if names.insert(name, module.functions.next()).is_some() {
            return Err(twice("function", name, span));
        }
        let mut function = Function::new(name);
        function.span = span;
        let function =
            FunctionReader { cx: &mut cx, module: &module, function, values: HashMap::new() }.read()?;
        module.functions.push(function);
    }
    Ok(module)
}

struct FunctionReader<'r, 'a> {
    cx: &'r mut Cursor<'a>,
    module: &'r Module,
    function: Function,
    /// For look-up only; nothing is listed from here.
    values: HashMap<&'a str, ValueId>,
}

impl<'a> FunctionReader<'_, 'a> {
    fn read(mut self) -> Parsed<Function> {
        self.cx.expect('(')?;
        while !self.cx.eat(Token::Punct(')')) {
            if !self.function.params.is_empty() {
                self.cx.expect(',')?;
            }
            let (name, span) = self.cx.sigil('%', "a parameter, `%name: type`, or `)`")?;
            self.cx.expect(':')?;
            let ty = read_type(self.cx, &self.module.space)?;
            let value = self.define(name, span, ty)?;
            self.function.params.push(value);
        }
        self.function.phase = read_phase(self.cx)?;
        if self.cx.eat(Token::Word("origin")) {
            let (origin, _) = self.cx.sigil('@', "the function of the model, `@name`")?;
            self.function.origin = Some(origin.to_owned());
        }
        self.cx.expect('{')?;
        while !self.cx.eat(Token::Word("return")) {
            self.node()?;
        }
        for (name, value) in read_outputs(self.cx, |cx| operand(cx, &self.function, &self.values))? {
            let outputs = &mut self.function.outputs;
            if let Some((name, span)) = name
                && outputs.iter().any(|o| o.name.as_deref() == Some(name))
            {
                return Err(twice("output", name, span));
            }
            outputs.push(Output { name: name.map(|(name, _)| name.to_owned()), value });
        }
        Ok(self.function)
    }

    fn node(&mut self) -> Parsed<()> {
        let mut targets = Vec::new();
        if let Token::Sigil('%', _) = self.cx.peek() {
            targets = self.cx.items(|cx| cx.sigil('%', "a value, `%name`"))?;
            self.cx.expect('=')?;
        }
        let expected = if targets.is_empty() { "a value, an operation or `return`" } else { "an operation" };
        let (name, span) = self.cx.word(expected)?;
        let operands = match self.cx.peek() {
            Token::Sigil('%', _) => self.cx.items(|cx| operand(cx, &self.function, &self.values))?,
            _ => Vec::new(),
        };
        let attrs = read_attrs(self.cx)?;
        let op = make_op(name, span, attrs, &self.module.space, &self.module.functions)?;
        let mut results: SmallVec<[ValueId; 1]> = SmallVec::new();
        for (i, (name, span)) in targets.into_iter().enumerate() {
            self.cx.expect(if i == 0 { ':' } else { ',' })?;
            let ty = read_type(self.cx, &self.module.space)?;
            results.push(self.define(name, span, ty)?);
        }
        self.function.nodes.push(Node { op, operands: operands.into(), results, span });
        Ok(())
    }

    /// Numbers the value; a number that the text states must be the one it gets.
    fn define(&mut self, name: &'a str, span: Span, ty: TensorType) -> Parsed<ValueId> {
        let id = self.function.values.next();
        let numbered = name.starts_with(|c: char| c.is_ascii_digit());
        let padded = name.len() > 1 && name.starts_with('0');
        if numbered && (padded || name.parse() != Ok(id.index())) {
            let message = format!("`%{name}` is value number {}", id.index());
            let label = "values are numbered in order of definition, parameters first";
            let help = format!("write `%{}`, or give it a name", id.index());
            return Err(Box::new(mistake("E11", message, span, label).help(help)));
        }
        let known = if numbered { None } else { Some(name.into()) };
        if self.values.insert(name, id).is_some() {
            return Err(twice("value", name, span));
        }
        Ok(self.function.values.push(Value { ty: Arc::new(ty), name: known, span }))
    }
}

fn operand(cx: &mut Cursor<'_>, function: &Function, values: &HashMap<&str, ValueId>) -> Parsed<ValueId> {
    let (name, span) = cx.sigil('%', "a value, `%name`")?;
    let known = || function.values.values().filter_map(|v| v.name.as_deref());
    values.get(name).copied().ok_or_else(|| unknown("value", name, span, known()))
}
