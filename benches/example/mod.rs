//! The descriptions of models in `examples`.

use std::path::Path;

use serde_json::Value;

/// The configuration of an example.
pub(crate) fn config(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples").join(name).join("config.json");
    serde_json::from_str(&std::fs::read_to_string(path).expect("an example")).expect("JSON")
}
