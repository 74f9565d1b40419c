//! One Python module from a per-rank program: a function of PyTorch for each function of the program.
//!
//! The generated part has the mesh, the dimensions and the functions; every line is an operation, and what differs by rank is in
//! the types that it names. `runtime/*.py` is the same for every program: of it a module has the functions that it uses.

mod expression;
mod function;
mod library;
mod python;

use std::collections::BTreeSet;

use ithaca_ir::{Diagnostics, Dim, Module, Order, Space};

use function::Printer;
use python::{string, tuple};

/// The program that runs steps of `ranks`, one process per rank, on a CPU or a GPU each.
///
/// `whole` is the program of one device, by which rank 0 checks the ranks.
///
/// # Errors
/// `S43` for an operation that has no form in PyTorch; `S42` for dropout that follows a device.
pub fn emit(ranks: &Module, whole: &Module) -> Result<String, Diagnostics> {
    let (mut body, mut groups, mut blocks) = (String::new(), BTreeSet::new(), Vec::new());
    for (prefix, module) in [("", ranks), ("whole_", whole)] {
        let mut printer = Printer::new(module, prefix);
        for id in module.functions.ids() {
            body.push_str("\n\n");
            body.push_str(&printer.function(id).map_err(|d| vec![d])?);
            if prefix.is_empty() && Some(id) != module.main() {
                blocks.push(printer.name(id).to_owned());
            }
        }
        groups.extend(printer.groups);
    }
    let spaces = format!(
        "RANKS = {}\n\nWHOLE = {}\n\n# Axes along which ranks communicate, and streams between stages.\nAXES = {}\n\nBLOCKS = {}\n",
        space(&ranks.space),
        space(&whole.space),
        tuple(groups.iter().cloned()),
        tuple(blocks.iter().map(|name| string(name))),
    );
    let generated = format!("{spaces}{body}");
    let library = library::used_by(&generated);
    Ok(format!(
        "{}{}\n\n\n{}\n\n\nif __name__ == \"__main__\":\n    main()\n",
        header(ranks),
        library,
        python::wrapped(&generated).trim_end(),
    ))
}

/// The description at the start of the module.
fn header(module: &Module) -> String {
    let mesh = &module.space.mesh;
    let shape = if mesh.axes.is_empty() { "of one".to_owned() } else { mesh.to_string() };
    let ranks = mesh.ranks();
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
fn space(space: &Space) -> String {
    let axes = space.mesh.axes.values().map(|axis| format!("{}: {}", string(&axis.name), axis.size));
    let dims = space.dims.values().map(|of| format!("    {}: {},\n", string(&of.name), dim(space, of)));
    format!("Space({{{}}}, {{\n{}}})", axes.collect::<Vec<_>>().join(", "), dims.collect::<String>())
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
        let ranges = fetched.parts.iter().map(|part| tuple(part.iter().map(range)));
        format!("fetched=({}, {})", name(fetched.of), tuple(ranges))
    }));
    parts.extend(
        dim.part
            .map(|part| format!("part=({}, {}, {}, {})", name(part.of), part.index, part.count, part.runs)),
    );
    format!("Dim({})", parts.join(", "))
}
