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
const MOVES: [Move; 36] = {
    use Move::{
        Apart, Beside, Block, Cut, Joined, Mixed, Moved, Order, Own, Placed, Relaid, Resized, Shared, Split, Swapped,
    };
    [
        Moved, Moved, Moved, Moved, Moved, Swapped, Swapped, Swapped, Swapped, Swapped, Swapped, Relaid, Mixed, Mixed,
        Order, Resized, Resized, Shared, Shared, Apart, Split, Own, Own, Block, Block, Block, Block, Beside, Beside,
        Beside, Cut, Cut, Joined, Placed, Placed, Placed,
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
    /// A micro-batch goes to another place, or two change places.
    Order,
    /// A group gets other ranks that touch or overlap its own.
    Resized,
    /// The ranks of two neighbouring groups are divided anew.
    Shared,
    /// The documents of two micro-batches are divided anew.
    Apart,
    /// A micro-batch is divided into two, or two are joined.
    Split,
    /// A document gets a micro-batch of its own.
    Own,
    /// Two micro-batches exchange equally many ranks with their documents, or one reverses some of its ranks.
    Block,
    /// A document gets a part of a group's ranks for itself.
    Beside,
    /// A group is divided into two.
    Cut,
    /// Two neighbouring groups are joined.
    Joined,
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
            Move::Order => {
                let (i, j) = (self.draw.below(count), self.draw.below(count));
                if i == j {
                    return None;
                }
                let swap = self.draw.one_in(2);
                for team in next.teams_mut() {
                    let place = usize::from(team.micro_batch);
                    let new = match place {
                        _ if place == i => j,
                        _ if swap => {
                            if place == j {
                                i
                            } else {
                                place
                            }
                        }
                        _ if i < place && place <= j => place - 1,
                        _ if j <= place && place < i => place + 1,
                        _ => place,
                    };
                    team.micro_batch = new as u16;
                }
                Some(())
            }
            Move::Resized => {
                let at = self.draw.below(from.teams().len());
                let team = from.teams()[at];
                let taken = from.taken(parts, team.micro_batch, [at, MOST]);
                let slot = self.draw.below(parts.slots.len()) as u16;
                if slot == team.slot || taken & parts.slots.get(slot).ranks != 0 {
                    return None;
                }
                next.put(parts, at, slot, team.documents)
            }
            Move::Shared => self.share(from, next),
            Move::Apart => {
                let (i, j) = (self.draw.below(count), self.draw.below(count));
                let all = from.inside(i) | from.inside(j);
                let first = self.part(all)?;
                if i == j {
                    return None;
                }
                self.lay_out(next, i, first)?;
                self.lay_out(next, j, all & !first)
            }
            Move::Split => {
                let i = self.draw.below(count);
                let all = from.inside(i);
                if self.draw.one_in(2) {
                    let first = self.part(all).filter(|_| self.may_have(count + 1))?;
                    self.lay_out(next, i, first)?;
                    let place = self.draw.below(count + 1);
                    next.open(place);
                    self.lay_out(next, place, all & !first)
                } else {
                    let j = self.draw.below(count);
                    if i == j || !self.may_have(count - 1) {
                        return None;
                    }
                    let both = all | from.inside(j);
                    next.clear(j);
                    self.lay_out(next, i, both)?;
                    next.close(j as u16);
                    Some(())
                }
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
            Move::Block => self.exchange(from, next),
            Move::Beside => {
                let document = self.document();
                let (left, at) = (from.team_of(document), self.draw.below(from.teams().len()));
                if left == at {
                    return None;
                }
                let (first, second) = self.halves(from.teams()[at].slot)?;
                let team = from.teams()[at];
                next.put(parts, at, first, team.documents)?;
                next.add(parts, usize::from(team.micro_batch), second, 1 << document)?;
                self.leave(next, left, document)
            }
            Move::Cut => {
                let at = self.draw.below(from.teams().len());
                let team = from.teams()[at];
                let part = self.part(team.documents)?;
                let (first, second) = self.halves(team.slot)?;
                next.put(parts, at, first, part)?;
                next.add(parts, usize::from(team.micro_batch), second, team.documents & !part)
            }
            Move::Joined => {
                let (a, b) = self.beside(from)?;
                let [first, second] = [a, b].map(|at| from.teams()[at]);
                let end = parts.slots.get(second.slot).end();
                let slot = parts.slots.between(parts.slots.get(first.slot).first, end)?;
                next.put(parts, a, slot, first.documents | second.documents)?;
                next.teams_mut()[b].documents = 0;
                next.drop_empty(b);
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

    /// A random part of a set of documents, neither empty nor all.
    fn part(&mut self, all: Set) -> Option<Set> {
        let part = all & self.draw.bits() as Set;
        (part != 0 && part != all).then_some(part)
    }

    /// Two slots that together have the ranks of a slot, in random order.
    fn halves(&mut self, slot: u16) -> Option<(u16, u16)> {
        let slot = *self.parts.slots.get(slot);
        if slot.size == 1 {
            return None;
        }
        let cut = slot.first + self.cut(slot.size);
        let (first, second) = (self.parts.slots.between(slot.first, cut)?, self.parts.slots.between(cut, slot.end())?);
        Some(if self.draw.one_in(2) { (first, second) } else { (second, first) })
    }

    /// A random place at which a block of `size` ranks may be cut.
    fn cut(&mut self, size: u32) -> u32 {
        match self.parts.problem.group_sizes {
            GroupSizes::PowersOfTwo => size / 2,
            GroupSizes::Any => 1 + self.draw.below(size as usize - 1) as u32,
        }
    }

    /// Two teams of a micro-batch without another team between them.
    fn beside(&mut self, from: &Layout) -> Option<(usize, usize)> {
        let a = self.draw.below(from.teams().len());
        let (end, j) = (self.parts.slots.get(from.teams()[a].slot).end(), from.teams()[a].micro_batch);
        let first = |at: usize| self.parts.slots.get(from.teams()[at].slot).first;
        let behind = (0..from.teams().len()).filter(|&at| from.teams()[at].micro_batch == j && first(at) >= end);
        Some((a, behind.min_by_key(|&at| first(at))?))
    }

    /// Divides the ranks of two neighbouring teams, and those between them, anew.
    fn share(&mut self, from: &Layout, next: &mut Layout) -> Option<()> {
        let (a, b) = self.beside(from)?;
        let slots = &self.parts.slots;
        let [first, second] = [a, b].map(|at| from.teams()[at]);
        let (start, end) = (slots.get(first.slot).first, slots.get(second.slot).end());
        let cut = match self.draw.below(4) {
            0 => slots.get(first.slot).end() + 1,
            1 => slots.get(second.slot).first - 1,
            _ => start + 1 + self.draw.below((end - start) as usize - 1) as u32,
        };
        if cut <= start || cut >= end {
            return None;
        }
        let (left, right) = (slots.between(start, cut)?, slots.between(cut, end)?);
        let swap = self.draw.one_in(2);
        let (left, right) = if swap { (right, left) } else { (left, right) };
        next.put(self.parts, a, left, first.documents)?;
        next.put(self.parts, b, right, second.documents)
    }

    /// Two micro-batches exchange the contents of equally many ranks, or one micro-batch reverses the contents of some
    /// ranks.
    fn exchange(&mut self, from: &Layout, next: &mut Layout) -> Option<()> {
        let count = usize::from(from.count);
        let slots = &self.parts.slots;
        let at = self.draw.below(from.teams().len());
        let (i, j) = (from.teams()[at].micro_batch, self.draw.below(count) as u16);
        let own = *slots.get(from.teams()[at].slot);
        let (first, size) = if self.draw.one_in(2) {
            (own.first, own.size)
        } else {
            let slot = slots.get(self.draw.below(slots.len()) as u16);
            (slot.first, slot.size)
        };
        let places = self.parts.problem.world_size - size as usize + 1;
        let other = if self.draw.one_in(2) { first } else { self.draw.below(places) as u32 };
        if i == j && first.abs_diff(other) < size {
            return None;
        }
        let mut moved = false;
        for (at, team) in from.teams().iter().enumerate() {
            let slot = slots.get(team.slot);
            let is_in = |first: u32| first <= slot.first && slot.end() <= first + size;
            let is_apart = |first: u32| slot.end() <= first || first + size <= slot.first;
            let (to, shift) = match team.micro_batch {
                j_or_i if j_or_i == i && is_in(first) => (j, other.wrapping_sub(first)),
                j_or_i if j_or_i == j && is_in(other) => (i, first.wrapping_sub(other)),
                j_or_i if (j_or_i == i && !is_apart(first)) || (j_or_i == j && !is_apart(other)) => return None,
                _ => continue,
            };
            moved = true;
            let start = slot.first.wrapping_add(shift);
            next.teams_mut()[at].micro_batch = to;
            if shift != 0 {
                next.put(self.parts, at, slots.between(start, start + slot.size)?, team.documents)?;
            }
        }
        if !moved {
            return None;
        }
        // Neither of the two may become empty.
        let few = count <= self.documents();
        (!few || (!next.is_empty(i) && !next.is_empty(j))).then_some(())
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
