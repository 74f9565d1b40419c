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
    /// The pages that are free, of each group of sequences that a rank has; those on devices are given first.
    free: Vec<Vec<usize>>,
    /// Pages on devices; further ones are in host memory.
    on_device: usize,
}

/// Pages for sequences of these lengths, in so many groups of sequences that have pages of their own.
///
/// # Errors
/// `C19` for a number of pages that is asked for and does not suffice.
pub(super) fn pages(
    (tokens, asked, host): (u64, Option<u64>, Option<u64>),
    lengths: &[u64],
    groups: u64,
) -> Result<Pages> {
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
    let count = asked.unwrap_or(needed).max(groups);
    if let Some(host) = host.filter(|&host| host + groups > count) {
        let message = format!("`--offload cache={host}` leaves no page on a rank, of {count} in all");
        let most = (count - groups) / groups * groups;
        let repairs = (most > 0).then(|| format!("--offload cache={most}"));
        return Err(Diagnostic::new("C19", message).repairs(repairs).into());
    }
    Ok(Pages { tokens, count: Some(count), host })
}

impl PageTable {
    /// No pages of `sequences` yet; caches have `capacity` tokens, and sequences are in `groups`.
    pub(super) fn new(pages: Pages, capacity: u64, sequences: usize, groups: u64) -> Self {
        let host = pages.host.unwrap_or(0);
        let on_device = index(pages.count.unwrap_or(0).saturating_sub(host));
        let [each, of_host] = [on_device, index(host)].map(|pages| pages / index(groups.max(1)));
        let own = |group: usize, from: usize, each: usize| from + group * each..from + (group + 1) * each;
        let free = (0..index(groups))
            .map(|group| own(group, on_device, of_host).chain(own(group, 0, each)).collect());
        Self {
            tokens: pages.tokens,
            entries: index(capacity.div_ceil(pages.tokens)),
            of_sequences: vec![Vec::new(); sequences],
            free: free.collect(),
            on_device,
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

    /// The pages on devices and those in host memory, which a table numbers after them, apart.
    pub(super) fn apart(&self, all: &Tensor<f64>) -> [Tensor<f64>; 2] {
        let at = self.on_device * all.shape[1..].iter().product::<usize>();
        let shape = |pages: usize| [&[pages], &all.shape[1..]].concat();
        let [device, host] = [&all.data[..at], &all.data[at..]].map(<[f64]>::to_vec);
        [Tensor::new(shape(self.on_device), device), Tensor::new(shape(all.shape[0] - self.on_device), host)]
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
