//! The parser of rule files.
//!
//! ```text
//! file      = { rule }
//! rule      = "rule" name app "=>" ( app | operand { "," operand } ) [ "where" condition { "," condition } ]
//! app       = operation { operand } [ "as" value ] [ "{" [ item { "," item } ] "}" ]
//! operand   = value | "(" app ")" [ "#" number ]                               the index of the result, from 0
//! item      = name "=" term | ".." | ".." variable
//! term      = an attribute of the text form, with variables in any place; + - * / on the right
//! condition = term ( "=" | "!=" | "<" | "<=" ) term | predicate "(" … ")"
//! ```

use ithaca_ir::ops::Attr;
use ithaca_ir::text::{Cursor, Notation, Parsed, Token};
use ithaca_ir::{Diagnostic, Diagnostics};

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

/// Reads rules.
///
/// # Errors
/// `P60` for a syntax error, `P61`–`P65` for an invalid rule; each points at its span.
pub fn parse(text: &str) -> Result<Vec<Rule>, Diagnostics> {
    if u32::try_from(text.len()).is_err() {
        return Err(vec![Diagnostic::new("P60", format!("a file of {} bytes is too long", text.len()))]);
    }
    let rules = read_rules(&mut Cursor::new(text, Notation::Rules))
        .map_err(|diagnostic| vec![Diagnostic { code: "P60", ..*diagnostic }])?;
    let found = resolve(&rules);
    if found.is_empty() { Ok(rules) } else { Err(found) }
}

fn refused(cx: &Cursor<'_>, message: String, label: &str) -> Box<Diagnostic> {
    Box::new(Diagnostic::new("P60", message).at(cx.span()).label(label))
}

fn too_deep(cx: &Cursor<'_>) -> Box<Diagnostic> {
    refused(cx, format!("rules nest deeper than {MAX_DEPTH} levels"), "the first that is too deep")
}

fn value(cx: &mut Cursor<'_>) -> Parsed<Name> {
    cx.sigil('%', "a value, `%name`").map(Name::from)
}

fn read_rules(cx: &mut Cursor<'_>) -> Parsed<Vec<Rule>> {
    let mut rules = Vec::new();
    while cx.peek() != Token::End {
        if rules.len() == MAX_RULES {
            return Err(refused(cx, format!("more than {MAX_RULES} rules"), "one too many"));
        }
        if !cx.eat(Token::Word("rule")) {
            return Err(cx.unexpected("`rule`"));
        }
        let name = Name::from(cx.word("the name of the rule")?);
        let place = format!("rule `{}`: ", name.text);
        rules.push(read_rule(cx, name).map_err(|mut diagnostic| {
            diagnostic.message.insert_str(0, &place);
            diagnostic
        })?);
    }
    if rules.is_empty() {
        let diagnostic = Diagnostic::new("P60", "the file has no rules");
        return Err(Box::new(diagnostic.help("write `rule NAME pattern => replacement`")));
    }
    Ok(rules)
}

fn read_rule(cx: &mut Cursor<'_>, name: Name) -> Parsed<Rule> {
    let left = read_app(cx, 0)?;
    if !cx.eat(Token::Sign("=>")) {
        return Err(cx.unexpected("`=>`"));
    }
    let right = match cx.peek() {
        Token::Sigil('%', _) | Token::Punct('(') => {
            let mut results = vec![read_operand(cx, 0)?];
            while cx.eat(Token::Punct(',')) {
                results.push(read_operand(cx, 0)?);
            }
            results
        }
        _ => vec![Pattern::App(read_app(cx, 0)?)],
    };
    let mut conditions = Vec::new();
    if cx.eat(Token::Word("where")) {
        conditions.push(read_condition(cx)?);
        while cx.eat(Token::Punct(',')) {
            conditions.push(read_condition(cx)?);
        }
    }
    Ok(Rule { name: name.text, span: name.span, left, right, conditions })
}

fn read_app(cx: &mut Cursor<'_>, depth: usize) -> Parsed<App> {
    if depth == MAX_DEPTH {
        return Err(too_deep(cx));
    }
    let op = Name::from(cx.word("an operation")?);
    let mut operands = Vec::new();
    loop {
        let comma = !operands.is_empty() && cx.eat(Token::Punct(','));
        match cx.peek() {
            Token::Sigil('%', _) | Token::Punct('(') => operands.push(read_operand(cx, depth + 1)?),
            _ if comma => return Err(cx.unexpected("a value or an operation in parentheses")),
            _ => break,
        }
    }
    let like = if cx.eat(Token::Word("as")) { Some(value(cx)?) } else { None };
    let (mut attrs, mut rest) = (Vec::new(), Rest::Absent);
    if cx.eat(Token::Punct('{')) {
        while !cx.eat(Token::Punct('}')) {
            if !attrs.is_empty() {
                cx.expect(',')?;
            }
            if cx.eat(Token::Dots) {
                rest = match cx.sigil('?', "a variable") {
                    Ok(name) => Rest::Bound(name.into()),
                    Err(_) => Rest::Ignored,
                };
                cx.expect('}')?;
                break;
            }
            let key = Name::from(cx.word("the name of an attribute, or `..`")?);
            cx.expect('=')?;
            attrs.push((key, read_term(cx, depth + 1)?));
        }
    }
    Ok(App { op: op.text, span: op.span, operands, attrs, rest, like, result: 0 })
}

fn read_operand(cx: &mut Cursor<'_>, depth: usize) -> Parsed<Pattern> {
    if !cx.eat(Token::Punct('(')) {
        return value(cx).map(Pattern::Value);
    }
    let mut app = read_app(cx, depth)?;
    cx.expect(')')?;
    if cx.eat(Token::Punct('#')) {
        let Token::Int(digits) = cx.peek() else { return Err(cx.unexpected("the number of a result")) };
        app.result = digits.parse().ok().filter(|n| *n < 10).ok_or_else(|| cx.unexpected("one digit"))?;
        cx.eat(cx.peek());
    }
    Ok(Pattern::App(app))
}

/// `a | b`, `a & b`, `a + b`, `a * b`, in order of increasing precedence.
fn read_term(cx: &mut Cursor<'_>, depth: usize) -> Parsed<Term> {
    if depth >= MAX_DEPTH {
        return Err(too_deep(cx));
    }
    cx.chain('|', Term::Any, |cx| cx.chain('&', Term::All, |cx| read_arithmetic(cx, depth, &SIGNS)))
}

/// A chain of the first of these pairs of operators, over chains of the others; each operator adds a level.
fn read_arithmetic(cx: &mut Cursor<'_>, depth: usize, signs: &[[Sign; 2]]) -> Parsed<Term> {
    let Some((own, inner)) = signs.split_first() else { return read_plain(cx, depth) };
    let mut term = read_arithmetic(cx, depth, inner)?;
    for n in 0.. {
        let Some(&sign) = own.iter().find(|sign| cx.peek() == Token::Punct(sign.spelling())) else { break };
        if n == MAX_DEPTH {
            return Err(too_deep(cx));
        }
        cx.eat(cx.peek());
        term = Term::Arithmetic(sign, Box::new(term), Box::new(read_arithmetic(cx, depth, inner)?));
    }
    Ok(term)
}

fn read_plain(cx: &mut Cursor<'_>, depth: usize) -> Parsed<Term> {
    Ok(match cx.peek() {
        Token::Sigil('?', _) => Term::Variable(cx.sigil('?', "a variable")?.into()),
        Token::Int(_) => {
            let first = cx.int()?;
            let is_range = cx.eat(Token::Dots);
            Term::Literal(if is_range { Attr::Range(first, cx.int()?) } else { Attr::Int(first) })
        }
        Token::Float(_) => Term::Literal(Attr::Float(cx.float()?)),
        Token::Punct('-') => {
            cx.eat(Token::Punct('-'));
            Term::Literal(Attr::Float(-cx.float()?))
        }
        Token::Text(_) => Term::Literal(Attr::Text(cx.string()?)),
        Token::Word(_) => read_named(cx, depth)?,
        Token::Punct('(') => {
            cx.eat(Token::Punct('('));
            let inner = read_term(cx, depth + 1)?;
            cx.expect(')')?;
            inner
        }
        Token::Punct('[') => {
            cx.eat(Token::Punct('['));
            Term::List(cx.list(']', |cx| read_term(cx, depth + 1))?)
        }
        _ => return Err(cx.unexpected("the value of an attribute")),
    })
}

/// `word`, `word(1, 2)`, `word(key=term, …)`.
fn read_named(cx: &mut Cursor<'_>, depth: usize) -> Parsed<Term> {
    let name = cx.word("a word")?.0.to_owned();
    if !cx.eat(Token::Punct('(')) {
        return Ok(Term::Literal(Attr::Word(name)));
    }
    if let Token::Int(_) = cx.peek() {
        return Ok(Term::Literal(Attr::Numbers(name, cx.list(')', Cursor::int)?)));
    }
    let args = cx.list(')', |cx| {
        let (key, _) = cx.word("the name of an argument")?;
        cx.expect('=')?;
        Ok((key.to_owned(), read_term(cx, depth + 1)?))
    })?;
    Ok(Term::Call(name, args))
}

fn read_condition(cx: &mut Cursor<'_>) -> Parsed<Condition> {
    let mut ahead = cx.clone();
    let (Ok((name, _)), true) = (ahead.word("a condition"), ahead.eat(Token::Punct('('))) else {
        return read_comparison(cx);
    };
    let test = DimTest::ALL.into_iter().find(|(_, known)| *known == name);
    if test.is_none() && !["float", "divides", "alike"].contains(&name) {
        return match ahead.peek() {
            Token::Sigil('%' | '?', _) => Err(no_condition(cx, "a condition")),
            _ => read_comparison(cx),
        };
    }
    *cx = ahead;
    let condition = match (name, test) {
        (_, Some((test, _))) => {
            let value = value(cx)?;
            cx.expect(',')?;
            Condition::Dimension(test, value, read_term(cx, 1)?)
        }
        ("float", None) => Condition::Float(read_term(cx, 1)?),
        ("divides", None) => {
            let first = read_term(cx, 1)?;
            cx.expect(',')?;
            Condition::Divides(first, read_term(cx, 1)?)
        }
        (_, None) => {
            let first = value(cx)?;
            cx.expect(',')?;
            Condition::Alike(first, value(cx)?)
        }
    };
    cx.expect(')')?;
    Ok(condition)
}

fn read_comparison(cx: &mut Cursor<'_>) -> Parsed<Condition> {
    let first = read_term(cx, 1)?;
    let spelled = match cx.peek() {
        Token::Punct('=') => "=",
        Token::Punct('<') => "<",
        Token::Sign(sign) => sign,
        _ => "",
    };
    let known = Comparison::ALL.into_iter().find(|(_, spelling)| *spelling == spelled);
    let Some((comparison, _)) = known else { return Err(no_condition(cx, "`=`, `!=`, `<` or `<=`")) };
    cx.eat(cx.peek());
    Ok(Condition::Compare(first, comparison, read_term(cx, 1)?))
}

fn no_condition(cx: &Cursor<'_>, expected: &str) -> Box<Diagnostic> {
    Box::new(cx.unexpected(expected).help(CONDITIONS))
}
