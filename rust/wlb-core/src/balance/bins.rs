//! Bins of items: documents in micro-batches, or groups of documents on ranks.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::items::{Item, Limits};

/// Items divided into bins of limited size.
#[derive(Clone)]
pub(crate) struct Bins<'a> {
    /// All items, costliest first.
    pub(crate) items: &'a [Item],
    pub(crate) limits: Limits,
    /// Indices in `items` of each bin's items, ascending.
    pub(crate) contents: Vec<Vec<u32>>,
    /// Cost of each bin, less its target.
    pub(crate) loads: Vec<f64>,
    pub(super) tokens: Vec<i64>,
    pub(super) documents: Vec<i64>,
    /// Class of each bin: items are exchanged inside a class. Empty if there is only one.
    pub(crate) classes: Vec<u32>,
}

impl<'a> Bins<'a> {
    /// Bins without items.
    pub(crate) fn new(items: &'a [Item], limits: Limits, targets: &[f64]) -> Self {
        Self {
            items,
            limits,
            contents: targets.iter().map(|_| Vec::with_capacity(2 * items.len() / targets.len())).collect(),
            loads: targets.iter().map(|target| -target).collect(),
            tokens: vec![0; targets.len()],
            documents: vec![0; targets.len()],
            classes: Vec::new(),
        }
    }

    /// Bins with these contents (indices in `items`), where empty bins are given an item if another can spare one.
    pub(crate) fn held(items: &'a [Item], limits: Limits, targets: &[f64], contents: Vec<Vec<u32>>) -> Self {
        let mut bins = Self::new(items, limits, targets);
        for (bin, mut places) in contents.into_iter().enumerate() {
            places.sort_unstable();
            places.into_iter().for_each(|place| bins.put(place, bin));
        }
        bins.leave_none_empty();
        bins
    }

    /// Free tokens of a bin.
    #[inline]
    pub(super) fn room(&self, bin: usize) -> i64 {
        self.limits.tokens - self.tokens[bin]
    }

    /// Whether a bin stays within the limits with this many tokens and documents more.
    #[inline]
    pub(crate) fn has_room(&self, bin: usize, tokens: i64, documents: i64) -> bool {
        self.tokens[bin] + tokens <= self.limits.tokens && self.documents[bin] + documents <= self.limits.documents
    }

    #[inline]
    pub(super) fn takes(&self, bin: usize, item: &Item) -> bool {
        self.has_room(bin, item.tokens, i64::from(item.documents))
    }

    pub(crate) fn put(&mut self, place: u32, bin: usize) {
        let item = self.items[place as usize];
        self.contents[bin].push(place);
        self.loads[bin] += item.cost;
        self.tokens[bin] += item.tokens;
        self.documents[bin] += i64::from(item.documents);
    }

    /// Gives every empty bin an item: the cheapest of the bin with the most items, if that has at least two.
    pub(super) fn leave_none_empty(&mut self) {
        let empty: Vec<usize> = (0..self.contents.len()).filter(|&j| self.contents[j].is_empty()).collect();
        if empty.is_empty() {
            return;
        }
        let mut most: BinaryHeap<_> = (0..).zip(&self.contents).map(|(j, held)| (held.len(), Reverse(j))).collect();
        for bin in empty {
            let Some((items, Reverse(from))) = most.pop().filter(|&(items, _)| items > 1) else { return };
            self.hand_over(self.contents[from][items - 1], from, bin);
            most.push((items - 1, Reverse(from)));
        }
    }

    /// Moves an item from one bin to another.
    pub(crate) fn hand_over(&mut self, place: u32, from: usize, to: usize) {
        let item = self.items[place as usize];
        self.contents[from].retain(|&other| other != place);
        let at = self.contents[to].partition_point(|&other| other < place);
        self.contents[to].insert(at, place);
        for (bin, sign) in [(from, -1), (to, 1)] {
            self.loads[bin] += f64::from(sign) * item.cost;
            self.tokens[bin] += i64::from(sign) * item.tokens;
            self.documents[bin] += i64::from(sign) * i64::from(item.documents);
        }
    }

    /// Cost of a bin, summed anew from its items.
    pub(crate) fn cost(&self, bin: usize) -> f64 {
        self.contents[bin].iter().map(|&place| self.items[place as usize].cost).sum()
    }

    /// Cost of each bin.
    pub(crate) fn costs(&self) -> Vec<f64> {
        (0..self.contents.len()).map(|bin| self.cost(bin)).collect()
    }
}
