//! Documents from the costliest to the cheapest.

use crate::longest_first::sort;

/// Leading bits of a cost that the radix sort looks at, in two passes. Costs that agree in these bits are compared.
const BITS: u32 = 22;

/// Indices of documents from the costliest to the cheapest; equal costs in index order.
///
/// Costs are 0 or above, and finite.
///
/// # Complexity
/// O(n), plus a comparison sort of nearly equal costs; at most 2^32 documents.
pub(crate) fn costliest_first(costs: &[f64]) -> impl Iterator<Item = usize> + use<> {
    // Floats of one sign sort like their bits. Zero counts as the least cost above zero.
    let (floor, most) = range(costs);
    let (least, most) = (floor.to_bits(), most.to_bits());
    let shift = (u64::BITS - (most - least).leading_zeros()).saturating_sub(BITS);
    let key = |cost: f64| (most - if cost > floor { cost } else { floor }.to_bits()) >> shift;
    let keys: Vec<u64> = costs.iter().zip(0..).map(|(&cost, at)| key(cost) << 32 | at).collect();
    let mut sorted = sort(keys, BITS);
    let cost = |key: u64| costs[key as u32 as usize];
    let mut end = 1;
    while end < sorted.len() {
        let (above, key) = (sorted[end - 1], sorted[end]);
        // Documents with equal keys mostly cost the same and are in index order already.
        if above >> 32 != key >> 32 || cost(above) >= cost(key) {
            end += 1;
            continue;
        }
        let start = sorted[..end].partition_point(|&other| other >> 32 < key >> 32);
        end += sorted[end..].partition_point(|&other| other >> 32 == key >> 32);
        sorted[start..end].sort_unstable_by(|&a, &b| cost(b).total_cmp(&cost(a)).then(a.cmp(&b)));
    }
    sorted.into_iter().map(|key| key as u32 as usize)
}

/// The least cost above zero and the greatest cost; both are zero if all costs are.
fn range(costs: &[f64]) -> (f64, f64) {
    let wider = |least: &mut f64, most: &mut f64, cost: f64| {
        let above = if cost > 0.0 { cost } else { f64::INFINITY };
        *least = if above < *least { above } else { *least };
        *most = if cost > *most { cost } else { *most };
    };
    // Four comparisons side by side, since each comparison waits for the result of the one before it.
    let (mut least, mut most) = ([f64::INFINITY; 4], [0.0; 4]);
    let (quadruples, rest) = costs.as_chunks::<4>();
    for quadruple in quadruples {
        for lane in 0..4 {
            wider(&mut least[lane], &mut most[lane], quadruple[lane]);
        }
    }
    rest.iter().for_each(|&cost| wider(&mut least[0], &mut most[0], cost));
    let most = most.into_iter().fold(0.0, f64::max);
    (least.into_iter().fold(most, f64::min), most)
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
