//! Pseudo-random numbers that are the same on every machine.

/// SplitMix64 (Steele, Lea and Flood, 2014), which uses only integer operations.
pub(super) struct Draw(pub(super) u64);

impl Draw {
    /// 64 pseudo-random bits.
    pub(super) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number from 0 to `many - 1`.
    pub(super) fn below(&mut self, many: usize) -> usize {
        (((self.bits() >> 32) * many as u64) >> 32) as usize
    }

    /// True with probability 1 / `many`.
    pub(super) fn one_in(&mut self, many: usize) -> bool {
        self.below(many) == 0
    }

    /// The index of a random bit in a set, which must not be empty.
    pub(super) fn of_set(&mut self, mut set: u64) -> usize {
        for _ in 0..self.below(set.count_ones() as usize) {
            set &= set - 1;
        }
        set.trailing_zeros() as usize
    }
}
