//! The sequence of a small model, and the windows and chunks of its tokens.

/// A sequence and a smaller one, in blocks of tokens that ranks hold together.
///
/// A small window reaches as many blocks as the large one, and ends inside a block if the large one does. So ranks need keys
/// of the same ranks, and tiles are whole, cut and empty in both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmallTokens {
    /// Tokens of a sequence of the large model.
    pub sequence: u64,
    /// Tokens of a sequence of the small model.
    pub small_sequence: u64,
    /// Tokens of a block of the large sequence.
    pub block: u64,
    /// Tokens of a block of the small sequence; two or more, unless `block` is one.
    pub small_block: u64,
    /// The blocks after which a rank has one again, where blocks are dealt round; the small sequence has four rounds.
    pub round: Option<u64>,
}

impl SmallTokens {
    /// Sequences in two blocks for each of so many ranks, as a zigzag has them.
    pub fn halves(sequence: u64, small_sequence: u64, ranks: u64) -> Self {
        let block = |n: u64| (n / ranks.saturating_mul(2).max(1)).max(1);
        Self {
            sequence,
            small_sequence,
            block: block(sequence),
            small_block: block(small_sequence),
            round: None,
        }
    }

    /// The small window for a window of `width` tokens.
    pub fn window(&self, width: u64) -> u64 {
        let Self { sequence, small_sequence, block, small_block, round } = *self;
        if width == 0 || width >= sequence {
            return scaled(width, small_sequence, sequence);
        }
        let (blocks, rest) = ((width - 1) / block, (width - 1) % block);
        // Two rounds are enough: each rank has two blocks in the window.
        let blocks = match round {
            Some(round) if blocks >= 3 * round => 2 * round + blocks % round,
            Some(_) | None => blocks,
        };
        let rest = match rest {
            0 => 0,
            rest => scaled(rest, small_block, block).max(rest.min(2)).min(small_block.saturating_sub(1)),
        };
        blocks * small_block + rest + 1
    }

    /// The small size of chunks of `size` tokens: several in a block, or one of several blocks, if the large one is.
    pub fn chunk(&self, size: u64) -> u64 {
        let Self { sequence, block, small_block, .. } = *self;
        if size == 0 || size >= sequence {
            return self.window(size);
        }
        if size.is_multiple_of(block) {
            return size / block * small_block;
        }
        if !block.is_multiple_of(size) {
            return self.window(size);
        }
        let exact = small_block / (block / size);
        let divisor = |least: u64| (least..small_block).find(|&small| small_block.is_multiple_of(small));
        divisor(exact.max(2)).or_else(|| divisor(1)).unwrap_or(1)
    }
}

/// `n · small / large`, rounded up.
pub(super) fn scaled(n: u64, small: u64, large: u64) -> u64 {
    let scaled = (u128::from(n) * u128::from(small)).div_ceil(u128::from(large));
    u64::try_from(scaled).unwrap_or(u64::MAX).max(1)
}
