//! Choices, read from a list of numbers, where 0 is the plainest choice and a list that is used up gives zeros; so what fails is
//! made smaller by writing zeros into the list.

use std::ops::Range;

/// A list of choices.
#[derive(Clone, Debug)]
pub struct Choices {
    numbers: Vec<u32>,
    at: usize,
}

impl Choices {
    /// Numbers in a list.
    pub const LENGTH: usize = 600;

    /// The choices of a draw.
    pub fn from_seed(seed: u64) -> Choices {
        // SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
        let mut state = seed;
        let mut number = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (z >> 33) as u32
        };
        Choices { numbers: (0..Self::LENGTH).map(|_| number()).collect(), at: 0 }
    }

    /// The choices that bytes spell, four for each number.
    pub fn from_bytes(bytes: &[u8]) -> Choices {
        let (words, _) = bytes.as_chunks::<4>();
        Choices { numbers: words.iter().map(|&word| u32::from_le_bytes(word)).collect(), at: 0 }
    }

    /// The bytes of [`from_bytes`](Self::from_bytes).
    pub fn to_bytes(&self) -> Vec<u8> {
        self.numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
    }

    /// The same choices but for zeros in a range; nothing where there are only zeros.
    pub fn with_zeros(&self, range: Range<usize>) -> Option<Choices> {
        let mut numbers = self.numbers.clone();
        let end = range.end.min(numbers.len());
        numbers[range.start..end].fill(0);
        (numbers != self.numbers).then_some(Choices { numbers, at: 0 })
    }

    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        let number = self.numbers.get(self.at).copied().unwrap_or(0);
        self.at += 1;
        number as usize % n
    }

    /// One of the items.
    pub fn one_of<T: Clone>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())].clone()
    }

    /// True once in `n`, and never when choices are used up.
    pub fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == n - 1
    }
}
