//! Faults on request: a task of one rank fails, panics or hangs, to test the reaction of the others.

use std::ops::Range;

use ithaca_ir::Rank;
use ithaca_ir::entity::Entity;
use ithaca_ir::schedule::Schedule;

/// A fault before a task of a rank starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The rank.
    pub rank: Rank,
    /// The frame, by name.
    pub frame: String,
    /// The task's number in the frame.
    pub task: usize,
    /// The layer; when absent, the first one that the frame runs for.
    pub layer: Option<u64>,
    /// The kind of the fault.
    pub kind: FaultKind,
}

/// The kind of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// It returns an error.
    Error,
    /// It panics.
    Panic,
    /// It neither ends nor sends until another rank fails, by [`timeout`](super::Options::timeout) at the latest.
    Hang,
}

/// The task of a fault that the schedule does not have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoSuchTask {
    /// The mesh has no such rank.
    #[error("there is no rank {rank}: ranks are 0 to {last}")]
    Rank {
        /// The rank.
        rank: u64,
        /// The last rank.
        last: u64,
    },
    /// No frame has this name.
    #[error("there is no frame `{frame}`: there are {}", .frames.join(", "))]
    Frame {
        /// The name.
        frame: String,
        /// The frames of the schedule.
        frames: Vec<String>,
    },
    /// The frame has fewer tasks.
    #[error("frame `{frame}` has no task {task}: it has {tasks}, from 0")]
    Task {
        /// The frame.
        frame: String,
        /// The number.
        task: usize,
        /// The number of its tasks.
        tasks: usize,
    },
    /// The rank does not run the frame for the layer, or not the task.
    #[error("rank {rank} does not run task {task} of `{frame}`{}", ran(.layers))]
    Elsewhere {
        /// The rank.
        rank: u64,
        /// The frame.
        frame: String,
        /// The task.
        task: usize,
        /// The layers for which it runs the task.
        layers: Vec<Range<u64>>,
    },
}

fn ran(layers: &[Range<u64>]) -> String {
    let shown: Vec<String> = layers.iter().map(|l| format!("{}..{}", l.start, l.end)).collect();
    match shown.as_slice() {
        [] => ", which belongs to another stage".to_owned(),
        shown => format!(" for this layer: it does for layers {}", shown.join(", ")),
    }
}

impl Fault {
    /// Whether a schedule has the task.
    ///
    /// # Errors
    /// [`NoSuchTask`], with the valid choices.
    pub fn check(&self, schedule: &Schedule) -> Result<(), NoSuchTask> {
        let ranks = schedule.space.mesh.ranks();
        if self.rank.0 >= ranks {
            return Err(NoSuchTask::Rank { rank: self.rank.0, last: ranks.saturating_sub(1) });
        }
        let named = schedule.frames.iter().find(|(_, frame)| frame.name == self.frame);
        let (id, frame) = named.ok_or_else(|| NoSuchTask::Frame {
            frame: self.frame.clone(),
            frames: schedule.frames.values().map(|frame| frame.name.clone()).collect(),
        })?;
        let task = frame.tasks.get(self.task).ok_or_else(|| NoSuchTask::Task {
            frame: self.frame.clone(),
            task: self.task,
            tasks: frame.tasks.len(),
        })?;
        let mesh = &schedule.space.mesh;
        let runs = &schedule.layers_by_place()[id.index()];
        let here = runs.iter().filter(|(_, at)| at.is_none_or(|at| at.has(mesh, self.rank)));
        let layers: Vec<Range<u64>> = here.map(|(layers, _)| layers.clone()).collect();
        let runs_task = frame.runs(&schedule.space, task, self.rank);
        let runs_layer = match self.layer {
            Some(layer) => layers.iter().any(|layers| layers.contains(&layer)),
            None => !layers.is_empty(),
        };
        if runs_task && runs_layer {
            Ok(())
        } else {
            Err(NoSuchTask::Elsewhere {
                rank: self.rank.0,
                frame: self.frame.clone(),
                task: self.task,
                layers: if runs_task { layers } else { Vec::new() },
            })
        }
    }

    /// Whether this is the place: a frame, a layer and a task of a rank.
    pub(crate) fn is_at(&self, rank: Rank, frame: &str, layer: u64, task: usize) -> bool {
        self.rank == rank
            && self.task == task
            && self.frame == frame
            && self.layer.is_none_or(|own| own == layer)
    }
}
