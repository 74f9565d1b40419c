//! Options of passes: structs with derived serde traits, read from the text of a pipeline and written to it.
//!
//! A pass declares its options once. [`read`] fills the struct from the `key=value` pairs of a pipeline, [`write()`]
//! returns the pairs that differ from the default. A value is a number, the name of a variant, a text that a type parses
//! ([`mod@text`]), or a list of these joined by `+`.

use std::cell::Cell;
use std::fmt::{self, Display};

use ithaca_ir::Diagnostic;
use ithaca_ir::diagnostic::nearest;
use serde::de::value::{MapDeserializer, SeqDeserializer, StrDeserializer};
use serde::de::{self, DeserializeOwned, Deserializer, IntoDeserializer, Visitor};
use serde::{Deserialize, Serialize, forward_to_deserialize_any};
use serde_json::Value;

use crate::Pass;

/// The options of a pass without options.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NoOptions {}

/// Reads the options of `pass`; `usage` lists them for a reader.
///
/// # Errors
/// `P02` for an option that is unknown, missing, given twice, or has a value that it does not take.
pub fn read<T: DeserializeOwned>(
    pass: &str,
    usage: &str,
    options: &[(String, String)],
) -> Result<T, Diagnostic> {
    let last = Cell::new(None);
    let pairs = options.iter().inspect(|&pair| last.set(Some(pair)));
    let pairs = pairs.map(|(key, value)| (key.as_str(), Word(value)));
    T::deserialize(MapDeserializer::new(pairs)).map_err(|problem| {
        let refuse = |message: String| Diagnostic::new("P02", message);
        let (key, value) = last.get().cloned().unwrap_or_default();
        let of_option =
            |expected: &str| refuse(format!("option `{key}={value}` of `{pass}` is not {expected}"));
        match problem {
            Problem::Unknown(_) => {
                let refusal = refuse(format!("`{pass}` has no option `{key}`"));
                // A struct may have a part of the options only; the usage has all.
                let items = usage.split([',', ';']).filter_map(|item| item.split_once('='));
                let near = nearest(&key, items.map(|(name, _)| name.trim()));
                let refusal = near.iter().fold(refusal, |d, near| d.help(format!("did you mean `{near}`?")));
                refusal.help(format!("options: {usage}"))
            }
            Problem::Missing(name) => {
                refuse(format!("`{pass}` needs an option `{name}`")).help(format!("options: {usage}"))
            }
            Problem::Twice(name) => refuse(format!("option `{name}` of `{pass}` is given twice")),
            Problem::Variant(known) => {
                let refusal = of_option(&format!("one of {}", known.join(", ")));
                nearest(&value, known.iter().copied())
                    .iter()
                    .fold(refusal, |d, near| d.help(format!("did you mean `{near}`?")))
            }
            Problem::Value(expected) => of_option(&expected),
        }
    })
}

/// The pass whose fields are its options, as by [`read`].
///
/// # Errors
/// Those of [`read`].
pub fn pass<P: Pass + DeserializeOwned + 'static>(
    pass: &str,
    usage: &str,
    options: &[(String, String)],
) -> Result<Box<dyn Pass>, Diagnostic> {
    Ok(Box::new(read::<P>(pass, usage, options)?))
}

/// The options in a pipeline, in the order of the fields, without those with their default value.
pub fn write<T: Serialize + Default>(options: &T) -> Vec<(String, String)> {
    let fields = |options: &T| match serde_json::to_value(options) {
        Ok(Value::Object(fields)) => fields,
        Ok(_) | Err(_) => unreachable!("options are a struct with fields that have texts"),
    };
    let standard = fields(&T::default());
    let changed = fields(options).into_iter().filter(|(key, value)| standard.get(key) != Some(value));
    changed.filter(|(_, value)| !value.is_null()).map(|(key, value)| (key, value_text(&value))).collect()
}

/// Pairs of the options of `T`, and all others, each in their order.
pub fn split<T: DeserializeOwned>(options: &[(String, String)]) -> [Vec<(String, String)>; 2] {
    let names = names::<T>();
    let (own, others) = options.iter().cloned().partition(|(key, _)| names.contains(&key.as_str()));
    [own, others]
}

/// The names of the options of `T`, a struct that denies unknown fields.
pub fn names<T: DeserializeOwned>() -> &'static [&'static str] {
    match T::deserialize(MapDeserializer::new(std::iter::once(("", Word(""))))) {
        Err(Problem::Unknown(names)) => names,
        Ok(_) | Err(_) => unreachable!("options deny a field without a name"),
    }
}

/// A whole number from `MIN` to `MAX`, for `deserialize_with`.
///
/// # Errors
/// Another value.
pub fn whole<'de, D: Deserializer<'de>, const MIN: u64, const MAX: u64>(
    deserializer: D,
) -> Result<u64, D::Error> {
    let n = u64::deserialize(deserializer).ok().filter(|n| (MIN..=MAX).contains(n));
    n.ok_or_else(|| de::Error::custom(format!("a whole number from {MIN} to {MAX}")))
}

/// As [`whole`], of an option that may be absent.
///
/// # Errors
/// Another value.
pub fn optional_whole<'de, D: Deserializer<'de>, const MIN: u64, const MAX: u64>(
    deserializer: D,
) -> Result<Option<u64>, D::Error> {
    whole::<D, MIN, MAX>(deserializer).map(Some)
}

/// A finite number that fits, for `deserialize_with`; `expected` describes those that do.
///
/// # Errors
/// Another value.
pub fn number<'de, D: Deserializer<'de>>(
    deserializer: D,
    fits: impl Fn(f64) -> bool,
    expected: &str,
) -> Result<f64, D::Error> {
    let number = f64::deserialize(deserializer).ok().filter(|&x| x.is_finite() && fits(x));
    number.ok_or_else(|| de::Error::custom(expected))
}

/// For `with`: a value in the text that its type prints and parses; the error of the parser describes the expected texts.
pub mod text {
    use super::*;

    /// Writes the text.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn serialize<S: serde::Serializer>(value: &impl Display, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(value)
    }

    /// Reads the text.
    ///
    /// # Errors
    /// A text that the type does not parse.
    pub fn deserialize<'de, T, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error>
    where
        T: std::str::FromStr<Err: Display>,
    {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// For `serialize_with`: writes the text of an option that may be absent.
///
/// # Errors
/// Those of the serializer.
pub fn optional_text<S: serde::Serializer>(
    value: &Option<impl Display>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    value.as_ref().map(ToString::to_string).serialize(serializer)
}

fn value_text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::Bool(flag) => flag.to_string(),
        Value::Number(number) => match number.as_f64().filter(|_| number.is_f64()) {
            Some(number) => format!("{number:?}"),
            None => number.to_string(),
        },
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(value_text).collect::<Vec<_>>().join("+"),
        Value::Object(_) => unreachable!("an option is no struct"),
    }
}

/// The reason of a refusal; it concerns the option that was read last.
#[derive(Debug)]
enum Problem {
    /// The option is unknown; these are known.
    Unknown(&'static [&'static str]),
    /// A required option is missing.
    Missing(&'static str),
    /// An option is repeated.
    Twice(&'static str),
    /// The value is not one of these choices.
    Variant(&'static [&'static str]),
    /// The value does not fit this description.
    Value(String),
}

impl Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

impl std::error::Error for Problem {}

impl de::Error for Problem {
    fn custom<T: Display>(expected: T) -> Self {
        Self::Value(expected.to_string())
    }

    fn invalid_type(_found: de::Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        Self::Value(expected.to_string())
    }

    fn invalid_value(_found: de::Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        Self::Value(expected.to_string())
    }

    fn unknown_variant(_found: &str, known: &'static [&'static str]) -> Self {
        Self::Variant(known)
    }

    fn unknown_field(_found: &str, known: &'static [&'static str]) -> Self {
        Self::Unknown(known)
    }

    fn missing_field(name: &'static str) -> Self {
        Self::Missing(name)
    }

    fn duplicate_field(name: &'static str) -> Self {
        Self::Twice(name)
    }
}

/// One value.
#[derive(Clone, Copy)]
struct Word<'a>(&'a str);

impl<'a> IntoDeserializer<'_, Problem> for Word<'a> {
    type Deserializer = Word<'a>;

    fn into_deserializer(self) -> Word<'a> {
        self
    }
}

impl Word<'_> {
    fn parse<T: std::str::FromStr>(self, expected: &str) -> Result<T, Problem> {
        self.0.trim().parse().map_err(|_| Problem::Value(expected.to_owned()))
    }
}

impl<'de> Deserializer<'de> for Word<'_> {
    type Error = Problem;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
        visitor.visit_str(self.0)
    }

    fn deserialize_u64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
        visitor.visit_u64(self.parse("a whole number")?)
    }

    fn deserialize_f64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
        visitor.visit_f64(self.parse("a number")?)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Problem> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
        visitor.visit_seq(SeqDeserializer::new(self.0.split('+').map(|item| Word(item.trim()))))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Problem> {
        let word: StrDeserializer<'_, Problem> = self.0.into_deserializer();
        word.deserialize_enum(name, variants, visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u128 f32 char str string bytes byte_buf unit unit_struct tuple tuple_struct
        map struct identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
    #[serde(rename_all = "kebab-case")]
    enum Size {
        #[default]
        Small,
        VeryLarge,
    }

    #[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
    #[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
    struct Options {
        #[serde(deserialize_with = "whole::<_, 1, 8>")]
        chunks: u64,
        scale: f64,
        size: Size,
        sizes: Vec<Size>,
        axis: Option<String>,
    }

    fn pairs(text: &str) -> Vec<(String, String)> {
        let pairs = text.split(',').filter(|item| !item.is_empty());
        pairs.map(|item| item.split_once('=').unwrap()).map(|(k, v)| (k.into(), v.into())).collect()
    }

    fn refusal(text: &str) -> Diagnostic {
        read::<Options>("cut", "chunks=N", &pairs(text)).unwrap_err()
    }

    #[test]
    fn options_are_written_as_they_are_read() {
        for text in ["", "chunks=2", "chunks=8,scale=1e-8,size=very-large,sizes=small+very-large,axis=tp"] {
            let options: Options = read("cut", "", &pairs(text)).unwrap();
            assert_eq!(write(&options), pairs(text), "{text}");
        }
    }

    #[test]
    fn a_refusal_names_the_option_and_the_nearest() {
        let unknown = refusal("chunk=2");
        assert_eq!(unknown.message, "`cut` has no option `chunk`");
        assert_eq!(unknown.helps, ["did you mean `chunks`?", "options: chunks=N"]);
        assert_eq!(
            refusal("chunks=9").message,
            "option `chunks=9` of `cut` is not a whole number from 1 to 8"
        );
        assert_eq!(refusal("scale=x").message, "option `scale=x` of `cut` is not a number");
        let variant = refusal("size=smal");
        assert_eq!(variant.message, "option `size=smal` of `cut` is not one of small, very-large");
        assert_eq!(variant.helps, ["did you mean `small`?"]);
        assert_eq!(refusal("axis=a,axis=b").message, "option `axis` of `cut` is given twice");
    }

    #[test]
    fn names_are_those_of_the_fields() {
        assert_eq!(names::<Options>(), ["chunks", "scale", "size", "sizes", "axis"]);
        let [own, others] = split::<Options>(&pairs("tp=2,chunks=1"));
        assert_eq!((own, others), (pairs("chunks=1"), pairs("tp=2")));
    }
}
