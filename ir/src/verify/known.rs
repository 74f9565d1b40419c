//! The parts of a module that need no check, because a verified module that it was made from has them.
//!
//! Whether an operation is legal depends on the space, on the operation and on the types of its values; of a call, on the types
//! that its callee takes and returns as well. So an operation of the same function, on values of the same types in an equal
//! space, is legal again. Levels, names, and the order of values and of functions are checked each time.

use crate::entity::Entity;
use crate::handles::ValueId;
use crate::module::{Function, Level, Module, Node};
use crate::ops::table::op::Op;

/// As many operations before and after the expected place are compared.
const AROUND: usize = 12;

/// A verified module in the space of the module at hand, if there is one.
#[derive(Default)]
pub(super) struct Known<'a> {
    module: Option<&'a Module>,
    /// For each function, whether that of the same number there takes and returns the same types.
    signatures: Vec<bool>,
}

impl<'a> Known<'a> {
    /// The parts of `module` that `previous` proves.
    pub(super) fn of(previous: &'a Module, module: &Module) -> Self {
        // On the program level types follow other rules.
        let is_alike = (previous.level == Level::Program) == (module.level == Level::Program);
        if !is_alike || previous.space != module.space {
            return Self::default();
        }
        let functions = module.functions.values().zip(previous.functions.values());
        Self {
            module: Some(previous),
            signatures: functions.map(|(f, g)| have_one_signature(f, g)).collect(),
        }
    }

    pub(super) fn has_space(&self) -> bool {
        self.module.is_some()
    }

    pub(super) fn module(&self) -> Option<&'a Module> {
        self.module
    }

    /// For each node of `function`, whether it is known to be legal; empty if none is.
    pub(super) fn nodes(&self, function: &Function) -> Vec<bool> {
        let known =
            self.module.and_then(|module| module.function(&function.name).map(|id| &module.functions[id]));
        let Some(known) = known else { return Vec::new() };
        let mut next = 0;
        let is_known = |node: &Node| {
            if let Op::Call { callee, .. } = node.op
                && !self.signatures.get(callee.index()).is_some_and(|is_same| *is_same)
            {
                return false;
            }
            let is_same = |i: &usize| is_alike((function, node), (known, &known.nodes[*i]));
            let end = known.nodes.len().min(next + AROUND);
            let found = (next..end)
                .find(is_same)
                .or_else(|| (next.saturating_sub(AROUND)..next.min(end)).find(is_same));
            next = found.map_or(next, |i| i + 1);
            found.is_some()
        };
        function.nodes.iter().map(is_known).collect()
    }
}

/// Whether two nodes are the same operation on values of the same types.
fn is_alike((f, a): (&Function, &Node), (g, b): (&Function, &Node)) -> bool {
    a.op == b.op
        && have_one_type((f, &a.results), (g, &b.results))
        && have_one_type((f, &a.operands), (g, &b.operands))
}

fn have_one_signature(f: &Function, g: &Function) -> bool {
    let outputs = |f: &Function| -> Vec<ValueId> { f.outputs.iter().map(|o| o.value).collect() };
    have_one_type((f, &f.params), (g, &g.params)) && have_one_type((f, &outputs(f)), (g, &outputs(g)))
}

/// Whether the values of two lists have the same types. The order of values is not checked yet, so a handle may be of no value.
fn have_one_type((f, a): (&Function, &[ValueId]), (g, b): (&Function, &[ValueId])) -> bool {
    a.len() == b.len()
        && a.iter().zip(b).all(|(&a, &b)| f.values.get(a).map(|v| &v.ty) == g.values.get(b).map(|v| &v.ty))
}

#[cfg(test)]
mod tests {
    use crate::entity::Entity;
    use crate::handles::ValueId;
    use crate::module::Module;
    use crate::ops::table::op::Op;
    use crate::text::parse;
    use crate::verify::{VerifiedModule, verify};

    use super::Known;

    const SOURCE: &str = r#"ithaca 1 program
model "m"
dim s = 4
dim m = 6

func @block(%x: f32[s m]) {
  %w = param {name="{layer}.w"} : f32[m]
  %y = mul %x, %w : f32[s m]
  %z = scale %y {factor=0.5} : f32[s m]
  return %z
}

func @main() {
  %x = input {name="x"} : f32[s m]
  %y = call %x {callee=@block, layers=0..2} : f32[s m]
  return y = %y
}
"#;

    fn module() -> Module {
        parse(SOURCE).unwrap()
    }

    #[test]
    fn operations_on_values_of_the_same_types_are_known() {
        let (before, after) = (module(), module());
        let known = Known::of(&before, &after);
        let of = |name: &str| known.nodes(&after.functions[after.function(name).unwrap()]);
        assert_eq!((of("block"), of("main")), (vec![true; 3], vec![true; 2]));
        let mut other = module();
        let block = other.function("block").unwrap();
        other.functions[block].outputs.clear();
        let known = Known::of(&before, &other);
        assert_eq!(known.nodes(&other.functions[other.function("main").unwrap()]), [true, false]);
        let mut resized = module();
        resized.space.dims.values_mut().for_each(|dim| dim.size += 1);
        assert!(!Known::of(&before, &resized).has_space());
    }

    /// Every value with the type of every other one, and every operation with every other operand, is refused as a module
    /// without a past is.
    #[test]
    fn a_change_is_found_as_in_a_module_of_its_own() {
        let before = module();
        let verified = verify(&before).unwrap();
        let mut refused = 0;
        let mut compare = |changed: Module| {
            let alone = verify(&changed).map(|_| ()).map_err(|found| format!("{found:?}"));
            refused += usize::from(alone.is_err());
            let after = VerifiedModule::after(verified, changed);
            assert_eq!(after.map(|_| ()).map_err(|found| format!("{found:?}")), alone);
        };
        for id in before.functions.ids() {
            let function = &before.functions[id];
            let values: Vec<ValueId> = function.values.ids().collect();
            for &v in &values {
                for &other in &values {
                    let mut changed = before.clone();
                    changed.functions[id].values[v].ty = function.values[other].ty.clone();
                    compare(changed);
                    for n in 0..function.nodes.len() {
                        let mut changed = before.clone();
                        let operands = &mut changed.functions[id].nodes[n].operands;
                        operands.iter_mut().filter(|o| **o == v).for_each(|o| *o = other);
                        compare(changed);
                    }
                }
            }
        }
        let mut changed = before.clone();
        changed.functions.values_mut().for_each(|f| f.nodes[1].operands[0] = ValueId::new(99));
        compare(changed);
        let mut changed = before.clone();
        changed
            .functions
            .values_mut()
            .for_each(|f| f.nodes.retain(|node| !matches!(node.op, Op::Call { .. })));
        compare(changed);
        assert!(refused > 8, "{refused} were refused");
    }
}
