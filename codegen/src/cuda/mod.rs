//! A self-contained C++17, CUDA and NCCL program from a schedule.
//!
//! The generated part, `main.cu`, is the schedule's device program as C++: each launch, product and transfer with its arguments.
//! `kernels/*.cuh` are the device code that it includes. `runtime/*.hpp` is the same for every schedule: it starts the program,
//! loads and writes tensors, waits, and compares.

mod context;
mod decoding;
mod frame;
mod lines;
mod names;
mod number;
mod part;
mod program;
mod record;

use std::collections::BTreeSet;

use ithaca_device::{Communicator, DeviceProgram, LowerError, SOURCES};
use ithaca_ir::handover::Handover;
use ithaca_ir::ops::{Attention, Keyed, Op};
use ithaca_ir::schedule::{Schedule, Verified, Work};
use ithaca_ir::{Diagnostic, Diagnostics};

/// A file of an artifact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// Its path in the artifact, with `/`.
    pub path: String,
    /// Its text.
    pub contents: String,
}

const RUNTIME: &[(&str, &str)] = &[
    ("check.hpp", include_str!("runtime/check.hpp")),
    ("ranks.hpp", include_str!("runtime/ranks.hpp")),
    ("safetensors.hpp", include_str!("runtime/safetensors.hpp")),
    ("source.hpp", include_str!("runtime/source.hpp")),
    ("watch.hpp", include_str!("runtime/watch.hpp")),
    ("products.hpp", include_str!("runtime/products.hpp")),
    ("device.hpp", include_str!("runtime/device.hpp")),
    ("compare.hpp", include_str!("runtime/compare.hpp")),
    ("options.hpp", include_str!("runtime/options.hpp")),
];

/// The command line of a program that runs steps.
const DRIVE: &[(&str, &str)] =
    &[("drive.hpp", include_str!("runtime/drive.hpp")), ("drive.cpp", include_str!("runtime/drive.cpp"))];

/// The steps of a program.
#[derive(Clone, Copy, Debug)]
pub struct Steps<'a> {
    /// The step; that of a token, where steps continue sequences.
    pub step: Verified<'a>,
    /// The step of prompts, where steps continue sequences: the program decodes.
    pub prompts: Option<Verified<'a>>,
    /// Where states go from steps of prompts to those of a token; none where both lay them out alike, on the same ranks.
    pub handover: Option<&'a Handover>,
}

impl Steps<'_> {
    fn n_processes(&self) -> u64 {
        self.handover.map_or(self.step.schedule().space.mesh.ranks(), Handover::n_processes)
    }

    /// The mesh, or that of each of two steps.
    fn shape(&self) -> String {
        let shape = |of: Verified<'_>| {
            let mesh = &of.schedule().space.mesh;
            if mesh.axes.is_empty() { "of one".to_owned() } else { mesh.to_string() }
        };
        match (self.handover, self.prompts) {
            (Some(_), Some(prompts)) => {
                format!("{} for prompts, {} for tokens", shape(prompts), shape(self.step))
            }
            _ => shape(self.step),
        }
    }
}

impl<'a> From<Verified<'a>> for Steps<'a> {
    fn from(step: Verified<'a>) -> Self {
        Self { step, prompts: None, handover: None }
    }
}

/// The program that runs steps of `ranks`, one process per rank.
///
/// `reference` has the steps of the whole program on a mesh of one; with it the program can check itself on one GPU.
///
/// # Errors
/// `S40` for a task that has no emitted form, and for steps that do not share their states; `S42` for dropout that follows a
/// device.
pub fn emit<'a>(ranks: impl Into<Steps<'a>>, reference: Option<Steps<'a>>) -> Result<Vec<File>, Diagnostics> {
    let (ranks, mut namespaces, mut kernels) = (ranks.into(), String::new(), BTreeSet::new());
    for (name, steps) in [("ranks", Some(ranks)), ("whole", reference)] {
        let Some(Steps { step, prompts, handover }) = steps else { continue };
        let mut programs = Vec::new();
        // Steps that run in turns share communicators if ranks are the same.
        let of_step = |step: Verified<'a>| Communicator::extra_communicators(step.schedule());
        let shared: BTreeSet<Communicator> = std::iter::once(step).chain(prompts).flat_map(of_step).collect();
        for (name, step) in [(name.to_owned(), Some(step)), (decoding::prompts_of(name), prompts)] {
            let Some(step) = step else { continue };
            let schedule = step.schedule();
            let communicators = match handover {
                None => shared.clone(),
                Some(_) => of_step(step).into_iter().collect(),
            };
            let communicators: Vec<Communicator> = communicators.into_iter().collect();
            check_dropout(schedule).map_err(|d| vec![d])?;
            let program = lower(schedule).map_err(|d| vec![d])?;
            namespaces
                .push_str(&program::print(&name, (schedule, &program), &communicators).map_err(|d| vec![d])?);
            namespaces.push('\n');
            kernels.extend(program.kernels());
            programs.push(program);
        }
        if let ([step, prompts], None) = (programs.as_slice(), handover) {
            decoding::check_states(step, prompts).map_err(|d| vec![d])?;
        }
    }
    let schedule = ranks.step.schedule();
    let drive = match ranks.prompts {
        Some(_) => decoding::drive(ranks.handover.is_some(), reference.is_some()),
        None => {
            let whole = if reference.is_some() { "&whole::program()" } else { "nullptr" };
            format!("drive(argc, argv, ranks::program(), {whole})")
        }
    };
    let command_line = if ranks.prompts.is_some() { decoding::DRIVE } else { DRIVE };
    let launched = headers(&kernels);
    let includes: String = launched.iter().map(|name| format!("#include \"kernels/{name}\"\n")).collect();
    let handover = ranks.handover.map(decoding::handover).unwrap_or_default();
    let main = format!(
        "{}{includes}#include \"runtime/{}\"\n\n{namespaces}{handover}int main(int argc, char** argv) {{ \
         return ithaca::{drive}; }}\n",
        header(ranks),
        command_line[0].0,
    );

    let mut files = vec![File { path: "main.cu".into(), contents: main }];
    let file = |path: String, contents: &str| File { path, contents: contents.to_owned() };
    let used = with_included(launched.iter().copied().chain([OF_THE_RUNTIME]).collect());
    let used = SOURCES.iter().filter(|(name, _)| used.contains(name));
    files.extend(used.map(|(name, text)| file(format!("kernels/{name}"), text)));
    files
        .extend(RUNTIME.iter().chain(command_line).map(|(name, text)| file(format!("runtime/{name}"), text)));
    files.push(file("Makefile".into(), include_str!("runtime/Makefile")));
    let readme = include_str!("runtime/README.md")
        .replace("@NAME@", &names::comment(&schedule.name))
        .replace("@RANKS@", &ranks.n_processes().to_string())
        .replace("@MESH@", &ranks.shape())
        .replace("@DECODING@", if ranks.prompts.is_some() { decoding::README } else { "" });
    files.push(File { path: "README.md".into(), contents: readme });
    Ok(files)
}

/// The device program; its errors as diagnostics.
fn lower(schedule: &Schedule) -> Result<DeviceProgram, Diagnostic> {
    let refusal =
        |error: LowerError| Diagnostic::new("S40", format!("the schedule has no emitted form: {error}"));
    ithaca_device::lower(schedule, ithaca_device::Options::default()).map_err(refusal)
}

/// Refuses dropout by a stream of random numbers, which is the order of one device.
fn check_dropout(schedule: &Schedule) -> Result<(), Diagnostic> {
    let attention = |work: &Work| match work {
        Work::Compute(Op::Attention(a) | Op::AttentionBackward(a)) => follows_stream(a),
        _ => false,
    };
    if schedule.frames.values().flat_map(|f| &f.tasks).any(|task| attention(&task.work)) {
        return Err(crate::dropout_of_a_device());
    }
    Ok(())
}

fn follows_stream(attention: &Attention) -> bool {
    attention.dropout.as_ref().is_some_and(|dropout| dropout.keyed == Keyed::Stream)
}

/// The header of kernels that the runtime includes.
const OF_THE_RUNTIME: &str = "numeric.cuh";

/// The headers that declare these kernels.
fn headers(kernels: &BTreeSet<String>) -> Vec<&'static str> {
    let names: BTreeSet<&str> = kernels.iter().filter_map(|kernel| kernel.split('<').next()).collect();
    let declares = |text: &str| {
        let mut declared = text.split("__global__ void ").skip(1);
        declared.any(|text| text.split('(').next().is_some_and(|name| names.contains(name)))
    };
    SOURCES.iter().filter(|(_, text)| declares(text)).map(|(name, _)| *name).collect()
}

/// Headers with all that they include, directly or not.
fn with_included(mut open: Vec<&'static str>) -> BTreeSet<&'static str> {
    let mut all = BTreeSet::new();
    while let Some(header) = open.pop() {
        if all.insert(header) {
            let text = SOURCES.iter().find(|(name, _)| *name == header).map_or("", |(_, text)| text);
            let included =
                text.lines().filter_map(|line| line.strip_prefix("#include \"")?.strip_suffix('"'));
            open.extend(included);
        }
    }
    all
}

fn header(steps: Steps<'_>) -> String {
    let schedule = steps.step.schedule();
    format!(
        "// {}: {} ranks, mesh {}.\n// Pipeline: {}\n\n",
        names::comment(&schedule.name),
        steps.n_processes(),
        steps.shape(),
        names::comment(&schedule.pipeline.join(",")),
    )
}
