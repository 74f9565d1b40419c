//! What a layout sends, against closed formulas of the literature: the plan, the per-rank program and the runtime agree
//! with them and with each other, to the byte.

use ithaca_ir::traffic::{self, Traffic};
use ithaca_ir::{Module, verify};
use ithaca_kernels::cpu;
use ithaca_kernels::store::RandomTensors;
use ithaca_passes::cluster::Cluster;
use ithaca_passes::compile::compile;
use ithaca_passes::import::{Workload, import};
use ithaca_passes::pass::{Prices, Volume};
use ithaca_passes::plan;
use ithaca_passes::planner::{self, Program, Request};
use ithaca_passes::shard::{HeadSplit, ShardOptions, parse_mesh};
use serde_json::json;

/// A model of the llama family, and what it is asked to do.
#[derive(Clone, Copy, Debug)]
struct Case {
    heads: u64,
    kv_heads: u64,
    head_dim: u64,
    tokens: u64,
    layers: u64,
    dtype: &'static str,
}

/// A vocabulary that divides by no degree of these tests, so that embedding and head stay whole and send nothing.
const WHOLE_VOCABULARY: u64 = 97;

/// A vocabulary that divides by all of them.
const SPLIT_VOCABULARY: u64 = 96;

impl Case {
    fn module(&self, vocabulary: u64) -> Module {
        let config = json!({
            "model_type": "llama",
            "hidden_size": self.heads * self.head_dim,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": self.layers,
            "intermediate_size": 64,
            "vocab_size": vocabulary,
            "dtype": self.dtype,
        });
        import(&config, "model", &Workload::prefill(1, self.tokens)).unwrap()
    }

    /// Bytes of an element.
    fn element(&self) -> u64 {
        match self.dtype {
            "float32" => 4,
            "bfloat16" | "float16" => 2,
            other => panic!("{other} has no size here"),
        }
    }

    /// Key/value heads that travel when the heads of each tensor rank are split over `degree`: copied ones where there
    /// are fewer than ranks.
    fn travelling_kv_heads(&self, degree: u64, tensor: u64) -> u64 {
        self.kv_heads.max(degree * tensor) / tensor
    }

    /// `L · (P−1)/P · N/P · D·e·(2·Hq + 2·Hkv′)`, of the heads of one tensor rank.
    fn ulysses(&self, degree: u64, tensor: u64) -> u64 {
        let heads = 2 * self.heads / tensor + 2 * self.travelling_kv_heads(degree, tensor);
        let numerator = self.layers * (degree - 1) * self.tokens * self.head_dim * self.element() * heads;
        assert_eq!(numerator % (degree * degree), 0);
        numerator / (degree * degree)
    }

    /// `(P−1)/P · N·h·e`: one all-gather or reduce-scatter of the residual.
    fn half(&self, degree: u64) -> u64 {
        (degree - 1) * self.tokens * self.heads * self.head_dim * self.element() / degree
    }
}

/// One layer with heads 128 wide, over 65 536 tokens in bf16: the model of the table of published sizes.
pub(crate) fn published(heads: u64, kv_heads: u64) -> Module {
    let case = Case { heads, kv_heads, head_dim: 128, tokens: 65_536, layers: 1, dtype: "bfloat16" };
    case.module(WHOLE_VOCABULARY)
}

/// The row of a kind, or none sent.
fn row(rows: &[Traffic], kind: &str) -> (u64, u64) {
    let of_kind: Vec<&Traffic> = rows.iter().filter(|r| r.kind == kind).collect();
    assert!(of_kind.len() <= 1, "{rows:?}");
    of_kind.first().map_or((0, 0), |r| (r.count, r.bytes_sent_per_rank))
}

/// What a strategy sends for a module.
pub(crate) fn sent(module: &Module, strategy: &str, mesh: &str, prices: &dyn Prices) -> Vec<Traffic> {
    let options = ShardOptions::new(strategy, parse_mesh(mesh).unwrap());
    let compiled = compile(module, &options, prices).unwrap_or_else(|d| panic!("{strategy} {mesh}: {d:?}"));
    traffic::of_module(&compiled.per_rank)
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (heads, kv_heads) in [(32, 32), (32, 8), (16, 4), (16, 2), (32, 1), (8, 8), (8, 1)] {
        for (head_dim, tokens, layers, dtype) in
            [(128, 4096, 2, "bfloat16"), (64, 1024, 3, "float16"), (8, 256, 1, "float32")]
        {
            cases.push(Case { heads, kv_heads, head_dim, tokens, layers, dtype });
        }
    }
    cases
}

#[test]
fn ulysses_sends_what_the_formula_says() {
    for case in cases() {
        let module = case.module(WHOLE_VOCABULARY);
        for degree in [2, 4, 8, 16, 32].into_iter().filter(|p| case.heads % p == 0) {
            let rows = sent(&module, "ulysses", &format!("ulysses={degree}"), &Volume);
            let (count, bytes) = row(&rows, "all_to_all");
            assert_eq!(bytes, case.ulysses(degree, 1), "{case:?} on {degree}");
            assert!(count <= 4 * case.layers, "{case:?} on {degree}: {count} all-to-alls");
            assert_eq!(rows.len(), 1, "{case:?} on {degree}: {rows:?}");
        }
    }
}

/// MiB sent per rank in one layer's forward pass, bf16, heads 128 wide, 65 536 tokens.
#[test]
fn ulysses_sends_what_the_table_of_published_sizes_says() {
    let cluster = Cluster::named("dgx-h100").unwrap();
    let volume: &dyn Prices = &Volume;
    for (heads, kv_heads, mebibytes) in [
        (32, 32, [512, 384, 224, 120, 62]),
        (32, 8, [320, 240, 140, 90, 62]),
        (128, 8, [1088, 816, 476, 270, 155]),
        (32, 1, [272, 216, 140, 90, 62]),
    ] {
        let module = published(heads, kv_heads);
        for (degree, expected) in [2, 4, 8, 16, 32].into_iter().zip(mebibytes) {
            let (_, bytes) =
                row(&sent(&module, "ulysses", &format!("ulysses={degree}"), volume), "all_to_all");
            // The table's figures are rounded down to whole MiB.
            assert_eq!(bytes >> 20, expected, "{heads}/{kv_heads} on {degree}");
            if degree <= 8 {
                let on_a_node = sent(&module, "ulysses", &format!("ulysses={degree}"), &cluster);
                assert_eq!(
                    row(&on_a_node, "all_to_all").1,
                    bytes,
                    "{heads}/{kv_heads} on {degree} of a node"
                );
            }
        }
    }
}

#[test]
fn tensor_parallelism_sends_two_all_reduces_a_layer() {
    for case in cases() {
        for (vocabulary, more) in [(WHOLE_VOCABULARY, 0), (SPLIT_VOCABULARY, 1)] {
            let module = case.module(vocabulary);
            for degree in [2, 4, 8].into_iter().filter(|p| case.heads % p == 0) {
                // A vocabulary that is split adds one for the embedding.
                let times = 2 * case.layers + more;
                let mesh = format!("tp={degree}");
                let rows = sent(&module, "megatron-tp", &mesh, &Volume);
                assert_eq!(
                    row(&rows, "all_reduce"),
                    (times, times * 2 * case.half(degree)),
                    "{case:?} {mesh}"
                );
                assert_eq!(rows.len(), 1, "{rows:?}");

                let rows = sent(&module, "megatron-tp-sp", &mesh, &Volume);
                for kind in ["all_gather", "reduce_scatter"] {
                    assert_eq!(
                        row(&rows, kind),
                        (times, times * case.half(degree)),
                        "{case:?} {mesh} {kind}"
                    );
                }
                assert_eq!(rows.len(), 2, "{rows:?}");
            }
        }
    }
}

#[test]
fn products_send_what_their_factors_send() {
    for case in cases() {
        let module = case.module(WHOLE_VOCABULARY);
        for (degree, tensor) in [(2, 2), (4, 2), (2, 4)] {
            let legal = case.heads % (degree * tensor) == 0;
            if !legal {
                continue;
            }
            for mesh in [format!("ulysses={degree},tp={tensor}"), format!("tp={tensor},ulysses={degree}")] {
                let rows = sent(&module, "ulysses+megatron-tp", &mesh, &Volume);
                assert_eq!(row(&rows, "all_to_all").1, case.ulysses(degree, tensor), "{case:?} {mesh}");
                let reduced = 2 * case.layers * 2 * case.half(tensor) / degree;
                assert_eq!(row(&rows, "all_reduce").1, reduced, "{case:?} {mesh}");

                let rows = sent(&module, "ulysses+megatron-tp-sp", &mesh, &Volume);
                assert_eq!(row(&rows, "all_to_all").1, case.ulysses(degree, tensor), "{case:?} {mesh}");
                for kind in ["all_gather", "reduce_scatter"] {
                    let halves = 2 * case.layers * case.half(tensor) / degree;
                    assert_eq!(row(&rows, kind).1, halves, "{case:?} {mesh} {kind}");
                }
            }
        }
    }
}

#[test]
fn plan_program_and_runtime_agree() {
    let cluster = Cluster::named("dgx-h100").unwrap();
    for (heads, kv_heads, dtype) in
        [(8, 8, "bfloat16"), (8, 4, "float32"), (8, 1, "float16"), (6, 3, "float32")]
    {
        for vocabulary in [WHOLE_VOCABULARY, SPLIT_VOCABULARY] {
            let case = Case { heads, kv_heads, head_dim: 8, tokens: 48, layers: 2, dtype };
            let module = case.module(vocabulary);
            let tensors = RandomTensors::of_module(&module, 7);
            for (strategy, mesh) in [
                ("ulysses", "ulysses=2"),
                ("ulysses", "ulysses=4"),
                ("ulysses", "ulysses=8"),
                ("megatron-tp", "tp=2"),
                ("megatron-tp", "tp=4"),
                ("megatron-tp-sp", "tp=2"),
                ("megatron-tp-sp", "tp=8"),
                ("ulysses+megatron-tp", "ulysses=2,tp=2"),
                ("ulysses+megatron-tp-sp", "tp=2,ulysses=4"),
                ("ring", "ring=4"),
                ("ring+megatron-tp-sp", "ring=2,tp=2"),
                ("megatron-cp-allgather", "cp=4"),
                ("megatron-cp-a2a-p2p", "cp=2,ulysses=2"),
                ("rsa", "ring=3"),
                ("dist-flash", "ring=8"),
                ("usp", "ulysses=2,ring=3"),
                ("loongtrain", "outer=2,ring=2,ulysses=2"),
                ("gspmd-2d", "cp=3,tp=2"),
                ("sparse-fetch", "ring=4"),
                ("pass-q", "ring=4"),
            ] {
                let mesh = parse_mesh(mesh).unwrap();
                let request = Request {
                    strategy: Some(strategy.to_owned()),
                    mesh: Some(mesh.clone()),
                    options: ShardOptions { heads: HeadSplit::Uneven, ..ShardOptions::default() },
                    ..Request::new(mesh.ranks())
                };
                let program = Program::new(verify::verify(&module).unwrap(), &cluster);
                // What is not legal for six heads is the business of other tests.
                let Ok(ranked) = planner::rank(&program, &cluster, &request) else {
                    assert_eq!(heads, 6, "{case:?} {strategy} {mesh}");
                    continue;
                };
                let compiled = ranked.step.compiled.clone();
                let promised = traffic::of_module(&compiled.per_rank);
                let subject = planner::Subject {
                    model: plan::Model::new("model", json!({})),
                    workload: plan::Workload::of(&Workload::prefill(1, case.tokens), &module),
                    model_flops: 0.0,
                };
                let written = ranked.into_plan(&cluster, &request, subject).collectives;
                assert_eq!(written, plan::collectives(&compiled.per_rank));
                assert_eq!(written.len(), promised.len());
                for (row, promise) in written.iter().zip(&promised) {
                    assert_eq!(
                        (&row.kind, &row.axis, row.count),
                        (&promise.kind, &promise.axis, promise.count)
                    );
                    assert_eq!(row.bytes_sent_per_rank, promise.bytes_sent_per_rank);
                }
                verify::verify(&compiled.per_rank).unwrap();
                let run =
                    cpu::execute(&compiled.schedule, &tensors, &tensors, &cpu::Options::default()).unwrap();
                assert_eq!(run.traffic, promised, "{case:?} {strategy} {mesh}");
            }
        }
    }
}
