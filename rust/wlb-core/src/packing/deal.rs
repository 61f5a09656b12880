//! Micro-batches dealt to data-parallel ranks.

use crate::error::{Error, Result, saturating_i64};
use crate::ladder::Ladder;

use super::columns::Columns;
use super::plan::Packing;

impl Packing {
    /// Deals the micro-batches of each step to `dp_size` ranks: equal counts, costs balanced, in schedule order.
    ///
    /// The heaviest micro-batch goes first, each to the rank with the least cost among those that still lack one.
    /// Inside a rank the lightest micro-batches stand at both ends and the heaviest in the middle: a pipeline
    /// multiplies the cost of the first and the last by its depth (fill and drain). A packing that was made for ranks
    /// keeps its order.
    ///
    /// With several columns of costs the ranks wait for one another in each column: a step takes the sum over columns
    /// of the heaviest rank. Two deals are tried: one by the sum of the columns, one by the column in which each
    /// micro-batch is the greatest part. The deal with the shorter step wins; if both are equal, the deal by the sum.
    ///
    /// # Arguments
    /// * `dp_size` - data-parallel ranks.
    ///
    /// # Returns
    /// Rows of micro-batch indices, one after the other: `dp_size` rows for each step.
    ///
    /// # Errors
    /// [`Error::Indivisible`] when `dp_size` does not divide the number of micro-batches of a step: ranks with unequal
    /// counts would deadlock in their gradient reduction. [`Error::Combination`] when the packing was made for other
    /// ranks ([`pack_for_ranks`](crate::packing::pack_for_ranks)).
    ///
    /// # Complexity
    /// O(M log M) to sort `M` micro-batches, and on average a few steps for each.
    ///
    /// # Example
    /// ```
    /// use wlb_core::{CostModel, Lengths, Mask, Packing};
    ///
    /// let lengths = Lengths::new("lengths", &[50, 40, 30, 20])?;
    /// let cost = CostModel::analytic(0.0, 1.0, Mask::Causal)?;
    /// let packing = Packing::from_assignment(&lengths, &[0, 1, 2, 3], 4, 100, &cost)?;
    /// // The first rank trains micro-batches 3 and 0, the second 2 and 1: 70 tokens each.
    /// assert_eq!(packing.deal(2)?, [3, 0, 2, 1]);
    /// # Ok::<(), wlb_core::Error>(())
    /// ```
    pub fn deal(&self, dp_size: usize) -> Result<Vec<usize>> {
        let total = self.num_micro_batches() / self.global_batches;
        if dp_size == 0 || !total.is_multiple_of(dp_size) {
            return Err(Error::Indivisible { argument: "dp_size", value: saturating_i64(dp_size), total });
        }
        if let Some(ranks) = self.ranks {
            let requirement = "the packing was made for another number of ranks; pack again with this dp_size";
            let other = Err(Error::Combination { argument: "dp_size", requirement });
            return if ranks.dp_size == dp_size { Ok((0..total).collect()) } else { other };
        }
        if let Some(columns) = &self.columns {
            return Ok(deal_in_columns(&self.costs, columns, dp_size));
        }
        let steps = self.costs.chunks(total).enumerate();
        Ok(steps.flat_map(|(step, costs)| deal(costs, dp_size).into_iter().map(move |j| step * total + j)).collect())
    }
}

/// Deals the micro-batches of one step: by the sum of the columns, or by the leading column of each micro-batch.
fn deal_in_columns(costs: &[f64], columns: &Columns, dp_size: usize) -> Vec<usize> {
    let timed: Vec<usize> = columns.timed().collect();
    let per_rank = costs.len() / dp_size;
    let load = |micro_batch: usize, column: usize| columns.costs[micro_batch * columns.len() + column];
    let step = |dealt: &[usize]| -> f64 {
        let of_rank = |rank: &[usize], column: usize| rank.iter().map(|&j| load(j, column)).sum::<f64>();
        let most = |&column: &usize| dealt.chunks(per_rank).map(|rank| of_rank(rank, column)).fold(0.0, f64::max);
        timed.iter().map(most).sum()
    };
    let by_sum = deal(costs, dp_size);
    if timed.len() == 1 || per_rank == 1 || dp_size == 1 {
        return by_sum;
    }

    let sums: Vec<f64> = timed.iter().map(|&column| columns.column(column).sum()).collect();
    // The column in which a micro-batch is the greatest part (the first if several are equal), and this part.
    let leading = |j: usize| {
        let parts = timed.iter().zip(&sums).map(|(&k, &sum)| if sum > 0.0 { load(j, k) / sum } else { 0.0 });
        parts.enumerate().fold((0, -1.0), |most, (at, part)| if part > most.1 { (at, part) } else { most })
    };
    let leading: Vec<(usize, f64)> = (0..costs.len()).map(leading).collect();
    let mut greatest_first: Vec<usize> = (0..costs.len()).collect();
    greatest_first.sort_by(|&a, &b| leading[b].1.total_cmp(&leading[a].1));
    let mut ranks = vec![(vec![0.0; timed.len()], Vec::with_capacity(per_rank)); dp_size];
    let mut open: Vec<Ladder> = timed.iter().map(|_| Ladder::new(ranks.iter().map(|_| 0.0))).collect();
    for micro_batch in greatest_first {
        let rank = open[leading[micro_batch].0].lightest();
        let (loads, dealt) = &mut ranks[rank];
        dealt.push(micro_batch);
        for ((sum, &column), open) in loads.iter_mut().zip(&timed).zip(&mut open) {
            *sum += load(micro_batch, column);
            if dealt.len() < per_rank {
                open.set(rank, *sum);
            } else {
                open.remove(rank);
            }
        }
    }
    let by_column = ranks.into_iter().flat_map(|(_, mut dealt)| {
        dealt.sort_by(|&a, &b| costs[b].total_cmp(&costs[a]).then(a.cmp(&b)));
        light_ends(&dealt)
    });
    let by_column: Vec<usize> = by_column.collect();
    if step(&by_column) < step(&by_sum) { by_column } else { by_sum }
}

/// Deals the micro-batches of one step: `dp_size` rows of indices, in the order of [`Packing::deal`].
pub(crate) fn deal(costs: &[f64], dp_size: usize) -> Vec<usize> {
    let per_rank = costs.len() / dp_size;
    let mut heaviest_first: Vec<usize> = (0..costs.len()).collect();
    heaviest_first.sort_by(|&a, &b| costs[b].total_cmp(&costs[a]));

    let mut ranks = vec![(0.0, Vec::with_capacity(per_rank)); dp_size];
    let mut open = Ladder::new(ranks.iter().map(|&(cost, _)| cost));
    for micro_batch in heaviest_first {
        let rank = open.lightest();
        let (cost, dealt) = &mut ranks[rank];
        *cost += costs[micro_batch];
        dealt.push(micro_batch);
        if dealt.len() < per_rank {
            open.set(rank, *cost);
        } else {
            open.remove(rank);
        }
    }
    ranks.into_iter().flat_map(|(_, dealt)| light_ends(&dealt)).collect()
}

/// Reorders items that come heaviest first: lightest first, second lightest last, and so on inwards.
pub(crate) fn light_ends(heaviest_first: &[usize]) -> Vec<usize> {
    let from_lightest = || heaviest_first.iter().rev().copied();
    let rising = from_lightest().step_by(2);
    let falling: Vec<usize> = from_lightest().skip(1).step_by(2).collect();
    rising.chain(falling.into_iter().rev()).collect()
}
