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
/// Most items for each rank for [`Effort::Tightest`]: with more, exchanges make ranks level.
const FEW: usize = 16;
/// Number of times that [`tightest`] halves the interval of loads.
const HALVINGS: usize = 12;

/// How hard a share-out searches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effort {
    /// The least load first, then the exchange of the first partner that has one.
    Quick,
    /// The least load first, then the best exchange of all partners, and, if nobody has one, of two for two.
    Thorough,
    /// [`tightest`], then exchanges as for [`Effort::Thorough`]; for few items on each rank.
    Tightest,
}

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
    pub(crate) effort: Effort,
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
    let first = Bins::filled(items, limits, &vec![0.0; shared.ranks], rule).filter(is_equal);
    let mut bins = match (shared.effort, first) {
        (Effort::Tightest, _) if shared.equal_documents || items.len() > FEW * shared.ranks => return None,
        (Effort::Tightest, first) => tightest(items, limits, shared.ranks, heaviest(&first?))?,
        (_, Some(bins)) => bins,
        (_, None) => shared.division?.filled(items, limits)?,
    };
    let all: Vec<usize> = (0..shared.ranks).collect();
    let mut rules = Rules::new(shared.close, PARTNERS);
    if shared.effort != Effort::Quick {
        rules = Rules { sizes: &[Size::One, Size::Two], enough: f64::NEG_INFINITY, ..rules };
    }
    let mut search = Leveller::new(STEPS, shared.equal_documents);
    search.most_pairs = PAIRS;
    search.exchange(&mut bins, &all, &rules);
    Some(bins)
}

fn heaviest(bins: &Bins) -> f64 {
    bins.loads.iter().copied().fold(f64::NEG_INFINITY, f64::max)
}

/// Items on ranks by [`Rule::TightestWithin`], for the least load at which all find room, by bisection; `None` if there
/// is none below `most`.
///
/// Where each rank has few items, the least load first pairs the costliest with the cheapest, and no exchange improves
/// pairs. Here the costliest may stay alone (Coffman, Garey, Johnson 1978, MULTIFIT).
///
/// # Complexity
/// O(n log N) for `n` items on `N` ranks, for each halving.
fn tightest<'a>(items: &'a [Item], limits: Limits, ranks: usize, most: f64) -> Option<Bins<'a>> {
    let mean = items.iter().map(|item| item.cost).sum::<f64>() / ranks as f64;
    let two = if items.len() > ranks { items[ranks - 1].cost + items[ranks].cost } else { 0.0 };
    let (mut low, mut high) = (items.first()?.cost.max(mean).max(two), most);
    let mut best = None;
    for _ in 0..HALVINGS {
        if low >= high {
            break;
        }
        let target = f64::midpoint(low, high);
        match Bins::filled(items, limits, &vec![target; ranks], Rule::TightestWithin) {
            Some(mut bins) => {
                bins.loads.iter_mut().for_each(|load| *load += target);
                high = heaviest(&bins);
                best = Some(bins);
            }
            None => low = target,
        }
    }
    best
}
