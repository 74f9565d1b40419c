//! Spellings in C++: identifiers, strings, numbers, comments.

use ithaca_ir::DType;

/// Identifiers that do not collide, made from names that may hold anything.
#[derive(Default)]
pub(super) struct Names {
    taken: Vec<String>,
}

impl Names {
    /// An identifier for `name` that no earlier call returned; it starts with `prefix`.
    pub(super) fn fresh(&mut self, prefix: &str, name: &str) -> String {
        let clean: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
        // Two underscores in a row are reserved in C++.
        let mut identifier = prefix.to_owned();
        for c in clean.chars() {
            if !(c == '_' && identifier.ends_with('_')) {
                identifier.push(c);
            }
        }
        if self.taken.contains(&identifier) {
            let n = (2..).find(|n| !self.taken.contains(&format!("{identifier}_{n}")));
            identifier = format!("{identifier}_{}", n.expect("some number is free"));
        }
        self.taken.push(identifier.clone());
        identifier
    }
}

/// A string literal.
pub(super) fn string(text: &str) -> String {
    let mut out = String::from("\"");
    for byte in text.bytes() {
        match byte {
            b'"' | b'\\' | b'?' => {
                out.push('\\');
                out.push(char::from(byte));
            }
            b' '..=b'~' => out.push(char::from(byte)),
            // Three octal digits: a hexadecimal escape would swallow the digits behind it.
            _ => out.push_str(&format!("\\{byte:03o}")),
        }
    }
    out.push('"');
    out
}

/// A literal of type `double`, exact.
pub(super) fn double(value: f64) -> String {
    if value.is_nan() {
        "NAN".to_owned()
    } else if value.is_infinite() {
        if value > 0.0 { "INFINITY".to_owned() } else { "-INFINITY".to_owned() }
    } else {
        format!("{value:?}")
    }
}

/// Text that may stand in a comment of one line.
pub(super) fn comment(text: &str) -> String {
    // A backslash at the end of a line would continue the comment.
    text.chars().map(|c| if c.is_control() || c == '\\' { ' ' } else { c }).collect()
}

/// The enumerator of an element type.
pub(super) fn dtype(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "DType::F64",
        DType::F32 => "DType::F32",
        DType::F16 => "DType::F16",
        DType::BF16 => "DType::BF16",
        DType::I32 => "DType::I32",
        DType::Bool => "DType::Bool",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers_do_not_collide() {
        let mut names = Names::default();
        assert_eq!(names.fresh("b_", "x.y"), "b_x_y");
        assert_eq!(names.fresh("b_", "x-y"), "b_x_y_2");
        assert_eq!(names.fresh("b_", "x_y_2"), "b_x_y_2_2");
        assert_eq!(names.fresh("b_", "_π_"), "b_");
    }

    #[test]
    fn strings_are_escaped() {
        assert_eq!(string("a\"b\\c\n1π"), "\"a\\\"b\\\\c\\0121\\317\\200\"");
    }

    #[test]
    fn doubles_keep_their_value() {
        for value in [1e-6, 10000.0, 0.1, 1e300, -2.5] {
            assert_eq!(double(value).parse::<f64>().unwrap(), value);
        }
    }
}
