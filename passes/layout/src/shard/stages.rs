//! Stages of a pipeline: the ranks that run the calls of `main`, and the transfers between them.
//!
//! A call of stage `k` runs on the ranks at coordinate `k` of the axis, and its results are there. Any other operation of
//! `main` runs where the last of its operands was made, or everywhere; an input that one stage alone needs is there. What is used elsewhere is sent by a `permute`: before
//! its ranks begin their next call, or where it is read if that is earlier. So a stage that has made something sends it at
//! once, and no stage waits in front of work that it could do.

use ithaca_ir::entity::Entity;
use ithaca_ir::layout::AxisList;
use ithaca_ir::module::{Function, Node, ValueId};
use ithaca_ir::ops::Op;
use ithaca_ir::{AxisId, Diagnostic, Mesh, Module};

/// The stages of `main`.
#[derive(Clone, Debug, Default)]
pub(super) struct Stages {
    /// Their axis; `None` without a pipeline.
    pub(super) axis: Option<AxisId>,
    /// For each value the stage that makes it.
    pub(super) made: Vec<Option<u64>>,
    /// For each value the other stages that read it, in order.
    pub(super) read: Vec<Vec<u64>>,
    /// Values to send, with their stage.
    pub(super) pending: Vec<(ValueId, u64)>,
}

impl Stages {
    /// The stages of `main` along the first of `axes`.
    pub(super) fn of(main: &Function, axes: &AxisList) -> Self {
        let made = made(main, &vec![None; main.values.len()]);
        let made = self::made(main, &needed(main, &made));
        let mut read: Vec<Vec<u64>> = vec![Vec::new(); main.values.len()];
        for node in &main.nodes {
            let Some(stage) = stage_of(node, &made) else { continue };
            for operand in &node.operands {
                let elsewhere = made[operand.index()].is_some_and(|there| there != stage);
                let read = &mut read[operand.index()];
                if elsewhere && !read.contains(&stage) {
                    read.push(stage);
                }
            }
        }
        Self { axis: axes.first().copied(), made, read, pending: Vec::new() }
    }
}

/// The stage that runs a node; `made` gives the stage of each operand.
fn stage_of(node: &Node, made: &[Option<u64>]) -> Option<u64> {
    match node.op {
        Op::Call { stage, .. } => stage.map(|s| s.number),
        _ => {
            let last = node.operands.iter().filter(|v| made[v.index()].is_some()).max();
            last.and_then(|v| made[v.index()])
        }
    }
}

/// For each value the stage that makes it; `sources` gives the stages of values without operands.
fn made(main: &Function, sources: &[Option<u64>]) -> Vec<Option<u64>> {
    let mut made: Vec<Option<u64>> = vec![None; main.values.len()];
    for node in &main.nodes {
        let stage = stage_of(node, &made);
        node.results.iter().for_each(|v| made[v.index()] = stage.or(sources[v.index()]));
    }
    made
}

/// For each input the one stage that needs it, where there is only one; nothing for all else.
fn needed(main: &Function, made: &[Option<u64>]) -> Vec<Option<u64>> {
    let mut readers: Vec<Readers> = vec![Readers::Nobody; main.values.len()];
    main.outputs.iter().for_each(|o| readers[o.value.index()] = Readers::All);
    for node in main.nodes.iter().rev() {
        let of_node = match stage_of(node, made) {
            Some(stage) => Readers::One(stage),
            // A node without results writes weights or states, on any rank.
            None if node.results.is_empty() => Readers::All,
            None => node.results.iter().fold(Readers::Nobody, |all, v| all.and(readers[v.index()])),
        };
        for operand in &node.operands {
            readers[operand.index()] = readers[operand.index()].and(of_node);
        }
    }
    let mut needed = vec![None; main.values.len()];
    for node in main.nodes.iter().filter(|n| matches!(n.op, Op::Input(_) | Op::Positions { .. })) {
        if let Readers::One(stage) = readers[node.result().index()] {
            needed[node.result().index()] = Some(stage);
        }
    }
    needed
}

/// The stages that need a value.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Readers {
    Nobody,
    One(u64),
    /// Several, or ranks of all of them.
    All,
}

impl Readers {
    fn and(self, other: Readers) -> Readers {
        match (self, other) {
            (Readers::Nobody, one) | (one, Readers::Nobody) => one,
            (a, b) if a == b => a,
            (Readers::One(_) | Readers::All, Readers::One(_) | Readers::All) => Readers::All,
        }
    }
}

/// Refuses a program whose stages are not those of the mesh.
pub(super) fn check(module: &Module, mesh: &Mesh, axes: &AxisList) -> Result<(), Diagnostic> {
    let calls = module.functions.values().flat_map(|f| &f.nodes);
    let stage = |n: &Node| match n.op {
        Op::Call { stage, .. } => stage.map(|s| s.number + 1),
        _ => None,
    };
    let stages = calls.filter_map(stage).max();
    match (stages, axes.first()) {
        (None, None) => Ok(()),
        (Some(n), Some(&axis)) if mesh.size(axis) == n => Ok(()),
        (Some(n), Some(&axis)) => {
            let axis = &mesh.axes[axis];
            Err(Diagnostic::new(
                "P54",
                format!("a program of {n} stages does not fit `{}={}`", axis.name, axis.size),
            ))
        }
        (Some(n), None) => {
            Err(Diagnostic::new("P54", format!("a program of {n} stages is laid out without a pipeline"))
                .help(format!("use strategy `pipeline`, alone or in a product, on a mesh with `pp={n}`")))
        }
        (None, Some(&axis)) => {
            let axis = &mesh.axes[axis];
            let message = format!("the program has no stages to lay out over `{}={}`", axis.name, axis.size);
            Err(Diagnostic::new("P54", message).help(format!(
                "a program in text form becomes a training step in stages by `differentiate{{stages={}, micro_batches=N}}`; one \
                 of a model has the stages of the mesh",
                axis.size
            )))
        }
    }
}
