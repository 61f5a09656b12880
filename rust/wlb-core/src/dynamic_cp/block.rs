//! Blocks of ranks while they are filled.

use std::collections::BinaryHeap;

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

/// Blocks of one size.
struct Size {
    members: Vec<u32>,
    /// The weight of each of them that is not set aside.
    ladder: Ladder,
    /// Room and place of those that had too little.
    aside: BinaryHeap<(i64, u32)>,
}

/// Blocks of each size by weight, while they change.
pub(super) struct Sizes {
    /// Ascending.
    sizes: Vec<Size>,
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
        let of = |members: Vec<u32>| {
            let ladder = Ladder::new(members.iter().map(|&block| weight(&blocks[block as usize])));
            Size { members, ladder, aside: BinaryHeap::new() }
        };
        Self { sizes: members.into_iter().map(of).collect(), places }
    }

    /// Of each size that there is, the lightest blocks that will do, so `many` at most.
    pub(super) fn lightest(&self, many: usize, will_do: impl Fn(usize) -> bool + Copy) -> impl Iterator<Item = usize> {
        self.sizes.iter().flat_map(move |Size { members, ladder, .. }| {
            ladder.ascending().map(|place| members[place] as usize).filter(move |&block| will_do(block)).take(many)
        })
    }

    /// The lightest block of all sizes, the first of several.
    #[inline]
    pub(super) fn first(&self) -> Option<usize> {
        let of_size = |Size { members, ladder, .. }: &Size| ladder.first().map(|(weight, at)| (weight, members[at]));
        let lighter = |a: &(f64, u32), b: &(f64, u32)| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1));
        self.sizes.iter().filter_map(of_size).min_by(lighter).map(|(_, block)| block as usize)
    }

    /// Sets blocks aside until the lightest of each size has so much room. Those that were set aside before, and have so
    /// much, come back.
    ///
    /// # Complexity
    /// A logarithm for every block that was set since, as long as no more room is asked for than before.
    pub(super) fn make_room(
        &mut self,
        tokens: i64,
        blocks: &[Block],
        room: impl Fn(&Block) -> i64,
        weight: impl Fn(&Block) -> f64,
    ) {
        for Size { members, ladder, aside } in &mut self.sizes {
            let block = |place: usize| &blocks[members[place] as usize];
            while let Some((_, place)) = aside.peek().copied().filter(|&(room, _)| room >= tokens) {
                aside.pop();
                ladder.set(place as usize, weight(block(place as usize)));
            }
            while let Some((_, place)) = ladder.first() {
                let room = room(block(place));
                if room >= tokens {
                    break;
                }
                ladder.remove(place);
                aside.push((room, place as u32));
            }
        }
    }

    /// Sets one weight, of a block that is not set aside.
    pub(super) fn set(&mut self, block: usize, weight: f64) {
        let (size, place) = self.places[block];
        self.sizes[size as usize].ladder.set(place as usize, weight);
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
                let first = (0..blocks.len()).min_by(|&a, &b| blocks[a].seconds.total_cmp(&blocks[b].seconds));
                prop_assert_eq!(sizes.first(), first);
            }
        }

        #[test]
        fn the_lightest_of_each_size_have_room(
            start in proptest::collection::vec((0_u32..4, 0_u8..9, 0_i64..20), 1..20),
            documents in proptest::collection::vec((1_i64..9, any::<prop::sample::Index>(), 0_u8..9), 0..40),
        ) {
            let block = |&(size, seconds, tokens): &(u32, u8, i64)| {
                let (load, seconds) = (Load::default(), f64::from(seconds));
                let mut block = Block { micro_batch: 0, first_rank: 0, cp_size: 1 << size, load, seconds };
                block.load.tokens = tokens;
                block
            };
            let mut blocks: Vec<Block> = start.iter().map(block).collect();
            let room = |block: &Block| 20 - block.load.tokens;
            let mut sizes = Sizes::new(&blocks, |block| block.seconds);
            // In any order, of which falling is one.
            for (tokens, index, seconds) in documents {
                sizes.make_room(tokens, &blocks, room, |block| block.seconds);
                let lightest = |cp_size: u32| {
                    let fitting = (0..blocks.len()).filter(|&at| blocks[at].cp_size == cp_size && room(&blocks[at]) >= tokens);
                    fitting.min_by(|&a, &b| blocks[a].seconds.total_cmp(&blocks[b].seconds))
                };
                let expected: Vec<usize> = [1, 2, 4, 8].into_iter().filter_map(lightest).collect();
                prop_assert_eq!(sizes.lightest(1, |_| true).collect::<Vec<_>>(), expected.clone());
                let Some(&chosen) = expected.get(index.index(4)) else { continue };
                blocks[chosen].load.tokens += tokens;
                blocks[chosen].seconds += f64::from(seconds);
                sizes.set(chosen, blocks[chosen].seconds);
            }
        }
    }
}
