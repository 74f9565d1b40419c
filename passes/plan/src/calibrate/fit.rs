//! Least squares of the logarithms of time, by the method of Levenberg and Marquardt (SIAM J. Appl. Math. 11, 1963).
//!
//! Figures are positive, and a point of a microsecond counts as much as one of a second: both are taken as logarithms. A
//! figure that the points do not depend on keeps its value, because damping leaves it where it is, unless another start from it
//! explains the points better.

use super::figure::Figure;
use super::point::Point;
use super::report;
use crate::cluster::Cluster;

/// The step of a numerical derivative, in logarithms.
const STEP: f64 = 1e-4;

/// Steps that are tried at most.
const STEPS: usize = 200;

/// Derivatives below this are taken for none.
const FLAT: f64 = 1e-9;

/// Fits `figures` of `cluster` to `points`, as many of them as there are points.
pub(super) fn fit(cluster: &mut Cluster, figures: &[Figure], points: &[&Point]) {
    let figures = &figures[..figures.len().min(points.len())];
    if figures.is_empty() {
        return;
    }
    let first = Trial::of(cluster, figures, points).minimize(cluster, figures, points);
    // Where another level of links bounds every time, no point depends on a figure until it is small.
    let slopes = first.slopes(cluster, figures, points);
    let is_flat = |i: &usize| figures[*i].is_part() && slopes.iter().all(|row| row[*i].abs() <= DETERMINED);
    let restart = |(i, share): (usize, f64)| {
        let mut logs = first.logs.clone();
        logs[i] = share.ln();
        Trial::at(cluster, figures, points, logs).minimize(cluster, figures, points)
    };
    let flat = (0..figures.len()).filter(is_flat);
    let restarts = flat.flat_map(|i| STARTS.map(|share| (i, share))).map(restart);
    let is_better = |one: &Trial, best: &Trial| one.sum < WORTH * best.sum;
    let best = restarts.fold(first.clone(), |best, one| if is_better(&one, &best) { one } else { best });
    let slopes = best.slopes(cluster, figures, points);
    let error = report::mean_error(&best.cluster, points);
    let mut sources: Vec<&str> = points.iter().map(|point| point.source.as_str()).collect();
    sources.dedup();
    let source = format!(
        "measured: {}; fit to {}, {:.1} % off on average",
        sources.join("; "),
        ithaca_ir::diagnostic::counted(points.len() as u64, "point"),
        100.0 * error
    );
    for (i, &figure) in figures.iter().enumerate() {
        let is_determined = slopes.iter().any(|row| row[i].abs() > DETERMINED);
        let log = best.logs[i];
        let target = figure.of(cluster);
        if is_determined || target.source.is_empty() {
            target.value = four_digits(log.exp());
            target.source.clone_from(&source);
        }
    }
}

/// Shares of a peak from which a fit starts again.
const STARTS: [f64; 3] = [0.3, 0.1, 0.03];

/// The part of the sum of squares that a fit from another start has at most.
const WORTH: f64 = 0.9;

/// The least derivative of a residual by a figure that the points determine.
const DETERMINED: f64 = 1e-3;

/// A number of four significant digits.
pub(super) fn four_digits(x: f64) -> f64 {
    let text = format!("{x:.3e}");
    text.parse().unwrap_or(x)
}

/// Figures that were tried.
#[derive(Clone)]
struct Trial {
    /// Their logarithms.
    logs: Vec<f64>,
    cluster: Cluster,
    /// For each point the logarithm of the predicted time over the measured one.
    residuals: Vec<f64>,
    /// The sum of their squares.
    sum: f64,
}

impl Trial {
    fn of(cluster: &Cluster, figures: &[Figure], points: &[&Point]) -> Self {
        let mut begun = cluster.clone();
        let logs = figures.iter().map(|figure| figure.of(&mut begun).value.ln()).collect();
        Self::at(cluster, figures, points, logs)
    }

    fn at(cluster: &Cluster, figures: &[Figure], points: &[&Point], mut logs: Vec<f64>) -> Self {
        let mut cluster = cluster.clone();
        for (figure, log) in figures.iter().zip(&mut logs) {
            *log = log.max(figure.least().ln());
            if figure.is_part() {
                *log = log.min(0.0);
            }
            figure.of(&mut cluster).value = log.exp();
        }
        let residuals: Vec<f64> =
            points.iter().map(|point| (point.work.seconds(&cluster) / point.seconds).ln()).collect();
        let sum = residuals.iter().map(|r| r * r).sum();
        Self { logs, cluster, residuals, sum }
    }

    /// The trial with the least sum that damped steps reach from this one.
    fn minimize(self, cluster: &Cluster, figures: &[Figure], points: &[&Point]) -> Self {
        let mut best = self;
        let mut damping = 1e-3;
        for _ in 0..STEPS {
            let Some(step) = best.step(cluster, figures, points, damping) else { break };
            let next: Vec<f64> =
                best.logs.iter().zip(&step).map(|(log, step)| log + step.clamp(-2.0, 2.0)).collect();
            let trial = Trial::at(cluster, figures, points, next);
            if trial.sum < best.sum {
                let gained = best.sum - trial.sum;
                best = trial;
                damping = (damping / 4.0f64).max(1e-12);
                if gained <= 1e-14 * (1.0 + best.sum) {
                    break;
                }
            } else {
                damping *= 4.0;
                if damping > 1e12 {
                    break;
                }
            }
        }
        best
    }

    /// For each point the derivatives of its residual by the figures.
    fn slopes(&self, cluster: &Cluster, figures: &[Figure], points: &[&Point]) -> Vec<Vec<f64>> {
        let mut rows = vec![vec![0.0; figures.len()]; points.len()];
        for i in 0..figures.len() {
            let mut logs = self.logs.clone();
            // Towards smaller values, which the bounds of parts allow.
            logs[i] -= STEP;
            let moved = Self::at(cluster, figures, points, logs);
            for (row, (here, there)) in rows.iter_mut().zip(self.residuals.iter().zip(&moved.residuals)) {
                row[i] = (here - there) / STEP;
            }
        }
        rows
    }

    /// The damped step to the least squares of the linearised residuals.
    fn step(
        &self,
        cluster: &Cluster,
        figures: &[Figure],
        points: &[&Point],
        damping: f64,
    ) -> Option<Vec<f64>> {
        let slopes = self.slopes(cluster, figures, points);
        let n = figures.len();
        let mut normal = vec![vec![0.0; n + 1]; n];
        for (row, r) in slopes.iter().zip(&self.residuals) {
            for i in 0..n {
                for j in 0..n {
                    normal[i][j] += row[i] * row[j];
                }
                normal[i][n] -= row[i] * r;
            }
        }
        for (i, row) in normal.iter_mut().enumerate() {
            row[i] += damping * row[i] + FLAT;
        }
        solve(normal)
    }
}

/// The solution of a symmetric positive system with its right side as the last column.
fn solve(mut rows: Vec<Vec<f64>>) -> Option<Vec<f64>> {
    let n = rows.len();
    for i in 0..n {
        let pivot = (i..n).max_by(|&a, &b| rows[a][i].abs().total_cmp(&rows[b][i].abs()))?;
        rows.swap(i, pivot);
        let (above, below) = rows.split_at_mut(i + 1);
        let first = &above[i];
        if first[i] == 0.0 || !first[i].is_finite() {
            return None;
        }
        for row in below {
            let factor = row[i] / first[i];
            row.iter_mut().zip(first).skip(i).for_each(|(x, y)| *x -= factor * y);
        }
    }
    let mut found = vec![0.0; n];
    for i in (0..n).rev() {
        let known: f64 = (i + 1..n).map(|j| rows[i][j] * found[j]).sum();
        found[i] = (rows[i][n] - known) / rows[i][i];
    }
    found.iter().all(|x| x.is_finite()).then_some(found)
}
