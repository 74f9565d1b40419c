//! The workload that the arguments of a command describe: lengths, types, pages of caches, and states in host memory.

use std::path::Path;

use ithaca_ir::diagnostic::counted;
use ithaca_ir::{DType, Diagnostic, Mesh};
use ithaca_passes::import::{Capacity, Documents, ExpertBound, Labels, Logits, Mode, Pages, Workload};
use ithaca_passes::shard::strategy::STAGE_AXIS;

use crate::cli::{self, WorkloadArgs};
use crate::error::{Failure, Result};
use crate::{files, ineffective};

/// The lengths of given inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lengths {
    /// Sequences.
    pub batch: u64,
    /// Tokens of each sequence.
    pub sequence: u64,
    /// Tokens of each sequence of the decoder, where the model has one.
    pub target: Option<u64>,
}

/// The workload of arguments; missing lengths are those of `fallback`.
///
/// # Errors
/// `C00` for a missing length and an unknown element type, `P02` for an option of the training step.
pub fn workload(args: &WorkloadArgs, fallback: Option<Lengths>) -> Result<Workload> {
    let dtype =
        match &args.dtype {
            None => None,
            Some(name) => Some(DType::parse(name).filter(|d| d.is_arithmetic()).ok_or_else(|| {
                Failure::usage(format!("`--dtype {name}` is not one of f64, f32, f16, bf16"))
            })?),
        };
    let mode = match args.mode {
        None | Some(cli::Mode::Prefill) => Mode::Prefill,
        Some(cli::Mode::Train) => Mode::Train,
        Some(cli::Mode::Decode) => Mode::Decode,
        Some(cli::Mode::Serve) => {
            let refusal =
                Diagnostic::new("C00", "`--mode serve` is a mode of `plan`, which makes no program of it");
            return Err(refusal.help("use `--mode decode` for the steps that serve").into());
        }
    };
    let batch = args.batch.or(fallback.map(|f| f.batch));
    let documents = args.documents.as_deref().map(documents).transpose()?;
    let of_documents = documents.as_ref().map(Documents::tokens);
    let of_step = (args.mode == Some(cli::Mode::Decode)).then_some(1);
    let sequence = of_step.or(args.seq).or(of_documents).or(fallback.map(|f| f.sequence));
    let target_sequence = args.target_seq.or(fallback.and_then(|f| f.target));
    let sequence = sequence.ok_or_else(|| {
        Failure::from(
            Diagnostic::new("C00", "the length of the sequence is missing")
                .help("add it, as in `--seq 8192`"),
        )
    })?;
    let logits = match args.logits {
        Some(cli::Logits::Last) => Logits::Last,
        None if mode == Mode::Decode => Logits::Last,
        Some(cli::Logits::All) | None => Logits::All,
    };
    let training = ineffective::training(&ineffective::settings(args, mode)?)?;
    let labels = Labels { ahead: u64::from(args.shift_labels), ..Labels::default() };
    let host = offload(args)?.pages();
    check_page(args.page, args.context)?;
    Ok(Workload {
        capacity: args.capacity.as_deref().map(Capacity::parse).transpose()?,
        expert_bound: Some(match &args.expert_bound {
            Some(text) => ExpertBound::parse(text)?,
            None => ExpertBound::default(),
        }),
        documents,
        logits,
        labels,
        training,
        batch: batch.unwrap_or(1),
        sequence,
        target_sequence,
        dtype,
        mode,
        cache: args.context,
        step: None,
        cache_type: args.cache_type.as_deref().map(cache_type).transpose()?,
        pages: args.page.map(|tokens| Pages { tokens, count: args.pages, host }),
        ignore: args.ignore_fields.clone(),
    })
}

/// Refuses pages longer than a cache: all that is behind its end is never used.
///
/// # Errors
/// `M09`.
pub fn check_page(page: Option<u64>, context: Option<u64>) -> Result<()> {
    let (Some(page), Some(context)) = (page, context) else { return Ok(()) };
    if page <= context {
        return Ok(());
    }
    let message = format!("a page of {} in caches of {context}", counted(page, "token"));
    Err(Diagnostic::new("M09", message).repairs([format!("--page {context}")]).into())
}

/// Refuses fewer pages than full caches of all sequences need.
///
/// # Errors
/// `C19`.
pub fn check_pages(workload: &Workload) -> Result<()> {
    let Some((needed, all)) = workload.pages_needed(workload.batch).filter(|(needed, all)| all < needed)
    else {
        return Ok(());
    };
    let (tokens, context) = (workload.pages.map_or(1, |pages| pages.tokens), workload.cache.unwrap_or(0));
    let message = format!(
        "{} of {context} tokens in caches need {} of {}, and `--pages` is {all}",
        counted(workload.batch, "sequence"),
        counted(needed, "page"),
        counted(tokens, "token"),
    );
    Err(Diagnostic::new("C19", message).repairs([format!("--pages {needed}")]).into())
}

/// Which states are in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offload {
    /// None.
    None,
    /// Those of the optimizer.
    Optimizer,
    /// The pages of caches that do not fit on the GPUs.
    AsNeeded,
    /// So many pages of caches.
    Pages(u64),
}

impl Offload {
    /// The number of pages, where it is known.
    pub fn pages(self) -> Option<u64> {
        match self {
            Offload::None | Offload::Optimizer | Offload::AsNeeded => None,
            Offload::Pages(n) => Some(n),
        }
    }
}

/// The states that `--offload` asks to keep in host memory.
///
/// # Errors
/// `C00` for another value than `optimizer`, `cache` or `cache=N`, for caches without pages, and for as many pages as there
/// are, or more.
pub fn offload(args: &WorkloadArgs) -> Result<Offload> {
    let Some(text) = args.offload.as_deref() else { return Ok(Offload::None) };
    if text == "optimizer" {
        return Ok(Offload::Optimizer);
    }
    let number = match text.split_once('=') {
        None if text == "cache" => Some(0),
        Some(("cache", n)) => n.parse::<u64>().ok().filter(|&n| n > 0),
        None | Some(_) => None,
    };
    let refused = |message: String| {
        Diagnostic::new("C00", message)
            .help("write `--offload optimizer`, `--offload cache`, or `--offload cache=8` for 8 pages")
    };
    let n = number.ok_or_else(|| refused(format!("`--offload {text}` names no caches and no optimizer")))?;
    if args.page.is_none() {
        let message = format!("`--offload {text}` keeps pages of caches, and the caches have no pages");
        return Err(Diagnostic::new("C00", message).help("add their size, as in `--page 16`").into());
    }
    if n == 0 {
        return Ok(Offload::AsNeeded);
    }
    if args.pages.is_some_and(|all| n >= all) {
        return Err(refused(format!(
            "`--offload {text}` leaves no page of `--pages {}` on the GPUs",
            args.pages.unwrap_or(0)
        ))
        .into());
    }
    Ok(Offload::Pages(n))
}

/// The element type of caches of this name.
fn cache_type(name: &str) -> Result<DType> {
    let known = DType::parse(name).filter(|dtype| dtype.is_float() && *dtype != DType::F64);
    known.ok_or_else(|| Failure::usage(format!("`--cache-type {name}` is not one of f32, f16, bf16, f8e4m3")))
}

/// The file of lengths of documents that the value of `--documents` names, where it lists none.
pub(crate) fn documents_file(text: &str) -> Option<&Path> {
    let is_list = text.chars().all(|c| c.is_ascii_digit() || "kKmM*, ".contains(c));
    (!is_list).then(|| Path::new(text))
}

/// The lengths of documents that a text lists, or the file that it names.
fn documents(text: &str) -> Result<Documents> {
    let Some(file) = documents_file(text) else { return Ok(Documents::parse(text)?) };
    let lengths = files::read_text(file).map_err(|mut failure| {
        let help = "`--documents` takes lengths, as in `8k,512*30`, or a file of them";
        failure.diagnostics = failure.diagnostics.into_iter().map(|d| d.help(help)).collect();
        failure
    })?;
    Ok(Documents::parse(&lengths)?)
}

/// The workload with as many pipeline stages as the mesh has.
pub fn staged(mut workload: Workload, mesh: &Mesh) -> Workload {
    if let Some(axis) = mesh.axis(STAGE_AXIS) {
        workload.training.stages = mesh.size(axis);
    }
    workload
}

/// The workload with groups of tokens for so many GPUs, where a capacity was requested without groups.
pub fn grouped(workload: Workload, gpus: u64) -> Workload {
    let capacity = workload.capacity.map(|capacity| capacity.for_ranks(gpus, workload.sequence));
    Workload { capacity, ..workload }
}
