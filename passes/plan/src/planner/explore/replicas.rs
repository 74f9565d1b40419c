//! Ranks that have the same weights: how their messages and stages of ZeRO change a block, for a first look.

use std::collections::BTreeSet;

use ithaca_layout::fuse::{MAX_BUCKET, Pack};
use ithaca_layout::shard::Zero;

use super::Search;
use crate::planner::block::{Block, Call, Held, Kind};
use crate::planner::tasks::Gradient;

/// The part of a layer's exposed communication that chunks are expected to hide.
const HIDDEN: f64 = 0.25;

/// Ranks that have the same weights and other tokens: how many, and how far apart.
#[derive(Clone, Copy)]
pub(super) struct Replicas {
    pub(super) all: u64,
    pub(super) stride: u64,
}

/// A stage of ZeRO among replicas, with the seconds of its messages of weights and gradients.
pub(super) struct Replication {
    zero: Zero,
    all: u64,
    /// The level of the cluster whose links bound the messages.
    level: usize,
    /// Whether collectives of activations may go in chunks.
    hides: bool,
    /// In MiB, where it is not that of `pack`.
    pub(super) bucket: Option<u64>,
    /// Of a layer of each call.
    messages: Vec<Messages>,
}

/// Seconds of the messages of a layer, and the bytes of the weights in them.
#[derive(Clone, Copy)]
struct Messages {
    /// To reduce its gradients.
    reduced: f64,
    /// To gather its weights where they are used, and once a step.
    gathered: f64,
    once: f64,
    /// To copy weights from buckets and to them.
    unpacked: f64,
    copied: u64,
}

impl Search<'_> {
    /// The bucket, in MiB, in which the transfer of weights takes twice as long as the rest of the message, where that is more than
    /// buckets usually have.
    pub(super) fn bucket(&self, zero: Zero, Replicas { all, stride }: Replicas) -> Option<u64> {
        let splits_weights = matches!(zero, Zero::Parameters | Zero::ParametersAbove(_));
        if !splits_weights || !self.request.chooses_fusion {
            return None;
        }
        let seconds = |bytes| self.cluster.gather_seconds(all, stride, bytes);
        let start = seconds(0.0);
        let mib = |n: u64| (n << 20) as f64;
        let rate = mib(MAX_BUCKET) / (seconds(mib(MAX_BUCKET)) - start);
        let least = (2.0 * start * rate / mib(1)).ceil() as u64;
        let usual = Pack::default().bytes >> 20;
        (least > usual).then(|| least.next_power_of_two().min(MAX_BUCKET))
    }

    /// A stage of ZeRO with the usual bucket, and the one that suits it if there is one.
    pub(super) fn replications(&self, block: &Block, replicas: Replicas, zero: Zero) -> Vec<Replication> {
        let suited = self.bucket(zero, replicas);
        let buckets = std::iter::once(None).chain(suited.map(Some));
        let with = |bucket| {
            let messages = block.calls.iter().map(|call| self.messages(call, replicas, (zero, bucket)));
            let Replicas { all, stride } = replicas;
            let hides = self.request.chooses_fusion;
            let level = self.cluster.crossed((all, stride)).into_iter().max().unwrap_or(0);
            Replication { zero, all, level, hides, bucket, messages: messages.collect() }
        };
        buckets.map(with).collect()
    }

    fn messages(
        &self,
        call: &Call,
        Replicas { all, stride }: Replicas,
        (zero, bucket): (Zero, Option<u64>),
    ) -> Messages {
        // Seconds to gather such tensors of a kind of which ranks have copies, each a message where there are no buckets.
        let gather = |kind: Kind, such: &dyn Fn(&Held) -> bool| -> f64 {
            let is_such = |held: &&Held| held.kind == kind && held.parts < all && such(held);
            let held = || call.held.iter().filter(is_such);
            let numbers: BTreeSet<u64> = held().map(|held| held.parts).collect();
            let of = |parts: u64| {
                let bytes: Vec<u64> =
                    held().filter(|held| held.parts == parts).map(|held| held.bytes).collect();
                let (n, bytes) = (bytes.len() as u64, bytes.iter().sum::<u64>());
                let messages = bucket.map_or(n, |mib| bytes.div_ceil(mib << 20).clamp(1, n));
                let seconds = |bytes| self.cluster.gather_seconds(all / parts, stride * parts, bytes);
                seconds(bytes as f64) + (messages - 1) as f64 * seconds(0.0)
            };
            numbers.into_iter().map(of).sum()
        };
        // Gradients that every micro-batch adds to a part travel in the type of their weights.
        let reduced = match zero {
            Zero::Off | Zero::Optimizer => Kind::Gradients,
            Zero::Gradients | Zero::Parameters | Zero::ParametersAbove(_) => Kind::Parameters,
        };
        let is_copied =
            |held: &&Held| held.kind == Kind::Parameters && held.parts < all && is_split(zero, held);
        let copied: u64 = call.held.iter().filter(is_copied).map(|held| held.bytes).sum();
        Messages {
            reduced: gather(reduced, &|_| true),
            gathered: gather(Kind::Parameters, &|held| is_split(zero, held)),
            once: gather(Kind::Parameters, &|held| !is_split(zero, held)),
            unpacked: bucket.map_or(0.0, |_| self.cluster.copy_seconds("unpack", 2.0 * copied as f64)),
            copied,
        }
    }
}

/// Whether ranks have parts of a weight.
fn is_split(zero: Zero, held: &Held) -> bool {
    match zero {
        Zero::Off | Zero::Optimizer | Zero::Gradients => false,
        Zero::Parameters => true,
        Zero::ParametersAbove(_) => held.is_per_layer,
    }
}

impl Replication {
    /// A block of one sequence with replicas and a larger micro-batch, roughly.
    pub(super) fn of(&self, block: &Block, (sequences, micro_batches): (u64, u64)) -> Block {
        let &Self { zero, all, .. } = self;
        let mut block = block.scaled(sequences);
        for (call, messages) in block.calls.iter_mut().zip(&self.messages) {
            let &Messages { reduced, gathered, once, unpacked, copied } = messages;
            let Call { seconds, alone, gradients, .. } = call;
            let whole = if zero == Zero::Off { 2.0 * reduced } else { reduced };
            // A gradient is cast after it is reduced to a part, and not at all where products add to sums in f32.
            let more = match zero {
                Zero::Off | Zero::Optimizer if micro_batches == 1 => 0.0,
                Zero::Off | Zero::Optimizer => {
                    gradients.iter().map(|one| one.adding).sum::<f64>() - seconds.cast
                }
                Zero::Gradients | Zero::Parameters | Zero::ParametersAbove(_) => -seconds.cast,
            };
            seconds.backward += more;
            seconds.complete += more;
            // Collectives of activations may go in chunks, which hide them where no messages of weights use the links.
            if matches!(zero, Zero::Off | Zero::Optimizer) && self.hides {
                let [forward, backward] = seconds.exposed.map(|exposed| HIDDEN * exposed);
                seconds.forward -= forward;
                seconds.backward -= backward;
                seconds.complete -= backward;
            }
            // Messages of weights and of activations take turns on a link.
            let [forward, backward] =
                call.links.each_ref().map(|links| links.get(self.level).copied().unwrap_or(0.0));
            match zero {
                Zero::Off => {
                    seconds.complete = reduced_in(gradients, seconds.complete, backward + whole);
                }
                Zero::Optimizer => {
                    seconds.update = seconds.update / all as f64 + once;
                    seconds.complete = reduced_in(gradients, seconds.complete, backward + whole);
                }
                Zero::Gradients => {
                    seconds.update = seconds.update / all as f64 + once;
                    seconds.complete = reduced_in(gradients, seconds.complete, backward + whole);
                    seconds.backward = reduced_in(gradients, seconds.backward, backward + whole);
                }
                Zero::Parameters | Zero::ParametersAbove(_) => {
                    seconds.update = seconds.update / all as f64 + once;
                    // Nothing gathers for the first layer of a call, and nothing reduces for the last.
                    let share = |one: Option<&Gradient>| part_of(gradients, one);
                    let reduced = reduced_in(gradients, seconds.backward, backward + whole);
                    let late = (reduced - seconds.backward.max(backward + whole)).max(0.0);
                    let late = late + gathered * share(gradients.first());
                    alone.forward += gathered * share(gradients.last());
                    alone.backward += late;
                    alone.complete += late;
                    seconds.forward = (seconds.forward + unpacked).max(forward + gathered);
                    seconds.backward = (seconds.backward + 2.0 * unpacked).max(backward + gathered + whole);
                    seconds.complete = (seconds.complete + 2.0 * unpacked).max(backward + gathered + whole);
                    call.frame += 2 * copied;
                }
            }
            if zero != Zero::Off {
                call.update_frame /= all;
            }
            for held in &mut call.held {
                // Gradients of several micro-batches are summed beside those of one.
                let sums = match zero {
                    Zero::Off | Zero::Optimizer if held.kind == Kind::Gradients && micro_batches > 1 => {
                        held.bytes
                    }
                    _ => 0,
                };
                let parts = match (held.kind, zero) {
                    (_, Zero::Off) | (Kind::States, _) => 1,
                    (Kind::Parameters, _) if !is_split(zero, held) => 1,
                    (Kind::Gradients | Kind::Optimizer | Kind::Parameters, _) => all / held.parts,
                };
                held.bytes = held.bytes.div_ceil(parts) + sums;
            }
        }
        block
    }
}

/// The part of the bytes of all gradients that one has.
fn part_of(gradients: &[Gradient], one: Option<&Gradient>) -> f64 {
    let bytes: u64 = gradients.iter().map(|one| one.bytes).sum();
    one.map_or(0.0, |one| one.bytes as f64 / bytes.max(1) as f64)
}

/// Seconds of a backward pass that takes `seconds` without its messages of gradients, `messages` seconds together, each of which is
/// sent as soon as its gradient is known.
fn reduced_in(gradients: &[Gradient], seconds: f64, messages: f64) -> f64 {
    let sent =
        |sent: f64, one: &Gradient| sent.max(one.at * seconds) + messages * part_of(gradients, Some(one));
    let sent = gradients.iter().fold(0.0, sent);
    seconds.max(messages).max(sent)
}
