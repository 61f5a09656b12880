//! Improves Algorithm 1's plan where tokens run out before work does.

use crate::cost::CostModel;
use crate::packing::options::Method;
use crate::packing::piece::Piece;
use crate::packing::placement::Placement;
use crate::packing::plan::Packing;

use super::bins::Bins;
use super::documents::Documents;
use super::exchange::exchange;
use super::steepest::steepest;

/// A plan stays as it is if its maximum is at most this multiple of the lower bound.
const CLOSE: f64 = 1.0001;
/// Documents are exchanged until the maximum is at most this multiple of the lower bound.
const NEAR: f64 = 1.0005;
/// Target of [`steepest`] if documents are left over: this part of the way from the lower bound to the maximum.
const RAISED: f64 = 0.75;

/// Algorithm 1, then [`refine`].
///
/// # Complexity
/// The time of [`refine`].
pub(crate) fn pack(lengths: &[i32], num_micro_batches: usize, max_tokens: i32, cost_model: &CostModel) -> Packing {
    let documents = Documents::new(lengths, &cost_model.costs(lengths), max_tokens);
    let empty = Placement::new(lengths.len(), num_micro_batches, cost_model.micro_batch());
    let mut bins = Bins::resume(empty, max_tokens);
    for document in &documents.longest_first {
        bins.place(document.index as usize, document.length, document.cost);
    }
    let placement = improve(bins.placement, || documents);
    let piece = |index| Piece::whole(index, lengths[index]);
    placement.into_packing(Some(Method::Refined), max_tokens, cost_model, piece)
}

/// A plan no worse than `start`: every document placed there is placed, and the maximum cost is not higher. Documents
/// that were left over may be placed as well; other documents of the batch are not touched.
///
/// # Complexity
/// O(n log N) for `n` documents and `N` micro-batches, and a bounded number of exchanges.
pub(crate) fn refine(start: Placement, lengths: &[i32], costs: &[f64], max_tokens: i32) -> Placement {
    improve(start, || Documents::new(lengths, costs, max_tokens))
}

/// Improves a placement. If every micro-batch has spare tokens, `start` is nearly optimal, and only exchanges follow.
/// If tokens run out, Algorithm 1 goes wrong early, because it looks at cost alone until a micro-batch is full;
/// [`steepest`] looks at both from the first document on. Its target is the lower bound, or more if documents are left
/// over: with a higher target more of them find room, which matters more than balance. [`exchange`] then works on the
/// heaviest micro-batch of the better plan.
fn improve(start: Placement, documents: impl FnOnce() -> Documents) -> Placement {
    let ceiling = start.max_cost();
    let mean = start.costs.iter().sum::<f64>() / start.costs.len() as f64;
    if start.leftover.is_empty() && ceiling <= mean * CLOSE {
        return start;
    }
    let documents = documents();
    let mut placed = documents.longest_first.iter().filter(|document| start.assignment[document.index as usize] >= 0);
    // A lower bound on the maximum of any plan that places the same documents.
    let bound = placed.next().map_or(mean, |longest| mean.max(start.empty_cost() + longest.cost));
    if start.leftover.is_empty() && ceiling <= bound * CLOSE {
        return start;
    }

    let mut best = start;
    if best.length_fallbacks > 0 || !best.leftover.is_empty() {
        let raised = if best.leftover.is_empty() { 0.0 } else { RAISED };
        let target = bound + (ceiling - bound).max(0.0) * raised;
        if let Some(found) = steepest(&documents, &best, target, ceiling)
            && found.is_better_than(&best, ceiling)
        {
            best = found;
        }
    }
    exchange(&documents, best, bound * NEAR)
}

impl Placement {
    /// Whether it leaves fewer documents over, or as many at a lower maximum, and costs at most `ceiling`.
    fn is_better_than(&self, other: &Self, ceiling: f64) -> bool {
        let max = self.max_cost();
        max <= ceiling && (self.leftover.len(), max) < (other.leftover.len(), other.max_cost())
    }
}
