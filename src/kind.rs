//! The kind of a file, by its content. An unexpected kind is refused with its name and the command that reads it.
//!
//! Files with mistakes are accepted here; their reader reports the place of the mistake.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use ithaca_ir::{Diagnostic, Level};
use ithaca_kernels::store::shards;
use serde_json::Value;

use crate::error::Result;
use crate::files::{self, TextFile};

/// The kind of a file or folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A folder.
    Folder,
    /// A pipe or a device. Only its reader may read it, as it can be read once.
    Stream,
    /// A file without content.
    Empty,
    /// A program in text form.
    Program(Level),
    /// A schedule in text form.
    Schedule,
    /// Rewrite rules.
    Rules,
    /// A plan.
    Plan,
    /// Deployments that answer requests at a rate.
    Deployments,
    /// A model's `config.json`.
    Config,
    /// The index of a checkpoint of several files.
    Index,
    /// A schedule as JSON.
    ScheduleJson,
    /// A timeline for Perfetto.
    Trace,
    /// Other JSON, also incomplete JSON.
    Json,
    /// A cluster file.
    Cluster,
    /// A safetensors file.
    Tensors,
    /// A checkpoint in the format of PyTorch.
    Pickle,
    /// Other bytes that are not text.
    Binary,
    /// Other text.
    Text,
}

/// The kind of file that a command reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpectedKind {
    /// A plan.
    Plan,
    /// A plan or deployments, which have a report.
    Reported,
    /// A plan, a model, or a program to run.
    Subject,
    /// The configuration of a model.
    Model,
    /// The configuration of a model, or a program to plan.
    Described,
    /// A cluster file.
    Cluster,
    /// A program in text form, of any level.
    Program,
    /// A plan or a program in text form, for the comparison with a schedule.
    Meaning,
    /// Rewrite rules.
    Rules,
    /// Tensors.
    Tensors,
    /// A folder with the shards of a checkpoint.
    Shards,
}

/// The first bytes, by which text and other files are distinguished.
const HEAD: usize = 4096;

impl Kind {
    /// The kind of the file or folder at `path`.
    ///
    /// # Errors
    /// `C01` for a path that does not exist or is not readable.
    pub fn of(path: &Path) -> Result<Kind> {
        let failed = |e: &std::io::Error| files::failed(path, e);
        if files::is_standard_input(path) {
            return Ok(Kind::Stream);
        }
        let about = std::fs::metadata(path).map_err(|e| failed(&e))?;
        if about.is_dir() {
            return Ok(Kind::Folder);
        }
        if !about.is_file() {
            return Err(files::no_file(path));
        }
        let mut head = Vec::with_capacity(HEAD);
        let file = File::open(path).map_err(|e| failed(&e))?;
        file.take(HEAD as u64).read_to_end(&mut head).map_err(|e| failed(&e))?;
        Ok(match Kind::of_head(&head) {
            Kind::Json | Kind::Text if about.len() <= files::MAX_TEXT => {
                Kind::of_text(&files::read_text(path)?)
            }
            kind => kind,
        })
    }

    /// The kind of a file that begins with these bytes.
    fn of_head(head: &[u8]) -> Kind {
        if head.len() > 8 && head[8] == b'{' && head[5..8] == [0; 3] {
            // The length of the header, then the header.
            return Kind::Tensors;
        }
        if head.starts_with(b"PK\x03\x04") || head.starts_with(b"\x80\x02") {
            return Kind::Pickle;
        }
        let text = match std::str::from_utf8(head) {
            Ok(text) => text,
            // The end may cut a character.
            Err(e) if e.error_len().is_none() => {
                std::str::from_utf8(&head[..e.valid_up_to()]).expect("text before a UTF-8 error is UTF-8")
            }
            Err(_) => return Kind::Binary,
        };
        if text.contains('\0') {
            return Kind::Binary;
        }
        let code = code(text);
        match code.chars().next() {
            None if head.len() < HEAD => Kind::Empty,
            Some('{' | '[') => Kind::Json,
            None | Some(_) => Kind::Text,
        }
    }

    /// The kind of a text.
    fn of_text(text: &str) -> Kind {
        let code = code(text);
        let mut words = code.split_whitespace();
        match (words.next(), words.next(), words.next()) {
            (Some("ithaca"), _, Some("schedule")) => return Kind::Schedule,
            (Some("ithaca"), _, Some(level)) => {
                // The parser reports an unknown level.
                return Kind::Program(Level::parse(level).unwrap_or(Level::Program));
            }
            (Some("rule"), Some(_), _) => return Kind::Rules,
            (Some("ithaca"), _, None) => return Kind::Program(Level::Program),
            (None | Some(_), _, _) => {}
        }
        if code.starts_with(['{', '[']) && !code.starts_with("[[") && !is_table(code) {
            return serde_json::from_str(text).map_or(Kind::Json, |value| Kind::of_json(&value));
        }
        if text.lines().any(|line| matches!(line.trim(), "[accelerator]" | "[[levels]]")) {
            Kind::Cluster
        } else {
            Kind::Text
        }
    }

    /// The kind of a JSON value.
    pub fn of_json(value: &Value) -> Kind {
        let has = |fields: &[&str]| fields.iter().all(|&field| value.get(field).is_some());
        if has(&["frames", "dims"]) {
            Kind::ScheduleJson
        } else if has(&["workload"]) || has(&["strategy", "alternatives"]) || has(&["pipeline", "gpus"]) {
            Kind::Plan
        } else if has(&["demand", "frontier"]) {
            Kind::Deployments
        } else if has(&["model_type"]) {
            Kind::Config
        } else if has(&["weight_map"]) {
            Kind::Index
        } else if has(&["traceEvents"]) {
            Kind::Trace
        } else {
            Kind::Json
        }
    }

    /// Whether a file of this kind may be the wanted one; its reader reports mistakes.
    pub fn may_be(self, wanted: ExpectedKind) -> bool {
        if self == Kind::Stream {
            return true;
        }
        match wanted {
            ExpectedKind::Plan => matches!(self, Kind::Plan | Kind::Json),
            ExpectedKind::Reported => matches!(self, Kind::Plan | Kind::Deployments | Kind::Json),
            ExpectedKind::Subject => matches!(
                self,
                Kind::Plan | Kind::Config | Kind::Json | Kind::Folder | Kind::Program(Level::Program)
            ),
            ExpectedKind::Model => matches!(self, Kind::Config | Kind::Json | Kind::Folder),
            ExpectedKind::Described => {
                matches!(self, Kind::Config | Kind::Json | Kind::Folder | Kind::Program(Level::Program))
            }
            ExpectedKind::Cluster => matches!(self, Kind::Cluster | Kind::Text),
            ExpectedKind::Program => matches!(self, Kind::Program(_) | Kind::Text),
            ExpectedKind::Meaning => matches!(self, Kind::Program(_) | Kind::Plan | Kind::Json),
            ExpectedKind::Rules => matches!(self, Kind::Rules | Kind::Text),
            // The reader reports incomplete files, with the missing part.
            ExpectedKind::Tensors => {
                matches!(self, Kind::Tensors | Kind::Index | Kind::Folder | Kind::Binary | Kind::Empty)
            }
            ExpectedKind::Shards => matches!(self, Kind::Folder),
        }
    }

    /// The name of the kind, with an article.
    fn described(self) -> &'static str {
        match self {
            Kind::Folder => "a folder",
            Kind::Stream => "a stream",
            Kind::Empty => "empty",
            Kind::Program(Level::Program) => "a whole program in text form",
            Kind::Program(Level::Sharded) => "a sharded program in text form",
            Kind::Program(Level::PerRank) => "a per-rank program in text form",
            Kind::Schedule => "a schedule in text form",
            Kind::Rules => "a file of rewrite rules",
            Kind::Plan => "a plan",
            Kind::Deployments => "the deployments of a search",
            Kind::Config => "the configuration of a model",
            Kind::Index => "the index of a checkpoint",
            Kind::ScheduleJson => "a schedule as JSON",
            Kind::Trace => "a timeline",
            Kind::Json => "JSON",
            Kind::Cluster => "a cluster file",
            Kind::Tensors => "a safetensors file",
            Kind::Pickle => "an archive or a pickle, as PyTorch writes checkpoints",
            Kind::Binary => "a file that is not text",
            Kind::Text => "text in no form that Ithaca reads, and not JSON",
        }
    }

    /// The command or option that reads the file at `path`.
    fn taken_by(self, path: &str) -> Option<String> {
        let help = match self {
            Kind::Program(Level::Program) => format!("`ithaca run {path}` runs it, `ithaca plan {path} --gpus 8` plans it, `ithaca opt {path}` runs passes over it"),
            Kind::Program(Level::Sharded) => format!("`ithaca opt {path}` runs passes over it"),
            Kind::Program(Level::PerRank) => {
                format!("`ithaca verify {path} --program PROGRAM` compares it with a whole program, `ithaca opt {path}` runs passes over it")
            }
            Kind::Schedule => format!("`ithaca verify {path} --program plan.json` checks it"),
            Kind::Rules => format!("`ithaca opt PROGRAM --rules {path}` applies them"),
            Kind::Plan => format!("`ithaca explain {path}` explains it; `run`, `verify` and `emit` read it too"),
            Kind::Deployments => format!("`ithaca report {path} -o report.html` draws them"),
            Kind::Config => format!("`ithaca plan {path} --gpus 8 --seq 8192 -o plan.json` makes a plan for it"),
            Kind::Tensors | Kind::Index => "pass tensors to `ithaca run` as `--weights`, `--inputs` or `--expect`".to_owned(),
            Kind::ScheduleJson => {
                "no command reads it: `ithaca emit plan.json --target schedule` writes the text form, which `ithaca verify` checks".to_owned()
            }
            Kind::Trace => "open it in Perfetto or Chrome: no command reads it".to_owned(),
            Kind::Cluster => format!("pass it as `--cluster {path}`"),
            Kind::Pickle => "convert it to safetensors: no command reads it".to_owned(),
            Kind::Folder if Path::new(path).join(shards::INDEX).exists() => {
                format!("`ithaca merge-weights {path} -o model.safetensors` joins its shards")
            }
            Kind::Folder if Path::new(path).join("config.json").exists() => {
                format!("`ithaca plan {path} --gpus 8 --seq 8192 -o plan.json` makes a plan for its model")
            }
            Kind::Folder | Kind::Stream | Kind::Empty | Kind::Json | Kind::Binary | Kind::Text => return None,
        };
        Some(help)
    }
}

impl ExpectedKind {
    /// The wanted kind, with an article.
    fn described(self) -> &'static str {
        match self {
            ExpectedKind::Plan => "a plan",
            ExpectedKind::Reported => "a plan, or deployments that `ithaca plan --mode serve` wrote",
            ExpectedKind::Subject => "a plan, a model or a whole program",
            ExpectedKind::Model => "a model's folder or its config.json",
            ExpectedKind::Described => "a model's folder, its config.json or a whole program",
            ExpectedKind::Cluster => "a cluster file",
            ExpectedKind::Program => "a program in text form",
            ExpectedKind::Meaning => "a plan or a program in text form",
            ExpectedKind::Rules => "a file of rewrite rules",
            ExpectedKind::Tensors => "a safetensors file, its index or a folder with either",
            ExpectedKind::Shards => "a folder that `ithaca shard-weights` wrote",
        }
    }

    /// The command that makes or lists one.
    fn found_by(self) -> Option<&'static str> {
        match self {
            ExpectedKind::Plan | ExpectedKind::Reported | ExpectedKind::Meaning => {
                Some("`ithaca plan MODEL --gpus N --seq TOKENS -o plan.json` writes a plan")
            }
            ExpectedKind::Cluster => Some("`ithaca list clusters` lists the built-in clusters"),
            ExpectedKind::Program => Some("`ithaca emit plan.json --target ir` writes one"),
            ExpectedKind::Shards => {
                Some("`ithaca shard-weights plan.json --weights model.safetensors -o shards` writes one")
            }
            ExpectedKind::Subject
            | ExpectedKind::Model
            | ExpectedKind::Described
            | ExpectedKind::Rules
            | ExpectedKind::Tensors => None,
        }
    }
}

/// The kind of the file at `path`, if it may be the wanted one.
///
/// # Errors
/// `C01` for a path that does not exist or is not readable, `C03` for a sharded or per-rank program where a whole program is
/// needed, `C05` for another kind, with the command that reads it.
pub fn expect(path: &Path, wanted: ExpectedKind) -> Result<Kind> {
    let kind = Kind::of(path)?;
    if kind.may_be(wanted) {
        return Ok(kind);
    }
    let name = path.display().to_string();
    let is_program =
        matches!((kind, wanted), (Kind::Program(_), ExpectedKind::Subject | ExpectedKind::Described));
    let code = if is_program { "C03" } else { "C05" };
    let instead = is_program.then(|| "name its plan, or the whole program that it was made from".to_owned());
    let found_by = wanted.found_by().map(str::to_owned);
    let helps = kind.taken_by(&name).into_iter().chain(found_by).chain(instead);
    let message = format!("`{name}` is {}, and the command reads {}", kind.described(), wanted.described());
    let refusal = Diagnostic::new(code, message);
    Err(helps.fold(refusal, Diagnostic::help).into())
}

/// Checks that a path has tensors, or does not exist; the reader reports the latter.
///
/// # Errors
/// As [`expect`].
pub fn expect_tensors(path: &Path) -> Result<()> {
    if path.exists() {
        expect(path, ExpectedKind::Tensors)?;
    }
    Ok(())
}

/// A file of the wanted kind.
///
/// # Errors
/// As [`expect`].
pub fn read(path: &Path, wanted: ExpectedKind) -> Result<TextFile> {
    let kind = expect(path, wanted)?;
    let is_small = match kind {
        Kind::Config | Kind::Cluster | Kind::Rules => true,
        Kind::Plan | Kind::Program(_) | Kind::Schedule => false,
        _ => matches!(wanted, ExpectedKind::Model | ExpectedKind::Cluster | ExpectedKind::Rules),
    };
    TextFile::read_within(path, if is_small { files::MAX_SMALL } else { files::MAX_TEXT })
}

/// A text without its leading blanks and comments.
fn code(text: &str) -> &str {
    let mut rest = text.trim_start_matches('\u{feff}').trim_start();
    while rest.starts_with("//") {
        rest = rest.find('\n').map_or("", |end| rest[end..].trim_start());
    }
    rest
}

/// Whether a text that begins with a bracket begins with a table of TOML.
fn is_table(code: &str) -> bool {
    let name = code.strip_prefix('[').and_then(|rest| rest.split_once(']')).map(|(name, _)| name);
    name.is_some_and(|name| name.starts_with(|c: char| c.is_ascii_lowercase()))
}
