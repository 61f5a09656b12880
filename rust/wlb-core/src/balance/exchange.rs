//! Exchanges between teams, from the heaviest to the lightest.

use crate::ladder::Ladder;

/// Most items that go each way in an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Size {
    /// One for at most one.
    One,
    /// Up to two for up to two: where limits bind, one long document goes for two short ones with as many tokens
    /// together.
    Two,
}

/// Teams that wait for each other: bins, ranks with all their bins, or bins as one column of costs sees them.
pub(crate) trait Teams {
    /// What two teams exchange.
    type Exchange;

    /// Load of a team. The heaviest team is to become lighter.
    fn load(&self, team: usize) -> f64;

    /// Whether the search has no steps left.
    fn is_spent(&self) -> bool;

    /// The best exchange of this size that makes the first team lighter, and its score: the load of the heavier team
    /// after it, or that with a price. `None` if there is no exchange, or none with a score below `least`.
    fn best(&mut self, pair: [usize; 2], size: Size, least: Option<f64>) -> Option<(f64, Self::Exchange)>;

    /// Makes an exchange between two teams.
    fn apply(&mut self, pair: [usize; 2], exchange: Self::Exchange);
}

/// What differs between searches.
#[derive(Clone, Copy)]
pub(crate) struct Rules {
    /// Difference in load at which teams count as level.
    pub(crate) close: f64,
    /// Load of the heaviest team at which the search ends.
    pub(crate) low: f64,
    /// Number of partners of the heaviest team that are tried, from the lightest on.
    pub(crate) partners: usize,
    /// Sizes of exchanges. A size is tried if no partner has an exchange of the size before it.
    pub(crate) sizes: &'static [Size],
    /// No further partner is tried if the score is at most this much above the mean of the two teams. Infinity: the
    /// first partner with an exchange takes part in it. Minus infinity: the best exchange of all partners is made.
    pub(crate) enough: f64,
    /// Whether a heaviest team without an exchange is set aside, and the next one is tried.
    pub(crate) sets_aside: bool,
    /// Most exchanges.
    pub(crate) most: usize,
}

impl Rules {
    /// One item for at most one, with the first partner that has an exchange.
    pub(crate) fn new(close: f64, partners: usize) -> Self {
        let sizes = &[Size::One];
        Self {
            close,
            low: f64::NEG_INFINITY,
            partners,
            sizes,
            enough: f64::INFINITY,
            sets_aside: true,
            most: usize::MAX,
        }
    }
}

/// Makes the heaviest team lighter, again and again: until all teams are level, no exchange is left, or the steps are
/// used up. Returns the number of exchanges.
///
/// # Complexity
/// O(log N) and the time of [`Teams::best`] for each partner that is tried.
pub(crate) fn exchange<T: Teams>(teams: &mut T, count: usize, rules: &Rules) -> usize {
    let mut by_load = Ladder::new((0..count).map(|team| teams.load(team)));
    let (mut made, mut left) = (0, count);
    while left > 1 && made < rules.most {
        let (heavy, light) = (by_load.heaviest(), by_load.lightest());
        let level = teams.load(heavy) - teams.load(light) <= rules.close || teams.load(heavy) <= rules.low;
        if level || teams.is_spent() {
            break;
        }
        if let Some((partner, exchange)) = find(teams, &by_load, heavy, rules) {
            teams.apply([heavy, partner], exchange);
            made += 1;
            [heavy, partner].into_iter().for_each(|team| by_load.set(team, teams.load(team)));
        } else if rules.sets_aside {
            by_load.remove(heavy);
            left -= 1;
        } else {
            break;
        }
    }
    made
}

/// The exchange that the heaviest team makes, and its partner.
fn find<T: Teams>(teams: &mut T, by_load: &Ladder, heavy: usize, rules: &Rules) -> Option<(usize, T::Exchange)> {
    for &size in rules.sizes {
        let mut best: Option<(usize, f64, T::Exchange)> = None;
        for partner in by_load.ascending().filter(|&team| team != heavy).take(rules.partners) {
            let loads = [heavy, partner].map(|team| teams.load(team));
            let least = best.as_ref().map(|&(_, score, _)| score);
            if let Some((score, exchange)) = teams.best([heavy, partner], size, least) {
                best = Some((partner, score, exchange));
                if score <= (loads[0] + loads[1]) / 2.0 + rules.enough {
                    break;
                }
            }
        }
        if let Some((partner, _, exchange)) = best {
            return Some((partner, exchange));
        }
    }
    None
}
