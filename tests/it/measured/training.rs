//! Training steps of whole models.

use ithaca_ir::Mesh;
use ithaca_passes::cluster::Cluster;
use ithaca_passes::compile::compile;
use ithaca_passes::differentiate::{PipelineOrder, Recompute, Training};
use ithaca_passes::fuse::Fusion;
use ithaca_passes::import::{ExpertBound, Mode, Workload, program};
use ithaca_passes::movement::Partials;
use ithaca_passes::shard::{ShardOptions, Zero, parse_mesh};
use ithaca_passes::simulate::simulate;
use serde_json::{Value, json};

use super::{Compared, Group, Row, Use};

/// Groups of steps; by default the smallest, since the others compile for seconds.
pub(super) fn groups(all: bool) -> Vec<Group> {
    let some = vec![megatron(all)];
    if all { some.into_iter().chain([burst_engine(), ulysses(), context_parallel()]).collect() } else { some }
}

/// Of steps that overlap nothing by themselves.
const FUSE: &str = "fold+pack";

/// A degree of parallelism, and its figure.
type Measured = (u64, f64);
/// Degrees of tensor and context parallelism, and the ratio of speeds.
type Ratio = (u64, u64, f64);

/// A step: its workload and its layout.
#[derive(Clone)]
pub(super) struct Step<'a> {
    pub(super) config: Value,
    pub(super) batch: u64,
    pub(super) sequence: u64,
    pub(super) training: Training,
    pub(super) layout: (&'a str, &'a str),
    pub(super) zero: Zero,
    pub(super) fuse: &'a str,
}

impl Step<'_> {
    pub(super) fn seconds(&self, cluster: &Cluster) -> f64 {
        self.seconds_with(cluster, None)
    }

    /// With so many slots of experts.
    pub(super) fn seconds_with(&self, cluster: &Cluster, expert_bound: Option<ExpertBound>) -> f64 {
        let Self { config, batch, sequence, training, layout: (strategy, mesh), zero, fuse } = self;
        let workload = Workload {
            mode: Mode::Train,
            training: training.clone(),
            expert_bound,
            ..Workload::prefill(*batch, *sequence)
        };
        let module = program(config, "model", &workload).unwrap_or_else(|e| panic!("{e:?}"));
        let fusion = Fusion::parse(fuse).unwrap();
        let options = ShardOptions {
            zero: *zero,
            fusion,
            partials: Partials::Bf16,
            ..ShardOptions::new(*strategy, parse_mesh(mesh).unwrap())
        };
        let cluster = cluster.clone().spread(options.mesh.ranks());
        let compiled =
            compile(&module, &options, &cluster).unwrap_or_else(|e| panic!("{strategy} {mesh}: {e:?}"));
        simulate(&cluster, &compiled.schedule).seconds
    }
}

/// A model of GPT-3's kind, with the dropout of Megatron-LM.
pub(super) fn gpt([hidden, layers, heads]: [u64; 3], positions: u64) -> Value {
    json!({
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 51200, "n_embd": hidden,
        "n_layer": layers, "n_head": heads, "n_positions": positions, "n_ctx": positions, "activation_function": "gelu_new",
        "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": true, "torch_dtype": "bfloat16"
    })
}

/// A model of Llama's kind with 7 billion weights.
fn llama_7b() -> Value {
    json!({
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262_144, "vocab_size": 32000, "torch_dtype": "bfloat16"
    })
}

fn recomputing(recompute: Recompute) -> Training {
    Training { recompute, ..Training::default() }
}

/// Megatron-LM (Korthikanti et al., arXiv 2205.05198, table 5), A100-80GB, 2 048 tokens: seconds of a step with full
/// recomputation, and with sequence parallelism and selective recomputation. Products of A100 are fitted to these. Its full
/// recomputation computes the last product of a layer again, which ours does not; the time is added.
fn megatron(all: bool) -> Group {
    let cluster = Cluster::named("dgx-a100-80gb").and_then(|c| c.with_attention_kernel("unfused")).unwrap();
    struct Model {
        name: &'static str,
        sizes: [u64; 3],
        stages: u64,
        chunks: u64,
        batch: u64,
        measured: [f64; 2],
    }
    let models = [
        Model { name: "22B", sizes: [6144, 48, 64], stages: 1, chunks: 1, batch: 4, measured: [1.42, 1.10] },
        Model {
            name: "175B",
            sizes: [12288, 96, 96],
            stages: 8,
            chunks: 3,
            batch: 64,
            measured: [18.13, 13.75],
        },
    ];
    let mut rows = Vec::new();
    for Model { name, sizes, stages, chunks, batch, measured } in
        models.into_iter().take(if all { 2 } else { 1 })
    {
        let policies =
            [("full", Recompute::FULL, "megatron-tp"), ("selective", Recompute::Selective, "megatron-tp-sp")];
        for ((policy, recompute, strategy), measured) in policies.into_iter().zip(measured) {
            let piped = (format!("pipeline+{strategy}"), format!("pp={stages},tp=8"));
            let layout = if stages > 1 { (piped.0.as_str(), piped.1.as_str()) } else { (strategy, "tp=8") };
            let training = if stages > 1 {
                let pipeline = PipelineOrder::Interleaved;
                Training { stages, micro_batches: batch, pipeline, chunks, ..recomputing(recompute) }
            } else {
                recomputing(recompute)
            };
            let config = gpt(sizes, 2048);
            let step = Step { config, batch, sequence: 2048, training, layout, zero: Zero::Off, fuse: FUSE };
            let again = match recompute {
                Recompute::Full { .. } => {
                    let ([hidden, layers, _], micro_batches) = (sizes, if stages > 1 { batch } else { 1 });
                    let product = product([batch / micro_batches * 2048, 4 * hidden / 8, hidden], &cluster);
                    (layers / stages * micro_batches) as f64 * product
                }
                Recompute::None | Recompute::Selective | Recompute::KeepAttention => 0.0,
            };
            let simulated = step.seconds(&cluster) + again;
            rows.push(Row { name: format!("{name}, {policy}"), measured, simulated, by: Use::Fitted });
        }
    }
    Group { source: "Megatron-LM, A100, seconds a step", compared: Compared::Absolutely, rows }
}

/// Seconds of a product of so many rows, terms and columns.
fn product([rows, terms, columns]: [u64; 3], cluster: &Cluster) -> f64 {
    let text = format!(
        "ithaca 1 program\nmodel \"product\"\ndim t = {rows}\ndim n = {terms}\ndim m = {columns}\n\nfunc @main() {{\n  \
         %x = input {{name=\"x\"}} : bf16[t n]\n  %w = param {{name=\"w\"}} : bf16[m n]\n  %y = einsum %x, %w : bf16[t m]\n  \
         return y = %y\n}}\n"
    );
    let module = ithaca_ir::text::parse(&text).unwrap_or_else(|e| panic!("{e:?}"));
    let options = ShardOptions::new("single", Mesh::single());
    let compiled = compile(&module, &options, cluster).unwrap_or_else(|e| panic!("{e:?}"));
    simulate(cluster, &compiled.schedule).seconds
}

/// BurstEngine, Llama-7B on 8 A800, tokens a second and GPU by the degree of sequence parallelism; the other GPUs are
/// data-parallel. Weights and states are split over all and layers recomputed.
fn burst_engine() -> Group {
    let cluster = Cluster::named("dgx-a100-80gb").unwrap();
    let mut rows = Vec::new();
    let measured: [(u64, &str, &[Measured]); 6] = [
        (64, "ulysses", &[(2, 1315.0), (4, 1324.0), (8, 1252.0)]),
        (64, "ring", &[(2, 1479.0), (4, 1404.0), (8, 1259.0)]),
        (64, "megatron-tp-sp", &[(2, 1481.0), (4, 1379.0), (8, 1310.0)]),
        (128, "ulysses", &[(2, 882.0), (4, 845.0), (8, 830.0)]),
        (128, "ring", &[(2, 952.0), (4, 927.0), (8, 876.0)]),
        (128, "megatron-tp-sp", &[(4, 846.0), (8, 747.0)]),
    ];
    for (kilo, strategy, by_degree) in measured {
        for &(degree, measured) in by_degree {
            let sequence = kilo << 10;
            let axis = if strategy == "megatron-tp-sp" { "tp" } else { strategy };
            let data = 8 / degree;
            let (strategy, mesh) = if data > 1 {
                (format!("data-parallel+{strategy}"), format!("dp={data},{axis}={degree}"))
            } else {
                (strategy.to_owned(), format!("{axis}={degree}"))
            };
            let zero = if data > 1 || axis != "tp" { Zero::Parameters } else { Zero::Off };
            let step = Step {
                config: llama_7b(),
                batch: data,
                sequence,
                training: recomputing(Recompute::FULL),
                layout: (&strategy, &mesh),
                zero,
                fuse: FUSE,
            };
            let simulated = (data * sequence) as f64 / step.seconds(&cluster) / 8.0;
            let name = format!("{kilo} Ki tokens, {axis}={degree}");
            rows.push(Row { name, measured, simulated, by: Use::HeldOut });
        }
    }
    Group { source: "BurstEngine, 7B on 8 A800, tokens/s a GPU", compared: Compared::AsRatios, rows }
}

/// DeepSpeed-Ulysses, 7B on 32 A100-40GB, TFLOP/s a GPU by length, recomputation counted; eight heads groups in a node.
/// The kernel, the batch and the count of FLOPs were chosen by the errors of these rows.
fn ulysses() -> Group {
    let cluster = Cluster::named("dgx-a100-40gb").and_then(|c| c.with_attention_kernel("flash-1")).unwrap();
    let measured: [(&str, &str, &[f64]); 2] = [
        ("data-parallel+ulysses", "dp=4,ulysses=8", &[158.8, 175.3, 177.6, 181.1, 175.0, 174.0]),
        ("data-parallel+megatron-tp-sp", "dp=4,tp=8", &[105.8, 142.7, 164.3, 164.6, 158.0]),
    ];
    let mut rows = Vec::new();
    for (strategy, mesh, rates) in measured {
        for (i, &measured) in rates.iter().enumerate() {
            let sequence = 8192_u64 << i;
            let zero = if strategy.ends_with("ulysses") { Zero::Parameters } else { Zero::Optimizer };
            let config = gpt([4096, 32, 32], sequence);
            let batch = 4 * (262_144 / sequence);
            let training = recomputing(Recompute::FULL);
            let step = Step { config, batch, sequence, training, layout: (strategy, mesh), zero, fuse: FUSE };
            let (s, h) = (sequence as f64, 4096.0);
            let flops =
                96.0 * batch as f64 * s * 32.0 * h * h * (1.0 + s / (6.0 * h) + 51200.0 / (16.0 * 32.0 * h));
            let simulated = flops / step.seconds(&cluster) / 32.0 / 1e12;
            let name = format!("{} Ki tokens, {mesh}", sequence >> 10);
            rows.push(Row { name, measured, simulated, by: Use::Fitted });
        }
    }
    Group { source: "DeepSpeed-Ulysses, 7B on 32 A100, TFLOP/s a GPU", compared: Compared::AsRatios, rows }
}

/// Megatron-Core, GPT-175B on H100: throughput of a GPU over that of 8 tensor-parallel ranks that recompute layers.
/// The kernel and the micro-batches were chosen by the errors of these rows.
fn context_parallel() -> Group {
    let cluster = Cluster::named("dgx-h100").and_then(|c| c.with_attention_kernel("cudnn")).unwrap();
    let step = |sequence: u64, recompute: Recompute, layout: (&str, &str), gpus: f64| {
        let config = gpt([12288, 96, 96], sequence);
        let training = Training { micro_batches: 64, ..recomputing(recompute) };
        let step = Step { config, batch: 64, sequence, training, layout, zero: Zero::Off, fuse: FUSE };
        1.0 / (step.seconds(&cluster) * gpus)
    };
    let mut rows = Vec::new();
    let lengths: [(u64, &[Ratio]); 2] =
        [(16, &[(16, 1, 1.13), (8, 2, 1.25)]), (32, &[(32, 1, 0.85), (16, 2, 1.15), (8, 4, 1.20)])];
    for (kilo, ratios) in lengths {
        let base = step(kilo << 10, Recompute::FULL, ("megatron-tp-sp", "tp=8"), 8.0);
        for &(tp, cp, measured) in ratios {
            let mesh = if cp > 1 { format!("ring={cp},tp={tp}") } else { format!("tp={tp}") };
            let strategy = if cp > 1 { "megatron-tp-sp+ring" } else { "megatron-tp-sp" };
            let rate = step(kilo << 10, Recompute::None, (strategy, &mesh), (tp * cp) as f64);
            let name = format!("{kilo} Ki tokens, {mesh}");
            rows.push(Row { name, measured, simulated: rate / base, by: Use::Fitted });
        }
    }
    Group { source: "GPT-175B on H100, speed over tp=8", compared: Compared::Absolutely, rows }
}
