//! Clusters: the rates of an accelerator, the links between devices, and the source of each figure.
//!
//! A cluster is a TOML file in which every number stands beside its source, as `{ value = …, source = "…" }`; a number
//! without one is refused. Levels of the topology go from the inside out, each naming how many devices it joins.
//! Devices are numbered as ranks are: rank `r` is device `r`, so neighbouring ranks share the innermost level.
//! Profiles of common machines are built in; `collective` prices collectives.

mod between;
mod check;
mod collective;
mod curve;
mod description;
mod load;
mod message;
mod prices;
mod profiles;
mod read;
mod runtime;
mod spread;
mod write;

use ithaca_ir::{Diagnostic, Rank};

pub use between::RankExchange;
pub(crate) use collective::sent_bytes;
pub use curve::{Curve, KernelCurve, Measured, MeasuredKernels};
pub use description::{
    Accelerator, AttentionKernel, AttentionRate, CachedRate, Cluster, Efficiency, Level, Peak, ScoreBytes,
    SharedCores, Sourced,
};
pub use load::{Load, Part, Way};
pub use prices::{Collective, CollectiveTime};
pub use profiles::{builtin, names};
pub use runtime::{AllReduce, ExpertProducts, Launch, Runtime};

impl Cluster {
    /// The cluster that the TOML text describes; `name` is shown in diagnostics.
    ///
    /// # Errors
    /// `M20` when the text is not a cluster (not TOML, a key missing, unknown or without source), `M21` when a number
    /// cannot be (negative, zero, a fraction above one); both name the key.
    pub fn parse(name: &str, text: &str) -> Result<Self, Diagnostic> {
        read::parse(name, text)
    }

    /// Checks every number, for a cluster that came by another way than [`parse`](Self::parse).
    ///
    /// # Errors
    /// `M21`, naming the key.
    pub fn check(&self) -> Result<(), Diagnostic> {
        check::check(self)
    }

    /// The built-in profile called `name`.
    ///
    /// # Errors
    /// `M22`, listing the profiles.
    pub fn named(name: &str) -> Result<Self, Diagnostic> {
        builtin(name).ok_or_else(|| {
            Diagnostic::new("M22", format!("there is no cluster called `{name}`")).names(
                "clusters, beside the path of a cluster file",
                name,
                names(),
            )
        })
    }

    /// The number of the innermost level that joins two devices; of the outermost where none does.
    pub fn level_between(&self, a: Rank, b: Rank) -> usize {
        let joins = |level: &Level| {
            let ranks = level.ranks();
            a.0 / ranks == b.0 / ranks
        };
        self.levels.iter().position(joins).unwrap_or(self.levels.len().saturating_sub(1))
    }

    /// The same cluster, in which so many ranks take as many devices of every block of several nodes, such as a rack, as job
    /// schedulers do: of the fewest blocks among which the ranks divide in whole nodes, at most twice those that they fill. Where
    /// there are none, or the description says how many devices are used, ranks take one device after another.
    #[must_use]
    pub fn spread(mut self, ranks: u64) -> Self {
        self.ranks = Some(ranks);
        let total = self.devices();
        let Some(i) = self.levels.len().checked_sub(2) else { return self };
        let inside = i.checked_sub(1).map_or(1, |inside| self.levels[inside].ranks());
        let node = self.devices_per_node.value.max(inside);
        let level = &mut self.levels[i];
        let devices = level.devices.value;
        if level.used.is_some() || devices <= node || ranks <= devices || ranks.is_multiple_of(devices) {
            return self;
        }
        let fewest = ranks.div_ceil(devices);
        let mut blocks = fewest..=(2 * fewest).min(total / devices);
        if let Some(blocks) = blocks.find(|blocks| ranks.is_multiple_of(blocks * node)) {
            let source = format!("{ranks} ranks, as many in each of {blocks} blocks");
            level.used = Some(Sourced { value: ranks / blocks, source });
        }
        self
    }

    /// The same cluster, on which times and memory assume the attention kernel called `name`.
    ///
    /// # Errors
    /// `M22`, listing the kernels of the accelerator.
    pub fn with_attention_kernel(mut self, name: &str) -> Result<Self, Diagnostic> {
        let accelerator = &mut self.accelerator;
        if accelerator.attention_called(name).is_none() {
            let message = format!("{} has no attention kernel called `{name}`", accelerator.name);
            let kernels = accelerator.attention.iter().map(|kernel| kernel.name.as_str());
            return Err(Diagnostic::new("M22", message).names("attention kernels", name, kernels));
        }
        if accelerator.attention_kernel.value != name {
            let source = "the request of the plan".to_owned();
            accelerator.attention_kernel = Sourced { value: name.to_owned(), source };
        }
        Ok(self)
    }

    /// The same cluster, on which steps run so.
    ///
    /// # Errors
    /// `M22` where the cluster lacks a figure that the runtime needs.
    pub fn with_runtime(mut self, runtime: Runtime) -> Result<Self, Diagnostic> {
        self.runtime = runtime;
        match self.missing_figure() {
            None => Ok(self),
            Some((word, key)) => {
                let message =
                    format!("`{word}` needs the figure `{key}`, which cluster `{}` lacks", self.name);
                Err(Diagnostic::new("M22", message)
                    .help("add it to a cluster file (docs/book/src/clusters.md), or choose another runtime"))
            }
        }
    }
}
