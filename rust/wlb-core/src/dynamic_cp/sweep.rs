//! The plan of a step: which numbers of micro-batches and sizes of blocks are tried, in which order, and which are not
//! worth it.

use crate::error::{Error, Result};
use crate::lengths::Lengths;
use crate::pipeline::Pipeline;

use super::bound;
use super::check::check;
use super::cost::{Costs, GroupCost};
use super::counts::{Counts, candidates, limit, note, price, whole};
use super::demand::Demand;
use super::draft;
use super::memory;
use super::options::{DynamicCpOptions, GroupSizes};
use super::plan::DynamicCpPlan;
use super::problem::Problem;
use super::search::{Candidate, SAME, SMALL, Search};
use super::simulate;

/// Steps towards the best targets, of numbers of micro-batches that promise to be among the best.
const STEPS: usize = 32;
/// What those steps leave of the time, at best.
const PROMISE: f64 = 0.998;
/// Where exchange costs: how much faster twice the ranks have to make a document that is not done in time on them
/// either. Much, where many documents share the ranks; little, where the step waits for a few.
const GAINS: [f64; 3] = [1.4, 1.2, 1.05];
/// Where exchange costs, so few documents are also planned by the targets of one that costs nothing.
const FEW: usize = 1024;
/// Of more, another gain is tried for numbers of micro-batches that were so close to the best with those before.
const NEAR: f64 = 1.05;
/// A solution is given up where what is placed so far takes so much longer than the best: halving blocks makes up for
/// less.
const LATE: f64 = 1.05;
/// No larger blocks are tried where the step takes so much longer than with smaller ones.
const LARGE: f64 = 1.2;
/// Of those, the size of blocks that suits the best number of micro-batches is tried for others that were so close to
/// it.
const CLOSE: f64 = 1.1;

/// Divides the documents of one step, whose names are their indices.
pub(super) fn plan(lengths: &Lengths, options: &DynamicCpOptions, costs: Costs<'_>) -> Result<DynamicCpPlan> {
    let plan = planned(lengths, options, costs)?;
    if options.group_sizes == GroupSizes::PowersOfTwo {
        return Ok(plan);
    }
    // Among more groups the search sometimes ends at a slower plan: so that of fewer is one of them.
    let of_powers = DynamicCpOptions { group_sizes: GroupSizes::PowersOfTwo, ..options.clone() };
    let paid = |plan: &DynamicCpPlan| price(options, plan.num_micro_batches(), plan.seconds);
    Ok(match planned(lengths, &of_powers, costs) {
        Ok(other) if paid(&other) < paid(&plan) => {
            DynamicCpPlan { lower_bound: plan.lower_bound.min(other.lower_bound), ..other }
        }
        _ => plan,
    })
}

/// The same with groups of just those sizes.
fn planned(lengths: &Lengths, options: &DynamicCpOptions, costs: Costs<'_>) -> Result<DynamicCpPlan> {
    let largest_group = check(lengths, options, costs)?;
    // A constant of the cost model is one more that every micro-batch takes.
    let micro_batch_seconds = options.micro_batch_seconds + costs.micro_batch();
    let max_tokens_per_rank = options.most_tokens()?;
    let options = &DynamicCpOptions { micro_batch_seconds, max_tokens_per_rank, ..options.clone() };
    let cost = GroupCost {
        communication: options.communication,
        node: options.node,
        micro_batch_seconds,
        document_seconds: costs.document(),
    };
    let world_size = options.world_size;
    let problem = Problem::new(lengths, costs, cost, options, largest_group);
    let Counts { least, start, most } = Counts::new(lengths, options)?;
    let mut counts = candidates(options, least, start - 1);
    counts.extend(candidates(options, start, most));
    counts.dedup();
    let gains: &[f64] = if problem.cost.is_free() { &GAINS[..1] } else { &GAINS };
    let problems: Vec<Problem> = gains.iter().map(|&gain| problem.with_gain(gain)).collect();
    let mut search = Search::new(&problem, options);
    if !problem.cost.is_free() && problem.documents.len() <= FEW {
        search.as_if_free(&counts)?;
    }
    for problem in &problems {
        search.problem = problem;
        search.fitting = None;
        search.demand = (!problem.cost.is_free()).then(|| Demand::new(problem, most));
        search.all(&counts)?;
    }
    // The most that hold no more than memory was planned for, whatever is in them.
    let safe = (least..=most).rfind(|&count| !memory::limits_rounds(options, count));
    if search.best.is_none() && options.num_micro_batches.is_none() {
        match options.max_micro_batches {
            None => search.more(most)?,
            Some(_) => safe.filter(|count| !counts.contains(count)).map_or(Ok(()), |count| search.enough(count))?,
        }
    }
    if options.num_micro_batches.is_none() {
        search.between(most)?;
    }
    search.refine()?;
    if problem.documents.len() <= SMALL {
        for (evenly, rising) in [(false, false), (true, false), (true, true)] {
            let (before, sweep) = (search.best.clone(), search.sweep.clone());
            search.plainly(&counts, evenly, rising)?;
            search.refine()?;
            // Shorter by the estimate may be longer by the clock: then nothing is left of it, in the sweep neither.
            if rising
                && let (Some(before), Some(after)) = (before, search.best.clone())
                && search.simulated_price(&before)? < search.simulated_price(&after)?
            {
                (search.best, search.sweep) = (Some(before), sweep);
            }
        }
        if search.in_one_size(least, start, most)? {
            search.refine()?;
        }
    }
    let Some(best) = search.best.take() else {
        let argument = match options {
            DynamicCpOptions { num_micro_batches: Some(_), .. } => "num_micro_batches",
            DynamicCpOptions { max_micro_batches: Some(_), .. } => "max_micro_batches",
            DynamicCpOptions { max_documents: Some(_), .. } => "max_documents",
            _ => "max_tokens_per_rank",
        };
        let requirement = match options.max_documents {
            _ if least <= most && safe.is_none() => {
                "leaves no multiple of num_stages: in other rounds an interleaved pipeline holds more tokens than \
                 max_tokens_per_rank allows, and no way was found to have fewer in each micro-batch"
            }
            None => {
                "no way was found to fit the documents into so few micro-batches of world_size * max_tokens_per_rank \
                 tokens"
            }
            Some(_) => {
                "no way was found to fit the documents into so few micro-batches of world_size * max_tokens_per_rank \
                 tokens, in groups of at most max_documents"
            }
        };
        return Err(Error::Combination { argument, requirement });
    };
    let mut sweep = std::mem::take(&mut search.sweep);
    sweep.sort_by_key(|&(num_micro_batches, _)| num_micro_batches);
    let draft = best.draft.in_order(&best.order, &problem.documents);
    let pipeline = search.pipeline(best.num_micro_batches)?;
    let seconds = simulate::simulated(&pipeline, &draft, options);
    let last = sweep.last().map_or(most, |&(num_micro_batches, _)| num_micro_batches);
    let lower_bound = bound::lower_bound(&problem, options, least, last.max(most));
    let documents: Vec<i64> =
        draft.documents.iter().map(|&document| i64::from(problem.documents[document as usize].index)).collect();
    Ok(DynamicCpPlan {
        world_size,
        num_stages: options.num_stages,
        num_virtual_stages: options.num_virtual_stages,
        schedule: options.schedule(),
        sync: options.sync,
        max_tokens_per_rank,
        padding: options.padding.clone(),
        max_documents: options.max_documents,
        lengths: documents.iter().map(|&index| lengths[index as usize]).collect(),
        documents,
        groups: draft.groups.iter().map(draft::Group::planned).collect(),
        document_offsets: std::iter::once(0).chain(draft.groups.iter().map(|group| group.end as usize)).collect(),
        group_offsets: draft.offsets,
        seconds,
        p2p_seconds: options.p2p_seconds,
        lower_bound,
        balanced_seconds: problem.total_work / (world_size * options.num_stages) as f64,
        sweep,
    })
}

impl<'a> Search<'a> {
    /// A number of micro-batches that promises more seconds changes nothing: neither the best, nor what was noted of
    /// it.
    fn hopeless(&self, num_micro_batches: usize) -> f64 {
        let noted = self.sweep.iter().find(|&&(tried, _)| tried == num_micro_batches);
        let (Some(best), Some(&(_, seconds))) = (&self.best, noted) else { return f64::INFINITY };
        seconds.max(best.price(self.options) / (PROMISE * price(self.options, num_micro_batches, 1.0)))
    }

    /// The candidate whose targets promise most first.
    fn all(&mut self, counts: &[usize]) -> Result<()> {
        let near: Vec<usize> = counts.iter().copied().filter(|&count| self.is_near(count)).collect();
        let mut candidates =
            near.into_iter().map(|count| self.candidate(count, self.hopeless(count))).collect::<Result<Vec<_>>>()?;
        // What promises the same as with the gain before is the same problem.
        let promise = |candidate: &Candidate| (candidate.num_micro_batches, candidate.relaxed.seconds);
        let before = std::mem::replace(&mut self.promises, candidates.iter().map(promise).collect());
        let same = |a: (usize, f64), b: (usize, f64)| a.0 == b.0 && (a.1 - b.1).abs() <= SAME * b.1;
        candidates.retain(|candidate| !before.iter().any(|&before| same(before, promise(candidate))));
        candidates.sort_by(|a, b| a.relaxed.seconds.total_cmp(&b.relaxed.seconds));
        candidates.into_iter().try_for_each(|candidate| self.attempt(candidate))
    }

    /// Whether a number of micro-batches may be the best with another gain; of few documents any may.
    fn is_near(&self, count: usize) -> bool {
        let Some(best) = self.best.as_ref().filter(|_| self.problem.documents.len() > FEW) else { return true };
        let least = best.price(self.options) * NEAR;
        self.sweep.iter().all(|&(tried, seconds)| tried != count || price(self.options, count, seconds) <= least)
    }

    /// Solves for one number of micro-batches. If it would be slower than the best so far, no more than the promise.
    fn attempt(&mut self, mut candidate: Candidate) -> Result<()> {
        let Candidate { num_micro_batches, ref mut relaxed } = candidate;
        let promised = price(self.options, num_micro_batches, relaxed.seconds) * PROMISE;
        if self.best.as_ref().is_some_and(|best| promised >= best.price(self.options)) {
            let seconds = relaxed.seconds;
            note(&mut self.sweep, num_micro_batches, seconds);
            return Ok(());
        }
        let pipeline = self.pipeline(num_micro_batches)?;
        self.descend(relaxed, STEPS, &pipeline);
        if self.tries_sizes() {
            // Of few documents the second best may become the best.
            let late = self.best.as_ref().filter(|_| self.problem.documents.len() > SMALL);
            self.limit = late.map_or(f64::INFINITY, |best| best.price(self.options) * LATE);
            let tried = self.sizes(&candidate, &pipeline);
            self.limit = f64::INFINITY;
            tried
        } else {
            self.solve(&candidate, self.problem.largest_group, &pipeline).map(|_| ())
        }
    }

    /// Whether blocks of other than the largest size may be better: where exchange costs, and where a group may not
    /// have all documents, since a block has no more than a group may.
    fn tries_sizes(&self) -> bool {
        self.demand.is_some() || self.problem.counts_documents()
    }

    /// Plans by targets that know nothing of the exchange, then by them as much longer as the first solution took:
    /// largest blocks for all numbers of micro-batches, smaller ones for the best, and the best size for those close to
    /// it.
    fn as_if_free(&mut self, counts: &[usize]) -> Result<()> {
        let largest = self.problem.largest_group;
        let mut candidates =
            counts.iter().map(|&count| self.candidate(count, f64::INFINITY)).collect::<Result<Vec<_>>>()?;
        candidates.sort_by(|a, b| a.relaxed.seconds.total_cmp(&b.relaxed.seconds));
        for candidate in &mut candidates {
            let promised = price(self.options, candidate.num_micro_batches, candidate.relaxed.seconds) * PROMISE;
            if self.best.as_ref().is_none_or(|best| promised < best.price(self.options)) {
                let pipeline = self.pipeline(candidate.num_micro_batches)?;
                self.descend(&mut candidate.relaxed, STEPS, &pipeline);
                self.scaled(candidate, largest, false)?;
            }
        }
        let Some(best) = &self.best else { return Ok(()) };
        let (count, close) = (best.num_micro_batches, best.seconds * CLOSE);
        let others: Vec<usize> =
            self.sweep.iter().filter(|other| other.0 != count && other.1 <= close).map(|other| other.0).collect();
        let mut base = None;
        for size in self.problem.base_sizes().into_iter().filter(|&size| size < largest) {
            for candidate in candidates.iter().filter(|candidate| candidate.num_micro_batches == count) {
                if self.scaled(candidate, size, true)? {
                    base = Some(size);
                }
            }
        }
        for candidate in candidates.iter().filter(|candidate| others.contains(&candidate.num_micro_batches)) {
            if let Some(base) = base {
                self.scaled(candidate, base, true)?;
            }
        }
        Ok(())
    }

    /// Solves for the targets, for those that they began with, if `start`, and for the longer ones. Whether one is
    /// best.
    fn scaled(&mut self, candidate: &Candidate, base: usize, start: bool) -> Result<bool> {
        let pipeline = self.pipeline(candidate.num_micro_batches)?;
        let relaxed = &candidate.relaxed;
        let seconds = self.solve(candidate, base, &pipeline)?;
        let mut least = seconds;
        if start {
            least = least.min(self.solve_for(candidate, &relaxed.start, base, &pipeline)?);
        }
        let longer = seconds / relaxed.seconds;
        if longer.is_finite() {
            let targets: Vec<f64> = relaxed.targets.iter().map(|target| target * longer).collect();
            least = least.min(self.solve_for(candidate, &targets, base, &pipeline)?);
        }
        Ok(self.best.as_ref().is_some_and(|best| best.seconds == least))
    }

    /// Plans documents as plainly as can be, blocks of one size for all of them but those that need more memory: of few
    /// documents, a time that each micro-batch should take says little. `evenly`: as much work for every micro-batch.
    /// `rising`: the longest last.
    fn plainly(&mut self, counts: &[usize], evenly: bool, rising: bool) -> Result<()> {
        for &count in counts {
            let candidate = self.candidate(count, f64::INFINITY)?;
            let pipeline = self.pipeline(count)?;
            let targets = &candidate.relaxed.targets;
            let even = vec![targets.iter().sum::<f64>() / count as f64; count];
            let targets = if evenly { &even } else { targets };
            let places: Vec<f64> = (0..count).map(|place| place as f64).collect();
            let shape = if rising { &places } else { targets };
            for size in self.problem.plain_sizes() {
                self.solve_within(&candidate, (targets, shape), size, f64::INFINITY, &pipeline)?;
            }
        }
        Ok(())
    }

    /// Tries sizes of blocks: larger ones are more even, smaller ones exchange less, and have more documents in all. At
    /// first, with every gain, from the smallest up to one that is far from the best; then from the one that was
    /// fastest with this gain, as long as it gets faster.
    fn sizes(&mut self, candidate: &Candidate, pipeline: &Pipeline) -> Result<()> {
        let sizes: Vec<usize> = self.problem.base_sizes();
        let Some(middle) = self.fitting.and_then(|(_, base)| sizes.iter().position(|&size| size == base)) else {
            let mut least = f64::INFINITY;
            for &size in &sizes {
                let seconds = self.solve(candidate, size, pipeline)?;
                if self.problem.documents.len() > SMALL && least.is_finite() && seconds > least * LARGE {
                    break;
                }
                least = least.min(seconds);
            }
            return Ok(());
        };
        let seconds = self.solve(candidate, sizes[middle], pipeline)?;
        for larger in [true, false] {
            let (mut at, mut least) = (middle, seconds);
            while let Some(next) = if larger { Some(at + 1).filter(|&at| at < sizes.len()) } else { at.checked_sub(1) }
            {
                let seconds = self.solve(candidate, sizes[next], pipeline)?;
                if seconds >= least {
                    break;
                }
                (at, least) = (next, seconds);
            }
        }
        Ok(())
    }

    /// Where exchange costs, tries numbers of micro-batches between the best and those beside it that were tried, ever
    /// closer to it.
    fn between(&mut self, most: usize) -> Result<()> {
        if let Some((problem, base)) = self.suited.filter(|_| self.demand.is_some()) {
            self.problem = problem;
            self.fitting = self.best.as_ref().map(|best| (best.price(self.options), base));
            self.demand = Some(Demand::new(problem, most));
        }
        // Those too that turned out not to fit, of which the sweep knows nothing: no number is tried twice.
        let mut all: Vec<usize> = self.sweep.iter().map(|&(tried, _)| tried).collect();
        while let Some(best) = self.best.as_ref().filter(|_| self.demand.is_some()) {
            let count = best.num_micro_batches;
            let tried = || all.iter().copied();
            let below = tried().filter(|&tried| tried < count).max().map(|below| below + (count - below) / 2);
            let above = tried().filter(|&tried| tried > count).min().map(|above| count + (above - count) / 2);
            let new = |count: usize| {
                whole(self.options, count, usize::MAX).filter(|&count| !tried().any(|tried| tried == count))
            };
            let new: Vec<usize> = [below, above].into_iter().flatten().filter_map(new).collect();
            if new.is_empty() {
                break;
            }
            for count in new {
                all.push(count);
                let candidate = self.candidate(count, f64::INFINITY)?;
                self.attempt(candidate)?;
            }
        }
        Ok(())
    }

    /// Doubles the micro-batches until the documents fit, which they do when each can have one, or a plan may have no
    /// more.
    fn more(&mut self, most: usize) -> Result<()> {
        let round = if self.options.is_interleaved() { self.options.num_stages } else { 1 };
        let limit = limit(self.options);
        let whole = if limit > round { limit - limit % round } else { limit };
        let wanted = self.problem.documents.len().max(self.options.least_micro_batches());
        let enough = wanted.next_multiple_of(round).min(whole);
        let mut count = most;
        while self.best.is_none() && count < enough {
            count = (2 * count).next_multiple_of(round).min(enough);
            self.enough(count)?;
        }
        Ok(())
    }

    /// Solves for a number of micro-batches that may be enough where others were not.
    fn enough(&mut self, count: usize) -> Result<()> {
        let candidate = self.candidate(count, f64::INFINITY)?;
        let (pipeline, base) = (self.pipeline(count)?, self.problem.largest_group);
        self.solve(&candidate, base, &pipeline)?;
        self.solve_for(&candidate, &candidate.relaxed.start, base, &pipeline)?;
        if self.best.is_some() && self.tries_sizes() {
            self.fitting = None;
            self.sizes(&candidate, &pipeline)?;
        }
        Ok(())
    }
}
