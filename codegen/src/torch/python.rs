//! Spellings in Python: identifiers, strings, numbers, long lines.

use ithaca_ir::Mask;
use ithaca_ir::mask::Align;
use ithaca_ir::ops::Attr;

/// The longest line.
const WIDTH: usize = 120;

/// Words that no variable can have as its name.
const KEYWORDS: &str = "False None True and as assert async await break class continue def del elif else except finally for from \
    global if import in is lambda nonlocal not or pass raise return try while with yield layer torch dist math F on range reversed \
    tuple list dict set len min max sum int float str zip map print type id";

/// A string literal.
pub(super) fn string(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            c if c.is_control() => out.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// The name of a stored tensor: a string, formatted where it has the number of a layer.
pub(super) fn stored_name(name: &str) -> String {
    const LAYER: &str = "{layer}";
    if !name.contains(LAYER) {
        return string(name);
    }
    let parts = name.split(LAYER).map(|part| part.replace('{', "{{").replace('}', "}}"));
    format!("f{}", string(&parts.collect::<Vec<_>>().join(LAYER)))
}

/// A tuple; of one element, with its comma.
pub(super) fn tuple(items: impl IntoIterator<Item = String>) -> String {
    let items: Vec<String> = items.into_iter().collect();
    let comma = if items.len() == 1 { "," } else { "" };
    format!("({}{comma})", items.join(", "))
}

/// A real number.
pub(super) fn real(x: f64) -> String {
    if x.is_finite() { format!("{x:?}") } else { format!("float(\"{x}\")") }
}

/// An identifier for a name that may hold anything, and that is no word of `taken`.
pub(super) fn identifier(name: &str, taken: &dyn Fn(&str) -> bool) -> String {
    let mut out: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
    if !out.starts_with(|c: char| c.is_ascii_alphabetic()) {
        out.insert(0, 't');
    }
    while KEYWORDS.split_whitespace().any(|word| word == out) || taken(&out) {
        out.push('_');
    }
    out
}

/// An attribute as a literal: words are strings, calls are a name and its arguments.
pub(super) fn literal(attr: &Attr) -> String {
    match attr {
        Attr::Int(n) => n.to_string(),
        Attr::Float(x) => real(*x),
        Attr::Text(text) | Attr::Word(text) | Attr::Func(text) => string(text),
        Attr::Range(start, end) => format!("({start}, {end})"),
        Attr::List(items) | Attr::All(items) | Attr::Any(items) => tuple(items.iter().map(literal)),
        Attr::Call(name, args) => {
            let args = args.iter().map(|(key, value)| format!("{}: {}", string(key), literal(value)));
            format!("({}, {{{}}})", string(name), args.collect::<Vec<_>>().join(", "))
        }
        Attr::Numbers(name, numbers) => {
            tuple(std::iter::once(string(name)).chain(numbers.iter().map(u64::to_string)))
        }
    }
}

/// A mask as nested tuples.
pub(super) fn mask(of: &Mask) -> String {
    let numbers = |list: &[u64]| tuple(list.iter().map(u64::to_string));
    let bound = |n: &Option<u64>| n.map_or("None".to_owned(), |n| n.to_string());
    let (name, parts) = match of {
        Mask::Full => ("full", vec![]),
        Mask::Causal => ("causal", vec![]),
        Mask::CausalAtEnd { queries, keys } => ("causal", vec![queries.to_string(), keys.to_string()]),
        Mask::Window { left, right } => ("window", vec![bound(left), bound(right)]),
        Mask::Prefix(n) => ("prefix", vec![n.to_string()]),
        Mask::Sinks(n) => ("sinks", vec![n.to_string()]),
        Mask::Global(n) => ("global", vec![n.to_string()]),
        Mask::GlobalAt(at) => ("global_at", vec![numbers(at)]),
        Mask::Chunks(size) => ("chunks", vec![size.to_string()]),
        Mask::Documents(bounds) => ("documents", vec![numbers(bounds), "None".to_owned()]),
        Mask::DocumentPairs { queries, keys, causal } => {
            let align = match causal {
                None => "None",
                Some(Align::Start) => "\"start\"",
                Some(Align::End) => "\"end\"",
            };
            ("documents", vec![numbers(queries), numbers(keys), align.to_owned()])
        }
        Mask::Blocks { size, rows } => {
            ("blocks", vec![size.to_string(), tuple(rows.iter().map(|row| numbers(row)))])
        }
        Mask::All(masks) => ("all", masks.iter().map(mask).collect()),
        Mask::Any(masks) => ("any", masks.iter().map(mask).collect()),
    };
    tuple(std::iter::once(string(name)).chain(parts))
}

/// Text whose long lines are broken behind commas within brackets.
pub(super) fn wrapped(text: &str) -> String {
    let mut out = String::new();
    for line in text.lines() {
        wrap_line(&mut out, line);
    }
    out
}

fn wrap_line(out: &mut String, line: &str) {
    let indent = line.len() - line.trim_start().len();
    let (mut rest, mut depth) = (line.to_owned(), 0);
    while rest.len() > WIDTH {
        let Some((at, inside)) = last_break(&rest, depth) else { break };
        depth = inside;
        out.push_str(&rest[..at]);
        out.push('\n');
        rest = format!("{}{}", " ".repeat(indent + 8), &rest[at + 1..]);
    }
    out.push_str(&rest);
    out.push('\n');
}

/// The last space behind a comma in brackets and outside of strings that leaves the line short enough, or the first one, and the
/// number of brackets around it; the line begins within `depth` of them.
fn last_break(line: &str, mut depth: usize) -> Option<(usize, usize)> {
    let (mut in_string, mut before, mut found) = (false, ' ', None);
    if line.trim_start().starts_with('#') {
        return None;
    }
    for (at, c) in line.char_indices() {
        match c {
            '"' if before != '\\' => in_string = !in_string,
            '(' | '[' | '{' if !in_string => depth += 1,
            ')' | ']' | '}' if !in_string => depth = depth.saturating_sub(1),
            ' ' if !in_string && depth > 0 && before == ',' && (at <= WIDTH || found.is_none()) => {
                found = Some((at, depth));
            }
            _ => {}
        }
        before = c;
    }
    found.filter(|&(at, _)| !line[..at].trim().is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_broken_within_brackets_only() {
        let targets: Vec<String> = (0..9).map(|n| format!("t{n}")).collect();
        let arguments: Vec<String> = (0..40).map(|n| format!("(t{n}, \"a, b\")")).collect();
        let line = format!("{} = {}({})", targets.join(", "), "f".repeat(90), arguments.join(", "));
        let text = wrapped(&line);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].starts_with("t0, t1") && lines[0].ends_with(','), "{text}");
        assert!(lines[0].contains('('), "{text}");
        assert!(lines.len() > 2 && lines[1..].iter().all(|line| line.len() <= WIDTH), "{text}");
        let joined: String = lines.iter().map(|line| format!("{} ", line.trim_start())).collect();
        assert_eq!(joined.trim_end(), line);
    }
}
