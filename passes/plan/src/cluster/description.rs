//! What a cluster file says: devices, their rates, and the levels that join them.

use ithaca_ir::DType;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::curve::{Measured, MeasuredKernels};
use super::prices::Pattern;
use super::runtime::{AllReduce, ExpertProducts, Launch, Runtime};

/// A number and where it comes from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Sourced<T> {
    /// The number.
    pub value: T,
    /// A datasheet, a measurement, or the word `estimate` with its ground.
    pub source: String,
}

/// The part of a machine's memory that states of ranks leave to everything else.
const HOST_RESERVE: f64 = 0.1;

/// A machine, or many of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// The name, for example `dgx-h100`.
    pub name: String,
    /// One line for a list.
    pub summary: String,
    /// How steps run: which of the figures below hold.
    #[serde(default, skip_serializing_if = "Runtime::is_default")]
    pub runtime: Runtime,
    /// Devices in one machine.
    pub devices_per_node: Sourced<u64>,
    /// Memory of one machine beside that of its devices, bytes, for states in host memory; without it they are not limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_memory_bytes: Option<Sourced<u64>>,
    /// The device.
    pub accelerator: Accelerator,
    /// How devices are wired, from the inside out.
    pub levels: Vec<Level>,
    /// Ranks of a plan, of which a mesh may be a part that is anywhere among them; none where every mesh begins at the first device.
    #[serde(skip)]
    pub ranks: Option<u64>,
}

/// A device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Accelerator {
    /// The product's name.
    pub name: String,
    /// Memory, bytes.
    pub memory_bytes: Sourced<u64>,
    /// The part of the memory that a plan must leave to the driver, the communication library and the allocator.
    pub reserve_fraction: Sourced<f64>,
    /// Memory bandwidth, bytes per second.
    pub memory_bandwidth: Sourced<f64>,
    /// Bandwidth of copies from pinned memory of the host, and to it, bytes per second; without it no cache can be there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_bandwidth: Option<Sourced<f64>>,
    /// Time to start a kernel from the host, seconds.
    pub launch_seconds: Sourced<f64>,
    /// Time in which a kernel of a recorded graph starts, and fills and drains the device, seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub graph_launch_seconds: Option<Sourced<f64>>,
    /// The price of a device for an hour, US dollars.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub price_per_hour: Option<Sourced<f64>>,
    /// Peak rates, FLOP per second.
    pub peak: Peak,
    /// What parts of the peaks kernels reach.
    pub efficiency: Efficiency,
    /// The attention kernel that times and memory assume, by its name.
    pub attention_kernel: Sourced<String>,
    /// The attention kernels of the device.
    pub attention: Vec<AttentionKernel>,
    /// The cores of the machine, where devices are threads that share them; without it every device has its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_cores: Option<SharedCores>,
    /// Measured times of kernels that are no products and no attention, used in place of the bandwidth where they apply.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<MeasuredKernels>,
}

/// Cores that devices share.
///
/// Rates are those of a device on a core of its own. More devices than cores share them evenly; of fewer devices each has
/// as many cores as are there for it, in products and attention that are large enough.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SharedCores {
    /// The cores.
    pub cores: Sourced<u64>,
    /// FLOPs for each core that a product or an attention uses.
    pub flops: Sourced<f64>,
}

impl SharedCores {
    /// How many times longer a kernel of so many FLOPs takes where `ranks` compute at a time; FLOPs are those of products
    /// and attention.
    pub fn factor(&self, ranks: u64, flops: f64) -> f64 {
        let cores = self.cores.value;
        if ranks >= cores {
            return ranks as f64 / cores as f64;
        }
        let used = (flops / self.flops.value).floor().min((cores / ranks) as f64);
        1.0 / used.max(1.0)
    }
}

/// An attention kernel, or the kernels that take its place.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AttentionKernel {
    /// The name, for example `flash-2`.
    pub name: String,
    /// Its rate forward.
    pub forward: AttentionRate,
    /// Its rate backward.
    pub backward: AttentionRate,
    /// Its rate over a cache of keys and values, with few queries; that of the forward pass if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cached: Option<CachedRate>,
    /// The bytes of scores in memory, for an attention that stores them: products, softmax and dropout are kernels of their
    /// own, and the mask saves none of them. None for one that computes scores in tiles.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scores: Option<ScoreBytes>,
}

/// The rate of an attention kernel in one direction.
///
/// Heads `D` wide whose queries see `S` keys each reach `efficiency · D/(D + columns) · S/(S + keys)` of the peak rate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AttentionRate {
    /// The part of the peak rate that very wide heads and very many keys reach.
    pub efficiency: Sourced<f64>,
    /// As many columns of a head as could be multiplied while the exponential of a score is computed; 0 if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub columns: Option<Sourced<f64>>,
    /// As many keys as a query could see while a tile begins, ends, and is cut by the mask; 0 if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys: Option<Sourced<f64>>,
}

/// The rate of attention over a cache, whose keys are split over the device; another kernel merges the parts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CachedRate {
    /// The part of the peak rate that products reach where queries are many for each key/value head.
    pub efficiency: Sourced<f64>,
    /// The part of the memory bandwidth at which the cache is read.
    pub memory: Sourced<f64>,
}

/// Bytes in memory for each score of two bytes; of wider elements in proportion.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ScoreBytes {
    /// Read and written forward.
    pub forward: Sourced<f64>,
    /// Read and written backward.
    pub backward: Sourced<f64>,
    /// Held from the forward to the backward pass.
    pub saved: Sourced<f64>,
    /// More of each where there is dropout.
    pub dropout_forward: Sourced<f64>,
    /// More of each backward where there is dropout.
    pub dropout_backward: Sourced<f64>,
    /// More of each held where there is dropout.
    pub dropout_saved: Sourced<f64>,
}

/// Peak dense rates by element type, FLOP per second.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Peak {
    /// bfloat16.
    pub bf16: Sourced<f64>,
    /// IEEE half precision.
    pub f16: Sourced<f64>,
    /// IEEE single precision.
    pub f32: Sourced<f64>,
    /// IEEE double precision.
    pub f64: Sourced<f64>,
}

/// Parts of peak rates that kernels reach, each above 0 and at most 1, and how products fall short of theirs.
///
/// A product of `k` terms for each of `r` results takes `2 (r k + matmul_terms r + matmul_results k)` FLOPs at this part of
/// the peak rate, and its launch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Efficiency {
    /// Very large matrix products, of the peak rate.
    pub matmul: Sourced<f64>,
    /// As many terms as could be summed while a product begins and stores its results; 0 if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub matmul_terms: Option<Sourced<f64>>,
    /// As many results as could be computed by the part of the device that a product leaves idle; 0 if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub matmul_results: Option<Sourced<f64>>,
    /// The part of the peak rate that very large products keep under the load of a step, where that is less than `matmul`: devices
    /// lower their clock when tensor cores draw all their power. All products are slower by as much. `matmul` if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub matmul_limit: Option<Sourced<f64>>,
    /// Kernels that stream, of the memory bandwidth.
    pub memory: Sourced<f64>,
}

/// One level of the topology.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Level {
    /// The name, for example `nvlink`.
    pub name: String,
    /// Devices that the level joins; a multiple of the devices of the level inside.
    pub devices: Sourced<u64>,
    /// Devices of each block of the level that ranks take; all of them if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used: Option<Sourced<u64>>,
    /// Bandwidth of one device in one direction, bytes per second.
    pub bandwidth: Sourced<f64>,
    /// Links to different devices that make up this bandwidth: a message to one device has one of them. Left out, or 1, where a
    /// switch gives it all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub links: Option<Sourced<u64>>,
    /// Devices that share this bandwidth when all of them communicate; one where every device has its own link.
    pub contention: Sourced<f64>,
    /// One step of a ring (all-gather, reduce-scatter, all-reduce), seconds.
    pub latency: Sourced<f64>,
    /// One message of an all-to-all to the ranks of one block of the level inside, seconds.
    pub message_latency: Sourced<f64>,
    /// The time of a ring collective, or of one message to one rank, beside its steps, seconds: once where the level is the innermost
    /// that is crossed. Nothing if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ring_start: Option<Sourced<f64>>,
    /// The same for an all-to-all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exchange_start: Option<Sourced<f64>>,
    /// One round in which ranks signal that their data is ready and read that of their peers, seconds: half of an all-reduce
    /// by a kernel of its own, or all of one that reads everything from everyone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub direct_latency: Option<Sourced<f64>>,
    /// The part of the bandwidth that ring collectives reach.
    pub ring_efficiency: Sourced<f64>,
    /// The part of the bandwidth that an all-to-all reaches.
    pub exchange_efficiency: Sourced<f64>,
    /// The part of the bandwidth that a collective loses with each doubling of the blocks of the level inside that it joins,
    /// beyond two; nothing if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale_loss: Option<Sourced<f64>>,
    /// Measured times of collectives within one block of the level, used in place of the figures above where they apply.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<Measured>,
}

impl Level {
    /// Ranks of a full block of the level.
    pub fn ranks(&self) -> u64 {
        self.used.as_ref().unwrap_or(&self.devices).value.max(1)
    }
}

impl Cluster {
    /// Devices of the outermost level that ranks may take.
    pub fn devices(&self) -> u64 {
        match self.levels.as_slice() {
            [] => 1,
            [only] => only.ranks(),
            [.., block, outermost] => outermost.ranks() / block.devices.value.max(1) * block.ranks(),
        }
    }

    /// Bytes of memory that a plan may use on a device.
    pub fn usable_bytes(&self) -> u64 {
        let Accelerator { memory_bytes, reserve_fraction, .. } = &self.accelerator;
        (memory_bytes.value as f64 * (1.0 - reserve_fraction.value)) as u64
    }

    /// Bytes of host memory that each of so many ranks may use, where the cluster says how much a machine has: its share of
    /// what the operating system and the loading of data leave.
    pub fn host_bytes(&self, ranks: u64) -> Option<u64> {
        let of_machine = self.host_memory_bytes.as_ref()?.value as f64 * (1.0 - HOST_RESERVE);
        Some((of_machine / self.devices_per_node.value.min(ranks).max(1) as f64) as u64)
    }

    /// The property of the runtime that needs a figure which the cluster lacks, and the key of the figure.
    pub(super) fn missing_figure(&self) -> Option<(&'static str, &'static str)> {
        let direct = self.levels.iter().any(|level| level.direct_latency.is_some());
        match self.runtime {
            Runtime { launch: Launch::Graph, .. } if self.accelerator.graph_launch_seconds.is_none() => {
                Some(("graph", "accelerator.graph_launch_seconds"))
            }
            Runtime { all_reduce: AllReduce::Direct, .. } if !direct => {
                Some(("direct", "levels.direct_latency"))
            }
            _ => None,
        }
    }

    /// How servers decode, as far as the cluster has the figures.
    pub fn decoding_runtime(&self) -> Runtime {
        let direct = self.levels.iter().any(|level| level.direct_latency.is_some());
        Runtime {
            launch: self.accelerator.graph_launch_seconds.as_ref().map_or(Launch::Stream, |_| Launch::Graph),
            all_reduce: if direct { AllReduce::Direct } else { AllReduce::Nccl },
            experts: ExpertProducts::FilledSlots,
        }
    }

    /// Seconds to start a kernel.
    pub fn launch_seconds(&self) -> f64 {
        let accelerator = &self.accelerator;
        let recorded =
            accelerator.graph_launch_seconds.as_ref().filter(|_| self.runtime.launch == Launch::Graph);
        recorded.unwrap_or(&accelerator.launch_seconds).value
    }

    /// How many times longer work of the processor takes where `ranks` do it at a time, by the cores that they share.
    pub(crate) fn core_contention(&self, ranks: u64) -> f64 {
        self.accelerator.shared_cores.as_ref().map_or(1.0, |shared| shared.factor(ranks, 0.0))
    }

    /// Whether so many ranks leave none of the cores idle that they share.
    pub(crate) fn has_no_idle_core(&self, ranks: u64) -> bool {
        self.accelerator.shared_cores.as_ref().is_some_and(|shared| ranks >= shared.cores.value)
    }

    /// Seconds of a copy that reads and writes `bytes` in total; `name` is that of its kind of task.
    pub(crate) fn copy_seconds(&self, name: &str, bytes: f64) -> f64 {
        let launch = self.launch_seconds();
        let measured = self.accelerator.measured.as_ref().and_then(|m| m.seconds(name, launch, bytes));
        measured.unwrap_or_else(|| launch + self.stream_seconds(bytes))
    }

    /// Seconds of a copy of so many bytes between a device and the memory of its host.
    pub(crate) fn host_seconds(&self, bytes: u64) -> f64 {
        let rate = self.accelerator.host_bandwidth.as_ref().map_or(f64::INFINITY, |rate| rate.value);
        self.launch_seconds() + bytes as f64 / rate
    }

    /// Seconds in which a kernel reads and writes `bytes` in total, without its launch.
    pub fn stream_seconds(&self, bytes: f64) -> f64 {
        let Accelerator { memory_bandwidth, efficiency, .. } = &self.accelerator;
        bytes / (memory_bandwidth.value * efficiency.memory.value)
    }
}

impl Accelerator {
    /// The attention kernel that times and memory assume.
    pub fn assumed_attention(&self) -> &AttentionKernel {
        self.attention_called(&self.attention_kernel.value).expect("checked: the kernel is one of the list")
    }

    /// The attention kernel that times and memory assume, to change its figures.
    pub(crate) fn assumed_attention_mut(&mut self) -> &mut AttentionKernel {
        let assumed = &self.attention_kernel.value;
        let mut kernels = self.attention.iter_mut();
        kernels.find(|kernel| kernel.name == *assumed).expect("checked: the kernel is one of the list")
    }

    /// The attention kernel called `name`.
    pub fn attention_called(&self, name: &str) -> Option<&AttentionKernel> {
        self.attention.iter().find(|kernel| kernel.name == name)
    }
}

impl Level {
    /// Bytes per second of one device over a link that it has to itself.
    pub(super) fn rate(&self, pattern: Pattern) -> f64 {
        let efficiency = match pattern {
            Pattern::Ring { .. } => self.ring_efficiency.value,
            Pattern::Exchange => self.exchange_efficiency.value,
        };
        self.bandwidth.value * efficiency
    }

    /// The links to different devices.
    pub(super) fn links(&self) -> f64 {
        self.links.as_ref().map_or(1.0, |links| links.value as f64)
    }

    /// The part of the links that so many devices have among each other.
    pub(super) fn used(&self, devices: u64) -> f64 {
        (devices.saturating_sub(1).max(1) as f64).min(self.links()) / self.links()
    }

    /// Whether a device has links of its own to different devices.
    pub(crate) fn has_own_links(&self) -> bool {
        self.links() > 1.0
    }

    /// Seconds of a collective beside its steps, where this is the innermost level that it crosses.
    pub(super) fn start(&self, pattern: Pattern) -> f64 {
        let start = match pattern {
            Pattern::Ring { .. } => &self.ring_start,
            Pattern::Exchange => &self.exchange_start,
        };
        start.as_ref().map_or(0.0, |start| start.value)
    }

    /// The same of messages to one device.
    pub(super) fn rate_to_one(&self, pattern: Pattern) -> f64 {
        self.rate(pattern) / self.links()
    }

    /// The same of a collective that joins so many blocks of the level inside.
    pub(super) fn rate_across(&self, pattern: Pattern, blocks: u64) -> f64 {
        let loss = self.scale_loss.as_ref().map_or(0.0, |loss| loss.value);
        self.rate(pattern) * self.used(blocks) / (1.0 + loss * (blocks as f64 / 2.0).log2().max(0.0))
    }
}

impl Peak {
    /// The peak rate for elements of `dtype`; integers count as f32.
    pub fn of(&self, dtype: DType) -> f64 {
        match dtype {
            // Kernels widen eight bits as they read them.
            DType::BF16 | DType::F8E4M3 => self.bf16.value,
            DType::F16 => self.f16.value,
            DType::F32 | DType::I32 | DType::Bool => self.f32.value,
            DType::F64 => self.f64.value,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_share_the_cores_of_a_machine() {
        let number = |value| Sourced { value, source: "a test".to_owned() };
        let shared =
            SharedCores { cores: Sourced { value: 4, source: "a test".to_owned() }, flops: number(100.0) };
        for (ranks, flops, factor) in [
            (8, 1e9, 2.0),
            (6, 0.0, 1.5),
            (4, 1e9, 1.0),
            (2, 1e9, 0.5),
            (2, 150.0, 1.0),
            (1, 1e9, 0.25),
            (1, 250.0, 0.5),
            (1, 0.0, 1.0),
        ] {
            assert_eq!(shared.factor(ranks, flops), factor, "{ranks} ranks, {flops} FLOPs");
        }
    }

    #[test]
    fn ranks_of_a_machine_share_its_memory() {
        let mut cluster = Cluster::named("dgx-h100").unwrap();
        cluster.host_memory_bytes = Some(Sourced { value: 800, source: "a test".to_owned() });
        let shares = [1, 4, 8, 64].map(|ranks| cluster.host_bytes(ranks));
        assert_eq!(shares, [720, 180, 90, 90].map(Some));
        cluster.host_memory_bytes = None;
        assert_eq!(cluster.host_bytes(8), None);
    }
}
