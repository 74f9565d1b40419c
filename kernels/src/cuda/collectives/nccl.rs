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

use ithaca_ir::entity::Entity;
use ithaca_ir::{DType, Rank, Space};
use nccl_rs::UniqueId;
use nccl_rs::{
    Collective as Call, Communicator, DataType, DevicePointer, Library, Reduction, Split, State, Status,
    Stream,
};

use super::exchange::{Block, Broken, Collective, Collectives, End, Even, Exchange};
use crate::cuda::arguments::Address;
use crate::cuda::device::Device;
use crate::cuda::error::{CudaError, Part, Unavailable};
use crate::cuda::patience::Patience;
use crate::tensor::index;

/// The environment variable by which NCCL allows several ranks on one GPU.
const SHARED_GPU_VARIABLE: &str = "NCCL_MULTI_RANK_GPU_ENABLE";

/// The first version that does.
const SHARED_GPU_VERSION: (u32, u32, u32) = (2, 30, 3);

/// The time limit for finalizing communicators.
const FINALIZE_TIMEOUT: Duration = Duration::from_secs(5);

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
    /// The ranks of this process.
    ranks: Vec<Rank>,
    /// Of each of them; none once they were aborted.
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
        let id = library.unique_id()?;
        Self::join_as(library, (space, &id), space.mesh.iter_ranks().collect(), devices, longest)
    }

    /// The id by which ranks of different processes find each other, which one of them makes.
    ///
    /// # Errors
    /// [`Unavailable`] without NCCL; NCCL's.
    pub fn new_id() -> Result<Vec<u8>, CudaError> {
        Ok(Library::open()?.unique_id()?.bytes().to_vec())
    }

    /// Makes communicators for one rank, whose others are in processes that have the same id.
    ///
    /// # Errors
    /// [`Unavailable`] without NCCL; as [`join`](Self::join).
    pub fn open_rank(
        space: &Space,
        (rank, device): (Rank, &'d dyn Device),
        id: &[u8],
        longest: Option<Duration>,
    ) -> Result<Self, CudaError> {
        let malformed = |_| CudaError::Unsupported(format!("an id of {} bytes", id.len()));
        let id = UniqueId::from_bytes(id.try_into().map_err(malformed)?);
        Self::join_as(Library::open()?, (space, &id), vec![rank], vec![device], longest)
    }

    /// Communicators of the ranks of this process.
    fn join_as(
        library: Library,
        (space, id): (&Space, &UniqueId),
        ranks: Vec<Rank>,
        devices: Vec<&'d dyn Device>,
        longest: Option<Duration>,
    ) -> Result<Self, CudaError> {
        let n_ranks = index(space.mesh.ranks());
        let mut worlds = Vec::with_capacity(ranks.len());
        for (&rank, device) in ranks.iter().zip(&devices) {
            device.enter()?;
            let world = library.init_rank(n_ranks, id, index(rank.0));
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
        Ok(Self { library, ranks, members: RefCell::new(members), devices, longest })
    }

    /// Issues one rank's end, within a group.
    ///
    /// # Safety
    /// As [`Collectives::exchange`].
    unsafe fn issue(&self, members: &[Member], exchange: &Exchange, end: &End) -> Result<(), CudaError> {
        let (dtype, comm) = (data_type(exchange.dtype), self.used(members, exchange, end)?);
        let device = self.ranks.iter().zip(&self.devices).find(|(rank, _)| **rank == end.rank);
        device.map_or(Ok(()), |(_, device)| device.enter())?;
        let stream = Stream(end.stream.0);
        let at = |address: Address| DevicePointer(address.number());
        let call = |which: Call, from: Address, to: Address, n: u64| {
            // SAFETY: the caller vouches for the memory and the streams.
            unsafe { comm.collective(which, at(from), at(to), count(n), dtype, stream) }
        };
        // SAFETY: the caller vouches for the memory and the streams.
        unsafe {
            match &end.collective {
                &Collective::Even { kind, from, to, count } => {
                    let which = match kind {
                        Even::AllReduce => Call::AllReduce(Reduction::Sum),
                        Even::AllGather => Call::AllGather,
                        Even::ReduceScatter => Call::ReduceScatter(Reduction::Sum),
                        Even::AllToAll => Call::AllToAll,
                    };
                    call(which, from, to, count)?;
                }
                Collective::Reduce { blocks, to } => {
                    for &Block { peer, at, count } in blocks {
                        let reduce = Call::Reduce { reduction: Reduction::Sum, root: index(peer) };
                        call(reduce, at, *to, count)?;
                    }
                }
                Collective::SendReceive { sends, receives } => {
                    for &Block { peer, at: from, count: n } in sends {
                        comm.send(at(from), count(n), dtype, index(peer), stream)?;
                    }
                    for &Block { peer, at: to, count: n } in receives {
                        comm.recv(at(to), count(n), dtype, index(peer), stream)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The communicator that an end uses.
    fn used<'m>(
        &self,
        members: &'m [Member],
        exchange: &Exchange,
        end: &End,
    ) -> Result<&'m Communicator, CudaError> {
        let lacking =
            || CudaError::Unsupported(format!("a collective of rank {}, which is not here", end.rank.0));
        let place = self.ranks.iter().position(|&rank| rank == end.rank);
        let member = place.and_then(|place| members.get(place)).ok_or_else(lacking)?;
        match exchange.communicator {
            ithaca_device::Communicator::World => Ok(&member.world),
            ithaca_device::Communicator::Axis(axis) => {
                member.axes.get(axis.index()).and_then(Option::as_ref).ok_or_else(lacking)
            }
        }
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
        let of_end = |end: &End| Some((end.rank, self.used(&members, exchange, end).ok()?));
        settled(exchange.ends.iter().filter_map(of_end).collect(), self.longest)
    }

    fn check(&self) -> Result<(), Broken> {
        let members = self.members.borrow();
        let all = self.ranks.iter().copied().zip(members.iter());
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
    /// Ranks finalize together, as each waits for the others; a communicator that does not end is aborted.
    fn drop(&mut self) {
        let mut members = self.members.take();
        for (i, member) in members.iter_mut().enumerate() {
            if self.devices[i].enter().is_err() {
                return;
            }
            // Without `ncclCommFinalize` a communicator ends when it is dropped.
            for part in member.axes.iter_mut().flatten() {
                drop(part.finalize());
            }
        }
        let parts = members.iter().flat_map(|m| m.axes.iter().flatten()).map(|part| (Rank(0), part));
        drop(settled(parts.collect(), Some(FINALIZE_TIMEOUT)));
        members.iter_mut().for_each(|member| drop(member.world.finalize()));
        let worlds = members.iter().map(|member| (Rank(0), &member.world)).collect();
        drop(settled(worlds, Some(FINALIZE_TIMEOUT)));
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
