//! Movements: how blocks of keys and queries meet when ranks split the sequence inside attention.
//!
//! A movement only states which blocks meet where. [`LowerMovements`](crate::lower_movements::LowerMovements) derives
//! the transfers, the merge of partial results and the whole backward pass. To add one, implement [`Movement`] and name
//! it in a [`Strategy`](crate::shard::Strategy); put both into a [`Registry`](crate::registry::Registry).
//! `docs/book/src/guide/your-first-sharding-pass.md` shows each step; `examples/template.rs` is a template to copy.

mod known;
mod legality;
mod partials;
mod steps;

pub use known::MOVEMENTS;
pub(crate) use legality::{admit, check_options};
pub use partials::Partials;

use ithaca_ir::layout::Move;
use ithaca_ir::mask::Positions;
use ithaca_ir::mesh::{AxisId, Rank};
use ithaca_ir::ops::Attention;
use ithaca_ir::order::{Order, Run};
use ithaca_ir::{Diagnostic, DimId, Space};
use smallvec::SmallVec;

/// How keys and queries on different ranks meet.
///
/// Inside attention, `P` ranks along some mesh axes each hold one block of the queries and one of the keys and values;
/// the token order decides which tokens a block has. [`visits`](Self::visits) states where blocks are in each step. The
/// compiler derives from it, for the forward and the backward pass: the transfers, each issued one step ahead; the
/// steps that the mask makes empty; the merge of partial results by online softmax in f32; the gradients, which
/// accumulate in f32 along the blocks' route and return to their home ranks.
///
/// A movement is `Sync` and has no state: everything it depends on is in the [`Site`].
pub trait Movement: Sync {
    /// The name, as in the attribute `movement`.
    fn name(&self) -> &'static str;
    /// One sentence with its source.
    fn summary(&self) -> &'static str;
    /// The requirements, for the table of strategies.
    fn legality(&self) -> &'static str;
    /// The supported token orders and the preferred one. An unsupported order is refused.
    fn orders(&self) -> Orders {
        Orders::Balanced
    }
    /// Whether it skips blocks that the mask leaves empty; [`Visits::Steps`] does so step by step. With `--prune`, a
    /// movement that does not is refused.
    fn prunes(&self) -> bool {
        false
    }
    /// The options, as in `gather(groups=2)`, each with its meaning; other options are refused.
    fn options(&self) -> &'static [(&'static str, &'static str)] {
        &[]
    }
    /// The axes on which queries may be.
    fn reach(&self) -> Reach {
        Reach::SameAxes
    }
    /// Refuses an attention that it cannot compute; called before [`visits`](Self::visits). The compiler always checks
    /// that every pair of blocks meets exactly once.
    ///
    /// # Errors
    /// `P40`–`P49`: the rule with its numbers, and repairs.
    fn check(&self, _site: &Site<'_>) -> Result<(), Diagnostic> {
        Ok(())
    }
    /// Which blocks meet where.
    fn visits(&self, site: &Site<'_>) -> Visits;
}

/// The token orders that a movement supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Orders {
    /// Any; by default the order that minimises the pairs of the busiest rank.
    Balanced,
    /// Any; contiguous by default, because ranks need their neighbours' tokens.
    Local,
    /// Contiguous only.
    Contiguous,
}

/// The axes that may split the queries of a movement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// The axes that split the keys: each rank has one block of each.
    SameAxes,
    /// Any axes: queries and keys may be split along different axes.
    AnyAxes,
}

/// The attention that a movement is applied to.
#[derive(Clone, Copy)]
pub struct Site<'a> {
    /// Dimensions with their orders, and the mesh.
    pub space: &'a Space,
    /// The attention, its roles and its mask.
    pub attention: &'a Attention,
    /// The axes that split the keys, major to minor.
    pub axes: &'a [AxisId],
    /// The axes that split the queries, major to minor: the axes of the keys, unless the movement's
    /// [`reach`](Movement::reach) differs.
    pub query_axes: &'a [AxisId],
    /// The axes that split query heads and key/value heads, major to minor.
    pub head_axes: &'a [AxisId],
    /// The options given to the movement.
    pub options: &'a [(String, u64)],
}

/// Which blocks meet where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Visits {
    /// Every rank receives all keys, then computes attention once.
    Gather,
    /// As [`Gather`](Visits::Gather), in this number of groups of a rank's key/value heads, one after another: only one
    /// group's gathered keys are held at a time.
    GatherGroups(u64),
    /// Every rank receives the keys that its queries see, then computes attention once.
    Fetch,
    /// Step by step, starting at home ([`Step::default`]). Every pair of a query block and a key block that the mask
    /// does not leave empty must meet in exactly one step, on one rank; otherwise `P48` names the pair. Steps without a
    /// visible pair are skipped.
    Steps(Vec<Step>),
    /// Keys follow the steps until the rows of scores are complete, then values do; queries stay at home.
    TwoPass(Vec<Step>),
    /// Every rank computes attention over its own keys; the partial results for the same queries are merged.
    Reduce,
}

/// The positions of blocks during a step; the rank at coordinate `c` along an axis holds the block of `c + by`.
///
/// A step states positions; the compiler derives the route, from the nearest earlier position of the block. If queries
/// are away from home, the output, its lse and the gradient of the queries are sent back.
///
/// ```
/// use ithaca_layout::movement::{Site, Step};
/// // Keys from the rank `hops` before, queries at home.
/// fn from_the_left(site: &Site<'_>, hops: u64) -> Step {
///     Step::keys(site.offset(&[site.blocks() - hops]))
/// }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// The block of queries on a rank; its own when empty.
    pub queries: RankOffset,
    /// The block of keys and values on a rank; its own when empty.
    pub keys: RankOffset,
}

/// The displacement of blocks along each axis; empty at home. [`Site::offset`] makes one.
///
/// A [`Move`] with `only` applies to some coordinates; the other ranks hold no block during the step, as in `balance`.
/// The coordinates must be consecutive, and so must their blocks.
pub type RankOffset = SmallVec<[Move; 1]>;

impl Step {
    /// Keys and values at `offset`, queries at home.
    pub fn keys(offset: RankOffset) -> Self {
        Self { keys: offset, queries: RankOffset::new() }
    }

    /// Queries at `offset`, keys and values at home.
    pub fn queries(offset: RankOffset) -> Self {
        Self { queries: offset, keys: RankOffset::new() }
    }
}

impl Site<'_> {
    /// The number of blocks that the keys are split into, `P`.
    pub fn blocks(&self) -> u64 {
        self.space.mesh.degree(self.axes)
    }

    /// The number of blocks that the queries are split into.
    pub fn query_blocks(&self) -> u64 {
        self.space.mesh.degree(self.query_axes)
    }

    /// The value of an option of the movement, if given.
    pub fn option(&self, name: &str) -> Option<u64> {
        self.options.iter().find(|(key, _)| key == name).map(|&(_, n)| n)
    }

    /// The offset of blocks displaced by `by[i]` along the `i`-th axis, around the ring: coordinate `c` holds the block
    /// of `c + by[i]`. So `1` is the next rank's block and `P − 1` the previous one's; axes beyond the length of `by`
    /// stay at home.
    pub fn offset(&self, by: &[u64]) -> RankOffset {
        let moves = self.axes.iter().zip(by);
        let mut offset: RankOffset = moves
            .map(|(&axis, &by)| Move { axis, by: by % self.space.mesh.size(axis), only: None })
            .filter(|m| m.by != 0)
            .collect();
        offset.sort_unstable();
        offset
    }

    /// The positions of block `i` of the queries.
    pub fn queries(&self, i: u64) -> Vec<Run> {
        self.block(self.attention.queries, self.query_axes, i)
    }

    /// The positions of block `i` of the keys.
    pub fn keys(&self, i: u64) -> Vec<Run> {
        self.block(self.attention.keys, self.axes, i)
    }

    fn block(&self, dim: DimId, axes: &[AxisId], i: u64) -> Vec<Run> {
        let mesh = &self.space.mesh;
        let (rank, _) = axes.iter().rev().fold((Rank(0), i), |(rank, rest), &axis| {
            let n = mesh.size(axis);
            (mesh.with_coordinate(rank, axis, rest % n), rest / n)
        });
        self.space.position_runs(dim, self.space.range(dim, axes, rank))
    }

    /// The pairs of query block `q` and key block `k` that the mask keeps.
    pub fn pairs(&self, q: u64, k: u64) -> u128 {
        pairs(self.attention, &self.queries(q), &self.keys(k))
    }

    /// The order of the queries, if it is not contiguous.
    pub fn reordered(&self) -> Option<&Order> {
        let order = |dim| &self.space.dims[dim].order;
        [order(self.attention.queries), order(self.attention.keys)]
            .into_iter()
            .find(|&o| *o != Order::Contiguous)
    }

    /// Refuses a non-contiguous order for the movement `name`; `repair` names an alternative that supports any order.
    ///
    /// # Errors
    /// `P42`.
    pub fn need_contiguous(&self, name: &str, repair: &str) -> Result<(), Diagnostic> {
        match self.reordered() {
            None => Ok(()),
            Some(order) => {
                let message = format!("movement `{name}` needs tokens in contiguous order, not {order}");
                Err(Diagnostic::new("P42", message).help(repair))
            }
        }
    }

    /// The axes as text: `outer=2 × ring=4`.
    pub fn axes_text(&self) -> String {
        self.space.mesh.degrees_text(self.axes)
    }
}

fn pairs(attention: &Attention, queries: &[Run], keys: &[Run]) -> u128 {
    let [queries, keys] = [queries, keys].map(|runs| Positions::new(runs.iter().map(Run::positions)));
    if attention.starts {
        // Where queries stand is known on the device alone.
        return queries.len() * keys.len();
    }
    attention.mask.pairs_between(&queries, &keys)
}

/// The name for attention without a movement: its keys are whole.
pub const LOCAL: &str = "local";
