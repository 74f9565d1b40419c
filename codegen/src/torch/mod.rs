//! One Python module from a per-rank program: a function of PyTorch for each function of the program.
//!
//! The generated part has the mesh, the dimensions and the functions; every line is an operation, and what differs by rank is in
//! the types that it names. `runtime/*.py` is the same for every program: of it a module has the functions that it uses.

mod autograd;
mod expression;
mod function;
mod handover;
mod library;
mod python;
mod terms;

use std::collections::BTreeSet;

use ithaca_ir::handover::Handover;
use ithaca_ir::module::{Function, Node};
use ithaca_ir::ops::{Appended, Cache};
use ithaca_ir::{Diagnostics, Dim, Module, Op, Order, Space};

pub use autograd::Optimizer;
use function::Printer;
use python::{string, tuple};

/// A program as per-rank modules.
#[derive(Clone, Copy, Debug)]
pub struct Steps<'a> {
    /// The step; that of a token, where steps continue sequences.
    pub step: &'a Module,
    /// The step of prompts, where steps continue sequences: the program decodes.
    pub prompts: Option<&'a Module>,
    /// Where states go from steps of prompts to those of a token; none where both lay them out alike, on the same ranks.
    pub handover: Option<&'a Handover>,
}

/// The program that runs steps of `ranks`, one process per rank, on a CPU or a GPU each.
///
/// `whole` is the program of one device, by which rank 0 checks the ranks.
///
/// # Errors
/// `S43` for an operation that has no form in PyTorch, and for states that are laid out otherwise in a step of prompts, without a
/// handover; `S42` for dropout that follows a device.
pub fn emit(ranks: Steps<'_>, whole: Steps<'_>) -> Result<String, Diagnostics> {
    let constants = match ranks.prompts {
        None => String::new(),
        Some(prompts) => {
            if ranks.handover.is_none() {
                handover::check_states(ranks.step, prompts).map_err(|refusal| vec![refusal])?;
            }
            let moves = handover::moves(&ranks.step.space, ranks.handover);
            caches(ranks.step, prompts) + &moves
        }
    };
    let main = if ranks.prompts.is_some() { "decode" } else { "main" };
    written(ranks, whole, &constants, main)
}

/// The program that trains: PyTorch differentiates the forward pass `ranks`, which computes a loss, and updates the weights.
///
/// # Errors
/// As [`emit`]; `S44` for a program that cannot be differentiated so.
pub fn emit_autograd(ranks: &Module, whole: &Module, optimizer: &Optimizer) -> Result<String, Diagnostics> {
    autograd::check(ranks).map_err(|refusal| vec![refusal])?;
    let of = |step| Steps { step, prompts: None, handover: None };
    written(of(ranks), of(whole), &optimizer.constants(), "train")
}

fn written(ranks: Steps<'_>, whole: Steps<'_>, constants: &str, main: &str) -> Result<String, Diagnostics> {
    let modules = [
        ("RANKS", "", Some(ranks.step)),
        ("PROMPTS", "prompts_", ranks.prompts),
        ("WHOLE", "whole_", Some(whole.step)),
        ("WHOLE_PROMPTS", "whole_prompts_", whole.prompts),
    ];
    let (mut spaces, mut body, mut groups, mut blocks) =
        (String::new(), String::new(), [BTreeSet::new(), BTreeSet::new()], Vec::new());
    let processes = |name| match (ranks.handover, name) {
        (Some(handover), "PROMPTS") => handover::processes(&handover.processes[0]),
        (Some(handover), "RANKS") => handover::processes(&handover.processes[1]),
        _ => String::new(),
    };
    for (name, prefix, module) in modules {
        let Some(module) = module else { continue };
        spaces.push_str(&format!("{name} = {}\n\n", space(&module.space, &processes(name))));
        let mut printer = Printer::new(module, prefix);
        for id in module.functions.ids() {
            body.push_str("\n\n");
            body.push_str(&printer.function(id).map_err(|d| vec![d])?);
            if name == "RANKS" && Some(id) != module.main() {
                blocks.push(string(printer.name(id)));
            }
        }
        groups[usize::from(name == "PROMPTS")].extend(printer.groups);
    }
    let [axes, of_prompts] = groups;
    let generated = format!(
        "{spaces}# Axes along which ranks communicate, and streams between stages.\nAXES = {}\n{}\nBLOCKS = {}\n{constants}{body}",
        tuple(axes),
        ranks.prompts.map(|_| format!("PROMPT_AXES = {}\n", tuple(of_prompts))).unwrap_or_default(),
        tuple(blocks),
    );
    let library = library::used_by(&format!("{generated} {main}"));
    Ok(format!(
        "{}{library}\n\n\n{}\n\n\nif __name__ == \"__main__\":\n    {main}()\n",
        header(ranks),
        python::wrapped(&generated).trim_end(),
    ))
}

/// What the loop that decodes must know: sequences, the tokens of a step of prompts and of a cache, pages.
fn caches(step: &Module, prompts: &Module) -> String {
    let nodes = || step.functions.values().flat_map(|f| f.nodes.iter().map(move |node| (f, node)));
    let size = |dim| step.space.size(dim);
    let (mut context, mut pages, mut sequences) = (0, "None".to_owned(), 0);
    for (function, node) in nodes() {
        let ty = |i: usize| function.ty(node.operands[i]);
        if node.op == Op::Cache(Cache::Advance) {
            sequences = ty(0).dims.iter().map(|&d| size(d)).product();
        }
        let Some(Appended { by, start }) = node.op.appended() else { continue };
        match by {
            // A ring has room for any number.
            Cache::Append { wraps: true, .. } if context > 0 => {}
            Cache::Append { wraps: true, .. } => context = Dim::MAX_SIZE,
            Cache::Append { over, .. } => context = step.space.dims[over].valid,
            Cache::AppendPages { pages: of, slots, .. } => {
                let entries = size(ty(start + 2).dims[1]);
                // Pages of the smaller groups are those of the larger ones, too.
                let groups = page_groups(step).max(page_groups(prompts));
                context = entries * size(slots);
                pages = format!("({}, {}, {groups}, {entries})", size(slots), size(of));
            }
            _ => {}
        }
    }
    let ids = prompts.functions.values().flat_map(|f| f.nodes.iter().map(move |node| (f, node))).find_map(
        |(f, node)| {
            let is_ids = matches!(&node.op, Op::Input(binding) if binding.name == "input_ids");
            is_ids.then(|| f.ty(node.results[0]).dims.last().copied()).flatten()
        },
    );
    let chunk = ids.map(|dim| string(&prompts.space.dims[dim].name)).unwrap_or_default();
    format!(
        "\n# The dimension CHUNK has the tokens of a step of prompts; pages are their tokens, number, groups and entries.\n\
         SEQUENCES = {sequences}\nCHUNK = {chunk}\nCONTEXT = {context}\nPAGES = {pages}\n"
    )
}

/// The groups of sequences that have pages of their own.
fn page_groups(module: &Module) -> u64 {
    let nodes = module.functions.values().flat_map(|f| f.nodes.iter().map(move |node| (f, node)));
    let degree = |(f, node): (&Function, &Node)| match node.op.appended()?.by {
        Cache::AppendPages { pages, .. } => {
            Some(module.space.mesh.degree(f.ty(node.operands[0]).axes_of(pages)))
        }
        _ => None,
    };
    nodes.filter_map(degree).max().unwrap_or(1)
}

/// The description at the start of the module.
fn header(Steps { step: module, prompts, handover }: Steps<'_>) -> String {
    let shape = |module: &Module| {
        let mesh = &module.space.mesh;
        if mesh.axes.is_empty() { "of one".to_owned() } else { mesh.to_string() }
    };
    let ranks = handover.map_or(module.space.mesh.ranks(), Handover::n_processes);
    let shape = match (handover, prompts) {
        (Some(_), Some(prompts)) => format!("{} for prompts, {} for tokens", shape(prompts), shape(module)),
        _ => shape(module),
    };
    let clean = |text: &str| -> String {
        text.chars().filter(|c| !c.is_control() && !matches!(c, '"' | '\\')).collect()
    };
    format!(
        "\"\"\"{} on {ranks} ranks, mesh {shape}.\n\nPipeline: {}\n\n    torchrun --nproc-per-node {ranks} program.py --weights \
         DIR --inputs FILE [--expect FILE] [--self-check]\n\nNeeds PyTorch and safetensors. GPUs communicate by NCCL, CPUs by \
         gloo.\n\"\"\"\n\n",
        clean(&module.name),
        clean(&module.pipeline.join(", ")),
    )
}

/// A mesh and its dimensions.
fn space(space: &Space, processes: &str) -> String {
    let axes = space.mesh.axes.values().map(|axis| format!("{}: {}", string(&axis.name), axis.size));
    let dims = space.dims.values().map(|of| format!("    {}: {},\n", string(&of.name), dim(space, of)));
    format!(
        "Space({{{}}}, {{\n{}}}{processes})",
        axes.collect::<Vec<_>>().join(", "),
        dims.collect::<String>()
    )
}

fn dim(space: &Space, dim: &Dim) -> String {
    let name = |id| string(&space.dims[id].name);
    let range = |r: &std::ops::Range<u64>| format!("({}, {})", r.start, r.end);
    let mut parts = vec![dim.size.to_string()];
    if dim.granule != 1 {
        parts.push(format!("granule={}", dim.granule));
    }
    if dim.valid != dim.size {
        parts.push(format!("valid={}", dim.valid));
    }
    let order = match &dim.order {
        Order::Contiguous => None,
        Order::Zigzag { parts } => Some(format!("(\"zigzag\", {parts})")),
        Order::Striped { parts, block } => Some(format!("(\"striped\", {parts}, {block})")),
        Order::Table(runs) => Some(format!("(\"table\", {})", tuple(runs.iter().map(range)))),
    };
    parts.extend(order.map(|order| format!("order={order}")));
    parts.extend(dim.copies.map(|of| format!("copies={}", name(of))));
    parts.extend(dim.fetched.as_ref().map(|fetched| {
        let ranges = fetched.parts().iter().map(|part| tuple(part.iter().map(range)));
        format!("fetched=({}, {})", name(fetched.of), tuple(ranges))
    }));
    parts.extend(
        dim.part
            .map(|part| format!("part=({}, {}, {}, {})", name(part.of), part.index, part.count, part.runs)),
    );
    format!("Dim({})", parts.join(", "))
}
