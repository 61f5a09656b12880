//! From documents to groups, for a given number of micro-batches.
//!
//! Three steps. A document that is too much for a block of `base` ranks opens a larger one of its own
//! ([`Blocks::open`]). All others go, longest first, to the block with the least time beyond its target that has room
//! for them; where exchange is free, so that all blocks are about alike, to the one with the most room if the first has
//! none ([`Blocks::fill`]). Where documents bring their own costs, that is
//! costliest first; and longest first only if they do not fit so. Then every block is halved, and its halves again,
//! while halves of equal work can be found in it ([`Halving`]): less to exchange, same time.

use super::block::{Block, Sizes};
use super::cost::Load;
use super::options::GroupSizes;
use super::plan::{Draft, DraftGroup};
use super::problem::Problem;
use super::ranks::FreeRanks;

/// Halves may take this much longer than what their micro-batch takes anyway.
const SLACK: f64 = 1.0 + 1.0 / 256.0;
/// Whether a solution becomes too late is asked so often. Costliest first, half of the documents are most of the work.
const PARTS: usize = 4;
/// Relative rounding error of seconds.
const ROUNDING: f64 = 1e-12;

struct Blocks<'a> {
    problem: &'a Problem,
    targets: Vec<f64>,
    blocks: Vec<Block>,
    /// Block of each document, or [`NOWHERE`] yet.
    assignment: Vec<u32>,
}

const NOWHERE: u32 = u32::MAX;

/// Whether micro-batches that take this many seconds are too late.
pub(super) type Late<'a> = &'a mut dyn FnMut(&[f64]) -> bool;

/// Treatment of a document that does not fit on the block with the least time beyond its target.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Overflow {
    /// The block with the next least time among those with room. Blocks of all sizes then end about equally late.
    NextLightest,
    /// The block with the most room: a large one, which becomes late. More documents fit this way.
    MostRoom,
}

/// A micro-batch while larger blocks are opened in it.
struct Place {
    micro_batch: usize,
    /// Target time of the block.
    target: f64,
    /// Ranks of its blocks.
    used: usize,
    /// Ranks of the largest block that can be opened.
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

    /// Opens a block for every document that needs more than `base` ranks, for memory or to be done in `full` seconds,
    /// while micro-batches have ranks left; cuts what is left of them into blocks of `base`.
    fn open(&mut self, base: usize, full: f64) {
        let Self { problem, targets, .. } = self;
        let world = FreeRanks::new(problem.world_size, problem.node());
        // Longest target first, so that those in which a document is done in time come before all others.
        let mut fullest: Vec<usize> = (0..targets.len()).collect();
        fullest.sort_by(|&a, &b| targets[b].total_cmp(&targets[a]));
        let mut places: Vec<Place> = fullest.into_iter().map(|j| Place::new(j, targets[j] * SLACK, &world)).collect();
        let mut free = vec![world; targets.len()];
        // They come in falling sizes, so each power of two is aligned.
        for (place, size) in problem.large(base, full) {
            let document = &problem.documents[place];
            let seconds = problem.cost.seconds(&document.load, size);
            // Where it exceeds the target least; of those, where most ranks are free.
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

    /// Places the other documents in that order: each to the block that is furthest below its target; if it does not
    /// fit there, to another. A block of as many documents as a group may have takes none. `None` if it fits nowhere,
    /// or if what micro-batches take is too late.
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
        let room = |block: &Block| problem.room(block);
        let least_room = |block: &Block| -room(block) as f64;
        let mut by_time = Sizes::new(blocks, in_order || !makes_room, weight, room);
        let (mut by_room, mut with_room): (Option<Sizes>, Option<Sizes>) = (None, None);
        let mut without_room = 0;
        // A document takes the same time more on every block of a size where exchange is free; where it costs, about
        // the same. 12, 24 or 48 ranks have no more blocks of a size than this.
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
                // Too small a block, at the end of a world that is no power of two: the one that it takes least beyond
                // its target. Where many have no room, an order of its own leaves them out.
                let mut least: Option<(usize, Block)> = None;
                if !makes_room && without_room > blocks.len() && with_room.is_none() {
                    let sizes = with_room.insert(Sizes::new(blocks, in_order, weight, room));
                    sizes.make_room(document.load.tokens);
                }
                for of_size in with_room.as_ref().unwrap_or(&by_time).ascending() {
                    let mut fitting = 0;
                    for at in of_size {
                        let block = &blocks[at];
                        // Later than the least, whatever the documents hide of each other's exchange; but for rounding.
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

/// Seconds of each micro-batch so far, on its slowest block.
fn slowest(blocks: &[Block], num_micro_batches: usize) -> Vec<f64> {
    let mut seconds = vec![0.0_f64; num_micro_batches];
    for block in blocks {
        let slowest = &mut seconds[block.micro_batch as usize];
        *slowest = slowest.max(block.seconds);
    }
    seconds
}

impl Problem {
    /// Documents that want more than `base` ranks, and how many, in falling numbers.
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
    /// none, one where it is about as fast as it can be.
    fn wanted(&self, load: &Load, base: usize, most: usize, full: f64) -> usize {
        let in_time = self.smallest_in_time(load, base, most, full * SLACK);
        in_time.unwrap_or_else(|| self.fastest(load).0.clamp(base, most))
    }

    /// Groups of documents in micro-batches that should take as long as `targets`, in blocks of `base` ranks where
    /// these will do: for memory, and to be done in `full` seconds. `None` if the documents do not fit, or if
    /// micro-batches become too late: of what each of them takes with a part of the documents, and with all, before
    /// blocks are halved.
    ///
    /// # Complexity
    /// For `n` documents, `m` micro-batches and `r` ranks: O(n log r + m r / base), and O(m) more for every document
    /// that needs a larger block. Where `base` does not divide `r`, up to O(m log r) more for any, and O(m r / base)
    /// where memory binds. Twice that where exchange costs and documents do not fit at first.
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

    /// Appends the groups of a block, whose documents come costliest first; they may take as long as the block, or as
    /// the limit.
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

    /// Two blocks in the place of one, and how many documents the first has, which come to the front. `None` if there
    /// are none that are done within the limit, and the documents are as before.
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
            // Or those that the costliest needs, and the others.
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
            // Stable for the first part; the second is put in order below.
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
