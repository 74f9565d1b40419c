//! The search for repairs: which requests have a plan, found without trying every layout.
//!
//! A layout is passed over where it cannot fit ([`Floor`]) or is not legal; the others are tried in order of
//! their estimated memory. The search as a whole, and each question, ends after so many layouts, so a refusal never takes
//! much longer than a plan; later repairs are not offered. Every offered layout was compiled, and fits.

use std::cell::Cell;

use crate::cluster::Cluster;
use crate::planner::candidates::candidates;
use crate::planner::compiler::Compiler;
use crate::planner::floor::{Floor, MemoryBounds};
use crate::planner::outcomes::{Priced, price};
use crate::planner::request::Request;
use ithaca_layout::registry::Registry;
use ithaca_layout::shard::ShardOptions;
use ithaca_layout::shard::strategy::CONTEXT_AXES;

/// The effort of a search; a layout of a few GPUs costs one.
const EFFORT: u64 = 256;

/// The effort of one question.
const SHARE: u64 = 64;

/// The part of it for layouts that probably fit, of which the best is chosen.
const EASY: u64 = 48;

/// As many ranks of a ring cost one more: a ring has a step for each.
const RANKS_OF_ONE: u64 = 64;

/// A search.
pub(super) struct Search<'a> {
    compiler: &'a dyn Compiler,
    cluster: &'a Cluster,
    registry: Registry,
    floor: Floor,
    /// The rest of [`EFFORT`].
    left: Cell<u64>,
    /// The least memory among the layouts tried for the last question, bytes.
    least: Cell<Option<u64>>,
}

impl<'a> Search<'a> {
    pub(super) fn new(compiler: &'a dyn Compiler, cluster: &'a Cluster) -> Self {
        let (registry, floor) = (compiler.registry(), Floor::of(compiler, cluster));
        Self { compiler, cluster, registry, floor, left: Cell::new(EFFORT), least: Cell::new(None) }
    }

    pub(super) fn cluster(&self) -> &'a Cluster {
        self.cluster
    }

    /// Asks as long as this much of the effort lasts.
    pub(super) fn sparing<T>(&self, effort: u64, ask: impl FnOnce() -> T) -> T {
        let all = self.left.get();
        let given = all.min(effort);
        self.left.set(given);
        let answer = ask();
        self.left.set(all - (given - self.left.get()));
        answer
    }

    /// The least memory among the layouts tried for the last question, bytes.
    pub(super) fn least(&self) -> Option<u64> {
        self.least.get()
    }

    /// Whether some layout of the request is legal and fits.
    pub(super) fn works(&self, request: &Request) -> bool {
        self.any(request, |_| true)
    }

    /// As [`works`](Self::works), where nothing that `other` allows fits: only the other layouts are tried.
    pub(super) fn works_unlike(&self, request: &Request, other: &Request) -> bool {
        self.any(request, |options| {
            let (heads, sequence) = (other.options.heads, other.options.sequence);
            !self.is_legal(&ShardOptions { heads, sequence, ..options.clone() })
        })
    }

    /// The best strategy and mesh of those tried for a request that fixes neither, as options.
    pub(super) fn best(&self, request: &Request) -> Option<String> {
        let found = self.find(request, |candidates| {
            let legal = self.promising(candidates).into_iter().filter(|(_, options)| self.is_legal(options));
            let (easy, tight): (Vec<_>, Vec<_>) =
                legal.partition(|(held, _)| held.about <= self.cluster.usable_bytes());
            let options = |all: Vec<(MemoryBounds, ShardOptions)>| -> Vec<ShardOptions> {
                all.into_iter().map(|(_, options)| options).collect()
            };
            let share = Cell::new(SHARE);
            let mut all: Vec<Priced> = Vec::new();
            for options in evenly(options(easy)) {
                all.extend(self.fitting(&options, &share));
            }
            if all.is_empty() {
                all.extend(options(tight).iter().find_map(|options| self.fitting(options, &share)));
            }
            all.into_iter().min_by(Priced::cmp_rank)
        })?;
        let ShardOptions { strategy, mesh, .. } = &found.options;
        Some(if mesh.axes.is_empty() {
            format!("--strategy {strategy}")
        } else {
            format!("--strategy {strategy} --mesh {mesh}")
        })
    }

    fn any(&self, request: &Request, is_asked: impl Fn(&ShardOptions) -> bool) -> bool {
        let first = |candidates| {
            let share = Cell::new(SHARE);
            let promising = self.promising(candidates).into_iter();
            let affordable = promising.take_while(|_| share.get() > 0 && self.left.get() > 0);
            let mut asked = affordable.filter(|(_, options)| is_asked(options) && self.is_legal(options));
            asked.find_map(|(_, options)| self.fitting(&options, &share))
        };
        self.find(request, first).is_some()
    }

    /// The layout found among the candidates of a request.
    fn find(&self, request: &Request, find: impl Fn(Vec<ShardOptions>) -> Option<Priced>) -> Option<Priced> {
        self.least.set(None);
        find(candidates(&self.registry, self.cluster, request).ok()?)
    }

    fn is_legal(&self, options: &ShardOptions) -> bool {
        self.compiler.check(options).is_ok()
    }

    /// Those that may fit, by estimated memory.
    fn promising(&self, candidates: Vec<ShardOptions>) -> Vec<(MemoryBounds, ShardOptions)> {
        let held = |options: ShardOptions| (self.floor.of_layout(&options), options);
        let usable = self.cluster.usable_bytes();
        let may_fit = |(held, _): &(MemoryBounds, ShardOptions)| held.at_least <= usable;
        let mut kept: Vec<_> = candidates.into_iter().map(held).filter(may_fit).collect();
        kept.sort_by_key(|(held, _)| held.about);
        kept
    }

    /// A legal layout, where it fits and there is enough left of the share and of the whole effort.
    fn fitting(&self, options: &ShardOptions, share: &Cell<u64>) -> Option<Priced> {
        if cost(options) > share.get().min(self.left.get()) {
            return None;
        }
        for budget in [share, &self.left] {
            budget.set(budget.get() - cost(options));
        }
        let priced = price(self.compiler, self.cluster, options).ok()?;
        let fits = priced.memory.over().is_none();
        let bytes = priced.memory.total;
        self.least.set(Some(self.least.get().map_or(bytes, |least| least.min(bytes))));
        fits.then_some(priced)
    }
}

/// The cost of trying a layout: its longest axis along which something may pass around.
fn cost(options: &ShardOptions) -> u64 {
    let passes_around = options.mesh.axes.values().filter(|axis| CONTEXT_AXES.contains(&axis.name.as_str()));
    1 + passes_around.map(|axis| axis.size / RANKS_OF_ONE).max().unwrap_or(0)
}

/// As many layouts as may be tried of those that probably fit, the first and others evenly behind it.
fn evenly(candidates: Vec<ShardOptions>) -> Vec<ShardOptions> {
    let all: u64 = candidates.iter().map(cost).sum();
    let step = usize::try_from(all.div_ceil(EASY).max(1)).unwrap_or(usize::MAX);
    candidates.into_iter().step_by(step).collect()
}
