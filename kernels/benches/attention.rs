//! How long kernels take on this machine: causal attention and its gradients, and matrix products.
#![allow(missing_docs, reason = "criterion's macros make undocumented functions")]

mod workloads;

use criterion::{Criterion, criterion_group, criterion_main};
use workloads::Workload;

fn kernels(c: &mut Criterion) {
    let mut group = c.benchmark_group("kernels");
    group.sample_size(20);
    for name in workloads::NAMES {
        let mut workload = Workload::named(name).expect("a name of the list");
        group.bench_function(*name, |b| b.iter(|| workload.run()));
    }
}

criterion_group!(benches, kernels);
criterion_main!(benches);
