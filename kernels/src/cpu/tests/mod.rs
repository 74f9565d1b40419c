//! Schedules against the oracle, and failures that must not hang.

mod attention;
mod coalesced;
mod distributed;
mod failures;
mod products;
mod streams;

use std::time::Duration;

use ithaca_ir::boxes::Side;
use ithaca_ir::entity::Entity;
use ithaca_ir::module::{Function, Output};
use ithaca_ir::ops::{Attention, AttentionDims, Binding, Direction, Pairs, Rotary, Scaling};
use ithaca_ir::schedule::{
    Buffer, BufferId, Content, Frame, FrameId, FrameOutput, Place, Schedule, Stream, Task, Transfer, Work,
    aligned,
};
use ithaca_ir::{
    Arena, DType, Dim, DimId, FunctionBuilder, Level, Mask, Mesh, Module, Op, TensorType, message, traffic,
};

use super::threads::Threads;
use super::{Options, execute, gemm};
use crate::error::RunError;
use crate::oracle::tests::{attention_op, module, noise, source, space, ulysses, ulysses_weights};
use crate::oracle::{Elements, Operand, ResultSpec, eval, run, run_ranks};
use crate::store::{RandomTensors, Tensors};
use crate::tensor::{Tensor, whole};

/// A schedule with a buffer for every value, every collective packed and unpacked: no cleverness to go wrong.
fn lower(module: &Module) -> Schedule {
    let mut schedule = Schedule {
        name: module.name.clone(),
        pipeline: vec![],
        space: module.space.clone(),
        frames: Arena::new(),
    };
    for (id, function) in module.functions.iter() {
        let frame = lower_function(module, function, Some(id) == module.main(), &schedule.frames);
        schedule.frames.push(frame);
    }
    schedule
}

fn lower_function(
    module: &Module,
    function: &Function,
    is_main: bool,
    callees: &Arena<FrameId, Frame>,
) -> Frame {
    let mut frame =
        Frame { name: function.name.clone(), n_arguments: function.params.len(), ..Frame::default() };
    let place = |frame: &mut Frame, content: Content, place: Option<Place>| {
        let buffer =
            Buffer { name: format!("b{}", frame.buffers.len()), content, place: Place::Frame(frame.bytes) };
        let bytes = aligned(buffer.bytes(&module.space));
        match place {
            Some(place) => frame.buffers.push(Buffer { place, ..buffer }),
            None => {
                frame.bytes += bytes;
                frame.buffers.push(buffer)
            }
        }
    };
    let mut of: Vec<BufferId> = Vec::new();
    for (value, definition) in function.values.iter() {
        let parameter = function.params.iter().position(|&p| p == value).map(Place::Argument);
        let source = function.nodes.iter().find(|n| n.results.contains(&value)).and_then(|n| match &n.op {
            Op::Param(b) => Some(Place::Weight(b.clone())),
            Op::Input(b) => Some(Place::Input(b.clone())),
            _ => None,
        });
        of.push(place(&mut frame, Content::Tensor(definition.ty.clone()), parameter.or(source)));
    }
    let task = |work: Work, reads: Vec<BufferId>, writes: Vec<BufferId>| Task {
        stream: Stream::Compute,
        work,
        reads,
        writes,
        waits: vec![],
        records: None,
    };
    for node in &function.nodes {
        let reads: Vec<BufferId> = node.operands.iter().map(|v| of[v.index()]).collect();
        let writes: Vec<BufferId> = node.results.iter().map(|v| of[v.index()]).collect();
        match &node.op {
            Op::Param(_) | Op::Input(_) => {}
            Op::Call { callee, layers, stride, scan, stage } => {
                let callee = FrameId::new(callee.index());
                let base = frame.bytes;
                frame.bytes += callees[callee].bytes;
                // Results of several layers have the place of the arguments, so arguments are copied there first.
                let mut arguments = reads.clone();
                for (i, (&read, &write)) in reads.iter().zip(&writes).enumerate() {
                    frame.tasks.push(task(Work::Copy, vec![read], vec![write]));
                    arguments[i] = write;
                }
                frame.tasks.push(task(
                    Work::Call {
                        callee,
                        layers: layers.clone(),
                        stride: *stride,
                        base,
                        scan: *scan,
                        stage: *stage,
                    },
                    arguments,
                    writes,
                ));
            }
            op if op.is_communication() => {
                let (operands, results) = (function.operand_types(node), function.result_types(node));
                let transfer = Transfer::of(message::parcels(op, &operands, &results)).unwrap();
                if transfer.is_direct() {
                    frame.tasks.push(task(Work::Exchange(transfer), reads, writes));
                    continue;
                }
                let wire = |frame: &mut Frame, side: Side| {
                    let elements = message::wire_elements(&module.space, transfer.parcels(), side);
                    place(frame, Content::Wire { dtype: transfer.first().from.dtype, elements }, None)
                };
                let fetches = matches!(op, Op::Fetch { .. } | Op::FetchSum { .. });
                let several = transfer.only().is_none();
                let packs =
                    several || fetches || matches!(op, Op::AllToAll { .. } | Op::ReduceScatter { .. });
                let unpacks = several || fetches || matches!(op, Op::AllToAll { .. } | Op::AllGather { .. });
                let (mut from, mut to) = (reads[0], writes[0]);
                if packs {
                    from = wire(&mut frame, Side::Sent);
                    frame.tasks.push(task(Work::Pack(transfer.clone()), reads.clone(), vec![from]));
                }
                if unpacks {
                    to = wire(&mut frame, Side::Received);
                }
                frame.tasks.push(task(Work::Exchange(transfer.clone()), vec![from], vec![to]));
                if unpacks {
                    frame.tasks.push(task(Work::Unpack(transfer.clone()), vec![to], writes.clone()));
                }
            }
            op => frame.tasks.push(task(Work::Compute(op.clone()), reads, writes)),
        }
    }
    for (i, output) in function.outputs.iter().enumerate() {
        let mut buffer = of[output.value.index()];
        if !is_main {
            let result = place(
                &mut frame,
                Content::Tensor(function.values[output.value].ty.clone()),
                Some(Place::Result(i)),
            );
            frame.tasks.push(task(Work::Copy, vec![buffer], vec![result]));
            buffer = result;
        }
        frame.outputs.push(FrameOutput { name: output.name.clone(), buffer });
    }
    frame
}

fn near(found: &Tensor<f32>, expected: &Tensor<f64>) {
    let verdict = crate::compare::tensors(found, expected);
    assert!(verdict.within(1e-5), "{verdict:?}");
}

#[test]
fn uneven_ulysses_gives_the_whole_and_sends_what_was_foretold() {
    let weights = ulysses_weights();
    let expected = run::<f64>(&ulysses(Level::Program), &weights, &weights).unwrap();
    let per_rank = ulysses(Level::PerRank);
    let execution = execute(&lower(&per_rank), &weights, &weights, &Options::default()).unwrap();
    near(&execution.outputs["out"], &expected["out"]);
    assert_eq!(execution.traffic, traffic::of_module(&per_rank));
    assert!(execution.traffic.iter().any(|t| t.kind == "all_to_all" && t.count == 3));
}

/// Two axes, layers, an embedding split over its rows, bf16 types, positions, sums, slices and a permute.
fn layered() -> Module {
    let mut space = space(&[("v", 6), ("m", 4), ("f", 8), ("h", 2), ("d", 2)]);
    let s = space.dims.push(Dim { uneven: true, ..Dim::new("s", 7) });
    space.mesh = Mesh::new([("a", 2), ("t", 2)]);
    let [v, m, f, h, d] = ["v", "m", "f", "h", "d"].map(|n| space.dim(n).unwrap());
    let [a, t] = ["a", "t"].map(|n| space.mesh.axis(n).unwrap());
    let x_ty = TensorType::new(DType::BF16, [s, m]).split(s, [a]);
    let mut functions = Arena::new();

    let mut b = FunctionBuilder::new("block", &space, &functions);
    let x = b.param(x_ty.clone(), None);
    let positions = b.param(TensorType::new(DType::I32, [s]).split(s, [a]), None);
    let norm = source(&mut b, "norm.{layer}", DType::BF16, &[m]);
    let y = b.push(Op::RmsNorm { over: m, eps: 1e-5, offset: 0.0 }, &[x, norm]).unwrap();
    let q = b.weight(Binding::named("q.{layer}"), TensorType::new(DType::BF16, [h, d, m])).unwrap();
    let q = b.einsum(y, q, &[s, h, d]).unwrap();
    let rotary = Rotary {
        over: d,
        width: 2,
        theta: 10.0,
        scaling: Scaling::None,
        turn: Direction::Forward,
        pairs: Pairs::default(),
    };
    let q = b.push(Op::Rotary(rotary), &[q, positions]).unwrap();
    let q = b.push(Op::all_to_all(a, h, s), &[q]).unwrap();
    let dims = AttentionDims { heads: h, kv_heads: h, queries: s, keys: s, width: d };
    let op = Attention::new(dims, Mask::Window { left: Some(3), right: Some(0) }, 0.5);
    let o = b.push(Op::Attention(op), &[q, q, q]).unwrap();
    let o = b.push(Op::all_to_all(a, s, h), &[o]).unwrap();
    let w = source(&mut b, "o.{layer}", DType::BF16, &[h, d, m]);
    let o = b.einsum(o, w, &[s, m]).unwrap();
    let x = b.add(x, o).unwrap();
    let up =
        b.weight(Binding::named("up.{layer}"), TensorType::new(DType::BF16, [m, f]).split(f, [t])).unwrap();
    let up = b.einsum(x, up, &[s, f]).unwrap();
    let up = b.push(Op::Unary(ithaca_ir::ops::Unary::Silu), &[up]).unwrap();
    let down =
        b.weight(Binding::named("down.{layer}"), TensorType::new(DType::BF16, [f, m]).split(f, [t])).unwrap();
    let y = b.einsum(up, down, &[s, m]).unwrap();
    let y = b.push(Op::AllReduce { axis: t.into() }, &[y]).unwrap();
    let x = b.add(x, y).unwrap();
    let block = b.finish([Output { name: None, value: x }]);
    let block = functions.push(block);

    let mut b = FunctionBuilder::new("main", &space, &functions);
    let ids = TensorType::new(DType::I32, [s]).split(s, [a]);
    let ids = b.push_as(Op::Input(Binding::named("ids")), &[], ids).unwrap();
    let positions =
        b.push_as(Op::Positions { padding: 0 }, &[], TensorType::new(DType::I32, [s]).split(s, [a])).unwrap();
    let table =
        b.weight(Binding::named("table"), TensorType::new(DType::BF16, [v, m]).split(v, [t])).unwrap();
    let x = b.push(Op::Embed { over: v, padding: None }, &[table, ids]).unwrap();
    let x = b.push(Op::AllReduce { axis: t.into() }, &[x]).unwrap();
    let x = b.call(block, 0..3, &[x, positions]).unwrap()[0];
    let head = source(&mut b, "table", DType::BF16, &[v, m]);
    let y = b.einsum(x, head, &[s, v]).unwrap();
    let y = b.push(Op::Slice { axis: t, dim: v }, &[y]).unwrap();
    let turned = TensorType::new(DType::BF16, [s, v]).split(s, [a]).split(v, [t]);
    let y = b.push_as(Op::Permute, &[y], turned).unwrap();
    let main = b.finish([
        Output { name: Some("out".into()), value: y },
        Output { name: Some("ids".into()), value: ids },
    ]);
    functions.push(main);
    Module { level: Level::PerRank, name: "layered".into(), pipeline: vec![], space, functions }
}

#[test]
fn layers_on_two_axes_agree_with_the_oracle() {
    let module = layered();
    let tensors = RandomTensors::of_module(&module, 7);
    let expected = run_ranks::<f64>(&module, &tensors, &tensors).unwrap();
    let execution = execute(&lower(&module), &tensors, &tensors, &Options::default()).unwrap();
    near(&execution.outputs["out"], &expected["out"]);
    near(&execution.outputs["ids"], &expected["ids"]);
    assert_eq!(execution.traffic, traffic::of_module(&module));
    assert!(expected["out"].data.iter().all(|x| x.abs() < 100.0), "random weights keep values finite");
}

#[test]
fn too_much_memory_is_refused_with_the_bytes() {
    let weights = ulysses_weights();
    let schedule = lower(&ulysses(Level::PerRank));
    let options = Options { memory_limit: 1000, ..Options::default() };
    match execute(&schedule, &weights, &weights, &options) {
        Err(RunError::Memory { needed, limit: 1000, ranks: 2, .. }) => assert!(needed > 1000),
        other => panic!("expected a refusal, not {other:?}"),
    }
}

#[test]
fn one_failing_rank_stops_all_and_is_named() {
    let module = layered();
    let random = RandomTensors::of_module(&module, 7);
    // The last token is on ranks 2 and 3 only; it is outside the table.
    let ids: Tensors =
        [("ids", Tensor::new(vec![7], vec![0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))].into_iter().collect();
    match execute(&lower(&module), &random, &ids, &Options::default()) {
        // Either may be the first to notice, and stops the other.
        Err(RunError::Rank { rank: 2 | 3, frame, work, cause, .. }) => {
            assert_eq!((frame.as_str(), work.as_str()), ("main", "embed"));
            assert!(matches!(*cause, RunError::TokenOutOfRange { value: 6, .. }));
        }
        other => panic!("expected a failure of rank 2 or 3, not {other:?}"),
    }
}

#[test]
fn broken_schedules_are_errors() {
    let weights = ulysses_weights();
    let good = lower(&ulysses(Level::PerRank));
    let options = Options { timeout: Some(Duration::from_secs(20)), ..Options::default() };
    let fails = |change: &dyn Fn(&mut Frame)| {
        let mut schedule = good.clone();
        let main = schedule.main().unwrap();
        change(&mut schedule.frames[main]);
        execute(&schedule, &weights, &weights, &options).unwrap_err().to_string()
    };
    let event = |frame: &mut Frame| {
        frame.n_events = 1;
        frame.tasks[2].waits.push(ithaca_ir::schedule::EventId::new(0));
    };
    assert!(fails(&event).contains("waits for event"), "{}", fails(&event));
    let unpacked = |frame: &mut Frame| {
        let exchange = frame.tasks.iter().position(|t| matches!(t.work, Work::Exchange(_))).unwrap();
        frame.tasks[exchange].reads = frame.tasks[exchange - 1].reads.clone();
    };
    assert!(fails(&unpacked).contains("must be packed"), "{}", fails(&unpacked));
    assert!(fails(&|frame| frame.bytes = 256).contains("not as large"));
}

/// Rows and terms of a ragged dimension that are zero are not multiplied, not even by infinity.
#[test]
fn products_leave_out_empty_rows() {
    let mut space = space(&[("e", 2), ("c", 4), ("m", 3), ("x", 2)]);
    let [e, c, m, x] = ["e", "c", "m", "x"].map(|name| space.dim(name).unwrap());
    space.dims[c].ragged = Some(2);
    let ty = |dims: [DimId; 3]| TensorType::new(DType::F32, dims);
    let product = |(a, of_a): (&TensorType, &[f32]), (b, of_b): (&TensorType, &[f32]), z: &TensorType| {
        let operand =
            |ty, data| Operand { ty, region: whole(&space.shape(ty)), elements: Elements::Real(data) };
        let (a, b, region) = (operand(a, of_a), operand(b, of_b), whole(&space.shape(z)));
        gemm::einsum(&space, (&a, &b), z, &region, Threads::ONE).unwrap()
    };
    // One row of the first expert is filled, and two of the second.
    let filled = [true, false, false, false, true, true, false, false];
    let rows = |width, empty: f32| -> Vec<f32> {
        filled.iter().flat_map(|&is| vec![if is { 1.0 } else { empty }; width]).collect()
    };
    let (slots, weights, done) = (ty([e, c, m]), ty([e, x, m]), ty([e, c, x]));
    let infinite = vec![f32::INFINITY; 2 * 2 * 3];
    assert_eq!(
        product((&slots, &rows(3, 0.0)), (&weights, &infinite), &done),
        rows(2, 0.0).iter().map(|&x| if x == 0.0 { 0.0 } else { f32::INFINITY }).collect::<Vec<_>>()
    );
    let gradient = product((&done, &rows(2, f32::NAN)), (&slots, &rows(3, 0.0)), &weights);
    assert_eq!(gradient, [vec![1.0; 6], vec![2.0; 6]].concat());
}

#[test]
fn products_of_every_shape_agree_with_plain_loops() {
    let space = space(&[("a", 2), ("b", 3), ("c", 4), ("d", 5), ("e", 1)]);
    let cases = [
        ("a b c", "d c", "a b d"),
        ("a b c", "c d", "d b a"),
        ("a b c", "b c d", "a d"),
        ("a b c", "c b d", "a d"),
        ("a b c", "a c d", "a b d"),
        ("c a b", "a c d", "b d a c"),
        ("a b", "c d", "c a d b"),
        ("a b c", "c", "a b"),
        ("a e", "d e", "d a"),
        ("a b", "c b", "c"),
        ("a", "c", "a"),
        ("a", "a", ""),
    ];
    for (x, y, z) in cases {
        let ty = |names: &str| {
            let dims: Vec<DimId> = names.split_whitespace().map(|n| space.dim(n).unwrap()).collect();
            TensorType::new(DType::F32, dims)
        };
        let (x, y, z) = (ty(x), ty(y), ty(z));
        let data = |ty: &TensorType, seed| -> Vec<f32> {
            let n: u64 = space.shape(ty).iter().product();
            noise(n as usize, seed).into_iter().map(|x| x as f32).collect()
        };
        let (xs, ys) = (data(&x, 1), data(&y, 2));
        let operand =
            |ty, data| Operand { ty, region: whole(&space.shape(ty)), elements: Elements::Real(data) };
        let operands = [operand(&x, &xs), operand(&y, &ys)];
        let region = whole(&space.shape(&z));
        let found = gemm::einsum(&space, (&operands[0], &operands[1]), &z, &region, Threads::ONE).unwrap();
        let wanted = [ResultSpec { ty: &z, region: region.clone() }];
        let expected = eval::eval(&space, &Op::Einsum, &operands, &wanted).unwrap().pop();
        let Some(crate::oracle::Value::Real(expected)) = expected else {
            panic!("einsum gives real numbers")
        };
        let verdict = crate::compare::tensors(&Tensor::new(expected.shape.clone(), found), &expected);
        assert!(verdict.within(1e-6), "{:?} {:?} -> {:?}: {verdict:?}", x.dims, y.dims, z.dims);
    }
}

#[test]
fn attention_in_blocks_agrees_with_plain_loops() {
    let mut space = space(&[("b", 2), ("t", 150), ("g", 2), ("d", 8)]);
    space.dims.push(Dim::new("s", 200));
    space.dims.push(Dim { granule: 2, ..Dim::new("h", 4) });
    let window = |left, right| Mask::Window { left, right };
    let masks = [
        Mask::Full,
        window(None, Some(0)),
        window(Some(9), Some(0)),
        window(None, Some(3)),
        window(Some(5), Some(70)),
        Mask::CausalAtEnd { queries: 200, keys: 150 },
        Mask::Any(vec![window(Some(9), Some(0)), Mask::Sinks(3)]),
        Mask::Any(vec![
            Mask::Global(2),
            Mask::Blocks { size: 16, rows: vec![vec![1, 2, 8], vec![], vec![4]] },
        ]),
        Mask::All(vec![
            window(None, Some(0)),
            Mask::Blocks { size: 48, rows: vec![vec![0], vec![], vec![0, 2]] },
        ]),
    ];
    let plain = masks.iter().map(|mask| attention_op(&space, "g", "t", mask.clone()));
    let Op::Attention(causal) = attention_op(&space, "g", "t", window(None, Some(0))) else { unreachable!() };
    let capped = Op::Attention(Attention { softcap: Some(0.8), ..causal });
    for op in plain.chain([capped]) {
        let module = |dtype| {
            let dims = |names: [&str; 4]| names.map(|n| space.dim(n).unwrap());
            let op = op.clone();
            module(Level::Program, space.clone(), |b| {
                let q = source(b, "q", dtype, &dims(["b", "s", "h", "d"]));
                let k = source(b, "k", dtype, &dims(["b", "t", "g", "d"]));
                let v = source(b, "v", dtype, &dims(["b", "t", "g", "d"]));
                b.push(op, &[q, k, v]).unwrap()
            })
        };
        let weights: Tensors = [
            ("q", Tensor::new(vec![2, 200, 4, 8], noise(12_800, 1))),
            ("k", Tensor::new(vec![2, 150, 2, 8], noise(4_800, 2))),
            ("v", Tensor::new(vec![2, 150, 2, 8], noise(4_800, 3))),
        ]
        .into_iter()
        .collect();
        let expected = run::<f64>(&module(DType::F64), &weights, &weights).unwrap();
        let execution =
            execute(&lower(&module(DType::F32)), &weights, &weights, &Options::default()).unwrap();
        near(&execution.outputs["out"], &expected["out"]);
    }
}
