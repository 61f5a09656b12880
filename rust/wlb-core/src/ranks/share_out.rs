//! Shares groups of documents that have to stay together out to ranks.

use crate::balance::{Bins, Item, Leveller, Limits, Rule, Rules, Size};

use super::division::Division;

/// Most steps of exchanges: a tenth of a millisecond.
pub(super) const STEPS: usize = 1 << 15;
/// Number of partners with which a rank tries to exchange.
const PARTNERS: usize = 12;
/// Most pairs of groups on two ranks for which two are exchanged for two: with many groups on a rank, one for one is
/// enough.
const PAIRS: usize = 1 << 10;

/// Limits of a share-out.
pub(crate) struct Shared<'a> {
    /// Number of ranks.
    pub(crate) ranks: usize,
    /// Most tokens of a rank.
    pub(crate) tokens: i64,
    /// Most documents of a rank.
    pub(crate) documents: i64,
    /// Whether all ranks get equally many documents (they differ by at most one).
    pub(crate) equal_documents: bool,
    /// Equal numbers of documents for groups that the rule [`Rule::FewestDocuments`] does not divide equally.
    pub(crate) division: Option<&'a Division>,
    /// Difference in cost at which ranks count as level.
    pub(crate) close: f64,
    /// Whether the best exchange of all partners is made, not that of the first partner that has one, and, if nobody
    /// has one, of two for two.
    pub(crate) thorough: bool,
}

/// Items on ranks, with costs as level as exchanges make them; `None` if no way was found.
///
/// # Arguments
/// * `items` - costliest first.
pub(crate) fn share_out<'a>(items: &'a [Item], shared: &Shared<'_>) -> Option<Bins<'a>> {
    let limits = Limits { tokens: shared.tokens, documents: shared.documents };
    let rule = if shared.equal_documents { Rule::FewestDocuments } else { Rule::LeastLoad };
    let is_equal = |bins: &Bins| {
        let documents = |held: &Vec<u32>| held.iter().map(|&place| items[place as usize].documents).sum::<u32>();
        let held: Vec<u32> = bins.contents.iter().map(documents).collect();
        !shared.equal_documents || held.iter().max().unwrap_or(&0) - held.iter().min().unwrap_or(&0) <= 1
    };
    let mut bins = match Bins::filled(items, limits, &vec![0.0; shared.ranks], rule).filter(is_equal) {
        Some(bins) => bins,
        None => shared.division?.filled(items, limits)?,
    };
    let all: Vec<usize> = (0..shared.ranks).collect();
    let mut rules = Rules::new(shared.close, PARTNERS);
    if shared.thorough {
        rules = Rules { sizes: &[Size::One, Size::Two], enough: f64::NEG_INFINITY, ..rules };
    }
    let mut search = Leveller::new(STEPS, shared.equal_documents);
    search.most_pairs = PAIRS;
    search.exchange(&mut bins, &all, &rules);
    Some(bins)
}
