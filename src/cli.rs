//! The command line's grammar.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// A compiler for distributed attention.
#[derive(Debug, Parser)]
#[command(name = "ithaca", version, about, long_about = None, arg_required_else_help = true)]
pub struct Cli {
    /// How errors are printed.
    #[arg(long, value_enum, default_value_t = ErrorFormat::Human, global = true, value_name = "FORMAT")]
    pub error_format: ErrorFormat,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// How errors are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ErrorFormat {
    /// For a person.
    Human,
    /// One JSON object per line.
    Json,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Choose how to distribute a model, and say why.
    #[command(
        after_help = "Example:\n  ithaca plan examples/llama-3-8b --cluster dgx-h100 --gpus 8 --seq 131072 -o plan.json"
    )]
    Plan(PlanArgs),
    /// Write a plan as code: IR, schedule, JSON, a picture, or a CUDA/NCCL program.
    #[command(after_help = "Example:\n  ithaca emit plan.json --target cuda -o out/ && make -C out")]
    Emit(EmitArgs),
    /// Run a plan or a model on this machine, a thread per rank, and compare.
    #[command(
        after_help = "Examples:\n  ithaca run plan.json --shrink\n  ithaca run DIR --inputs DIR/io.safetensors --expect DIR/io.safetensors\n  ithaca run DIR --mode train --seq 64 --steps 5 --save step5.safetensors\n  ithaca run DIR --mode train --seq 64 --steps 5 --resume step5.safetensors --strategy ring --mesh ring=4\n  torchrun --nproc-per-node 8 --no-python ithaca run plan.json --shrink --launch"
    )]
    Run(RunArgs),
    /// Check that the per-rank program computes what the whole one does, in double precision.
    ///
    /// Of a schedule in text form, as `emit --target schedule` writes it, that memory, collectives and order hold, and with
    /// `--program` that it computes what its program says.
    #[command(
        after_help = "Examples:\n  ithaca verify plan.json\n  ithaca verify DIR --mode train --seq 64 --strategy ring --mesh ring=4 --steps 2\n  ithaca emit plan.json --target schedule -o schedule.ith && ithaca verify schedule.ith --program plan.json"
    )]
    Verify(VerifyArgs),
    /// Cut a checkpoint into a file for each rank of a plan.
    #[command(
        after_help = "Examples:\n  ithaca shard-weights plan.json --weights model.safetensors -o shards\n  ithaca shard-weights DIR --strategy megatron-tp --mesh tp=4 --weights DIR -o shards\n  ithaca shard-weights DIR --mode train --strategy data-parallel --mesh dp=4 --zero 3 --weights step5.safetensors -o shards"
    )]
    ShardWeights(ShardWeightsArgs),
    /// Join what `shard-weights` cut, bit for bit.
    #[command(after_help = "Example:\n  ithaca merge-weights shards -o model.safetensors")]
    MergeWeights(MergeWeightsArgs),
    /// Say what changed between two plans; exit 1 when something did.
    #[command(after_help = "Example:\n  ithaca diff before.json after.json")]
    Diff(DiffArgs),
    /// Run passes over a program in text form.
    #[command(
        after_help = "Example:\n  ithaca opt model.ith --pipeline \"shard{strategy=ulysses,ulysses=4},lower-reshards\" --timings"
    )]
    Opt(OptArgs),
    /// Say what a plan does and why.
    #[command(after_help = "Example:\n  ithaca explain plan.json")]
    Explain(ExplainArgs),
    /// List operations, passes, strategies, models or clusters.
    #[command(after_help = "Example:\n  ithaca list strategies")]
    List(ListArgs),
    /// Print a completion script for a shell.
    #[command(
        after_help = "Example:\n  ithaca completions bash > ~/.local/share/bash-completion/completions/ithaca"
    )]
    Completions(CompletionsArgs),
}

/// The workload.
#[derive(Clone, Debug, Args)]
pub struct WorkloadArgs {
    /// Tokens per sequence.
    #[arg(long, value_name = "TOKENS", allow_hyphen_values = true, value_parser = positive)]
    pub seq: Option<u64>,
    /// Tokens per sequence of the decoder, for a model with an encoder and a decoder; those of --seq when left out.
    #[arg(long, value_name = "TOKENS", allow_hyphen_values = true, value_parser = positive)]
    pub target_seq: Option<u64>,
    /// Sequences.
    #[arg(long, value_name = "N", allow_hyphen_values = true, value_parser = positive)]
    pub batch: Option<u64>,
    /// Element type of weights and activations; the configuration's own when left out.
    #[arg(long, value_name = "DTYPE")]
    pub dtype: Option<String>,
    /// What is computed; prefill when left out.
    #[arg(long, value_enum)]
    pub mode: Option<Mode>,
    /// What a training step computes again instead of keeping it: none, selective (attention), full, `full(every=K)` (K
    /// layers at a time), or keep-attention (all but attention).
    #[arg(long, value_name = "POLICY")]
    pub recompute: Option<String>,
    /// Parts of the tokens of each rank whose loss and gradients a training step computes one after another, so that the
    /// logits of one part are there at a time.
    #[arg(long, value_name = "C", allow_hyphen_values = true)]
    pub loss_chunks: Option<String>,
    /// Parts of the batch whose gradients are summed in a training step.
    #[arg(long, value_name = "M", allow_hyphen_values = true)]
    pub micro_batches: Option<String>,
    /// In which order the stages of a pipeline, on the axis pp of the mesh, run micro-batches: gpipe, 1f1b (as when left
    /// out), or interleaved (with `--train chunks=N` ranges of layers for each stage).
    #[arg(long, value_name = "ORDER")]
    pub pipeline: Option<String>,
    /// Another option of the training step: `dropout=off` (nothing is dropped; `config`, as when left out, drops what the
    /// configuration says), `optimizer=none`, `lr=1e-4`, `clip=1.0`, `beta1=…`, `beta2=…`, `eps=…`,
    /// `weight_decay=…`; may be repeated.
    #[arg(long = "train", value_name = "KEY=VALUE")]
    pub training: Vec<String>,
    /// The label of a token is that of the next one, as where labels are the tokens themselves.
    #[arg(long)]
    pub shift_labels: bool,
    /// How many tokens an expert takes: a factor of the even share, and the groups of a sequence that share slots, as in
    /// `1.25/8`; all that choose it when left out.
    #[arg(long, value_name = "FACTOR[/GROUPS]", allow_hyphen_values = true)]
    pub capacity: Option<String>,
    /// A field of the configuration that is known not to change the computation; may be repeated.
    #[arg(long = "ignore-field", value_name = "FIELD")]
    pub ignore_fields: Vec<String>,
}

/// What is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// The forward pass over whole sequences.
    Prefill,
    /// A training step.
    Train,
    /// One token after another.
    Decode,
}

/// The cluster where none is named.
pub const DEFAULT_CLUSTER: &str = "dgx-h100";

/// The layout.
#[derive(Clone, Debug, Args)]
pub struct LayoutArgs {
    /// A profile's name, or the path of a cluster.toml; dgx-h100 when left out.
    #[arg(long, value_name = "CLUSTER")]
    pub cluster: Option<String>,
    /// How many GPUs; that of the mesh when left out.
    #[arg(long, value_name = "N", allow_hyphen_values = true, value_parser = positive)]
    pub gpus: Option<u64>,
    /// A strategy, or a product of strategies written with a plus; `plan` tries all when it is left out.
    #[arg(long, value_name = "NAME")]
    pub strategy: Option<String>,
    /// Sizes of mesh axes, major to minor.
    #[arg(long, value_name = "AXIS=N,…")]
    pub mesh: Option<String>,
    /// Let ranks hold different numbers of heads where they do not divide.
    #[arg(long)]
    pub uneven_heads: bool,
    /// Pad heads that do not divide, key/value heads with the query heads that they serve.
    #[arg(long, conflicts_with = "uneven_heads")]
    pub pad_heads: bool,
    /// Pad a sequence that does not divide.
    #[arg(long)]
    pub pad_sequence: bool,
    /// The order of tokens over the ranks that split a sequence inside attention: contiguous, zigzag, striped,
    /// striped:BLOCK or balanced (dealt by the pairs of the mask); the best-balanced closed form when left out.
    #[arg(long, value_name = "ORDER")]
    pub order: Option<String>,
    /// Refuse a strategy that moves blocks which the mask leaves empty.
    #[arg(long)]
    pub prune: bool,
    /// Split over ranks that hold the same weights: 1 and 2 the optimizer and gradients, 3 parameters too.
    #[arg(long, value_name = "STAGE", allow_hyphen_values = true, value_parser = whole)]
    pub zero: Option<u64>,
    /// What is fused: `pack` joins independent collectives into one message; `overlap` or `overlap(chunks=N)` cuts
    /// collectives and the kernels beside them into chunks as well, so that one travels while another computes; `none`.
    /// With `fold+` before them kernels write and read tensors where they lie on the wire, so that nothing packs or unpacks
    /// these; with `prefetch+` weights that are split are gathered before they are needed, across layers too, and gradients
    /// reduced after they are there; `prefetch(layers=0)+` within each layer only; with `two-level+` mesh axes that span nodes are
    /// put in two levels, one collective for each; `two-level(choose=cheaper)+` does where that costs less on the cluster.
    /// `fold+pack` when left out, `prefetch+fold+pack` with `--zero 3`.
    #[arg(long, value_name = "PASSES")]
    pub fuse: Option<String>,
    /// Another strategy inside attention for one kind of layer, a function of the program; may be repeated.
    #[arg(long = "layer-strategy", value_name = "FUNCTION=NAME")]
    pub layer_strategies: Vec<String>,
    /// The movement that brings keys and queries together inside attention, in place of the strategy's: rotate,
    /// gather(groups=2), …; `list strategies` names them.
    #[arg(long, value_name = "MOVEMENT")]
    pub movement: Option<String>,
    /// The same for attention whose keys are another sequence than its queries, as between encoder and decoder.
    #[arg(long, value_name = "MOVEMENT")]
    pub cross_movement: Option<String>,
    /// Mesh axes of a sequence's own, by its dimension (s; t in a decoder), in place of the strategy's; `none` for no
    /// axes; may be repeated.
    #[arg(long, value_name = "DIM=AXIS[+AXIS],…")]
    pub sequence_axes: Vec<String>,
}

/// Arguments of `plan`.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// A folder with config.json, or the file itself.
    pub model: PathBuf,
    /// The workload.
    #[command(flatten)]
    pub workload: WorkloadArgs,
    /// The layout.
    #[command(flatten)]
    pub layout: LayoutArgs,
    /// Where to write the plan.
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Print the plan as JSON instead of a table.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `emit`.
#[derive(Debug, Args)]
pub struct EmitArgs {
    /// A plan.
    pub plan: PathBuf,
    /// What to write.
    #[arg(long, value_enum)]
    pub target: Target,
    /// A file, or for `cuda` a folder; standard output when left out.
    #[arg(short, long, value_name = "PATH")]
    pub output: Option<PathBuf>,
}

/// What `emit` writes.
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
    /// The simulated step as a trace for Chrome and Perfetto: a process for each rank (of more than 64, one for all that do
    /// the same), a thread for each stream.
    Trace,
    /// A self-contained CUDA/NCCL program.
    Cuda,
}

/// What is run: a plan, or a model with a layout.
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
    /// A safetensors file with the model's inputs; random ones when left out.
    #[arg(long, value_name = "FILE")]
    pub inputs: Option<PathBuf>,
    /// A safetensors file, its index, or a folder with weights; those beside config.json, or random ones, when left out.
    #[arg(long, value_name = "PATH")]
    pub weights: Option<PathBuf>,
    /// Run a small model of the same structure in place of the real one.
    #[arg(long)]
    pub shrink: bool,
    /// Seed of random weights and inputs; 0 when left out.
    #[arg(long, value_name = "SEED", allow_hyphen_values = true, value_parser = whole)]
    pub seed: Option<u64>,
}

/// Arguments of `run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// What is run.
    #[command(flatten)]
    pub subject: SubjectArgs,
    /// A safetensors file with expected outputs; the whole program's own when left out.
    #[arg(long, value_name = "FILE")]
    pub expect: Option<PathBuf>,
    /// The largest error that passes, absolute and relative both. 1e-4 when left out; where tensors are stored as they are typed,
    /// 1e-2 for those of a program in f16 and 5e-2 in bf16, and errors of elements are taken beside the largest of their tensor.
    #[arg(long, value_name = "ERROR", allow_hyphen_values = true, value_parser = tolerance)]
    pub tolerance: Option<f64>,
    /// Steps of training, each on the weights and the optimizer's state that the one before left.
    #[arg(long, value_name = "N", default_value_t = 1, allow_hyphen_values = true, value_parser = positive)]
    pub steps: u64,
    /// Where to write what further steps of training continue from: a file, or a folder for `model.safetensors`.
    #[arg(long, value_name = "PATH")]
    pub save: Option<PathBuf>,
    /// Continue training from what `--save` wrote, under this plan or any other.
    #[arg(long, value_name = "PATH")]
    pub resume: Option<PathBuf>,
    /// Where to write outputs, as safetensors.
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// How values of 16-bit types are kept; wide when left out, but on a GPU always as they are typed.
    #[arg(long, value_enum)]
    pub storage: Option<StorageArg>,
    /// Run one rank in this process, which a launcher started beside those of the other ranks (torchrun, mpirun, srun):
    /// they are found by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    #[arg(long)]
    pub launch: bool,
    /// Print how long tasks took, by kind; on a device each is waited for, in a second step.
    #[arg(long)]
    pub timings: bool,
    /// Write when each task ran, as a trace for Chrome and Perfetto: a process for each rank, a thread for each stream, as
    /// `emit --target trace` does of the simulated step.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// What runs the schedule.
    #[arg(long, value_enum, default_value_t = DeviceArg::Cpu)]
    pub device: DeviceArg,
    /// Who does collectives, with `--device cuda`; in-process when left out.
    #[arg(long, value_enum)]
    pub collectives: Option<CollectivesArg>,
    /// Make a CUDA graph of the step and run that, with `--device cuda`.
    #[arg(long)]
    pub graph: bool,
    /// Compare with nothing: for times of what takes too long to check.
    #[arg(long, conflicts_with = "expect")]
    pub unchecked: bool,
    /// Seconds that a rank waits for another before the run is stopped; on GPUs, that nothing goes on.
    #[arg(long, value_name = "SECONDS", default_value_t = 600, allow_hyphen_values = true, value_parser = positive)]
    pub timeout: u64,
    /// Stop at the first task that writes a number which is none (NaN), and name it; on GPUs each task is waited for.
    #[arg(long)]
    pub look_for_nan: bool,
    /// Let a task of one rank go wrong, to see that the others stop: the task of a frame by its number, as errors and
    /// traces have it, at a layer or the first one; KIND is error, as when left out, panic, or hang, which ends by
    /// --timeout.
    #[arg(long, value_name = "RANK:FRAME/TASK[:LAYER][=KIND]", allow_hyphen_values = true)]
    pub fault: Option<String>,
}

impl RunArgs {
    /// How values of 16-bit types are kept: as was asked for, or as the device does.
    pub fn kept(&self) -> StorageArg {
        self.storage.unwrap_or(match self.device {
            DeviceArg::Cpu => StorageArg::Wide,
            DeviceArg::Cuda => StorageArg::Typed,
        })
    }
}

/// How values of 16-bit types are kept while a plan runs on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StorageArg {
    /// In single precision.
    Wide,
    /// Rounded to their type, as a device keeps them.
    Typed,
}

/// What runs a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceArg {
    /// This machine's processor, a thread per rank.
    Cpu,
    /// CUDA GPUs, all ranks in one process.
    Cuda,
}

/// Who does collectives on CUDA GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CollectivesArg {
    /// Copies and sums between ranks that share the first GPU.
    InProcess,
    /// NCCL, ranks dealt to all GPUs; several on one GPU with NCCL 2.30.3 and NCCL_MULTI_RANK_GPU_ENABLE=1.
    Nccl,
}

/// Arguments of `verify`.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// What is verified; here a schedule in text form too.
    #[command(flatten)]
    pub subject: SubjectArgs,
    /// What a schedule in text form is to compute: its plan, the per-rank program that `emit --target ir` writes, or a whole
    /// program, which is laid out by the passes that the schedule names.
    #[arg(long, value_name = "FILE")]
    pub program: Option<PathBuf>,
    /// Steps of training, each on the weights and the optimizer's state that the one before left.
    #[arg(long, value_name = "N", default_value_t = 1, allow_hyphen_values = true, value_parser = positive)]
    pub steps: u64,
    /// A safetensors file with expected outputs, compared too.
    #[arg(long, value_name = "FILE")]
    pub expect: Option<PathBuf>,
    /// The largest error against expected outputs that passes, absolute and relative both; 1e-4 when left out.
    #[arg(long, value_name = "ERROR", allow_hyphen_values = true, value_parser = tolerance)]
    pub tolerance: Option<f64>,
}

/// Arguments of `shard-weights`.
#[derive(Debug, Args)]
pub struct ShardWeightsArgs {
    /// A plan, a folder with config.json, or a program in text form (.ith).
    pub subject: PathBuf,
    /// The workload, for a model; a small one when left out, as weights do not depend on lengths.
    #[command(flatten)]
    pub workload: WorkloadArgs,
    /// The layout, for a model.
    #[command(flatten)]
    pub layout: LayoutArgs,
    /// A safetensors file, its index, or a folder with weights; those beside config.json when left out.
    #[arg(long, value_name = "PATH")]
    pub weights: Option<PathBuf>,
    /// The folder to write, which must be new or empty.
    #[arg(short, long, value_name = "OUTDIR")]
    pub output: PathBuf,
}

/// Arguments of `merge-weights`.
#[derive(Debug, Args)]
pub struct MergeWeightsArgs {
    /// A folder that `shard-weights` wrote.
    pub shards: PathBuf,
    /// The safetensors file to write.
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
}

/// Arguments of `diff`.
#[derive(Debug, Args)]
pub struct DiffArgs {
    /// The plan before.
    pub before: PathBuf,
    /// The plan after.
    pub after: PathBuf,
}

/// Arguments of `opt`.
#[derive(Debug, Args)]
pub struct OptArgs {
    /// A program in text form.
    pub file: PathBuf,
    /// Passes to run.
    #[arg(long, value_name = "PIPELINE", default_value = "")]
    pub pipeline: String,
    /// Rewrite rules to try and apply: where `rules` stands in the pipeline, else after it.
    #[arg(long, value_name = "FILE")]
    pub rules: Option<PathBuf>,
    /// Print the program after each run of this pass, or after `all`.
    #[arg(long, value_name = "PASS")]
    pub print_after: Option<String>,
    /// Say after each pass that the program was verified. Every pass is verified in any case.
    #[arg(long)]
    pub verify_each: bool,
    /// Allow only the first N rewrites.
    #[arg(long, value_name = "N", allow_hyphen_values = true, value_parser = whole)]
    pub stop_after: Option<u64>,
    /// Print how long each pass took.
    #[arg(long)]
    pub timings: bool,
    /// The cluster by whose prices passes choose; dgx-h100 when left out.
    #[arg(long, value_name = "CLUSTER")]
    pub cluster: Option<String>,
    /// Where to write the program; standard output when left out.
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// Arguments of `explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// A plan.
    pub plan: PathBuf,
}

/// Arguments of `list`.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// What to list.
    #[arg(value_enum)]
    pub what: Listing,
}

/// What `list` lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Listing {
    /// Operations.
    Ops,
    /// Passes.
    Passes,
    /// Strategies.
    Strategies,
    /// Model families.
    Models,
    /// Cluster profiles.
    Clusters,
}

/// Arguments of `completions`.
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell.
    #[arg(value_enum)]
    pub shell: clap_complete::Shell,
}

fn positive(text: &str) -> Result<u64, String> {
    match text.parse::<u64>() {
        Ok(n) if (1..=ithaca_ir::Dim::MAX_SIZE).contains(&n) => Ok(n),
        Ok(_) | Err(_) => {
            Err(format!("`{text}` is not a whole number from 1 to {}", ithaca_ir::Dim::MAX_SIZE))
        }
    }
}

fn whole(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("`{text}` is not a whole number from 0 to {}", u64::MAX))
}

fn tolerance(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(x) if x.is_finite() && x >= 0.0 => Ok(x),
        _ => Err(format!("`{text}` is not a number that is zero or more")),
    }
}
