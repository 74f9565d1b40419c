//! Slots: where the tokens of an expert lie.

use crate::ops::table::experts::{Capacity, Slots};
use crate::space::Space;

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
