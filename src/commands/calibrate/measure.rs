//! Measuring this machine: the runtime runs the probes, and each task is a point.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use ithaca_ir::{DType, Span as Place};
use ithaca_kernels::cpu::threads::{Threads, WORTH_A_THREAD};
use ithaca_kernels::cpu::{self, Trace};
use ithaca_kernels::cuda::{self, Backend, Clock, Machine};
use ithaca_kernels::store::RandomTensors;
use ithaca_passes::calibrate::{self, Cores, Group, Point, Work};
use ithaca_passes::cluster::Cluster;
use ithaca_passes::import::Mode;

use super::probes::{self, CHAINS, CPU_SIZES, CUDA_SIZES, CUDA_WIDE, Family, Probe, Sizes};
use crate::cli::DeviceArg;
use crate::error::{Result, unavailable};

/// A probe ends after so many runs that took longer than this together. A long one has each kernel several times in a run.
const RUNS: [(usize, Duration); 2] = [(4, Duration::from_millis(300)), (2, Duration::from_secs(4))];

/// Sizes of collectives, bytes.
const BYTES: [u64; 4] = [1 << 14, 1 << 18, 1 << 21, 1 << 23];

/// A device that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Device {
    Cpu,
    Cuda,
}

/// The cores of this machine, and the profile that its measurements begin with.
pub(super) fn cores() -> Cores {
    Cores { cores: Threads::beside(1).count() as u64, flops: WORTH_A_THREAD as f64 }
}

/// The points of this machine's processor or GPU.
///
/// # Errors
/// `C20` for each part of CUDA that is missing; what the runtime fails at.
pub(super) fn measure(
    device: DeviceArg,
    base: &Cluster,
    progress: &mut dyn FnMut(&str),
) -> Result<Vec<Point>> {
    match device {
        DeviceArg::Cpu => {
            let cores = cores().cores;
            // As many ranks as cores, so that each has one.
            let mut points = steps(Device::Cpu, &CPU_SIZES, (cores, DType::F32), base, progress)?;
            let ranks = (1..).map(|i| 1u64 << i).take_while(|&ranks| ranks <= cores.max(8));
            for ranks in ranks {
                for chain in CHAINS {
                    for bytes in BYTES {
                        progress(&format!("measuring {chain:?} of {bytes} bytes on {ranks} ranks"));
                        points.extend(collectives(&probes::chain(chain, ranks, bytes, base)?)?);
                    }
                }
            }
            Ok(points)
        }
        DeviceArg::Cuda => {
            let missing = cuda::available::missing();
            if !missing.is_empty() {
                return Err(unavailable(&missing).into());
            }
            // Models are run in bf16 on GPUs; products in f32 are other kernels, which would share one efficiency with these.
            let on = (1, DType::BF16);
            let mut points = steps(Device::Cuda, &CUDA_SIZES, on, base, progress)?;
            points.extend(step(Device::Cuda, (Family::Llama, CUDA_WIDE), Mode::Prefill, on, base, progress)?);
            Ok(points)
        }
    }
}

/// The kernels of steps of transformers of these sizes.
fn steps(
    device: Device,
    sizes: &[Sizes],
    (ranks, dtype): (u64, DType),
    base: &Cluster,
    progress: &mut dyn FnMut(&str),
) -> Result<Vec<Point>> {
    let mut points = Vec::new();
    for &sizes in sizes {
        for (family, mode) in [
            (Family::Llama, Mode::Prefill),
            (Family::Llama, Mode::Train),
            (Family::Gpt2, Mode::Prefill),
            (Family::Gpt2, Mode::Train),
        ] {
            points.extend(step(device, (family, sizes), mode, (ranks, dtype), base, progress)?);
        }
    }
    Ok(points)
}

/// The kernels of a step of a transformer.
fn step(
    device: Device,
    of: (Family, Sizes),
    mode: Mode,
    on: (u64, DType),
    base: &Cluster,
    progress: &mut dyn FnMut(&str),
) -> Result<Vec<Point>> {
    progress(&format!("measuring kernels of {:?}, {}, {:?}", of.0, mode.name(), of.1));
    kernels(device, &probes::step(of, mode, on, base)?)
}

/// Each kernel and copy of a schedule with the lower quartile of its processor times on all ranks, in all layers and runs.
fn kernels(device: Device, probe: &Probe) -> Result<Vec<Point>> {
    let schedule = &probe.schedule;
    let mut times: BTreeMap<(usize, usize), Vec<f64>> = BTreeMap::new();
    let frame = |name: &str| schedule.frames.values().position(|frame| frame.name == name);
    repeat(device, probe, |execution| {
        for (span, &busy) in execution.spans.iter().zip(&execution.busy) {
            if let Some(frame) = frame(&span.frame) {
                times.entry((frame, span.task)).or_default().push(busy);
            }
        }
    })?;
    let source = source(device);
    let point = |((frame, task), mut times): ((usize, usize), Vec<f64>)| {
        let (id, _) = schedule.frames.iter().nth(frame)?;
        let work = calibrate::of_task(schedule, id, task).filter(|work| !work.is_collective())?;
        Some(Point { work, seconds: quartile(&mut times), source: source.clone(), span: Place::default() })
    };
    Ok(times.into_iter().filter_map(point).collect())
}

/// Each kind of collective of a chain: the processor time of its ranks over the cores that they share, as the lower quartile
/// of the runs.
fn collectives(probe: &Probe) -> Result<Vec<Point>> {
    let schedule = &probe.schedule;
    let Some(main) = schedule.main() else { return Ok(Vec::new()) };
    let ranks = schedule.space.mesh.ranks();
    let shared = ranks.min(cores().cores) as f64;
    let mut times: Vec<(Group, Vec<f64>)> = Vec::new();
    repeat(Device::Cpu, probe, |execution| {
        let mut sums: Vec<(Group, f64, f64)> = Vec::new();
        for (span, &busy) in execution.spans.iter().zip(&execution.busy) {
            let Some(Work::Collective(group)) = calibrate::of_task(schedule, main, span.task) else {
                continue;
            };
            match sums.iter_mut().find(|sum| sum.0 == group) {
                Some(sum) => (sum.1, sum.2) = (sum.1 + busy, sum.2 + 1.0),
                None => sums.push((group, busy, 1.0)),
            }
        }
        for (group, sum, n) in sums {
            match times.iter_mut().find(|(known, _)| *known == group) {
                Some((_, times)) => times.push(sum / n * ranks as f64 / shared),
                None => times.push((group, vec![sum / n * ranks as f64 / shared])),
            }
        }
    })?;
    let point = |(group, mut times): (Group, Vec<f64>)| Point {
        work: Work::Collective(group),
        seconds: quartile(&mut times).max(1e-9),
        source: source(Device::Cpu),
        span: Place::default(),
    };
    Ok(times.into_iter().map(point).collect())
}

/// Runs a probe several times, and gives every run but the first to `take`.
fn repeat(device: Device, probe: &Probe, mut take: impl FnMut(&cpu::Execution)) -> Result<()> {
    let Probe { module, schedule } = probe;
    let tensors = RandomTensors::of_module(module, 0);
    let machine = match device {
        Device::Cpu => None,
        Device::Cuda => {
            let options = cuda::Options { clock: Clock::Streams, ..cuda::Options::default() };
            Some((Machine::open(schedule, Backend::InProcess, &options)?, options))
        }
    };
    let begun = Instant::now();
    for run in 0.. {
        let execution = match &machine {
            None => {
                let options = cpu::Options { trace: Trace::Spans, ..cpu::Options::default() };
                cpu::execute(schedule, &tensors, &tensors, &options)?
            }
            Some((machine, options)) => machine.execute(schedule, &tensors, &tensors, options)?,
        };
        // Memory is touched for the first time in the first run.
        if run > 0 {
            take(&execution);
        }
        if RUNS.iter().any(|&(runs, long)| run >= runs && begun.elapsed() > long) {
            break;
        }
    }
    Ok(())
}

/// The number that a quarter of the others are below.
fn quartile(numbers: &mut [f64]) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 4).copied().unwrap_or_default()
}

fn source(device: Device) -> String {
    match device {
        Device::Cpu => format!("the runtime on this machine, {} cores", cores().cores),
        Device::Cuda => "the runtime on a GPU of this machine".to_owned(),
    }
}
