//! From documents to groups, for a given number of micro-batches.
//!
//! Three steps. A document that is too much for a block of `base` ranks opens a larger one of its own
//! ([`Blocks::open`]). All others go, longest first, to the block with the least time beyond its target, or, where
//! memory binds, to the one with the most room ([`Blocks::fill`]). Where documents bring their own costs, that is
//! costliest first; and longest first only if they do not fit so. Then every block is halved, and its halves again,
//! while halves of equal work can be found in it ([`Halving`]): less to exchange, same time.

use crate::interrupt::Meter;
use crate::ladder::Ladder;
use crate::limits::MAX_TOKENS;
use crate::longest_first::longest_first;

use super::cost::{Costs, GroupCost, Load};

/// Halves may take this much longer than what their micro-batch takes anyway.
const SLACK: f64 = 1.0 + 1.0 / 256.0;

/// A document as the solver sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Document {
    pub(super) index: u32,
    pub(super) load: Load,
}

/// The gain of a problem whose targets are those of an exchange that costs nothing.
const AS_IF_FREE: f64 = 1.0;

/// What is the same for every number of micro-batches.
pub(super) struct Problem {
    /// Costliest first; of equal costs longest first, then as they came.
    pub(super) documents: Vec<Document>,
    /// Their positions, longest first, where that is another order.
    by_tokens: Option<Vec<u32>>,
    /// A document that is not done in time on any group gets twice the ranks while that makes it so much faster.
    pub(super) gain: f64,
    pub(super) total_work: f64,
    pub(super) cost: GroupCost,
    pub(super) world_size: usize,
    pub(super) largest_group: usize,
    pub(super) max_tokens_per_rank: i64,
}

/// Documents together on a group of ranks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Group {
    pub(super) first_rank: u32,
    pub(super) cp_size: u32,
    pub(super) seconds: f64,
    /// One past its last document in [`Draft::documents`].
    pub(super) end: u32,
}

/// A plan in the making.
#[derive(Clone, Debug, Default)]
pub(super) struct Draft {
    /// Positions in [`Problem::documents`], group by group.
    pub(super) documents: Vec<u32>,
    /// Micro-batch by micro-batch; in one, in the order of ranks, and every rank in one.
    pub(super) groups: Vec<Group>,
    /// Micro-batch `j` is `groups[offsets[j]..offsets[j + 1]]`.
    pub(super) offsets: Vec<usize>,
}

impl Draft {
    /// Seconds of each micro-batch on its slowest rank.
    pub(super) fn costs(&self) -> Vec<f64> {
        let slowest = |groups: &[Group]| groups.iter().map(|group| group.seconds).fold(0.0, f64::max);
        self.offsets.windows(2).map(|ends| slowest(&self.groups[ends[0]..ends[1]])).collect()
    }

    /// The same with its micro-batches in another order, and documents in order of arrival inside each group.
    pub(super) fn in_order(&self, order: &[usize], documents: &[Document]) -> Self {
        let mut draft = Self { offsets: vec![0], ..Self::default() };
        for &j in order {
            for index in self.offsets[j]..self.offsets[j + 1] {
                let group = self.groups[index];
                let start = if index == 0 { 0 } else { self.groups[index - 1].end } as usize;
                let first = draft.documents.len();
                draft.documents.extend_from_slice(&self.documents[start..group.end as usize]);
                draft.documents[first..].sort_unstable_by_key(|&document| documents[document as usize].index);
                draft.groups.push(Group { end: draft.documents.len() as u32, ..group });
            }
            draft.offsets.push(draft.groups.len());
        }
        draft
    }
}

impl Problem {
    pub(super) fn new(
        lengths: &[i32],
        costs: Costs<'_>,
        cost: GroupCost,
        world_size: usize,
        largest_group: usize,
        max_tokens_per_rank: i32,
    ) -> Self {
        let mut documents: Vec<Document> = longest_first(lengths)
            .map(|(length, index)| Document { index: index as u32, load: costs.load(index, length) })
            .collect();
        let by_tokens = matches!(costs, Costs::Given { .. }).then(|| {
            documents.sort_by(|a, b| b.load.work().total_cmp(&a.load.work()));
            let mut order: Vec<u32> = (0..documents.len() as u32).collect();
            order.sort_by_key(|&place| std::cmp::Reverse(documents[place as usize].load.tokens));
            order
        });
        let total_work = documents.iter().map(|document| document.load.work()).sum();
        let max_tokens_per_rank = i64::from(max_tokens_per_rank);
        let gain = AS_IF_FREE;
        Self { documents, by_tokens, gain, total_work, cost, world_size, largest_group, max_tokens_per_rank }
    }

    /// The same with another gain.
    pub(super) fn with_gain(&self, gain: f64) -> Self {
        let (documents, by_tokens) = (self.documents.clone(), self.by_tokens.clone());
        Self { documents, by_tokens, gain, ..*self }
    }

    /// Whether a document that costs more is longer, too.
    pub(super) fn is_by_length(&self) -> bool {
        self.by_tokens.is_none()
    }

    /// The heaviest document on the largest group, relative to all work spread evenly.
    pub(super) fn heaviest(&self) -> f64 {
        let work = self.documents.first().map_or(0.0, |document| document.load.work());
        if work > 0.0 { work * self.world_size as f64 / (self.largest_group as f64 * self.total_work) } else { 0.0 }
    }

    /// Seconds of documents on groups where they are about as fast as they can be, costliest first; of those that can be
    /// side by side, the longest.
    pub(super) fn longest(&self) -> impl Iterator<Item = f64> {
        let largest = self.largest_group;
        let alone = move |document: &Document| match self.gain {
            AS_IF_FREE => (largest, document.load.on(largest as f64)),
            _ => self.fastest(&document.load),
        };
        let mut documents = self.documents.iter().map(alone).peekable();
        std::iter::from_fn(move || {
            let (mut ranks, mut longest) = (0, None);
            while let Some((size, seconds)) = documents.next_if(|(size, _)| ranks + size <= self.world_size) {
                ranks += size;
                longest = Some(longest.map_or(seconds, |longest: f64| longest.max(seconds)));
            }
            longest
        })
    }

    /// The group that a document is on where none is fast enough, and its seconds there, without what every micro-batch
    /// takes: the smallest of which twice the ranks are not much faster. Beyond that they exchange more than they save.
    pub(super) fn fastest(&self, load: &Load) -> (usize, f64) {
        let constant = self.cost.micro_batch_seconds;
        let seconds = |size: usize| self.cost.seconds(load, size) - constant;
        let mut sizes = self.group_sizes().filter(|&size| self.fits(load, size)).map(|size| (size, seconds(size)));
        let mut best = sizes.next().unwrap_or((self.largest_group, 0.0));
        for next in sizes {
            if next.1 * self.gain > best.1 {
                break;
            }
            best = next;
        }
        best
    }

    /// Powers of two.
    pub(super) fn group_sizes(&self) -> impl Iterator<Item = usize> + use<> {
        let largest = self.largest_group;
        (0..=largest.ilog2()).map(|bit| 1 << bit)
    }

    /// Whether no rank gets too many tokens (ranks differ by at most one), and the group no more than int32
    /// `cu_seqlens` count.
    #[inline]
    pub(super) fn fits(&self, load: &Load, cp_size: usize) -> bool {
        load.tokens <= self.capacity(cp_size)
    }

    /// Tokens of each micro-batch on its fullest rank.
    pub(super) fn fullest(&self, draft: &Draft) -> Vec<i64> {
        let mut start = 0;
        let mut of_group = |group: &Group| {
            let documents = &draft.documents[start..group.end as usize];
            start = group.end as usize;
            let tokens: i64 = documents.iter().map(|&document| self.documents[document as usize].load.tokens).sum();
            let ranks = i64::from(group.cp_size);
            (tokens + ranks - 1) / ranks
        };
        let mut of_micro_batch = |groups: &[Group]| groups.iter().map(&mut of_group).fold(0, i64::max);
        draft.offsets.windows(2).map(|ends| of_micro_batch(&draft.groups[ends[0]..ends[1]])).collect()
    }

    fn capacity(&self, cp_size: usize) -> i64 {
        (cp_size as i64 * self.max_tokens_per_rank).min(MAX_TOKENS)
    }

    /// Tokens that a block still takes.
    fn room(&self, block: &Block) -> i64 {
        self.capacity(block.cp_size as usize) - block.load.tokens
    }

    /// Groups of documents in micro-batches that should take as long as `targets`, in blocks of `base` ranks where
    /// these will do. `None` if the documents do not fit.
    ///
    /// # Complexity
    /// For `n` documents, `m` micro-batches and `r` ranks: O(n log r + m r / base), and O(m) more for every document
    /// that needs a larger block. Where `base` does not divide `r`, up to O(m log r) more for any, and O(m r / base)
    /// where memory binds.
    pub(super) fn solve(&self, targets: &[f64], base: usize) -> Option<Draft> {
        let places = 0..self.documents.len() as u32;
        let solved = |order: &mut dyn Iterator<Item = u32>| {
            let mut blocks = Blocks::new(self, targets.to_vec());
            blocks.open(base);
            blocks.fill(order, base)?;
            Some(blocks.into_draft())
        };
        solved(&mut places.into_iter()).or_else(|| solved(&mut self.by_tokens.as_ref()?.iter().copied()))
    }

    /// Seconds that each micro-batch takes at least: its constant; and of documents that are more than a fair share of
    /// all work even on the largest group, the longest where the shape is fullest, and so on.
    pub(super) fn floors(&self, shape: &[f64], work: f64) -> Vec<f64> {
        let mut fullest_first: Vec<usize> = (0..shape.len()).collect();
        fullest_first.sort_by(|&a, &b| shape[b].total_cmp(&shape[a]));
        let share = work / shape.len() as f64;
        let mut floors = vec![self.cost.micro_batch_seconds; shape.len()];
        for (seconds, &j) in self.longest().zip(&fullest_first) {
            if seconds <= share {
                break;
            }
            floors[j] += seconds;
        }
        floors
    }

    /// What the shape, scaled to the work, has above the floors.
    pub(super) fn above(&self, floors: &[f64], shape: &[f64], mut work: f64) -> Vec<f64> {
        let constant = self.cost.micro_batch_seconds;
        let mut left: f64 = shape.iter().sum();
        // Floors above the level lower it for all others: highest first, relative to the shape.
        let mut heights: Vec<(f64, f64)> =
            floors.iter().zip(shape).map(|(floor, size)| ((floor - constant) / size, *size)).collect();
        heights.sort_by(|a, b| b.0.total_cmp(&a.0));
        for (height, size) in heights {
            if height <= work / left || left <= size {
                break;
            }
            work = (work - height * size).max(0.0);
            left -= size;
        }
        let level = work / left;
        floors.iter().zip(shape).map(|(floor, size)| (size * level - (floor - constant)).max(0.0)).collect()
    }
}

/// Blocks of each size by weight, while they change.
struct Sizes {
    /// By the logarithm of the size: its blocks, and their weights.
    sizes: Vec<(Vec<u32>, Ladder)>,
    /// Of each block, its size and its place among those of it.
    places: Vec<(u32, u32)>,
}

impl Sizes {
    fn new(blocks: &[Block], weight: impl Fn(&Block) -> f64) -> Self {
        let largest = blocks.iter().map(|block| block.cp_size).max().unwrap_or(1);
        let mut members: Vec<Vec<u32>> = vec![Vec::new(); largest.ilog2() as usize + 1];
        let mut places = Vec::with_capacity(blocks.len());
        for (index, block) in blocks.iter().enumerate() {
            let size = block.cp_size.ilog2();
            places.push((size, members[size as usize].len() as u32));
            members[size as usize].push(index as u32);
        }
        let ladder = |members: Vec<u32>| {
            let ladder = Ladder::new(members.iter().map(|&block| weight(&blocks[block as usize])));
            (members, ladder)
        };
        Self { sizes: members.into_iter().map(ladder).collect(), places }
    }

    /// Of each size that there is, the lightest blocks that will do, so `many` at most.
    fn lightest(&self, many: usize, will_do: impl Fn(usize) -> bool + Copy) -> impl Iterator<Item = usize> {
        self.sizes.iter().flat_map(move |(members, ladder)| {
            ladder.ascending().map(|place| members[place] as usize).filter(move |&block| will_do(block)).take(many)
        })
    }

    fn set(&mut self, block: usize, weight: f64) {
        let (size, place) = self.places[block];
        self.sizes[size as usize].1.set(place as usize, weight);
    }
}

/// An aligned run of ranks in one micro-batch, being filled.
#[derive(Clone, Copy, Debug)]
struct Block {
    micro_batch: u32,
    first_rank: u32,
    cp_size: u32,
    load: Load,
    seconds: f64,
}

struct Blocks<'a> {
    problem: &'a Problem,
    targets: Vec<f64>,
    blocks: Vec<Block>,
    /// Block of each document, or [`NOWHERE`] yet.
    assignment: Vec<u32>,
}

const NOWHERE: u32 = u32::MAX;

impl<'a> Blocks<'a> {
    fn new(problem: &'a Problem, targets: Vec<f64>) -> Self {
        let assignment = vec![NOWHERE; problem.documents.len()];
        Self { problem, targets, blocks: Vec::new(), assignment }
    }

    /// Opens a block for every document that needs more than `base` ranks, for memory or for time, while micro-batches
    /// have ranks left; cuts what is left of them into blocks of `base`.
    fn open(&mut self, base: usize) {
        let Self { problem, targets, .. } = self;
        let mut used = vec![0_usize; targets.len()];
        let mut meter = Meter::default();
        // Blocks come in falling sizes, so each is aligned.
        for (place, size) in problem.large(base, targets.iter().copied().fold(0.0, f64::max)) {
            meter.spend(targets.len());
            let document = &problem.documents[place];
            let seconds = problem.cost.seconds(&document.load, size);
            let room = (0..targets.len()).filter(|&j| used[j] + size <= problem.world_size);
            // Where it exceeds the target least; of those, where most ranks are free.
            let excess = |j: usize| (seconds - targets[j] * SLACK).max(0.0);
            let Some(j) = room.min_by(|&a, &b| excess(a).total_cmp(&excess(b)).then(used[a].cmp(&used[b]))) else {
                break;
            };
            self.assignment[place] = self.blocks.len() as u32;
            let (micro_batch, first_rank, cp_size) = (j as u32, used[j] as u32, size as u32);
            self.blocks.push(Block { micro_batch, first_rank, cp_size, load: document.load, seconds });
            used[j] += size;
        }
        let constant = problem.cost.micro_batch_seconds;
        for (j, &used) in used.iter().enumerate() {
            let mut first = used;
            while first < problem.world_size {
                let rest = problem.world_size - first;
                let cp_size = base.min(1 << rest.ilog2());
                let (micro_batch, first_rank) = (j as u32, first as u32);
                let load = Load::default();
                self.blocks.push(Block { micro_batch, first_rank, cp_size: cp_size as u32, load, seconds: constant });
                first += cp_size;
            }
        }
    }

    /// Places the other documents in that order: each to the block that is furthest below its target; if it does not fit there, to
    /// the one with the most room. `None` if it fits nowhere.
    fn fill(&mut self, order: &mut dyn Iterator<Item = u32>, base: usize) -> Option<()> {
        let Self { problem, targets, blocks, assignment } = self;
        let over = |block: &Block| block.seconds - targets[block.micro_batch as usize];
        let mut by_time = Sizes::new(blocks, over);
        let mut by_room: Option<Ladder> = None;
        let mut meter = Meter::default();
        // A document takes the same time more on every block of a size where exchange is free; where it costs, about
        // the same. 12, 24 or 48 ranks have no more blocks of a size than this.
        let many = if problem.cost.is_free() { 1 } else { targets.len() };
        for place in order {
            if assignment[place as usize] != NOWHERE {
                continue;
            }
            let document = &problem.documents[place as usize];
            let with = |block: &Block| {
                let load = block.load + document.load;
                let cp_size = block.cp_size as usize;
                Block { load, seconds: problem.cost.seconds(&load, cp_size), ..*block }
            };
            let fits = |block: &Block| problem.fits(&block.load, block.cp_size as usize);
            let lightest = |a: &usize, b: &usize| over(&blocks[*a]).total_cmp(&over(&blocks[*b])).then(a.cmp(b));
            let mut chosen = by_time.lightest(1, |_| true).min_by(lightest)?;
            let mut after = with(&blocks[chosen]);
            if (after.cp_size as usize) < base && over(&after) > 0.0 {
                meter.spend(targets.len());
                // Too small a block, at the end of a world that is no power of two: the one that it takes least beyond
                // its target.
                let found = by_time.lightest(many, |block| fits(&with(&blocks[block])));
                let all = found.map(|block| (block, with(&blocks[block])));
                (chosen, after) = all.min_by(|a, b| over(&a.1).total_cmp(&over(&b.1)).then(a.0.cmp(&b.0)))?;
            } else if !fits(&after) {
                let rooms = || blocks.iter().map(|block| -problem.room(block) as f64);
                chosen = by_room.get_or_insert_with(|| Ladder::new(rooms())).lightest();
                after = with(&blocks[chosen]);
                if !fits(&after) {
                    return None;
                }
            }
            blocks[chosen] = after;
            by_time.set(chosen, over(&after));
            if let Some(by_room) = &mut by_room {
                by_room.set(chosen, -problem.room(&after) as f64);
            }
            assignment[place as usize] = chosen as u32;
        }
        Some(())
    }

    fn into_draft(self) -> Draft {
        let Self { problem, targets, mut blocks, assignment } = self;
        // What a micro-batch takes anyway.
        let mut limits = targets;
        for block in &blocks {
            let limit = &mut limits[block.micro_batch as usize];
            *limit = limit.max(block.seconds);
        }
        // Documents by block, costliest first in each: a counting sort.
        let mut cursors = vec![0_u32; blocks.len() + 1];
        for &block in &assignment {
            cursors[block as usize + 1] += 1;
        }
        for block in 0..blocks.len() {
            cursors[block + 1] += cursors[block];
        }
        let starts = cursors.clone();
        let mut documents = vec![0_u32; assignment.len()];
        for (document, &block) in assignment.iter().enumerate() {
            let cursor = &mut cursors[block as usize];
            documents[*cursor as usize] = document as u32;
            *cursor += 1;
        }
        let mut order: Vec<usize> = (0..blocks.len()).collect();
        order.sort_unstable_by_key(|&block| (blocks[block].micro_batch, blocks[block].first_rank));
        let mut draft = Draft { documents: Vec::with_capacity(documents.len()), ..Draft::default() };
        let mut meter = Meter::default();
        let mut halving = Halving { problem, scratch: Vec::new() };
        draft.offsets.push(0);
        for (j, &limit) in limits.iter().enumerate() {
            let of_micro_batch = order.partition_point(|&block| (blocks[block].micro_batch as usize) < j)
                ..order.partition_point(|&block| blocks[block].micro_batch as usize <= j);
            for &index in &order[of_micro_batch] {
                meter.spend(1 + (starts[index + 1] - starts[index]) as usize);
                let range = starts[index] as usize..starts[index + 1] as usize;
                halving.halve(&mut blocks[index], &mut documents[range], limit * SLACK, &mut draft);
            }
            draft.offsets.push(draft.groups.len());
        }
        draft
    }
}

impl Problem {
    /// Documents that want more than `base` ranks, and how many, in falling numbers.
    fn large(&self, base: usize, full: f64) -> Vec<(usize, usize)> {
        let mut large = Vec::new();
        let mut most = self.largest_group;
        let mut meter = Meter::default();
        for (place, document) in self.documents.iter().enumerate() {
            meter.spend(1);
            let size = self.wanted(&document.load, base, most, full);
            if size > base {
                large.push((place, size));
            }
            if self.is_by_length() {
                // A shorter document never needs more ranks.
                if size <= base {
                    break;
                }
                most = size;
            }
        }
        if !self.is_by_length() {
            large.sort_by_key(|&(_, size)| std::cmp::Reverse(size));
        }
        large
    }

    /// The smallest group from `base` to `most` ranks on which a document takes at most `full` seconds; if there is
    /// none, one where it is about as fast as it can be.
    fn wanted(&self, load: &Load, base: usize, most: usize, full: f64) -> usize {
        let in_time = |&size: &usize| self.cost.seconds(load, size) <= full * SLACK;
        let mut sizes = self.group_sizes().filter(|&size| (base..=most).contains(&size) && self.fits(load, size));
        sizes.find(in_time).unwrap_or_else(|| self.fastest(load).0.clamp(base, most))
    }
}

/// Cuts blocks into the smallest groups that take no longer.
struct Halving<'a> {
    problem: &'a Problem,
    scratch: Vec<u32>,
}

impl Halving<'_> {
    fn halve(&mut self, block: &mut Block, documents: &mut [u32], limit: f64, draft: &mut Draft) {
        if let Some((first, mut halves)) = self.halves(block, documents, limit) {
            let (left, right) = documents.split_at_mut(first);
            self.halve(&mut halves[0], left, limit, draft);
            self.halve(&mut halves[1], right, limit, draft);
            return;
        }
        draft.documents.extend_from_slice(documents);
        let Block { first_rank, cp_size, seconds, .. } = *block;
        draft.groups.push(Group { first_rank, cp_size, seconds, end: draft.documents.len() as u32 });
    }

    /// Costliest first, each to the half with less work, memory permitting; the documents of the first half come to the
    /// front. `None` if that takes longer than the block and the limit, and the documents are as before.
    fn halves(&mut self, block: &Block, documents: &mut [u32], limit: f64) -> Option<(usize, [Block; 2])> {
        if block.cp_size == 1 || documents.len() < 2 {
            return None;
        }
        let half = block.cp_size as usize / 2;
        let mut loads = [Load::default(); 2];
        self.scratch.clear();
        for &document in &*documents {
            let load = self.problem.documents[document as usize].load;
            let mut side = usize::from(loads[1].work() < loads[0].work());
            if !self.problem.fits(&(loads[side] + load), half) {
                side = 1 - side;
                if !self.problem.fits(&(loads[side] + load), half) {
                    return None;
                }
            }
            loads[side] = loads[side] + load;
            self.scratch.push(side as u32);
        }
        let seconds = loads.map(|load| self.problem.cost.seconds(&load, half));
        if seconds[0].max(seconds[1]) > limit.max(block.seconds) || loads[1].tokens == 0 {
            return None;
        }
        let mut first = 0;
        for index in 0..documents.len() {
            // Stable for the first half; the second is put in order below.
            if self.scratch[index] == 0 {
                documents.swap(first, index);
                first += 1;
            }
        }
        documents[first..].sort_unstable();
        let of = |side: usize| Block {
            first_rank: block.first_rank + (side * half) as u32,
            cp_size: half as u32,
            load: loads[side],
            seconds: seconds[side],
            ..*block
        };
        Some((first, [of(0), of(1)]))
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
