//! Classes of ranks: those that run the same tasks.
//!
//! Ranks run different tasks where values lie in places, so a class is a choice of coordinates along the axes of
//! places; all coordinates that no place names are one class. There are as many classes as stages of a pipeline, or one,
//! however many ranks there are.

use std::collections::{BTreeMap, BTreeSet};

use crate::layout::At;
use crate::mesh::{AxisId, Mesh};
use crate::ops::error::{OpError, ensure};
use crate::schedule::{Frame, Task};

/// More classes than any pipeline has.
const MAX_CLASSES: usize = 4096;

/// The ranks with these coordinates.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(super) struct Class {
    /// For each axis of places, ascending, the coordinate; none for those that no place names.
    coordinates: Vec<(AxisId, Option<u64>)>,
}

impl Class {
    /// The classes that places tell apart, ascending; one where there are no places.
    ///
    /// # Errors
    /// `S16` for more than 4096.
    pub(super) fn all(mesh: &Mesh, places: impl IntoIterator<Item = At>) -> Result<Vec<Class>, OpError> {
        let mut axes: BTreeMap<AxisId, BTreeSet<Option<u64>>> = BTreeMap::new();
        for At { axis, coordinate } in places {
            axes.entry(axis).or_default().insert(Some(coordinate));
        }
        let mut classes = vec![Class::default()];
        for (axis, mut coordinates) in axes {
            if (coordinates.len() as u64) < mesh.size(axis) {
                coordinates.insert(None);
            }
            ensure!(
                classes.len() * coordinates.len() <= MAX_CLASSES,
                "S16",
                "places tell more than {MAX_CLASSES} classes of ranks apart"
            );
            let with = |class: &Class, &c: &Option<u64>| {
                let mut class = class.clone();
                class.coordinates.push((axis, c));
                class
            };
            classes =
                classes.iter().flat_map(|class| coordinates.iter().map(move |c| with(class, c))).collect();
        }
        Ok(classes)
    }

    /// Whether the ranks of the class are those of a place, among others perhaps; all ranks are where there is none.
    pub(super) fn is_at(&self, place: Option<At>) -> bool {
        place.is_none_or(|at| self.along(at.axis).is_none_or(|c| c == Some(at.coordinate)))
    }

    /// Whether the class runs a task of a frame.
    pub(super) fn runs(&self, frame: &Frame, task: &Task) -> bool {
        frame.places(task).iter().any(|&place| self.is_at(place))
    }

    /// The coordinate along an axis: none where the axis tells no classes apart.
    pub(super) fn along(&self, axis: AxisId) -> Option<Option<u64>> {
        self.coordinates.iter().find(|(a, _)| *a == axis).map(|(_, c)| *c)
    }

    /// Whether the classes differ along `axes` only.
    pub(super) fn differs_along(&self, other: &Class, axes: &[AxisId]) -> bool {
        self.coordinates.iter().zip(&other.coordinates).all(|(a, b)| a == b || axes.contains(&a.0))
    }

    /// The ranks for messages.
    pub(super) fn describe(&self, mesh: &Mesh) -> String {
        let coordinate = |(axis, c): &(AxisId, Option<u64>)| {
            let c = c.map_or("elsewhere".to_owned(), |c| c.to_string());
            format!("{}={c}", mesh.axes[*axis].name)
        };
        if self.coordinates.is_empty() {
            "all ranks".to_owned()
        } else {
            let all: Vec<String> = self.coordinates.iter().map(coordinate).collect();
            format!("ranks {}", all.join(","))
        }
    }
}

/// The tasks of a frame that a class of ranks runs, in order of issue.
#[derive(Clone, Debug)]
pub(super) struct Line<'s> {
    pub(super) frame: &'s Frame,
    pub(super) class: &'s Class,
    /// Numbers of tasks, ascending.
    pub(super) tasks: Vec<usize>,
}

impl<'s> Line<'s> {
    pub(super) fn of(frame: &'s Frame, class: &'s Class) -> Self {
        let runs = |&i: &usize| class.runs(frame, &frame.tasks[i]);
        Self { frame, class, tasks: (0..frame.tasks.len()).filter(runs).collect() }
    }

    /// Whether the class holds a buffer.
    pub(super) fn holds(&self, buffer: crate::schedule::BufferId) -> bool {
        self.class.is_at(self.frame.at(buffer))
    }
}
