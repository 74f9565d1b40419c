//! Cuts a checkpoint for the ranks of a schedule.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use ithaca_ir::ops::Target;
use ithaca_ir::schedule::Schedule;

use super::error::ShardError;
use super::manifest::{INDEX, Identity, Index, REST, Shard, VERSION, Whole, rank_file};
use super::part::{Part, product};
use super::resolve::resolve;
use crate::persistent;
use crate::store::whole::{folder, permissions};
use crate::store::{About, Checkpoint, Entry, StoreError, TensorSource, Writer};
use crate::tensor::index;

/// The sizes of a cut checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Stored tensors that ranks have parts of.
    pub tensors: usize,
    /// For each rank, bytes of its parts.
    pub bytes: Vec<u64>,
    /// Tensors of the checkpoint that the plan does not use.
    pub left_out: Vec<String>,
}

/// A stored tensor and how ranks hold it.
struct Source {
    whole: Whole,
    /// Its tensors in the checkpoint, several for a stack.
    members: Vec<String>,
    /// For each of its different parts, the part of each rank, if it has one.
    parts: Vec<Vec<Option<Part>>>,
}

/// Cuts `from` for the ranks of `schedule` into files of the folder `to`, which is created: each rank's weights, and states of
/// the optimizer where the checkpoint has them. One stored tensor is held in memory at a time.
///
/// # Errors
/// [`ShardError::Occupied`], and [`ShardError::Store`] for weights that are missing or of another shape, for states of
/// which some are missing, and for files that cannot be written; [`ShardError::Invalid`] for experts of different
/// types. The folder appears only when it is complete.
pub fn cut(schedule: &Schedule, from: &Checkpoint, identity: Identity, to: &Path) -> Result<Cut, ShardError> {
    if to.exists() && !std::fs::read_dir(to).is_ok_and(|mut entries| entries.next().is_none()) {
        return Err(ShardError::Occupied(to.to_owned()));
    }
    let ranks = schedule.space.mesh.ranks();
    let sources = sources(schedule, from)?;
    let tensors = sources.iter().map(|(name, s)| (name.clone(), s.whole.clone())).collect();
    let uncovered: BTreeSet<&str> =
        sources.iter().filter(|(_, s)| s.leaves_out_some()).map(|(name, _)| name.as_str()).collect();
    let has_rest = !uncovered.is_empty();
    let document = Index { version: VERSION, identity, ranks, has_rest, about: from.about(), tensors };

    let io = StoreError::io("write", to);
    // The reason alone: the name of a temporary folder is another every time.
    let reason = |error: std::io::Error| io(error.kind().into());
    let beside = tempfile::Builder::new().prefix(".ithaca-").tempdir_in(folder(to)).map_err(reason)?;
    let mut order: Vec<(&String, &Source)> = sources.iter().collect();
    order.sort_by_key(|(name, source)| (source.whole.entry(name).order().0, *name));
    let mut files = Vec::new();
    let mut bytes = Vec::new();
    for rank in 0..ranks {
        let (entries, parts) = of_rank(&order, rank);
        bytes.push(entries.iter().map(|e| e.bytes() as u64).sum());
        let about = Shard::new(&document, rank, parts).about();
        files.push(Writer::create(&beside.path().join(rank_file(rank)), &about, &entries)?);
    }
    let kept_whole: Vec<&(&String, &Source)> =
        order.iter().filter(|(name, _)| uncovered.contains(name.as_str())).collect();
    let entries: Vec<Entry> = kept_whole.iter().map(|(name, source)| source.whole.entry(name)).collect();
    let rest = || Writer::create(&beside.path().join(REST), &About::new(), &entries);
    let mut rest = (!entries.is_empty()).then(rest).transpose()?;
    for (name, source) in &order {
        let mut stored = Vec::new();
        for member in &source.members {
            stored.extend(from.raw(member)?.bytes);
        }
        let size = source.whole.dtype.bytes();
        for part in &source.parts {
            for (file, part) in files.iter_mut().zip(part) {
                if let Some(part) = part {
                    file.append(&part.cut(&stored, size))?;
                }
            }
        }
        if let Some(rest) = rest.as_mut().filter(|_| uncovered.contains(name.as_str())) {
            rest.append(&stored)?;
        }
    }
    for file in files.into_iter().chain(rest) {
        file.finish()?;
    }
    std::fs::write(beside.path().join(INDEX), document.to_json()).map_err(&io)?;
    // Temporary folders are private; the result has the usual permissions.
    if let Some(usual) = permissions(0o755) {
        std::fs::set_permissions(beside.path(), usual).map_err(&io)?;
    }
    std::fs::rename(beside.path(), to).map_err(&io)?;
    // The temporary folder has been renamed, so there is nothing to remove.
    let _ = beside.keep();
    let taken: BTreeSet<&String> = sources.values().flat_map(|s| &s.members).collect();
    let left_out = from.names().into_iter().filter(|name| !taken.contains(name)).collect();
    Ok(Cut { tensors: taken.len(), bytes, left_out })
}

/// The stored tensors that the schedule's weights and states are parts of.
fn sources(schedule: &Schedule, from: &Checkpoint) -> Result<BTreeMap<String, Source>, ShardError> {
    let space = &schedule.space;
    let mut sources: BTreeMap<String, Source> = BTreeMap::new();
    let (mut absent, mut has_states) = (None, false);
    for one in persistent::tensors(schedule)?.iter().filter(|one| !one.is_gradient()) {
        let expected = one.binding.stored_shape(space, one.ty);
        let Some(binding) = resolve(from, one.binding, one.layer, &expected)? else {
            let name =
                one.stored(space).into_iter().next().map_or_else(|| one.stored_name(), |(name, _)| name);
            match one.target {
                Target::Param => return Err(from.missing(&name).into()),
                Target::State => absent = absent.or(Some(name)),
            }
            continue;
        };
        has_states |= one.target == Target::State;
        let (members, shapes): (Vec<String>, Vec<_>) =
            persistent::members(&binding.name, &binding.stored).into_iter().unzip();
        let dtype = from.entry(&members[0])?.stored;
        for (name, expected) in members.iter().zip(shapes) {
            let Entry { name, stored, shape: found } = from.entry(name)?;
            if found != expected {
                return Err(StoreError::Shape { store: from.description(), name, found, expected }.into());
            }
            if stored != dtype {
                let reason = format!("`{name}` has another element type than `{}`", members[0]);
                return Err(ShardError::Invalid { path: from.description().into(), reason });
            }
        }
        let part = |rank| one.is_on(space, rank).then(|| Part::of(space, &binding, one.ty, rank));
        let parts: Vec<Option<Part>> = space.mesh.iter_ranks().map(part).collect();
        let whole = Whole { dtype, shape: binding.stored.clone() };
        let known =
            sources.entry(binding.name.clone()).or_insert(Source { whole, members, parts: Vec::new() });
        if !known.parts.contains(&parts) {
            known.parts.push(parts);
        }
    }
    match absent {
        Some(name) if has_states => Err(from.missing(&name).into()),
        Some(_) | None => Ok(sources),
    }
}

/// The tensors of a rank's file, in the order of the file, each with its part.
fn of_rank(order: &[(&String, &Source)], rank: u64) -> (Vec<Entry>, BTreeMap<String, Part>) {
    let (mut entries, mut parts) = (Vec::new(), BTreeMap::new());
    for (name, source) in order {
        for (i, of_ranks) in source.parts.iter().enumerate() {
            let Some(part) = &of_ranks[index(rank)] else { continue };
            let name = if source.parts.len() == 1 { (*name).clone() } else { format!("{name}#{i}") };
            entries.push(Entry { name: name.clone(), stored: source.whole.dtype, shape: part.extents() });
            parts.insert(name, part.clone());
        }
    }
    (entries, parts)
}

impl Source {
    /// Whether some of its elements are on no rank.
    fn leaves_out_some(&self) -> bool {
        // Ranks together hold everything that a plan uses, so only windows can leave elements out.
        let parts = || self.parts.iter().flatten().flatten();
        if parts().any(|part| part.window.is_empty()) {
            return false;
        }
        let mut known = vec![false; product(&self.whole.shape).unwrap_or(0)];
        for part in parts() {
            part.each(|_, at| known[at] = true);
        }
        known.contains(&false)
    }
}
