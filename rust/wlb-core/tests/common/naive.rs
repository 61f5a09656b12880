//! The specification, written out: slow, obvious, and without a line of the fast code.
#![allow(dead_code, reason = "each test file uses a part of it")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::cmp::Reverse;

use wlb_core::cost::LocalMask;
use wlb_core::packing::{Piece, Ranks, Sync};
use wlb_core::sharding::Segment;
use wlb_core::stream::{Oversize, PackerConfig, Release, StepShape, StreamMethod};
use wlb_core::{CostModel, Mask};

/// What a packing says, in the plainest form.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Plan {
    pub(crate) micro_batches: Vec<Vec<Piece>>,
    pub(crate) assignment: Vec<i32>,
    pub(crate) tokens: Vec<i64>,
    pub(crate) costs: Vec<f64>,
    pub(crate) leftover: Vec<Piece>,
    pub(crate) length_fallbacks: usize,
}

impl Plan {
    fn empty(num_documents: usize, num_micro_batches: usize, cost: &CostModel) -> Self {
        Self::of_cost(num_documents, num_micro_batches, cost.micro_batch())
    }

    /// Of micro-batches that cost so much without documents.
    fn of_cost(num_documents: usize, num_micro_batches: usize, empty: f64) -> Self {
        Self {
            micro_batches: vec![Vec::new(); num_micro_batches],
            assignment: vec![-1; num_documents],
            tokens: vec![0; num_micro_batches],
            costs: vec![empty; num_micro_batches],
            leftover: Vec::new(),
            length_fallbacks: 0,
        }
    }

    /// Lists the pieces of each micro-batch in their order.
    fn list(&mut self, pieces: &[Piece]) {
        for (j, listed) in self.micro_batches.iter_mut().enumerate() {
            *listed = (0..pieces.len()).filter(|&i| self.assignment[i] == j as i32).map(|i| pieces[i]).collect();
        }
    }

    fn put(&mut self, micro_batch: usize, piece: Piece, cost: f64) {
        self.micro_batches[micro_batch].push(piece);
        self.tokens[micro_batch] += i64::from(piece.length);
        self.costs[micro_batch] += cost;
    }
}

fn whole(index: usize, length: i32) -> Piece {
    Piece { id: index as i64, start: 0, length }
}

/// Indices from the longest document to the shortest, ties by index.
pub(crate) fn longest_first(lengths: &[i32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    order.sort_by_key(|&index| (Reverse(lengths[index]), index));
    order
}

/// The first index with the least value.
fn first_least<T: PartialOrd>(values: impl IntoIterator<Item = (usize, T)>) -> Option<usize> {
    let mut best: Option<(usize, T)> = None;
    for (index, value) in values {
        if best.as_ref().is_none_or(|(_, least)| value < *least) {
            best = Some((index, value));
        }
    }
    best.map(|(index, _)| index)
}

/// Micro-batch `j` is what lies in tokens `j*S .. (j+1)*S` of the concatenation.
pub(crate) fn original(lengths: &[i32], num_micro_batches: usize, max_tokens: i32, cost: &CostModel) -> Plan {
    let mut plan = Plan::empty(lengths.len(), num_micro_batches, cost);
    let mut begin = 0_i64;
    for (index, &length) in lengths.iter().enumerate() {
        let end = begin + i64::from(length);
        let part = |from: i64, to: i64| {
            let (from, to) = (from.max(begin), to.min(end));
            (from < to).then(|| Piece { id: index as i64, start: (from - begin) as i32, length: (to - from) as i32 })
        };
        for j in 0..num_micro_batches {
            let cut = j as i64 * i64::from(max_tokens);
            if let Some(piece) = part(cut, cut + i64::from(max_tokens)) {
                plan.put(j, piece, cost.cost(piece.length));
                if piece.length == length {
                    plan.assignment[index] = j as i32;
                }
            }
        }
        plan.leftover.extend(part(num_micro_batches as i64 * i64::from(max_tokens), i64::MAX));
        begin = end;
    }
    plan
}

/// Longest first, to the least pairs with room; cut at the boundary when it fits nowhere.
pub(crate) fn fixed_length(lengths: &[i32], num_micro_batches: usize, max_tokens: i32, cost: &CostModel) -> Plan {
    let mut plan = Plan::empty(lengths.len(), num_micro_batches, cost);
    let mut pairs = vec![0_i128; num_micro_batches];
    for index in longest_first(lengths) {
        let mut rest = whole(index, lengths[index]);
        while rest.length > 0 {
            let room: Vec<i64> = plan.tokens.iter().map(|tokens| i64::from(max_tokens) - tokens).collect();
            let fits = (0..num_micro_batches).filter(|&j| room[j] >= i64::from(rest.length));
            let most_room = first_least((0..num_micro_batches).map(|j| (j, -room[j]))).unwrap_or(0);
            let (j, taken) = match first_least(fits.map(|j| (j, pairs[j]))) {
                Some(j) => (j, rest.length),
                None if room[most_room] > 0 => (most_room, room[most_room] as i32),
                None => {
                    plan.leftover.push(rest);
                    break;
                }
            };
            plan.put(j, Piece { length: taken, ..rest }, cost.cost(taken));
            pairs[j] += naive_pairs(cost.mask(), taken);
            if taken == lengths[index] {
                plan.assignment[index] = j as i32;
            }
            rest = Piece { start: rest.start + taken, length: rest.length - taken, ..rest };
        }
    }
    for pieces in &mut plan.micro_batches {
        pieces.sort_by_key(|piece| (piece.id, piece.start));
    }
    plan
}

/// Pairs under a window or in chunks, query by query.
pub(crate) fn naive_local_pairs(mask: LocalMask, length: i32) -> u64 {
    let keys = |query: i32| match mask {
        LocalMask::Window(size) => (query + 1).min(size),
        LocalMask::Chunk(size) => query % size + 1,
    };
    (0..length).map(|query| keys(query) as u64).sum()
}

/// Pairs of a whole document.
pub(crate) fn naive_pairs(mask: Mask, length: i32) -> i128 {
    let d = i128::from(length);
    match mask {
        Mask::Causal => d * (d + 1) / 2,
        Mask::Full => d * d,
    }
}

/// Algorithm 1 for documents in arrival order.
pub(crate) fn var_length(lengths: &[i32], num_micro_batches: usize, max_tokens: i32, cost: &CostModel) -> Plan {
    let pieces: Vec<Piece> = lengths.iter().enumerate().map(|(index, &length)| whole(index, length)).collect();
    let documents = Costs::by(cost, &pieces);
    algorithm_1(&pieces, &longest_first(lengths), &Holds::new(num_micro_batches, max_tokens), &documents)
}

/// What is filled: so many micro-batches, or ranks with all of theirs, and what each may hold.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Holds {
    n: usize,
    tokens: i64,
    documents: i64,
    /// Micro-batches of each.
    rounds: i64,
}

impl Holds {
    fn new(n: usize, max_tokens: i32) -> Self {
        Self { n, tokens: i64::from(max_tokens), documents: i64::from(i32::MAX), rounds: 1 }
    }

    fn micro_batches(config: &PackerConfig) -> Self {
        let documents = config.shape.max_documents.map_or(i64::from(i32::MAX), |most| most as i64);
        Self { documents, ..Self::new(config.num_micro_batches, config.max_tokens) }
    }

    /// What the adaptive rule makes level.
    fn levelled(config: &PackerConfig) -> Self {
        let all = Self::micro_batches(config);
        let Some(Ranks { dp_size, sync: Sync::Step }) = config.shape.ranks else { return all };
        let rounds = (all.n / dp_size) as i64;
        Self { n: dp_size, tokens: all.tokens * rounds, documents: all.documents * rounds, rounds }
    }

    /// What a document counts for: as many tokens as leave room for no more documents than there may be.
    fn size(&self, piece: &Piece) -> i64 {
        let limited = self.documents < i64::from(i32::MAX);
        let share = self.tokens / self.documents + i64::from(self.tokens % self.documents != 0);
        i64::from(piece.length).max(if limited { share } else { 1 })
    }

    fn nothing(&self, documents: usize, costs: &Costs) -> Plan {
        Plan::of_cost(documents, self.n, costs.empty * self.rounds as f64)
    }

    fn fits(&self, plan: &Plan, j: usize, piece: &Piece) -> bool {
        plan.tokens[j] + i64::from(piece.length) <= self.tokens && (plan.micro_batches[j].len() as i64) < self.documents
    }

    /// Where the sizes are fewest.
    fn emptiest(&self, plan: &Plan) -> usize {
        let size = |j: usize| plan.micro_batches[j].iter().map(|piece| self.size(piece)).sum::<i64>();
        first_least((0..self.n).map(|j| (j, size(j)))).unwrap_or(0)
    }
}

/// What the pieces of a step cost, and a micro-batch without any.
pub(crate) struct Costs {
    pub(crate) of: Vec<f64>,
    pub(crate) empty: f64,
}

impl Costs {
    fn by(model: &CostModel, pieces: &[Piece]) -> Self {
        let of = pieces.iter().map(|piece| model.cost(piece.length)).collect();
        Self { of, empty: model.micro_batch() }
    }
}

/// Places `pieces` in the given order: least cost; else fewest tokens; else left over.
fn algorithm_1(pieces: &[Piece], order: &[usize], holds: &Holds, costs: &Costs) -> Plan {
    let mut plan = holds.nothing(pieces.len(), costs);
    place(&mut plan, pieces, order, holds, costs);
    // Listed as they came, not as they were placed.
    plan.list(pieces);
    plan
}

/// The same, from what is placed on.
fn place(plan: &mut Plan, pieces: &[Piece], order: &[usize], holds: &Holds, costs: &Costs) {
    for &index in order {
        let piece = pieces[index];
        let least_cost = first_least(plan.costs.iter().copied().enumerate()).unwrap_or(0);
        let fewest_tokens = holds.emptiest(plan);
        let j = if holds.fits(plan, least_cost, &piece) {
            least_cost
        } else if holds.fits(plan, fewest_tokens, &piece) {
            plan.length_fallbacks += 1;
            fewest_tokens
        } else {
            plan.leftover.push(piece);
            continue;
        };
        plan.put(j, piece, costs.of[index]);
        plan.assignment[index] = j as i32;
    }
}

/// Algorithm 1, made better.
pub(crate) fn refined(lengths: &[i32], num_micro_batches: usize, max_tokens: i32, cost: &CostModel) -> Plan {
    refine(var_length(lengths, num_micro_batches, max_tokens, cost), lengths, max_tokens, cost)
}

/// A plan by slope where tokens ran out; then exchanges with the heaviest micro-batch. Pieces are `whole`.
fn refine(start: Plan, lengths: &[i32], max_tokens: i32, cost: &CostModel) -> Plan {
    let costs: Vec<f64> = lengths.iter().map(|&length| cost.cost(length)).collect();
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    order.sort_by(|&a, &b| costs[b].total_cmp(&costs[a]).then(lengths[b].cmp(&lengths[a])));
    let placed: Vec<usize> = order.iter().copied().filter(|&index| start.assignment[index] >= 0).collect();
    let (n, empty) = (start.costs.len(), cost.micro_batch());
    let max = |plan: &Plan| plan.costs.iter().copied().fold(0.0, f64::max);
    let (mean, ceiling) = (start.costs.iter().sum::<f64>() / n as f64, max(&start));
    let bound = placed.first().map_or(mean, |&index| mean.max(empty + costs[index]));
    if start.leftover.is_empty() && ceiling <= bound * 1.0001 {
        return start;
    }
    let nothing = |target: f64| Held {
        lengths,
        costs: &costs,
        order: &order,
        max_tokens: i64::from(max_tokens),
        at: vec![None; lengths.len()],
        loads: vec![-target; n],
    };
    let mut best = nothing(bound - empty);
    placed.iter().for_each(|&index| best.put(index, start.assignment[index] as usize));
    if start.length_fallbacks > 0 || !start.leftover.is_empty() {
        let raised = if start.leftover.is_empty() { 0.0 } else { (ceiling - bound).max(0.0) * 0.75 };
        let mut other = nothing(bound - empty + raised);
        if placed.iter().all(|&index| other.put_by_slope(index)) {
            let is_left = |index: &usize| start.leftover.iter().any(|piece| piece.id as usize == *index);
            for index in order.iter().copied().filter(is_left) {
                let lightest = first_least(other.with_room(index).into_iter().map(|j| (j, other.loads[j])));
                let fits = |&j: &usize| other.loads[j] + costs[index] <= ceiling - bound - raised;
                lightest.filter(fits).into_iter().for_each(|j| other.put(index, j));
            }
            other.loads.iter_mut().for_each(|load| *load += raised);
            let most = bound + other.loads.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let more = other.at.iter().flatten().count() > placed.len();
            best = if most < ceiling || more && most <= ceiling { other } else { best };
        }
    }
    best.exchange(bound * (1.0005 - 1.0));

    let mut plan = Plan { length_fallbacks: start.length_fallbacks, ..Plan::empty(lengths.len(), n, cost) };
    for (index, j) in order.iter().filter_map(|&index| Some((index, best.at[index]?))) {
        plan.put(j, whole(index, lengths[index]), costs[index]);
        plan.assignment[index] = j as i32;
    }
    plan.micro_batches.iter_mut().for_each(|pieces| pieces.sort_by_key(|piece| piece.id));
    plan.leftover = start.leftover.iter().copied().filter(|piece| plan.assignment[piece.id as usize] < 0).collect();
    let rank = |plan: &Plan| (plan.leftover.len(), max(plan));
    if max(&plan) <= ceiling && rank(&plan) < rank(&start) { plan } else { start }
}

/// Documents in micro-batches, and what each costs beyond its target.
struct Held<'a> {
    lengths: &'a [i32],
    costs: &'a [f64],
    /// Costliest first.
    order: &'a [usize],
    max_tokens: i64,
    at: Vec<Option<usize>>,
    loads: Vec<f64>,
}

/// At most two documents, and what they cost.
type Bundle = (Vec<usize>, f64);

impl Held<'_> {
    fn put(&mut self, index: usize, j: usize) {
        self.at[index] = Some(j);
        self.loads[j] += self.costs[index];
    }

    fn inside(&self, j: usize) -> Vec<usize> {
        self.order.iter().copied().filter(|&index| self.at[index] == Some(j)).collect()
    }

    fn tokens(&self, documents: &[usize]) -> i64 {
        documents.iter().map(|&index| i64::from(self.lengths[index])).sum()
    }

    fn room(&self, j: usize) -> i64 {
        self.max_tokens - self.tokens(&self.inside(j))
    }

    fn with_room(&self, index: usize) -> Vec<usize> {
        (0..self.loads.len()).filter(|&j| self.room(j) >= i64::from(self.lengths[index])).collect()
    }

    /// To the most cost lacking per token of room, where the cost stays within the target; else to the least cost.
    fn put_by_slope(&mut self, index: usize) -> bool {
        let with_room = self.with_room(index);
        let within = with_room.iter().copied().filter(|&j| self.loads[j] + self.costs[index] <= 0.0);
        let steepest = first_least(within.map(|j| (j, self.loads[j] / self.room(j).max(1) as f64)));
        let found = steepest.or_else(|| first_least(with_room.iter().map(|&j| (j, self.loads[j]))));
        found.into_iter().for_each(|j| self.put(index, j));
        found.is_some()
    }

    /// Exchanges until there is none, the heaviest is low enough, or all steps are taken.
    fn exchange(&mut self, low: f64) {
        let mut steps = STEPS + self.lengths.len();
        loop {
            let mut lightest: Vec<usize> = (0..self.loads.len()).collect();
            lightest.sort_by(|&a, &b| self.loads[a].total_cmp(&self.loads[b]));
            let heavy = first_least(self.loads.iter().map(|load| -load).enumerate()).unwrap_or(0);
            if self.loads[heavy] <= self.loads[lightest[0]].max(low) || steps == 0 {
                return;
            }
            let partners: Vec<usize> = lightest.into_iter().filter(|&j| j != heavy).take(PARTNERS).collect();
            let both = [1, 2].iter().flat_map(|&most| partners.iter().map(move |&light| (most, light)));
            let mut tried = both.map(|(most, light)| (light, self.best([heavy, light], most, &mut steps)));
            let Some((light, [given, taken])) = tried.find_map(|(light, found)| Some((light, found?))) else { return };
            for (documents, from, to) in [(given, heavy, light), (taken, light, heavy)] {
                for index in documents {
                    self.loads[from] -= self.costs[index];
                    self.put(index, to);
                }
            }
        }
    }

    /// What is given and taken so that a cost moves which is nearest to half of the difference. On either side of the
    /// nearest bundle the first that fits counts, among a few. Every bundle is a step.
    fn best(&self, [heavy, light]: [usize; 2], most: usize, steps: &mut usize) -> Option<[Vec<usize>; 2]> {
        let aim = (self.loads[heavy] - self.loads[light]) / 2.0;
        let pairs: usize = [heavy, light].iter().map(|&j| self.inside(j).len().pow(2) / 2).sum();
        if aim <= 0.0 || most == 2 && pairs > PAIRS {
            return None;
        }
        let (has, offers) = (self.bundles(heavy, most), self.bundles(light, most));
        *steps = steps.saturating_sub(has.len() + offers.len());
        let (reach, held) = (if most == 2 { 16 } else { 4 }, self.inside(heavy).len());
        let (mut best, mut least) = (None, aim * (1.0 - 1e-6));
        for given in has.iter().filter(|(documents, _)| !documents.is_empty()) {
            let fits = |taken: &&Bundle| {
                let moved = self.tokens(&given.0) - self.tokens(&taken.0);
                let empties = taken.0.is_empty() && given.0.len() == held;
                !empties && moved <= self.room(light) && -moved <= self.room(heavy)
            };
            let turn = offers.iter().filter(|taken| taken.1 > given.1 - aim).count();
            let behind = offers[turn..].iter().take(reach).find(fits);
            let before = offers[..turn].iter().rev().take(reach).find(fits);
            for taken in behind.into_iter().chain(before) {
                let error = (given.1 - taken.1 - aim).abs();
                if error < least {
                    (best, least) = (Some([given.0.clone(), taken.0.clone()]), error);
                }
            }
        }
        best
    }

    /// Each document, or each and every two of them, costliest first; at last nothing.
    fn bundles(&self, j: usize, most: usize) -> Vec<Bundle> {
        let inside = self.inside(j);
        let mut bundles: Vec<Bundle> = inside.iter().map(|&index| (vec![index], self.costs[index])).collect();
        for (at, &first) in inside.iter().enumerate().filter(|_| most == 2) {
            let with = |&second: &usize| (vec![first, second], self.costs[first] + self.costs[second]);
            bundles.extend(inside[at + 1..].iter().map(with));
        }
        bundles.sort_by(|a, b| b.1.total_cmp(&a.1));
        bundles.push((Vec::new(), 0.0));
        bundles
    }
}

/// Steps of all exchanges of a plan, besides one for each document; partners that the heaviest micro-batch tries; most
/// pairs in two micro-batches for which two are exchanged for two.
const STEPS: usize = 256;
const PARTNERS: usize = 4;
const PAIRS: usize = 256;

/// The queues of a new packer: a level a threshold, or the one in which any document may wait.
fn empty_queues(config: &PackerConfig) -> Vec<Vec<Waiting>> {
    match config.release {
        Release::Fifo => vec![Vec::new(); config.outlier_thresholds.len()],
        Release::Adaptive => vec![Vec::new()],
    }
}

/// What documents cost that came lately: costs and tokens, halved whenever they are of more than 256 global batches.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Arrived(f64, f64);

impl Arrived {
    /// With new documents: the most that those of a step may cost, infinite if there is no bound.
    pub(crate) fn budget(&mut self, new: &[(i32, f64)], config: &PackerConfig) -> f64 {
        let Some(times) = config.shape.max_cost else { return f64::INFINITY };
        let global_batch = global_batch(config);
        for (length, cost) in new {
            *self = Self(self.0 + cost, self.1 + f64::from(*length));
        }
        while self.1 > 256.0 * global_batch {
            *self = Self(self.0 / 2.0, self.1 / 2.0);
        }
        if self.1 == 0.0 { f64::INFINITY } else { times * (self.0 / self.1) * global_batch }
    }
}

/// Tokens of a global batch.
fn global_batch(config: &PackerConfig) -> f64 {
    config.shape.tokens_per_batch.map_or(contexts(config), |tokens| tokens as f64)
}

/// Tokens of a context for each micro-batch.
pub(crate) fn contexts(config: &PackerConfig) -> f64 {
    config.num_micro_batches as f64 * f64::from(config.max_document_tokens)
}

/// The adaptive rule: what is `due` leaves in its place, or first, if it finds no room so, or if the step costs too
/// much. `by_cost` is all but what is carried, costliest first.
#[allow(clippy::too_many_arguments)]
pub(crate) fn adaptive(
    listing: &[Waiting],
    carried: &[usize],
    due: &[usize],
    by_cost: &[usize],
    iteration: u64,
    budget: f64,
    config: &PackerConfig,
    costs: &Costs,
) -> Plan {
    let others: Vec<usize> = by_cost.iter().copied().filter(|i| !due.contains(i)).collect();
    let urgent = [carried, due].concat();
    let mut plan = least_loss(listing, carried, due, by_cost, iteration, f64::INFINITY, config, costs);
    if !urgent.iter().all(|&i| plan.assignment[i] >= 0) {
        plan = least_loss(listing, &urgent, &[], &others, iteration, f64::INFINITY, config, costs);
    }
    let leaves = (0..listing.len()).filter(|&i| plan.assignment[i] >= 0);
    if leaves.map(|i| costs.of[i]).sum::<f64>() > budget {
        plan = least_loss(listing, &urgent, &[], &others, iteration, budget, config, costs);
    }
    plan
}

/// The best of the eight cuts with the lowest bounds, in which all that is `due` leaves; nothing but `first` where it
/// finds no room in any. Each is made, whole, from nothing.
#[allow(clippy::too_many_arguments)]
fn least_loss(
    listing: &[Waiting],
    first: &[usize],
    due: &[usize],
    by_cost: &[usize],
    iteration: u64,
    budget: f64,
    config: &PackerConfig,
    costs: &Costs,
) -> Plan {
    let holds = Holds::levelled(config);
    let n = holds.n;
    let cost = |i: usize| costs.of[i];
    let debt = |i: usize| {
        let (length, turn) = (i128::from(listing[i].piece.length), listing[i].turn);
        if turn > iteration { -length } else { length * i128::from(iteration - turn + 1) }
    };
    let price = |debt: i128| {
        let global_batch = config.num_micro_batches as f64 * f64::from(config.max_document_tokens);
        config.delay_price.unwrap() * debt as f64 / global_batch
    };
    let loss = |heaviest: f64, total: f64, debt: i128| {
        let imbalance = if total > 0.0 { heaviest * n as f64 / total } else { 1.0 };
        (imbalance - 1.0).max(0.0) + price(debt)
    };
    let heaviest = |costs: &[f64]| costs.iter().copied().fold(0.0, f64::max);
    let alone = urgent_only(listing, first, &holds, costs);
    let empty = costs.empty * holds.rounds as f64;
    let length = |i: usize| i64::from(listing[i].piece.length);
    // Under a cut, all before a place waits, unless it is due.
    let due_before = |from: usize| by_cost[..from].iter().copied().filter(|i| due.contains(i)).collect::<Vec<_>>();
    let cost_of = |some: &[usize]| some.iter().fold(0.0, |sum, &i| sum + cost(i));
    let cost_from_the_end = |some: &[usize]| some.iter().rev().fold(0.0, |sum, &i| sum + cost(i));
    let nothing = alone.tokens.iter().sum::<i64>() == 0;
    let placed: Vec<usize> = first.iter().copied().filter(|&i| alone.assignment[i] >= 0).collect();
    let left = if budget == f64::INFINITY { budget } else { budget - placed.iter().map(|&i| cost(i)).sum::<f64>() };
    // What of a cut is within the budget: its first, then by the debt of a unit of work.
    let urgency = |i: usize| debt(i) as f64 / cost(i);
    let within = |from: usize| -> Vec<usize> {
        let leaves = &by_cost[from..];
        if budget == f64::INFINITY || leaves.is_empty() {
            return leaves.to_vec();
        }
        let mut by_urgency = leaves[1..].to_vec();
        by_urgency.sort_by(|&a, &b| urgency(b).total_cmp(&urgency(a))); // stable: of equals, the costlier
        let mut kept = vec![leaves[0]];
        let mut spent = cost(leaves[0]);
        for i in by_urgency {
            if spent + cost(i) <= left.max(cost(leaves[0])) {
                spent += cost(i);
                kept.push(i);
            }
        }
        leaves.iter().copied().filter(|i| kept.contains(i)).collect()
    };

    let mut cuts: Vec<(f64, usize)> = Vec::new();
    for from in (0..=by_cost.len()).filter(|&from| by_cost.get(from).is_none_or(|i| !due.contains(i))) {
        let leaves = [due_before(from), by_cost[from..].to_vec()].concat();
        if leaves.is_empty() && nothing {
            continue;
        }
        if let [first, rest @ ..] = &by_cost[from..] {
            let else_nothing = nothing && rest.is_empty();
            if cost(*first) > left && !else_nothing {
                continue;
            }
        }
        let longest = leaves.first().map_or(0.0, |&i| empty + cost(i)).max(heaviest(&alone.costs));
        let most = by_cost.get(from).map_or(0.0, |&first| left.max(cost(first)));
        let of_others = cost_from_the_end(&by_cost[from..]);
        let total = alone.costs.iter().sum::<f64>() + (of_others.min(most) + cost_of(&due_before(from)));
        let tokens = alone.tokens.iter().sum::<i64>() + leaves.iter().map(|&i| length(i)).sum::<i64>();
        // What came early may be among what finds no room: its waiting costs less than nothing.
        let came_early = leaves.iter().filter(|&&i| listing[i].turn > iteration && !due.contains(&i));
        let came_early: i64 = came_early.map(|&i| length(i)).sum();
        let beyond = tokens - n as i64 * holds.tokens;
        let mut beyond = i128::from((beyond - came_early).max(0) - came_early);
        // What is over the budget waits, and each of it costs what the least urgent does at least.
        let over = of_others * (1.0 - 1e-9) - most;
        if came_early == 0 && over > 0.0 {
            let least = by_cost[from + 1..].iter().map(|&i| urgency(i)).fold(f64::INFINITY, f64::min);
            beyond = beyond.max((over * least) as i128);
        }
        let waiting: i128 = by_cost[..from].iter().filter(|i| !due.contains(i)).map(|&i| debt(i)).sum();
        cuts.push((loss(longest, total, waiting + if leaves.is_empty() { 0 } else { beyond }), from));
    }
    cuts.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));

    let mut best: Option<(f64, usize, Plan)> = None;
    'cuts: for &(_, from) in cuts.iter().take(8) {
        let mut plan = alone.clone();
        let leaves = within(from);
        let waits = |i: &&usize| !leaves.contains(i) && !due.contains(i);
        let mut waiting: i128 = by_cost.iter().filter(waits).map(|&i| debt(i)).sum();
        let everything = plan.costs.iter().sum::<f64>() + (cost_from_the_end(&leaves) + cost_of(&due_before(from)));
        let due_tokens: i64 = due.iter().map(|&i| length(i)).sum();
        // What may wait leaves room for what is due.
        let mut spare = n as i64 * holds.tokens - plan.tokens.iter().sum::<i64>() - due_tokens;
        for i in [due_before(from), leaves].concat() {
            let least_of_all = first_least(plan.costs.iter().copied().enumerate());
            let with_room = (0..n).filter(|&j| holds.fits(&plan, j, &listing[i].piece));
            let least = first_least(with_room.map(|j| (j, plan.costs[j])));
            let tolerated = heaviest(&plan.costs) + price(debt(i)) * (everything / n as f64);
            let too_heavy = |j: usize| Some(j) != least_of_all && plan.costs[j] + cost(i) > tolerated;
            match least.filter(|&j| due.contains(&i) || (length(i) <= spare && !too_heavy(j))) {
                Some(j) => {
                    spare -= if due.contains(&i) { 0 } else { length(i) };
                    plan.length_fallbacks += usize::from(Some(j) != least_of_all);
                    plan.put(j, listing[i].piece, cost(i));
                    plan.assignment[i] = j as i32;
                }
                None if due.contains(&i) => continue 'cuts,
                None => waiting += debt(i),
            }
        }
        let loss = loss(heaviest(&plan.costs), plan.costs.iter().sum(), waiting);
        if best.as_ref().is_none_or(|(least, of, _)| loss < *least || (loss == *least && from < *of)) {
            best = Some((loss, from, plan));
        }
    }
    let mut plan = best.map_or(alone, |(_, _, plan)| plan);
    let pieces: Vec<Piece> = listing.iter().map(|waiting| waiting.piece).collect();
    if n < config.num_micro_batches {
        // These were ranks: what leaves goes into their micro-batches, as Algorithm 1 places it.
        let leave: Vec<usize> = by_cost.iter().copied().filter(|&i| plan.assignment[i] >= 0).collect();
        let holds = Holds::micro_batches(config);
        plan = urgent_only(listing, first, &holds, costs);
        let carried = plan.leftover.len();
        // Where these hold more of what goes first, the others pay for it.
        let of_first: f64 = first.iter().filter(|&&i| plan.assignment[i] >= 0).map(|&i| cost(i)).sum();
        let more = of_first > placed.iter().map(|&i| cost(i)).sum::<f64>();
        let mut left = budget - of_first;
        for i in leave {
            if !more || cost(i) <= left {
                place(&mut plan, &pieces, &[i], &holds, costs);
                left -= if plan.assignment[i] >= 0 { cost(i) } else { 0.0 };
            }
        }
        plan.leftover.truncate(carried);
    }
    plan.list(&pieces);
    plan
}

/// A plan of so few tokens is made fuller: by tokens alone, or into the first micro-batch with room.
pub(crate) fn fill_up(
    given: Plan,
    pieces: &[Piece],
    order: &[usize],
    due: &[usize],
    min_tokens: i64,
    config: &PackerConfig,
    costs: &Costs,
) -> Plan {
    let n = config.num_micro_batches;
    let tokens = |plan: &Plan| plan.tokens.iter().sum::<i64>();
    let mut fullest = given;
    for first_fit in [false, true] {
        if tokens(&fullest) >= min_tokens || !fullest.assignment.contains(&-1) {
            return fullest;
        }
        let holds = Holds::micro_batches(config);
        let mut plan = holds.nothing(pieces.len(), costs);
        for &i in order {
            let has_room = |j: &usize| holds.fits(&plan, *j, &pieces[i]);
            let fewest = holds.emptiest(&plan);
            let lightest = first_least(plan.costs.iter().copied().enumerate()).unwrap();
            let chosen = if first_fit { (0..n).find(has_room) } else { Some(fewest).filter(has_room) };
            let Some(j) = chosen else {
                plan.leftover.push(pieces[i]);
                continue;
            };
            plan.length_fallbacks += usize::from(first_fit || j != lightest);
            plan.put(j, pieces[i], costs.of[i]);
            plan.assignment[i] = j as i32;
        }
        plan.list(pieces);
        // What is due leaves, if it can.
        let leaves = |plan: &Plan| due.iter().all(|&i| plan.assignment[i] >= 0);
        if tokens(&plan) > tokens(&fullest) && (leaves(&plan) || !leaves(&fullest)) {
            fullest = plan;
        }
    }
    fullest
}

/// Only what goes first: Algorithm 1, and by tokens where that finds no room for all.
fn urgent_only(listing: &[Waiting], urgent: &[usize], holds: &Holds, costs: &Costs) -> Plan {
    let pieces: Vec<Piece> = listing.iter().map(|waiting| waiting.piece).collect();
    let plan = algorithm_1(&pieces, urgent, holds, costs);
    if plan.leftover.is_empty() {
        return plan;
    }
    let mut plan = holds.nothing(listing.len(), costs);
    for &i in urgent {
        let piece = pieces[i];
        let fewest = holds.emptiest(&plan);
        if !holds.fits(&plan, fewest, &piece) {
            plan.leftover.push(piece);
            continue;
        }
        plan.length_fallbacks += usize::from(Some(fewest) != first_least(plan.costs.iter().copied().enumerate()));
        plan.put(fewest, piece, costs.of[i]);
        plan.assignment[i] = fewest as i32;
    }
    plan
}

/// Batch `i` is documents `offsets[i]..offsets[i + 1]`.
pub(crate) fn batch_offsets(lengths: &[i32], tokens_per_batch: i64) -> Vec<usize> {
    let mut offsets = vec![0];
    let mut next = 0;
    while next < lengths.len() {
        let begin = next;
        let tokens = |end: usize| lengths[begin..end].iter().map(|&length| i64::from(length)).sum::<i64>();
        next += 1;
        while next < lengths.len() && tokens(next + 1) <= tokens_per_batch {
            next += 1;
        }
        offsets.push(next);
    }
    offsets
}

/// Pieces of at most `limit` tokens, all full but a document's last.
pub(crate) fn split(document: Piece, limit: i32) -> Vec<Piece> {
    let whole_pieces = (document.length - 1) / limit;
    let mut pieces: Vec<Piece> =
        (0..whole_pieces).map(|k| Piece { start: document.start + k * limit, length: limit, ..document }).collect();
    let done = whole_pieces * limit;
    pieces.push(Piece { start: document.start + done, length: document.length - done, ..document });
    pieces
}

/// A piece that waits, and the iteration it came in.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Waiting {
    pub(crate) piece: Piece,
    pub(crate) arrived: u64,
    pub(crate) turn: u64,
}

/// One global batch that a packer emitted.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub(crate) plan: Plan,
    pub(crate) flushed: bool,
    /// `(tokens, iterations waited)` of each emitted piece.
    pub(crate) moved: Vec<(i64, i64)>,
    /// For whom it was made.
    pub(crate) shape: StepShape,
    /// What its documents cost, and at most should.
    pub(crate) work: f64,
    pub(crate) budget: f64,
}

/// The packer of a stream, which remembers every step instead of sums of them.
#[derive(Clone, Debug)]
pub(crate) struct Packer {
    pub(crate) config: PackerConfig,
    pub(crate) iteration: u64,
    pub(crate) next_id: i64,
    pub(crate) queues: Vec<Vec<Waiting>>,
    pub(crate) carried: Vec<Waiting>,
    pub(crate) arrived: Arrived,
    pub(crate) steps: Vec<Step>,
    /// From which of the steps on costs are what they are now.
    pub(crate) costed_from: usize,
}

impl Packer {
    pub(crate) fn new(config: PackerConfig) -> Self {
        let queues = empty_queues(&config);
        let (carried, arrived, steps) = (Vec::new(), Arrived::default(), Vec::new());
        Self { config, iteration: 0, next_id: 0, queues, carried, arrived, steps, costed_from: 0 }
    }

    pub(crate) fn pending(&self) -> Vec<Waiting> {
        self.queues.iter().flatten().chain(&self.carried).copied().collect()
    }

    /// The deepest level whose threshold a length reaches.
    fn level(&self, length: i32) -> Option<usize> {
        let threshold = |level: usize| self.config.outlier_thresholds.get(level).copied().unwrap_or(1);
        (0..self.queues.len()).rev().find(|&level| length >= threshold(level))
    }

    /// A push of valid arguments.
    pub(crate) fn push(&mut self, lengths: &[i32], ids: Option<&[i64]>) -> Plan {
        self.push_at_least(lengths, ids, 0)
    }

    /// Of which so many tokens leave, if they are there.
    pub(crate) fn push_at_least(&mut self, lengths: &[i32], ids: Option<&[i64]>, min_step_tokens: i64) -> Plan {
        self.push_early(lengths, ids, min_step_tokens, &vec![0; lengths.len()])
    }

    /// By so many iterations before their turns.
    pub(crate) fn push_early(
        &mut self,
        lengths: &[i32],
        ids: Option<&[i64]>,
        min_step_tokens: i64,
        early: &[i64],
    ) -> Plan {
        let t = self.iteration;
        let default_ids: Vec<i64> = (self.next_id..).take(lengths.len()).collect();
        let ids = ids.unwrap_or(&default_ids);
        self.next_id = ids.iter().map(|id| id + 1).chain([self.next_id]).max().unwrap_or(0);

        let limit = self.config.max_document_tokens;
        let mut new = Vec::new();
        for ((&id, &length), early) in ids.iter().zip(lengths).zip(early) {
            let document = Piece { id, start: 0, length };
            let pieces = match self.config.oversize {
                Oversize::Split => split(document, limit),
                Oversize::Truncate | Oversize::Error => vec![Piece { length: length.min(limit), ..document }],
            };
            for piece in pieces {
                let waiting = Waiting { piece, arrived: t, turn: t + *early as u64 };
                match self.level(piece.length) {
                    Some(level) => self.queues[level].push(waiting),
                    None => new.push(waiting),
                }
            }
        }

        let mut released = Vec::new();
        for queue in &mut self.queues {
            if self.config.release == Release::Adaptive {
                released.append(queue);
            }
            let company = self.config.shape.ranks.map_or(self.config.num_micro_batches, |ranks| ranks.dp_size);
            while queue.len() >= company {
                released.extend(queue.drain(..company));
            }
            if let Some(delay) = self.config.max_delay {
                let (due, kept) = queue.iter().copied().partition(|waiting| t - waiting.arrived >= delay);
                released.extend::<Vec<Waiting>>(due);
                *queue = kept;
            }
        }
        let of = |all: &[Waiting]| all.iter().map(|waiting| i64::from(waiting.piece.length)).sum::<i64>();
        while self.config.release == Release::Fifo && of(&self.carried) + of(&released) + of(&new) < min_step_tokens {
            let fronts = (0..self.queues.len()).filter_map(|level| Some((self.queues[level].first()?.arrived, level)));
            let Some((_, level)) = fronts.min() else { break };
            released.push(self.queues[level].remove(0));
        }
        let mut plan = self.step(released, new, Some(min_step_tokens));
        plan.assignment = ids
            .iter()
            .zip(lengths)
            .map(|(&id, &length)| {
                let cut = length > limit && self.config.oversize == Oversize::Split;
                let holds = |pieces: &Vec<Piece>| pieces.iter().any(|piece| piece.id == id);
                plan.micro_batches.iter().position(holds).filter(|_| !cut).map_or(-1, |j| j as i32)
            })
            .collect();
        plan
    }

    /// How many documents the next push may bring: the most that have room and fit into a step by themselves. None
    /// where the first of them has no room in an empty packer.
    pub(crate) fn admits(&self, lengths: &[i32]) -> Option<usize> {
        let PackerConfig { num_micro_batches, max_tokens, max_document_tokens: limit, .. } = self.config;
        let capacity = num_micro_batches as i64 * i64::from(max_tokens);
        let holds = Holds::micro_batches(&self.config);
        let of = |all: &[Waiting]| all.iter().map(|waiting| holds.size(&waiting.piece)).sum::<i64>();
        let fit_a_step = |pieces: &[Piece]| {
            let mut tokens = vec![0_i64; num_micro_batches];
            for index in longest_first(&pieces.iter().map(|piece| piece.length).collect::<Vec<_>>()) {
                *tokens.iter_mut().min().unwrap() += holds.size(&pieces[index]);
            }
            tokens.iter().all(|&tokens| tokens <= i64::from(max_tokens))
        };
        let room = match self.config.release {
            Release::Adaptive => {
                // All that waits leaves when it is due, or nothing enters.
                let due = |waiting: &Waiting| {
                    self.config.max_delay.map(|delay| (waiting.arrived + delay).max(self.iteration))
                };
                let waiting = self.pending();
                let at = |step: u64| waiting.iter().filter(move |waiting| due(waiting) == Some(step));
                let mut steps = waiting.iter().filter_map(due);
                let leaves =
                    steps.all(|step| fit_a_step(&at(step).map(|waiting| waiting.piece).collect::<Vec<Piece>>()));
                let late = match self.config.max_delay {
                    None => false,
                    Some(0) => !waiting.is_empty(),
                    Some(_) => !self.carried.is_empty(),
                };
                if late || !leaves { 0 } else { 2 * capacity - of(&waiting) }
            }
            Release::Fifo => {
                // With what leaves the queues in the next step.
                let company = self.config.shape.ranks.map_or(num_micro_batches, |ranks| ranks.dp_size);
                let full = |level: &Vec<Waiting>| of(&level[..level.len() / company * company]);
                capacity - of(&self.carried) - self.queues.iter().map(full).sum::<i64>()
            }
        };
        let fits = |count: &usize| {
            let mut pieces = Vec::new();
            for &length in &lengths[..*count] {
                let kept = if self.config.oversize == Oversize::Truncate { length.min(limit) } else { length };
                pieces.extend(split(Piece { id: 0, start: 0, length: kept }, limit));
            }
            let size = pieces.iter().map(|piece| holds.size(piece)).sum::<i64>();
            size <= room.max(0) && (self.config.release == Release::Fifo || fit_a_step(&pieces))
        };
        let most = (0..=lengths.len()).rev().find(fits).unwrap_or(0);
        if most > 0 || lengths.is_empty() {
            return Some(most);
        }
        (!self.pending().is_empty() && Self::new(self.config.clone()).admits(&lengths[..1]) == Some(1)).then_some(0)
    }

    pub(crate) fn flush(&mut self) -> Vec<Plan> {
        let mut plans = Vec::new();
        while !self.pending().is_empty() {
            let released = self.queues.iter_mut().flat_map(std::mem::take).collect();
            let mut plan = self.step(released, Vec::new(), None);
            plan.assignment.clear();
            plans.push(plan);
        }
        plans
    }

    /// `min_step_tokens` of a push; none in a flush.
    fn step(&mut self, released: Vec<Waiting>, new: Vec<Waiting>, min_step_tokens: Option<i64>) -> Plan {
        let flushed = min_step_tokens.is_none();
        let carried = std::mem::take(&mut self.carried);
        let is_carried = 0..carried.len();
        let is_released = carried.len()..carried.len() + released.len();
        let listing: Vec<Waiting> = [carried, released, new].concat();

        let overdue = |i: usize| {
            let waited = self.iteration - listing[i].arrived;
            !flushed && is_released.contains(&i) && self.config.max_delay.is_some_and(|delay| waited >= delay)
        };
        let rank = |i: usize| match i {
            _ if is_carried.contains(&i) => (0, 0),
            _ if overdue(i) => (1, -listing[i].piece.length),
            _ => (2, -listing[i].piece.length),
        };
        let mut order: Vec<usize> = (0..listing.len()).collect();
        order.sort_by_key(|&i| (rank(i), i));

        let pieces: Vec<Piece> = listing.iter().map(|waiting| waiting.piece).collect();
        let config = &self.config;
        let costs = Costs::by(config.cost_model.as_ref().unwrap(), &pieces);
        let mut budget = f64::INFINITY;
        if flushed {
            self.arrived.budget(&[], config); // halved here, too: a state may have come of larger global batches
        }
        let mut plan = if config.release == Release::Fifo || flushed {
            let plan = algorithm_1(&pieces, &order, &Holds::micro_batches(config), &costs);
            fill_up(plan, &pieces, &order, &[], min_step_tokens.unwrap_or(0), config, &costs)
        } else {
            let urgent: Vec<usize> = order.iter().copied().filter(|&i| rank(i).0 < 2).collect();
            let (carried, due) = urgent.split_at(is_carried.len());
            let mut by_cost: Vec<usize> = (is_carried.end..listing.len()).collect();
            by_cost.sort_by_key(|&i| (-listing[i].piece.length, i));
            let is_new = |i: &usize| listing[*i].arrived == self.iteration;
            let new = (0..listing.len()).filter(is_new).map(|i| (pieces[i].length, costs.of[i]));
            budget = self.arrived.budget(&new.collect::<Vec<_>>(), config);
            let mut plan = adaptive(&listing, carried, due, &by_cost, self.iteration, budget, config, &costs);
            plan = fill_up(plan, &pieces, &order, &urgent, min_step_tokens.unwrap_or(0), config, &costs);
            plan.leftover.retain(|piece| urgent.iter().any(|&i| pieces[i] == *piece));
            let waits = |i: &usize| plan.assignment[*i] < 0 && !urgent.contains(i);
            self.queues = vec![(0..listing.len()).filter(waits).map(|i| listing[i]).collect()];
            plan
        };
        // What is arranged for ranks, or within a number of documents, is so from here on: `arranged` takes that.
        let arranged = config.shape.ranks.is_some() || config.shape.max_documents.is_some();
        if config.method == StreamMethod::Refined && !arranged {
            plan = refine_step(plan, &pieces, config);
        }
        self.carried = order
            .iter()
            .filter(|&&i| plan.assignment[i] < 0 && plan.leftover.contains(&listing[i].piece))
            .map(|&i| listing[i])
            .collect();
        let moved = (0..listing.len())
            .filter(|&i| plan.assignment[i] >= 0)
            .map(|i| (i64::from(pieces[i].length), self.iteration as i64 - listing[i].turn as i64))
            .collect();
        let work = (0..listing.len()).filter(|&i| plan.assignment[i] >= 0).map(|i| costs.of[i]).sum();
        self.steps.push(Step { plan: plan.clone(), flushed, moved, shape: self.config.shape.clone(), work, budget });
        self.iteration += 1;
        plan
    }

    /// Costs are those of this configuration from here on.
    pub(crate) fn change_costs(&mut self) {
        self.arrived = Arrived::default();
        self.costed_from = self.steps.len();
    }

    /// Goes on under another configuration: if it is another but for its ranks, what is queued is filed anew, oldest
    /// first.
    pub(crate) fn reconfigure(&mut self, config: PackerConfig, is_another: bool) {
        if is_another {
            let mut queued: Vec<Waiting> = std::mem::take(&mut self.queues).concat();
            queued.sort_by_key(|waiting| (waiting.arrived, waiting.piece.id, waiting.piece.start));
            self.queues = empty_queues(&config);
            self.config = config.clone();
            for waiting in queued {
                match self.level(waiting.piece.length) {
                    Some(level) => self.queues[level].push(waiting),
                    None => self.carried.push(waiting),
                }
            }
        }
        self.config = config;
    }
}

/// Micro-batches of these costs, rank by rank: the heaviest first, to the rank of least cost that lacks one.
pub(crate) fn dealt(costs: &[f64], dp_size: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..costs.len()).collect();
    order.sort_by(|&a, &b| costs[b].total_cmp(&costs[a]));
    let mut ranks = vec![Vec::new(); dp_size];
    for j in order {
        let sum = |rank: usize, ranks: &[Vec<usize>]| ranks[rank].iter().map(|&j: &usize| costs[j]).sum::<f64>();
        let open = (0..dp_size).filter(|&rank| ranks[rank].len() < costs.len() / dp_size);
        let rank = first_least(open.map(|rank| (rank, sum(rank, &ranks)))).unwrap();
        ranks[rank].push(j);
    }
    // The lightest at both ends.
    let light_ends = |held: Vec<usize>| {
        let rising: Vec<usize> = held.iter().rev().step_by(2).copied().collect();
        let falling = held.iter().rev().skip(1).step_by(2).rev().copied();
        rising.into_iter().chain(falling.collect::<Vec<_>>()).collect::<Vec<_>>()
    };
    ranks.into_iter().flat_map(light_ends).collect()
}

/// [`refine`] for pieces of any name, some of which wait.
fn refine_step(plan: Plan, pieces: &[Piece], config: &PackerConfig) -> Plan {
    let lengths: Vec<i32> = pieces.iter().map(|piece| piece.length).collect();
    let rename = |plan: Plan, name: &dyn Fn(Piece) -> Piece| Plan {
        micro_batches: plan.micro_batches.into_iter().map(|listed| listed.into_iter().map(name).collect()).collect(),
        leftover: plan.leftover.into_iter().map(name).collect(),
        ..plan
    };
    let place_of = |piece: Piece| pieces.iter().position(|&other| other == piece).unwrap();
    let start = rename(plan, &|piece| whole(place_of(piece), piece.length));
    let plan = refine(start, &lengths, config.max_tokens, config.cost_model.as_ref().unwrap());
    rename(plan, &|piece| pieces[piece.id as usize])
}

/// The rank of chunk `k` of `2*cp`.
fn owner(k: usize, cp: usize) -> usize {
    if k < cp { k } else { 2 * cp - 1 - k }
}

/// Rank of every token of every document.
pub(crate) type Owners = Vec<Vec<usize>>;

pub(crate) fn per_sequence(lengths: &[i32], cp: usize) -> Owners {
    let total: usize = lengths.iter().map(|&d| d as usize).sum();
    let mut of_packed = Vec::new();
    for k in 0..2 * cp {
        let size = total / (2 * cp) + usize::from(k < total % (2 * cp));
        of_packed.extend(vec![owner(k, cp); size]);
    }
    let mut of_packed = of_packed.into_iter();
    lengths.iter().map(|&d| of_packed.by_ref().take(d as usize).collect()).collect()
}

pub(crate) fn contiguous(lengths: &[i32], cp: usize) -> Owners {
    let total: usize = lengths.iter().map(|&d| d as usize).sum();
    let mut of_packed = (0..cp).flat_map(|rank| vec![rank; total / cp + usize::from(rank < total % cp)]);
    lengths.iter().map(|&d| of_packed.by_ref().take(d as usize).collect()).collect()
}

/// Per document, for those of at least `threshold` tokens; the others own nothing yet.
pub(crate) fn per_document(lengths: &[i32], cp: usize, threshold: i64) -> Owners {
    let mut owners = vec![Vec::new(); lengths.len()];
    let mut cursor = 0;
    for document in longest_first(lengths).into_iter().filter(|&document| i64::from(lengths[document]) >= threshold) {
        let d = lengths[document] as usize;
        let mut sizes = vec![d / (2 * cp); 2 * cp];
        for _ in 0..d % (2 * cp) {
            sizes[cursor] += 1;
            cursor = (cursor + 1) % (2 * cp);
        }
        for (k, size) in sizes.into_iter().enumerate() {
            owners[document].extend(vec![owner(k, cp); size]);
        }
    }
    owners
}

/// Long documents per document; short ones whole to the rank with the most quota left.
///
/// The specification leaves open which ranks take the `total % cp` odd tokens: those that already hold one more.
pub(crate) fn hybrid(lengths: &[i32], cp: usize, threshold: i64) -> Owners {
    let mut owners = per_document(lengths, cp, threshold);
    let total: usize = lengths.iter().map(|&d| d as usize).sum();
    let held = |rank: usize| owners.iter().flatten().filter(|&&owner| owner == rank).count();
    let held: Vec<usize> = (0..cp).map(held).collect();
    let mut fullest_first: Vec<usize> = (0..cp).collect();
    fullest_first.sort_by_key(|&rank| (Reverse(held[rank]), rank));
    let mut quota: Vec<i64> = held.iter().map(|&held| (total / cp) as i64 - held as i64).collect();
    fullest_first[..total % cp].iter().for_each(|&rank| quota[rank] += 1);

    for document in longest_first(lengths).into_iter().filter(|&document| i64::from(lengths[document]) < threshold) {
        while owners[document].len() < lengths[document] as usize {
            let rank = first_least((0..cp).map(|rank| (rank, -quota[rank]))).unwrap_or(0);
            while quota[rank] > 0 && owners[document].len() < lengths[document] as usize {
                owners[document].push(rank);
                quota[rank] -= 1;
            }
        }
    }
    owners
}

/// The runs of one rank in the order of its rows, key by key: documents whose keys are all here and that nobody else
/// sees, documents whose keys are all here, documents that others see, the rest.
pub(crate) fn rows(owners: &Owners, cp: usize, mask: Mask, rank: usize) -> Vec<Segment> {
    let runs = &segments(owners, cp)[rank];
    let sees = |query: usize, key: usize| mask == Mask::Full || query >= key;
    let place = |document: u32| {
        let owners = &owners[document as usize];
        let is_seen_by =
            |key: usize, own: bool| (0..owners.len()).any(|query| (owners[query] == rank) == own && sees(query, key));
        let here = (0..owners.len()).all(|key| owners[key] == rank || !is_seen_by(key, true));
        let needed = (0..owners.len()).any(|key| owners[key] == rank && is_seen_by(key, false));
        [[3, 2], [0, 1]][usize::from(here)][usize::from(needed)]
    };
    let of_place = |wanted: i32| runs.iter().filter(move |run| place(run.document) == wanted).copied();
    (0..4).flat_map(of_place).collect()
}

/// Runs of equal owners, rank by rank in packed order.
pub(crate) fn segments(owners: &Owners, cp: usize) -> Vec<Vec<Segment>> {
    let mut ranks = vec![Vec::new(); cp];
    for (document, owners) in owners.iter().enumerate() {
        let mut start = 0;
        for run in owners.chunk_by(|a, b| a == b) {
            let segment = Segment { document: document as u32, start: start as i32, length: run.len() as i32 };
            ranks[run[0]].push(segment);
            start += run.len();
        }
    }
    ranks
}
