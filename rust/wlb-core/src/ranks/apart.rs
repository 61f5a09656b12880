//! Fills micro-batches class by class, for documents of several classes that never share one.
//!
//! Each class has micro-batches of its own: as many as it needs, and of the others the class with the most cost in each
//! gets the next. A class whose documents find no room gets one more, and all are shared out again.

use crate::balance::{Bins, Item};
use crate::packing::deal;
use crate::packing::options::Sync;

use super::classes::{Need, shares};
use super::plan::{Batch, CLOSE};
use super::rounds;

/// A micro-batch: its class, its target cost and its documents.
type Filled = (u32, f64, Vec<u32>);

impl Batch<'_> {
    /// A lower bound on the number of rounds that hold all classes.
    pub(super) fn least_apart(&self) -> usize {
        let dp_size = self.options.dp_size();
        let all: Vec<u32> = (0..self.placed.items.len() as u32).collect();
        let least = |held: &Vec<u32>| self.least(held.iter().map(|&place| &self.placed.items[place as usize]));
        let divided = self.classes.divide(&all, &self.placed.items);
        if self.classes.in_rounds {
            divided.iter().map(|held| least(held).div_ceil(dp_size)).sum()
        } else {
            divided.iter().map(least).sum::<usize>().div_ceil(dp_size)
        }
    }

    /// Micro-batches of all ranks, dealt to ranks; documents may go to any rank.
    pub(super) fn free_apart(&self, rounds: usize) -> Option<(Bins<'_>, Vec<Vec<usize>>)> {
        let dp_size = self.options.dp_size();
        let all: Vec<u32> = (0..self.placed.items.len() as u32).collect();
        let unit = if self.classes.in_rounds { dp_size } else { 1 };
        let filled = self.fill_apart(&[all], rounds * dp_size / unit, unit)?;
        let bins = self.bins_of(filled.into_iter().flatten().collect());
        let costs = bins.costs();
        let ranks = if self.classes.in_rounds {
            rounds::rows_to_ranks(&mut rounds::heaviest_together(&costs, &bins.classes, dp_size), &costs, dp_size)
        } else {
            deal(&costs, dp_size).chunks(rounds).map(<[usize]>::to_vec).collect()
        };
        Some((bins, ranks))
    }

    /// Micro-batches of ranks that keep these documents.
    pub(super) fn ranks_apart(&self, held: &[Vec<u32>], rounds: usize) -> Option<(Bins<'_>, Vec<Vec<usize>>)> {
        let filled = if self.classes.in_rounds {
            self.fill_apart(held, rounds, 1)?
        } else {
            let alone = |rank: &Vec<u32>| self.fill_apart(std::slice::from_ref(rank), rounds, 1);
            held.iter().map(alone).collect::<Option<Vec<_>>>()?.into_iter().flatten().collect()
        };
        let bins = self.bins_of(filled.into_iter().flatten().collect());
        Some((bins, (0..held.len()).map(|rank| (rank * rounds..(rank + 1) * rounds).collect()).collect()))
    }

    /// Fills `units` times `unit` micro-batches for each of these lists of documents; a class has equally many in all
    /// lists, a multiple of `unit`. `None` if a class finds no room.
    fn fill_apart(&self, lists: &[Vec<u32>], units: usize, unit: usize) -> Option<Vec<Vec<Filled>>> {
        let divided: Vec<Vec<Vec<u32>>> =
            lists.iter().map(|held| self.classes.divide(held, &self.placed.items)).collect();
        let items_of =
            |places: &[u32]| places.iter().map(|&place| self.placed.items[place as usize]).collect::<Vec<Item>>();
        let need = |class: usize| {
            let mut need = Need::default();
            for places in divided.iter().map(|of_list| &of_list[class]) {
                let items = items_of(places);
                need.least = need.least.max(self.least(&items).div_ceil(unit));
                need.most = need.most.max(places.len().div_ceil(unit));
                need.cost += items.iter().map(|item| item.cost).sum::<f64>();
            }
            need
        };
        let mut needs: Vec<Need> = (0..self.classes.number).map(need).collect();
        'shared: loop {
            let units_of = shares(&needs, units)?;
            let mut filled = vec![Vec::with_capacity(units * unit); lists.len()];
            for (list, of_list) in filled.iter_mut().zip(&divided) {
                for (class, places) in of_list.iter().enumerate().filter(|&(class, _)| units_of[class] > 0) {
                    let items = items_of(places);
                    let targets = self.targets_apart(&items, units_of[class] * unit);
                    let close = CLOSE * targets.iter().sum::<f64>() / targets.len() as f64;
                    let Some(bins) = self.filled(&items, &targets, close, None) else {
                        needs[class].least = units_of[class] + 1;
                        continue 'shared;
                    };
                    for (contents, target) in bins.contents.into_iter().zip(targets) {
                        let held = contents.into_iter().map(|at| places[at as usize]).collect();
                        list.push((class as u32, target, held));
                    }
                }
            }
            return Some(filled);
        }
    }

    /// Target cost of each of these micro-batches of one class.
    fn targets_apart(&self, items: &[Item], micro_batches: usize) -> Vec<f64> {
        let ranks = self.options.dp_size();
        match self.sync {
            Sync::Step => {
                let total: f64 = items.iter().map(|item| item.cost).sum();
                vec![total / micro_batches as f64; micro_batches]
            }
            Sync::MicroBatch => {
                let size = if self.members.is_empty() && micro_batches.is_multiple_of(ranks) { ranks } else { 1 };
                let targets = rounds::targets(items, size, micro_batches / size);
                targets.into_iter().flat_map(|target| std::iter::repeat_n(target, size)).collect()
            }
        }
    }

    fn bins_of(&self, filled: Vec<Filled>) -> Bins<'_> {
        let targets: Vec<f64> = filled.iter().map(|&(_, target, _)| target).collect();
        let mut bins = Bins::new(&self.placed.items, self.limits, &targets);
        for (micro_batch, (class, _, places)) in filled.into_iter().enumerate() {
            bins.classes.push(class);
            places.into_iter().for_each(|place| bins.put(place, micro_batch));
        }
        bins
    }
}
