//! Collectives by NCCL: a communicator for each rank over the whole mesh, and one along each axis, as emitted programs
//! have them.
//!
//! All ranks are in this process, on one GPU or on several. Ranks that share a GPU need NCCL 2.30.3 and the environment
//! variable `NCCL_MULTI_RANK_GPU_ENABLE`. What one thread issues for several communicators is a group.

use std::time::Duration;

use ithaca_ir::{DType, Rank, Space};
use nccl_rs::{Communicator, Config, DataType, DevicePointer, Library, Reduction, State, Stream, UniqueId};

use super::{Collectives, End, Exchange, Kind};
use crate::cuda::device::Device;
use crate::cuda::error::{CudaError, Part, Unavailable};
use crate::cuda::gpu::{Context, Gpu};

/// The environment variable by which NCCL allows several ranks on one GPU.
const SHARED_GPU_VARIABLE: &str = "NCCL_MULTI_RANK_GPU_ENABLE";

/// The first version that does.
const SHARED_GPU_VERSION: (u32, u32, u32) = (2, 30, 3);

/// How long ranks wait for each other when communicators are made.
const LONGEST: Duration = Duration::from_secs(120);

/// The communicators of one rank.
struct Member {
    world: Communicator,
    axes: Vec<Option<Communicator>>,
}

/// Collectives by NCCL.
pub struct Nccl<'d> {
    library: Library,
    members: Vec<Member>,
    gpus: Vec<&'d Gpu>,
}

impl<'d> Nccl<'d> {
    /// Communicators for the ranks of a mesh; `gpus` has that of each rank.
    ///
    /// # Errors
    /// [`Unavailable`] without NCCL, and where ranks share a GPU and it does not allow that; NCCL's.
    pub fn new(space: &Space, gpus: Vec<&'d Gpu>) -> Result<Self, CudaError> {
        let library = Library::open()?;
        let shared =
            gpus.iter().enumerate().any(|(i, gpu)| gpus[..i].iter().any(|&other| std::ptr::eq(other, *gpu)));
        if shared {
            allow_sharing(&library)?;
        }
        let id = library.unique_id()?;
        let ranks: Vec<(Rank, Context)> =
            space.mesh.iter_ranks().zip(gpus.iter().map(|gpu| gpu.context())).collect();
        // Ranks join from threads of their own, as each waits for all.
        let joined: Vec<Result<Member, CudaError>> = std::thread::scope(|scope| {
            let (library, n) = (&library, ranks.len());
            let join = |&(rank, context): &(Rank, Context)| {
                scope.spawn(move || {
                    // SAFETY: the GPUs live as long as this.
                    unsafe { context.make_current() }?;
                    join(library, space, (rank, n), &id)
                })
            };
            let threads: Vec<_> = ranks.iter().map(join).collect();
            let ended = |thread: std::thread::ScopedJoinHandle<'_, _>| {
                thread.join().unwrap_or_else(|_| {
                    Err(CudaError::Failed {
                        call: "NCCL",
                        detail: "the thread of a rank panicked".to_owned(),
                    })
                })
            };
            threads.into_iter().map(ended).collect()
        });
        Ok(Self { library, members: joined.into_iter().collect::<Result<_, _>>()?, gpus })
    }

    fn member(&self, rank: Rank) -> Result<(usize, &Member), CudaError> {
        let at = usize::try_from(rank.0).unwrap_or(usize::MAX);
        let lacking =
            || CudaError::Unsupported(format!("a collective of rank {}, which is not here", rank.0));
        self.members.get(at).map(|member| (at, member)).ok_or_else(lacking)
    }

    /// Along one axis its communicator, else the world; with the number of each member of the group.
    fn peers<'a>(
        &'a self,
        exchange: &Exchange,
        end: &End,
    ) -> Result<(&'a Communicator, Vec<usize>), CudaError> {
        let (_, member) = self.member(end.rank)?;
        use ithaca_ir::entity::Entity;
        let axis = match exchange.axes.as_slice() {
            [axis] => member.axes.get(axis.index()).and_then(Option::as_ref),
            _ => None,
        };
        Ok(match axis {
            Some(comm) => (comm, (0..end.group.len()).collect()),
            None => {
                let numbers = end.group.iter().map(|rank| usize::try_from(rank.0).unwrap_or(usize::MAX));
                (&member.world, numbers.collect())
            }
        })
    }

    /// Issues one rank's end, within a group.
    ///
    /// # Safety
    /// As [`Collectives::exchange`].
    unsafe fn issue(&self, exchange: &Exchange, end: &End) -> Result<(), CudaError> {
        let dtype = data_type(exchange.dtype);
        let (comm, numbers) = self.peers(exchange, end)?;
        let (at, _) = self.member(end.rank)?;
        self.gpus[at].make_current()?;
        let stream = Stream(end.stream.0);
        let (from, to) = (DevicePointer(end.from.number()), DevicePointer(end.to.number()));
        let whole_axis = numbers.len() == comm.ranks();
        let even = |counts: &[u64]| counts.iter().all(|&n| n == counts[0] && n > 0);
        // SAFETY: the caller vouches for the memory and the streams.
        unsafe {
            match exchange.kind {
                Kind::AllReduce if whole_axis => {
                    comm.all_reduce(from, to, count(end.mine), dtype, Reduction::Sum, stream)?;
                }
                Kind::Gather if whole_axis && even(&end.recv) => {
                    comm.all_gather(from, to, count(end.mine), dtype, stream)?;
                }
                Kind::ReduceScatter if whole_axis && even(&end.send) => {
                    comm.reduce_scatter(from, to, count(end.wanted), dtype, Reduction::Sum, stream)?;
                }
                Kind::Blocks
                    if whole_axis && even(&end.send) && even(&end.recv) && end.send[0] == end.recv[0] =>
                {
                    comm.all_to_all(from, to, count(end.send[0]), dtype, stream)?;
                }
                Kind::ReduceScatter if whole_axis => {
                    for (i, &n) in end.send.iter().enumerate().filter(|(_, n)| **n > 0) {
                        let block = from.offset(End::start(&end.send, i) * exchange.dtype.bytes());
                        comm.reduce(block, to, count(n), dtype, Reduction::Sum, i, stream)?;
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
                                self.gpus[at].copy(end.stream, from, to, n_recv * bytes)?;
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
    unsafe fn exchange(&self, exchange: &Exchange) -> Result<(), CudaError> {
        let mut failure = None;
        let grouped = self.library.group(|| {
            for end in &exchange.ends {
                // SAFETY: the caller vouches for the memory.
                if let Err(error) = unsafe { self.issue(exchange, end) } {
                    failure = Some(error);
                    break;
                }
            }
            Ok(())
        });
        match failure {
            Some(error) => Err(error),
            None => Ok(grouped?),
        }
    }

    fn check(&self) -> Result<(), CudaError> {
        for member in &self.members {
            let communicators = std::iter::once(&member.world).chain(member.axes.iter().flatten());
            for communicator in communicators {
                if let State::Failed(status) = communicator.state()? {
                    return Err(CudaError::Failed { call: "NCCL", detail: status.name().to_owned() });
                }
            }
        }
        Ok(())
    }
}

/// Joins the world and splits it along every axis.
fn join(
    library: &Library,
    space: &Space,
    (rank, ranks): (Rank, usize),
    id: &UniqueId,
) -> Result<Member, CudaError> {
    let number = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
    let world = library.init_rank(ranks, id, number(rank.0))?;
    world.wait_ready(LONGEST)?;
    let mut axes = Vec::new();
    for axis in space.mesh.axes.ids() {
        let color = space.mesh.group(rank, axis).first().map_or(0, |first| number(first.0));
        let key = number(space.mesh.coordinate(rank, axis));
        axes.push(world.split(Some(color), key, &Config::default(), LONGEST)?);
    }
    Ok(Member { world, axes })
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
