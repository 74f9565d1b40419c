//! The device that runs the schedule: the processor of this machine, or its GPUs.

use ithaca_ir::Diagnostic;
use ithaca_ir::schedule::Schedule;
use ithaca_kernels::cpu::{self, Execution, LookForNan};
use ithaca_kernels::cuda::collectives::Nccl;
use ithaca_kernels::cuda::{self, Backend, Clock, Issue, Machine};
use ithaca_kernels::launch::{Agreement, NextStep, Process, Step};
use ithaca_kernels::store::TensorSource;

use crate::cli::{CollectivesArg, DeviceArg, RunArgs, StorageArg};
use crate::error::{Failure, Result, unavailable};

/// The requested device.
pub(super) enum Device {
    /// The processor.
    Cpu,
    /// GPUs, and the options of the run there.
    Cuda(Box<Machine>, cuda::Options),
}

impl Device {
    /// Opens the requested device, for all ranks or for the rank of this process.
    ///
    /// # Errors
    /// `C20` for each part of CUDA that is missing; `C00` for options that do not go together.
    pub(super) fn open(schedule: &Schedule, args: &RunArgs, process: Option<&Process>) -> Result<Self> {
        match args.device {
            DeviceArg::Cpu if args.graph => Err(Failure::usage("`--graph` goes with `--device cuda`")),
            DeviceArg::Cpu => Ok(Device::Cpu),
            DeviceArg::Cuda if args.graph && (args.timings || args.trace.is_some()) => Err(Failure::usage(
                "`--graph` excludes `--timings` and `--trace`: the tasks of a CUDA graph are not timed",
            )),
            DeviceArg::Cuda if process.is_some() && args.collectives == Some(CollectivesArg::InProcess) => {
                Err(Failure::usage(
                    "ranks in processes of their own communicate by NCCL: leave `--collectives` out",
                ))
            }
            DeviceArg::Cuda if args.timings && args.trace.is_some() => Err(Failure::usage(
                "`--timings` and `--trace` exclude each other on a GPU: the first waits for each task, the second for none",
            )),
            DeviceArg::Cuda => {
                if args.storage == Some(StorageArg::Wide) {
                    let message =
                        "`--storage wide` goes with `--device cpu`; a GPU stores every tensor in its type";
                    return Err(Diagnostic::new("C00", message)
                        .help("omit it, or use `--storage typed`")
                        .into());
                }
                let missing = cuda::available::missing();
                if !missing.is_empty() {
                    return Err(unavailable(&missing).into());
                }
                let collectives = match args.collectives.unwrap_or(CollectivesArg::InProcess) {
                    CollectivesArg::InProcess => Backend::InProcess,
                    CollectivesArg::Nccl => Backend::Nccl,
                };
                let clock = match (args.timings, &args.trace) {
                    (true, _) => Clock::EachTask,
                    (false, Some(_)) => Clock::Streams,
                    (false, None) => Clock::Off,
                };
                let issue = if args.graph { Issue::Graph } else { Issue::Tasks };
                let how =
                    cuda::Options { clock, issue, look_for_nan: look_for_nan(args), ..Default::default() };
                let machine = match process {
                    None => Machine::open(schedule, collectives, &how)?,
                    Some(process) => Machine::open_rank(schedule, process.local_rank(), &how)?,
                };
                Ok(Device::Cuda(Box::new(machine), how))
            }
        }
    }

    /// Runs a step of one rank, whose others are in processes of their own.
    ///
    /// # Errors
    /// What the runtime refuses, or fails at.
    pub(super) fn step(
        &self,
        agreed: &Agreement<'_>,
        sources: (&dyn TensorSource, &dyn TensorSource),
        options: &cpu::Options,
        next: NextStep,
    ) -> Result<Step> {
        Ok(match self {
            Device::Cpu => agreed.step(sources.0, sources.1, options, next)?,
            Device::Cuda(machine, how) => {
                let cpu::Options { timeout, fault, .. } = options.clone();
                let how = cuda::Options { timeout, fault, ..how.clone() };
                let process = agreed.process();
                let id = process.shared(|| Ok(Nccl::new_id()?))?;
                agreed.step_by(sources.0, next, |job, rank| {
                    let rank = (rank, id.as_slice());
                    machine.execute_rank(job, rank, sources, &how, &|| process.has_failed())
                })?
            }
        })
    }

    /// Runs a step; `options` are those of this machine's processor, of which GPUs take how long ranks wait for each other
    /// and what is to go wrong.
    ///
    /// # Errors
    /// The errors of the runtime.
    pub(super) fn execute(
        &self,
        schedule: &Schedule,
        weights: &dyn TensorSource,
        inputs: &dyn TensorSource,
        options: &cpu::Options,
    ) -> Result<Execution> {
        Ok(match self {
            Device::Cpu => cpu::execute(schedule, weights, inputs, options)?,
            Device::Cuda(machine, how) => {
                let cpu::Options { timeout, fault, .. } = options.clone();
                machine.execute(
                    schedule,
                    weights,
                    inputs,
                    &cuda::Options { timeout, fault, ..how.clone() },
                )?
            }
        })
    }
}

/// The tensors in which a run looks for NaN.
pub(super) fn look_for_nan(args: &RunArgs) -> LookForNan {
    if args.look_for_nan { LookForNan::Writes } else { LookForNan::Off }
}
