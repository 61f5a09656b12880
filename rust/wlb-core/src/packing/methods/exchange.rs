//! Documents exchanged between two micro-batches, so that the heaviest becomes lighter.

use std::ops::Range;

use crate::packing::placement::Placement;

use super::documents::Documents;
use super::steepest::ordered;
use super::tournament::Tournament;

/// Most steps of all searches together: `STEPS`, and `STEPS_EACH` for each micro-batch, at most `STEPS_MOST`. After
/// these, only the lightest micro-batch is tried as a partner, with `STEPS_MOST` further steps and one for each
/// document.
///
/// A step takes about ten nanoseconds; the first `STEPS_MOST` take about as long as Algorithm 1 for a few hundred
/// documents. More steps would lower the maximum by a hundredth of a percent on average.
const STEPS: usize = 96;
const STEPS_EACH: usize = 40;
const STEPS_MOST: usize = 256;

/// Lowers the maximum cost by exchanges between the heaviest micro-batch and one other.
///
/// The heaviest micro-batch gives one document for at most one. If no partner has such an exchange, it gives up to two
/// for up to two. Partners are tried from the lightest on. The first partner with an exchange after which both cost
/// less than the heaviest did makes its best exchange. So the costs, sorted from the heaviest on, only descend. The
/// search ends if no exchange is left, if the maximum is `low_enough`, or if the steps are used up.
///
/// # Complexity
/// O(n + N), O(log N) for each partner, and O(n) steps, of which every partner takes some.
pub(crate) fn exchange(documents: &Documents, start: Placement, low_enough: f64) -> Placement {
    if start.max_cost() <= low_enough {
        return start;
    }
    let mut contents = Contents::new(documents, &start);
    while let heaviest = contents.heaviest()
        && contents.costs[heaviest] > low_enough
        && let Some((partner, exchange)) = contents.find(heaviest)
    {
        contents.apply(heaviest, partner, &exchange);
    }
    contents.into_placement(start)
}

/// An exchange: items that leave the heaviest micro-batch, items that come back, and the costs of both after it.
struct Exchange {
    given: [usize; 2],
    taken: [usize; 2],
    costs: [f64; 2],
}

/// A document of a micro-batch; `rank` is its place among all documents, longest first.
#[derive(Clone, Copy)]
struct Item {
    cost: f64,
    length: i32,
    rank: u32,
}

impl Item {
    fn tokens(&self) -> i64 {
        i64::from(self.length)
    }
}

/// Spare room of a micro-batch's list, in documents.
const SPARE: usize = 3;

/// No document: 0 tokens that cost nothing.
const NONE: Item = Item { cost: 0.0, length: 0, rank: u32::MAX };

/// Documents of each micro-batch, in the order that searches need.
struct Contents<'a> {
    documents: &'a Documents,
    /// Rank of each micro-batch's longest document at the start, and for each document the rank of the next one there.
    first: Vec<u32>,
    next: Vec<u32>,
    /// Items of micro-batches that were looked at, one micro-batch after the other; each list ends with [`NONE`].
    items: Vec<Item>,
    /// Range of each micro-batch's items; empty for micro-batches that were never looked at.
    spans: Vec<Span>,
    tokens: Vec<i64>,
    costs: Vec<f64>,
    /// Micro-batches by cost, lightest first and heaviest first; ties by index.
    lightest: Tournament,
    heaviest: Tournament,
    /// Partners of the present search; all but the last are taken out of `lightest`.
    partners: Vec<usize>,
    /// Number of steps that searches may still take.
    steps: usize,
    /// Steps after these, which try the lightest partner alone.
    last_steps: usize,
}

/// Range of [`Contents::items`], with spare room behind it.
#[derive(Clone, Default)]
struct Span {
    start: usize,
    end: usize,
    room_end: usize,
    /// Whether an exchange changed this span.
    changed: bool,
}

/// A search for the best exchange between the heaviest micro-batch and a partner.
struct ExchangeSearch<'a> {
    has: &'a [Item],
    offers: &'a [Item],
    /// Costs of both micro-batches.
    costs: [f64; 2],
    /// Tokens that both micro-batches have free.
    room: [i64; 2],
    /// Cost of the heavier micro-batch after the best exchange so far.
    least: f64,
    best: Option<Exchange>,
}

impl ExchangeSearch<'_> {
    /// Costs of both micro-batches after an exchange.
    fn after(&self, given: f64, taken: f64) -> [f64; 2] {
        let moved = given - taken;
        [self.costs[0] - moved, self.costs[1] + moved]
    }

    #[inline]
    fn consider(&mut self, given: [usize; 2], taken: [usize; 2], costs: [f64; 2]) {
        let max = costs[0].max(costs[1]);
        if max < self.least {
            self.least = max;
            self.best = Some(Exchange { given, taken, costs });
        }
    }

    /// Tries one document for at most one. The shorter the given document, the shorter the other must be: for the token
    /// limits, and for equal costs of both micro-batches.
    fn one_for_one(&mut self, left: &mut usize) {
        let (has, offers) = (self.has, self.offers);
        *left = left.saturating_sub(has.len() + offers.len());
        let (given_none, taken_none) = (has.len() - 1, offers.len() - 1);
        let (mut from, mut to, mut turn) = (0, 0, 0);
        for (i, given) in has[..given_none].iter().enumerate() {
            let (most, fewest) = (given.tokens() + self.room[0], given.tokens() - self.room[1]);
            from += offers[from..].iter().take_while(|taken| taken.tokens() > most).count();
            to += offers[to..].iter().take_while(|taken| taken.tokens() >= fewest).count();
            let is_before = |taken: &&Item| {
                let [heavy, light] = self.after(given.cost, taken.cost);
                heavy > light
            };
            turn += offers[turn..].iter().take_while(is_before).count();
            let at = turn.clamp(from, to);
            for k in around(at, from, to) {
                let taken = offers[k].cost;
                self.consider([i, given_none], [taken_none, k], self.after(given.cost, taken));
            }
        }
    }

    /// Tries up to two documents for up to two. As the third gets shorter, the fourth may get longer.
    fn two_for_two(&mut self, left: &mut usize) {
        let (has, offers) = (self.has, self.offers);
        let (given_none, none) = (has.len() - 1, offers.len() - 1);
        for i in 0..given_none {
            let mut first = 0;
            for j in i + 1..has.len() {
                let (tokens, cost) = (has[i].tokens() + has[j].tokens(), has[i].cost + has[j].cost);
                let (mut from, mut to, mut turn) = (offers.len(), offers.len(), offers.len());
                if *left == 0 {
                    return;
                }
                *left -= 1;
                // A longer third document leaves the heavy micro-batch too heavy.
                first += offers[first..].partition_point(|third| self.after(cost, third.cost)[0] >= self.least);
                for k in first..offers.len() {
                    if *left == 0 {
                        return;
                    }
                    *left -= 1;
                    let third = offers[k];
                    let next = (k + 1).min(none);
                    if self.after(cost, third.cost + offers[next].cost)[1] >= self.least {
                        // A shorter third document makes the light micro-batch too heavy.
                        break;
                    }
                    let lacking = tokens - third.tokens();
                    let (most, fewest) = (lacking + self.room[0], lacking - self.room[1]);
                    from = next.max(boundary(&offers[..from], |fourth| fourth.tokens() > most));
                    to = next.max(boundary(&offers[..to], |fourth| fourth.tokens() >= fewest));
                    if from >= to {
                        continue;
                    }
                    turn = boundary(&offers[..turn], |fourth| {
                        let [heavy, light] = self.after(cost, third.cost + fourth.cost);
                        heavy > light
                    });
                    let at = turn.clamp(from, to);
                    for l in around(at, from, to) {
                        self.consider([i, j], [k, l], self.after(cost, third.cost + offers[l].cost));
                    }
                }
            }
        }
    }
}

/// The indices next to `at` on both sides, within `from..to`.
fn around(at: usize, from: usize, to: usize) -> Range<usize> {
    at.saturating_sub(1).max(from)..(at + 1).min(to)
}

/// [`slice::partition_point`] for a boundary that is near the end.
#[inline]
fn boundary(items: &[Item], is_before: impl Fn(&Item) -> bool) -> usize {
    let (mut end, mut step) = (items.len(), 1);
    while end > 0 && !is_before(&items[end - 1]) {
        end = end.saturating_sub(step);
        step *= 2;
    }
    if step <= 2 {
        return end;
    }
    end + items[end..(end + step / 2).min(items.len())].partition_point(is_before)
}

impl<'a> Contents<'a> {
    fn new(documents: &'a Documents, start: &Placement) -> Self {
        let mut first = vec![NONE.rank; start.tokens.len()];
        let mut next = vec![NONE.rank; documents.longest_first.len()];
        let mut placed = 0;
        for (rank, document) in documents.longest_first.iter().enumerate().rev() {
            if let Ok(micro_batch) = usize::try_from(start.assignment[document.index as usize]) {
                next[rank] = std::mem::replace(&mut first[micro_batch], rank as u32);
                placed += 1;
            }
        }
        Self {
            documents,
            first,
            next,
            items: Vec::new(),
            spans: vec![Span::default(); start.tokens.len()],
            tokens: start.tokens.clone(),
            costs: start.costs.clone(),
            lightest: Tournament::new(start.costs.iter().map(|&cost| ordered(cost))),
            heaviest: Tournament::new(start.costs.iter().map(|&cost| !ordered(cost))),
            partners: Vec::new(),
            steps: STEPS_MOST.min(STEPS + STEPS_EACH * start.tokens.len()),
            last_steps: STEPS_MOST + placed,
        }
    }

    /// The first partner, from the lightest on, that has an exchange, and its best exchange.
    fn find(&mut self, heaviest: usize) -> Option<(usize, Exchange)> {
        let mut left = self.steps;
        if left == 0 && self.last_steps == 0 {
            return None;
        }
        let mut found = None;
        self.look_at(heaviest);
        let mut partners = std::mem::take(&mut self.partners);
        'search: for at_most_two in [false, true] {
            for turn in 0.. {
                if turn == partners.len() {
                    partners.last().inspect(|&&last| self.lightest.set(last, Tournament::NONE));
                    let Some(next) = self.lightest.least() else { break };
                    partners.push(next);
                }
                let partner = partners[turn];
                if self.costs[partner] >= self.costs[heaviest] {
                    break;
                }
                self.look_at(partner);
                if self.steps == 0 {
                    let steps = self.items(heaviest).len() + self.items(partner).len();
                    self.last_steps = self.last_steps.saturating_sub(steps);
                }
                let both = [heaviest, partner];
                let mut search = ExchangeSearch {
                    has: self.items(heaviest),
                    offers: self.items(partner),
                    costs: both.map(|j| self.costs[j]),
                    room: both.map(|j| self.documents.max_tokens - self.tokens[j]),
                    least: self.costs[heaviest],
                    best: None,
                };
                if at_most_two {
                    search.two_for_two(&mut left);
                } else {
                    search.one_for_one(&mut left);
                }
                found = search.best.map(|exchange| (partner, exchange));
                if found.is_some() || left == 0 {
                    break 'search;
                }
            }
        }
        for partner in partners.drain(..) {
            self.lightest.set(partner, ordered(self.costs[partner]));
        }
        self.partners = partners;
        self.steps = left;
        found
    }

    fn items(&self, j: usize) -> &[Item] {
        &self.items[self.spans[j].start..self.spans[j].end]
    }

    fn look_at(&mut self, j: usize) {
        if self.spans[j].end > 0 {
            return;
        }
        let start = self.items.len();
        let mut rank = self.first[j];
        while rank != NONE.rank {
            let document = &self.documents.longest_first[rank as usize];
            self.items.push(Item { cost: document.cost, length: document.length, rank });
            rank = self.next[rank as usize];
        }
        self.items.push(NONE);
        self.spans[j].end = self.items.len();
        self.spans[j].start = start;
        self.add_room(j);
    }

    /// Adds spare room after the last items.
    fn add_room(&mut self, j: usize) {
        self.items.extend([NONE; SPARE]);
        self.spans[j].room_end = self.items.len();
    }

    fn apply(&mut self, heavy: usize, light: usize, exchange: &Exchange) {
        let given = self.take_out(heavy, exchange.given);
        let taken = self.take_out(light, exchange.taken);
        self.put_in(light, given);
        self.put_in(heavy, taken);
        for (j, cost) in [heavy, light].into_iter().zip(exchange.costs) {
            self.costs[j] = cost;
            self.spans[j].changed = true;
            self.lightest.set(j, ordered(cost));
            self.heaviest.set(j, !ordered(cost));
        }
    }

    /// The heaviest micro-batch, the lowest index if several are equal.
    fn heaviest(&self) -> usize {
        self.heaviest.least().unwrap_or(0)
    }

    fn take_out(&mut self, j: usize, places: [usize; 2]) -> [Item; 2] {
        let start = self.spans[j].start;
        let items = places.map(|place| self.items[start + place]);
        // The later place first, so that the earlier one stays valid. The last item is [`NONE`] and is never removed.
        for place in [places[0].max(places[1]), places[0].min(places[1])] {
            let (at, end) = (start + place, self.spans[j].end);
            let item = self.items[at];
            if item.rank != NONE.rank {
                self.items.copy_within(at + 1..end, at);
                self.spans[j].end -= 1;
                self.tokens[j] -= item.tokens();
            }
        }
        items
    }

    fn put_in(&mut self, j: usize, items: [Item; 2]) {
        for item in items.into_iter().filter(|item| item.rank != NONE.rank) {
            if self.spans[j].end == self.spans[j].room_end {
                let Span { start, end, .. } = self.spans[j];
                self.spans[j].start = self.items.len();
                self.items.extend_from_within(start..end);
                self.spans[j].end = self.items.len();
                self.add_room(j);
            }
            let Span { start, end, .. } = self.spans[j];
            let at = start + self.items(j).partition_point(|other| other.rank < item.rank);
            self.items.copy_within(at..end, at + 1);
            self.items[at] = item;
            self.spans[j].end += 1;
            self.tokens[j] += item.tokens();
        }
    }

    /// `start` with all exchanges, unless rounding lifts the maximum: the costs are summed anew.
    fn into_placement(mut self, mut start: Placement) -> Placement {
        let max = start.max_cost();
        let changed: Vec<usize> = (0..self.spans.len()).filter(|&j| self.spans[j].changed).collect();
        self.costs.copy_from_slice(&start.costs);
        for &j in &changed {
            self.costs[j] = self.items(j).iter().fold(start.empty_cost(), |sum, item| sum + item.cost);
        }
        if self.costs.iter().copied().fold(0.0, f64::max) >= max {
            return start;
        }
        for j in changed {
            for item in self.items(j).iter().take_while(|item| item.rank != NONE.rank) {
                let document = self.documents.longest_first[item.rank as usize];
                start.assignment[document.index as usize] = j as i32;
            }
        }
        (start.tokens, start.costs) = (self.tokens, self.costs);
        start
    }
}
