//! Choices of attention beside the strategy: another movement, and mesh axes for single sequences.

use ithaca_ir::Diagnostic;
use ithaca_ir::ops::Movement;
use ithaca_pass::options;
use serde::{Deserialize, Deserializer, Serialize};

/// Choices of attention that replace those of the strategy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct AttentionChoice {
    /// The movement, in place of that of the strategy; layers with a strategy of their own keep the movement of it.
    #[serde(serialize_with = "options::optional_text", deserialize_with = "movement")]
    pub movement: Option<Movement>,
    /// The same for attention whose keys are another sequence than its queries, in every layer.
    #[serde(serialize_with = "options::optional_text", deserialize_with = "movement")]
    pub cross_movement: Option<Movement>,
    /// For sequences by the name of their dimension, the mesh axes that split them, major to minor, in place of the axes of
    /// the strategy.
    #[serde(skip)]
    pub sequences: Vec<(String, Vec<String>)>,
}

/// The spelling of an empty list of axes.
const NO_AXES: &str = "none";

impl AttentionChoice {
    /// The choices as flags of the command line, each after a space.
    pub fn flags(&self) -> String {
        let Self { movement, cross_movement, sequences } = self;
        // A shell interprets parentheses.
        let quote = |m: &Movement| if m.options.is_empty() { m.to_string() } else { format!("'{m}'") };
        let movement = movement.iter().map(|m| format!(" --movement {}", quote(m)));
        let cross = cross_movement.iter().map(|m| format!(" --cross-movement {}", quote(m)));
        let sequences =
            sequences.iter().map(|(dim, axes)| format!(" --sequence-axes {dim}={}", axes_text(axes)));
        movement.chain(cross).chain(sequences).collect()
    }
}

fn movement<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Movement>, D::Error> {
    let text = String::deserialize(deserializer)?;
    let expected = |_| serde::de::Error::custom(format!("a movement, {AS_IN}"));
    parse_movement(&text).map(Some).map_err(expected)
}

/// Examples of movements.
const AS_IN: &str = "as in `rotate` or `gather(groups=2)`";

/// The movement spelled `rotate` or `gather(groups=2)`.
///
/// # Errors
/// `P02` for another spelling. The name is not looked up here.
pub fn parse_movement(text: &str) -> Result<Movement, Diagnostic> {
    let wrong = || Diagnostic::new("P02", format!("`{text}` is not a movement")).help(AS_IN);
    let is_name = |name: &str| {
        name.starts_with(|c: char| c.is_ascii_alphabetic())
            && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-')
    };
    let (name, options) = match text.trim().split_once('(') {
        None => (text.trim(), None),
        Some((name, rest)) => (name.trim(), Some(rest.strip_suffix(')').ok_or_else(wrong)?)),
    };
    if !is_name(name) {
        return Err(wrong());
    }
    let option = |item: &str| {
        let (key, value) = item.split_once('=')?;
        let key = Some(key.trim()).filter(|key| is_name(key))?;
        Some((key.to_owned(), value.trim().parse::<u64>().ok()?))
    };
    let items = options.iter().flat_map(|options| options.split(','));
    let options = items.map(|item| option(item).ok_or_else(wrong)).collect::<Result<_, _>>()?;
    Ok(Movement { name: name.to_owned(), options })
}

/// The axes of a sequence, spelled `cp`, `outer+cp` or `none`.
pub fn parse_axes(text: &str) -> Vec<String> {
    match text.trim() {
        NO_AXES => Vec::new(),
        axes => axes.split('+').map(|axis| axis.trim().to_owned()).collect(),
    }
}

/// The spelling that [`parse_axes`] reads.
pub fn axes_text(axes: &[String]) -> String {
    if axes.is_empty() { NO_AXES.to_owned() } else { axes.join("+") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn movements_read_as_they_print() {
        for text in ["rotate", "rotate-q", "gather(groups=2)", "name(a=1, b=2)"] {
            assert_eq!(parse_movement(text).unwrap().to_string(), text);
        }
        for text in
            ["", "gather(", "gather(groups)", "gather(groups=two)", "gather()", "ga ther", "gather(=2)"]
        {
            assert_eq!(parse_movement(text).unwrap_err().code, "P02", "{text}");
        }
    }

    #[test]
    fn axes_read_as_they_print() {
        for text in ["cp", "outer+cp", "none"] {
            assert_eq!(axes_text(&parse_axes(text)), text);
        }
    }
}
