//! Keys are rotated where they are appended to their cache, together with values, and queries with them.
//!
//! ```text
//! %at     = token_positions %start, %end {rows=t} : i32[b t]
//! %turned = rotary %q, %at {over=d, …} : bf16[b t h d]
//! %k      = rotary %key, %at {over=d, …} : bf16[b t k d]
//! %keys   = append %cache, %k, %start, %end {over=c, rows=t} : bf16[b c k d]
//! %values = append %more, %v, %start, %end {over=c, rows=t} : bf16[b c k d]
//! ```
//! becomes
//! ```text
//! %keys, %values, %turned = rotate_append %cache, %more, %key, %v, %start, %end, %q {over=d, …, slots=c, rows=t, queries=true}
//! ```
//! which is one kernel instead of five, and writes and reads the rotated keys once less. Queries that are sent before attention
//! are rotated alone: their message need not wait for values.

use ithaca_ir::Op;
use ithaca_ir::module::{Function, ValueId};
use ithaca_ir::ops::{Appended, Cache, RotateAppend};

use super::graph::Flow;
use super::replace::Replacement;

/// The places where two caches grow by the same tokens.
pub(super) fn appends(flow: &Flow<'_>, function: &Function) -> Vec<Replacement> {
    let mut found: Vec<Replacement> = Vec::new();
    for n in 0..function.nodes.len() {
        let is_taken = |n: usize| found.iter().any(|found| found.nodes.contains(&n));
        let Some(keys) = (!is_taken(n)).then(|| Keys::of(flow, function, n)).flatten() else { continue };
        let values = (0..function.nodes.len()).find(|&m| !is_taken(m) && keys.goes_with(m));
        found.extend(values.map(|values| keys.with(flow, values)));
    }
    found
}

/// An `append` of rotated keys.
struct Keys<'f> {
    function: &'f Function,
    append: usize,
    rotary: usize,
    /// The keys before, and the positions by which they are rotated.
    rotated: [ValueId; 2],
    /// Both in one, without queries.
    op: RotateAppend,
}

impl<'f> Keys<'f> {
    fn of(flow: &Flow<'_>, function: &'f Function, append: usize) -> Option<Self> {
        let node = &function.nodes[append];
        let (slots, rows, wraps, pages) = match node.op.appended()? {
            Appended { by: Cache::Append { over, rows, wraps }, start: 2 } => (over, rows, wraps, None),
            Appended {
                by: Cache::AppendPages { pages, slots, rows, beyond: None, after: None },
                start: 2,
            } => (slots, rows, false, Some(pages)),
            _ => return None,
        };
        let rotary = flow.maker(node.operands[1])?;
        let Op::Rotary(of_rotary) = &function.nodes[rotary].op else { return None };
        let &[key, positions] = &function.nodes[rotary].operands[..] else { return None };
        let op = RotateAppend { rotary: of_rotary.clone(), slots, rows, wraps, pages, queries: false };
        let at = &function.nodes[flow.maker(positions)?];
        let is_of_step = at.op == Op::Cache(op.positions()) && at.operands[..] == node.operands[2..4];
        let (ty, cache) = (function.ty(key), function.ty(node.operands[0]));
        let is_plain = node.results.len() == 1
            && ty.dtype == cache.dtype
            && ty.dims.last() == Some(&of_rotary.over)
            && ty.axes_of(rows).is_empty();
        let is_alone = flow.after(rotary).all(|user| user == append) && !flow.is_returned(rotary);
        let rotated = [key, positions];
        (is_of_step && is_plain && is_alone).then_some(Self { function, append, rotary, rotated, op })
    }

    /// Whether node `n` appends values that belong to these keys.
    fn goes_with(&self, n: usize) -> bool {
        let [keys, values] = [self.append, n].map(|n| &self.function.nodes[n]);
        let is_alike = |a: ValueId, b: ValueId| self.function.ty(a) == self.function.ty(b);
        n != self.append
            && keys.op == values.op
            && keys.operands[2..] == values.operands[2..]
            && is_alike(keys.operands[0], values.operands[0])
            && is_alike(self.rotated[0], values.operands[1])
    }

    /// The operation with the values that node `n` appends.
    fn with(self, flow: &Flow<'_>, n: usize) -> Replacement {
        let queries = (0..self.function.nodes.len()).find(|&q| self.rotates_queries(flow, q));
        let [keys, values] = [self.append, n].map(|n| &self.function.nodes[n]);
        let (mut nodes, mut before) = (vec![self.append, n], vec![self.rotary]);
        let mut operands = vec![keys.operands[0], values.operands[0], self.rotated[0], values.operands[1]];
        operands.extend(&values.operands[2..]);
        let mut results = vec![keys.result(), values.result()];
        if let Some(q) = queries {
            nodes.push(q);
            operands.push(self.function.nodes[q].operands[0]);
            results.push(self.function.nodes[q].result());
        }
        let is_replaced = |user: usize| nodes.contains(&user) || user == self.rotary;
        before.extend(
            flow.maker(self.rotated[1])
                .filter(|&at| flow.after(at).all(is_replaced) && !flow.is_returned(at)),
        );
        let op = RotateAppend { queries: queries.is_some(), ..self.op };
        Replacement { op: Op::RotateAppend(op), operands, results, nodes, before }
    }

    /// Whether node `q` rotates queries of the same tokens as these keys, and nothing sends them.
    fn rotates_queries(&self, flow: &Flow<'_>, q: usize) -> bool {
        let node = &self.function.nodes[q];
        let Some(&operand) = node.operands.first() else { return false };
        let [queries, keys] = [operand, self.rotated[0]].map(|value| self.function.ty(value));
        let tokens = keys.position(self.op.rows).map_or(0, |at| at + 1);
        let is_sent = |user: usize| self.function.nodes[user].op.is_communication();
        q != self.rotary
            && node.op == Op::Rotary(self.op.rotary.clone())
            && node.operands[1] == self.rotated[1]
            && queries.dims.last() == keys.dims.last()
            && queries.dtype == keys.dtype
            && queries.dims.get(..tokens) == keys.dims.get(..tokens)
            && queries.layout.split.get(..tokens) == keys.layout.split.get(..tokens)
            && !flow.after(q).any(is_sent)
    }
}

#[cfg(test)]
mod tests {
    use ithaca_ir::Op;
    use ithaca_ir::text;
    use ithaca_pass::{Context, Pass, Unwatched, Volume, run_passes};

    use crate::fuse::FuseCaches;

    /// The operations of a step that appends rotated keys, without sources, after the pass. `between` is a line behind the
    /// rotation of keys.
    fn operations(between: &str) -> Vec<&'static str> {
        let program = format!(
            "ithaca 1 per_rank\nmodel \"m\"\nmesh single=1\ndim b = 2\ndim t = 3\ndim h = 4 granule 2\ndim k = 2\ndim d = 8\ndim c = 12\n\n\
             func @main() {{\n%start = input {{name=\"start\"}} : i32[b]\n%end = input {{name=\"end\"}} : i32[b]\n\
             %q = input {{name=\"q\"}} : f32[b t h d]\n%key = input {{name=\"k\"}} : f32[b t k d]\n\
             %v = input {{name=\"v\"}} : f32[b t k d]\n%at = token_positions %start, %end {{rows=t}} : i32[b t]\n\
             %turned = rotary %q, %at {{over=d, width=8, theta=10000.0, scaling=none}} : f32[b t h d]\n\
             %k = rotary %key, %at {{over=d, width=8, theta=10000.0, scaling=none}} : f32[b t k d]\n{between}\
             %keys = state {{name=\"cache.key\"}} : f32[b c k d]\n\
             %longer = append %keys, %k, %start, %end {{over=c, rows=t}} : f32[b c k d]\n\
             assign %longer {{target=state, name=\"cache.key\"}}\n\
             %values = state {{name=\"cache.value\"}} : f32[b c k d]\n\
             %more = append %values, %v, %start, %end {{over=c, rows=t}} : f32[b c k d]\n\
             assign %more {{target=state, name=\"cache.value\"}}\n\
             %o = attention %turned, %longer, %more, %start {{heads=h, kv_heads=k, queries=t, keys=c, width=d, mask=causal, \
             scale=0.3, starts=true}} : f32[b t h d]\nreturn o = %o\n}}\n"
        );
        let module = text::parse(&program).unwrap_or_else(|e| panic!("{e:?}\n{program}"));
        let passes: Vec<Box<dyn Pass>> = vec![Box::new(FuseCaches)];
        let module = run_passes(module, &passes, &mut Context::new(&Volume), &mut Unwatched).unwrap();
        let printed = text::print(&module);
        let read = text::parse(&printed).unwrap_or_else(|e| panic!("{e:?}\n{printed}"));
        assert_eq!(text::print(&read), printed);
        let main = &module.functions[module.main().unwrap()];
        let is_source = |op: &Op| matches!(op, Op::Input(_) | Op::State(_));
        main.nodes.iter().filter(|n| !is_source(&n.op)).map(|n| n.op.name()).collect()
    }

    #[test]
    fn a_step_rotates_and_appends_by_one_kernel() {
        assert_eq!(operations(""), ["rotate_append", "assign", "assign", "attention"]);
    }

    #[test]
    fn another_reader_of_positions_keeps_them_and_one_of_rotated_keys_keeps_all() {
        let scaled = "%x = cast %at {to=f32} : f32[b t]\n";
        assert_eq!(operations(scaled)[..3], ["token_positions", "cast", "rotate_append"]);
        let scaled = "%x = scale %k {factor=2.0} : f32[b t k d]\n";
        let kept = [
            "token_positions",
            "rotary",
            "rotary",
            "scale",
            "append",
            "assign",
            "append",
            "assign",
            "attention",
        ];
        assert_eq!(operations(scaled), kept);
    }
}
