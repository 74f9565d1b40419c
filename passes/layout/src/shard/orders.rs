//! Which order the tokens of each sequence get.
//!
//! Unless one is asked for, the first that balances pairs within 2 % of the best, among those that the movement takes:
//! contiguous, zigzag, a zigzag inside each document if it divides.

use std::collections::BTreeMap;
use std::ops::Range;
use std::str::FromStr;

use ithaca_ir::mesh::{AxisId, Rank};
use ithaca_ir::ops::Attention;
use ithaca_ir::order::joined;
use ithaca_ir::{Diagnostic, DimId, Mask, Order, Space};
use ithaca_pass::choices::{Topic, impossible, missing};

use super::inside::Inside;
use super::options::OrderChoice;
use crate::movement::Orders;

/// Into how many parts `inside` splits its sequence `dim`; one where it has no such sequence.
fn parts(space: &Space, inside: &Inside<'_>, dim: DimId) -> u64 {
    let Attention { queries, keys, .. } = *inside.attention;
    let degree = |is: bool, axes: &[AxisId]| if is { space.mesh.degree(axes) } else { 1 };
    degree(keys == dim, &inside.axes).max(degree(queries == dim, &inside.query_axes))
}

/// An order that was chosen for balance, without its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChosenOrder {
    /// One that can be asked for.
    As(OrderChoice),
    /// A zigzag inside each document.
    Documents,
}

impl std::fmt::Display for ChosenOrder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::As(choice) => choice.fmt(f),
            Self::Documents => f.write_str("documents"),
        }
    }
}

impl FromStr for ChosenOrder {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "documents" { Ok(Self::Documents) } else { text.parse().map(Self::As) }
    }
}

/// Orders chosen for balance, by dimension.
pub type ChosenOrders = BTreeMap<String, ChosenOrder>;

/// The orders of the sequences of a program.
#[derive(Debug, Default)]
pub(super) struct Ordered {
    /// Those of all sequences that are split inside attention, where they are not those that the program brings.
    pub(super) orders: BTreeMap<DimId, Order>,
    /// Those that nobody asked for.
    pub(super) chosen: ChosenOrders,
}

/// The orders of all sequences, with `recorded` choices in place of new ones. Tokens in `pages` have that of their slots.
///
/// # Errors
/// `P26` for an order that was asked for and does not divide, or that attentions of different degree would share; `P05` for
/// one that is not recorded.
pub(super) fn decide(
    space: &Space,
    splits: &[Inside<'_>],
    pages: &BTreeMap<DimId, [DimId; 2]>,
    (asked, recorded): (Option<OrderChoice>, Option<&ChosenOrders>),
) -> Result<Ordered, Diagnostic> {
    let mut found = Ordered::default();
    let mut sequences: Vec<DimId> =
        splits.iter().flat_map(|s| [s.attention.queries, s.attention.keys]).collect();
    sequences.sort_unstable();
    sequences.dedup();
    for dim in sequences {
        let here: Vec<&Inside<'_>> = splits.iter().filter(|s| parts(space, s, dim) > 1).collect();
        if here.is_empty() {
            continue;
        }
        let name = &space.dims[dim].name;
        if let Some(&[_, slots]) = pages.get(&dim) {
            // Each rank has its slots of every page.
            let parts = here.first().map_or(1, |s| parts(space, s, dim));
            let block = (space.size(slots) / parts).max(1);
            found.orders.insert(dim, Order::Striped { parts, block });
            continue;
        }
        let order = match (asked, recorded) {
            (Some(choice), _) => asked_for(space, dim, &here, choice)?,
            // An order that the program brings is its own.
            (None, _) if space.dims[dim].order != Order::Contiguous => continue,
            (None, Some(recorded)) => {
                let choice = *recorded.get(name).ok_or_else(|| missing(Topic::Orders, name))?;
                found.chosen.insert(name.clone(), choice);
                match choice {
                    ChosenOrder::As(choice) => asked_for(space, dim, &here, choice)?,
                    ChosenOrder::Documents => by_documents(space, dim, &here).next().ok_or_else(|| {
                        impossible(Topic::Orders, name, "documents", "there are no documents")
                    })?,
                }
            }
            (None, None) => {
                let (order, choice) = balanced(space, dim, &here);
                found.chosen.insert(name.clone(), choice);
                order
            }
        };
        if order != space.dims[dim].order {
            found.orders.insert(dim, order);
        }
    }
    Ok(found)
}

fn asked_for(
    space: &Space,
    dim: DimId,
    here: &[&Inside<'_>],
    choice: OrderChoice,
) -> Result<Order, Diagnostic> {
    let parts = here.first().map_or(1, |s| parts(space, s, dim));
    let size = space.size(dim);
    let order = match choice {
        OrderChoice::Contiguous => Order::Contiguous,
        OrderChoice::Zigzag => zigzag(space, dim, here),
        OrderChoice::Striped(block) => Order::Striped { parts, block },
        OrderChoice::Balanced => dispatched(space, dim, here, parts),
    };
    match order.check(size) {
        Ok(()) => Ok(order),
        Err(message) => {
            let step = match choice {
                OrderChoice::Contiguous | OrderChoice::Zigzag => 1,
                OrderChoice::Balanced => parts,
                OrderChoice::Striped(block) => parts.saturating_mul(block),
            };
            let next = size.checked_next_multiple_of(step.max(1)).unwrap_or(size);
            Err(Diagnostic::new("P26", format!("sequence {}: {message}", space.dims[dim].name))
                .help(format!("use `--order contiguous`, or {next} tokens")))
        }
    }
}

/// The zigzag of a sequence; where halves of the ranks' tokens are not all as long, a table of them.
fn zigzag(space: &Space, dim: DimId, here: &[&Inside<'_>]) -> Order {
    let parts = here.first().map_or(1, |s| parts(space, s, dim));
    let zigzag = Order::Zigzag { parts };
    let axes = here.iter().find_map(|s| s.axes_of(dim).filter(|axes| space.mesh.degree(axes) == parts));
    let Some(axes) = axes.filter(|_| zigzag.check(space.size(dim)).is_err()) else { return zigzag };
    let (mut front, mut back) = (0, space.size(dim));
    let mut runs = Vec::new();
    for rank in space.mesh.group_along(Rank(0), axes) {
        let held = space.range(dim, axes, rank);
        let len = held.end - held.start;
        let (start, end) = (front, back);
        (front, back) = (front + len.div_ceil(2), back - len / 2);
        runs.extend([start..front, back..end].into_iter().filter(|run| !run.is_empty()));
    }
    Order::Table(runs)
}

/// Chunks dealt by the pairs of their queries: the heaviest first, each to the part that has the least and room for more
/// (longest processing time first: Graham, 1969). A length that does not divide is left to be refused.
fn dispatched(space: &Space, dim: DimId, here: &[&Inside<'_>], parts: u64) -> Order {
    const MOST_CHUNKS: u64 = 16;
    let size = space.size(dim);
    let each = (1..=MOST_CHUNKS).rev().find(|n| size.is_multiple_of(parts * n) && size >= parts * n);
    let Some(each) = each else { return Order::Striped { parts, block: 1 } };
    let len = size / (parts * each);
    let work = |i: u64| -> u128 {
        let asks = here.iter().filter(|s| s.attention.queries == dim);
        let pairs = |s: &&Inside<'_>| {
            s.attention.mask.pairs(i * len..(i + 1) * len, 0..space.dims[s.attention.keys].valid)
        };
        asks.map(pairs).sum()
    };
    let mut chunks: Vec<(u128, u64)> = (0..parts * each).map(|i| (work(i), i)).collect();
    chunks.sort_by_key(|&(work, i)| (std::cmp::Reverse(work), i));
    let mut dealt: Vec<(u128, Vec<u64>)> = (0..parts).map(|_| (0, Vec::new())).collect();
    for (work, i) in chunks {
        let open = dealt.iter_mut().filter(|(_, held)| (held.len() as u64) < each);
        let least = open.min_by_key(|(sum, _)| *sum).expect("there are as many places as chunks");
        least.0 += work;
        least.1.push(i);
    }
    let mut runs: Vec<Range<u64>> = Vec::new();
    for (_, mut held) in dealt {
        held.sort_unstable();
        runs.extend(joined(held.into_iter().map(|i| i * len..(i + 1) * len).collect()));
    }
    Order::Table(runs)
}

/// Tokens of a cache are dealt in blocks of this many, so that all ranks have alike many of a sequence of any length.
const CACHE_BLOCK: u64 = 16;

/// Blocks of a cache in turn; a block is a token where longer ones do not divide the capacity.
fn of_cache(space: &Space, dim: DimId, parts: u64) -> (Order, ChosenOrder) {
    let size = space.size(dim);
    let block = [CACHE_BLOCK, 1].into_iter().find(|block| size.is_multiple_of(parts * block));
    let block = block.unwrap_or(1);
    (Order::Striped { parts, block }, ChosenOrder::As(OrderChoice::Striped(block)))
}

fn balanced(space: &Space, dim: DimId, here: &[&Inside<'_>]) -> (Order, ChosenOrder) {
    if let Some(cache) = here.iter().find(|s| s.attention.starts && s.attention.keys == dim) {
        return of_cache(space, dim, parts(space, cache, dim));
    }
    let contiguous = (Order::Contiguous, ChosenOrder::As(OrderChoice::Contiguous));
    if here.iter().any(|s| s.movement.orders() != Orders::Balanced) {
        return contiguous;
    }
    let size = space.size(dim);
    let zigzag = (zigzag(space, dim, here), ChosenOrder::As(OrderChoice::Zigzag));
    let mut candidates = vec![contiguous.clone(), zigzag];
    candidates.extend(by_documents(space, dim, here).map(|order| (order, ChosenOrder::Documents)));
    // A zigzag balances masks that are the same everywhere.
    let has_documents = here.iter().any(|s| bounds(&s.attention.mask).is_some());
    if has_documents {
        let parts = here.first().map_or(1, |s| parts(space, s, dim));
        let dealt = dispatched(space, dim, here, parts);
        candidates.push((dealt, ChosenOrder::As(OrderChoice::Balanced)));
        let striped = Order::Striped { parts, block: 1 };
        candidates.push((striped, ChosenOrder::As(OrderChoice::Striped(1))));
    }
    candidates.retain(|(order, _)| order.check(size).is_ok());
    let busiest = |order: &Order| -> u128 {
        // Every block of keys visits every rank, so only the order of queries matters.
        let asks = here.iter().filter(|s| s.attention.queries == dim);
        asks.map(|s| busiest_pairs(space, s, order)).sum()
    };
    let pairs: Vec<u128> = candidates.iter().map(|(order, _)| busiest(order)).collect();
    let least = pairs.iter().copied().min().unwrap_or_default();
    let mut known = candidates.into_iter().zip(pairs);
    known.find(|(_, pairs)| pairs * 50 <= least * 51).map_or(contiguous, |(order, _)| order)
}

/// Zigzags inside the documents of each mask that has some.
fn by_documents(space: &Space, dim: DimId, here: &[&Inside<'_>]) -> impl Iterator<Item = Order> {
    let parts = here.first().map_or(1, |s| parts(space, s, dim));
    let zigzag = |split: &&Inside<'_>| Order::zigzag_documents(bounds(&split.attention.mask)?, parts).ok();
    here.iter().filter_map(zigzag).collect::<Vec<_>>().into_iter()
}

/// Pairs of the rank that has the most, all keys counted.
fn busiest_pairs(space: &Space, split: &Inside<'_>, order: &Order) -> u128 {
    let a = split.attention;
    let keys = 0..space.dims[a.keys].valid;
    let ranks = space.mesh.group_along(Rank(0), &split.query_axes);
    let pairs = |rank: Rank| -> u128 {
        let held = space.range(a.queries, &split.query_axes, rank);
        let runs = order.runs(space.size(a.queries), held);
        runs.iter().map(|run| a.mask.pairs(run.positions(), keys.clone())).sum()
    };
    ranks.into_iter().map(pairs).max().unwrap_or(0)
}

/// The bounds of packed documents, if the mask keeps to them.
fn bounds(mask: &Mask) -> Option<&[u64]> {
    match mask {
        Mask::Documents(bounds) => Some(bounds),
        Mask::All(masks) => masks.iter().find_map(bounds),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use ithaca_ir::layout::AxisList;
    use ithaca_ir::ops::AttentionDims;
    use ithaca_ir::{Dim, Mesh};

    use super::*;
    use crate::registry::Registry;

    /// Calls `check` with an attention whose sequence is split by a ring, and with the relation of the busiest rank's pairs to
    /// the mean under an order.
    fn on_ring(
        parts: u64,
        size: u64,
        mask: Mask,
        check: impl FnOnce(&Space, &Inside<'_>, &dyn Fn(&Order) -> f64),
    ) {
        let mut space = Space { mesh: Mesh::new([("ring", parts)]), ..Space::default() };
        let s = space.dims.push(Dim::new("s", size));
        let [h, d] = ["h", "d"].map(|name| space.dims.push(Dim::new(name, 4)));
        let dims = AttentionDims { heads: h, kv_heads: h, queries: s, keys: s, width: d };
        let attention = Attention::new(dims, mask, 1.0);
        let axes = [space.mesh.axis("ring").unwrap()];
        let split = Inside {
            attention: &attention,
            axes: axes.into_iter().collect(),
            query_axes: axes.into_iter().collect(),
            head_axes: AxisList::new(),
            movement: Registry::default().movement("rotate").unwrap(),
            options: Vec::new(),
        };
        let all = attention.mask.pairs(0..size, 0..size) as f64;
        let busiest = |order: &Order| {
            order.check(size).unwrap();
            busiest_pairs(&space, &split, order) as f64 / (all / parts as f64)
        };
        check(&space, &split, &busiest);
    }

    /// Packed documents of very different lengths, which no zigzag over the whole sequence balances.
    #[test]
    fn dealing_by_pairs_balances_documents() {
        let mask = Mask::All(vec![Mask::Causal, Mask::Documents(vec![0, 700, 720, 740, 1024])]);
        on_ring(4, 1024, mask, |space, split, busiest| {
            let order = dispatched(space, split.attention.queries, &[split], 4);
            assert!(busiest(&order) < 1.02, "{order}: {}", busiest(&order));
            assert!(busiest(&Order::Zigzag { parts: 4 }) > 1.1);
        });
    }

    #[test]
    fn a_length_without_zigzag_is_balanced_too() {
        for (parts, size) in [(8, 131_064), (4, 12), (3, 9), (5, 655), (16, 16 * 8191)] {
            on_ring(parts, size, Mask::Causal, |space, split, busiest| {
                let (order, _) = balanced(space, split.attention.queries, &[split]);
                assert!(Order::Zigzag { parts }.check(size).is_err());
                assert!(
                    busiest(&order) < busiest(&Order::Striped { parts, block: 1 }) * 1.02 + 1e-9,
                    "{size}: {order}"
                );
                assert!(size < 100 || busiest(&order) < 1.03, "{size}: {order} {}", busiest(&order));
            });
            on_ring(parts, size, Mask::Full, |space, split, _| {
                assert_eq!(balanced(space, split.attention.queries, &[split]).0, Order::Contiguous);
            });
        }
    }
}
