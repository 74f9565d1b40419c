//! One rank fails: the others stop, and the error names the rank and task.

use std::time::Duration;

use ithaca_ir::Rank;
use ithaca_ir::schedule::{Schedule, Stream, Work};

use super::super::{Fault, FaultKind, LookForNan, NoSuchTask};
use super::coalesced::module;
use super::streams::in_two_streams;
use super::{Options, execute, layered, lower};
use crate::error::RunError;
use crate::store::{RandomTensors, Tensors};
use crate::tensor::Tensor;

fn schedule() -> (Schedule, RandomTensors) {
    let module = layered();
    let tensors = RandomTensors::of_module(&module, 7);
    (in_two_streams(lower(&module)), tensors)
}

fn fault(rank: u64, frame: &str, (task, layer): (usize, Option<u64>), kind: FaultKind) -> Options {
    let fault = Fault { rank: Rank(rank), frame: frame.to_owned(), task, layer, kind };
    Options { fault: Some(fault), timeout: Some(Duration::from_secs(60)), ..Options::default() }
}

#[test]
fn a_fault_stops_all_and_is_named() {
    let (schedule, tensors) = schedule();
    let block = schedule.frames.values().next().unwrap();
    let first = |stream| block.tasks.iter().position(|task| task.stream == stream).unwrap();
    for (kind, says) in [(FaultKind::Error, "a fault was requested"), (FaultKind::Panic, "panicked: a fault")]
    {
        for stream in [Stream::Compute, Stream::Comm] {
            let at = first(stream);
            let options = fault(2, "block", (at, Some(1)), kind);
            match execute(&schedule, &tensors, &tensors, &options) {
                Err(RunError::Rank { rank: 2, frame, layer: 1, task, cause, .. }) => {
                    assert_eq!((frame.as_str(), task), ("block", at));
                    assert!(cause.to_string().starts_with(says), "{cause}");
                }
                other => panic!("expected the fault of rank 2, not {other:?}"),
            }
        }
    }
    // Without a layer it is the first; a call is a task as well.
    let call = schedule.frames.values().last().unwrap();
    let call = call.tasks.iter().position(|task| matches!(task.work, Work::Call { .. })).unwrap();
    for (frame, task) in [("block", 0), ("main", call)] {
        let error = execute(&schedule, &tensors, &tensors, &fault(3, frame, (task, None), FaultKind::Error));
        let error = error.unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("rank 3 failed at task {task} of `{frame}` at layer 0")),
            "{error}"
        );
    }
}

#[test]
fn who_waits_for_a_rank_that_hangs_gives_up() {
    let (schedule, tensors) = schedule();
    for task in [0, 5] {
        let hang = fault(1, "block", (task, Some(2)), FaultKind::Hang);
        let options = Options { timeout: Some(Duration::from_millis(300)), ..hang };
        let error = execute(&schedule, &tensors, &tensors, &options).unwrap_err().to_string();
        // Its group waits for it, and theirs for them.
        assert!(error.contains("waits for rank") && error.contains("longer than the timeout"), "{error}");
        assert!(error.contains("of `block` at layer 2"), "{error}");
    }
    let options = Options { timeout: None, ..fault(1, "block", (0, None), FaultKind::Hang) };
    let error = execute(&schedule, &tensors, &tensors, &options).unwrap_err().to_string();
    assert!(error.contains("timeout"), "{error}");
}

#[test]
fn a_place_that_is_none_is_refused_with_those_there_are() {
    let (schedule, tensors) = schedule();
    let refused = |options: Options| match execute(&schedule, &tensors, &tensors, &options) {
        Err(RunError::NoSuchTask(refusal)) => refusal.to_string(),
        other => panic!("expected a refusal, not {other:?}"),
    };
    let kind = FaultKind::Error;
    assert_eq!(refused(fault(4, "block", (0, None), kind)), "there is no rank 4: ranks are 0 to 3");
    let expected = "there is no frame `blok`: there are block, main";
    assert_eq!(refused(fault(0, "blok", (0, None), kind)), expected);
    assert!(
        refused(fault(0, "block", (99, None), kind)).starts_with("frame `block` has no task 99: it has ")
    );
    assert!(refused(fault(0, "block", (0, Some(3)), kind)).ends_with("it does for layers 0..3"));
    let nowhere = NoSuchTask::Elsewhere { rank: 0, frame: "main".to_owned(), task: 3, layers: Vec::new() };
    assert_eq!(nowhere.to_string(), "rank 0 does not run task 3 of `main`, which belongs to another stage");
}

#[test]
fn the_first_task_that_writes_nan_is_named_when_asked() {
    let module = module(
        "%x = input {name=\"x\"} : f32[k@u l]\n%a = tanh %x : f32[k@u l]\n%b = silu %a : f32[k@u l]\n\
         %p = all_gather %b {axis=u, dim=k} : f32[k l]\nreturn p = %p\n",
    );
    let mut data = vec![1.0; 8];
    data[5] = f64::NAN;
    data[7] = f64::INFINITY;
    let tensors: Tensors = [("x", Tensor::new(vec![4, 2], data))].into_iter().collect();
    let schedule = in_two_streams(lower(&module));
    let buffer = &schedule.frames.values().last().unwrap().tasks[0].writes[0];
    let buffer = schedule.frames.values().last().unwrap().buffers[*buffer].name.clone();
    let quiet = execute(&schedule, &tensors, &tensors, &Options::default()).unwrap();
    assert!(quiet.outputs["p"].data.iter().any(|x| x.is_nan()));
    let options = Options { look_for_nan: LookForNan::Writes, ..Options::default() };
    match execute(&schedule, &tensors, &tensors, &options) {
        // Ranks 2 and 3, at 1 along `u`, have the second half.
        Err(RunError::Rank { rank: 2 | 3, task: 0, work, cause, .. }) => {
            assert_eq!(work, "tanh");
            assert_eq!(cause.to_string(), format!("it writes NaN to `${buffer}` at [2, 1]"));
        }
        other => panic!("expected NaN of rank 2 or 3, not {other:?}"),
    }
}
