//! The layers of a small model: each chunk of a pipeline keeps some of each kind, with the same neighbours where that is asked for.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::spec::{Spec, Spelling};

/// How many layers are kept.
pub(super) struct Keep<'a> {
    /// The layers of each chunk of a pipeline; empty without a pipeline.
    pub(super) chunks: &'a [u64],
    /// The layers that are recomputed together.
    pub(super) every: u64,
    /// Groups of such layers, in every chunk.
    pub(super) groups: u64,
}

impl Keep<'_> {
    /// The layers of a stack of `n`: two, or as many of each chunk as are kept.
    pub(super) fn layers(&self, n: u64) -> u64 {
        let chunks = self.chunks.len().max(1) as u64;
        chunks.saturating_mul(self.of_run(n / chunks)).max(2).min(n)
    }

    /// The layers that are kept of `n` that follow one another in a chunk: some groups, and those that are left.
    fn of_run(&self, n: u64) -> u64 {
        let group = self.every.max(1);
        (self.groups * group + n % group).clamp(1, n.max(1))
    }
}

/// Whether layers differ by a factor of their scores only.
pub(super) fn is_scaled_by_layer(spec: &Spec) -> bool {
    spec.spelling == Spelling::Gpt2 && spec.kinds.len() > 1
}

/// The kinds of the small model's layers. Either each chunk keeps the layers that have the same neighbours, or runs of one kind
/// are cut to equal lengths, and of these the first layers that have every kind are kept, as many as are needed.
pub(super) fn small_layers(spec: &Spec, keep: &Keep<'_>) -> Vec<usize> {
    let least = keep.layers(spec.sizes.layers);
    let mut kinds: Vec<usize> = Vec::new();
    for (kind, _) in &spec.runs {
        if !kinds.contains(kind) {
            kinds.push(*kind);
        }
    }
    // Kinds that differ by layer only (scores scaled by depth) need two at most.
    if is_scaled_by_layer(spec) {
        kinds.truncate(2);
        let first = *kinds.last().expect("there are several");
        kinds.resize(kinds.len().max(usize::try_from(least).unwrap_or(usize::MAX)), first);
        return kinds;
    }
    if let Some(chunks) = by_chunk(&spec.runs, keep) {
        return chunks.concat();
    }
    let all = spec.sizes.layers;
    let least = least.min(all);
    let cut = |length: u64| -> Vec<usize> {
        let runs = spec.runs.iter().flat_map(|(kind, layers)| {
            layers.clone().take(usize::try_from(length).unwrap_or(usize::MAX)).map(|_| *kind)
        });
        runs.collect()
    };
    let fits = |layers: &Vec<usize>| layers.len() as u64 >= least;
    let mut layers = (1..=all).map(cut).find(fits).unwrap_or_else(|| cut(all));
    let has_all = |n: usize| kinds.iter().all(|kind| layers[..n].contains(kind));
    let n = (1..=layers.len()).find(|&n| n as u64 >= least && has_all(n)).unwrap_or(layers.len());
    layers.truncate(n);
    layers
}

/// The kinds of the layers that each chunk keeps, where enough of them are asked for: the fewest of its first and last ones in which
/// runs of one kind have the same neighbours. Of a long run a first layer is kept, a last one, and some between them.
pub(super) fn by_chunk(runs: &[(usize, Range<u64>)], keep: &Keep<'_>) -> Option<Vec<Vec<usize>>> {
    let layers = runs.last().map_or(0, |(_, last)| last.end);
    let all = [layers];
    let chunks = if keep.chunks.is_empty() { &all[..] } else { keep.chunks };
    let is_of_one_kind = runs.iter().all(|(kind, _)| *kind == runs[0].0);
    let is_enough = if is_of_one_kind { chunks.len() > 1 } else { keep.groups > 1 };
    if !is_enough || chunks.iter().sum::<u64>() != layers {
        return None;
    }
    let starts = chunks.iter().scan(0, |end, &n| {
        *end += n;
        Some(*end - n..*end)
    });
    let of_chunk = |chunk: Range<u64>| {
        let inside = |(kind, run): &(usize, Range<u64>)| {
            let n = run.end.min(chunk.end).saturating_sub(run.start.max(chunk.start));
            (n > 0).then(|| (*kind, keep.of_run(n)))
        };
        with_same_neighbours(runs.iter().filter_map(inside).collect())
    };
    Some(starts.map(of_chunk).collect())
}

/// The layers of the fewest first and last runs in which each run has the same neighbours as in all of them.
fn with_same_neighbours(runs: Vec<(usize, u64)>) -> Vec<usize> {
    let neighbours = |runs: &[(usize, u64)]| -> BTreeSet<[Option<(usize, u64)>; 3]> {
        let run = |i: usize| runs.get(i).copied();
        (0..runs.len()).map(|i| [i.checked_sub(1).and_then(run), run(i), run(i + 1)]).collect()
    };
    let all = neighbours(&runs);
    let ends = |n: usize| (0..=n).map(move |last| (n - last, last));
    let cut = |(first, last)| [&runs[..first], &runs[runs.len() - last..]].concat();
    let cuts = (1..runs.len()).flat_map(ends).map(cut);
    let kept = cuts.into_iter().find(|kept| neighbours(kept) == all).unwrap_or_else(|| runs.clone());
    kept.into_iter().flat_map(|(kind, n)| (0..n).map(move |_| kind)).collect()
}
