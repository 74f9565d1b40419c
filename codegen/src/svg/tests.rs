use ithaca_ir::{Module, text};

use super::layers::Slot;
use super::{emit, layers, order, place};
use crate::dot;

fn module() -> Module {
    let source = "ithaca 1 per_rank\nmodel \"a & <b>\"\nmesh u=2\ndim s = 8\ndim m = 4\n\nfunc @main() {\n  \
                  %x = input {name=\"x<y\"} : f32[s@u m]\n  %w = param {name=\"w\"} : f32[m]\n  \
                  %v1 = silu %x : f32[s@u m]\n  %v2 = gelu %x : f32[s@u m]\n  %v3 = mul %v1, %w : f32[s@u m]\n  \
                  %v4 = mul %v3, %v2 : f32[s@u m]\n  %v5 = add %v4, %x : f32[s@u m]\n  \
                  %v6 = all_gather %v5 {axis=u, dim=s} : f32[s m]\n  \
                  assign %w {target=state, name=\"grad.w\"}\n  return y = %v6\n}\n";
    text::parse(source).unwrap()
}

#[test]
fn names_and_types_are_text() {
    let picture = emit(&module());
    assert!(picture.contains(">a &amp; &lt;b&gt; on 2 ranks: u=2</text>"), "{picture}");
    assert!(picture.contains(">input x&lt;y</text>"), "{picture}");
    assert_eq!(picture, emit(&module()));
}

#[test]
fn what_communicates_and_what_lasts_stand_out() {
    let picture = emit(&module());
    let text = picture.lines().find(|l| l.contains("all_gather over u: join s")).unwrap();
    assert!(text.contains("class=\"communication\""), "{text}");
    let text = picture.lines().find(|l| l.contains("assign grad.w")).unwrap();
    assert!(text.contains("class=\"state\""), "{text}");
}

#[test]
fn edges_go_down_and_boxes_stand_apart() {
    let module = module();
    let graph = dot::dataflow(&module, module.functions.values().next().unwrap());
    let mut layers = layers::of_graph(&graph);
    let before = order::crossings(&layers);
    order::untangle(&mut layers);
    assert!(order::crossings(&layers) <= before);
    let placed = place::place(&graph, &layers);
    for (at, slots) in layers.slots.iter().enumerate() {
        for edge in &layers.edges[at] {
            assert!(slots.contains(&edge.0) && layers.slots[at + 1].contains(&edge.1), "{edge:?}");
        }
        let mut end = f64::MIN;
        for slot in slots {
            let half = match *slot {
                Slot::Vertex(v) => place::size(&graph, v).0 / 2.0,
                Slot::Passing(_) => 0.0,
            };
            let middle = placed.x[at][slot];
            assert!(middle - half > end, "{slot:?} in layer {at}");
            assert!(middle - half > -1e-6 && middle + half < placed.size.0 + 1e-6, "{slot:?}");
            end = middle + half;
        }
    }
}

#[test]
fn a_weight_stands_right_above_its_use() {
    let module = module();
    let graph = dot::dataflow(&module, module.functions.values().next().unwrap());
    let layers = layers::of_graph(&graph);
    let layer = |label: &str| {
        let holds = |slot: &Slot| matches!(*slot, Slot::Vertex(v) if graph[v].label.starts_with(label));
        layers.slots.iter().position(|slots| slots.iter().any(holds)).unwrap()
    };
    // The weight is used by the product in layer 2 and by the assignment.
    assert_eq!((layer("input"), layer("silu"), layer("mul")), (0, 1, 2));
    assert_eq!(layer("all_gather"), 5);
}
