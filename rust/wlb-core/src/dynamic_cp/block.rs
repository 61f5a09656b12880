//! Blocks of ranks while they are filled.

use std::collections::BinaryHeap;

use crate::ladder::Ladder;

use super::by_room::ByRoom;
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

/// All blocks of one size.
struct Size {
    members: Vec<u32>,
    order: Order,
    /// Weight and place of the lightest block in the order, if any.
    first: Option<(f64, usize)>,
}

impl Size {
    fn find_first(&mut self, tokens: i64) {
        self.first = match &self.order {
            Order::Falling { ladder, .. } => ladder.first(),
            Order::Any(tree) => tree.next(None, tokens).map(|place| (tree.weight(place), place)),
        };
    }
}

/// Blocks of one size by weight, and by whether they have room.
enum Order {
    /// For demands that only fall: blocks with too little room are set aside, by room and place.
    Falling { ladder: Ladder, rooms: Vec<i64>, aside: BinaryHeap<(i64, u32)> },
    /// For demands that may rise, where blocks that were set aside would have to come back for every document.
    Any(ByRoom),
}

/// Blocks of each size by weight, while weights and rooms change.
pub(super) struct Sizes {
    /// Sizes, ascending.
    sizes: Vec<Size>,
    /// For each block, the index of its size and its place among the blocks of that size.
    places: Vec<(u32, u32)>,
    /// The room of the last demand.
    tokens: i64,
}

impl Sizes {
    /// Blocks of given weights and rooms. `falling`: no document is longer than the one before it.
    pub(super) fn new(
        blocks: &[Block],
        falling: bool,
        weight: impl Fn(&Block) -> f64,
        room: impl Fn(&Block) -> i64,
    ) -> Self {
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
            let blocks = members.iter().map(|&block| &blocks[block as usize]);
            let order = if falling {
                let rooms = blocks.clone().map(&room).collect();
                Order::Falling { ladder: Ladder::new(blocks.map(&weight)), rooms, aside: BinaryHeap::new() }
            } else {
                Order::Any(ByRoom::new(blocks.map(|block| (weight(block), room(block)))))
            };
            let mut size = Size { members, order, first: None };
            size.find_first(i64::MIN);
            size
        };
        Self { sizes: members.into_iter().map(of).collect(), places, tokens: i64::MIN }
    }

    /// For each size, blocks by weight: all that have the room of the last demand, and perhaps others.
    pub(super) fn ascending(&self) -> impl Iterator<Item = impl Iterator<Item = usize>> {
        self.sizes.iter().map(move |Size { members, order, .. }| {
            let (ladder, tree) = match order {
                Order::Falling { ladder, .. } => (Some(ladder.ascending()), None),
                Order::Any(tree) => {
                    let next = |&place: &usize| tree.next(Some(place), self.tokens);
                    (None, Some(std::iter::successors(tree.next(None, self.tokens), next)))
                }
            };
            let places = ladder.into_iter().flatten().chain(tree.into_iter().flatten());
            places.map(|place| members[place] as usize)
        })
    }

    /// The lightest block of any size with the room of the last demand, the first if several are equal.
    #[inline]
    pub(super) fn first(&self) -> Option<usize> {
        let block = |&(_, size, place): &(f64, &Size, usize)| size.members[place];
        let firsts = self.sizes.iter().filter_map(|size| size.first.map(|(weight, place)| (weight, size, place)));
        let lightest = firsts.min_by(|a, b| a.0.total_cmp(&b.0).then_with(|| block(a).cmp(&block(b))))?;
        Some(block(&lightest) as usize)
    }

    /// Sets the demanded room: blocks with less are left out from now on, and blocks with enough that were left out
    /// return.
    ///
    /// # Complexity
    /// A logarithm for every block that was set since the last demand, or for each size.
    #[inline]
    pub(super) fn make_room(&mut self, tokens: i64) {
        self.tokens = tokens;
        for size in &mut self.sizes {
            if let Order::Falling { ladder, rooms, aside } = &mut size.order {
                let is_full = |first: Option<(f64, usize)>| first.is_some_and(|(_, place)| rooms[place] < tokens);
                if !is_full(size.first) && aside.peek().is_none_or(|&(room, _)| room < tokens) {
                    continue;
                }
                while let Some((_, place)) = aside.peek().copied().filter(|&(room, _)| room >= tokens) {
                    aside.pop();
                    ladder.put_back(place as usize);
                }
                while let Some((_, place)) = ladder.first().filter(|&first| is_full(Some(first))) {
                    ladder.remove(place);
                    aside.push((rooms[place], place as u32));
                }
            }
            size.find_first(tokens);
        }
    }

    /// Sets the weight and the room of a block that is not left out.
    #[inline]
    pub(super) fn set(&mut self, block: usize, weight: f64, room: i64) {
        let (size, place) = self.places[block];
        let size = &mut self.sizes[size as usize];
        match &mut size.order {
            Order::Falling { ladder, rooms, .. } => {
                rooms[place as usize] = room;
                ladder.set(place as usize, weight);
            }
            Order::Any(tree) => tree.set(place as usize, weight, room),
        }
        size.find_first(self.tokens);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use proptest::prelude::*;

    use super::{Block, Load, Sizes};

    const MEMORY: i64 = 20;

    fn block((size, seconds, tokens): (u32, u8, i64)) -> Block {
        let (load, seconds) = (Load::default(), f64::from(seconds));
        let mut block = Block { micro_batch: 0, first_rank: 0, cp_size: 1 << size, load, seconds };
        block.load.tokens = tokens;
        block
    }

    fn room(block: &Block) -> i64 {
        MEMORY - block.load.tokens
    }

    fn weight(block: &Block) -> f64 {
        block.seconds
    }

    proptest! {
        #[test]
        fn sizes_know_the_lightest_blocks_of_each(
            start in proptest::collection::vec((0_u32..4, 0_u8..9, 0_i64..20), 1..20),
            changes in proptest::collection::vec((any::<prop::sample::Index>(), 0_u8..9), 0..40),
            falling in any::<bool>(),
        ) {
            let mut blocks: Vec<Block> = start.into_iter().map(block).collect();
            let mut sizes = Sizes::new(&blocks, falling, weight, room);
            for (index, seconds) in changes {
                let index = index.index(blocks.len());
                blocks[index].seconds = f64::from(seconds);
                sizes.set(index, blocks[index].seconds, room(&blocks[index]));
                let of_size = |cp_size: u32| {
                    let of_size = (0..blocks.len()).filter(|&block| blocks[block].cp_size == cp_size);
                    let mut of_size: Vec<usize> = of_size.collect();
                    of_size.sort_by(|&a, &b| blocks[a].seconds.total_cmp(&blocks[b].seconds));
                    of_size
                };
                let expected: Vec<usize> = [1, 2, 4, 8].into_iter().flat_map(of_size).collect();
                prop_assert_eq!(sizes.ascending().flatten().collect::<Vec<_>>(), expected);
                let first = (0..blocks.len()).min_by(|&a, &b| blocks[a].seconds.total_cmp(&blocks[b].seconds));
                prop_assert_eq!(sizes.first(), first);
            }
        }

        #[test]
        fn the_lightest_of_each_size_have_room(
            start in proptest::collection::vec((0_u32..4, 0_u8..9, 0_i64..20), 1..20),
            mut documents in proptest::collection::vec((1_i64..9, any::<prop::sample::Index>(), 0_u8..9), 0..40),
            falling in any::<bool>(),
            sorted in any::<bool>(),
        ) {
            let mut blocks: Vec<Block> = start.into_iter().map(block).collect();
            let mut sizes = Sizes::new(&blocks, falling, weight, room);
            // In any order; `falling` may be false although lengths fall.
            if sorted {
                documents.sort_by_key(|&(tokens, ..)| std::cmp::Reverse(tokens));
            }
            for (tokens, index, seconds) in documents {
                sizes.make_room(tokens);
                let lightest = |cp_size: u32| {
                    let fitting = (0..blocks.len()).filter(|&at| blocks[at].cp_size == cp_size && room(&blocks[at]) >= tokens);
                    fitting.min_by(|&a, &b| blocks[a].seconds.total_cmp(&blocks[b].seconds))
                };
                let expected: Vec<usize> = [1, 2, 4, 8].into_iter().filter_map(lightest).collect();
                let found: Vec<usize> = sizes.ascending().filter_map(|mut of_size| of_size.next()).collect();
                prop_assert_eq!(found, expected.clone());
                let first = expected.iter().copied().min_by(|&a, &b| {
                    blocks[a].seconds.total_cmp(&blocks[b].seconds).then(a.cmp(&b))
                });
                prop_assert_eq!(sizes.first(), first);
                let Some(&chosen) = expected.get(index.index(4)) else { continue };
                blocks[chosen].load.tokens += tokens;
                blocks[chosen].seconds += f64::from(seconds);
                sizes.set(chosen, blocks[chosen].seconds, room(&blocks[chosen]));
            }
        }
    }

    /// Few blocks are looked at for a document even if long and short documents alternate: the light blocks lack room
    /// for long ones.
    #[test]
    fn documents_in_any_order_move_few_blocks() {
        for falling in [true, false] {
            let (all, documents) = (2000, 2000);
            let mut blocks: Vec<Block> = (0..all).map(|at| block((0, 0, if at < all / 2 { 15 } else { 0 }))).collect();
            (0..all).for_each(|at| blocks[at].seconds = at as f64);
            let looked = Cell::new(0);
            let counted = |block: &Block| {
                looked.set(looked.get() + 1);
                room(block)
            };
            let mut sizes = Sizes::new(&blocks, falling, weight, counted);
            for document in 0..documents {
                let long = if falling { document < documents / 2 } else { document % 2 == 0 };
                sizes.make_room(if long { 9 } else { 1 });
                let chosen = sizes.first().unwrap_or(0);
                assert_eq!(chosen >= all / 2, long);
                blocks[chosen].seconds += 1e-3;
                sizes.set(chosen, blocks[chosen].seconds, room(&blocks[chosen]));
            }
            assert!(looked.get() <= 4 * (all + documents), "{} in {} documents", looked.get(), documents);
        }
    }
}
