//! What a schedule does, found out the long way: every pair of tasks, every pair of regions. It serves to prove that a
//! mutant which passes the checks is harmless, and knows nothing of how the checks work.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use ithaca_ir::boxes::{self, Side};
use ithaca_ir::entity::Entity;
use ithaca_ir::layout::At;
use ithaca_ir::message::{self, Parcel};
use ithaca_ir::ops::{Fused, Optimizer, Random};
use ithaca_ir::schedule::{
    self, BufferId, Content, Frame, FrameId, Place, Schedule, Streams, Transfer, Work,
};
use ithaca_ir::{Op, TensorType};

use super::facts::{Facts, Source};

/// Memory of a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Region {
    Bytes(Range<u64>),
    /// A part of a wire that has these bytes; [`REST`] is what is packed beside parts that lie there.
    Part(Range<u64>, BufferId, usize),
    Port(usize),
    Home(String),
    Outside(String),
}

/// The parts of a wire that no tensor lies in.
const REST: usize = usize::MAX;

impl Region {
    fn meets(&self, other: &Region) -> bool {
        match (self, other) {
            (Region::Part(_, wire, a), Region::Part(_, other, b)) if wire == other => a == b,
            (Region::Bytes(a) | Region::Part(a, ..), Region::Bytes(b) | Region::Part(b, ..)) => {
                a.start.max(b.start) < a.end.min(b.end)
            }
            (Region::Port(a), Region::Port(b)) => a == b,
            (Region::Home(a), Region::Home(b)) => a == b,
            _ => false,
        }
    }

    /// Bytes of the frame; those of the whole wire for a part of one.
    fn bytes(&self) -> Option<&Range<u64>> {
        match self {
            Region::Bytes(bytes) | Region::Part(bytes, ..) => Some(bytes),
            Region::Port(_) | Region::Home(_) | Region::Outside(_) => None,
        }
    }
}

/// What every place does in a frame, tasks by their numbers in `before`.
///
/// # Errors
/// What may go wrong, in words.
pub(super) fn facts(schedule: &Schedule, id: FrameId, before: &[usize]) -> Result<Vec<Facts>, String> {
    let frame = &schedule.frames[id];
    for callee in schedule.frames.values().flat_map(|f| &f.tasks) {
        if let Work::Call { base, .. } = &callee.work
            && base % 256 != 0
        {
            return Err("a frame that does not lie well".to_owned());
        }
    }
    let stages = frame.stages();
    let places: Vec<Option<At>> =
        if stages.is_empty() { vec![None] } else { stages.into_iter().map(Some).collect() };
    places.into_iter().map(|at| Reader::new(schedule, id, at).facts(before)).collect()
}

struct Reader<'s> {
    schedule: &'s Schedule,
    frame: &'s Frame,
    at: Option<At>,
    /// Tasks that run there.
    tasks: Vec<usize>,
    /// What each frame writes and reads of what lasts.
    homes: Vec<[BTreeSet<String>; 2]>,
}

fn home(place: &Place) -> Option<String> {
    match place {
        Place::Weight(b) => Some(format!("weight {b:?}")),
        Place::State(b) => Some(format!("state {b:?}")),
        _ => None,
    }
}

impl<'s> Reader<'s> {
    fn new(schedule: &'s Schedule, id: FrameId, at: Option<At>) -> Self {
        let frame = &schedule.frames[id];
        let tasks = (0..frame.tasks.len())
            .filter(|&i| at.is_none_or(|at| frame.runs_at(&frame.tasks[i], at)))
            .collect();
        let mut homes: Vec<[BTreeSet<String>; 2]> = Vec::new();
        for frame in schedule.frames.values() {
            let mut of: [BTreeSet<String>; 2] = Default::default();
            for task in &frame.tasks {
                for (set, buffers) in of.iter_mut().zip([&task.writes, &task.reads]) {
                    set.extend(buffers.iter().filter_map(|&b| home(&frame.buffers[b].place)));
                }
                if let Work::Call { callee, .. } = &task.work
                    && let Some(called) = homes.get(callee.index()).cloned()
                {
                    of.iter_mut().zip(called).for_each(|(set, called)| set.extend(called));
                }
            }
            homes.push(of);
        }
        Self { schedule, frame, at, tasks, homes }
    }

    fn region(&self, b: BufferId) -> Region {
        let buffer = &self.frame.buffers[b];
        match &buffer.place {
            Place::Frame(offset) => {
                Region::Bytes(*offset..offset.saturating_add(buffer.bytes(&self.schedule.space)))
            }
            Place::Inside { whole, part } => match self.region(*whole) {
                Region::Bytes(bytes) => Region::Part(self.piece(b, bytes), *whole, *part),
                other => other,
            },
            Place::Argument(i) | Place::Result(i) => Region::Port(*i),
            Place::Input(b) => Region::Outside(format!("{b:?}")),
            place => Region::Home(home(place).unwrap()),
        }
    }

    /// Of the bytes of a wire or of a tensor those of a part: all of them where it is not one piece.
    fn piece(&self, b: BufferId, whole: Range<u64>) -> Range<u64> {
        let space = &self.schedule.space;
        let own = &self.frame.buffers[b];
        let is_wire = matches!(self.frame.buffers[self.frame.holder(b)].content, Content::Wire { .. });
        match self.frame.strided(space, b).filter(|strided| !is_wire && strided.cut.is_none()) {
            Some(strided) => {
                let start = whole.start + strided.start * own.dtype().bytes();
                start..start + own.bytes(space)
            }
            None => whole,
        }
    }

    fn held(&self, buffers: &[BufferId]) -> Vec<(BufferId, Region)> {
        let here = |b: &BufferId| self.at.is_none() || self.frame.at(*b).is_none_or(|at| Some(at) == self.at);
        buffers.iter().copied().filter(here).map(|b| (b, self.region(b))).collect()
    }

    /// The tensors that are written one by one in a wire to be sent, or in another tensor, in order of parts.
    fn sent_from(&self, whole: BufferId) -> Vec<BufferId> {
        let is_whole = match self.frame.buffers[whole].content {
            Content::Wire { .. } => !matches!(self.frame.carried(whole), Some((_, Side::Sent))),
            Content::Tensor(_) => self.frame.tasks.iter().any(|task| task.writes.contains(&whole)),
        };
        if is_whole {
            return Vec::new();
        }
        let part = |b: &BufferId| match self.frame.buffers[*b].place {
            Place::Inside { whole: own, part } if own == whole => Some(part),
            _ => None,
        };
        let mut inside: Vec<BufferId> = self.frame.buffers.ids().filter(|b| part(b).is_some()).collect();
        inside.sort_by_key(|b| part(b));
        inside
    }

    /// What a task reads: of a wire in which tensors lie these, and what is packed beside them.
    fn read(&self, i: usize) -> Vec<(BufferId, Region)> {
        let of = |(b, region): (BufferId, Region)| -> Vec<(BufferId, Region)> {
            let inside = self.sent_from(b);
            let Region::Bytes(bytes) = &region else { return vec![(b, region)] };
            if inside.is_empty() {
                return vec![(b, region)];
            }
            let rest = self.frame.tasks.iter().any(|t| t.writes.contains(&b));
            let rest = rest.then(|| (b, Region::Part(bytes.clone(), b, REST)));
            self.held(&inside).into_iter().chain(rest).collect()
        };
        self.held(&self.frame.tasks[i].reads).into_iter().flat_map(of).collect()
    }

    /// What a task writes: of a wire in which tensors lie the others; what stays in a wire is not written.
    fn written(&self, i: usize) -> Vec<(BufferId, Region)> {
        let task = &self.frame.tasks[i];
        let stays = |b: BufferId| {
            matches!(task.work, Work::Unpack(_)) && Some(&self.frame.holder(b)) == task.reads.first()
        };
        let of = |(b, region): (BufferId, Region)| match &region {
            Region::Bytes(bytes) if !self.sent_from(b).is_empty() => {
                (b, Region::Part(bytes.clone(), b, REST))
            }
            _ => (b, region),
        };
        self.held(&task.writes).into_iter().filter(|(b, _)| !stays(*b)).map(of).collect()
    }

    /// Whether a task that writes where it reads writes each element from that element alone, or is the collective that
    /// may: a sum that is left exactly where its terms were.
    fn goes_by_element(&self, i: usize, (k, read): (usize, &Region), (l, write): (usize, &Region)) -> bool {
        let nth = |held: Vec<(BufferId, Region)>, n: usize| held.get(n).map(|(b, _)| *b);
        let content = |b: Option<BufferId>| Some(&self.frame.buffers[b?].content);
        let (from, to) = (content(nth(self.read(i), k)), content(nth(self.written(i), l)));
        let same_elements = match (from, to) {
            (Some(Content::Tensor(from)), Some(Content::Tensor(to))) => {
                let of = |ty: &TensorType| (ty.dims.clone(), ty.layout.split.clone(), ty.dtype.bytes());
                of(from) == of(to)
            }
            _ => false,
        };
        match &self.frame.tasks[i].work {
            Work::Compute(op) => {
                let by_element = matches!(
                    op,
                    Op::Unary(_)
                        | Op::Binary(_)
                        | Op::Accumulate
                        | Op::Scale { .. }
                        | Op::Cast { .. }
                        | Op::Fused(Fused::Gated { .. })
                        | Op::Random(Random::Dropout { .. })
                        | Op::Optimizer(Optimizer::AdamW(_))
                ) || (*op == Op::AccumulateProduct && k == 2);
                by_element && same_elements && read == write
            }
            Work::Exchange(transfer) => {
                let is_wire = |content: Option<&Content>| matches!(content, Some(Content::Wire { .. }));
                let lies_alike = if is_wire(to) { self.is_summed_in_place(transfer) } else { same_elements };
                let sums = transfer.parcels().iter().all(|parcel| matches!(parcel.op, Op::AllReduce { .. }));
                let exactly = match (read.bytes(), write.bytes()) {
                    (Some(read), Some(write)) => read == write,
                    (None, _) | (_, None) => read == write,
                };
                sums && lies_alike && exactly
            }
            Work::Pack(_) | Work::Unpack(_) | Work::Copy | Work::Call { .. } => false,
        }
    }

    /// Whether on every rank each sum of a message comes to lie where its own term lay, seen from the start of the wires.
    ///
    /// A sum over all ranks may be left where its terms were when both ends begin at one address: NCCL says so of
    /// `ncclAllReduce` and `ncclReduce`; ours reads the part of an element that it sums from every rank before it writes
    /// that part. Of a reduce-scatter and an all-gather NCCL wants one end inside of the other, at a distance that is
    /// another on each rank, which no frame has; an all-to-all, and what is sent and received, may not be in place at all.
    /// Ends that overlap otherwise are promised nothing, whatever the collective.
    fn is_summed_in_place(&self, transfer: &Transfer) -> bool {
        let space = &self.schedule.space;
        let parcels = transfer.parcels();
        let of_one_size = parcels.iter().all(|parcel| parcel.from.dtype == parcel.to.dtype);
        of_one_size
            && space.mesh.iter_ranks().all(|rank| {
                let on = |side| message::wire(space, parcels, side, rank).blocks;
                on(Side::Sent) == on(Side::Received)
            })
    }

    /// What a callee writes and reads beside arguments and results.
    fn called(&self, i: usize) -> [Vec<Region>; 2] {
        let Work::Call { callee, base, .. } = &self.frame.tasks[i].work else { return Default::default() };
        let [writes, reads] =
            self.homes[callee.index()].clone().map(|s| s.into_iter().map(Region::Home).collect::<Vec<_>>());
        let own = Region::Bytes(*base..base + self.schedule.frames[*callee].bytes);
        [writes.into_iter().chain([own]).collect(), reads]
    }

    /// For each task those that end before it starts.
    fn earlier(&self) -> Result<BTreeMap<usize, BTreeSet<usize>>, String> {
        let mut all: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
        for (n, &i) in self.tasks.iter().enumerate() {
            let task = &self.frame.tasks[i];
            let mut earlier: BTreeSet<usize> = BTreeSet::new();
            // Whether the streams that meet at a call are those of two tasks.
            let meet = |j: usize, other: usize| match self.frame.tasks[j].work {
                Work::Call { callee, .. } => {
                    let used = schedule::used_streams(&self.schedule.frames)[callee.index()];
                    let streams = |k: usize| match self.frame.tasks[k].work {
                        Work::Call { callee, .. } => {
                            schedule::used_streams(&self.schedule.frames)[callee.index()]
                        }
                        _ => Streams::only(self.frame.tasks[k].stream),
                    };
                    used.communicates() && streams(other).iter().any(|stream| used.has(stream))
                }
                _ => false,
            };
            for &j in &self.tasks[..n] {
                let other = &self.frame.tasks[j];
                let waited = other.records.is_some_and(|e| task.waits.contains(&e));
                if waited || other.stream == task.stream || meet(i, j) || meet(j, i) {
                    earlier.insert(j);
                    earlier.extend(&all[&j]);
                }
            }
            all.insert(i, earlier);
        }
        for (i, task) in self.frame.tasks.iter().enumerate() {
            for event in &task.waits {
                if !self.frame.tasks[..i].iter().any(|t| t.records == Some(*event)) {
                    return Err(format!("task {i} waits for nothing"));
                }
            }
        }
        Ok(all)
    }

    fn facts(&self, before: &[usize]) -> Result<Facts, String> {
        let earlier = self.earlier()?;
        let mut facts = Facts::default();
        type Touched = (Vec<(BufferId, Region)>, Vec<(BufferId, Region)>, [Vec<Region>; 2]);
        let touched: BTreeMap<usize, Touched> =
            self.tasks.iter().map(|&i| (i, (self.read(i), self.written(i), self.called(i)))).collect();
        let size = self.frame.bytes;
        let inside = |r: &Region| match r {
            Region::Bytes(r) => r.start % 256 == 0 && r.end <= size && r.start <= r.end,
            Region::Part(r, ..) => r.end <= size && r.start <= r.end,
            _ => true,
        };
        for (&i, (reads, writes, called)) in &touched {
            let mut all = reads.iter().chain(writes).map(|(_, r)| r).chain(&called[0]);
            if !all.all(inside) {
                return Err(format!("task {i} reaches out of the frame"));
            }
            let task = &self.frame.tasks[i];
            let mut work = format!("{:?} of {:?}", task.work, task.reads.len());
            if let Work::Call { base, .. } = &task.work {
                work = work.replace(&format!("base: {base}"), "");
            }
            for b in task.reads.iter().chain(&task.writes) {
                if let Content::Tensor(ty) = &self.frame.buffers[*b].content {
                    work.push_str(&format!(" {ty:?}"));
                }
                // What an unpack gives is told by its number; what stays in the wire is the exchange's.
                if let (Place::Inside { part, .. }, Work::Pack(_)) =
                    (&self.frame.buffers[*b].place, &task.work)
                {
                    work.push_str(&format!(" in part {part}"));
                }
            }
            facts.work.insert(before[i], work);
            match &task.work {
                Work::Copy => drop(facts.copies.insert(before[i])),
                Work::Exchange(_) => drop(facts.exchanges.insert(before[i])),
                Work::Call { .. } => drop(facts.calls.insert(before[i])),
                Work::Compute(_) | Work::Pack(_) | Work::Unpack(_) => {}
            }
            for (k, (_, read)) in reads.iter().enumerate() {
                for (l, (_, write)) in writes.iter().enumerate() {
                    if read.meets(write) && !self.goes_by_element(i, (k, read), (l, write)) {
                        facts.in_place.insert((before[i], k, l));
                    }
                }
                if called[0].iter().any(|r| r.meets(read)) {
                    return Err(format!("the callee of task {i} writes an argument"));
                }
            }
            for (l, (_, write)) in writes.iter().enumerate() {
                if called[0].iter().chain(&called[1]).any(|r| r.meets(write))
                    || writes[..l].iter().any(|(_, r)| r.meets(write))
                {
                    return Err(format!("task {i} writes twice in one place"));
                }
            }
        }
        let tasks: Vec<usize> = self.tasks.clone();
        for (n, &j) in tasks.iter().enumerate() {
            let of = |i: usize| {
                let (reads, writes, called) = &touched[&i];
                let writes: Vec<&Region> = writes.iter().map(|(_, r)| r).chain(&called[0]).collect();
                let reads: Vec<&Region> = reads.iter().map(|(_, r)| r).chain(&called[1]).collect();
                (reads, writes)
            };
            let (reads, writes) = of(j);
            for &i in tasks[..n].iter().filter(|i| !earlier[&j].contains(i)) {
                let (others, other_writes) = of(i);
                let meet = |a: &[&Region], b: &[&Region]| a.iter().any(|x| b.iter().any(|y| x.meets(y)));
                if meet(&writes, &others) || meet(&writes, &other_writes) || meet(&reads, &other_writes) {
                    return Err(format!("tasks {i} and {j} touch the same at the same time"));
                }
            }
        }
        // By its number among all that the task writes, whatever stays where it is.
        let result = |i: usize, b: BufferId| {
            let l = self.frame.tasks[i].writes.iter().position(|&written| written == b);
            format!("result {}", l.unwrap_or(usize::MAX))
        };
        let home_before = |home: &str, n: usize| -> Source {
            for &i in tasks[..n].iter().rev() {
                let (_, writes, called) = &touched[&i];
                let is = |r: &Region| matches!(r, Region::Home(h) if h == home);
                if let Some((b, _)) = writes.iter().find(|(_, r)| is(r)) {
                    return Source::Task(before[i], result(i, *b));
                }
                if called[0].iter().any(is) {
                    return Source::Task(before[i], format!("callee, {home}"));
                }
            }
            Source::Given(home.to_owned())
        };
        let source = |b: BufferId, region: &Region, n: usize| -> Result<Source, String> {
            if let Region::Home(home) = region {
                return Ok(home_before(home, n));
            }
            for &i in tasks[..n].iter().rev() {
                let (_, writes, called) = &touched[&i];
                for (written, r) in writes {
                    if *written == b {
                        return Ok(Source::Task(before[i], result(i, b)));
                    }
                    if let Place::Inside { whole, part } = self.frame.buffers[b].place
                        && whole == *written
                        && !matches!(r, Region::Part(..))
                    {
                        return Ok(Source::Task(before[i], format!("{} part {part}", result(i, *written))));
                    }
                    if r.meets(region) {
                        return Err(format!("task {i} writes over {b:?}"));
                    }
                }
                if called[0].iter().any(|r| r.meets(region)) {
                    return Err(format!("the callee of task {i} writes over {b:?}"));
                }
            }
            match (region, &self.frame.buffers[b].place) {
                (Region::Bytes(r) | Region::Part(r, ..), _) if !r.is_empty() => {
                    Err(format!("nobody writes {b:?}"))
                }
                (_, Place::Result(_)) => Err(format!("nobody writes {b:?}")),
                (region, _) => Ok(Source::Given(format!("{region:?}"))),
            }
        };
        for (n, &i) in tasks.iter().enumerate() {
            let (reads, _, called) = &touched[&i];
            let operands = reads.iter().map(|(b, region)| source(*b, region, n));
            let found = called.iter().flatten().filter_map(|region| match region {
                Region::Home(home) => Some(Ok(home_before(home, n))),
                Region::Bytes(_) | Region::Part(..) | Region::Port(_) | Region::Outside(_) => None,
            });
            facts.reads.insert(before[i], operands.chain(found).collect::<Result<_, _>>()?);
        }
        for output in &self.frame.outputs {
            if let [(b, region)] = self.held(&[output.buffer]).as_slice() {
                facts.outputs.push(source(*b, region, tasks.len())?);
            }
        }
        let homes: BTreeSet<String> = touched
            .values()
            .flat_map(|(_, writes, called)| writes.iter().map(|(_, r)| r).chain(&called[0]))
            .filter_map(|r| if let Region::Home(h) = r { Some(h.clone()) } else { None })
            .collect();
        for home in homes {
            let last = home_before(&home, tasks.len());
            facts.homes.insert(home, last);
        }
        Ok(facts)
    }
}

/// Whether every wire takes the blocks of every rank, own blocks included.
pub(super) fn wires_fit(schedule: &Schedule) -> bool {
    schedule.frames.values().all(|frame| {
        frame.tasks.iter().all(|task| {
            let (Work::Pack(t) | Work::Exchange(t) | Work::Unpack(t)) = &task.work else { return true };
            let fits = |b: Option<&BufferId>, needed: u64| match b.map(|&b| &frame.buffers[b].content) {
                Some(Content::Wire { elements, .. }) => elements >= &needed,
                _ => true,
            };
            schedule.space.mesh.iter_ranks().all(|rank| {
                let of =
                    |blocks: &[Vec<boxes::Region>]| blocks.iter().map(|b| boxes::block_elements(b)).sum();
                let (mut sent, mut received): (u64, u64) = (0, 0);
                for Parcel { op, from, to } in t.parcels() {
                    let all = boxes::exchange(&schedule.space, op, from, to, rank);
                    let (out, back): (u64, u64) = (of(&all.send), of(&all.recv));
                    // Of several tensors what goes to all peers, or is summed of all, is on the wire once.
                    let once = |ty| boxes::elements(&schedule.space.local_box(ty, rank));
                    let shared = |side| t.only().is_none() && message::is_shared(op, side);
                    sent += if shared(Side::Sent) { out.min(once(from)) } else { out };
                    received += if shared(Side::Received) { back.min(once(to)) } else { back };
                }
                match &task.work {
                    Work::Pack(_) => fits(task.writes.first(), sent),
                    Work::Unpack(_) => fits(task.reads.first(), received),
                    _ => fits(task.reads.first(), sent) && fits(task.writes.first(), received),
                }
            })
        })
    })
}
