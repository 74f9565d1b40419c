//! Slots: where the tokens of an expert lie.

use crate::ops::table::experts::{Deal, Shared};
use crate::space::Space;

/// The least number of slots of an expert for a group with a bound, if the group has as many tokens: the share of a few
/// tokens is a matter of chance.
pub const MIN_SLOTS: u64 = 64;

/// The slots of an expert for a group of `tokens` of which each chooses `top` of `experts`: `bound` times the even share,
/// rounded up; at least [`MIN_SLOTS`], and never more than tokens.
pub fn bounded_slots(bound: f64, tokens: u64, top: u64, experts: u64) -> u64 {
    let share = tokens as f64 * top as f64 / experts.max(1) as f64;
    // The tolerance keeps a factor such as 128/8 from being rounded up to one more slot.
    let slots = (bound * share * (1.0 - 1e-12)).ceil();
    (slots as u64).max(MIN_SLOTS).min(tokens).max(1)
}

/// The slots of an expert on a rank up to which a product on a device reads the weights of experts with a filled slot only: it is bound by
/// the bytes of the weights. Of more slots, all are multiplied.
pub const FEW_SLOTS: u64 = 32;

/// The load of the busiest rank that plans expect, as a factor of the even share: tokens that its experts take from a group.
///
/// An estimate: no load of a trained router was measured. It is a capacity factor with which Switch Transformers were
/// trained (Fedus et al., arXiv 2101.03961).
pub const EXPECTED_LOAD: f64 = 1.25;

/// The slots of an expert for a group that are expected to be filled, of so many: [`EXPECTED_LOAD`] times the even share.
pub fn expected_slots(slots: u64, tokens: u64, top: u64, experts: u64) -> u64 {
    let share = tokens as f64 * top as f64 / experts.max(1) as f64;
    ((EXPECTED_LOAD * share * (1.0 - 1e-12)).ceil() as u64).clamp(1, slots.max(1))
}

impl Shared {
    /// Sequences and tokens of each that a group has; none when they do not divide.
    pub fn tokens(&self, space: &Space) -> Option<[u64; 2]> {
        let each = |of, groups| {
            let (n, groups) = (space.size(of), space.size(groups));
            (groups > 0 && n.is_multiple_of(groups)).then(|| n / groups)
        };
        Some([each(self.batch, self.batches)?, each(self.sequence, self.groups)?])
    }

    /// The group of each of `sequences · tokens` tokens, and the number of groups; a group has `each` of both.
    pub fn group_of([sequences, tokens]: [u64; 2], each: [u64; 2]) -> (u64, impl Fn(u64) -> u64) {
        let [rows, columns] = each.map(|n| n.max(1));
        let across = tokens / columns;
        let number = move |token: u64| {
            let (b, s) = (token / tokens.max(1), token % tokens.max(1));
            b / rows * across + s / columns
        };
        (sequences / rows * across, number)
    }
}

impl Deal {
    /// Deals slots to tokens in order, `top` choices a token: for each choice the place `expert · slots + slot`, and −1 where
    /// the slots are taken or no such expert exists. `group` is the group of a token, of `groups`. Returns with the places the
    /// tokens that chose the most demanded expert of a group, and that expert.
    pub fn places(
        choices: &[i32],
        top: usize,
        [experts, slots]: [u64; 2],
        (groups, group): (u64, impl Fn(u64) -> u64),
    ) -> (Vec<i32>, [u64; 2]) {
        let size = usize::try_from(groups.saturating_mul(experts)).unwrap_or(0);
        let mut chosen = vec![0u64; size];
        let mut most = [0, 0];
        let mut place = |token: u64, choice: i32| -> Option<i32> {
            let expert = u64::try_from(choice).ok().filter(|&e| e < experts)?;
            let count = chosen.get_mut(usize::try_from(group(token) * experts + expert).ok()?)?;
            let slot = *count;
            *count += 1;
            most = most.max([*count, expert]);
            (slot < slots).then(|| i32::try_from(expert * slots + slot).ok()).flatten()
        };
        let places = choices.iter().enumerate();
        let places = places.map(|(i, &c)| place((i / top.max(1)) as u64, c).unwrap_or(-1)).collect();
        (places, most)
    }

    /// The tokens of a group, and an expert's even share of them.
    pub fn share(&self, space: &Space) -> (u64, f64) {
        let tokens = self.shared.tokens(space).map_or(0, |[sequences, tokens]| sequences * tokens);
        (tokens, (tokens * space.size(self.top)) as f64 / space.size(self.experts).max(1) as f64)
    }

    /// The error of a run in which `demand` tokens of a group chose an expert that has fewer slots for it.
    pub fn overflow(&self, space: &Space, [demand, expert]: [u64; 2]) -> String {
        let slots = space.size(self.shared.slots);
        let (tokens, share) = self.share(space);
        let least = (demand as f64 / share.max(f64::MIN_POSITIVE) * 100.0).ceil() / 100.0;
        format!(
            "expert {expert} was chosen by {demand} of {tokens} tokens and has slots for {slots}; `--expert-bound {least:.2}` has \
             slots for all of them, `--capacity` drops tokens"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_dealt_in_order_and_the_rest_is_without() {
        let choices = [0, 1, 1, 0, 0, 2, 9, 0];
        let (places, most) = Deal::places(&choices, 2, [3, 2], (1, |_| 0));
        assert_eq!(places, [0, 2, 3, 1, -1, 4, -1, -1]);
        assert_eq!(most, [4, 0]);
        // Two sequences of two tokens, a group of the first tokens of both and one of the second.
        let (groups, group) = Shared::group_of([2, 2], [2, 1]);
        assert_eq!((groups, (0..4).map(&group).collect::<Vec<_>>()), (2, vec![0, 1, 0, 1]));
        let (places, most) = Deal::places(&[0, 0, 0, 1], 1, [2, 2], (groups, group));
        assert_eq!((places, most), (vec![0, 0, 1, 2], [2, 0]));
    }

    #[test]
    fn a_bound_is_a_factor_of_the_even_share() {
        assert_eq!(bounded_slots(2.0, 8192, 8, 128), 1024);
        assert_eq!(bounded_slots(16.0, 8192, 8, 128), 8192);
        assert_eq!(bounded_slots(2.0, 512, 8, 256), MIN_SLOTS);
        assert_eq!(bounded_slots(2.0, 16, 8, 256), 16);
    }
}
