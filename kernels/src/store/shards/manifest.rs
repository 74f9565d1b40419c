//! The metadata of the files of a cut checkpoint.

use std::collections::BTreeMap;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::error::ShardError;
use super::part::Part;
use crate::store::{About, Entry, SafeTensorsFile, StoreError, Stored};

/// The index of a folder of parts.
pub const INDEX: &str = "shards.json";

/// The file of the elements that no rank holds.
pub const REST: &str = "rest.safetensors";

/// The version of the format.
pub(super) const VERSION: u32 = 1;

/// The metadata key of a file of parts.
const KEY: &str = "ithaca.shard";

/// The file of a rank.
pub fn rank_file(rank: u64) -> String {
    format!("rank-{rank:05}.safetensors")
}

/// The plan for which a checkpoint is cut.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// The digest of the plan.
    pub plan: String,
    /// The model.
    pub model: String,
    /// The strategy.
    pub strategy: String,
    /// The mesh.
    pub mesh: String,
}

/// The index.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Index {
    /// The version of this document.
    pub(super) version: u32,
    /// The plan.
    pub(super) identity: Identity,
    /// Number of ranks, each with its file.
    pub(super) ranks: u64,
    /// Whether there is a file of the rest.
    pub(super) has_rest: bool,
    /// The metadata of the checkpoint.
    pub(super) about: About,
    /// The stored tensors that have parts.
    pub(super) tensors: BTreeMap<String, Whole>,
}

/// A stored tensor, whole.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Whole {
    /// Its element type.
    pub(super) dtype: Stored,
    /// Its shape; a stack's has the number of its members first.
    pub(super) shape: Vec<u64>,
}

/// The metadata of a rank's file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Shard {
    /// The version of this document.
    pub(super) version: u32,
    /// The digest of the plan.
    pub(super) plan: String,
    /// The rank.
    pub(super) rank: u64,
    /// Number of ranks.
    pub(super) ranks: u64,
    /// The part of each tensor of the file.
    pub(super) parts: BTreeMap<String, Part>,
}

impl Whole {
    /// The tensor under its name.
    pub(super) fn entry(&self, name: &str) -> Entry {
        Entry { name: name.to_owned(), stored: self.dtype, shape: self.shape.clone() }
    }
}

impl Index {
    /// The document.
    pub(super) fn to_json(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("an index is JSON");
        text.push('\n');
        text
    }

    /// Reads the index of a folder.
    ///
    /// # Errors
    /// [`StoreError::Io`] when it is missing; [`ShardError::Invalid`] for another document or version.
    pub(super) fn read(folder: &Path) -> Result<Self, ShardError> {
        let path = folder.join(INDEX);
        let text = crate::store::whole::read_document(&path).map_err(StoreError::io("open", &path))?;
        parse(&path, &text)
    }
}

impl Shard {
    /// The metadata of `rank`'s file with these parts.
    pub(super) fn new(index: &Index, rank: u64, parts: BTreeMap<String, Part>) -> Self {
        let plan = index.identity.plan.clone();
        Self { version: VERSION, plan, rank, ranks: index.ranks, parts }
    }

    /// Metadata of the file.
    pub(super) fn about(&self) -> About {
        let text = serde_json::to_string(self).expect("the metadata of a shard is JSON");
        [(KEY.to_owned(), text), ("format".to_owned(), "pt".to_owned())].into()
    }

    /// The metadata of a file, which must be that of `rank` of this index.
    ///
    /// # Errors
    /// [`ShardError::Invalid`] for another file, [`ShardError::OtherPlan`].
    pub(super) fn of(file: &SafeTensorsFile, index: &Index, rank: u64) -> Result<Self, ShardError> {
        let invalid = |reason: String| ShardError::Invalid { path: file.path().to_owned(), reason };
        let about = file.about();
        let text = about.get(KEY).ok_or_else(|| invalid(format!("its metadata has no `{KEY}`")))?;
        let shard: Self = parse(file.path(), text)?;
        if shard.plan != index.identity.plan {
            return Err(ShardError::OtherPlan {
                path: file.path().to_owned(),
                found: shard.plan,
                expected: index.identity.plan.clone(),
            });
        }
        if (shard.rank, shard.ranks) != (rank, index.ranks) {
            return Err(invalid(format!(
                "it is of rank {} of {}, but rank {rank} of {} is expected",
                shard.rank, shard.ranks, index.ranks
            )));
        }
        for (name, part) in &shard.parts {
            part.check().map_err(|reason| invalid(format!("`{name}`: {reason}")))?;
        }
        Ok(shard)
    }
}

/// A document of the version that is read here.
fn parse<T: DeserializeOwned>(path: &Path, text: &str) -> Result<T, ShardError> {
    let invalid = |reason: String| ShardError::Invalid { path: path.to_owned(), reason };
    let value: serde_json::Value = serde_json::from_str(text).map_err(|e| invalid(e.to_string()))?;
    match value.get("version").and_then(serde_json::Value::as_u64) {
        Some(version) if version == u64::from(VERSION) => {}
        Some(version) => return Err(invalid(format!("version {version} is not {VERSION}"))),
        None => return Err(invalid("it has no version".to_owned())),
    }
    serde_json::from_value(value).map_err(|e| invalid(e.to_string()))
}
