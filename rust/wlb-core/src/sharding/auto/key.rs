//! A rank in one integer: its pairs, then its tokens, then its number.
//!
//! Ascending integers are ranks in the order in which documents choose them: fewest pairs, then most room, then lowest
//! number. So one comparison orders two ranks, and one addition gives a rank more pairs and tokens.

/// An integer with enough bits for pairs, tokens and number.
pub(super) trait Key: Copy + Ord {
    /// `low` has at most `shift` bits.
    fn new(pairs: u64, low: u64, shift: u32) -> Self;
    fn pairs(self, shift: u32) -> u64;
    fn low(self, shift: u32) -> u64;
    fn plus(self, other: Self) -> Self;
}

macro_rules! keys {
    ($($integer:ty),+) => {
        $(impl Key for $integer {
            #[inline]
            fn new(pairs: u64, low: u64, shift: u32) -> Self {
                Self::from(pairs) << shift | Self::from(low)
            }

            #[inline]
            fn pairs(self, shift: u32) -> u64 {
                (self >> shift) as u64
            }

            #[inline]
            fn low(self, shift: u32) -> u64 {
                self as u64 & ((1 << shift) - 1)
            }

            #[inline]
            fn plus(self, other: Self) -> Self {
                self + other
            }
        })+
    };
}

// `u64` is always enough for up to two million tokens; `u128` for any micro-batch.
keys!(u64, u128);

/// Bit positions of the parts of a key.
#[derive(Clone, Copy)]
pub(super) struct Format {
    /// Tokens of the rank that gets the most: the largest number of tokens in a key.
    pub(super) most_tokens: u64,
    rank_bits: u32,
    /// Number of bits below the pairs.
    shift: u32,
}

impl Format {
    pub(super) fn new(tokens: u64, cp_size: usize) -> Self {
        let most_tokens = tokens.div_ceil(cp_size as u64);
        let bits = |most: u64| u64::BITS - most.leading_zeros();
        let rank_bits = bits(cp_size as u64 - 1);
        Self { most_tokens, rank_bits, shift: rank_bits + bits(most_tokens) }
    }

    /// Whether `u64` is enough.
    pub(super) fn is_small(&self, all_pairs: u64) -> bool {
        self.shift <= all_pairs.leading_zeros()
    }

    /// The key of a rank that can take `room` tokens (at most `most_tokens`).
    pub(super) fn key<W: Key>(&self, room: u64, rank: usize) -> W {
        W::new(0, (self.most_tokens - room) << self.rank_bits | rank as u64, self.shift)
    }

    /// The number to add to a rank's key when it gets these pairs and tokens.
    #[inline]
    pub(super) fn growth<W: Key>(&self, pairs: u64, tokens: i32) -> W {
        W::new(pairs, (tokens as u64) << self.rank_bits, self.shift)
    }

    #[inline]
    pub(super) fn pairs(&self, key: impl Key) -> u64 {
        key.pairs(self.shift)
    }

    #[inline]
    pub(super) fn room(&self, key: impl Key) -> u64 {
        self.most_tokens - (key.low(self.shift) >> self.rank_bits)
    }

    #[inline]
    pub(super) fn rank(&self, key: impl Key) -> u32 {
        (key.low(self.shift) & ((1 << self.rank_bits) - 1)) as u32
    }

    /// A key that sorts by room, most room first, equal room by rank.
    #[inline]
    pub(super) fn by_room(&self, key: impl Key) -> u64 {
        key.low(self.shift)
    }
}
