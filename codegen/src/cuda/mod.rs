//! A self-contained C++17, CUDA and NCCL program from a schedule.
//!
//! The generated part, `main.cu`, states the space, the types and the tasks; what follows from them for a rank (extents,
//! strides, the geometry of collectives) is computed when the program starts. So the source has the same length for 2
//! and for 1024 ranks, and uneven splits need no tables. The rest of the program (`runtime/*.hpp`, `kernels/*.cuh`) is
//! the same for every schedule.

mod attention;
mod experts;
mod frame;
mod names;
mod program;
mod tables;

use ithaca_ir::ops::Op;
use ithaca_ir::schedule::{self, Schedule, Work};
use ithaca_ir::{DType, Diagnostics};

/// A file of an artifact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// Its path in the artifact, with `/`.
    pub path: String,
    /// Its text.
    pub contents: String,
}

/// Most dimensions of a tensor that the emitted kernels take.
pub const MAX_DIMS: usize = 8;

const RUNTIME: &[(&str, &str)] = &[
    ("check.hpp", include_str!("runtime/check.hpp")),
    ("space.hpp", include_str!("runtime/space.hpp")),
    ("boxes.hpp", include_str!("runtime/boxes.hpp")),
    ("rendezvous.hpp", include_str!("runtime/rendezvous.hpp")),
    ("safetensors.hpp", include_str!("runtime/safetensors.hpp")),
    ("source.hpp", include_str!("runtime/source.hpp")),
    ("task.hpp", include_str!("runtime/task.hpp")),
    ("patience.hpp", include_str!("runtime/patience.hpp")),
    ("communicators.hpp", include_str!("runtime/communicators.hpp")),
    ("watch.hpp", include_str!("runtime/watch.hpp")),
    ("device.hpp", include_str!("runtime/device.hpp")),
    ("launch.hpp", include_str!("runtime/launch.hpp")),
    ("ops.hpp", include_str!("runtime/ops.hpp")),
    ("experts.hpp", include_str!("runtime/experts.hpp")),
    ("attention.hpp", include_str!("runtime/attention.hpp")),
    ("random.hpp", include_str!("runtime/random.hpp")),
    ("training.hpp", include_str!("runtime/training.hpp")),
    ("einsum.hpp", include_str!("runtime/einsum.hpp")),
    ("collective.hpp", include_str!("runtime/collective.hpp")),
    ("message.hpp", include_str!("runtime/message.hpp")),
    ("gather.hpp", include_str!("runtime/gather.hpp")),
    ("compare.hpp", include_str!("runtime/compare.hpp")),
    ("driver.hpp", include_str!("runtime/driver.hpp")),
];

/// The program that runs `schedule`, one process per rank.
///
/// `reference` is a schedule of the whole program on a mesh of one; with it the program can check itself on one GPU.
/// `kernel_sources` is the device code by file name.
///
/// # Errors
/// What the schedule's verifier finds; `S40` for a task that has no emitted form, `S41` for a tensor of more than
/// [`MAX_DIMS`] dimensions.
pub fn emit(
    schedule: &Schedule,
    reference: Option<&Schedule>,
    kernel_sources: &[(&str, &str)],
) -> Result<Vec<File>, Diagnostics> {
    let mut main = String::from(
        "#include \"runtime/attention.hpp\"\n\
         #include \"runtime/collective.hpp\"\n\
         #include \"runtime/message.hpp\"\n\
         #include \"runtime/driver.hpp\"\n\
         #include \"runtime/einsum.hpp\"\n\
         #include \"runtime/ops.hpp\"\n\
         #include \"runtime/training.hpp\"\n",
    );
    if [Some(schedule), reference].into_iter().flatten().any(has_experts) {
        main.push_str("#include \"runtime/experts.hpp\"\n");
    }
    if [Some(schedule), reference].into_iter().flatten().any(draws) {
        main.push_str("#include \"runtime/random.hpp\"\n");
    }
    main.push('\n');
    let mut dtypes = Vec::new();
    for (namespace, schedule) in
        [("ranks", Some(schedule)), ("whole", reference)].into_iter().filter_map(|(n, s)| Some((n, s?)))
    {
        schedule::verify(schedule)?;
        let program = program::emit(namespace, schedule).map_err(|d| vec![d])?;
        main.push_str(&program.source);
        main.push('\n');
        dtypes.extend(program.dtypes);
    }
    let whole = if reference.is_some() { "&whole::program()" } else { "nullptr" };
    main.push_str(&format!(
        "int main(int argc, char** argv) {{ return ithaca::drive(argc, argv, ranks::program(), {whole}); }}\n"
    ));

    let mut files = vec![File { path: "main.cu".into(), contents: header(schedule) + &main }];
    let file = |path: String, contents: &str| File { path, contents: contents.to_owned() };
    files.extend(kernel_sources.iter().map(|(name, text)| file(format!("kernels/{name}"), text)));
    files.extend(RUNTIME.iter().map(|(name, text)| file(format!("runtime/{name}"), text)));
    files.push(File { path: "runtime/config.hpp".into(), contents: config(&dtypes) });
    files.push(file("Makefile".into(), include_str!("runtime/Makefile")));
    let readme = include_str!("runtime/README.md")
        .replace("@NAME@", &names::comment(&schedule.name))
        .replace("@RANKS@", &schedule.space.mesh.ranks().to_string())
        .replace("@MESH@", &schedule.space.mesh.to_string());
    files.push(File { path: "README.md".into(), contents: readme });
    Ok(files)
}

/// Whether a schedule computes what only models with experts, or with latent attention, do.
fn has_experts(schedule: &Schedule) -> bool {
    let tasks = schedule.frames.values().flat_map(|f| &f.tasks);
    tasks.into_iter().any(|t| matches!(&t.work, Work::Compute(Op::Experts(_) | Op::Window(_))))
}

/// Whether a schedule draws random numbers.
fn draws(schedule: &Schedule) -> bool {
    let tasks = schedule.frames.values().flat_map(|f| &f.tasks);
    tasks.into_iter().any(|t| matches!(&t.work, Work::Compute(Op::Random(_))))
}

fn header(schedule: &Schedule) -> String {
    format!(
        "// {}: {} ranks, mesh {}.\n// Pipeline: {}\n\n",
        names::comment(&schedule.name),
        schedule.space.mesh.ranks(),
        match schedule.space.mesh.axes.is_empty() {
            true => "of one".to_owned(),
            false => schedule.space.mesh.to_string(),
        },
        names::comment(&schedule.pipeline.join(",")),
    )
}

/// Which element types kernels are compiled for.
fn config(dtypes: &[DType]) -> String {
    let mut out = String::from(
        "// The floating-point types of the program; kernels are compiled for these.\n#pragma once\n\n",
    );
    for dtype in DType::ALL.into_iter().filter(|d| d.is_float()) {
        let has = u8::from(dtypes.contains(&dtype));
        out.push_str(&format!("#define ITHACA_HAS_{} {has}\n", dtype.name().to_uppercase()));
    }
    out
}
