//! The tokens that an expert has slots for: a bound, which ends the run when exceeded, or a capacity, which drops tokens.

use std::fmt;

use ithaca_ir::Diagnostic;
use num_integer::gcd;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The maximum number of tokens that an expert takes from one group of tokens: `FACTOR` times its even share, rounded
/// up.
///
/// Slots are assigned in order of position; an expert drops the tokens that find no free slot (GShard, arXiv
/// 2006.16668, section 2.2). A group is a run of consecutive tokens of one sequence. Groups are part of the model's
/// computation: the layout does not change which tokens are dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Capacity {
    /// The factor of the even share, times 1000.
    pub permille: u64,
    /// Groups of each sequence; one when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub groups: Option<u64>,
}

impl Capacity {
    /// The capacity spelled `FACTOR` or `FACTOR/GROUPS`, as in `1.25/8`.
    ///
    /// # Errors
    /// `M10` when `text` is not a capacity.
    pub fn parse(text: &str) -> Result<Self, Diagnostic> {
        let (factor, groups) = text.split_once('/').map_or((text, None), |(f, groups)| (f, Some(groups)));
        let groups = groups.map(|n| n.trim().parse::<u64>().ok().filter(|&n| n > 0));
        match (permille(factor), groups) {
            (Some(permille), None) => Ok(Self { permille, groups: None }),
            (Some(permille), Some(groups @ Some(_))) => Ok(Self { permille, groups }),
            (_, _) => Err(Diagnostic::new("M10", format!("`{text}` is not a capacity of experts"))
                .help("write FACTOR or FACTOR/GROUPS, as in `1.25` or `1.25/8`")),
        }
    }

    /// The capacity with groups for layouts of so many ranks, unless it has groups: one for each run of a zigzag order over
    /// them, two for each rank, as far as these divide a sequence; one for one rank.
    #[must_use]
    pub fn for_ranks(self, ranks: u64, sequence: u64) -> Self {
        let runs = if ranks > 1 { ranks.saturating_mul(2) } else { 1 };
        Self { groups: self.groups.or(Some(gcd(sequence, runs))), ..self }
    }

    /// Groups of each sequence.
    pub fn groups(self) -> u64 {
        self.groups.unwrap_or(1)
    }

    /// The slots of an expert for a group of `tokens`; each token chooses `top` of `experts`.
    pub(super) fn slots(self, tokens: u64, top: u64, experts: u64) -> u64 {
        let share = u128::from(self.permille) * u128::from(tokens) * u128::from(top);
        let slots = share.div_ceil(1000 * u128::from(experts.max(1)));
        u64::try_from(slots).unwrap_or(u64::MAX).clamp(1, tokens.max(1))
    }
}

impl fmt::Display for Capacity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.permille as f64 / 1000.0, self.groups())
    }
}

/// The maximum number of tokens that an expert takes from the tokens of a rank: a factor of its even share. A run with
/// more ends with an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ExpertBound {
    /// The factor of the even share, times 1000.
    pub permille: u64,
}

impl Default for ExpertBound {
    fn default() -> Self {
        Self { permille: 2000 }
    }
}

impl ExpertBound {
    /// The bound spelled `FACTOR`, as in `2`, at least 1.
    ///
    /// # Errors
    /// `M10` when `text` is not a bound.
    pub fn parse(text: &str) -> Result<Self, Diagnostic> {
        let permille = permille(text).filter(|&permille| permille >= 1000);
        permille.map(|permille| Self { permille }).ok_or_else(|| {
            Diagnostic::new("M10", format!("`{text}` is not a bound of experts"))
                .help("write a factor of the even share of tokens, at least 1, as in `--expert-bound 2`")
        })
    }

    /// The factor.
    pub fn factor(self) -> f64 {
        self.permille as f64 / 1000.0
    }
}

fn permille(factor: &str) -> Option<u64> {
    let permille = factor.trim().parse::<f64>().ok().map(|x| (x * 1000.0).round());
    permille.filter(|x| (1.0..=1e9).contains(x)).map(|x| x as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_rounded_up_and_bounded_by_the_group() {
        let capacity = Capacity::parse("1.25/8").unwrap();
        assert_eq!((capacity.permille, capacity.groups()), (1250, 8));
        assert_eq!(capacity.to_string(), "1.25/8");
        assert_eq!(capacity.slots(16, 2, 8), 5);
        assert_eq!(capacity.slots(3, 1, 64), 1);
        assert_eq!(Capacity::parse("100").unwrap().slots(16, 2, 8), 16);
        let groups = |ranks| Capacity::parse("1.25").unwrap().for_ranks(ranks, 96).groups();
        assert_eq!([1, 2, 8, 64].map(groups), [1, 4, 16, 32]);
        assert_eq!(capacity.for_ranks(2, 96), capacity);
        for wrong in ["", "0", "-1", "1/0", "x", "1/2/3", "inf"] {
            assert!(Capacity::parse(wrong).is_err(), "{wrong}");
        }
    }
}
