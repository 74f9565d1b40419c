//! Collectives by NCCL: a communicator for each rank over the whole mesh, and one along each axis, as emitted programs
//! have them.
//!
//! All ranks are in this process, on one GPU or on several. Ranks that share a GPU need NCCL 2.30.3 and the environment
//! variable `NCCL_MULTI_RANK_GPU_ENABLE`. What one thread issues for several communicators is a group.
//!
//! No call blocks: communicators are made, split, used and ended in the background, and looked at until they are there,
//! for as long as is allowed. So a rank that does not come is named, and the others are not lost with it.

use std::cell::RefCell;
use std::time::Duration;

use ithaca_ir::{DType, Rank, Space};
use nccl_rs::{
    Collective, Communicator, DataType, DevicePointer, Library, Reduction, Split, State, Status, Stream,
};

use super::{Broken, Collectives, End, Exchange, Kind};
use crate::cuda::device::Device;
use crate::cuda::error::{CudaError, Part, Unavailable};
use crate::cuda::patience::Patience;
use crate::tensor::index;

/// The environment variable by which NCCL allows several ranks on one GPU.
const SHARED_GPU_VARIABLE: &str = "NCCL_MULTI_RANK_GPU_ENABLE";

/// The first version that does.
const SHARED_GPU_VERSION: (u32, u32, u32) = (2, 30, 3);

/// How long communicators that are not used any more may take to say goodbye.
const GOODBYE: Duration = Duration::from_secs(5);

/// The communicators of one rank.
struct Member {
    world: Communicator,
    axes: Vec<Option<Communicator>>,
}

impl Member {
    fn communicators(&self) -> impl Iterator<Item = &Communicator> {
        self.axes.iter().flatten().chain([&self.world])
    }
}

/// Collectives by NCCL.
pub struct Nccl<'d> {
    library: Library,
    /// In order of ranks; none once they were aborted.
    members: RefCell<Vec<Member>>,
    devices: Vec<&'d dyn Device>,
    longest: Option<Duration>,
}

impl<'d> Nccl<'d> {
    /// Opens NCCL and makes communicators for the ranks of a mesh; `devices` has that of each rank. Ranks wait for each
    /// other at most `longest`.
    ///
    /// # Errors
    /// [`Unavailable`] without NCCL, and where ranks share a GPU and it does not allow that; as [`join`](Self::join).
    pub fn open(
        space: &Space,
        devices: Vec<&'d dyn Device>,
        longest: Option<Duration>,
    ) -> Result<Self, CudaError> {
        let library = Library::open()?;
        let same = |a: &dyn Device, b: &dyn Device| std::ptr::addr_eq(a, b);
        if devices
            .iter()
            .enumerate()
            .any(|(i, device)| devices[..i].iter().any(|other| same(*other, *device)))
        {
            allow_sharing(&library)?;
        }
        Self::join(library, space, devices, longest)
    }

    /// Communicators of an opened library.
    ///
    /// # Errors
    /// [`CudaError::Absent`] for a rank that does not come into a communicator; NCCL's.
    pub fn join(
        library: Library,
        space: &Space,
        devices: Vec<&'d dyn Device>,
        longest: Option<Duration>,
    ) -> Result<Self, CudaError> {
        let ranks: Vec<Rank> = space.mesh.iter_ranks().collect();
        let id = library.unique_id()?;
        let mut worlds = Vec::with_capacity(ranks.len());
        for (&rank, device) in ranks.iter().zip(&devices) {
            device.enter()?;
            let world = library.init_rank(ranks.len(), &id, index(rank.0));
            worlds.push(world.map_err(absent(rank, ALL_RANKS))?);
        }
        ready(ranks.iter().copied().zip(&worlds), ALL_RANKS, longest)?;
        let mut axes: Vec<Vec<Option<Communicator>>> = ranks.iter().map(|_| Vec::new()).collect();
        for axis in space.mesh.axes.ids() {
            let what = format!("the communicators along `{}`", space.mesh.axes[axis].name);
            let mut splits: Vec<Split<'_>> = Vec::with_capacity(ranks.len());
            for ((&rank, device), world) in ranks.iter().zip(&devices).zip(&worlds) {
                device.enter()?;
                let color = space.mesh.group(rank, axis).first().map_or(0, |first| index(first.0));
                let key = index(space.mesh.coordinate(rank, axis));
                splits.push(world.begin_split(Some(color), key).map_err(absent(rank, &what))?);
            }
            ready(ranks.iter().copied().zip(&worlds), &what, longest)?;
            let mut parts = Vec::with_capacity(ranks.len());
            for (&rank, split) in ranks.iter().zip(splits) {
                parts.push((rank, split.part().map_err(absent(rank, &what))?));
            }
            ready(parts.iter().filter_map(|(rank, part)| Some((*rank, part.as_ref()?))), &what, longest)?;
            for ((rank, mut part), axes) in parts.into_iter().zip(&mut axes) {
                part.as_mut().map_or(Ok(()), Communicator::learn).map_err(absent(rank, &what))?;
                axes.push(part);
            }
        }
        let members = worlds.into_iter().zip(axes).map(|(world, axes)| Member { world, axes }).collect();
        Ok(Self { library, members: RefCell::new(members), devices, longest })
    }

    /// Issues one rank's end, within a group.
    ///
    /// # Safety
    /// As [`Collectives::exchange`].
    unsafe fn issue(&self, members: &[Member], exchange: &Exchange, end: &End) -> Result<(), CudaError> {
        let dtype = data_type(exchange.dtype);
        let (comm, numbers) = peers(members, exchange, end)?;
        let device = self.devices[index(end.rank.0)];
        device.enter()?;
        let stream = Stream(end.stream.0);
        let (from, to) = (DevicePointer(end.from.number()), DevicePointer(end.to.number()));
        let whole_axis = numbers.len() == comm.ranks();
        let even = |counts: &[u64]| counts.iter().all(|&n| n == counts[0] && n > 0);
        // SAFETY: the caller vouches for the memory and the streams.
        unsafe {
            match exchange.kind {
                Kind::AllReduce if whole_axis => {
                    comm.collective(
                        Collective::AllReduce(Reduction::Sum),
                        from,
                        to,
                        count(end.mine),
                        dtype,
                        stream,
                    )?;
                }
                Kind::Gather if whole_axis && even(&end.recv) => {
                    comm.collective(Collective::AllGather, from, to, count(end.mine), dtype, stream)?;
                }
                Kind::ReduceScatter if whole_axis && even(&end.send) => {
                    comm.collective(
                        Collective::ReduceScatter(Reduction::Sum),
                        from,
                        to,
                        count(end.wanted),
                        dtype,
                        stream,
                    )?;
                }
                Kind::Blocks
                    if whole_axis && even(&end.send) && even(&end.recv) && end.send[0] == end.recv[0] =>
                {
                    comm.collective(Collective::AllToAll, from, to, count(end.send[0]), dtype, stream)?;
                }
                Kind::ReduceScatter if whole_axis => {
                    for (i, &n) in end.send.iter().enumerate().filter(|(_, n)| **n > 0) {
                        let block = from.offset(End::start(&end.send, i) * exchange.dtype.bytes());
                        let reduce = Collective::Reduce { reduction: Reduction::Sum, root: i };
                        comm.collective(reduce, block, to, count(n), dtype, stream)?;
                    }
                }
                Kind::AllReduce | Kind::ReduceScatter => {
                    let what = "a sum over ranks that are not those of an axis".to_owned();
                    return Err(CudaError::Unsupported(what));
                }
                Kind::Blocks | Kind::Whole | Kind::Gather => {
                    let bytes = exchange.dtype.bytes();
                    for (i, &peer) in numbers.iter().enumerate() {
                        let (n_send, n_recv) = (end.send[i], end.recv[i]);
                        let start = if exchange.kind == Kind::Blocks { End::start(&end.send, i) } else { 0 };
                        let block = from.offset(start * bytes);
                        let place = to.offset(End::start(&end.recv, i) * bytes);
                        if end.group[i] == end.rank {
                            if n_recv > 0 && block != place {
                                let [from, to] = [block, place].map(|at| crate::cuda::Address(at.0));
                                device.copy(end.stream, from, to, n_recv * bytes)?;
                            }
                            continue;
                        }
                        if n_send > 0 {
                            comm.send(block, count(n_send), dtype, peer, stream)?;
                        }
                        if n_recv > 0 {
                            comm.recv(place, count(n_recv), dtype, peer, stream)?;
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

impl Collectives for Nccl<'_> {
    unsafe fn exchange(&self, exchange: &Exchange) -> Result<(), Broken> {
        let members = self.members.borrow();
        let mut failure = None;
        let grouped = self.library.group(|| {
            for end in &exchange.ends {
                // SAFETY: the caller vouches for the memory.
                if let Err(error) = unsafe { self.issue(&members, exchange, end) } {
                    failure = Some(end.broken(error));
                    break;
                }
            }
            Ok(())
        });
        if let Some(failure) = failure {
            return Err(failure);
        }
        let Some(first) = exchange.ends.first() else { return Ok(()) };
        grouped.map_err(|error| first.broken(error.into()))?;
        // What is issued in the background is behind the event that others wait for only once it is issued.
        let used = |end: &End| Some((end.rank, peers(&members, exchange, end).ok()?.0));
        settled(exchange.ends.iter().filter_map(used).collect(), self.longest)
    }

    fn check(&self) -> Result<(), Broken> {
        let members = self.members.borrow();
        let all = (0..).map(Rank).zip(members.iter());
        // Of communicators that failed most say that another did.
        let mut found = None;
        for (rank, communicator) in all.flat_map(|(rank, m)| m.communicators().map(move |c| (rank, c))) {
            let error = match communicator.state() {
                Ok(State::Ready | State::InProgress) => continue,
                Ok(State::Failed(Status::RemoteError)) if found.is_some() => continue,
                Ok(State::Failed(status)) => background(status),
                Err(error) => error.into(),
            };
            let is_remote =
                matches!(&error, CudaError::Nccl(nccl_rs::Error::Failed { status: Status::RemoteError, .. }));
            found = Some(Broken { rank, error });
            if !is_remote {
                break;
            }
        }
        found.map_or(Ok(()), Err)
    }

    fn abort(&self) {
        for Member { world, axes } in self.members.take() {
            // The run has failed already; there is no one to tell of a second failure.
            axes.into_iter().flatten().chain([world]).for_each(|communicator| drop(communicator.abort()));
        }
    }
}

impl Drop for Nccl<'_> {
    /// Ranks say goodbye together, as each waits for the others; who does not is aborted.
    fn drop(&mut self) {
        let mut members = self.members.take();
        for (i, member) in members.iter_mut().enumerate() {
            if self.devices[i].enter().is_err() {
                return;
            }
            // Libraries that cannot say goodbye in the background do so when they are dropped.
            for part in member.axes.iter_mut().flatten() {
                drop(part.finalize());
            }
        }
        let parts = members.iter().flat_map(|m| m.axes.iter().flatten()).map(|part| (Rank(0), part));
        drop(settled(parts.collect(), Some(GOODBYE)));
        members.iter_mut().for_each(|member| drop(member.world.finalize()));
        let worlds = members.iter().map(|member| (Rank(0), &member.world)).collect();
        drop(settled(worlds, Some(GOODBYE)));
    }
}

/// What the communicator of the whole mesh is called.
const ALL_RANKS: &str = "the communicator of all ranks";

fn absent<'w, E: Into<CudaError>>(rank: Rank, what: &'w str) -> impl Fn(E) -> CudaError + use<'w, E> {
    move |error| CudaError::Absent { rank: rank.0, what: what.to_owned(), cause: Box::new(error.into()) }
}

fn background(status: Status) -> CudaError {
    let detail = "found in the background".to_owned();
    nccl_rs::Error::Failed { call: "ncclCommGetAsyncError", status, detail }.into()
}

/// Waits until communicators that are being made are ready.
fn ready<'c>(
    communicators: impl Iterator<Item = (Rank, &'c Communicator)>,
    what: &str,
    longest: Option<Duration>,
) -> Result<(), CudaError> {
    settled(communicators.collect(), longest).map_err(|Broken { rank, error }| absent(rank, what)(error))
}

/// Waits until nothing that was asked of communicators goes on in the background.
///
/// # Errors
/// [`CudaError::Late`] where something does for longer than allowed; what failed.
fn settled(mut waiting: Vec<(Rank, &Communicator)>, longest: Option<Duration>) -> Result<(), Broken> {
    let mut patience = Patience::new(longest);
    loop {
        let before = waiting.len();
        let mut left = Vec::with_capacity(before);
        for (rank, communicator) in waiting {
            match communicator.state().map_err(|error| Broken { rank, error: error.into() })? {
                State::Ready => {}
                State::InProgress => left.push((rank, communicator)),
                State::Failed(status) => return Err(Broken { rank, error: background(status) }),
            }
        }
        let [(rank, _), others @ ..] = left.as_slice() else { return Ok(()) };
        if left.len() < before {
            patience.renew();
        } else if let Err(waited) = patience.pause() {
            let waiting = others.iter().map(|(other, _)| other.0).collect();
            return Err(Broken { rank: *rank, error: CudaError::Late { waited, waiting } });
        }
        waiting = left;
    }
}

/// Along one axis its communicator, else the world; with the number of each member of the group.
fn peers<'m>(
    members: &'m [Member],
    exchange: &Exchange,
    end: &End,
) -> Result<(&'m Communicator, Vec<usize>), CudaError> {
    use ithaca_ir::entity::Entity;
    let lacking =
        || CudaError::Unsupported(format!("a collective of rank {}, which is not here", end.rank.0));
    let member = members.get(index(end.rank.0)).ok_or_else(lacking)?;
    let axis = match exchange.axes.as_slice() {
        [axis] => member.axes.get(axis.index()).and_then(Option::as_ref),
        _ => None,
    };
    Ok(match axis {
        Some(comm) => (comm, (0..end.group.len()).collect()),
        None => (&member.world, end.group.iter().map(|rank| index(rank.0)).collect()),
    })
}

/// Whether the library lets ranks share a GPU.
fn allow_sharing(library: &Library) -> Result<(), CudaError> {
    let version = library.version()?;
    let mut why = Vec::new();
    let words = |(major, minor, patch): (u32, u32, u32)| format!("{major}.{minor}.{patch}");
    if version < SHARED_GPU_VERSION {
        let needed = words(SHARED_GPU_VERSION);
        why.push(format!("ranks that share a GPU need NCCL {needed}, this is {}", words(version)));
    }
    if std::env::var_os(SHARED_GPU_VARIABLE).is_none_or(|value| value != "1") {
        why.push(format!("ranks that share a GPU need {SHARED_GPU_VARIABLE}=1"));
    }
    match why.is_empty() {
        true => Ok(()),
        false => Err(Unavailable { part: Part::Nccl, why }.into()),
    }
}

fn count(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

fn data_type(dtype: DType) -> DataType {
    match dtype {
        DType::F64 => DataType::F64,
        DType::F32 => DataType::F32,
        DType::F16 => DataType::F16,
        DType::BF16 => DataType::BF16,
        DType::I32 => DataType::I32,
        DType::Bool => DataType::I8,
    }
}
