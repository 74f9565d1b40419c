//! Spellings in C++: identifiers, strings, numbers, comments.

use std::collections::{BTreeMap, BTreeSet};

use ithaca_ir::DType;

/// Identifiers that do not collide, made from names that may hold anything.
#[derive(Default)]
pub(super) struct Names {
    taken: BTreeSet<String>,
    /// For each identifier that was taken once more, the number to try next.
    next: BTreeMap<String, u64>,
}

/// Words that a variable of a frame's function cannot have as its name: keywords, macros, and names that the function uses.
const RESERVED: &str = "alignas alignof and and_eq asm auto bitand bitor bool break case catch char class compl const \
    constexpr continue decltype default delete do double else enum explicit export extern false float for friend goto if \
    inline int long mutable namespace new noexcept not not_eq nullptr operator or or_eq private protected public register \
    reinterpret_cast return short signed sizeof static static_assert static_cast struct switch template this throw true \
    try typedef typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq assert errno stdin \
    stdout stderr linux unix main ranks whole ithaca kernel program tables run c s in i k kCompute kComm kDown kWeights kHost kToHost kForwardEven kForwardOdd \
    kBackwardEven kBackwardOdd kForwardWrap kBackwardWrap kWorld";

impl Names {
    /// Names for variables of a frame's function.
    pub(super) fn for_variables() -> Self {
        Self { taken: RESERVED.split_whitespace().map(str::to_owned).collect(), ..Self::default() }
    }

    /// An identifier for `name` that no earlier call returned; it starts with `prefix`.
    pub(super) fn fresh(&mut self, prefix: &str, name: &str) -> String {
        let clean: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
        // Variables start with a lower-case letter, unlike types.
        let is_variable = !prefix.is_empty() || clean.starts_with(|c: char| c.is_ascii_lowercase());
        let mut identifier = if is_variable { prefix.to_owned() } else { "v_".to_owned() };
        // Two underscores in a row are reserved in C++.
        for c in clean.chars() {
            if !(c == '_' && identifier.ends_with('_')) {
                identifier.push(c);
            }
        }
        if self.taken.contains(&identifier) {
            let next = self.next.entry(identifier.clone()).or_insert(2);
            let numbered = |n: u64| format!("{identifier}_{n}");
            while self.taken.contains(&numbered(*next)) {
                *next += 1;
            }
            identifier = numbered(*next);
        }
        self.taken.insert(identifier.clone());
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

/// Text for a comment of one line.
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
        DType::F8E4M3 => "DType::F8",
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
    fn variables_avoid_keywords() {
        let mut names = Names::for_variables();
        assert_eq!(names.fresh("", "new"), "new_2");
        assert_eq!(names.fresh("", "12"), "v_12");
        assert_eq!(names.fresh("", "Address"), "v_Address");
        assert_eq!(names.fresh("", "k.out"), "k_out");
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
