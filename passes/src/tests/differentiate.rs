//! What the pass makes of small models: which functions there are, what they keep, and what it refuses.

use std::collections::BTreeSet;

use ithaca_differentiate::*;
use ithaca_import::{Mode, Workload, program};
use ithaca_ir::entity::Entity;
use ithaca_ir::module::{Function, Layers, Node};
use ithaca_ir::ops::{Random, Target, state};
use ithaca_ir::verify::verify;
use ithaca_ir::{DType, Module, Op, text};
use ithaca_pass::{Context, Pass, Volume};
use serde_json::json;

fn llama() -> serde_json::Value {
    json!({"model_type": "llama", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32, "tie_word_embeddings": true})
}

fn step(training: Training) -> Module {
    let workload = Workload { mode: Mode::Train, training, ..Workload::prefill(4, 8) };
    program(&llama(), "m", &workload).unwrap_or_else(|d| panic!("{d:?}"))
}

fn function<'a>(module: &'a Module, name: &str) -> &'a Function {
    &module.functions[module.function(name).unwrap_or_else(|| panic!("there is `@{name}`"))]
}

fn count(function: &Function, op: &str) -> usize {
    function.nodes.iter().filter(|n| n.op.name() == op).count()
}

#[test]
fn a_step_prints_as_it_is_read() {
    let module = step(Training { micro_batches: 2, clip: Some(1.0), ..Training::default() });
    verify(&module).unwrap();
    assert_eq!(text::parse(&text::print(&module)).unwrap(), module);
}

#[test]
fn gradients_are_summed_in_the_type_that_is_asked() {
    let types = |gradients| {
        let training = Training { micro_batches: 2, gradients, ..Training::default() };
        let dtype = Some(DType::BF16);
        let workload = Workload { mode: Mode::Train, training, dtype, ..Workload::prefill(4, 8) };
        let module = program(&llama(), "m", &workload).unwrap();
        verify(&module).unwrap();
        let nodes = module.functions.values().flat_map(|f| f.nodes.iter().map(move |n| (f, n)));
        let states = nodes.filter_map(|(f, n)| match &n.op {
            Op::State(binding) if binding.name != state::STEP => {
                Some((state::is_gradient(&binding.name), f.ty(n.result()).dtype))
            }
            _ => None,
        });
        states.collect::<BTreeSet<_>>()
    };
    assert_eq!(types(GradientType::Full), BTreeSet::from([(false, DType::F32), (true, DType::F32)]));
    assert_eq!(types(GradientType::Weights), BTreeSet::from([(false, DType::F32), (true, DType::BF16)]));
}

#[test]
fn policies_keep_less_and_compute_more() {
    let kept = |recompute| {
        let module = step(Training { recompute, ..Training::default() });
        let (forward, backward) = (function(&module, "block"), function(&module, "block.backward"));
        (forward.outputs.len() - 1, count(backward, "attention"), count(backward, "einsum"))
    };
    let (none, attentions, products) = kept(Recompute::None);
    // Each of the seven products has a gradient for either side, and an attention's backward sums its output's.
    assert!(none > 10 && attentions == 0 && products == 2 * 7 + 1);
    // Output and lse are not kept; q, k and v are.
    assert_eq!(kept(Recompute::Selective), (none - 2, 1, products));
    // The argument of the block alone; the last product is not needed.
    assert_eq!(kept(Recompute::FULL), (1, 1, products + 6));
    assert_eq!(kept(Recompute::KeepAttention), (3, 0, products + 6));
    // What is only multiplied is computed by the kernel that multiplies, whatever is kept.
    let module = step(Training::default());
    assert_eq!(count(function(&module, "block.backward"), "silu"), 1);
}

#[test]
fn tied_weights_sum_their_gradients_and_change_once() {
    let module = step(Training::default());
    let embedding = "model.embed_tokens.weight";
    let assigned = |name: &str, target: Target| {
        let nodes = &function(&module, name).nodes;
        let is_it = |op: &Op| match op {
            Op::Assign { target: t, binding } => *t == target && binding.name.ends_with(embedding),
            _ => false,
        };
        nodes.iter().filter(|n| is_it(&n.op)).count()
    };
    for name in ["embed.zero", "embed.backward", "head.backward"] {
        assert_eq!(assigned(name, Target::State), 1, "{name}");
    }
    assert_eq!(assigned("embed.update", Target::Param), 1);
    assert_eq!(assigned("head.update", Target::Param), 0);
    assert!(module.function("block.zero").is_none(), "each layer has its own weights");
}

#[test]
fn the_batch_is_cut_into_equal_parts() {
    let module = step(Training { micro_batches: 4, ..Training::default() });
    let main = function(&module, "main");
    assert_eq!(count(main, "valid"), 1, "labels are counted over the whole batch");
    assert_eq!(module.space.size(module.space.dim("b").unwrap()), 1);
    let training = Training { micro_batches: 3, ..Training::default() };
    let workload = Workload { mode: Mode::Train, training, ..Workload::prefill(4, 8) };
    let refused = program(&llama(), "m", &workload).unwrap_err();
    assert_eq!(refused[0].code, "P52");
    assert!(refused[0].message.contains('4') && refused[0].message.contains('3'), "{}", refused[0].message);
}

#[test]
fn what_has_no_loss_is_refused() {
    let refused = |source: &str| {
        let module = text::parse(source).unwrap();
        let mut cx = Context::new(&Volume);
        let verified = verify(&module).unwrap();
        Differentiate::default().run(verified, &mut cx).unwrap_err()[0].code
    };
    let main =
        "ithaca 1 program\nmodel \"m\"\ndim x = 4\n\nfunc @main() {\n  %w = param {name=\"w\"} : f32[x]\n";
    assert_eq!(refused(&format!("{main}  return y = %w\n}}\n")), "P50");
    assert_eq!(refused(&format!("{main}  return loss = %w\n}}\n")), "P50");
    let states = "  %l = sum %w : f32[]\n  %s = state {name=\"s\"} : f32[]\n  %loss = add %l, %s : f32[]\n";
    assert_eq!(refused(&format!("{main}{states}  return loss = %loss\n}}\n")), "P51");
}

#[test]
fn a_step_draws_by_its_number_and_keeps_no_keys() {
    let mut config = llama();
    config["attention_dropout"] = json!(0.1);
    let step = |training: Training| {
        program(&config, "m", &Workload { mode: Mode::Train, training, ..Workload::prefill(4, 8) }).unwrap()
    };
    let named = |module: &Module, name: &str, of: &str| {
        let (_, function) = module.functions.iter().find(|(_, f)| f.name == of).unwrap();
        function.nodes.iter().filter(|n| n.op.name() == name).count()
    };
    let plain = step(Training::default());
    assert_eq!([named(&plain, "key", "main"), named(&plain, "fold_in", "main")], [1, 1]);
    assert_eq!([named(&plain, "layer_key", "block"), named(&plain, "layer_key", "block.backward")], [1, 1]);
    let gradients = step(Training { optimizer: None, ..Training::default() });
    assert_eq!(named(&gradients, "fold_in", "main"), 0, "nothing counts the steps");
    let parts = step(Training { micro_batches: 2, ..Training::default() });
    assert_eq!([named(&parts, "fold_in", "main"), named(&parts, "layer_key", "micro")], [1, 1]);
    let stages = step(Training { micro_batches: 2, stages: 2, ..Training::default() });
    assert_eq!(named(&stages, "fold_in", "main"), 3, "that of the step, and one for each micro-batch");
    let off = step(Training { dropout: DropoutChoice::Off, ..Training::default() });
    let drops = |op: &Op| match op {
        Op::Attention(a) | Op::AttentionBackward(a) => a.dropout.is_some(),
        op => matches!(op, Op::Random(Random::Dropout { .. } | Random::DropoutMask { .. })),
    };
    assert!(off.functions.values().flat_map(|f| &f.nodes).all(|n| !drops(&n.op)));
}

#[test]
fn keys_begin_in_main() {
    let text = r#"ithaca 1 program
model "m"
dim x = 4

func @f() -> {
  %k = key {seed=1} : i32[]
  %w = param {name="w"} : f32[x]
  %m = dropout_mask %k {rate=0.5, seed=0} : bool[x]
  %y = dropout %w, %m {rate=0.5} : f32[x]
  %loss = sum %y : f32[]
  return %loss
}

func @main() {
  %loss = call {callee=@f} : f32[]
  return loss = %loss
}
"#
    .replace("func @f() -> {", "func @f() {");
    let module = text::parse(&text).unwrap();
    let verified = verify(&module).unwrap();
    let refused = &Differentiate::default().run(verified, &mut Context::new(&Volume)).unwrap_err()[0];
    assert_eq!(refused.code, "P51");
    assert!(refused.message.contains("@f"), "{}", refused.message);
}

#[test]
fn groups_of_layers_are_one_loop_and_a_shorter_one() {
    let module = step(Training { recompute: Recompute::Full { every: 2 }, ..Training::default() });
    verify(&module).unwrap();
    assert_eq!(text::parse(&text::print(&module)).unwrap(), module);
    let calls = |name: &str| -> Vec<(String, Layers, u64)> {
        let one = |node: &Node| match &node.op {
            Op::Call { callee, layers, stride, .. } => {
                Some((module.functions[*callee].name.clone(), layers.clone(), *stride))
            }
            _ => None,
        };
        function(&module, name).nodes.iter().filter_map(one).collect()
    };
    let call = |name: &str, layers: Layers, stride| (name.to_owned(), layers, stride);
    // Three layers: one group of two, and what is left.
    let of_groups: Vec<_> = calls("main").into_iter().filter(|(name, ..)| name.contains("group")).collect();
    let expected = [
        call("block.group", 0..1, 0),
        call("block.group2", 1..2, 0),
        call("block.group2.backward", 1..2, 0),
        call("block.group.backward", 0..1, 0),
    ];
    assert_eq!(of_groups, expected);
    assert_eq!(calls("block.group"), [call("block", 0..2, 2)]);
    let again = [call("block.again.backward", 0..2, 2), call("block.backward", 0..2, 2)];
    assert_eq!(calls("block.group.backward"), again);
    assert_eq!(calls("block.group2"), [call("block", 0..1, 2)]);
    // Nothing is kept of layers; the argument of a group that runs once is still there.
    assert_eq!(function(&module, "block.group").outputs.len(), 1);
    // Layers are true: those of all functions together are the three.
    let layers = module.layers_of_functions();
    let id = module.function("block.backward").unwrap();
    let layers: Vec<u64> = layers[id.index()].iter().cloned().flatten().collect();
    assert_eq!(layers, [0, 1, 2]);
}

#[test]
fn kinds_of_layers_that_alternate_share_a_group() {
    let config = json!({"model_type": "gemma2", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 32, "sliding_window": 4});
    let of = |every| {
        let training = Training { recompute: Recompute::Full { every }, ..Training::default() };
        let workload = Workload { mode: Mode::Train, training, ..Workload::prefill(4, 8) };
        program(&config, "m", &workload).unwrap_or_else(|d| panic!("{d:?}"))
    };
    // Four groups of one layer of each kind are one loop.
    let module = of(2);
    let main = function(&module, "main");
    let loops: Vec<Layers> = main
        .nodes
        .iter()
        .filter_map(|n| match &n.op {
            Op::Call { callee, layers, .. } if module.functions[*callee].name.contains("group") => {
                Some(layers.clone())
            }
            _ => None,
        })
        .collect();
    assert_eq!(loops, [0..4, 0..4]);
    // Groups of three begin with either kind: two functions, and a shorter one.
    let groups =
        of(3).functions.values().filter(|f| f.name.contains("group") && !f.name.contains("backward")).count();
    assert_eq!(groups, 3);
}

#[test]
fn logits_of_one_part_are_there_at_a_time() {
    let module = step(Training { loss_chunks: 4, ..Training::default() });
    verify(&module).unwrap();
    let head = function(&module, "head");
    assert!(module.function("head.backward").is_none());
    let [v, s] = ["v", "s"].map(|name| module.space.dim(name).unwrap());
    let logits = |v: &ithaca_ir::Value, d| v.ty.has(d);
    assert!(head.values.values().all(|value| !(logits(value, v) && logits(value, s))));
    assert_eq!(count(head, "cross_entropy"), 4);
    assert_eq!(count(head, "join"), 1);
    // The weights' gradients are written once.
    let assigned = count(head, "assign");
    assert_eq!(assigned, count(function(&step(Training::default()), "head.backward"), "assign"));
}

#[test]
fn a_loss_that_has_no_parts_is_refused() {
    let training = Training { loss_chunks: 3, ..Training::default() };
    let workload = Workload { mode: Mode::Train, training, ..Workload::prefill(4, 8) };
    let refused = program(&llama(), "m", &workload).unwrap_err();
    assert_eq!(refused[0].code, "P57");
    assert!(
        refused[0].message.contains("`s` of 8 tokens does not divide into 3 parts"),
        "{}",
        refused[0].message
    );
}
