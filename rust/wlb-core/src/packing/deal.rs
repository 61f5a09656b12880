//! Micro-batches dealt to data-parallel ranks.

use crate::error::{Error, Result};

use super::plan::Packing;
use super::saturating_i64;

impl Packing {
    /// Deals the micro-batches to `dp_size` ranks: equal counts, costs balanced, in schedule order.
    ///
    /// Heaviest first, each to the rank with the least cost that still lacks one. Inside a rank the lightest
    /// micro-batches stand at both ends and the heaviest in the middle: the first and the last are the ones whose
    /// cost a pipeline multiplies by its depth (fill and drain).
    ///
    /// Returns `dp_size` rows of `N / dp_size` micro-batch indices, concatenated.
    ///
    /// # Errors
    /// [`Error::Indivisible`] when `dp_size` does not divide the number of micro-batches: ranks with unequal
    /// counts would deadlock in their gradient reduction.
    ///
    /// # Complexity
    /// O(N log N + N dp_size).
    pub fn deal(&self, dp_size: usize) -> Result<Vec<usize>> {
        let total = self.num_micro_batches();
        if dp_size == 0 || !total.is_multiple_of(dp_size) {
            return Err(Error::Indivisible { argument: "dp_size", value: saturating_i64(dp_size), total });
        }
        let per_rank = total / dp_size;
        let mut heaviest_first: Vec<usize> = (0..total).collect();
        heaviest_first.sort_by(|&a, &b| self.costs[b].total_cmp(&self.costs[a]).then(a.cmp(&b)));

        let mut ranks = vec![(0.0_f64, Vec::with_capacity(per_rank)); dp_size];
        for micro_batch in heaviest_first {
            let open = ranks.iter_mut().filter(|(_, dealt)| dealt.len() < per_rank);
            if let Some((cost, dealt)) = open.min_by(|a, b| a.0.total_cmp(&b.0)) {
                *cost += self.costs[micro_batch];
                dealt.push(micro_batch);
            }
        }
        Ok(ranks.into_iter().flat_map(|(_, dealt)| light_ends(&dealt)).collect())
    }
}

/// Reorders heaviest-first items: lightest first, second lightest last, and so on inwards.
fn light_ends(heaviest_first: &[usize]) -> Vec<usize> {
    let from_lightest = || heaviest_first.iter().rev().copied();
    let rising = from_lightest().step_by(2);
    let falling: Vec<usize> = from_lightest().skip(1).step_by(2).collect();
    rising.chain(falling.into_iter().rev()).collect()
}
