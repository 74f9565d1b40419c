//! Steps as lines of Mermaid.

use std::fmt::Write as _;

use ithaca_ir::{AxisId, Mesh, Module, Rank};

use super::load::Load;
use super::mesh::{Arrow, Arrows, Drawn, Ends, coordinates};
use super::step::{Phase, Step};

/// The most kinds of operations in a line of a note.
const OPS_IN_A_LINE: usize = 4;

/// The diagram.
pub(super) fn diagram(
    module: &Module,
    drawn: &Drawn,
    load: &Load,
    steps: &[(Phase, Step)],
    note: Option<&str>,
) -> String {
    let mesh = &module.space.mesh;
    let mut lines = Lines { out: String::new(), depth: 1, over: drawn.ends() };
    // A JSON string is a YAML string.
    let ranks = if drawn.n_ranks == 1 { "one rank".to_owned() } else { format!("{} ranks", drawn.n_ranks) };
    let at = if mesh.axes.is_empty() { String::new() } else { format!(" ({mesh})") };
    let title = serde_json::Value::from(format!("{} on {ranks}{at}", module.name));
    let _ = write!(lines.out, "---\ntitle: {title}\n---\nsequenceDiagram\n");
    participants(&mut lines, mesh, drawn);
    if let Some(note) = note {
        lines.note(&[note.to_owned()]);
    }
    lines.section(Phase::Load, |lines| {
        let inputs = load.inputs.iter().map(|(name, ty)| format!("{name}: {ty}"));
        let memory = [(load.weights, "of weights"), (load.states, "of gradients and optimizer states")];
        let memory =
            memory.iter().filter(|(n, _)| *n > 0).map(|&(n, of)| format!("{} {of} per rank", bytes(n)));
        let loaded: Vec<String> = memory.chain(inputs).collect();
        if !loaded.is_empty() {
            lines.note(&loaded);
        }
    });
    lines.steps(steps, None);
    lines.out
}

/// The ranks, in boxes by their coordinates along all axes but the last.
fn participants(lines: &mut Lines, mesh: &Mesh, drawn: &Drawn) {
    let axes: Vec<AxisId> = mesh.axes.ids().collect();
    let boxed = axes.len() > 1;
    for (name, ranks) in drawn.groups(mesh) {
        if boxed {
            lines.line(&format!("box {}", escaped(&name)));
            lines.depth += 1;
        }
        for rank in ranks {
            let at = axes.last().map(|&last| coordinates(mesh, &[last], rank)).unwrap_or_default();
            let at = if at.is_empty() { at } else { format!("<br/>{}", escaped(&at)) };
            lines.line(&format!("participant r{rank} as rank {rank}{at}"));
        }
        if boxed {
            lines.depth -= 1;
            lines.line("end");
        }
    }
    let n_drawn = drawn.ranks.len() as u64;
    if n_drawn < drawn.n_ranks {
        lines.note(&[format!("{n_drawn} of {} ranks are drawn; the others do alike", drawn.n_ranks)]);
    }
}

/// `r0,r3`: the participants of a note.
fn span(over: Option<Ends>) -> String {
    match over {
        Some(Ends { first, last }) if first != last => format!("r{first},r{last}"),
        over => format!("r{}", over.map_or(Rank(0), |ends| ends.first)),
    }
}

/// The text written so far.
struct Lines {
    out: String,
    depth: usize,
    /// All ranks that are drawn.
    over: Option<Ends>,
}

impl Lines {
    fn line(&mut self, text: &str) {
        let _ = writeln!(self.out, "{:1$}{text}", "", 4 * self.depth);
    }

    /// A note over all ranks, of several lines.
    fn note(&mut self, text: &[String]) {
        self.note_over(self.over, text);
    }

    /// A note over some ranks.
    fn note_over(&mut self, over: Option<Ends>, text: &[String]) {
        let text: Vec<String> = text.iter().map(|line| escaped(line)).collect();
        self.line(&format!("Note over {}: {}", span(over), text.join("<br/>")));
    }

    /// A block with an `end`.
    fn block(&mut self, head: &str, body: impl FnOnce(&mut Self)) {
        self.line(head);
        self.depth += 1;
        body(self);
        self.depth -= 1;
        self.line("end");
    }

    /// A coloured part of the diagram.
    fn section(&mut self, phase: Phase, body: impl FnOnce(&mut Self)) {
        self.block(&format!("rect {}", colour(phase)), |lines| {
            lines.note(&[phase.title().to_uppercase()]);
            body(lines);
        });
    }

    /// Steps, in a section for each phase that is not `inside` already.
    fn steps(&mut self, steps: &[(Phase, Step)], inside: Option<Phase>) {
        let is_mixed = |step: &Step| matches!(step, Step::Call { phase: None, .. });
        let alike = |a: &(Phase, Step), b: &(Phase, Step)| a.0 == b.0 && is_mixed(&a.1) == is_mixed(&b.1);
        for run in steps.chunk_by(alike) {
            let (phase, first) = &run[0];
            let body = |lines: &mut Self| run.iter().for_each(|(phase, step)| lines.step(*phase, step));
            if inside == Some(*phase) || is_mixed(first) {
                body(self);
            } else {
                self.section(*phase, body);
            }
        }
    }

    fn step(&mut self, phase: Phase, step: &Step) {
        match step {
            Step::Local { ops, over } => self.note_over(Some(*over), &local(ops)),
            Step::Exchange { kind, axis, count, bytes, arrows } => {
                self.exchange(&exchange(kind, axis, *count, *bytes), arrows);
            }
            Step::Again { times, steps } => {
                self.block(&format!("loop {times} times"), |lines| lines.steps(steps, Some(phase)));
            }
            Step::Call { name, over, stage, layers, phase: _, steps } if steps.is_empty() => {
                let on = stage.as_ref().map_or_else(String::new, |stage| format!(" on {stage}"));
                let times = if *layers == 1 { String::new() } else { format!("{layers} × ") };
                self.note_over(Some(*over), &[format!("{times}@{name}{on}, as above")]);
            }
            Step::Call { name, over, stage: _, layers: 1, phase: Some(_), steps } => match steps.as_slice() {
                [(_, Step::Local { ops, over: _ }), rest @ ..] => {
                    let title = format!("@{name}");
                    self.note_over(Some(*over), &[vec![title], local(ops)].concat());
                    self.steps(rest, Some(phase));
                }
                _ => {
                    self.note_over(Some(*over), &[format!("@{name}")]);
                    self.steps(steps, Some(phase));
                }
            },
            Step::Call { layers: 1, phase: None, steps, .. } => self.steps(steps, None),
            Step::Call { name, over: _, stage, layers, phase, steps } => {
                let what = if phase.is_some() { "layers" } else { "times" };
                let on = stage.as_ref().map_or_else(String::new, |stage| format!(" on {}", escaped(stage)));
                let head = format!("loop {layers} {what}: @{}{on}", escaped(name));
                self.block(&head, |lines| lines.steps(steps, *phase));
            }
        }
    }

    /// A collective: an arrow for each group or each pair of neighbours.
    fn exchange(&mut self, lines: &[String], arrows: &Arrows) {
        let title: Vec<String> = lines.iter().map(|line| escaped(line)).collect();
        let title = title.join("<br/>");
        if arrows.shown.is_empty() {
            // Its ranks are not drawn.
            self.line(&format!("Note over {}: {title}", span(self.over)));
        }
        for (i, arrow) in arrows.shown.iter().enumerate() {
            let last = i + 1 == arrows.shown.len();
            let text = match (i, last && arrows.more > 0) {
                (0, false) => title.clone(),
                (0, true) => format!("{title}<br/>and {} more like it", arrows.more),
                (_, false) => "the same".to_owned(),
                (_, true) => format!("the same, and {} more like it", arrows.more),
            };
            match arrow {
                Arrow::Among(from, to) if from == to => self.line(&format!("Note over r{from}: {text}")),
                Arrow::Among(from, to) => self.line(&format!("r{from}<<->>r{to}: {text}")),
                Arrow::To(from, to) => self.line(&format!("r{from}->>r{to}: {text}")),
            }
        }
    }
}

/// `all_to_all over ulysses`, and its bytes.
fn exchange(kind: &str, axis: &str, count: u64, sent: u64) -> Vec<String> {
    let times = if count > 1 { format!("{count} × ") } else { String::new() };
    vec![format!("{times}{kind} over {axis}"), format!("{} sent per rank", bytes(sent))]
}

/// `3 einsum, 2 rotary`, a few in a line.
fn local(ops: &[(&'static str, u64)]) -> Vec<String> {
    let one = |&(name, n): &(&str, u64)| if n > 1 { format!("{n} {name}") } else { name.to_owned() };
    let lines = ops.chunks(OPS_IN_A_LINE);
    lines.map(|ops| ops.iter().map(one).collect::<Vec<_>>().join(", ")).collect()
}

fn colour(phase: Phase) -> &'static str {
    match phase {
        Phase::Load => "rgb(240, 240, 240)",
        Phase::Forward => "rgb(226, 240, 255)",
        Phase::Backward => "rgb(255, 236, 217)",
        Phase::Update => "rgb(228, 246, 228)",
    }
}

/// `168.00 MiB`, in the largest unit below; whole bytes below one KiB. Readers compare messages of a few MiB, which
/// [`ithaca_ir::units::bytes`] would round to hundredths of a GiB.
fn bytes(n: u64) -> String {
    const UNITS: [(u64, &str); 4] = [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match UNITS.iter().find(|(size, _)| n >= *size) {
        Some(&(size, unit)) => format!("{:.2} {unit}", n as f64 / size as f64),
        None => format!("{n} B"),
    }
}

/// Text with the special characters of Mermaid replaced by codes.
fn escaped(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '#' | ';' | '%' | '<' | '>' | '&' | '"' | '\\' => {
                let _ = write!(out, "#{};", u32::from(c));
            }
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}
