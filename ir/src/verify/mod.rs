//! The verifier of modules: every numbered invariant, and the proof that they hold.
//!
//! Declared types are taken at their word and checked one node at a time, so one mistake is one diagnostic and the
//! others of the same module are found as well. The invariants are listed in [`crate::codes`].

mod function;
mod known;
mod space;
pub(crate) mod states;

pub use space::{MAX_AXES, MAX_BYTES, MAX_DIMS, MAX_RANKS};
pub(crate) use space::{check_axis, check_dim, check_space, check_type};

use std::collections::HashMap;
use std::ops::Deref;

use crate::diagnostic::{Diagnostic, Diagnostics, MAX_DIAGNOSTICS};
use crate::entity::Entity;
use crate::handles::{FuncId, MAX_LAYERS};
use crate::identifier::is_identifier;
use crate::layers::shifted;
use crate::module::{Function, Level, Module};
use crate::ops::table::op::Op;
use known::Known;

/// The most often that a function may run in one run of `main`.
const MAX_RUNS: u64 = 1 << 40;

/// Proof that a module was verified.
#[derive(Clone, Copy, Debug)]
pub struct Verified<'a> {
    module: &'a Module,
}

impl<'a> Verified<'a> {
    /// The module.
    pub fn module(self) -> &'a Module {
        self.module
    }
}

/// A module with the proof that it was verified.
#[derive(Clone, Debug)]
pub struct VerifiedModule {
    module: Module,
}

impl VerifiedModule {
    /// Checks every invariant.
    ///
    /// # Errors
    /// As [`verify`].
    pub fn new(module: Module) -> Result<Self, Diagnostics> {
        verify(&module)?;
        Ok(Self { module })
    }

    /// Checks every invariant of a module that was made from `previous`: operations of the same function on values of the
    /// same types are not checked again where both modules have one space.
    ///
    /// # Errors
    /// As [`verify`].
    pub fn after(previous: Verified<'_>, module: Module) -> Result<Self, Diagnostics> {
        check(&module, &Known::of(previous.module, &module))?;
        Ok(Self { module })
    }

    /// The proof.
    pub fn verified(&self) -> Verified<'_> {
        Verified { module: &self.module }
    }

    /// The module, which may be changed without the proof.
    pub fn into_module(self) -> Module {
        self.module
    }
}

impl From<Verified<'_>> for VerifiedModule {
    fn from(verified: Verified<'_>) -> Self {
        Self { module: verified.module.clone() }
    }
}

impl Deref for VerifiedModule {
    type Target = Module;

    fn deref(&self) -> &Module {
        &self.module
    }
}

/// Checks every invariant.
///
/// # Errors
/// `V` diagnostics, in order of the text; at most 64. Mistakes in the space hide those in functions.
pub fn verify(module: &Module) -> Result<Verified<'_>, Diagnostics> {
    check(module, &Known::default())?;
    Ok(Verified { module })
}

/// Checks every invariant that is not known to hold.
fn check(module: &Module, known: &Known<'_>) -> Result<(), Diagnostics> {
    let mut found = if known.has_space() { Vec::new() } else { check_space(&module.space) };
    if found.is_empty() {
        check_functions(module, known, &mut found);
    }
    if found.is_empty() {
        Ok(())
    } else {
        found.truncate(MAX_DIAGNOSTICS);
        Err(found)
    }
}

fn check_functions(module: &Module, known: &Known<'_>, found: &mut Diagnostics) {
    if module.level == Level::Program && !module.space.mesh.axes.is_empty() {
        let message = format!("a program has no mesh, but this one has `{}`", module.space.mesh);
        found.push(Diagnostic::new("V13", message));
    }
    let mut names: HashMap<&str, FuncId> = HashMap::new();
    for (id, function) in module.functions.iter() {
        if found.len() >= MAX_DIAGNOSTICS {
            return;
        }
        let Function { name, origin, span, .. } = function;
        let at = |code, message: String| Diagnostic::new(code, message).at(*span).label("this function");
        if !is_identifier(name) {
            found.push(at("V02", format!("`{name}` is no name for a function")));
        }
        if let Some(origin) = origin.as_ref().filter(|origin| !is_identifier(origin)) {
            found.push(at("V02", format!("`{origin}` is no name for the origin of `@{name}`")));
        }
        if names.insert(name, id).is_some() {
            found.push(at("V15", format!("there are two functions `@{name}`")));
        }
        let is_last = id.index() + 1 == module.functions.len();
        if name == "main" && !is_last {
            found.push(at("V15", "`@main` is not the last function".to_owned()));
        } else if name == "main" && !function.params.is_empty() {
            let diagnostic = at("V02", format!("`@main` takes {} parameters", function.params.len()));
            found.push(diagnostic.help("read values from outside with `input` and `param`"));
        }
        function::check(module, id, &known.nodes(function), found);
    }
    if found.is_empty() {
        states::check(module, known.module(), found);
    }
    match module.functions.iter().next_back() {
        Some(_) if names.contains_key("main") => check_runs(module, found),
        Some((_, last)) => {
            let diagnostic = Diagnostic::new("V15", "there is no function `@main`").at(last.span);
            found.push(diagnostic.label("the last function"));
        }
        None => found.push(Diagnostic::new("V15", "there is no function `@main`")),
    }
}

/// Checks the layers that functions run for, and how often they run.
fn check_runs(module: &Module, found: &mut Diagnostics) {
    let layers = module.layers_of_functions();
    for (id, function) in module.functions.iter().rev() {
        let last = layers[id.index()].last().map_or(0, |layers| layers.end.saturating_sub(1));
        for node in &function.nodes {
            let Op::Call { layers, stride, .. } = &node.op else { continue };
            let end = shifted(layers, *stride, last).end;
            if end > MAX_LAYERS && *stride != 0 {
                let message = format!(
                    "a call in `@{}` runs up to layer {end}; it needs 1 to {MAX_LAYERS}",
                    function.name
                );
                found.push(Diagnostic::new("V18", message).at(node.span).label("this call"));
            }
        }
    }
    let counts = module.run_counts();
    let too_often = module.functions.iter().find(|(id, _)| counts[id.index()] > MAX_RUNS);
    if let Some((_, function)) = too_often {
        let message = format!("`@{}` runs more than {MAX_RUNS} times", function.name);
        found.push(Diagnostic::new("V18", message).at(function.span).label("this function"));
    }
}
