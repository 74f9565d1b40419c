//! Tasks of a schedule as measured work.

use ithaca_ir::Op;
use ithaca_ir::message::Parcel;
use ithaca_ir::ops::Unit;
use ithaca_ir::schedule::{FrameId, Schedule, Work as TaskWork};

use super::kernel::Kernel;
use super::point::{Group, Work};
use crate::cluster::{Collective, sent_bytes};
use crate::simulate::copied_bytes;

/// The work of a task: a kernel, a copy, or a collective of one kind along the only axis of the mesh; none of a call, of an
/// operation without a kernel, and of a message of several kinds.
pub fn of_task(schedule: &Schedule, frame: FrameId, task: usize) -> Option<Work> {
    let (space, frame) = (&schedule.space, &schedule.frames[frame]);
    let task = &frame.tasks[task];
    let copy = |name| Some(Work::Stream { name: Some(name), bytes: 2 * copied_bytes(space, frame, task) });
    match &task.work {
        TaskWork::Compute(op) => {
            let types = |buffers: &[_]| -> Option<Vec<_>> {
                buffers.iter().map(|&b| frame.buffers[b].tensor().cloned()).collect()
            };
            let kernel = Kernel::new(space.clone(), op.clone(), types(&task.reads)?, types(&task.writes)?);
            (op.info().unit != Unit::NoKernel).then(|| Work::Kernel(Box::new(kernel)))
        }
        TaskWork::Pack(_) => copy("pack"),
        TaskWork::Unpack(_) => copy("unpack"),
        TaskWork::Copy => copy("copy"),
        TaskWork::Exchange(transfer) => {
            let parcels = transfer.parcels();
            let kind = |parcel: &Parcel| match parcel.op {
                Op::Permute => Some(None),
                ref op => Collective::of(op).map(|(collective, _)| Some(collective)),
            };
            let collective = kind(parcels.first()?)?;
            if !parcels.iter().all(|parcel| kind(parcel) == Some(collective)) {
                return None;
            }
            let ranks = space.mesh.ranks();
            let sent = parcels
                .iter()
                .map(|Parcel { op, from, to }| sent_bytes(space, op, from, to) as f64)
                .sum::<f64>();
            let bytes = collective.map_or(sent, |collective| collective.whole_bytes(ranks, sent));
            Some(Work::Collective(Group { collective, ranks, hosts: 1, bytes: bytes.round() as u64 }))
        }
        TaskWork::Call { .. } => None,
    }
}
