//! Blocks of ranks while they are filled.

use crate::ladder::Ladder;

use super::cost::Load;

/// An aligned run of ranks in one micro-batch, being filled.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) micro_batch: u32,
    pub(super) first_rank: u32,
    pub(super) cp_size: u32,
    pub(super) load: Load,
    pub(super) seconds: f64,
}

/// Blocks of each size by weight, while they change.
pub(super) struct Sizes {
    /// Of each size, ascending: its blocks, and their weights.
    sizes: Vec<(Vec<u32>, Ladder)>,
    /// Of each block, which of the sizes it has, and its place among those of it.
    places: Vec<(u32, u32)>,
}

impl Sizes {
    pub(super) fn new(blocks: &[Block], weight: impl Fn(&Block) -> f64) -> Self {
        let mut different: Vec<u32> = blocks.iter().map(|block| block.cp_size).collect();
        different.sort_unstable();
        different.dedup();
        let mut members: Vec<Vec<u32>> = vec![Vec::new(); different.len()];
        let mut places = Vec::with_capacity(blocks.len());
        for (index, block) in blocks.iter().enumerate() {
            let size = different.partition_point(|&size| size < block.cp_size);
            places.push((size as u32, members[size].len() as u32));
            members[size].push(index as u32);
        }
        let ladder = |members: Vec<u32>| {
            let ladder = Ladder::new(members.iter().map(|&block| weight(&blocks[block as usize])));
            (members, ladder)
        };
        Self { sizes: members.into_iter().map(ladder).collect(), places }
    }

    /// Of each size that there is, the lightest blocks that will do, so `many` at most.
    pub(super) fn lightest(&self, many: usize, will_do: impl Fn(usize) -> bool + Copy) -> impl Iterator<Item = usize> {
        self.sizes.iter().flat_map(move |(members, ladder)| {
            ladder.ascending().map(|place| members[place] as usize).filter(move |&block| will_do(block)).take(many)
        })
    }

    pub(super) fn set(&mut self, block: usize, weight: f64) {
        let (size, place) = self.places[block];
        self.sizes[size as usize].1.set(place as usize, weight);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Block, Load, Sizes};

    proptest! {
        #[test]
        fn sizes_know_the_lightest_blocks_of_each(
            start in proptest::collection::vec((0_u32..4, 0_u8..9), 1..20),
            changes in proptest::collection::vec((any::<prop::sample::Index>(), 0_u8..9), 0..40),
            many in 1_usize..4,
        ) {
            let block = |&(size, seconds): &(u32, u8)| {
                let (cp_size, load, seconds) = (1 << size, Load::default(), f64::from(seconds));
                Block { micro_batch: 0, first_rank: 0, cp_size, load, seconds }
            };
            let mut blocks: Vec<Block> = start.iter().map(block).collect();
            let mut sizes = Sizes::new(&blocks, |block| block.seconds);
            for (index, seconds) in changes {
                let index = index.index(blocks.len());
                blocks[index].seconds = f64::from(seconds);
                sizes.set(index, blocks[index].seconds);
                let will_do = |block: usize| !block.is_multiple_of(3);
                let lightest = |cp_size: u32| {
                    let of_size = (0..blocks.len()).filter(|&block| blocks[block].cp_size == cp_size && will_do(block));
                    let mut of_size: Vec<usize> = of_size.collect();
                    of_size.sort_by(|&a, &b| blocks[a].seconds.total_cmp(&blocks[b].seconds));
                    of_size.into_iter().take(many)
                };
                let expected: Vec<usize> = [1, 2, 4, 8].into_iter().flat_map(lightest).collect();
                prop_assert_eq!(sizes.lightest(many, will_do).collect::<Vec<_>>(), expected);
            }
        }
    }
}
