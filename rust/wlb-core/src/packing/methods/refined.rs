//! Algorithm 1's plan, made better where tokens run out before work does.

use crate::cost::CostModel;
use crate::ladder::Ladder;
use crate::packing::options::Method;
use crate::packing::piece::Piece;
use crate::packing::placement::Placement;
use crate::packing::plan::Packing;

use super::documents::Documents;
use super::exchange::exchange;
use super::var_length;

/// A plan is left as it is once its maximum is this close to the lower bound.
const CLOSE: f64 = 1.0001;
/// Most plans made by [`steepest`], each for another target cost.
const TARGETS: usize = 3;
/// No further target is tried once the maximum is this close to the lower bound: exchanges do the rest, in less time.
const NEAR: f64 = 1.001;
/// Most micro-batches that all of them together look at: so many for every document and micro-batch, and so many more, which are enough
/// for any batch of some hundred documents. Algorithm 1 takes as long for a few of them.
const LOOKS_EACH: usize = 8;
const LOOKS_MORE: usize = 1 << 17;

/// Algorithm 1, then [`refine`].
///
/// # Complexity
/// As [`refine`].
pub(in crate::packing) fn pack(
    lengths: &[i32],
    num_micro_batches: usize,
    max_tokens: i32,
    cost_model: &CostModel,
) -> Packing {
    let (start, costs) = var_length::place(lengths, num_micro_batches, max_tokens, cost_model);
    refine(start, lengths, &costs, max_tokens)
        .into_packing(Some(Method::Refined), max_tokens, cost_model, |index| Piece::whole(index, lengths[index]))
}

/// A plan no worse than `start`: every document placed there is placed, and the maximum cost is not higher. What was left over
/// there may be placed as well; other documents of the batch are left alone.
///
/// Where every micro-batch has tokens to spare, `start` is next to optimal and is given back. Where tokens run out,
/// Algorithm 1 goes wrong early: it looks at cost alone until a micro-batch is full. [`steepest`] looks at both from the
/// first document on, for a few targets between the lower bound and the best maximum found; [`exchange`] then works on
/// the heaviest micro-batch of the best plan.
///
/// # Complexity
/// O(n + N), like Algorithm 1's plan for most batches, and about twice its time: a bounded number of micro-batches looked at
/// for each document, and of exchanges tried.
pub(in crate::packing) fn refine(start: Placement, lengths: &[i32], costs: &[f64], max_tokens: i32) -> Placement {
    let ceiling = start.max_cost();
    let placed = start.assignment.iter().zip(costs).filter(|&(&micro_batch, _)| micro_batch >= 0);
    let largest = start.empty_cost() + placed.map(|(_, &cost)| cost).fold(0.0, f64::max);
    // No plan that places as much has a lower maximum.
    let bound = largest.max(start.costs.iter().sum::<f64>() / start.costs.len() as f64);
    let is_within =
        |placement: &Placement, factor: f64| placement.leftover.is_empty() && placement.max_cost() <= bound * factor;
    if is_within(&start, CLOSE) {
        return start;
    }

    let documents = Documents::new(lengths, costs, max_tokens);
    let better = |best: Placement, other: Placement| if other.is_better_than(&best, ceiling) { other } else { best };
    let (mut below, mut above, mut target) = (bound, bound.max(ceiling), bound);
    let mut best = start.clone();
    let mut looks = LOOKS_EACH * (lengths.len() + start.tokens.len()) + LOOKS_MORE;
    for _ in 0..TARGETS {
        let found = steepest(&documents, &start, target, ceiling, &mut looks);
        if found.as_ref().is_some_and(|found| found.max_cost() <= target) {
            above = target;
        } else {
            below = target;
        }
        target = below + (above - below) * 0.5;
        best = found.into_iter().fold(best, better);
        if is_within(&best, CLOSE) {
            return best;
        }
        if is_within(&best, NEAR) || looks == 0 {
            break;
        }
    }
    // Costs are summed anew there: rounding may lift a maximum that exchanges could hardly lower.
    exchange(&documents, &best, bound * CLOSE).into_iter().fold(best, better)
}

impl Placement {
    fn max_cost(&self) -> f64 {
        self.costs.iter().copied().fold(0.0, f64::max)
    }

    /// Leaves fewer documents over, or as many at a lower maximum cost; and costs at most `ceiling`.
    fn is_better_than(&self, other: &Self, ceiling: f64) -> bool {
        let max = self.max_cost();
        max <= ceiling && (self.leftover.len(), max) < (other.leftover.len(), other.max_cost())
    }
}

/// Longest first, each to the micro-batch that lacks the most cost per token of its room, among those with room for it
/// whose cost stays within `target`; else to the least cost that has room.
///
/// Longer documents cost more per token. A micro-batch that has few tokens left but much cost to reach `target` must get
/// long ones, one with a heavy document and room to spare can take the many short ones: so both run out together.
///
/// `None` where a document that `start` places finds no room. What `start` left over is tried last, and placed where the
/// cost stays within `ceiling`. `None`, too, and no `looks` left, where that takes more of them.
fn steepest(
    documents: &Documents,
    start: &Placement,
    target: f64,
    ceiling: f64,
    looks: &mut usize,
) -> Option<Placement> {
    let mut placement = start.emptied();
    placement.length_fallbacks = start.length_fallbacks;
    let num_micro_batches = start.tokens.len();
    let room = |placement: &Placement, j: usize| documents.max_tokens - placement.tokens[j];
    // The steepest is the lightest of the ladder.
    let slope = |placement: &Placement, j: usize| match room(placement, j) {
        0 => f64::INFINITY,
        tokens => (placement.costs[j] - target) / tokens as f64,
    };
    let least_cost = |placement: &Placement, length: i32| {
        let with_room = (0..num_micro_batches).filter(|&j| room(placement, j) >= i64::from(length));
        with_room.min_by(|&a, &b| placement.costs[a].total_cmp(&placement.costs[b]))
    };
    let mut by_slope = Ladder::new((0..num_micro_batches).map(|j| slope(&placement, j)));
    for &index in &documents.longest_first {
        let index = index as usize;
        if start.assignment[index] < 0 {
            continue;
        }
        let (length, cost) = (documents.lengths[index], documents.costs[index]);
        let fits = |j: usize| room(&placement, j) >= i64::from(length) && placement.costs[j] + cost <= target;
        let looked = by_slope.ascending().take(*looks).enumerate().find(|&(_, j)| fits(j));
        let j = match looked {
            Some((others, j)) => {
                *looks -= others + 1;
                j
            }
            None => {
                *looks = looks.saturating_sub(2 * num_micro_batches);
                least_cost(&placement, length).filter(|_| *looks > 0)?
            }
        };
        placement.put(index, j, length, cost);
        by_slope.set(j, slope(&placement, j));
    }
    let most_room = (0..num_micro_batches).map(|j| room(&placement, j)).max().unwrap_or(0);
    for &index in &start.leftover {
        let (length, cost) = (documents.lengths[index], documents.costs[index]);
        if i64::from(length) > most_room {
            placement.leftover.push(index);
            continue;
        }
        *looks = looks.saturating_sub(num_micro_batches);
        if *looks == 0 {
            return None;
        }
        match least_cost(&placement, length).filter(|&j| placement.costs[j] + cost <= ceiling) {
            Some(j) => placement.put(index, j, length, cost),
            None => placement.leftover.push(index),
        }
    }
    Some(placement)
}
