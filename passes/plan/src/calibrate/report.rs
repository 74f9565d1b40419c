//! How far a cluster is from measurements, before and after.

use std::fmt::Write;

use super::point::Point;
use crate::cluster::Cluster;

/// The mean error of one kind of work.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The kind, such as `all_reduce 8`.
    pub kind: String,
    /// Points.
    pub points: usize,
    /// The mean of the relative errors of the base, as a part.
    pub before: f64,
    /// The same of the calibrated cluster.
    pub after: f64,
}

/// The rows of all points, in the order of their kinds' first points.
pub(super) fn rows(base: &Cluster, cluster: &Cluster, points: &[Point]) -> Vec<Row> {
    let mut kinds: Vec<(String, Vec<&Point>)> = Vec::new();
    for point in points {
        let kind = point.work.kind();
        match kinds.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, of_kind)) => of_kind.push(point),
            None => kinds.push((kind, vec![point])),
        }
    }
    let row = |(kind, points): (String, Vec<&Point>)| Row {
        kind,
        points: points.len(),
        before: mean_error(base, &points),
        after: mean_error(cluster, &points),
    };
    kinds.into_iter().map(row).collect()
}

/// The mean of the relative errors of the prices of a cluster.
pub(super) fn mean_error(cluster: &Cluster, points: &[&Point]) -> f64 {
    let errors = points.iter().map(|point| (point.work.seconds(cluster) / point.seconds - 1.0).abs());
    errors.sum::<f64>() / points.len().max(1) as f64
}

/// The table for a person.
pub fn report(rows: &[Row]) -> String {
    let width = rows.iter().map(|row| row.kind.len()).fold(8, usize::max);
    let mut out =
        format!("{:<width$}  {:>6}  {:>12}  {:>11}\n", "measured", "points", "error before", "error after");
    for Row { kind, points, before, after } in rows {
        let percent = |part: f64| format!("{:.1} %", 100.0 * part);
        // Writing to a string cannot fail.
        let _ =
            writeln!(out, "{kind:<width$}  {points:>6}  {:>12}  {:>11}", percent(*before), percent(*after));
    }
    out
}
