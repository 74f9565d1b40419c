//! The planner on a compiler of its own: one product and one collective, legal as a model of 32/8 heads is.

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{Function, Level};
use ithaca_ir::ops::Binding;
use ithaca_ir::schedule::{
    Buffer, BufferId, Content, EventId, Frame, Place, Schedule, Stream, Task, Transfer, Work,
};
use ithaca_ir::verify::VerifiedModule;
use ithaca_ir::{Arena, DType, Diagnostic, Diagnostics, Dim, Module, Op, Space, TensorType};

use ithaca_layout::compile::Compiled;
use ithaca_layout::registry::Registry;
use ithaca_layout::shard::{HeadSplit, SequenceFit};
use ithaca_pass::choices::Choices;

use super::*;
use crate::plan::Outcome;

/// A model of one layer: `x [s k] · w [k n]`, heads 32/8.
struct Fake {
    sequence: u64,
    /// Rows and columns of the weight.
    width: u64,
}

impl Fake {
    const SMALL: Fake = Fake { sequence: 8192, width: 4096 };

    fn refusal(&self, options: &ShardOptions) -> Option<Diagnostic> {
        let ranks = options.mesh.ranks();
        let heads = (32 % ranks == 0 && (8 % ranks == 0 || ranks.is_multiple_of(8)))
            || (options.heads == HeadSplit::Uneven && ranks <= 8);
        let tokens = options.mesh.axis("ulysses").map_or(1, |a| options.mesh.size(a));
        match () {
            () if !heads => Some(Diagnostic::new("P20", format!("32 query heads do not divide by {ranks}"))),
            () if !self.sequence.is_multiple_of(tokens) && options.sequence == SequenceFit::Uneven => {
                Some(Diagnostic::new("P23", format!("{} tokens do not divide by {tokens}", self.sequence)))
            }
            () => None,
        }
    }

    fn schedule(&self, options: &ShardOptions) -> Schedule {
        let mut space = Space { mesh: options.mesh.clone(), ..Space::default() };
        let (ulysses, tp) = (space.mesh.axis("ulysses"), space.mesh.axis("tp"));
        let s = space.dims.push(Dim { uneven: true, ..Dim::new("s", self.sequence) });
        let [k, n] = ["k", "n"].map(|d| space.dims.push(Dim { uneven: true, ..Dim::new(d, self.width) }));
        let mut x = TensorType::new(DType::BF16, [s, k]);
        let mut w = TensorType::new(DType::BF16, [k, n]);
        let mut y = TensorType::new(DType::BF16, [s, n]);
        x.layout.split[0].extend(ulysses);
        y.layout.split[0].extend(ulysses);
        x.layout.split[1].extend(tp);
        w.layout.split[0].extend(tp);
        y.layout.partial.extend(tp);
        let mut frame = Frame { name: "main".into(), n_events: 8, ..Frame::default() };
        let mut buffer = |name: &str, ty: &TensorType, place| {
            frame.buffers.push(Buffer {
                name: name.into(),
                content: Content::Tensor(ty.clone().into()),
                place,
            })
        };
        let bx = buffer("x", &x, Place::Input(Binding::named("x")));
        let bw = buffer("w", &w, Place::Weight(Binding::named("w")));
        let by = buffer("y", &y, Place::Frame(0));
        frame.bytes = space.max_local_bytes(&y);
        let mut event = 0;
        let mut push = |stream, work, reads: &[BufferId]| {
            let waits = if event == 0 { Vec::new() } else { vec![EventId::new(event - 1)] };
            let records = Some(EventId::new(event));
            event += 1;
            frame.tasks.push(Task { stream, work, reads: reads.to_vec(), writes: vec![by], waits, records });
        };
        push(Stream::Compute, Work::Compute(Op::Einsum), &[bx, bw]);
        for (axis, op) in [
            (ulysses, ulysses.map(|axis| Op::all_to_all(axis, n, s))),
            (tp, tp.map(|axis| Op::AllReduce { axis: axis.into() })),
        ] {
            if let (Some(_), Some(op)) = (axis, op) {
                let to = ithaca_ir::ops::collective::apply(&op, &space, &y).unwrap();
                let from = std::mem::replace(&mut y, to.clone());
                push(Stream::Comm, Work::Exchange(Transfer::one(op, from, to)), &[by]);
            }
        }
        Schedule {
            name: "fake".into(),
            pipeline: vec!["fake".into()],
            space,
            frames: [frame].into_iter().collect(),
        }
    }
}

impl Compiler for Fake {
    fn check(&self, options: &ShardOptions) -> Result<(), Diagnostic> {
        self.refusal(options).map_or(Ok(()), Err)
    }

    fn draft(&self, options: &ShardOptions) -> Result<Compiled, Diagnostics> {
        self.check(options).map_err(|d| vec![d])?;
        let schedule = self.schedule(options);
        let mut functions = Arena::new();
        functions.push(Function::new("main"));
        let per_rank = VerifiedModule::new(Module {
            level: Level::PerRank,
            name: "fake".into(),
            pipeline: Vec::new(),
            space: schedule.space.clone(),
            functions,
        })?;
        Ok(Compiled {
            per_rank,
            schedule,
            attention: Vec::new(),
            notes: Vec::new(),
            choices: Choices::default(),
        })
    }

    /// There is no program to verify it against.
    fn verify(&self, _: &Compiled) -> Result<(), Diagnostics> {
        Ok(())
    }
}

fn h100() -> Cluster {
    Cluster::named("dgx-h100").unwrap()
}

fn plan_of(fake: &Fake, request: &Request) -> Plan {
    let config = serde_json::json!({"heads": 32, "width": fake.width, "scale": 0.1});
    let model = plan::Model::new("fake", config);
    let workload = ithaca_import::Workload::prefill(1, fake.sequence);
    let ranked = rank(fake, &h100(), request).unwrap();
    let workload = plan::Workload::of(&workload, &ranked.step.compiled.per_rank);
    ranked.into_plan(&h100(), request, Subject { model, workload, model_flops: 1e15 })
}

/// Options under which the fake refuses tokens that do not divide.
fn uneven() -> ShardOptions {
    ShardOptions { sequence: SequenceFit::Uneven, ..ShardOptions::default() }
}

/// The table of a search, 100 columns wide.
fn shown(alternatives: &[Alternative], refusals: Refusals) -> String {
    let rates = plan::Rates { tokens: 8192, flops: 1e12, gpus: 8, peak: 989e12, decodes: false };
    table(alternatives, &rates, &View { width: 100, rows: Rows::Top(4), refusals })
}

/// Whether a request changed as a repair says is satisfied.
fn repaired(fake: &Fake, request: &Request, repair: &str) -> bool {
    let mut request = request.clone();
    let words: Vec<&str> = repair.split_whitespace().collect();
    for (i, &word) in words.iter().enumerate() {
        match word {
            "--gpus" => request.gpus = words[i + 1].parse().unwrap(),
            "--strategy" => request.strategy = Some(words[i + 1].to_owned()),
            "--mesh" => request.mesh = Some(ithaca_layout::shard::parse_mesh(words[i + 1]).unwrap()),
            "--uneven-heads" => request.options.heads = HeadSplit::Uneven,
            "--pad-sequence" => request.options.sequence = SequenceFit::Pad,
            _ => assert!(!word.starts_with("--"), "{repair}"),
        }
    }
    if repair.contains("--strategy") && !repair.contains("--mesh") {
        request.mesh = None;
    }
    rank(fake, &h100(), &request).is_ok()
}

/// The refusal, every repair of which was tried.
fn refusal(fake: &Fake, request: &Request) -> Diagnostic {
    let diagnostic = rank(fake, &h100(), request).unwrap_err().diagnostic;
    for repair in &diagnostic.repairs {
        assert!(repaired(fake, request, repair), "{repair}");
    }
    diagnostic
}

#[test]
fn candidates_are_every_strategy_and_product_on_every_mesh() {
    let all = candidates(&Registry::default(), &h100(), &Request::new(8)).unwrap();
    let texts: Vec<String> = all.iter().map(|o| format!("{} {}", o.strategy, o.mesh)).collect();
    insta::assert_snapshot!(texts.join("\n"));
    let far = candidates(&Registry::default(), &h100(), &Request::new(64)).unwrap();
    let mut different: Vec<(&str, String)> =
        far.iter().map(|o| (o.strategy.as_str(), o.mesh.to_string())).collect();
    different.sort_unstable();
    different.dedup();
    assert_eq!(different.len(), far.len());
    assert!(far.iter().all(|o| o.mesh.ranks() == 64));
    // Both orders of heads and ring: neighbours in a node are one or the other.
    for mesh in ["ring=8,ulysses=8", "ulysses=8,ring=8"] {
        assert!(different.binary_search(&("usp", mesh.to_owned())).is_ok(), "{mesh}");
    }
    let one = candidates(&Registry::default(), &h100(), &Request::new(1)).unwrap();
    assert_eq!(one.iter().map(|o| o.strategy.as_str()).collect::<Vec<_>>(), ["single"]);
}

#[test]
fn table_of_a_search() {
    let ranked = rank(&Fake::SMALL, &h100(), &Request::new(16)).unwrap();
    insta::assert_snapshot!(shown(&ranked.alternatives, Refusals::Summed));
    let rates = plan::Rates { tokens: 8192, flops: 1e12, gpus: 16, peak: 989e12, decodes: false };
    for width in [70, 80, 120, 200] {
        for refusals in [Refusals::Summed, Refusals::Each] {
            let text = table(&ranked.alternatives, &rates, &View { width, rows: Rows::All, refusals });
            let widest = text.lines().map(|line| line.chars().count()).max();
            assert!(widest <= Some(width), "{widest:?} of {width} columns:\n{text}");
        }
    }
}

#[test]
fn table_with_losers_of_every_kind() {
    // Tokens divide by four only, and their result is 76 GiB: whole on a device it does not fit.
    let fake = Fake { sequence: 4 * 2_500_001, width: 4096 };
    let ranked = rank(&fake, &h100(), &Request { options: uneven(), ..Request::new(8) }).unwrap();
    let [summed, each] =
        [Refusals::Summed, Refusals::Each].map(|refusals| shown(&ranked.alternatives, refusals));
    insta::assert_snapshot!(format!("{summed}\n{each}"));
}

#[test]
fn times_are_ranked_and_the_first_is_chosen() {
    let ranked = rank(&Fake::SMALL, &h100(), &Request::new(8)).unwrap();
    let steps: Vec<f64> = ranked
        .alternatives
        .iter()
        .filter_map(|a| match a.outcome {
            Outcome::Chosen { step_seconds, .. } | Outcome::Slower { step_seconds, .. } => Some(step_seconds),
            Outcome::OutOfMemory { .. } | Outcome::Refused { .. } => None,
        })
        .collect();
    assert!(steps.is_sorted() && steps.len() > 4, "{steps:?}");
    assert!(matches!(ranked.alternatives[0].outcome, Outcome::Chosen { .. }));
    assert_eq!(ranked.alternatives[0].strategy, ranked.chosen.options.strategy);
}

#[test]
fn three_gpus_for_32_8_heads_are_refused_with_repairs() {
    let fake = Fake { sequence: 8190, ..Fake::SMALL };
    let diagnostic = refusal(&fake, &Request::new(3));
    assert_eq!(diagnostic.code, "P31");
    assert_eq!(diagnostic.repairs, ["--uneven-heads", "--gpus 2", "--gpus 4"]);
}

#[test]
fn a_sequence_that_cannot_be_uneven_is_refused_with_padding() {
    let fake = Fake { sequence: 8191, ..Fake::SMALL };
    let request = Request { strategy: Some("ulysses".into()), options: uneven(), ..Request::new(8) };
    let diagnostic = refusal(&fake, &request);
    assert_eq!(diagnostic.code, "P23");
    assert!(diagnostic.repairs.iter().any(|r| r == "--pad-sequence"), "{:?}", diagnostic.repairs);
    assert!(diagnostic.repairs[0].starts_with("--strategy megatron-"), "{:?}", diagnostic.repairs);
}

#[test]
fn what_does_not_fit_asks_for_more_gpus() {
    let fake = Fake { sequence: 8192, width: 400_000 };
    let diagnostic = refusal(&fake, &Request::new(2));
    assert_eq!(diagnostic.code, "P32");
    assert_eq!(diagnostic.repairs, ["--gpus 8"]);
    assert!(diagnostic.helps[0].contains("parameters"), "{:?}", diagnostic.helps);
}

#[test]
fn malformed_requests_are_refused_with_what_they_could_have_been() {
    let mesh = |text| Some(ithaca_layout::shard::parse_mesh(text).unwrap());
    let of = |request: Request| refusal(&Fake::SMALL, &request);
    assert_eq!(of(Request::new(0)).code, "P30");
    assert_eq!(of(Request::new(1 << 40)).code, "P30");
    let wrong = of(Request { mesh: mesh("ulysses=4,tp=4"), ..Request::new(8) });
    assert!(wrong.message.contains("16 ranks"), "{wrong}");
    assert_eq!(wrong.repairs[0], "--gpus 16");
    assert_eq!(of(Request { mesh: mesh("banana=8"), ..Request::new(8) }).code, "P30");
    assert_eq!(of(Request { strategy: Some("single".into()), ..Request::new(8) }).code, "P30");
    assert_eq!(of(Request { strategy: Some("magic".into()), ..Request::new(8) }).code, "P10");
    let unfit = Request { strategy: Some("ulysses".into()), mesh: mesh("tp=8"), ..Request::new(8) };
    assert!(rank(&Fake::SMALL, &h100(), &unfit).is_ok(), "the fake does not look at axes");
}

/// Without a mesh stages are tried only where nothing else fits.
#[test]
fn a_mesh_with_stages_names_strategies_that_have_them() {
    let of = |mesh: Option<&str>| {
        let mesh = mesh.map(|text| ithaca_layout::shard::parse_mesh(text).unwrap());
        let found = candidates(&Registry::default(), &h100(), &Request { mesh, batch: 8, ..Request::new(8) })
            .unwrap();
        found.into_iter().map(|options| options.strategy).collect::<Vec<_>>()
    };
    let staged = of(Some("dp=2,pp=2,tp=2"));
    assert!(staged.iter().any(|name| name.split('+').count() == 3), "{staged:?}");
    assert!(staged.iter().all(|name| name.contains("pipeline")), "{staged:?}");
    assert_eq!(of(Some("pp=8")), ["pipeline"]);
    assert!(of(None).iter().all(|name| !name.contains("pipeline")));
}

#[test]
fn plans_are_stable_and_read_back() {
    let (a, b) = (plan_of(&Fake::SMALL, &Request::new(8)), plan_of(&Fake::SMALL, &Request::new(8)));
    assert_eq!(a.to_json(), b.to_json());
    // A fake's plan is of no model, so it is read without the checks.
    let read: Plan = serde_json::from_str(&a.to_json()).unwrap();
    assert_eq!(read, a);
    assert_eq!(read.to_json(), a.to_json());
    assert_eq!(plan::diff(&a, &read), []);
}

#[test]
fn differences_are_named_by_path() {
    let a = plan_of(&Fake::SMALL, &Request { strategy: Some("ulysses".into()), ..Request::new(8) });
    let b = plan_of(&Fake::SMALL, &Request { strategy: Some("megatron-tp".into()), ..Request::new(8) });
    let text: Vec<String> = plan::diff(&a, &b).iter().map(ToString::to_string).collect();
    insta::assert_snapshot!(text.join("\n"));
}

#[test]
fn broken_plans_are_refused_by_field() {
    let good = plan_of(&Fake::SMALL, &Request::new(8)).to_json();
    let broken = |from: &str, to: &str| {
        assert!(good.contains(from), "{from}");
        Plan::from_json(&Registry::default(), "plan.json", &good.replacen(from, to, 1)).unwrap_err()
    };
    for (from, to, code, field) in [
        ("\"version\": 6", "\"version\": 7", "M32", "`version` 7"),
        ("\"version\": 6", "\"version\": \"two\"", "M32", "version"),
        ("\"version\": 6,", "", "M31", "version"),
        ("\"gpus\": 8,", "", "M31", "gpus"),
        ("\"gpus\": 8,", "\"gpus\": -8,", "M31", "gpus"),
        ("\"gpus\": 8,", "\"gpus\": 16,", "M33", "gpus"),
        ("\"digest\": \"", "\"digest\": \"0", "M33", "model.digest"),
        ("\"devices_per_node\"", "\"devices_per_rack\"", "M31", "cluster.devices_per_rack"),
    ] {
        let d = broken(from, to);
        assert_eq!(d.code, code, "{d}");
        assert!(d.message.contains(field), "{d}");
    }
    for cut in (0..good.len() - 2).filter(|&i| good.is_char_boundary(i)).step_by(211) {
        assert_eq!(Plan::from_json(&Registry::default(), "plan.json", &good[..cut]).unwrap_err().code, "M30");
    }
}

#[test]
fn the_published_schema_is_current() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/book/src/plan.schema.json");
    let published = std::fs::read_to_string(path).unwrap_or_default();
    if std::env::var_os("ITHACA_BLESS").is_some() {
        std::fs::write(path, plan::schema()).unwrap();
        return;
    }
    assert!(
        published == plan::schema(),
        "docs/book/src/plan.schema.json is stale: run the tests with ITHACA_BLESS=1"
    );
}
