//! Weights that are gathered before the function that needs them begins, as far as a first estimate knows them.

use std::collections::BTreeMap;

use ithaca_ir::Op;
use ithaca_ir::schedule::{BufferId, Frame, Schedule, Transfer, Work};

use crate::cluster::Cluster;
use crate::cost::op_seconds;

/// What a function would gather before it begins: each message of weights as late as possible without delaying a kernel, one after
/// another, among the reductions of gradients.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ahead {
    /// Bytes of these weights.
    pub(super) bytes: u64,
    /// By how much the first message is early.
    pub(super) seconds: f64,
}

impl Ahead {
    /// Of a frame, in which messages of weights are told by their operation.
    pub(super) fn of(
        cluster: &Cluster,
        schedule: &Schedule,
        frame: &Frame,
        is_of_weights: &dyn Fn(&Op) -> bool,
    ) -> Self {
        struct Gather {
            seconds: f64,
            bytes: u64,
            used: Option<f64>,
        }
        let space = &schedule.space;
        let mut gathers: Vec<Gather> = Vec::new();
        let mut holders: BTreeMap<BufferId, usize> = BTreeMap::new();
        let (mut now, mut reductions) = (0.0, 0.0);
        for task in &frame.tasks {
            let gather = task.reads.iter().find_map(|&b| holders.get(&frame.holder(b)).copied());
            let of_weights = task.work.exchange().filter(|message| is_of_weights(&message.first().op));
            let seconds = |message: &Transfer| -> f64 {
                let parcels = message.parcels().iter();
                parcels
                    .map(|parcel| cluster.collective_seconds(space, &parcel.op, &parcel.from, &parcel.to))
                    .sum()
            };
            match (&task.work, of_weights) {
                (_, Some(message)) if matches!(message.first().op, Op::AllGather { .. }) => {
                    let bytes =
                        message.parcels().iter().map(|parcel| space.max_local_bytes(&parcel.to)).sum();
                    task.writes.iter().for_each(|&b| _ = holders.insert(frame.holder(b), gathers.len()));
                    gathers.push(Gather { seconds: seconds(message), bytes, used: None });
                }
                (_, Some(message)) => reductions += seconds(message),
                (Work::Compute(op), None) => {
                    if let Some(gather) = gather {
                        gathers[gather].used.get_or_insert(now);
                    }
                    let types = |buffers: &[BufferId]| -> Option<Vec<_>> {
                        buffers.iter().map(|&b| frame.buffers[b].tensor()).collect()
                    };
                    if let (Some(reads), Some(writes)) = (types(&task.reads), types(&task.writes)) {
                        now += op_seconds(cluster, space, op, &reads, &writes);
                    }
                }
                // A message that is unpacked is used with what it becomes.
                (Work::Unpack(_) | Work::Copy, None) => {
                    let writes =
                        task.writes.iter().filter_map(|&b| gather.map(|gather| (frame.holder(b), gather)));
                    holders.extend(writes);
                }
                (Work::Pack(_) | Work::Exchange(_) | Work::Call { .. }, None) => {}
            }
        }
        let all: f64 = gathers.iter().map(|gather| gather.seconds).sum();
        let (mut start, mut ahead) = (now, Self::default());
        for gather in gathers.iter().rev() {
            start = start.min(gather.used.unwrap_or(now)) - gather.seconds * (1.0 + reductions / all);
            if start < 0.0 {
                ahead = Self { bytes: ahead.bytes + gather.bytes, seconds: -start };
            }
        }
        ahead
    }
}
