//! Documents from the costliest to the cheapest.

use crate::interrupt::{Meter, STEPS, check};
use crate::longest_first::sort;

/// Bits of a cost that are sorted in linear time: two passes. What they do not tell apart is compared.
const BITS: u32 = 22;

/// Indices of documents from the costliest to the cheapest; equal costs in index order.
///
/// Costs are 0 or above, and finite.
///
/// # Complexity
/// O(n), and a comparison sort of what is nearly equal; at most 2^32 documents.
pub(crate) fn costliest_first(costs: &[f64]) -> impl Iterator<Item = usize> + use<> {
    // Numbers of one sign are in the order of their bits. Zero counts as the least above it.
    let (mut most, mut least) = (0, u64::MAX);
    for cost in costs {
        let bits = cost.to_bits();
        most = most.max(bits);
        // Wraps to the greatest for zero.
        least = least.min(bits.wrapping_sub(1));
    }
    let least = least.saturating_add(1).min(most);
    let shift = (u64::BITS - (most - least).leading_zeros()).saturating_sub(BITS);
    let key = |cost: f64| (most - cost.to_bits().max(least)) >> shift;
    let keys: Vec<u64> = costs.iter().zip(0..).map(|(&cost, at)| key(cost) << 32 | at).collect();
    check();
    let mut sorted = sort(keys, BITS);
    let mut start = 0;
    for end in 1..=sorted.len() {
        if end < sorted.len() && sorted[end] >> 32 == sorted[start] >> 32 {
            continue;
        }
        if end - start > 1 {
            let cost = |key: u64| costs[key as u32 as usize];
            sorted[start..end].sort_unstable_by(|&a, &b| cost(b).total_cmp(&cost(a)).then(a.cmp(&b)));
        }
        start = end;
    }
    // Each of them is then placed.
    let (mut meter, long) = (Meter::default(), sorted.len() >= STEPS);
    sorted.into_iter().map(move |key| {
        if long {
            meter.spend(1);
        }
        key as u32 as usize
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::costliest_first;

    proptest! {
        #[test]
        fn is_a_stable_descending_sort(
            costs in proptest::collection::vec(prop_oneof![Just(0.0), 0.0..1.0, 1.0..1.000001, 0.0..1e300, Just(5e-324)], 0..600),
        ) {
            let mut expected: Vec<usize> = (0..costs.len()).collect();
            expected.sort_by(|&a, &b| f64::total_cmp(&costs[b], &costs[a]));
            prop_assert_eq!(costliest_first(&costs).collect::<Vec<_>>(), expected);
        }
    }
}
