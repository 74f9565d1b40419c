//! What a training step sends, for each layer, against the formulas of the literature.

use std::collections::{BTreeMap, BTreeSet};

use ithaca_ir::ops::{Op, state};
use ithaca_ir::phase::Phase;
use ithaca_ir::{Module, Rank, TensorType, boxes, traffic};
use ithaca_passes::differentiate::{PipelineOrder, Training};
use ithaca_passes::import::{Mode, Workload, program};
use ithaca_passes::shard::{ShardOptions, Zero, parse_mesh};
use serde_json::{Value, json};

use super::sharded::per_rank;

#[derive(Clone, Copy, Debug)]
struct Case {
    heads: u64,
    kv_heads: u64,
    width: u64,
    tokens: u64,
    dtype: &'static str,
}

const BATCH: u64 = 2;
const HIDDEN: u64 = 64;
const FEED_FORWARD: u64 = 96;

/// Bytes sent per rank and number of collectives, by kind and axis.
type Sent = BTreeMap<(String, String), (u64, u64)>;

impl Case {
    fn element(&self) -> u64 {
        if self.dtype == "float32" { 4 } else { 2 }
    }

    /// Rotary positions and norms by the root mean square.
    fn llama(&self, layers: u64) -> Value {
        json!({
            "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": FEED_FORWARD,
            "num_hidden_layers": layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.width, "vocab_size": 96,
            "dtype": self.dtype,
        })
    }

    /// Learned positions, and norms with a bias.
    fn gpt2(&self, layers: u64) -> Value {
        json!({
            "model_type": "gpt2", "n_embd": HIDDEN, "n_inner": FEED_FORWARD, "n_layer": layers, "n_head": 4,
            "n_positions": 2 * self.tokens, "vocab_size": 96, "attn_pdrop": 0.0, "embd_pdrop": 0.0,
            "resid_pdrop": 0.0, "dtype": self.dtype,
        })
    }

    /// What a step of micro-batches of `BATCH` sequences sends in `layers` layers and around them, in these phases.
    fn step(&self, layers: u64, options: &ShardOptions, training: &Training, phases: &[Phase]) -> Sent {
        self.step_of(&self.llama(layers), options, training, phases)
    }

    fn step_of(&self, config: &Value, options: &ShardOptions, training: &Training, phases: &[Phase]) -> Sent {
        let workload = Workload {
            mode: Mode::Train,
            training: training.clone(),
            ..Workload::prefill(BATCH * training.micro_batches, self.tokens)
        };
        let module = program(config, "m", &workload).unwrap();
        let ranks = per_rank(&module, options).unwrap();
        let mut sent = Sent::new();
        for row in traffic::of_module(&ranks).into_iter().filter(|row| phases.contains(&row.phase)) {
            let (count, bytes) = sent.entry((row.kind.to_string(), row.axis.to_string())).or_default();
            *count += row.count;
            *bytes += row.bytes_sent_per_rank;
        }
        sent
    }

    /// What one layer sends.
    fn layer(&self, strategy: &str, mesh: &str, zero: Zero, training: &Training) -> Sent {
        let options = ShardOptions { zero, ..ShardOptions::new(strategy, parse_mesh(mesh).unwrap()) };
        let step = |layers| self.step(layers, &options, training, &Phase::ALL);
        let (two, mut sent) = (step(2), step(3));
        for (key, (count, bytes)) in &mut sent {
            let before = two.get(key).copied().unwrap_or_default();
            (*count, *bytes) = (*count - before.0, *bytes - before.1);
        }
        sent.retain(|_, sent| *sent != (0, 0));
        sent
    }

    /// Key/value heads that travel when heads are split over `degree`.
    fn travelling(&self, degree: u64) -> u64 {
        self.kv_heads.max(degree)
    }

    /// `(P−1)/P · N/P · D·e·(2·Hq + 2·Hkv′)`: q, k, v into the layout of heads and o back.
    fn exchanged(&self, degree: u64, ranks: u64) -> u64 {
        let heads = 2 * self.heads + 2 * self.travelling(degree);
        (degree - 1) * BATCH * self.tokens / ranks * self.width * self.element() * heads / degree
    }

    /// `(P−1)/P · N·h·e`: an all-gather or a reduce-scatter of the residual stream.
    fn half(&self, degree: u64) -> u64 {
        (degree - 1) * BATCH * self.tokens * HIDDEN * self.element() / degree
    }

    /// Elements of the weights of a layer.
    fn weights(&self) -> u64 {
        let attention = (2 * self.heads + 2 * self.kv_heads) * self.width * HIDDEN;
        attention + 3 * HIDDEN * FEED_FORWARD + 2 * HIDDEN
    }

    /// `N/P · 2·Hkv·D`: keys and values of one rank.
    fn keys_and_values(&self, ranks: u64, heads: u64) -> u64 {
        BATCH * self.tokens / ranks * 2 * heads * self.width
    }
}

/// Gradients and no optimizer.
fn gradients() -> Training {
    Training { optimizer: None, ..Training::default() }
}

fn of(sent: &Sent, kind: &str, axis: &str) -> (u64, u64) {
    sent.get(&(kind.to_owned(), axis.to_owned())).copied().unwrap_or_default()
}

/// Without what gradients of weights are summed by.
fn activations(sent: &Sent, axis: &str) -> Vec<&'static str> {
    let kinds = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"];
    kinds.into_iter().filter(|kind| of(sent, kind, axis).0 > 0).collect()
}

const CASES: [Case; 4] = [
    Case { heads: 8, kv_heads: 8, width: 8, tokens: 64, dtype: "bfloat16" },
    Case { heads: 8, kv_heads: 4, width: 8, tokens: 64, dtype: "bfloat16" },
    Case { heads: 8, kv_heads: 2, width: 16, tokens: 128, dtype: "float32" },
    Case { heads: 16, kv_heads: 1, width: 8, tokens: 64, dtype: "bfloat16" },
];

#[test]
fn ulysses_exchanges_as_much_backward_as_forward() {
    for case in CASES {
        for degree in [2, 4, 8] {
            let sent = case.layer("ulysses", &format!("ulysses={degree}"), Zero::Off, &gradients());
            let expected = (8, 2 * case.exchanged(degree, degree));
            assert_eq!(of(&sent, "all_to_all", "ulysses"), expected, "{case:?} {degree}: {sent:?}");
            assert_eq!(activations(&sent, "ulysses"), ["all_reduce", "all_to_all"]);
        }
    }
}

#[test]
fn tensor_parallelism_reduces_twice_forward_and_twice_backward() {
    for case in CASES {
        for degree in [2, 4].into_iter().filter(|d| case.heads % d == 0) {
            let mesh = format!("tp={degree}");
            if case.kv_heads % degree == 0 {
                let sent = case.layer("megatron-tp", &mesh, Zero::Off, &gradients());
                let expected = (4, 4 * 2 * case.half(degree));
                assert_eq!(of(&sent, "all_reduce", "tp"), expected, "{case:?} {mesh}: {sent:?}");
                assert_eq!(sent.len(), 1, "{sent:?}");

                let sent = case.layer("megatron-tp-sp", &mesh, Zero::Off, &gradients());
                // Two forward, two backward, and two inputs of products that were kept split.
                let gathers = (6, 6 * case.half(degree));
                assert_eq!(of(&sent, "all_gather", "tp"), gathers, "{case:?} {mesh}: {sent:?}");
                let scatters = (4, 4 * case.half(degree));
                assert_eq!(of(&sent, "reduce_scatter", "tp"), scatters, "{case:?} {mesh}: {sent:?}");
                // Weights of the two norms see a part of the tokens.
                let norms = 2 * 2 * (degree - 1) * HIDDEN * case.element() / degree;
                assert_eq!(of(&sent, "all_reduce", "tp"), (2, norms), "{case:?} {mesh}: {sent:?}");
            }
        }
    }
}

#[test]
fn a_ring_carries_gradients_home_in_single_precision() {
    for case in CASES {
        for ranks in [2, 4] {
            let sent = case.layer("ring", &format!("ring={ranks}"), Zero::Off, &gradients());
            let held = case.keys_and_values(ranks, case.kv_heads);
            let bytes = 2 * (ranks - 1) * held * case.element() + ranks * held * 4;
            let count = 4 * (ranks - 1) + 2 * ranks;
            assert_eq!(of(&sent, "permute", "ring"), (count, bytes), "{case:?} {ranks}: {sent:?}");
            assert_eq!(activations(&sent, "ring"), ["all_reduce", "permute"]);
        }
    }
}

#[test]
fn gathered_keys_are_gathered_again_and_their_gradients_scattered() {
    for case in CASES {
        for ranks in [2, 4] {
            let sent = case.layer("megatron-cp-allgather", &format!("cp={ranks}"), Zero::Off, &gradients());
            let once = (ranks - 1) * case.keys_and_values(ranks, case.kv_heads) * case.element();
            assert_eq!(of(&sent, "all_gather", "cp"), (4, 2 * once), "{case:?} {ranks}: {sent:?}");
            assert_eq!(of(&sent, "reduce_scatter", "cp"), (2, once), "{case:?} {ranks}: {sent:?}");
        }
    }
}

#[test]
fn usp_sends_what_its_halves_send() {
    for case in CASES {
        for (ring, ulysses) in [(2, 2), (2, 4), (4, 2)] {
            let mesh = format!("ring={ring},ulysses={ulysses}");
            let sent = case.layer("usp", &mesh, Zero::Off, &gradients());
            let ranks = ring * ulysses;
            let expected = (8, 2 * case.exchanged(ulysses, ranks));
            assert_eq!(of(&sent, "all_to_all", "ulysses"), expected, "{case:?} {mesh}: {sent:?}");
            let held = case.keys_and_values(ranks, case.travelling(ulysses));
            let bytes = 2 * (ring - 1) * held * case.element() + ring * held * 4;
            assert_eq!(of(&sent, "permute", "ring").1, bytes, "{case:?} {mesh}: {sent:?}");
        }
    }
}

/// Bytes of all kinds along all axes.
fn total(sent: &Sent, kinds: &[&str]) -> u64 {
    sent.iter().filter(|((kind, _), _)| kinds.contains(&kind.as_str())).map(|(_, (_, bytes))| bytes).sum()
}

/// No dimension of these weights divides by five: parts differ by one row.
#[test]
fn zero_splits_weights_of_which_no_dimension_divides() {
    const RANKS: u64 = 5;
    let case = CASES[0];
    for zero in [Zero::Optimizer, Zero::Gradients, Zero::Parameters] {
        let workload = Workload { mode: Mode::Train, ..Workload::prefill(RANKS, case.tokens) };
        let module = program(&case.llama(2), "m", &workload).unwrap();
        let mesh = parse_mesh("dp=5").unwrap();
        let module =
            per_rank(&module, &ShardOptions { zero, ..ShardOptions::new("data-parallel", mesh) }).unwrap();
        let (mut whole, mut held) = (0, [0; RANKS as usize]);
        for (function, node) in module.functions.values().flat_map(|f| f.nodes.iter().map(move |n| (f, n))) {
            let is_split = match &node.op {
                Op::Param(_) => zero == Zero::Parameters,
                Op::State(binding) => binding.name.starts_with(state::FIRST_MOMENT),
                _ => false,
            };
            if is_split {
                let ty = function.ty(node.result());
                whole += module.space.shape(ty).iter().product::<u64>();
                held.iter_mut()
                    .zip(0..)
                    .for_each(|(held, rank)| *held += module.space.local_elements(ty, Rank(rank)));
            }
        }
        assert_eq!(held.iter().sum::<u64>(), whole, "{zero:?}: nothing is held twice");
        assert!(held.iter().all(|&n| 100 * RANKS * n <= 105 * whole), "{zero:?}: {held:?} of {whole}");
    }
}

#[test]
fn stages_of_zero_send_two_and_three_times_the_parameters() {
    const REDUCTIONS: [&str; 3] = ["all_reduce", "reduce_scatter", "all_gather"];
    for case in CASES {
        let parameters = case.weights() * case.element();
        for (strategy, mesh, ranks) in [
            ("data-parallel", "dp=2", 2),
            ("data-parallel+ulysses", "dp=2,ulysses=2", 4),
            ("data-parallel+usp", "dp=2,ring=2,ulysses=2", 8),
        ] {
            for (zero, times) in
                [(Zero::Off, 2), (Zero::Optimizer, 2), (Zero::Gradients, 2), (Zero::Parameters, 3)]
            {
                let sent = case.layer(strategy, mesh, zero, &Training::default());
                let expected = times * (ranks - 1) * parameters / ranks;
                assert_eq!(total(&sent, &REDUCTIONS), expected, "{case:?} {mesh} {zero:?}: {sent:?}");
                // All ranks with the same weights are one group.
                let axes = mesh.split(',').count();
                let mut reductions = sent.keys().filter(|(kind, _)| REDUCTIONS.contains(&kind.as_str()));
                assert!(
                    reductions.all(|(_, axis)| axis.split('+').count() == axes),
                    "{mesh} {zero:?}: {sent:?}"
                );
            }
        }
    }
}

#[test]
fn gradients_are_reduced_once_per_step_where_ranks_keep_their_sums() {
    let case = CASES[0];
    let [llama, gpt2] = [case.llama(2), case.gpt2(2)];
    let bytes = |config: &Value, (strategy, mesh, zero): (&str, &str, Zero), training: Training| {
        let options = ShardOptions { zero, ..ShardOptions::new(strategy, parse_mesh(mesh).unwrap()) };
        // The first stage of a pipeline reduces in its backward pass, the others after theirs.
        let phases = [Phase::Backward, Phase::Update].map(|phase| {
            let sent = case.step_of(config, &options, &training, &[phase]);
            let reductions = sent.iter().filter(|((kind, axis), _)| kind != "all_gather" && axis == "dp");
            reductions.fold((0, 0), |(sum, n), (_, (count, bytes))| (sum + bytes, n + count))
        });
        phases.into_iter().max().unwrap()
    };
    let staged = |pipeline| Training { stages: 2, pipeline, ..gradients() };
    let in_stages = ("data-parallel+pipeline", "dp=2,pp=2");
    for (config, (strategy, mesh), training) in [
        (&llama, ("data-parallel", "dp=2"), gradients()),
        (&gpt2, ("data-parallel", "dp=2"), gradients()),
        (&llama, ("data-parallel+megatron-tp-sp", "dp=2,tp=2"), gradients()),
        (&gpt2, ("data-parallel+megatron-tp-sp", "dp=2,tp=2"), gradients()),
        (&llama, in_stages, staged(PipelineOrder::OneForwardOneBackward)),
        (&llama, in_stages, staged(PipelineOrder::ZbH1)),
        (&gpt2, in_stages, staged(PipelineOrder::ZbH1)),
    ] {
        let of = |zero, micro_batches| {
            bytes(config, (strategy, mesh, zero), Training { micro_batches, ..training.clone() })
        };
        for zero in [Zero::Off, Zero::Optimizer] {
            let found = [2, 4, 8].map(|n| of(zero, n));
            assert!(found[0].0 > 0 && found == [found[0]; 3], "{strategy} {zero:?}: {found:?}");
        }
        // Of positions stage 2 sends the rows of a sequence, and a sum the whole table.
        if config == &gpt2 {
            continue;
        }
        let (two, four) = (of(Zero::Gradients, 2), of(Zero::Gradients, 4));
        assert_eq!((2 * two.0, 2 * two.1), four, "{strategy}");
        assert_eq!(2 * of(Zero::Optimizer, 2).0, two.0, "{strategy}");
    }
}

#[test]
fn persistent_weights_are_gathered_once_a_step_and_others_in_every_pass() {
    const LAYERS: u64 = 2;
    let case = CASES[0];
    for (strategy, mesh, ranks) in
        [("data-parallel", "dp=2", 2), ("data-parallel+ulysses", "dp=2,ulysses=2", 4)]
    {
        for micro_batches in [1, 2, 4] {
            let training = Training { micro_batches, ..Training::default() };
            let gathers = |zero: Zero, phases: &[Phase]| {
                let options = ShardOptions { zero, ..ShardOptions::new(strategy, parse_mesh(mesh).unwrap()) };
                let sent = case.step(LAYERS, &options, &training, phases);
                total(&sent, &["all_gather"])
            };
            let in_passes = |zero| gathers(zero, &[Phase::Forward, Phase::Backward]);
            let once = |zero| gathers(zero, &[Phase::Update]);
            let sent = |elements: u64| (ranks - 1) * elements * case.element() / ranks;
            let layer = case.weights();
            // The table of the embedding, the head, and the norm before it.
            let (table, norm) = (96 * HIDDEN, HIDDEN);
            let of_attention = 4 * case.heads * case.width * HIDDEN + 2 * HIDDEN;
            // The embedding is read forward only.
            let outside = table + 2 * (table + norm);
            let all = |of_layer: u64, outside: u64| micro_batches * sent(2 * LAYERS * of_layer + outside);
            for (zero, passes, update) in [
                (Zero::Gradients, 0, sent(LAYERS * layer + 2 * table + norm)),
                (Zero::Parameters, all(layer, outside), 0),
                (Zero::ParametersAbove(0), all(layer, 0), sent(2 * table + norm)),
                (
                    Zero::ParametersAbove(case.heads * case.width * HIDDEN),
                    all(layer - of_attention, 0),
                    sent(LAYERS * of_attention + 2 * table + norm),
                ),
                (Zero::ParametersAbove(u64::MAX), 0, sent(LAYERS * layer + 2 * table + norm)),
            ] {
                let found = (in_passes(zero), once(zero));
                assert_eq!(found, (passes, update), "{mesh} {zero} {micro_batches}");
            }
        }
    }
}

/// Bytes that a rank sends in the function `name`, by kind of collective.
fn sent_in(ranks: &Module, name: &str) -> BTreeMap<&'static str, u64> {
    let function = ranks.functions.values().find(|f| f.name == name).unwrap();
    let mut sent = BTreeMap::new();
    for node in function.nodes.iter().filter(|node| node.op.is_communication()) {
        let (from, to) = (function.ty(node.operands[0]), function.ty(node.result()));
        let bytes = boxes::bytes_sent(&ranks.space, &node.op, from, to, Rank(0));
        *sent.entry(node.op.name()).or_default() += bytes;
    }
    sent
}

#[test]
fn the_gradient_of_an_embedding_sends_rows_of_tokens_or_of_the_table_whichever_are_fewer() {
    const TOKENS: u64 = 64;
    const WIDTH: u64 = 16;
    for (vocabulary, tp) in [(48, 2), (48, 4), (256, 2), (256, 4)] {
        let mut config = super::sharded::llama(4, 4, false);
        config["vocab_size"] = json!(vocabulary);
        let module = super::sharded::step(&config, gradients());
        let sent = |strategy: &str| {
            let options = ShardOptions::new(strategy, parse_mesh(&format!("tp={tp}")).unwrap());
            sent_in(&per_rank(&module, &options).unwrap(), "embed.backward")
        };
        let rows = vocabulary.min(TOKENS);
        let kind = if vocabulary < TOKENS { "reduce_scatter" } else { "all_gather" };
        let expected = BTreeMap::from([(kind, (tp - 1) * rows * WIDTH * 4 / tp)]);
        assert_eq!(sent("megatron-tp-sp"), expected, "{vocabulary} rows, tp={tp}");
        // Every rank has all tokens.
        assert_eq!(sent("megatron-tp"), BTreeMap::new(), "{vocabulary} rows, tp={tp}");
    }
}

/// Gradients read the output of attention inside, for delta, and outside, for the output projection. Functions return it once where
/// both have one layout, and in each of two layouts; with one layer, whose call is no loop, as with several.
#[test]
fn the_output_of_attention_is_saved_once_in_each_layout() {
    let case = CASES[0];
    for (strategy, mesh, is_twice) in [
        ("single", "", false),
        ("data-parallel", "dp=2", false),
        ("ring", "ring=2", false),
        ("megatron-tp", "tp=2", false),
        ("ulysses", "ulysses=2", true),
        ("usp", "ring=2,ulysses=2", true),
    ] {
        for layers in [1, 2] {
            let workload = Workload {
                mode: Mode::Train,
                training: gradients(),
                ..Workload::prefill(BATCH, case.tokens)
            };
            let module = program(&case.llama(layers), "m", &workload).unwrap();
            let options = ShardOptions::new(strategy, parse_mesh(mesh).unwrap());
            let ranks = per_rank(&module, &options).unwrap();
            let block = ranks.functions.values().find(|f| f.name == "block").unwrap();
            let is_mixed = |ty: &TensorType| {
                let names: Vec<&str> = ty.dims.iter().map(|&d| ranks.space.dims[d].name.as_str()).collect();
                names == ["b", "s", "h", "d"]
            };
            let values: Vec<_> = block.outputs.iter().map(|o| o.value).collect();
            let distinct: BTreeSet<_> = values.iter().collect();
            assert_eq!(distinct.len(), values.len(), "{strategy} {layers}: a value is returned twice");
            // Queries, keys, values and the output of attention.
            let saved = values.iter().filter(|&&v| is_mixed(block.ty(v))).count();
            assert_eq!(saved, 4 + usize::from(is_twice), "{strategy}, {layers} layers");
        }
    }
}
