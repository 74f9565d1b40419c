//! Options and rules; what the pass does to programs is tested where programs can be run.

use super::*;

#[test]
fn every_file_of_rules_can_be_read() {
    let rules = builtin();
    let names: BTreeSet<&str> = rules.iter().map(|rule| rule.name.as_str()).collect();
    assert_eq!(names.len(), rules.len(), "names are unique over all files");
}

#[test]
fn options_print_as_they_are_read() {
    let options = |text: &str| -> Vec<(String, String)> {
        let pairs = text.split(',').filter(|item| !item.is_empty());
        pairs.map(|item| item.split_once('=').unwrap()).map(|(k, v)| (k.into(), v.into())).collect()
    };
    for text in ["", "nodes=100", "nodes=100,iterations=2", "rules=added"] {
        assert_eq!(Saturate::from_pipeline(&options(text)).unwrap().options(), options(text), "{text}");
    }
    for text in ["nodes=0", "nodes=many", "time=1", "rules=mine"] {
        assert_eq!(Saturate::from_pipeline(&options(text)).unwrap_err().code, "P02", "{text}");
    }
}
