//! The choices of lowering: everything that is decided by prices or bytes while a program is compiled.
//!
//! A key names a place (a function, a dimension, a conversion of layouts) and no size, so the choices made for a large model
//! also compile a small one of the same structure. A compilation either makes choices by prices and records them, or
//! replays a record and asks no prices. In a record a choice that is missing is an error.

use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};

use ithaca_ir::ops::OpError;
use schemars::{JsonSchema, Schema, schema_for};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::prices::Prices;

/// The choices of one compilation: by kind, the text of each by its key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
#[schemars(transform = list_topics)]
pub struct Choices(BTreeMap<Topic, BTreeMap<String, String>>);

/// A kind of choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Topic {
    /// By dimension: the order of tokens that balances work.
    Orders,
    /// By function and table: whether the gradient of a look-up is computed by `tokens` or by `rows`.
    Lookups,
    /// By type: whether what passes from stage to stage is sent as `parts`, one by each of the ranks that have it, or `whole`.
    Sends,
    /// By name: whether a weight is `whole` or `split` among ranks that hold the same weights, where some are persistent.
    Weights,
    /// By mesh axis: the number of its ranks in a node, and whether its collectives are in two levels.
    Levels,
    /// By both types: the collectives that change a layout.
    Reshards,
    /// By function: the operations that become one kernel, each with its class of equal values and its place in it.
    Kernels,
    /// By function: the collectives that are one message, by their numbers among the collectives of the function.
    Messages,
    /// By function and loop: the nodes before which weights are gathered, and the gradients that the next layer reduces.
    Prefetch,
}

impl Display for Topic {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

impl Choices {
    /// The choices of a kind.
    pub fn of(&self, topic: Topic) -> &BTreeMap<String, String> {
        static EMPTY: BTreeMap<String, String> = BTreeMap::new();
        self.0.get(&topic).unwrap_or(&EMPTY)
    }

    fn insert(&mut self, topic: Topic, key: String, text: String) {
        self.0.entry(topic).or_default().insert(key, text);
    }
}

/// Replaces the schema of any key by the topics with their descriptions, which `schemars` has for keys without descriptions only.
fn list_topics(schema: &mut Schema) {
    let choices = schema.insert("additionalProperties".to_owned(), false.into()).unwrap_or_default();
    let topics = schema_for!(Topic).remove("oneOf");
    let properties = topics.iter().flat_map(|topics| topics.as_array()).flatten().map(|topic| {
        let mut property = choices.clone();
        property["description"] = topic["description"].clone();
        (topic["const"].as_str().expect("a topic is a name").to_owned(), property)
    });
    schema.insert("properties".to_owned(), Value::Object(properties.collect()));
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
pub(crate) struct ChoiceRecorder<'a> {
    source: Source<'a>,
    made: Choices,
    counts: BTreeMap<(Topic, String), u64>,
    open: Option<(Topic, String)>,
}

impl<'a> ChoiceRecorder<'a> {
    pub(crate) fn new(source: Source<'a>) -> Self {
        Self { source, made: Choices::default(), counts: BTreeMap::new(), open: None }
    }

    pub(crate) fn source(&self) -> Source<'a> {
        self.source
    }

    pub(crate) fn made(&self) -> &Choices {
        &self.made
    }

    pub(crate) fn choose(&mut self, topic: Topic, key: String) -> Result<Choice<'a>, OpError> {
        let n = self.counts.entry((topic, key.clone())).or_default();
        *n += 1;
        let key = if *n == 1 { key } else { format!("{key} #{n}") };
        match self.source {
            Source::Prices(prices) => {
                self.open = Some((topic, key));
                Ok(Choice::ByPrice(prices))
            }
            Source::Record(given) => {
                let Some(text) = given.of(topic).get(&key) else { return Err(missing(topic, &key)) };
                self.made.insert(topic, key, text.clone());
                Ok(Choice::Recorded(text))
            }
        }
    }

    pub(crate) fn record(&mut self, text: String) {
        let (topic, key) = self.open.take().expect("a choice is recorded after it is asked for");
        self.made.insert(topic, key, text);
    }
}

/// The refusal of a choice that is not recorded.
pub fn missing(topic: Topic, key: &str) -> OpError {
    OpError::new("P05", format!("the plan records no choice of `{topic}` for `{key}`"))
}

/// The refusal of a recorded choice that its program does not have, for the reason `why`.
pub fn impossible(topic: Topic, key: &str, text: &str, why: &str) -> OpError {
    OpError::new(
        "P05",
        format!("the plan records `{text}` as the choice of `{topic}` for `{key}`, but {why}"),
    )
}
