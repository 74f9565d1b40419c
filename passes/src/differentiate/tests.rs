use serde_json::json;

use super::*;
use crate::import::{Mode, Workload, program};

fn llama() -> serde_json::Value {
    json!({"model_type": "llama", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32, "tie_word_embeddings": true})
}

fn step(training: Training) -> Module {
    let workload = Workload { mode: Mode::Train, training, ..Workload::prefill(4, 8) };
    program(&llama(), "m", &workload).unwrap_or_else(|d| panic!("{d:?}"))
}

#[test]
fn show() {
    let module = step(Training { micro_batches: 2, clip: Some(1.0), ..Training::default() });
    std::fs::write("/tmp/train.ith", ithaca_ir::text::print(&module)).unwrap();
    let module = step(Training { recompute: Recompute::KeepAttention, ..Training::default() });
    std::fs::write("/tmp/train2.ith", ithaca_ir::text::print(&module)).unwrap();
}
