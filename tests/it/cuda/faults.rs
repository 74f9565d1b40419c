//! The runtime on devices when something goes wrong: a rank that fails, hangs, or loses its communicator ends the run, and
//! the error names it and its task. On the host, where streams can be held as on a GPU, and on a NCCL of its own, which
//! does in the background what NCCL does there.

use std::cell::Cell;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use ithaca_ir::Rank;
use ithaca_ir::schedule::{Schedule, Stream, Work};
use ithaca_ir::verify::verify;
use ithaca_kernels::RunError;
use ithaca_kernels::cpu::{self, Fault, FaultKind, LookForNan};
use ithaca_kernels::cuda::collectives::{CollectiveFailure, Collectives, Exchange, InProcess, Library, Nccl};
use ithaca_kernels::cuda::{self, CudaError, Device, Host, Options};
use ithaca_kernels::store::{RandomTensors, TensorSource, Tensors};
use ithaca_kernels::tensor::Tensor;
use ithaca_passes::compile::compile;
use ithaca_passes::fuse::{Fusion, Messages};
use ithaca_passes::import::Workload;
use ithaca_passes::lower::lower;
use ithaca_passes::pass::Volume;
use ithaca_passes::shard::ShardOptions;

use super::device::single;
use super::distributed::module;
use super::{can_run, compiler, root};

/// Far longer than any of these runs takes, and far shorter than for ever.
const LONG: Duration = Duration::from_secs(60);

/// The limit that shows that no rank hung.
const NOT_FOR_EVER: Duration = Duration::from_secs(200);

/// A model on four ranks along two axes.
fn model() -> (Schedule, RandomTensors) {
    let whole = super::module(&root().join("tests/goldens/llama-gqa"), &Workload::prefill(1, 8));
    let options = super::options("ulysses+megatron-tp", &[("ulysses", "2"), ("tp", "2")]);
    let schedule = compile(&whole, &options, &Volume).unwrap().schedule;
    (schedule, RandomTensors::of_module(&whole, 5))
}

fn run(
    schedule: &Schedule,
    host: &Host,
    collectives: &dyn Collectives,
    sources: &dyn TensorSource,
    options: &Options,
) -> Result<cpu::Execution, RunError> {
    let begun = Instant::now();
    let result = cuda::execute_on(schedule, host, collectives, (sources, sources), options);
    assert!(begun.elapsed() < NOT_FOR_EVER, "it took {:?}", begun.elapsed());
    result
}

fn in_process(
    schedule: &Schedule,
    sources: &dyn TensorSource,
    options: &Options,
) -> Result<cpu::Execution, RunError> {
    let host = Host::new(single());
    let collectives = InProcess::new(&host, schedule.space.mesh.ranks()).unwrap();
    run(schedule, &host, &collectives, sources, options)
}

/// A task of a kind in a frame of layers.
fn task_of(schedule: &Schedule, is: impl Fn(&Work) -> bool) -> usize {
    let block = schedule.frames.values().find(|frame| frame.name == "block").unwrap();
    block.tasks.iter().position(|task| is(&task.work)).unwrap()
}

fn fault(rank: u64, task: usize, kind: FaultKind, timeout: Duration) -> Options {
    let fault = Fault { rank: Rank(rank), frame: "block".to_owned(), task, layer: Some(1), kind };
    Options { fault: Some(fault), timeout: Some(timeout), ..Options::default() }
}

#[test]
fn a_rank_that_fails_ends_all_and_is_named() {
    if !can_run() {
        return;
    }
    let (schedule, sources) = model();
    for (kind, says) in [(FaultKind::Error, "a fault was requested"), (FaultKind::Panic, "panicked: a fault")]
    {
        for task in [0, task_of(&schedule, |work| matches!(work, Work::Exchange(_)))] {
            match in_process(&schedule, &sources, &fault(2, task, kind, LONG)) {
                Err(RunError::Rank { rank: 2, frame, layer: 1, task: at, cause, .. }) => {
                    assert_eq!((frame.as_str(), at), ("block", task));
                    assert!(cause.to_string().starts_with(says), "{cause}");
                }
                other => panic!("expected the fault of rank 2, not {other:?}"),
            }
        }
    }
    let refused = in_process(&schedule, &sources, &fault(9, 0, FaultKind::Error, LONG)).unwrap_err();
    assert!(matches!(refused, RunError::NoSuchTask(_)), "{refused}");
}

#[test]
fn a_rank_that_hangs_is_waited_for_as_long_as_allowed() {
    if !can_run() {
        return;
    }
    let (schedule, sources) = model();
    let soon = Duration::from_millis(200);
    let exchange = task_of(&schedule, |work| matches!(work, Work::Exchange(_)));
    for task in [0, exchange] {
        match in_process(&schedule, &sources, &fault(1, task, FaultKind::Hang, soon)) {
            Err(RunError::Rank { rank: 1, frame, layer: 1, task: at, cause, .. }) => {
                assert_eq!((frame.as_str(), at), ("block", task));
                match *cause {
                    RunError::Cuda(CudaError::Timeout { waited, waiting }) => {
                        assert!(waited >= soon);
                        // Whoever shares an axis with it has come to the collective.
                        assert_eq!(waiting.is_empty(), task != exchange, "{waiting:?}");
                    }
                    other => panic!("{other}"),
                }
            }
            other => panic!("expected that rank 1 is late, not {other:?}"),
        }
    }
    let for_ever = Options { timeout: None, ..fault(1, 0, FaultKind::Hang, soon) };
    let refused = in_process(&schedule, &sources, &for_ever).unwrap_err().to_string();
    assert!(refused.contains("timeout"), "{refused}");
}

/// Collectives of which one fails in the background, after some looks.
struct Failing<'d> {
    inner: InProcess<'d>,
    looks: Cell<u32>,
    is_aborted: Cell<bool>,
}

impl Collectives for Failing<'_> {
    unsafe fn exchange(&self, exchange: &Exchange) -> Result<(), CollectiveFailure> {
        // SAFETY: the caller vouches for the memory.
        unsafe { self.inner.exchange(exchange) }
    }

    fn check(&self) -> Result<(), CollectiveFailure> {
        match self.looks.get() {
            0 => Err(CollectiveFailure {
                rank: Rank(3),
                error: CudaError::Failed { call: "NCCL", detail: "the link is down".to_owned() },
            }),
            n => {
                self.looks.set(n - 1);
                self.inner.check()
            }
        }
    }

    fn abort(&self) {
        self.is_aborted.set(true);
        self.inner.abort();
    }
}

#[test]
fn a_communicator_that_fails_while_ranks_wait_ends_all() {
    if !can_run() {
        return;
    }
    let (schedule, sources) = model();
    let exchange = task_of(&schedule, |work| matches!(work, Work::Exchange(_)));
    let host = Host::new(single());
    let inner = InProcess::new(&host, 4).unwrap();
    // While rank 0 hangs, so that the others wait.
    let failing = Failing { inner, looks: Cell::new(50), is_aborted: Cell::new(false) };
    let error =
        run(&schedule, &host, &failing, &sources, &fault(0, exchange, FaultKind::Hang, LONG)).unwrap_err();
    assert!(failing.is_aborted.get());
    match error {
        RunError::Rank { rank: 3, cause, .. } => {
            assert!(cause.to_string().contains("the link is down"), "{cause}")
        }
        other => panic!("expected the communicator of rank 3, not {other}"),
    }
}

#[test]
fn the_first_task_that_writes_nan_is_named_when_asked() {
    if !can_run() {
        return;
    }
    let text = "%x = input {name=\"x\"} : f32[k@u l]\n%a = tanh %x : f32[k@u l]\n%b = silu %a : f32[k@u l]\n\
                %p = all_gather %b {axis=u, dim=k} : f32[k l]\nreturn p = %p\n";
    let text = format!(
        "ithaca 1 per_rank\nmodel \"m\"\nmesh u=2\ndim k = 4\ndim l = 2\n\nfunc @main() {{\n{text}}}\n"
    );
    let whole = module(&text);
    let schedule = lower(verify(&whole).unwrap()).unwrap();
    let mut data = vec![1.0; 8];
    data[5] = f64::NAN;
    data[7] = f64::INFINITY;
    let tensors: Tensors = [("x", Tensor::new(vec![4, 2], data))].into_iter().collect();
    let look = Options { look_for_nan: LookForNan::Writes, ..Options::default() };
    let names = cuda::kernels_of(&schedule, &look).unwrap();
    assert!(
        names.contains("find_nan")
            && !cuda::kernels_of(&schedule, &Options::default()).unwrap().contains("find_nan")
    );
    let quiet = in_process(&schedule, &tensors, &Options::default()).unwrap();
    assert!(quiet.outputs["p"].data.iter().any(|x| x.is_nan()));
    match in_process(&schedule, &tensors, &look) {
        // Rank 1 has the second half.
        Err(RunError::Rank { rank: 1, task: 0, work, cause, .. }) => {
            assert_eq!(work, "tanh");
            assert!(cause.to_string().ends_with("at [2, 1]"), "{cause}");
        }
        other => panic!("expected NaN of rank 1, not {other:?}"),
    }
    // Memory that no task wrote is NaN too, and is not searched: wires, padding, tensors in wires.
    let (schedule, sources) = model();
    in_process(&schedule, &sources, &look).unwrap();
    for (golden, axis, messages) in [
        ("llama-gqa", "ulysses", Messages::Packed),
        ("llama-gqa", "ulysses", Messages::Chunked(2)),
        ("mixtral", "ulysses", Messages::Packed),
        ("mistral-swa", "ring", Messages::Packed),
    ] {
        let whole = super::module(&root().join("tests/goldens").join(golden), &Workload::prefill(1, 8));
        let fusion = Fusion { messages, ..Fusion::NONE }.folded();
        let options = ShardOptions { fusion, ..super::options(axis, &[(axis, "2")]) };
        let schedule = compile(&whole, &options, &Volume).unwrap().schedule;
        let sources = RandomTensors::of_module(&whole, 5);
        in_process(&schedule, &sources, &look).unwrap_or_else(|e| panic!("{golden} {axis}: {e}"));
    }
}

/// A substitute of NCCL, compiled with these faults.
fn nccl(directory: &tempfile::TempDir, wrong: &[&str]) -> Library {
    let path: PathBuf = directory.path().join(format!("libnccl{}.so", wrong.join("")));
    let run = Command::new(compiler())
        .args(["-std=c++17", "-O1", "-shared", "-fPIC"])
        .args(wrong.iter().map(|what| format!("-D{what}")))
        .arg("-o")
        .arg(&path)
        .arg(root().join("tests/cuda/host/libnccl.cpp"))
        .output()
        .unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    Library::open_first(&[&path.to_string_lossy()]).unwrap()
}

#[test]
fn nccl_gives_what_collectives_in_process_give() {
    if !can_run() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let library = nccl(&directory, &[]);
    let whole = super::module(&root().join("tests/goldens/llama-gqa"), &Workload::prefill(1, 8));
    let sources = RandomTensors::of_module(&whole, 5);
    for (strategy, axes) in [
        ("ulysses+megatron-tp", &[("ulysses", "2"), ("tp", "2")][..]),
        ("ring+megatron-tp-sp", &[("ring", "2"), ("tp", "2")]),
        ("ulysses", &[("ulysses", "3"), ("heads", "uneven"), ("sequence", "pad")]),
    ] {
        let schedule = compile(&whole, &super::options(strategy, axes), &Volume).unwrap().schedule;
        let expected = in_process(&schedule, &sources, &Options::default()).unwrap();
        let host = Host::new(single());
        let devices = schedule.space.mesh.iter_ranks().map(|_| &host as &dyn Device).collect();
        let nccl = Nccl::join(library.clone(), &schedule, devices, Some(LONG)).unwrap();
        let found = run(&schedule, &host, &nccl, &sources, &Options::default()).unwrap();
        assert_eq!(found.traffic, expected.traffic, "{strategy}");
        for (name, expected) in &expected.outputs {
            let distance =
                super::device::distance(&found.outputs[name].map(f64::from), &expected.map(f64::from));
            assert!(distance < 1e-6, "{strategy}: {name} is {distance:.1e} off");
        }
    }
}

#[test]
fn a_rank_that_does_not_come_into_a_communicator_is_not_waited_for_for_ever() {
    if !can_run() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (schedule, sources) = model();
    let soon = Some(Duration::from_millis(100));
    for (wrong, says) in
        [("ABSENT_RANK=2", "communicator of all ranks"), ("ABSENT_PART=0", "along `ulysses`")]
    {
        let library = nccl(&directory, &[wrong]);
        let host = Host::new(single());
        let devices = schedule.space.mesh.iter_ranks().map(|_| &host as &dyn Device).collect();
        let begun = Instant::now();
        let Err(error) = Nccl::join(library, &schedule, devices, soon) else { panic!("{wrong}: all came") };
        assert!(begun.elapsed() < NOT_FOR_EVER);
        assert!(
            matches!(&error, CudaError::NotJoined { cause, .. } if matches!(**cause, CudaError::Timeout { .. }))
        );
        assert!(error.to_string().contains(says), "{wrong}: {error}");
    }
    // One that fails in the background ends the run where it is used next.
    let library = nccl(&directory, &["BROKEN_RANK=1", "BROKEN_AFTER=5"]);
    let host = Host::new(single());
    let devices = schedule.space.mesh.iter_ranks().map(|_| &host as &dyn Device).collect();
    let nccl = Nccl::join(library, &schedule, devices, Some(LONG)).unwrap();
    match run(&schedule, &host, &nccl, &sources, &Options { timeout: Some(LONG), ..Options::default() }) {
        Err(RunError::Rank { rank: 1, cause, .. }) => {
            assert!(cause.to_string().contains("ncclSystemError"), "{cause}");
        }
        other => panic!("expected the communicator of rank 1, not {other:?}"),
    }
    // Nothing is exchanged any more.
    assert!(run(&schedule, &host, &nccl, &sources, &Options::default()).is_err());
}

/// Both streams of a rank are watched, whatever is issued to them.
#[test]
fn a_long_run_stays_within_what_streams_may_have_ahead() {
    if !can_run() {
        return;
    }
    let (schedule, sources) = model();
    let streams: Vec<Stream> =
        schedule.frames.values().flat_map(|f| f.tasks.iter().map(|t| t.stream)).collect();
    assert!([Stream::Compute, Stream::Comm].iter().all(|stream| streams.contains(stream)));
    let timed = Options { clock: cuda::Clock::EachTask, timeout: Some(LONG), ..Options::default() };
    let execution = in_process(&schedule, &sources, &timed).unwrap();
    assert!(execution.timings.rows().iter().all(|(_, timing)| timing.count > 0));
}
