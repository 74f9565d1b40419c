//! Words of the text form that may be names.

/// Whether `name` can be spelled in the text form, as a word or after a sigil: ASCII letters, digits and `_`, no
/// digit first, and `.` or `-` between them.
pub fn is_identifier(name: &str) -> bool {
    !name.is_empty() && word_len(name.as_bytes()) == name.len()
}

/// The length of the word at the start of `bytes`: letters, digits, `_`; inside, `.` and `-` too.
pub(crate) fn word_len(bytes: &[u8]) -> usize {
    let letter = |b: Option<&u8>| b.is_some_and(|b| b.is_ascii_alphanumeric() || *b == b'_');
    if !letter(bytes.first()) || bytes[0].is_ascii_digit() {
        return 0;
    }
    let mut n = 1;
    while letter(bytes.get(n)) || (matches!(bytes.get(n), Some(b'.' | b'-')) && letter(bytes.get(n + 1))) {
        n += 1;
    }
    n
}
