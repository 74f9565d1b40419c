//! Rules, rank orders, texts and readings of frameworks, on the models of the examples.

use ithaca_differentiate::{GradientType, PipelineOrder, Recompute, Training};
use ithaca_import::{Facts, Mode, Pages, Workload, facts};
use ithaca_ir::{DType, Mesh};
use ithaca_layout::registry::Registry;
use ithaca_layout::shard::strategy::parse_mesh;
use ithaca_layout::shard::{HeadSplit, ShardOptions, Zero};

use crate::{
    Framework, Layout, Role, Subject, TokenOrder, UnsupportedOption, check, export, megatron_args, nearest,
    row, settings,
};

fn model(name: &str) -> (serde_json::Value, Facts) {
    let path = format!("{}/../../examples/{name}/config.json", env!("CARGO_MANIFEST_DIR"));
    let config: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let facts = facts(&config, &[]).unwrap();
    (config, facts)
}

fn train(batch: u64, sequence: u64) -> Workload {
    Workload { mode: ithaca_import::Mode::Train, ..Workload::prefill(batch, sequence) }
}

fn layout(facts: &Facts, strategy: &str, mesh: &str, workload: &Workload) -> Layout {
    let mesh = if mesh.is_empty() { Mesh::single() } else { parse_mesh(mesh).unwrap() };
    let stages = mesh.axis("pp").map_or(1, |axis| mesh.size(axis));
    let training = Training { stages, ..workload.training.clone() };
    let workload = Workload { training, ..workload.clone() };
    let options = ShardOptions::new(strategy, mesh);
    Layout::new(&Registry::default(), &options, &workload, facts, Some(TokenOrder::Zigzag)).unwrap()
}

/// The reasons of refusals, joined.
fn reasons(framework: Framework, layout: &Layout, facts: &Facts) -> String {
    let refusals = check(framework, layout, facts);
    refusals.into_iter().map(|refusal| refusal.reason).collect::<Vec<_>>().join("\n")
}

#[test]
fn megatron_numbers_ranks_as_its_documentation_shows() {
    let (_, facts) = model("llama-3-8b");
    let groups = |mesh: &str, role: Role| {
        let layout = layout(&facts, "pipeline+data-parallel+ring+megatron-tp", mesh, &train(16, 8192));
        Framework::Megatron.order(&layout).groups(&[role])[0].clone()
    };
    let usual = "pp=2,dp=2,ring=2,tp=2";
    assert_eq!(groups(usual, Role::Tensor), [0, 1]);
    assert_eq!(groups(usual, Role::Tokens), [0, 2]);
    assert_eq!(groups(usual, Role::Data), [0, 4]);
    assert_eq!(groups(usual, Role::Stages), [0, 8]);
    // With `--use-tp-pp-dp-mapping`, which the mesh asks for.
    let inside = "dp=2,pp=2,ring=2,tp=2";
    assert_eq!(groups(inside, Role::Stages), [0, 4]);
    assert_eq!(groups(inside, Role::Data), [0, 8]);
    let layout = layout(&facts, "pipeline+data-parallel+ring+megatron-tp", inside, &train(16, 8192));
    assert!(row(&settings(Framework::Megatron, &layout, &facts), true).contains("--use-tp-pp-dp-mapping"));
}

#[test]
fn a_mesh_in_another_order_gives_a_permutation() {
    let (_, facts) = model("llama-3-8b");
    let layout = layout(&facts, "megatron-tp+ring", "tp=2,ring=4", &train(1, 8192));
    let order = Framework::Megatron.order(&layout);
    assert!(!order.is_identity());
    // Rank 1 of the framework is the other half of the weights: rank 4 of the mesh.
    assert_eq!((0..8).map(|rank| order.of_framework(rank)).collect::<Vec<_>>(), [0, 4, 1, 5, 2, 6, 3, 7]);
    assert_eq!(order.to_framework(), [0, 2, 4, 6, 1, 3, 5, 7]);
    assert!(order.sentence("Megatron-LM").contains("ranks 0 2 4 6 1 3 5 7"));
    // Groups of TransformerEngine are the caller's.
    assert!(Framework::TransformerEngine.order(&layout).is_identity());
}

#[test]
fn every_choice_that_a_framework_lacks_is_refused() {
    use Framework::{
        Accelerate, Deepspeed, Megatron, Sglang, TensorrtLlm, Torchtitan, TransformerEngine, Vllm,
    };
    let (_, llama) = model("llama-3-8b");
    let (_, qwen) = model("qwen2.5-7b");
    let (_, gemma) = model("gemma-2-9b");
    let (_, experts) = model("mixtral-8x7b");
    let (_, t5) = model("t5-3b");
    let step = train(16, 8192);
    let prompt = Workload::prefill(16, 8192);
    let decode = Workload::decode(16, 8192);
    let is = |framework: Framework, layout: &Layout, facts: &Facts, expected: &str| {
        let found = reasons(framework, layout, facts);
        assert!(found.contains(expected), "{framework}: {expected}\nfound: {found}");
    };
    let on = |strategy: &str, mesh: &str| layout(&llama, strategy, mesh, &step);
    let ring = on("ring", "ring=4");
    is(Megatron, &on("rsa", "ring=4"), &llama, "meet by `two-pass`");
    is(Megatron, &on("loongtrain", "outer=2,ring=2,ulysses=2"), &llama, "a ring inside a ring");
    is(Megatron, &Layout { order: TokenOrder::Contiguous, ..ring.clone() }, &llama, "in order contiguous");
    is(Megatron, &Layout { order: TokenOrder::Striped(1), ..ring.clone() }, &llama, "in order striped");
    is(Megatron, &Layout { sequence: 8196, ..ring.clone() }, &llama, "not divisible by 2 · context degree 4");
    // The rule is the same for every type of communication.
    is(
        Megatron,
        &Layout { sequence: 8196, ..on("ulysses", "ulysses=4") },
        &llama,
        "not divisible by 2 · context degree 4",
    );
    is(Megatron, &on("ulysses", "ulysses=16"), &llama, "copies no key/value heads");
    is(Megatron, &layout(&gemma, "ring", "ring=4", &step), &gemma, "a sliding window");
    is(
        Megatron,
        &layout(&qwen, "megatron-tp", "tp=8", &step),
        &qwen,
        "28 query heads are not divisible by tensor degree 8",
    );
    is(Megatron, &layout(&t5, "single", "", &step), &t5, "t5 is not a decoder");
    is(Megatron, &layout(&llama, "megatron-tp", "tp=2", &decode), &llama, "continues sequences from caches");
    is(
        Megatron,
        &layout(&experts, "data-parallel+megatron-tp+ep", "dp=4,tp=2", &step),
        &experts,
        "needs sequence parallelism",
    );
    is(Megatron, &layout(&experts, "ep", "ep=4", &step), &experts, "split experts only");
    let with = |training: Training| Layout {
        training: Training { stages: 4, ..training },
        ..on("pipeline", "pp=4")
    };
    for order in [PipelineOrder::Gpipe, PipelineOrder::ZbH1] {
        is(
            Megatron,
            &with(Training { pipeline: order, micro_batches: 8, ..Training::default() }),
            &llama,
            "in order `",
        );
    }
    is(
        Deepspeed,
        &with(Training { pipeline: PipelineOrder::Interleaved, micro_batches: 8, ..Training::default() }),
        &llama,
        "`interleaved`",
    );
    is(
        Megatron,
        &with(Training { recompute: Recompute::KeepAttention, ..Training::default() }),
        &llama,
        "`keep-attention`",
    );
    is(Megatron, &with(Training { loss_chunks: 4, ..Training::default() }), &llama, "in 4 parts");
    is(
        Torchtitan,
        &with(Training { micro_batches: 2, ..Training::default() }),
        &llama,
        "fewer than 4 stages",
    );
    is(
        Torchtitan,
        &with(Training { recompute: Recompute::Full { every: 2 }, ..Training::default() }),
        &llama,
        "`full(every=2)`",
    );
    for option in [
        UnsupportedOption::UnevenHeads,
        UnsupportedOption::LayerStrategies,
        UnsupportedOption::SequenceAxes,
        UnsupportedOption::NarrowPartials,
        UnsupportedOption::PersistentWeights,
    ] {
        let odd = Layout { unsupported: vec![option.clone()], ..ring.clone() };
        for framework in Framework::ALL {
            is(framework, &odd, &llama, &option.name());
        }
    }
    is(Deepspeed, &ring, &llama, "splits heads there (Ulysses)");
    is(Deepspeed, &on("ulysses+megatron-tp", "ulysses=2,tp=2"), &llama, "numbers ranks for one of them");
    is(Deepspeed, &on("megatron-tp-sp", "tp=2"), &llama, "AutoTP of DeepSpeed does not");
    is(Deepspeed, &Layout { zero: Zero::Parameters, ..on("pipeline", "pp=2") }, &llama, "ZeRO 1 at most");
    let cut = |layers: Vec<u64>| on("pipeline", "pp=4").cut(layers);
    is(Deepspeed, &cut(vec![8, 8, 8, 6]), &llama, "stages of the plan have 8, 8, 8, 6 layers, and");
    let long = [vec![0], vec![1; 126], vec![0]].concat();
    is(Deepspeed, &cut(long), &llama, "have 0*1, 1*126, 0*1 layers (layers*stages, 128 in all), and");
    let mixed = [1, 2].repeat(64);
    is(Deepspeed, &cut(mixed), &llama, "1*1, 2*1, … layers (layers*stages, 128 in all), and");
    is(Torchtitan, &on("ulysses", "ulysses=4"), &llama, "gathers keys and values of tokens");
    is(Torchtitan, &ring, &llama, "torchtitan gathers keys and values");
    is(
        Torchtitan,
        &on("megatron-tp-sp", "tp=16"),
        &llama,
        "8 key/value heads are not divisible by tensor degree 16",
    );
    is(Torchtitan, &Layout { zero: Zero::Optimizer, ..on("data-parallel", "dp=4") }, &llama, "ZeRO 1");
    is(Accelerate, &on("pipeline", "pp=2"), &llama, "has no pipeline");
    is(Accelerate, &on("usp", "ring=2,ulysses=2"), &llama, "sp or cp");
    is(Accelerate, &on("data-parallel+megatron-tp", "dp=2,tp=2"), &llama, "dp_shard_size > 1");
    is(Vllm, &ring, &llama, "the plan is a training step");
    is(Vllm, &layout(&llama, "ulysses", "ulysses=4", &prompt), &llama, "splits weights by heads instead");
    is(Vllm, &layout(&llama, "ring", "ring=4", &prompt), &llama, "latent attention only");
    is(Vllm, &layout(&llama, "decode-context+megatron-tp", "tp=4,dcp=2", &decode), &llama, "at most 1");
    // SGLang accepts this and corrupts the cache.
    is(Sglang, &layout(&llama, "decode-context+megatron-tp", "tp=4,dcp=2", &decode), &llama, "at most 1");
    is(TensorrtLlm, &layout(&llama, "data-parallel+megatron-tp", "dp=2,tp=2", &prompt), &llama, "2 replicas");
    is(TransformerEngine, &layout(&llama, "rsa", "ring=4", &prompt), &llama, "meet by `two-pass`");
}

#[test]
fn all_reasons_are_given_at_once_and_the_nearest_layout_has_none() {
    let (_, facts) = model("llama-3-8b");
    let training = Training { recompute: Recompute::KeepAttention, loss_chunks: 4, ..Training::default() };
    let step = Workload { training, ..train(16, 8192) };
    let odd = Layout {
        order: TokenOrder::Contiguous,
        ..layout(&facts, "data-parallel+loongtrain", "dp=2,outer=2,ring=2,ulysses=2", &step)
    };
    assert_eq!(check(Framework::Megatron, &odd, &facts).len(), 4);
    for framework in [
        Framework::Megatron,
        Framework::Nemo,
        Framework::Torchtitan,
        Framework::Deepspeed,
        Framework::Accelerate,
    ] {
        let (near, changed) =
            nearest(framework, &odd, &facts).unwrap_or_else(|refusals| panic!("{framework}: {refusals:?}"));
        assert_eq!(reasons(framework, &near, &facts), "");
        assert!(changed.iter().all(|refusal| refusal.change.is_some()) && near.ranks() == odd.ranks());
    }
    // A server does not train, whatever else changes.
    assert!(nearest(Framework::Vllm, &odd, &facts).is_err());
}

#[test]
fn sequence_parallelism_of_one_rank_is_not_written() {
    let (_, facts) = model("llama-3-8b");
    let one = Layout { sequence_parallel: true, ..layout(&facts, "data-parallel", "dp=8", &train(8, 8192)) };
    assert_eq!(row(&settings(Framework::Megatron, &one, &facts), true), "");
}

#[test]
fn texts_of_all_frameworks() {
    let (_, llama) = model("llama-3-70b");
    let (_, latent) = model("deepseek-v3");
    let training = Training { recompute: Recompute::FULL, micro_batches: 8, ..Training::default() };
    let step = |training: &Training| Workload { training: training.clone(), ..train(64, 8192) };
    let subject = |plan: &str| Subject { model: "llama-3-70b".to_owned(), plan: plan.to_owned(), node: 8 };
    let show = |name: &str, layout: &Layout, facts: &Facts| {
        let framework: Framework = name.parse().unwrap();
        assert_eq!(reasons(framework, layout, facts), "", "{framework}");
        insta::assert_snapshot!(
            name,
            export(framework, layout, facts, &subject("llama-3-70b: a plan"), &[]).text
        );
    };
    let staged = layout(
        &llama,
        "pipeline+data-parallel+usp+megatron-tp-sp",
        "pp=4,dp=2,ring=2,ulysses=2,tp=2",
        &step(&training),
    );
    let staged = Layout { zero: Zero::Optimizer, ..staged }.cut(vec![21, 20, 20, 19]);
    show("megatron", &staged, &llama);
    show("nemo", &staged, &llama);
    show("transformer-engine", &layout(&llama, "usp", "ring=2,ulysses=2", &step(&training)), &llama);
    let zb = Training { pipeline: PipelineOrder::ZbH1, micro_batches: 4, ..training.clone() };
    let titan = layout(&llama, "pipeline+data-parallel+megatron-cp-allgather", "pp=2,dp=2,cp=2", &step(&zb));
    show("torchtitan", &Layout { zero: Zero::Parameters, ..titan }.cut(vec![2, 1]), &llama);
    let ulysses = layout(&llama, "data-parallel+ulysses", "dp=4,ulysses=4", &step(&training));
    let ulysses = Layout { zero: Zero::Parameters, ..ulysses };
    show("deepspeed", &ulysses, &llama);
    let gathered = layout(&llama, "data-parallel+ring", "dp=4,ring=4", &step(&training));
    show("accelerate", &Layout { zero: Zero::Parameters, ..gathered }, &llama);
    let decode = layout(&latent, "decode-context+megatron-tp", "tp=4,dcp=4", &Workload::decode(64, 32768));
    show("vllm", &Layout { order: TokenOrder::Striped(16), ..decode.clone() }, &latent);
    show("sglang", &decode, &latent);
    let prompt = layout(&llama, "pipeline+megatron-tp", "pp=2,tp=4", &Workload::prefill(4, 8192));
    show("tensorrt-llm", &prompt, &llama);
}

#[test]
fn servers_take_no_experts_over_replicas_and_no_other_caches() {
    let (_, mixture) = model("mixtral-8x7b");
    let decode = Workload::decode(64, 4096);
    // As many replicas as ranks that split weights.
    let over_data = layout(&mixture, "data-parallel+megatron-tp+ep", "dp=2,tp=2", &decode);
    assert!(reasons(Framework::Sglang, &over_data, &mixture).contains("replicas of SGLang share none"));
    let (near, _) = nearest(Framework::Sglang, &over_data, &mixture).unwrap();
    assert_eq!(reasons(Framework::Sglang, &near, &mixture), "");
    assert_eq!(near.experts(), 2);
    let (_, facts) = model("llama-3-8b");
    let subject = Subject { model: "m".to_owned(), plan: String::new(), node: 8 };
    let of = |workload: &Workload| layout(&facts, "data-parallel", "dp=16", workload);
    let narrow = of(&Workload { cache_type: Some(DType::F8E4M3), ..decode.clone() });
    for (framework, says) in [
        (Framework::Vllm, "--kv-cache-dtype fp8_e4m3"),
        (Framework::Sglang, "--kv-cache-dtype fp8_e4m3"),
        (Framework::TensorrtLlm, "kv_cache_config:\n  dtype: fp8"),
    ] {
        let text = export(framework, &narrow, &facts, &subject, &[]).text;
        assert!(text.contains(says), "{text}");
    }
    let text = export(Framework::Vllm, &narrow, &facts, &subject, &[]).text;
    assert!(text.contains("# 16 replicas need 2 nodes"), "{text}");
    let pages = Pages { tokens: 16, count: None, host: Some(8) };
    let refused = [
        (Workload { cache_type: Some(DType::F32), ..decode.clone() }, "in f8e4m3 only"),
        (Workload { pages: Some(pages), ..decode }, "in host memory"),
    ];
    for (workload, says) in refused {
        let reasons = reasons(Framework::Vllm, &of(&workload), &facts);
        assert!(reasons.contains(says) && !reasons.contains('\n'), "{reasons}");
    }
}

#[test]
fn padded_heads_are_odd_only_where_heads_do_not_divide() {
    let (_, facts) = model("qwen2.5-7b");
    let unsupported = |degree: u64| {
        let mesh = Mesh::new([("ulysses", degree)]);
        let options = ShardOptions { heads: HeadSplit::Pad, ..ShardOptions::new("ulysses", mesh) };
        Layout::new(&Registry::default(), &options, &Workload::prefill(1, 8192), &facts, None)
            .unwrap()
            .unsupported
    };
    assert_eq!(unsupported(4), []);
    assert_eq!(unsupported(8), [UnsupportedOption::PaddedHeads]);
}

#[test]
fn persistent_weights_are_odd() {
    let (_, facts) = model("llama-3-8b");
    let options = ShardOptions {
        zero: Zero::ParametersAbove(0),
        ..ShardOptions::new("data-parallel", Mesh::new([("dp", 4)]))
    };
    let workload = Workload { mode: Mode::Train, ..Workload::prefill(4, 8192) };
    let layout = Layout::new(&Registry::default(), &options, &workload, &facts, None).unwrap();
    assert_eq!(
        (layout.zero, layout.unsupported),
        (Zero::Parameters, vec![UnsupportedOption::PersistentWeights])
    );
}

#[test]
fn gradients_are_summed_as_the_plan_says() {
    use Framework::{Accelerate, Deepspeed, Megatron, Nemo, Torchtitan};
    let (_, facts) = model("llama-3-8b");
    let of = |(strategy, mesh): (&str, &str), gradients, dtype, zero| {
        let training = Training { gradients, ..Training::default() };
        let workload = Workload { training, dtype: Some(dtype), ..train(16, 8192) };
        Layout { zero, ..layout(&facts, strategy, mesh, &workload) }
    };
    let data = ("data-parallel", "dp=4");
    let text = |framework, layout: &Layout| {
        let subject = Subject { model: "m".to_owned(), plan: String::new(), node: 8 };
        export(framework, layout, &facts, &subject, &[]).text
    };
    let (full, narrow) = (GradientType::Full, GradientType::Weights);
    for (dtype, full_flag, narrow_flag) in [
        (DType::BF16, "", "--grad-reduce-in-bf16"),
        (DType::F16, "--accumulate-allreduce-grads-in-fp32", ""),
        (DType::F32, "", ""),
    ] {
        for (gradients, flag) in [(full, full_flag), (narrow, narrow_flag)] {
            let script = text(Megatron, &of(data, gradients, dtype, Zero::Optimizer));
            let flags = ["--grad-reduce-in-bf16", "--accumulate-allreduce-grads-in-fp32"];
            let found: Vec<&str> = flags.into_iter().filter(|flag| script.contains(flag)).collect();
            assert_eq!(found.concat(), flag, "{gradients:?} {dtype}");
        }
    }
    let bf16 = |gradients, zero| of(data, gradients, DType::BF16, zero);
    assert!(text(Nemo, &bf16(full, Zero::Optimizer)).contains("config.ddp.grad_reduce_in_fp32 = True"));
    assert!(text(Nemo, &bf16(narrow, Zero::Optimizer)).contains("config.ddp.grad_reduce_in_fp32 = False"));
    let json = |layout: &Layout| serde_json::from_str::<serde_json::Value>(&text(Deepspeed, layout)).unwrap();
    let sharded = bf16(full, Zero::Parameters);
    assert!(text(Megatron, &sharded).contains("--megatron-fsdp-main-grads-dtype fp32"));
    assert!(text(Nemo, &sharded).contains("config.ddp.megatron_fsdp_main_grads_dtype = torch.float32"));
    let accumulates = |layout: &Layout| json(layout)["data_types"]["grad_accum_dtype"].clone();
    assert_eq!(accumulates(&bf16(full, Zero::Gradients)), "fp32");
    assert_eq!(accumulates(&bf16(narrow, Zero::Off)), "bf16");
    assert!(reasons(Deepspeed, &bf16(full, Zero::Off), &facts).contains("summed in f32 without ZeRO"));
    // With one replica stage 1 splits nothing, and has sums in f32.
    let alone = of(("megatron-tp", "tp=4"), full, DType::BF16, Zero::Off);
    assert_eq!(json(&alone)["zero_optimization"]["stage"], 1);
    for framework in [Torchtitan, Accelerate] {
        assert_eq!(reasons(framework, &bf16(full, Zero::Parameters), &facts), "");
        let reasons = reasons(framework, &bf16(narrow, Zero::Parameters), &facts);
        assert!(reasons.contains("summed in bf16") && !reasons.contains('\n'), "{reasons}");
    }
    for (flags, train) in [
        ("--bf16", "dropout=off"),
        ("--bf16 --accumulate-allreduce-grads-in-fp32", "dropout=off"),
        ("--bf16 --grad-reduce-in-bf16", "dropout=off --train gradients=weights"),
        ("--fp16", "dropout=off --train gradients=weights"),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", "dropout=off"),
        ("--bf16 --use-megatron-fsdp", "dropout=off --train gradients=weights"),
        ("--bf16 --use-megatron-fsdp --megatron-fsdp-main-grads-dtype fp32", "dropout=off"),
    ] {
        let words = megatron_args::words(&ARGUMENTS.replace("--bf16", flags));
        let run = megatron_args::read(&words, 16, &[]).unwrap();
        assert!(run.workload.join(" ").ends_with(&format!("--train {train}")), "{flags}: {:?}", run.workload);
    }
}

#[test]
fn the_last_node_runs_the_ranks_that_are_left() {
    let (_, facts) = model("llama-3-8b");
    let layout = layout(&facts, "pipeline+data-parallel", "pp=2,dp=10", &train(20, 8192));
    let subject = Subject { model: "m".to_owned(), plan: String::new(), node: 8 };
    let text = export(Framework::Megatron, &layout, &facts, &subject, &[]).text;
    assert!(text.contains("torchrun --nproc-per-node \"$((NODE_RANK < 2 ? 8 : 4))\" --nnodes 3 "), "{text}");
}

const ARGUMENTS: &str = "torchrun --nproc-per-node 8 pretrain_gpt.py \\
    --tensor-model-parallel-size 4 --sequence-parallel --context-parallel-size=2 --cp-comm-type a2a \\
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 \\
    --vocab-size 128256 --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope \\
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 \\
    --seq-length 8192 --micro-batch-size 2 --global-batch-size 32 --bf16 --use-distributed-optimizer \\
    --recompute-granularity selective --lr 1e-4 --lr-decay-iters 100 --save 'a folder'";

#[test]
fn a_command_line_of_megatron_is_read() {
    let words = megatron_args::words(ARGUMENTS);
    let run = megatron_args::read(&words, 16, &[]).unwrap();
    assert_eq!(
        run.layout.join(" "),
        "--gpus 16 --strategy data-parallel+ulysses+megatron-tp-sp --mesh dp=2,ulysses=2,tp=4 --zero 1 --recompute selective \
         --micro-batches 8 --loss-chunks 1"
    );
    assert_eq!(run.workload.join(" "), "--mode train --seq 8192 --batch 32 --dtype bf16 --train dropout=off");
    assert_eq!(run.notes, ["ignored, for they change no price: --lr --lr-decay-iters --save"]);
    let facts = facts(&run.config.unwrap(), &[]).unwrap();
    assert_eq!((facts.layers, facts.heads, facts.kv_heads, facts.ffn), (32, 32, 8, 14336));
}

/// Experts over all ranks that split tokens are no axis of their own, as in the plan of which `export` writes them.
#[test]
fn experts_beside_context_parallelism_are_read() {
    let read = |experts: &str| {
        let more = format!(
            "{ARGUMENTS} --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size {experts} \
            --expert-tensor-parallel-size 4"
        );
        megatron_args::read(&megatron_args::words(&more), 16, &[])
    };
    let layout = read("4").unwrap().layout.join(" ");
    let expected = "--strategy data-parallel+ulysses+megatron-tp-sp+ep --mesh dp=2,ulysses=2,tp=4 ";
    assert!(layout.contains(expected), "{layout}");
    let refusals = read("2").unwrap_err();
    assert!(refusals[0].helps[0].contains("those of all ranks that split tokens"), "{refusals:?}");
}

#[test]
fn what_a_command_line_leaves_unclear_is_refused() {
    let read = |more: &str| {
        let words = megatron_args::words(&format!("{ARGUMENTS} {more}"));
        let refusals = megatron_args::read(&words, 16, &[]).unwrap_err();
        assert!(refusals.iter().all(|refusal| refusal.code == "C21"));
        refusals
            .into_iter()
            .map(|refusal| format!("{} {}", refusal.message, refusal.helps.join(" ")))
            .collect::<Vec<_>>()
            .join("\n")
    };
    assert!(read("--fp8-format hybrid --moe-shared").contains("`--fp8-format` may change the computation"));
    assert!(read("--sequence-paralel").contains("did you mean `--sequence-parallel`?"));
    assert!(read("--cp-comm-type allgather").contains("`all_gather` only"));
    assert!(read("--cp-comm-type a2a p2p").contains("another type for each layer"));
    assert!(read("--context-parallel-size 3").contains("16 GPUs are not divisible by 12"));
    assert!(read("--global-batch-size 31").contains("is not divisible by 4"));
    assert!(read("--recompute-modules mlp").contains("`--recompute-modules mlp` is not understood"));
    assert!(read("--micro-batch-size two").contains("is not a whole number"));
    assert!(read("--normalization LayerNorm").contains("are not understood"));
    // A caller may know better.
    let words = megatron_args::words(&format!("{ARGUMENTS} --fp8-format hybrid"));
    assert!(megatron_args::read(&words, 16, &["fp8-format".to_owned()]).is_ok());
}
