//! Invariants of weights and states: `V30`, `V31`.
//!
//! A weight or state that is assigned has one home. So all that read or write its elements name it alike, as one type;
//! different parts of one stored tensor are windows that do not meet. A tensor that is never assigned may be read in any way.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::diagnostic::{Diagnostic, Diagnostics, Span};
use crate::entity::Entity;
use crate::module::Module;
use crate::ops::error::OpError;
use crate::ops::table::op::Op;
use crate::ops::table::source::{Binding, Target};
use crate::space::Space;
use crate::text::show::show;
use crate::types::TensorType;

/// The readers and writers of a weight or a state.
#[derive(PartialEq)]
pub(crate) struct Use<'a> {
    pub(crate) target: Target,
    pub(crate) binding: &'a Binding,
    pub(crate) ty: &'a TensorType,
    /// The layers for which it does.
    pub(crate) layers: &'a [Range<u64>],
    pub(crate) is_assigned: bool,
}

/// Adds the mistakes in a module's states and assigned weights, which has none if `known`, a verified module in the same
/// space, uses them in the same way.
pub(super) fn check(module: &Module, known: Option<&Module>, found: &mut Diagnostics) {
    let layers = module.layers_of_functions();
    let (uses, spans) = uses(module, &layers);
    if let Some(known) = known {
        let layers = known.layers_of_functions();
        if self::uses(known, &layers).0 == uses {
            return;
        }
    }
    for (i, error) in conflicts(&module.space, &uses) {
        found.push(Diagnostic::from(error).at(spans[i]).label("here"));
    }
}

/// All uses, in order, and where the text form has them.
fn uses<'m>(module: &'m Module, layers: &'m [Vec<Range<u64>>]) -> (Vec<Use<'m>>, Vec<Span>) {
    let mut uses = Vec::new();
    let mut spans = Vec::new();
    for (id, function) in module.functions.iter() {
        for node in &function.nodes {
            let (target, binding, value, is_assigned) =
                match (&node.op, &node.results[..], &node.operands[..]) {
                    (Op::Param(binding), &[value], _) => (Target::Param, binding, value, false),
                    (Op::State(binding), &[value], _) => (Target::State, binding, value, false),
                    (Op::Assign { target, binding }, _, &[value]) => (*target, binding, value, true),
                    _ => continue,
                };
            let layers = &layers[id.index()];
            uses.push(Use { target, binding, ty: function.ty(value), layers, is_assigned });
            spans.push(node.span);
        }
    }
    (uses, spans)
}

/// Uses that are alike: the first of them, whether one assigns, and the layers of all.
type Kind = (usize, bool, Vec<Range<u64>>);

/// Whether two kinds of uses under one name have a layer in common, one of which assigns.
fn shares_layers(alike: &[usize], uses: &[Use<'_>], kinds: &[Kind]) -> bool {
    let is_per_layer = uses[kinds[alike[0]].0].binding.is_per_layer();
    let meet = |a: &Kind, b: &Kind| {
        let is_common = |x: &Range<u64>| b.2.iter().any(|y| x.start < y.end && y.start < x.end);
        (a.1 || b.1) && (!is_per_layer || a.2.iter().any(is_common))
    };
    alike.iter().enumerate().any(|(n, &k)| alike[..n].iter().any(|&other| meet(&kinds[other], &kinds[k])))
}

/// Uses that contradict one before them; each is listed once.
pub(crate) fn conflicts(space: &Space, uses: &[Use<'_>]) -> Vec<(usize, OpError)> {
    if !uses.iter().any(|u| u.is_assigned) {
        return Vec::new();
    }
    // Uses that are alike are one, so that a tensor of many layers is looked at once for each.
    let mut kinds: Vec<Kind> = Vec::new();
    let mut by_name: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (i, u) in uses.iter().enumerate() {
        let named = by_name.entry(u.binding.name.as_str()).or_default();
        let alike = |&&k: &&usize| {
            let other = &uses[kinds[k].0];
            other.target == u.target && other.binding == u.binding && other.ty == u.ty
        };
        match named.iter().find(alike) {
            Some(&k) => {
                kinds[k].1 |= u.is_assigned;
                kinds[k].2.extend(u.layers.iter().cloned());
            }
            None => {
                named.push(kinds.len());
                kinds.push((i, u.is_assigned, u.layers.to_vec()));
            }
        }
    }
    // Most tensors are bound in one way, so few have their layers' names written out.
    let mut forms: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (k, (first, ..)) in kinds.iter().enumerate() {
        forms.entry(uses[*first].binding.name_form()).or_default().push(k);
    }
    forms.retain(|_, alike| alike.len() > 1 && alike.iter().any(|&k| kinds[k].1));
    // Of bindings with one name, those of the same layers share a tensor; of others the layers' names are written out.
    let mut stored: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for alike in forms.into_values() {
        let name = |k: usize| &uses[kinds[k].0].binding.name;
        let have_one_name = alike.iter().all(|&k| name(k) == name(alike[0]));
        if have_one_name && !shares_layers(&alike, uses, &kinds) {
            continue;
        }
        for k in alike {
            let (first, _, layers) = &kinds[k];
            let binding = uses[*first].binding;
            let n_layers = if binding.is_per_layer() { usize::MAX } else { 1 };
            for layer in layers.iter().cloned().flatten().take(n_layers) {
                let kinds = stored.entry(binding.stored_name(layer)).or_default();
                if !kinds.contains(&k) {
                    kinds.push(k);
                }
            }
        }
    }
    stored.values_mut().for_each(|kinds| kinds.sort_unstable());
    let mut found: BTreeMap<usize, OpError> = BTreeMap::new();
    for (i, u) in uses.iter().enumerate().filter(|(_, u)| u.is_assigned && u.binding.is_of_next_layer()) {
        let message = format!("`{}` is of the next layer, which alone assigns it", u.binding.name);
        found.insert(i, OpError::new("V30", message));
    }
    for (name, alike) in &stored {
        for (n, &k) in alike.iter().enumerate() {
            for &earlier in &alike[..n] {
                let (a, b) = (&kinds[earlier], &kinds[k]);
                if (a.1 || b.1)
                    && let Some(error) = conflict(space, name, &uses[a.0], &uses[b.0])
                {
                    found.entry(b.0.max(a.0)).or_insert(error);
                }
            }
        }
    }
    found.into_iter().collect()
}

/// The conflict between two uses of one stored tensor that is assigned.
fn conflict(space: &Space, name: &str, a: &Use<'_>, b: &Use<'_>) -> Option<OpError> {
    if a.target != b.target {
        return Some(OpError::new("V30", format!("`{name}` is a weight and a state, and is assigned")));
    }
    let [same, other] = [a, b].map(|of| of.binding.of_own_layer().0);
    if same != other {
        let disjoint = same.stored == other.stored
            && same.view == other.view
            && same.name == other.name
            && same.window.iter().zip(&other.window).any(|(x, y)| x.end <= y.start || y.end <= x.start);
        return (!disjoint).then(|| {
            let message = format!(
                "`{name}` is assigned, and bound in two ways that are neither equal nor windows that do not meet"
            );
            OpError::new("V30", message)
        });
    }
    (a.ty != b.ty).then(|| {
        let (a, b) = (show(space, a.ty), show(space, b.ty));
        OpError::new("V31", format!("`{name}` is assigned, and bound as {a} and as {b}"))
    })
}
