//! Properties of the text form and of the verifier, on random programs.

use ithaca_ir::{Mask, Module, text, verify};
use proptest::prelude::*;

use crate::attention::case::Case;
use crate::generate::{Choices, Precision, distribute, mesh, program};

fn survives_printing(module: &Module) {
    if let Err(diagnostics) = verify::verify(module) {
        panic!("{diagnostics:#?}\n{}", text::print(module));
    }
    let printed = text::print(module);
    let parsed = match text::parse(&printed) {
        Ok(parsed) => parsed,
        Err(diagnostics) => panic!("{diagnostics:#?}\n{printed}"),
    };
    assert_eq!(parsed, *module);
    assert_eq!(text::print(&parsed), printed);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    #[test]
    fn programs_print_as_they_parse(mut choices in Choices::strategy()) {
        survives_printing(&program(&mut choices, Precision::Mixed));
    }

    #[test]
    fn distributed_programs_print_as_they_parse(mut choices in Choices::strategy()) {
        let mesh = mesh(&mut choices);
        let module = program(&mut choices, Precision::Only(ithaca_ir::DType::F64));
        survives_printing(&distribute(&module, mesh, &mut choices));
    }

    #[test]
    fn text_that_means_nothing_is_refused(lines in prop::collection::vec("[ -~]{0,40}", 0..20)) {
        let text = format!("ithaca 1 program\nmodel \"m\"\ndim a = 4\nfunc @main() {{\n{}", lines.join("\n"));
        prop_assert!(text::parse(&text).is_err());
    }
}

/// Attention that was distributed, forward and backward, a way for each kind of steps.
fn attentions() -> Vec<Module> {
    let ring = |strategy: &str| Case::new(strategy, &[("ring", 4)], 16);
    let decode = Case { queries: 1, keys: Some(16), ..Case::new("decode-reduce", &[("cp", 4)], 1) };
    let cases = [
        Case { sink: true, ..ring("ring") },
        ring("dist-flash"),
        ring("rsa"),
        ring("sparse-fetch"),
        Case { mask: Mask::Full, ..decode },
        // More ranks than key/value heads, so that these are copied.
        Case::new("ulysses", &[("ulysses", 4)], 16),
    ];
    cases.iter().map(|case| case.per_rank(&case.whole()).unwrap()).collect()
}

#[test]
fn distributed_attention_prints_as_it_parses() {
    attentions().iter().for_each(survives_printing);
}

#[test]
fn random_programs_use_every_operation() {
    let mut seen = std::collections::BTreeSet::new();
    let mut pending = 0;
    for seed in 0..300 {
        let mut choices = Choices::from_seed(seed);
        let mesh = mesh(&mut choices);
        let module = program(&mut choices, Precision::Mixed);
        let distributed = distribute(&module, mesh, &mut choices);
        for function in distributed.functions.values() {
            seen.extend(function.nodes.iter().map(|n| n.op.name()));
            pending += function.values.values().filter(|v| !v.ty.layout.partial.is_empty()).count();
        }
    }
    for module in attentions() {
        seen.extend(module.functions.values().flat_map(|f| &f.nodes).map(|n| n.op.name()));
    }
    let unused: Vec<&str> =
        ithaca_ir::ops::TABLE.iter().map(|row| row.name).filter(|n| !seen.contains(n)).collect();
    assert!(unused.is_empty(), "never generated: {unused:?}");
    assert!(pending > 50, "only {pending} values are pending sums");
}
