//! What runs the schedule: this machine's processor, or its GPUs.

use ithaca_ir::schedule::Schedule;
use ithaca_kernels::cpu::{self, Execution};
use ithaca_kernels::cuda::{self, By, Clock, Issue, Machine};
use ithaca_kernels::store::TensorSource;

use crate::cli::{CollectivesArg, DeviceArg, RunArgs};
use crate::error::{Failure, Result, unavailable};

/// A device that was asked for.
pub(super) enum Device {
    /// This machine's processor.
    Cpu,
    /// Its GPUs, and how the schedule runs there.
    Cuda(Box<Machine>, cuda::Options),
}

impl Device {
    /// Opens what was asked for.
    ///
    /// # Errors
    /// `C20` for each part of CUDA that is missing; `C00` for options that do not go together.
    pub(super) fn open(schedule: &Schedule, args: &RunArgs) -> Result<Self> {
        match args.device {
            DeviceArg::Cpu if args.graph => Err(Failure::usage("`--graph` goes with `--device cuda`")),
            DeviceArg::Cpu => Ok(Device::Cpu),
            DeviceArg::Cuda if args.graph && (args.timings || args.trace.is_some()) => Err(Failure::usage(
                "tasks of a graph are not timed: leave `--graph`, or `--timings` and `--trace`, out",
            )),
            DeviceArg::Cuda if args.timings && args.trace.is_some() => Err(Failure::usage(
                "`--timings` runs one task at a time on a GPU, and `--trace` all as they come: ask for one of them",
            )),
            DeviceArg::Cuda => {
                let only_here = [
                    ("--launch", args.launch),
                    ("--fault", args.fault.is_some()),
                    ("--look-for-nan", args.look_for_nan),
                ];
                if let Some((flag, _)) = only_here.into_iter().find(|(_, given)| *given) {
                    return Err(Failure::usage(format!("`{flag}` goes with `--device cpu`")));
                }
                let missing = cuda::available::missing();
                if !missing.is_empty() {
                    return Err(unavailable(&missing).into());
                }
                let collectives = match args.collectives.unwrap_or(CollectivesArg::InProcess) {
                    CollectivesArg::InProcess => By::InProcess,
                    CollectivesArg::Nccl => By::Nccl,
                };
                let machine = Machine::open(schedule, collectives)?;
                let clock = match (args.timings, &args.trace) {
                    (true, _) => Clock::EachTask,
                    (false, Some(_)) => Clock::Streams,
                    (false, None) => Clock::Off,
                };
                let issue = if args.graph { Issue::Graph } else { Issue::Tasks };
                Ok(Device::Cuda(Box::new(machine), cuda::Options { clock, issue }))
            }
        }
    }

    /// Runs a step; `options` are those of this machine's processor.
    ///
    /// # Errors
    /// What the runtime refuses, or fails at.
    pub(super) fn execute(
        &self,
        schedule: &Schedule,
        weights: &dyn TensorSource,
        inputs: &dyn TensorSource,
        options: &cpu::Options,
    ) -> Result<Execution> {
        Ok(match self {
            Device::Cpu => cpu::execute(schedule, weights, inputs, options)?,
            Device::Cuda(machine, how) => machine.execute(schedule, weights, inputs, how)?,
        })
    }
}
