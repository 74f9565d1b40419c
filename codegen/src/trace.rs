//! Timelines in the trace event format of Chrome and Perfetto: a process for each rank, a thread for each stream.
//!
//! Format: Trace Event Format, "complete" events (`ph` = `X`), times in microseconds. Beside them, in `otherData`, what the
//! timeline says of each rank: seconds, the part of them in which each stream is busy, and each collective with what of it
//! no kernel covers.

use std::collections::BTreeSet;

use ithaca_ir::schedule::Stream;
use ithaca_ir::timeline::{self, Collective, Span, Summary};
use serde_json::{Value, json};

/// The timeline as JSON, an event on each line, in order of ranks, streams and time. `source` says where the times come
/// from, as `simulated` or `measured`.
pub fn emit(source: &str, spans: &[Span]) -> String {
    let mut sorted: Vec<&Span> = spans.iter().collect();
    sorted.sort_by(|a, b| {
        (a.rank, a.stream)
            .cmp(&(b.rank, b.stream))
            .then(a.start.total_cmp(&b.start))
            .then(a.task.cmp(&b.task))
    });
    let ranks: BTreeSet<_> = spans.iter().map(|s| s.rank).collect();
    let mut events = Vec::new();
    for rank in ranks {
        let name = json!({ "name": format!("rank {} ({source})", rank.0) });
        events.push(json!({ "ph": "M", "name": "process_name", "pid": rank.0, "args": name }));
        let order = json!({ "sort_index": rank.0 });
        events.push(json!({ "ph": "M", "name": "process_sort_index", "pid": rank.0, "args": order }));
        for stream in Stream::ALL {
            let args = json!({ "name": stream.name() });
            events.push(
                json!({ "ph": "M", "name": "thread_name", "pid": rank.0, "tid": thread(stream), "args": args }),
            );
        }
    }
    events.extend(sorted.into_iter().map(event));
    let lines: Vec<String> = events.iter().map(Value::to_string).collect();
    let ranks: Vec<String> = timeline::summaries(spans).iter().map(|s| summary(s).to_string()).collect();
    let other = format!("{{\"source\":{},\"ranks\":[\n{}\n]}}", json!(source), ranks.join(",\n"));
    let events = lines.join(",\n");
    format!("{{\"displayTimeUnit\":\"ms\",\"otherData\":{other},\"traceEvents\":[\n{events}\n]}}\n")
}

fn summary(of: &Summary) -> Value {
    let Summary { rank, seconds, compute, comm, collectives } = of;
    let part = |busy: f64| if *seconds > 0.0 { busy / seconds } else { 0.0 };
    let row = |Collective { frame, name, count, seconds, exposed }: &Collective| json!({ "frame": frame, "name": name, "count": count, "seconds": seconds, "exposed_seconds": exposed });
    let collectives: Vec<Value> = collectives.iter().map(row).collect();
    json!({
        "rank": rank.0,
        "seconds": seconds,
        "occupancy": { "compute": part(*compute), "comm": part(*comm) },
        "collectives": collectives,
    })
}

fn thread(stream: Stream) -> usize {
    match stream {
        Stream::Compute => 0,
        Stream::Comm => 1,
    }
}

fn event(span: &Span) -> Value {
    let Span { rank, stream, frame, layer, task, name, kind, start, end } = span;
    json!({
        "ph": "X",
        "name": name,
        "cat": kind,
        "pid": rank.0,
        "tid": thread(*stream),
        "ts": start * 1e6,
        "dur": (end - start) * 1e6,
        "args": { "frame": frame, "layer": layer, "task": task },
    })
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
}
