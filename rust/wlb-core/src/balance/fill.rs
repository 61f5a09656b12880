//! Rules that fill bins.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use super::bins::Bins;
use super::items::{Item, Limits, ordered};
use super::shortest::Shortest;
use super::takers::Takers;

/// The order and the rule by which bins are filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rule {
    /// Costliest item first, to the bin that lacks the most cost to its target.
    LeastLoad,
    /// Costliest item first, to the bin that lacks the most cost per token of its room, so that tokens and cost run
    /// out together.
    Steepest,
    /// Longest item first, to the fullest bin with room, so that as few tokens as possible stay free.
    BestFit,
    /// The item with the most documents first, to the bin with the fewest documents, then with the least cost.
    FewestDocuments,
}

impl<'a> Bins<'a> {
    /// Bins filled by a rule; `None` if an item finds no room.
    ///
    /// # Complexity
    /// O(n log n) for `n` items; the ladder of `N` bins takes a few steps for each item, O(N) in the worst case.
    pub(crate) fn filled(items: &'a [Item], limits: Limits, targets: &[f64], rule: Rule) -> Option<Self> {
        let mut bins = Self::new(items, limits, targets);
        match rule {
            Rule::LeastLoad => bins.fill_by(|bins, j| bins.loads[j]),
            Rule::Steepest => bins.fill_by(|bins, j| bins.loads[j] / bins.room(j).max(1) as f64),
            Rule::BestFit => bins.fill_fullest(),
            Rule::FewestDocuments => bins.fill_by_documents(),
        }?;
        for contents in &mut bins.contents {
            contents.sort_unstable();
        }
        bins.leave_none_empty();
        Some(bins)
    }

    /// Fills costliest item first, each into the bin of least weight with room.
    fn fill_by(&mut self, weight: impl Fn(&Self, usize) -> f64) -> Option<()> {
        let shortest = Shortest::new(self.items);
        let mut open = Takers::new((0..self.loads.len()).map(|j| weight(self, j)));
        for rank in 0..self.items.len() {
            let next = |j: usize| {
                if self.documents[j] == self.limits.documents {
                    return None;
                }
                let with_room = |from: usize| shortest.within(self.room(j), from);
                let fits = |&place: &usize| self.takes(j, &self.items[place]);
                std::iter::successors(with_room(rank), |place| with_room(place + 1)).find(fits)
            };
            let bin = open.first(rank, |j| weight(self, j), next)?;
            self.put(rank as u32, bin);
            open.set(bin, weight(self, bin));
        }
        Some(())
    }

    fn fill_fullest(&mut self) -> Option<()> {
        let mut longest_first: Vec<u32> = (0..self.items.len() as u32).collect();
        longest_first.sort_by_key(|&place| Reverse(self.items[place as usize].tokens));
        let mut open: BTreeSet<(i64, usize)> = (0..self.loads.len()).map(|j| (self.room(j), j)).collect();
        for place in longest_first {
            let item = self.items[place as usize];
            let mut with_tokens = open.range((item.tokens, 0)..);
            let &(room, bin) = with_tokens.find(|&&(_, j)| self.takes(j, &item))?;
            open.remove(&(room, bin));
            self.put(place, bin);
            if self.documents[bin] < self.limits.documents {
                open.insert((self.room(bin), bin));
            }
        }
        Some(())
    }

    fn fill_by_documents(&mut self) -> Option<()> {
        let mut most_first: Vec<u32> = (0..self.items.len() as u32).collect();
        most_first.sort_by_key(|&place| Reverse(self.items[place as usize].documents));
        let key = |bins: &Self, j: usize| Reverse((bins.documents[j], ordered(bins.loads[j]), j));
        let mut open: BinaryHeap<_> = (0..self.loads.len()).map(|j| key(self, j)).collect();
        let mut full = Vec::new();
        for place in most_first {
            let item = self.items[place as usize];
            let bin = loop {
                let Reverse((_, _, bin)) = *open.peek()?;
                open.pop();
                if self.takes(bin, &item) {
                    break bin;
                }
                full.push(bin);
            };
            self.put(place, bin);
            open.push(key(self, bin));
            open.extend(full.drain(..).map(|j| key(self, j)));
        }
        Some(())
    }
}
