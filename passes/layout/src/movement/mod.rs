//! Movements: how blocks of keys and queries visit each other when ranks split the sequence inside attention.
//!
//! A movement says who meets whom, and nothing else; [`LowerMovements`](crate::lower_movements::LowerMovements) derives the transfers, the merge of
//! partial results and the whole backward pass from it. To add one, implement [`Movement`] and name it in a
//! [`Strategy`](crate::shard::Strategy); put both into a [`Registry`](crate::registry::Registry).
//! `docs/guide/your-first-sharding-pass.md` does so from nothing, `examples/template.rs` is there to be copied.

mod admit;
mod balance;
mod fetch;
mod gather;
mod known;
mod reduce;
mod rotate;
mod two_pass;

pub(crate) use admit::admit;
pub use known::MOVEMENTS;

use ithaca_ir::layout::Move;
use ithaca_ir::mask::Positions;
use ithaca_ir::mesh::{AxisId, Rank};
use ithaca_ir::ops::Attention;
use ithaca_ir::order::{Order, Run};
use ithaca_ir::{Diagnostic, DimId, Space};
use smallvec::SmallVec;

/// How keys and queries that lie on different ranks meet.
///
/// Inside attention, `P` ranks along some axes of the mesh each hold one block of the queries and one of the keys and
/// values; what block `i` has of tokens is the order's business. [`visits`](Self::visits) says where blocks go so that
/// they meet. From that follow, for the forward and the backward pass: the transfers, each issued a step ahead; which
/// steps the mask makes needless; the merge of partial results by online softmax, in f32; the sums of gradients, in f32,
/// on the way of the blocks that they belong to, and their way home.
///
/// A movement is `Sync` and has no state: what it knows is in the [`Site`].
pub trait Movement: Sync {
    /// The name, as the attribute `movement` has it.
    fn name(&self) -> &'static str;
    /// One sentence, with its source.
    fn summary(&self) -> &'static str;
    /// What must hold, for the table of strategies.
    fn legality(&self) -> &'static str;
    /// Which token orders it takes, and which it likes best. One that is asked for and is not taken is refused.
    fn orders(&self) -> Orders {
        Orders::Balanced
    }
    /// Whether it leaves out what the mask leaves empty; [`Visits::Steps`] does, step by step. One that does not is refused
    /// where `--prune` asks for it.
    fn prunes(&self) -> bool {
        false
    }
    /// The options that it takes, as `gather(groups=2)` has one, each with its meaning; any other is refused.
    fn options(&self) -> &'static [(&'static str, &'static str)] {
        &[]
    }
    /// Which queries it brings keys to.
    fn reach(&self) -> Reach {
        Reach::SameAxes
    }
    /// Refuses an attention that it cannot compute; called before [`visits`](Self::visits). That every pair of blocks
    /// meets once is checked in any case.
    ///
    /// # Errors
    /// `P40`–`P49`: the rule, with its numbers, and repairs.
    fn check(&self, _site: &Site<'_>) -> Result<(), Diagnostic> {
        Ok(())
    }
    /// Who meets whom.
    fn visits(&self, site: &Site<'_>) -> Visits;
}

/// The token orders that a movement takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Orders {
    /// Any; unless told otherwise the one in which the busiest rank has the fewest pairs.
    Balanced,
    /// Any; unless told otherwise contiguous, because neighbours need neighbours' tokens.
    Local,
    /// Contiguous only.
    Contiguous,
}

/// By which axes the queries may be split that a movement brings keys to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Those that split the keys: a rank has one block of each.
    SameAxes,
    /// Any: encoder and decoder may lie on different axes.
    AnyAxes,
}

/// Where an attention takes place: what a movement may look at.
#[derive(Clone, Copy)]
pub struct Site<'a> {
    /// Dimensions, with their orders, and the mesh.
    pub space: &'a Space,
    /// The attention, its roles and its mask.
    pub attention: &'a Attention,
    /// The axes that split the keys, major to minor.
    pub axes: &'a [AxisId],
    /// The axes that split the queries, major to minor: those of the keys, unless the movement has another
    /// [`reach`](Movement::reach).
    pub query_axes: &'a [AxisId],
    /// The axes that split query heads and key/value heads, major to minor.
    pub head_axes: &'a [AxisId],
    /// The options that the movement was given.
    pub options: &'a [(String, u64)],
}

/// Who meets whom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Visits {
    /// Every rank gets all keys, then attends at once.
    Gather,
    /// As [`Gather`](Visits::Gather), in so many groups of the key/value heads that a rank has, one after another: only the
    /// gathered keys of one group are held at a time.
    GatherGroups(u64),
    /// Every rank gets the keys that its queries see, then attends at once.
    Fetch,
    /// Step by step, the first at home ([`Step::default`]). Every pair of a block of queries and a block of keys whose tile
    /// the mask does not leave empty must meet in exactly one step, on one rank; `P48` otherwise, with the pair. Steps in
    /// which no pair sees anything are left out.
    Steps(Vec<Step>),
    /// Keys take the steps to complete the rows of scores, then values take them; queries stay at home.
    TwoPass(Vec<Step>),
    /// Every rank attends to the keys it holds; the partial results for the same queries merge.
    Reduce,
}

/// Where blocks are during a step; the rank at coordinate `c` along an axis holds the block of `c + by`.
///
/// Blocks move from the nearest place where they have been, straight on where they can; a step says where they are, not
/// how they come there. When queries are away, the output, its lse and the gradient of the queries come home from there.
///
/// ```
/// use ithaca_layout::movement::{Site, Step};
/// /// Keys of the rank `hops` before, queries at home.
/// fn from_the_left(site: &Site<'_>, hops: u64) -> Step {
///     Step::keys(site.seat(&[site.blocks() - hops]))
/// }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// The block of queries that a rank has, its own when empty.
    pub queries: Seat,
    /// The block of keys and values that a rank has, its own when empty.
    pub keys: Seat,
}

/// How far blocks have travelled, along each axis that they have left home on; empty at home. [`Site::seat`] makes one.
///
/// A [`Move`] with `only` holds for some coordinates and leaves the other ranks without a block during the step, as
/// `balance` does; ranks in a row whose blocks are in a row.
pub type Seat = SmallVec<[Move; 1]>;

impl Step {
    /// Keys and values at `seat`, queries at home.
    pub fn keys(seat: Seat) -> Self {
        Self { keys: seat, queries: Seat::new() }
    }

    /// Queries at `seat`, keys and values at home.
    pub fn queries(seat: Seat) -> Self {
        Self { queries: seat, keys: Seat::new() }
    }
}

impl Site<'_> {
    /// Number of blocks that the keys are split into, `P`.
    pub fn blocks(&self) -> u64 {
        self.space.mesh.degree(self.axes)
    }

    /// Number of blocks that the queries are split into.
    pub fn query_blocks(&self) -> u64 {
        self.space.mesh.degree(self.query_axes)
    }

    /// The value of an option of the movement, if it was given.
    pub fn option(&self, name: &str) -> Option<u64> {
        self.options.iter().find(|(key, _)| key == name).map(|&(_, n)| n)
    }

    /// The seat of blocks that have travelled by `by[i]` along the `i`-th axis, around the ring: coordinate `c` holds the
    /// block of `c + by[i]`. So `1` is the block of the next rank and `P − 1` that of the one before; axes that `by` lacks
    /// stay at home.
    pub fn seat(&self, by: &[u64]) -> Seat {
        let moves = self.axes.iter().zip(by);
        let mut seat: Seat = moves
            .map(|(&axis, &by)| Move { axis, by: by % self.space.mesh.size(axis), only: None })
            .filter(|m| m.by != 0)
            .collect();
        seat.sort_unstable();
        seat
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

    /// Pairs that the mask keeps of block `q` of the queries and block `k` of the keys.
    pub fn pairs(&self, q: u64, k: u64) -> u128 {
        pairs(self.attention, &self.queries(q), &self.keys(k))
    }

    /// The order of the queries, where it is not contiguous.
    pub fn reordered(&self) -> Option<&Order> {
        let order = |dim| &self.space.dims[dim].order;
        [order(self.attention.queries), order(self.attention.keys)]
            .into_iter()
            .find(|&o| *o != Order::Contiguous)
    }

    /// Refuses another order than contiguous, for the movement called `name`; `repair` says what takes any.
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

    /// The axes as they are written: `outer=2 × ring=4`.
    pub fn axes_text(&self) -> String {
        self.axes_named(self.axes)
    }

    /// Any axes as they are written.
    fn axes_named(&self, axes: &[AxisId]) -> String {
        let mesh = &self.space.mesh;
        let axes: Vec<String> =
            axes.iter().map(|&a| format!("{}={}", mesh.axes[a].name, mesh.size(a))).collect();
        axes.join(" × ")
    }
}

fn pairs(attention: &Attention, queries: &[Run], keys: &[Run]) -> u128 {
    let [queries, keys] = [queries, keys].map(|runs| Positions::new(runs.iter().map(Run::positions)));
    attention.mask.pairs_between(&queries, &keys)
}

/// The name of the movement of attention that needs none: its keys are whole.
pub const LOCAL: &str = "local";
