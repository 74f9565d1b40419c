//! Measured times of collectives, and times between and beyond the measured ones.
//!
//! A curve has the time of one collective on one number of ranks, by bytes. Between two sizes time is linear in bytes; below
//! the least size it is that of the least, above the largest it follows the last slope. More bytes never take less time:
//! neighbouring points that say so are replaced by their geometric mean. Between two numbers of ranks, and beyond the last,
//! the logarithm of time is linear in that of the number of ranks.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::prices::{Collective, CollectiveTime};

/// Measured times of collectives within one block of a level.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// The measurement.
    pub source: String,
    /// The curves, each a text such as `all_gather 8: 65536 18.6, 262144 33.0`: collective, number of ranks, then bytes and
    /// microseconds. Bytes are the input of a rank; of an all-gather they are its output.
    pub curves: Vec<Curve>,
}

/// The time of a collective on a number of ranks, by bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "String")]
pub struct Curve {
    collective: Collective,
    ranks: u64,
    /// As written: bytes, ascending, and microseconds.
    points: Vec<(f64, f64)>,
    /// The seconds, none less than the one before.
    rising: Vec<f64>,
}

/// Measured times of kernels by the bytes that they read and write.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MeasuredKernels {
    /// The measurement.
    pub source: String,
    /// The curves, each a text such as `rms_norm: 65536 31.5, 1048576 402`: kernel, then bytes and microseconds. Time is
    /// linear between two points, from the launch to the first, and beyond the last.
    pub curves: Vec<KernelCurve>,
}

/// The time of a kernel by bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "String")]
pub struct KernelCurve {
    name: String,
    /// As written: bytes, ascending, and microseconds.
    points: Vec<(f64, f64)>,
}

impl MeasuredKernels {
    /// Seconds of the kernel `name`, whose launch takes `launch`; `None` where it was not measured.
    pub(crate) fn seconds(&self, name: &str, launch: f64, bytes: f64) -> Option<f64> {
        let curve = self.curves.iter().find(|curve| curve.name == name)?;
        let begun: Vec<(f64, f64)> =
            std::iter::once((0.0, launch)).chain(in_seconds(&curve.points)).collect();
        let rising = rising(begun.iter().map(|point| point.1));
        Some(between(&begun, &rising, bytes))
    }
}

impl KernelCurve {
    /// The curve of measured bytes, ascending, and seconds.
    pub fn new(name: &str, points: &[(u64, f64)]) -> Self {
        Self { name: name.to_owned(), points: in_micros(points) }
    }

    /// The kernel.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl TryFrom<String> for KernelCurve {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let is_wrong = |problem: &str| {
            format!(
                "`{text}` {problem}; a curve reads `rms_norm: 65536 31.5, 1048576 402`, bytes and microseconds"
            )
        };
        let (name, tail) = text.split_once(':').ok_or_else(|| is_wrong("has no `:`"))?;
        let points =
            points(tail).ok_or_else(|| is_wrong("has a point that is not bytes and microseconds"))?;
        if points.windows(2).any(|pair| pair[0].0 >= pair[1].0) {
            return Err(is_wrong("has bytes that do not ascend"));
        }
        Ok(Self { name: name.trim().to_owned(), points })
    }
}

impl From<KernelCurve> for String {
    fn from(curve: KernelCurve) -> String {
        format!("{}: {}", curve.name, spelled(&curve.points))
    }
}

/// Bytes beyond which not every integer is a number of its own.
const MOST_BYTES: u64 = 1 << f64::MANTISSA_DIGITS;

/// Bytes and microseconds of measured bytes and seconds, in whole nanoseconds.
fn in_micros(points: &[(u64, f64)]) -> Vec<(f64, f64)> {
    points.iter().map(|&(bytes, seconds)| (bytes as f64, (seconds * 1e9).round().max(1.0) / 1e3)).collect()
}

fn in_seconds(points: &[(f64, f64)]) -> impl Iterator<Item = (f64, f64)> + '_ {
    points.iter().map(|&(bytes, micros)| (bytes, micros * 1e-6))
}

/// Bytes and microseconds of `65536 18.6, 262144 33.0`; at least one pair.
fn points(text: &str) -> Option<Vec<(f64, f64)>> {
    let point = |pair: &str| -> Option<(f64, f64)> {
        let (bytes, micros) = pair.trim().split_once(' ')?;
        let (bytes, micros): (u64, f64) = (bytes.parse().ok()?, micros.trim().parse().ok()?);
        let is_plausible = bytes <= MOST_BYTES && micros > 0.0 && (micros * 1e-6).is_normal();
        is_plausible.then_some((bytes as f64, micros))
    };
    text.split(',').map(point).collect()
}

/// The text of points.
fn spelled(points: &[(f64, f64)]) -> String {
    let point = |(bytes, micros): &(f64, f64)| format!("{bytes} {micros}");
    points.iter().map(point).collect::<Vec<String>>().join(", ")
}

/// The time of `bytes` on the lines between points, whose times are `rising`; that of the first point below it.
fn between(points: &[(f64, f64)], rising: &[f64], bytes: f64) -> f64 {
    let above = points.partition_point(|&(size, _)| size < bytes);
    if above == 0 {
        return rising[0];
    }
    let high = above.min(points.len() - 1);
    let ((x0, _), (x1, _)) = (points[high - 1], points[high]);
    let (y0, y1) = (rising[high - 1], rising[high]);
    y0 + (y1 - y0) * (bytes - x0) / (x1 - x0)
}

impl Measured {
    /// The time of a collective of `bytes` on `ranks` ranks; `None` where too few numbers of ranks were measured.
    pub(super) fn time(&self, collective: Collective, ranks: u64, bytes: f64) -> Option<CollectiveTime> {
        let (seconds, latency) =
            (self.seconds(collective, ranks, bytes)?, self.seconds(collective, ranks, 0.0)?);
        Some(CollectiveTime { latency, transfer: (seconds - latency).max(0.0) })
    }

    fn seconds(&self, collective: Collective, ranks: u64, bytes: f64) -> Option<f64> {
        let curves = || self.curves.iter().filter(|curve| curve.collective == collective);
        if let Some(curve) = curves().find(|curve| curve.ranks == ranks) {
            return Some(curve.seconds(bytes));
        }
        let mut near: Vec<&Curve> = curves().collect();
        // The nearest on either side, or the two nearest on one.
        near.sort_by_key(|curve| curve.ranks);
        let above = near.partition_point(|curve| curve.ranks < ranks).clamp(1, near.len().max(2) - 1);
        let (low, high) = (near.get(above - 1)?, near.get(above)?);
        let (from, to) = (low.seconds(bytes), high.seconds(bytes));
        let slope = (to / from).ln() / (high.ranks as f64 / low.ranks as f64).ln();
        Some(from * (ranks as f64 / low.ranks as f64).powf(slope.clamp(0.0, 1.0)))
    }
}

impl Curve {
    fn seconds(&self, bytes: f64) -> f64 {
        between(&self.points, &self.rising, bytes)
    }
}

/// The geometric means of the longest runs that leave nothing falling.
fn rising(seconds: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut runs: Vec<(f64, usize)> = Vec::new();
    for (mut log, mut n) in seconds.map(|s| (s.ln(), 1)) {
        while let Some((before, m)) = runs.pop_if(|run| run.0 > log) {
            log = (log * n as f64 + before * m as f64) / (n + m) as f64;
            n += m;
        }
        runs.push((log, n));
    }
    runs.into_iter().flat_map(|(log, n)| std::iter::repeat_n(log.exp(), n)).collect()
}

impl TryFrom<String> for Curve {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let is_wrong = |problem: &str| {
            format!(
                "`{text}` {problem}; a curve reads `all_gather 8: 65536 18.6, 262144 33.0`, bytes and microseconds"
            )
        };
        let (head, tail) = text.split_once(':').ok_or_else(|| is_wrong("has no `:`"))?;
        let (name, ranks) = head.trim().split_once(' ').ok_or_else(|| is_wrong("has no number of ranks"))?;
        let collective = Collective::parse(name).ok_or_else(|| is_wrong("names no measured collective"))?;
        let ranks: u64 = ranks.trim().parse().map_err(|_| is_wrong("has no number of ranks"))?;
        if ranks < 2 {
            return Err(is_wrong("has fewer than 2 ranks"));
        }
        let points = points(tail);
        let points = points.ok_or_else(|| is_wrong("has a point that is not bytes and microseconds"))?;
        if points.len() < 2 || points.windows(2).any(|pair| pair[0].0 >= pair[1].0) {
            return Err(is_wrong("needs two points or more, in ascending order of bytes"));
        }
        let rising = rising(in_seconds(&points).map(|(_, seconds)| seconds));
        Ok(Self { collective, ranks, points, rising })
    }
}

impl From<Curve> for String {
    fn from(curve: Curve) -> String {
        format!("{} {}: {}", curve.collective.name(), curve.ranks, spelled(&curve.points))
    }
}

impl Curve {
    /// The curve of measured bytes, ascending, and seconds; `None` for fewer than two points.
    pub fn new(collective: Collective, ranks: u64, points: &[(u64, f64)]) -> Option<Self> {
        let points = in_micros(points);
        let rising = rising(in_seconds(&points).map(|(_, seconds)| seconds));
        (points.len() > 1).then_some(Self { collective, ranks, points, rising })
    }

    /// The collective.
    pub fn collective(&self) -> Collective {
        self.collective
    }

    /// The ranks of the measured group.
    pub fn ranks(&self) -> u64 {
        self.ranks
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Cluster;

    fn curve(text: &str) -> Curve {
        Curve::try_from(text.to_owned()).unwrap()
    }

    fn measured(curves: &[&str]) -> Measured {
        Measured { source: "a test".to_owned(), curves: curves.iter().map(|text| curve(text)).collect() }
    }

    #[test]
    fn time_is_linear_between_points_and_never_falls() {
        let curve = curve("all_to_all 8: 1000 10, 2000 40, 3000 10, 4000 30, 8000 50");
        for (bytes, micros) in
            [(0.0, 10.0), (1000.0, 10.0), (1500.0, 15.0), (2500.0, 20.0), (6000.0, 40.0), (12000.0, 70.0)]
        {
            let found = curve.seconds(bytes) * 1e6;
            assert!((found - micros).abs() < 1e-9, "{bytes}: {found}");
        }
        assert_eq!(String::from(curve), "all_to_all 8: 1000 10, 2000 40, 3000 10, 4000 30, 8000 50");
    }

    #[test]
    fn other_numbers_of_ranks_lie_on_a_line_of_logarithms() {
        let two = measured(&["all_gather 4: 1000 20, 2000 30", "all_gather 16: 1000 40, 2000 60"]);
        let micros = |ranks, bytes| two.time(Collective::AllGather, ranks, bytes).unwrap().seconds() * 1e6;
        for (ranks, expected) in [(2, 200f64.sqrt()), (4, 20.0), (8, 800f64.sqrt()), (16, 40.0), (64, 80.0)] {
            assert!((micros(ranks, 1000.0) - expected).abs() < 1e-9, "{ranks}");
        }
        assert_eq!(two.time(Collective::AllReduce, 4, 1000.0), None);
        let one = measured(&["all_gather 4: 1000 20, 2000 30"]);
        assert_eq!(one.time(Collective::AllGather, 8, 1000.0), None);
        let time = one.time(Collective::AllGather, 4, 1500.0).unwrap();
        assert!((time.latency * 1e6 - 20.0).abs() < 1e-9 && (time.transfer * 1e6 - 5.0).abs() < 1e-9);
    }

    #[test]
    fn a_kernel_begins_with_its_launch_and_goes_on_with_its_last_slope() {
        let curves = ["rms_norm: 1000 12, 3000 32", "add repeated: 500 7"];
        let curves = curves.map(|text| KernelCurve::try_from(text.to_owned()).unwrap());
        let measured = MeasuredKernels { source: "a test".to_owned(), curves: curves.to_vec() };
        let micros = |name, bytes| measured.seconds(name, 2e-6, bytes).map(|seconds| seconds * 1e6);
        for (name, bytes, expected) in [
            ("rms_norm", 500.0, 7.0),
            ("rms_norm", 2000.0, 22.0),
            ("rms_norm", 5000.0, 52.0),
            ("add repeated", 1000.0, 12.0),
        ] {
            assert!((micros(name, bytes).unwrap() - expected).abs() < 1e-9, "{name} {bytes}");
        }
        assert_eq!(micros("add", 1000.0), None);
        assert_eq!(curves.map(String::from), ["rms_norm: 1000 12, 3000 32", "add repeated: 500 7"]);
        for text in
            ["rms_norm", "rms_norm:", "rms_norm: 1000", "rms_norm: 2000 3, 1000 4", "rms_norm: 1000 0"]
        {
            assert!(KernelCurve::try_from(text.to_owned()).is_err_and(|e| e.contains(text)), "{text}");
        }
    }

    #[test]
    fn a_curve_that_is_none_is_refused() {
        for text in [
            "all_gather 8",
            "gather 8: 1 2, 3 4",
            "all_gather 1: 1 2, 3 4",
            "all_gather 8: 1 2",
            "all_gather 8: 3 2, 1 4",
            "all_gather 8: 1 0, 2 3",
            "all_gather 8: 1, 2 3",
        ] {
            assert!(Curve::try_from(text.to_owned()).is_err_and(|e| e.contains(text)), "{text}");
        }
    }

    #[test]
    fn a_curve_is_written_as_it_was_read() {
        for text in
            ["all_gather 8: 65536 31.671014, 262144 109951162777681.4", "all_reduce 2: 0 0.0001, 1 2.5e-7"]
        {
            let read = curve(text);
            assert_eq!(Curve::try_from(String::from(read.clone())), Ok(read), "{text}");
        }
        let (exact, beyond) =
            ("all_gather 8: 1 2, 9007199254740992 3", "all_gather 8: 1 2, 9007199254740993 3");
        assert!(Curve::try_from(exact.to_owned()).is_ok() && Curve::try_from(beyond.to_owned()).is_err());
    }

    /// Every second size predicts those between; neighbours are 16 times apart then.
    #[test]
    fn half_of_a_profile_predicts_the_other() {
        for name in ["dgx-h100", "dgx-b200", "gb200-nvl72"] {
            let cluster = Cluster::named(name).unwrap();
            let measured = cluster.levels[0].measured.as_ref().unwrap();
            let mut errors = Vec::new();
            for curve in &measured.curves {
                let half: Vec<(f64, f64)> = curve.points.iter().copied().step_by(2).collect();
                let rising = rising(in_seconds(&half).map(|(_, seconds)| seconds));
                let half = Curve { points: half, rising, ..curve.clone() };
                let other = curve.points.iter().skip(1).step_by(2);
                errors.extend(other.map(|&(bytes, micros)| (half.seconds(bytes) * 1e6 / micros).ln().abs()));
            }
            let mean = errors.iter().sum::<f64>() / errors.len() as f64;
            assert!(mean < 0.17, "{name}: {mean}");
        }
    }
}
