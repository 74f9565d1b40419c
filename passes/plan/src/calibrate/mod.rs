//! Profiles from measurements: points in, a cluster whose figures meet them out.
//!
//! A point is a piece of work with the seconds that it took: a kernel, or a collective of a group of devices. Points come from
//! the logs of nccl-tests (`nccl`), from tables of kernels (`table`), or from a run of this machine's runtime. Collectives
//! within one block of a level replace the curves of that level; the other figures are fitted by least squares of the
//! logarithms of time (`fit`), with the prices that planning uses, so that a profile means the same in both.
//!
//! Figures that no point concerns stay those of the base, with their sources.

mod cores;
mod figure;
mod fit;
mod kernel;
mod nccl;
mod point;
mod report;
mod table;
mod task;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use ithaca_ir::Diagnostic;

use crate::cluster::{Cluster, Collective, Curve, KernelCurve, Level, Measured, MeasuredKernels};
pub use cores::{Cores, on_cores};
use figure::Figure;
pub use kernel::{AttentionSizes, Direction, Kernel};
pub use nccl::parse as nccl_tests;
pub use point::{Group, Point, Work};
pub use report::{Row, report};
pub use table::parse as kernels;
pub use task::of_task;

/// A cluster whose figures meet measurements.
#[derive(Clone, Debug)]
pub struct Calibration {
    /// The cluster.
    pub cluster: Cluster,
    /// The mean error of each kind of work, before and after.
    pub rows: Vec<Row>,
}

/// A profile called `name` that begins as `base` and meets `points`.
///
/// # Errors
/// `M24` for a point that no figure of the base can meet: a rate above a peak, more devices than the cluster has.
pub fn calibrate(base: &Cluster, name: &str, points: &[Point]) -> Result<Calibration, (usize, Diagnostic)> {
    for (i, point) in points.iter().enumerate() {
        check(base, point).map_err(|refusal| (i, refusal))?;
    }
    let mut cluster = Cluster { name: name.to_owned(), ..base.clone() };
    cluster.summary = format!("{}, calibrated", base.summary);
    let of = |is: &dyn Fn(&Work) -> bool| -> Vec<&Point> { points.iter().filter(|p| is(&p.work)).collect() };
    let kernels = |is: &dyn Fn(&Kernel) -> bool| of(&|work| matches!(work, Work::Kernel(k) if is(k)));
    let streams = of(&|work| matches!(work, Work::Stream { name: None, .. }));
    fit::fit(&mut cluster, &[Figure::Memory, Figure::Launch], &streams);
    let products = kernels(&Kernel::is_product);
    if !products.is_empty() {
        cluster.accelerator.efficiency.matmul_limit = None;
    }
    fit::fit(&mut cluster, &[Figure::Matmul, Figure::MatmulTerms, Figure::MatmulResults], &products);
    for direction in [Direction::Forward, Direction::Backward] {
        let attention = kernels(&|k| k.direction() == Some(direction));
        let differ = |size: &dyn Fn(&Kernel) -> Option<u64>| {
            let sizes = attention.iter().filter_map(|point| match &point.work {
                Work::Kernel(kernel) => size(kernel),
                Work::Stream { .. } | Work::Collective(_) => None,
            });
            sizes.collect::<BTreeSet<u64>>().len() > 1
        };
        let mut figures = vec![Figure::Attention(direction)];
        // One width does not tell the columns of an exponential from the rate, nor does one length tell the keys of a tile.
        if differ(&Kernel::width) {
            figures.push(Figure::AttentionColumns(direction));
        }
        if differ(&Kernel::keys) {
            figures.push(Figure::AttentionKeys(direction));
        }
        fit::fit(&mut cluster, &figures, &attention);
    }
    kernel_curves(&mut cluster, points);
    let groups: Vec<(&Point, Group)> = points
        .iter()
        .filter_map(|point| match point.work {
            Work::Collective(group) => Some((point, group)),
            Work::Kernel(_) | Work::Stream { .. } => None,
        })
        .collect();
    collectives(&mut cluster, &groups);
    let rows = report::rows(base, &cluster, points);
    Ok(Calibration { cluster, rows })
}

/// The bytes and seconds of a kernel's points, by the power of two below the bytes.
type Sizes = BTreeMap<u32, (Vec<f64>, Vec<f64>)>;

/// Curves of the measured kernels that are no products and no attention, in place of those of the same names.
fn kernel_curves(cluster: &mut Cluster, points: &[Point]) {
    // Of sizes within a power of two, the geometric means.
    let mut sizes: BTreeMap<String, Sizes> = BTreeMap::new();
    let mut sources: Vec<&str> = Vec::new();
    for point in points {
        let named = match &point.work {
            Work::Kernel(kernel) => kernel.vector(),
            Work::Stream { name, bytes } => name.map(|name| (name.to_owned(), *bytes)),
            Work::Collective(_) => None,
        };
        let Some((name, bytes)) = named.filter(|(_, bytes)| *bytes > 0) else { continue };
        let size = sizes.entry(name).or_default().entry(bytes.ilog2()).or_default();
        size.0.push(bytes as f64);
        size.1.push(point.seconds);
        if !sources.contains(&point.source.as_str()) {
            sources.push(&point.source);
        }
    }
    if sizes.is_empty() {
        return;
    }
    let curve = |(name, sizes): (&String, &Sizes)| {
        let mean = |(bytes, seconds): &(Vec<f64>, Vec<f64>)| {
            (geometric_mean(bytes).round() as u64, geometric_mean(seconds))
        };
        KernelCurve::new(name, &sizes.values().map(mean).collect::<Vec<_>>())
    };
    let mut curves: Vec<KernelCurve> = sizes.iter().map(curve).collect();
    let mut source = format!("measured: {}", sources.join("; "));
    if let Some(before) = cluster.accelerator.measured.take() {
        let is_old = |curve: &KernelCurve| !sizes.contains_key(curve.name());
        let kept: Vec<KernelCurve> = before.curves.into_iter().filter(is_old).collect();
        if !kept.is_empty() {
            source = format!("{source}; others: {}", before.source);
            curves.extend(kept);
        }
    }
    cluster.accelerator.measured = Some(MeasuredKernels { source, curves });
}

/// Fits the links, level by level from the inside out, and then replaces curves.
fn collectives(cluster: &mut Cluster, groups: &[(&Point, Group)]) {
    let curves: Vec<Option<Measured>> =
        cluster.levels.iter_mut().map(|level| level.measured.take()).collect();
    let crossed: Vec<Vec<usize>> =
        groups.iter().map(|(_, group)| cluster.crossed((group.ranks, group.stride(cluster)))).collect();
    for level in 0..cluster.levels.len() {
        let here = |is_exchange: bool| -> Vec<&Point> {
            let of_level = groups.iter().zip(&crossed).filter(|(_, crossed)| crossed.last() == Some(&level));
            let of_kind =
                of_level.filter(|((_, g), _)| (g.collective == Some(Collective::AllToAll)) == is_exchange);
            of_kind.map(|((point, _), _)| *point).collect()
        };
        let ring = here(false);
        let is_step = |point: &&Point| matches!(point.work, Work::Collective(Group { collective: None, .. }));
        let steps: Vec<&Point> = ring.iter().copied().filter(is_step).collect();
        let exchange = here(true);
        // Times of several groups tell what a collective takes beside its steps.
        let tells = |points: &[&Point]| {
            let groups = points.iter().filter_map(|point| match &point.work {
                Work::Collective(group) => Some((group.ranks, group.hosts)),
                Work::Kernel(_) | Work::Stream { .. } => None,
            });
            groups.collect::<BTreeSet<_>>().len() > 1
        };
        let Level { ring_start, exchange_start, .. } = &mut cluster.levels[level];
        *ring_start = ring_start.take().filter(|_| ring.is_empty() || tells(&ring));
        *exchange_start = exchange_start.take().filter(|_| exchange.is_empty() || tells(&exchange));
        let (has_ring_start, has_exchange_start) = (ring_start.is_some(), exchange_start.is_some());
        // Steps between two ranks have no curves, so the figures are theirs where they were measured; alone they do not tell a start.
        let ring = if steps.len() > 1 && !has_ring_start { steps } else { ring };
        let mut figures = vec![Figure::RingEfficiency(level), Figure::Latency(level)];
        figures.extend(has_ring_start.then_some(Figure::RingStart(level)));
        fit::fit(cluster, &figures, &ring);
        let mut figures = vec![Figure::ExchangeEfficiency(level), Figure::MessageLatency(level)];
        figures.extend(has_exchange_start.then_some(Figure::ExchangeStart(level)));
        fit::fit(cluster, &figures, &exchange);
    }
    for (level, before) in curves.into_iter().enumerate() {
        let whole = groups.iter().zip(&crossed).filter(|(_, crossed)| **crossed == [level]).map(|(g, _)| *g);
        cluster.levels[level].measured = replace(before, whole);
    }
}

/// Curves of measured groups in place of all curves of their collectives.
fn replace<'a>(
    before: Option<Measured>,
    points: impl Iterator<Item = (&'a Point, Group)>,
) -> Option<Measured> {
    let mut sizes: BTreeMap<(&str, u64), BTreeMap<u64, Vec<f64>>> = BTreeMap::new();
    let mut sources: Vec<&str> = Vec::new();
    for (point, group) in points.filter(|(_, group)| group.collective.is_some()) {
        sizes
            .entry((group.name(), group.ranks))
            .or_default()
            .entry(group.bytes)
            .or_default()
            .push(point.seconds);
        if !sources.contains(&point.source.as_str()) {
            sources.push(&point.source);
        }
    }
    let curve = |(&(name, ranks), sizes): (&(&str, u64), &BTreeMap<u64, Vec<f64>>)| {
        let points: Vec<(u64, f64)> =
            sizes.iter().map(|(&bytes, seconds)| (bytes, geometric_mean(seconds))).collect();
        Curve::new(Collective::parse(name)?, ranks, &points)
    };
    let curves: Vec<Curve> = sizes.iter().filter_map(curve).collect();
    if curves.is_empty() {
        return before;
    }
    let mut source = format!("measured: {}", sources.join("; "));
    let mut all = curves;
    if let Some(before) = before {
        let is_old = |curve: &Curve| all.iter().all(|new| new.collective() != curve.collective());
        let kept: Vec<Curve> = before.curves.into_iter().filter(is_old).collect();
        if !kept.is_empty() {
            let mut names: Vec<&str> = kept.iter().map(|curve| curve.collective().name()).collect();
            names.dedup();
            source = format!("{source}; {}: {}", names.join(", "), before.source);
            all.extend(kept);
        }
    }
    Some(Measured { source, curves: all })
}

fn geometric_mean(numbers: &[f64]) -> f64 {
    (numbers.iter().map(|x| x.ln()).sum::<f64>() / numbers.len() as f64).exp()
}

/// Refuses a point that the figures of `base` cannot meet.
fn check(base: &Cluster, point: &Point) -> Result<(), Diagnostic> {
    let refuse = |message: String| Diagnostic::new("M24", message).at(point.span);
    match &point.work {
        Work::Kernel(kernel) => {
            let Some((rate, peak, key)) = kernel.rate(base, point.seconds) else { return Ok(()) };
            if rate <= peak {
                return Ok(());
            }
            let message = format!(
                "{} in {:.1} microseconds is {rate:.3e} FLOP per second, above the {peak:.3e} of `accelerator.peak.{key}` of `{}`",
                kernel.title(),
                point.seconds * 1e6,
                base.name
            );
            Err(refuse(message)
                .help("the column is microseconds of one run")
                .help("or name another profile with `--base`, or raise its peak"))
        }
        Work::Stream { .. } => Ok(()),
        Work::Collective(group) => {
            let (devices, node) = (base.devices(), base.devices_per_node.value);
            let needed = group.ranks * group.stride(base);
            if needed > devices {
                let message = format!(
                    "{} ranks on {} hosts need {needed} devices, and `{}` joins {devices}",
                    group.ranks, group.hosts, base.name
                );
                return Err(refuse(message).help("name a profile with more devices with `--base`"));
            }
            let per_host = group.ranks / group.hosts;
            if group.hosts > 1 && per_host > 1 && !per_host.is_multiple_of(node) {
                let message = format!(
                    "{per_host} ranks on each of {} hosts, and a node of `{}` has {node} devices",
                    group.hosts, base.name
                );
                return Err(refuse(message)
                    .help("measure with one rank, or with all devices, of each host")
                    .help(
                        "or set `devices_per_node` and the innermost level of the base to those of the hosts",
                    ));
            }
            Ok(())
        }
    }
}
