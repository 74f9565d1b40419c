//! The digest of a model's configuration: the same for the same content, however it is spaced and ordered.

use serde_json::Value;
use sha2::{Digest, Sha256};

/// SHA-256 of `config` with keys sorted and without spaces, in hexadecimal.
pub fn digest(config: &Value) -> String {
    let mut sorted = config.clone();
    sorted.sort_all_objects();
    Sha256::digest(sorted.to_string().as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_and_spaces_do_not_count_but_content_does() {
        let digest_of = |text: &str| digest(&serde_json::from_str(text).unwrap());
        let one = digest_of(r#"{"a": [1, 2.5, null], "b": {"y": "x", "z": true}}"#);
        assert_eq!(one, digest_of(r#"{"b":{"z":true,"y":"x"},"a":[1,2.5,null]}"#));
        assert_ne!(one, digest_of(r#"{"b":{"z":true,"y":"x"},"a":[1,2.5]}"#));
        assert_eq!(one.len(), 64);
        // SHA-256 of `{}`.
        assert_eq!(digest_of("{}"), "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a");
    }
}
