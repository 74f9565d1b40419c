//! Lines of at most 120 columns.

/// The most columns of a line.
const COLUMNS: usize = 120;

/// Adds a statement. Long statements are broken after commas.
pub(super) fn push(out: &mut String, indent: usize, text: &str) {
    let mut margin = "    ".repeat(indent);
    let mut line = margin.clone();
    margin.push_str("    ");
    let mut is_empty = true;
    for word in pieces(text) {
        if !is_empty && !word.trim_start().starts_with("//") && line.len() + word.trim_end().len() > COLUMNS {
            out.push_str(line.trim_end());
            out.push('\n');
            line.clone_from(&margin);
        }
        line.push_str(word);
        is_empty = false;
    }
    out.push_str(line.trim_end());
    out.push('\n');
}

/// Parts that end behind a comma and a space, outside of strings.
fn pieces(text: &str) -> Vec<&str> {
    let mut pieces = Vec::new();
    let (mut start, mut is_quoted, mut is_escaped) = (0, false, false);
    let bytes = text.as_bytes();
    for (i, &byte) in bytes.iter().enumerate() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if is_quoted => is_escaped = true,
            b'"' => is_quoted = !is_quoted,
            b' ' if !is_quoted && i > 0 && bytes[i - 1] == b',' => {
                pieces.push(&text[start..=i]);
                start = i + 1;
            }
            _ => {}
        }
    }
    pieces.push(&text[start..]);
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_broken_behind_commas() {
        let mut out = String::new();
        let list = (0..40).map(|i| format!("x{i}")).collect::<Vec<_>>().join(", ");
        push(&mut out, 1, &format!("f(\"a, b\", {list});"));
        assert!(out.lines().all(|line| line.len() <= COLUMNS));
        let lines: Vec<&str> = out.lines().collect();
        assert!(
            lines.len() == 2
                && lines[0].starts_with("    f(\"a, b\", x0,")
                && lines[1].starts_with("        x")
        );
        assert_eq!(
            lines.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" "),
            format!("f(\"a, b\", {list});")
        );
    }
}
