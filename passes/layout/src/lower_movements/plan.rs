//! Plans attention: checks and prunes the visits of its movement, and declares the dimensions that they need.

use std::ops::Range;

use ithaca_ir::layout::{Layout, Move};
use ithaca_ir::mask::Positions;
use ithaca_ir::mesh::AxisId;
use ithaca_ir::ops::Attention;
use ithaca_ir::order::joined;
use ithaca_ir::{Diagnostic, Dim, DimId, Fetched, Mesh, Part, Rank, Space, TensorType};

use crate::movement::{Movement, RankOffset, Site, Step, Visits, admit};
use crate::parts::part;
use crate::registry::Registry;

/// The steps of one attention.
#[derive(Clone, Debug)]
pub(super) enum Plan {
    Gather,
    /// Keys are gathered in groups of heads, one after another.
    Groups {
        /// For each group its part of the query heads.
        heads: Vec<DimId>,
        /// For each group its part of the key/value heads.
        kv_heads: Vec<DimId>,
    },
    /// Keys are fetched into this dimension.
    Fetch(DimId),
    Steps(Vec<Step>),
    TwoPass {
        steps: Vec<Step>,
        /// The dimension of the keys that a rank holds.
        columns: DimId,
    },
    Reduce {
        /// The dimension of partial results.
        parts: DimId,
        /// The axes that split keys and not queries; along others keys are gathered.
        axes: Vec<AxisId>,
    },
}

/// Plans `attention` on operands of these types; declares new dimensions in `space`.
pub(super) fn plan(
    registry: &Registry,
    space: &mut Space,
    attention: &Attention,
    operands: &[&TensorType],
) -> Result<Plan, Diagnostic> {
    let name = attention.movement.as_ref().map_or("", |m| m.name.as_str());
    let movement = registry.movement(name)?;
    let axes: Vec<AxisId> = operands[1].axes_of(attention.keys).to_vec();
    let site = Site {
        space,
        attention,
        axes: &axes,
        query_axes: operands[0].axes_of(attention.queries),
        head_axes: operands[0].axes_of(attention.heads),
        options: attention.movement.as_ref().map_or(&[], |m| &m.options),
    };
    admit(movement, &site)?;
    match movement.visits(&site) {
        Visits::Gather => Ok(Plan::Gather),
        Visits::GatherGroups(groups) => {
            let runs = space.mesh.degree(operands[0].axes_of(attention.heads));
            let cut = |space: &mut Space, of: DimId| -> Vec<DimId> {
                (0..groups).map(|index| part(space, Part { of, index, count: groups, runs })).collect()
            };
            let heads = cut(space, attention.heads);
            Ok(Plan::Groups { heads, kv_heads: cut(space, attention.kv_heads) })
        }
        Visits::Fetch => fetched(space, attention, &axes).map(Plan::Fetch),
        Visits::Steps(steps) => steps_of(movement, &site, steps).map(Plan::Steps),
        Visits::TwoPass(steps) => {
            let steps = steps_of(movement, &site, steps)?;
            let size = space.max_extent(attention.keys, &axes);
            let columns = declare(space, "columns", size);
            Ok(Plan::TwoPass { steps, columns })
        }
        Visits::Reduce => {
            let queries = operands[0].axes_of(attention.queries);
            let alone: Vec<AxisId> = axes.iter().copied().filter(|a| !queries.contains(a)).collect();
            let size = space.mesh.degree(&alone);
            Ok(Plan::Reduce { parts: declare(space, "parts", size), axes: alone })
        }
    }
}

/// A plain dimension of this name and size: an existing one, or a new one.
fn declare(space: &mut Space, name: &str, size: u64) -> DimId {
    let mut name = name.to_owned();
    loop {
        match space.dim(&name) {
            None => return space.dims.push(Dim::new(name, size)),
            Some(id) if space.dims[id] == Dim::new(name.as_str(), size) => return id,
            Some(_) => name.push('_'),
        }
    }
}

/// The number of ranges above which they are joined before more are added.
const MOST_APART: usize = 1024;

/// The dimension of the keys that each rank's queries see.
fn fetched(space: &mut Space, attention: &Attention, axes: &[AxisId]) -> Result<DimId, Diagnostic> {
    let of = attention.keys;
    let dim = &space.dims[of];
    let mut parts: Vec<Vec<Range<u64>>> = Vec::new();
    for rank in space.mesh.group_along(Rank(0), axes) {
        let queries = space.position_runs(attention.queries, space.range(attention.queries, axes, rank));
        let mut seen: Vec<Range<u64>> = Vec::new();
        let mut most = MOST_APART;
        for run in &queries {
            seen.extend(attention.mask.reach(run.positions(), 0..dim.valid));
            // Stripes see nearly the same keys, run after run.
            if seen.len() > most {
                seen = joined(seen);
                most = MOST_APART.max(2 * seen.len());
            }
        }
        let seen = joined(seen);
        parts.push(dim.order.indices(dim.size, &seen));
    }
    if parts.iter().all(Vec::is_empty) {
        // A dimension has at least one element; no query sees this one.
        parts[0].push(0..1);
    }
    let fetched = Fetched::new(of, parts);
    let size = fetched.total();
    let known = space.dims.iter().find(|(_, d)| d.fetched.as_ref() == Some(&fetched)).map(|(id, _)| id);
    if let Some(id) = known {
        return Ok(id);
    }
    let name = space.free_name(format!("{}_seen", dim.name));
    Ok(space.dims.push(Dim { fetched: Some(fetched), ..Dim::new(name, size) }))
}

/// The steps of a movement without those in which no rank has a visible pair.
fn steps_of(movement: &dyn Movement, site: &Site<'_>, steps: Vec<Step>) -> Result<Vec<Step>, Diagnostic> {
    let wrong = |problem: String| {
        let message = format!("movement `{}` on {}: {problem}", movement.name(), site.axes_text());
        Err(Diagnostic::new("P48", message)
            .help("every block of keys must meet every block of queries that sees it, once"))
    };
    if steps.first() != Some(&Step::default()) {
        return wrong("the first step is not at home, which is `Step::default()`".to_owned());
    }
    let meetings = Meetings::new(site);
    if let Some((q, k, times)) = meetings.first_wrong(site, &steps) {
        let sees = if meetings.sees(q, k) { "see" } else { "do not see" };
        return wrong(format!("queries of block {q} {sees} keys of block {k}, and meet them {times} times"));
    }
    let mut steps = steps;
    let home = steps.remove(0);
    // The first step starts the sums even without pairs.
    steps.retain(|step| meetings.any(&site.space.mesh, site.axes, step));
    steps.insert(0, home);
    Ok(steps)
}

/// The blocks of an attention, and which of them see each other.
struct Meetings<'a> {
    attention: &'a Attention,
    queries: Vec<Positions>,
    keys: Vec<Positions>,
    ranks: Vec<Rank>,
}

impl<'a> Meetings<'a> {
    fn new(site: &Site<'a>) -> Self {
        let ranks = site.space.mesh.group_along(Rank(0), site.axes);
        let runs = |dim: DimId| -> Vec<Positions> {
            let part = |&r: &Rank| site.space.position_runs(dim, site.space.range(dim, site.axes, r));
            ranks.iter().map(|rank| Positions::new(part(rank).iter().map(|run| run.positions()))).collect()
        };
        let (queries, keys) = (runs(site.attention.queries), runs(site.attention.keys));
        Self { attention: site.attention, queries, keys, ranks }
    }

    fn sees(&self, q: usize, k: usize) -> bool {
        self.attention.may_see(&self.queries[q], &self.keys[k])
    }

    /// The blocks of queries and keys that each rank has in `step`.
    fn met<'s>(
        &'s self,
        mesh: &'s Mesh,
        axes: &'s [AxisId],
        step: &'s Step,
    ) -> impl Iterator<Item = (usize, usize)> + 's {
        // Late ranks have the most pairs, so they come first.
        self.ranks.iter().rev().filter_map(move |&rank| {
            let held = |offset: &RankOffset| {
                let layout = Layout { moved: offset.clone(), ..Layout::default() };
                let owner = layout.owner(mesh, rank)?;
                usize::try_from(mesh.coordinate_along(owner, axes)).ok()
            };
            Some((held(&step.queries)?, held(&step.keys)?))
        })
    }

    fn any(&self, mesh: &Mesh, axes: &[AxisId], step: &Step) -> bool {
        self.met(mesh, axes, step).any(|(q, k)| self.sees(q, k))
    }

    /// The first pair of blocks that meets twice, or that is visible and never meets; with the number of meetings.
    fn first_wrong(&self, site: &Site<'_>, steps: &[Step]) -> Option<(usize, usize, usize)> {
        let n = self.ranks.len();
        let mesh = &site.space.mesh;
        // Where all ranks take a step, the way from a block of queries to that of keys is the same for all, along every axis.
        let way = |q: usize, k: usize| {
            let [from, to] = [q, k].map(|block| self.ranks[block]);
            let along =
                |&axis: &AxisId| mesh.coordinate(to, axis) + mesh.size(axis) - mesh.coordinate(from, axis);
            let ways = site.axes.iter().map(|axis| (along(axis) % mesh.size(*axis), mesh.size(*axis)));
            ways.fold(0, |all, (way, size)| all * size + way) as usize
        };
        let (mut by_way, mut by_pair) = (vec![0usize; n], Vec::new());
        for step in steps {
            let mut met = self.met(mesh, site.axes, step);
            if is_full(&step.queries) && is_full(&step.keys) {
                met.next().into_iter().for_each(|(q, k)| by_way[way(q, k)] += 1);
            } else {
                by_pair.resize(n * n, 0usize);
                met.for_each(|(q, k)| by_pair[q * n + k] += 1);
            }
        }
        if by_pair.is_empty() && by_way.iter().all(|&times| times == 1) {
            return None;
        }
        let times = |q: usize, k: usize| by_way[way(q, k)] + by_pair.get(q * n + k).copied().unwrap_or(0);
        let wrong = |&(q, k): &(usize, usize)| match times(q, k) {
            0 => self.sees(q, k),
            1 => false,
            _ => true,
        };
        let mut pairs = (0..n).flat_map(|q| (0..n).map(move |k| (q, k)));
        pairs.find(wrong).map(|(q, k)| (q, k, times(q, k)))
    }
}

/// The offset of the same blocks at home, for blocks that some ranks hold at `offset`.
pub(super) fn home_of(mesh: &Mesh, offset: &RankOffset) -> Option<RankOffset> {
    let mut home = RankOffset::new();
    for m in offset {
        let n = mesh.size(m.axis);
        let Some((start, end)) = m.only else { continue };
        let (first, last) = ((start + m.by) % n, (end - 1 + m.by) % n);
        // Blocks of ranks in a row that wrap around the end are not in a row at home.
        if first > last {
            return None;
        }
        home.push(Move { axis: m.axis, by: 0, only: Some((first, last + 1)) });
    }
    Some(home)
}

/// Whether every rank holds a block.
pub(super) fn is_full(offset: &RankOffset) -> bool {
    offset.iter().all(|m| m.only.is_none())
}
