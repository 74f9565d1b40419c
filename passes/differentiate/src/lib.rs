//! `differentiate`: turns a program that computes a loss into one training step.
//!
//! Every function becomes two. The forward function returns its results, then the saved values that its gradients need.
//! The backward function takes gradients of the results and the saved values, stores the gradients of its weights in
//! states, and returns the gradients of its arguments. `main` calls the forward functions, the backward functions in
//! reverse order, and the optimizer.
//!
//! ```text
//! %x = call %x0 {callee=@block, layers=0..32}
//! ```
//! becomes
//! ```text
//! %x, %q, … = call %x0 {callee=@block, layers=0..32, over=l, carried=1}
//! …
//! %dx0 = call %dx, %q, … {callee=@block.backward, layers=0..32, over=l, carried=1, order=descending}
//! ```
//!
//! The method is reverse mode, one operation at a time (Griewank and Walther, Evaluating Derivatives); each operation
//! defines its adjoint. The forward values to save are chosen on a joint function of both passes, as in PyTorch's
//! ahead-of-time autograd.

mod active;
mod chunked;
mod deferred;
mod dropout;
mod group;
mod joint;
mod last;
mod micro;
mod options;
pub mod order;
mod owners;
mod pipelined;
mod regroup;
mod sequences;
mod split;
mod stages;
mod step;
mod tape;
mod tied;
mod update;

pub use micro::undivided;
pub use options::{ADAMW, DropoutChoice, GradientType, OPTIONS, Offload, PipelineOrder, Recompute, Training};
pub use pipelined::{MAX_CALLS, check_calls};
pub use sequences::in_micro_batches;
pub use stages::{chunk_layers, chunks, in_stages};

use std::collections::BTreeMap;

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{FuncId, Layers, Level, ValueId};
use ithaca_ir::ops::{Binding, OpError};
use ithaca_ir::phase::Phase;
use ithaca_ir::verify::Verified;
use ithaca_ir::{Diagnostic, Diagnostics, DimId, Module, Op, TensorType};
use ithaca_pass::{Context, Pass};

use active::Activity;
use last::LastPass;
use micro::Split;
use owners::owned;
use pipelined::Stages;
use split::{Repetition, split};
use step::{Backward, Cx, DifferentiatedFunction, Optimize, StepParts, Sweep};
use tape::Accumulation;
use update::OwnedWeights;

/// The pass.
#[derive(Clone, Debug, Default)]
pub struct Differentiate {
    training: Training,
}

impl Differentiate {
    /// The pass with these options.
    pub fn new(training: Training) -> Self {
        Self { training }
    }
}

impl Pass for Differentiate {
    fn name(&self) -> &'static str {
        "differentiate"
    }

    fn options(&self) -> Vec<(String, String)> {
        self.training.to_pipeline()
    }

    fn run(&self, module: Verified<'_>, cx: &mut Context<'_>) -> Result<Module, Diagnostics> {
        let module = module.module();
        if module.level != Level::Program {
            let message =
                format!("`differentiate` takes a whole program; this one is {}", module.level.name());
            return Err(vec![Diagnostic::new("P03", message)]);
        }
        if !cx.rewrite() {
            return Ok(module.clone());
        }
        if self.training.dropout == DropoutChoice::Off && !dropout::drops(module) {
            cx.note("`dropout=off` has no effect: the program drops nothing");
        }
        training_step(module, &self.training)
    }
}

/// One training step of `module`, which computes an output `loss`.
fn training_step(module: &Module, training: &Training) -> Result<Module, Diagnostics> {
    let (main, _) = loss_of(module)?;
    check(module, main)?;
    dropout::check_keys(module, main)?;
    let without;
    let module = match training.dropout {
        DropoutChoice::Config => module,
        DropoutChoice::Off => {
            without = dropout::without(module)?;
            &without
        }
    };
    if training.stages == 1 {
        return Ok(stepped(module, main, training, None)?);
    }
    let (shape, order) = pipelined::schedule(training).map_err(|refused| vec![*refused])?;
    let staged = stages::cut(module, main, training)?;
    let stages = Stages::of(&staged, main, shape.stages);
    let pipeline = Pipeline { chunks: &staged.chunks, stages, shape, order };
    Ok(stepped(&staged.module, main, training, Some(&pipeline))?)
}

/// A step cut into stages.
struct Pipeline<'a> {
    /// For each node of `main` its chunk.
    chunks: &'a [Option<usize>],
    stages: Stages,
    shape: order::Shape,
    order: Vec<order::Step>,
}

fn stepped(
    module: &Module,
    main: FuncId,
    training: &Training,
    pipeline: Option<&Pipeline<'_>>,
) -> Result<Module, OpError> {
    let mut layers = calls(module);
    // `main` counts as one layer; it alone calls functions so far.
    layers[main.index()].push(0..1);
    let (mut owned, tied) = owned(module, main, &layers, (training, pipeline.map(|p| &p.stages)))?;
    // Where a backward pass that also reduces gradients would keep earlier stages waiting, only the first stage's does.
    let is_alone = pipeline.is_some() && training.micro_batches > 1 && !training.pipeline.defers_weights();
    let completes_on = is_alone.then_some(0);
    if is_alone {
        owned.iter_mut().for_each(OwnedWeights::complete_together);
    }
    let none = vec![None; module.functions[main].nodes.len()];
    let chunks = pipeline.map_or(&none[..], |p| p.chunks);
    let grouped = match training.recompute {
        Recompute::Full { every } if every > 1 => Some(group::group(module, main, chunks, every)?),
        Recompute::None | Recompute::Selective | Recompute::Full { .. } | Recompute::KeepAttention => None,
    };
    let (module, chunks) = grouped.as_ref().map_or((module, chunks), |g| (&g.module, &g.chunks[..]));
    let (main, loss) = loss_of(module)?;
    let runs = calls(module);
    let mut stepped = module.emptied(Level::Program);
    let cut = micro::cut(&mut stepped, module, training.micro_batches, pipeline.is_some())?;
    let chunked = match training.loss_chunks {
        1 => None,
        n => Some(chunked::of(module, (main, loss), n, &mut stepped.space)?),
    };
    // The backward pass of the head follows its forward pass at once, unless all micro-batches go forward first: nothing is saved
    // for long, and what is computed again would be held as long.
    let goes_back = pipeline.is_none() || training.pipeline != PipelineOrder::Gpipe;
    let head = chunked::head(module, (main, loss)).filter(|_| goes_back);
    let activity = Activity::of(module);
    let accumulation = |reader: FuncId, binding: &Binding| {
        let name = &module.functions[reader].name;
        let own = |o: &&OwnedWeights| o.name == *name || o.name.strip_suffix(".shared") == Some(name);
        let elsewhere = tied.iter().find(|t| t.binding == *binding && t.user.0 == *name);
        let mut weights = owned.iter().filter(own).chain(&owned).flat_map(|o| &o.weights);
        match elsewhere {
            Some(tied) => Accumulation::AddOnStage(tied.user.1.number),
            None => weights
                .find(|(b, _, _)| b == binding)
                .map_or(Accumulation::Assign, |(_, _, accumulation)| *accumulation),
        }
    };
    let stacks = stacks(&mut stepped, &runs);
    let stack = |n: u64| *stacks.get(&n).expect("a dimension was declared for each number of layers");

    let mut functions: Vec<Option<DifferentiatedFunction>> = Vec::new();
    for (id, function) in module.functions.iter().filter(|&(id, _)| id != main) {
        if let Some(chunked) = chunked.as_ref().filter(|c| c.head == id) {
            let own = |binding: &Binding| accumulation(id, binding);
            let halves =
                chunked::halves(&stepped.space, function, chunked, &activity, (training.gradients, own))?;
            let forward = stepped.functions.push(halves.forward.clone());
            functions.push(Some(DifferentiatedFunction {
                halves,
                plain: None,
                forward,
                backward: Backward::InForward,
            }));
            continue;
        }
        let is_group = grouped.as_ref().is_some_and(|g| g.is_group(id));
        let is_member = grouped.as_ref().is_some_and(|g| g.is_member(id));
        let (source, functions_so_far) = (module, &functions[..]);
        let inner = Cx {
            source,
            main: id,
            activity: &activity,
            functions: functions_so_far,
            stack: &stack,
            gradients: training.gradients,
            accumulation: &accumulation,
            counts: None,
            last: &BTreeMap::new(),
            completes_on,
        };
        let joint = joint::joint(&inner, &stepped.space, &stepped.functions)?;
        let looped = runs[id.index()].iter().any(|l| l.end - l.start > 1);
        let runs = if looped { Repetition::Looped } else { Repetition::Once };
        // Layers of a group that is recomputed save every value.
        let recompute = if is_member || head == Some(id) { Recompute::None } else { training.recompute };
        let of = (&stepped.space, &stepped.functions);
        let mut halves = split(of, id, function, &joint, &activity, (runs, recompute))?;
        let plain = is_member.then(|| stepped.functions.push(function.clone()));
        if is_group {
            halves.forward = regroup::forward(&inner, &stepped.space, &stepped.functions, &halves)?;
        } else if is_member {
            halves.forward.name = format!("{}.again.backward", function.name);
            halves.forward.origin = Some(function.model_name().to_owned());
            halves.forward.phase = Phase::Backward;
        }
        let forward = stepped.functions.push(halves.forward.clone());
        let whole = std::mem::take(&mut halves.backward);
        let parts = if training.pipeline.defers_weights() && pipeline.is_some() {
            let n_carried = match runs {
                Repetition::Once => 0,
                Repetition::Looped => halves.seeds.len() + halves.sums.len(),
            };
            deferred::parts((&stepped.space, &stepped.functions), &whole, n_carried)?
        } else {
            None
        };
        let backward = match parts {
            None => Backward::Whole(stepped.functions.push(whole)),
            Some(deferred::Parts { inputs, weights, operands }) => Backward::Apart {
                inputs: inputs.map(|inputs| stepped.functions.push(inputs)),
                weights: stepped.functions.push(weights),
                operands,
            },
        };
        functions.push(Some(DifferentiatedFunction { halves, plain, forward, backward }));
    }

    let main_name = &module.functions[main].name;
    let mut last_pass = LastPass::new(&owned, main_name);
    if training.micro_batches == 1 {
        stepped.functions.values_mut().for_each(|function| {
            last_pass.complete(function);
        });
    } else if let Some(pipeline) = pipeline {
        for (node, chunk) in module.functions[main].nodes.iter().zip(chunks) {
            let stage = chunk.map(|chunk| pipelined::stage_of(chunk, pipeline.shape.stages).number);
            if let Op::Call { callee, .. } = &node.op
                && let Some(function) = &functions[callee.index()]
                && (completes_on.is_none() || completes_on == stage)
            {
                for id in function.functions() {
                    last_pass.function(&mut stepped.functions, id);
                }
            }
        }
    }
    let last = last_pass.copies().clone();

    let scalar = TensorType::new(update::scalar_type(&owned), []);
    let (mut zero, mut reduce) = (Sweep::default(), Sweep::default());
    let mut optimize = training.optimizer.map(|_| Optimize {
        squares: Sweep::default(),
        update: Sweep::default(),
        clip: training.clip,
        scalar: scalar.clone(),
    });
    for owned in owned.iter().chain(&tied::tied_gradients(&tied, training.gradients)) {
        if owned.is_summed() {
            let function = update::zero(&stepped.space, owned)?;
            zero.calls.push((stepped.functions.push(function), owned.layers.clone()));
        }
        let places = owned.reduced_last(completes_on);
        if !places.is_empty() {
            let function = update::reduce(&stepped.space, owned, completes_on)?;
            reduce.calls.push((stepped.functions.push(function), places));
        }
    }
    for owned in &owned {
        if let (Some(adamw), Some(optimize)) = (training.optimizer, &mut optimize) {
            if training.clip.is_some() {
                let function = update::squares(&stepped.space, owned, &scalar)?;
                optimize.squares.calls.push((stepped.functions.push(function), owned.layers.clone()));
            }
            let function = update::update(&stepped.space, owned, (adamw, training.offload), &scalar)?;
            optimize.update.calls.push((stepped.functions.push(function), owned.layers.clone()));
        }
    }
    let exchanges = tied::exchanges(&stepped.space, &mut stepped.functions, &tied, training.gradients)?;
    let counts = training.optimizer.is_some().then_some(&scalar);
    let cx = Cx {
        source: module,
        main,
        activity: &activity,
        functions: &functions,
        stack: &stack,
        gradients: training.gradients,
        accumulation: &accumulation,
        counts,
        last: &last,
        completes_on,
    };
    let parts =
        StepParts { zero: &zero, reduce: &reduce, exchanges: &exchanges, optimize: optimize.as_ref() };
    let function = match (cut, pipeline) {
        (Some(cut), Some(Pipeline { shape, order, .. })) => {
            pipelined::main(&cx, &stepped, (loss, cut), (chunks, order), *shape, &parts)?
        }
        (Some(cut @ Split { earlier: Some(earlier), .. }), None) => {
            let of = (loss, cut, earlier);
            micro::functions(&cx, &stepped.space, &mut stepped.functions, of, (&parts, &mut last_pass))?
        }
        (_, _) => {
            let mut main = step::main(&cx, &stepped.space, &stepped.functions, loss, &parts)?;
            last_pass.complete(&mut main);
            main
        }
    };
    stepped.functions.push(function);
    Ok(stepped)
}

/// `main` and the value of its output `loss`.
fn loss_of(module: &Module) -> Result<(FuncId, ValueId), OpError> {
    let main =
        module.main().ok_or_else(|| OpError::new("P50", "the program has no `@main` to differentiate"))?;
    let function = &module.functions[main];
    let loss = function.outputs.iter().find(|o| o.name.as_deref() == Some("loss"));
    let loss = loss.ok_or_else(|| OpError::new("P50", "`@main` returns no `loss` to differentiate"))?.value;
    let ty = function.ty(loss);
    if !ty.dims.is_empty() || !ty.dtype.is_float() {
        return Err(OpError::new("P50", "the `loss` that `@main` returns is not a real scalar"));
    }
    Ok((main, loss))
}

/// Refuses calls outside `main`, and states.
fn check(module: &Module, main: FuncId) -> Result<(), OpError> {
    let nested = module
        .functions
        .iter()
        .filter(|&(id, _)| id != main)
        .find(|(_, f)| f.nodes.iter().any(|n| matches!(n.op, Op::Call { .. })));
    if let Some((_, nested)) = nested {
        let message =
            format!("`@{}` calls a function; only `@main` may, in a program to differentiate", nested.name);
        return Err(OpError::new("P51", message));
    }
    let lasting = module.functions.values().flat_map(|f| &f.nodes);
    let mut lasting = lasting.filter(|n| matches!(n.op, Op::State(_) | Op::Assign { .. }));
    match lasting.next() {
        Some(_) => Err(OpError::new("P51", "a program to differentiate reads and writes no states")),
        None => Ok(()),
    }
}

/// For each function the layers of all calls of it.
fn calls(module: &Module) -> Vec<Vec<Layers>> {
    let mut calls = vec![Vec::new(); module.functions.len()];
    for node in module.functions.values().flat_map(|f| &f.nodes) {
        if let Op::Call { callee, layers, .. } = &node.op {
            calls[callee.index()].push(layers.clone());
        }
    }
    calls
}

/// A stack dimension for each number of layers that a call runs over.
fn stacks(stepped: &mut Module, layers: &[Vec<Layers>]) -> BTreeMap<u64, DimId> {
    let mut stacks = BTreeMap::new();
    for n in layers.iter().flatten().map(|l| l.end - l.start).filter(|&n| n > 1) {
        stacks.entry(n).or_insert_with(|| micro::declare(stepped, "l", n));
    }
    stacks
}
