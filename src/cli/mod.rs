//! The command line's grammar.

mod decoding;
mod frameworks;
mod project;
mod run;
mod search;
mod serving;
mod subject;
mod values;

use std::path::PathBuf;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use serde::Serialize;

pub use decoding::DecodingArgs;
pub use frameworks::{ExportArgs, ImportArgs};
pub use project::{CheckArgs, InitArgs, PROJECT};
pub use run::{CollectivesArg, DeviceArg, RunArgs, StorageArg};
pub use search::{NarrowingArgs, TableArgs};
pub use serving::ServingArgs;
pub use subject::{DEFAULT_CLUSTER, LayoutArgs, Logits, Mode, SubjectArgs, WorkloadArgs};
pub(crate) use values::tokens;
use values::{positive, tolerance, whole};

/// A compiler for distributed attention.
#[derive(Debug, Parser)]
#[command(
    name = "ithaca",
    version,
    about,
    long_about = None,
    arg_required_else_help = true,
    max_term_width = 100
)]
pub struct Cli {
    /// The form of error messages.
    #[arg(long, value_enum, default_value_t = ErrorFormat::Human, global = true, value_name = "FORMAT")]
    pub error_format: ErrorFormat,
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The form of error messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ErrorFormat {
    /// For a person.
    Human,
    /// One JSON object per line.
    Json,
}

/// The command.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Choose how to distribute a model, with the reasons.
    #[command(after_help = "\
Examples:
  ithaca plan examples/llama-3-8b --gpus 8 --seq 128k -o plan.json
  ithaca plan examples/llama-3-70b --mode train --gpus 64 --seq 8k --batch 64
  ithaca plan examples/llama-3-70b --mode decode --gpus 8 --batch 64 --context 8k
  ithaca plan examples/llama-3-70b --mode serve --rate 10 --input 2k --output 256 --tpot 30
  ithaca plan --check plan.json

A plan of training searches what is left open: strategy, mesh, ZeRO, recomputation, micro-batches, order of stages, and parts of
the loss. --max-tp, --only and --without narrow it.")]
    Plan(PlanArgs),
    /// Write ithaca.toml, which names models, clusters and workloads to plan.
    #[command(after_help = "\
Examples:
  ithaca init models/llama-3-8b
  ithaca check --bless")]
    Init(InitArgs),
    /// Plan everything in ithaca.toml and review the differences from the committed plans; exit 1 when there are any.
    #[command(after_help = "\
Examples:
  ithaca check
  ithaca check --bless

Exit code: 0 if every plan is as committed; 1 if one differs, is missing, or is not named any
more; 2 after an error. With --bless plans are written, and 1 remains for those not named.")]
    Check(CheckArgs),
    /// Write a plan as code: IR, schedule, JSON, a picture, or a CUDA/NCCL program.
    #[command(after_help = "\
Example:
  ithaca emit plan.json --target cuda -o out/ && make -C out")]
    Emit(EmitArgs),
    /// Write a plan for a framework, such as Megatron-LM, DeepSpeed, torchtitan or vLLM.
    ///
    /// A plan that the framework cannot run is refused with every reason; `--nearest` writes the nearest layout that it can run, and
    /// names each difference.
    #[command(after_help = "\
Examples:
  ithaca export plan.json --to megatron -o train.sh
  ithaca export plan.json --to torchtitan --nearest
  ithaca plan examples/llama-3-70b --mode train --gpus 64 --seq 8k --batch 64 --for megatron -o plan.json")]
    Export(ExportArgs),
    /// Price the layout of another framework's command line beside the best plan for it.
    #[command(after_help = "\
Examples:
  ithaca import --from megatron --gpus 64 --model examples/llama-3-70b -- \\
    --tensor-model-parallel-size 8 --sequence-parallel --seq-length 8192 --bf16 \\
    --micro-batch-size 1 --global-batch-size 64
  ithaca import --from megatron --gpus 64 train.sh")]
    Import(ImportArgs),
    /// Run a plan or a model on this machine, a thread per rank, and compare the outputs.
    #[command(after_help = "\
Examples:
  ithaca run plan.json --shrink
  ithaca run DIR --inputs DIR/io.safetensors --expect DIR/io.safetensors
  ithaca run DIR --mode train --seq 64 --steps 5 --save step5.safetensors
  ithaca run DIR --mode train --seq 64 --steps 5 --resume step5.safetensors --mesh dp=4
  torchrun --nproc-per-node 8 --no-python ithaca run plan.json --shrink --launch")]
    Run(RunArgs),
    /// Check in double precision that the per-rank program computes the same as the whole program.
    ///
    /// A schedule in text form, as `emit --target schedule` writes it, is checked for memory, collectives and order,
    /// and with `--program` also against its program.
    #[command(after_help = "\
Examples:
  ithaca verify plan.json
  ithaca verify DIR --mode train --seq 64 --strategy ring --mesh ring=4 --steps 2
  ithaca verify schedule.ith --program plan.json
  ithaca verify ranks.ith --program whole.ith

Exit code: 0 if nothing differs, also where ranks send nothing and there is no communication to prove; 1 with a difference; 2 after
an error, as when a small model lacks a collective of its plan.")]
    Verify(VerifyArgs),
    /// Split a checkpoint into one file for each rank of a plan.
    #[command(after_help = "\
Examples:
  ithaca shard-weights plan.json --weights model.safetensors -o shards
  ithaca shard-weights DIR --strategy megatron-tp --mesh tp=4 -o shards
  ithaca shard-weights DIR --mode train --mesh dp=4 --zero 3 --weights step5.safetensors -o shards")]
    ShardWeights(ShardWeightsArgs),
    /// Join the files of `shard-weights`, bit for bit.
    #[command(after_help = "\
Example:
  ithaca merge-weights shards -o model.safetensors")]
    MergeWeights {
        /// A folder that `shard-weights` wrote.
        shards: PathBuf,
        /// The safetensors file to write.
        #[arg(short, long, value_name = "FILE")]
        output: PathBuf,
    },
    /// Review the differences between two plans; exit 1 when there are any.
    #[command(after_help = "\
Examples:
  ithaca diff before.json after.json
  ithaca diff before.json after.json --only layout,time --tolerance 1%

Exit code: 0 without a difference, 1 with one, 2 after an error.")]
    Diff(DiffArgs),
    /// Run passes over a program in text form.
    #[command(after_help = "\
Example:
  ithaca opt model.ith --pipeline \"shard{strategy=ulysses,ulysses=4},lower-reshards\"")]
    Opt(OptArgs),
    /// Explain a plan: communication, time, memory, and why the alternatives lost.
    #[command(after_help = "\
Example:
  ithaca explain plan.json")]
    Explain(ExplainArgs),
    /// Write a page about a plan: the alternatives, one step, memory, messages, kernels.
    ///
    /// One HTML file, which needs no network: the answer, the alternatives as a table and a picture, the timeline of a step, memory
    /// over the step, who sends how much to whom, the layout of a layer, and kernels against the limits of the GPU.
    #[command(after_help = "\
Examples:
  ithaca report plan.json -o report.html
  ithaca plan examples/llama-3-8b --gpus 8 --seq 128k --report report.html")]
    Report(ReportArgs),
    /// Make a cluster profile that meets measurements.
    ///
    /// Collectives of one node replace the curves of the base; other figures are fitted. The table shows how far the prices
    /// of planning are from the measurements, before and after.
    #[command(after_help = "\
Examples:
  ithaca calibrate --base dgx-h100 --nccl-tests all_reduce.log all_gather.log -o ours.toml
  ithaca calibrate --base ours.toml --kernels gemm.csv attention.csv -o ours.toml
  ithaca calibrate --device cpu -o this-machine.toml
  ithaca plan examples/llama-3-8b --cluster ours.toml --gpus 8 --seq 128k

docs/book/src/clusters.md has the columns of the tables.")]
    Calibrate(CalibrateArgs),
    /// List operations, passes, strategies, models or clusters.
    #[command(after_help = "\
Example:
  ithaca list strategies")]
    List {
        /// The list to print; without it, the names of the lists.
        #[arg(value_enum)]
        listing: Option<Listing>,
    },
    /// Print a completion script for a shell.
    #[command(after_help = "\
Example:
  ithaca completions bash > ~/.local/share/bash-completion/completions/ithaca")]
    Completions {
        /// The shell.
        #[arg(value_enum)]
        shell: clap_complete::Shell,
    },
}

/// Arguments of `plan`.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// A folder with config.json, the file itself, or a whole program in text form; with `--check`, the model in place of
    /// that in the plan.
    #[arg(required_unless_present = "check")]
    pub model: Option<PathBuf>,
    /// The workload.
    #[command(flatten)]
    pub workload: WorkloadArgs,
    /// The requests to serve.
    #[command(flatten)]
    pub serving: ServingArgs,
    /// The layout.
    #[command(flatten)]
    pub layout: LayoutArgs,
    /// What the search leaves out.
    #[command(flatten)]
    pub narrowing: NarrowingArgs,
    /// Write the plan to this file.
    #[arg(short, long, value_name = "FILE", help_heading = "Output")]
    pub output: Option<PathBuf>,
    /// Write a page about the plan or the deployments to this file, as `ithaca report` does.
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub report: Option<PathBuf>,
    /// Print the plan as JSON instead of a table.
    #[arg(long, help_heading = "Output")]
    pub json: bool,
    /// The table.
    #[command(flatten)]
    pub table: TableArgs,
    /// Plan again what this plan was made for, and review the differences; exit 1 when there are any.
    #[arg(long, value_name = "PLAN", help_heading = "Output", conflicts_with_all = ["output", "json", "report"])]
    pub check: Option<PathBuf>,
}

/// Arguments of `diff`.
#[derive(Debug, Args)]
pub struct DiffArgs {
    /// The plan before.
    pub before: PathBuf,
    /// The plan after.
    pub after: PathBuf,
    /// Compare these parts only: model, cluster, workload, search, layout, collectives, time, memory, notes, alternatives.
    #[arg(long, value_name = "PART,…", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Numbers that differ by at most this part are equal, as in 1% or 0.01 [default: 0].
    #[arg(long, value_name = "PART", allow_hyphen_values = true)]
    pub tolerance: Option<String>,
    /// Compare the rankings of the alternatives too.
    #[arg(long)]
    pub alternatives: bool,
    /// List every field that differs, by its path.
    #[arg(long)]
    pub all: bool,
}

/// Arguments of `explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// A plan.
    pub plan: PathBuf,
    /// The table.
    #[command(flatten)]
    pub table: TableArgs,
}

/// Arguments of `report`.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// A plan, or deployments that `plan --mode serve` wrote.
    pub plan: PathBuf,
    /// The HTML file to write.
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
}

/// Arguments of `emit`.
#[derive(Debug, Args)]
pub struct EmitArgs {
    /// A plan.
    pub plan: PathBuf,
    /// The form of the code.
    #[arg(long, value_enum)]
    pub target: Target,
    /// A file, or a folder for `cuda` [default: standard output].
    #[arg(short, long, value_name = "PATH")]
    pub output: Option<PathBuf>,
    /// Of a training step for `torch`: PyTorch differentiates the forward pass, and `torch.optim` updates the weights.
    #[arg(long)]
    pub autograd: bool,
    /// Of a program that decodes: the most tokens of a prompt in one step [default: 512, or those of the cache].
    #[arg(long, value_name = "TOKENS", allow_hyphen_values = true, value_parser = tokens)]
    pub chunk: Option<u64>,
    /// Of a program that decodes: a plan of its steps of prompts, made with the same `--context`, and the same `--batch` or a divisor
    /// of it. Where ranks have other parts of caches, these are sent; a plan of another number of ranks has ranks of its own.
    #[arg(long, value_name = "PLAN", conflicts_with = "chunk")]
    pub prompts: Option<PathBuf>,
    /// Prompts are computed on ranks of their own, which come before those of tokens.
    #[arg(long)]
    pub two_pools: bool,
}

/// The form of the code that `emit` writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Target {
    /// The per-rank program in text form.
    Ir,
    /// The schedule in text form.
    Schedule,
    /// The schedule as JSON.
    Json,
    /// The per-rank program as a graph for Graphviz.
    Dot,
    /// The same graph as a picture.
    Svg,
    /// A sequence diagram for Mermaid: ranks, phases, collectives.
    Mermaid,
    /// The simulated step as a trace for Chrome and Perfetto: a process per rank (above 64 ranks, one per class of equal
    /// ranks), a thread per stream.
    Trace,
    /// A self-contained CUDA/NCCL program.
    Cuda,
    /// One Python module for PyTorch, to run under torchrun: gloo on CPUs, NCCL on GPUs.
    Torch,
}

/// Arguments of `verify`.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// The plan or model; here also a schedule or a per-rank program in text form.
    #[command(flatten)]
    pub subject: SubjectArgs,
    /// The program of a schedule in text form: its plan, its per-rank program, or a whole program. The whole program of a
    /// per-rank program in text form: a plan, a model or a program.
    ///
    /// A whole program is laid out by the passes that the schedule names. With a per-rank program it is run in double
    /// precision, and the per-rank program on virtual ranks.
    #[arg(long, value_name = "FILE", help_heading = "Comparison")]
    pub program: Option<PathBuf>,
    /// Training steps; each continues from the weights and optimizer states of the step before.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        allow_hyphen_values = true,
        value_parser = positive,
        help_heading = "Comparison"
    )]
    pub steps: u64,
    /// Compare also with the outputs in this safetensors file.
    #[arg(long, value_name = "FILE", help_heading = "Comparison")]
    pub expect: Option<PathBuf>,
    /// The largest absolute and relative error against `--expect` that passes [default: 1e-4].
    #[arg(
        long,
        value_name = "ERROR",
        allow_hyphen_values = true,
        value_parser = tolerance,
        help_heading = "Comparison"
    )]
    pub tolerance: Option<f64>,
}

/// Arguments of `shard-weights`.
#[derive(Debug, Args)]
pub struct ShardWeightsArgs {
    /// A plan, a folder with config.json, or a program in text form (.ith).
    pub subject: PathBuf,
    /// The workload, for a model [default: a small one, as weights do not depend on lengths].
    #[command(flatten)]
    pub workload: WorkloadArgs,
    /// The layout, for a model.
    #[command(flatten)]
    pub layout: LayoutArgs,
    /// Weights: a safetensors file, its index, or a folder [default: those beside config.json].
    #[arg(long, value_name = "PATH", help_heading = "Data")]
    pub weights: Option<PathBuf>,
    /// The folder to write, new or empty.
    #[arg(short, long, value_name = "OUTDIR", help_heading = "Data")]
    pub output: PathBuf,
}

/// Arguments of `opt`.
#[derive(Debug, Args)]
pub struct OptArgs {
    /// A program in text form.
    pub file: PathBuf,
    /// Passes to run (`ithaca list passes`).
    #[arg(long, value_name = "PIPELINE", default_value = "")]
    pub pipeline: String,
    /// Rewrite rules to try and apply, at the place of `rules` in the pipeline, else after it.
    #[arg(long, value_name = "FILE")]
    pub rules: Option<PathBuf>,
    /// Print the program after each run of this pass, or after `all`.
    #[arg(long, value_name = "PASS")]
    pub print_after: Option<String>,
    /// Report after each pass that the program was verified. Every pass is verified in any case.
    #[arg(long)]
    pub verify_each: bool,
    /// Allow only the first N rewrites.
    #[arg(long, value_name = "N", allow_hyphen_values = true, value_parser = whole)]
    pub stop_after: Option<u64>,
    /// Print the time of each pass.
    #[arg(long)]
    pub timings: bool,
    /// The cluster whose prices the passes use [default: dgx-h100].
    #[arg(long, value_name = "CLUSTER")]
    pub cluster: Option<String>,
    /// Write the program to this file [default: standard output].
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// Arguments of `calibrate`.
#[derive(Debug, Args)]
pub struct CalibrateArgs {
    /// The profile or cluster file to begin with [default: dgx-h100].
    #[arg(long, value_name = "CLUSTER")]
    pub base: Option<String>,
    /// Logs of nccl-tests; TEST (all_reduce, all_gather, reduce_scatter, alltoall, sendrecv) where a log does not name it.
    #[arg(long, value_name = "[TEST=]FILE", num_args = 1.., help_heading = "Measurements")]
    pub nccl_tests: Vec<String>,
    /// Tables of matrix products, attention and memory kernels: comma-separated values with column names.
    #[arg(long, value_name = "FILE", num_args = 1.., help_heading = "Measurements")]
    pub kernels: Vec<PathBuf>,
    /// Measure this machine with the runtime of `run`: `cpu` the processor, kernels and collectives between ranks, `cuda` the
    /// kernels of a GPU. It takes up to four minutes on two busy cores [base: cpu with `cpu`].
    #[arg(long, value_enum, hide_possible_values = true, help_heading = "Measurements")]
    pub device: Option<DeviceArg>,
    /// The cluster file to write; its name is the name of the cluster.
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
}

/// A list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Listing {
    /// Operations of programs in text form.
    Ops,
    /// Passes and their options, for `opt --pipeline`.
    Passes,
    /// Strategies and movements, for `--strategy` and `--movement`.
    Strategies,
    /// Model families that can be imported.
    Models,
    /// Built-in cluster profiles, for `--cluster`.
    Clusters,
}

/// The arguments of a command with these options, for some subject.
pub(crate) fn arguments_of<'a, A: FromArgMatches>(
    command: &'a str,
    subject: &'a str,
    options: impl IntoIterator<Item = &'a String>,
) -> Result<A, clap::Error> {
    let words = ["ithaca", command, subject].into_iter().chain(options.into_iter().map(String::as_str));
    let mut matches = Cli::command().try_get_matches_from(words)?;
    let (_, mut matches) = matches.remove_subcommand().expect("the words name a command");
    A::from_arg_matches_mut(&mut matches)
}

/// The first flag of `args` that was given, as `--seq`: the fields of `args` are named after their flags.
pub fn first_given(args: &impl Serialize) -> Option<String> {
    let Ok(serde_json::Value::Object(fields)) = serde_json::to_value(args) else {
        unreachable!("arguments are structs of texts, numbers, lists and flags")
    };
    let is_given = |value: &serde_json::Value| match value {
        serde_json::Value::Null => false,
        serde_json::Value::Bool(is_set) => *is_set,
        serde_json::Value::Array(items) => !items.is_empty(),
        serde_json::Value::Number(_) | serde_json::Value::String(_) | serde_json::Value::Object(_) => true,
    };
    fields.iter().find(|(_, value)| is_given(value)).map(|(name, _)| format!("--{name}"))
}
