//! What is asked of a deployment, and what it gives.

use serde::{Deserialize, Serialize};

/// What requests ask.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
pub struct Demand {
    /// Requests a second.
    pub rate: f64,
    /// Tokens of a prompt.
    pub input: u64,
    /// Tokens of an answer.
    pub output: u64,
    /// The longest average time to the first token, seconds.
    pub first_token_seconds: Option<f64>,
    /// The longest average time per further token, seconds.
    pub token_seconds: Option<f64>,
    /// The most GPUs.
    pub gpus: u64,
}

/// A pool: equal replicas that do the same work.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Part {
    /// Replicas.
    pub replicas: u64,
    /// GPUs of a replica.
    pub gpus: u64,
    /// The strategy and the mesh of a replica.
    pub layout: String,
    /// Sequences that a step of a replica has: those that are decoded at once, or the prompts of a prefill.
    pub batch: u64,
    /// Micro-batches of a step, which the stages of a pipeline compute at once.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub micro_batches: u64,
}

fn one() -> u64 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_one(n: &u64) -> bool {
    *n == 1
}

/// A way to serve.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct Deployment {
    /// The pool that decodes; without another pool it computes prompts, too.
    pub decode: Part,
    /// Tokens of a prompt that are computed at once.
    pub chunk: u64,
    /// Prompts of which so many tokens are computed at once.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub chunk_batch: u64,
    /// Micro-batches of these prompts.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub chunk_micro_batches: u64,
    /// The pool that computes prompts.
    pub prefill: Option<Part>,
    /// Average time to the first token, seconds.
    pub first_token_seconds: f64,
    /// Average time per further token, seconds.
    pub token_seconds: f64,
    /// GPUs of all pools.
    pub gpus: u64,
    /// Requests a second that all replicas can end, both pools considered.
    pub capacity: f64,
}

impl Deployment {
    /// Output tokens a second and GPU, at the rate that is asked.
    pub fn tokens_per_gpu(&self, demand: &Demand) -> f64 {
        demand.rate * demand.output as f64 / self.gpus as f64
    }

    /// Average time to the last token of an answer, seconds.
    pub(super) fn answer_seconds(&self, demand: &Demand) -> f64 {
        self.first_token_seconds + demand.output.saturating_sub(1) as f64 * self.token_seconds
    }

    /// Output tokens a second for one user.
    pub fn tokens_per_user(&self) -> f64 {
        1.0 / self.token_seconds
    }
}

/// The part of the time that a queue may be busy. Beyond it the wait, ten times the service and more, follows from the smallest
/// error of a price.
const BUSIEST: f64 = 0.95;

/// The average wait in a queue with random arrivals, `rate` of them a second, and a fixed time of service; `None` where it is busy
/// for more than [`BUSIEST`] of the time.
pub(super) fn wait(rate: f64, service: f64) -> Option<f64> {
    let busy = rate * service;
    (busy <= BUSIEST).then(|| busy * service / (2.0 * (1.0 - busy)))
}

/// The average wait for one of `slots` that are each held for a fixed time, with random arrivals, `rate` of them a second: half of
/// that by Erlang's formula, which is for times that are random too. `None` where they are busy for more than [`BUSIEST`] of the
/// time.
pub(super) fn wait_for_slot(rate: f64, slots: u64, held: f64) -> Option<f64> {
    let (load, n) = (rate * held, slots as f64);
    if load > BUSIEST * n {
        return None;
    }
    // The probability that all are busy, where those that find none leave; then where they wait.
    let blocked = (1..=slots).fold(1.0, |blocked, k| load * blocked / (k as f64 + load * blocked));
    let waits = blocked * n / (n - load * (1.0 - blocked));
    Some(waits * held / (2.0 * (n - load)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_slot_is_a_queue() {
        let of_one = |rate| (wait_for_slot(rate, 1, 2.0), wait(rate, 2.0));
        for rate in [0.0, 0.1, 0.25, 0.4] {
            let (slot, queue) = of_one(rate);
            assert!((slot.unwrap() - queue.unwrap()).abs() < 1e-12, "{slot:?} {queue:?}");
        }
        assert_eq!(of_one(0.5), (None, None));
    }

    /// Waits of simulated queues, 2 · 10⁶ arrivals each, as parts of the time that a slot is held.
    #[test]
    fn several_slots_wait_less() {
        let close = |slots: u64, busy: f64, simulated: f64| {
            let wait = wait_for_slot(busy * slots as f64, slots, 1.0).unwrap();
            assert!((wait / simulated - 1.0).abs() < 0.1, "{wait} {simulated}");
        };
        close(4, 0.8, 0.386);
        close(32, 0.9, 0.0765);
    }

    #[test]
    fn a_queue_waits_as_pollaczek_and_khinchin_say() {
        assert_eq!(wait(0.0, 2.0), Some(0.0));
        // Half busy: a wait of half of the service.
        assert_eq!(wait(0.25, 2.0), Some(1.0));
        assert_eq!(wait(0.5, 2.0), None);
    }
}
