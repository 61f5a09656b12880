//! Items that bins hold: documents, or documents that stay together.

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

/// Each document as one item, costliest first.
pub(crate) fn documents(lengths: &[i32], costs: &[f64]) -> Vec<Item> {
    let item = |(index, (&length, &cost)): (usize, (&i32, &f64))| Item {
        cost,
        tokens: i64::from(length),
        documents: 1,
        index: index as u32,
    };
    let mut items: Vec<Item> = lengths.iter().zip(costs).enumerate().map(item).collect();
    sort(&mut items);
    items
}

/// Integers in the order of [`f64::total_cmp`].
pub(super) fn ordered(weight: f64) -> u64 {
    let bits = weight.to_bits();
    if bits >> 63 == 1 { !bits } else { bits | 1 << 63 }
}
