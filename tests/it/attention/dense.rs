//! Attention over the dense matrix of pairs, from its definition: what the oracle itself is held against.

use ithaca_kernels::store::TensorSource;
use ithaca_kernels::{Outputs, Tensor};

use super::case::{Case, Extent};

/// A tensor of four dimensions, or of three with a last one of 1.
struct Dense {
    shape: [usize; 4],
    data: Vec<f64>,
}

impl Dense {
    fn zeros(shape: [usize; 4]) -> Self {
        Self { shape, data: vec![0.0; shape.iter().product()] }
    }

    fn read(source: &dyn TensorSource, name: &str) -> Self {
        let tensor = source.read(name).unwrap();
        let mut shape = [1; 4];
        shape[..tensor.shape.len()].copy_from_slice(&tensor.shape);
        Self { shape, data: tensor.data }
    }

    fn index(&self, at: [usize; 4]) -> usize {
        at.iter().zip(self.shape).fold(0, |i, (&at, n)| i * n + at)
    }

    fn row(&self, b: usize, t: usize, h: usize) -> &[f64] {
        let start = self.index([b, t, h, 0]);
        &self.data[start..start + self.shape[3]]
    }

    fn add(&mut self, [b, t, h]: [usize; 3], factor: f64, row: &[f64]) {
        let start = self.index([b, t, h, 0]);
        for (x, y) in self.data[start..].iter_mut().zip(row) {
            *x += factor * y;
        }
    }
}

fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

/// One pair of the matrix.
struct Pair {
    key: usize,
    score: f64,
    /// The derivative of the score by the product of query and key.
    slope: f64,
    /// What dropout multiplies the weight by.
    kept: f64,
}

/// Outputs of the case, by name.
pub(super) fn run(case: &Case, source: &dyn TensorSource) -> Outputs<f64> {
    let [q, k, v] = ["q", "k", "v"].map(|name| Dense::read(source, name));
    let bias = case.bias.map(|_| source.read("bias").unwrap());
    let logits = case.sink.then(|| source.read("logits").unwrap().data);
    let d_o = (case.extent == Extent::Backward).then(|| Dense::read(source, "d_o"));
    let [n_b, n_t, n_h, _] = q.shape;
    let e = v.shape[3];
    let (mut o, mut lse) = (Dense::zeros([n_b, n_t, n_h, e]), Dense::zeros([n_b, n_t, n_h, 1]));
    let [mut dq, mut dk, mut dv] = [&q, &k, &v].map(|x| Dense::zeros(x.shape));
    let group = case.group as usize;
    for b in 0..n_b {
        for h in 0..n_h {
            for t in 0..n_t {
                let query = q.row(b, t, h);
                let pair = |key: usize| {
                    if !case.mask.allows(t as u64, key as u64) {
                        return None;
                    }
                    let mut score = case.scale * dot(query, k.row(b, key, h / group));
                    let mut slope = case.scale;
                    if let Some(cap) = case.softcap {
                        let capped = (score / cap).tanh();
                        score = cap * capped;
                        slope *= 1.0 - capped * capped;
                    }
                    if let (Some(table), Some(buckets)) = (&bias, case.bias) {
                        let relative = ithaca_ir::ops::RelativeBias {
                            buckets: ithaca_ir::entity::Entity::new(0),
                            max_distance: buckets.max_distance,
                            sides: buckets.sides,
                        };
                        let bucket = relative.bucket(buckets.n, key as i64 - t as i64) as usize;
                        score += table.data[bucket * n_h + h];
                    }
                    let at = [b, h, t, key].map(|i| i as u64);
                    let dropout = case.dropout.map(|d| match case.key {
                        Some(seed) => d.with_key(ithaca_ir::ops::random::key(seed)),
                        None => d,
                    });
                    let kept = dropout.map_or(1.0, |d| {
                        if d.drops(at[0], at[1], at[2], at[3]) { 0.0 } else { 1.0 / (1.0 - d.rate) }
                    });
                    Some(Pair { key, score, slope, kept })
                };
                let pairs: Vec<Pair> = (0..k.shape[1]).filter_map(pair).collect();
                let sink = logits.as_ref().map(|l| l[h]);
                let scores = || pairs.iter().map(|p| p.score).chain(sink);
                let max = scores().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores().map(|s| (s - max).exp()).sum();
                let here = if max == f64::NEG_INFINITY { max } else { max + sum.ln() };
                let at = lse.index([b, t, h, 0]);
                lse.data[at] = here;
                for p in &pairs {
                    o.add([b, t, h], (p.score - here).exp() * p.kept, v.row(b, p.key, h / group));
                }
                let Some(d_o) = &d_o else { continue };
                let d_o = d_o.row(b, t, h);
                let delta = dot(d_o, o.row(b, t, h));
                for p in &pairs {
                    let weight = (p.score - here).exp();
                    let d_weight = p.kept * dot(d_o, v.row(b, p.key, h / group));
                    let d_product = weight * (d_weight - delta) * p.slope;
                    dq.add([b, t, h], d_product, k.row(b, p.key, h / group));
                    dk.add([b, p.key, h / group], d_product, query);
                    dv.add([b, p.key, h / group], weight * p.kept, d_o);
                }
            }
        }
    }
    let mut outputs = Outputs::new();
    let mut give = |name: &str, x: Dense, n_dims: usize| {
        outputs.insert(name.to_owned(), Tensor::new(x.shape[..n_dims].to_vec(), x.data))
    };
    give("o", o, 4);
    if case.extent != Extent::Output {
        give("lse", lse, 3);
    }
    if case.extent == Extent::Backward {
        give("dq", dq, 4);
        give("dk", dk, 4);
        give("dv", dv, 4);
    }
    outputs
}
