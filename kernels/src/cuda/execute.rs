//! A schedule on devices: allocate, upload, issue, wait, download.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use ithaca_device::catalogue::c_type;
use ithaca_device::lower::{self, Checks};
use ithaca_device::{Collective, DeviceProgram, Record};
use ithaca_ir::schedule::Schedule;
use ithaca_ir::traffic::Traffic;
use ithaca_ir::{DType, Rank};

use super::collectives::{Collectives, InProcess, Nccl};
use super::device::Device;
use super::error::CudaError;
use super::gpu::Gpu;
use super::options::{By, Clock, Issue, Options};
use super::steps::Steps;
use super::{available, inputs, rank::Seat};
use crate::Outputs;
use crate::cpu::memory::SourcePlan;
use crate::cpu::{Execution, FaultKind, LookForNan, Timings, guarded};
use crate::error::RunError;
use crate::store::TensorSource;
use crate::tensor::index;
use crate::updates::{self, Update};

/// The GPUs of this machine, with the kernels of a schedule.
pub struct Machine {
    gpus: Vec<Gpu>,
    program: DeviceProgram,
    collectives: By,
}

impl Machine {
    /// Opens the GPUs that a schedule's ranks run on, and compiles its kernels.
    ///
    /// # Errors
    /// [`RunError::Cuda`] with what is missing where there is no GPU, NVRTC or cuBLASLt, and for operations without a
    /// kernel.
    pub fn open(schedule: &Schedule, collectives: By, options: &Options) -> Result<Self, RunError> {
        if let Some(missing) = available::missing().into_iter().next() {
            return Err(CudaError::from(missing).into());
        }
        let program = lowered(schedule, options)?;
        let kernels = kernels(&program);
        let n_gpus = match collectives {
            By::InProcess => 1,
            By::Nccl => available::gpus()?.min(index(schedule.space.mesh.ranks())),
        };
        let gpus: Vec<Gpu> = (0..n_gpus).map(Gpu::open).collect::<Result<_, _>>()?;
        gpus.iter().try_for_each(|gpu| gpu.load(&kernels))?;
        Ok(Self { gpus, program, collectives })
    }

    /// Executes the schedule that it was opened for, all ranks in this process.
    ///
    /// # Errors
    /// [`RunError::Cuda`] where NCCL is asked for and is missing, else as [`cpu::execute`](crate::cpu::execute).
    pub fn execute(
        &self,
        schedule: &Schedule,
        weights: &dyn TensorSource,
        inputs: &dyn TensorSource,
        options: &Options,
    ) -> Result<Execution, RunError> {
        let ranks = schedule.space.mesh.ranks();
        let of_rank: Vec<&Gpu> = (0..index(ranks)).map(|rank| &self.gpus[rank % self.gpus.len()]).collect();
        match self.collectives {
            By::InProcess => {
                let collectives = InProcess::new(&self.gpus[0], ranks)?;
                on((schedule, &self.program), &of_rank, &collectives, (weights, inputs), options)
            }
            By::Nccl => {
                let devices = of_rank.iter().map(|&gpu| gpu as &dyn Device).collect();
                let collectives = Nccl::open(&schedule.space, devices, options.timeout)?;
                on((schedule, &self.program), &of_rank, &collectives, (weights, inputs), options)
            }
        }
    }

    /// The names of its GPUs.
    pub fn names(&self) -> Vec<&str> {
        self.gpus.iter().map(Gpu::name).collect()
    }
}

/// The names of the kernels that a schedule launches, on any rank, when it runs as `options` say.
///
/// # Errors
/// [`RunError::Cuda`] for operations without a kernel, and for schedules that contradict themselves.
pub fn kernels_of(schedule: &Schedule, options: &Options) -> Result<BTreeSet<String>, RunError> {
    Ok(kernels(&lowered(schedule, options)?))
}

/// The device program of a schedule that runs as `options` say.
fn lowered(schedule: &Schedule, options: &Options) -> Result<DeviceProgram, CudaError> {
    let checks = match options.look_for_nan {
        LookForNan::Nowhere => Checks::None,
        LookForNan::InWhatIsWritten => Checks::OfWrittenBuffers,
    };
    Ok(ithaca_device::lower(schedule, lower::Options { checks })?)
}

/// The kernels of a program, those for sums over ranks of one device included.
fn kernels(program: &DeviceProgram) -> BTreeSet<String> {
    let summed = |record: &Record| -> Option<DType> {
        let Record::Transfer(transfer) = record else { return None };
        match transfer.collective {
            Collective::ReduceScatter { .. } | Collective::AllReduce { .. } | Collective::Reduce { .. } => {
                Some(transfer.dtype)
            }
            Collective::SendReceive { .. } | Collective::AllToAll { .. } | Collective::AllGather { .. } => {
                None
            }
        }
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
    let program = lowered(schedule, options)?;
    let plan = SourcePlan::of(schedule)?;
    let seats = seats((schedule, &program), &plan, |_| device)?;
    run((schedule, &program), &plan, collectives, seats, sources, options)
}

fn on(
    (schedule, program): (&Schedule, &DeviceProgram),
    of_rank: &[&Gpu],
    collectives: &dyn Collectives,
    sources: (&dyn TensorSource, &dyn TensorSource),
    options: &Options,
) -> Result<Execution, RunError> {
    let plan = SourcePlan::of(schedule)?;
    let seats = seats((schedule, program), &plan, |rank| of_rank[rank])?;
    run((schedule, program), &plan, collectives, seats, sources, options)
}

fn seats<'a>(
    (schedule, program): (&Schedule, &DeviceProgram),
    plan: &SourcePlan<'_>,
    device: impl Fn(usize) -> &'a dyn Device,
) -> Result<Vec<Seat<'a>>, RunError> {
    let main = schedule.main().ok_or_else(|| RunError::NoMain(schedule.name.clone()))?;
    if schedule.frames[main].n_arguments != 0 {
        return Err(RunError::invalid("`main` has arguments"));
    }
    let seat = |rank: Rank| Seat::new(device(index(rank.0)), program, plan, rank);
    schedule.space.mesh.iter_ranks().map(seat).collect()
}

fn run<'a>(
    (schedule, program): (&'a Schedule, &'a DeviceProgram),
    plan: &'a SourcePlan<'a>,
    collectives: &'a dyn Collectives,
    seats: Vec<Seat<'a>>,
    (weights, sources): (&dyn TensorSource, &dyn TensorSource),
    options: &Options,
) -> Result<Execution, RunError> {
    if let Some(fault) = &options.fault {
        fault.check(schedule)?;
        if (fault.kind, options.timeout) == (FaultKind::Hang, None) {
            return Err(RunError::invalid("a rank that hangs is waited for with a timeout only"));
        }
    }
    inputs::load(schedule, plan, &seats, weights, sources)?;
    let mut steps = Steps::new(schedule, program, plan, collectives, seats, options);
    let ended = guarded(|| steps_of(&mut steps, (weights, sources), options));
    let traffic = ended.map_err(|error| {
        steps.stop();
        steps.failed_here(error)
    })?;

    let mut outputs = Outputs::new();
    for output in &program.outputs {
        let local = |rank: Rank| Ok(Cow::Owned(steps.output(index(rank.0), output)?));
        let whole = crate::oracle::assemble(&schedule.space, &output.name, &output.ty, local)?;
        outputs.insert(output.name.clone(), whole);
    }
    let kept = kept(&steps, weights)?;
    let mut peaks = plan.held(index(schedule.space.mesh.ranks()));
    for (peak, seat) in peaks.iter_mut().zip(&steps.seats) {
        peak.arena = seat.arena;
    }
    let memory_bytes = steps.seats.iter().map(|seat| seat.bytes).sum();
    let timings: Timings = std::mem::take(&mut steps.timings);
    let spans = steps.moments.spans(schedule, &steps.seats)?;
    Ok(Execution { outputs, kept, traffic, peaks, timings, spans, memory_bytes })
}

/// Issues what was asked for and waits until it is done; gives what the first step sent.
fn steps_of(
    steps: &mut Steps<'_>,
    (weights, sources): (&dyn TensorSource, &dyn TensorSource),
    options: &Options,
) -> Result<Vec<Traffic>, RunError> {
    let (schedule, plan) = (steps.schedule, steps.plan);
    steps.issue()?;
    steps.wait()?;
    let traffic = steps.ledger.rows();
    // What the first step kept is put back, so that the second is the same again.
    match (options.issue, options.clock) {
        (Issue::Tasks, Clock::Off) => {}
        (Issue::Tasks, Clock::EachTask | Clock::Streams) => {
            // Times are those of a step that finds everything ready.
            inputs::load(schedule, plan, &steps.seats, weights, sources)?;
            steps.timings = Timings::default();
            steps.issue()?;
            steps.wait()?;
        }
        (Issue::Graph, _) => {
            inputs::load(schedule, plan, &steps.seats, weights, sources)?;
            steps.graph()?;
        }
    }
    Ok(traffic)
}

/// What ranks wrote, as files have it; `before` has what was there.
fn kept(steps: &Steps<'_>, before: &dyn TensorSource) -> Result<Outputs<f32>, RunError> {
    let mut parts: BTreeMap<String, Vec<Update<'_, f32>>> = BTreeMap::new();
    for (number, tensor) in steps.plan.tensors().iter().enumerate().filter(|(_, tensor)| tensor.is_written) {
        let held = (0..steps.seats.len())
            .map(|seat| steps.held(seat, number).map(Cow::Owned))
            .collect::<Result<_, _>>()?;
        let part = Update { binding: tensor.binding, ty: &tensor.ty, held };
        parts.entry(tensor.binding.stored_name(tensor.layer)).or_default().push(part);
    }
    let mut kept = Outputs::new();
    for (name, parts) in parts {
        let joined = updates::merge(&steps.schedule.space, &name, &parts, before)?;
        kept.extend(updates::unstack(&name, joined));
    }
    Ok(kept)
}
