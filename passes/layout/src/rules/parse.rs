//! The parser of rule files.
//!
//! ```text
//! file      = { rule }
//! rule      = "rule" name app "=>" ( value | app ) [ "where" condition { "," condition } ]
//! app       = operation { operand } [ "as" value ] [ "{" [ item { "," item } ] "}" ]
//! operand   = value | "(" app ")" [ "#" number ]                               the index of the result, from 0
//! item      = name "=" term | ".." | ".." variable
//! term      = an attribute of the text form, with variables in any place; + - * / on the right
//! condition = term ( "=" | "!=" | "<" | "<=" ) term | predicate "(" … ")"
//! ```

use ithaca_ir::ops::Attr;
use ithaca_ir::{Diagnostic, Diagnostics, Span};

use super::lexer::{Token, tokens};
use super::resolve::resolve;
use super::syntax::{App, Comparison, Condition, DimTest, Name, Pattern, Rest, Rule, Sign, Term};

/// The maximum depth of patterns and terms.
const MAX_DEPTH: usize = 32;

/// The maximum number of rules in a file.
const MAX_RULES: usize = 1024;

/// The conditions, for messages.
const CONDITIONS: &str = "conditions: comparisons, float(?t), divides(?a, ?d), has(%x, ?d), lacks(%x, ?d), \
                          whole(%x, ?d), alike(%x, %y)";

/// The operators in order of increasing precedence.
const SIGNS: [[Sign; 2]; 2] = [[Sign::Plus, Sign::Minus], [Sign::Times, Sign::Over]];

type Parsed<T> = Result<T, Box<Diagnostic>>;

/// Reads rules.
///
/// # Errors
/// `P60` for a syntax error, `P61`–`P65` for an invalid rule; each points at its span.
pub fn parse(text: &str) -> Result<Vec<Rule>, Diagnostics> {
    if u32::try_from(text.len()).is_err() {
        return Err(vec![Diagnostic::new("P60", format!("a file of {} bytes is too long", text.len()))]);
    }
    let mut reader = Reader { tokens: tokens(text), at: 0, rule: None };
    let rules = reader.rules().map_err(|diagnostic| vec![*diagnostic])?;
    let found = resolve(&rules);
    if found.is_empty() { Ok(rules) } else { Err(found) }
}

struct Reader<'a> {
    tokens: Vec<(Token<'a>, Span)>,
    at: usize,
    /// The current rule, for messages.
    rule: Option<&'a str>,
}

impl<'a> Reader<'a> {
    fn peek(&self) -> Token<'a> {
        self.tokens[self.at].0
    }

    fn span(&self) -> Span {
        match self.peek() {
            // The end has no span; use the last token's.
            Token::End => self.tokens[self.at.saturating_sub(1)].1,
            _ => self.tokens[self.at].1,
        }
    }

    fn next(&mut self) -> (Token<'a>, Span) {
        let taken = self.tokens[self.at];
        if taken.0 != Token::End {
            self.at += 1;
        }
        taken
    }

    fn eat(&mut self, sign: &'static str) -> bool {
        let found = self.peek() == Token::Sign(sign);
        if found {
            self.next();
        }
        found
    }

    fn expect(&mut self, sign: &'static str) -> Parsed<()> {
        if self.eat(sign) { Ok(()) } else { Err(self.unexpected(&format!("`{sign}`"))) }
    }

    fn unexpected(&self, expected: &str) -> Box<Diagnostic> {
        let place = self.rule.map(|name| format!("rule `{name}`: ")).unwrap_or_default();
        let message = format!("{place}expected {expected}, found {}", self.peek());
        Box::new(
            Diagnostic::new("P60", message).at(self.span()).label(format!("{expected} is expected here")),
        )
    }

    fn too_deep(&self) -> Box<Diagnostic> {
        let message = format!("rules nest deeper than {MAX_DEPTH} levels");
        Box::new(Diagnostic::new("P60", message).at(self.span()).label("the first that is too deep"))
    }

    /// Takes the next token, whose name is `text`.
    fn name(&mut self, text: &str) -> Name {
        Name { text: text.to_owned(), span: self.next().1 }
    }

    fn word(&mut self, expected: &str) -> Parsed<Name> {
        match self.peek() {
            Token::Word(text) => Ok(self.name(text)),
            _ => Err(self.unexpected(expected)),
        }
    }

    fn value(&mut self) -> Parsed<Name> {
        match self.peek() {
            Token::Value(text) => Ok(self.name(text)),
            _ => Err(self.unexpected("a value, `%name`")),
        }
    }

    /// Whether the next token is this word, which is then taken.
    fn eat_word(&mut self, word: &str) -> bool {
        let found = self.peek() == Token::Word(word);
        if found {
            self.next();
        }
        found
    }

    /// Items between commas up to `close`.
    fn list<T>(
        &mut self,
        close: &'static str,
        mut item: impl FnMut(&mut Self) -> Parsed<T>,
    ) -> Parsed<Vec<T>> {
        let mut items = Vec::new();
        while !self.eat(close) {
            if !items.is_empty() {
                self.expect(",")?;
            }
            items.push(item(self)?);
        }
        Ok(items)
    }

    fn rules(&mut self) -> Parsed<Vec<Rule>> {
        let mut rules = Vec::new();
        while self.peek() != Token::End {
            self.rule = None;
            if rules.len() == MAX_RULES {
                let message = format!("more than {MAX_RULES} rules");
                return Err(Box::new(Diagnostic::new("P60", message).at(self.span()).label("one too many")));
            }
            if !self.eat_word("rule") {
                return Err(self.unexpected("`rule`"));
            }
            rules.push(self.rule()?);
        }
        if rules.is_empty() {
            let diagnostic = Diagnostic::new("P60", "the file has no rules");
            return Err(Box::new(diagnostic.help("write `rule NAME pattern => replacement`")));
        }
        Ok(rules)
    }

    fn rule(&mut self) -> Parsed<Rule> {
        let Token::Word(name) = self.peek() else { return Err(self.unexpected("the name of the rule")) };
        self.rule = Some(name);
        let name = self.name(name);
        let left = self.app(0)?;
        self.expect("=>")?;
        let right = match self.peek() {
            Token::Value(_) => Pattern::Value(self.value()?),
            Token::Sign("(") => self.operand(0)?,
            _ => Pattern::App(self.app(0)?),
        };
        let mut conditions = Vec::new();
        if self.eat_word("where") {
            conditions.push(self.condition()?);
            while self.eat(",") {
                conditions.push(self.condition()?);
            }
        }
        Ok(Rule { name: name.text, span: name.span, left, right, conditions })
    }

    fn app(&mut self, depth: usize) -> Parsed<App> {
        if depth == MAX_DEPTH {
            return Err(self.too_deep());
        }
        let op = self.word("an operation")?;
        let mut operands = Vec::new();
        loop {
            let comma = !operands.is_empty() && self.eat(",");
            match self.peek() {
                Token::Value(_) | Token::Sign("(") => operands.push(self.operand(depth + 1)?),
                _ if comma => return Err(self.unexpected("a value or an operation in parentheses")),
                _ => break,
            }
        }
        let like = if self.eat_word("as") { Some(self.value()?) } else { None };
        let (mut attrs, mut rest) = (Vec::new(), Rest::Absent);
        if self.eat("{") {
            while !self.eat("}") {
                if !attrs.is_empty() {
                    self.expect(",")?;
                }
                if self.eat("..") {
                    rest = match self.peek() {
                        Token::Variable(text) => Rest::Bound(self.name(text)),
                        _ => Rest::Ignored,
                    };
                    self.expect("}")?;
                    break;
                }
                let key = self.word("the name of an attribute, or `..`")?;
                self.expect("=")?;
                attrs.push((key, self.term(depth + 1)?));
            }
        }
        Ok(App { op: op.text, span: op.span, operands, attrs, rest, like, result: 0 })
    }

    fn operand(&mut self, depth: usize) -> Parsed<Pattern> {
        if !self.eat("(") {
            return self.value().map(Pattern::Value);
        }
        let mut app = self.app(depth)?;
        self.expect(")")?;
        if self.eat("#") {
            app.result = match self.peek() {
                Token::Int(digits) if digits.len() == 1 => {
                    self.next();
                    usize::from(digits.as_bytes()[0] - b'0')
                }
                _ => return Err(self.unexpected("the number of a result")),
            };
        }
        Ok(Pattern::App(app))
    }

    /// `a | b`, `a & b`, `a + b`, `a * b`, in order of increasing precedence.
    fn term(&mut self, depth: usize) -> Parsed<Term> {
        if depth >= MAX_DEPTH {
            return Err(self.too_deep());
        }
        self.chain("|", Term::Any, &mut |r| r.chain("&", Term::All, &mut |r| r.arithmetic(depth, &SIGNS)))
    }

    fn chain(
        &mut self,
        sign: &'static str,
        make: fn(Vec<Term>) -> Term,
        part: &mut dyn FnMut(&mut Self) -> Parsed<Term>,
    ) -> Parsed<Term> {
        let first = part(self)?;
        if self.peek() != Token::Sign(sign) {
            return Ok(first);
        }
        let mut parts = vec![first];
        while self.eat(sign) {
            parts.push(part(self)?);
        }
        Ok(make(parts))
    }

    /// A chain of the first of these pairs of operators, over chains of the others; each operator adds a level.
    fn arithmetic(&mut self, depth: usize, signs: &[[Sign; 2]]) -> Parsed<Term> {
        let Some((own, inner)) = signs.split_first() else { return self.plain(depth) };
        let mut term = self.arithmetic(depth, inner)?;
        for n in 0.. {
            let Token::Sign(text) = self.peek() else { break };
            let known = Sign::ALL.into_iter().find(|(sign, known)| *known == text && own.contains(sign));
            let Some((sign, _)) = known else { break };
            if n == MAX_DEPTH {
                return Err(self.too_deep());
            }
            self.next();
            term = Term::Arithmetic(sign, Box::new(term), Box::new(self.arithmetic(depth, inner)?));
        }
        Ok(term)
    }

    fn plain(&mut self, depth: usize) -> Parsed<Term> {
        Ok(match self.peek() {
            Token::Variable(text) => Term::Variable(self.name(text)),
            Token::Int(_) => {
                let first = self.int()?;
                if self.eat("..") {
                    Term::Literal(Attr::Range(first, self.int()?))
                } else {
                    Term::Literal(Attr::Int(first))
                }
            }
            Token::Float(digits) => self.float(digits, 1.0)?,
            Token::Sign("-") => {
                self.next();
                match self.peek() {
                    Token::Int(digits) | Token::Float(digits) => self.float(digits, -1.0)?,
                    _ => return Err(self.unexpected("a number")),
                }
            }
            Token::Text(text) => {
                self.next();
                Term::Literal(Attr::Text(text.to_owned()))
            }
            Token::Word(_) => self.named(depth)?,
            Token::Sign("(") => {
                self.next();
                let inner = self.term(depth + 1)?;
                self.expect(")")?;
                inner
            }
            Token::Sign("[") => {
                self.next();
                Term::List(self.list("]", |r| r.term(depth + 1))?)
            }
            Token::Sign(_) | Token::Value(_) | Token::Bad | Token::End => {
                return Err(self.unexpected("the value of an attribute"));
            }
        })
    }

    /// `word`, `word(1, 2)`, `word(key=term, …)`.
    fn named(&mut self, depth: usize) -> Parsed<Term> {
        let name = self.word("a word")?.text;
        if !self.eat("(") {
            return Ok(Term::Literal(Attr::Word(name)));
        }
        if let Token::Int(_) = self.peek() {
            return Ok(Term::Literal(Attr::Numbers(name, self.list(")", Self::int)?)));
        }
        let args = self.list(")", |r| {
            let key = r.word("the name of an argument")?.text;
            r.expect("=")?;
            Ok((key, r.term(depth + 1)?))
        })?;
        Ok(Term::Call(name, args))
    }

    fn int(&mut self) -> Parsed<u64> {
        let Token::Int(digits) = self.peek() else { return Err(self.unexpected("a whole number")) };
        match digits.parse() {
            Ok(n) => {
                self.next();
                Ok(n)
            }
            Err(_) => Err(self.unexpected("a number below 2^64")),
        }
    }

    fn float(&mut self, digits: &str, sign: f64) -> Parsed<Term> {
        match digits.parse::<f64>() {
            Ok(x) if x.is_finite() => {
                self.next();
                Ok(Term::Literal(Attr::Float(sign * x)))
            }
            _ => Err(self.unexpected("a number that a 64-bit real can be")),
        }
    }

    fn condition(&mut self) -> Parsed<Condition> {
        let next = |n: usize| self.tokens.get(self.at + n).map(|(token, _)| *token);
        let (Token::Word(name), Some(Token::Sign("("))) = (self.peek(), next(1)) else {
            return self.comparison();
        };
        let test = DimTest::ALL.into_iter().find(|(_, known)| *known == name);
        if test.is_none() && !["float", "divides", "alike"].contains(&name) {
            return match next(2) {
                Some(Token::Value(_) | Token::Variable(_)) => Err(self.no_condition("a condition")),
                _ => self.comparison(),
            };
        }
        self.next();
        self.expect("(")?;
        let condition = match (name, test) {
            (_, Some((test, _))) => {
                let value = self.value()?;
                self.expect(",")?;
                Condition::Dimension(test, value, self.term(1)?)
            }
            ("float", None) => Condition::Float(self.term(1)?),
            ("divides", None) => {
                let first = self.term(1)?;
                self.expect(",")?;
                Condition::Divides(first, self.term(1)?)
            }
            (_, None) => {
                let first = self.value()?;
                self.expect(",")?;
                Condition::Alike(first, self.value()?)
            }
        };
        self.expect(")")?;
        Ok(condition)
    }

    fn comparison(&mut self) -> Parsed<Condition> {
        let first = self.term(1)?;
        match Comparison::ALL.into_iter().find(|(_, sign)| self.eat(sign)) {
            Some((comparison, _)) => Ok(Condition::Compare(first, comparison, self.term(1)?)),
            None => Err(self.no_condition("`=`, `!=`, `<` or `<=`")),
        }
    }

    fn no_condition(&self, expected: &str) -> Box<Diagnostic> {
        let mut diagnostic = self.unexpected(expected);
        diagnostic.helps.push(CONDITIONS.to_owned());
        diagnostic
    }
}
