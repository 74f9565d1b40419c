//! Placed graphs as SVG.

use std::fmt::Write as _;

use ithaca_ir::Module;
use petgraph::graph::DiGraph;

use super::layers::{Layers, Slot};
use super::place::{self, LETTER, LINE, Placed};
use crate::dot::{Style, Vertex};

/// Pixels around everything.
const MARGIN: f64 = 24.0;

/// A function's picture.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Panel {
    title: String,
    body: String,
    size: (f64, f64),
}

/// The graph of a function, its top left corner at the origin.
pub(super) fn panel(title: &str, graph: &DiGraph<Vertex, String>, layers: &Layers, placed: &Placed) -> Panel {
    let mut body = String::new();
    for (at, edges) in layers.edges.iter().enumerate() {
        for &(from, to) in edges {
            let (start, end) = (placed.x[at][&from], placed.x[at + 1][&to]);
            let (top, height) = placed.y[at];
            let bottom = placed.y[at + 1].0;
            // A box is at the top of its layer. A passing value goes straight through.
            let leaves = match from {
                Slot::Vertex(v) => top + place::size(graph, v).1,
                Slot::Passing(_) => top + height,
            };
            let foot = top + height;
            let half = (foot + bottom) / 2.0;
            let _ = write!(
                body,
                "<path d=\"M{start:.0} {leaves:.0}L{start:.0} {foot:.0}\
                 C{start:.0} {half:.0} {end:.0} {half:.0} {end:.0} {bottom:.0}"
            );
            match to {
                Slot::Vertex(_) => body.push_str("\" marker-end=\"url(#tip)\"/>\n"),
                Slot::Passing(_) => {
                    let through = placed.y[at + 1].0 + placed.y[at + 1].1;
                    let _ = writeln!(body, "L{end:.0} {through:.0}\"/>");
                }
            }
        }
    }
    for (at, slots) in layers.slots.iter().enumerate() {
        for &slot in slots {
            let Slot::Vertex(v) = slot else { continue };
            let (width, height) = place::size(graph, v);
            let (middle, top) = (placed.x[at][&slot], placed.y[at].0);
            let class = class(graph[v].style);
            let _ = writeln!(
                body,
                "<rect class=\"{class}\" x=\"{:.0}\" y=\"{top:.0}\" width=\"{width:.0}\" height=\"{height:.0}\" rx=\"4\"/>",
                middle - width / 2.0
            );
            let (label, types) = place::lines(graph, v);
            let lines = label.iter().map(|line| (class, line)).chain(types.iter().map(|line| ("type", line)));
            for (i, (class, line)) in lines.enumerate() {
                let baseline = top + LINE * (i as f64 + 1.0);
                let _ = writeln!(
                    body,
                    "<text class=\"{class}\" x=\"{middle:.0}\" y=\"{baseline:.0}\">{}</text>",
                    escaped(line)
                );
            }
        }
    }
    Panel { title: title.to_owned(), body, size: placed.size }
}

/// The tip of an arrow.
const TIP: &str = "<defs><marker id=\"tip\" viewBox=\"0 0 8 8\" refX=\"7\" refY=\"4\" markerWidth=\"8\" markerHeight=\"8\" \
                   orient=\"auto\"><path class=\"tip\" d=\"M0 0L8 4L0 8z\"/></marker></defs>";

/// The graph of a function alone, without styles.
pub(super) fn element(panel: &Panel) -> String {
    let (width, height) = (panel.size.0 + 2.0 * MARGIN, panel.size.1 + 2.0 * MARGIN);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" aria-label=\"{}\" width=\"{width:.0}\" height=\"{height:.0}\" \
         viewBox=\"0 0 {width:.0} {height:.0}\">{TIP}<g transform=\"translate({MARGIN:.0} {MARGIN:.0})\">{}</g></svg>",
        escaped(&panel.title),
        panel.body
    )
}

/// The frame of a panel: its width and height.
fn framed(panel: &Panel) -> (f64, f64) {
    let letters = panel.title.chars().count() as f64 * LETTER * 1.4;
    let width = panel.size.0.max(letters) + 2.0 * MARGIN;
    (width, panel.size.1 + 2.0 * MARGIN + 2.0 * LINE)
}

/// The corners of panels in rows, whose picture is about square.
fn rows(panels: &[Panel]) -> (Vec<(f64, f64)>, (f64, f64)) {
    let sizes: Vec<(f64, f64)> = panels.iter().map(framed).collect();
    let area: f64 = sizes.iter().map(|(w, h)| (w + MARGIN) * (h + MARGIN)).sum();
    let widest = sizes.iter().map(|(w, _)| *w).fold(0.0, f64::max);
    let most = MARGIN + widest.max(area.sqrt());
    let (mut corners, mut x, mut y, mut tall) = (Vec::new(), MARGIN, 0.0, 0.0f64);
    let mut right = 0.0f64;
    for (width, height) in sizes {
        if x > MARGIN && x + width > most {
            (x, y, tall) = (MARGIN, y + tall + MARGIN, 0.0);
        }
        corners.push((x, y));
        right = right.max(x + width);
        x += width + MARGIN;
        tall = tall.max(height);
    }
    (corners, (right, y + tall + MARGIN))
}

/// All functions, in rows.
pub(super) fn document(module: &Module, panels: Vec<Panel>) -> String {
    let mesh = &module.space.mesh;
    let ranks = mesh.ranks();
    let at = if mesh.axes.is_empty() { String::new() } else { format!(": {mesh}") };
    let unit = if ranks == 1 { "rank" } else { "ranks" };
    let title = format!("{} on {ranks} {unit}{at}", module.name);
    let (corners, size) = rows(&panels);
    let head = MARGIN + 2.0 * LINE;
    let mut body = String::new();
    for (panel, (x, y)) in panels.iter().zip(corners) {
        let (full, height) = framed(panel);
        let top = head + y;
        let _ = writeln!(
            body,
            "<rect class=\"panel\" x=\"{x:.0}\" y=\"{top:.0}\" width=\"{full:.0}\" height=\"{height:.0}\" rx=\"8\"/>"
        );
        let _ = writeln!(
            body,
            "<text class=\"title\" x=\"{:.0}\" y=\"{:.0}\">{}</text>",
            x + MARGIN,
            top + 1.5 * LINE,
            escaped(&panel.title)
        );
        let _ = writeln!(
            body,
            "<g transform=\"translate({:.0} {:.0})\">\n{}</g>",
            x + MARGIN,
            top + MARGIN + 2.0 * LINE,
            panel.body
        );
    }
    let letters = title.chars().count() as f64 * LETTER * 1.4;
    let (width, height) = (size.0.max(letters + MARGIN) + MARGIN, head + size.1);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" viewBox=\"0 0 {width:.0} {height:.0}\">\n\
         <style>{STYLE}</style>\n{TIP}\n\
         <text class=\"title\" x=\"{MARGIN:.0}\" y=\"{:.0}\">{}</text>\n{body}</svg>\n",
        MARGIN + LINE / 2.0,
        escaped(&title)
    )
}

const STYLE: &str = "\
text{font:12px monospace;text-anchor:middle;fill:#222}\
text.type{font-size:11px;fill:#777}\
text.title{font-size:16px;font-weight:bold;text-anchor:start}\
text.communication{font-weight:bold;fill:#7a2800}\
path{fill:none;stroke:#999}\
path.tip{fill:#999;stroke:none}\
rect{fill:#fff;stroke:#555}\
rect.panel{fill:#fcfcfc;stroke:#ccc}\
rect.boundary{fill:none;stroke:none}\
rect.source{fill:#eef2f7;stroke:#9ab}\
rect.layout{stroke:#c05020;stroke-dasharray:5 3}\
rect.communication{fill:#ffd9b3;stroke:#c05020;stroke-width:2.5}\
rect.state{fill:#dff0df;stroke:#4a8a4a}\
rect.call{fill:#e2f0ff;stroke:#36c;stroke-width:2}";

fn class(style: Style) -> &'static str {
    match style {
        Style::Boundary => "boundary",
        Style::Source => "source",
        Style::Local => "local",
        Style::Layout => "layout",
        Style::Communication => "communication",
        Style::State => "state",
        Style::Call => "call",
    }
}

/// Text without markup. Characters that XML forbids are dropped.
fn escaped(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => {}
            c => out.push(c),
        }
    }
    out
}
