//! Reads and writes of weights and states in a frame: in place where that is right, by copies elsewhere.
//!
//! A `state` or `param` gives the elements that it finds. Its value is in the buffer that it reads, and gets a buffer
//! of its own when something writes there before the value was read for the last time. A value that is assigned is
//! made in the buffer that the assignment would copy it to, unless someone still needs what is there.

use std::borrow::Cow;
use std::collections::BTreeSet;

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{Function, Module, ValueId};
use ithaca_ir::ops::state::works_in_place;
use ithaca_ir::ops::{Binding, Cache, Target};
use ithaca_ir::{Op, TensorType};

/// A weight or a state.
pub(super) type Home = (Target, Binding);

/// The weights and states that a function reads and writes, callees included.
#[derive(Clone, Debug, Default)]
pub(super) struct Effects {
    reads: Vec<Home>,
    writes: Vec<Home>,
}

impl Effects {
    /// The effects of every function, indexed by function.
    pub(super) fn of(module: &Module) -> Vec<Effects> {
        let mut all: Vec<Effects> = Vec::with_capacity(module.functions.len());
        for function in module.functions.values() {
            let mut effects = Effects::default();
            for node in &function.nodes {
                let Effects { mut reads, writes } = Effects::of_op(&node.op, &all).into_owned();
                // Callers run functions for many layers.
                reads.iter_mut().for_each(|(_, binding)| *binding = binding.of_own_layer().0.into_owned());
                for (all, more) in [(&mut effects.reads, reads), (&mut effects.writes, writes)] {
                    more.into_iter().for_each(|home| {
                        if !all.contains(&home) {
                            all.push(home)
                        }
                    });
                }
            }
            all.push(effects);
        }
        // Reads of weights and states that no function writes need no order.
        let written: Vec<Home> = all.iter().flat_map(|e| e.writes.clone()).collect();
        for effects in &mut all {
            effects.reads.retain(|home| written.contains(home));
        }
        all
    }

    /// The effects of an operation; `all` are those of the functions that it may call.
    fn of_op<'a>(op: &Op, all: &'a [Effects]) -> Cow<'a, Self> {
        let (mut reads, mut writes) = (Vec::new(), Vec::new());
        match op {
            Op::Param(binding) => reads.push((Target::Param, binding.clone())),
            Op::State(binding) => reads.push((Target::State, binding.clone())),
            Op::Assign { target, binding } => writes.push((*target, binding.clone())),
            Op::Call { callee, .. } => return Cow::Borrowed(&all[callee.index()]),
            _ => {}
        }
        Cow::Owned(Self { reads, writes })
    }

    /// Whether the function writes it.
    pub(super) fn writes(&self, home: &Home) -> bool {
        self.writes.contains(home)
    }
}

/// The places of values that are read from, or assigned to, weights and states.
pub(super) struct Homes {
    /// For each value the home in whose buffer it is.
    pub(super) of: Vec<Option<Home>>,
    /// Values that are read and get a buffer of their own.
    pub(super) copied: BTreeSet<ValueId>,
}

impl Homes {
    /// The homes of the values of `function`; `effects` are those of all functions, `last_use` the node after which
    /// each value is not used any more.
    pub(super) fn of(function: &Function, effects: &[Effects], last_use: &[usize]) -> Self {
        let effects = function.nodes.iter().map(|node| Effects::of_op(&node.op, effects)).collect();
        let finder = Finder { function, effects, last_use };
        let mut homes = Homes { of: vec![None; function.values.len()], copied: BTreeSet::new() };
        for (at, node) in function.nodes.iter().enumerate() {
            let home = match &node.op {
                Op::Param(binding) => (Target::Param, binding.clone()),
                Op::State(binding) => (Target::State, binding.clone()),
                _ => continue,
            };
            let value = node.result();
            if (at + 1..=last_use[value.index()]).any(|n| finder.overwrites(n, &home, value)) {
                homes.copied.insert(value);
            } else {
                homes.of[value.index()] = Some(home);
            }
        }
        for (at, node) in function.nodes.iter().enumerate() {
            if let Op::Assign { target, binding } = &node.op {
                let home = (*target, binding.clone());
                let value = node.operands[0];
                if homes.of[value.index()].is_none() && finder.may_make_there(&homes, at, value, &home) {
                    homes.of[value.index()] = Some(home);
                }
            }
        }
        homes
    }
}

struct Finder<'a> {
    function: &'a Function,
    /// By node.
    effects: Vec<Cow<'a, Effects>>,
    last_use: &'a [usize],
}

impl Finder<'_> {
    /// Whether node `n` writes `home`, other than with `value`, which is there.
    fn overwrites(&self, n: usize, home: &Home, value: ValueId) -> bool {
        let Some(node) = self.function.nodes.get(n) else { return false };
        let is_there = matches!(node.op, Op::Assign { .. }) && node.operands[0] == value;
        !is_there && self.effects[n].writes(home)
    }

    /// Whether node `n` reads or writes `home`, in whatever way.
    fn touches(&self, homes: &Homes, n: usize, home: &Home) -> bool {
        let node = &self.function.nodes[n];
        let effects = &self.effects[n];
        let mut operands = node.operands.iter();
        effects.reads.contains(home)
            || effects.writes(home)
            || operands.any(|v| homes.of[v.index()].as_ref() == Some(home))
    }

    /// Whether `value`, which node `at` assigns to `home`, may be made there.
    fn may_make_there(&self, homes: &Homes, at: usize, value: ValueId, home: &Home) -> bool {
        let nodes = &self.function.nodes;
        let Some(made) = nodes.iter().position(|n| n.results.contains(&value)) else { return false };
        let maker = &nodes[made];
        let is_kernel = match &maker.op {
            // A call may pass the buffers of its results from layer to layer.
            Op::Call { .. } | Op::Param(_) | Op::State(_) | Op::Input(_) | Op::Assign { .. } => false,
            // What is in host memory is copied there, but for rows of a cache.
            Op::Cache(Cache::AppendPages { .. }) => true,
            _ => !home.1.host,
        };
        // The maker may read the old elements one by one; no other node may read them before the assignment.
        let ty = self.function.ty(value);
        let in_place = maker.operands.iter().enumerate().all(|(i, &v)| {
            let there = homes.of[v.index()].as_ref() == Some(home);
            !there || (works_in_place(&maker.op, i) && same_elements(self.function.ty(v), ty))
        });
        // Another result of the maker may have been given the same place.
        let taken = maker.results.iter().any(|v| homes.of[v.index()].as_ref() == Some(home));
        let last = self.last_use[value.index()];
        is_kernel
            && in_place
            && !taken
            && (made + 1..at).all(|n| !self.touches(homes, n, home))
            && (at + 1..=last).all(|n| !self.overwrites(n, home, value))
    }
}

/// Whether element i of both has the same place.
pub(super) fn same_elements(a: &TensorType, b: &TensorType) -> bool {
    a.dims == b.dims && a.layout.split == b.layout.split && a.dtype.bytes() == b.dtype.bytes()
}
