//! Checks names in rules: operations and attributes are known, variables are bound before use.

use std::collections::BTreeSet;

use ithaca_ir::diagnostic::nearest;
use ithaca_ir::ops::{Family, TABLE};
use ithaca_ir::{Diagnostic, Diagnostics};

use super::syntax::{App, Name, Pattern, Rest, Rule, Side, Term};

/// The errors in rules, in order.
pub(super) fn resolve(rules: &[Rule]) -> Diagnostics {
    let mut found = Diagnostics::new();
    for (i, rule) in rules.iter().enumerate() {
        if rules[..i].iter().any(|before| before.name == rule.name) {
            let message = format!("there are two rules `{}`", rule.name);
            found.push(Diagnostic::new("P61", message).at(rule.span).label("the second"));
        }
        Resolver { rule, found: &mut found }.rule();
    }
    found
}

struct Resolver<'r> {
    rule: &'r Rule,
    found: &'r mut Diagnostics,
}

/// The names that a left side binds.
#[derive(Default)]
struct Bound<'r> {
    values: BTreeSet<&'r str>,
    attrs: BTreeSet<&'r str>,
    rests: BTreeSet<&'r str>,
}

impl<'r> Resolver<'r> {
    fn refuse(&mut self, code: &'static str, at: &Name, message: String, label: &str) -> &mut Diagnostic {
        let message = format!("rule `{}`: {message}", self.rule.name);
        self.found.push(Diagnostic::new(code, message).at(at.span).label(label));
        self.found.last_mut().expect("one was pushed")
    }

    fn rule(&mut self) {
        let apps = self.rule.apps();
        for &(app, side) in &apps {
            self.app(app, side);
        }
        let bound = self.bind(&apps);
        for (app, _) in apps.iter().filter(|(_, side)| *side == Side::Right) {
            let values = app.like.iter().chain(app.values()).collect();
            self.uses(values, app.attrs.iter().map(|(_, term)| term).collect(), &bound);
            if let Rest::Bound(name) = &app.rest
                && !bound.rests.contains(name.text.as_str())
            {
                self.unbound(name, "..?");
            }
        }
        for (i, pattern) in self.rule.right.iter().enumerate() {
            match pattern {
                Pattern::Value(name) => self.uses(vec![name], Vec::new(), &bound),
                Pattern::App(app) if self.rule.right[..i].contains(pattern) => {
                    let place = Name { text: app.op.clone(), span: app.span };
                    let message = format!("two results are the same result of `{}`", app.op);
                    self.refuse("P65", &place, message, "the second");
                }
                Pattern::App(_) => {}
            }
        }
        for condition in &self.rule.conditions {
            let (values, terms) = condition.operands();
            self.uses(values, terms, &bound);
        }
    }

    fn app(&mut self, app: &'r App, side: Side) {
        let place = Name { text: app.op.clone(), span: app.span };
        let Some(info) = app.info() else {
            let message = format!("there is no operation `{}`", app.op);
            let near = nearest(&app.op, TABLE.iter().map(|row| row.name));
            let diagnostic = self.refuse("P62", &place, message, "unknown");
            diagnostic.helps.extend(near.map(|near| format!("did you mean `{near}`?")));
            return;
        };
        if matches!(info.family, Family::Source | Family::Structure) {
            let message = format!("`{}` is not legal in a rule", app.op);
            let label = "a rule takes values from `%name` and calls no function";
            self.refuse("P63", &place, message, label);
            return;
        }
        let n = app.operands.len();
        if !info.operands.contains(&n) {
            let message = format!("`{}` takes {}, not {n}", app.op, info.operand_count());
            self.refuse("P62", &place, message, "this operation");
        }
        for (i, (key, term)) in app.attrs.iter().enumerate() {
            if !info.attr_names().any(|known| known == key.text) {
                let known: Vec<&str> = info.attr_names().collect();
                let message = format!("`{}` has no attribute `{}`", app.op, key.text);
                let help = if known.is_empty() {
                    format!("`{}` has no attributes", app.op)
                } else {
                    format!("attributes of `{}`: {}", app.op, known.join(", "))
                };
                self.refuse("P62", key, message, "unknown").helps.push(help);
            }
            if app.attrs[..i].iter().any(|(before, _)| before.text == key.text) {
                let message = format!("attribute `{}` occurs twice", key.text);
                self.refuse("P62", key, message, "the second");
            }
            if side == Side::Left && term.has_arithmetic() {
                let message =
                    format!("`{}={term}` would need an equation solved, and patterns are linear", key.text);
                self.refuse(
                    "P65",
                    key,
                    message,
                    "arithmetic is legal on the right side and in conditions only",
                )
                .helps
                .push("bind a variable, and state the equation after `where`".to_owned());
            }
        }
        let may_have_name = match side {
            Side::Left => !std::ptr::eq(app, &self.rule.left),
            Side::Right => matches!(app.op.as_str(), "reshard" | "permute"),
        };
        if let (Some(like), false) = (&app.like, may_have_name) {
            let message = format!("`as` is not legal on `{}`", app.op);
            self.refuse(
                "P65",
                like,
                message,
                "an operand of the pattern has a name, a `reshard` or `permute` on the right side a target layout",
            );
        }
        if side == Side::Right && app.rest == Rest::Ignored {
            let message = format!("`..` does not determine the attributes of the new `{}`", app.op);
            let diagnostic = self.refuse("P65", &place, message, "made by the rule");
            diagnostic
                .helps
                .push("bind the others on the left with `..?r`, and write `..?r` here".to_owned());
        }
    }

    fn bind(&mut self, apps: &[(&'r App, Side)]) -> Bound<'r> {
        let mut bound = Bound::default();
        for (app, _) in apps.iter().filter(|(_, side)| *side == Side::Left) {
            bound.values.extend(app.values().chain(&app.like).map(|name| name.text.as_str()));
            let variables = app.attrs.iter().flat_map(|(_, term)| term.variables());
            bound.attrs.extend(variables.map(|name| name.text.as_str()));
            if let Rest::Bound(name) = &app.rest {
                bound.rests.insert(&name.text);
            }
        }
        let both: Vec<&str> = bound.rests.intersection(&bound.attrs).copied().collect();
        for name in both {
            let message = format!("`?{name}` is bound to one attribute and to all others");
            let place = Name { text: name.to_owned(), span: self.rule.span };
            self.refuse("P65", &place, message, "in this rule");
        }
        bound
    }

    /// Refuses values and variables that the left side does not bind.
    fn uses(&mut self, values: Vec<&Name>, terms: Vec<&Term>, bound: &Bound<'_>) {
        for name in values.into_iter().filter(|name| !bound.values.contains(name.text.as_str())) {
            self.unbound(name, "%");
        }
        let variables = terms.into_iter().flat_map(Term::variables);
        for name in variables.filter(|name| !bound.attrs.contains(name.text.as_str())) {
            self.unbound(name, "?");
        }
    }

    fn unbound(&mut self, name: &Name, sigil: &str) {
        let message = format!("`{sigil}{}` is not bound by the pattern", name.text);
        self.refuse("P64", name, message, "the left side does not have it");
    }
}
