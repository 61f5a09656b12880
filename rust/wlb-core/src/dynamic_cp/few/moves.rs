//! Random neighbours of a layout: a document, a group or a micro-batch is moved.

use crate::dynamic_cp::cost::Load;
use crate::dynamic_cp::options::GroupSizes;
use crate::dynamic_cp::problem::{Problem, at_most};

use super::draw::Draw;
use super::layout::{Layout, MOST, Parts, SAME, Set, documents_of};

/// One of this many moved documents is drawn from all documents, the others from the rank with the most work.
const LATEST: usize = 5;
/// Number of random divisions of all ranks that are tried for the documents of a micro-batch until they fit.
const DEALS: usize = 8;
const NOBODY: [usize; 2] = [MOST; 2];

/// The kinds of moves; a kind that is listed more often is drawn more often.
const MOVES: [Move; 19] = {
    use Move::{Mixed, Moved, Own, Placed, Relaid, Swapped};
    [
        Moved, Moved, Moved, Moved, Moved, Swapped, Swapped, Swapped, Swapped, Swapped, Swapped, Relaid, Mixed, Mixed,
        Own, Own, Placed, Placed, Placed,
    ]
};

#[derive(Clone, Copy)]
enum Move {
    /// A document goes to another group.
    Moved,
    /// Two documents change places.
    Swapped,
    /// A document goes to idle ranks.
    Placed,
    /// The documents of a micro-batch get new groups.
    Relaid,
    /// A document goes to another micro-batch, whose documents get new groups.
    Mixed,
    /// A document gets a micro-batch of its own.
    Own,
}

/// Draws neighbours of a layout.
pub(super) struct Neighbours<'a> {
    parts: &'a Parts<'a>,
    pub(super) draw: Draw,
    /// The documents of the rank with the most work.
    pub(super) latest: Set,
    /// For each number of micro-batches, whether it is allowed.
    allowed: Vec<bool>,
}

impl<'a> Neighbours<'a> {
    pub(super) fn new(parts: &'a Parts<'a>) -> Self {
        Self { parts, draw: Draw(0), latest: 0, allowed: Vec::new() }
    }

    /// Allows exactly these numbers of micro-batches.
    pub(super) fn allow(&mut self, counts: &[usize]) {
        self.allowed.clear();
        self.allowed.resize(counts.iter().fold(0, |most, &count| most.max(count + 1)), false);
        counts.iter().for_each(|&count| self.allowed[count] = true);
    }

    fn may_have(&self, count: usize) -> bool {
        self.allowed.get(count).copied().unwrap_or(false)
    }

    fn documents(&self) -> usize {
        self.parts.problem.documents.len()
    }

    /// Turns `next`, a copy of `from`, into a random neighbour of `from`. `None` if the drawn move is impossible.
    #[inline]
    pub(super) fn step(&mut self, from: &Layout, next: &mut Layout) -> Option<()> {
        let count = usize::from(from.count);
        let parts = self.parts;
        match MOVES[self.draw.below(MOVES.len())] {
            Move::Moved => {
                let document = self.document();
                let (left, to) = (from.team_of(document), self.draw.below(from.teams().len()));
                if to == left {
                    return None;
                }
                next.put(parts, to, from.teams()[to].slot, from.teams()[to].documents | 1 << document)?;
                self.leave(next, left, document)
            }
            Move::Swapped => {
                let documents = [self.document(), self.draw.below(self.documents())];
                let [a, b] = documents.map(|document| from.team_of(document));
                if a == b {
                    return None;
                }
                let both = 1 << documents[0] | 1 << documents[1];
                next.put(parts, a, from.teams()[a].slot, from.teams()[a].documents ^ both)?;
                next.put(parts, b, from.teams()[b].slot, from.teams()[b].documents ^ both)
            }
            Move::Placed => {
                let document = self.document();
                let left = from.team_of(document);
                let j = self.draw.below(count);
                let alone = from.teams()[left].documents == 1 << document;
                let slot = self.draw.below(parts.slots.len()) as u16;
                let taken = from.taken(parts, j as u16, if alone { [left, MOST] } else { NOBODY });
                if taken & parts.slots.get(slot).ranks != 0 {
                    return None;
                }
                if alone {
                    let i = from.teams()[left].micro_batch;
                    next.teams_mut()[left].micro_batch = j as u16;
                    next.put(parts, left, slot, 1 << document)?;
                    return self.close(next, i);
                }
                next.add(parts, j, slot, 1 << document)?;
                self.leave(next, left, document)
            }
            Move::Relaid => {
                let j = self.draw.below(count);
                self.lay_out(next, j, from.inside(j))
            }
            Move::Mixed => {
                let document = self.document();
                let left = from.team_of(document);
                let (i, j) = (usize::from(from.teams()[left].micro_batch), self.draw.below(count));
                if i == j {
                    return None;
                }
                let joined = from.inside(j) | 1 << document;
                if self.draw.one_in(2) {
                    self.lay_out(next, i, from.inside(i) & !(1 << document))?;
                    self.lay_out(next, j, joined)?;
                } else {
                    let team = from.teams()[left];
                    next.put(parts, left, team.slot, team.documents & !(1 << document))?;
                    next.drop_empty(left);
                    self.lay_out(next, j, joined)?;
                }
                self.close(next, i as u16)
            }
            Move::Own => {
                if !self.may_have(count + 1) {
                    return None;
                }
                let document = self.document();
                let left = from.team_of(document);
                let i = usize::from(from.teams()[left].micro_batch);
                if from.inside(i).count_ones() < 2 {
                    return None;
                }
                let slot = self.draw.below(parts.slots.len()) as u16;
                let place = self.draw.below(count + 1);
                next.open(place);
                next.add(parts, place, slot, 1 << document)?;
                let team = from.teams()[left];
                next.put(parts, left, team.slot, team.documents & !(1 << document))?;
                next.drop_empty(left);
                Some(())
            }
        }
    }

    /// A random document, usually one of the rank with the most work.
    fn document(&mut self) -> usize {
        if self.latest != 0 && !self.draw.one_in(LATEST) {
            return self.draw.of_set(self.latest.into());
        }
        self.draw.below(self.documents())
    }

    /// Removes a document from its team, which may leave its micro-batch empty.
    fn leave(&self, next: &mut Layout, left: usize, document: usize) -> Option<()> {
        let team = next.teams()[left];
        next.put(self.parts, left, team.slot, team.documents & !(1 << document))?;
        next.drop_empty(left);
        self.close(next, team.micro_batch)
    }

    /// Removes an empty micro-batch. `None` if the number of micro-batches may not shrink but none may be empty.
    fn close(&self, next: &mut Layout, micro_batch: u16) -> Option<()> {
        let count = usize::from(next.count);
        if count > self.documents() || !next.is_empty(micro_batch) {
            return Some(());
        }
        if !self.may_have(count - 1) {
            return None;
        }
        next.close(micro_batch);
        Some(())
    }

    /// Gives a micro-batch these documents: groups of random sizes, documents costliest first, each where it finishes
    /// first. `None` if a document fits in none of the groups.
    fn lay_out(&mut self, next: &mut Layout, micro_batch: usize, documents: Set) -> Option<()> {
        let parts = self.parts;
        let &Problem { world_size, largest_group, .. } = parts.problem;
        next.clear(micro_batch);
        let many = documents.count_ones() as usize;
        let mut groups = [(0_u16, Set::default(), Load::default(), 0.0_f64); MOST];
        let mut len = 0;
        // One piece more than documents: a single document need not have all ranks.
        let pieces = 1 + self.draw.below((many + 1).min(world_size));
        let mut first = 0;
        while first < world_size && len < MOST {
            let left = world_size - first;
            let mut size = left.min(largest_group);
            let apart = pieces.saturating_sub(len + 1);
            if apart > 0 && left > 1 {
                size = size.min(1 + self.draw.below((2 * left).div_ceil(apart + 1).min(left)));
            }
            if let Some(sizes) = parts.problem.only() {
                size = at_most(sizes, size);
            } else if parts.problem.group_sizes == GroupSizes::PowersOfTwo {
                let aligned = if first == 0 { usize::MAX } else { 1 << first.trailing_zeros() };
                size = aligned.min(1 << size.ilog2());
            }
            groups[len].0 = parts.slots.between(first as u32, (first + size) as u32)?;
            len += 1;
            first += size;
        }
        for document in documents_of(documents) {
            let own = parts.problem.documents[document].load;
            let mut best: Option<(f64, usize)> = None;
            for (at, (slot, _, load, _)) in groups[..len].iter().enumerate() {
                let Some(done) = parts.seconds_of(&(*load + own), *slot) else { continue };
                if best.is_none_or(|(least, _)| done < least * (1.0 - SAME)) {
                    best = Some((done, at));
                }
            }
            let (_, at) = best?;
            groups[at].2 = groups[at].2 + own;
            groups[at].1 |= 1 << document;
        }
        for &(slot, set, ..) in groups[..len].iter().filter(|group| group.1 != 0) {
            next.add(parts, micro_batch, slot, set)?;
        }
        Some(())
    }

    /// Deals the documents to `count` micro-batches: one for each, then to the one with the least work, costliest first
    /// or in random order. `None` if no groups were found in which they fit.
    pub(super) fn dealt(&mut self, count: usize) -> Option<Layout> {
        let mut dealt: Vec<(f64, Set)> = vec![(0.0, 0); count];
        let documents = &self.parts.problem.documents;
        let mut order: Vec<usize> = (0..documents.len()).collect();
        if self.draw.one_in(2) {
            (1..order.len()).for_each(|at| order.swap(at, self.draw.below(at + 1)));
        }
        for (place, document) in order.into_iter().enumerate() {
            let lightest = (1..count).fold(0, |a, b| if dealt[b].0 < dealt[a].0 * (1.0 - SAME) { b } else { a });
            let at = if place < count { place } else { lightest };
            dealt[at] = (dealt[at].0 + documents[document].load.work(), dealt[at].1 | 1 << document);
        }
        let mut layout = Layout::empty(count);
        for (j, (_, documents)) in dealt.into_iter().enumerate() {
            (0..DEALS).find_map(|_| self.lay_out(&mut layout, j, documents))?;
        }
        Some(layout)
    }
}
