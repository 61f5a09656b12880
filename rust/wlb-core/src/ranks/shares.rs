//! Shares of items: documents in micro-batches, or groups of documents on ranks.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use crate::packing::takers::Takers;

use super::items::Item;

/// The limits of a share.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) tokens: i64,
    pub(super) documents: i64,
}

/// Items divided into shares of limited size.
#[derive(Clone)]
pub(super) struct Shares<'a> {
    /// All items, costliest first.
    pub(super) items: &'a [Item],
    pub(super) limits: Limits,
    /// Indices in `items` of each share's items, ascending.
    pub(super) contents: Vec<Vec<u32>>,
    /// Cost of each share, less its target.
    pub(super) loads: Vec<f64>,
    tokens: Vec<i64>,
    documents: Vec<i64>,
}

/// The order and the rule by which shares are filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    /// Costliest item first, to the share that lacks the most cost to its target.
    LeastLoad,
    /// Costliest item first, to the share that lacks the most cost per token of its room, so that tokens and cost run
    /// out together.
    Steepest,
    /// Longest item first, to the fullest share with room, so that as few tokens as possible stay free.
    BestFit,
    /// The item with the most documents first, to the share with the fewest documents, then with the least cost.
    FewestDocuments,
}

impl<'a> Shares<'a> {
    /// Shares without items.
    pub(super) fn new(items: &'a [Item], limits: Limits, targets: &[f64]) -> Self {
        Self {
            items,
            limits,
            contents: targets.iter().map(|_| Vec::with_capacity(2 * items.len() / targets.len())).collect(),
            loads: targets.iter().map(|target| -target).collect(),
            tokens: vec![0; targets.len()],
            documents: vec![0; targets.len()],
        }
    }

    /// Shares filled by a rule; `None` if an item finds no room.
    ///
    /// # Complexity
    /// O(n log n) for `n` items; the ladder of `N` shares takes a few steps for each item, O(N) in the worst case.
    pub(super) fn filled(items: &'a [Item], limits: Limits, targets: &[f64], rule: Rule) -> Option<Self> {
        let mut shares = Self::new(items, limits, targets);
        match rule {
            Rule::LeastLoad => shares.fill_by(|shares, j| shares.loads[j]),
            Rule::Steepest => shares.fill_by(|shares, j| shares.loads[j] / shares.room(j).max(1) as f64),
            Rule::BestFit => shares.fill_fullest(),
            Rule::FewestDocuments => shares.fill_by_documents(),
        }?;
        for contents in &mut shares.contents {
            contents.sort_unstable();
        }
        shares.leave_none_empty();
        Some(shares)
    }

    /// Shares with these contents (indices in `items`), where empty shares are given an item if another can spare one.
    pub(super) fn held(items: &'a [Item], limits: Limits, targets: &[f64], contents: Vec<Vec<u32>>) -> Self {
        let mut shares = Self::new(items, limits, targets);
        for (share, mut places) in contents.into_iter().enumerate() {
            places.sort_unstable();
            places.into_iter().for_each(|place| shares.put(place, share));
        }
        shares.leave_none_empty();
        shares
    }

    fn room(&self, share: usize) -> i64 {
        self.limits.tokens - self.tokens[share]
    }

    /// Whether a share stays within the limits with this many tokens and documents more.
    #[inline]
    pub(super) fn has_room(&self, share: usize, tokens: i64, documents: i64) -> bool {
        self.tokens[share] + tokens <= self.limits.tokens && self.documents[share] + documents <= self.limits.documents
    }

    #[inline]
    fn takes(&self, share: usize, item: &Item) -> bool {
        self.has_room(share, item.tokens, i64::from(item.documents))
    }

    pub(super) fn put(&mut self, place: u32, share: usize) {
        let item = self.items[place as usize];
        self.contents[share].push(place);
        self.loads[share] += item.cost;
        self.tokens[share] += item.tokens;
        self.documents[share] += i64::from(item.documents);
    }

    /// Fills costliest item first, each into the share of least weight with room.
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
            let share = open.first(rank, |j| weight(self, j), next)?;
            self.put(rank as u32, share);
            open.set(share, weight(self, share));
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
            let &(room, share) = with_tokens.find(|&&(_, j)| self.takes(j, &item))?;
            open.remove(&(room, share));
            self.put(place, share);
            if self.documents[share] < self.limits.documents {
                open.insert((self.room(share), share));
            }
        }
        Some(())
    }

    fn fill_by_documents(&mut self) -> Option<()> {
        let mut most_first: Vec<u32> = (0..self.items.len() as u32).collect();
        most_first.sort_by_key(|&place| Reverse(self.items[place as usize].documents));
        let key = |shares: &Self, j: usize| Reverse((shares.documents[j], ordered(shares.loads[j]), j));
        let mut open: BinaryHeap<_> = (0..self.loads.len()).map(|j| key(self, j)).collect();
        let mut full = Vec::new();
        for place in most_first {
            let item = self.items[place as usize];
            let share = loop {
                let Reverse((_, _, share)) = *open.peek()?;
                open.pop();
                if self.takes(share, &item) {
                    break share;
                }
                full.push(share);
            };
            self.put(place, share);
            open.push(key(self, share));
            open.extend(full.drain(..).map(|j| key(self, j)));
        }
        Some(())
    }

    /// Gives every empty share an item: the cheapest of the share with the most items, if that has at least two.
    fn leave_none_empty(&mut self) {
        let empty: Vec<usize> = (0..self.contents.len()).filter(|&j| self.contents[j].is_empty()).collect();
        if empty.is_empty() {
            return;
        }
        let mut most: BinaryHeap<_> = (0..).zip(&self.contents).map(|(j, held)| (held.len(), Reverse(j))).collect();
        for share in empty {
            let Some((items, Reverse(from))) = most.pop().filter(|&(items, _)| items > 1) else { return };
            self.hand_over(self.contents[from][items - 1], from, share);
            most.push((items - 1, Reverse(from)));
        }
    }

    /// Moves an item from one share to another.
    pub(super) fn hand_over(&mut self, place: u32, from: usize, to: usize) {
        let item = self.items[place as usize];
        self.contents[from].retain(|&other| other != place);
        let at = self.contents[to].partition_point(|&other| other < place);
        self.contents[to].insert(at, place);
        for (share, sign) in [(from, -1), (to, 1)] {
            self.loads[share] += f64::from(sign) * item.cost;
            self.tokens[share] += i64::from(sign) * item.tokens;
            self.documents[share] += i64::from(sign) * i64::from(item.documents);
        }
    }

    /// Cost of a share, summed anew from its items.
    pub(super) fn cost(&self, share: usize) -> f64 {
        self.contents[share].iter().map(|&place| self.items[place as usize].cost).sum()
    }

    /// Cost of each share.
    pub(super) fn costs(&self) -> Vec<f64> {
        (0..self.contents.len()).map(|share| self.cost(share)).collect()
    }
}

/// Finds items that are short enough: a tree of the least tokens of all items, of each half, of each quarter, and so
/// on.
struct Shortest {
    /// Least tokens of a range of items; its halves are at twice its index and at the next index.
    tokens: Vec<i64>,
}

impl Shortest {
    fn new(items: &[Item]) -> Self {
        let half = items.len().next_power_of_two();
        let mut tokens = vec![i64::MAX; 2 * half];
        tokens[half..].iter_mut().zip(items).for_each(|(tokens, item)| *tokens = item.tokens);
        (1..half).rev().for_each(|at| tokens[at] = tokens[2 * at].min(tokens[2 * at + 1]));
        Self { tokens }
    }

    /// The first item, from `place` on, of at most this many tokens.
    ///
    /// # Complexity
    /// O(log n).
    #[inline]
    fn within(&self, room: i64, place: usize) -> Option<usize> {
        let half = self.tokens.len() / 2;
        let mut at = half + place;
        while *self.tokens.get(at)? > room {
            at += 1;
            if at.is_power_of_two() {
                return None;
            }
            at >>= at.trailing_zeros();
        }
        while at < half {
            at *= 2;
            at += usize::from(self.tokens[at] > room);
        }
        Some(at - half)
    }
}

/// Integers in the order of [`f64::total_cmp`].
fn ordered(weight: f64) -> u64 {
    let bits = weight.to_bits();
    if bits >> 63 == 1 { !bits } else { bits | 1 << 63 }
}
