//! Lowers collectives to transfers: the blocks between ranks.

use std::collections::BTreeMap;

use ithaca_ir::boxes::{self, Side};
use ithaca_ir::layout::At;
use ithaca_ir::message::{self, Parcel, RunPlaces, Runs};
use ithaca_ir::ops::Op;
use ithaca_ir::schedule::{BufferId, Frame, Schedule, Stream, Task, Transfer as TaskTransfer};
use ithaca_ir::strided::Strided;
use ithaca_ir::{AxisId, DType, Rank, Space, TensorType};

use super::axes::splitting_axes;
use super::context::{In, Lowering};
use crate::address::Region;
use crate::argument::{Pointer, arguments};
use crate::catalogue::c_type;
use crate::error::LowerError;
use crate::merge::Span;
use crate::ops::view::{Cx, signed};
use crate::record::{Block, Collective, Communicator, Even, Members, Record, Transfer};
use crate::structs::MemberRuns;
use crate::value::{Choice, Int, Varying};

/// The distribution of a collective's elements among its members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Each member receives a different block from each.
    Blocks,
    /// Each member receives all elements of others that have elements for it.
    Whole,
    /// As [`Whole`](Self::Whole), the same number from every member.
    Gather,
    /// Each member receives the sum of its blocks.
    ReduceScatter,
    /// All members receive the sum.
    AllReduce,
}

impl Kind {
    fn of(op: &Op) -> Result<Self, LowerError> {
        Ok(match op {
            Op::AllToAll { .. } | Op::Fetch { .. } | Op::FetchSum { .. } => Kind::Blocks,
            Op::Permute => Kind::Whole,
            Op::AllGather { .. } => Kind::Gather,
            Op::ReduceScatter { .. } => Kind::ReduceScatter,
            Op::AllReduce { .. } => Kind::AllReduce,
            other => return LowerError::unsupported(format!("`{}` as a collective", other.name())),
        })
    }
}

/// Bytes of a count of filled rows.
const COUNT_BYTES: u64 = 4;

/// Threads that share a row: the kernels' `kLanes`.
const LANES: i64 = 32;

/// Bytes of the counts of filled rows that a rank sends and receives, in the collective that has the most.
pub(super) fn bytes_of_counts(schedule: &Schedule) -> u64 {
    let space = &schedule.space;
    let tasks = schedule.frames.values().flat_map(|frame| &frame.tasks);
    let of_transfer = |transfer: &TaskTransfer| {
        let runs = message::runs(space, transfer.parcels(), Rank(0))?;
        let members = Members::of(space, transfer.first()).count(&space.mesh);
        Some(2 * members * runs.n * COUNT_BYTES)
    };
    tasks.filter_map(|task| of_transfer(task.work.exchange()?)).max().unwrap_or(0)
}

/// One rank's part in a message, its memory aside.
struct End {
    rank: Rank,
    /// The ranks of its group, itself among them, in order.
    group: Vec<Rank>,
    /// Elements that it sends to and receives from each member.
    send: Vec<u64>,
    recv: Vec<u64>,
    /// Elements before and after the collective.
    mine: u64,
    wanted: u64,
}

impl End {
    fn of(space: &Space, parcels: &[Parcel], rank: Rank) -> Self {
        let [sent, received] =
            [Side::Sent, Side::Received].map(|side| message::wire(space, parcels, side, rank));
        let held = |ty: &TensorType| boxes::elements(&space.local_box(ty, rank));
        let holds = |ty: &&TensorType| space.holds(ty, rank);
        End {
            rank,
            group: sent.group,
            send: sent.elements,
            recv: received.elements,
            mine: parcels.iter().map(|p| &p.from).filter(holds).map(held).sum(),
            wanted: parcels.iter().map(|p| &p.to).filter(holds).map(held).sum(),
        }
    }
}

/// One rank's part in the exchange of a wire, or of a tensor, with its memory.
#[derive(Clone, Copy)]
struct Part<'e> {
    end: &'e End,
    from: Pointer,
    to: Pointer,
}

/// The library call of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    SendReceive,
    Even(Even),
    Reduce,
}

/// A message between ranks that are numbered by a communicator.
struct Message {
    kind: Kind,
    communicator: Communicator,
    dtype: DType,
    method: Method,
    /// The rows of blocks, where only filled rows are sent.
    filled: Option<Filled>,
}

/// The rows of a message that sends filled rows only.
#[derive(Clone, Copy)]
struct Filled {
    runs: Runs,
    sent: RunPlaces,
    received: RunPlaces,
}

impl Filled {
    /// Those of one parcel between two buffers: the tensor itself or a wire.
    fn of(
        space: &Space,
        (parcels, rank): (&[Parcel], Rank),
        (frame, [from, to]): (&Frame, [BufferId; 2]),
    ) -> Result<Option<Self>, LowerError> {
        let Some((runs, parcel)) = message::runs(space, parcels, rank).zip(parcels.first()) else {
            return Ok(None);
        };
        let places = |buffer: BufferId, side| {
            let cut = frame.strided(space, buffer).and_then(|strided| strided.cut);
            let in_tensor =
                || RunPlaces::in_tensor(space, parcel, side, cut.map(|cut| [cut.len, cut.stride]));
            match frame.buffers[buffer].tensor().and_then(|_| in_tensor()) {
                Some(places) => Ok(places),
                // Other tensors are their blocks, one after another.
                None if cut.is_none() => Ok(RunPlaces::in_order(runs.n)),
                None => LowerError::invalid("the pieces of a tensor are not the blocks of members"),
            }
        };
        Ok(Some(Self { runs, sent: places(from, Side::Sent)?, received: places(to, Side::Received)? }))
    }
}

impl Message {
    /// All ranks of a group use the same method, even where their own blocks would allow another.
    fn of(
        space: &Space,
        (parcels, stream): (&[Parcel], Stream),
        buffers: (&Frame, [BufferId; 2]),
        ends: &BTreeMap<Rank, Vec<End>>,
    ) -> Result<Self, LowerError> {
        let Some(first) = parcels.first() else { return LowerError::invalid("a message without tensors") };
        let kind = Kind::of(&first.op)?;
        let communicator = Communicator { members: Members::of(space, first), stream };
        let members = communicator.members.count(&space.mesh);
        let all = || ends.values().flatten();
        let whole = all().all(|end| end.group.len() as u64 == members);
        let even = |counts: &[u64]| counts.iter().all(|&n| n == counts[0] && n > 0);
        let method = match kind {
            Kind::AllReduce if whole => Method::Even(Even::AllReduce),
            Kind::Gather if whole && all().all(|end| even(&end.recv)) => Method::Even(Even::AllGather),
            Kind::ReduceScatter if whole && all().all(|end| even(&end.send)) => {
                Method::Even(Even::ReduceScatter)
            }
            Kind::ReduceScatter if whole => Method::Reduce,
            Kind::AllReduce | Kind::ReduceScatter => {
                return LowerError::unsupported("a sum over ranks that are not those of an axis");
            }
            Kind::Blocks
                if whole
                    && all().all(|end| even(&end.send) && even(&end.recv) && end.send[0] == end.recv[0]) =>
            {
                Method::Even(Even::AllToAll)
            }
            Kind::Blocks | Kind::Whole | Kind::Gather => Method::SendReceive,
        };
        let rank = ends.keys().next().copied().unwrap_or(Rank(0));
        let filled = Filled::of(space, (parcels, rank), buffers)?;
        if filled.is_some() && method != Method::Even(Even::AllToAll) {
            return LowerError::unsupported("filled rows for some ranks of an axis");
        }
        Ok(Message { kind, communicator, dtype: first.from.dtype, method, filled })
    }

    fn number(&self, space: &Space, member: Rank) -> Int {
        Int::Const(signed(self.communicator.members.number(&space.mesh, member)))
    }

    /// Adds the record of one rank, whose parts are more than one if tensors are sent from where they are.
    fn trace(&self, cx: &Cx<'_>, parts: &[Part<'_>]) -> Result<(), LowerError> {
        let Some(&Part { end, from, to }) = parts.first() else { return Ok(()) };
        if let Some(filled) = self.filled {
            return self.trace_filled(cx, signed(end.group.len() as u64), (from, to), filled);
        }
        let bytes = self.dtype.bytes();
        let count = |n: u64| Int::Const(signed(n));
        let block = |end: &End, i: usize, at: Pointer, n: u64| Block {
            peer: self.number(cx.space, end.group[i]),
            at: at.address(),
            count: count(n),
        };
        let starts = |counts: &[u64]| -> Vec<u64> {
            let start = |sum: &mut u64, &n: &u64| Some(std::mem::replace(sum, *sum + n));
            counts.iter().scan(0, start).collect()
        };
        let (at, into) = (from.address(), to.address());
        let collective = match self.method {
            Method::Even(kind) => {
                let n = match kind {
                    Even::AllReduce | Even::AllGather => end.mine,
                    Even::ReduceScatter => end.wanted,
                    Even::AllToAll => end.send[0],
                };
                Collective::Even { kind, from: at, to: into, count: count(n) }
            }
            Method::Reduce => {
                let (send_starts, sent) =
                    (starts(&end.send), (0..end.group.len()).filter(|&i| end.send[i] > 0));
                let blocks = sent.map(|i| block(end, i, from.offset(send_starts[i] * bytes), end.send[i]));
                Collective::Reduce { blocks: blocks.collect(), to: into }
            }
            Method::SendReceive => {
                let (mut sends, mut receives) = (Vec::new(), Vec::new());
                for &Part { end, from, to } in parts {
                    let (send_starts, recv_starts) = (starts(&end.send), starts(&end.recv));
                    for (i, &member) in end.group.iter().enumerate() {
                        let start = if self.kind == Kind::Blocks { send_starts[i] } else { 0 };
                        let (source, target) =
                            (from.offset(start * bytes), to.offset(recv_starts[i] * bytes));
                        if member == end.rank {
                            cx.copy(end.recv[i] * bytes, source, target)?;
                            continue;
                        }
                        if end.send[i] > 0 {
                            sends.push(block(end, i, source, end.send[i]));
                        }
                        if end.recv[i] > 0 {
                            receives.push(block(end, i, target, end.recv[i]));
                        }
                    }
                }
                Collective::SendReceive { sends, receives }
            }
        };
        self.add(cx, self.dtype, collective);
        Ok(())
    }

    /// Adds the records of an all-to-all of filled rows: they are counted, the counts are exchanged, rows that will not arrive are
    /// cleared, and the others are exchanged.
    fn trace_filled(
        &self,
        cx: &Cx<'_>,
        members: i64,
        (from, to): (Pointer, Pointer),
        Filled { runs, sent, received }: Filled,
    ) -> Result<(), LowerError> {
        let [n, rows, width] = [runs.n, runs.rows, runs.width].map(signed);
        let places = |at: RunPlaces| MemberRuns {
            runs: n,
            adjacent: signed(at.adjacent),
            again: signed(at.again),
            member: signed(at.member),
        };
        let (all, t) = (members * n, c_type(self.dtype));
        let outgoing = Pointer { region: Region::Counts, bytes: 0 };
        let incoming = outgoing.offset(all.cast_unsigned() * COUNT_BYTES);
        let threads = all * rows * LANES;
        cx.launch("clear_counts", all, arguments![outgoing, all])?;
        let args = arguments![from, outgoing, places(sent), rows, width, threads];
        cx.launch(&format!("filled_rows<{t}>"), threads, args)?;
        let [from, to_rows, outgoing_counts, incoming_counts] =
            [from, to, outgoing, incoming].map(Pointer::address);
        self.add(
            cx,
            DType::I32,
            Collective::Even {
                kind: Even::AllToAll,
                from: outgoing_counts.clone(),
                to: incoming_counts.clone(),
                count: Int::Const(n),
            },
        );
        let args = arguments![to, incoming, places(received), rows, width, threads];
        cx.launch(&format!("clear_rows<{t}>"), threads, args)?;
        self.add(
            cx,
            self.dtype,
            Collective::Filled {
                from,
                to: to_rows,
                outgoing: outgoing_counts,
                incoming: incoming_counts,
                runs,
                sent,
                received,
            },
        );
        Ok(())
    }

    fn add(&self, cx: &Cx<'_>, dtype: DType, collective: Collective) {
        cx.trace.add(Record::Transfer(Transfer { communicator: self.communicator, dtype, collective }));
    }
}

impl<'a> Lowering<'a> {
    /// The axes that affect the blocks of a transfer; none if all ranks have the same sizes and offsets.
    pub(super) fn span_of(&self, places: [Option<At>; 2], transfer: &TaskTransfer) -> Span {
        let (space, parcels) = (self.space(), transfer.parcels());
        let even = |side| (0..parcels.len()).all(|part| Strided::of(space, parcels, side, part).is_some());
        if even(Side::Sent) && even(Side::Received) {
            return Span::of(&space.mesh, []);
        }
        let Parcel { op, from, to } = transfer.first();
        let axes = boxes::axes(space, op, from, to);
        let of_types = parcels.iter().flat_map(|parcel| [&parcel.from, &parcel.to]).flat_map(splitting_axes);
        let all = axes.iter().copied().chain(of_types);
        // The ranks of one place are on one coordinate of its axis.
        let fixed = if places[0] == places[1] { places[0].map(|at| at.axis) } else { None };
        Span::of(&space.mesh, all.filter(|axis| Some(*axis) != fixed))
    }

    /// Records of a collective.
    pub(super) fn exchange(
        &mut self,
        of: In<'a>,
        task: &'a Task,
        transfer: &TaskTransfer,
    ) -> Result<Choice<Vec<Record>>, LowerError> {
        let (space, parcels, first) = (self.space(), transfer.parcels(), transfer.first());
        let places = of.frame.places(task);
        let span = self.span_of(places, transfer);
        let start = self.start_of(places, &span);
        let participates = |rank: &Rank| places.iter().any(|p| p.is_none_or(|at| at.has(&space.mesh, *rank)));
        let together = if transfer.is_direct() { 1 } else { parcels.len() };
        let parts: Vec<&[Parcel]> = parcels.chunks(together).collect();
        if [task.reads.len(), task.writes.len()] != [parts.len(); 2] {
            return LowerError::invalid(format!("it reads and writes {} buffers", parts.len()));
        }
        // For each rank, its ends of the parts; none where it takes no part.
        let ends: BTreeMap<Rank, Vec<End>> = span
            .ranks(&space.mesh, start)
            .filter(participates)
            .map(|rank| (rank, parts.iter().map(|parcels| End::of(space, parcels, rank)).collect()))
            .collect();
        let buffers = (of.frame, [task.reads[0], task.writes[0]]);
        let message = Message::of(space, (parcels, task.stream), buffers, &ends)?;
        let locate = |&buffer: &BufferId| self.locate(of, buffer);
        let sources = task.reads.iter().map(locate).collect::<Result<Vec<_>, _>>()?;
        let targets = task.writes.iter().map(locate).collect::<Result<Vec<_>, _>>()?;
        let held =
            |ty: &TensorType, rank, at: &Pointer| if space.holds(ty, rank) { *at } else { Pointer::NONE };
        let mut merged = self.traced(of, places, &span, &|cx| {
            let own = ends.get(&cx.rank).into_iter().flatten();
            let parts = own.zip(sources.iter().zip(&targets)).map(|(end, (from, to))| Part {
                end,
                from: held(&first.from, cx.rank, from),
                to: held(&first.to, cx.rank, to),
            });
            message.trace(&cx, &Vec::from_iter(parts))
        })?;
        if message.communicator.members == Members::World {
            // A rank's peers have its coordinates along all other axes.
            let is_other = |axis: &AxisId| {
                let fixed = places.iter().flatten().any(|at| at.axis == *axis);
                !fixed && !span.axes().contains(axis) && space.mesh.size(*axis) > 1
            };
            let others: Vec<(AxisId, i64)> = space
                .mesh
                .axes
                .ids()
                .filter(is_other)
                .map(|axis| (axis, signed(space.mesh.stride(axis))))
                .collect();
            for block in merged.alternatives.iter_mut().flatten().flat_map(blocks) {
                block.peer = plus(&block.peer, &others);
            }
        }
        Ok(merged)
    }
}

/// The blocks of a record that name peers.
fn blocks(record: &mut Record) -> Vec<&mut Block> {
    match record {
        Record::Transfer(Transfer { collective, .. }) => match collective {
            Collective::SendReceive { sends, receives } => sends.iter_mut().chain(receives).collect(),
            Collective::Reduce { blocks, .. } => blocks.iter_mut().collect(),
            Collective::Even { .. } | Collective::Filled { .. } => Vec::new(),
        },
        Record::Launch(_) | Record::Product(_) | Record::Pair(_) | Record::Copy { .. } => Vec::new(),
    }
}

/// The sum of an integer and multiples of coordinates that it does not depend on.
fn plus(int: &Int, others: &[(AxisId, i64)]) -> Int {
    let mut varying = match int {
        Int::Const(base) => Varying { base: *base, ..Varying::default() },
        Int::Varying(varying) => (**varying).clone(),
    };
    varying.per_axis.extend(others);
    varying.per_axis.sort_unstable();
    varying.into_int()
}
