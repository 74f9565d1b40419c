//! Legality of heads: query and key/value heads that divide, are dealt out unevenly, are padded or are copied.

use ithaca_ir::layout::AxisList;
use ithaca_ir::ops::Op;
use ithaca_ir::{Diagnostic, DimId};
use num_integer::lcm;

use super::{Check, Decisions, PaddedGroups};
use crate::shard::degrees::legal_degrees;
use crate::shard::options::HeadSplit;

impl Check<'_> {
    pub(super) fn heads(
        &self,
        heads: DimId,
        kv_heads: DimId,
        decisions: &mut Decisions,
    ) -> Result<(), Diagnostic> {
        let axes = self.placement.attention_heads();
        let total = self.degree(&axes);
        if total == 1 {
            return Ok(());
        }
        let dims = &self.module.space.dims;
        let (hq, hkv) = (dims[heads].size, dims[kv_heads].size);
        let legal = |p: u64| hq % p == 0 && (hkv % p == 0 || p.is_multiple_of(hkv));
        if legal(total) {
            return self.copies((hq, hkv), kv_heads, total, decisions);
        }
        if self.options.heads == HeadSplit::Pad {
            return self.pad_heads(heads, kv_heads, total, decisions);
        }
        if self.options.heads == HeadSplit::Uneven && hkv >= total {
            decisions.uneven.extend([heads, kv_heads]);
            decisions.uneven.dedup();
            let each = |n: u64| format!("{} or {}", n.div_ceil(total) * (hq / hkv), n / total * (hq / hkv));
            decisions
                .notes
                .push(format!("{hq} query heads are split unevenly over {total} ranks: {} each", each(hkv)));
            return Ok(());
        }
        let axes = self.mesh.degrees_text(&axes);
        let refused = if hq % total != 0 {
            let message = format!(
                "{} not divide by the head degree {total} ({axes})",
                if hq == 1 { "1 query head does".to_owned() } else { format!("{hq} query heads do") }
            );
            Diagnostic::new("P20", message)
        } else {
            let message = format!(
                "{hkv} key/value heads are neither a multiple nor a divisor of the head degree {total} ({axes})"
            );
            Diagnostic::new("P21", message)
        };
        let refused = refused.help(legal_degrees(hq, "head", legal));
        Err(match self.options.heads {
            HeadSplit::Pad => refused,
            HeadSplit::Uneven => refused.help(format!(
                "`--uneven-heads` deals out the {hkv} key/value heads whole, so it reaches {hkv} ranks; `--pad-heads` in its \
                 place makes heads divide"
            )),
            HeadSplit::Even if hkv >= total => {
                refused.help(format!("`--uneven-heads` deals out the {hkv} key/value heads as they come"))
            }
            HeadSplit::Even => refused,
        })
    }

    /// Heads are padded to the fewest that divide: groups of query heads that share a key/value head, key/value heads, or both.
    fn pad_heads(
        &self,
        heads: DimId,
        kv_heads: DimId,
        total: u64,
        decisions: &mut Decisions,
    ) -> Result<(), Diagnostic> {
        let dims = &self.module.space.dims;
        let (hq, hkv) = (dims[heads].size, dims[kv_heads].size);
        let nodes = || self.module.functions.values().flat_map(|f| &f.nodes);
        let normalised = nodes().any(|n| match &n.op {
            Op::RmsScale { over, .. } => over.contains(&heads) || over.contains(&kv_heads),
            op => op.normalised().is_some_and(|over| over == heads || over == kv_heads),
        });
        if normalised {
            let message = format!("{hq} query heads cannot be padded: a norm counts all of them");
            return Err(Diagnostic::new("P20", message).help("use a head degree that divides"));
        }
        // Either ranks share key/value heads, and the query heads of each are padded for the ranks that share it; or each rank
        // has its own, and there may be some of padding with as many query heads as the others. Where every query head has a
        // key/value head, they are one dimension, and the second is as good.
        let group = hq / hkv;
        let shared = (hkv..total).filter(|k| total.is_multiple_of(*k) && heads != kv_heads);
        let shared = shared.map(|count| PaddedGroups {
            count,
            valid: group,
            size: group.next_multiple_of(total / count),
        });
        let own = PaddedGroups { count: hkv.next_multiple_of(total), valid: group, size: group };
        let padded = shared.chain([own]).min_by_key(|padded| (padded.heads(), padded.count)).unwrap_or(own);
        decisions.padded.insert(heads, padded.heads());
        if padded.count > hkv {
            decisions.padded.insert(kv_heads, padded.count);
        }
        if padded.size > group {
            decisions.padded_groups.insert(heads, padded);
            // Such a head attends to the keys of its group. Without weights it changes no result, but the weights of the output
            // projection would get a gradient.
            if nodes().any(|n| matches!(n.op, Op::AttentionBackward(_))) {
                decisions.cleared.insert(heads);
            }
        }
        decisions.notes.push(format!(
            "{hq} query heads {}are padded to {}{}; padded heads have no weights, so they reach neither the output \
             projection nor a gradient",
            if padded.count > hkv { format!("and {hkv} key/value heads ") } else { String::new() },
            if padded.count > hkv { format!("{} and {}", padded.heads(), padded.count) } else { padded.heads().to_string() },
            if padded.size > group { format!(", {} for each key/value head", padded.size) } else { String::new() },
        ));
        self.copies((padded.heads(), padded.count), kv_heads, total, decisions)
    }

    /// Key/value heads that are fewer than the ranks are copied, so that every rank has one.
    fn copies(
        &self,
        (hq, hkv): (u64, u64),
        kv_heads: DimId,
        total: u64,
        decisions: &mut Decisions,
    ) -> Result<(), Diagnostic> {
        let cache = &self.placement.cache;
        let tensor: AxisList =
            self.placement.weights.iter().filter(|a| !cache.contains(a)).copied().collect();
        let tensor = self.degree(&tensor);
        if hkv.is_multiple_of(total) {
            return Ok(());
        }
        let loaded = if hkv.is_multiple_of(tensor) {
            hkv
        } else if self.only_loaded(kv_heads) {
            lcm(hkv, tensor)
        } else {
            // An argument, and a value with a gradient, keep their heads; attention copies them, and sums the copies.
            decisions.whole.push(kv_heads);
            hkv
        };
        if !hq.is_multiple_of(loaded) {
            let message = format!("{hkv} key/value heads cannot be copied to {loaded} for {hq} query heads");
            return Err(Diagnostic::new("P21", message));
        }
        if loaded != hkv {
            decisions.copy_weights.insert(kv_heads, loaded);
        }
        if total != loaded {
            decisions.copy_activations.insert(kv_heads, total);
        }
        decisions.notes.push(format!(
            "{} replicated to {total}, {} copies of each, one for each of {total} ranks",
            match hkv {
                1 => "1 key/value head is".to_owned(),
                n => format!("{n} key/value heads are"),
            },
            total / hkv
        ));
        Ok(())
    }

    /// Whether heads come from weights alone and nothing flows back to them.
    fn only_loaded(&self, kv_heads: DimId) -> bool {
        self.module.functions.values().all(|f| {
            f.nodes.iter().all(|node| match &node.op {
                Op::Input(_) => !f.ty(node.result()).has(kv_heads),
                Op::AttentionBackward(a) => a.kv_heads != kv_heads,
                _ => true,
            })
        })
    }
}
