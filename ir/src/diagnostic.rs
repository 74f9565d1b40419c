//! Diagnostics: a user's mistake, its place, and the repair.
//!
//! Codes: `E` parse, `V` verify, `P` pass, `S` schedule, `M` model. Messages are lower case, carry their numbers and
//! have no final stop; the message states the mistake, the helps the repair.

use std::fmt;
use std::ops::Range;

use annotate_snippets::{AnnotationKind, Level, Renderer, Snippet};
use serde::Serialize;

/// A range of bytes of a source text; empty when the thing has no place in a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Span {
    /// First byte.
    pub start: u32,
    /// One past the last byte.
    pub end: u32,
}

impl Span {
    /// The span of `start..end`.
    pub fn new(start: usize, end: usize) -> Self {
        Self { start: u32::try_from(start).unwrap_or(u32::MAX), end: u32::try_from(end).unwrap_or(u32::MAX) }
    }

    /// Whether the span points nowhere.
    pub fn is_empty(self) -> bool {
        self.start >= self.end
    }
}

/// A text that spans point into, and the name to show for it.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// A path, or a description such as `command line`.
    pub name: &'a str,
    /// The whole text.
    pub text: &'a str,
}

/// One refusal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Diagnostic {
    /// The rule that was broken, for example `V07` or `P03`.
    pub code: &'static str,
    /// The mistake, with its numbers.
    pub message: String,
    /// Where.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub span: Option<Span>,
    /// The label of that place.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub label: String,
    /// Repairs; two at most.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub helps: Vec<String>,
    /// Command-line options, each of which makes the refused request legal.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub repairs: Vec<String>,
}

impl Diagnostic {
    /// A diagnostic that points nowhere yet.
    pub fn new(code: &'static str, message: impl Into<String>) -> Self {
        Self {
            code,
            message: printable(&message.into()),
            span: None,
            label: String::new(),
            helps: Vec::new(),
            repairs: Vec::new(),
        }
    }

    /// Points at `span`, if it is somewhere.
    pub fn at(mut self, span: Span) -> Self {
        self.span = Some(span).filter(|s| !s.is_empty());
        self
    }

    /// Puts `label` at the place pointed at.
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.label = label.into();
        self
    }

    /// Adds a repair.
    pub fn help(mut self, help: impl Into<String>) -> Self {
        self.helps.push(help.into());
        self
    }

    /// Adds the names that are known in place of `name`: the nearest, where one is near, then all of them.
    ///
    /// ```
    /// use ithaca_ir::Diagnostic;
    /// let refusal = Diagnostic::new("P10", "there is no strategy `rign`").names("strategies", "rign", ["ring", "usp"]);
    /// assert_eq!(refusal.helps, ["did you mean `ring`?", "strategies: ring, usp"]);
    /// ```
    pub fn names<'a>(self, kind: &str, name: &str, known: impl IntoIterator<Item = &'a str>) -> Self {
        let known: Vec<&str> = known.into_iter().collect();
        let near = nearest(name, known.iter().copied());
        let suggested = near.iter().fold(self, |d, near| d.help(format!("did you mean `{near}`?")));
        suggested.help(format!("{kind}: {}", known.join(", ")))
    }

    /// Adds options that make the request legal.
    pub fn repairs(mut self, repairs: impl IntoIterator<Item = String>) -> Self {
        self.repairs.extend(repairs);
        self
    }

    /// The diagnostic for a terminal, without colours; `source` is the text its span points into.
    pub fn render(&self, source: Option<Source<'_>>) -> String {
        self.render_within(source, COLUMNS)
    }

    /// As [`Self::render`], with lines of the source cut to `columns` around the span, and the span to its first part where it is
    /// longer. Messages and helps are not cut.
    pub fn render_within(&self, source: Option<Source<'_>>, columns: usize) -> String {
        let mut helps = self.helps.clone();
        if !self.repairs.is_empty() {
            let lines: String = self.repairs.iter().map(|repair| format!("\n      {repair}")).collect();
            helps.push(format!(
                "{} works:{lines}",
                if self.repairs.len() == 1 { "this" } else { "any of these" }
            ));
        }
        let span = self.span.map(|s| s.start as usize..s.end as usize);
        let (source, span) = match (source, span) {
            (Some(source), Some(span)) if source.text.get(span.clone()).is_some() => (source, span),
            _ => {
                let helps: String = helps.iter().map(|help| format!("\n  = help: {help}")).collect();
                return format!("{self}{helps}");
            }
        };
        let span = shortened(source.text, span, (columns, &self.label));
        let annotation = AnnotationKind::Primary.span(span);
        let annotation = match self.label.as_str() {
            "" => annotation,
            label => annotation.label(label),
        };
        let title = Level::ERROR.primary_title(self.message.as_str()).id(self.code);
        let mut group = title.element(Snippet::source(source.text).path(source.name).annotation(annotation));
        for help in &helps {
            group = group.element(Level::HELP.message(help.as_str()));
        }
        Renderer::plain().term_width(columns).render(&[group])
    }
}

/// Columns of a terminal of which nothing is known.
const COLUMNS: usize = 140;

/// The part of a span that has room in so many columns, beside the number of the line, an ellipsis on both sides and a label;
/// the whole span where its line fits, and where it has several lines.
fn shortened(text: &str, span: Range<usize>, (columns, label): (usize, &str)) -> Range<usize> {
    /// Columns of an ellipsis with a few characters, on each side.
    const BESIDE: usize = 6;
    let (before, after) = (&text[..span.start], &text[span.end..]);
    let start = before.rsplit('\n').next().map_or(0, |start| start.chars().count());
    let rest = after.lines().next().map_or(0, |rest| rest.chars().count());
    let part = &text[span.clone()];
    let number = (before.matches('\n').count() + 1).to_string().len() + " | ".len();
    let label = if label.is_empty() { 0 } else { label.chars().count() + 1 };
    if part.contains('\n') || number + start + part.chars().count() + rest <= columns {
        return span;
    }
    let room = columns.saturating_sub(number + 2 * BESIDE + label).max(1);
    let end = part.char_indices().nth(room).map_or(span.end, |(at, _)| span.start + at);
    span.start..end
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error[{}]: {}", self.code, self.message)
    }
}

impl std::error::Error for Diagnostic {}

/// Refusals, in order of discovery; never empty when returned as an error.
pub type Diagnostics = Vec<Diagnostic>;

/// The verifier stops after this many mistakes.
pub(crate) const MAX_DIAGNOSTICS: usize = 64;

/// A name of others as it may be printed: control characters, which could change what a terminal shows, and characters that change
/// the direction of text are escaped.
///
/// ```
/// use ithaca_ir::diagnostic::printable;
/// assert_eq!(printable("ok\u{1b}[2J\n"), "ok\\u{1b}[2J\\n");
/// ```
pub fn printable(name: &str) -> String {
    escaped(name, |c| c.is_control())
}

/// A text of several lines as it may be printed, escaped as [`printable`] does but for the ends of lines and tabs.
pub fn printable_lines(text: &str) -> String {
    escaped(text, |c| c.is_control() && c != '\n' && c != '\t')
}

fn escaped(text: &str, is_hidden: impl Fn(char) -> bool) -> String {
    let turns = |c| matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if is_hidden(c) || turns(c) { out.extend(c.escape_default()) } else { out.push(c) }
    }
    out
}

/// A number of things, for messages: `1 rank`, `2 ranks`; of a noun whose plural ends in `s`.
pub fn counted(n: impl Into<u128>, noun: &str) -> String {
    match n.into() {
        1 => format!("1 {noun}"),
        n => format!("{n} {noun}s"),
    }
}

/// The known name that `name` probably stands for: the one with the fewest edits (insertions, deletions, substitutions,
/// swaps of neighbours), at most one for every three characters; the first of several. Names of more than 64 characters have
/// none.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    const LONGEST: usize = 64;
    let length = name.chars().count();
    if length > LONGEST {
        return None;
    }
    let limit = length.div_ceil(3);
    let distance = |known: &&str| strsim::damerau_levenshtein(name, known);
    let edits = known.into_iter().map(|known| (distance(&known), known));
    edits.filter(|&(edits, _)| edits <= limit).min_by_key(|&(edits, _)| edits).map(|(_, known)| known)
}

/// Diagnostics for a terminal, one after another, with a count at the end when there are several.
pub fn render(diagnostics: &[Diagnostic], source: Option<Source<'_>>) -> String {
    render_within(diagnostics, source, COLUMNS)
}

/// As [`render`], with lines of the source cut to `columns`.
pub fn render_within(diagnostics: &[Diagnostic], source: Option<Source<'_>>, columns: usize) -> String {
    let mut out = String::new();
    for diagnostic in diagnostics {
        out += &diagnostic.render_within(source, columns);
        out += "\n";
    }
    if diagnostics.len() > 1 {
        out += &format!("{} errors\n", diagnostics.len());
    }
    out
}

/// Diagnostics as JSON: `{"diagnostics": [{code, message, span?, file?, line?, column?, label?, helps?, repairs?}]}`.
///
/// Spans are bytes from 0; lines and columns count from 1, columns in characters. Empty fields are left out.
pub fn json(diagnostics: &[Diagnostic], source: Option<Source<'_>>) -> serde_json::Value {
    let place = |diagnostic: &Diagnostic| {
        let source = source?;
        let before = source.text.get(..diagnostic.span?.start as usize)?;
        let line_start = before.rfind('\n').map_or(0, |i| i + 1);
        Some(Place {
            file: source.name,
            line: before.matches('\n').count() + 1,
            column: before[line_start..].chars().count() + 1,
        })
    };
    let entries: Vec<Placed<'_>> =
        diagnostics.iter().map(|diagnostic| Placed { diagnostic, place: place(diagnostic) }).collect();
    serde_json::json!({ "diagnostics": entries })
}

#[derive(Serialize)]
struct Placed<'a> {
    #[serde(flatten)]
    diagnostic: &'a Diagnostic,
    #[serde(flatten)]
    place: Option<Place<'a>>,
}

#[derive(Serialize)]
struct Place<'a> {
    file: &'a str,
    line: usize,
    column: usize,
}
