//! Pages about a plan and about a deployment: one HTML file with its data, which needs no network.
//!
//! A page has the data as JSON in a `<script type="application/json">` and draws it with D3 and Observable Plot, whose
//! builds are in `vendor` (ISC licence, `vendor/LICENSE-*`): d3 7.9 and plot 0.6, about 490 kB, which draw elements that a screen
//! reader and a keyboard reach. The page computes positions, rates and sums for its tables, and no figure of the plan. Drawings of
//! functions are those of [`crate::svg`].

use std::fmt::Write as _;

use serde_json::Value;

const PAGE: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const PLAN: Kind = Kind {
    body: include_str!("plan.html"),
    scripts: &[include_str!("timeline.js"), include_str!("plan.js")],
};
const SERVING: Kind = Kind { body: include_str!("serving.html"), scripts: &[include_str!("serving.js")] };
const LIBRARIES: [&str; 2] = [include_str!("vendor/d3.min.js"), include_str!("vendor/plot.umd.min.js")];
const SHARED: [&str; 2] = [include_str!("tables.js"), include_str!("charts.js")];

/// The parts of a page that differ by its subject.
struct Kind {
    body: &'static str,
    scripts: &'static [&'static str],
}

/// The drawing of a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drawing {
    /// Its title.
    pub title: String,
    /// An `<svg>` element.
    pub svg: String,
}

/// The page about a plan.
pub fn page(title: &str, data: &Value, drawings: &[Drawing]) -> String {
    let mut drawn = String::new();
    for (i, Drawing { title, svg }) in drawings.iter().enumerate() {
        let open = if i == 0 { " open" } else { "" };
        let title = escaped(title);
        // Writing to a string cannot fail.
        let _ = writeln!(
            drawn,
            "<details class=\"drawing\"{open}><summary>{title}</summary>\
             <div class=\"scroll\" tabindex=\"0\" role=\"group\" aria-label=\"Graph of {title}\">{svg}</div></details>"
        );
    }
    PLAN.page(title, data, &drawn)
}

/// The page about the deployments that answer requests at a rate.
pub fn serving(title: &str, data: &Value) -> String {
    SERVING.page(title, data, "")
}

impl Kind {
    fn page(&self, title: &str, data: &Value, drawings: &str) -> String {
        let scripts = LIBRARIES.iter().chain(&SHARED).chain(self.scripts);
        let scripts: String = scripts.map(|script| format!("<script>{script}</script>\n")).collect();
        let parts = [
            ("{{title}}", escaped(title)),
            ("{{style}}", STYLE.to_owned()),
            ("{{body}}", filled(self.body, [("{{drawings}}", drawings.to_owned())])),
            // `</script>` and `<!--` in a text would end the element.
            ("{{data}}", data.to_string().replace('<', "\\u003c")),
            ("{{scripts}}", scripts),
        ];
        filled(PAGE, parts)
    }
}

/// A text with its marks replaced, in the order of the text, so that a mark in a part is text.
fn filled<const N: usize>(text: &str, parts: [(&str, String); N]) -> String {
    let mut page = String::new();
    let mut rest = text;
    for (mark, part) in parts {
        if let Some((before, after)) = rest.split_once(mark) {
            page.push_str(before);
            page.push_str(&part);
            rest = after;
        }
    }
    page.push_str(rest);
    page
}

/// Text without markup.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_page_needs_nothing_else_and_texts_stay_texts() {
        let text = "</script><img src=x onerror=alert(1)><!-- {{scripts}}";
        let svg = "<svg></svg>".to_owned();
        let page = page(text, &json!({ "model": text }), &[Drawing { title: text.to_owned(), svg }]);
        assert!(!page.contains("<img"), "markup in a text");
        let scripts = [PLAN, SERVING].into_iter().flat_map(|kind| kind.scripts).copied();
        let own = SHARED.into_iter().chain([STYLE, PAGE, PLAN.body, SERVING.body]).chain(scripts);
        for part in own {
            for outside in ["http:", "https:", "@import", "url(", "fetch(", "XMLHttpRequest", "src="] {
                assert!(!part.contains(outside), "`{outside}`");
            }
        }
        let (_, rest) = page.split_once("type=\"application/json\">").unwrap();
        let (data, _) = rest.split_once("</script>").unwrap();
        assert_eq!(serde_json::from_str::<Value>(data).unwrap()["model"], json!(text));
    }
}
