//! The parser's place in the text: one token of look-ahead, and the ways to ask for the next one.

use std::ops::Range;

use crate::diagnostic::{Diagnostic, Span, nearest};
use crate::text::lexer::{Lexer, Notation, Token, unescape};

/// The result of parsing. The error is boxed because success is the common case.
pub type Parsed<T> = Result<T, Box<Diagnostic>>;

/// A place in the text.
#[derive(Clone, Debug)]
pub struct Cursor<'a> {
    lexer: Lexer<'a>,
    token: Token<'a>,
    span: Span,
    /// The place of the token before the next one.
    last: Span,
}

impl<'a> Cursor<'a> {
    /// The start of a text in this notation.
    pub fn new(text: &'a str, notation: Notation) -> Self {
        let mut lexer = Lexer::new(text, notation);
        let (token, span) = lexer.token();
        Self { lexer, token, span, last: Span::default() }
    }

    /// The token that comes next.
    pub fn peek(&self) -> Token<'a> {
        self.token
    }

    /// The place of the next token.
    pub fn span(&self) -> Span {
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
    pub fn eat(&mut self, token: Token<'_>) -> bool {
        let found = self.token == token;
        if found {
            self.next();
        }
        found
    }

    /// Items between commas, up to `close`, which is taken.
    ///
    /// # Errors
    /// A missing comma, and those of `item`.
    pub fn list<T>(&mut self, close: char, mut item: impl FnMut(&mut Self) -> Parsed<T>) -> Parsed<Vec<T>> {
        let mut items = Vec::new();
        while !self.eat(Token::Punct(close)) {
            if !items.is_empty() {
                self.expect(',')?;
            }
            items.push(item(self)?);
        }
        Ok(items)
    }

    /// Parts with `sign` between them as one chain, or one part alone.
    ///
    /// # Errors
    /// Those of `part`.
    pub fn chain<T>(
        &mut self,
        sign: char,
        chain: fn(Vec<T>) -> T,
        mut part: impl FnMut(&mut Self) -> Parsed<T>,
    ) -> Parsed<T> {
        let first = part(self)?;
        if self.token != Token::Punct(sign) {
            return Ok(first);
        }
        let mut parts = vec![first];
        while self.eat(Token::Punct(sign)) {
            parts.push(part(self)?);
        }
        Ok(chain(parts))
    }

    /// Takes the character or refuses the next token.
    ///
    /// # Errors
    /// Another token.
    pub fn expect(&mut self, c: char) -> Parsed<Span> {
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
    ///
    /// # Errors
    /// Another token.
    pub fn word(&mut self, what: &str) -> Parsed<(&'a str, Span)> {
        match self.token {
            Token::Word(word) => Ok((word, self.next().1)),
            _ => Err(self.unexpected(what)),
        }
    }

    /// Takes a name after `sigil`.
    ///
    /// # Errors
    /// Another token.
    pub fn sigil(&mut self, sigil: char, what: &str) -> Parsed<(&'a str, Span)> {
        match self.token {
            Token::Sigil(found, name) if found == sigil => Ok((name, self.next().1)),
            _ => Err(self.unexpected(what)),
        }
    }

    /// Takes a whole number.
    ///
    /// # Errors
    /// Another token, or `E03` for a number above 64 bits.
    pub fn int(&mut self) -> Parsed<u64> {
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

    /// Takes a real number.
    ///
    /// # Errors
    /// `E03` for one beyond the range.
    pub fn float(&mut self) -> Parsed<f64> {
        let (Token::Float(digits) | Token::Int(digits)) = self.token else {
            return Err(self.unexpected("a number"));
        };
        let (_, span) = self.next();
        digits.parse().ok().filter(|x: &f64| x.is_finite()).ok_or_else(|| {
            let message = format!("`{digits}` is larger than a real number can be");
            mistake("E03", message, span, "too large")
        })
    }

    /// Takes a whole number that counts things in memory.
    pub(crate) fn count(&mut self) -> Parsed<usize> {
        let span = self.span;
        let n = self.int()?;
        // Arenas hold fewer than 2^32 items.
        u32::try_from(n).map(|n| n as usize).map_err(|_| too_large(&n.to_string(), span))
    }

    /// Takes a string.
    ///
    /// # Errors
    /// Another token, or `E02` for an unknown escape.
    pub fn string(&mut self) -> Parsed<String> {
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
    pub fn unexpected(&self, expected: &str) -> Box<Diagnostic> {
        let span = match self.token {
            // The end has no byte of its own; the last token is pointed at.
            Token::End => self.last,
            _ => self.span,
        };
        let code = match self.token {
            Token::Bad(_) => "E02",
            _ => "E01",
        };
        let message = format!("expected {expected}, found {}", self.token);
        mistake(code, message, span, format!("{expected} is expected here"))
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
