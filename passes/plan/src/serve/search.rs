//! The search for deployments, from priced steps.

use std::collections::{BTreeMap, BTreeSet};

use super::deployment::{Demand, Deployment, Part, wait, wait_for_slot};

/// A layout of the GPUs of a replica.
#[derive(Clone, Debug, PartialEq)]
pub struct Replica {
    /// Strategy and mesh.
    pub layout: String,
    /// GPUs.
    pub gpus: u64,
    /// Steps that decode.
    pub decoding: Vec<Decoding>,
    /// Steps of chunks of prompts, beside caches that have half of a prompt.
    pub chunks: Vec<Prompts>,
    /// Steps of prompts, whole or in parts, where nothing else runs.
    pub prefills: Vec<Prompts>,
}

impl Replica {
    fn part(&self, replicas: u64, batch: u64, micro_batches: u64) -> Part {
        Part { replicas, gpus: self.gpus, layout: self.layout.clone(), batch, micro_batches }
    }

    fn decoding_part(&self, replicas: u64, step: &Decoding) -> Part {
        self.part(replicas, step.batch, step.micro_batches)
    }
}

/// A step that decodes a token of each of so many sequences.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decoding {
    /// Sequences.
    pub batch: u64,
    /// Micro-batches of them.
    pub micro_batches: u64,
    /// Its time.
    pub seconds: f64,
    /// Bytes that there are for the activations of a step, of this one or of a chunk.
    pub room: u64,
    /// Seconds in which the caches of a prompt come by one GPU's links, those of all GPUs of the replica.
    pub transfer_seconds: f64,
}

/// A step of so many tokens of each of several prompts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prompts {
    /// Prompts.
    pub batch: u64,
    /// Micro-batches of them.
    pub micro_batches: u64,
    /// Tokens of each.
    pub tokens: u64,
    /// Its time.
    pub seconds: f64,
    /// Bytes of its activations.
    pub room: u64,
}

impl Prompts {
    /// The steps of a prompt.
    fn steps_of(&self, demand: &Demand) -> f64 {
        demand.input.div_ceil(self.tokens) as f64
    }
}

/// The deployments that were found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Those that meet the demand, the fewest GPUs first.
    pub meets: Vec<Deployment>,
    /// Of those that need more GPUs than there are, and meet the targets, the one with the fewest.
    pub large: Option<Deployment>,
    /// Of those on as many GPUs as there are that miss the time to the first token only, the one with the least.
    pub late: Option<Deployment>,
    /// Of those that miss the time per token only, the one with the least.
    pub slow: Option<Deployment>,
    /// Of those that miss both, the one that misses the farther one, as a factor, by the least.
    pub far: Option<Deployment>,
}

/// All deployments of layouts, judged.
pub fn search(demand: &Demand, replicas: &[Replica]) -> Outcome {
    let prefills = pools_of_prompts(demand, replicas);
    let mut outcome = Outcome::default();
    for replica in replicas {
        for step in &replica.decoding {
            // More GPUs are of use where the first token is late.
            // Prompts that are computed at once go to slots of one replica.
            let fit = |prompts: u64| step.batch.is_multiple_of(prompts);
            let chunks = replica.chunks.iter().filter(|chunk| chunk.room <= step.room && fit(chunk.batch));
            for chunk in chunks {
                let mut deployments = one_pool(demand, replica, step, chunk);
                while deployments.next().is_some_and(|deployment| outcome.is_late(demand, deployment)) {}
            }
            for pool in prefills.iter().filter(|pool| fit(pool.part.batch)) {
                let mut deployments = two_pools(demand, replica, step, pool);
                while deployments.next().is_some_and(|deployment| outcome.is_late(demand, deployment)) {}
            }
        }
    }
    let answer = |deployment: &Deployment| deployment.answer_seconds(demand);
    outcome.meets.sort_by(|a, b| a.gpus.cmp(&b.gpus).then(answer(a).total_cmp(&answer(b))));
    outcome
}

/// The part of the time of an answer that one on more GPUs may take.
const SOONER: f64 = 0.97;

impl Outcome {
    /// Judges a deployment: whether its first token is later than the target.
    fn is_late(&mut self, demand: &Demand, new: Deployment) -> bool {
        let Demand { first_token_seconds, token_seconds, gpus, .. } = demand;
        let least = |kept: &mut Option<Deployment>, new: Deployment, figure: &dyn Fn(&Deployment) -> f64| {
            if kept.as_ref().is_none_or(|kept| figure(&new) < figure(kept)) {
                *kept = Some(new);
            }
        };
        let factor = |seconds: f64, most: &Option<f64>| most.map_or(1.0, |most| seconds / most);
        let missed = |d: &Deployment| {
            factor(d.first_token_seconds, first_token_seconds).max(factor(d.token_seconds, token_seconds))
        };
        let is_slow = token_seconds.is_some_and(|most| new.token_seconds > most);
        let is_late = first_token_seconds.is_some_and(|most| new.first_token_seconds > most);
        match (new.gpus > *gpus, is_slow, is_late) {
            (false, false, false) => self.meets.push(new),
            (true, false, false) => least(&mut self.large, new, &|d| d.gpus as f64),
            (false, false, true) => least(&mut self.late, new, &|d| d.first_token_seconds),
            (false, true, false) => least(&mut self.slow, new, &|d| d.token_seconds),
            (false, true, true) => least(&mut self.far, new, &missed),
            (true, _, _) => {}
        }
        is_late
    }

    /// Deployments of which none has both sooner answers and fewer GPUs, the fastest for a user first; those that are hardly faster
    /// than one of fewer GPUs are left out.
    pub fn frontier(&self, demand: &Demand) -> Vec<&Deployment> {
        let mut found: Vec<&Deployment> = Vec::new();
        // The fewest GPUs come first, and of equally many the fastest.
        for deployment in &self.meets {
            let is_sooner =
                |last: &&Deployment| deployment.answer_seconds(demand) < SOONER * last.answer_seconds(demand);
            if found.last().is_none_or(is_sooner) {
                found.push(deployment);
            }
        }
        found.reverse();
        found
    }

    /// Of each number of GPUs up to the most of the frontier, with one pool and with two, the fastest for a user: those that are
    /// not on the frontier.
    pub fn others(&self, demand: &Demand) -> Vec<&Deployment> {
        let frontier = self.frontier(demand);
        let most = frontier.first().map_or(0, |deployment| deployment.gpus);
        let kind = |deployment: &Deployment| (deployment.gpus, deployment.prefill.is_some());
        let mut seen = BTreeSet::new();
        // The fastest of a kind comes first.
        let fastest = self.meets.iter().filter(|d| d.gpus <= most && seen.insert(kind(d)));
        fastest.filter(|d| !frontier.contains(d)).collect()
    }
}

/// Numbers of equal queues from the fewest on, with the wait in each, until waits are short beside the service.
fn queues(least: f64, service: f64, wait: impl Fn(f64) -> Option<f64>) -> impl Iterator<Item = (u64, f64)> {
    /// The part of the service that a wait may have for more queues to be no use.
    const SHORT: f64 = 0.01;
    let least = (least.ceil() as u64).max(1);
    let numbers = std::iter::successors(Some(least), |n| n.checked_add((n / 16).max(1)));
    let waits = numbers.filter_map(move |n| Some((n, wait(n as f64)?)));
    let mut before = f64::INFINITY;
    waits.take_while(move |(_, waits)| std::mem::replace(&mut before, *waits) > SHORT * service)
}

/// The first of some prompts that are computed at once on each of `n` replicas waits for the last: so long on average.
fn gathering(demand: &Demand, at_once: f64, n: f64) -> f64 {
    (at_once - 1.0) * n / (2.0 * demand.rate)
}

/// Replicas that decode and compute prompts in turns.
fn one_pool(
    demand: &Demand,
    replica: &Replica,
    step: &Decoding,
    chunk: &Prompts,
) -> impl Iterator<Item = Deployment> {
    let chunks = chunk.steps_of(demand);
    let (batch, at_once) = (step.batch as f64, chunk.batch as f64);
    let (output, rate) = (demand.output as f64, demand.rate);
    let token_seconds = step.seconds + batch * chunks * chunk.seconds / (output * at_once);
    let service = chunks * (chunk.seconds + step.seconds);
    // The time per token has the chunks of a sequence's own prompt.
    let held = output * token_seconds + chunks * step.seconds;
    let capacity = (batch / held).min(at_once / service);
    // Each group of ranks has a queue of its own.
    let slots = step.batch;
    let waits =
        move |n: f64| Some(wait(rate / (n * at_once), service)? + wait_for_slot(rate / n, slots, held)?);
    queues(rate / capacity, service, waits).filter_map(move |(replicas, waits)| {
        Some(Deployment {
            decode: replica.decoding_part(replicas, step),
            chunk: chunk.tokens,
            chunk_batch: chunk.batch,
            chunk_micro_batches: chunk.micro_batches,
            prefill: None,
            first_token_seconds: gathering(demand, at_once, replicas as f64) + waits + service,
            token_seconds,
            gpus: replicas.checked_mul(replica.gpus)?,
            capacity: capacity * replicas as f64,
        })
    })
}

/// A pool for prompts: its part, and the time to the first token without the way of the caches.
struct PoolOfPrompts {
    part: Part,
    tokens: u64,
    capacity: f64,
    first_token_seconds: f64,
}

/// The pools for prompts that are not worse in GPUs and in time than another that goes to the same replicas.
fn pools_of_prompts(demand: &Demand, replicas: &[Replica]) -> Vec<PoolOfPrompts> {
    let mut pools: Vec<PoolOfPrompts> = Vec::new();
    for replica in replicas {
        for step in &replica.prefills {
            let (batch, service) = (step.batch as f64, step.steps_of(demand) * step.seconds);
            let rate = demand.rate / batch;
            let waits = |n: f64| wait(rate / n, service);
            pools.extend(queues(rate * service, service, waits).map(|(n, waits)| PoolOfPrompts {
                part: replica.part(n, step.batch, step.micro_batches),
                tokens: step.tokens,
                capacity: n as f64 * batch / service,
                first_token_seconds: gathering(demand, batch, n as f64) + waits + service,
            }));
        }
    }
    let gpus = |pool: &PoolOfPrompts| pool.part.replicas.saturating_mul(pool.part.gpus);
    pools.sort_by(|a, b| gpus(a).cmp(&gpus(b)).then(a.first_token_seconds.total_cmp(&b.first_token_seconds)));
    // One with prompts at once that divide these goes to all replicas to which these go.
    let mut fastest: BTreeMap<u64, f64> = BTreeMap::new();
    pools.retain(|pool| {
        let (batch, seconds) = (pool.part.batch, pool.first_token_seconds);
        let is_faster = fastest.iter().all(|(n, &other)| !batch.is_multiple_of(*n) || seconds < other);
        if is_faster {
            fastest.insert(batch, seconds);
        }
        is_faster
    });
    pools
}

/// Replicas that decode what a pool for prompts sends.
fn two_pools<'a>(
    demand: &Demand,
    replica: &'a Replica,
    step: &'a Decoding,
    pool: &'a PoolOfPrompts,
) -> impl Iterator<Item = Deployment> + use<'a> {
    // The slower side has fewer links.
    let transfer_seconds = step.transfer_seconds / pool.part.gpus.min(replica.gpus) as f64;
    let held = transfer_seconds + demand.output as f64 * step.seconds;
    let capacity = step.batch as f64 / held;
    let (rate, slots) = (demand.rate, step.batch);
    let without_wait = pool.first_token_seconds + transfer_seconds + step.seconds;
    let waits = move |n: f64| wait_for_slot(rate / n, slots, held);
    queues(rate / capacity, without_wait, waits).filter_map(move |(replicas, waits)| {
        let gpus = replicas.checked_mul(replica.gpus)?;
        Some(Deployment {
            decode: replica.decoding_part(replicas, step),
            chunk: pool.tokens,
            chunk_batch: pool.part.batch,
            chunk_micro_batches: pool.part.micro_batches,
            prefill: Some(pool.part.clone()),
            first_token_seconds: without_wait + waits,
            token_seconds: step.seconds,
            gpus: gpus.checked_add(pool.part.replicas.checked_mul(pool.part.gpus)?)?,
            capacity: (capacity * replicas as f64).min(pool.capacity),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replica() -> Replica {
        let prompts = |tokens, seconds| Prompts { batch: 1, micro_batches: 1, tokens, seconds, room: 1 };
        Replica {
            layout: "megatron-tp tp=8".to_owned(),
            gpus: 8,
            decoding: vec![
                Decoding { batch: 10, micro_batches: 1, seconds: 0.01, room: 1, transfer_seconds: 0.8 },
                Decoding { batch: 40, micro_batches: 1, seconds: 0.02, room: 1, transfer_seconds: 0.8 },
            ],
            chunks: vec![prompts(500, 0.05)],
            prefills: vec![prompts(1000, 0.1)],
        }
    }

    fn demand() -> Demand {
        Demand {
            rate: 8.0,
            input: 1000,
            output: 100,
            first_token_seconds: None,
            token_seconds: None,
            gpus: 1024,
        }
    }

    #[test]
    fn chunks_take_their_share_of_the_time_between_tokens() {
        let replica = replica();
        let found = one_pool(&demand(), &replica, &replica.decoding[1], &replica.chunks[0]).next().unwrap();
        // 40 sequences end in 100 steps, so there are 0.4 prompts of 0.1 s a step.
        assert!((found.token_seconds - 0.06).abs() < 1e-12, "{found:?}");
        // 40 / (100 · 0.06 + 2 · 0.02) = 6.62 requests a second.
        assert_eq!((found.decode.replicas, found.gpus), (2, 16));
        // 4 requests a second, each 2 chunks and 2 steps, 0.14 s; a slot is held for 100 tokens and the steps between chunks.
        let wait = 0.56 * 0.14 / (2.0 * 0.44) + wait_for_slot(4.0, 40, 6.04).unwrap();
        assert!((found.first_token_seconds - 0.14 - wait).abs() < 1e-12, "{found:?}");
    }

    /// Prompts that are computed at once go to slots of one replica.
    #[test]
    fn no_more_prompts_are_computed_at_once_than_there_are_slots() {
        let mut replica = replica();
        replica.prefills[0].batch = 20;
        replica.chunks[0].batch = 4;
        let found = search(&demand(), std::slice::from_ref(&replica));
        assert!(!found.meets.is_empty() && found.meets.iter().all(|d| d.decode.batch == 40), "{found:?}");
        // The first of a batch waits for the others.
        let of_two = found.meets.iter().find(|d| d.prefill.is_some()).unwrap();
        assert!(of_two.first_token_seconds > 19.0 / (2.0 * demand().rate), "{of_two:?}");
    }

    #[test]
    fn the_frontier_trades_gpus_for_speed() {
        let more = Demand { rate: 30.0, ..demand() };
        let outcome = search(&more, &[replica()]);
        assert!(outcome.meets.is_sorted_by_key(|d| d.gpus));
        let frontier = outcome.frontier(&more);
        assert!(frontier.len() > 1);
        let answer = |d: &Deployment| d.answer_seconds(&more);
        assert!(frontier.is_sorted_by(|a, b| answer(a) < answer(b) && a.gpus > b.gpus));
        let others = outcome.others(&more);
        assert!(!others.is_empty() && others.iter().all(|d| !frontier.contains(d)));
        let is_worse =
            |d: &&&Deployment| frontier.iter().any(|f| f.gpus <= d.gpus && SOONER * answer(f) <= answer(d));
        assert_eq!(others.iter().filter(is_worse).count(), others.len());
        let fast = Demand { token_seconds: Some(0.011), ..demand() };
        let outcome = search(&fast, &[replica()]);
        assert!(outcome.meets.iter().all(|d| d.prefill.is_some() && d.decode.batch == 10), "{outcome:?}");
        // 10 / (100 · 0.01) = 10 requests a second of one replica; one for prompts is busy 0.8 of the time.
        assert_eq!(outcome.meets[0].gpus, 16);
        let hopeless = Demand { token_seconds: Some(0.001), ..demand() };
        let outcome = search(&hopeless, &[replica()]);
        assert!(outcome.meets.is_empty() && outcome.slow.unwrap().token_seconds == 0.01);
    }

    #[test]
    fn what_a_refusal_calls_reachable_is_reached() {
        let fewest = |first_token_seconds: f64| {
            let demand = Demand {
                rate: 60.0,
                gpus: u64::MAX,
                first_token_seconds: Some(first_token_seconds),
                ..demand()
            };
            let found = search(&demand, &[replica()]);
            (found.meets.first().map(|deployment| deployment.gpus), found.late)
        };
        let (none, late) = fewest(1e-3);
        assert_eq!(none, None);
        let least = late.unwrap().first_token_seconds;
        let gpus = [1.0, 1.01, 1.05, 1.2, 2.0, 10.0].map(|factor| fewest(factor * least).0.unwrap());
        assert!(gpus.is_sorted_by(|a, b| a >= b) && gpus[0] > gpus[5], "{gpus:?}");
    }
}
