//! `overlap`: a collective and its adjacent kernels are cut into chunks, so one chunk is sent while another is
//! computed.
//!
//! ```text
//! %q1 = all_to_all %q {axis=u, split=h, concat=s}
//! %o1 = attention %q1, %k1, %v1 {heads=h, kv_heads=k, …}
//! %o = all_to_all %o1 {axis=u, split=s, concat=h}
//! ```
//! becomes, with two chunks,
//! ```text
//! %q0 = take %q {to=h_0}
//! %q10 = all_to_all %q0 {axis=u, split=h_0, concat=s}
//! %q1 = take %q {to=h_1}
//! %q11 = all_to_all %q1 {axis=u, split=h_1, concat=s}     is sent while
//! %o10 = attention %q10, …  {heads=h_0, …}                 is computed
//! …
//! %o = join %o0, %o1 {to=h}
//! ```
//! A *region* is a set of operations that are cut along a dimension in which all of them are parallel: heads around
//! attention, tokens around the matrix products of tensor parallelism (all-gather ∘ matmul, matmul ∘ reduce-scatter:
//! Wang et al., ASPLOS 2023). Factor rules decide which operations are parallel; the pass does not depend on
//! strategies. Streams run tasks in program order, so the pass orders chunks as a software pipeline: each step first
//! sends the next chunk, then computes the chunk that has arrived.

mod chunk;
mod region;

use std::collections::BTreeMap;

use ithaca_ir::module::Level;
use ithaca_ir::verify::Verified;
use ithaca_ir::{Diagnostic, Diagnostics, Module};
use ithaca_pass::{Context, Pass, options};
use serde::{Deserialize, Serialize};

/// The pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Overlap {
    /// The maximum number of chunks; a region uses the largest number up to it that divides its dimension.
    #[serde(deserialize_with = "options::whole::<_, 2, MAX_CHUNKS>")]
    pub chunks: u64,
}

impl Default for Overlap {
    /// Four chunks: they hide three quarters of a collective, and kernels stay large.
    fn default() -> Self {
        Self { chunks: 4 }
    }
}

/// Options, as `list passes` shows them.
pub const OPTIONS: &str = "chunks=N";

/// The maximum number of chunks.
pub const MAX_CHUNKS: u64 = 64;

impl Pass for Overlap {
    fn name(&self) -> &'static str {
        "overlap"
    }

    fn options(&self) -> Vec<(String, String)> {
        vec![("chunks".to_owned(), self.chunks.to_string())]
    }

    fn run(&self, module: Verified<'_>, cx: &mut Context<'_>) -> Result<Module, Diagnostics> {
        let module = module.module();
        if module.level == Level::Sharded {
            let message = "`overlap` needs a per-rank program, but this one has reshards";
            return Err(vec![Diagnostic::new("P03", message).help("run `lower-reshards` first")]);
        }
        let mut chunked = module.emptied(module.level);
        // The number of regions by number of chunks.
        let mut regions: BTreeMap<u64, u64> = BTreeMap::new();
        for function in module.functions.values() {
            let mut function = function.clone();
            // A chunked region has new dimensions, so no collective is found twice.
            while let Some((region, chunks)) = region::find(&chunked.space, &function, self.chunks) {
                if !cx.rewrite() {
                    break;
                }
                *regions.entry(chunks).or_default() += 1;
                let cuts = chunk::declare(&mut chunked.space, &region, chunks);
                function = chunk::cut(&chunked.space, &chunked.functions, &function, &region, &cuts)?;
            }
            chunked.functions.push(function);
        }
        if regions.is_empty() {
            let why = "no collective has an adjacent kernel that can be cut into chunks with it";
            cx.note(format!("`overlap` has no effect: {why}"));
        }
        let most = self.chunks;
        for (chunks, n) in regions.range(..most) {
            let (noun, is) = if *n == 1 { ("region", "is") } else { ("regions", "are") };
            cx.note(format!(
                "`overlap`: {n} {noun} of the program {is} cut into {chunks} chunks, not {most}: the number of chunks has to divide the dimension"
            ));
        }
        Ok(chunked)
    }
}
