//! Rules that fill bins.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use super::bins::Bins;
use super::items::{Item, Limits, ordered};
use super::open_bins::OpenBins;
use super::shortest::Shortest;

/// The order and the rule by which bins are filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rule {
    /// Costliest item first, to the bin that lacks the most cost to its target.
    LeastLoad,
    /// Longest item first, to the bin with the least load: what trainers do by hand.
    LongestFirst,
    /// Costliest item first, to the bin that lacks the most cost per token of its room, so that tokens and cost run
    /// out together.
    Steepest,
    /// [`Rule::Steepest`] among the bins that stay within their targets; if there is none with room, to the least load.
    SteepestWithin,
    /// Longest item first, to the fullest bin with room, so that as few tokens as possible stay free.
    BestFit,
    /// Costliest item first, to the bin with room that then lacks the least cost to its target; none goes above it.
    TightestWithin,
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
        let costliest_first: Vec<u32> = (0..items.len() as u32).collect();
        if !bins.pour(&costliest_first, rule, None) {
            return None;
        }
        bins.leave_none_empty();
        Some(bins)
    }

    /// Puts these items, costliest first, into bins by a rule. Returns false if an item finds no room.
    ///
    /// # Arguments
    /// * `ceiling` - if given, an item may stay out: it does if there is no room, or if the load of the bin would be
    ///   above this.
    pub(crate) fn pour(&mut self, items: &[u32], rule: Rule, ceiling: Option<f64>) -> bool {
        let slope = |bins: &Self, j: usize| bins.loads[j] / bins.room(j).max(1) as f64;
        let filled = match rule {
            Rule::LeastLoad => self.fill_by(items, |bins, j| bins.loads[j], f64::INFINITY, ceiling),
            Rule::LongestFirst => {
                let mut longest_first = items.to_vec();
                self.sort_longest_first(&mut longest_first);
                self.fill_by(&longest_first, |bins, j| bins.loads[j], f64::INFINITY, ceiling)
            }
            Rule::Steepest => self.fill_by(items, slope, f64::INFINITY, ceiling),
            Rule::SteepestWithin => self.fill_by(items, slope, 0.0, ceiling),
            Rule::BestFit => {
                let mut longest_first = items.to_vec();
                longest_first.sort_by_key(|&place| Reverse(self.items[place as usize].tokens));
                self.fill_tightest(&longest_first, Self::room, |item| item.tokens).is_some()
            }
            Rule::TightestWithin => {
                self.fill_tightest(items, |bins, j| ordered(-bins.loads[j]), |item| ordered(item.cost)).is_some()
            }
            Rule::FewestDocuments => self.fill_by_documents().is_some(),
        };
        self.contents.iter_mut().for_each(|contents| contents.sort_unstable());
        filled
    }

    /// Fills costliest item first: each into the bin of least weight, among those with room whose load stays within
    /// `most`; if there is none, into the bin of least load with room.
    fn fill_by(
        &mut self,
        items: &[u32],
        weight: impl Fn(&Self, usize) -> f64,
        most: f64,
        ceiling: Option<f64>,
    ) -> bool {
        let shortest = Shortest::new(items.iter().map(|&place| self.items[place as usize].tokens));
        // The first item, from `rank` on, that a bin takes without a load above `most`.
        let next = |bins: &Self, j: usize, rank: usize, most: f64| {
            if bins.documents[j] == bins.limits.documents {
                return None;
            }
            let takes = |rank: usize| bins.takes(j, &bins.items[items[rank] as usize]);
            if takes(rank) && bins.loads[j] + bins.items[items[rank] as usize].cost <= most {
                return Some(rank);
            }
            let costly = |&place: &u32| bins.loads[j] + bins.items[place as usize].cost > most;
            let within = rank + if most < f64::INFINITY { items[rank..].partition_point(costly) } else { 0 };
            let with_room = |from: usize| shortest.within(bins.room(j), from);
            std::iter::successors(with_room(within), |rank| with_room(rank + 1)).find(|&rank| takes(rank))
        };
        let mut open = OpenBins::new((0..self.loads.len()).map(|j| weight(self, j)));
        let mut by_load: Option<OpenBins> = None;
        for (rank, &place) in items.iter().enumerate() {
            if let Some(j) = open.first(rank, |j| weight(self, j), |j| next(self, j, rank, most)) {
                if ceiling.is_none_or(|ceiling| self.loads[j] + self.items[place as usize].cost <= ceiling) {
                    self.put(place, j);
                    open.set(j, weight(self, j));
                }
                continue;
            }
            let loads = self.loads.iter().copied();
            let others = (most < f64::INFINITY).then(|| by_load.get_or_insert_with(|| OpenBins::new(loads)));
            match others
                .and_then(|others| others.first(rank, |j| self.loads[j], |j| next(self, j, rank, f64::INFINITY)))
            {
                // Its weight in `open` only grows.
                Some(j) => self.put(place, j),
                None if ceiling.is_some() => {}
                None => return false,
            }
        }
        true
    }

    fn sort_longest_first(&self, places: &mut [u32]) {
        places.sort_by_key(|&place| Reverse(self.items[place as usize].tokens));
    }

    /// Fills in this order: each item into the bin of least slack that is no less than the item's size.
    fn fill_tightest<K: Copy + Ord>(
        &mut self,
        order: &[u32],
        slack: impl Fn(&Self, usize) -> K,
        size: impl Fn(&Item) -> K,
    ) -> Option<()> {
        let mut open: BTreeSet<(K, usize)> = (0..self.loads.len()).map(|j| (slack(self, j), j)).collect();
        for &place in order {
            let item = self.items[place as usize];
            let mut wide_enough = open.range((size(&item), 0)..);
            let &(before, bin) = wide_enough.find(|&&(_, j)| self.takes(j, &item))?;
            open.remove(&(before, bin));
            self.put(place, bin);
            if self.documents[bin] < self.limits.documents {
                open.insert((slack(self, bin), bin));
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
