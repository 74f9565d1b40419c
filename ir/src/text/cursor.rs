//! The parser's place in the text: one token of look-ahead, and the ways to ask for the next one.

use crate::diagnostic::{Diagnostic, Span, nearest};
use crate::text::lexer::{Lexer, Token, unescape};

/// The result of parsing. The error is boxed because success is the common case.
pub(crate) type Parsed<T> = Result<T, Box<Diagnostic>>;

/// A place in the text.
pub(crate) struct Cursor<'a> {
    lexer: Lexer<'a>,
    token: Token<'a>,
    span: Span,
    /// The place of the token before the next one.
    last: Span,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(text: &'a str) -> Self {
        let mut lexer = Lexer::new(text);
        let (token, span) = lexer.token();
        Self { lexer, token, span, last: Span::default() }
    }

    /// The token that comes next.
    pub(crate) fn peek(&self) -> Token<'a> {
        self.token
    }

    /// The place of the next token.
    pub(crate) fn span(&self) -> Span {
        self.span
    }

    /// Takes the next token.
    pub(crate) fn next(&mut self) -> (Token<'a>, Span) {
        let taken = (self.token, self.span);
        self.last = self.span;
        (self.token, self.span) = self.lexer.token();
        taken
    }

    /// Whether the next token is this one, which is then taken.
    pub(crate) fn eat(&mut self, token: Token<'_>) -> bool {
        let found = self.token == token;
        if found {
            self.next();
        }
        found
    }

    /// Takes the character or refuses the next token.
    pub(crate) fn expect(&mut self, c: char) -> Parsed<Span> {
        if self.token == Token::Punct(c) {
            Ok(self.next().1)
        } else {
            Err(self.unexpected(&format!("`{c}`")))
        }
    }

    /// Takes the word or refuses the next token.
    pub(crate) fn keyword(&mut self, word: &str) -> Parsed<Span> {
        if self.token == Token::Word(word) {
            Ok(self.next().1)
        } else {
            Err(self.unexpected(&format!("`{word}`")))
        }
    }

    /// Takes any word; `what` says which kind is wanted.
    pub(crate) fn word(&mut self, what: &str) -> Parsed<(&'a str, Span)> {
        match self.token {
            Token::Word(word) => Ok((word, self.next().1)),
            _ => Err(self.unexpected(what)),
        }
    }

    /// Takes a name after `sigil`.
    pub(crate) fn sigil(&mut self, sigil: char, what: &str) -> Parsed<(&'a str, Span)> {
        match self.token {
            Token::Sigil(found, name) if found == sigil => Ok((name, self.next().1)),
            _ => Err(self.unexpected(what)),
        }
    }

    /// Takes a whole number.
    pub(crate) fn int(&mut self) -> Parsed<u64> {
        match self.token {
            Token::Int(digits) => {
                let (_, span) = self.next();
                digits.parse().map_err(|_| too_large(digits, span))
            }
            _ => Err(self.unexpected("a whole number")),
        }
    }

    /// Takes a whole number that counts things in memory.
    pub(crate) fn count(&mut self) -> Parsed<usize> {
        let span = self.span;
        let n = self.int()?;
        // Arenas hold fewer than 2^32 items.
        u32::try_from(n).map(|n| n as usize).map_err(|_| too_large(&n.to_string(), span))
    }

    /// Takes a string.
    pub(crate) fn string(&mut self) -> Parsed<String> {
        match self.token {
            Token::Text(raw) => {
                let (_, span) = self.next();
                unescape(raw).map_err(|escape| {
                    let escape: String = escape.chars().take(2).collect();
                    Box::new(
                        Diagnostic::new("E02", format!("`{escape}` is no escape that a string may have"))
                            .at(span)
                            .label("in this string")
                            .help("write `\\\"`, `\\\\`, `\\n` or `\\u{hex}`"),
                    )
                })
            }
            _ => Err(self.unexpected("a string in quotes")),
        }
    }

    /// The diagnostic for a next token that is not `expected`.
    pub(crate) fn unexpected(&self, expected: &str) -> Box<Diagnostic> {
        let span = match self.token {
            // The end has no byte of its own; the last token is pointed at.
            Token::End => self.last,
            _ => self.span,
        };
        let code = match self.token {
            Token::Bad(_) => "E02",
            _ => "E01",
        };
        let label = match self.token {
            Token::End => format!("{expected} must follow"),
            _ => format!("{expected} must stand here"),
        };
        Box::new(
            Diagnostic::new(code, format!("expected {expected}, found {}", self.token)).at(span).label(label),
        )
    }
}

fn too_large(digits: &str, span: Span) -> Box<Diagnostic> {
    let shown =
        if digits.len() > 24 { format!("a number of {} digits", digits.len()) } else { digits.into() };
    Box::new(Diagnostic::new("E03", format!("{shown} is too large")).at(span).label("larger than any size"))
}

/// The diagnostic for a name that nothing has, with the nearest of `candidates` as a suggestion.
pub(crate) fn unknown<'c>(
    what: &str,
    name: &str,
    span: Span,
    candidates: impl IntoIterator<Item = &'c str>,
) -> Box<Diagnostic> {
    let diagnostic = Diagnostic::new("E06", format!("{what} `{name}` is not known here")).at(span);
    Box::new(suggest(diagnostic.label("not declared before"), name, candidates))
}

/// Adds `did you mean` to a diagnostic about `name`.
pub(crate) fn suggest<'c>(
    diagnostic: Diagnostic,
    name: &str,
    candidates: impl IntoIterator<Item = &'c str>,
) -> Diagnostic {
    match nearest(name, candidates) {
        Some(near) => diagnostic.help(format!("did you mean `{near}`?")),
        None => diagnostic,
    }
}
