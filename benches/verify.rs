//! How long the checks of a schedule take: training steps of a large model on many ranks, and frames of many tasks.

mod median;

use std::hint::black_box;
use std::path::Path;

use ithaca::ir::entity::{Arena, Entity};
use ithaca::ir::mesh::Mesh;
use ithaca::ir::schedule::{
    self, Buffer, BufferId, Content, EventId, Frame, FrameOutput, Place, Schedule, Stream, Task, Transfer,
    Work,
};
use ithaca::ir::{DType, Dim, Op, Space, TensorType, ops, verify};
use ithaca::passes::cluster::Cluster;
use ithaca::passes::compile::compile;
use ithaca::passes::differentiate::Training;
use ithaca::passes::import::{Mode, Workload, program};
use ithaca::passes::shard::{ShardOptions, Zero, parse_mesh};

/// Llama-3.1-405B, a training step, on up to 16 384 ranks.
fn models() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/llama-3.1-405b/config.json");
    let config = serde_json::from_str(&std::fs::read_to_string(path).expect("an example")).expect("JSON");
    let cluster = Cluster::named("dgx-h100").expect("a built-in profile");
    for (strategy, mesh, stages, micro_batches) in [
        ("data-parallel+ulysses+megatron-tp-sp", "dp=8,ulysses=16,tp=8", 1, 1),
        ("data-parallel+ring+megatron-tp-sp", "dp=16,ring=64,tp=8", 1, 1),
        ("data-parallel+ulysses+megatron-tp-sp", "dp=128,ulysses=16,tp=8", 1, 1),
        ("data-parallel+pipeline+megatron-tp-sp", "dp=128,pp=16,tp=8", 16, 32),
    ] {
        let training = Training { stages, micro_batches, ..Training::default() };
        let batch = 128 * micro_batches;
        let workload = Workload { mode: Mode::Train, training, ..Workload::prefill(batch, 131_072) };
        let module = program(&config, "llama-3.1-405b", &workload).expect("imports");
        let options = ShardOptions {
            zero: Zero::Parameters,
            ..ShardOptions::new(strategy, parse_mesh(mesh).expect("a mesh"))
        };
        let compiled = match compile(&module, &options, &cluster) {
            Ok(compiled) => compiled,
            Err(refusal) => panic!("{strategy} {mesh}: {}", refusal[0]),
        };
        let tasks: usize = compiled.schedule.frames.values().map(|frame| frame.tasks.len()).sum();
        let program = verify::verify(&compiled.per_rank).expect("compiled programs are sound");
        median::report(&format!("verify llama-3.1-405b training, {mesh}, {tasks} tasks"), || {
            schedule::verify(black_box(&compiled.schedule)).expect("sound");
            schedule::verify_meaning(&compiled.schedule, program).expect("the same");
        });
    }
}

/// Frames in which kernels and collectives take turns.
fn frames() {
    for n in [1_000, 10_000, 100_000] {
        let schedule = frame(n);
        median::report(&format!("verify {n} tasks"), || {
            schedule::verify(black_box(&schedule)).expect("sound");
        });
    }
}

/// A frame of `n` tasks in threes: a kernel, a gather of what it made, and a kernel on what was gathered, over sixteen
/// places in memory, on 16 384 ranks.
fn frame(n: usize) -> Schedule {
    let mut space = Space { mesh: Mesh::new([("dp", 2_048), ("x", 8)]), ..Space::default() };
    let s = space.dims.push(Dim::new("s", 512));
    let x = space.mesh.axis("x").expect("an axis");
    let (part, whole) = (TensorType::new(DType::F32, [s]).split(s, [x]), TensorType::new(DType::F32, [s]));
    let mut buffers: Arena<BufferId, Buffer> = Arena::new();
    let mut push = |name: String, ty: &TensorType, place: Place| {
        buffers.push(Buffer { name, content: Content::Tensor(ty.clone()), place })
    };
    let input = push("x".into(), &part, Place::Input(ops::Binding::named("x")));
    let mut tasks: Vec<Task> = Vec::new();
    let mut n_events = 0;
    let mut last = input;
    let task = |stream, work, reads: BufferId, writes| Task {
        stream,
        work,
        reads: vec![reads],
        writes: vec![writes],
        waits: Vec::new(),
        records: None,
    };
    let gather = Transfer::one(Op::AllGather { axis: x, dim: s }, part.clone(), whole.clone());
    for i in 0..n / 3 {
        let at = (i % 16) as u64 * 8192;
        let a = push(format!("a{i}"), &part, Place::Frame(at));
        let b = push(format!("b{i}"), &whole, Place::Frame(at + 2048));
        let c = push(format!("c{i}"), &whole, Place::Frame(at + 4096));
        let scale = || Work::Compute(Op::Scale { factor: 0.5 });
        let [made, gathered] = [EventId::new(n_events), EventId::new(n_events + 1)];
        n_events += 2;
        tasks.push(Task { records: Some(made), ..task(Stream::Compute, scale(), input, a) });
        let exchange = task(Stream::Comm, Work::Exchange(gather.clone()), a, b);
        tasks.push(Task { waits: vec![made], records: Some(gathered), ..exchange });
        tasks.push(Task { waits: vec![gathered], ..task(Stream::Compute, scale(), b, c) });
        last = c;
    }
    let outputs = vec![FrameOutput { name: Some("y".into()), buffer: last }];
    let main = Frame {
        name: "main".into(),
        outputs,
        buffers,
        tasks,
        n_events,
        bytes: 16 * 8192,
        ..Frame::default()
    };
    let frames = std::iter::once(main).collect();
    Schedule { name: "threes".into(), pipeline: Vec::new(), space, frames }
}

fn main() {
    models();
    frames();
}
