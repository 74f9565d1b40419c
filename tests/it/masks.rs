//! Programs with masks of every form, whole and distributed.

use ithaca_ir::{Mask, Module, Op};
use ithaca_kernels::{compare, cpu, oracle};
use ithaca_passes::compile::compile;
use ithaca_passes::pass::Volume;
use ithaca_passes::shard::{HeadSplit, SequenceFit, ShardOptions, parse_mesh};

use crate::golden::{CLOSE, EXACT, Golden};

fn llama() -> Golden {
    Golden::open("llama-gqa")
}

/// The program with another mask in every attention.
pub(crate) fn masked(module: &Module, mask: &Mask) -> Module {
    let mut module = module.clone();
    for node in module.functions.values_mut().flat_map(|f| &mut f.nodes) {
        if let Op::Attention(attention) = &mut node.op {
            attention.mask = mask.clone();
        }
    }
    module
}

/// Tokens of a sequence of the program.
pub(crate) fn tokens(module: &Module) -> u64 {
    module.space.dims[module.space.dim("s").unwrap()].valid
}

fn window(left: u64, right: u64) -> Mask {
    Mask::Window { left: Some(left), right: Some(right) }
}

/// Masks of a sequence; under the last four the last token would see keys after the sequence, if there were any.
fn masks(n: u64) -> Vec<Mask> {
    vec![
        Mask::CausalAtEnd { queries: n, keys: n },
        Mask::Any(vec![Mask::Causal, Mask::Prefix(n / 2)]),
        Mask::Any(vec![window(2, 0), Mask::Sinks(2)]),
        Mask::Documents(vec![0, 3, n - 2, n]),
        Mask::All(vec![Mask::Documents(vec![0, 1, n - 3, n]), Mask::Causal]),
        Mask::All(vec![Mask::Causal, Mask::Chunks(n / 3)]),
        // Queries of the second block see nothing.
        Mask::All(vec![Mask::Causal, Mask::Blocks { size: 2, rows: vec![vec![0], vec![], vec![0, 2]] }]),
        Mask::Full,
        window(3, 1),
        Mask::Any(vec![Mask::Global(1), window(1, 1)]),
        Mask::All(vec![Mask::Full, Mask::Any(vec![Mask::Causal, Mask::Global(2)])]),
    ]
}

#[test]
fn ulysses_runs_on_any_mask() {
    let Golden { module, weights, io, .. } = llama();
    let (weights, io) = (&weights, &io);
    let n = tokens(&module);
    let three = ShardOptions {
        heads: HeadSplit::Uneven,
        sequence: SequenceFit::Pad,
        ..ShardOptions::new("ulysses", parse_mesh("ulysses=3").unwrap())
    };
    let four = ShardOptions::new("ulysses+megatron-tp", parse_mesh("ulysses=2,tp=2").unwrap());
    for (mask, options) in masks(n).into_iter().flat_map(|mask| [(mask.clone(), &three), (mask, &four)]) {
        let module = masked(&module, &mask);
        let whole = oracle::run::<f64>(&module, weights, io).unwrap();
        assert!(whole["logits"].data.iter().all(|x| x.is_finite()), "{mask:?}");
        let compiled = compile(&module, options, &Volume).unwrap_or_else(|e| panic!("{mask:?}: {e:?}"));
        let ranks = oracle::run_ranks::<f64>(&compiled.per_rank, weights, io).unwrap();
        for comparison in compare::outputs(&ranks, &whole) {
            assert!(comparison.verdict.within(EXACT), "{mask:?}: {comparison:?}");
        }
        let run = cpu::execute(&compiled.schedule, weights, io, &cpu::Options::default()).unwrap();
        let verdict = compare::tensors(&run.outputs["logits"], &whole["logits"]);
        assert!(verdict.within(CLOSE), "{mask:?}: {verdict:?}");
    }
}
