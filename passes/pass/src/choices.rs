//! The choices of lowering: everything that is decided by prices or bytes while a program is compiled.
//!
//! A key names a place (a function, a dimension, a conversion of layouts) and no size, so the choices made for a large model
//! also compile a small one of the same structure. A compilation either makes choices by prices and records them, or
//! replays a record and asks no prices. In a record a choice that is missing is an error.

use std::collections::BTreeMap;

use ithaca_ir::ops::OpError;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::prices::Prices;

/// The choices of one compilation, as text by key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Choices {
    /// By dimension: the order of tokens that balances work.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub orders: BTreeMap<String, String>,
    /// By function and table: whether the gradient of a look-up is computed by `tokens` or by `rows`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub lookups: BTreeMap<String, String>,
    /// By type: whether what passes from stage to stage is sent as `parts`, one by each of the ranks that have it, or `whole`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub sends: BTreeMap<String, String>,
    /// By name: whether a weight is `whole` or `split` among ranks that hold the same weights, where some are persistent.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub weights: BTreeMap<String, String>,
    /// By mesh axis: the number of its ranks in a node, and whether its collectives are in two levels.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub levels: BTreeMap<String, String>,
    /// By both types: the collectives that change a layout.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub reshards: BTreeMap<String, String>,
    /// By function: the operations that become one kernel, each with its class of equal values and its place in it.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub kernels: BTreeMap<String, String>,
    /// By function: the collectives that are one message, by their numbers among the collectives of the function.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub messages: BTreeMap<String, String>,
    /// By function and loop: the nodes before which weights are gathered, and the gradients that the next layer reduces.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub prefetch: BTreeMap<String, String>,
}

/// A kind of choice: a field of [`Choices`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Topic {
    /// Token orders.
    Orders,
    /// Gradients of look-ups.
    Lookups,
    /// Transfers between stages of a pipeline.
    Sends,
    /// Weights that stay whole.
    Weights,
    /// Collectives in two levels.
    Levels,
    /// Conversions of layouts.
    Reshards,
    /// Fused operations.
    Kernels,
    /// Coalesced collectives.
    Messages,
    /// Positions of gathers and deferred reductions.
    Prefetch,
}

impl Topic {
    /// The field.
    pub fn name(self) -> &'static str {
        match self {
            Topic::Orders => "orders",
            Topic::Lookups => "lookups",
            Topic::Sends => "sends",
            Topic::Weights => "weights",
            Topic::Levels => "levels",
            Topic::Reshards => "reshards",
            Topic::Kernels => "kernels",
            Topic::Messages => "messages",
            Topic::Prefetch => "prefetch",
        }
    }
}

impl Choices {
    /// The choices of a kind.
    pub fn of(&self, topic: Topic) -> &BTreeMap<String, String> {
        match topic {
            Topic::Orders => &self.orders,
            Topic::Lookups => &self.lookups,
            Topic::Sends => &self.sends,
            Topic::Weights => &self.weights,
            Topic::Levels => &self.levels,
            Topic::Reshards => &self.reshards,
            Topic::Kernels => &self.kernels,
            Topic::Messages => &self.messages,
            Topic::Prefetch => &self.prefetch,
        }
    }

    fn of_mut(&mut self, topic: Topic) -> &mut BTreeMap<String, String> {
        match topic {
            Topic::Orders => &mut self.orders,
            Topic::Lookups => &mut self.lookups,
            Topic::Sends => &mut self.sends,
            Topic::Weights => &mut self.weights,
            Topic::Levels => &mut self.levels,
            Topic::Reshards => &mut self.reshards,
            Topic::Kernels => &mut self.kernels,
            Topic::Messages => &mut self.messages,
            Topic::Prefetch => &mut self.prefetch,
        }
    }
}

/// How choices are made.
#[derive(Clone, Copy)]
pub enum Source<'a> {
    /// By these prices.
    Prices(&'a dyn Prices),
    /// As they were made before.
    Record(&'a Choices),
}

/// One choice to make.
pub enum Choice<'a> {
    /// It is made by these prices, and recorded.
    ByPrice(&'a dyn Prices),
    /// It was made: its text.
    Recorded(&'a str),
}

/// The choices of a run of passes, as they are made or replayed.
pub(crate) struct Chooser<'a> {
    source: Source<'a>,
    made: Choices,
    asked: BTreeMap<(Topic, String), u64>,
    open: Option<(Topic, String)>,
}

impl<'a> Chooser<'a> {
    pub(crate) fn new(source: Source<'a>) -> Self {
        Self { source, made: Choices::default(), asked: BTreeMap::new(), open: None }
    }

    pub(crate) fn source(&self) -> Source<'a> {
        self.source
    }

    pub(crate) fn made(&self) -> &Choices {
        &self.made
    }

    pub(crate) fn ask(&mut self, topic: Topic, key: String) -> Result<Choice<'a>, OpError> {
        let n = self.asked.entry((topic, key.clone())).or_default();
        *n += 1;
        let key = if *n == 1 { key } else { format!("{key} #{n}") };
        match self.source {
            Source::Prices(prices) => {
                self.open = Some((topic, key));
                Ok(Choice::ByPrice(prices))
            }
            Source::Record(given) => {
                let Some(text) = given.of(topic).get(&key) else { return Err(missing(topic, &key)) };
                self.made.of_mut(topic).insert(key, text.clone());
                Ok(Choice::Recorded(text))
            }
        }
    }

    pub(crate) fn record(&mut self, text: String) {
        let (topic, key) = self.open.take().expect("a choice is recorded after it is asked for");
        self.made.of_mut(topic).insert(key, text);
    }
}

/// The refusal of a choice that is not recorded.
pub fn missing(topic: Topic, key: &str) -> OpError {
    OpError::new("P05", format!("the plan records no choice of `{}` for `{key}`", topic.name()))
}

/// The refusal of a recorded choice that its program does not have, for the reason `why`.
pub fn impossible(topic: Topic, key: &str, text: &str, why: &str) -> OpError {
    let topic = topic.name();
    OpError::new(
        "P05",
        format!("the plan records `{text}` as the choice of `{topic}` for `{key}`, but {why}"),
    )
}
