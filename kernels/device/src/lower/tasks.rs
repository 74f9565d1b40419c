//! Tasks as records: calls, operations, copies, packing, and searches for NaN.

use ithaca_ir::TensorType;
use ithaca_ir::boxes::{self, Side};
use ithaca_ir::message;
use ithaca_ir::ops::{Op, ScanOrder, Stage};
use ithaca_ir::schedule::{BufferId, Content, Stream, Task, Transfer, Work as TaskWork};
use ithaca_ir::strided::{self, Strided};

use super::axes::uneven_axes;
use super::buffers;
use super::context::{In, Lowering, only};
use super::options::Checks;
use crate::address::Region;
use crate::argument::Pointer;
use crate::error::LowerError;
use crate::merge::{self, Span};
use crate::ops::view::{Cx, signed};
use crate::program::{Call, Check, Operand};
use crate::record::Record;
use crate::value::{Choice, Int};

impl<'a> Lowering<'a> {
    pub(super) fn call(&self, of: In<'a>, task: &Task) -> Result<Call, LowerError> {
        let TaskWork::Call { callee, layers, stride, scan, stage, base } = &task.work else {
            return LowerError::invalid("a task that calls nothing");
        };
        let operand = |(buffer, slice): (&BufferId, Int)| -> Result<Operand, LowerError> {
            let address = self.locate(of, *buffer)?.address();
            Ok(Operand { address, slice, at: of.frame.at(*buffer) })
        };
        let slices = buffers::slices(self.schedule, of.frame, task);
        Ok(Call {
            frame: *callee,
            layers: layers.clone(),
            stride: *stride,
            order: scan.as_ref().map_or(ScanOrder::Ascending, |scan| scan.order),
            base: *base,
            at: stage.and_then(Stage::at),
            arguments: task.reads.iter().zip(slices.arguments).map(operand).collect::<Result<_, _>>()?,
            results: task.writes.iter().zip(slices.results).map(operand).collect::<Result<_, _>>()?,
            carried: scan.as_ref().map_or(task.writes.len(), |scan| scan.carried),
        })
    }

    pub(super) fn compute(
        &mut self,
        of: In<'a>,
        task: &'a Task,
        op: &Op,
    ) -> Result<Choice<Vec<Record>>, LowerError> {
        let strided = |buffers: &[BufferId]| -> Vec<Option<Strided>> {
            buffers.iter().map(|&b| of.frame.strided(self.space(), b)).collect()
        };
        let (in_wires, out_wires) = (strided(&task.reads), strided(&task.writes));
        let reads = self.views(of, &task.reads, &in_wires)?;
        let writes = self.views(of, &task.writes, &out_wires)?;
        let types: Vec<&TensorType> = reads.iter().chain(&writes).map(|view| view.ty).collect();
        let at = of.frame.places(task)[0];
        let before = std::mem::take(&mut self.workspace);
        let records = self.by_size_or_place(of, at, &types, &|cx| cx.compute(op, &reads, &writes))?;
        if self.workspace > 0 && task.stream != Stream::Compute {
            // Tasks of one stream take turns.
            return LowerError::unsupported(format!("`{}` beside the compute stream", op.name()));
        }
        self.workspace = self.workspace.max(before);
        Ok(records)
    }

    pub(super) fn copy(&mut self, of: In<'a>, task: &'a Task) -> Result<Choice<Vec<Record>>, LowerError> {
        let (from, to) = (only(&task.reads)?, only(&task.writes)?);
        let (source, target) = (self.locate(of, from)?, self.locate(of, to)?);
        let at = of.frame.places(task)[0];
        match &of.frame.buffers[from].content {
            Content::Wire { dtype, elements } => {
                let bytes = dtype.bytes() * elements;
                self.by_size_or_place(of, at, &[], &|cx| cx.copy(bytes, source, target))
            }
            Content::Tensor(ty) => self.by_size_or_place(of, at, &[ty], &|cx| {
                let bytes = boxes::elements(&cx.space.local_box(ty, cx.rank)) * ty.dtype.bytes();
                cx.copy(bytes, source, target)
            }),
        }
    }

    /// Packs a wire, or unpacks it.
    pub(super) fn pack(
        &mut self,
        of: In<'a>,
        task: &'a Task,
        transfer: &Transfer,
        side: Side,
    ) -> Result<Choice<Vec<Record>>, LowerError> {
        let (wire, buffers) = match side {
            Side::Sent => (only(&task.writes)?, &task.reads),
            Side::Received => (only(&task.reads)?, &task.writes),
        };
        let first = strided::end(transfer.first(), side);
        let parcels = transfer.parcels();
        if buffers.len() != parcels.len() {
            return LowerError::invalid(format!("it has {} tensors", buffers.len()));
        }
        // Tensors in the wire are not copied.
        let tensor = |&b: &BufferId| {
            if b != wire && of.frame.holder(b) == wire { Ok(Pointer::NONE) } else { self.locate(of, b) }
        };
        let tensors: Vec<Pointer> = buffers.iter().map(tensor).collect::<Result<_, _>>()?;
        let wire = self.locate(of, wire)?;
        let places = of.frame.places(task);
        let span = self.span_of(places, transfer);
        self.traced(of, places, &span, &|cx| {
            if cx.space.holds(first, cx.rank) {
                cx.move_message(parcels, side, &tensors, wire)
            } else {
                Ok(())
            }
        })
    }

    /// Searches for NaN in the buffers that a task wrote.
    pub(super) fn checks(&mut self, of: In<'a>, task: &'a Task) -> Result<Vec<Check>, LowerError> {
        let calls = matches!(task.work, TaskWork::Call { .. });
        if self.options.checks == Checks::None || calls {
            return Ok(Vec::new());
        }
        let space = self.space();
        let finding = Pointer { region: Region::Finding, bytes: 0 };
        let places = of.frame.places(task);
        let mut checks = Vec::new();
        for &buffer in &task.writes {
            if !of.frame.buffers[buffer].dtype().is_float() {
                continue;
            }
            let (n, records) = match &of.frame.buffers[buffer].content {
                Content::Tensor(ty) => {
                    let strided = [of.frame.strided(space, buffer)];
                    let views = self.views(of, &[buffer], &strided)?;
                    let span = Span::of(&space.mesh, uneven_axes(space, ty));
                    let at = ty.layout.at;
                    let from = merge::rank_at(&space.mesh, at);
                    let held = |rank| signed(boxes::elements(&space.local_box(ty, rank)));
                    let n = merge::integer(&span, span.ranks(&space.mesh, from).map(held));
                    let search = |cx: Cx<'_>| cx.find_nan(views[0], finding);
                    (n, self.traced(of, [at; 2], &span, &search)?)
                }
                Content::Wire { dtype, .. } => {
                    let Some((transfer, side)) = written_side(&task.work) else { continue };
                    let at = self.locate(of, buffer)?;
                    let span = self.span_of(places, transfer);
                    let from = self.start_of(places, &span);
                    let elements = |rank| {
                        let wire = message::wire(space, transfer.parcels(), side, rank);
                        signed(wire.blocks.iter().flatten().map(|p| boxes::elements(&p.region)).sum())
                    };
                    let n = merge::integer(&span, span.ranks(&space.mesh, from).map(elements));
                    let search = |cx: Cx<'_>| cx.find_nan_in_wire((at, *dtype), elements(cx.rank), finding);
                    (n, self.traced(of, places, &span, &search)?)
                }
            };
            checks.push(Check { buffer, n, records });
        }
        Ok(checks)
    }
}

/// The side of the transfer's wire that a task writes.
fn written_side(work: &TaskWork) -> Option<(&Transfer, Side)> {
    match work {
        TaskWork::Pack(transfer) => Some((transfer, Side::Sent)),
        TaskWork::Exchange(transfer) => Some(match transfer.first().op {
            // The sum is in place.
            Op::AllReduce { .. } => (transfer, Side::Sent),
            _ => (transfer, Side::Received),
        }),
        // The source of a copy was checked before.
        TaskWork::Copy | TaskWork::Compute(_) | TaskWork::Unpack(_) | TaskWork::Call { .. } => None,
    }
}
