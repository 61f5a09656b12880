//! Improves Algorithm 1's plan where tokens run out before work does.

use crate::balance::{Bins, Item, Leveller, Limits, Rule, Rules, Size, documents, in_order};
use crate::cost::CostModel;
use crate::longest_first::longest_first;
use crate::packing::options::Method;
use crate::packing::piece::Piece;
use crate::packing::placement::Placement;
use crate::packing::plan::Packing;

use super::var_length;

/// A plan stays as it is if its maximum is at most this multiple of the lower bound.
const CLOSE: f64 = 1.0001;
/// Documents are exchanged until the maximum is at most this multiple of the lower bound.
const NEAR: f64 = 1.0005;
/// Target of [`Rule::SteepestWithin`] if documents are left over: this part of the way from the lower bound to the
/// maximum.
const RAISED: f64 = 0.75;
/// Number of partners that the heaviest micro-batch tries, from the lightest on.
const PARTNERS: usize = 4;
/// Most steps of exchanges, besides one for each document. A step takes about ten nanoseconds.
const STEPS: usize = 1 << 8;
/// Most pairs of documents in two micro-batches for which two are exchanged for two: with more documents in a
/// micro-batch, one for one is enough.
const PAIRS: usize = 1 << 8;

/// Algorithm 1, then [`refine`].
///
/// # Complexity
/// The time of [`refine`].
pub(crate) fn pack(lengths: &[i32], num_micro_batches: usize, max_tokens: i32, cost_model: &CostModel) -> Packing {
    let costs = cost_model.costs(lengths);
    let empty = Placement::new(lengths.len(), num_micro_batches, cost_model.micro_batch());
    let order: Vec<(i32, usize)> = longest_first(lengths).collect();
    let start = var_length::place(order.iter().copied(), &costs, empty, max_tokens);
    let piece = |index| Piece::whole(index, lengths[index]);
    // Under a cost model the longest documents are the costliest.
    let placement = improve(start, max_tokens, || in_order(order.iter().map(|&(_, index)| index), lengths, &costs));
    placement.into_packing(Some(Method::Refined), max_tokens, cost_model, piece)
}

/// A plan no worse than `start`: every document placed there is placed, and the maximum cost is not higher. Documents
/// that were left over may be placed as well; other documents of the batch are not touched.
///
/// # Complexity
/// O(n log n) for `n` documents, and a bounded number of exchanges.
pub(crate) fn refine(start: Placement, lengths: &[i32], costs: &[f64], max_tokens: i32) -> Placement {
    improve(start, max_tokens, || documents(lengths, costs))
}

/// Improves a placement; `items` are the documents, costliest first.
///
/// If every micro-batch has spare tokens, `start` is nearly optimal, and only exchanges follow. If tokens run out,
/// Algorithm 1 goes wrong early, because it looks at cost alone until a micro-batch is full; [`Rule::SteepestWithin`]
/// looks at both from the first document on. Its target is the lower bound, or more if documents are left over: with a
/// higher target more of them find room, which matters more than balance. Exchanges then make the heaviest micro-batch
/// of the better plan lighter.
fn improve(start: Placement, max_tokens: i32, items: impl FnOnce() -> Vec<Item>) -> Placement {
    let (ceiling, empty, count) = (start.max_cost(), start.empty_cost(), start.costs.len());
    let mean = start.costs.iter().sum::<f64>() / count as f64;
    if start.leftover.is_empty() && ceiling <= mean * CLOSE {
        return start;
    }
    let items = items();
    let micro_batch = |place: u32| usize::try_from(start.assignment[items[place as usize].index as usize]).ok();
    let placed: Vec<u32> = (0..items.len() as u32).filter(|&place| micro_batch(place).is_some()).collect();
    // A lower bound on the maximum of any plan that places the same documents.
    let bound = placed.first().map_or(mean, |&costliest| mean.max(empty + items[costliest as usize].cost));
    if start.leftover.is_empty() && ceiling <= bound * CLOSE {
        return start;
    }

    let limits = Limits { tokens: i64::from(max_tokens), documents: i64::MAX };
    let targets = |raised: f64| vec![bound - empty + raised; count];
    let mut found = None;
    if start.length_fallbacks > 0 || !start.leftover.is_empty() {
        let raised = if start.leftover.is_empty() { 0.0 } else { (ceiling - bound).max(0.0) * RAISED };
        let mut bins = Bins::new(&items, limits, &targets(raised));
        if bins.pour(&placed, Rule::SteepestWithin, None) {
            let mut is_left = vec![false; items.len()];
            start.leftover.iter().for_each(|&index| is_left[index] = true);
            let left: Vec<u32> =
                (0..).zip(&items).filter(|(_, item)| is_left[item.index as usize]).map(|(place, _)| place).collect();
            bins.pour(&left, Rule::LeastLoad, Some(ceiling - bound - raised));
            bins.loads.iter_mut().for_each(|load| *load += raised);
            let most = bound + bins.loads.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let more = bins.contents.iter().map(Vec::len).sum::<usize>() > placed.len();
            found = Some(bins).filter(|_| most < ceiling || more && most <= ceiling);
        }
    }
    let mut best = found.unwrap_or_else(|| {
        let mut bins = Bins::new(&items, limits, &targets(0.0));
        placed.iter().for_each(|&place| micro_batch(place).into_iter().for_each(|j| bins.put(place, j)));
        bins
    });
    let all: Vec<usize> = (0..count).collect();
    let sizes = &[Size::One, Size::Two];
    let rules = Rules { low: bound * (NEAR - 1.0), sizes, sets_aside: false, ..Rules::new(0.0, PARTNERS) };
    let mut search = Leveller::new(STEPS + items.len(), false);
    search.most_pairs = PAIRS;
    search.exchange(&mut best, &all, &rules);

    let mut placement = start.emptied();
    for (j, contents) in best.contents.iter().enumerate() {
        for item in contents.iter().map(|&place| &items[place as usize]) {
            placement.put(item.index as usize, j, item.tokens as i32, item.cost);
        }
    }
    placement.leftover = start.leftover.iter().copied().filter(|&index| placement.assignment[index] < 0).collect();
    placement.length_fallbacks = start.length_fallbacks;
    let rank = |placement: &Placement| (placement.leftover.len(), placement.max_cost());
    // Costs are summed anew: rounding may lift the maximum.
    if placement.max_cost() <= ceiling && rank(&placement) < rank(&start) { placement } else { start }
}
