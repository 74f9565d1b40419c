//! Roles of the dimensions of models.

use ithaca_import::{Workload, import};
use ithaca_ir::{DimId, Module};
use ithaca_pass::roles::Roles;
use serde_json::json;

fn names<'a>(module: &Module, dims: impl IntoIterator<Item = &'a DimId>) -> Vec<String> {
    dims.into_iter().map(|&d| module.space.dims[d].name.clone()).collect()
}

#[test]
fn types_of_token_are_no_vocabulary() {
    let config = json!({"model_type": "bert", "architectures": ["BertModel"]});
    let module = import(&config, "m", &Workload::prefill(2, 64)).unwrap();
    let roles = Roles::of(&module);
    assert_eq!(names(&module, &roles.vocabularies), ["v"]);
    assert_eq!(names(&module, &roles.hidden), ["f", "n"]);
    assert_eq!(names(&module, &roles.sequences), ["s"]);
    assert_eq!(names(&module, &roles.batches), ["b"]);
}

#[test]
fn both_sequences_of_an_encoder_and_a_decoder_are_sequences() {
    let module = import(&json!({"model_type": "t5"}), "m", &Workload::prefill(2, 64)).unwrap();
    let roles = Roles::of(&module);
    assert_eq!(names(&module, &roles.sequences), ["s", "t"]);
    assert_eq!(names(&module, &roles.hidden), ["f"]);
    assert_eq!(names(&module, &roles.vocabularies), ["v"]);
    assert_eq!(names(&module, &roles.batches), ["b"]);
    assert!(roles.caches.is_empty());
}
