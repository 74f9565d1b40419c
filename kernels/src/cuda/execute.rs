//! Executes a schedule on devices: allocate, upload, issue, wait, download.

use std::collections::BTreeSet;

use ithaca_device::catalogue::c_type;
use ithaca_device::lower::{self, Checks};
use ithaca_device::{Collective, DeviceProgram, Even, Record};
use ithaca_ir::schedule::Schedule;
use ithaca_ir::traffic::{Ledger, Traffic};
use ithaca_ir::{DType, Rank};

use super::collectives::{Collectives, InProcess, Launched, Nccl};
use super::device::Device;
use super::error::CudaError;
use super::gpu::Gpu;
use super::options::{Backend, Clock, Issue, Options};
use super::rank::{Exceeded, LocalRank};
use super::steps::Steps;
use super::{available, inputs};
use crate::cpu::{Execution, FaultKind, Job, LookForNan, RankResult, Timings, guarded};
use crate::error::RunError;
use crate::store::TensorSource;
use crate::tensor::index;

/// The GPUs of this machine, with the kernels of a schedule.
pub struct Machine {
    gpus: Vec<Gpu>,
    program: DeviceProgram,
    collectives: Backend,
}

impl Machine {
    /// Opens the GPUs that a schedule's ranks run on, and compiles its kernels.
    ///
    /// # Errors
    /// [`RunError::Cuda`] with [`Unavailable`](super::Unavailable) for a missing GPU, NVRTC or cuBLASLt, and for operations
    /// without a kernel.
    pub fn open(schedule: &Schedule, collectives: Backend, options: &Options) -> Result<Self, RunError> {
        if let Some(missing) = available::missing().into_iter().next() {
            return Err(CudaError::from(missing).into());
        }
        let program = lowered(schedule, options)?;
        let kernels = kernels(&program);
        let n_gpus = match collectives {
            Backend::InProcess => 1,
            Backend::Nccl => available::gpus()?.min(index(schedule.space.mesh.ranks())),
        };
        let gpus: Vec<Gpu> = (0..n_gpus).map(Gpu::open).collect::<Result<_, _>>()?;
        gpus.iter().try_for_each(|gpu| gpu.load(&kernels))?;
        Ok(Self { gpus, program, collectives })
    }

    /// Executes the schedule of [`open`](Self::open) with all ranks in this process.
    ///
    /// # Errors
    /// [`RunError::Cuda`] if NCCL is requested and missing, else as [`cpu::execute`](crate::cpu::execute).
    pub fn execute(
        &self,
        schedule: &Schedule,
        weights: &dyn TensorSource,
        inputs: &dyn TensorSource,
        options: &Options,
    ) -> Result<Execution, RunError> {
        let job = Job::of(schedule)?;
        let on_gpu = |rank: Rank| (rank, &self.gpus[index(rank.0) % self.gpus.len()] as &dyn Device);
        let ranks: Vec<(Rank, &dyn Device)> = schedule.space.mesh.iter_ranks().map(on_gpu).collect();
        let all = |collectives: &dyn Collectives| {
            let (results, bytes) =
                run((&job, &self.program), &ranks, collectives, (weights, inputs), options)?;
            job.assemble(&results, weights, bytes)
        };
        match self.collectives {
            Backend::InProcess => all(&InProcess::new(&self.gpus[0], schedule.space.mesh.ranks())?),
            Backend::Nccl => {
                let devices = ranks.iter().map(|(_, device)| *device).collect();
                all(&Nccl::open(schedule, devices, options.timeout)?)
            }
        }
    }

    /// Opens one GPU for one rank; its peers are other processes.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_rank(schedule: &Schedule, gpu: u64, options: &Options) -> Result<Self, RunError> {
        if let Some(missing) = available::missing().into_iter().next() {
            return Err(CudaError::from(missing).into());
        }
        let program = lowered(schedule, options)?;
        let gpu = Gpu::open(index(gpu) % available::gpus()?.max(1))?;
        gpu.load(&kernels(&program))?;
        Ok(Self { gpus: vec![gpu], program, collectives: Backend::Nccl })
    }

    /// Executes one rank on its GPU. The processes of the other ranks do the same with communicators of the same `id`.
    /// Returns the results and the bytes of memory. Ends early when `has_failed` reports that another process failed.
    ///
    /// # Errors
    /// As [`execute`](Self::execute).
    pub fn execute_rank(
        &self,
        job: &Job<'_>,
        (rank, id): (Rank, &[u8]),
        sources: (&dyn TensorSource, &dyn TensorSource),
        options: &Options,
        has_failed: &dyn Fn() -> bool,
    ) -> Result<(RankResult, u64), RunError> {
        let local = (rank, &self.gpus[0] as &dyn Device);
        let nccl = Nccl::open_rank(job.schedule(), local, id, options.timeout)?;
        let collectives = Launched { rank, nccl, has_failed };
        let (mut results, bytes) = run((job, &self.program), &[local], &collectives, sources, options)?;
        let result = results.pop().ok_or_else(|| RunError::invalid("a rank without results"))?;
        Ok((result, bytes))
    }

    /// The names of the GPUs.
    pub fn names(&self) -> Vec<&str> {
        self.gpus.iter().map(Gpu::name).collect()
    }
}

/// The names of the kernels that a schedule launches on any rank under `options`.
///
/// # Errors
/// [`RunError::Cuda`] for operations without a kernel, and for schedules that contradict themselves.
pub fn kernels_of(schedule: &Schedule, options: &Options) -> Result<BTreeSet<String>, RunError> {
    Ok(kernels(&lowered(schedule, options)?))
}

/// The device program of a schedule under `options`.
fn lowered(schedule: &Schedule, options: &Options) -> Result<DeviceProgram, CudaError> {
    let checks = match options.look_for_nan {
        LookForNan::Off => Checks::None,
        LookForNan::Writes => Checks::OfWrittenBuffers,
    };
    Ok(ithaca_device::lower(schedule, lower::Options { checks })?)
}

/// The kernels of a program, with those that sum over ranks of one device.
fn kernels(program: &DeviceProgram) -> BTreeSet<String> {
    let summed = |record: &Record| -> Option<DType> {
        let Record::Transfer(transfer) = record else { return None };
        let sums = match transfer.collective {
            Collective::Even { kind, .. } => matches!(kind, Even::ReduceScatter | Even::AllReduce),
            Collective::Reduce { .. } => true,
            Collective::SendReceive { .. } | Collective::Filled { .. } => false,
        };
        sums.then_some(transfer.dtype)
    };
    let sums = program.records().filter_map(summed).map(|dtype| format!("sum_members<{}>", c_type(dtype)));
    program.kernels().into_iter().chain(sums).collect()
}

/// Executes a schedule with all ranks on one device.
///
/// # Errors
/// As [`Machine::execute`].
pub fn execute_on(
    schedule: &Schedule,
    device: &dyn Device,
    collectives: &dyn Collectives,
    sources: (&dyn TensorSource, &dyn TensorSource),
    options: &Options,
) -> Result<Execution, RunError> {
    let (program, job) = (lowered(schedule, options)?, Job::of(schedule)?);
    let ranks: Vec<(Rank, &dyn Device)> =
        schedule.space.mesh.iter_ranks().map(|rank| (rank, device)).collect();
    let (results, bytes) = run((&job, &program), &ranks, collectives, sources, options)?;
    job.assemble(&results, sources.0, bytes)
}

/// Runs the ranks of this process, each on its device. Returns their results in order, and the bytes of their memory.
fn run(
    (job, program): (&Job<'_>, &DeviceProgram),
    ranks: &[(Rank, &dyn Device)],
    collectives: &dyn Collectives,
    (weights, inputs): (&dyn TensorSource, &dyn TensorSource),
    options: &Options,
) -> Result<(Vec<RankResult>, u64), RunError> {
    let (schedule, plan) = (job.schedule(), job.plan());
    if let Some(fault) = &options.fault {
        fault.check(schedule)?;
        if (fault.kind, options.timeout) == (FaultKind::Hang, None) {
            return Err(RunError::invalid("a fault that hangs a rank needs a timeout"));
        }
    }
    let locals: Vec<LocalRank<'_>> = ranks
        .iter()
        .map(|&(rank, device)| LocalRank::new(device, program, plan, rank))
        .collect::<Result<_, RunError>>()?;
    inputs::load(schedule, plan, &locals, weights, inputs)?;
    let mut steps = Steps::new(schedule, program, plan, collectives, locals, options);
    let result = guarded(|| execute_steps(&mut steps, (weights, inputs), options));
    let mut traffic = result.map_err(|error| {
        steps.stop();
        steps.failed_here(error)
    })?;

    for local in &steps.locals {
        match (local.overflow()?, schedule.bounded_deal()) {
            (Some(Exceeded::Cache { tokens, capacity }), _) => {
                return Err(RunError::CacheFull { tokens, capacity });
            }
            (Some(Exceeded::Page { token, sequence }), _) => {
                return Err(RunError::NoPage { token, sequence });
            }
            (Some(Exceeded::Expert(most)), Some(deal)) => {
                let what = deal.overflow(&schedule.space, most);
                return Err(RunError::Experts(format!("rank {}: {what}", local.rank.0)));
            }
            (Some(Exceeded::Expert(_)), None) | (None, _) => {}
        }
    }
    let mut results = Vec::with_capacity(ranks.len());
    for (number, local) in steps.locals.iter().enumerate() {
        let outputs = program.outputs.iter().map(|output| steps.output(number, output));
        let written = plan.tensors().iter().enumerate().filter(|(_, tensor)| tensor.is_written);
        results.push(RankResult {
            rank: local.rank,
            outputs: outputs.collect::<Result<_, _>>()?,
            written: written.map(|(tensor, _)| steps.held(number, tensor)).collect::<Result<_, _>>()?,
            arena_used: local.arena,
            // The timings are those of all ranks of the process together.
            timings: if number == 0 { steps.timings.clone() } else { Timings::default() },
            traffic: std::mem::take(&mut traffic[number]),
            spans: steps.timestamps.spans(schedule, &steps.locals, number)?,
        });
    }
    Ok((results, steps.locals.iter().map(|local| local.bytes).sum()))
}

/// Runs the steps that `options` request. Returns the traffic of each rank in the first step.
fn execute_steps(
    steps: &mut Steps<'_>,
    (weights, sources): (&dyn TensorSource, &dyn TensorSource),
    options: &Options,
) -> Result<Vec<Vec<Traffic>>, RunError> {
    let (schedule, plan) = (steps.schedule, steps.plan);
    steps.issue()?;
    steps.wait()?;
    let traffic = steps.ledgers.iter().map(Ledger::rows).collect();
    // The state is reloaded before a second step, so that both steps compute the same.
    match (options.issue, options.clock) {
        (Issue::Tasks, Clock::Off) => {}
        (Issue::Tasks, Clock::EachTask | Clock::Streams) => {
            // The second step is timed, after the first has warmed up the devices.
            inputs::load(schedule, plan, &steps.locals, weights, sources)?;
            steps.timings = Timings::default();
            steps.issue()?;
            steps.wait()?;
        }
        (Issue::Graph, _) => {
            inputs::load(schedule, plan, &steps.locals, weights, sources)?;
            steps.graph()?;
        }
    }
    Ok(traffic)
}
