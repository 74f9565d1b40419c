//! Legality: the divisibility that a layout requires, and copies, padding or a refusal where it is not met.
//!
//! The outcome is a [`Decisions`]: dimensions to declare (copied key/value heads, uneven heads, padded sequences), or a
//! refusal that names the quantity.

mod heads;

use std::collections::{BTreeMap, BTreeSet};

use ithaca_ir::diagnostic::counted;
use ithaca_ir::mesh::AxisId;
use ithaca_ir::ops::Op;
use ithaca_ir::{Diagnostic, Dim, DimId, Mesh, Module, Order};
use ithaca_pass::roles::Roles;
use num_integer::lcm;

use super::choice::AttentionChoice;
use super::degrees::legal_degrees;
use super::experts::{self, GroupSize};
use super::inside::{self, Inside};
use super::options::{HeadSplit, OrderChoice, SequenceFit, ShardOptions};
use super::orders::{self, ChosenOrders};
use super::pages;
use super::placements::Placements;
use super::strategy::Placement;
use crate::registry::Registry;

/// Runs of an order that a note lists.
const FEW_RUNS: usize = 8;

/// Changes of the space before values are laid out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decisions {
    /// Key/value heads that are copied where weights are loaded: the new size of the dimension.
    pub copy_weights: BTreeMap<DimId, u64>,
    /// Key/value heads that are copied before attention: the new size.
    pub copy_activations: BTreeMap<DimId, u64>,
    /// Dimensions that ranks hold in different sizes.
    pub uneven: Vec<DimId>,
    /// Heads and sequences that are padded: the new size.
    pub padded: BTreeMap<DimId, u64>,
    /// Query heads whose groups are padded one by one.
    pub padded_groups: BTreeMap<DimId, PaddedGroups>,
    /// Query heads whose padding attention gives zeros, for what it gives has a part in the gradient of a weight.
    pub cleared: BTreeSet<DimId>,
    /// Vocabularies and key/value heads that stay whole in weights because they do not divide.
    pub whole: Vec<DimId>,
    /// The order of tokens, where it is not contiguous.
    pub orders: BTreeMap<DimId, Order>,
    /// The orders of tokens that nobody asked for.
    pub chosen_orders: ChosenOrders,
    /// Groups of tokens that share slots of experts, and their slots.
    pub expert_groups: BTreeMap<DimId, GroupSize>,
    /// Notes to the user.
    pub notes: Vec<String>,
}

/// Groups of query heads that share a key/value head, with padding after the heads of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PaddedGroups {
    /// Groups.
    pub count: u64,
    /// Heads of a group.
    pub valid: u64,
    /// Heads of a padded group.
    pub size: u64,
}

impl PaddedGroups {
    /// Heads of all padded groups.
    pub fn heads(&self) -> u64 {
        self.count * self.size
    }

    /// The order of the padded heads: positions after those of all heads are padding.
    pub fn order(&self) -> Order {
        let Self { count, valid, size } = *self;
        if count == 1 {
            return Order::Contiguous;
        }
        let (all, padding) = (count * valid, size - valid);
        let runs = |g: u64| [g * valid..(g + 1) * valid, all + g * padding..all + (g + 1) * padding];
        Order::Table((0..count).flat_map(runs).collect())
    }
}

/// Decides whether and how `module` may be laid out.
///
/// # Errors
/// `P20` heads, `P21` key/value heads, `P22` feed-forward width, `P23` fewer tokens than ranks, `P24` padding of a sequence with an order of its own,
/// `P25` sequences of the batch, `P26` token orders, `P28` experts, `P29` groups of tokens, `P40`–`P49` limits of movements.
pub(super) fn decide(
    registry: &Registry,
    module: &Module,
    placements: &Placements,
    roles: &Roles,
    options: &ShardOptions,
    recorded: Option<&ChosenOrders>,
) -> Result<Decisions, Diagnostic> {
    let mut decisions = Decisions::default();
    let (mesh, placement) = (&options.mesh, &placements.base);
    for (i, placement) in placements.all().enumerate() {
        let check = Check { module, mesh, placement, placements, options };
        let mut own = Decisions::default();
        for &(heads, kv_heads) in &roles.heads {
            check.heads(heads, kv_heads, &mut own)?;
        }
        if i == 0 {
            decisions = own;
        } else if own != decisions {
            let message =
                "layers that split heads differently would need different copies of key/value heads";
            return Err(Diagnostic::new("P13", message)
                .help("use degrees that divide the key/value heads, or one strategy for all layers"));
        }
    }
    let check = Check { module, mesh, placement, placements, options };
    let degree = mesh.degree(&placement.weights);
    for &dim in &roles.hidden {
        let Dim { name, size, .. } = &module.space.dims[dim];
        if size % degree != 0 {
            let message =
                format!("feed-forward width {name} = {size} does not divide by the tensor degree {degree}");
            return Err(
                Diagnostic::new("P22", message).help(legal_degrees(*size, "width", |p| size % p == 0))
            );
        }
    }
    for &dim in &roles.vocabularies {
        let Dim { name, size, .. } = &module.space.dims[dim];
        if size % degree != 0 {
            decisions.whole.push(dim);
            decisions.notes.push(format!(
                "vocabulary {name} = {size} does not divide by the tensor degree {degree}: embedding and head stay whole"
            ));
        }
    }
    experts::check(module, mesh, placement, roles)?;
    let degree = mesh.degree(&placement.batch);
    for &dim in &roles.batches {
        let Dim { name, size, part, .. } = &module.space.dims[dim];
        let name = part.map_or(name, |part| &module.space.dims[part.of].name);
        if size % degree != 0 {
            let degrees = legal_degrees(*size, "batch", |p| size % p == 0);
            let Some(n) = micro_batches(module, dim) else {
                let message = format!(
                    "batch {name} = {} does not divide by the data-parallel degree {degree}",
                    counted(*size, "sequence")
                );
                return Err(Diagnostic::new("P25", message).help(degrees));
            };
            let message = format!(
                "a micro-batch of {}, of a batch {name} of {} in {n} micro-batches, does not divide by the data-parallel \
                 degree {degree}",
                counted(*size, "sequence"),
                size * n
            );
            let (each, share) = (size.next_multiple_of(degree), size * n / degree);
            let numbers = (1..=share.min(64)).filter(|m| (size * n).is_multiple_of(m * degree));
            let numbers: Vec<String> = numbers.map(|m| m.to_string()).collect();
            let refusal = Diagnostic::new("P25", message).help(degrees);
            let refusal = match numbers.as_slice() {
                [] => refusal,
                numbers => refusal.help(format!("legal numbers of micro-batches: {}", numbers.join(", "))),
            };
            return Err(refusal.help(format!("`--batch {}` has {each} sequences for each of them", each * n)));
        }
    }
    if roles.batches.is_empty() && degree > 1 {
        let message = format!("the program has no batch to split over the data-parallel degree {degree}");
        return Err(Diagnostic::new("P25", message));
    }
    pages::check(&module.space, mesh, placement, roles)?;
    let inside = inside::splits(registry, module, placements, roles)?;
    for &dim in roles.sequences.iter().filter(|&&d| module.space.dims[d].part.is_none()) {
        check.sequence(dim, roles, &inside, &mut decisions)?;
    }
    let mut space = module.space.clone();
    space.mesh.clone_from(mesh);
    for (&dim, &size) in &decisions.padded {
        space.dims[dim].size = size;
    }
    for &dim in &decisions.uneven {
        space.dims[dim].uneven = true;
    }
    let ordered = orders::decide(&space, &inside, &roles.pages, (options.order, recorded))?;
    (decisions.orders, decisions.chosen_orders) = (ordered.orders, ordered.chosen);
    if let Some(order) = options.order.filter(|_| inside.is_empty()) {
        decisions
            .notes
            .push(format!("order {order} has no effect: nothing splits a sequence inside attention"));
    }
    for (&dim, order) in &decisions.orders {
        space.dims[dim].order.clone_from(order);
        let order = match order {
            Order::Table(runs) if runs.len() > FEW_RUNS => {
                format!("{}, so that they see alike many keys", counted(runs.len() as u64, "run"))
            }
            order => format!("order {order}"),
        };
        decisions.notes.push(format!("sequence {} is dealt to ranks in {order}", space.dims[dim].name));
    }
    // Heads as attention will see them.
    for (&dim, &size) in decisions.copy_weights.iter().chain(&decisions.copy_activations) {
        space.dims[dim].size = size;
    }
    let (groups, notes) = experts::groups(module, &space, placement, roles)?;
    decisions.expert_groups = groups;
    decisions.notes.extend(notes);
    inside::check(&space, &inside, options.prune)?;
    let idle = idle(options, &inside, (roles, mesh.degree(&placement.attention_heads())), &decisions);
    decisions.notes.extend(idle);
    Ok(decisions)
}

/// A share of padding: `+0.01 %`.
fn percentage(padding: u64, tokens: u64) -> String {
    match padding as f64 / tokens as f64 * 100.0 {
        percent if percent < 0.01 => "below +0.01 %".to_owned(),
        percent => format!("+{percent:.2} %"),
    }
}

/// Options that were asked for and change nothing, with the reason.
fn idle(
    options: &ShardOptions,
    inside: &[Inside<'_>],
    (roles, head_degree): (&Roles, u64),
    decisions: &Decisions,
) -> Vec<String> {
    let mut idle = Vec::new();
    let is_padded = |dim: &DimId| decisions.padded.contains_key(dim);
    let is_uneven = |dim: &DimId| decisions.uneven.contains(dim);
    let heads = match options.heads {
        HeadSplit::Even => None,
        HeadSplit::Uneven => {
            (!roles.heads.iter().any(|(heads, _)| is_uneven(heads))).then_some("--uneven-heads")
        }
        HeadSplit::Pad => (!roles.heads.iter().any(|(heads, _)| is_padded(heads))).then_some("--pad-heads"),
    };
    if let Some(flag) = heads {
        let why = match head_degree {
            1 => "nothing splits heads".to_owned(),
            n => format!("heads divide by the head degree {n}"),
        };
        idle.push(format!("`{flag}` has no effect: {why}"));
    }
    let sequence = match options.sequence {
        SequenceFit::Auto => None,
        SequenceFit::Pad => (!roles.sequences.iter().any(is_padded)).then_some("--pad-sequence"),
        SequenceFit::Uneven => (!roles.sequences.iter().any(is_uneven)).then_some("--uneven-sequence"),
    };
    if let Some(flag) = sequence {
        idle.push(format!("`{flag}` has no effect: every sequence divides as it is"));
    }
    let AttentionChoice { movement, cross_movement, sequences: _ } = &options.attention;
    for (asked, flag, of_cross) in
        [(movement, "--movement", false), (cross_movement, "--cross-movement", true)]
    {
        if let Some(movement) = asked.as_ref().filter(|_| inside.iter().all(|i| i.is_cross() != of_cross)) {
            let what =
                if of_cross { "attention to another sequence" } else { "attention of a sequence to itself" };
            idle.push(format!("`{flag} {movement}` has no effect: nothing splits a sequence inside {what}"));
        }
    }
    idle
}

/// Of how many micro-batches `batch` is one, where it is one of several.
fn micro_batches(module: &Module, batch: DimId) -> Option<u64> {
    if let Some(part) = module.space.dims[batch].part {
        return Some(part.count);
    }
    let main = &module.functions[module.main()?];
    main.nodes.iter().find_map(|node| match (&node.op, main.ty(node.results.first().copied()?)) {
        (Op::Input(binding), ty) if !binding.view.is_empty() && ty.dims.get(1) == Some(&batch) => {
            Some(module.space.dims[ty.dims[0]].size)
        }
        // A pipeline's micro-batches are windows of the batch.
        (Op::Input(binding), ty) if !binding.window.is_empty() && ty.dims.first() == Some(&batch) => {
            Some(binding.stored.first()? / module.space.dims[batch].size)
        }
        _ => None,
    })
}

struct Check<'a> {
    module: &'a Module,
    mesh: &'a Mesh,
    placement: &'a Placement,
    placements: &'a Placements,
    options: &'a ShardOptions,
}

impl Check<'_> {
    fn degree(&self, axes: &[AxisId]) -> u64 {
        self.mesh.degree(axes)
    }

    /// The flag that sets the length of a sequence: the decoder's has its own, where there is an encoder too.
    fn length_flag(&self, dim: DimId) -> &'static str {
        let mut nodes = self.module.functions.values().flat_map(|f| f.nodes.iter().map(move |n| (f, n)));
        let is_target = nodes.any(|(f, node)| match &node.op {
            Op::Input(binding) => binding.name == "decoder_input_ids" && f.ty(node.result()).has(dim),
            _ => false,
        });
        if is_target { "--target-seq" } else { "--seq" }
    }

    /// Into how many parts each attention splits sequence `dim`, where it has that.
    fn parts<'i>(&'i self, inside: &'i [Inside<'_>], dim: DimId) -> impl Iterator<Item = u64> + 'i {
        inside.iter().filter_map(move |i| i.axes_of(dim)).map(|axes| self.degree(axes))
    }

    fn sequence(
        &self,
        dim: DimId,
        roles: &Roles,
        inside: &[Inside<'_>],
        decisions: &mut Decisions,
    ) -> Result<(), Diagnostic> {
        let mut axes = self.placements.residual_sequence(dim);
        if roles.caches.contains(&dim) {
            axes.extend(self.placement.cache.iter().copied());
        }
        let ranks = self.degree(&axes);
        // Every rank cuts its tokens into as many parts.
        let chunks = self.module.space.dims.values().filter_map(|d| d.part.filter(|p| p.of == dim));
        let chunks = chunks.map(|part| part.count).fold(1, lcm);
        let degree = ranks.saturating_mul(chunks);
        let Dim { name, size, order, .. } = &self.module.space.dims[dim];
        // An order that is asked for must fit too.
        let step = match self.options.order {
            None | Some(OrderChoice::Contiguous | OrderChoice::Zigzag | OrderChoice::Balanced) => degree,
            Some(OrderChoice::Striped(block)) => {
                self.parts(inside, dim).map(|n| n.saturating_mul(block)).fold(degree, lcm)
            }
        };
        let pads = match self.options.sequence {
            SequenceFit::Auto => *order == Order::Contiguous,
            SequenceFit::Pad => true,
            SequenceFit::Uneven => false,
        };
        if size % if pads { step } else { degree } == 0 {
            return Ok(());
        }
        if !pads {
            return self.uneven_sequence(dim, (ranks, &self.mesh.degrees_text(&axes)), chunks, decisions);
        }
        if *order != Order::Contiguous {
            let message =
                format!("sequence {name} cannot be padded: its {size} tokens have an order of their own");
            return Err(Diagnostic::new("P24", message)
                .help("use a length that divides, or leave the order to the strategy"));
        }
        let padded = size.next_multiple_of(step);
        decisions.padded.insert(dim, padded);
        decisions.notes.push(format!(
            "sequence {name} is padded from {size} to {padded} tokens ({}); outputs are cut back and padded labels ignored",
            percentage(padded - size, *size)
        ));
        Ok(())
    }

    /// A sequence of which the first ranks have one token more.
    fn uneven_sequence(
        &self,
        dim: DimId,
        (ranks, axes): (u64, &str),
        chunks: u64,
        decisions: &mut Decisions,
    ) -> Result<(), Diagnostic> {
        let Dim { name, size, .. } = &self.module.space.dims[dim];
        let flag = self.length_flag(dim);
        let (below, above) =
            (size / (ranks * chunks) * ranks * chunks, size.next_multiple_of(ranks * chunks));
        let lengths = if below == 0 { above.to_string() } else { format!("{below} or {above}") };
        let padding = format!("pad it with `--pad-sequence` to {above}, or use {flag} {lengths}");
        if chunks > 1 {
            let message = format!(
                "{size} tokens {name} on {ranks} ranks ({axes}) do not divide into {chunks} parts of the loss"
            );
            return Err(Diagnostic::new("P57", message).help(padding));
        }
        if *size < ranks {
            let message = format!(
                "sequence {name} = {} leaves some of {ranks} ranks ({axes}) without any",
                counted(*size, "token")
            );
            return Err(Diagnostic::new("P23", message).help(padding));
        }
        if experts::deals(self.module).any(|deal| deal.shared.sequence == dim) {
            let message =
                format!("{size} tokens {name} on {ranks} ranks ({axes}) are no equal groups for experts");
            return Err(Diagnostic::new("P29", message).help(padding));
        }
        decisions.uneven.push(dim);
        decisions.notes.push(format!(
            "sequence {name} of {size} tokens is split unevenly over {ranks} ranks: {} or {} tokens each",
            size.div_ceil(ranks),
            size / ranks
        ));
        Ok(())
    }
}
