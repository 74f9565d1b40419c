//! Attributes in the form that the text form, the parser and the printer share.

use std::fmt;

use crate::handles::FuncId;
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

impl Attr {
    /// Whether it is the bare word `word`.
    pub(crate) fn is_word(&self, word: &str) -> bool {
        matches!(self, Attr::Word(found) if found == word)
    }
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

/// Parts that are chains themselves are put in parentheses, whether they need them or not.
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

/// The names that attributes refer to.
#[derive(Clone, Copy)]
pub struct Names<'a> {
    /// Dimensions and axes.
    pub space: &'a Space,
    /// Functions.
    pub functions: &'a dyn FunctionNames,
}

/// Functions by name.
pub trait FunctionNames {
    /// The name of a function.
    fn name_of(&self, function: FuncId) -> Option<&str>;
    /// The function called `name`.
    fn called(&self, name: &str) -> Option<FuncId>;
}

/// No functions: a schedule refers to none.
pub(crate) struct NoFunctions;

impl FunctionNames for NoFunctions {
    fn name_of(&self, _: FuncId) -> Option<&str> {
        None
    }

    fn called(&self, _: &str) -> Option<FuncId> {
        None
    }
}

/// Attributes of the text form, taken one by one. An attribute that is left over is an error.
#[derive(Clone, Debug)]
pub struct Attrs {
    op: String,
    items: Vec<(String, Attr)>,
}

/// The message that refuses attributes.
pub type AttrError = String;

impl Attrs {
    /// The attributes of the operation called `op`.
    pub fn new(op: impl Into<String>, items: Vec<(String, Attr)>) -> Self {
        Self { op: op.into(), items }
    }

    pub(crate) fn has(&self, key: &str) -> bool {
        self.items.iter().any(|(k, _)| k == key)
    }

    pub(crate) fn take(&mut self, key: &str) -> Option<Attr> {
        let i = self.items.iter().position(|(k, _)| k == key)?;
        Some(self.items.remove(i).1)
    }

    pub(crate) fn missing(&self, key: &str) -> AttrError {
        format!("`{}` lacks attribute `{key}`", self.op)
    }

    pub(crate) fn wrong(&self, key: &str, expected: &str, found: &Attr) -> AttrError {
        format!("attribute `{key}` of `{}` must be {expected}, not `{found}`", self.op)
    }

    pub(crate) fn finish(self) -> Result<(), AttrError> {
        match self.items.first() {
            None => Ok(()),
            Some((key, _)) => Err(format!("`{}` has no attribute `{key}`", self.op)),
        }
    }
}
