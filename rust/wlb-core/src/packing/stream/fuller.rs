//! A step with too few tokens gets more of them, at the cost of its balance.
//!
//! The release rules weigh balance against waiting and do not look at how many tokens a step trains. So a step can be
//! nearly empty while much waits. For example, `N` documents of one token were carried over: they are placed first, one
//! in each micro-batch, and then no document of the full `max_tokens` finds room. The gradient of a handful of tokens
//! is noise, so there the number of tokens matters more than balance.

use crate::packing::placement::Placement;

use super::config::PackerConfig;
use super::outlier_queue::Waiting;

/// The first of three placements of a step with `min_tokens` or more: the one given; all that is there, in `order`,
/// where the tokens are fewest; the same into the first micro-batch with room. If none has so many, the one with the
/// most.
///
/// The last holds `min_tokens`, everything, or, with two micro-batches or more, `N / 2` (rounded down) times
/// `max_tokens`: unless everything found room, any two neighbours hold more than `max_tokens`, for the first document
/// of the second found no room in the first. In all three a document that finds no room was tried after documents that
/// leave too little of it in every micro-batch: who was first in `order` waits for nobody behind.
///
/// # Complexity
/// O(n log N).
pub(super) fn fuller(
    given: Placement,
    pieces: &[Waiting],
    order: &[usize],
    min_tokens: i64,
    config: &PackerConfig,
) -> Placement {
    let cost = |index: usize| config.cost_model.cost(pieces[index].piece.length);
    let by_tokens = || {
        let mut bins = config.bins(pieces.len());
        for &index in order {
            bins.place_by_tokens(index, pieces[index].piece.length, cost(index));
        }
        bins.placement
    };
    let first_fit = || {
        let mut placement = config.empty(pieces.len());
        let mut rooms = Rooms::new(config.num_micro_batches, config.max_tokens);
        for &index in order {
            let length = pieces[index].piece.length;
            match rooms.take_first(length) {
                Some(micro_batch) => {
                    placement.put(index, micro_batch, length, cost(index));
                    placement.length_fallbacks += 1; // none was placed by its cost
                }
                None => placement.leftover.push(index),
            }
        }
        placement
    };
    let tokens = |placement: &Placement| placement.tokens.iter().sum::<i64>();
    let mut fullest = given;
    for other in [&by_tokens as &dyn Fn() -> Placement, &first_fit] {
        if tokens(&fullest) >= min_tokens {
            break;
        }
        let other = other();
        if tokens(&other) > tokens(&fullest) {
            fullest = other;
        }
    }
    fullest
}

/// Finds the first micro-batch with room: a tree over them, with the most room below every node.
struct Rooms {
    /// The root is node 1, the children of `k` are `2 k` and `2 k + 1`; leaves that no micro-batch has are full.
    most: Vec<i32>,
    leaves: usize,
}

impl Rooms {
    fn new(num_micro_batches: usize, max_tokens: i32) -> Self {
        let leaves = num_micro_batches.next_power_of_two();
        let mut most = vec![0; 2 * leaves];
        most[leaves..leaves + num_micro_batches].fill(max_tokens);
        for node in (1..leaves).rev() {
            most[node] = most[2 * node].max(most[2 * node + 1]);
        }
        Self { most, leaves }
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
        self.most[node] -= length;
        while node > 1 {
            node /= 2;
            self.most[node] = self.most[2 * node].max(self.most[2 * node + 1]);
        }
        Some(micro_batch)
    }
}
