//! The capacity of experts: the maximum number of tokens an expert processes.

use std::fmt;

use ithaca_ir::Diagnostic;
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
    /// Groups of each sequence.
    pub groups: u64,
}

impl Capacity {
    /// The capacity spelled `FACTOR` or `FACTOR/GROUPS`, as in `1.25/8`.
    ///
    /// # Errors
    /// `M10` when `text` is not a capacity.
    pub fn parse(text: &str) -> Result<Self, Diagnostic> {
        let (factor, groups) = text.split_once('/').unwrap_or((text, "1"));
        let permille = factor.trim().parse::<f64>().ok().map(|x| (x * 1000.0).round());
        let permille = permille.filter(|x| (1.0..=1e9).contains(x)).map(|x| x as u64);
        match (permille, groups.trim().parse::<u64>()) {
            (Some(permille), Ok(groups)) if groups > 0 => Ok(Self { permille, groups }),
            (_, _) => Err(Diagnostic::new("M10", format!("`{text}` is not a capacity of experts"))
                .help("write FACTOR or FACTOR/GROUPS, as in `1.25` or `1.25/8`")),
        }
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
        write!(f, "{}/{}", self.permille as f64 / 1000.0, self.groups)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_rounded_up_and_bounded_by_the_group() {
        let capacity = Capacity::parse("1.25/8").unwrap();
        assert_eq!((capacity.permille, capacity.groups), (1250, 8));
        assert_eq!(capacity.to_string(), "1.25/8");
        assert_eq!(capacity.slots(16, 2, 8), 5);
        assert_eq!(capacity.slots(3, 1, 64), 1);
        assert_eq!(Capacity::parse("100").unwrap().slots(16, 2, 8), 16);
        for wrong in ["", "0", "-1", "1/0", "x", "1/2/3", "inf"] {
            assert!(Capacity::parse(wrong).is_err(), "{wrong}");
        }
    }
}
