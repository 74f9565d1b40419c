//! What decoding gives: the tokens and logits of every step, and those that a file expects.

use std::path::Path;

use ithaca_ir::Diagnostic;
use ithaca_kernels::store::{self, Renamed, TensorSource};
use ithaca_kernels::tensor::{Tensor, index};
use ithaca_kernels::{Outputs, Real};

use super::stops::Stops;
use crate::commands::verdict::{STEP_LOGITS, TOKENS, none_expected};
use crate::error::Result;

/// The tokens and logits of every step, and what it leaves.
pub(super) struct Generated<T> {
    /// By sequence.
    tokens: Vec<Vec<T>>,
    /// By sequence.
    logits: Vec<Vec<T>>,
}

impl<T: Real> Generated<T> {
    pub(super) fn new(batch: usize) -> Self {
        Self { tokens: vec![Vec::new(); batch], logits: vec![Vec::new(); batch] }
    }

    /// Adds what a step gave the sequences that it continued to their next token.
    pub(super) fn add(&mut self, outputs: &Outputs<T>, ended: &[bool]) {
        let (Some(tokens), Some(logits)) = (outputs.get("token"), outputs.get("logits")) else { return };
        let width = logits.data.len() / ended.len().max(1);
        for (i, _) in ended.iter().enumerate().filter(|(_, ended)| **ended) {
            self.tokens[i].push(tokens.data[i]);
            self.logits[i].extend_from_slice(&logits.data[i * width..(i + 1) * width]);
        }
    }

    /// The last token of a sequence.
    pub(super) fn last(&self, sequence: usize) -> Option<f64> {
        self.tokens[sequence].last().map(|token| token.to_f64())
    }

    /// The number of tokens of each sequence.
    pub(super) fn ends(&self) -> Vec<usize> {
        self.tokens.iter().map(Vec::len).collect()
    }

    /// As outputs of a run, those of finished sequences with their last token and logits of zero behind it: `tokens [sequence step]` and `step_logits [sequence step vocabulary]`.
    pub(super) fn outputs(self) -> Outputs<T> {
        let batch = self.tokens.len();
        let steps = self.tokens.iter().map(Vec::len).max().unwrap_or(0);
        let longest = self.logits.iter().map(Vec::len).max().unwrap_or(0);
        let width = longest / steps.max(1);
        let mut tokens = Vec::with_capacity(batch * steps);
        let mut logits = Vec::with_capacity(batch * longest);
        for (mut of_sequence, mut own) in self.tokens.into_iter().zip(self.logits) {
            let last = of_sequence.last().copied().unwrap_or(T::ZERO);
            of_sequence.resize(steps, last);
            own.resize(longest, T::ZERO);
            tokens.extend(of_sequence);
            logits.extend(own);
        }
        let tokens = Tensor::new(vec![batch, steps], tokens);
        let logits = Tensor::new(vec![batch, steps, width], logits);
        [(TOKENS.to_owned(), tokens), (STEP_LOGITS.to_owned(), logits)].into_iter().collect()
    }
}

/// The expected outputs of a file, of as many steps as were run; all of them if it has fewer. Caches of so many tokens, `before`,
/// were continued: steps of the file that made them are left out. Behind the end of a finished sequence nothing is compared.
///
/// # Errors
/// `C10` for an unreadable file, and for sequences that are not equally far; `C00` for a file without any of the outputs.
pub(super) fn expected(
    path: &Path,
    found: &Outputs<f32>,
    (before, ends): (Option<&[u64]>, &[usize]),
) -> Result<Outputs<f64>> {
    let file = store::open(path)?;
    let file = Renamed::new(file, &[]);
    let taken = match before {
        Some(before) if file.shape("prompt_lengths").is_some() => {
            let prompts = file.read("prompt_lengths")?;
            // The last token of each sequence is not in its cache.
            let taken = before.iter().zip(&prompts.data).map(|(&n, &prompt)| n as f64 - prompt + 1.0);
            let taken = Vec::from_iter(taken);
            let [first, ..] = taken.as_slice() else { return Ok(Outputs::new()) };
            if *first < 0.0 || taken.iter().any(|n| n != first) || prompts.data.len() != before.len() {
                let message = format!(
                    "the caches have {before:?} tokens, and prompts of `{}` {:?}: they are not equally many steps further",
                    path.display(),
                    prompts.data
                );
                return Err(Diagnostic::new("C10", message).into());
            }
            index(*first as u64)
        }
        _ => 0,
    };
    let mut expected = Outputs::new();
    for (name, run) in found {
        if file.shape(name).is_none() {
            continue;
        }
        let all = file.read(name)?;
        let cut = match (all.shape.as_slice(), run.shape.as_slice()) {
            (&[_, steps, ..], &[_, wanted, ..]) if all.shape.len() == run.shape.len() => {
                let range = taken.min(steps)..(taken + wanted).min(steps);
                let row: usize = all.shape[2..].iter().product();
                let of_sequence = |rows: &[f64]| rows[range.start * row..range.end * row].to_vec();
                let data = all.data.chunks(steps * row).flat_map(of_sequence).collect();
                let mut shape = all.shape.clone();
                shape[1] = range.len();
                let mut cut = Tensor::new(shape, data);
                let own = cut.data.chunks_mut((range.len() * row).max(1));
                for ((own, run), end) in own.zip(run.data.chunks((wanted * row).max(1))).zip(ends) {
                    let same = (end * row).min(own.len())..own.len();
                    own[same.clone()]
                        .iter_mut()
                        .zip(&run[same])
                        .for_each(|(x, &of_run)| *x = f64::from(of_run));
                }
                cut
            }
            _ => all,
        };
        expected.insert(name.clone(), cut);
    }
    if expected.is_empty() {
        return Err(none_expected(found));
    }
    Ok(expected)
}

/// The tokens of each sequence up to its end.
pub(super) fn continuations(found: &Outputs<f32>, ends: &[usize], stops: &Stops) -> String {
    let Some(tokens) = found.get(TOKENS) else { return String::new() };
    let width = tokens.shape.get(1).copied().unwrap_or(1).max(1);
    let line = |(i, (row, &end)): (usize, (&[f32], &usize))| {
        let ids: Vec<String> = row[..end].iter().map(|id| id.to_string()).collect();
        let is_finished = row[..end].last().is_some_and(|&last| stops.has(f64::from(last)));
        let mark = if is_finished { " (finished)" } else { "" };
        format!("sequence {i}: {}{mark}\n", ids.join(" "))
    };
    tokens.data.chunks(width).zip(ends).enumerate().map(line).collect()
}
