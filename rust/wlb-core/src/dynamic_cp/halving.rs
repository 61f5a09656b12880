//! Blocks cut into the smallest groups that take no longer.

use super::block::Block;
use super::cost::Load;
use super::draft::{Draft, Group};
use super::options::GroupSizes;
use super::problem::Problem;

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
        draft.groups.push(Group { first_rank, cp_size, seconds, end: draft.documents.len() as u32 });
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
        let half = self.problem.half(block.first_rank as usize, size);
        self.parts(block, documents, limit, half).or_else(|| {
            // Or those that the costliest needs, and the others.
            let costliest = &self.problem.documents[documents[0] as usize].load;
            let needed = self.problem.smallest_in_time(costliest, 1, size - 1, limit)?;
            if needed == half { None } else { self.parts(block, documents, limit, needed) }
        })
    }

    /// The same with so many ranks in the first: costliest first, each document to the part with less work a rank,
    /// limits permitting.
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
