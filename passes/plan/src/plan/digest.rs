//! The digest of a model's configuration: the same for the same content, however it is spaced and ordered.

use std::fmt::Write;

use serde_json::Value;
use sha2::{Digest, Sha256};

/// SHA-256 of `config` with keys sorted and without spaces, in hexadecimal.
pub fn digest(config: &Value) -> String {
    let mut text = String::new();
    canonical(config, &mut text);
    Sha256::digest(text.as_bytes()).iter().fold(String::new(), |mut hex, byte| {
        write!(hex, "{byte:02x}").expect("writing to a string succeeds");
        hex
    })
}

fn canonical(value: &Value, text: &mut String) {
    match value {
        Value::Object(map) => {
            let mut entries: Vec<_> = map.iter().collect();
            entries.sort_by_key(|&(key, _)| key);
            text.push('{');
            for (i, (key, value)) in entries.into_iter().enumerate() {
                text.push_str(if i == 0 { "" } else { "," });
                text.push_str(&Value::String(key.clone()).to_string());
                text.push(':');
                canonical(value, text);
            }
            text.push('}');
        }
        Value::Array(items) => {
            text.push('[');
            for (i, item) in items.iter().enumerate() {
                text.push_str(if i == 0 { "" } else { "," });
                canonical(item, text);
            }
            text.push(']');
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {
            text.push_str(&value.to_string());
        }
    }
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
