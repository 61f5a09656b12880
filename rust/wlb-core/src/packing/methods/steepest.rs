//! Micro-batches filled so that tokens and work run out together.

use crate::interrupt::Meter;
use crate::packing::placement::Placement;
use crate::packing::takers::Takers;

use super::documents::{Document, Documents};

/// Longest first, each to the micro-batch that lacks the most cost per token of its room, among those with room for it
/// whose cost stays within `target`; else to the least cost that has room.
///
/// Longer documents cost more per token. A micro-batch that has few tokens left but much cost to reach `target` must get
/// long ones, one with a heavy document and room to spare can take the many short ones: so both run out together.
///
/// `None` where a document that `start` places finds no room, or the plan misses its target and cannot be better than
/// `start`, whose maximum is the `ceiling`. What `start` left over is tried last, and placed where the
/// cost stays within `ceiling`.
///
/// # Complexity
/// O(n log N), and O(N) for each document left over that some micro-batch has room for.
pub(super) fn steepest(documents: &Documents, start: &Placement, target: f64, ceiling: f64) -> Option<Placement> {
    let mut placement = start.emptied();
    placement.length_fallbacks = start.length_fallbacks;
    let mut by_slope = Takers::new((0..placement.costs.len()).map(|j| slope(&placement, documents, j, target)));
    // Most batches need it for a few documents at the end.
    let mut by_cost = None;
    // Then the plan is no better, and its target was missed: the rest of it says nothing more.
    let misses = |cost: f64| cost > target && (cost > ceiling || (cost == ceiling && start.leftover.is_empty()));
    let mut meter = Meter::default();
    for (rank, document) in documents.longest_first.iter().enumerate() {
        let index = document.index as usize;
        if start.assignment[index] < 0 {
            continue;
        }
        meter.spend(1);
        let room = |j: usize| room(&placement, documents, j);
        let within = |j: usize| first_within(documents, rank, room(j), |cost| placement.costs[j] + cost <= target);
        if let Some(j) = by_slope.first(rank, |j| slope(&placement, documents, j, target), within) {
            placement.put(index, j, document.length, document.cost);
            by_slope.set(j, slope(&placement, documents, j, target));
        } else {
            let by_cost = by_cost.get_or_insert_with(|| Takers::new(placement.costs.iter().copied()));
            let with_room = |j: usize| first_within(documents, rank, room(j), |_| true);
            let j = by_cost.first(rank, |j| placement.costs[j], with_room)?;
            // Above the target by now: it takes nothing more within that.
            placement.put(index, j, document.length, document.cost);
            if misses(placement.costs[j]) {
                return None;
            }
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

/// The cost that a micro-batch has too much for each token of its room: less than none while it lacks some.
#[inline]
fn slope(placement: &Placement, documents: &Documents, micro_batch: usize, target: f64) -> f64 {
    (placement.costs[micro_batch] - target) / room(placement, documents, micro_batch).max(1) as f64
}

/// From this rank on, the first document of no more tokens than `room` whose cost `is_within` what is wanted: then so
/// are all that are shorter.
#[inline]
fn first_within(documents: &Documents, rank: usize, room: i64, is_within: impl Fn(f64) -> bool) -> Option<usize> {
    let listed = &documents.longest_first[rank..];
    let fits = |document: &Document| (i64::from(document.length) <= room) & is_within(document.cost);
    if fits(&listed[0]) {
        return Some(rank);
    }
    let first = listed.partition_point(|document| !fits(document));
    (first < listed.len()).then_some(rank + first)
}
