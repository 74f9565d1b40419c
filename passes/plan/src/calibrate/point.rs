//! Measured points: a piece of work, its price, and the time that it took.

use ithaca_ir::Span;

use super::kernel::Kernel;
use crate::cluster::{Cluster, Collective};

/// A piece of work and the time that it took.
#[derive(Clone, Debug)]
pub struct Point {
    /// The work.
    pub work: Work,
    /// Seconds.
    pub seconds: f64,
    /// The measurement: a file, and what it is a log of.
    pub source: String,
    /// Where it is in its file.
    pub span: Span,
}

/// A measured piece of work.
#[derive(Clone, Debug)]
pub enum Work {
    /// A kernel on one device.
    Kernel(Box<Kernel>),
    /// A kernel that reads and writes so many bytes in all; with the name of its curve, if it has one.
    Stream {
        /// The name, of a kind of task such as `pack`.
        name: Option<&'static str>,
        /// The bytes.
        bytes: u64,
    },
    /// A collective.
    Collective(Group),
}

/// A collective of the devices of some hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// The collective; `None` where each rank sends to the next and receives from the one before.
    pub collective: Option<Collective>,
    /// Ranks.
    pub ranks: u64,
    /// Hosts that have them, each as many.
    pub hosts: u64,
    /// The input of a rank, bytes; of an all-gather its output.
    pub bytes: u64,
}

impl Group {
    /// The name of the collective.
    pub fn name(&self) -> &'static str {
        self.collective.map_or("permute", Collective::name)
    }

    /// Between neighbours of the group, on the devices of `cluster`.
    pub(super) fn stride(&self, cluster: &Cluster) -> u64 {
        if self.hosts > 1 && self.hosts == self.ranks { cluster.devices_per_node.value } else { 1 }
    }
}

impl Work {
    /// The kind of the work, as tables name it.
    pub(super) fn kind(&self) -> String {
        match self {
            Work::Kernel(kernel) => kernel.kind(),
            Work::Stream { name, .. } => name.unwrap_or("memory").to_owned(),
            Work::Collective(group) if group.hosts > 1 => {
                format!("{} {} on {} hosts", group.name(), group.ranks, group.hosts)
            }
            Work::Collective(group) => format!("{} {}", group.name(), group.ranks),
        }
    }

    /// Whether it is a collective.
    pub fn is_collective(&self) -> bool {
        matches!(self, Work::Collective(_))
    }

    /// Seconds on a cluster.
    pub(super) fn seconds(&self, cluster: &Cluster) -> f64 {
        match self {
            Work::Kernel(kernel) => kernel.seconds(cluster),
            &Work::Stream { name, bytes } => cluster.copy_seconds(name.unwrap_or_default(), bytes as f64),
            Work::Collective(group) => cluster.group_seconds(
                group.collective,
                (group.ranks, group.stride(cluster)),
                group.bytes as f64,
            ),
        }
    }
}

/// The last part of a path.
pub(super) fn file_name(path: &str) -> &str {
    path.rsplit(['/', '\\']).next().unwrap_or(path)
}
