//! Attention of few queries reads the keys and values of caches in pages where they are.
//!
//! ```text
//! %keys   = gather_pages %pages, %table {pages=p, slots=s, over=c} : bf16[b c k d]
//! %values = gather_pages %more, %table {pages=p, slots=s, over=c} : bf16[b c k d]
//! %o      = attention %q, %keys, %values, %start {…, starts=true} : bf16[b t h d]
//! ```
//! becomes
//! ```text
//! %o = attend_pages %q, %pages, %more, %start, %table {…, pages=p, slots=s} : bf16[b t h d]
//! ```
//! A copy of what a step of decoding reads would be written and read again. Many queries read each key many times, and keep
//! the copy; so does a cache with pages in host memory.

use ithaca_ir::module::{Function, Node, ValueId};
use ithaca_ir::ops::attention::TABLE;
use ithaca_ir::ops::{Attention, Cache};
use ithaca_ir::{DimId, Op, Space};

use super::graph::Flow;
use super::replace::Replacement;

/// Attention over pages that nothing else gathers.
pub(super) fn attentions(space: &Space, flow: &Flow<'_>, function: &Function) -> Vec<Replacement> {
    let of_node = |(i, node): (usize, &Node)| {
        let Op::Attention(attention) = &node.op else { return None };
        let may = attention.may_read_pages(space, function.ty(node.operands[2]));
        may.then(|| of_attention(flow, function, (i, attention))).flatten()
    };
    function.nodes.iter().enumerate().filter_map(of_node).collect()
}

fn of_attention(
    flow: &Flow<'_>,
    function: &Function,
    (i, attention): (usize, &Attention),
) -> Option<Replacement> {
    let node = &function.nodes[i];
    let mut operands = Vec::with_capacity(node.operands.len() + 1);
    let mut gathers = Vec::new();
    let mut of_table: Option<([DimId; 2], ValueId)> = None;
    for (n, &operand) in node.operands.iter().enumerate() {
        if n == TABLE {
            operands.push(of_table?.1);
        }
        if !attention.is_of_keys(n) {
            operands.push(operand);
            continue;
        }
        let maker = flow.maker(operand)?;
        let Op::Cache(Cache::GatherPages { pages, slots, over, beyond: None }) = function.nodes[maker].op
        else {
            return None;
        };
        let &[cache, table] = &function.nodes[maker].operands[..] else { return None };
        let is_alone = flow.after(maker).all(|user| user == i) && !flow.is_returned(maker);
        let is_alike = *of_table.get_or_insert(([pages, slots], table)) == ([pages, slots], table);
        if over != attention.keys || !is_alone || !is_alike {
            return None;
        }
        operands.push(cache);
        gathers.push(maker);
    }
    let ([pages, slots], table) = of_table?;
    if operands.len() == TABLE {
        operands.push(table);
    }
    let op = Op::AttendPages { attention: attention.clone(), pages, slots };
    Some(Replacement { op, operands, results: node.results.to_vec(), nodes: vec![i], before: gathers })
}

#[cfg(test)]
mod tests {
    use ithaca_ir::text;
    use ithaca_pass::{Unwatched, Volume, run_passes};

    use ithaca_ir::Op;
    use ithaca_pass::{Context, Pass};

    use crate::fuse::FuseCaches;

    /// The operations on caches of a step of `t` tokens, after the pass; `more` is a line behind the gathers.
    fn operations(t: u64, more: &str) -> Vec<&'static str> {
        let program = format!(
            "ithaca 1 per_rank\nmodel \"m\"\nmesh dcp=2\ndim b = 2\ndim t = {t}\ndim h = 4 granule 2\ndim k = 2\ndim d = 8\n\
             dim p = 6\ndim s = 4\ndim n = 3\ndim c = 12\n\nfunc @main() {{\n\
             %q = input {{name=\"q\"}} : f32[b t h d]\n%start = input {{name=\"start\"}} : i32[b]\n\
             %table = input {{name=\"pages\"}} : i32[b n]\n%keys = input {{name=\"k\"}} : f32[p s k d]\n\
             %values = input {{name=\"v\"}} : f32[p s k d]\n\
             %k = gather_pages %keys, %table {{pages=p, slots=s, over=c}} : f32[b c k d]\n\
             %v = gather_pages %values, %table {{pages=p, slots=s, over=c}} : f32[b c k d]\n{more}\
             %o = attention %q, %k, %v, %start {{heads=h, kv_heads=k, queries=t, keys=c, width=d, mask=causal, scale=0.3, \
             starts=true}} : f32[b t h d]\nreturn o = %o\n}}\n"
        );
        let module = text::parse(&program).unwrap_or_else(|e| panic!("{e:?}\n{program}"));
        let passes: Vec<Box<dyn Pass>> = vec![Box::new(FuseCaches)];
        let module = run_passes(module, &passes, &mut Context::new(&Volume), &mut Unwatched).unwrap();
        let main = &module.functions[module.main().unwrap()];
        main.nodes.iter().filter(|n| !matches!(n.op, Op::Input(_))).map(|n| n.op.name()).collect()
    }

    #[test]
    fn few_queries_read_pages_where_they_are() {
        assert_eq!(operations(1, ""), ["attend_pages"]);
        assert_eq!(operations(8, ""), ["attend_pages"]);
    }

    #[test]
    fn many_queries_and_other_readers_keep_the_copy() {
        assert_eq!(operations(9, ""), ["gather_pages", "gather_pages", "attention"]);
        let more = "%x = scale %k {factor=2.0} : f32[b c k d]\n";
        assert_eq!(operations(1, more), ["gather_pages", "gather_pages", "scale", "attention"]);
    }
}
