//! Micro-batches filled so that tokens and work run out together.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::interrupt::Meter;
use crate::packing::placement::Placement;

use super::documents::{Document, Documents};
use super::tournament::Tournament;

/// Longest first, each to the micro-batch that lacks the most cost per token of its room, among those with room for it
/// whose cost stays within `target`; else to the least cost that has room.
///
/// Longer documents cost more per token. A micro-batch that has few tokens left but much cost to reach `target` must
/// get long ones, one with a heavy document and room to spare can take the many short ones: so both run out together.
///
/// `None` where a document that `start` places finds no room. What `start` left over comes last, longest first again:
/// to the least cost that has room, if that stays within `ceiling`.
///
/// # Complexity
/// O(n log N), as long as few documents share a row of [`FirstFit`]; else O(n log n).
pub(super) fn steepest(documents: &Documents, start: &Placement, target: f64, ceiling: f64) -> Option<Placement> {
    let mut assignment = vec![-1; start.assignment.len()];
    let mut held = vec![Held { tokens: 0, cost: start.empty_cost() }; start.tokens.len()];
    let first_fit = FirstFit::new(documents);
    let slope = |held: &Held| (held.cost - target) / (documents.max_tokens - held.tokens) as f64;
    let cost = |held: &Held| held.cost;
    let mut by_slope = Takers::new(&first_fit, &held, 0, target, slope);
    let mut by_cost: Option<Takers<_>> = None; // most batches need it for a few documents at the end
    let mut unplaced = Vec::new();
    let mut meter = Meter::default();
    for (rank, document) in documents.longest_first.iter().enumerate() {
        let index = document.index as usize;
        if start.assignment[index] < 0 {
            unplaced.push(*document);
            continue;
        }
        meter.spend(1);
        let j = if let Some(j) = by_slope.first(&held, rank) {
            held[j].put(document);
            by_slope.changed(&held, j, rank + 1);
            if let Some(by_cost) = &mut by_cost {
                by_cost.changed(&held, j, rank + 1);
            }
            j
        } else {
            let room = |held: &Held| documents.max_tokens - held.tokens;
            if by_cost.is_none() && held.iter().map(room).max() < Some(i64::from(document.length)) {
                return None;
            }
            let by_cost = by_cost.get_or_insert_with(|| Takers::new(&first_fit, &held, rank, f64::INFINITY, cost));
            let j = by_cost.first(&held, rank)?;
            held[j].put(document);
            by_cost.changed(&held, j, rank + 1);
            j
        };
        assignment[index] = j as i32;
    }
    let (tokens, costs) = held.into_iter().map(|held| (held.tokens, held.cost)).unzip();
    let mut placement = start.rearranged(assignment, tokens, costs);
    if !start.leftover.is_empty() {
        place_left_over(documents, &unplaced, start, ceiling, &mut placement);
    }
    Some(placement)
}

/// Of what `start` did not place what it left over, longest first: each to the least cost that has room, if that stays
/// within `ceiling`. Micro-batches without room for the shortest are not looked at: mostly these are all.
///
/// # Complexity
/// O(N), and O(log N) for each that there may be room for.
fn place_left_over(
    documents: &Documents,
    unplaced: &[Document],
    start: &Placement,
    ceiling: f64,
    placement: &mut Placement,
) {
    let mut left_over = vec![false; start.assignment.len()];
    start.leftover.iter().for_each(|&index| left_over[index] = true);
    let shortest = unplaced.iter().rev().find(|document| left_over[document.index as usize]);
    let shortest = shortest.map_or(i64::MAX, |document| i64::from(document.length));
    // By room; and, of those that have enough, by cost.
    let with_room = (0..placement.tokens.len()).map(|j| (room(placement, documents, j), j as u32));
    let mut lacking: BinaryHeap<(i64, u32)> = with_room.filter(|&(room, _)| room >= shortest).collect();
    let mut ready = BinaryHeap::new();
    for document in unplaced.iter().filter(|document| left_over[document.index as usize]) {
        while let Some(&(room, j)) = lacking.peek()
            && room >= i64::from(document.length)
        {
            lacking.pop();
            ready.push(Reverse((ordered(placement.costs[j as usize]), j)));
        }
        if let Some(&Reverse((_, j))) = ready.peek()
            && placement.costs[j as usize] + document.cost <= ceiling
        {
            ready.pop();
            placement.put(document.index as usize, j as usize, document.length, document.cost);
            lacking.push((room(placement, documents, j as usize), j));
        }
    }
    let is_left = |index: &usize| placement.assignment[*index] < 0;
    placement.leftover = start.leftover.iter().copied().filter(is_left).collect();
}

fn room(placement: &Placement, documents: &Documents, micro_batch: usize) -> i64 {
    documents.max_tokens - placement.tokens[micro_batch]
}

/// What a micro-batch holds: side by side, since both are asked for wherever one is.
#[derive(Clone)]
struct Held {
    tokens: i64,
    cost: f64,
}

impl Held {
    fn put(&mut self, document: &Document) {
        self.tokens += i64::from(document.length);
        self.cost += document.cost;
    }
}

/// The micro-batches that may take a document, the one of least weight first, while documents come longest first.
///
/// What may take a document may take all that are shorter, until it takes one. So a micro-batch that may not take the
/// next one waits for a certain later one, and is not looked at until then.
struct Takers<'a, W> {
    first_fit: &'a FirstFit<'a>,
    /// Most that a micro-batch may cost.
    target: f64,
    weight: W,
    /// By weight.
    ready: Tournament,
    /// Of each document by rank, a micro-batch that waits for it, and of each micro-batch the next that waits for the
    /// same.
    waits_for: Vec<u32>,
    next: Vec<u32>,
    /// Whose next are known by now: all documents before this rank were looked at.
    rank: usize,
}

/// Of fewer documents halving is as fast as tables, which have to be filled first.
const SMALL: usize = 1024;

/// No micro-batch.
const NOBODY: u32 = u32::MAX;
/// In [`Takers::next`], of a micro-batch that does not wait.
const READY: u32 = u32::MAX - 1;

impl<'a, W: Fn(&Held) -> f64> Takers<'a, W> {
    fn new(first_fit: &'a FirstFit<'a>, held: &[Held], rank: usize, target: f64, weight: W) -> Self {
        let num_micro_batches = held.len();
        let mut takers = Self {
            first_fit,
            target,
            weight,
            ready: Tournament::new(std::iter::repeat_n(Tournament::NONE, num_micro_batches)),
            waits_for: vec![NOBODY; first_fit.documents.longest_first.len()],
            next: vec![READY; num_micro_batches],
            rank,
        };
        (0..num_micro_batches).for_each(|j| takers.changed(held, j, rank));
        takers
    }

    fn fits(&self, held: &Held, rank: usize) -> bool {
        self.first_fit.documents.longest_first.get(rank).is_some_and(|document| {
            held.tokens + i64::from(document.length) <= self.first_fit.documents.max_tokens
                && held.cost + document.cost <= self.target
        })
    }

    /// The micro-batch of least weight that may take this document; ranks only ascend.
    fn first(&mut self, held: &[Held], rank: usize) -> Option<usize> {
        while self.rank <= rank {
            let mut j = self.waits_for[self.rank];
            while j != NOBODY {
                let next = std::mem::replace(&mut self.next[j as usize], READY);
                self.changed(held, j as usize, rank);
                j = next;
            }
            self.rank += 1;
        }
        self.ready.least()
    }

    /// A micro-batch holds other documents than before. The next has this rank.
    fn changed(&mut self, held: &[Held], j: usize, rank: usize) {
        if self.next[j] != READY {
            return; // it waits, and what it waited for is the earliest that it may take by now
        }
        if self.fits(&held[j], rank) {
            self.ready.set(j, ordered((self.weight)(&held[j])));
        } else {
            self.ready.set(j, Tournament::NONE);
            self.wait(&held[j], j, rank);
        }
    }

    fn wait(&mut self, held: &Held, j: usize, rank: usize) {
        let fit = self.first_fit.of(rank + 1, held.tokens, held.cost, self.target);
        if fit < self.waits_for.len() {
            self.next[j] = std::mem::replace(&mut self.waits_for[fit], j as u32);
        }
    }
}

/// Which of the documents, longest first, is the first that fits. Four of five placements ask: after most documents a
/// micro-batch waits for a much shorter one, and halving misses the caches. So tables by length and by cost tell it,
/// whose rows hold some documents each.
struct FirstFit<'a> {
    documents: &'a Documents,
    /// First rank of a length of so much, shifted, or less.
    by_length: Vec<u32>,
    length_shift: u32,
    /// First rank of a cost of so much or less: of what its bits, shifted, are above those of a cheap one, so that rows
    /// get wider with the cost.
    by_cost: Vec<u32>,
    cheap: u64,
    cost_shift: u32,
}

/// Binary orders of magnitude below the dearest document that rows by cost tell apart.
const ORDERS: u64 = 24;

impl<'a> FirstFit<'a> {
    fn new(documents: &'a Documents) -> Self {
        let all = &documents.longest_first;
        let (longest, dearest) = all.first().map_or((0, 0.0), |document| (document.length, document.cost));
        let cheapest = all.last().map_or(0.0, |document| document.cost);
        let cheap = cheapest.to_bits().max(dearest.to_bits().saturating_sub(ORDERS << 52));
        let mut first_fit =
            Self { documents, by_length: Vec::new(), length_shift: 0, by_cost: Vec::new(), cheap, cost_shift: 0 };
        if all.len() < SMALL {
            return first_fit;
        }
        let shift = |most: u64| (0..).find(|&shift| most >> shift <= all.len() as u64).unwrap_or(0);
        first_fit.length_shift = shift(longest as u64);
        first_fit.cost_shift = shift(dearest.to_bits().saturating_sub(cheap));
        let tables = |row: &dyn Fn(&Document) -> usize| {
            let mut table = vec![all.len() as u32; all.first().map_or(0, row) + 1];
            let mut above = table.len();
            for (rank, document) in all.iter().enumerate() {
                let row = row(document);
                if row < above {
                    table[row..above].fill(rank as u32);
                    above = row;
                }
            }
            table
        };
        first_fit.by_length = tables(&|document| first_fit.length_row(i64::from(document.length)));
        first_fit.by_cost = tables(&|document| first_fit.cost_row(document.cost));
        first_fit
    }

    fn length_row(&self, length: i64) -> usize {
        (length >> self.length_shift) as usize
    }

    fn cost_row(&self, cost: f64) -> usize {
        (cost.max(0.0).to_bits().saturating_sub(self.cheap) >> self.cost_shift) as usize
    }

    /// The rank, `from` or more, of the first that a micro-batch may take which has so many tokens and costs so much.
    fn of(&self, from: usize, tokens: i64, cost: f64, target: f64) -> usize {
        let all = &self.documents.longest_first;
        let room = self.documents.max_tokens - tokens;
        if self.by_length.is_empty() {
            let rest = &all[from.min(all.len())..];
            return from
                + rest.partition_point(|document| i64::from(document.length) > room || cost + document.cost > target);
        }
        let first = |table: &[u32], row: usize| table.get(row).map_or(0, |&rank| rank as usize);
        let end = |table: &[u32], row: usize| if row == 0 { all.len() } else { first(table, row - 1) };
        let row = self.length_row(room);
        let start = first(&self.by_length, row);
        let rest = &all[start..end(&self.by_length, row)];
        let short = start + rest.partition_point(|document| i64::from(document.length) > room);
        if all.get(short).is_none_or(|document| cost + document.cost <= target) {
            return short.max(from);
        }
        // As much more and less as sums may be rounded: nearly always one row.
        let (slack, rounding) = (target - cost, target * (2.0 * f64::EPSILON));
        let start = first(&self.by_cost, self.cost_row(slack + rounding));
        let rest = &all[start..end(&self.by_cost, self.cost_row(slack - rounding))];
        from.max(short).max(start + rest.partition_point(|document| cost + document.cost > target))
    }
}

/// Integers in the order of [`f64::total_cmp`].
pub(super) fn ordered(weight: f64) -> u64 {
    let bits = weight.to_bits();
    if bits >> 63 == 1 { !bits } else { bits | 1 << 63 }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Documents, FirstFit, SMALL};

    #[test]
    fn what_fits_since_sums_are_rounded_is_found() {
        let lengths: Vec<i32> = (1..=SMALL as i32 + 100).collect();
        let costs: Vec<f64> = lengths.iter().map(|&length| f64::from(length) / 100.0).collect();
        let documents = Documents::new(&lengths, &costs, 1 << 20);
        // Numbers that large are two apart: what costs a little less than 3 fits beside 2 that are left.
        let (held, target) = (1e16, 1e16 + 2.0);
        let looked = documents.longest_first.iter().position(|document| held + document.cost <= target).unwrap_or(0);
        assert!(documents.longest_first[looked].cost > target - held);
        assert_eq!(FirstFit::new(&documents).of(0, 0, held, target), looked);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn the_first_that_fits_is_found_in_tables_as_by_looking(
            lengths in proptest::collection::vec(prop_oneof![1..50, 1..5000, 1..=1 << 20], SMALL - 20..SMALL + 400),
            (linear, squares) in (prop_oneof![Just(0.0), 0.1..2.0], prop_oneof![Just(0.0), Just(1e-4), Just(1e30)]),
            asked in proptest::collection::vec(
                (any::<prop::sample::Index>(), any::<prop::sample::Index>(), 0.0..1.0, 0.0..1.5), 1..60),
        ) {
            let cost = |length: i32| f64::from(length) * (linear + squares * f64::from(length));
            let costs: Vec<f64> = lengths.iter().copied().map(cost).collect();
            let documents = Documents::new(&lengths, &costs, 1 << 20);
            let all = &documents.longest_first;
            let first_fit = FirstFit::new(&documents);
            for (at, from, tokens, target) in asked {
                // Near what documents have, so that it matters which side of them it is.
                let document = all[at.index(all.len())];
                let tokens = documents.max_tokens - i64::from(document.length) - (3.0 * tokens) as i64 + 1;
                let (from, target) = (from.index(all.len() + 1), target * 2.0 * document.cost);
                let held = 0.3 * document.cost;
                let fits = |rank: &usize| {
                    tokens + i64::from(all[*rank].length) <= documents.max_tokens && held + all[*rank].cost <= target
                };
                let looked = (from..all.len()).find(fits).unwrap_or(all.len());
                prop_assert_eq!(first_fit.of(from, tokens, held, target), looked);
            }
        }
    }
}
