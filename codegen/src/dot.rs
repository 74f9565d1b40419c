//! A module as a picture, in the language of Graphviz: a box for each node, an edge for each use of a value.
//!
//! Functions are clusters. Collectives are filled, changes of layout without messages are dashed, and states are
//! cylinders. Edges carry types with their layouts.

use std::fmt::Write as _;

use ithaca_ir::entity::Entity;
use ithaca_ir::ops::attr::Names;
use ithaca_ir::ops::experts::Rows;
use ithaca_ir::ops::{Op, Scan, ScanOrder};
use ithaca_ir::{Function, Module, Node, Order, boxes, text};
use petgraph::graph::{DiGraph, NodeIndex};
use petgraph::visit::EdgeRef;

/// A vertex of a function's dataflow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vertex {
    /// The label.
    pub label: String,
    /// Its style.
    pub style: Style,
}

/// The style of a vertex.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Parameters and outputs.
    Boundary,
    /// Weights, inputs, positions.
    Source,
    /// Local work.
    Local,
    /// A change of layout without messages.
    Layout,
    /// Communication.
    Communication,
    /// A read or write of a tensor that is kept from step to step.
    State,
    /// A call.
    Call,
}

/// The dataflow of a function; edges are labelled with the value and its type.
pub fn dataflow(module: &Module, function: &Function) -> DiGraph<Vertex, String> {
    let mut graph = DiGraph::new();
    let mut defined: Vec<Option<NodeIndex>> = vec![None; function.values.len()];
    for (i, &param) in function.params.iter().enumerate() {
        let label = format!("argument {i}");
        defined[param.index()] = Some(graph.add_node(Vertex { label, style: Style::Boundary }));
    }
    for node in &function.nodes {
        let at = graph.add_node(Vertex { label: label(module, function, node), style: style(&node.op) });
        for &operand in &node.operands {
            connect(&mut graph, &defined, module, function, operand, at);
        }
        for &result in &node.results {
            defined[result.index()] = Some(at);
        }
    }
    for (i, output) in function.outputs.iter().enumerate() {
        let label = output.name.clone().unwrap_or_else(|| format!("result {i}"));
        let at = graph.add_node(Vertex { label, style: Style::Boundary });
        connect(&mut graph, &defined, module, function, output.value, at);
    }
    graph
}

fn connect(
    graph: &mut DiGraph<Vertex, String>,
    defined: &[Option<NodeIndex>],
    module: &Module,
    function: &Function,
    value: ithaca_ir::ValueId,
    to: NodeIndex,
) {
    if let Some(from) = defined[value.index()] {
        graph.add_edge(from, to, text::show(&module.space, function.ty(value)).to_string());
    }
}

/// The picture of a module.
pub fn emit(module: &Module) -> String {
    let mut out = format!("digraph {} {{\n", quoted(&module.name));
    out.push_str("    rankdir=TB;\n    node [shape=box, fontname=\"monospace\"];\n");
    out.push_str("    edge [fontname=\"monospace\", fontsize=9];\n");
    if let Some(orders) = orders(module) {
        let _ = writeln!(out, "    orders [label={}, shape=note];", quoted(&orders));
    }
    for (id, function) in module.functions.iter() {
        let f = id.index();
        let graph = dataflow(module, function);
        let _ = writeln!(out, "    subgraph cluster_{f} {{");
        let _ = writeln!(out, "        label={};", quoted(&format!("@{}", function.name)));
        for at in graph.node_indices() {
            let Vertex { label, style } = &graph[at];
            let _ =
                writeln!(out, "        f{f}n{} [label={}{}];", at.index(), quoted(label), attributes(*style));
        }
        for edge in graph.edge_references() {
            let (from, to) = (edge.source().index(), edge.target().index());
            let _ = writeln!(out, "        f{f}n{from} -> f{f}n{to} [label={}];", quoted(edge.weight()));
        }
        out.push_str("    }\n");
    }
    out.push_str("}\n");
    out
}

/// The dimensions with tokens out of order, a line each.
fn orders(module: &Module) -> Option<String> {
    let dims = &module.space.dims;
    let lines: Vec<String> = dims
        .values()
        .filter_map(|d| match (&d.fetched, &d.order) {
            (Some(fetched), _) => Some(format!("{}: fetched from {}", d.name, dims[fetched.of].name)),
            (None, Order::Contiguous) => None,
            (None, order) => Some(format!("{}: {order}", d.name)),
        })
        .collect();
    (!lines.is_empty()).then(|| lines.join("\n"))
}

/// The attributes of attention that a picture shows. Roles and factors would take too much room.
const SHOWN: [&str; 6] = ["mask", "bias", "dropout", "returns", "parts", "movement"];

fn label(module: &Module, function: &Function, node: &Node) -> String {
    let Node { op, operands, results, .. } = node;
    let axis = |a: ithaca_ir::AxisId| module.space.mesh.axes[a].name.as_str();
    let dim = |d: ithaca_ir::DimId| module.space.dims[d].name.as_str();
    let several =
        |axes: &[ithaca_ir::AxisId]| axes.iter().map(|&a| axis(a)).collect::<Vec<_>>().join(" and ");
    match op {
        Op::Param(binding) | Op::Input(binding) | Op::State(binding) | Op::Assign { binding, .. } => {
            format!("{} {}", op.name(), binding.name)
        }
        Op::Call { callee, layers, stride, scan, stage } => {
            let mut call =
                format!("call @{} {}..{}", module.functions[*callee].name, layers.start, layers.end);
            if *stride != 0 {
                call += &format!(" of every {stride}");
            }
            if let Some(stage) = stage {
                call += &format!(", stage {}", stage.number);
            }
            match scan {
                None => call,
                Some(Scan { over, carried: _, order: ScanOrder::Ascending }) => {
                    format!("{call}, stacked over {}", dim(*over))
                }
                Some(Scan { over, carried: _, order: ScanOrder::Descending }) => {
                    format!("{call}, last layer first, stacked over {}", dim(*over))
                }
            }
        }
        Op::AllToAll { axis: a, split, concat, rows } => {
            let all = if *rows == Rows::All { ", all rows" } else { "" };
            format!("all_to_all over {}: split {}, join {}{all}", axis(*a), dim(*split), dim(*concat))
        }
        Op::AllGather { axis: a, dim: d } => format!("all_gather over {}: join {}", several(a), dim(*d)),
        Op::Slice { axis: a, dim: d } => format!("slice over {}: split {}", axis(*a), dim(*d)),
        Op::ReduceScatter { axis: a, dim: d } => {
            format!("reduce_scatter over {}: split {}", several(a), dim(*d))
        }
        Op::AllReduce { axis: a } => format!("all_reduce over {}", several(a)),
        Op::Permute => match (operands.first(), results.first()) {
            (Some(&x), Some(&z)) => {
                let axes = boxes::axes(&module.space, op, function.ty(x), function.ty(z));
                format!("permute over {}", several(&axes))
            }
            _ => op.name().to_owned(),
        },
        Op::Fetch { to } => format!("fetch {}", dim(*to)),
        Op::Take { to } => format!("take {}", dim(*to)),
        Op::Join { to } => format!("join {}", dim(*to)),
        Op::Coalesced(members) => {
            format!("{} {} of {}", op.name(), op.collective_name(), members.len())
        }
        Op::FetchSum { from } => format!("fetch_sum {}", dim(*from)),
        Op::MergeParts { over } => format!("merge_parts over {}", dim(*over)),
        Op::RowLse { over, parts: _ } => format!("row_lse over {}", dim(*over)),
        Op::Attention(_)
        | Op::AttendPages { .. }
        | Op::AttentionBackward(_)
        | Op::Scores { .. }
        | Op::Weigh { .. } => {
            let attrs = op.attrs(Names { space: &module.space, functions: &module.functions });
            let shown = attrs.iter().filter(|(key, _)| SHOWN.contains(key));
            let lines: Vec<String> = shown.map(|(key, value)| format!("\n{key}={value}")).collect();
            format!("{}{}", op.name(), lines.concat())
        }
        _ => op.name().to_owned(),
    }
}

fn style(op: &Op) -> Style {
    match op {
        Op::Param(_) | Op::Input(_) | Op::Fill { .. } | Op::Positions { .. } => Style::Source,
        Op::State(_) | Op::Assign { .. } => Style::State,
        Op::Call { .. } => Style::Call,
        _ if op.is_communication() => Style::Communication,
        _ if op.is_layout_change() => Style::Layout,
        _ => Style::Local,
    }
}

fn attributes(style: Style) -> &'static str {
    match style {
        Style::Boundary => ", shape=plaintext",
        Style::Source => ", shape=note",
        Style::Local => "",
        Style::Layout => ", style=dashed, color=\"#c05020\"",
        Style::Communication => ", style=\"filled,bold\", fillcolor=\"#ffd9b3\", color=\"#c05020\"",
        Style::State => ", shape=cylinder, style=filled, fillcolor=\"#dff0df\", color=\"#4a8a4a\"",
        Style::Call => ", shape=component",
    }
}

fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n"))
}

#[cfg(test)]
mod tests {
    use ithaca_ir::module::{Level, Output};
    use ithaca_ir::{Arena, DType, Dim, FunctionBuilder, Mesh, Space, TensorType};

    use super::*;

    #[test]
    fn collectives_stand_out() {
        let mut space = Space { mesh: Mesh::new([("u", 2)]), ..Space::default() };
        let s = space.dims.push(Dim::new("s", 4));
        let u = space.mesh.axis("u").unwrap();
        let functions = Arena::new();
        let mut b = FunctionBuilder::new("main", &space, &functions);
        let ty = TensorType::new(DType::F32, [s]).split(s, [u]);
        let x = b.push_as(Op::Input(ithaca_ir::ops::Binding::named("x")), &[], ty).unwrap();
        let y = b.push(Op::AllGather { axis: u.into(), dim: s }, &[x]).unwrap();
        let function = b.finish([Output { name: Some("y".into()), value: y }]);
        let mut functions = Arena::new();
        functions.push(function);
        let module =
            Module { level: Level::PerRank, name: "a \"b\"".into(), pipeline: vec![], space, functions };
        let picture = emit(&module);
        assert!(picture.starts_with("digraph \"a \\\"b\\\"\" {\n"), "{picture}");
        let gather = picture.lines().find(|l| l.contains("all_gather over u: join s")).unwrap();
        assert!(gather.contains("filled"), "{gather}");
        assert!(picture.contains("f0n0 -> f0n1 [label=\"f32[s@u]\"]"), "{picture}");
    }

    #[test]
    fn orders_and_parts_that_travel_are_told() {
        let module = text::parse(
            "ithaca 1 per_rank\nmodel \"ring\"\nmesh ring=2\ndim s = 8 order zigzag(2)\n\
             dim f = 10 fetches s [[0..4], [2..8]]\n\nfunc @main() {\n  %x = input {name=\"x\"} : f32[s@ring]\n  \
             %y = permute %x : f32[s@ring+1]\n  %z = fetch %x {to=f} : f32[f@ring]\n  return y = %y, z = %z\n}\n",
        )
        .unwrap();
        let picture = emit(&module);
        assert!(picture.contains("orders [label=\"s: zigzag(2)\\nf: fetched from s\""), "{picture}");
        for told in ["permute over ring", "fetch f"] {
            let line = picture.lines().find(|l| l.contains(told)).unwrap();
            assert!(line.contains("filled"), "{line}");
        }
        assert!(picture.contains("[label=\"f32[s@ring+1]\"]"), "{picture}");
    }
}
