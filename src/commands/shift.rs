//! Prompts under one layout and tokens under another, on the same ranks: which rank of one has the caches of which of the other.
//!
//! Where ranks have the same parts of every cache, only numbered otherwise, nothing moves between prompts and tokens: a process
//! is rank `r` of prompts and rank `places[r]` of tokens (Shift Parallelism, arXiv 2509.16495). What a rank has follows from the
//! types of the caches alone.

use std::collections::BTreeMap;

use ithaca_ir::ops::Target;
use ithaca_ir::ops::cache::CACHE;
use ithaca_ir::order::Run;
use ithaca_ir::schedule::Schedule;
use ithaca_ir::{Rank, Space};
use ithaca_kernels::persistent::{self, PersistentTensor};

use crate::error::Result;

/// What a rank has of all caches: for each, by name, and for each dimension, positions in the order of their places.
type Held = Vec<(String, Vec<Vec<(u64, u64)>>)>;

/// For each rank of `prompts` the rank of `token` that has the same parts of all caches; `None` where some rank has other parts.
pub(super) fn places(prompts: &Schedule, token: &Schedule) -> Result<Option<Vec<u64>>> {
    let mut free: BTreeMap<Held, Vec<u64>> = BTreeMap::new();
    for (rank, held) in held(token)?.into_iter().enumerate().rev() {
        free.entry(held).or_default().push(rank as u64);
    }
    let mut place = |held: Held| free.get_mut(&held)?.pop();
    Ok(held(prompts)?.into_iter().map(&mut place).collect())
}

/// What each rank has.
fn held(schedule: &Schedule) -> Result<Vec<Held>> {
    let tensors = persistent::tensors(schedule)?;
    let is_cache = |tensor: &&PersistentTensor<'_>| {
        tensor.target == Target::State && tensor.stored_name().starts_with(CACHE)
    };
    let caches: Vec<_> = tensors.iter().filter(is_cache).collect();
    let space = &schedule.space;
    let of_rank = |rank: Rank| {
        let own = caches.iter().filter(|cache| cache.is_on(space, rank));
        let mut held: Held = own.map(|cache| (cache.stored_name(), parts(space, cache, rank))).collect();
        held.sort();
        held
    };
    Ok((0..space.mesh.ranks()).map(|rank| of_rank(Rank(rank))).collect())
}

/// What a rank has of a cache; copies of a head are the head.
fn parts(space: &Space, cache: &PersistentTensor<'_>, rank: Rank) -> Vec<Vec<(u64, u64)>> {
    let dims = cache.ty.dims.iter().zip(space.local_box(cache.ty, rank));
    let positions = |run: Run| (run.position, run.len);
    dims.map(|(&dim, held)| space.position_runs(dim, held).into_iter().map(positions).collect()).collect()
}

/// What users are told of it.
pub(super) fn text(layouts: [&str; 2], places: Option<&[u64]>) -> String {
    let [prompts, token] = layouts;
    match places {
        None => format!(
            "note: prompts under {prompts}, tokens under {token}: ranks have other parts of the caches, which move between them\n"
        ),
        Some(places) if places.iter().enumerate().all(|(rank, &place)| rank as u64 == place) => {
            format!("note: prompts under {prompts}, tokens under {token}: caches stay where they are\n")
        }
        Some(places) => {
            let places: Vec<String> = places.iter().map(u64::to_string).collect();
            format!(
                "note: prompts under {prompts}, tokens under {token}: caches stay where they are; ranks 0, 1, … of prompts are \
                 ranks {} of tokens\n",
                places.join(", ")
            )
        }
    }
}
