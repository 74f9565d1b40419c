//! The parser's place in the text: one token of look-ahead, and the ways to ask for the next one.

use std::ops::Range;

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

    /// Takes `start..end`.
    pub(crate) fn range(&mut self) -> Parsed<Range<u64>> {
        let start = self.int()?;
        if !self.eat(Token::Dots) {
            return Err(self.unexpected("`..`"));
        }
        Ok(start..self.int()?)
    }

    /// Takes items with commas between them, at least one.
    pub(crate) fn items<T>(&mut self, mut item: impl FnMut(&mut Self) -> Parsed<T>) -> Parsed<Vec<T>> {
        let mut items = vec![item(self)?];
        while self.eat(Token::Punct(',')) {
            items.push(item(self)?);
        }
        Ok(items)
    }

    /// Takes items with commas between them, and `close` after them.
    pub(crate) fn items_until<T>(
        &mut self,
        close: char,
        mut item: impl FnMut(&mut Self) -> Parsed<T>,
    ) -> Parsed<Vec<T>> {
        let mut items = Vec::new();
        while !self.eat(Token::Punct(close)) {
            if !items.is_empty() {
                self.expect(',')?;
            }
            items.push(item(self)?);
        }
        Ok(items)
    }

    /// Takes the word that spells one of `all`, which messages call `what`.
    pub(crate) fn choice<T: Copy>(
        &mut self,
        expected: &str,
        what: &str,
        all: &[T],
        name: impl Fn(T) -> &'static str,
    ) -> Parsed<T> {
        let (word, span) = self.word(expected)?;
        let found = all.iter().copied().find(|&choice| name(choice) == word);
        found.ok_or_else(|| unknown(what, word, span, all.iter().map(|&choice| name(choice))))
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
                    let message = format!("`{escape}` is no escape that a string may have");
                    let mistake = mistake("E02", message, span, "in this string");
                    Box::new(mistake.help("write `\\\"`, `\\\\`, `\\n` or `\\u{hex}`"))
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
        mistake(code, format!("expected {expected}, found {}", self.token), span, label)
    }
}

fn too_large(digits: &str, span: Span) -> Box<Diagnostic> {
    let shown =
        if digits.len() > 24 { format!("a number of {} digits", digits.len()) } else { digits.into() };
    mistake("E03", format!("{shown} is too large"), span, "larger than any size")
}

/// The diagnostic for a mistake at a place, with the label of the place.
pub(crate) fn mistake(
    code: &'static str,
    message: impl Into<String>,
    span: Span,
    label: impl Into<String>,
) -> Box<Diagnostic> {
    Box::new(Diagnostic::new(code, message).at(span).label(label))
}

/// The diagnostic for a name that nothing has, with the nearest of `candidates` as a suggestion.
pub(crate) fn unknown<'c>(
    what: &str,
    name: &str,
    span: Span,
    candidates: impl IntoIterator<Item = &'c str>,
) -> Box<Diagnostic> {
    let message = format!("{what} `{name}` is not known here");
    suggest(mistake("E06", message, span, "not declared before"), name, candidates)
}

/// Adds `did you mean` to a diagnostic about `name`.
pub(crate) fn suggest<'c>(
    diagnostic: Box<Diagnostic>,
    name: &str,
    candidates: impl IntoIterator<Item = &'c str>,
) -> Box<Diagnostic> {
    match nearest(name, candidates) {
        Some(near) => Box::new(diagnostic.help(format!("did you mean `{near}`?"))),
        None => diagnostic,
    }
}
