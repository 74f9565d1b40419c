//! Passes, and the manager that runs, verifies and times them.
//!
//! A pass reads a verified module and returns a module that verifies. It opens no device, file or clock, and prints
//! nothing; its messages go to [`Context::note`].

pub mod choices;
pub mod options;
mod prices;
pub mod rebuild;
pub mod roles;

use std::time::{Duration, Instant};

use ithaca_ir::ops::OpError;
use ithaca_ir::verify::{Verified, VerifiedModule, verify};
use ithaca_ir::{Diagnostic, Diagnostics, Module};

use choices::{Choice, ChoiceRecorder, Choices, Source, Topic};

pub use prices::{Prices, Volume};

/// The choices and the messages of a run of passes.
pub struct Context<'a> {
    recorder: ChoiceRecorder<'a>,
    notes: Vec<String>,
    rewrites_left: Option<u64>,
}

impl<'a> Context<'a> {
    /// A context without limit on rewrites, in which choices are made by prices and recorded.
    pub fn new(prices: &'a dyn Prices) -> Self {
        Self::from(Source::Prices(prices))
    }

    /// A context that replays the choices of an earlier compilation.
    pub fn replaying(choices: &'a Choices) -> Self {
        Self::from(Source::Record(choices))
    }

    /// The next choice of a kind for a place, which is numbered if it was asked for before. A choice that is made by
    /// prices is then [recorded](Self::record).
    ///
    /// # Errors
    /// `P05` for a choice that the record does not have.
    pub fn choose(&mut self, topic: Topic, key: impl Into<String>) -> Result<Choice<'a>, OpError> {
        self.recorder.choose(topic, key.into())
    }

    /// Records the choice that was asked for last.
    pub fn record(&mut self, text: impl Into<String>) {
        self.recorder.record(text.into());
    }

    /// How choices are made.
    pub fn source(&self) -> Source<'a> {
        self.recorder.source()
    }

    /// The choices so far.
    pub fn choices(&self) -> &Choices {
        self.recorder.made()
    }

    /// The same context, in which only the first `n` rewrites are allowed; for bisecting.
    pub fn stop_after(mut self, n: Option<u64>) -> Self {
        self.rewrites_left = n;
        self
    }

    /// Adds a message about the result for the user, unless it is there already.
    pub fn note(&mut self, note: impl Into<String>) {
        let note = note.into();
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// The messages so far.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Whether one more rewrite may be made; counts it.
    pub fn rewrite(&mut self) -> bool {
        match &mut self.rewrites_left {
            None => true,
            Some(0) => false,
            Some(n) => {
                *n -= 1;
                true
            }
        }
    }
}

/// A transformation of modules.
///
/// [`rebuild`](crate::rebuild::rebuild) copies the nodes that a rewrite does not change. A pipeline can name a pass of
/// a `Registry`; `docs/book/src/guide/your-first-sharding-pass.md` adds one.
pub trait Pass {
    /// The name in a pipeline.
    fn name(&self) -> &'static str;

    /// The options in a pipeline, as they print.
    fn options(&self) -> Vec<(String, String)> {
        Vec::new()
    }

    /// The transformed module.
    ///
    /// # Errors
    /// `P` diagnostics: why the pass cannot be applied, with its numbers.
    fn run(&self, module: Verified<'_>, cx: &mut Context<'_>) -> Result<Module, Diagnostics>;
}

impl Pass for &(dyn Pass + Sync) {
    fn name(&self) -> &'static str {
        (**self).name()
    }

    fn options(&self) -> Vec<(String, String)> {
        (**self).options()
    }

    fn run(&self, module: Verified<'_>, cx: &mut Context<'_>) -> Result<Module, Diagnostics> {
        (**self).run(module, cx)
    }
}

impl std::fmt::Display for dyn Pass + '_ {
    /// `name{key=value,…}`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())?;
        let options = self.options();
        if !options.is_empty() {
            let options: Vec<String> = options.iter().map(|(k, v)| format!("{k}={v}")).collect();
            write!(f, "{{{}}}", options.join(","))?;
        }
        Ok(())
    }
}

impl<'a> From<Source<'a>> for Context<'a> {
    fn from(source: Source<'a>) -> Self {
        Self { recorder: ChoiceRecorder::new(source), notes: Vec::new(), rewrites_left: None }
    }
}

/// The first diagnostic of a refusal.
pub fn first(diagnostics: Diagnostics) -> Diagnostic {
    diagnostics.into_iter().next().expect("a refusal has at least one diagnostic")
}

/// The text of a pipeline.
pub fn print(passes: &[Box<dyn Pass>]) -> String {
    let passes: Vec<String> = passes.iter().map(|p| p.to_string()).collect();
    passes.join(",")
}

/// Watches a pipeline run.
pub trait Instrument {
    /// After a pass, with the new module and the time of the pass without verification.
    fn after(&mut self, pass: &dyn Pass, module: &Module, took: Duration);
}

/// An instrument that watches nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unwatched;

impl Instrument for Unwatched {
    fn after(&mut self, _pass: &dyn Pass, _module: &Module, _took: Duration) {}
}

/// Runs passes in order; the module is verified before the first and after each, and keeps their text.
///
/// # Errors
/// The diagnostics of the pass that refused, or of the verifier when a pass broke the module.
pub fn run_passes(
    module: Module,
    passes: &[Box<dyn Pass>],
    cx: &mut Context<'_>,
    instrument: &mut dyn Instrument,
) -> Result<Module, Diagnostics> {
    let last = run_on(verify(&module)?, passes, cx, instrument)?;
    Ok(last.map_or(module, VerifiedModule::into_module))
}

/// As [`run_passes`], from a module that is verified to another; nothing if there are no passes.
///
/// # Errors
/// As [`run_passes`].
pub fn run_on(
    module: Verified<'_>,
    passes: &[Box<dyn Pass>],
    cx: &mut Context<'_>,
    instrument: &mut dyn Instrument,
) -> Result<Option<VerifiedModule>, Diagnostics> {
    let mut last: Option<VerifiedModule> = None;
    for pass in passes {
        let before = last.as_ref().map_or(module, VerifiedModule::verified);
        let started = Instant::now();
        let mut next = pass.run(before, cx)?;
        let took = started.elapsed();
        next.pipeline.push(pass.to_string());
        instrument.after(pass.as_ref(), &next, took);
        last = Some(VerifiedModule::after(before, next)?);
    }
    Ok(last)
}
