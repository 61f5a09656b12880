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
/// `None` where a document that `start` places finds no room. What `start` left over is tried last, and placed where the
/// cost stays within `ceiling`.
///
/// # Complexity
/// O(n log N), and O(N) for each document left over that some micro-batch has room for.
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
    let mut by_slope = Takers::new(documents, &placement, 0, within(target), slope);
    // Most batches need it for a few documents at the end.
    let mut by_cost = None;
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
                Takers::changed(by_cost, &placement, j, rank + 1);
            }
        } else {
            let by_cost =
                by_cost.get_or_insert_with(|| Takers::new(documents, &placement, rank, within(f64::INFINITY), cost));
            let j = by_cost.first(&placement, rank)?;
            placement.put(index, j, document.length, document.cost);
            by_cost.took(&placement, rank + 1);
        }
    }
    place_left_over(documents, start, ceiling, &mut placement);
    Some(placement)
}

fn place_left_over(documents: &Documents, start: &Placement, ceiling: f64, placement: &mut Placement) {
    if start.leftover.is_empty() {
        return;
    }
    let mut of_index = vec![None; start.assignment.len()];
    documents.longest_first.iter().for_each(|document| of_index[document.index as usize] = Some(document));
    let left_over = || start.leftover.iter().filter_map(|&index| of_index[index]);
    let shortest = left_over().map(|document| document.length).min().unwrap_or(0);
    // Few have room for any of them.
    let has_room = |placement: &Placement, j: usize, length: i32| room(placement, documents, j) >= i64::from(length);
    let some_room: Vec<usize> = (0..start.tokens.len()).filter(|&j| has_room(placement, j, shortest)).collect();
    let mut meter = Meter::default();
    for &Document { index, length, cost } in left_over() {
        meter.spend(1 + some_room.len());
        let with_room = some_room.iter().copied().filter(|&j| has_room(placement, j, length));
        let least_cost = with_room.min_by(|&a, &b| placement.costs[a].total_cmp(&placement.costs[b]));
        match least_cost.filter(|&j| placement.costs[j] + cost <= ceiling) {
            Some(j) => placement.put(index as usize, j, length, cost),
            None => placement.leftover.push(index as usize),
        }
    }
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
    ready: BinaryHeap<Reverse<(u64, u32, i64)>>,
    /// Rank of the first document that fits, micro-batch, tokens.
    waiting: BinaryHeap<Reverse<(u32, u32, i64)>>,
}

impl<'a, F, W> Takers<'a, F, W>
where
    F: Fn(&Placement, usize, &Document) -> bool,
    W: Fn(&Placement, usize) -> f64,
{
    fn new(documents: &'a Documents, placement: &Placement, rank: usize, fits: F, weight: W) -> Self {
        let mut takers = Self {
            documents,
            fits,
            weight,
            ready: BinaryHeap::with_capacity(placement.tokens.len()),
            waiting: BinaryHeap::new(),
        };
        (0..placement.tokens.len()).for_each(|j| takers.changed(placement, j, rank));
        takers
    }

    /// The micro-batch of least weight that may take this document.
    fn first(&mut self, placement: &Placement, rank: usize) -> Option<usize> {
        while let Some(&Reverse((first, j, tokens))) = self.waiting.peek()
            && first as usize <= rank
        {
            self.waiting.pop();
            if placement.tokens[j as usize] == tokens {
                self.ready.push(Reverse((ordered((self.weight)(placement, j as usize)), j, tokens)));
            }
        }
        while let Some(&Reverse((_, j, tokens))) = self.ready.peek() {
            if placement.tokens[j as usize] == tokens {
                return Some(j as usize);
            }
            self.ready.pop();
        }
        None
    }

    /// The first took a document. The next has this rank.
    fn took(&mut self, placement: &Placement, rank: usize) {
        let Some(mut first) = self.ready.peek_mut() else { return };
        let j = first.0.1;
        let fits = |document: &Document| (self.fits)(placement, j as usize, document);
        if self.documents.longest_first.get(rank).is_some_and(fits) {
            first.0 = (ordered((self.weight)(placement, j as usize)), j, placement.tokens[j as usize]);
        } else {
            PeekMut::pop(first);
            self.wait(placement, j, rank);
        }
    }

    /// A micro-batch holds other documents than before.
    fn changed(&mut self, placement: &Placement, j: usize, rank: usize) {
        if self.documents.longest_first.get(rank).is_some_and(|document| (self.fits)(placement, j, document)) {
            let weight = ordered((self.weight)(placement, j));
            self.ready.push(Reverse((weight, j as u32, placement.tokens[j])));
        } else {
            self.wait(placement, j as u32, rank);
        }
    }

    fn wait(&mut self, placement: &Placement, j: u32, rank: usize) {
        let rest = self.documents.longest_first.get(rank + 1..).unwrap_or(&[]);
        let first = rest.partition_point(|document| !(self.fits)(placement, j as usize, document));
        if first < rest.len() {
            self.waiting.push(Reverse(((rank + 1 + first) as u32, j, placement.tokens[j as usize])));
        }
    }
}

/// Integers in the order of [`f64::total_cmp`].
fn ordered(weight: f64) -> u64 {
    let bits = weight.to_bits();
    if bits >> 63 == 1 { !bits } else { bits | 1 << 63 }
}
