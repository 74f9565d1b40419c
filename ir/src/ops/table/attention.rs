//! The attributes of attention.

use std::fmt;

use crate::dim::DimId;
use crate::mask::Mask;
use crate::ops::attr::{Attr, Names};
use crate::ops::attribute::{Refused, Value};
use crate::ops::declare::{attributes, call, words};

attributes! {
    /// Attributes of `attention`: the roles of the dimensions of q, k and v.
    ///
    /// `q [… queries heads width]`, `k [… keys kv_heads width]`, `v [… keys kv_heads e]` give `o [… queries heads e]` and,
    /// where requested, `lse [… queries heads]`; all of them share the leading dimensions. Query head `i` is served by
    /// key/value head `i / (heads / kv_heads)`. A query that sees no key has `o = 0` and `lse = −∞`.
    #[derive(Clone, Debug, PartialEq)]
    pub struct Attention {
        /// Query heads.
        pub heads: DimId,
        /// Key/value heads; each serves a run of heads / kv_heads query heads. May be `heads` itself.
        pub kv_heads: DimId,
        /// The query sequence.
        pub queries: DimId,
        /// The key sequence; may be `queries` itself, and may be fetched from it.
        pub keys: DimId,
        /// The width of a head, which the scores sum over.
        pub width: DimId,
        /// The keys that a query sees, by position; `docs/book/src/text.md` lists the masks.
        pub mask: Mask,
        /// The factor of the scores.
        pub scale: f64,
        /// The bound of the scaled scores, which become `softcap · tanh(score / softcap)` before the mask.
        pub softcap: Option<f64> = None,
        /// A bias that is added to the scores, learned by relative position; it is the operand after q, k and v.
        pub bias: Option<RelativeBias> = None,
        /// Attention weights that training sets to zero. The last operand, an `i32`, is the key that they are drawn from;
        /// without it every run drops the same weights.
        pub dropout: Option<Dropout> = None,
        /// Queries stand behind tokens of a cache: the operand after q, k, v and the bias, an `i32` over the dimensions in front,
        /// has the position of the first query.
        pub starts: bool = false,
        /// Sequences have ends of their own: the operand after q, k, v and the bias, an `i32` over the dimensions in front, has the
        /// number of keys of each sequence; keys behind are not seen. Not with `starts`.
        pub ends: bool = false,
        /// The cache is a ring: the key at index i is the last one whose position is i modulo the tokens of the cache. It has room for
        /// the tokens that the mask, a window, shows to a query, and those of the step.
        pub wraps: bool = false,
        /// Keys and values of a cache have eight bits and a scale for each row: the last two operands, `f32` over the
        /// dimensions of keys and of values but the last.
        pub scaled: bool = false,
        /// Keys and values are one tensor, of latents: the operand is given twice, and read once.
        pub latent: bool = false,
        /// The results: `output` only; `with_lse`, lse in `f32` too; `part`, both in `f32`, of the keys that the rank holds.
        pub returns: Returns = Returns::Output,
        /// The dimension that distinguishes the results of ranks with the same queries and other keys.
        pub parts: Option<DimId> = None,
        /// The order in which keys and queries visit each other, in sharded programs; lowering makes it explicit steps.
        pub movement: Option<Movement> = None,
    }
}

words! {
    /// The results of an attention.
    #[derive(Default)]
    pub enum Returns {
        /// The output, in the element type of q.
        #[default]
        Output = "output",
        /// The output and, in `f32`, the logarithm of the sum of exponentials of each query's scores.
        WithLse = "with_lse",
        /// Output and lse, both in `f32`, of the keys that the rank holds: a part that is to be merged.
        Part = "part",
    }
}

/// A movement by name, with its options, as `rotate` or `name(key=2)`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Movement {
    /// The name.
    pub name: String,
    /// Options, in order.
    pub options: Vec<(String, u64)>,
}

impl fmt::Display for Movement {
    /// `rotate`, `name(key=2)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        for (i, (key, value)) in self.options.iter().enumerate() {
            write!(f, "{}{key}={value}", if i == 0 { "(" } else { ", " })?;
        }
        f.write_str(if self.options.is_empty() { "" } else { ")" })
    }
}

impl Value for Movement {
    const KIND: &'static str = "a movement such as rotate, or name(option=2)";

    fn to_attr(&self, _: Names<'_>) -> Attr {
        if self.options.is_empty() {
            return Attr::Word(self.name.clone());
        }
        let options = self.options.iter().map(|(key, n)| (key.clone(), Attr::Int(*n)));
        Attr::Call(self.name.clone(), options.collect())
    }

    fn from_attr(attr: Attr, names: Names<'_>) -> Result<Self, Refused> {
        match attr {
            Attr::Word(name) => Ok(Movement { name, options: Vec::new() }),
            Attr::Call(name, args) => {
                let number = |(key, value)| Ok((key, u64::from_attr(value, names)?));
                Ok(Movement { name, options: args.into_iter().map(number).collect::<Result<_, Refused>>()? })
            }
            other => Err(Refused::Kind(other)),
        }
    }
}

call! {
    /// A bias `[buckets heads]`, learned for buckets of relative positions (T5: Raffel et al., arXiv 1910.10683, section 2.1).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct RelativeBias as "relative" {
        /// The dimension of buckets.
        pub buckets: DimId,
        /// The distance from which on all keys share the last bucket.
        pub max_distance: u64,
        /// The keys that have buckets of their own.
        pub sides: Sides,
    }
}

words! {
    /// The keys that have buckets of their own.
    pub enum Sides {
        /// Keys before and after the query: half of the buckets each.
        Both = "both",
        /// Keys before the query; those after it share the first bucket.
        Before = "before",
    }
}

call! {
    /// Dropout of attention weights.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct Dropout as "uniform" {
        /// The share of weights that become zero; the others are divided by one minus it.
        pub rate: f64,
        /// The seed of the generator.
        pub seed: u64,
        /// The index by which weights are drawn.
        pub keyed: Keyed,
    }
}

words! {
    /// The index by which a generator of random numbers is evaluated.
    pub enum Keyed {
        /// Sequence of the batch, head, position of the query and of the key: every layout drops the same weights.
        Position = "position",
        /// The order in which a device happens to compute: another layout drops other weights.
        Stream = "stream",
    }
}
