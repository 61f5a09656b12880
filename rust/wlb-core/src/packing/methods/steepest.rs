//! Micro-batches filled so that tokens and work run out together.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;

use crate::interrupt::Meter;
use crate::packing::placement::Placement;

use super::documents::{Document, Documents};

/// Longest first, each to the micro-batch that lacks the most cost per token of its room, among those with room for it
/// whose cost stays within `target`; else to the least cost that has room.
///
/// Longer documents cost more per token. A micro-batch that has few tokens left but much cost to reach `target` must get
/// long ones, one with a heavy document and room to spare can take the many short ones: so both run out together.
///
/// `None` where a document that `start` places finds no room. What `start` left over comes last, longest first again: to the
/// least cost that has room, if that stays within `ceiling`.
///
/// # Complexity
/// O(n log N).
pub(super) fn steepest(documents: &Documents, start: &Placement, target: f64, ceiling: f64) -> Option<Placement> {
    let mut placement = start.emptied();
    placement.length_fallbacks = start.length_fallbacks;
    let within = |target: f64| {
        move |placement: &Placement, j: usize, document: &Document| {
            room(placement, documents, j) >= i64::from(document.length) && placement.costs[j] + document.cost <= target
        }
    };
    let slope = |placement: &Placement, j: usize| (placement.costs[j] - target) / room(placement, documents, j) as f64;
    let cost = |placement: &Placement, j: usize| placement.costs[j];
    let by_cost_from =
        |placement: &Placement, rank| Takers::new(documents, placement, rank, within(f64::INFINITY), cost);
    let mut by_slope = Takers::new(documents, &placement, 0, within(target), slope);
    let mut by_cost: Option<Takers<_, _>> = None; // most batches need it for a few documents at the end
    let mut meter = Meter::default();
    for (rank, document) in documents.longest_first.iter().enumerate() {
        let index = document.index as usize;
        if start.assignment[index] < 0 {
            continue;
        }
        meter.spend(1);
        if let Some(j) = by_slope.first(&placement, rank) {
            placement.put(index, j, document.length, document.cost);
            by_slope.took(&placement, rank + 1);
            if let Some(by_cost) = &mut by_cost {
                by_cost.changed(&placement, j, rank + 1);
            }
        } else {
            let by_cost = by_cost.get_or_insert_with(|| by_cost_from(&placement, rank));
            let j = by_cost.first(&placement, rank)?;
            placement.put(index, j, document.length, document.cost);
            by_cost.took(&placement, rank + 1);
        }
    }
    if start.leftover.is_empty() {
        return Some(placement);
    }
    let mut left_over = vec![false; start.assignment.len()];
    start.leftover.iter().for_each(|&index| left_over[index] = true);
    let mut by_cost = by_cost_from(&placement, 0);
    for (rank, document) in documents.longest_first.iter().enumerate() {
        let index = document.index as usize;
        if left_over[index]
            && let Some(j) = by_cost.first(&placement, rank)
            && placement.costs[j] + document.cost <= ceiling
        {
            placement.put(index, j, document.length, document.cost);
            by_cost.took(&placement, rank + 1);
            left_over[index] = false;
        }
    }
    placement.leftover = start.leftover.iter().copied().filter(|&index| left_over[index]).collect();
    Some(placement)
}

fn room(placement: &Placement, documents: &Documents, micro_batch: usize) -> i64 {
    documents.max_tokens - placement.tokens[micro_batch]
}

/// The micro-batches that may take a document, the one of least weight first, while documents come longest first.
///
/// What may take a document may take all that are shorter, until it takes one. So a micro-batch that may not take the
/// next one waits for a certain later one, and is not looked at until then.
struct Takers<'a, F, W> {
    documents: &'a Documents,
    fits: F,
    weight: W,
    /// Weight, micro-batch, and its tokens when it was put here: with others by now, it is no longer true.
    ready: BinaryHeap<Reverse<(u64, u32, u32)>>,
    /// Of each document by rank, a micro-batch that waits for it, and of each micro-batch the next that waits for the same.
    waits_for: Vec<u32>,
    next: Vec<u32>,
    /// Whose next are known by now: all documents before this rank were looked at.
    rank: usize,
}

/// No micro-batch.
const NOBODY: u32 = u32::MAX;
/// In [`Takers::next`], of a micro-batch that does not wait.
const READY: u32 = u32::MAX - 1;

impl<'a, F, W> Takers<'a, F, W>
where
    F: Fn(&Placement, usize, &Document) -> bool,
    W: Fn(&Placement, usize) -> f64,
{
    fn new(documents: &'a Documents, placement: &Placement, rank: usize, fits: F, weight: W) -> Self {
        let num_micro_batches = placement.tokens.len();
        let mut takers = Self {
            documents,
            fits,
            weight,
            ready: BinaryHeap::with_capacity(num_micro_batches),
            waits_for: vec![NOBODY; documents.longest_first.len()],
            next: vec![READY; num_micro_batches],
            rank,
        };
        (0..num_micro_batches).for_each(|j| takers.changed(placement, j, rank));
        takers
    }

    /// The micro-batch of least weight that may take this document; ranks only ascend.
    fn first(&mut self, placement: &Placement, rank: usize) -> Option<usize> {
        while self.rank <= rank {
            let mut j = std::mem::replace(&mut self.waits_for[self.rank], NOBODY);
            while j != NOBODY {
                let next = std::mem::replace(&mut self.next[j as usize], READY);
                self.changed(placement, j as usize, rank);
                j = next;
            }
            self.rank += 1;
        }
        while let Some(&Reverse((_, j, tokens))) = self.ready.peek() {
            if placement.tokens[j as usize] as u32 == tokens {
                return Some(j as usize);
            }
            self.ready.pop();
        }
        None
    }

    /// The first took a document. The next has this rank.
    fn took(&mut self, placement: &Placement, rank: usize) {
        let Some(mut first) = self.ready.peek_mut() else { return };
        let j = first.0.1 as usize;
        if self.documents.longest_first.get(rank).is_some_and(|document| (self.fits)(placement, j, document)) {
            first.0 = (ordered((self.weight)(placement, j)), j as u32, placement.tokens[j] as u32);
        } else {
            PeekMut::pop(first);
            self.wait(placement, j, rank);
        }
    }

    /// A micro-batch holds other documents than before. The next has this rank.
    fn changed(&mut self, placement: &Placement, j: usize, rank: usize) {
        if self.next[j] != READY {
            return; // it waits, and what it waited for is the earliest that it may take by now
        }
        if self.documents.longest_first.get(rank).is_some_and(|document| (self.fits)(placement, j, document)) {
            let weight = ordered((self.weight)(placement, j));
            self.ready.push(Reverse((weight, j as u32, placement.tokens[j] as u32)));
        } else {
            self.wait(placement, j, rank);
        }
    }

    fn wait(&mut self, placement: &Placement, j: usize, rank: usize) {
        let rest = self.documents.longest_first.get(rank + 1..).unwrap_or(&[]);
        let first = rest.partition_point(|document| !(self.fits)(placement, j, document));
        if first < rest.len() {
            self.next[j] = std::mem::replace(&mut self.waits_for[rank + 1 + first], j as u32);
        }
    }
}

/// Integers in the order of [`f64::total_cmp`].
fn ordered(weight: f64) -> u64 {
    let bits = weight.to_bits();
    if bits >> 63 == 1 { !bits } else { bits | 1 << 63 }
}
