//! Lays documents on ranks.

use crate::cost::Mask;

use super::key::{Format, Key};
use super::runs::Runs;

/// Lays documents on ranks, attempt after attempt.
pub(super) struct Layer<'a, W> {
    /// `(length, index)`, longest first.
    pub(super) documents: &'a [(i32, u32)],
    mask: Mask,
    format: Format,
    /// The ranks before the first document.
    empty: Vec<W>,
    /// The ranks with what they have so far, ascending.
    ranks: Vec<W>,
    /// The ranks that were chosen for the present document.
    chosen: Vec<W>,
    /// Runs that were placed.
    pub(super) runs: Runs,
}

impl<'a, W: Key> Layer<'a, W> {
    pub(super) fn new(documents: &'a [(i32, u32)], mask: Mask, format: Format, tokens: u64, cp_size: usize) -> Self {
        let room = |rank: usize| tokens / cp_size as u64 + u64::from((rank as u64) < tokens % cp_size as u64);
        let empty: Vec<W> = (0..cp_size).map(|rank| format.key(room(rank), rank)).collect();
        Self {
            documents,
            mask,
            format,
            ranks: empty.clone(),
            empty,
            chosen: Vec::with_capacity(cp_size),
            runs: Runs::with_capacity(documents.len()),
        }
    }

    /// Lays all documents, the first ones on the numbers of ranks in `parts` and all others on one rank. Returns how
    /// many were laid and the pairs of the heaviest rank. Gives up as soon as a rank has more than `bound` pairs.
    pub(super) fn lay(&mut self, parts: &[u32], bound: u64) -> (usize, u64) {
        self.runs.clear();
        self.ranks.copy_from_slice(&self.empty);
        let mut heaviest = 0;
        for (number, &(length, document)) in self.documents.iter().enumerate() {
            self.runs.begin(document);
            let laid = match parts.get(number) {
                None | Some(1) => self.lay_whole(length),
                Some(&parts) => self.lay_cut(length, parts as usize),
            };
            heaviest = heaviest.max(laid.unwrap_or_else(|| self.lay_where_room_is(length)));
            if heaviest > bound {
                return (number + 1, heaviest);
            }
        }
        (self.documents.len(), heaviest)
    }

    /// Gives a document to the rank with the fewest pairs among those with room for all of it; returns the rank's
    /// pairs.
    fn lay_whole(&mut self, length: i32) -> Option<u64> {
        let Self { ranks, format, .. } = self;
        let from = ranks.iter().position(|&rank| format.room(rank) >= length as u64)?;
        let key = ranks[from].plus(format.growth(self.mask.pairs(length), length));
        // Ranks that now come before it move up, one by one: with so few ranks a binary search takes longer.
        let (mut at, mut next) = (from, from + 1);
        while next < ranks.len() && ranks[next] < key {
            ranks[at] = ranks[next];
            (at, next) = (next, next + 1);
        }
        ranks[at] = key;
        self.runs.push(format.rank(key), length);
        Some(format.pairs(key))
    }

    /// Cuts a document for the `parts` ranks with the fewest pairs that have room for a part. Each rank's part comes
    /// half from the front and half from the back of the document, so that all parts have about equally many pairs.
    fn lay_cut(&mut self, length: i32, parts: usize) -> Option<u64> {
        let Self { ranks, chosen, format, mask, .. } = self;
        let (each, longer) = (length / parts as i32, length as usize % parts);
        let has_room = |rank: W| format.room(rank) >= each as u64;
        chosen.clear();
        chosen.extend(ranks.iter().copied().filter(|&rank| has_room(rank)).take(parts));
        let last = *chosen.last()?;
        // The `length % parts` tokens that are left over go to the ranks with the most room.
        chosen.sort_unstable_by_key(|&rank| format.by_room(rank));
        if chosen.len() < parts || longer > 0 && format.room(chosen[longer - 1]) == each as u64 {
            return None;
        }

        let (fronts, backs) = self.runs.push_empty(2 * parts).split_at_mut(parts);
        let (mut start, mut end) = (0, length);
        let places = chosen.iter_mut().zip(fronts).zip(backs.iter_mut().rev());
        for (place, ((key, front), back)) in places.enumerate() {
            let tokens = each + i32::from(place < longer);
            let (before, after) = (tokens / 2, tokens - tokens / 2);
            end -= after;
            let pairs = mask.segment_pairs(start, before, length) + mask.segment_pairs(end, after, length);
            start += before;
            *key = key.plus(format.growth(pairs, tokens));
            let rank = format.rank(*key);
            (*front, *back) = ((rank, before), (rank, after));
        }

        // All other ranks stay in order. The chosen ranks are merged between them from behind, where there is room.
        chosen.sort_unstable();
        let mut others = 0;
        for index in 0..ranks.len() {
            let rank = ranks[index];
            ranks[others] = rank;
            others += usize::from(rank > last || !has_room(rank));
        }
        let mut left = parts;
        while left > 0 {
            let from_others = others > 0 && ranks[others - 1] > chosen[left - 1];
            ranks[others + left - 1] = if from_others { ranks[others - 1] } else { chosen[left - 1] };
            others -= usize::from(from_others);
            left -= usize::from(!from_others);
        }
        chosen.last().map(|&heaviest| format.pairs(heaviest))
    }

    /// Gives a document to the rank with the most room, and the rest of it to the next. This always succeeds, since the
    /// ranks' room equals the tokens that are still to come.
    fn lay_where_room_is(&mut self, length: i32) -> u64 {
        let Self { ranks, format, .. } = self;
        let (mut start, mut heaviest) = (0, 0);
        while start < length {
            let Some(rank) = ranks.iter_mut().min_by_key(|rank| format.by_room(**rank)) else { break };
            let taken = format.room(*rank).min((length - start) as u64) as i32;
            *rank = rank.plus(format.growth(self.mask.segment_pairs(start, taken, length), taken));
            heaviest = heaviest.max(format.pairs(*rank));
            self.runs.push(format.rank(*rank), taken);
            start += taken;
        }
        ranks.sort_unstable();
        heaviest
    }
}
