//! Where the results of a frame are written: in their places where that is safe, else by a copy.

use ithaca_ir::module::ValueId;
use ithaca_ir::ops::state::works_in_place;
use ithaca_ir::schedule::{Buffer, BufferId, FrameOutput, Place, Stream, Task, Work};

use super::Lowering;
use super::arena::UNPLACED;
use super::lasting;

impl Lowering<'_> {
    /// Arguments that are returned are copied at once, where no later read can conflict.
    pub(super) fn pass_on(&mut self) {
        let n_params = self.function.params.len();
        for (i, output) in self.function.outputs.iter().enumerate().skip(n_params) {
            if self.function.params.contains(&output.value) {
                let from = self.buffer(output.value);
                let to = self.result(i, from);
                self.task(Stream::Compute, Work::Copy, vec![from], vec![to]);
                self.passed_on.insert(i, to);
            }
        }
    }

    /// Outputs go where the caller wants them: directly if that is safe, else by a copy at the end.
    pub(super) fn outputs(&mut self) {
        let values: Vec<ValueId> = self.function.outputs.iter().map(|o| o.value).collect();
        let mut copies = Vec::new();
        for (i, output) in self.function.outputs.iter().enumerate() {
            let buffer = self.buffer(output.value);
            let repeated = values[..i].contains(&output.value);
            let owned = matches!(self.frame.buffers[buffer].place, Place::Frame(_)) && !repeated;
            let target = if let Some(&target) = self.passed_on.get(&i) {
                target
            } else if self.is_main && owned {
                buffer
            } else if !self.is_main && owned && self.may_write_early(i, buffer) {
                self.frame.buffers[buffer].place = Place::Result(i);
                buffer
            } else if self.is_main {
                self.copy(i, buffer)
            } else {
                let target = self.result(i, buffer);
                copies.push((i, buffer, target));
                target
            };
            self.frame.outputs.push(FrameOutput { name: output.name.clone(), buffer: target });
        }
        while !copies.is_empty() {
            // The argument in the place of a result may be another result.
            let free = |&(i, _, _): &(usize, BufferId, BufferId)| {
                !copies.iter().any(|&(_, from, _)| self.frame.buffers[from].place == Place::Argument(i))
            };
            match copies.iter().position(free) {
                Some(next) => {
                    let (_, from, to) = copies.remove(next);
                    self.task(Stream::Compute, Work::Copy, vec![from], vec![to]);
                }
                // Each waits for another, or for itself.
                None => copies[0].1 = self.copy(copies[0].0, copies[0].1),
            }
        }
    }

    /// A buffer for result `i`, of the content of another.
    fn result(&mut self, i: usize, like: BufferId) -> BufferId {
        let Buffer { name, content, .. } = self.frame.buffers[like].clone();
        let name = self.unique(format!("{name}.out{i}"));
        self.frame.buffers.push(Buffer { name, content, place: Place::Result(i) })
    }

    /// A copy of a buffer in the frame.
    fn copy(&mut self, i: usize, from: BufferId) -> BufferId {
        let Buffer { name, content, .. } = self.frame.buffers[from].clone();
        let name = self.unique(format!("{name}.copy{i}"));
        let copy = self.frame.buffers.push(Buffer { name, content, place: UNPLACED });
        self.task(Stream::Compute, Work::Copy, vec![from], vec![copy]);
        copy
    }

    /// Whether result `i` may be written where it is made: argument `i`, which may share the place, has no later read.
    fn may_write_early(&self, i: usize, buffer: BufferId) -> bool {
        let Some(&argument) = self.function.params.get(i) else { return true };
        // A loop works in the buffer of a value before its own.
        let read = self.buffer(argument);
        let Some(made) = self.frame.tasks.iter().position(|task| task.writes.contains(&buffer)) else {
            return false;
        };
        let (maker, later) = (&self.frame.tasks[made], &self.frame.tasks[made + 1..]);
        let mut outputs = self.function.outputs.iter().enumerate();
        let returned = outputs.any(|(k, o)| o.value == argument && !self.passed_on.contains_key(&k));
        let overwrites = maker.reads.contains(&read) && !self.may_overwrite(maker, i, (read, buffer));
        !returned && !overwrites && !later.iter().any(|task| task.reads.contains(&read))
    }

    /// Whether a task that reads argument `i` of the frame may write result `i`, which may share its place.
    fn may_overwrite(&self, task: &Task, i: usize, (read, written): (BufferId, BufferId)) -> bool {
        let ty = |b: BufferId| self.frame.buffers[b].tensor();
        match &task.work {
            Work::Compute(op) => {
                let alike = ty(read).zip(ty(written)).is_some_and(|(a, b)| lasting::same_elements(a, b));
                let mut operands = (0..task.reads.len()).filter(|&i| task.reads[i] == read);
                operands.all(|i| works_in_place(op, i)) && task.writes.len() == 1 && alike
            }
            // One layer reads an argument for the last time before it writes the result of the same number.
            Work::Call { layers, .. } => {
                let once = task.reads.iter().filter(|&&b| b == read).count() == 1;
                let same = task.reads.get(i) == Some(&read) && task.writes.get(i) == Some(&written);
                layers.end - layers.start == 1 && once && same
            }
            Work::Pack(_) | Work::Exchange(_) | Work::Unpack(_) | Work::Copy => false,
        }
    }
}
