//! The command line's grammar.

mod decoding;
mod frameworks;
mod project;
mod run;
mod search;
mod serving;
mod values;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::Serialize;

pub use decoding::DecodingArgs;
pub use frameworks::{ExportArgs, ImportArgs};
pub use project::{CheckArgs, InitArgs, PROJECT};
pub use run::{CollectivesArg, DeviceArg, RunArgs, StorageArg};
pub use search::{NarrowingArgs, TableArgs};
pub use serving::ServingArgs;
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

Exit code: 0 if nothing differs, also where nothing is split and there is no communication to prove; 1 with a difference; 2 after
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

/// The workload.
#[derive(Clone, Debug, Args, Serialize)]
#[serde(rename_all = "kebab-case")]
#[command(next_help_heading = "Workload")]
pub struct WorkloadArgs {
    /// Tokens per sequence; `128k` is 128 · 1024, `1m` is 1024 · 1024.
    #[arg(long, value_name = "TOKENS", allow_hyphen_values = true, value_parser = tokens)]
    pub seq: Option<u64>,
    /// Tokens per sequence of the decoder, for a model with encoder and decoder [default: that of --seq].
    #[arg(long, value_name = "TOKENS", allow_hyphen_values = true, value_parser = tokens)]
    pub target_seq: Option<u64>,
    /// Sequences [default: 1].
    #[arg(long, value_name = "N", allow_hyphen_values = true, value_parser = positive)]
    pub batch: Option<u64>,
    /// Documents that are packed into each sequence: their lengths in order, as in `8k,512*30`, or a file of them. A token
    /// sees its own document only [default: one].
    #[arg(long, value_name = "LENGTHS|FILE")]
    pub documents: Option<String>,
    /// Element type of weights and activations: f64, f32, f16, bf16 [default: that of the configuration].
    #[arg(long, value_name = "DTYPE")]
    pub dtype: Option<String>,
    /// The kind of step [default: prefill].
    #[arg(long, value_enum)]
    pub mode: Option<Mode>,
    /// Tokens that the cache of each sequence has room for, in decoding [default for `run`: prompt and steps].
    #[arg(long, value_name = "TOKENS", allow_hyphen_values = true, value_parser = tokens)]
    pub context: Option<u64>,
    /// Keep caches in pages of so many tokens, which sequences share; ranks that split tokens have a part of each page.
    #[arg(long, value_name = "TOKENS", allow_hyphen_values = true, value_parser = tokens, help_heading = "Workload")]
    pub page: Option<u64>,
    /// The number of pages [default: as many as the sequences may need].
    #[arg(long, value_name = "N", requires = "page", allow_hyphen_values = true, value_parser = positive, help_heading = "Workload")]
    pub pages: Option<u64>,
    /// Element type of caches: f32, f16, bf16, or f8e4m3, which has a scale for each token and head [default: that of
    /// activations].
    #[arg(long, value_name = "DTYPE", help_heading = "Workload")]
    pub cache_type: Option<String>,
    /// The tokens whose logits a prefill returns [default: last for `plan`, all otherwise].
    #[arg(long, value_enum)]
    pub logits: Option<Logits>,
    /// Capacity of an expert: a factor of the even share of tokens, and the groups of a sequence that share slots, as
    /// in `1.25/8`; an expert drops further tokens [default: none is dropped].
    #[arg(long, value_name = "FACTOR[/GROUPS]", allow_hyphen_values = true)]
    pub capacity: Option<String>,
    /// Slots of an expert for the tokens of a rank: a factor of their even share, at least 1. A run in which more tokens of
    /// a rank choose an expert ends with an error that names it [default: 2].
    #[arg(long, value_name = "FACTOR", allow_hyphen_values = true, conflicts_with = "capacity")]
    pub expert_bound: Option<String>,
    /// Ignore a field of the configuration that is known not to change the computation; repeatable.
    #[arg(long = "ignore-field", value_name = "FIELD")]
    #[serde(rename = "ignore-field")]
    pub ignore_fields: Vec<String>,
    /// Activations that the backward pass computes again: none, selective, full, full(every=K), keep-attention
    /// [default: the fastest for `plan`, none otherwise].
    ///
    /// `selective` computes attention again; `full` everything, K layers at a time; `keep-attention` everything except
    /// attention.
    #[arg(long, value_name = "POLICY", help_heading = "Training")]
    pub recompute: Option<String>,
    /// Compute loss and gradients in C parts of the tokens of each rank, so that only one part of the logits is live
    /// [default: chosen by `plan`, 1 otherwise].
    #[arg(long, value_name = "C", allow_hyphen_values = true, help_heading = "Training")]
    pub loss_chunks: Option<String>,
    /// Accumulate gradients over M parts of the batch [default: chosen by `plan`, 1 otherwise].
    #[arg(long, value_name = "M", allow_hyphen_values = true, help_heading = "Training")]
    pub micro_batches: Option<String>,
    /// Order of micro-batches in a pipeline (mesh axis pp): gpipe, 1f1b, interleaved, zb-h1 [default: the fastest for
    /// `plan`, 1f1b otherwise].
    ///
    /// `interleaved` gives each stage several ranges of layers: `--train chunks=N`. `zb-h1` computes gradients of weights
    /// apart from those of activations, and later, while a stage would wait.
    #[arg(long, value_name = "ORDER", help_heading = "Training")]
    pub pipeline: Option<String>,
    /// Another option of the training step, such as `lr=1e-4`; repeatable.
    ///
    /// The keys are `optimizer=adamw|none`, `lr`, `beta1`, `beta2`, `eps`, `weight_decay`, `clip`, `chunks`, and
    /// `dropout=config|off`. `config`, the default, applies the dropout of the configuration.
    #[arg(long = "train", value_name = "KEY=VALUE", help_heading = "Training")]
    #[serde(rename = "train")]
    pub training: Vec<String>,
    /// The label of a token is the next token, for labels that are copies of the tokens.
    #[arg(long, help_heading = "Training")]
    pub shift_labels: bool,
}

/// The kind of step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
pub enum Mode {
    /// The forward pass over whole sequences.
    Prefill,
    /// A training step.
    Train,
    /// One token after another.
    Decode,
    /// Requests at a rate, for `plan`: layouts of prompts and of decoding, batches, and the GPUs that they need.
    Serve,
}

/// The tokens whose logits a prefill returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
pub enum Logits {
    /// The last token of each sequence.
    Last,
    /// All tokens.
    All,
}

/// The default cluster.
pub const DEFAULT_CLUSTER: &str = "dgx-h100";

/// The layout.
#[derive(Clone, Debug, Args, Serialize)]
#[serde(rename_all = "kebab-case")]
#[command(next_help_heading = "Cluster and mesh")]
pub struct LayoutArgs {
    /// A profile (`ithaca list clusters`) or the path of a cluster file [default: dgx-h100].
    #[arg(long, value_name = "CLUSTER")]
    pub cluster: Option<String>,
    /// The attention kernel that times and memory assume, of those that the cluster lists [default: the cluster's].
    ///
    /// `unfused` stores the scores in memory; `ithaca` is the kernel that `emit --target cuda` launches.
    #[arg(long, value_name = "NAME")]
    pub attention_kernel: Option<String>,
    /// How times assume that steps run: `stream` or `graph`, `nccl` or `direct`, `all-slots` or `filled-slots`.
    ///
    /// Kernels are launched one by one or by a recorded graph; NCCL reduces small tensors, or kernels that read their peers' memory;
    /// products of experts multiply all slots or those that are filled. The first of each is what `emit --target cuda` does, and the
    /// default of prefill and training; the second is what servers do, and the default of decoding.
    #[arg(long, value_name = "PROPERTY,…")]
    pub runtime: Option<String>,
    /// Number of GPUs [default: the ranks of the mesh].
    #[arg(long, value_name = "N", allow_hyphen_values = true, value_parser = positive)]
    pub gpus: Option<u64>,
    /// A strategy (`ithaca list strategies`), or a product such as ulysses+megatron-tp.
    ///
    /// `plan` tries all of them by default. The mesh axes dp, pp, tp, dcp and ep add data-parallel, pipeline, megatron-tp,
    /// decode-context and ep to the product where it has no strategy for them.
    #[arg(long, value_name = "NAME")]
    pub strategy: Option<String>,
    /// Mesh axes and their sizes, major to minor, such as dp=2,ulysses=4.
    #[arg(long, value_name = "AXIS=N,…")]
    pub mesh: Option<String>,
    /// Allow ranks to have different numbers of heads.
    #[arg(long, help_heading = "Layout")]
    pub uneven_heads: bool,
    /// Pad the heads to the fewest that divide; in training, key/value heads together with their query heads.
    #[arg(long, conflicts_with = "uneven_heads", help_heading = "Layout")]
    pub pad_heads: bool,
    /// Let ranks have different numbers of tokens where the sequence does not divide; by default it is padded.
    #[arg(long, help_heading = "Layout")]
    pub uneven_sequence: bool,
    /// Pad the sequence, or refuse it.
    #[arg(long, conflicts_with = "uneven_sequence", help_heading = "Layout")]
    pub pad_sequence: bool,
    /// Token order inside attention: contiguous, zigzag, striped, striped:BLOCK, balanced.
    ///
    /// `balanced` deals chunks by the number of pairs that the mask leaves. The default is the simplest
    /// order that balances pairs within 2 % of the best.
    #[arg(long, value_name = "ORDER", help_heading = "Layout")]
    pub order: Option<String>,
    /// Refuse a strategy that sends blocks which the mask leaves empty.
    #[arg(long, help_heading = "Layout")]
    pub prune: bool,
    /// ZeRO stage: 1 and 2 split optimizer states and gradients over data-parallel ranks, 3 parameters too
    /// [default: the fastest that fits for `plan`, 0 otherwise].
    ///
    /// Of several micro-batches stages 0 and 1 sum the gradients whole on each rank, and reduce them once a step. Stages 2
    /// and 3 reduce those of each micro-batch, and a rank holds its part of the sum only.
    #[arg(long, value_name = "STAGE", allow_hyphen_values = true, value_parser = whole, help_heading = "Layout")]
    pub zero: Option<u64>,
    /// Another strategy inside the attention of one kind of layer, a function of the program; repeatable.
    #[arg(long = "layer-strategy", value_name = "FUNCTION=NAME", help_heading = "Layout")]
    #[serde(rename = "layer-strategy")]
    pub layer_strategies: Vec<String>,
    /// Another movement of keys and queries inside attention than that of the strategy, such as gather(groups=2).
    #[arg(long, value_name = "MOVEMENT", help_heading = "Layout")]
    pub movement: Option<String>,
    /// Another movement for cross-attention, as between encoder and decoder.
    #[arg(long, value_name = "MOVEMENT", help_heading = "Layout")]
    pub cross_movement: Option<String>,
    /// Element type in which partial results of attention travel between ranks: f32, bf16 [default: f32].
    ///
    /// Ranks that compute for others send outputs and gradients of some of the keys. bf16 halves their bytes and adds a
    /// relative error of 2^-9 with each hop; sums are taken in f32 in any case.
    #[arg(long, value_name = "DTYPE", help_heading = "Layout")]
    pub partials: Option<String>,
    /// Mesh axes of one sequence dimension (s; t in a decoder) in place of those of the strategy, or `none`; repeatable.
    #[arg(long, value_name = "DIM=AXIS[+AXIS],…", help_heading = "Layout")]
    pub sequence_axes: Vec<String>,
    /// Passes that fuse and overlap communication, joined by `+` [default: fold+pack; prefetch+fold+pack for ZeRO 3].
    ///
    /// `pack` coalesces independent collectives into one message. `overlap` or `overlap(chunks=N)` also cuts collectives
    /// and the kernels next to them into chunks, so that one chunk is sent while another is computed. `none` does
    /// neither. `fold` lets kernels read and write wire buffers, without copies to pack and unpack. `prefetch` gathers
    /// ZeRO-3 weights one layer ahead and reduces gradients one layer later; `prefetch(layers=0)` stays within a layer.
    /// `two-level` splits mesh axes that span nodes, so that each collective becomes one across nodes and one inside;
    /// `two-level(choose=cheaper)` only where that costs less on the cluster. By default `plan` also tries 2, 4 and 8
    /// chunks and cheaper levels for the best layouts, and keeps them where a step is more than 1 % faster.
    #[arg(long, value_name = "PASSES", help_heading = "Layout")]
    pub fuse: Option<String>,
}

/// Arguments of `plan`.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// A folder with config.json, or the file itself; with `--check`, the model in place of that in the plan.
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
    /// Write a page about the plan to this file, as `ithaca report` does.
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
    /// A plan.
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
    /// Of a program that decodes: the most tokens of a prompt in one step [default: 512, or those of the cache].
    #[arg(long, value_name = "TOKENS", allow_hyphen_values = true, value_parser = tokens)]
    pub chunk: Option<u64>,
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

/// A plan, or a model with a layout.
#[derive(Clone, Debug, Args)]
pub struct SubjectArgs {
    /// A plan, a folder with config.json, or a program in text form (.ith).
    pub subject: PathBuf,
    /// The workload, for a model.
    #[command(flatten)]
    pub workload: WorkloadArgs,
    /// The layout, for a model.
    #[command(flatten)]
    pub layout: LayoutArgs,
    /// A safetensors file with the inputs of the model [default: random inputs].
    #[arg(long, value_name = "FILE", help_heading = "Data")]
    pub inputs: Option<PathBuf>,
    /// Weights: a safetensors file, its index, or a folder [default: those beside config.json, or random weights].
    #[arg(long, value_name = "PATH", help_heading = "Data")]
    pub weights: Option<PathBuf>,
    /// Run a small model of the same structure instead of the real one.
    #[arg(long, help_heading = "Data")]
    pub shrink: bool,
    /// Seed of random weights and inputs [default: 0].
    #[arg(long, value_name = "SEED", allow_hyphen_values = true, value_parser = whole, help_heading = "Data")]
    pub seed: Option<u64>,
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
