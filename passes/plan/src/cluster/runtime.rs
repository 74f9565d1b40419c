//! How a step is run, as far as its time depends on it: which of the figures of a cluster hold.
//!
//! Prefill and training are priced as the emitted programs run them: kernels are launched one by one, NCCL reduces, and products of
//! experts multiply all slots unless they are few. Servers decode with recorded graphs, all-reduces of their own and grouped products, so decoding is
//! priced with those, where the profile has their figures.

use ithaca_ir::Diagnostic;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How a step is run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Runtime {
    /// How kernels are started.
    pub launch: Launch,
    /// Who reduces.
    pub all_reduce: AllReduce,
    /// The slots that products of experts multiply.
    pub experts: ExpertProducts,
}

/// How kernels are started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Launch {
    /// The host launches one after another (`launch_seconds`).
    #[default]
    Stream,
    /// They are nodes of a recorded graph (`graph_launch_seconds`).
    Graph,
}

/// Who reduces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AllReduce {
    /// NCCL.
    #[default]
    Nccl,
    /// A kernel that reads the memory of its peers (`direct_latency`), where that is faster.
    Direct,
}

/// The slots that products of experts multiply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ExpertProducts {
    /// All of them, where an expert has more than `FEW_SLOTS` on a rank.
    #[default]
    AllSlots,
    /// Those that are filled: grouped products. Weights of experts that no token chose are not read.
    FilledSlots,
}

ithaca_ir::spellings! {
    Launch {
        Stream = "stream",
        Graph = "graph",
    }
}

ithaca_ir::spellings! {
    AllReduce {
        Nccl = "nccl",
        Direct = "direct",
    }
}

ithaca_ir::spellings! {
    ExpertProducts {
        AllSlots = "all-slots",
        FilledSlots = "filled-slots",
    }
}

impl Runtime {
    /// Whether it is that of prefill and training.
    pub(super) fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Whether all-to-alls of filled rows send all rows: the host reads the counts, and a recorded graph has none, except in servers
    /// whose kernels read them.
    pub(super) fn sends_all_rows(self) -> bool {
        self.launch == Launch::Graph && self.experts == ExpertProducts::AllSlots
    }

    /// The list of changes that make this runtime of another; empty of the same.
    pub fn changes_from(self, other: Self) -> String {
        let [own, others] = [self, other].map(|r| [r.launch.name(), r.all_reduce.name(), r.experts.name()]);
        let changes = own.into_iter().zip(others).filter(|(own, other)| own != other);
        changes.map(|(own, _)| own).collect::<Vec<_>>().join(",")
    }

    /// This runtime with the changes that `text` lists, for example `stream,nccl`.
    ///
    /// # Errors
    /// `M22` for a word that there is not.
    pub fn changed(mut self, text: &str) -> Result<Self, Diagnostic> {
        let words: Vec<&str> = text.split(',').map(str::trim).collect();
        // Properties come in pairs of which a runtime has one.
        let pairs = [
            Launch::ALL.map(Launch::name),
            AllReduce::ALL.map(AllReduce::name),
            ExpertProducts::ALL.map(ExpertProducts::name),
        ];
        if let Some([a, b]) = pairs.iter().find(|pair| pair.iter().all(|word| words.contains(word))) {
            let message = format!("a runtime is `{a}` or `{b}`, not both");
            return Err(Diagnostic::new("M22", message).help("leave one of them out"));
        }
        for word in words {
            if let Some(launch) = Launch::parse(word) {
                self.launch = launch;
            } else if let Some(all_reduce) = AllReduce::parse(word) {
                self.all_reduce = all_reduce;
            } else if let Some(experts) = ExpertProducts::parse(word) {
                self.experts = experts;
            } else {
                let message = format!("a runtime has no property called `{word}`");
                return Err(Diagnostic::new("M22", message).names("properties", word, pairs.concat()));
            }
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Cluster;
    use super::*;

    #[test]
    fn a_runtime_is_a_list_of_changes() {
        let all = Runtime::default().changed("graph, direct,filled-slots").unwrap();
        assert_eq!(all, Cluster::named("dgx-h100").unwrap().decoding_runtime());
        assert_eq!(all.changed("stream,nccl,all-slots").unwrap(), Runtime::default());
        let prompts = all.changed("stream").unwrap();
        assert_eq!(prompts.changes_from(Runtime::default()), "direct,filled-slots");
        assert_eq!((prompts.changes_from(all), all.changes_from(all)), ("stream".to_owned(), String::new()));
        let refusal = Runtime::default().changed("direct,graph,nccl").unwrap_err();
        assert!(refusal.message.contains("`nccl` or `direct`"), "{refusal}");
        let refusal = Runtime::default().changed("graf").unwrap_err();
        assert!(refusal.code == "M22" && refusal.message.contains("`graf`"), "{refusal}");
    }

    #[test]
    fn a_figure_that_is_missing_is_named() {
        let cpu = Cluster::named("cpu").unwrap();
        let graph = Runtime { launch: Launch::Graph, ..Runtime::default() };
        let refusal = cpu.clone().with_runtime(graph).unwrap_err();
        assert!(refusal.message.contains("accelerator.graph_launch_seconds"), "{refusal}");
        let usual = cpu.decoding_runtime();
        assert_eq!((usual.launch, usual.all_reduce), (Launch::Stream, AllReduce::Nccl));
    }
}
