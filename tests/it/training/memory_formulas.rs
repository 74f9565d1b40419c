//! What the forward pass keeps of a layer, against the formulas of Korthikanti et al. (Reducing activation recomputation in
//! large transformer models, arXiv 2205.05198, equations 1 to 6 and section 5).
//!
//! The layer is written out, attention as well: products, a softmax, dropout. Nothing is counted here but what the compiled
//! schedule has: the stacks that its forward call writes for its backward call, the growth of the arena with the number of
//! layers, and the weights that it loads. The paper's assumptions, which the program states: 16-bit values, masks of one
//! byte, statistics of norms and the causal mask not counted (the program has no mask, the compiler keeps no statistics),
//! a width of `4h` in the MLP.

use ithaca_ir::schedule::{Schedule, Work};
use ithaca_ir::{Module, diagnostic, text};
use ithaca_passes::cluster::Cluster;
use ithaca_passes::compile::compile;
use ithaca_passes::differentiate::{Differentiate, Recompute, Training};
use ithaca_passes::memory;
use ithaca_passes::pass::{Context, Pass, Unwatched, Volume, run_passes};
use ithaca_passes::shard::{ShardOptions, parse_mesh};

/// A layer: `s` tokens, `b` sequences, width `h`, `a` heads, over `t` ranks.
#[derive(Clone, Copy, Debug)]
struct Case {
    s: u64,
    b: u64,
    h: u64,
    a: u64,
    t: u64,
}

const CASES: [Case; 5] = [
    Case { s: 64, b: 2, h: 64, a: 4, t: 2 },
    Case { s: 32, b: 1, h: 128, a: 8, t: 4 },
    Case { s: 128, b: 4, h: 64, a: 8, t: 8 },
    Case { s: 96, b: 3, h: 192, a: 6, t: 2 },
    Case { s: 256, b: 1, h: 32, a: 4, t: 4 },
];

impl Case {
    fn sbh(self) -> u64 {
        self.s * self.b * self.h
    }

    /// `5as²b`: the softmax, its mask, and what the mask leaves.
    fn attention(self) -> u64 {
        5 * self.a * self.s * self.s * self.b
    }

    /// A training step of `layers` layers in `dtype`.
    fn step(self, layers: u64, dtype: &str, recompute: Recompute) -> Module {
        let Case { s, b, h, a, .. } = self;
        let (width, inner) = (h / a, 4 * h);
        let scale = 1.0 / (width as f64).sqrt();
        let program = format!(
            r#"ithaca 1 program
model "a GPT layer without flash attention"
dim b = {b}
dim s = {s}
dim t = {s}
dim m = {h}
dim h = {a}
dim d = {width}
dim f = {inner}

func @block(%x: {dtype}[b s m], %key: i32[]) {{
  %own = layer_key %key : i32[]
  %g1 = param {{name="{{layer}}.norm1.weight"}} : {dtype}[m]
  %c1 = param {{name="{{layer}}.norm1.bias"}} : {dtype}[m]
  %n1 = layer_norm %x, %g1, %c1 {{over=m, eps=0.00001}} : {dtype}[b s m]
  %wq = param {{name="{{layer}}.q.weight"}} : {dtype}[h d m]
  %bq = param {{name="{{layer}}.q.bias"}} : {dtype}[h d]
  %q0 = einsum %n1, %wq : {dtype}[b h s d]
  %q = add %q0, %bq : {dtype}[b h s d]
  %wk = param {{name="{{layer}}.k.weight"}} : {dtype}[h d m]
  %bk = param {{name="{{layer}}.k.bias"}} : {dtype}[h d]
  %k0 = einsum %n1, %wk : {dtype}[b h d s]
  %k1 = add %k0, %bk : {dtype}[b h d s]
  %k = cut %k1 {{to=t, start=0}} : {dtype}[b h d t]
  %wv = param {{name="{{layer}}.v.weight"}} : {dtype}[h d m]
  %bv = param {{name="{{layer}}.v.bias"}} : {dtype}[h d]
  %v0 = einsum %n1, %wv : {dtype}[b h d s]
  %v1 = add %v0, %bv : {dtype}[b h d s]
  %v = cut %v1 {{to=t, start=0}} : {dtype}[b h d t]
  %scores = einsum %q, %k : {dtype}[b h s t]
  %scaled = scale %scores {{factor={scale:?}}} : {dtype}[b h s t]
  %weights = softmax %scaled {{over=t}} : {dtype}[b h s t]
  %m0 = dropout_mask %own {{rate=0.1, seed=0}} : bool[b h s t]
  %left = dropout %weights, %m0 {{rate=0.1}} : {dtype}[b h s t]
  %mixed = einsum %left, %v : {dtype}[b s h d]
  %wo = param {{name="{{layer}}.o.weight"}} : {dtype}[m h d]
  %bo = param {{name="{{layer}}.o.bias"}} : {dtype}[m]
  %o0 = einsum %mixed, %wo : {dtype}[b s m]
  %o1 = add %o0, %bo : {dtype}[b s m]
  %m1 = dropout_mask %own {{rate=0.1, seed=1}} : bool[b s m]
  %o = dropout %o1, %m1 {{rate=0.1}} : {dtype}[b s m]
  %attended = add %x, %o : {dtype}[b s m]
  %g2 = param {{name="{{layer}}.norm2.weight"}} : {dtype}[m]
  %c2 = param {{name="{{layer}}.norm2.bias"}} : {dtype}[m]
  %n2 = layer_norm %attended, %g2, %c2 {{over=m, eps=0.00001}} : {dtype}[b s m]
  %w1 = param {{name="{{layer}}.up.weight"}} : {dtype}[f m]
  %b1 = param {{name="{{layer}}.up.bias"}} : {dtype}[f]
  %u0 = einsum %n2, %w1 : {dtype}[b s f]
  %u1 = add %u0, %b1 : {dtype}[b s f]
  %u = gelu %u1 : {dtype}[b s f]
  %w2 = param {{name="{{layer}}.down.weight"}} : {dtype}[m f]
  %b2 = param {{name="{{layer}}.down.bias"}} : {dtype}[m]
  %y0 = einsum %u, %w2 : {dtype}[b s m]
  %y1 = add %y0, %b2 : {dtype}[b s m]
  %m2 = dropout_mask %own {{rate=0.1, seed=2}} : bool[b s m]
  %y2 = dropout %y1, %m2 {{rate=0.1}} : {dtype}[b s m]
  %y = add %attended, %y2 : {dtype}[b s m]
  return %y
}}

func @main() {{
  %x = input {{name="x"}} : {dtype}[b s m]
  %key = key {{seed=1}} : i32[]
  %y = call %x, %key {{callee=@block, layers=0..{layers}}} : {dtype}[b s m]
  %wide = cast %y {{to=f32}} : f32[b s m]
  %loss = sum %wide : f32[]
  return loss = %loss
}}
"#
        );
        let shown = |d: &[ithaca_ir::Diagnostic]| diagnostic::render(d, None);
        let module = text::parse(&program).unwrap_or_else(|d| panic!("{}", shown(&d)));
        let training = Training { recompute, optimizer: None, ..Training::default() };
        let pass: Box<dyn Pass> = Box::new(Differentiate::new(training));
        run_passes(module, &[pass], &mut Context::new(&Volume), &mut Unwatched)
            .unwrap_or_else(|d| panic!("{}", shown(&d)))
    }

    fn schedule(self, layers: u64, (dtype, recompute): (&str, Recompute), layout: Layout) -> Schedule {
        let (strategy, mesh) = match layout {
            Layout::Serial => ("megatron-tp", "tp=1".to_owned()),
            Layout::Tensor => ("megatron-tp", format!("tp={}", self.t)),
            Layout::TensorAndSequence => ("megatron-tp-sp", format!("tp={}", self.t)),
        };
        let options = ShardOptions::new(strategy, parse_mesh(&mesh).unwrap());
        let cluster = Cluster::named("dgx-a100-80gb").unwrap();
        let module = self.step(layers, dtype, recompute);
        let compiled = compile(&module, &options, &cluster);
        compiled.unwrap_or_else(|d| panic!("{self:?} {layout:?}: {}", diagnostic::render(&d, None))).schedule
    }
}

#[derive(Clone, Copy, Debug)]
enum Layout {
    Serial,
    Tensor,
    TensorAndSequence,
}

/// Bytes of what the forward call writes for its backward call, with the names of what is kept.
fn kept(schedule: &Schedule) -> (u64, Vec<(String, u64)>) {
    let main = &schedule.frames[schedule.main().unwrap()];
    let call = main.tasks.iter().find_map(|task| match &task.work {
        Work::Call { callee, scan: Some(scan), .. } if schedule.frames[*callee].name == "block" => {
            Some(&task.writes[scan.carried..])
        }
        _ => None,
    });
    let stacks = call.unwrap().iter().map(|&b| &main.buffers[b]);
    let named: Vec<(String, u64)> = stacks.map(|b| (b.name.to_string(), b.bytes(&schedule.space))).collect();
    (named.iter().map(|(_, bytes)| bytes).sum(), named)
}

#[test]
fn what_a_layer_keeps_is_what_the_formulas_say() {
    for case in CASES {
        let Case { t, .. } = case;
        let (sbh, attention) = (case.sbh(), case.attention());
        let rows = [
            (Layout::Serial, Recompute::None, 34 * sbh + attention),
            (Layout::Tensor, Recompute::None, 10 * sbh + 24 * sbh / t + attention / t),
            (Layout::TensorAndSequence, Recompute::None, (34 * sbh + attention) / t),
            (Layout::Serial, Recompute::Selective, 34 * sbh),
            (Layout::TensorAndSequence, Recompute::Selective, 34 * sbh / t),
            (Layout::Serial, Recompute::Full { every: 1 }, 2 * sbh),
        ];
        for (layout, recompute, expected) in rows {
            for dtype in ["bf16", "f16"] {
                let [two, four] = [2, 4].map(|n| case.schedule(n, (dtype, recompute), layout));
                let (bytes, named) = kept(&two);
                assert_eq!(bytes, 2 * expected, "{case:?} {layout:?} {recompute}: two layers keep {named:?}");
                assert_eq!(kept(&four).0, 4 * expected);
                let grown = four.arena_bytes() - two.arena_bytes();
                assert_eq!(grown, 2 * expected, "{case:?} {layout:?} {recompute}: the arena grows otherwise");
            }
        }
    }
}

#[test]
fn a_layer_has_the_weights_that_the_formula_says() {
    for case in CASES {
        let Case { h, .. } = case;
        let of = |layers| case.schedule(layers, ("bf16", Recompute::None), Layout::Serial);
        let cluster = Cluster::named("dgx-h100").unwrap();
        let [two, three] = [2, 3].map(|layers| memory::of_schedule(&cluster, &of(layers)).parameters);
        assert_eq!(three - two, 2 * (12 * h * h + 13 * h), "{case:?}");
    }
}
