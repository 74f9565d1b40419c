//! Tokens of the text form and of rewrite rules, with their spans.
//!
//! White space and `//` comments separate tokens and mean nothing else; lines do not matter. The lexer never fails: what
//! it cannot read is a [`Token::Bad`], which the parser refuses where it meets it.

use std::fmt;

use crate::diagnostic::Span;
use crate::identifier::word_len;

/// A token; names and strings are slices of the text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Token<'a> {
    /// A bare word.
    Word(&'a str),
    /// `%name`, `@name`, `$name`, in rules `?name`; the sigil and the name, which may be a number.
    Sigil(char, &'a str),
    /// A whole number, unread: it may be too large.
    Int(&'a str),
    /// A real number, unread.
    Float(&'a str),
    /// A string, between its quotes, escapes unread.
    Text(&'a str),
    /// `..`
    Dots,
    /// `->`
    Arrow,
    /// One of `(){}[],=:&|+@`, in rules `-*/<#` too; `@` is one when no name follows it directly.
    Punct(char),
    /// One of `=>`, `!=`, `<=`, in rules.
    Sign(&'static str),
    /// Text that is not a token, and the reason.
    Bad(&'static str),
    /// The end of the text.
    End,
}

impl fmt::Display for Token<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Token::Word(w) | Token::Int(w) | Token::Float(w) => write!(f, "`{w}`"),
            Token::Sigil(sigil, name) => write!(f, "`{sigil}{name}`"),
            Token::Text(_) => f.write_str("a string"),
            Token::Dots => f.write_str("`..`"),
            Token::Arrow => f.write_str("`->`"),
            Token::Punct(c) => write!(f, "`{c}`"),
            Token::Sign(sign) => write!(f, "`{sign}`"),
            Token::Bad(why) => f.write_str(why),
            Token::End => f.write_str("the end of the file"),
        }
    }
}

/// The notation of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notation {
    /// Modules and schedules.
    Module,
    /// Rewrite rules, with arithmetic: a minus is no part of a number, and a dash no part of a name after a sigil.
    Rules,
}

/// The signs of rules with two characters.
const SIGNS: [&str; 3] = ["=>", "!=", "<="];

/// Reads tokens one by one.
#[derive(Clone, Debug)]
pub(crate) struct Lexer<'a> {
    text: &'a str,
    at: usize,
    notation: Notation,
}

impl<'a> Lexer<'a> {
    pub(crate) fn new(text: &'a str, notation: Notation) -> Self {
        Self { text, at: 0, notation }
    }

    /// The next token; [`Token::End`] for ever at the end.
    pub(crate) fn token(&mut self) -> (Token<'a>, Span) {
        self.skip_blank();
        let start = self.at;
        let bytes = self.text.as_bytes();
        let Some(&first) = bytes.get(start) else {
            return (Token::End, Span::new(start, start));
        };
        let in_rules = self.notation == Notation::Rules;
        let sign = SIGNS.into_iter().find(|sign| in_rules && bytes[start..].starts_with(sign.as_bytes()));
        let token = match first {
            _ if sign.is_some() => self.take(2, sign.map_or(Token::End, Token::Sign)),
            b'?' if in_rules => self.sigil(first),
            b'-' | b'*' | b'/' | b'<' | b'#' if in_rules => self.take(1, Token::Punct(char::from(first))),
            b'a'..=b'z' | b'A'..=b'Z' | b'_' => Token::Word(self.word()),
            b'0'..=b'9' => self.number(),
            b'-' if bytes.get(start + 1) == Some(&b'>') => self.take(2, Token::Arrow),
            b'-' if bytes.get(start + 1).is_some_and(u8::is_ascii_digit) => self.number(),
            b'.' if bytes.get(start + 1) == Some(&b'.') => self.take(2, Token::Dots),
            b'%' | b'@' | b'$' => self.sigil(first),
            b'(' | b')' | b'{' | b'}' | b'[' | b']' | b',' | b'=' | b':' | b'&' | b'|' | b'+' => {
                self.take(1, Token::Punct(char::from(first)))
            }
            b'"' => self.string(),
            _ => {
                let width = self.text[start..].chars().next().map_or(1, char::len_utf8);
                self.take(width, Token::Bad("a character that has no meaning here"))
            }
        };
        (token, Span::new(start, self.at))
    }

    fn take(&mut self, n_bytes: usize, token: Token<'a>) -> Token<'a> {
        self.at += n_bytes;
        token
    }

    fn skip_blank(&mut self) {
        let bytes = self.text.as_bytes();
        loop {
            while bytes.get(self.at).is_some_and(u8::is_ascii_whitespace) {
                self.at += 1;
            }
            if !self.text[self.at..].starts_with("//") {
                return;
            }
            self.at = self.text[self.at..].find('\n').map_or(self.text.len(), |n| self.at + n);
        }
    }

    fn word(&mut self) -> &'a str {
        let start = self.at;
        self.at += word_len(&self.text.as_bytes()[start..]);
        &self.text[start..self.at]
    }

    fn sigil(&mut self, sigil: u8) -> Token<'a> {
        self.at += 1;
        let rest = &self.text.as_bytes()[self.at..];
        let while_any = |fits: fn(&u8) -> bool| rest.iter().take_while(|b| fits(b)).count();
        let len = match (self.notation, while_any(u8::is_ascii_digit)) {
            (Notation::Rules, _) => while_any(|b| b.is_ascii_alphanumeric() || *b == b'_'),
            (Notation::Module, 0) => word_len(rest),
            (Notation::Module, n_digits) => n_digits,
        };
        let name = &self.text[self.at..self.at + len];
        self.at += len;
        match (len, sigil) {
            (0, b'@') => Token::Punct('@'),
            (0, _) => Token::Bad("a sigil without a name"),
            _ => Token::Sigil(char::from(sigil), name),
        }
    }

    fn number(&mut self) -> Token<'a> {
        let bytes = self.text.as_bytes();
        let start = self.at;
        let digits = |mut at: usize| {
            while bytes.get(at).is_some_and(u8::is_ascii_digit) {
                at += 1;
            }
            at
        };
        let mut at = digits(start + usize::from(bytes[start] == b'-'));
        let mut float = bytes[start] == b'-';
        if bytes.get(at) == Some(&b'.') && bytes.get(at + 1).is_some_and(u8::is_ascii_digit) {
            float = true;
            at = digits(at + 1);
        }
        if matches!(bytes.get(at), Some(b'e' | b'E')) {
            let sign = usize::from(matches!(bytes.get(at + 1), Some(b'-' | b'+')));
            if bytes.get(at + 1 + sign).is_some_and(u8::is_ascii_digit) {
                float = true;
                at = digits(at + 1 + sign);
            }
        }
        self.at = at;
        let text = &self.text[start..at];
        if float { Token::Float(text) } else { Token::Int(text) }
    }

    fn string(&mut self) -> Token<'a> {
        let bytes = self.text.as_bytes();
        let start = self.at + 1;
        let mut at = start;
        loop {
            match bytes.get(at) {
                Some(b'"') => {
                    self.at = at + 1;
                    return Token::Text(&self.text[start..at]);
                }
                // The escaped byte may open a longer character, whose other bytes are no quotes.
                Some(b'\\') => at += 2,
                None | Some(b'\n') => {
                    self.at = at.min(bytes.len());
                    return Token::Bad("a string that does not end on its line");
                }
                Some(_) => at += 1,
            }
        }
    }
}

/// The string that was written between quotes, or the first escape that has no meaning.
pub(crate) fn unescape(raw: &str) -> Result<String, &str> {
    let mut out = String::with_capacity(raw.len());
    let mut rest = raw;
    while let Some(i) = rest.find('\\') {
        out.push_str(&rest[..i]);
        let escape = &rest[i..];
        let (c, len) = match escape.as_bytes().get(1) {
            Some(b'"') => ('"', 2),
            Some(b'\\') => ('\\', 2),
            Some(b'n') => ('\n', 2),
            Some(b'u') => unicode(escape).ok_or(escape)?,
            _ => return Err(escape),
        };
        out.push(c);
        rest = &escape[len..];
    }
    out.push_str(rest);
    Ok(out)
}

/// `\u{7f}`: the character and the length of its spelling.
fn unicode(escape: &str) -> Option<(char, usize)> {
    let digits = escape.strip_prefix("\\u{")?;
    let end = digits.find('}').filter(|&n| n <= 6)?;
    let c = char::from_u32(u32::from_str_radix(&digits[..end], 16).ok()?)?;
    Some((c, "\\u{".len() + end + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(text: &str) -> Vec<Token<'_>> {
        tokens_in(text, Notation::Module)
    }

    fn tokens_in(text: &str, notation: Notation) -> Vec<Token<'_>> {
        let mut lexer = Lexer::new(text, notation);
        std::iter::from_fn(|| Some(lexer.token().0).filter(|t| *t != Token::End)).collect()
    }

    #[test]
    fn ranges_are_no_real_numbers() {
        assert_eq!(tokens("0..32"), [Token::Int("0"), Token::Dots, Token::Int("32")]);
        assert_eq!(
            tokens("1e-5 -2.5 3e2"),
            [Token::Float("1e-5"), Token::Float("-2.5"), Token::Float("3e2")]
        );
    }

    #[test]
    fn words_may_have_dashes_but_arrows_stay_arrows() {
        assert_eq!(tokens("q.k-v->x"), [Token::Word("q.k-v"), Token::Arrow, Token::Word("x")]);
        assert_eq!(tokens("s@(a"), tokens("s @ ( a"));
    }

    #[test]
    fn rules_have_arithmetic() {
        assert_eq!(
            tokens_in("?a-1e-2 // rest\n0..4 => a-b", Notation::Rules),
            [
                Token::Sigil('?', "a"),
                Token::Punct('-'),
                Token::Float("1e-2"),
                Token::Int("0"),
                Token::Dots,
                Token::Int("4"),
                Token::Sign("=>"),
                Token::Word("a-b")
            ]
        );
        assert!(matches!(tokens("? #")[..], [Token::Bad(_), Token::Bad(_)]));
    }

    #[test]
    fn a_string_ends_on_its_line() {
        assert_eq!(tokens(r#""a\"b""#), [Token::Text(r#"a\"b"#)]);
        assert!(matches!(tokens("\"a\nb")[0], Token::Bad(_)));
        assert!(matches!(tokens("\"a\\")[0], Token::Bad(_)));
    }
}
