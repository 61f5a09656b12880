//! A step with too few tokens gets more of them, at the cost of its balance.
//!
//! The release rules weigh balance against waiting and do not look at how many tokens a step trains. So a step can be
//! nearly empty while much waits. For example, `N` documents of one token were carried over: they are placed first, one
//! in each micro-batch, and then no document of the full `max_tokens` finds room. The gradient of a handful of tokens
//! is noise, so there the number of tokens matters more than balance.

use crate::ladder::Ladder;
use crate::packing::methods::columns::{Placed, Priced};

/// The first of three placements of a step with `min_tokens` or more: the one given; all that is there, in `order`,
/// where the tokens are fewest; the same into the first micro-batch with room. If none has so many, the one with the
/// most.
///
/// The last holds `min_tokens`, everything, or, with two micro-batches or more, `N / 2` (rounded down) times
/// `max_tokens`: unless everything found room, any two neighbours hold more than `max_tokens`, for the first document
/// of the second found no room in the first. In all three a document that finds no room was tried after documents that
/// leave too little of it in every micro-batch: who was first in `order` waits for nobody behind.
///
/// The first documents are due. A placement that leaves one of them over is skipped if the one before it leaves none.
/// They are then nearly half of the room by themselves, so the one before it holds as much.
///
/// Columns with a limit and the number of documents are kept too, and then nothing is said of how many tokens a step
/// holds.
///
/// # Arguments
/// * `due` - how many of `order` must leave if that is possible.
///
/// # Complexity
/// O(n log N); O(n N) where there are such columns.
pub(super) fn fuller(given: Placed, priced: &Priced<'_>, order: &[usize], due: usize, min_tokens: i64) -> Placed {
    let tokens = |placed: &Placed| placed.placement.tokens.iter().sum::<i64>();
    let all_leave = |placed: &Placed| order[..due].iter().all(|&index| placed.placement.assignment[index] >= 0);
    let mut fullest = given;
    for other in [by_tokens, first_fit] {
        if tokens(&fullest) >= min_tokens {
            break;
        }
        let other = other(priced, order);
        if tokens(&other) > tokens(&fullest) && (all_leave(&other) || !all_leave(&fullest)) {
            fullest = other;
        }
    }
    fullest
}

/// Each document where the tokens are fewest; where there are limits, among the micro-batches that keep them.
fn by_tokens(priced: &Priced<'_>, order: &[usize]) -> Placed {
    if priced.costs.columns() == 1 {
        let mut bins = priced.bins();
        for &index in order {
            bins.place_by_tokens(index, priced.lengths[index], priced.costs.values()[index]);
        }
        return bins.placement.into();
    }
    let mut placed = priced.nothing();
    let mut by_tokens = Ladder::new(placed.placement.tokens.iter().map(|_| 0.0));
    for &index in order {
        // Without limits none has room where the emptiest has none.
        let tried = if priced.costs.is_limited() { priced.num_micro_batches } else { 1 };
        let found = by_tokens.ascending().take(tried).find(|&j| priced.has_room(&placed, j, index));
        put(priced, &mut placed, index, found);
        if let Some(j) = found {
            by_tokens.set(j, placed.placement.tokens[j] as f64);
        }
    }
    placed
}

/// Each document into the first micro-batch with room.
fn first_fit(priced: &Priced<'_>, order: &[usize]) -> Placed {
    let mut placed = priced.nothing();
    let mut rooms = Rooms::new(priced);
    for &index in order {
        let found = if priced.costs.is_limited() {
            (0..priced.num_micro_batches).find(|&j| priced.has_room(&placed, j, index))
        } else {
            rooms.take_first(priced.lengths[index])
        };
        put(priced, &mut placed, index, found);
    }
    placed
}

fn put(priced: &Priced<'_>, placed: &mut Placed, index: usize, found: Option<usize>) {
    match found {
        Some(j) => {
            priced.put(placed, index, j);
            placed.placement.length_fallbacks += 1; // none was placed by its cost
        }
        None => placed.placement.leftover.push(index),
    }
}

/// Finds the first micro-batch with room: a tree over them, with the most room below every node.
struct Rooms {
    /// The root is node 1, the children of `k` are `2 k` and `2 k + 1`; leaves that no micro-batch has are full.
    most: Vec<i32>,
    leaves: usize,
    /// Number of documents that each micro-batch may still take; one that may take none has no room.
    documents: Vec<usize>,
}

impl Rooms {
    fn new(&Priced { num_micro_batches, max_tokens, max_documents, .. }: &Priced<'_>) -> Self {
        let leaves = num_micro_batches.next_power_of_two();
        let mut most = vec![0; 2 * leaves];
        most[leaves..leaves + num_micro_batches].fill(max_tokens);
        for node in (1..leaves).rev() {
            most[node] = most[2 * node].max(most[2 * node + 1]);
        }
        Self { most, leaves, documents: vec![max_documents.unwrap_or(usize::MAX); num_micro_batches] }
    }

    /// Takes the room from the first that has it.
    fn take_first(&mut self, length: i32) -> Option<usize> {
        if self.most[1] < length {
            return None;
        }
        let mut node = 1;
        while node < self.leaves {
            node = 2 * node + usize::from(self.most[2 * node] < length);
        }
        let micro_batch = node - self.leaves;
        self.documents[micro_batch] -= 1;
        self.most[node] = if self.documents[micro_batch] > 0 { self.most[node] - length } else { 0 };
        while node > 1 {
            node /= 2;
            self.most[node] = self.most[2 * node].max(self.most[2 * node + 1]);
        }
        Some(micro_batch)
    }
}
