//! Rearranges documents that lie in micro-batches already, for ranks or within a limit on their number.

use crate::packing::deal;
use crate::packing::options::{Method, Ranks, Together};
use crate::packing::placement::Placement;

use super::options::RankOptions;
use super::plan::{Batch, Contents};

/// Rearranges the same documents in as many micro-batches, listed rank by rank in schedule order. It uses
/// [`pack_for_ranks`](super::pack_for_ranks) if that finds a plan, else exchanges that begin with the placement. The
/// step is never longer than that of the placement dealt as it is. Documents that are left over stay left over.
///
/// # Arguments
/// * `start` - a placement within the limits.
/// * `ranks` - the ranks to deal to; if `None`, the heaviest micro-batch counts as the step.
///
/// # Complexity
/// The time of [`pack_for_ranks`](super::pack_for_ranks) with a given number of micro-batches.
pub(crate) fn arrange(
    start: Placement,
    lengths: &[i32],
    costs: &[f64],
    max_tokens: i32,
    max_documents: Option<usize>,
    ranks: Option<Ranks>,
) -> Placement {
    let total = start.tokens.len();
    let options = RankOptions {
        num_micro_batches: Some(total),
        fewest: false,
        multiple_of: 1,
        max_tokens,
        method: Method::VarLength,
        ranks,
        groups: Vec::new(),
        together: Together::Rank,
        equal_documents: false,
        max_documents,
    };
    let placed: Vec<usize> = (0..lengths.len()).filter(|&index| start.assignment[index] >= 0).collect();
    let of_placed: Vec<i32> = placed.iter().map(|&index| lengths[index]).collect();
    let costs_of_placed: Vec<f64> = placed.iter().map(|&index| costs[index]).collect();
    let mut held = vec![Vec::new(); total];
    for (document, &index) in placed.iter().enumerate() {
        held[start.assignment[index] as usize].push(document as u32);
    }
    let rounds = total / options.dp_size();
    let as_it_is = dealt(&held, &start.costs, options.dp_size());
    // Cannot fail: only groups and equal counts are ever refused.
    let Ok(mut batch) = Batch::new(&of_placed, &costs_of_placed, &options) else { return start };
    let mut costliest: Vec<usize> = (0..total).collect();
    costliest.sort_by(|&a, &b| start.costs[b].total_cmp(&start.costs[a]));
    batch.start = Some(costliest.into_iter().map(|j| held[j].clone()).collect());
    let step = |contents: &Contents| {
        let sum = |held: &Vec<u32>| held.iter().map(|&document| costs_of_placed[document as usize]).sum();
        let costs: Vec<f64> = contents.iter().flatten().map(sum).collect();
        ranks.map_or_else(|| costs.iter().copied().fold(0.0, f64::max), |ranks| ranks.step_cost(&costs))
    };
    let best = match batch.attempt(rounds) {
        Some(arranged) if step(&arranged) <= step(&as_it_is) => arranged,
        _ => as_it_is,
    };

    let mut micro_batches = vec![0; placed.len()];
    for (micro_batch, contents) in best.iter().flatten().enumerate() {
        contents.iter().for_each(|&document| micro_batches[document as usize] = micro_batch);
    }
    let mut placement = start.emptied();
    for (&index, micro_batch) in placed.iter().zip(micro_batches) {
        placement.put(index, micro_batch, lengths[index], costs[index]);
    }
    placement.leftover = start.leftover;
    placement.length_fallbacks = start.length_fallbacks;
    placement
}

/// Deals micro-batches to ranks without changing them.
fn dealt(held: &[Vec<u32>], costs: &[f64], dp_size: usize) -> Contents {
    let order = deal(costs, dp_size);
    order.chunks(held.len() / dp_size).map(|rank| rank.iter().map(|&j| held[j].clone()).collect()).collect()
}
