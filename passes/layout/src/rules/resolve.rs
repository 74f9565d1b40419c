//! Checks names in rules: operations and attributes are known, variables are bound before use.

use std::collections::BTreeSet;

use ithaca_ir::diagnostic::nearest;
use ithaca_ir::ops::{Family, OpInfo, TABLE};
use ithaca_ir::{Diagnostic, Diagnostics};

use super::syntax::{App, Condition, Name, Pattern, Rest, Rule, Side, Term};

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
        let mut apps: Vec<(&'r App, Side)> = Vec::new();
        self.rule.each_app(&mut |app, side| apps.push((app, side)));
        for &(app, side) in &apps {
            self.app(app, side);
        }
        let bound = self.bind(&apps);
        for &(app, side) in &apps {
            if side == Side::Right {
                self.uses_of(app, &bound);
            }
        }
        if let Pattern::Value(name) = &self.rule.right {
            self.value(name, &bound);
        }
        for condition in &self.rule.conditions {
            match condition {
                Condition::Compare(a, _, b) | Condition::Divides(a, b) => {
                    self.term(a, &bound);
                    self.term(b, &bound);
                }
                Condition::Float(t) => self.term(t, &bound),
                Condition::Has(x, d) | Condition::Lacks(x, d) | Condition::Whole(x, d) => {
                    self.value(x, &bound);
                    self.term(d, &bound);
                }
                Condition::Alike(x, y) => {
                    self.value(x, &bound);
                    self.value(y, &bound);
                }
            }
        }
    }

    fn app(&mut self, app: &'r App, side: Side) {
        let place = Name { text: app.op.clone(), span: app.span };
        let Some(info) = TABLE.iter().find(|row| row.name == app.op) else {
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
        self.counts(app, info, &place);
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
        if let Some(like) = &app.like
            && (side == Side::Left || !matches!(app.op.as_str(), "reshard" | "permute"))
        {
            let message = format!("`as` is not legal on `{}`", app.op);
            self.refuse(
                "P65",
                like,
                message,
                "only a `reshard` or `permute` on the right side has a target layout",
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

    fn counts(&mut self, app: &App, info: &OpInfo, place: &Name) {
        let n = app.operands.len();
        if !info.operands.contains(&n) {
            let message = format!("`{}` takes {}, not {n}", app.op, info.operand_count());
            self.refuse("P62", place, message, "this operation");
        }
    }

    fn bind(&mut self, apps: &[(&'r App, Side)]) -> Bound<'r> {
        let mut bound = Bound::default();
        for (app, _) in apps.iter().filter(|(_, side)| *side == Side::Left) {
            for operand in &app.operands {
                if let Pattern::Value(name) = operand {
                    bound.values.insert(&name.text);
                }
            }
            for (_, term) in &app.attrs {
                term.each_variable(&mut |name| {
                    bound.attrs.insert(&name.text);
                });
            }
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

    fn uses_of(&mut self, app: &'r App, bound: &Bound<'_>) {
        if let Some(like) = &app.like {
            self.value(like, bound);
        }
        for operand in &app.operands {
            if let Pattern::Value(name) = operand {
                self.value(name, bound);
            }
        }
        for (_, term) in &app.attrs {
            self.term(term, bound);
        }
        if let Rest::Bound(name) = &app.rest
            && !bound.rests.contains(name.text.as_str())
        {
            self.unbound(name, &format!("..?{}", name.text));
        }
    }

    fn value(&mut self, name: &Name, bound: &Bound<'_>) {
        if !bound.values.contains(name.text.as_str()) {
            self.unbound(name, &format!("%{}", name.text));
        }
    }

    fn term(&mut self, term: &Term, bound: &Bound<'_>) {
        term.each_variable(&mut |name| {
            if !bound.attrs.contains(name.text.as_str()) {
                self.unbound(name, &format!("?{}", name.text));
            }
        });
    }

    fn unbound(&mut self, name: &Name, spelled: &str) {
        let message = format!("`{spelled}` is not bound by the pattern");
        self.refuse("P64", name, message, "the left side does not have it");
    }
}
