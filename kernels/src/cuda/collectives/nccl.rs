//! Collectives by NCCL. Each rank has a communicator over the whole mesh and one along each axis, and others for the streams
//! of stages, as in emitted programs.
//!
//! Ranks that share a GPU need NCCL 2.30.3 and the environment variable `NCCL_MULTI_RANK_GPU_ENABLE`. Calls for several
//! communicators are issued as one group.
//!
//! No call blocks: communicators are initialized, split, used and finalized in the background, and polled with a timeout.
//! So the error names a rank that does not join, and the other ranks end.

use std::cell::RefCell;
use std::time::Duration;

use ithaca_device::Members;
use ithaca_ir::entity::Entity;
use ithaca_ir::schedule::{Schedule, Stream as Queue};
use ithaca_ir::{DType, Rank};
use nccl_rs::{
    Collective as Call, Communicator, DataType, DevicePointer, Library, Split, State, Status, Stream,
    UniqueId,
};

use super::exchange::{Block, Collective, CollectiveFailure, Collectives, End, Even, Exchange};
use crate::cuda::arguments::Address;
use crate::cuda::deadline::Deadline;
use crate::cuda::device::Device;
use crate::cuda::error::{CudaError, Part, Unavailable};
use crate::tensor::index;

/// The environment variable that lets several ranks share a GPU.
const SHARED_GPU_VARIABLE: &str = "NCCL_MULTI_RANK_GPU_ENABLE";

/// The first version of NCCL that lets ranks share a GPU.
const SHARED_GPU_VERSION: (u32, u32, u32) = (2, 30, 3);

/// The time limit for finalizing communicators.
const FINALIZE_TIMEOUT: Duration = Duration::from_secs(5);

/// The communicators of one rank.
struct Member {
    world: Communicator,
    /// Along each axis, then those of other streams, as [`Nccl::own`] lists them.
    parts: Vec<Communicator>,
}

impl Member {
    fn communicators(&self) -> impl Iterator<Item = &Communicator> {
        self.parts.iter().chain([&self.world])
    }
}

/// Collectives by NCCL.
pub struct Nccl<'d> {
    library: Library,
    /// The ranks of this process.
    ranks: Vec<Rank>,
    /// The communicators of each rank; empty after an abort.
    members: RefCell<Vec<Member>>,
    n_axes: usize,
    /// The communicators of streams other than the communication stream.
    own: Vec<ithaca_device::Communicator>,
    devices: Vec<&'d dyn Device>,
    timeout: Option<Duration>,
}

impl<'d> Nccl<'d> {
    /// Opens NCCL and creates communicators for the ranks of a schedule; `devices` has the device of each rank. Waits between
    /// ranks end after `timeout`.
    ///
    /// # Errors
    /// [`Unavailable`] without NCCL, or with ranks that may not share a GPU; as [`join`](Self::join).
    pub fn open(
        schedule: &Schedule,
        devices: Vec<&'d dyn Device>,
        timeout: Option<Duration>,
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
        Self::join(library, schedule, devices, timeout)
    }

    /// Creates communicators with an opened library.
    ///
    /// # Errors
    /// [`CudaError::NotJoined`] for a rank that does not join a communicator; NCCL's.
    pub fn join(
        library: Library,
        schedule: &Schedule,
        devices: Vec<&'d dyn Device>,
        timeout: Option<Duration>,
    ) -> Result<Self, CudaError> {
        let id = library.unique_id()?;
        let ranks = schedule.space.mesh.iter_ranks().collect();
        Self::join_as(library, (schedule, &id), ranks, devices, timeout)
    }

    /// Creates the id by which ranks of different processes join; one process creates it.
    ///
    /// # Errors
    /// [`Unavailable`] without NCCL; NCCL's.
    pub fn new_id() -> Result<Vec<u8>, CudaError> {
        Ok(Library::open()?.unique_id()?.bytes().to_vec())
    }

    /// Creates communicators for one rank; its peers are processes with the same id.
    ///
    /// # Errors
    /// [`Unavailable`] without NCCL; as [`join`](Self::join).
    pub fn open_rank(
        schedule: &Schedule,
        (rank, device): (Rank, &'d dyn Device),
        id: &[u8],
        timeout: Option<Duration>,
    ) -> Result<Self, CudaError> {
        let malformed = |_| CudaError::Unsupported(format!("an id of {} bytes", id.len()));
        let id = UniqueId::from_bytes(id.try_into().map_err(malformed)?);
        Self::join_as(Library::open()?, (schedule, &id), vec![rank], vec![device], timeout)
    }

    /// Creates the communicators of the ranks of this process.
    fn join_as(
        library: Library,
        (schedule, id): (&Schedule, &UniqueId),
        ranks: Vec<Rank>,
        devices: Vec<&'d dyn Device>,
        timeout: Option<Duration>,
    ) -> Result<Self, CudaError> {
        let mesh = &schedule.space.mesh;
        let own = ithaca_device::Communicator::extra_communicators(schedule);
        let n_ranks = index(mesh.ranks());
        let mut worlds = Vec::with_capacity(ranks.len());
        for (&rank, device) in ranks.iter().zip(&devices) {
            device.make_current()?;
            let world = library.init_rank(n_ranks, id, index(rank.0));
            worlds.push(world.map_err(not_joined(rank, ALL_RANKS))?);
        }
        ready(ranks.iter().copied().zip(&worlds), ALL_RANKS, timeout)?;
        let mut parts_of: Vec<Vec<Communicator>> = ranks.iter().map(|_| Vec::new()).collect();
        let along = mesh.axes.ids().map(|axis| (Members::Along(axis.into()), String::new()));
        let of_stream = |c: &ithaca_device::Communicator| (c.members, format!(" of `{}`", c.stream));
        for (members, of) in along.chain(own.iter().map(of_stream)) {
            let name = match members {
                Members::World => format!("the communicator of all ranks{of}"),
                Members::Along(axes) => {
                    let names: Vec<&str> = axes.iter().map(|&axis| mesh.axes[axis].name.as_str()).collect();
                    format!("the communicators along `{}`{of}", names.join("+"))
                }
            };
            let mut splits: Vec<Split<'_>> = Vec::with_capacity(ranks.len());
            for ((&rank, device), world) in ranks.iter().zip(&devices).zip(&worlds) {
                device.make_current()?;
                let color = members.of_rank(mesh, rank).first().map_or(0, |first| index(first.0));
                let key = index(members.number(mesh, rank));
                let size = index(members.count(mesh));
                splits.push(world.begin_split(color, key, size).map_err(not_joined(rank, &name))?);
            }
            ready(ranks.iter().copied().zip(&worlds), &name, timeout)?;
            let mut parts = Vec::with_capacity(ranks.len());
            for (&rank, split) in ranks.iter().zip(splits) {
                parts.push((rank, split.part().map_err(not_joined(rank, &name))?));
            }
            ready(parts.iter().map(|(rank, part)| (*rank, part)), &name, timeout)?;
            for ((_, part), parts_of) in parts.into_iter().zip(&mut parts_of) {
                parts_of.push(part);
            }
        }
        let members =
            worlds.into_iter().zip(parts_of).map(|(world, parts)| Member { world, parts }).collect();
        let n_axes = mesh.axes.len();
        Ok(Self { library, ranks, members: RefCell::new(members), n_axes, own, devices, timeout })
    }

    /// Issues one rank's end, within a group.
    ///
    /// # Safety
    /// As [`Collectives::exchange`].
    unsafe fn issue(&self, members: &[Member], exchange: &Exchange, end: &End) -> Result<(), CudaError> {
        let (dtype, comm) = (data_type(exchange.dtype), self.used(members, exchange, end)?);
        let device = self.ranks.iter().zip(&self.devices).find(|(rank, _)| **rank == end.rank);
        device.map_or(Ok(()), |(_, device)| device.make_current())?;
        let stream = Stream(end.stream.0);
        let call = |which: Call, from: Address, to: Address, n: u64| {
            let (from, to) = (DevicePointer(from.number()), DevicePointer(to.number()));
            // SAFETY: the caller guarantees the memory and the streams.
            unsafe { comm.collective(which, from, to, count(n), dtype, stream) }
        };
        match &end.collective {
            &Collective::Even { kind, from, to, count } => {
                let which = match kind {
                    Even::AllReduce => Call::AllReduce,
                    Even::AllGather => Call::AllGather,
                    Even::ReduceScatter => Call::ReduceScatter,
                    Even::AllToAll => Call::AllToAll,
                };
                call(which, from, to, count)?;
            }
            Collective::Reduce { blocks, to } => {
                for &Block { peer, at, count } in blocks {
                    call(Call::Reduce { root: index(peer) }, at, *to, count)?;
                }
            }
            Collective::Filled { .. } => {
                return Err(CudaError::Unsupported("filled rows without their counts".to_owned()));
            }
            Collective::SendReceive { sends, receives } => {
                for &Block { peer, at, count } in sends {
                    call(Call::Send { peer: index(peer) }, at, at, count)?;
                }
                for &Block { peer, at, count } in receives {
                    call(Call::Receive { peer: index(peer) }, at, at, count)?;
                }
            }
        }
        Ok(())
    }

    /// The communicator of an end.
    fn used<'m>(
        &self,
        members: &'m [Member],
        exchange: &Exchange,
        end: &End,
    ) -> Result<&'m Communicator, CudaError> {
        let missing = || {
            CudaError::Unsupported(format!(
                "a collective of rank {}, which is not in this process",
                end.rank.0
            ))
        };
        let place = self.ranks.iter().position(|&rank| rank == end.rank);
        let member = place.and_then(|place| members.get(place)).ok_or_else(missing)?;
        let used = exchange.communicator;
        let part = match (used.members, used.stream) {
            (Members::World, Queue::Comm) => return Ok(&member.world),
            (Members::Along(axes), Queue::Comm) if axes.len() == 1 => Some(axes[0].index()),
            _ => self.own.iter().position(|own| *own == used).map(|own| self.n_axes + own),
        };
        part.and_then(|part| member.parts.get(part)).ok_or_else(missing)
    }
}

impl Collectives for Nccl<'_> {
    unsafe fn exchange(&self, exchange: &Exchange) -> Result<(), CollectiveFailure> {
        let members = self.members.borrow();
        let mut failure = None;
        let grouped = self.library.group(|| {
            for end in &exchange.ends {
                // SAFETY: the caller guarantees the memory.
                if let Err(error) = unsafe { self.issue(&members, exchange, end) } {
                    failure = Some(end.failure(error));
                    break;
                }
            }
            Ok(())
        });
        if let Some(failure) = failure {
            return Err(failure);
        }
        let Some(first) = exchange.ends.first() else { return Ok(()) };
        grouped.map_err(|error| first.failure(error.into()))?;
        // The event after the collective may be recorded only after NCCL has issued its work in the background.
        let of_end = |end: &End| Some((end.rank, self.used(&members, exchange, end).ok()?));
        settled(exchange.ends.iter().filter_map(of_end).collect(), self.timeout)
    }

    fn check(&self) -> Result<(), CollectiveFailure> {
        let members = self.members.borrow();
        let all = self.ranks.iter().copied().zip(members.iter());
        // After a failure most communicators report a remote error; the original error is preferred.
        let mut found = None;
        for (rank, communicator) in all.flat_map(|(rank, m)| m.communicators().map(move |c| (rank, c))) {
            let error = match communicator.state() {
                Ok(State::Ready | State::InProgress) => continue,
                Ok(State::Failed(Status::REMOTE_ERROR)) if found.is_some() => continue,
                Ok(State::Failed(status)) => nccl_rs::Error::background(status).into(),
                Err(error) => error.into(),
            };
            let is_remote = matches!(
                &error,
                CudaError::Nccl(nccl_rs::Error::Failed { status: Status::REMOTE_ERROR, .. })
            );
            found = Some(CollectiveFailure { rank, error });
            if !is_remote {
                break;
            }
        }
        found.map_or(Ok(()), Err)
    }

    fn abort(&self) {
        for Member { world, parts } in self.members.take() {
            // The run has failed already; a second failure is not reported.
            parts.into_iter().chain([world]).for_each(|communicator| drop(communicator.abort()));
        }
    }
}

impl Drop for Nccl<'_> {
    /// Finalizes all ranks together, because each waits for the others. A communicator that does not end is aborted.
    fn drop(&mut self) {
        let mut members = self.members.take();
        for (i, member) in members.iter_mut().enumerate() {
            if self.devices[i].make_current().is_err() {
                return;
            }
            // Without `ncclCommFinalize` a communicator ends when it is dropped.
            for part in &mut member.parts {
                drop(part.finalize());
            }
        }
        let parts = members.iter().flat_map(|m| &m.parts).map(|part| (Rank(0), part));
        drop(settled(parts.collect(), Some(FINALIZE_TIMEOUT)));
        members.iter_mut().for_each(|member| drop(member.world.finalize()));
        let worlds = members.iter().map(|member| (Rank(0), &member.world)).collect();
        drop(settled(worlds, Some(FINALIZE_TIMEOUT)));
    }
}

/// The name of the communicator of the whole mesh in messages.
const ALL_RANKS: &str = "the communicator of all ranks";

fn not_joined<'w, E: Into<CudaError>>(
    rank: Rank,
    communicator: &'w str,
) -> impl Fn(E) -> CudaError + use<'w, E> {
    move |error| CudaError::NotJoined {
        rank: rank.0,
        communicator: communicator.to_owned(),
        cause: Box::new(error.into()),
    }
}

/// Waits until new communicators are ready.
fn ready<'c>(
    communicators: impl Iterator<Item = (Rank, &'c Communicator)>,
    communicator: &str,
    timeout: Option<Duration>,
) -> Result<(), CudaError> {
    settled(communicators.collect(), timeout)
        .map_err(|CollectiveFailure { rank, error }| not_joined(rank, communicator)(error))
}

/// Waits until the communicators have no operation in progress.
///
/// # Errors
/// [`CudaError::Timeout`] after `timeout` without progress; the failure of a communicator.
fn settled(
    mut waiting: Vec<(Rank, &Communicator)>,
    timeout: Option<Duration>,
) -> Result<(), CollectiveFailure> {
    let mut deadline = Deadline::new(timeout);
    loop {
        let before = waiting.len();
        let mut left = Vec::with_capacity(before);
        for (rank, communicator) in waiting {
            match communicator.state().map_err(|error| CollectiveFailure { rank, error: error.into() })? {
                State::Ready => {}
                State::InProgress => left.push((rank, communicator)),
                State::Failed(status) => {
                    let error = nccl_rs::Error::background(status).into();
                    return Err(CollectiveFailure { rank, error });
                }
            }
        }
        let [(rank, _), others @ ..] = left.as_slice() else { return Ok(()) };
        if left.len() < before {
            deadline.extend();
        } else if let Err(waited) = deadline.pause() {
            let waiting = others.iter().map(|(other, _)| other.0).collect();
            return Err(CollectiveFailure { rank: *rank, error: CudaError::Timeout { waited, waiting } });
        }
        waiting = left;
    }
}

/// Checks that the library lets ranks share a GPU.
fn allow_sharing(library: &Library) -> Result<(), CudaError> {
    let version = library.version()?;
    let mut why = Vec::new();
    let spelled = |(major, minor, patch): (u32, u32, u32)| format!("{major}.{minor}.{patch}");
    if version < SHARED_GPU_VERSION {
        let needed = spelled(SHARED_GPU_VERSION);
        why.push(format!("ranks that share a GPU need NCCL {needed}, this is {}", spelled(version)));
    }
    if std::env::var_os(SHARED_GPU_VARIABLE).is_none_or(|value| value != "1") {
        why.push(format!("ranks that share a GPU need {SHARED_GPU_VARIABLE}=1"));
    }
    if why.is_empty() { Ok(()) } else { Err(Unavailable { part: Part::Nccl, why }.into()) }
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
        DType::F8E4M3 | DType::Bool => DataType::I8,
    }
}
