//! Model FLOPs: those that the model needs for a step, whatever the layout.
//!
//! Of the forward pass they are 2 for each weight that multiplies a token, and those of attention over the pairs that the mask
//! leaves; a training step has three times as many (Narayanan et al., Efficient Large-Scale Language Model Training on GPU
//! Clusters, 2021; Chowdhery et al., PaLM, appendix B). Recomputation, padding and slots of experts without a token do not
//! count.

use std::collections::BTreeMap;

use ithaca_import::Mode;
use ithaca_ir::entity::Entity;
use ithaca_ir::ops::Unit;
use ithaca_ir::ops::experts::{Experts, Slots};
use ithaca_ir::{DimId, Function, Module, Op, Space};

/// Model FLOPs of a step; `forward` is the program before differentiation.
pub fn model_flops(forward: &Module, mode: Mode) -> f64 {
    let runs = forward.run_counts();
    let functions = forward.functions.iter();
    let once = functions.map(|(id, f)| runs[id.index()] as f64 * of_function(&forward.space, f));
    let passes = match mode {
        Mode::Prefill | Mode::Decode => 1.0,
        Mode::Train => 3.0,
    };
    // The sum of no numbers is -0.0.
    passes * once.sum::<f64>() + 0.0
}

fn of_function(space: &Space, function: &Function) -> f64 {
    let filled = filled_slots(space, function);
    let nodes = function.nodes.iter().filter(|node| match node.op.info().unit {
        Unit::Matmul | Unit::Attention => true,
        Unit::Vector | Unit::NoKernel => false,
    });
    let flops = nodes.map(|node| {
        let (operands, results) = (function.operand_types(node), function.result_types(node));
        let dims = operands.iter().chain(&results).flat_map(|ty| &ty.dims);
        let filled = dims.filter_map(|dim| filled.get(dim)).copied().fold(1.0, f64::min);
        filled * node.op.cost(space, &operands, &results).flops as f64
    });
    flops.sum()
}

/// The part of the slots of experts that tokens fill where each choice has one, by the dimension of the slots.
fn filled_slots(space: &Space, function: &Function) -> BTreeMap<DimId, f64> {
    let dispatched = function.nodes.iter().filter_map(|node| match &node.op {
        Op::Experts(Experts::Dispatch(slots)) => Some(slots),
        _ => None,
    });
    let size = |dim: DimId| space.size(dim) as f64;
    let filled = |Slots { experts, top, shared }: &Slots| {
        let groups = if shared.batches == shared.batch { size(shared.batch) } else { size(shared.batches) };
        let slots = size(*experts) * groups * size(shared.groups) * size(shared.slots);
        (shared.slots, size(shared.batch) * size(shared.sequence) * size(*top) / slots)
    };
    dispatched.map(filled).collect()
}

#[cfg(test)]
mod tests {
    use ithaca_import::{self as import, Workload};
    use serde_json::json;

    use super::*;

    #[test]
    fn forward_flops_are_two_for_each_weight_and_token_and_those_of_attention() {
        let dense = json!({
            "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-5,
            "max_position_embeddings": 128, "vocab_size": 100, "torch_dtype": "bfloat16"
        });
        let (n, batch) = (32.0, 2);
        let flops = |config, workload: &Workload| {
            model_flops(&import::import(config, "model", workload).unwrap(), workload.mode)
        };
        let prefill = Workload { batch, ..Workload::prefill(batch, 32) };
        let weights = 3.0 * (64.0 * (64.0 + 2.0 * 32.0) + 64.0 * 64.0 + 3.0 * 64.0 * 96.0) + 64.0 * 100.0;
        let pairs = n * (n + 1.0) / 2.0;
        let attention = 2.0 * 3.0 * pairs * 4.0 * 4.0 * 16.0;
        let expected = 2.0 * weights * 2.0 * n + attention;
        let found = flops(&dense, &prefill);
        assert!((found / expected - 1.0).abs() < 0.01, "{found} {expected}");
        assert_eq!(flops(&dense, &Workload { mode: Mode::Train, ..prefill.clone() }), 3.0 * found);
        let experts = json!({
            "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-5,
            "max_position_embeddings": 128, "vocab_size": 100, "torch_dtype": "bfloat16",
            "num_local_experts": 8, "num_experts_per_tok": 2
        });
        // Two experts for each token, and the router.
        let more = 3.0 * (3.0 * 64.0 * 96.0 + 64.0 * 8.0) * 2.0 * 2.0 * n;
        for expert_bound in [None, Some(import::ExpertBound::default())] {
            let workload = Workload { expert_bound, batch: 1, ..Workload::prefill(1, 4096) };
            let dense = flops(&dense, &workload);
            let scale = 4096.0 / (2.0 * n);
            let found = flops(&experts, &workload);
            assert!(((found - dense) / (more * scale) - 1.0).abs() < 0.01, "{found} {dense}");
        }
    }
}
