//! Arguments that name a model, its workload and its layout.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::values::{positive, tokens, whole};

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
    /// Keep states in host memory: `optimizer` those of AdamW in training; in decoding `cache` the pages of caches that do
    /// not fit on the GPUs, `cache=N` so many of all pages.
    ///
    /// The states of a weight are copied to the GPU during the update of the weight before it, with `--fuse prefetch` those of a
    /// layer during that of the layer before, and copied back after it. A layer's pages are copied while the layer before it
    /// runs. Each direction has a stream of its own.
    #[arg(long, value_name = "WHAT", help_heading = "Workload")]
    pub offload: Option<String>,
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
    /// Compute M parts of the batch one after another: in training gradients are accumulated over them; a pipeline's stages work
    /// on several at once, in any mode [default: chosen by `plan`, 1 otherwise].
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
    /// The keys are `optimizer=adamw|none`, `lr`, `beta1`, `beta2`, `eps`, `weight_decay`, `clip`, `chunks`,
    /// `stage_layers=8+8+8+6`, `dropout=config|off` and `gradients=full|weights`. Without `stage_layers` the stages of a
    /// pipeline have nearly equal FLOPs. `config`, the default, applies the dropout of the configuration;
    /// `full`, the default, sums gradients in f32, `weights` in the type of the weights, at half the memory.
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
    /// products of experts multiply all slots, if they are more than 32, or those that are filled. The first of each is what
    /// `emit --target cuda` does, and the default of prefill and training; the second is what servers do, and the default of decoding.
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
    /// and 3 reduce those of each micro-batch, and a rank holds its part of the sum only. Stage 3 gathers weights for every
    /// pass of every micro-batch; with 3:ELEMENTS weights outside layers, and those of layers with at most so many elements,
    /// stay whole and are gathered once a step. For several micro-batches `plan` chooses how many where memory allows, 3:none
    /// keeps none.
    #[arg(long, value_name = "STAGE[:ELEMENTS]", allow_hyphen_values = true, help_heading = "Layout")]
    pub zero: Option<String>,
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
    /// `two-level(choose=cheaper)` only where that costs less on the cluster. `bucket(mib=N)` coalesces gathers and
    /// reductions up to N MiB, 25 by default. By default `plan` also tries 2, 4 and 8 chunks and cheaper levels for the
    /// best layouts, and keeps them where a step is more than 1 % faster, and larger buckets where a step of ZeRO 3
    /// waits for its weights.
    #[arg(long, value_name = "PASSES", help_heading = "Layout")]
    pub fuse: Option<String>,
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
