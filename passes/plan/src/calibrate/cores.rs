//! A profile of a machine whose devices are threads that share its cores.

use ithaca_ir::Diagnostic;

use super::fit::four_digits;
use super::point::{Point, Work};
use crate::cluster::{Cluster, SharedCores, Sourced};

/// The cores of a machine, and FLOPs for each thread of a product or an attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cores {
    /// The cores.
    pub cores: u64,
    /// FLOPs for each of several threads of a kernel.
    pub flops: f64,
}

/// `base` with shared cores, whose peaks are the fastest measured kernels, so that parts of peaks are at most one.
///
/// # Errors
/// `M24` where no product or no copy was measured.
pub fn on_cores(base: &Cluster, cores: Cores, points: &[Point]) -> Result<Cluster, Diagnostic> {
    let mut cluster = base.clone();
    let a = &mut cluster.accelerator;
    let rates = points.iter().filter_map(|point| match &point.work {
        Work::Kernel(kernel) => kernel.rate(base, point.seconds).map(|(rate, ..)| rate),
        Work::Stream { .. } | Work::Collective(_) => None,
    });
    let kernels = points.iter().filter(|point| matches!(point.work, Work::Kernel(_)));
    let (fastest, shortest) =
        (rates.fold(0.0, f64::max), kernels.map(|point| point.seconds).fold(f64::INFINITY, f64::min));
    if fastest == 0.0 || !shortest.is_finite() {
        return Err(Diagnostic::new("M24", "no product was measured"));
    }
    let measured =
        |value: f64, of: &str| Sourced { value: four_digits(value), source: format!("measured: {of}") };
    // Narrow types are stored as f32.
    let peak = measured(1.001 * fastest, "the fastest product or attention on one core");
    a.peak.f64 = Sourced { value: four_digits(peak.value / 2.0), source: "estimate: half of f32".to_owned() };
    (a.peak.bf16, a.peak.f16) = (peak.clone(), peak.clone());
    a.peak.f32 = peak;
    a.launch_seconds = measured(shortest, "the shortest task");
    a.shared_cores = Some(SharedCores {
        cores: Sourced { value: cores.cores, source: "cores of this machine".to_owned() },
        flops: Sourced {
            value: cores.flops,
            source: "the runtime: a kernel takes a thread for so many".to_owned(),
        },
    });
    Ok(cluster)
}
