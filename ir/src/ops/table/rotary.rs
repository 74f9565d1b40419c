//! The attributes of rotary position embedding.

use crate::ops::attr::{Attr, Attrs, Names};
use crate::ops::attribute::{Attribute, Refused, Value};
use crate::ops::declare::{attributes, words};

attributes! {
    /// Attributes of `rotary`.
    #[derive(Clone, Debug, PartialEq)]
    pub struct Rotary {
        /// The dimension whose pairs are rotated.
        pub over: crate::dim::DimId,
        /// The number of elements that are rotated, even; the elements after them stay as they are.
        pub width: u64,
        /// The base of the frequencies.
        pub theta: f64,
        /// The change of frequencies beyond the trained length.
        pub scaling: Scaling,
        /// The elements that form a pair.
        pub pairs: Pairs = Pairs::Halves,
        /// The direction of the rotation.
        pub turn: Direction = Direction::Forward,
    }
}

words! {
    /// The elements that form a pair.
    #[derive(Default)]
    pub enum Pairs {
        /// Element `i` of the first half of the width and element `i` of the second.
        #[default]
        Halves = "halves",
        /// Elements `2i` and `2i + 1`.
        Neighbours = "neighbours",
    }
}

words! {
    /// The direction of a rotation.
    #[derive(Default)]
    pub enum Direction {
        /// By the angle of the position.
        #[default]
        Forward = "forward",
        /// By the opposite angle: the adjoint.
        Inverse = "back",
    }
}

/// The scaling of rotary frequencies.
#[derive(Clone, Debug, PartialEq)]
pub enum Scaling {
    /// None.
    None,
    /// Every frequency divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3.1: long wavelengths divided, short ones kept, a ramp between.
    Llama3 {
        /// The divisor of long wavelengths.
        factor: f64,
        /// Wavelengths above `original / low` are divided.
        low: f64,
        /// Wavelengths below `original / high` are kept.
        high: f64,
        /// The trained length, tokens.
        original: f64,
    },
    /// YaRN (Peng et al., arXiv 2309.00071): a ramp over pair indices, and scores sharpened by `attention`.
    Yarn {
        /// The divisor of slow pairs.
        factor: f64,
        /// Pairs that turn more often than this within `original` are kept.
        beta_fast: f64,
        /// Pairs that turn less often than this within `original` are divided.
        beta_slow: f64,
        /// The trained length, tokens.
        original: f64,
        /// Factor of cosine and sine.
        attention: f64,
        /// Whether the ramp's ends are rounded outward to whole pairs.
        truncate: bool,
    },
}

impl Value for Scaling {
    const KIND: &'static str = "none, linear(…), llama3(…) or yarn(…)";

    fn to_attr(&self, _: Names<'_>) -> Attr {
        let call = |name: &str, args: &[(&str, f64)]| {
            let args = args.iter().map(|&(key, x)| (key.to_owned(), Attr::Float(x)));
            (name.to_owned(), args.collect::<Vec<_>>())
        };
        let (name, args) = match *self {
            Scaling::None => return Attr::Word("none".to_owned()),
            Scaling::Linear { factor } => call("linear", &[("factor", factor)]),
            Scaling::Llama3 { factor, low, high, original } => {
                call("llama3", &[("factor", factor), ("low", low), ("high", high), ("original", original)])
            }
            Scaling::Yarn { factor, beta_fast, beta_slow, original, attention, truncate } => {
                let numbers = [
                    ("factor", factor),
                    ("beta_fast", beta_fast),
                    ("beta_slow", beta_slow),
                    ("original", original),
                    ("attention", attention),
                ];
                let (name, mut args) = call("yarn", &numbers);
                args.push(("truncate".to_owned(), Attr::Word(truncate.to_string())));
                (name, args)
            }
        };
        Attr::Call(name, args)
    }

    fn from_attr(attr: Attr, names: Names<'_>) -> Result<Self, Refused> {
        let (name, args) = match attr {
            Attr::Word(word) if word == "none" => return Ok(Scaling::None),
            Attr::Call(name, args) => (name, args),
            other => return Err(Refused::Kind(other)),
        };
        let mut args = Attrs::new(name.as_str(), args);
        let mut number = |key| f64::read(&mut args, key, None, names);
        let scaling = match name.as_str() {
            "linear" => Scaling::Linear { factor: number("factor")? },
            "llama3" => Scaling::Llama3 {
                factor: number("factor")?,
                low: number("low")?,
                high: number("high")?,
                original: number("original")?,
            },
            "yarn" => Scaling::Yarn {
                factor: number("factor")?,
                beta_fast: number("beta_fast")?,
                beta_slow: number("beta_slow")?,
                original: number("original")?,
                attention: number("attention")?,
                truncate: bool::read(&mut args, "truncate", None, names)?,
            },
            other => return Err(Refused::Message(format!("`{other}` is not a scaling of `rotary`"))),
        };
        args.finish()?;
        Ok(scaling)
    }
}
