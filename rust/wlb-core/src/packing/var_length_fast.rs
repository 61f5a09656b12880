//! Algorithm 1 for the documents that decide the balance; the light tail is poured.

use crate::cost::CostModel;

use super::plan::{Packing, Placement, whole};
use super::var_length::{self, Bins};
use super::{Method, radix};

/// A document below this share of a micro-batch's fair cost is tiny: pouring it cannot overshoot by more.
const TINY: f64 = 0.0005;
/// How far above the lower bound the heaviest micro-batch may be.
const TOLERANCE: f64 = 1.001;

/// Heavy documents as in Algorithm 1; light ones poured in arrival order, then tiny ones to level.
///
/// Let `T` be the fair share, total cost over `N`. Tiny documents cost at most `0.0005 T` each and `R` a micro-batch in
/// all. Light ones cost at most `R` each: poured in arrival order until a micro-batch reaches `T - R`, they cannot lift it
/// over `T`. Tiny ones then fill every micro-batch up to `T`. Only the heavy rest is sorted, and it is placed as
/// Algorithm 1 places it. The result costs at most the larger of Algorithm 1's maximum and 1.001 times the lower
/// bound; where tokens run out, so that this might not hold, Algorithm 1 itself runs.
///
/// # Complexity
/// O(n + h log N) for `h` heavy documents.
pub(super) fn pack(lengths: &[i32], num_micro_batches: usize, max_tokens: i32, cost_model: &CostModel) -> Packing {
    pour(lengths, num_micro_batches, max_tokens, cost_model)
        .map(|placement| {
            placement.into_packing(Some(Method::VarLengthFast), max_tokens, |index| whole(index, lengths[index]))
        })
        .unwrap_or_else(|| Packing {
            method: Some(Method::VarLengthFast),
            ..var_length::pack(lengths, num_micro_batches, max_tokens, cost_model)
        })
}

/// `None` if the guarantee does not hold.
fn pour(lengths: &[i32], num_micro_batches: usize, max_tokens: i32, cost_model: &CostModel) -> Option<Placement> {
    let share = |cost: f64| cost / num_micro_batches as f64;
    let total: f64 = lengths.iter().map(|&length| cost_model.cost(length)).sum();
    let fair = share(total);
    // Cost never decreases with length, so that classes are intervals of length, told apart without computing a cost.
    let tiny = longest_below(cost_model, fair * TINY, max_tokens);
    let tiny_total: f64 = lengths.iter().filter(|&&length| length <= tiny).map(|&length| cost_model.cost(length)).sum();
    let reserve = share(tiny_total);
    let light = longest_below(cost_model, reserve, max_tokens).max(tiny);

    let mut bins = Bins::new(lengths.len(), num_micro_batches, max_tokens);
    let heavy = lengths.iter().copied().enumerate().filter(|&(_, length)| length > light);
    for (length, index) in radix::descending_keys(heavy) {
        bins.place(index, length, cost_model.cost(length));
    }
    let mut placement = bins.placement;
    if placement.length_fallbacks > 0 || !placement.leftover.is_empty() {
        return None;
    }
    let heavy_max = placement.costs.iter().copied().fold(0.0, f64::max);

    for (class, level) in [(tiny + 1..=light, fair - reserve), (1..=tiny, fair)] {
        let mut micro_batch = 0;
        for (index, &length) in lengths.iter().enumerate().filter(|(_, length)| class.contains(length)) {
            while placement.costs[micro_batch] >= level
                || placement.tokens[micro_batch] + i64::from(length) > i64::from(max_tokens)
            {
                micro_batch += 1;
                if micro_batch == num_micro_batches {
                    return None;
                }
            }
            placement.put(index, micro_batch, length, cost_model.cost(length));
        }
    }
    let max = placement.costs.iter().copied().fold(0.0, f64::max);
    (max <= heavy_max.max(fair * TOLERANCE)).then_some(placement)
}

/// The longest document, up to `limit` tokens, that costs at most `cost`; 0 if none.
fn longest_below(cost_model: &CostModel, cost: f64, limit: i32) -> i32 {
    let (mut below, mut above) = (0_i64, i64::from(limit) + 1);
    while above - below > 1 {
        let middle = (below + above) / 2;
        if cost_model.cost(middle as i32) <= cost { below = middle } else { above = middle }
    }
    below as i32
}
