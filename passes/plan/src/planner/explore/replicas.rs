//! Ranks that have the same weights: how their messages and stages of ZeRO change a block, for a coarse estimate.

use std::collections::BTreeSet;

use ithaca_layout::fuse::{MAX_BUCKET, Pack};
use ithaca_layout::shard::Zero;

use super::Search;
use crate::planner::block::{Block, Call, Kind, StoredTensor};
use crate::planner::tasks::Gradient;

/// The part of a layer's exposed communication that chunks are expected to hide, and that of a layer whose experts are split.
const HIDDEN: f64 = 0.25;
const HIDDEN_OF_EXPERTS: f64 = 0.5;

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
    /// The levels of the cluster that the messages cross, with the part of their time for which they use links there.
    levels: Vec<(usize, f64)>,
    /// The part of the exposed collectives of activations that chunks hide.
    hidden: f64,
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

    /// A stage of ZeRO with the usual bucket, and the one that suits it if there is one, where experts are split or not.
    pub(super) fn replications(
        &self,
        block: &Block,
        (replicas, splits_experts): (Replicas, bool),
        zero: Zero,
    ) -> Vec<Replication> {
        let suited = self.bucket(zero, replicas);
        let buckets = std::iter::once(None).chain(suited.map(Some));
        let with = |bucket| {
            let messages = block.calls.iter().map(|call| self.messages(call, replicas, (zero, bucket)));
            let Replicas { all, stride } = replicas;
            // Messages of weights use the links in which chunks of activations would travel.
            let splits_weights =
                matches!(zero, Zero::Gradients | Zero::Parameters | Zero::ParametersAbove(_));
            let hidden = match (self.request.chooses_fusion, splits_experts) {
                (false, _) => 0.0,
                (true, true) => HIDDEN_OF_EXPERTS,
                (true, false) if splits_weights => 0.0,
                (true, false) => HIDDEN,
            };
            let levels = self.cluster.gather_parts((all, stride));
            Replication { zero, all, levels, hidden, bucket, messages: messages.collect() }
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
        let gather = |kind: Kind, such: &dyn Fn(&StoredTensor) -> bool| -> f64 {
            let is_such = |held: &&StoredTensor| held.kind == kind && held.parts < all && such(held);
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
            |held: &&StoredTensor| held.kind == Kind::Parameters && held.parts < all && is_split(zero, held);
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
fn is_split(zero: Zero, held: &StoredTensor) -> bool {
    match zero {
        Zero::Off | Zero::Optimizer | Zero::Gradients => false,
        Zero::Parameters => true,
        Zero::ParametersAbove(_) => held.is_per_layer,
    }
}

impl Replication {
    /// Of seconds by level, and of those that are exposed.
    fn on_levels(&self, links: &[f64], exposed: f64) -> OnLevels {
        let of = |&(level, part): &(usize, f64)| (links.get(level).copied().unwrap_or(0.0), part);
        let levels = || self.levels.iter().map(of);
        // Only where messages of weights take longest do they wait for others.
        let longest =
            levels().filter(|(_, part)| *part == 1.0).map(|(seconds, _)| seconds).fold(0.0, f64::max);
        let exposed = (exposed / links.iter().copied().fold(f64::MIN_POSITIVE, f64::max)).min(1.0);
        OnLevels { longest, product: exposed * levels().map(|(seconds, part)| seconds * part).sum::<f64>() }
    }

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
            let [forward, backward] = seconds.exposed.map(|exposed| self.hidden * exposed);
            seconds.forward -= forward;
            seconds.backward -= backward;
            seconds.complete -= backward;
            // Messages of activations have half of a link while one of weights uses it, and all take turns.
            let [forward, backward] = [0, 1]
                .map(|pass| self.on_levels(&call.links[pass], (1.0 - self.hidden) * seconds.exposed[pass]));
            let beside = |links: OnLevels, weights: f64, seconds: f64| {
                let slower = seconds + links.product * weights / seconds.max(f64::MIN_POSITIVE);
                slower.max(links.longest + weights)
            };
            let reduces = |seconds: f64| {
                reduced_in(gradients, beside(backward, whole, seconds), backward.longest + whole)
            };
            match zero {
                Zero::Off | Zero::Optimizer => seconds.complete = reduces(seconds.complete),
                Zero::Gradients => {
                    seconds.complete = reduces(seconds.complete);
                    seconds.backward = reduces(seconds.backward);
                }
                Zero::Parameters | Zero::ParametersAbove(_) => {
                    // Nothing gathers for the first layer of a call, and nothing reduces for the last.
                    let share = |one: Option<&Gradient>| part_of(gradients, one);
                    let bound = backward.longest + whole;
                    let reduced = reduced_in(gradients, seconds.backward, bound);
                    let late = (reduced - seconds.backward.max(bound)).max(0.0);
                    let late = late + gathered * share(gradients.first());
                    alone.forward += gathered * share(gradients.last());
                    alone.backward += late;
                    alone.complete += late;
                    seconds.forward = beside(forward, gathered, seconds.forward + unpacked);
                    seconds.backward = beside(backward, gathered + whole, seconds.backward + 2.0 * unpacked);
                    seconds.complete = beside(backward, gathered + whole, seconds.complete + 2.0 * unpacked);
                }
            }
            if zero != Zero::Off {
                seconds.update = seconds.update / all as f64 + once;
            }
            // How often a layer's gradients, or the weights that are gathered for it, are there at once, as compiled blocks show.
            let bytes = gradients.iter().map(|one| one.bytes).sum::<u64>().max(copied) as f64;
            let times = match zero {
                Zero::Off => 2.0,
                Zero::Optimizer => 1.3,
                Zero::Gradients => 1.0,
                Zero::Parameters | Zero::ParametersAbove(_) => 1.1,
            };
            call.frame += (times * bytes) as u64;
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

/// How long messages of activations use the links that those of weights cross: the longest time, and the sum over levels of what is exposed,
/// each times the part for which those of weights use it.
#[derive(Clone, Copy)]
struct OnLevels {
    longest: f64,
    product: f64,
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
