//! Pipelines as text: `shard{strategy=ulysses,ulysses=4},lower-reshards`.

use ithaca_differentiate::{self as differentiate, Differentiate, Training};
use ithaca_ir::Diagnostic;
use ithaca_layout::fuse::levels::{self, TwoLevel};
use ithaca_layout::fuse::overlap::{self, Overlap};
use ithaca_layout::fuse::prefetch::{self, Prefetch};
use ithaca_layout::fuse::saturate::{self, Saturate};
use ithaca_layout::fuse::{self, Accumulate, FuseCaches, Pack};
use ithaca_layout::lower_movements::{self, LowerMovements};
use ithaca_layout::registry::Registry;
use ithaca_layout::reshard::LowerReshards;
use ithaca_layout::shard::{self, Shard, ShardOptions};
use ithaca_pass::Pass;
use ithaca_pass::options::{self, NoOptions};

pub use ithaca_pass::print;

/// A pass as written: its name and its options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    /// The name.
    pub name: String,
    /// Options in order.
    pub options: Vec<(String, String)>,
}

type ReadPass = fn(&Registry, &Stage) -> Result<Box<dyn Pass>, Diagnostic>;

/// The row of a pass for `list passes`.
pub struct PassInfo {
    /// The name in a pipeline.
    pub name: &'static str,
    /// What it does, in one sentence.
    pub summary: &'static str,
    /// Its options.
    pub options: &'static str,
    /// Reads it with its options.
    read: ReadPass,
}

/// Every pass.
pub const PASSES: &[PassInfo] = &[
    PassInfo {
        name: "differentiate",
        summary: "makes a training step of a program with an output `loss`: backward functions, gradients, the optimizer",
        options: differentiate::OPTIONS,
        read: |_, stage| Ok(boxed(Differentiate::new(Training::from_pipeline(&stage.options)?))),
    },
    PassInfo {
        name: "shard",
        summary: "lays a program out over a mesh by a strategy; layouts that do not match become reshards",
        options: shard::OPTIONS,
        read: |registry, stage| {
            let options = ShardOptions::from_pipeline(&stage.options)?;
            Ok(boxed(Shard::new(options).with_registry(registry.clone())))
        },
    },
    PassInfo {
        name: "lower-movements",
        summary: "turns attention whose keys are split into explicit steps: transfers, partial attention, merges",
        options: lower_movements::OPTIONS,
        read: |registry, stage| {
            let options = options::read(&stage.name, lower_movements::OPTIONS, &stage.options)?;
            Ok(boxed(LowerMovements::new(registry.clone(), options)))
        },
    },
    PassInfo {
        name: "two-level",
        summary: "splits each mesh axis that spans nodes in two, so that each collective becomes one across nodes and one inside",
        options: levels::OPTIONS,
        read: |_, stage| options::pass::<TwoLevel>(&stage.name, levels::OPTIONS, &stage.options),
    },
    PassInfo {
        name: "lower-reshards",
        summary: "turns each reshard into the cheapest sequence of collectives on the cluster",
        options: "none",
        read: |_, stage| without_options(stage).map(|()| boxed(LowerReshards)),
    },
    PassInfo {
        name: "accumulate",
        summary: "adds products to sums of gradients in one kernel",
        options: "none",
        read: |_, stage| without_options(stage).map(|()| boxed(Accumulate)),
    },
    PassInfo {
        name: "fuse-caches",
        summary: "rotates keys where they are appended to caches, and lets attention of few queries read pages where they are",
        options: "none",
        read: |_, stage| without_options(stage).map(|()| boxed(FuseCaches)),
    },
    PassInfo {
        name: "saturate",
        summary: "rewrites each function to the form that is cheapest on the cluster, by rules of communication and an e-graph",
        options: saturate::OPTIONS,
        read: |_, stage| options::pass::<Saturate>(&stage.name, saturate::OPTIONS, &stage.options),
    },
    PassInfo {
        name: "overlap",
        summary: "cuts collectives and the kernels next to them into chunks, so that one chunk is sent while another is computed",
        options: overlap::OPTIONS,
        read: |_, stage| options::pass::<Overlap>(&stage.name, overlap::OPTIONS, &stage.options),
    },
    PassInfo {
        name: "pack",
        summary: "coalesces independent collectives of one kind, between the same ranks, into one message",
        options: fuse::OPTIONS,
        read: |_, stage| options::pass::<Pack>(&stage.name, fuse::OPTIONS, &stage.options),
    },
    PassInfo {
        name: "prefetch",
        summary: "gathers weights before their use and reduces gradients after they are computed, overlapped with kernels, also across layers",
        options: prefetch::OPTIONS,
        read: |_, stage| options::pass::<Prefetch>(&stage.name, prefetch::OPTIONS, &stage.options),
    },
    PassInfo {
        name: "rules",
        summary: "tries the rewrite rules of the file of `--rules`, and applies them",
        options: "none",
        read: |_, _| {
            let message = "`rules` reads its rules from a file, and has no options";
            Err(Diagnostic::new("P02", message).help("name the file with `ithaca opt --rules FILE`"))
        },
    },
];

/// Reads the text of a pipeline into stages.
///
/// # Errors
/// `P01` when braces or options are malformed.
pub fn parse_stages(text: &str) -> Result<Vec<Stage>, Diagnostic> {
    let malformed = |problem: String| {
        Diagnostic::new("P01", format!("pipeline `{text}`: {problem}"))
            .help("a pipeline is `pass,pass{key=value,key=value},…`")
    };
    let mut stages = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let end = rest.find([',', '{']).unwrap_or(rest.len());
        let name = rest[..end].trim();
        let valid = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        if name.is_empty() || !name.chars().all(valid) {
            return Err(malformed(format!("`{name}` is not the name of a pass")));
        }
        rest = &rest[end..];
        let mut options = Vec::new();
        if let Some(body) = rest.strip_prefix('{') {
            let close = body.find('}').ok_or_else(|| malformed(format!("`{name}{{` is not closed")))?;
            for item in items(&body[..close]).map(str::trim).filter(|item| !item.is_empty()) {
                let (key, value) =
                    item.split_once('=').ok_or_else(|| malformed(format!("option `{item}` has no value")))?;
                options.push((key.trim().to_owned(), value.trim().to_owned()));
            }
            rest = body[close + 1..].trim_start();
        }
        stages.push(Stage { name: name.to_owned(), options });
        rest = match rest.strip_prefix(',') {
            Some(more) if !more.trim().is_empty() => more.trim_start(),
            Some(_) => return Err(malformed("it ends in a comma".to_owned())),
            None if rest.is_empty() => rest,
            None => return Err(malformed(format!("expected a comma before `{rest}`"))),
        };
    }
    Ok(stages)
}

/// The items between commas; commas inside parentheses do not separate.
fn items(body: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0usize;
    body.split(move |c: char| {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0
    })
}

/// Reads the text of a pipeline.
///
/// # Errors
/// `P01` for malformed text, `P02` for an unknown pass or option.
pub fn parse(text: &str) -> Result<Vec<Box<dyn Pass>>, Diagnostic> {
    parse_with(&Registry::default(), text)
}

/// As [`parse`], with the strategies, movements and passes of `registry`.
///
/// # Errors
/// As [`parse`].
pub fn parse_with(registry: &Registry, text: &str) -> Result<Vec<Box<dyn Pass>>, Diagnostic> {
    parse_stages(text)?.into_iter().map(|stage| pass_of(registry, stage)).collect()
}

fn pass_of(registry: &Registry, stage: Stage) -> Result<Box<dyn Pass>, Diagnostic> {
    let name = stage.name.as_str();
    if let Some(info) = PASSES.iter().find(|pass| pass.name == name) {
        return (info.read)(registry, &stage);
    }
    if let Some(pass) = registry.passes().find(|pass| pass.name() == name) {
        return without_options(&stage).map(|()| boxed(pass));
    }
    let known = PASSES.iter().map(|p| p.name).chain(registry.passes().map(|p| p.name()));
    Err(Diagnostic::new("P02", format!("there is no pass `{name}`")).names("passes", name, known))
}

fn boxed(pass: impl Pass + 'static) -> Box<dyn Pass> {
    Box::new(pass)
}

fn without_options(stage: &Stage) -> Result<(), Diagnostic> {
    options::read::<NoOptions>(&stage.name, "none", &stage.options).map(|NoOptions {}| ())
}
