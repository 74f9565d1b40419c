//! An operation as an expression of PyTorch.

use ithaca_ir::ops::attention::TABLE;
use ithaca_ir::ops::{
    Attention, Binary, Cache, Experts, Fused, Gradient, Keyed, Loss, Optimizer, Random, Returns,
    RotateAppend, Sides, Window,
};
use ithaca_ir::{Diagnostic, DimId, Node, Op, TensorType};

use super::function::{Scope, place};
use super::python::{mask, real, stored_name, string};
use super::terms::{bounds, dtype, lacks, unary};

impl Scope<'_> {
    /// The expression of an operation that every rank carries out by itself.
    ///
    /// # Errors
    /// `S42`, `S43`.
    pub(super) fn expression(&self, node: &Node) -> Result<String, Diagnostic> {
        let x = |i: usize| self.of(node.operands[i]).to_owned();
        let ty = |i: usize| self.function.ty(node.operands[i]);
        let text = |i: usize| self.ty(node.operands[i]);
        let result = |i: usize| self.ty(node.results[i]);
        let result_type = |i: usize| self.function.ty(node.results[i]);
        let dim = |dim: DimId| string(&self.module.space.dims[dim].name);
        let dims = |i: usize| string(&self.dims(ty(i)));
        let at = |i: usize, over: DimId| ty(i).position(over).unwrap_or_default();
        let all = || node.operands.iter().map(|&v| self.of(v)).collect::<Vec<_>>().join(", ");
        let space = &self.module.space;
        Ok(match &node.op {
            Op::Param(b) => format!("weight({}, {}{})", stored_name(&b.name), result(0), place(b)),
            Op::State(b) => format!("state({}, {}{})", stored_name(&b.name), result(0), place(b)),
            Op::Input(b) => format!("given({}, {}{})", stored_name(&b.name), result(0), place(b)),
            Op::Fill { value } => format!("fill({}, {})", real(*value), result(0)),
            Op::Positions { padding } => format!("positions({padding}, {})", result(0)),
            Op::Einsum => self.einsum(&[ty(0), ty(1)], result_type(0), &[x(0), x(1)]),
            Op::AccumulateProduct => {
                format!("{} + {}", x(2), self.einsum(&[ty(0), ty(1)], result_type(0), &[x(0), x(1)]))
            }
            Op::Sum => self.einsum(&[ty(0)], result_type(0), &[x(0)]),
            Op::Expand => format!(
                "expand({}, {}, {}, {})",
                x(0),
                dims(0),
                string(&self.dims(result_type(0))),
                result(0)
            ),
            Op::Select { over, position } => {
                format!("select({}, {}, {}, {position})", x(0), text(0), dim(*over))
            }
            Op::Embed { over, .. } => format!("embed({}, {}, {}, {})", x(0), x(1), text(0), dim(*over)),
            Op::Scale { factor } => format!("{} * {}", x(0), real(*factor)),
            Op::Clamp { min, max } => format!("{}.clamp({})", x(0), bounds(*min, *max)),
            Op::Cast { to } => format!("{}.to({})", x(0), dtype(*to)),
            Op::Unary(f) => unary(*f, &x(0)),
            Op::Binary(f) => {
                let y = self.aligned(&x(1), ty(1), ty(0));
                match f {
                    Binary::Add => format!("{} + {y}", x(0)),
                    Binary::Sub => format!("{} - {y}", x(0)),
                    Binary::Mul => format!("{} * {y}", x(0)),
                    Binary::Div => format!("{} / {y}", x(0)),
                    Binary::LogAddExp => format!("log_add_exp({}, {y})", x(0)),
                }
            }
            Op::Fused(Fused::BiasProduct { of }) => {
                let product = self.einsum(&[ty(0), ty(1)], result_type(0), &[x(0), x(1)]);
                let mut sum = format!("{product} + {}", self.aligned(&x(2), ty(2), result_type(0)));
                if node.operands.len() > 3 {
                    sum = format!("{} + {sum}", x(3));
                }
                of.map_or_else(|| sum.clone(), |f| unary(f, &sum))
            }
            Op::Fused(Fused::ProductPair) => {
                let product = |i: usize| self.einsum(&[ty(0), ty(i)], result_type(0), &[x(0), x(i)]);
                format!("{}, {}", product(1), product(2))
            }
            Op::Fused(Fused::Gated { of, limit }) => {
                let [mut input, mut factor] = [x(0), x(1)];
                if let Some(limit) = *limit {
                    input = format!("{input}.clamp({})", bounds(None, Some(limit)));
                    factor = format!("{factor}.clamp({})", bounds(Some(-limit), Some(limit)));
                }
                if node.operands.len() > 2 {
                    factor = format!("({factor} + {})", x(2));
                }
                format!("{} * {factor}", unary(*of, &input))
            }
            Op::Fused(Fused::GatedBackward { of, limit }) => {
                let limit = limit.map(|limit| format!(", limit={}", real(limit))).unwrap_or_default();
                format!("gated_backward({}, of={}{limit})", all(), string(of.name()))
            }
            Op::Fused(Fused::AddRmsNorm { over, eps, offset }) => {
                let w = self.aligned(&x(2), ty(2), ty(0));
                let (at, eps, offset) = (at(0, *over), real(*eps), real(*offset));
                format!("add_rms_norm({}, {}, {w}, {at}, {eps}, {offset})", x(0), x(1))
            }
            Op::Fused(Fused::AddLayerNorm { over, eps }) => {
                let [w, b] = [2, 3].map(|i| self.aligned(&x(i), ty(i), ty(0)));
                format!("add_layer_norm({}, {}, {w}, {b}, {}, {})", x(0), x(1), at(0, *over), real(*eps))
            }
            Op::Window(Window::Concat { .. }) => {
                format!("concat({}, {}, {}, {})", x(0), x(1), dims(0), dims(1))
            }
            Op::Window(Window::Cut { to, start }) => {
                format!("{}.narrow(-1, {start}, {}).contiguous()", x(0), space.size(*to))
            }
            Op::RmsNorm { over, eps, offset } => {
                let w = self.aligned(&x(1), ty(1), ty(0));
                let offset =
                    if *offset == 0.0 { String::new() } else { format!(", offset={}", real(*offset)) };
                format!("rms_norm({}, {w}, {}, eps={}{offset})", x(0), at(0, *over), real(*eps))
            }
            Op::Gradient(Gradient::RmsNorm { over, eps, offset }) => {
                let w = self.aligned(&x(1), ty(1), ty(0));
                format!(
                    "rms_norm_backward({}, {w}, {}, {}, eps={}, lacks={}, offset={})",
                    x(0),
                    x(2),
                    at(0, *over),
                    real(*eps),
                    lacks(ty(0), ty(1)),
                    real(*offset)
                )
            }
            Op::RmsScale { over, eps } | Op::Gradient(Gradient::RmsScale { over, eps }) => {
                let n: u64 = over.iter().map(|&d| space.size(d)).product();
                let [squares, w] = [1, 2].map(|i| self.aligned(&x(i), ty(i), ty(0)));
                let operands = format!("{}, {squares}, {w}", x(0));
                if matches!(node.op, Op::RmsScale { .. }) {
                    format!("rms_scale({operands}, {n}, {})", real(*eps))
                } else {
                    let lacks = format!("({}, {})", lacks(ty(0), ty(1)), lacks(ty(0), ty(2)));
                    format!("rms_scale_backward({operands}, {}, {n}, {}, {lacks})", x(3), real(*eps))
                }
            }
            Op::LayerNorm { over, eps } => {
                let [w, b] = [1, 2].map(|i| self.aligned(&x(i), ty(i), ty(0)));
                format!("layer_norm({}, {w}, {b}, {}, eps={})", x(0), at(0, *over), real(*eps))
            }
            Op::Gradient(Gradient::LayerNorm { over, eps }) => {
                let w = self.aligned(&x(1), ty(1), ty(0));
                let lacks = lacks(ty(0), ty(1));
                format!(
                    "layer_norm_backward({}, {w}, {}, {}, eps={}, lacks={lacks})",
                    x(0),
                    x(2),
                    at(0, *over),
                    real(*eps)
                )
            }
            Op::Softmax { over } => format!("F.softmax({}, {})", x(0), at(0, *over)),
            Op::Gradient(Gradient::Softmax { over }) => {
                format!("softmax_backward({}, {}, {})", x(0), x(1), at(0, *over))
            }
            Op::Rotary(r) => {
                let attrs = self.attributes(node, &["over"]);
                format!("rotary({}, {}, {}, {}, {}{attrs})", x(0), x(1), dims(0), dims(1), dim(r.over))
            }
            Op::RotateAppend(rotated) => {
                let operand = |i: Option<usize>| i.map_or("None".to_owned(), x);
                let types: Vec<&TensorType> = (0..node.operands.len()).map(ty).collect();
                let positions = rotated.positions_type(space, &types);
                let positions = positions.map_err(|error| Diagnostic::new("S43", error.message))?;
                let rows = (0..RotateAppend::START + 2).map(x).collect::<Vec<_>>().join(", ");
                format!(
                    "rotate_append({rows}, {}, {}, {}{})",
                    operand(rotated.table()),
                    operand(rotated.queries()),
                    [
                        text(0),
                        text(2),
                        self.type_text(&positions),
                        rotated.queries().map_or("None".to_owned(), text)
                    ]
                    .join(", "),
                    self.attributes(node, &["queries"]),
                )
            }
            Op::Attention(a) => self.attended(a, &all(), [text(0), text(1)])?,
            Op::AttendPages { attention: a, pages, slots } => {
                let types: Vec<&TensorType> = (0..node.operands.len()).map(ty).collect();
                let seen = a.of_gathered(space, [*pages, *slots], &types, |seen| {
                    [1, 2].map(|i| self.type_text(seen[i]))
                });
                let gathered = |i: usize| {
                    let [pages, slots, keys] = [*pages, *slots, a.keys].map(dim);
                    let types = format!("{}, {}", text(i), seen[i - 1]);
                    format!("gather_pages({}, {}, {types}, {pages}, {slots}, {keys})", x(i), x(TABLE))
                };
                let operands = [x(0), gathered(1), gathered(2), x(3)].join(", ");
                self.attended(a, &operands, [text(0), seen[0].clone()])?
            }
            Op::AttentionBackward(a) => {
                format!("attention_backward({}, {})", all(), self.attention(a, [text(0), text(1)])?)
            }
            Op::Scores { attention, columns } => {
                let ty = result_type(0);
                let columns = space.max_extent(*columns, ty.axes_of(*columns));
                format!(
                    "scores({}, columns={columns}, {})",
                    all(),
                    self.attention(attention, [text(0), text(1)])?
                )
            }
            Op::Weigh { attention, .. } => {
                // The queries and heads of lse, the tokens of v.
                let mut queries = ty(1).clone();
                queries.dims.push(attention.width);
                queries.layout.split.push(Default::default());
                let types = [self.type_text(&queries), text(2)];
                format!("weigh({}, to={}, {})", all(), result(0), self.attention(attention, types)?)
            }
            Op::Merge => format!("merge({})", all()),
            Op::MergeParts { .. } => format!("merge_parts({})", all()),
            Op::Accumulate => format!("accumulate({})", all()),
            Op::Sink => format!("sink({})", all()),
            Op::Gradient(Gradient::Sink) => {
                format!("sink_backward({}, {})", all(), lacks(ty(2), result_type(2)))
            }
            Op::RowLse { over, parts } => {
                let parts = if parts.is_some() { ", parts=True" } else { "" };
                format!("row_lse({}, {}, {}{parts})", x(0), text(0), dim(*over))
            }
            Op::Repeat { from, to } => {
                format!("repeat({}, {}, {}, {}, {})", x(0), text(0), result(0), dim(*from), dim(*to))
            }
            Op::SumCopies { from, to } => {
                format!("sum_copies({}, {}, {}, {}, {})", x(0), text(0), result(0), dim(*from), dim(*to))
            }
            Op::Take { to } => format!("take({}, {}, {})", x(0), text(0), dim(*to)),
            Op::Join { to } => {
                let first = result_type(0).position(*to).map(|i| dim(ty(0).dims[i])).unwrap_or_default();
                format!("join({}, text={}, to={}, first={first})", all(), result(0), dim(*to))
            }
            Op::Slice { .. } => format!("local_slice({}, {}, {})", x(0), text(0), result(0)),
            Op::Random(Random::Key { seed }) => format!("key({seed})"),
            Op::Random(Random::FoldIn) => format!("fold_in({})", all()),
            Op::Random(Random::LayerKey) => format!("layer_key({}, layer)", x(0)),
            Op::Random(Random::DropoutMask { rate, seed }) => {
                format!("dropout_mask({}, {}, {}, {seed})", x(0), result(0), real(*rate))
            }
            Op::Random(Random::Dropout { rate }) => format!("dropout({}, {})", all(), real(*rate)),
            Op::Experts(experts) => self.experts(node, experts),
            Op::Loss(Loss::CrossEntropy { over, ignore }) => {
                format!("cross_entropy({}, {}, {}, {}, {ignore})", all(), text(0), text(1), dim(*over))
            }
            Op::Gradient(Gradient::CrossEntropy { over, ignore }) => {
                format!(
                    "cross_entropy_backward({}, {}, {}, {}, {ignore})",
                    all(),
                    text(0),
                    text(1),
                    dim(*over)
                )
            }
            Op::Loss(Loss::Pick { over, ignore }) => {
                format!("pick({}, {}, {}, {}, {ignore})", all(), text(0), text(1), dim(*over))
            }
            Op::Loss(Loss::Valid { ignore }) => {
                format!("valid({}, {}, {ignore}, {})", x(0), text(0), result(0))
            }
            Op::Gradient(Gradient::Unary(of)) => format!("unary_backward({}, {})", all(), string(of.name())),
            Op::Gradient(Gradient::Clamp { min, max }) => {
                format!("torch.where({} == {}.clamp({}), {}, 0.0)", x(0), x(0), bounds(*min, *max), x(1))
            }
            Op::Gradient(Gradient::Embed { over, padding }) => {
                let padding = padding.map(|row| format!(", padding={row}")).unwrap_or_default();
                format!(
                    "embed_backward({}, {}, {}, {}, {}{padding})",
                    all(),
                    result(0),
                    dim(*over),
                    dims(0),
                    dims(1)
                )
            }
            Op::Optimizer(Optimizer::AdamW(_)) => format!("adamw({}{})", all(), self.attributes(node, &[])),
            Op::Optimizer(Optimizer::ClipFactor { max_norm }) => {
                format!("clip_factor({}, {})", x(0), real(*max_norm))
            }
            Op::Cache(cache) => match cache {
                Cache::Advance => format!("{} + {}", x(0), x(1)),
                Cache::TokenPositions { rows } => {
                    format!("token_positions({}, {}, {})", all(), result(0), dim(*rows))
                }
                Cache::Append { over, rows, wraps } => {
                    let wraps = if *wraps { ", wraps=True" } else { "" };
                    let [over, rows] = [dim(*over), dim(*rows)];
                    format!("append({}, {}, {}, {over}, {rows}{wraps})", all(), text(0), text(1))
                }
                Cache::AppendPages { after: Some(_), .. } | Cache::Upload => {
                    let message = "states in host memory have no form in PyTorch";
                    let help = "plan without `--offload`, emit `--target cuda`, or run the plan";
                    return Err(Diagnostic::new("S43", message).help(help));
                }
                Cache::AppendPages { pages, slots, rows, .. } => format!(
                    "append_pages({}, {}, {}, {}, {}, {})",
                    all(),
                    text(0),
                    text(1),
                    dim(*pages),
                    dim(*slots),
                    dim(*rows)
                ),
                Cache::GatherPages { pages, slots, over, .. } => format!(
                    "gather_pages({}, {}, {}, {}, {}, {})",
                    all(),
                    text(0),
                    result(0),
                    dim(*pages),
                    dim(*slots),
                    dim(*over)
                ),
                Cache::LastToken { over } => format!("last_token({}, {}, {})", all(), text(0), dim(*over)),
                Cache::Argmax { over, parts } => {
                    let parts = if parts.is_some() { ", parts=True" } else { "" };
                    let first = if node.results.len() == 1 { "[0]" } else { "" };
                    format!("argmax({}, text={}, over={}{parts}){first}", all(), text(0), dim(*over))
                }
                Cache::Choose => format!("torch.where({} > 0, {}, {})", x(0), x(1), x(2)),
            },
            op => return Err(self.refused(op)),
        })
    }

    fn refused(&self, op: &Op) -> Diagnostic {
        let message = format!("`{}` of `@{}` has no form in PyTorch", op.name(), self.function.name);
        Diagnostic::new("S43", message).help("emit `--target cuda`, or run the plan")
    }

    /// An attention of these operands, with queries and keys of these types.
    fn attended(&self, a: &Attention, operands: &str, types: [String; 2]) -> Result<String, Diagnostic> {
        let returns = match a.returns {
            Returns::Output => String::new(),
            other => format!(", returns={}", string(other.name())),
        };
        let parts = if a.parts.is_some() { ", parts=True" } else { "" };
        Ok(format!("attention({operands}, {}{returns}{parts})", self.attention(a, types)?))
    }

    /// The keyword arguments of attention, for queries and keys of these types.
    fn attention(&self, a: &Attention, [q, k]: [String; 2]) -> Result<String, Diagnostic> {
        let mut out = format!("types=({q}, {k}), mask={}, scale={}", mask(&a.mask), real(a.scale));
        if let Some(cap) = a.softcap {
            out.push_str(&format!(", softcap={}", real(cap)));
        }
        if let Some(bias) = a.bias {
            let sides = match bias.sides {
                Sides::Both => "both",
                Sides::Before => "before",
            };
            let buckets = string(&self.module.space.dims[bias.buckets].name);
            out.push_str(&format!(", bias=({buckets}, {}, \"{sides}\")", bias.max_distance));
        }
        if let Some(dropout) = a.dropout {
            if dropout.keyed == Keyed::Stream {
                return Err(crate::dropout_of_a_device());
            }
            out.push_str(&format!(", dropout=({}, {})", real(dropout.rate), dropout.seed));
        }
        if a.starts {
            out.push_str(", starts=True");
        }
        if a.ends {
            out.push_str(", ends=True");
        }
        if a.scaled {
            let message = "attention on a cache of eight bits has no form in PyTorch";
            return Err(
                Diagnostic::new("S43", message).help("plan with `--cache-type bf16`, or run the plan")
            );
        }
        if a.wraps {
            let [keys, queries] = [a.keys, a.queries].map(|dim| self.module.space.dims[dim].valid);
            out.push_str(&format!(", ring=({keys}, {queries})"));
        }
        Ok(out)
    }

    fn experts(&self, node: &Node, experts: &Experts) -> String {
        let space = &self.module.space;
        let operands: Vec<&str> = node.operands.iter().map(|&v| self.of(v)).collect();
        let all = operands.join(", ");
        let groups = |shared: &ithaca_ir::ops::experts::Shared| {
            let [sequences, tokens] = shared.tokens(space).unwrap_or([1, 1]);
            format!("({sequences}, {tokens})")
        };
        let slots_of = |value| self.ty(value);
        match experts {
            Experts::Route(route) | Experts::RouteBackward(route) => {
                let mut attrs = format!(
                    "scoring={}, gates={}, scale={}",
                    string(route.scoring.name()),
                    string(route.gates.name()),
                    real(route.scale)
                );
                if matches!(experts, Experts::RouteBackward(_)) {
                    return format!("route_backward({all}, {attrs})");
                }
                if let Some(groups) = route.groups {
                    attrs.push_str(&format!(", groups=({}, {})", groups.kept, groups.count));
                }
                format!("route({all}, top={}, {attrs})", space.size(route.top))
            }
            Experts::Deal(deal) => {
                let bound = deal.bound.map(|x| format!(", bound={}", real(x))).unwrap_or_default();
                format!(
                    "deal({all}, {}, {}, {}{bound})",
                    groups(&deal.shared),
                    space.size(deal.experts),
                    space.size(deal.shared.slots)
                )
            }
            Experts::Dispatch(slots) => {
                format!("dispatch({all}, text={}, each={})", slots_of(node.results[0]), groups(&slots.shared))
            }
            Experts::Combine(slots) => {
                format!("combine({all}, text={}, each={})", slots_of(node.operands[1]), groups(&slots.shared))
            }
            Experts::Products(slots) => {
                format!(
                    "slot_products({all}, text={}, each={})",
                    slots_of(node.operands[1]),
                    groups(&slots.shared)
                )
            }
        }
    }
}
