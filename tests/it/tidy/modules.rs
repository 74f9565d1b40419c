//! The graph of a crate's modules: which file takes names from which, read off `mod`, `use` and paths.
//!
//! A name counts for the file that defines it, through re-exports. Re-exporting alone is no dependency. Tests, comments and
//! strings are left out. Methods are not seen.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// A module path from the root of its crate.
type ModulePath = Vec<String>;

/// A file of a crate.
#[derive(Default)]
struct Module {
    file: String,
    children: BTreeSet<String>,
    /// What each imported name stands for, and whether it is re-exported only.
    names: BTreeMap<String, (Vec<String>, bool)>,
    /// Modules of which everything is imported.
    globs: Vec<Vec<String>>,
    /// Items defined here.
    items: BTreeSet<String>,
    /// Paths in the code, imports left out.
    paths: Vec<Vec<String>>,
}

/// The modules of a crate.
pub(super) struct Graph {
    modules: BTreeMap<ModulePath, Module>,
}

/// A dependency of a file on another, with the names that it takes.
type Edges = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

impl Graph {
    /// The modules of the crate whose root is the file `root`.
    pub(super) fn of(root: &Path) -> Self {
        let mut modules = BTreeMap::new();
        let folder = root.parent().unwrap();
        let mut open: Vec<(ModulePath, PathBuf, PathBuf)> =
            vec![(Vec::new(), root.to_owned(), folder.to_owned())];
        while let Some((path, file, own)) = open.pop() {
            let source = std::fs::read_to_string(&file).unwrap();
            let mut words = Vec::new();
            tokens(source.parse().unwrap(), &mut words);
            let mut module = read(&without_tests(&words));
            module.file = file.strip_prefix(folder).unwrap().display().to_string();
            for child in &module.children {
                let (flat, nested) = (own.join(format!("{child}.rs")), own.join(child).join("mod.rs"));
                let file = if flat.exists() { flat } else { nested };
                let mut path = path.clone();
                path.push(child.clone());
                open.push((path, file, own.join(child)));
            }
            modules.insert(path, module);
        }
        Self { modules }
    }

    /// Files that depend on each other in a circle, each with the next one and the names that it takes from it.
    pub(super) fn cycles(&self) -> Vec<String> {
        let edges = self.edges();
        let reach = |from: &String| -> BTreeSet<String> {
            let mut seen: BTreeSet<String> = BTreeSet::new();
            let mut open: Vec<&String> = vec![from];
            while let Some(file) = open.pop() {
                for next in edges.get(file).into_iter().flat_map(|to| to.keys()) {
                    if seen.insert(next.clone()) {
                        open.push(next);
                    }
                }
            }
            seen
        };
        let reached: BTreeMap<&String, BTreeSet<String>> =
            edges.keys().map(|file| (file, reach(file))).collect();
        let tied = |a: &String, b: &String| {
            reached.get(a).is_some_and(|r| r.contains(b)) && reached.get(b).is_some_and(|r| r.contains(a))
        };
        let mut lines = Vec::new();
        for (from, targets) in &edges {
            for (to, names) in targets.iter().filter(|(to, _)| tied(from, to)) {
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                lines.push(format!("{from} -> {to}: {}", names.join(", ")));
            }
        }
        lines
    }

    fn edges(&self) -> Edges {
        let mut edges = Edges::new();
        for (path, module) in &self.modules {
            let mut add = |written: &[String]| {
                let Some((target, name)) = self.definition(path, written, 0) else { return };
                if target != *path {
                    let to = edges.entry(module.file.clone()).or_default();
                    to.entry(self.modules[&target].file.clone()).or_default().insert(name);
                }
            };
            for (target, is_public) in module.names.values() {
                if !is_public {
                    add(target);
                }
            }
            module.globs.iter().for_each(|glob| add(glob));
            module.paths.iter().for_each(|path| add(path));
        }
        edges
    }

    /// The module that defines what a path written in the module `here` names, and the name; none outside of the crate.
    fn definition(&self, here: &[String], written: &[String], depth: usize) -> Option<(ModulePath, String)> {
        if depth > 16 {
            return None;
        }
        let mut at: ModulePath = here.to_vec();
        let mut rest = written;
        match rest.first()?.as_str() {
            "crate" => {
                at.clear();
                rest = &rest[1..];
            }
            "self" => rest = &rest[1..],
            "super" => {
                while rest.first().is_some_and(|s| s == "super") {
                    at.pop()?;
                    rest = &rest[1..];
                }
            }
            first => {
                let module = &self.modules[&at];
                if !module.children.contains(first) && !module.names.contains_key(first) {
                    return None;
                }
            }
        }
        while let Some((name, more)) = rest.split_first() {
            let module = &self.modules[&at];
            if module.children.contains(name) {
                at.push(name.clone());
                rest = more;
                continue;
            }
            if let Some((target, _)) = module.names.get(name).filter(|(target, _)| target != written) {
                let mut target = target.clone();
                target.extend(more.iter().cloned());
                return self.definition(&at, &target, depth + 1);
            }
            if !module.items.contains(name) {
                for glob in &module.globs {
                    let mut target = glob.clone();
                    target.push(name.clone());
                    let found = self.definition(&at, &target, depth + 1);
                    if let Some(found) = found.filter(|found| self.modules[&found.0].items.contains(name)) {
                        return Some(found);
                    }
                }
            }
            return Some((at, name.clone()));
        }
        let name = at.last().cloned().unwrap_or_else(|| "crate".to_owned());
        Some((at, name))
    }
}

/// Words and signs of a source, without comments, literals and lifetimes.
fn tokens(stream: TokenStream, found: &mut Vec<String>) {
    let mut trees = stream.into_iter().peekable();
    while let Some(tree) = trees.next() {
        match tree {
            TokenTree::Group(group) => {
                let (open, close) = match group.delimiter() {
                    Delimiter::Parenthesis => ("(", ")"),
                    Delimiter::Brace => ("{", "}"),
                    Delimiter::Bracket => ("[", "]"),
                    Delimiter::None => ("", ""),
                };
                found.push(open.to_owned());
                tokens(group.stream(), found);
                found.push(close.to_owned());
            }
            TokenTree::Ident(word) => found.push(word.to_string()),
            TokenTree::Punct(sign) => {
                let next = trees.next_if(|next| match next {
                    TokenTree::Punct(next) => sign.as_char() == ':' && next.as_char() == ':',
                    next => sign.as_char() == '\'' && matches!(next, TokenTree::Ident(_)),
                });
                match next {
                    None => found.push(sign.to_string()),
                    Some(TokenTree::Punct(_)) => found.push("::".to_owned()),
                    Some(_) => {}
                }
            }
            TokenTree::Literal(_) => {}
        }
    }
}

/// The tokens without items that are there for tests only.
fn without_tests(tokens: &[String]) -> Vec<String> {
    let test = ["#", "[", "cfg", "(", "test", ")", "]"];
    let mut kept = Vec::new();
    let mut i = 0;
    while i < tokens.len() {
        if tokens[i..].len() >= test.len() && tokens[i..].iter().zip(test).all(|(a, b)| a == b) {
            i = after_item(tokens, i + test.len());
        } else {
            kept.push(tokens[i].clone());
            i += 1;
        }
    }
    kept
}

/// The place behind an item: after its semicolon, or its braces.
fn after_item(tokens: &[String], mut i: usize) -> usize {
    let mut depth = 0usize;
    while i < tokens.len() {
        match tokens[i].as_str() {
            "{" | "(" | "[" => depth += 1,
            "}" | ")" | "]" => {
                depth = depth.saturating_sub(1);
                if depth == 0 && tokens[i] == "}" {
                    return i + 1;
                }
            }
            ";" if depth == 0 => return i + 1,
            _ => {}
        }
        i += 1;
    }
    i
}

/// Reads a module off its tokens.
fn read(tokens: &[String]) -> Module {
    let mut module = Module::default();
    let token = |i: usize| tokens.get(i).map_or("", String::as_str);
    let is_name = |text: &str| text.starts_with(|c: char| c.is_alphabetic() || c == '_');
    let mut singles: BTreeSet<String> = BTreeSet::new();
    let mut i = 0;
    while i < tokens.len() {
        match token(i) {
            "mod" if token(i + 2) == ";" => {
                module.children.insert(token(i + 1).to_owned());
                i += 3;
            }
            "use" => {
                let is_public = matches!(i.checked_sub(1).map(token), Some("pub" | ")"));
                let end = i + tokens[i..].iter().position(|t| t == ";").unwrap();
                let mut leaves = Vec::new();
                use_tree(&tokens[i + 1..end], &mut 0, &[], &mut leaves);
                for (path, alias) in leaves {
                    match alias.as_str() {
                        "*" => module.globs.push(path),
                        _ => {
                            module.names.insert(alias, (path, is_public));
                        }
                    }
                }
                i = end + 1;
            }
            "fn" | "struct" | "enum" | "trait" | "const" | "static" | "type" | "union"
                if is_name(token(i + 1)) =>
            {
                module.items.insert(token(i + 1).to_owned());
                i += 2;
            }
            word if is_name(word) && !matches!(i.checked_sub(1).map(token), Some("." | "::")) => {
                let mut path = vec![word.to_owned()];
                while token(i + 1) == "::" && is_name(token(i + 2)) {
                    path.push(token(i + 2).to_owned());
                    i += 2;
                }
                i += 1;
                let is_type = word.starts_with(|c: char| c.is_uppercase());
                if path.len() > 1 {
                    module.paths.push(path);
                } else if is_type || token(i) == "(" {
                    singles.insert(word.to_owned());
                }
            }
            _ => i += 1,
        }
    }
    // What is re-exported and used as well.
    let used = module.names.keys().filter(|name| singles.contains(*name));
    let used: Vec<Vec<String>> = used.map(|name| vec![name.clone()]).collect();
    module.paths.extend(used);
    module
}

/// Reads the tree of an import into paths and the names that they get.
fn use_tree(tokens: &[String], i: &mut usize, prefix: &[String], leaves: &mut Vec<(Vec<String>, String)>) {
    let mut path = prefix.to_vec();
    while *i < tokens.len() {
        match tokens[*i].as_str() {
            "::" => *i += 1,
            "{" => {
                *i += 1;
                while *i < tokens.len() && tokens[*i] != "}" {
                    if tokens[*i] == "," {
                        *i += 1;
                        continue;
                    }
                    use_tree(tokens, i, &path, leaves);
                }
                *i += 1;
                return;
            }
            "," | "}" => break,
            "as" => {
                leaves.push((path, tokens[*i + 1].clone()));
                *i += 2;
                return;
            }
            "*" => {
                *i += 1;
                leaves.push((path, "*".to_owned()));
                return;
            }
            "self" if !path.is_empty() => *i += 1,
            word => {
                path.push(word.to_owned());
                *i += 1;
            }
        }
    }
    let name = path.last().cloned().unwrap_or_default();
    leaves.push((path, name));
}
