//! Options and rules. The effect on programs is tested in the crate that runs programs.

use super::*;
use ithaca_pass::Volume;

#[test]
fn every_file_of_rules_can_be_read() {
    let rules: Vec<&Rule> = ABOUT_COMMUNICATION.iter().chain(ABOUT_KERNELS.iter()).collect();
    let names: BTreeSet<&str> = rules.iter().map(|rule| rule.name.as_str()).collect();
    assert_eq!(names.len(), rules.len(), "names are unique over all files");
}

/// Each rule applies in the e-graph of a program drawn for it, and the result can be rebuilt.
#[test]
fn every_rule_fires_on_a_program_that_is_drawn_for_it() {
    for rule in ABOUT_COMMUNICATION.iter().chain(ABOUT_KERNELS.iter()) {
        let rules = std::slice::from_ref(rule);
        let fires = |seed: u64| {
            let Some(module) = rules::drawn(rule, seed) else { return false };
            let cx = ops::Context { space: &module.space, functions: &module.functions };
            let function = module.functions.values().next_back().unwrap();
            let mut block = Block::of(function, cx.names(), |_| true);
            let Saturate { nodes, iterations, .. } = Saturate::default();
            let made = grow(&mut block.graph, cx, module.level, rules, nodes, iterations);
            let mut prices = PriceList::new(&module.space, &Volume);
            let (roots, original) = (block.roots(), block.originals());
            let chosen = extract(&block.graph, (&mut prices, &BTreeMap::new()), &roots, &original, |_| true);
            let rebuilt = block.rebuilt(cx, &chosen).unwrap().unwrap();
            let text = written(&block.graph, &roots, &original, &chosen);
            let again = recorded(&block.graph, &roots, &original, &text).unwrap();
            let again = block.rebuilt(cx, &again).unwrap().unwrap();
            assert_eq!(again.nodes, rebuilt.nodes, "`{}`, seed {seed}: {text}", rule.name);
            let (before, after) = (prices.of_nodes(function, |_| true), prices.of_nodes(&rebuilt, |_| true));
            assert!(after <= before * (1.0 + 1e-9), "`{}`, seed {seed}: {before} to {after}", rule.name);
            !made.terms.is_empty() || !made.found.is_empty()
        };
        assert!((0..4000).any(fires), "`{}` never fired", rule.name);
    }
}

#[test]
fn options_print_as_they_are_read() {
    let options = |text: &str| -> Vec<(String, String)> {
        let pairs = text.split(',').filter(|item| !item.is_empty());
        pairs.map(|item| item.split_once('=').unwrap()).map(|(k, v)| (k.into(), v.into())).collect()
    };
    for text in [
        "",
        "nodes=100",
        "nodes=100,iterations=2",
        "rules=added",
        "rules=kernels",
        "rules=kernels,packing=folded",
    ] {
        assert_eq!(
            ithaca_pass::options::read::<Saturate>("saturate", OPTIONS, &options(text)).unwrap().options(),
            options(text),
            "{text}"
        );
    }
    for text in ["nodes=0", "nodes=many", "time=1", "rules=mine"] {
        assert_eq!(
            ithaca_pass::options::read::<Saturate>("saturate", OPTIONS, &options(text)).unwrap_err().code,
            "P02",
            "{text}"
        );
    }
}
