//! Places documents in groups for a given number of micro-batches.
//!
//! There are three steps. First, a document that is too large for a block of `base` ranks opens a larger block of its
//! own ([`Blocks::open`]). Second, all other documents go to blocks, longest first: each to the block with room whose
//! time exceeds its target least ([`Blocks::fill`]). (If exchange is free, all blocks are about alike; then a document
//! that does not fit on the first block goes to the one with the most room. If documents bring their own costs, the
//! order is costliest first, and longest first only if they do not fit.) Third, every block is halved, and its halves
//! again, while it divides into halves of equal work ([`Halving`]): less exchange, same time.

use super::block::{Block, Sizes};
use super::cost::Load;
use super::options::GroupSizes;
use super::plan::{Draft, DraftGroup};
use super::problem::Problem;
use super::ranks::FreeRanks;

/// Factor by which halves may exceed the time of their micro-batch.
const SLACK: f64 = 1.0 + 1.0 / 256.0;
/// A solution is checked for lateness this many times. Costliest first, half of the documents are most of the work.
const PARTS: usize = 4;
/// Relative rounding error of seconds.
const ROUNDING: f64 = 1e-12;

struct Blocks<'a> {
    problem: &'a Problem,
    targets: Vec<f64>,
    blocks: Vec<Block>,
    /// Block of each document, or [`NOWHERE`].
    assignment: Vec<u32>,
}

const NOWHERE: u32 = u32::MAX;

/// Whether micro-batches with these seconds are too late.
pub(super) type Late<'a> = &'a mut dyn FnMut(&[f64]) -> bool;

/// Where a document goes that does not fit on the block with the least time beyond its target.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Overflow {
    /// To the block with the next least time that has room. Blocks of all sizes then end about equally late.
    NextLightest,
    /// To the block with the most room: a large block, which gets late. More documents fit this way.
    MostRoom,
}

/// A micro-batch in which larger blocks are being opened.
struct Place {
    micro_batch: usize,
    /// Target time of the micro-batch.
    target: f64,
    /// Ranks of the blocks that were opened.
    used: usize,
    /// Ranks of the largest block that can still be opened.
    most: usize,
}

impl Place {
    fn new(micro_batch: usize, target: f64, world: &FreeRanks) -> Self {
        Self { micro_batch, target, used: 0, most: world.most() }
    }
}

impl<'a> Blocks<'a> {
    fn new(problem: &'a Problem, targets: Vec<f64>) -> Self {
        let assignment = vec![NOWHERE; problem.documents.len()];
        Self { problem, targets, blocks: Vec::new(), assignment }
    }

    /// Opens a block for every document that needs more than `base` ranks, for memory or to finish in `full` seconds,
    /// while micro-batches have ranks left. Cuts the remaining ranks into blocks of `base`.
    fn open(&mut self, base: usize, full: f64) {
        let Self { problem, targets, .. } = self;
        let world = FreeRanks::new(problem.world_size, problem.node());
        // Longest target first, so that the micro-batches in which a document finishes in time come first.
        let mut fullest: Vec<usize> = (0..targets.len()).collect();
        fullest.sort_by(|&a, &b| targets[b].total_cmp(&targets[a]));
        let mut places: Vec<Place> = fullest.into_iter().map(|j| Place::new(j, targets[j] * SLACK, &world)).collect();
        let mut free = vec![world; targets.len()];
        // Sizes descend, so each power of two is aligned.
        for (place, size) in problem.large(base, full) {
            let document = &problem.documents[place];
            let seconds = problem.cost.seconds(&document.load, size);
            // The micro-batch in which the document finishes in time, or exceeds the target least; of several, the one
            // with most ranks free.
            let in_time = places.partition_point(|place| place.target >= seconds);
            let emptiest = |places: &[Place]| {
                let fitting = (0..places.len()).filter(|&at| places[at].most >= size);
                fitting.min_by_key(|&at| (places[at].used, places[at].micro_batch))
            };
            let late = || {
                let first = in_time + places[in_time..].iter().position(|place| place.most >= size)?;
                let target = places[first].target;
                let same = places[first..].partition_point(|place| place.target >= target);
                Some(first + emptiest(&places[first..first + same])?)
            };
            let Some(at) = emptiest(&places[..in_time]).or_else(late) else { break };
            let chosen = &mut places[at];
            let j = chosen.micro_batch;
            let Some(first) = free[j].take(size) else { break };
            (chosen.used, chosen.most) = (chosen.used + size, free[j].most());
            self.assignment[place] = self.blocks.len() as u32;
            let (micro_batch, first_rank, cp_size) = (j as u32, first as u32, size as u32);
            let seconds = problem.cost.at(first_rank, &document.load, size);
            self.blocks.push(Block { micro_batch, first_rank, cp_size, load: document.load, seconds });
        }
        let seconds = problem.cost.micro_batch_seconds;
        self.blocks.reserve(targets.len() * (problem.world_size / base + 1));
        for (j, free) in free.into_iter().enumerate() {
            for (first, size) in free.cut(problem.group_sizes, problem.only(), base, problem.largest_group) {
                let (micro_batch, first_rank, cp_size) = (j as u32, first as u32, size as u32);
                self.blocks.push(Block { micro_batch, first_rank, cp_size, load: Load::default(), seconds });
            }
        }
    }

    /// Places the other documents in the given order: each on the block that is furthest below its target, or, if it
    /// does not fit there, on another. A block with the most documents that a group may have takes no more. `None` if a
    /// document fits nowhere, or if the micro-batches get too late.
    fn fill(
        &mut self,
        order: &mut dyn Iterator<Item = u32>,
        base: usize,
        overflow: Overflow,
        mut late: Option<Late<'_>>,
    ) -> Option<()> {
        let Self { problem, targets, blocks, assignment } = self;
        let part = problem.documents.len().div_ceil(PARTS);
        let mut placed = 0;
        let mut is_late = |blocks: &[Block]| late.as_mut().is_some_and(|late| late(&slowest(blocks, targets.len())));
        let over = |block: &Block| block.seconds - targets[block.micro_batch as usize];
        let weight = |block: &Block| if problem.is_full(&block.load) { f64::INFINITY } else { over(block) };
        let longest = targets.iter().copied().fold(0.0, f64::max);
        let (in_order, makes_room) = (problem.is_by_length(), overflow == Overflow::NextLightest);
        let room = |block: &Block| problem.room(&block.load, block.cp_size as usize);
        let least_room = |block: &Block| -room(block) as f64;
        let mut by_time = Sizes::new(blocks, in_order || !makes_room, weight, room);
        let (mut by_room, mut with_room): (Option<Sizes>, Option<Sizes>) = (None, None);
        let mut without_room = 0;
        // If exchange is free, a document adds equal time on all blocks of one size; if not, about equal time. A world
        // of 12, 24 or 48 ranks has at most this many blocks of a size.
        let many = if problem.cost.is_free() { 1 } else { targets.len() };
        for place in order {
            placed += 1;
            if placed % part == 0 && is_late(blocks) {
                return None;
            }
            if assignment[place as usize] != NOWHERE {
                continue;
            }
            let document = &problem.documents[place as usize];
            let with = |block: &Block| {
                let load = block.load + document.load;
                let cp_size = block.cp_size as usize;
                Block { load, seconds: problem.cost.at(block.first_rank, &load, cp_size), ..*block }
            };
            let fits = |block: &Block| problem.fits(&block.load, block.cp_size as usize);
            if makes_room {
                by_time.make_room(document.load.tokens);
            }
            if let Some(with_room) = &mut with_room {
                with_room.make_room(document.load.tokens);
            }
            let mut chosen = by_time.first()?;
            let mut after = with(&blocks[chosen]);
            if (after.cp_size as usize) < base && over(&after) > 0.0 {
                // A block at the end of a world that is no power of two is too small. Take the block where the document
                // exceeds the target least. If many blocks have no room, an order of blocks by room skips them.
                let mut least: Option<(usize, Block)> = None;
                if !makes_room && without_room > blocks.len() && with_room.is_none() {
                    let sizes = with_room.insert(Sizes::new(blocks, in_order, weight, room));
                    sizes.make_room(document.load.tokens);
                }
                for of_size in with_room.as_ref().unwrap_or(&by_time).ascending() {
                    let mut fitting = 0;
                    for at in of_size {
                        let block = &blocks[at];
                        // Certainly later than the best block so far, even if these documents hid all of each other's
                        // exchange.
                        let later = |(_, least): &(usize, Block)| {
                            let more = problem.cost.least_more(&document.load, block.cp_size as usize);
                            over(block) + more > over(least) + ROUNDING * (least.seconds + longest)
                        };
                        if fitting == many || least.as_ref().is_some_and(later) {
                            break;
                        }
                        let found = with(block);
                        if !fits(&found) {
                            without_room += 1;
                            continue;
                        }
                        fitting += 1;
                        let before = |(other, least): &(usize, Block)| {
                            over(&found).total_cmp(&over(least)).then(at.cmp(other)).is_lt()
                        };
                        if least.as_ref().is_none_or(before) {
                            least = Some((at, found));
                        }
                    }
                }
                (chosen, after) = least?;
            } else if !fits(&after) {
                chosen = by_room.get_or_insert_with(|| Sizes::new(blocks, in_order, least_room, room)).first()?;
                after = with(&blocks[chosen]);
                if !fits(&after) {
                    return None;
                }
            }
            blocks[chosen] = after;
            by_time.set(chosen, weight(&after), room(&after));
            if let Some(by_room) = &mut by_room {
                by_room.set(chosen, least_room(&after), room(&after));
            }
            if let Some(with_room) = &mut with_room {
                with_room.set(chosen, weight(&after), room(&after));
            }
            assignment[place as usize] = chosen as u32;
        }
        (!is_late(blocks)).then_some(())
    }

    fn into_draft(self) -> Draft {
        let Self { problem, targets, blocks, assignment } = self;
        // Time that each micro-batch takes in any case.
        let mut limits = targets;
        for block in &blocks {
            let limit = &mut limits[block.micro_batch as usize];
            *limit = limit.max(block.seconds);
        }
        // Documents by block, costliest first in each block: a counting sort.
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
        // Blocks by micro-batch, in the order of their ranks.
        let mut of_micro_batch: Vec<Vec<(u32, u32)>> = vec![Vec::new(); limits.len()];
        for (index, block) in blocks.iter().enumerate() {
            of_micro_batch[block.micro_batch as usize].push((block.first_rank, index as u32));
        }
        let mut draft = Draft { documents: Vec::with_capacity(documents.len()), ..Draft::default() };
        let mut halving = Halving::new(problem);
        draft.offsets.push(0);
        for (blocks_of, &limit) in of_micro_batch.iter_mut().zip(&limits) {
            blocks_of.sort_unstable();
            for &(_, index) in &*blocks_of {
                let index = index as usize;
                let range = starts[index] as usize..starts[index + 1] as usize;
                halving.halve(&blocks[index], &mut documents[range], limit * SLACK, &mut draft);
            }
            draft.offsets.push(draft.groups.len());
        }
        draft
    }
}

/// Seconds of each micro-batch so far: those of its slowest block.
fn slowest(blocks: &[Block], num_micro_batches: usize) -> Vec<f64> {
    let mut seconds = vec![0.0_f64; num_micro_batches];
    for block in blocks {
        let slowest = &mut seconds[block.micro_batch as usize];
        *slowest = slowest.max(block.seconds);
    }
    seconds
}

impl Problem {
    /// Documents that need more than `base` ranks, each with that number, in descending order of the number.
    fn large(&self, base: usize, full: f64) -> Vec<(usize, usize)> {
        let mut large = Vec::new();
        let mut most = self.largest_group;
        for (place, document) in self.documents.iter().enumerate() {
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
    /// none, the group from [`Problem::fastest`].
    fn wanted(&self, load: &Load, base: usize, most: usize, full: f64) -> usize {
        let in_time = self.smallest_in_time(load, base, most, full * SLACK);
        in_time.unwrap_or_else(|| self.fastest(load).0.clamp(base, most))
    }

    /// Groups of documents in micro-batches with these target seconds, in blocks of `base` ranks; a document gets a
    /// larger block only for memory or to finish in `full` seconds. `None` if the documents do not fit, or if `late`
    /// says that the micro-batches get too late. `late` is asked with a part of the documents placed, and with all,
    /// before blocks are halved.
    ///
    /// # Complexity
    /// For `n` documents, `m` micro-batches and `r` ranks: O(n log r + m r / base), and O(m) more for every document
    /// that needs a larger block. If `base` does not divide `r`, up to O(m log r) more for every document, and O(m r /
    /// base) if memory binds. Twice that if exchange costs and documents do not fit at first.
    pub(super) fn solve(&self, targets: &[f64], base: usize, full: f64, mut late: Option<Late<'_>>) -> Option<Draft> {
        let (asks, mut given_up) = (late.is_some(), false);
        let mut solved = |order: &mut dyn Iterator<Item = u32>, overflow| {
            if given_up {
                return None;
            }
            let mut blocks = Blocks::new(self, targets.to_vec());
            blocks.open(base, full);
            let mut noted = |seconds: &[f64]| {
                given_up = late.as_mut().is_some_and(|late| late(seconds));
                given_up
            };
            let late: Option<Late<'_>> = if asks { Some(&mut noted) } else { None };
            blocks.fill(order, base, overflow, late)?;
            Some(blocks.into_draft())
        };
        let places = || 0..self.documents.len() as u32;
        let priced = if self.cost.is_free() { None } else { solved(&mut places(), Overflow::NextLightest) };
        priced
            .or_else(|| solved(&mut places(), Overflow::MostRoom))
            .or_else(|| solved(&mut self.by_tokens.as_ref()?.iter().copied(), Overflow::MostRoom))
    }
}

/// Cuts blocks into the smallest groups that take no longer.
pub(super) struct Halving<'a> {
    problem: &'a Problem,
    scratch: Vec<u32>,
}

impl<'a> Halving<'a> {
    pub(super) fn new(problem: &'a Problem) -> Self {
        Self { problem, scratch: Vec::new() }
    }

    /// Appends the groups of a block, whose documents must be costliest first. The groups may take as long as the
    /// block, or as the limit.
    pub(super) fn halve(&mut self, block: &Block, documents: &mut [u32], limit: f64, draft: &mut Draft) {
        if let Some((first, halves)) = self.halves(block, documents, limit.max(block.seconds)) {
            let (left, right) = documents.split_at_mut(first);
            self.halve(&halves[0], left, limit, draft);
            self.halve(&halves[1], right, limit, draft);
            return;
        }
        draft.documents.extend_from_slice(documents);
        let Block { first_rank, cp_size, seconds, .. } = *block;
        draft.groups.push(DraftGroup { first_rank, cp_size, seconds, end: draft.documents.len() as u32 });
    }

    /// Two blocks instead of one, and the number of documents in the first; its documents come to the front. `None` if
    /// no two blocks finish within the limit; the documents then stay as they were.
    fn halves(&mut self, block: &Block, documents: &mut [u32], limit: f64) -> Option<(usize, [Block; 2])> {
        let size = block.cp_size as usize;
        if size == 1 || documents.len() < 2 {
            return None;
        }
        if self.problem.group_sizes == GroupSizes::PowersOfTwo {
            return self.parts(block, documents, limit, size / 2);
        }
        let half = self.problem.half(block.first_rank as usize, size)?;
        self.parts(block, documents, limit, half).or_else(|| {
            // Otherwise: the ranks that the costliest document needs, and the others.
            let costliest = &self.problem.documents[documents[0] as usize].load;
            let needed = self.problem.smallest_in_time(costliest, 1, size - 1, limit)?;
            let is_other = needed != half && self.problem.is_size(size - needed);
            if is_other { self.parts(block, documents, limit, needed) } else { None }
        })
    }

    /// Divides a block into two parts with `first` ranks in the first one: costliest document first, each to the part
    /// with less work per rank, within limits.
    fn parts(&mut self, block: &Block, documents: &mut [u32], limit: f64, first: usize) -> Option<(usize, [Block; 2])> {
        let sizes = [first, block.cp_size as usize - first];
        let mut loads = [Load::default(); 2];
        self.scratch.clear();
        for &document in &*documents {
            let load = self.problem.documents[document as usize].load;
            let work = [0, 1].map(|side: usize| loads[side].work() / sizes[side] as f64);
            let mut side = usize::from(work[1] < work[0]);
            if !self.problem.fits(&(loads[side] + load), sizes[side]) {
                side = 1 - side;
                if !self.problem.fits(&(loads[side] + load), sizes[side]) {
                    return None;
                }
            }
            loads[side] = loads[side] + load;
            self.scratch.push(side as u32);
        }
        let firsts = [block.first_rank, block.first_rank + first as u32];
        let seconds = [0, 1].map(|side| self.problem.cost.at(firsts[side], &loads[side], sizes[side]));
        if seconds[0].max(seconds[1]) > limit || loads[1].tokens == 0 {
            return None;
        }
        let mut count = 0;
        for index in 0..documents.len() {
            // The order stays for the first part; the second part is sorted below.
            if self.scratch[index] == 0 {
                documents.swap(count, index);
                count += 1;
            }
        }
        documents[count..].sort_unstable();
        let of = |side: usize| Block {
            first_rank: firsts[side],
            cp_size: sizes[side] as u32,
            load: loads[side],
            seconds: seconds[side],
            ..*block
        };
        Some((count, [of(0), of(1)]))
    }
}
