//! Timelines in the trace event format of Chrome and Perfetto: a process for each rank, a thread for each stream.
//!
//! Format: Trace Event Format, "complete" events (`ph` = `X`), times in microseconds. `otherData` has a summary of each
//! rank: seconds, the occupancy of each stream, and the time and exposed time of each collective.

use std::collections::BTreeSet;

use ithaca_ir::schedule::Stream;
use ithaca_ir::timeline::{self, Collective, Span, Summary};
use serde_json::{Value, json};

/// The timeline as JSON, an event on each line, in order of ranks, streams and time. `source` says where the times come
/// from, as `simulated` or `measured`.
pub fn emit(source: &str, spans: &[Span]) -> String {
    emit_steps(source, &[spans.to_vec()])
}

/// As [`emit`], of several steps, one after another. With more than one step, each task has the number of its step,
/// from 1, and each rank has a thread `steps` with the times of the steps.
pub fn emit_steps(source: &str, steps: &[Vec<Span>]) -> String {
    let mut begun = 0.0;
    let mut numbered: Vec<(u64, Span)> = Vec::new();
    let mut lengths: Vec<(f64, f64)> = Vec::new();
    for (number, spans) in (1..).zip(steps) {
        let later = |span: &Span| Span { start: begun + span.start, end: begun + span.end, ..span.clone() };
        let end = spans.iter().map(|span| begun + span.end).fold(begun, f64::max);
        numbered.extend(spans.iter().map(|span| (number, later(span))));
        lengths.push((begun, end));
        begun = end;
    }
    let is_one = steps.len() <= 1;
    numbered.sort_by(|(_, a), (_, b)| {
        (a.rank, a.stream)
            .cmp(&(b.rank, b.stream))
            .then(a.start.total_cmp(&b.start))
            .then(a.task.cmp(&b.task))
    });
    let ranks: BTreeSet<_> = numbered.iter().map(|(_, span)| span.rank).collect();
    let mut events = Vec::new();
    for rank in ranks {
        let name = json!({ "name": format!("rank {} ({source})", rank.0) });
        events.push(json!({ "ph": "M", "name": "process_name", "pid": rank.0, "args": name }));
        let order = json!({ "sort_index": rank.0 });
        events.push(json!({ "ph": "M", "name": "process_sort_index", "pid": rank.0, "args": order }));
        let is_used = |stream: Stream| {
            let usual = matches!(stream, Stream::Compute | Stream::Comm);
            usual || numbered.iter().any(|(_, span)| span.rank == rank && span.stream == stream)
        };
        let streams = Stream::ALL.into_iter().filter(|&stream| is_used(stream));
        let threads = streams
            .map(|stream| (stream as usize, stream.name()))
            .chain((!is_one).then_some((STEPS, "steps")));
        for (thread, name) in threads {
            let args = json!({ "name": name });
            events.push(
                json!({ "ph": "M", "name": "thread_name", "pid": rank.0, "tid": thread, "args": args }),
            );
        }
        let step = |(number, (start, end)): (u64, &(f64, f64))| {
            json!({
                "ph": "X",
                "name": format!("step {number}"),
                "cat": "step",
                "pid": rank.0,
                "tid": STEPS,
                "ts": start * 1e6,
                "dur": (end - start) * 1e6,
            })
        };
        events.extend((1..).zip(&lengths).map(step).filter(|_| !is_one));
    }
    let numbered = numbered.iter();
    events.extend(numbered.clone().map(|(step, span)| event(span, (!is_one).then_some(*step))));
    let spans: Vec<Span> = numbered.map(|(_, span)| span.clone()).collect();
    let lines: Vec<String> = events.iter().map(Value::to_string).collect();
    let ranks: Vec<String> = timeline::summaries(&spans).iter().map(|s| summary(s).to_string()).collect();
    let other = format!("{{\"source\":{},\"ranks\":[\n{}\n]}}", json!(source), ranks.join(",\n"));
    let events = lines.join(",\n");
    format!("{{\"displayTimeUnit\":\"ms\",\"otherData\":{other},\"traceEvents\":[\n{events}\n]}}\n")
}

/// The thread of the steps, after those of the streams.
const STEPS: usize = Stream::COUNT;

fn summary(of: &Summary) -> Value {
    let Summary { rank, seconds, compute, streams, collectives } = of;
    let part = |busy: f64| if *seconds > 0.0 { busy / seconds } else { 0.0 };
    let row = |Collective { frame, name, count, seconds, exposed }: &Collective| json!({ "frame": frame, "name": name, "count": count, "seconds": seconds, "exposed_seconds": exposed });
    let collectives: Vec<Value> = collectives.iter().map(row).collect();
    let mut occupancy = json!({ "compute": part(*compute), "comm": 0.0 });
    streams.iter().for_each(|(stream, busy)| occupancy[stream.name()] = json!(part(*busy)));
    json!({
        "rank": rank.0,
        "seconds": seconds,
        "occupancy": occupancy,
        "collectives": collectives,
    })
}

fn event(span: &Span, step: Option<u64>) -> Value {
    let Span { rank, stream, frame, layer, task, name, kind, start, end } = span;
    let mut event = json!({
        "ph": "X",
        "name": name,
        "cat": kind,
        "pid": rank.0,
        "tid": *stream as usize,
        "ts": start * 1e6,
        "dur": (end - start) * 1e6,
        "args": { "frame": frame, "layer": layer, "task": task },
    });
    if let Some(step) = step {
        event["args"]["step"] = json!(step);
    }
    event
}

#[cfg(test)]
mod tests {
    use super::*;
    use ithaca_ir::Rank;

    fn span(rank: u32, stream: Stream, start: f64, end: f64) -> Span {
        let (frame, name) = ("block".to_owned(), "attention $o".to_owned());
        Span { rank: Rank(rank.into()), stream, frame, layer: 3, task: 7, name, kind: "compute", start, end }
    }

    #[test]
    fn a_rank_is_a_process_and_a_stream_a_thread() {
        let spans = [span(1, Stream::Comm, 2e-6, 5e-6), span(0, Stream::Compute, 0.0, 1e-6)];
        let trace: Value = serde_json::from_str(&emit("simulated", &spans)).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let runs: Vec<&Value> = events.iter().filter(|e| e["ph"] == "X").collect();
        assert_eq!(runs.len(), 2);
        assert_eq!((&runs[0]["pid"], &runs[0]["tid"]), (&json!(0), &json!(0)));
        assert_eq!((&runs[1]["pid"], &runs[1]["tid"]), (&json!(1), &json!(1)));
        assert_eq!(runs[1]["ts"].as_f64().unwrap().round(), 2.0);
        assert_eq!(runs[1]["dur"].as_f64().unwrap().round(), 3.0);
        assert_eq!(runs[1]["args"]["layer"], json!(3));
        let ranks = trace["otherData"]["ranks"].as_array().unwrap();
        assert_eq!((&ranks[0]["rank"], &ranks[0]["occupancy"]["compute"]), (&json!(0), &json!(1.0)));
        assert_eq!(ranks[1]["collectives"][0]["name"], json!("attention $o"));
        let names = events.iter().filter(|e| e["name"] == "process_name");
        assert_eq!(names.count(), 2);
    }

    #[test]
    fn steps_are_told_apart() {
        let step = vec![span(0, Stream::Compute, 0.0, 1e-6), span(0, Stream::Comm, 1e-6, 4e-6)];
        let trace: Value = serde_json::from_str(&emit_steps("measured", &[step.clone(), step])).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let rows = |tid: u64| -> Vec<(f64, Value)> {
            let rows = events.iter().filter(|e| e["ph"] == "X" && e["tid"] == json!(tid));
            rows.map(|e| (e["ts"].as_f64().unwrap().round(), e["args"]["step"].clone())).collect()
        };
        assert_eq!(rows(0), [(0.0, json!(1)), (4.0, json!(2))]);
        assert_eq!(rows(1), [(1.0, json!(1)), (5.0, json!(2))]);
        let steps: Vec<&Value> = events.iter().filter(|e| e["cat"] == "step").map(|e| &e["name"]).collect();
        assert_eq!(steps, ["step 1", "step 2"]);
    }
}
