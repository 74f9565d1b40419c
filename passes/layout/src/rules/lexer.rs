//! The lexer of rule files: the tokens of the text form, and `?name`, `=>`, `#`, comparisons and arithmetic.

use ithaca_ir::Span;

/// A token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Token<'a> {
    /// A bare word.
    Word(&'a str),
    /// `%name`.
    Value(&'a str),
    /// `?name`.
    Variable(&'a str),
    /// A whole number, as text.
    Int(&'a str),
    /// A real number, as text.
    Float(&'a str),
    /// A string between its quotes, without escapes.
    Text(&'a str),
    /// A symbol: one of `( ) { } [ ] , = # & | + - * / < .. => != <=`.
    Sign(&'static str),
    /// An invalid character.
    Bad,
    /// The end.
    End,
}

impl std::fmt::Display for Token<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Token::Word(t) | Token::Int(t) | Token::Float(t) | Token::Sign(t) => write!(f, "`{t}`"),
            Token::Value(t) => write!(f, "`%{t}`"),
            Token::Variable(t) => write!(f, "`?{t}`"),
            Token::Text(_) => f.write_str("a string"),
            Token::Bad => f.write_str("a character that has no meaning here"),
            Token::End => f.write_str("the end of the file"),
        }
    }
}

/// The symbols; a longer one precedes its prefixes.
const SIGNS: &[&str] =
    &["..", "=>", "!=", "<=", "(", ")", "{", "}", "[", "]", ",", "=", "#", "&", "|", "+", "-", "*", "/", "<"];

/// Every token of the text with its span; the last is [`Token::End`].
pub(super) fn tokens(text: &str) -> Vec<(Token<'_>, Span)> {
    let mut found = Vec::new();
    let mut rest = text;
    loop {
        rest = rest.trim_start();
        if rest.starts_with("//") {
            rest = &rest[rest.find('\n').unwrap_or(rest.len())..];
            continue;
        }
        let at = text.len() - rest.len();
        let (token, len) = token(rest);
        found.push((token, Span::new(at, at + len)));
        if token == Token::End {
            return found;
        }
        rest = &rest[len..];
    }
}

/// The first token of a text without leading blanks, and its length.
fn token(text: &str) -> (Token<'_>, usize) {
    let bytes = text.as_bytes();
    let Some(&first) = bytes.first() else { return (Token::End, 0) };
    let named = |n: usize| if n == 0 { None } else { Some(&text[1..=n]) };
    match first {
        b'%' | b'?' => match named(name_len(&bytes[1..])) {
            Some(name) if first == b'%' => (Token::Value(name), name.len() + 1),
            Some(name) => (Token::Variable(name), name.len() + 1),
            None => (Token::Bad, 1),
        },
        b'"' => match text[1..].find(['"', '\\', '\n']) {
            Some(n) if bytes[n + 1] == b'"' => (Token::Text(&text[1..=n]), n + 2),
            _ => (Token::Bad, 1),
        },
        b'0'..=b'9' => number(text),
        c if c.is_ascii_alphabetic() || c == b'_' => {
            let n = word_len(bytes);
            (Token::Word(&text[..n]), n)
        }
        _ => match SIGNS.iter().find(|s| text.starts_with(**s)) {
            Some(sign) => (Token::Sign(sign), sign.len()),
            None => (Token::Bad, text.chars().next().map_or(1, char::len_utf8)),
        },
    }
}

/// Letters, digits and `_`; a dash after a variable is a minus.
fn name_len(bytes: &[u8]) -> usize {
    bytes.iter().take_while(|b| b.is_ascii_alphanumeric() || **b == b'_').count()
}

/// As in the text form: a word may contain `.` and `-`.
fn word_len(bytes: &[u8]) -> usize {
    let letter = |b: Option<&u8>| b.is_some_and(|b| b.is_ascii_alphanumeric() || *b == b'_');
    let mut n = 1;
    while letter(bytes.get(n)) || (matches!(bytes.get(n), Some(b'.' | b'-')) && letter(bytes.get(n + 1))) {
        n += 1;
    }
    n
}

fn number(text: &str) -> (Token<'_>, usize) {
    let digits = |at: usize| at + text[at..].bytes().take_while(u8::is_ascii_digit).count();
    // The end of the digits after `n` bytes, or `end` without digits.
    let after = |end: usize, n: usize| Some(digits(end + n)).filter(|&at| at > end + n).unwrap_or(end);
    let whole = digits(0);
    let mut end = whole;
    if text[end..].starts_with('.') {
        end = after(end, 1);
    }
    if text[end..].starts_with(['e', 'E']) {
        end = after(end, 1 + usize::from(text[end + 1..].starts_with(['-', '+'])));
    }
    if end == whole { (Token::Int(&text[..end]), end) } else { (Token::Float(&text[..end]), end) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signs_numbers_and_names() {
        let all = |text| tokens(text).into_iter().map(|(t, _)| t).collect::<Vec<_>>();
        assert_eq!(
            all("?a-1e-2 // rest\n0..4 => a-b"),
            [
                Token::Variable("a"),
                Token::Sign("-"),
                Token::Float("1e-2"),
                Token::Int("0"),
                Token::Sign(".."),
                Token::Int("4"),
                Token::Sign("=>"),
                Token::Word("a-b"),
                Token::End
            ]
        );
        assert_eq!(all("é \"a\n"), [Token::Bad, Token::Bad, Token::Word("a"), Token::End]);
        assert_eq!(all("? \"\""), [Token::Bad, Token::Text(""), Token::End]);
    }
}
