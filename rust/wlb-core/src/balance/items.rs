//! Items that bins hold: documents, or documents that stay together.

use crate::costliest_first::costliest_first;

/// A document, or the documents of one group together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Item {
    pub(crate) cost: f64,
    pub(crate) tokens: i64,
    pub(crate) documents: u32,
    /// Index of the document or group.
    pub(crate) index: u32,
}

/// Sorts items from the costliest to the cheapest; equal costs longest first, then by index.
pub(crate) fn sort(items: &mut [Item]) {
    items.sort_unstable_by(|a, b| b.cost.total_cmp(&a.cost).then(b.tokens.cmp(&a.tokens)).then(a.index.cmp(&b.index)));
}

/// The limits of a bin.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) tokens: i64,
    pub(crate) documents: i64,
}

/// Each document as one item, costliest first ([`sort`]).
///
/// # Complexity
/// O(n), plus a comparison sort of documents that cost nearly or exactly the same.
pub(crate) fn documents(lengths: &[i32], costs: &[f64]) -> Vec<Item> {
    let mut items = in_order(costliest_first(costs), lengths, costs);
    let in_disorder = |alike: &&mut [Item]| !alike.is_sorted_by(|a, b| a.tokens >= b.tokens);
    items.chunk_by_mut(|a, b| a.cost == b.cost).filter(in_disorder).for_each(sort);
    items
}

/// Documents in this order, each as one item.
pub(crate) fn in_order(order: impl Iterator<Item = usize>, lengths: &[i32], costs: &[f64]) -> Vec<Item> {
    let item = |index: usize| Item {
        cost: costs[index],
        tokens: i64::from(lengths[index]),
        documents: 1,
        index: index as u32,
    };
    order.map(item).collect()
}

/// Integers in the order of [`f64::total_cmp`].
pub(super) fn ordered(weight: f64) -> u64 {
    let bits = weight.to_bits();
    if bits >> 63 == 1 { !bits } else { bits | 1 << 63 }
}
