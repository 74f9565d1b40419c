//! Two streams: they overlap, and events order them.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex};
use std::time::Duration;

use ithaca_ir::Rank;
use ithaca_ir::entity::Entity;
use ithaca_ir::schedule::{EventId, Schedule, Stream, Work};

use super::super::{Communicator, Job, Mailboxes, Trace};
use super::coalesced::module;
use super::{Options, execute, layered, lower};
use crate::error::RunError;
use crate::store::RandomTensors;

/// Every collective on the stream of communication, with an event before and after it.
pub(super) fn in_two_streams(mut schedule: Schedule) -> Schedule {
    let ids: Vec<_> = schedule.frames.ids().collect();
    for id in ids {
        let frame = &mut schedule.frames[id];
        let mut last = None;
        for i in 0..frame.tasks.len() {
            if let Work::Exchange(_) = frame.tasks[i].work {
                frame.tasks[i].stream = Stream::Comm;
            }
            let stream = frame.tasks[i].stream;
            if let Some(before) = last.filter(|&b: &usize| frame.tasks[b].stream != stream) {
                let event = EventId::new(frame.n_events);
                frame.n_events += 1;
                frame.tasks[before].records = Some(event);
                frame.tasks[i].waits.push(event);
            }
            last = Some(i);
        }
    }
    schedule
}

/// A gather of `x`, and two kernels that have nothing to do with it, issued after it.
fn gather_and_kernels() -> (Schedule, RandomTensors) {
    let module = module(
        "%x = input {name=\"x\"} : f32[k@u l]\n%y = input {name=\"y\"} : f32[k@u l]\n\
         %a = silu %y : f32[k@u l]\n%b = silu %a : f32[k@u l]\n\
         %p = all_gather %x {axis=u, dim=k} : f32[k l]\nreturn p = %p, b = %b\n",
    );
    let mut schedule = lower(&module);
    let main = schedule.main().unwrap();
    let frame = &mut schedule.frames[main];
    let exchange = frame.tasks.remove(2);
    assert!(matches!(exchange.work, Work::Exchange(_)));
    frame.tasks.insert(0, exchange);
    frame.tasks[0].stream = Stream::Comm;
    frame.tasks[0].records = Some(EventId::new(0));
    frame.tasks[3].waits = vec![EventId::new(0)];
    frame.n_events = 1;
    let tensors = RandomTensors::of_module(&module, 5);
    (schedule, tensors)
}

/// Mailboxes that delay the blocks of a rank until its other stream has begun a number of tasks.
struct Gate {
    inner: Mailboxes,
    tasks: usize,
    begun: Mutex<BTreeMap<String, usize>>,
    wake: Condvar,
}

impl Communicator for Gate {
    fn send(&self, stream: Stream, from: Rank, to: Rank, block: Vec<f32>) -> Result<(), RunError> {
        let begun = self.begun.lock().unwrap();
        let few = |begun: &mut BTreeMap<String, usize>| {
            begun.get(&format!("rank {}", from.0)).is_none_or(|&n| n < self.tasks)
        };
        // It comes at once, or never.
        let (begun, waited) = self.wake.wait_timeout_while(begun, Duration::from_secs(60), few).unwrap();
        drop(begun);
        if waited.timed_out() {
            Err(RunError::invalid("no kernel ran while the collective did"))
        } else {
            self.inner.send(stream, from, to, block)
        }
    }

    fn receive(&self, stream: Stream, to: Rank, from: Rank) -> Result<Vec<f32>, RunError> {
        self.inner.receive(stream, to, from)
    }

    fn check(&self) -> Result<(), RunError> {
        let name = std::thread::current().name().unwrap_or_default().to_owned();
        *self.begun.lock().unwrap().entry(name).or_default() += 1;
        self.wake.notify_all();
        self.inner.check()
    }

    fn finish(&self, rank: Rank) {
        self.inner.finish(rank);
    }

    fn fail(&self, rank: Rank, error: &RunError) {
        self.inner.fail(rank, error);
    }
}

#[test]
fn kernels_run_while_a_collective_does() {
    let (schedule, tensors) = gather_and_kernels();
    let expected = execute(&schedule, &tensors, &tensors, &Options::default()).unwrap();
    let ranks: Vec<Rank> = schedule.space.mesh.iter_ranks().collect();
    let run = |tasks| {
        let job = Job::of(&schedule).unwrap();
        let loaded = job.load(&ranks, &tensors, &tensors, &Options::default()).unwrap();
        let inner = Mailboxes::new(ranks.len() as u64, 1, None);
        let gate = Gate { inner, tasks, begun: Mutex::default(), wake: Condvar::new() };
        let parts = loaded.run(&gate)?;
        job.assemble(&parts, &tensors, 0)
    };
    // The second kernel begins when the first has ended.
    assert_eq!(run(2).unwrap().outputs, expected.outputs);
}

#[test]
fn streams_change_no_bit() {
    let module = layered();
    let tensors = RandomTensors::of_module(&module, 7);
    let (one, two) = (lower(&module), in_two_streams(lower(&module)));
    if let Err(d) = ithaca_ir::schedule::verify(&two) {
        panic!("{d:?}");
    }
    let [one, two] = [one, two].map(|s| execute(&s, &tensors, &tensors, &Options::default()).unwrap());
    assert_eq!(one.outputs, two.outputs);
    assert_eq!((one.traffic, one.peaks), (two.traffic, two.peaks));
}

#[test]
fn an_event_that_is_missing_is_found_whatever_the_streams_do() {
    let (good, tensors) = gather_and_kernels();
    let main = good.main().unwrap();
    for _ in 0..20 {
        let mut schedule = good.clone();
        schedule.frames[main].tasks[3].waits.clear();
        let error = execute(&schedule, &tensors, &tensors, &Options::default()).unwrap_err().to_string();
        assert!(error.contains("all_gather") && error.contains("nothing orders the two"), "{error}");
        assert!(error.contains("task 0 ") && error.contains("task 3 "), "{error}");
    }
}

#[test]
fn events_that_never_happen_are_errors() {
    let (good, tensors) = gather_and_kernels();
    let main = good.main().unwrap();
    let fails = |change: &dyn Fn(&mut ithaca_ir::schedule::Frame)| {
        let mut schedule = good.clone();
        change(&mut schedule.frames[main]);
        execute(&schedule, &tensors, &tensors, &Options::default()).unwrap_err().to_string()
    };
    // The gather waits for the last kernel, which waits for the gather.
    let error = fails(&|frame| {
        frame.n_events = 2;
        frame.tasks[3].records = Some(EventId::new(1));
        frame.tasks[0].waits = vec![EventId::new(1)];
    });
    assert!(error.contains("task 0 of `main`") && error.contains("which task 3 (unpack"), "{error}");
    let error = fails(&|frame| frame.tasks[0].records = None);
    assert!(error.contains("which no task before it records"), "{error}");
    let error = fails(&|frame| frame.tasks[2].waits = vec![EventId::new(9)]);
    assert!(error.contains("which no task before it records"), "{error}");
    let error = fails(&|frame| frame.tasks[2].records = Some(EventId::new(9)));
    assert!(error.contains("an event that is not declared"), "{error}");
}

#[test]
fn spans_have_every_task_on_its_stream() {
    let module = layered();
    let tensors = RandomTensors::of_module(&module, 7);
    let schedule = in_two_streams(lower(&module));
    let options = Options { trace: Trace::Spans, ..Options::default() };
    let execution = execute(&schedule, &tensors, &tensors, &options).unwrap();
    let counted: u64 = execution.timings.rows().iter().map(|(_, timing)| timing.count).sum();
    // The permute of `main`, on each of four ranks, leads to the place that it comes from.
    assert_eq!(execution.spans.len() as u64, counted - 4);
    for span in &execution.spans {
        let frame = schedule.frames.values().find(|frame| frame.name == span.frame).unwrap();
        assert_eq!(frame.tasks[span.task].stream, span.stream);
        assert!(0.0 <= span.start && span.start <= span.end);
        assert!(span.layer < 3 && span.rank.0 < 4);
    }
    let along = |rank, stream| {
        let own = execution.spans.iter().filter(move |s| s.rank == Rank(rank) && s.stream == stream);
        own.collect::<Vec<_>>()
    };
    for (rank, stream) in (0..4).flat_map(|rank| [Stream::Compute, Stream::Comm].map(|stream| (rank, stream)))
    {
        let own = along(rank, stream);
        assert!(!own.is_empty() && own.windows(2).all(|w| w[0].end <= w[1].start), "{rank} {stream}");
    }
    let execution = execute(&schedule, &tensors, &tensors, &Options::default()).unwrap();
    assert!(execution.spans.is_empty());
}
