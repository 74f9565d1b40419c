//! Values of arguments that are numbers.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use ithaca_passes::frameworks::Framework;
use ithaca_passes::plan::Effort;

/// A framework by its name.
pub(super) fn framework() -> impl TypedValueParser<Value = Framework> {
    let names = PossibleValuesParser::new(Framework::ALL.map(Framework::name));
    names.map(|name| name.parse().expect("the names that are possible are those of frameworks"))
}

/// The effort of a search by its name.
pub(super) fn effort() -> impl TypedValueParser<Value = Effort> {
    let names = PossibleValuesParser::new(Effort::ALL.map(|(name, _)| name));
    let named = |name: String| Effort::ALL.into_iter().find(|(known, _)| *known == name);
    names.map(move |name| named(name).expect("the names that are possible are those of efforts").1)
}

/// A framework whose command line can be read.
pub(super) fn importable() -> impl TypedValueParser<Value = Framework> {
    let names = PossibleValuesParser::new([Framework::Megatron.name()]);
    names.map(|name| name.parse().expect("the names that are possible are those of frameworks"))
}

pub(super) fn positive(text: &str) -> Result<u64, String> {
    count(text, text)
}

/// A number of tokens: `8192`, `128k` (1024 each), `1m` (1024 · 1024 each).
pub(crate) fn tokens(text: &str) -> Result<u64, String> {
    let (digits, unit) = match text.char_indices().last() {
        Some((at, 'k' | 'K')) => (&text[..at], 1 << 10),
        Some((at, 'm' | 'M')) => (&text[..at], 1 << 20),
        Some(_) | None => (text, 1),
    };
    let scaled = digits.parse::<u64>().ok().and_then(|n| n.checked_mul(unit));
    count(text, &scaled.map_or_else(|| text.to_owned(), |n| n.to_string()))
}

fn count(written: &str, digits: &str) -> Result<u64, String> {
    let most = ithaca_ir::Dim::MAX_SIZE;
    let n = digits.parse::<u64>().ok().filter(|n| (1..=most).contains(n));
    n.ok_or_else(|| format!("`{written}` is not a whole number from 1 to {most}"))
}

pub(super) fn whole(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("`{text}` is not a whole number from 0 to {}", u64::MAX))
}

pub(super) fn positive_number(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|x| x.is_finite() && *x > 0.0);
    number.ok_or_else(|| format!("`{text}` is not a number above zero"))
}

pub(super) fn tolerance(text: &str) -> Result<f64, String> {
    let error = text.parse::<f64>().ok().filter(|x| x.is_finite() && *x >= 0.0);
    error.ok_or_else(|| format!("`{text}` is not a number that is zero or more"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_have_units() {
        assert_eq!(tokens("8192"), Ok(8192));
        assert_eq!(tokens("128k"), Ok(131_072));
        assert_eq!(tokens("1M"), Ok(1 << 20));
        for wrong in
            ["", "k", "0", "0k", "1.5k", "-1", "128kb", "99999999999999999999m", "18446744073709551615m"]
        {
            assert!(tokens(wrong).is_err(), "{wrong}");
        }
    }
}
