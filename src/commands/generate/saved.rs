//! Caches in files, from which decoding continues under any layout.
//!
//! A safetensors file of the states of a decoding step under their names: `cache.key.{layer} [sequence token head width]` and
//! what else a model keeps of tokens, `cache.lengths [sequence]` and `cache.token [sequence]`. It has as many tokens as the longest
//! sequence, so it does not depend on the capacity of the run. Caches of eight bits are kept as the numbers that they stand for,
//! so it does not depend on their type either.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use ithaca_ir::Diagnostic;
use ithaca_ir::diagnostic::counted;
use ithaca_ir::ops::Target;
use ithaca_ir::ops::cache::{CACHE, HOST, LENGTHS, SCALES, TOKEN};
use ithaca_ir::schedule::Schedule;
use ithaca_kernels::Outputs;
use ithaca_kernels::persistent;
use ithaca_kernels::storage::scale_of_row;
use ithaca_kernels::store::{self, Stored, TensorSource, Tensors};
use ithaca_kernels::tensor::{Tensor, index};

use super::pages::PageTable;
use crate::error::Result;

/// The caches of a file.
pub(super) struct Prefix {
    states: Tensors,
    /// Tokens of each sequence.
    pub(super) lengths: Vec<u64>,
}

impl Prefix {
    /// Reads a file; `shown` is how messages name it.
    ///
    /// # Errors
    /// `C10` for a file that cannot be read or has no lengths of sequences within its caches.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let file = store::open(path)?;
        let of_states = file.names().into_iter().filter(|name| file.shape(name).is_some());
        let states = of_states.map(|name| Ok((name.clone(), file.read(&name)?)));
        let states: Tensors = states.collect::<Result<Vec<_>>>()?.into_iter().collect();
        let refused = |what: &str| {
            let message = format!("`{}` is no file of caches: {what}", path.display());
            Diagnostic::new("C10", message).help("`run --mode decode --save-cache FILE` writes one")
        };
        let lengths = match [LENGTHS, TOKEN].map(|name| states.shape(name)) {
            [Some(lengths), Some(tokens)] if lengths.len() == 1 && lengths == tokens => {
                states.read(LENGTHS)?
            }
            _ => {
                return Err(refused(&format!("it has no `{LENGTHS}` and `{TOKEN}` of each sequence")).into());
            }
        };
        let names = states.names();
        let capacities = names.iter().filter_map(|name| states.shape(name)?.get(1).copied());
        let capacity = capacities.min().unwrap_or(0);
        let fits = |length: &f64| *length >= 0.0 && length.fract() == 0.0 && *length <= capacity as f64;
        if let Some(length) = lengths.data.iter().find(|length| !fits(length)) {
            let caches = counted(capacity, "token");
            return Err(
                refused(&format!("a sequence has {length} tokens, and the caches have {caches}")).into()
            );
        }
        Ok(Self { states, lengths: lengths.data.iter().map(|&n| n as u64).collect() })
    }

    /// The states of a schedule: its caches have its capacity, and zeros where no token is; or they are in pages of `table`.
    ///
    /// # Errors
    /// `C10` for a state that the file lacks or has in another shape.
    pub(super) fn states(
        self,
        path: &Path,
        schedule: &Schedule,
        table: Option<&PageTable>,
    ) -> Result<Tensors> {
        let mut states = Tensors::new();
        let kept = persistent::tensors(schedule)?;
        let kept = kept.iter().filter(|one| one.target == Target::State);
        let expected: BTreeMap<String, Vec<u64>> = kept.flat_map(|one| one.stored(&schedule.space)).collect();
        let has_scales = |name: &String| scales_of(name).filter(|scales| expected.contains_key(scales));
        let scales: BTreeSet<String> = expected.keys().filter_map(has_scales).collect();
        let is_alone = |name: &String| !scales.contains(name) && !name.starts_with(HOST);
        for (name, shape) in expected.iter().filter(|(name, _)| is_alone(name)) {
            // Pages in host memory follow the others.
            let in_host_memory = of_host(name).filter(|name| expected.contains_key(name));
            let mut shape = shape.clone();
            if let (Some(pages), Some(name)) = (shape.first_mut(), &in_host_memory) {
                *pages += expected[name].first().copied().unwrap_or(0);
            }
            let shape = &shape;
            let found = self.states.shape(name).unwrap_or_default();
            // Pages are of all sequences.
            let in_pages = shape.len() > 1 && table.is_some();
            let fits = found.len() == shape.len()
                && found.get(2..) == shape.get(2..)
                && (in_pages || found.first() == shape.first());
            if !fits {
                let message =
                    format!("`{}` has `{name}` {found:?}, and the model has {shape:?}", path.display());
                let help = "a file of caches continues with the model and the sequences that it was made of";
                return Err(Diagnostic::new("C10", message).help(help).into());
            }
            let tensor = self.states.read(name)?;
            let tensor = match (shape.get(1), table) {
                (Some(_), Some(table)) => table.scattered(&tensor, shape.iter().map(|&n| index(n)).collect()),
                (Some(&capacity), None) => rolled(&tensor, index(capacity), &self.lengths),
                (None, _) => tensor,
            };
            let kinds = match (in_host_memory, table) {
                (Some(of_host), Some(table)) => {
                    let [device, host] = table.apart(&tensor);
                    vec![(name.clone(), device), (of_host, host)]
                }
                _ => vec![(name.clone(), tensor)],
            };
            for (name, tensor) in kinds {
                match has_scales(&name) {
                    None => states.insert(name, tensor),
                    Some(scales) => {
                        let (rows, factors) = in_eight_bits(&tensor);
                        states.insert(name, rows);
                        states.insert(scales, factors);
                    }
                }
            }
        }
        Ok(states)
    }
}

/// Writes the states after a run; its caches may be in pages.
///
/// # Errors
/// `C10` for a path that cannot be written.
pub(super) fn save(path: &Path, kept: &Outputs<f32>, table: Option<&PageTable>) -> Result<()> {
    let lengths = kept.get(LENGTHS).map(|lengths| lengths.data.as_slice()).unwrap_or_default();
    let longest = lengths.iter().map(|&length| index(length as u64)).max().unwrap_or(0);
    let scales: BTreeSet<String> = kept.keys().filter_map(|name| scales_of(name)).collect();
    let numbers = |name: &str, tensor: &Tensor<f32>| {
        let mut tensor = tensor.map(f64::from);
        if let Some(scales) = scales_of(name).and_then(|name| kept.get(&name)) {
            let width = tensor.shape.last().copied().unwrap_or(1).max(1);
            let rows = tensor.data.chunks_mut(width).zip(&scales.data);
            rows.for_each(|(row, &scale)| row.iter_mut().for_each(|x| *x *= f64::from(scale)));
        }
        tensor
    };
    let is_alone = |name: &String| !scales.contains(name) && !name.starts_with(HOST);
    let tensors = kept.iter().filter(|(name, _)| is_alone(name)).map(|(name, tensor)| {
        let mut tensor = numbers(name, tensor);
        if let Some((name, host)) = of_host(name).and_then(|name| kept.get(&name).map(|host| (name, host))) {
            tensor.data.extend(numbers(&name, host).data);
            tensor.shape[0] += host.shape[0];
        }
        match (tensor.shape.len(), table) {
            (1, _) => (name, Stored::I32, tensor),
            (_, None) => (name, Stored::F32, unrolled(&tensor, longest, lengths)),
            (_, Some(table)) => (name, Stored::F32, table.gathered(&tensor, longest)),
        }
    });
    let tensors = Vec::from_iter(tensors);
    let tensors: Vec<_> = tensors.iter().map(|(name, stored, t)| (name.as_str(), *stored, t)).collect();
    Ok(store::write(path, &tensors)?)
}

/// The name of the pages in host memory of the cache `name`.
fn of_host(name: &str) -> Option<String> {
    Some(format!("{HOST}{}", name.strip_prefix(CACHE)?))
}

/// The name of the scales of the cache `name`, where it has some.
fn scales_of(name: &str) -> Option<String> {
    let (part, layer) = name.strip_prefix(CACHE)?.rsplit_once('.')?;
    Some(format!("{CACHE}{part}{SCALES}.{layer}"))
}

/// The rows of a cache divided by their scales, and the scales.
fn in_eight_bits(tensor: &Tensor<f64>) -> (Tensor<f64>, Tensor<f64>) {
    let width = tensor.shape.last().copied().unwrap_or(1).max(1);
    let scales: Vec<f64> = tensor.data.chunks(width).map(scale_of_row).collect();
    let rows = tensor.data.chunks(width).zip(&scales);
    let rows = rows.flat_map(|(row, &scale)| row.iter().map(move |&x| x / scale)).collect();
    let shape = tensor.shape[..tensor.shape.len().saturating_sub(1)].to_vec();
    (Tensor::new(tensor.shape.clone(), rows), Tensor::new(shape, scales))
}

/// The first tokens of sequences, zero behind their ends, as a cache of `capacity` tokens has them: that at a position is there
/// modulo the capacity, which is below the position where the cache is one of a window.
fn rolled(tensor: &Tensor<f64>, capacity: usize, lengths: &[u64]) -> Tensor<f64> {
    moved(tensor, capacity, lengths, capacity, |position| [position, position % capacity.max(1)])
}

/// The first `longest` tokens of sequences that are in a cache; of a window it has the last ones, and zero is in place of others.
fn unrolled(cache: &Tensor<f64>, longest: usize, lengths: &[f32]) -> Tensor<f64> {
    let lengths: Vec<u64> = lengths.iter().map(|&length| length as u64).collect();
    let capacity = cache.shape.get(1).copied().unwrap_or(1);
    moved(cache, longest, &lengths, capacity, |position| [position % capacity.max(1), position])
}

/// A tensor of `n` tokens, the second dimension, to which the last `capacity` tokens of each sequence are moved: from a place to
/// another by position.
fn moved(
    tensor: &Tensor<f64>,
    n: usize,
    lengths: &[u64],
    capacity: usize,
    places: impl Fn(usize) -> [usize; 2],
) -> Tensor<f64> {
    let Some(&tokens) = tensor.shape.get(1) else { return tensor.clone() };
    let width: usize = tensor.shape[2..].iter().product();
    let mut shape = tensor.shape.clone();
    shape[1] = n;
    let mut data = vec![0.0; shape.iter().product()];
    let rows = tensor.data.chunks((tokens * width).max(1)).zip(data.chunks_mut((n * width).max(1)));
    for ((from, to), &length) in rows.zip(lengths) {
        let length = index(length);
        for position in length.saturating_sub(capacity)..length {
            let [a, b] = places(position);
            to[b * width..(b + 1) * width].copy_from_slice(&from[a * width..(a + 1) * width]);
        }
    }
    Tensor::new(shape, data)
}
