//! Documents that are packed into one sequence: a token sees its own document only.

use std::fmt;

use ithaca_ir::diagnostic::counted;
use ithaca_ir::{Diagnostic, Mask};
use serde::{Deserialize, Serialize};

/// Lengths of the documents of a sequence, in tokens and in their order. All sequences of a batch have the same.
///
/// The text form is a list of lengths, `LENGTH*COUNT` for several documents of one length: `8192 4096*3 512`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Documents {
    lengths: Vec<u64>,
}

/// The most documents of a sequence; masks are lists of their bounds.
const MOST: u64 = 1 << 16;

impl Documents {
    /// Reads lengths that spaces, commas or lines separate; `k` and `m` are 1024 and 1024² tokens, and a line's part from `#`
    /// on is a comment.
    ///
    /// # Errors
    /// `M10` for text that is no list of lengths, and for more than 65 536 documents.
    pub fn parse(text: &str) -> Result<Self, Diagnostic> {
        let items = text.lines().map(|line| line.split('#').next().unwrap_or_default());
        let items = items.flat_map(|line| line.split([' ', '\t', ',', '\r'])).filter(|item| !item.is_empty());
        let mut lengths = Vec::new();
        for item in items {
            let (length, count) = item.split_once('*').unwrap_or((item, "1"));
            let (length, count) = (tokens(length), count.parse::<u64>().ok().filter(|&n| n > 0));
            let (Some(length), Some(count)) = (length, count) else {
                return Err(Diagnostic::new("M10", format!("`{item}` is not the length of a document"))
                    .help("write LENGTH or LENGTH*COUNT in tokens, as in `8192 4096*3 512`"));
            };
            if lengths.len() as u64 + count > MOST {
                let message = format!("a sequence of more than {MOST} documents");
                return Err(Diagnostic::new("M10", message).help("pack fewer documents into a sequence"));
            }
            lengths.extend((0..count).map(|_| length));
        }
        if lengths.is_empty() {
            return Err(Diagnostic::new("M10", "the list of documents has no lengths")
                .help("write LENGTH or LENGTH*COUNT in tokens, as in `8192 4096*3 512`"));
        }
        Ok(Self { lengths })
    }

    /// The number of documents.
    pub fn count(&self) -> u64 {
        self.lengths.len() as u64
    }

    /// The tokens of all documents.
    pub fn tokens(&self) -> u64 {
        self.lengths.iter().fold(0, |sum, &length| sum.saturating_add(length))
    }

    /// The tokens of the longest document.
    pub fn longest(&self) -> u64 {
        self.lengths.iter().copied().max().unwrap_or(0)
    }

    /// Checks that the documents are all of a sequence.
    ///
    /// # Errors
    /// `M10`.
    pub fn check(&self, sequence: u64) -> Result<(), Diagnostic> {
        let tokens = self.tokens();
        if tokens == sequence {
            return Ok(());
        }
        let of = counted(self.count(), "document");
        let message = format!("{of} of {} together in a sequence of {sequence}", counted(tokens, "token"));
        Err(Diagnostic::new("M10", message)
            .help("tokens that fill up a sequence are a document too")
            .repairs([format!("--seq {tokens}")]))
    }

    /// `mask`, inside documents.
    pub(super) fn inside(&self, mask: Mask) -> Mask {
        let ends = self.lengths.iter().scan(0, |end, length| {
            *end += length;
            Some(*end)
        });
        Mask::All(vec![mask, Mask::Documents(std::iter::once(0).chain(ends).collect())])
    }

    /// Documents for a small sequence of about `tokens`: neighbours together where there are more than eight, and every
    /// length a multiple of `unit` if all were.
    #[must_use]
    pub fn shrunk(&self, tokens: u64, unit: u64) -> Self {
        let unit = if self.lengths.iter().all(|length| length.is_multiple_of(unit)) { unit } else { 1 };
        let together = self.lengths.len().div_ceil(SMALL);
        let all = u128::from(self.tokens().max(1));
        let small = |lengths: &[u64]| {
            let units = u128::from(lengths.iter().sum::<u64>()) * u128::from(tokens) / all / u128::from(unit);
            u64::try_from(units).unwrap_or(u64::MAX).max(1) * unit
        };
        Self { lengths: self.lengths.chunks(together).map(small).collect() }
    }

    /// With a longer last document, so that tokens divided by `n` leave `rest`.
    #[must_use]
    pub fn filled(mut self, n: u64, rest: u64) -> Self {
        let missing = (rest % n + n - self.tokens() % n) % n;
        if let Some(last) = self.lengths.last_mut() {
            *last += missing;
        }
        self
    }
}

/// The most documents of a small sequence.
const SMALL: usize = 8;

fn tokens(text: &str) -> Option<u64> {
    let (digits, unit) = match text.strip_suffix(['k', 'K']) {
        Some(digits) => (digits, 1 << 10),
        None => text.strip_suffix(['m', 'M']).map_or((text, 1), |digits| (digits, 1 << 20)),
    };
    digits.parse::<u64>().ok()?.checked_mul(unit).filter(|&n| n > 0 && n < 1 << 31)
}

impl fmt::Display for Documents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, alike) in self.lengths.chunk_by(|a, b| a == b).enumerate() {
            let space = if i == 0 { "" } else { " " };
            match alike.len() {
                1 => write!(f, "{space}{}", alike[0])?,
                n => write!(f, "{space}{}*{n}", alike[0])?,
            }
        }
        Ok(())
    }
}

impl TryFrom<String> for Documents {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        Self::parse(&text).map_err(|refusal| refusal.message)
    }
}

impl From<Documents> for String {
    fn from(documents: Documents) -> String {
        documents.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_written() {
        let documents = Documents::parse("8k, 512*3\n100 # the rest\n").unwrap();
        assert_eq!(documents.to_string(), "8192 512*3 100");
        assert_eq!((documents.tokens(), documents.longest()), (8192 + 1536 + 100, 8192));
        for text in ["", "# none", "12x", "0", "5*0", "7*-1", "1*65537", "9999999999999"] {
            assert_eq!(Documents::parse(text).unwrap_err().code, "M10", "{text}");
        }
        assert_eq!(documents.check(9828), Ok(()));
        assert_eq!(documents.check(9000).unwrap_err().repairs, ["--seq 9828"]);
    }

    #[test]
    fn small_documents_divide_as_before() {
        let documents = Documents::parse("8192 4096*2 16384").unwrap();
        assert_eq!(documents.shrunk(64, 8).to_string(), "16 8*2 32");
        let many = Documents::parse("100*50 1").unwrap();
        assert_eq!(many.shrunk(64, 8).lengths.len(), 8);
        assert_eq!(many.shrunk(64, 8).filled(16, 3).tokens() % 16, 3);
    }
}
