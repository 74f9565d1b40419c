//! Prints modules.

use std::fmt;
use std::fmt::Write;

use crate::entity::Entity;
use crate::handles::ValueId;
use crate::module::{Function, Module, Node, Output};
use crate::ops::attr::Names;
use crate::phase::Phase;
use crate::text::grammar::{write_attrs, write_header};
use crate::text::show::show;

/// The text form.
///
/// A value prints as `%name` when it has a name and as `%N`, its number, otherwise.
pub fn print(module: &Module) -> String {
    let mut out = String::new();
    write_module(&mut out, module).expect("writing to a string does not fail");
    out
}

fn write_module(out: &mut String, module: &Module) -> fmt::Result {
    let Module { level, name, pipeline, space, functions } = module;
    write_header(out, level.name(), name, pipeline, space)?;
    for function in functions.values() {
        out.push('\n');
        write_function(out, module, function)?;
    }
    Ok(())
}

fn write_function(out: &mut String, module: &Module, function: &Function) -> fmt::Result {
    write!(out, "func @{}(", function.name)?;
    for (i, &param) in function.params.iter().enumerate() {
        let ty = show(&module.space, function.ty(param));
        write!(out, "{}{}: {ty}", if i == 0 { "" } else { ", " }, ValueText(function, param))?;
    }
    out.push(')');
    if function.phase != Phase::default() {
        write!(out, " phase {}", function.phase.name())?;
    }
    if let Some(origin) = &function.origin {
        write!(out, " origin @{origin}")?;
    }
    out.push_str(" {\n");
    for node in &function.nodes {
        write_node(out, module, function, node)?;
    }
    out.push_str("  return");
    for (i, Output { name, value }) in function.outputs.iter().enumerate() {
        out.push_str(if i == 0 { " " } else { ", " });
        if let Some(name) = name {
            write!(out, "{name} = ")?;
        }
        write!(out, "{}", ValueText(function, *value))?;
    }
    out.push_str("\n}\n");
    Ok(())
}

fn write_node(out: &mut String, module: &Module, function: &Function, node: &Node) -> fmt::Result {
    let Node { op, operands, results, span: _ } = node;
    out.push_str("  ");
    for (i, &result) in results.iter().enumerate() {
        write!(out, "{}{}", if i == 0 { "" } else { ", " }, ValueText(function, result))?;
    }
    if !results.is_empty() {
        out.push_str(" = ");
    }
    out.push_str(op.name());
    for (i, &operand) in operands.iter().enumerate() {
        write!(out, "{}{}", if i == 0 { " " } else { ", " }, ValueText(function, operand))?;
    }
    write_attrs(out, &op.attrs(Names { space: &module.space, functions: &module.functions }))?;
    for (i, &result) in results.iter().enumerate() {
        let ty = show(&module.space, function.ty(result));
        write!(out, "{}{ty}", if i == 0 { " : " } else { ", " })?;
    }
    out.push('\n');
    Ok(())
}

struct ValueText<'a>(&'a Function, ValueId);

impl fmt::Display for ValueText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0.values[self.1].name {
            Some(name) => write!(f, "%{name}"),
            None => write!(f, "%{}", self.1.index()),
        }
    }
}
