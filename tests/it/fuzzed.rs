//! The fuzz targets on their seeds and on mutations of these, the same in every run. `fuzz/` runs them for hours.

use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;

use crate::fuzz::{Choices, TARGETS, Target};
use crate::tier;

/// Mutations of a target: by default, and of the full tier.
const MUTATIONS: [u64; 2] = [24, 1000];

/// Requests run whole models; each counts for many mutations.
const REQUESTS: [u64; 2] = [4, 60];

/// Bytes with one to four things changed.
fn mutated(seeds: &[Vec<u8>], choices: &mut Choices) -> Vec<u8> {
    let mut bytes = choices.one_of(seeds);
    for _ in 0..1 + choices.below(4) {
        let at = choices.below(bytes.len() + 1);
        let end = (at + 1 + choices.below(16)).min(bytes.len());
        let at = at.min(end);
        match choices.below(7) {
            0 => drop(bytes.drain(at..end)),
            1 => {
                let piece = bytes[at..end].to_vec();
                bytes.splice(at..at, piece);
            }
            2 => {
                let other = choices.one_of(seeds);
                let from = choices.below(other.len() + 1);
                let to = (from + 1 + choices.below(64)).min(other.len());
                bytes.splice(at..end, other[from.min(to)..to].iter().copied());
            }
            3 => {
                let numbers =
                    ["0", "-1", "1", "1e308", "18446744073709551615", "1099511627776", "0.5", "null", "\"\""];
                bytes.splice(at..end, choices.one_of(&numbers).bytes());
            }
            4 => bytes.truncate(at),
            _ => {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte ^= 1 << choices.below(8);
                }
            }
        }
    }
    bytes
}

fn check(target: &Target, bytes: &[u8]) {
    if let Err(failure) = catch_unwind(AssertUnwindSafe(|| (target.run)(bytes))) {
        let path = std::env::temp_dir().join(format!("ithaca-fuzz-{}", target.name));
        let written =
            std::fs::write(&path, bytes).map_or("nowhere".to_owned(), |()| path.display().to_string());
        let _ = writeln!(std::io::stderr(), "the input of `{}` that fails is in {written}", target.name);
        resume_unwind(failure);
    }
}

#[test]
fn targets_hold_on_seeds_and_mutations() {
    for target in &TARGETS {
        let seeds = (target.seeds)(Path::new(env!("CARGO_MANIFEST_DIR")));
        assert!(!seeds.is_empty(), "{} has seeds", target.name);
        let [few, all] = if target.name == "request" { REQUESTS } else { MUTATIONS };
        for seed in tier::one_in(seeds.len().div_ceil(4), &seeds) {
            check(target, seed);
        }
        for draw in tier::draws(few, all) {
            check(target, &mutated(&seeds, &mut Choices::from_seed(draw)));
        }
    }
}
