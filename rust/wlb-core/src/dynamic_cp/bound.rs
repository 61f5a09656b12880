//! Lower bounds: no plan is faster.
//!
//! A *path* is a chain of ops, each of which waits for the one before it; a step takes as long as any path. All paths
//! here run on the same rank of every stage, and the bounds are sums over their micro-batches with factors that are the
//! same for all ranks: so they hold for the mean over the ranks, and the mean time of a micro-batch is at least its
//! work spread over all of them, however they are grouped.
//!
//! From here on times are of one stage: `x` of a micro-batch, a third of it forward. `p` stages, `w = p - 1`, `m`
//! micro-batches, `S` the sum of all `x`. Facts of 1F1B: the last stage runs forward and backward of one micro-batch
//! after the other; on the first stage the forward of micro-batch `j` comes behind all forwards before it and the
//! backwards up to `j - p`.

use crate::packing::Sync;

use super::cost::{Communication, Load};
use super::options::{DynamicCpOptions, GroupSizes};
use super::problem::{Document, Problem};

/// A step takes at least this long, whatever the plan, in seconds.
///
/// The largest of
/// - all work, and what has to be exchanged at least ([`exchanged`]), spread evenly over all ranks of all stages, and
///   the constant part of `least` micro-batches;
/// - the way of the longest document through the pipeline on its best group;
/// - where the pipeline is not interleaved, what it takes to fill and drain it with `most` micro-batches
///   ([`fill_and_drain`]), and around the `k` longest documents, for every `k` ([`around`]): on all ranks, and on those
///   that have one of them, while the others do the rest ([`Hosts`]).
///
/// All of them but the second with the hops to the last stage and back, which every path can be made to have.
///
/// Of a V the first with the hops to the last rank only, whose weight gradients may run while the others hop back.
/// There the way of a document is its forward, its input gradients and the last of its weight gradients: two thirds,
/// and a third of one of `2 p` stages; from the last rank down to the last rank up nothing hops.
///
/// # Complexity
/// O(min(documents, most) log world_size + most).
pub(super) fn lower_bound(problem: &Problem, options: &DynamicCpOptions, least: usize, most: usize) -> f64 {
    let &DynamicCpOptions { num_stages, num_virtual_stages, p2p_seconds, .. } = options;
    let stages = num_stages as f64;
    // With one rank there is nowhere to hop to.
    let hops = |hops: usize| if num_stages == 1 { 0.0 } else { hops as f64 * p2p_seconds };
    let is_v = options.schedule().is_v_shaped();
    let (to_the_last, whole_way) = if is_v {
        (hops(num_stages - 1), hops(4 * (num_stages - 1)))
    } else {
        (hops(2 * (num_stages - 1)), hops(2 * (num_stages * num_virtual_stages - 1)))
    };
    let way = if is_v { (2.0 + 0.5 / stages) / 3.0 } else { 1.0 };
    let constant = problem.cost.micro_batch_seconds / stages;
    let share = (problem.total_work + exchanged(problem)) / problem.world_size as f64 / stages;
    let sum = share + least as f64 * constant;
    let mut bound = sum + to_the_last;
    // Where documents bring their own costs, a long one of little work may need ranks that have to exchange a lot.
    let slowest = if problem.is_by_length() { 1 } else { problem.documents.len() };
    for document in &problem.documents[..slowest.min(problem.documents.len())] {
        let Least { fewer, whole, .. } = Least::of(problem, document);
        bound = bound.max(way * fewer.min(whole) + whole_way);
    }
    if num_virtual_stages > 1 || num_stages == 1 {
        return bound;
    }
    let filled = fill_and_drain(sum, stages, most);
    bound = bound.max(filled + to_the_last);
    let balance = balance(stages, most);
    let mut hosts = Hosts::new(problem, options, sum, filled, balance);
    let mut together = constant;
    let mut longer: Option<Least> = None;
    for document in problem.documents.iter().take(most) {
        together += document.load.work() / problem.world_size as f64 / stages;
        let others = (sum - together).max(0.0);
        let around = |longer: f64, shortest: f64| {
            around(together, longer / stages, shortest / stages, others, stages - 1.0, balance) + to_the_last
        };
        let shortest = Least::of(problem, document);
        let before = longer.unwrap_or(shortest);
        // By their lengths each is less than the one before it anyway.
        let shortest = shortest.min(&before);
        longer = Some(shortest);
        let longer = before;
        // Either all of them have all ranks, or one of them, no shorter than this one, goes all the way on fewer.
        let whole = around(longer.whole, shortest.whole).min(shortest.fewer + whole_way);
        bound = bound.max(around(longer.mean, shortest.mean)).max(whole);
        hosts.join(problem, document);
        bound = bound.max(hosts.seconds(bound - to_the_last) + to_the_last);
    }
    bound
}

/// Halvings between a time that is too short and one that is not.
const HALVINGS: usize = 24;

/// The ranks that have one of the `k` costliest documents, and the others, which have to do what these leave.
///
/// Say `h` ranks have one or several of them, and no group that has one is larger than `c`; so `h` is from `c` to `r`,
/// all ranks. Each takes at least `t` of its micro-batch, on whatever group of at most `c`. The paths of [`around`]
/// hold for each rank by itself. With `T` the time of the step, `S` all that a rank does, and `u` what it does in the
/// micro-batches where it has some of them,
///
/// - `T >= u + 2/3 (S - u) + e` with `e = w/3 (a + 2) t`, and `T >= u + 1/3 (S - u) + w t`, on the `h` ranks;
/// - `T >= g S` on all others, which fill and drain ([`fill_and_drain`]).
///
/// Sums over the ranks: the `S` are at least `W`, all work and the exchange that no plan hides; the `u` at least `Q`,
/// the same of the `k` documents alone, since no group takes less for fewer documents; and `S >= u`. So, of the `h`
/// ranks, the `S` are at most `3/2 h (T - e) - Q/2` and `3 h (T - w t) - 2 Q`, of the others `(r - h) T / g`, and these
/// have to be `W` or more; the second of them has to be `Q` or more, so that `h (T - w t) >= Q`. For a `T` each of
/// these is linear in `h`: whether there is an `h` for all of them is quickly told. If there is none for any `c`, no
/// step takes so little; and none takes less, since all of them are easier to keep for a longer one. Where all ranks
/// wait in each micro-batch, `h = r`.
struct Hosts {
    ranks: f64,
    /// `W`, `1 / g`, `w`, `w (a + 2) / 3`.
    total: f64,
    even: f64,
    way: f64,
    ends: f64,
    stages: f64,
    /// The largest groups that there may be, `c`, the least of them that no smaller one is, and `t`; ascending.
    sizes: Vec<(usize, usize, f64)>,
    /// The documents' work, and their exchange beyond what attention hides; ranks that the widest needs.
    work: f64,
    exchange: f64,
    widest: usize,
    /// Ranks that take as long as those that have them, at least.
    fewest: usize,
}

impl Hosts {
    fn new(problem: &Problem, options: &DynamicCpOptions, sum: f64, filled: f64, balance: f64) -> Self {
        let (ranks, stages) = (problem.world_size as f64, options.num_stages as f64);
        let way = stages - 1.0;
        let mut sizes = Vec::new();
        let mut below = 0;
        for size in problem.base_sizes() {
            let least = if problem.group_sizes == GroupSizes::Any { below + 1 } else { size };
            sizes.push((size, least, f64::INFINITY));
            below = size;
        }
        let even = if filled > 0.0 { sum / filled } else { 1.0 };
        let (total, ends) = (sum * ranks, way * (balance + 2.0) / 3.0);
        let fewest = if options.sync == Sync::MicroBatch { problem.world_size } else { 1 };
        Self { ranks, total, even, way, ends, stages, sizes, work: 0.0, exchange: 0.0, widest: 1, fewest }
    }

    /// Counts one more document among them.
    fn join(&mut self, problem: &Problem, document: &Document) {
        let load = &document.load;
        let smallest = problem.smallest(load);
        self.widest = self.widest.max(smallest);
        self.work += load.work();
        self.exchange += exposed(problem, load, smallest);
        let mut shortest = f64::INFINITY;
        for (size, fewest, least) in &mut self.sizes {
            shortest = shortest.min(problem.least_seconds(load, *fewest, *size));
            *least = least.min(shortest);
        }
    }

    /// No step takes less, if it takes no less than `least`. (Without the hops.)
    ///
    /// # Complexity
    /// O(log world_size) where that says it already.
    fn seconds(&self, least: f64) -> f64 {
        let held = (self.work + self.exchange.max(0.0)) / self.stages;
        let takes = |seconds: f64| {
            let of_size = |&(size, least, shortest): &(usize, usize, f64)| {
                let fewest = least.max(self.widest).max(self.fewest) as f64;
                size >= self.widest && self.takes(seconds, held, fewest, shortest / self.stages)
            };
            self.sizes.iter().any(of_size)
        };
        if least <= 0.0 || takes(least) {
            return least;
        }
        let (mut short, mut long) = (least, 2.0 * least);
        while !takes(long) && long.is_finite() {
            (short, long) = (long, 2.0 * long);
        }
        for _ in 0..HALVINGS {
            let middle = (short + long) / 2.0;
            if takes(middle) { long = middle } else { short = middle }
        }
        short
    }

    /// Whether steps of so many seconds may be, with from `fewest` ranks on that have those documents, which take
    /// `shortest` each and `held` together.
    fn takes(&self, seconds: f64, held: f64, fewest: f64, shortest: f64) -> bool {
        let spare = seconds - self.way * shortest;
        if spare <= 0.0 {
            return false;
        }
        let (mut fewest, mut most) = (fewest.max(held / spare), self.ranks);
        let idle = seconds * self.even;
        let kept = self.ranks * idle - self.total;
        let first = (kept - held / 2.0, 1.5 * (seconds - self.ends * shortest) - idle);
        let second = (kept - 2.0 * held, 3.0 * spare - idle);
        for (without, each) in [first, second] {
            // Whether `without + each * h` is not negative.
            if each > 0.0 {
                fewest = fewest.max(-without / each);
            } else if each < 0.0 {
                most = most.min(without / -each);
            } else if without < 0.0 {
                return false;
            }
        }
        fewest <= most
    }
}

/// Seconds of exchange that no plan hides, of all ranks together.
///
/// A group of `c` ranks with documents of `T` tokens and attention `a` in all takes, of all its ranks together,
/// `c (c - 1) l + T (c - 1) s - h a` for exchange, if that is above 0: latency `l`, `s` a token, a part `h` of
/// attention hides it. As a rank has no more than `M` tokens, `T <= c M`, and the first is at least `T (c - 1) l / M`.
/// So it takes no less than the sum of `t (c - 1) (s + l / M) - h a` over its documents, which grows with `c`; and no
/// less than nothing. Count the sum for groups of at least `C` ranks, and nothing for others: all groups together take
/// no less than the sum of each document's least of these. That holds for every `C`: a large one does not let documents
/// that hide much on few ranks hide what those that need many have to exchange.
fn exchanged(problem: &Problem) -> f64 {
    let from = |counted: usize| {
        let of = |document: &Document| {
            let smallest = problem.smallest(&document.load);
            let least = exposed(problem, &document.load, smallest.max(counted));
            if smallest < counted { least.min(0.0) } else { least }
        };
        problem.documents.iter().map(of).sum::<f64>()
    };
    let counted = std::iter::successors(Some(2), |size| Some(2 * size));
    counted.take_while(|&size| size <= problem.largest_group).map(from).fold(0.0, f64::max)
}

/// The part of that sum that a document is on a group of so many ranks or more.
fn exposed(problem: &Problem, load: &Load, cp_size: usize) -> f64 {
    let Communication { seconds_per_exchange, seconds_per_token, overlap } = problem.cost.of_size(cp_size);
    let price = seconds_per_token + seconds_per_exchange / problem.max_tokens_per_rank as f64;
    load.tokens as f64 * (cp_size - 1) as f64 * price - overlap * load.attention
}

/// Least times, through the whole model, of a micro-batch with a document, on groups that it fits on. Not less for a
/// longer document that costs no less.
#[derive(Clone, Copy)]
struct Least {
    /// The mean over all ranks: its group takes no less than for it alone, other ranks no less than nothing takes.
    mean: f64,
    /// On its group, if that is not all ranks; infinite if it has to be.
    fewer: f64,
    /// On all ranks; infinite if it cannot be.
    whole: f64,
}

impl Least {
    fn of(problem: &Problem, document: &Document) -> Self {
        let constant = problem.cost.micro_batch_seconds;
        let least_on = |least, most| problem.least_seconds(&document.load, least, most);
        let largest = problem.largest_group;
        let mean = |cp_size: usize| {
            let seconds = problem.cost.seconds(&document.load, cp_size);
            constant + (seconds - constant) * (cp_size as f64 / problem.world_size as f64)
        };
        // All ranks of a group together take no less for more of them; where exchange has one price.
        let smallest = problem.smallest(&document.load);
        let across = problem.cost.ranks_of_node().saturating_add(1).max(smallest);
        let across = if across <= largest { mean(across) } else { f64::INFINITY };
        Self {
            mean: mean(smallest).min(across),
            fewer: least_on(1, largest.min(problem.world_size - 1)),
            whole: if largest == problem.world_size { least_on(largest, largest) } else { f64::INFINITY },
        }
    }

    /// The smaller of both bounds.
    fn min(&self, other: &Self) -> Self {
        Self { mean: self.mean.min(other.mean), fewer: self.fewer.min(other.fewer), whole: self.whole.min(other.whole) }
    }
}

/// Micro-batches take at least this long that together take so many `seconds` of the whole model, whatever each takes.
pub(super) fn of_sum(seconds: f64, options: &DynamicCpOptions, num_micro_batches: usize) -> f64 {
    let sum = seconds / options.num_stages as f64;
    if options.num_virtual_stages > 1 || options.num_stages == 1 {
        return sum;
    }
    fill_and_drain(sum, options.num_stages as f64, num_micro_batches)
}

/// At most `most` micro-batches of together `sum`.
///
/// A path: forwards on the first stage up to that of `i`, this up to the last stage, everything there up to `k >= i`,
/// the backward of `k` down to the first stage, the backwards behind it there. It takes `S + F(i) + D(k)` with
///
/// `F(i) = w/3 x_i - 2/3 (sum before i)`, `D(k) = 2w/3 x_k - 1/3 (sum behind k)`.
///
/// Let `Q` be the sum of the first `c` micro-batches, `R = S - Q` that of the others, and `F`, `D` the largest of
/// `F(i)` among those, `D(k)` among these. `F(i) <= F` says `P_i + x_i + 3F/2 <= g (P_i + 3F/2)` for the sum `P_i`
/// before `i`, with `g = 1 + 2/w`; from the first on, `Q + 3F/2 <= g^c 3F/2`: so `F >= Q / (1.5 (g^c - 1))`. In the
/// same way, from the last on, `D >= R / (3 (h^(m-c) - 1))` with `h = 1 + 1/(2w)`. As `Q + R = S`, the least of the sum
/// of these two is where one of `Q` and `R` is 0. That holds for every `c`. (Fewer micro-batches than `most` are some
/// that take nothing.)
fn fill_and_drain(sum: f64, stages: f64, most: usize) -> f64 {
    let way = stages - 1.0;
    let mut drain = vec![1.0_f64; most + 1];
    for count in 0..most {
        drain[count + 1] = drain[count] * (1.0 + 0.5 / way);
    }
    let mut fill = 1.0_f64;
    let mut part = 0.0_f64;
    for count in 0..=most {
        // Over none of them it is infinite.
        let (before, behind) = (1.5 * (fill - 1.0), 3.0 * (drain[most - count] - 1.0));
        part = part.max(1.0 / before.max(behind));
        fill *= 1.0 + 2.0 / way;
    }
    sum + sum * part
}

/// Documents of together `t` (`together`), wherever they are; micro-batches with the shortest of them take at least `y`
/// (`shortest`), with others `x` (`longer`, no less); `others` is the rest of `S`.
///
/// Of the rest, `q` is in the `n <= w` micro-batches right before the first of them, `e` in those before, `s` behind
/// the last. What is in between counts as `t`, in full on both paths. Say the first takes `x` and the last `y`: either
/// both are one, with all of them, which takes more; or they have not both the shortest, and then these paths, with
/// more of the last than of the first, are shortest so.
///
/// - The first forward up, everything from the first to the last of them on the last stage, the last backward down. On
///   the first stage, all before that forward but the backwards of the last `n`, and all backwards behind:
///   `A = e + q/3 + w/3 x + t + 2w/3 y + 2/3 s`.
/// - The path of [`fill_and_drain`], from one of the `n` to the last of them: `B = e + q + F + t + 2w/3 y + 2/3 s`,
///   where `F >= (q + e - e g^n) / (1.5 (g^n - 1)) = q/u - 2/3 e` with `u = 1.5 (g^n - 1)`; less for fewer than `n`.
///
/// No step takes less than `A` and `B` in any proportion `a : 1 - a`. With `a = (u + 3) / (2u + 3)` ([`balance`]),
/// where a second in `q` and one in `s` count the same, 2/3, and one in `e` counts `1/3 + 2a/3`, no less, since `a >=
/// 1/2`: so `t + 2/3 (e + q + s) + w/3 (a x + 2y)`. With `a = 1`, what counts least is `q`:
/// `t + w/3 (x + 2y) + (e + q + s) / 3`. More in between than `t` is more in both.
fn around(together: f64, longer: f64, shortest: f64, others: f64, way: f64, a: f64) -> f64 {
    let ends = |a: f64| way / 3.0 * (a * longer + 2.0 * shortest);
    (together + others / 3.0 + ends(1.0)).max(together + others * 2.0 / 3.0 + ends(a))
}

/// The proportion of the first path of [`around`]: at most `most - 1` micro-batches are before another.
fn balance(stages: f64, most: usize) -> f64 {
    let way = stages - 1.0;
    let mut growth = 1.0;
    for _ in 0..(most - 1).min(way as usize) {
        growth *= 1.0 + 2.0 / way;
    }
    let u = 1.5 * (growth - 1.0);
    (u + 3.0) / (2.0 * u + 3.0)
}
