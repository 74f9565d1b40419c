//! `prefetch` on programs in text form.

use ithaca_ir::{Module, Op, text};
use ithaca_pass::{Context, Pass, Unwatched, Volume, run_passes};

use super::Prefetch;

/// Layers that read weights `nodes`, called `calls`, and the notes.
fn prefetched(nodes: &str, calls: &str, layers: u64) -> (Module, Vec<String>) {
    let program = format!(
        "ithaca 1 per_rank\nmodel \"m\"\nmesh u=2,v=2\ndim a = 4\ndim b = 8\ndim l = 3\n\n\
         func @layer(%x: f32[a b]) {{\n{nodes}}}\n\nfunc @main() {{\n%x = input {{name=\"x\"}} : f32[a b]\n{calls}}}\n"
    );
    let module = text::parse(&program).unwrap_or_else(|e| panic!("{e:?}\n{program}"));
    let passes: Vec<Box<dyn Pass>> = vec![Box::new(Prefetch { layers })];
    let mut cx = Context::new(&Volume);
    let module = run_passes(module, &passes, &mut cx, &mut Unwatched).unwrap();
    let notes = cx.notes().to_vec();
    (module, notes)
}

const LAYER: &str = "%w = param {name=\"layers.{layer}.w\"} : f32[a@u b]\n%g = all_gather %w {axis=u, dim=a} : f32[a b]\n\
                     %h = silu %x : f32[a b]\n%y = mul %h, %g : f32[a b]\nreturn %y\n";

const CALL: &str = "%y = call %x {callee=@layer, layers=0..3} : f32[a b]\nreturn y = %y\n";

/// The operations of a function without sources; for calls, the callee and the layers.
fn shown(module: &Module, function: &str) -> Vec<String> {
    let id = module.function(function).unwrap_or_else(|| panic!("there is no @{function}"));
    let nodes = module.functions[id].nodes.iter();
    nodes
        .filter_map(|node| match &node.op {
            Op::Call { callee, layers, stride, .. } => {
                let name = &module.functions[*callee].name;
                Some(format!("{name} {}..{} +{stride}", layers.start, layers.end))
            }
            Op::Input(_) | Op::Param(_) => None,
            op => Some(op.name().to_owned()),
        })
        .collect()
}

#[test]
fn each_layer_gathers_for_the_next_and_the_last_for_nobody() {
    let (module, notes) = prefetched(LAYER, CALL, 1);
    assert_eq!(shown(&module, "main"), ["layer.gather 0..1 +0", "layer.first 0..2 +0", "layer.last 2..3 +0"]);
    assert_eq!(shown(&module, "layer.first"), ["layer.shards 1..2 +1", "all_gather", "silu", "mul"]);
    assert_eq!(shown(&module, "layer.last"), ["silu", "mul"]);
    assert!(module.function("layer").is_none(), "no call remains");
    assert_eq!(notes, ["`prefetch`: `@layer`: 1 of 1 message of weights gathered during the previous layer"]);
}

#[test]
fn a_weight_is_gathered_ahead_along_all_its_axes() {
    let twice = LAYER.replace("a@u", "a@(u,v)").replace(
        "%g = all_gather %w {axis=u, dim=a}",
        "%half = all_gather %w {axis=v, dim=a} : f32[a@u b]\n%g = all_gather %half {axis=u, dim=a}",
    );
    let (module, notes) = prefetched(&twice, CALL, 1);
    assert_eq!(
        shown(&module, "layer.first"),
        ["layer.shards 1..2 +1", "all_gather", "all_gather", "silu", "mul"]
    );
    assert_eq!(shown(&module, "layer.gather"), ["all_gather", "all_gather"]);
    assert_eq!(shown(&module, "layer.last"), ["silu", "mul"]);
    let id = module.function("layer.last").unwrap();
    assert_eq!(module.functions[id].params.len(), 2, "what lies between the gathers is not handed on");
    assert_eq!(
        notes,
        ["`prefetch`: `@layer`: 2 of 2 messages of weights gathered during the previous layer"]
    );
}

#[test]
fn within_a_layer_a_gather_starts_before_what_does_not_need_it() {
    let late = LAYER
        .replace("%h = silu %x : f32[a b]\n", "")
        .replace("%g = all", "%h = silu %x : f32[a b]\n%g = all");
    let (module, _) = prefetched(&late, CALL, 0);
    assert_eq!(shown(&module, "main"), ["layer 0..3 +0"]);
    assert_eq!(shown(&module, "layer"), ["all_gather", "silu", "mul"]);
}

#[test]
fn a_stack_that_is_returned_stays_whole() {
    let nodes = LAYER.replace("return %y", "return %y, %x");
    let call = "%y, %s = call %x {callee=@layer, layers=0..3, over=l, carried=1} : f32[a b], f32[l a b]\n\
                return y = %y, s = %s\n";
    let (module, notes) = prefetched(&nodes, call, 1);
    assert_eq!(shown(&module, "main"), ["layer 0..3 +0"]);
    let why = "`prefetch`: weights of `@layer` are gathered within a layer only: `@main` returns a stack of layers `l`";
    assert_eq!(notes, [why]);
}

#[test]
fn what_is_computed_is_no_weight() {
    let nodes = "%g = all_gather %z {axis=u, dim=a} : f32[a b]\n%y = mul %x, %g : f32[a b]\nreturn %y\n";
    let nodes = format!("%z = slice %x {{axis=u, dim=a}} : f32[a@u b]\n{nodes}");
    let (module, notes) = prefetched(&nodes, CALL, 1);
    assert_eq!(shown(&module, "layer"), ["slice", "all_gather", "mul"]);
    assert_eq!(notes, ["`prefetch` has no effect: no weights are gathered; `--zero 3` shards them"]);
}
