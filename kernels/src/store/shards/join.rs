//! Joins the files of a cut checkpoint.

use std::collections::BTreeMap;
use std::path::Path;

use ithaca_ir::ops::source;

use super::error::ShardError;
use super::manifest::{INDEX, Index, REST, Shard, Whole, rank_file};
use super::part::{Part, product};
use crate::persistent;
use crate::store::{Entry, Raw, SafeTensorsFile, StoreError, TensorSource, Writer};
use crate::tensor::unravel;

/// The sizes of a joined checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Joined {
    /// Tensors of the file.
    pub tensors: usize,
    /// Ranks whose parts they were.
    pub ranks: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// A part, and the file that has it.
struct StoredPart<'a> {
    file: &'a SafeTensorsFile,
    name: String,
    part: Part,
}

/// Joins the parts in the folder `from` to the file `to`. One stored tensor is held in memory at a time.
///
/// # Errors
/// [`ShardError`]: files that are missing, cut off or of another plan, parts that are missing, or that have different bits
/// for one element. `to` is then unchanged.
pub fn join(from: &Path, to: &Path) -> Result<Joined, ShardError> {
    let index = Index::read(from)?;
    let mut files = Vec::new();
    for rank in 0..index.ranks {
        files.push(SafeTensorsFile::open(from.join(rank_file(rank)))?);
    }
    let rest = if index.has_rest { Some(SafeTensorsFile::open(from.join(REST))?) } else { None };
    let mut parts = parts(&files, &index)?;
    let mut order: Vec<(&String, &Whole)> = index.tensors.iter().collect();
    order.sort_by_key(|(name, whole)| (whole.entry(name).order().0, *name));
    let mut entries = Vec::new();
    for (name, whole) in &order {
        let whole_entry = whole.entry(name);
        // The check bounds the memory that an index can request by the size of the files.
        check(&whole_entry, parts.get(*name).map_or(&[], Vec::as_slice), rest.as_ref(), from)?;
        entries.extend(members(&whole_entry));
    }
    // The order of a checkpoint, in which the tensors of stacks alternate.
    entries.sort_by(|a, b| a.order().cmp(&b.order()));
    let places: BTreeMap<String, usize> =
        entries.iter().enumerate().map(|(i, entry)| (entry.name.clone(), i)).collect();
    let mut file = Writer::create(to, &index.about, &entries)?;
    for (name, whole) in order {
        let held = parts.remove(name).unwrap_or_default();
        let whole_entry = whole.entry(name);
        let stored = tensor(&whole_entry, &held, rest.as_ref())?;
        for (member, entry) in members(&whole_entry).enumerate() {
            file.put(places[&entry.name], &stored[member * entry.bytes()..][..entry.bytes()])?;
        }
    }
    file.finish()?;
    let bytes = entries.iter().map(|e| e.bytes() as u64).sum();
    Ok(Joined { tensors: entries.len(), ranks: index.ranks, bytes })
}

/// The parts of every stored tensor, in order of ranks.
fn parts<'a>(
    files: &'a [SafeTensorsFile],
    index: &Index,
) -> Result<BTreeMap<String, Vec<StoredPart<'a>>>, ShardError> {
    let mut parts: BTreeMap<String, Vec<StoredPart<'a>>> = BTreeMap::new();
    for (rank, file) in files.iter().enumerate() {
        for (name, part) in Shard::of(file, index, rank as u64)?.parts {
            let invalid = |reason: String| ShardError::Invalid { path: file.path().to_owned(), reason };
            let Entry { name, stored, shape } = file.entry(&name)?;
            if shape != part.extents() {
                return Err(invalid(format!("`{name}` has another shape than its part, {shape:?}")));
            }
            match index.tensors.get(&part.of) {
                Some(whole) if whole.shape == part.stored && whole.dtype == stored => {}
                Some(_) => {
                    return Err(invalid(format!("`{}` has another shape or type in the index", part.of)));
                }
                None => return Err(invalid(format!("`{}` is not in the index", part.of))),
            }
            parts.entry(part.of.clone()).or_default().push(StoredPart { file, name, part });
        }
    }
    Ok(parts)
}

/// Checks that there are elements enough for a stored tensor.
fn check(
    entry: &Entry,
    held: &[StoredPart<'_>],
    rest: Option<&SafeTensorsFile>,
    from: &Path,
) -> Result<(), ShardError> {
    let Entry { name, stored, shape } = entry;
    let is_stack = source::members(name, 1) != [name.as_str()];
    let elements = product(shape).filter(|&n| !is_stack || (n > 0 && !shape.is_empty()));
    let Some(elements) = elements else {
        let reason = format!("`{name}` has the invalid shape {shape:?}");
        return Err(ShardError::Invalid { path: from.join(INDEX), reason });
    };
    if let Some(rest) = rest.filter(|rest| rest.shape(name).is_some()) {
        let found = rest.entry(name)?;
        if (&found.shape, found.stored) != (shape, *stored) {
            let (store, name, expected) = (rest.description(), name.clone(), shape.clone());
            return Err(StoreError::Shape { store, name, found: found.shape, expected }.into());
        }
        return Ok(());
    }
    let in_parts: usize = held.iter().map(|h| product(&h.part.extents()).unwrap_or(0)).sum();
    if in_parts < elements { Err(missing(entry, held)) } else { Ok(()) }
}

/// The error of elements that no part has. Its memory is bounded by the elements of the parts.
fn missing(entry: &Entry, held: &[StoredPart<'_>]) -> ShardError {
    let Entry { name, stored: _, shape } = entry;
    let mut known: Vec<usize> = Vec::new();
    held.iter().for_each(|h| h.part.each(|_, at| known.push(at)));
    known.sort_unstable();
    known.dedup();
    let first = known.iter().enumerate().find(|&(i, &at)| i != at).map_or(known.len(), |(i, _)| i);
    let elements = shape.iter().product::<u64>();
    let missing = elements - known.len() as u64;
    ShardError::Missing { name: name.clone(), missing, elements, at: unravel(shape, first as u64) }
}

/// A stored tensor from its parts.
fn tensor(
    entry: &Entry,
    held: &[StoredPart<'_>],
    rest: Option<&SafeTensorsFile>,
) -> Result<Vec<u8>, ShardError> {
    let size = entry.stored.bytes();
    let mut stored = vec![0; entry.bytes()];
    let mut known = vec![false; stored.len() / size];
    for StoredPart { file, name, part } in held {
        let Raw { bytes, .. } = file.raw(name)?;
        let mut differs = None;
        part.each(|i, at| {
            let (new, old) = (&bytes[i * size..(i + 1) * size], &mut stored[at * size..(at + 1) * size]);
            if !std::mem::replace(&mut known[at], true) {
                old.copy_from_slice(new);
            } else if new != &*old {
                differs = differs.or(Some(at));
            }
        });
        if let Some(at) = differs {
            return Err(ShardError::Conflict {
                path: file.path().to_owned(),
                name: entry.name.clone(),
                at: unravel(&entry.shape, at as u64),
            });
        }
    }
    if !known.contains(&false) {
        return Ok(stored);
    }
    let Some(rest) = rest.filter(|rest| rest.shape(&entry.name).is_some()) else {
        return Err(missing(entry, held));
    };
    let Raw { bytes, .. } = rest.raw(&entry.name)?;
    for at in (0..known.len()).filter(|&at| !known[at]) {
        stored[at * size..(at + 1) * size].copy_from_slice(&bytes[at * size..(at + 1) * size]);
    }
    Ok(stored)
}

/// The tensors of the file that a stored tensor is; several for a stack.
fn members(entry: &Entry) -> impl Iterator<Item = Entry> {
    let stored = entry.stored;
    let members = persistent::members(&entry.name, &entry.shape).into_iter();
    members.map(move |(name, shape)| Entry { name, stored, shape })
}
