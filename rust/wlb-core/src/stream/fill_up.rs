//! Gives a step with too few tokens more of them, at the cost of its balance.
//!
//! The release rules weigh balance against waiting and ignore how many tokens a step trains, so a step can be nearly
//! empty while many documents wait. Example: `N` documents of one token were carried over. They are placed first, one
//! in each micro-batch, and then no document of the full `max_tokens` finds room. The gradient of a handful of tokens
//! is noise, so in such a step the number of tokens matters more than balance.

use crate::ladder::Ladder;
use crate::packing::methods::columns::{Placed, Priced};

/// Tries up to three placements of a step and returns the first with at least `min_tokens`: the given one; all
/// documents in `order`, each where the tokens are fewest; all documents in `order`, each in the first micro-batch with
/// room. If none has that many tokens, the placement with the most is returned.
///
/// The third placement holds `min_tokens`, or every document, or, with at least two micro-batches, `N / 2` (rounded
/// down) times `max_tokens`: unless every document found room, any two neighbours hold more than `max_tokens`, because
/// the first document of the second found no room in the first. In all three placements a document is left over only if
/// the documents tried before it leave too little room in every micro-batch. So the first in `order` waits for no later
/// document.
///
/// The first `due` documents of `order` are due. A placement that leaves one of them over is skipped if the best one so
/// far leaves none over. The due documents then fill nearly half of the room by themselves, so the best one so far
/// holds as much.
///
/// Limits of columns and of the number of documents are kept as well; with such limits there is no promise about the
/// tokens of a step.
///
/// # Arguments
/// * `due` - number of documents at the start of `order` that must leave if possible.
///
/// # Complexity
/// O(n log N); O(n N) if a column has a limit.
pub(super) fn fill_up(given: Placed, priced: &Priced<'_>, order: &[usize], due: usize, min_tokens: i64) -> Placed {
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

/// Puts each document where the tokens are fewest; with limits, among the micro-batches that keep them.
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
        // Without limits, if the micro-batch with the fewest tokens has no room, no other has.
        let tried = if priced.costs.is_limited() { priced.num_micro_batches } else { 1 };
        let found = by_tokens.ascending().take(tried).find(|&j| priced.has_room(&placed, j, index));
        put(priced, &mut placed, index, found);
        if let Some(j) = found {
            by_tokens.set(j, placed.placement.tokens[j] as f64);
        }
    }
    placed
}

/// Puts each document in the first micro-batch with room.
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
            placed.placement.length_fallbacks += 1; // no document is placed by cost here
        }
        None => placed.placement.leftover.push(index),
    }
}

/// Finds the first micro-batch with room: a tree whose nodes hold the most room below them.
struct Rooms {
    /// The root is node 1, the children of `k` are `2 k` and `2 k + 1`; leaves beyond the last micro-batch have no
    /// room.
    most: Vec<i32>,
    leaves: usize,
    /// Number of documents that each micro-batch may still take; if it is 0, the micro-batch has no room.
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

    /// Takes room from the first micro-batch that has enough.
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
