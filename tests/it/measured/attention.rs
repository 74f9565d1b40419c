//! Attention alone, over the GPUs of one node or of several.

use ithaca_ir::{Module, text};
use ithaca_passes::cluster::Cluster;
use ithaca_passes::compile::compile;
use ithaca_passes::shard::{OrderChoice, ShardOptions, parse_mesh};
use ithaca_passes::simulate::simulate;

use super::{Compared, Group, Row, Use};

pub(super) fn groups() -> Vec<Group> {
    vec![yunchang(), zhuzilin(), burst_engine()]
}

/// Sizes of a causal attention in bf16.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    batch: u64,
    tokens: u64,
    heads: u64,
    kv_heads: u64,
    width: u64,
}

impl Sizes {
    /// The forward pass, or both passes.
    fn program(self, is_backward: bool) -> Module {
        let Self { batch, tokens, heads, kv_heads, width } = self;
        let attributes = "heads=h, kv_heads=k, queries=s, keys=s, width=d, mask=causal, scale=0.1";
        let backward = if is_backward {
            format!(
                "  %g = input {{name=\"g\"}} : bf16[b s h d]
  %delta = input {{name=\"delta\"}} : f32[b s h]
  %dq, %dk, %dv = attention_backward %q, %x, %y, %g, %lse, %delta {{{attributes}, returns=with_lse}} : bf16[b s h d], bf16[b s k d], bf16[b s k d]
  return o = %o, dq = %dq, dk = %dk, dv = %dv
"
            )
        } else {
            "  return o = %o\n".to_owned()
        };
        let source = format!(
            "ithaca 1 program
model \"attention\"
dim b = {batch}
dim s = {tokens}
dim h = {heads} granule {}
dim k = {kv_heads}
dim d = {width}

func @main() {{
  %q = input {{name=\"q\"}} : bf16[b s h d]
  %x = input {{name=\"x\"}} : bf16[b s k d]
  %y = input {{name=\"y\"}} : bf16[b s k d]
  %o, %lse = attention %q, %x, %y {{{attributes}, returns=with_lse}} : bf16[b s h d], f32[b s h]
{backward}}}
",
            heads / kv_heads
        );
        text::parse(&source).unwrap_or_else(|e| panic!("{e:?}"))
    }

    fn seconds(
        self,
        cluster: &Cluster,
        is_backward: bool,
        (strategy, mesh): (&str, &str),
        order: OrderChoice,
    ) -> f64 {
        let options =
            ShardOptions { order: Some(order), ..ShardOptions::new(strategy, parse_mesh(mesh).unwrap()) };
        let compiled = compile(&self.program(is_backward), &options, cluster)
            .unwrap_or_else(|e| panic!("{strategy} {mesh}: {e:?}"));
        simulate(cluster, &compiled.schedule).seconds
    }
}

/// yunchang, 8 A100-80GB over NVLink: forward passes a second.
fn yunchang() -> Group {
    let cluster = Cluster::named("dgx-a100-80gb").unwrap();
    let sizes = Sizes { batch: 2, tokens: 131_072, heads: 32, kv_heads: 32, width: 32 };
    let row = |order: OrderChoice, u: u64, measured: f64| {
        let layout = match u {
            8 => ("ulysses", "ulysses=8".to_owned()),
            1 => ("ring", "ring=8".to_owned()),
            _ => ("usp", format!("ring={},ulysses={u}", 8 / u)),
        };
        let simulated = 1.0 / sizes.seconds(&cluster, false, (layout.0, &layout.1), order);
        let is_fitted = u == 8 && order == OrderChoice::Zigzag;
        let by = if is_fitted { Use::Fitted } else { Use::HeldOut };
        Row { name: format!("{order}, head degree {u}"), measured, simulated, by }
    };
    let rows = vec![
        row(OrderChoice::Zigzag, 8, 15.90),
        row(OrderChoice::Zigzag, 4, 16.03),
        row(OrderChoice::Zigzag, 2, 15.31),
        row(OrderChoice::Zigzag, 1, 13.17),
        row(OrderChoice::Contiguous, 8, 15.92),
        row(OrderChoice::Contiguous, 4, 8.72),
        row(OrderChoice::Contiguous, 2, 9.04),
    ];
    Group { source: "yunchang, 8 A100, attention forward, 1/s", compared: Compared::Absolutely, rows }
}

/// zhuzilin/ring-flash-attention, 8 H800, 8 192 tokens a GPU: passes a second.
fn zhuzilin() -> Group {
    let cluster = Cluster::named("dgx-h100").unwrap();
    let sizes = Sizes { batch: 1, tokens: 65_536, heads: 32, kv_heads: 8, width: 128 };
    let measured = [
        ("one GPU's flash / 8", "ulysses", OrderChoice::Contiguous, [73.9, 19.3], Use::Fitted),
        ("ring", "ring", OrderChoice::Contiguous, [38.5, 10.4], Use::HeldOut),
        ("zigzag", "ring", OrderChoice::Zigzag, [63.0, 17.4], Use::HeldOut),
        ("striped", "ring", OrderChoice::Striped(1), [55.0, 16.0], Use::HeldOut),
    ];
    let mut rows = Vec::new();
    for (name, strategy, order, rates, by) in measured {
        for (is_backward, measured) in [false, true].into_iter().zip(rates) {
            let simulated = if strategy == "ulysses" {
                let alone = Sizes { heads: 4, kv_heads: 1, ..sizes };
                1.0 / alone.seconds(&cluster, is_backward, ("single", ""), order)
            } else {
                1.0 / sizes.seconds(&cluster, is_backward, (strategy, "ring=8"), order)
            };
            let passes = if is_backward { "both passes" } else { "forward" };
            rows.push(Row { name: format!("{name}, {passes}"), measured, simulated, by });
        }
    }
    Group { source: "zhuzilin, 8 H800, attention, 1/s", compared: Compared::Absolutely, rows }
}

/// BurstEngine, 32 A800 in 4 nodes: TFLOP/s a GPU, forward and backward. Rings in the node were measured at half of the others'
/// rate, as tokens in order make them with a causal mask; the others cannot have been so. These orders were chosen by the
/// errors of the rows.
fn burst_engine() -> Group {
    let cluster = Cluster::named("dgx-a100-80gb").unwrap();
    let measured = [
        (
            "heads in a node, ring across",
            "usp",
            "ring=4,ulysses=8",
            OrderChoice::Zigzag,
            [136.8, 172.1, 155.1],
        ),
        (
            "ring in a node, heads across",
            "usp",
            "ulysses=4,ring=8",
            OrderChoice::Contiguous,
            [62.1, 85.6, 92.0],
        ),
        ("double ring", "loongtrain", "outer=4,ring=8,ulysses=1", OrderChoice::Zigzag, [106.7, 166.0, 155.1]),
    ];
    let mut rows = Vec::new();
    for (name, strategy, mesh, order, rates) in measured {
        for (tokens, measured) in [128 << 10, 256 << 10, 512 << 10].into_iter().zip(rates) {
            let sizes = Sizes { batch: 1, tokens, heads: 40, kv_heads: 40, width: 128 };
            let seconds = sizes.seconds(&cluster, true, (strategy, mesh), order);
            let flops = 4.0 * (tokens as f64).powi(2) * 40.0 * 128.0 * 0.5 * 3.5;
            let simulated = flops / seconds / 32.0 / 1e12;
            let name = format!("{name}, {} Ki tokens", tokens >> 10);
            rows.push(Row { name, measured, simulated, by: Use::Fitted });
        }
    }
    Group { source: "BurstEngine, 32 A800, attention, TFLOP/s a GPU", compared: Compared::AsRatios, rows }
}
