//! The pages of strategies, generated: layouts from the table of strategies, the picture from the passes and the emitter of
//! pictures, bytes and times from plans.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use clap::Parser;
use ithaca::cli::{Cli, Command};
use ithaca::codegen::svg;
use ithaca::error::Failure;
use ithaca::ir::units::{bytes, seconds};
use ithaca::ir::{Module, text};
use ithaca::passes::pass::{Context, Unwatched, Volume, run_passes};
use ithaca::passes::pipeline;
use ithaca::passes::plan::{Alternative, Outcome, Plan, layout_text};
use ithaca::passes::registry::Registry;
use ithaca::passes::shard::table::{self, Row};
use ithaca::request::PlanRequest;
use ithaca::subject;

/// A request whose layouts are compared.
struct Scenario {
    /// A few words for the column of a table.
    title: &'static str,
    arguments: &'static str,
}

const SCENARIOS: &[Scenario] = &[
    Scenario { title: "8B, 8k tokens", arguments: "examples/llama-3-8b --gpus 8 --seq 8k" },
    Scenario { title: "8B, 128k tokens", arguments: "examples/llama-3-8b --gpus 8 --seq 128k" },
    Scenario { title: "8B, 1m tokens", arguments: "examples/llama-3-8b --gpus 8 --seq 1m" },
    Scenario {
        title: "8B, 32k, over PCIe",
        arguments: "examples/llama-3-8b --cluster l40s-pcie --gpus 8 --seq 32k",
    },
    Scenario { title: "28 heads, 32k", arguments: "examples/qwen2.5-7b --gpus 8 --seq 32k" },
    Scenario { title: "window of 4k, 128k", arguments: "examples/mistral-7b --gpus 8 --seq 128k" },
    Scenario { title: "70B, two nodes, 128k", arguments: "examples/llama-3-70b --gpus 16 --seq 128k" },
    Scenario { title: "mixture, 8 x 8k", arguments: "examples/mixtral-8x7b --gpus 8 --seq 8k --batch 8" },
    Scenario {
        title: "decode, 64 x 8k",
        arguments: "examples/llama-3-70b --mode decode --gpus 8 --batch 64 --context 8k",
    },
    Scenario {
        title: "decode, 1 x 1m",
        arguments: "examples/llama-3-70b --mode decode --gpus 16 --batch 1 --context 1m",
    },
    Scenario {
        title: "training, 64 x 8k",
        arguments: "examples/llama-3-8b --mode train --gpus 8 --seq 8k --batch 64",
    },
];

/// The number of scenarios that the default tier compares: the first ones.
const FEW: usize = 1;

/// The request whose bytes the page of a strategy states, without the strategy.
fn reference(strategy: &str) -> Option<&'static str> {
    Some(match strategy {
        "single" | "streaming" => return None,
        "data-parallel" => "examples/llama-3-8b --gpus 8 --seq 32k --batch 8",
        "rsa" => "examples/llama-3-8b --gpus 8 --seq 4k",
        "window-halo" | "sparse-fetch" => "examples/mistral-7b --gpus 8 --seq 32k",
        "decode-reduce" | "decode-context" => {
            "examples/llama-3-8b --mode decode --gpus 8 --batch 8 --context 32k"
        }
        "pipeline" => {
            "examples/llama-3-8b --mode train --gpus 8 --seq 8k --batch 64 --micro-batches 16 --zero 0 --recompute full"
        }
        "ep" => "examples/mixtral-8x7b --gpus 8 --seq 32k",
        "data-parallel-ep" => "examples/mixtral-8x7b --gpus 8 --seq 8k --batch 8",
        _ => "examples/llama-3-8b --gpus 8 --seq 32k",
    })
}

/// The mask of the program that is drawn.
fn mask(strategy: &str) -> &'static str {
    match strategy {
        "window-halo" => "causal & window(left=3, right=0)",
        "streaming" => "causal & (window(left=3) | sinks(2))",
        "sparse-fetch" => "blocks(size=4, rows=[[0], [1], [0, 2], [0, 3]]) & causal",
        _ => "causal",
    }
}

/// Attention with its projections and its residual.
const BLOCK: &str = "\
ithaca 1 program
model \"attention\"
dim b = 4
dim s = 16
dim m = 8
dim k = 4
dim h = 8 granule 2
dim d = 4

func @main() {
  %x = input {name=\"x\"} : bf16[b s m]
  %wq = param {name=\"wq\"} : bf16[h d m]
  %wk = param {name=\"wk\"} : bf16[k d m]
  %wv = param {name=\"wv\"} : bf16[k d m]
  %wo = param {name=\"wo\"} : bf16[m h d]
  %q = einsum %x, %wq : bf16[b s h d]
  %k = einsum %x, %wk : bf16[b s k d]
  %v = einsum %x, %wv : bf16[b s k d]
  %o = attention %q, %k, %v {heads=h, kv_heads=k, queries=s, keys=s, width=d, mask=MASK, scale=0.5} : bf16[b s h d]
  %a = einsum %o, %wo : bf16[b s m]
  %y = add %x, %a : bf16[b s m]
  return y = %y
}
";

/// The same over a cache.
const CACHED: &str = "\
ithaca 1 program
model \"attention over a cache\"
dim b = 4
dim t = 2
dim s = 16
dim m = 8
dim k = 2
dim h = 8 granule 4
dim d = 4

func @main() {
  %x = input {name=\"x\"} : bf16[b t m]
  %k = input {name=\"k\"} : bf16[b s k d]
  %v = input {name=\"v\"} : bf16[b s k d]
  %wq = param {name=\"wq\"} : bf16[h d m]
  %wo = param {name=\"wo\"} : bf16[m h d]
  %q = einsum %x, %wq : bf16[b t h d]
  %o = attention %q, %k, %v {heads=h, kv_heads=k, queries=t, keys=s, width=d, mask=causal(queries=2, keys=16), scale=0.5} : bf16[b t h d]
  %y = einsum %o, %wo : bf16[b t m]
  return y = %y
}
";

/// Two micro-batches through two stages.
const STAGES: &str = "\
ithaca 1 program
model \"two micro-batches, two stages\"
dim b = 2
dim s = 8
dim m = 8

func @layer(%x: bf16[b s m]) {
  %y = silu %x : bf16[b s m]
  return %y
}

func @main() {
  %x0 = input {name=\"x0\"} : bf16[b s m]
  %x1 = input {name=\"x1\"} : bf16[b s m]
  %a0 = call %x0 {callee=@layer, layers=0..2, stage=0} : bf16[b s m]
  %a1 = call %x1 {callee=@layer, layers=0..2, stage=0} : bf16[b s m]
  %b0 = call %a0 {callee=@layer, layers=2..4, stage=1} : bf16[b s m]
  %b1 = call %a1 {callee=@layer, layers=2..4, stage=1} : bf16[b s m]
  %y = add %b0, %b1 : bf16[b s m]
  return y = %y
}
";

/// A small mixture of experts, of one layer.
fn mixture() -> Module {
    let config = std::fs::read_to_string(super::root().join("tests/goldens/mixtral/config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    config["num_hidden_layers"] = 1.into();
    let workload = ithaca::passes::import::Workload::prefill(4, 16);
    ithaca::passes::import::import(&config, "a mixture of experts", &workload).unwrap()
}

/// The program of one rank of a small mesh, and the arguments of the pass that laid it out.
fn per_rank(row: &Row) -> (Module, String) {
    let source = match row.name {
        "decode-reduce" | "decode-context" => Some(CACHED.to_owned()),
        "pipeline" => Some(STAGES.to_owned()),
        "ep" | "data-parallel-ep" => None,
        name => Some(BLOCK.replace("MASK", mask(name))),
    };
    let program = source.map_or_else(mixture, |source| text::parse(&source).unwrap());
    let size = if row.axes.len() == 1 && row.name != "pipeline" && row.name != "ep" { 4 } else { 2 };
    let axes: Vec<String> = row.axes.iter().map(|axis| format!("{axis}={size}")).collect();
    let stages = format!("shard{{strategy={},{}}},lower-movements,lower-reshards", row.name, axes.join(","));
    let passes = pipeline::parse(&stages).unwrap_or_else(|e| panic!("{stages}: {e}"));
    let module = run_passes(program, &passes, &mut Context::new(&Volume), &mut Unwatched);
    (module.unwrap_or_else(|e| panic!("{stages}: {e:?}")), stages)
}

/// The plan of arguments of `ithaca plan`, with paths in the repository.
fn plan(arguments: &str) -> Result<Plan, Failure> {
    let words = ["ithaca", "plan"].into_iter().chain(arguments.split_whitespace());
    let Command::Plan(args) = Cli::try_parse_from(words).unwrap().command else { unreachable!() };
    let registry = Registry::default();
    let model = subject::model(&super::root().join(args.model.as_deref().unwrap()))?;
    PlanRequest::of_args(&registry, model, &args.workload, &args.layout, &args.narrowing)?.plan(&registry)
}

/// The strategy of the search that has the same layouts and movement, on axes of other names.
fn twin(name: &str) -> Option<&'static str> {
    match name {
        "megatron-cp-p2p" => Some("ring"),
        "megatron-cp-a2a" => Some("ulysses"),
        "megatron-cp-a2a-p2p" => Some("usp"),
        _ => None,
    }
}

/// What came of a strategy in a scenario.
enum Place {
    /// The fastest layout with it, its seconds, and the part by which it is slower than the best.
    Fits {
        layout: String,
        seconds: f64,
        slower: f64,
    },
    TooLarge {
        layout: String,
        over: u64,
    },
    NoRoom(String),
    Refused(String),
    /// The search does not try it there.
    Untried,
}

impl Place {
    /// A few characters, for the table of all strategies.
    fn short(&self) -> String {
        match self {
            Place::Fits { slower, .. } if *slower < 0.0005 => "**best**".to_owned(),
            Place::Fits { slower, .. } if *slower < 10.0 => format!("+{:.1} %", 100.0 * slower),
            Place::Fits { slower, .. } => format!("{:.0} x", 1.0 + slower),
            Place::TooLarge { .. } | Place::NoRoom(_) => "memory".to_owned(),
            Place::Refused(_) => "refused".to_owned(),
            Place::Untried => String::new(),
        }
    }
}

/// Whether an alternative has a strategy in its product, or in the product of an equal one.
fn has(alternative: &Alternative, strategy: &str) -> bool {
    let products =
        std::iter::once(alternative.strategy.as_str()).chain(alternative.also.iter().map(String::as_str));
    products
        .flat_map(|text| text.split_whitespace().next().unwrap_or_default().split('+'))
        .any(|name| name == strategy)
}

/// The layout of an alternative that has a strategy, of several equal ones that in which it is named.
fn layout(alternative: &Alternative, strategy: &str) -> String {
    let own = layout_text(&alternative.strategy, &alternative.mesh);
    let is_own = alternative.strategy.split('+').any(|name| name == strategy);
    let also = alternative.also.iter().find(|text| {
        text.split_whitespace().next().unwrap_or_default().split('+').any(|name| name == strategy)
    });
    match also {
        Some(also) if !is_own => also.clone(),
        _ => own,
    }
}

fn place(arguments: &str, best: &Plan, strategy: &str) -> Place {
    let own: Vec<&Alternative> = best.alternatives.iter().filter(|a| has(a, strategy)).collect();
    let fastest = own.iter().filter_map(|a| match a.outcome {
        Outcome::Chosen { step_seconds, .. } | Outcome::Slower { step_seconds, .. } => {
            Some((a, step_seconds))
        }
        Outcome::OutOfMemory { .. } | Outcome::Refused { .. } => None,
    });
    let slower = |seconds: f64| seconds / best.time.step_seconds - 1.0;
    if let Some((a, seconds)) = fastest.min_by(|a, b| a.1.total_cmp(&b.1)) {
        return Place::Fits { layout: layout(a, strategy), seconds, slower: slower(seconds) };
    }
    let too_large = own.iter().find_map(|a| match &a.outcome {
        Outcome::OutOfMemory { over_bytes, .. } => Some((layout(a, strategy), *over_bytes)),
        Outcome::Chosen { .. } | Outcome::Slower { .. } | Outcome::Refused { .. } => None,
    });
    if let Some((layout, over)) = too_large {
        return Place::TooLarge { layout, over };
    }
    let refused = own.iter().find_map(|a| match &a.outcome {
        Outcome::Refused { message, .. } => Some(message.clone()),
        Outcome::Chosen { .. } | Outcome::Slower { .. } | Outcome::OutOfMemory { .. } => None,
    });
    if let Some(message) = refused {
        return Place::Refused(message);
    }
    // One that is tried only by name. Those of experts and caches say nothing about other models and steps.
    let (of_experts, of_caches) = (strategy.ends_with("ep"), strategy.starts_with("decode"));
    let is_tried = strategy != "single"
        && strategy != "pipeline"
        && (!of_experts || arguments.contains("mixtral"))
        && (!of_caches || arguments.contains("decode"));
    if !is_tried {
        return Place::Untried;
    }
    match plan(&format!("{arguments} --strategy {strategy}")) {
        Ok(named) => {
            let seconds = named.time.step_seconds;
            Place::Fits {
                layout: layout_text(&named.strategy, &named.mesh),
                seconds,
                slower: slower(seconds),
            }
        }
        Err(failure) => {
            let refusal = &failure.diagnostics[0];
            let message = refusal.message.clone();
            if refusal.code == "P32" { Place::NoRoom(message) } else { Place::Refused(message) }
        }
    }
}

/// The places of all strategies in some scenarios: by the index of the scenario, then by name.
pub(super) struct Places(Vec<BTreeMap<&'static str, Place>>);

impl Places {
    /// The number of scenarios.
    pub(super) fn all() -> usize {
        SCENARIOS.len()
    }

    pub(super) fn of(count: usize) -> Self {
        let names: Vec<&'static str> = Registry::default().strategies().map(|s| s.name()).collect();
        let of_scenario = |scenario: &Scenario| {
            let best =
                plan(scenario.arguments).unwrap_or_else(|f| panic!("{}: {}", scenario.title, f.render()));
            let of = |name| place(scenario.arguments, &best, twin(name).unwrap_or(name));
            names.iter().map(|&name| (name, of(name))).collect()
        };
        Self(SCENARIOS[..count].iter().map(of_scenario).collect())
    }
}

/// The number of scenarios of the tier.
pub(super) fn count() -> usize {
    let is_blessing = std::env::var_os("ITHACA_BLESS").is_some();
    if is_blessing || crate::tier::is_full() { SCENARIOS.len() } else { FEW }
}

/// A sentence of the table of strategies as a paragraph: a capital, a final stop, and links for papers.
fn sentence(text: &str) -> String {
    let mut out = String::new();
    for (i, part) in text.split("arXiv ").enumerate() {
        if i == 0 {
            out += part;
            continue;
        }
        let end = part.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(part.len());
        let (number, rest) = part.split_at(end);
        let _ = write!(out, "[arXiv {number}](https://arxiv.org/abs/{number}){rest}");
    }
    let mut letters = out.chars();
    let first = letters.next().into_iter().flat_map(char::to_uppercase);
    first.chain(letters).collect::<String>() + "."
}

/// The lines of a scenario in the page of a strategy.
fn line(scenario: &Scenario, place: &Place) -> Option<String> {
    let (layout, outcome) = match place {
        Place::Fits { layout, seconds: s, slower } if *slower < 0.0005 => {
            (layout, format!("{}, the best", seconds(*s)))
        }
        Place::Fits { layout, seconds: s, .. } => (layout, format!("{}, {}", seconds(*s), place.short())),
        Place::TooLarge { layout, over } => (layout, format!("lacks {} of memory", bytes(*over))),
        Place::NoRoom(message) | Place::Refused(message) => {
            return Some(format!("| {} | | {message} |\n", scenario.title));
        }
        Place::Untried => return None,
    };
    Some(format!("| {} | `{layout}` | {outcome} |\n", scenario.title))
}

/// The page of a strategy up to the scenarios, and the lines of the scenarios that were compared.
pub(super) fn page(row: &Row, places: &Places) -> (String, Vec<String>) {
    let Row { name, summary, axes, outside, inside, movement, legality } = row;
    let axes_text = if axes.is_empty() { "none".to_owned() } else { axes.join(", ") };
    let mut out = format!("# {name}\n\n{}\n\n| | |\n|---|---|\n", sentence(summary));
    // Writing to a string cannot fail.
    let _ = writeln!(out, "| axes of the mesh | `{axes_text}` |");
    let _ = writeln!(out, "| layout outside attention | `{outside}` |");
    let _ = writeln!(out, "| layout inside attention | `{inside}` |");
    let _ = writeln!(out, "| movement of keys and queries | `{movement}` |");
    let _ = writeln!(out, "| legal | {legality} |");
    if !axes.is_empty() {
        let (_, stages) = per_rank(row);
        let _ = write!(
            out,
            "\n## One rank's program\n\n\
             A small program, laid out by\n\n    ithaca opt small.ith --pipeline \"{stages}\"\n\n\
             is this program of one rank. Orange boxes are collectives; the letters are those of the [glossary](../glossary.md).\n\n\
             ![The program of one rank](../pictures/{name}.svg)\n",
        );
    }
    if let Some(arguments) = reference(name) {
        let _ = write!(out, "\n## Bytes\n\n    ithaca plan {arguments} --strategy {name}\n\n");
        match plan(&format!("{arguments} --strategy {name}")) {
            Ok(plan) => out += &traffic(&plan),
            Err(failure) => {
                let _ = writeln!(out, "It is refused: {}.", failure.diagnostics[0].message);
            }
        }
    }
    let lines = SCENARIOS.iter().zip(&places.0).filter_map(|(scenario, all)| line(scenario, &all[name]));
    (out, lines.collect())
}

fn traffic(plan: &Plan) -> String {
    let mut out = format!("In a step of `{}`:\n\n", layout_text(&plan.strategy, &plan.mesh));
    if plan.collectives.is_empty() {
        return out.replace(":\n\n", " no rank sends anything.\n");
    }
    out += "| collective | axis | phase | count | sent by the busiest rank |\n|---|---|---|---|---|\n";
    for row in &plan.collectives {
        let _ = writeln!(
            out,
            "| `{}` | `{}` | {} | {} | {} |",
            row.kind,
            row.axis,
            row.phase,
            row.count,
            bytes(row.bytes_sent_per_rank)
        );
    }
    out
}

/// The page that compares all strategies: its start, and the row of each.
pub(super) fn overview(rows: &[Row], places: &Places) -> String {
    let mut out = String::from(
        "# Strategies\n\n\
         A strategy chooses which mesh axes split which dimensions, and how keys meet queries. A page for each has its layouts, the\n\
         program of one rank, and its bytes.\n\n\
         ## When each wins\n\n\
         Each column is a request, priced by the profile of its cluster. A cell is the fastest layout that has the strategy, alone or in\n\
         a product, beside the best of all: slower by this part of the step. *memory* fits in no layout, *refused* is not legal, and an\n\
         empty cell is not tried there. These are prices, not measurements; [performance](../performance.md) has their errors.\n\n",
    );
    for (i, scenario) in SCENARIOS.iter().enumerate() {
        let _ = writeln!(out, "{}. {}: `ithaca plan {}`", i + 1, scenario.title, scenario.arguments);
    }
    out += "\n| strategy |";
    out.extend((1..=places.0.len()).map(|n| format!(" {n} |")));
    out += "\n|---|";
    out.extend(places.0.iter().map(|_| "---|"));
    for row in rows {
        let _ = write!(out, "\n| [{0}]({0}.md) |", row.name);
        out.extend(places.0.iter().map(|all| format!(" {} |", all[row.name].short())));
    }
    out + "\n"
}

/// Where a strategy wins: the heading, and the lines of its scenarios.
pub(super) fn wins(name: &str, lines: &[String]) -> String {
    if lines.is_empty() {
        return String::new();
    }
    let mut out = "\n## When it wins\n\n\
                   The fastest layout with it in each request of [the comparison](README.md), beside the best of all.\n"
        .to_owned();
    if let Some(twin) = twin(name) {
        let _ = writeln!(out, "Layouts and movement are those of [{twin}]({twin}.md), which stands for it.");
    }
    out + "\n| request | layout | step |\n|---|---|---|\n" + &lines.concat()
}

/// The picture of a strategy; `single` has none.
pub(super) fn picture(row: &Row) -> Option<String> {
    (!row.axes.is_empty()).then(|| svg::emit(&per_rank(row).0))
}

pub(super) fn rows() -> Vec<Row> {
    table::rows(&Registry::default())
}

/// Where the pages are.
pub(super) fn folder() -> &'static Path {
    Path::new("strategies")
}
