//! Timelines in the trace event format of Chrome and Perfetto: a process for each rank, a thread for each stream.
//!
//! Format: Trace Event Format, "complete" events (`ph` = `X`), times in microseconds. `otherData` has a summary of each
//! rank: seconds, the occupancy of each stream, and the time and exposed time of each collective. Ranks that do alike are one process,
//! whose name says how many they are. Runs that a timeline folds are one event of the category `folded`, with their number and
//! seconds; `left_out` then says what is not listed.

use ithaca_ir::Rank;
use ithaca_ir::schedule::Stream;
use ithaca_ir::timeline::{self, Collective, Fold, Span, Summary, Timeline};
use serde_json::{Value, json};

/// The timeline as JSON, an event on each line, in order of ranks, streams and time. `source` says where the times come
/// from, as `simulated` or `measured`.
pub fn emit(source: &str, timeline: &Timeline) -> String {
    let mut trace = Trace::new(source);
    for alike in &timeline.ranks {
        let rank = alike.first;
        let spans: Vec<&Span> = timeline.spans.iter().filter(|span| span.rank == rank).collect();
        let folds: Vec<&Fold> = timeline.folds.iter().filter(|fold| fold.rank == rank).collect();
        let is_listed = !spans.is_empty() || !folds.is_empty();
        trace.summary(&shortened(&alike.summary, if is_listed { ROWS } else { 0 }), alike.ranks);
        if !is_listed {
            continue;
        }
        let used: Vec<Stream> =
            spans.iter().map(|span| span.stream).chain(folds.iter().map(|f| f.stream)).collect();
        trace.process(rank, alike.ranks, &used, None);
        let spans = spans.into_iter().map(|span| (span.stream, span.start, event(span, None)));
        let folds = folds.into_iter().map(|fold| (fold.stream, fold.start, folded(fold)));
        trace.events(spans.chain(folds).collect());
    }
    trace.finish(timeline.left_out())
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
    let spans: Vec<Span> = numbered.iter().map(|(_, span)| span.clone()).collect();
    let mut trace = Trace::new(source);
    for summary in timeline::summaries(&spans) {
        let own = || numbered.iter().filter(|(_, span)| span.rank == summary.rank);
        let used: Vec<Stream> = own().map(|(_, span)| span.stream).collect();
        trace.process(summary.rank, 1, &used, (!is_one).then_some(&lengths));
        trace.summary(&summary, 1);
        let event =
            |(step, span): &(u64, Span)| (span.stream, span.start, event(span, (!is_one).then_some(*step)));
        trace.events(own().map(event).collect());
    }
    trace.finish(None)
}

/// Collectives of a rank in its summary, at most; a ring of thousands has one for each step.
const ROWS: usize = 256;

/// A summary with so many collectives, the most exposed ones, and the others as one.
fn shortened(summary: &Summary, most: usize) -> Summary {
    let mut short = summary.clone();
    if short.collectives.len() > most {
        short.collectives.sort_by(|a, b| {
            (b.exposed, b.seconds).partial_cmp(&(a.exposed, a.seconds)).expect("times are numbers")
        });
        let rest = short.collectives.split_off(most);
        short.collectives.push(Collective {
            frame: String::new(),
            name: format!("{} others", rest.len()),
            count: rest.iter().map(|one| one.count).sum(),
            seconds: rest.iter().map(|one| one.seconds).sum(),
            exposed: rest.iter().map(|one| one.exposed).sum(),
        });
    }
    short
}

/// A trace in the making.
struct Trace<'a> {
    source: &'a str,
    names: Vec<String>,
    events: Vec<String>,
    ranks: Vec<String>,
}

impl<'a> Trace<'a> {
    fn new(source: &'a str) -> Self {
        Self { source, names: Vec::new(), events: Vec::new(), ranks: Vec::new() }
    }

    /// A simulated rank with the number of ranks that it represents, the streams that it uses and the times of its steps.
    fn process(&mut self, rank: Rank, ranks: u64, used: &[Stream], steps: Option<&Vec<(f64, f64)>>) {
        let alike = if ranks > 1 { format!(" and {} like it", ranks - 1) } else { String::new() };
        let name = json!({ "name": format!("rank {}{alike} ({})", rank.0, self.source) });
        let order = json!({ "sort_index": rank.0 });
        let mut meta = |what: &str, args: &Value| {
            let event = json!({ "ph": "M", "name": what, "pid": rank.0, "args": args });
            self.names.push(event.to_string());
        };
        meta("process_name", &name);
        meta("process_sort_index", &order);
        let is_used =
            |stream: &Stream| matches!(stream, Stream::Compute | Stream::Comm) || used.contains(stream);
        let streams = Stream::ALL.into_iter().filter(is_used).map(|stream| (stream as usize, stream.name()));
        for (thread, name) in streams.chain(steps.map(|_| (STEPS, "steps"))) {
            let args = json!({ "name": name });
            let event =
                json!({ "ph": "M", "name": "thread_name", "pid": rank.0, "tid": thread, "args": args });
            self.names.push(event.to_string());
        }
        let step = |(number, (start, end)): (u64, &(f64, f64))| {
            let event = json!({
                "ph": "X",
                "name": format!("step {number}"),
                "cat": "step",
                "pid": rank.0,
                "tid": STEPS,
                "ts": start * 1e6,
                "dur": (end - start) * 1e6,
            });
            event.to_string()
        };
        self.names.extend((1..).zip(steps.into_iter().flatten()).map(step));
    }

    /// The events of a rank, in any order.
    fn events(&mut self, mut events: Vec<(Stream, f64, Value)>) {
        events.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
        self.events.extend(events.iter().map(|(.., event)| event.to_string()));
    }

    fn summary(&mut self, of: &Summary, alike: u64) {
        let mut summary = summary(of);
        if alike > 1 {
            summary["ranks_alike"] = json!(alike);
        }
        self.ranks.push(summary.to_string());
    }

    fn finish(self, left_out: Option<String>) -> String {
        let Self { source, names, events, ranks } = self;
        let left_out = left_out.map(|text| format!("\"left_out\":{},", json!(text))).unwrap_or_default();
        let ranks = ranks.join(",\n");
        let other = format!("{{\"source\":{},{left_out}\"ranks\":[\n{ranks}\n]}}", json!(source));
        let events = [names, events].concat().join(",\n");
        format!("{{\"displayTimeUnit\":\"ms\",\"otherData\":{other},\"traceEvents\":[\n{events}\n]}}\n")
    }
}

/// Runs that are not listed one by one.
fn folded(fold: &Fold) -> Value {
    let Fold { rank, stream, name, runs, start, end, busy, exposed } = fold;
    json!({
        "ph": "X",
        "name": name,
        "cat": "folded",
        "pid": rank.0,
        "tid": *stream as usize,
        "ts": start * 1e6,
        "dur": (end - start) * 1e6,
        "args": { "runs": runs, "busy_seconds": busy, "exposed_seconds": exposed },
    })
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
        let trace: Value = serde_json::from_str(&emit("simulated", &Timeline::of(spans.to_vec()))).unwrap();
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
