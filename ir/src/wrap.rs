//! Text in lines of a width.

/// `text` in lines of at most `width` characters, broken at spaces, and inside words that are longer than a line after `+` and
/// `,`. Lines after the first start with `indent` spaces. A word without a place to break may be longer.
pub fn wrapped(text: &str, width: usize, indent: usize) -> String {
    let lead = text.len() - text.trim_start_matches(' ').len();
    let mut lines: Vec<String> = vec![" ".repeat(lead)];
    let length = |text: &str| text.chars().count();
    let is_blank = |line: &str| line.trim().is_empty();
    for word in text[lead..].split(' ') {
        let last = lines.last_mut().expect("a text has a line");
        let space = usize::from(!is_blank(last));
        let fits = length(last) + space + length(word) <= width;
        if fits || (is_blank(last) && length(word) <= width.saturating_sub(indent)) {
            last.push_str(&" "[..space]);
            last.push_str(word);
            continue;
        }
        if length(word) + indent <= width {
            lines.push(" ".repeat(indent) + word);
            continue;
        }
        for (i, part) in word.split_inclusive(['+', ',']).enumerate() {
            let last = lines.last_mut().expect("a text has a line");
            let space = if i == 0 { usize::from(!is_blank(last)) } else { 0 };
            if length(last) + space + length(part) <= width || is_blank(last) {
                last.push_str(&" "[..space]);
                last.push_str(part);
            } else {
                lines.push(" ".repeat(indent) + part);
            }
        }
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::wrapped;

    #[test]
    fn lines_break_at_spaces_and_long_words_at_joints() {
        assert_eq!(wrapped("one two three", 80, 2), "one two three");
        assert_eq!(wrapped("one two three", 8, 2), "one two\n  three");
        assert_eq!(
            wrapped("megatron-tp-sp+ring ring=4,tp=2", 16, 2),
            "megatron-tp-sp+\n  ring\n  ring=4,tp=2"
        );
        assert_eq!(wrapped("    one two", 9, 4), "    one\n    two");
        assert_eq!(wrapped("unbreakable", 4, 0), "unbreakable");
        assert_eq!(wrapped("", 4, 0), "");
    }
}
