//! Exchanges items between two bins, so that the heavier one becomes lighter.

use super::bins::Bins;
use super::exchange::{Rules, Size, Teams, exchange};

/// Number of partners that a micro-batch tries, from the lightest on. If tokens run out, most exchanges do not fit, and
/// the time is better spent on other starts.
const PARTNERS: usize = 4;
/// Neighbours of the best bundle that are tried if the best does not fit: for one item for one, and for two for two.
const REACH: [usize; 2] = [4, 16];
/// Stands for "no item".
const NONE: u32 = u32::MAX;

/// At most two items that are given or taken together.
#[derive(Clone, Copy, Debug)]
struct Bundle {
    cost: f64,
    tokens: i64,
    documents: i64,
    places: [u32; 2],
}

const NOTHING: Bundle = Bundle { cost: 0.0, tokens: 0, documents: 0, places: [NONE; 2] };

impl Bundle {
    fn of(bins: &Bins, place: u32) -> Self {
        let item = &bins.items[place as usize];
        let (tokens, documents) = (item.tokens, i64::from(item.documents));
        Self { cost: item.cost, tokens, documents, places: [place, NONE] }
    }

    fn with(self, other: Self) -> Self {
        Self {
            cost: self.cost + other.cost,
            tokens: self.tokens + other.tokens,
            documents: self.documents + other.documents,
            places: [self.places[0], other.places[0]],
        }
    }

    fn items(&self) -> impl Iterator<Item = u32> + use<> {
        self.places.into_iter().filter(|&place| place != NONE)
    }
}

/// Items that one bin gives to another, and items that it gets back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Exchange {
    pub(crate) from: usize,
    pub(crate) to: usize,
    given: Bundle,
    taken: Bundle,
    /// Difference between the cost that is moved and the cost that should be.
    pub(crate) error: f64,
}

impl Exchange {
    pub(crate) fn apply(&self, bins: &mut Bins) {
        self.given.items().for_each(|place| bins.hand_over(place, self.from, self.to));
        self.taken.items().for_each(|place| bins.hand_over(place, self.to, self.from));
    }
}

/// A search for exchanges: its remaining steps and its rules.
pub(crate) struct Leveller {
    /// Steps that remain; a step looks at one or two items.
    pub(crate) steps: usize,
    /// Whether every bin keeps its number of documents.
    pub(crate) keeps_counts: bool,
    /// Most pairs of items in two bins for which [`Size::Two`] is tried: pairs are listed and sorted.
    pub(crate) most_pairs: usize,
    /// Bundles that each of the two bins may give.
    bundles: [Vec<Bundle>; 2],
}

impl Leveller {
    pub(crate) fn new(steps: usize, keeps_counts: bool) -> Self {
        Self { steps, keeps_counts, most_pairs: usize::MAX, bundles: [Vec::new(), Vec::new()] }
    }

    fn spend(&mut self, steps: usize) {
        self.steps = self.steps.saturating_sub(steps);
    }

    /// The exchange that moves a cost nearest to `aim`, if its error is below `error`.
    ///
    /// # Complexity
    /// O(items of both bins); for [`Size::Two`] the square of that, with a sort.
    pub(crate) fn find(
        &mut self,
        bins: &Bins,
        [from, to]: [usize; 2],
        size: Size,
        aim: f64,
        error: f64,
    ) -> Option<Exchange> {
        if !bins.classes.is_empty() && bins.classes[from] != bins.classes[to] {
            return None;
        }
        let pairs = |bin: usize| bins.contents[bin].len().pow(2) / 2;
        if size == Size::Two && pairs(from) + pairs(to) > self.most_pairs {
            return None;
        }
        let mut bundles = std::mem::take(&mut self.bundles);
        for (bundles, bin) in bundles.iter_mut().zip([from, to]) {
            bundles.clear();
            list(bins, bin, size, bundles);
        }
        self.spend(bundles[0].len() + bundles[1].len());
        let best = self.nearest(bins, [from, to], &bundles, size, aim, error);
        self.bundles = bundles;
        best
    }

    fn nearest(
        &self,
        bins: &Bins,
        [from, to]: [usize; 2],
        [has, offers]: &[Vec<Bundle>; 2],
        size: Size,
        aim: f64,
        error: f64,
    ) -> Option<Exchange> {
        let reach = REACH[size as usize];
        let held = bins.contents[from].len();
        let (mut best, mut least, mut turn) = (None, error, 0);
        // The last bundle is empty: nothing to give.
        for given in &has[..has.len() - 1] {
            // As the given bundle gets cheaper, so does the best one to take.
            turn += offers[turn..].iter().take_while(|taken| taken.cost > given.cost - aim).count();
            let mut look = |taken: &Bundle, least: &mut f64| {
                let error = (given.cost - taken.cost - aim).abs();
                // Farther on, the error only grows.
                if error >= *least || error.is_nan() {
                    return true;
                }
                let (tokens, documents) = (given.tokens - taken.tokens, given.documents - taken.documents);
                let empties = taken.documents == 0 && given.items().count() == held;
                let allowed = !empties
                    && (!self.keeps_counts || documents == 0)
                    && bins.has_room(to, tokens, documents)
                    && bins.has_room(from, -tokens, -documents);
                if allowed {
                    *least = error;
                    best = Some(Exchange { from, to, given: *given, taken: *taken, error });
                }
                allowed
            };
            let _ = offers[turn..].iter().take(reach).any(|taken| look(taken, &mut least));
            let _ = offers[..turn].iter().rev().take(reach).any(|taken| look(taken, &mut least));
        }
        best
    }

    /// Lowers the heaviest of some bins, then the next one that can be lowered, until all are within `close` of the
    /// lightest, no exchange is left, or the steps are used up.
    pub(crate) fn level(&mut self, bins: &mut Bins, among: &[usize], close: f64) {
        self.exchange(bins, among, &Rules::new(close, PARTNERS));
    }

    /// Exchanges items of some bins by these rules.
    pub(crate) fn exchange(&mut self, bins: &mut Bins, among: &[usize], rules: &Rules) {
        exchange(&mut Among { bins, among, close: rules.close, search: self }, among.len(), rules);
    }
}

/// Some bins, each a team of its own.
struct Among<'a, 'b> {
    bins: &'a mut Bins<'b>,
    among: &'a [usize],
    /// Difference in load at which bins count as level.
    close: f64,
    search: &'a mut Leveller,
}

impl Teams for Among<'_, '_> {
    type Exchange = Exchange;

    fn load(&self, team: usize) -> f64 {
        self.bins.loads[self.among[team]]
    }

    fn is_spent(&self) -> bool {
        self.search.steps == 0
    }

    fn best(&mut self, pair: [usize; 2], size: Size, least: Option<f64>) -> Option<(f64, Exchange)> {
        let [heavy, light] = pair.map(|team| self.load(team));
        if heavy - light <= self.close {
            return None;
        }
        let aim = (heavy - light) / 2.0;
        // Both end at least a little below the heavier bin's load, so the search ends in spite of rounding.
        let below = least.map_or(f64::INFINITY, |least| least - light - aim).min(aim * (1.0 - 1e-6));
        let found = self.search.find(self.bins, pair.map(|team| self.among[team]), size, aim, below)?;
        Some((light + aim + found.error, found))
    }

    fn apply(&mut self, _: [usize; 2], exchange: Exchange) {
        exchange.apply(self.bins);
    }
}

/// Lists the bundles that a bin may give, costliest first: each item, for [`Size::Two`] also each pair of items, and
/// last the empty bundle.
fn list(bins: &Bins, bin: usize, size: Size, bundles: &mut Vec<Bundle>) {
    let contents = &bins.contents[bin];
    bundles.extend(contents.iter().map(|&place| Bundle::of(bins, place)));
    if size == Size::Two {
        for first in 0..contents.len() {
            for second in first + 1..contents.len() {
                bundles.push(bundles[first].with(bundles[second]));
            }
        }
        bundles.sort_by(|a, b| b.cost.total_cmp(&a.cost));
    }
    bundles.push(NOTHING);
}
