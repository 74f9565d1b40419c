//! The functions of the runtime, and which of them a module needs.

use std::collections::BTreeSet;
use std::sync::LazyLock;

/// Files of the runtime, in the order in which their parts stand in a module.
const FILES: [&str; 11] = [
    include_str!("runtime/layout.py"),
    include_str!("runtime/collectives.py"),
    include_str!("runtime/tensors.py"),
    include_str!("runtime/math.py"),
    include_str!("runtime/attention.py"),
    include_str!("runtime/random.py"),
    include_str!("runtime/experts.py"),
    include_str!("runtime/cache.py"),
    include_str!("runtime/run.py"),
    include_str!("runtime/decode.py"),
    include_str!("runtime/autograd.py"),
];

/// A function, a class or constants, with the blank lines around it cut off.
struct Part {
    text: &'static str,
    /// The names that it defines.
    defines: Vec<&'static str>,
    /// The words of it.
    words: BTreeSet<&'static str>,
}

static PARTS: LazyLock<Vec<Part>> = LazyLock::new(|| {
    let parts = FILES.iter().flat_map(|file| file.trim_end().split("\n\n\n"));
    parts
        .map(|text| Part { text, defines: text.lines().flat_map(defined).collect(), words: words(text) })
        .collect()
});

/// The names that a line at the start of which something is defined defines.
fn defined(line: &'static str) -> Vec<&'static str> {
    let name = |rest: &'static str| rest.split(|c: char| !c.is_alphanumeric() && c != '_').next();
    match line.strip_prefix("def ").or_else(|| line.strip_prefix("class ")) {
        Some(rest) => name(rest).into_iter().collect(),
        None if line.starts_with(char::is_alphabetic) => match line.split_once(" = ") {
            Some((names, _)) => names.split(", ").collect(),
            None => Vec::new(),
        },
        None => Vec::new(),
    }
}

fn words(text: &str) -> BTreeSet<&str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty()).collect()
}

/// Whether the runtime defines a name.
pub(super) fn defines(name: &str) -> bool {
    PARTS.iter().any(|part| part.defines.contains(&name))
}

/// The parts of the runtime that a program uses, those that they use among them.
pub(super) fn used_by(program: &str) -> String {
    let mut wanted = words(program);
    let mut used = vec![false; PARTS.len()];
    loop {
        let new = PARTS.iter().enumerate().find(|(i, part)| {
            !used[*i] && (part.defines.is_empty() || part.defines.iter().any(|name| wanted.contains(name)))
        });
        let Some((i, part)) = new else { break };
        used[i] = true;
        wanted.extend(&part.words);
    }
    let texts = PARTS.iter().zip(used).filter(|(_, used)| *used).map(|(part, _)| part.text.trim_end());
    texts.collect::<Vec<_>>().join("\n\n\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A module has the parts that it names, so a name must be that of one part.
    #[test]
    fn every_name_is_defined_once() {
        let mut names: Vec<&str> = PARTS.iter().flat_map(|part| part.defines.iter().copied()).collect();
        names.sort_unstable();
        let twice: Vec<_> = names.windows(2).filter(|pair| pair[0] == pair[1]).map(|pair| pair[0]).collect();
        assert!(twice.is_empty(), "{twice:?}");
    }
}
