//! Slots: where the tokens of an expert lie.

use crate::dim::DimId;
use crate::space::Space;

/// The slots of experts, what `dispatch` fills and `combine` reads.
///
/// Without a capacity their type is `[e, tokens…, m]`: a token's slot is its own. With one it is
/// `[e, tokens…, c, m]`, `tokens…` naming groups in place of the sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slots {
    /// The dimension of the experts.
    pub experts: DimId,
    /// The dimension of a token's choices.
    pub top: DimId,
    /// What bounds the slots of an expert; a slot for every token when absent.
    pub capacity: Option<Capacity>,
}

/// Slots that the tokens of a group share, dealt in order of position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// The sequence whose tokens are grouped.
    pub sequence: DimId,
    /// The groups of a sequence, runs of as many tokens each.
    pub groups: DimId,
    /// The slots of an expert for each group.
    pub slots: DimId,
}

impl Capacity {
    /// Tokens of a group; none when they are not as many in each.
    pub fn tokens(&self, space: &Space) -> Option<u64> {
        let (tokens, groups) = (space.size(self.sequence), space.size(self.groups));
        (groups > 0 && tokens.is_multiple_of(groups)).then(|| tokens / groups)
    }
}

impl Slots {
    /// Deals slots to the tokens of one group in order: for each choice, `n` of them a token, the slot that the token gets
    /// at the expert; none where the slots are taken. Choices of experts that do not exist get none.
    pub fn deal(choices: &[i32], n: usize, experts: u64, slots: u64) -> Vec<Option<u64>> {
        let mut taken = vec![0u64; usize::try_from(experts).unwrap_or(0)];
        let mut dealt = Vec::with_capacity(choices.len());
        for token in choices.chunks(n.max(1)) {
            for &choice in token {
                let count = usize::try_from(choice).ok().and_then(|i| taken.get_mut(i));
                dealt.push(match count {
                    Some(count) if *count < slots => {
                        *count += 1;
                        Some(*count - 1)
                    }
                    Some(_) | None => None,
                });
            }
        }
        dealt
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_dealt_in_order_and_the_rest_is_dropped() {
        let choices = [0, 1, 1, 0, 0, 2, 9, 0];
        let dealt = Slots::deal(&choices, 2, 3, 2);
        assert_eq!(dealt, [Some(0), Some(0), Some(1), Some(1), None, Some(0), None, None]);
    }
}
