//! The pages of caches: which page has which tokens of which sequence.

use ithaca_ir::Diagnostic;
use ithaca_ir::diagnostic::counted;
use ithaca_kernels::tensor::{Tensor, index};
use ithaca_passes::import::Pages;

use crate::error::Result;

/// Pages of sequences; a sequence gets them as it grows.
pub(super) struct PageTable {
    /// Tokens of a page.
    tokens: u64,
    /// Pages that a sequence may have.
    entries: usize,
    /// The pages of each sequence, in order of its tokens.
    of_sequences: Vec<Vec<usize>>,
    /// The pages that are free, of each group of sequences that a rank has.
    free: Vec<Vec<usize>>,
}

/// Pages for sequences of these lengths, in so many groups of sequences that have pages of their own.
///
/// # Errors
/// `C19` for a number of pages that is asked for and does not suffice.
pub(super) fn pages((tokens, asked): (u64, Option<u64>), lengths: &[u64], groups: u64) -> Result<Pages> {
    let of_group = (lengths.len() / index(groups)).max(1);
    let needed = |group: &[u64]| group.iter().map(|length| length.div_ceil(tokens)).sum::<u64>();
    let most = lengths.chunks(of_group).map(needed).max().unwrap_or(0);
    let needed = most * groups;
    if let Some(asked) = asked.filter(|&asked| asked < needed) {
        let message = format!(
            "the sequences need {} of {}, and `--pages` is {asked}",
            counted(needed, "page"),
            counted(tokens, "token")
        );
        return Err(Diagnostic::new("C19", message).repairs([format!("--pages {needed}")]).into());
    }
    Ok(Pages { tokens, count: Some(asked.unwrap_or(needed).max(groups)) })
}

impl PageTable {
    /// No pages of `sequences` yet; caches have `capacity` tokens, and sequences are in `groups`.
    pub(super) fn new(pages: Pages, capacity: u64, sequences: usize, groups: u64) -> Self {
        let each = index(pages.count.unwrap_or(0) / groups.max(1));
        let free = (0..index(groups)).map(|group| (group * each..(group + 1) * each).collect());
        Self {
            tokens: pages.tokens,
            entries: index(capacity.div_ceil(pages.tokens)),
            of_sequences: vec![Vec::new(); sequences],
            free: free.collect(),
        }
    }

    /// Gives sequences pages for so many tokens each; there are enough.
    pub(super) fn grow(&mut self, lengths: &[u64]) {
        let of_group = (self.of_sequences.len() / self.free.len().max(1)).max(1);
        for (i, (own, length)) in self.of_sequences.iter_mut().zip(lengths).enumerate() {
            let free = &mut self.free[i / of_group];
            while (own.len() as u64) < length.div_ceil(self.tokens) {
                let Some(page) = free.pop() else { break };
                own.push(page);
            }
        }
    }

    /// The table `[sequence entry]`: −1 where a sequence has no page.
    pub(super) fn tensor(&self) -> Tensor<f64> {
        let entry = |own: &Vec<usize>, i: usize| own.get(i).map_or(-1.0, |&page| page as f64);
        let rows = self.of_sequences.iter().flat_map(|own| (0..self.entries).map(move |i| entry(own, i)));
        Tensor::new(vec![self.of_sequences.len(), self.entries], rows.collect())
    }

    /// A cache `[page slot …]` as `[sequence token …]`, with so many tokens.
    pub(super) fn gathered(&self, cache: &Tensor<f64>, tokens: usize) -> Tensor<f64> {
        let shape = [&[self.of_sequences.len(), tokens], &cache.shape[2..]].concat();
        let mut data = vec![0.0; shape.iter().product()];
        self.each(&shape, |row, of_page| data[row.clone()].copy_from_slice(&cache.data[of_page]));
        Tensor::new(shape, data)
    }

    /// A cache `[sequence token …]` as `[page slot …]` of a shape.
    pub(super) fn scattered(&self, cache: &Tensor<f64>, shape: Vec<usize>) -> Tensor<f64> {
        let mut data = vec![0.0; shape.iter().product()];
        self.each(&cache.shape, |row, of_page| data[of_page].copy_from_slice(&cache.data[row.clone()]));
        Tensor::new(shape, data)
    }

    /// Calls `f` with where each token is that has a page: in `[sequence token …]` of `shape`, and in pages.
    fn each(&self, shape: &[usize], mut f: impl FnMut(&std::ops::Range<usize>, std::ops::Range<usize>)) {
        let (slots, tokens, width) = (index(self.tokens), shape[1], shape[2..].iter().product::<usize>());
        for (sequence, own) in self.of_sequences.iter().enumerate() {
            for token in 0..tokens.min(own.len() * slots) {
                let row = (sequence * tokens + token) * width;
                let slot = (own[token / slots] * slots + token % slots) * width;
                f(&(row..row + width), slot..slot + width);
            }
        }
    }
}
