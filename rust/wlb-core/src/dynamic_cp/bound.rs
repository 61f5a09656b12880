//! Lower bounds on the time of a step, for any plan.
//!
//! A *path* is a chain of ops, each of which waits for the one before it; a step takes at least the time of any path.
//! All paths here stay on the same rank number in every stage, and each bound is a sum over the micro-batches of that
//! rank with factors that are equal for all ranks. So the bounds also hold for means over ranks; and the mean time of a
//! micro-batch is at least its work spread over all ranks, however these are grouped.
//!
//! From here on times are of one stage: micro-batch `j` takes `x_j`, a third of it in the forward pass. There are `p`
//! stages, `w = p - 1`, `m` micro-batches, and `S` is the sum of all `x_j`. Two facts of 1F1B are used. The last stage
//! runs forward and backward of one micro-batch after the other. On the first stage, the forward of micro-batch `j`
//! comes after all forwards before it and after the backwards up to `j - p`.

use crate::packing::Sync;

use super::cost::{Exchange, Load};
use super::options::{DynamicCpOptions, GroupSizes};
use super::problem::{Document, Problem};

/// A lower bound on the time of a step, in seconds, for any plan.
///
/// The largest of
///
/// - all work, and the exchange that no plan hides ([`exchanged`]), spread evenly over all ranks of all stages, plus
///   the constant part of `least` micro-batches;
/// - the way of the longest document through the pipeline on its best group;
/// - if the pipeline is not interleaved: the time to fill and drain it with `most` micro-batches ([`fill_and_drain`]);
///   and for every `k` the time around the `k` longest documents ([`around`]), if all ranks have them, or if some ranks
///   have them while the others do the rest ([`Hosts`]).
///
/// All bounds but the second include the hops to the last stage and back, since every path can be made to contain them.
///
/// In a V-shaped pipeline the first bound has only the hops to the last rank, because weight gradients may run there
/// while other ops hop back. The way of a document is then its forward, its input gradients and the last of its weight
/// gradients: two thirds of its time, and a third of one of `2 p` stages. Nothing hops between the two stages of the
/// last rank.
///
/// # Complexity
/// O(min(documents, most) log world_size + most).
pub(super) fn lower_bound(problem: &Problem, options: &DynamicCpOptions, least: usize, most: usize) -> f64 {
    let &DynamicCpOptions { num_stages, num_virtual_stages, p2p_seconds, .. } = options;
    let stages = num_stages as f64;
    // With one stage there are no hops.
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
    // If documents bring their own costs, a long one of little work may need ranks that have to exchange a lot.
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
        // If costs follow lengths, each is less than the one before it anyway.
        let shortest = shortest.min(&before);
        longer = Some(shortest);
        let longer = before;
        // Either all of these documents have all ranks, or one of them (not cheaper than this one) goes the whole way
        // on fewer.
        let whole = around(longer.whole, shortest.whole).min(shortest.fewer + whole_way);
        bound = bound.max(around(longer.mean, shortest.mean)).max(whole);
        hosts.join(problem, document);
        bound = bound.max(hosts.seconds(bound - to_the_last) + to_the_last);
    }
    bound
}

/// Number of times the gap between an impossible and a possible time is halved.
const HALVINGS: usize = 24;

/// Ranks that have one of the `k` costliest documents (hosts), and the other ranks, which do the remaining work.
///
/// Let `h` ranks be hosts, and let no group of these documents be larger than `c`; so `h` is from `c` to `r`, all
/// ranks. A host takes at least `t` in each micro-batch with such a document, the least time on any group of at most
/// `c` ranks. The paths of [`around`] hold for each rank by itself. Let `T` be the time of the step, `S` the time that
/// a rank computes, and `u` the part of `S` in micro-batches where the rank has such documents:
///
/// - on a host `T >= u + 2/3 (S - u) + e` with `e = w/3 (a + 2) t`, and `T >= u + 1/3 (S - u) + w t`;
/// - on every other rank `T >= g S`, since the pipeline fills and drains ([`fill_and_drain`]).
///
/// Sum over the ranks. All `S` together are at least `W`, all work and the exchange that no plan hides. All `u`
/// together are at least `Q`, the same for the `k` documents alone, since no group gets faster by other documents. And
/// `S >= u`. So the `S` of the hosts are at most `3/2 h (T - e) - Q/2` and at most `3 h (T - w t) - 2 Q`; those of the
/// other ranks are at most `(r - h) T / g`; and both sums must reach `W`. Also the hosts must reach `Q`: `h (T - w t)
/// >= Q`. For a given `T` all conditions are linear in `h`, so it is quickly decided whether an `h` satisfies all. If
/// for no `c` there is such an `h`, no step takes only `T`, nor less, since a longer time satisfies all conditions more
/// easily. If all ranks wait in each micro-batch, `h = r`.
struct Hosts {
    ranks: f64,
    /// `W`, `1 / g`, `w` and `w (a + 2) / 3`.
    total: f64,
    even: f64,
    way: f64,
    ends: f64,
    stages: f64,
    /// For each `c`, ascending: `c`, the least size of groups that only this `c` allows, and `t`.
    sizes: Vec<(usize, usize, f64)>,
    /// Work of the `k` documents, their exchange beyond what attention hides, and the ranks that the widest needs.
    work: f64,
    exchange: f64,
    widest: usize,
    /// Least number of ranks that count as hosts.
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

    /// Adds one document to the `k` documents.
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

    /// A lower bound on the step, without hops; `least` is a bound that is known already.
    ///
    /// # Complexity
    /// O(log world_size) if `least` is possible, so that it is the result.
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

    /// Whether a step may take this many seconds, if at least `fewest` ranks are hosts, a micro-batch of theirs takes
    /// at least `shortest`, and all of theirs take at least `held` together.
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
            // The condition `without + each * h >= 0`.
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

/// Seconds of exchange that no plan hides, summed over all ranks.
///
/// Take a group of `c` ranks whose documents have `T` tokens and attention `a`. Its ranks together spend `c (c - 1) l +
/// T (c - 1) s - h a` seconds on exchange, if that is above 0: the latency is `l`, a token costs `s`, and a part `h` of
/// the attention hides exchange. A rank holds at most `M` tokens, so `T <= c M`, and the first term is at least `T (c -
/// 1) l / M`. So the group spends at least the sum over its documents of `t (c - 1) (s + l / M) - h a`, which grows
/// with `c`, and at least 0.
///
/// Choose a `C`. Count this sum for groups of at least `C` ranks and 0 for all others: together the groups spend at
/// least the sum over documents of the least that each can count. That holds for every `C`. With a large `C`, documents
/// that hide much exchange on few ranks do not cancel the exchange of documents that need many ranks.
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

/// A document's term in that sum, on a group of this many ranks.
fn exposed(problem: &Problem, load: &Load, cp_size: usize) -> f64 {
    let Exchange { seconds_per_exchange, seconds_per_token, overlap } = problem.cost.of_size(cp_size);
    let price = seconds_per_token + seconds_per_exchange / problem.max_tokens_per_rank as f64;
    load.tokens as f64 * (cp_size - 1) as f64 * price - overlap * load.attention
}

/// Lower bounds on a micro-batch with this document, through the whole model, over all groups that the document fits
/// on. A longer document that costs no less has no smaller bounds.
#[derive(Clone, Copy)]
struct Least {
    /// Mean over all ranks: the group takes at least as long as for the document alone, other ranks at least the
    /// constant.
    mean: f64,
    /// Time on a group of fewer than all ranks; infinite if the document needs all.
    fewer: f64,
    /// Time on a group of all ranks; infinite if that is not allowed.
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
        // The ranks of a group together take longer on larger groups, as long as the price of exchange is the same.
        let smallest = problem.smallest(&document.load);
        let across = problem.cost.ranks_of_node().saturating_add(1).max(smallest);
        let across = if across <= largest { mean(across) } else { f64::INFINITY };
        Self {
            mean: mean(smallest).min(across),
            fewer: least_on(1, largest.min(problem.world_size - 1)),
            whole: if largest == problem.world_size { least_on(largest, largest) } else { f64::INFINITY },
        }
    }

    /// The smaller of both, bound by bound.
    fn min(&self, other: &Self) -> Self {
        Self { mean: self.mean.min(other.mean), fewer: self.fewer.min(other.fewer), whole: self.whole.min(other.whole) }
    }
}

/// A lower bound for micro-batches that together take this many `seconds` of the whole model, however they are divided.
pub(super) fn of_sum(seconds: f64, options: &DynamicCpOptions, num_micro_batches: usize) -> f64 {
    let sum = seconds / options.num_stages as f64;
    if options.num_virtual_stages > 1 || options.num_stages == 1 {
        return sum;
    }
    fill_and_drain(sum, options.num_stages as f64, num_micro_batches)
}

/// A lower bound for at most `most` micro-batches that together take `sum`.
///
/// The path runs the forwards on the first stage up to that of micro-batch `i`, follows `i` up to the last stage, runs
/// everything there up to `k >= i`, follows the backward of `k` down to the first stage, and runs the backwards after
/// it there. It takes `S + F(i) + D(k)` with
///
/// `F(i) = w/3 x_i - 2/3 (sum before i)`, `D(k) = 2w/3 x_k - 1/3 (sum after k)`.
///
/// Let `Q` be the sum of the first `c` micro-batches and `R = S - Q` that of the others. Let `F` be the largest `F(i)`
/// among the first `c`, and `D` the largest `D(k)` among the others. With the sum `P_i` before `i` and `g = 1 + 2/w`,
/// `F(i) <= F` means `P_i + x_i + 3F/2 <= g (P_i + 3F/2)`. Applied from the first on, `Q + 3F/2 <= g^c 3F/2`, so `F >=
/// Q / (1.5 (g^c - 1))`. In the same way, from the last on, `D >= R / (3 (h^(m-c) - 1))` with `h = 1 + 1/(2w)`. Since
/// `Q + R = S`, the sum `F + D` is least where `Q` or `R` is 0. That holds for every `c`. (Fewer micro-batches than
/// `most` count as if the missing ones took no time.)
fn fill_and_drain(sum: f64, stages: f64, most: usize) -> f64 {
    let way = stages - 1.0;
    let mut drain = vec![1.0_f64; most + 1];
    for count in 0..most {
        drain[count + 1] = drain[count] * (1.0 + 0.5 / way);
    }
    let mut fill = 1.0_f64;
    let mut part = 0.0_f64;
    for count in 0..=most {
        // The term of an empty part is infinite.
        let (before, behind) = (1.5 * (fill - 1.0), 3.0 * (drain[most - count] - 1.0));
        part = part.max(1.0 / before.max(behind));
        fill *= 1.0 + 2.0 / way;
    }
    sum + sum * part
}

/// A lower bound for documents that together take `t` (`together`), wherever they are. A micro-batch with the shortest
/// of them takes at least `y` (`shortest`), one with others at least `x >= y` (`longer`). `others` is the rest of `S`.
///
/// The rest has `q` in the `n <= w` micro-batches just before the first of these documents, `e` in the micro-batches
/// before those, and `s` behind the last of these documents. Work in between counts like `t`, in full on both paths.
/// Let the first micro-batch take `x` and the last `y`. (If both are the same micro-batch, it has all documents and
/// takes more. If only one of them has the shortest document, both paths are shortest in this order, since the last
/// counts more.)
///
/// - Path A follows the first forward up, runs everything from the first to the last of them on the last stage, and
///   follows the last backward down. On the first stage it runs everything before that forward, except the backwards of
///   the last `n`, and all backwards after: `A = e + q/3 + w/3 x + t + 2w/3 y + 2/3 s`.
/// - Path B is that of [`fill_and_drain`] from one of the `n` to the last of them: `B = e + q + F + t + 2w/3 y + 2/3
///   s`, with `F >= (q + e - e g^n) / (1.5 (g^n - 1)) = q/u - 2/3 e`, `u = 1.5 (g^n - 1)`. Fewer than `n` micro-batches
///   give less.
///
/// A step takes at least `a A + (1 - a) B` for any `a` from 0 to 1. With `a = (u + 3) / (2u + 3)` ([`balance`]), a
/// second in `q` and one in `s` count 2/3, and one in `e` counts `1/3 + 2a/3`, at least as much since `a >= 1/2`. So
/// the step takes at least `t + 2/3 (e + q + s) + w/3 (a x + 2y)`. With `a = 1` the least counted is `q`, and the step
/// takes at least `t + w/3 (x + 2y) + (e + q + s) / 3`. Work in between beyond `t` makes both larger.
fn around(together: f64, longer: f64, shortest: f64, others: f64, way: f64, a: f64) -> f64 {
    let ends = |a: f64| way / 3.0 * (a * longer + 2.0 * shortest);
    (together + others / 3.0 + ends(1.0)).max(together + others * 2.0 / 3.0 + ends(a))
}

/// The `a` of [`around`], if at most `most - 1` micro-batches come before another.
fn balance(stages: f64, most: usize) -> f64 {
    let way = stages - 1.0;
    let mut growth = 1.0;
    for _ in 0..(most - 1).min(way as usize) {
        growth *= 1.0 + 2.0 / way;
    }
    let u = 1.5 * (growth - 1.0);
    (u + 3.0) / (2.0 * u + 3.0)
}
