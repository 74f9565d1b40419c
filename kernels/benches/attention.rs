//! How long kernels take on this machine: causal attention and its gradients, and matrix products.

#[path = "../../benches/median/mod.rs"]
mod median;
mod workloads;

use workloads::Workload;

fn main() {
    for name in workloads::NAMES {
        let mut workload = Workload::named(name).expect("a name of the list");
        median::report(name, || workload.run());
    }
}
