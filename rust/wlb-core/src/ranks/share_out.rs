//! Shares groups of documents that have to stay together out to ranks.

use crate::balance::{Bins, Item, Leveller, Limits, Rule, sort};

use super::plan::{RANKS, STEPS};

/// Limits of a share-out.
pub(crate) struct Shared {
    /// Number of ranks.
    pub(crate) ranks: usize,
    /// Most tokens of a rank.
    pub(crate) tokens: i64,
    /// Most documents of a rank.
    pub(crate) documents: i64,
    /// Whether all ranks get equally many documents (they differ by at most one).
    pub(crate) equal_documents: bool,
    /// Difference in cost at which ranks count as level.
    pub(crate) close: f64,
}

/// Indices of the items of each rank, with costs as level as exchanges make them; `None` if no way was found.
pub(crate) fn share_out(mut items: Vec<Item>, shared: &Shared) -> Option<Vec<Vec<u32>>> {
    sort(&mut items);
    let limits = Limits { tokens: shared.tokens, documents: shared.documents };
    let rule = if shared.equal_documents { Rule::FewestDocuments } else { Rule::LeastLoad };
    let mut bins = Bins::filled(&items, limits, &vec![0.0; shared.ranks], rule)?;
    let documents = |held: &Vec<u32>| held.iter().map(|&place| items[place as usize].documents).sum::<u32>();
    let held: Vec<u32> = bins.contents.iter().map(documents).collect();
    let spread = held.iter().max().unwrap_or(&0) - held.iter().min().unwrap_or(&0);
    if shared.equal_documents && spread > 1 {
        return None;
    }
    let mut search = Leveller::new(STEPS, shared.equal_documents);
    search.partners = RANKS;
    search.level(&mut bins, &(0..shared.ranks).collect::<Vec<usize>>(), shared.close);
    let indices = |held: &Vec<u32>| held.iter().map(|&place| items[place as usize].index).collect();
    Some(bins.contents.iter().map(indices).collect())
}
