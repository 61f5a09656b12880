//! Finds the best plan of few documents, by walks for every number of micro-batches.

use std::rc::Rc;

use crate::dynamic_cp::bound;
use crate::dynamic_cp::counts::{Counts, note, price};
use crate::dynamic_cp::one_size::in_one_size;
use crate::dynamic_cp::options::DynamicCpOptions;
use crate::dynamic_cp::plan::Best;
use crate::dynamic_cp::problem::Problem;
use crate::dynamic_cp::search::{Found, StepSearch};
use crate::error::Result;
use crate::lengths::Lengths;
use crate::pipeline::Pipeline;

use super::anneal::Walks;
use super::clock::{Clock, MOST_RANKS};
use super::draw::Draw;
use super::layout::{Layout, MOST, Parts, SAME};
use super::slots::Slots;

/// Work of all walks for one document, for two and so on, in thousands of [`Clock::LEAST`].
const WORK: [usize; MOST] = [0, 4, 20, 22, 24, 26, 28, 32, 34, 38, 42, 48, 56, 64, 64, 64];
/// Part of the work that is divided equally among all numbers of micro-batches; the rest goes to the best of them.
const ALIKE: f64 = 0.3;
/// How many of the best numbers of micro-batches get the rest.
const BEST: usize = 3;
/// Number of walks for each of them.
const ROUNDS: usize = 8;
/// Part by which a layout may be slower at the beginning of a walk: `FAR` if the walk begins with documents dealt out
/// anew, `NEAR` if it begins with the best layout.
const FAR: f64 = 0.03;
const NEAR: f64 = 0.01;
/// With `n` documents `FAR` is multiplied by `1 + ROUGH / n^2`: if documents are few, each is a large part of a step,
/// and nearly every neighbour of a layout is much slower.
const ROUGH: f64 = 80.0;

/// Whether this search applies: the problem has few enough documents and ranks.
pub(in crate::dynamic_cp) fn are_few(problem: &Problem) -> bool {
    (1..=MOST).contains(&problem.documents.len()) && problem.world_size <= MOST_RANKS
}

/// The best plan of each number of micro-batches, whatever number is asked for.
///
/// # Arguments
/// * `problems` - the problem with each gain.
/// * `starts` - plans from which the search continues, besides those of the other ways of planning.
/// * `found` - plans of the other ways for the numbers that are asked for.
pub(in crate::dynamic_cp) fn of_each_count(
    lengths: &Lengths,
    problem: &Problem,
    problems: &[Problem],
    options: &DynamicCpOptions,
    starts: &[Best],
    found: &Found,
) -> Result<Vec<Best>> {
    let free = DynamicCpOptions {
        num_micro_batches: None,
        min_micro_batches: None,
        max_micro_batches: None,
        ..options.clone()
    };
    let Ok(counts) = Counts::new(lengths, &free) else { return Ok(Vec::new()) };
    let mut starts = starts.to_vec();
    if free == *options {
        starts.extend(found.others.iter().chain(&found.best).cloned());
    } else {
        let found = StepSearch::new(problem, &free).run(problems, &counts)?;
        starts.extend(found.others.into_iter().chain(found.best));
    }
    // The other ways drop plans that are slower than their best, and may leave micro-batches empty, so these are added.
    let pipeline = |count: usize| Ok(Rc::new(Pipeline::new(&free.pipeline(count))?));
    starts.extend(in_one_size(problem, &free, &counts, false, f64::INFINITY, pipeline)?);
    let most = counts.least.max(problem.documents.len());
    let counts: Vec<usize> = (counts.least..=most).filter(|&count| counts.allow(problem, &free, count)).collect();
    let (Some(&least), Some(&most)) = (counts.first(), counts.last()) else { return Ok(Vec::new()) };
    searched(problem, &free, &counts, &starts, bound::lower_bound(problem, &free, least, most))
}

/// Sets `found` to the best of `others` whose number of micro-batches is allowed. If there is none, searches on from
/// `found` with its number.
pub(in crate::dynamic_cp) fn choose(
    problem: &Problem,
    options: &DynamicCpOptions,
    counts: &Counts,
    others: &[Best],
    found: &mut Found,
) -> Result<()> {
    let fastest = others.iter().map(|other| other.price(options)).fold(f64::INFINITY, f64::min);
    let mut plans: Vec<Best> =
        others.iter().filter(|other| counts.allow(problem, options, other.num_micro_batches)).cloned().collect();
    let count = found.best.as_ref().map(|best| best.num_micro_batches).or(options.num_micro_batches);
    if let Some(count) = count {
        let bound = if plans.is_empty() { bound::lower_bound(problem, options, count, count) } else { f64::INFINITY };
        let own = searched(problem, options, &[count], found.best.as_slice(), bound)?;
        // A plan with the number that is asked for must not beat the free choice.
        let any = plans.is_empty();
        plans.extend(own.into_iter().filter(|own| any || own.price(options) >= fastest));
    }
    plans.sort_by_key(|plan| plan.num_micro_batches);
    found.sweep.clear();
    let plans = fastest_first(plans, |plan| plan.price(options));
    let least = plans.first().map_or(0.0, |best| best.price(options));
    for plan in &plans {
        // A time below the best one's is rounding.
        let seconds = plan.seconds.max(least / price(options, plan.num_micro_batches, 1.0));
        note(&mut found.sweep, plan.num_micro_batches, seconds);
    }
    found.best = plans.into_iter().next();
    Ok(())
}

/// The best plan found for each number of micro-batches. No micro-batch is empty if there are as many documents as
/// micro-batches.
///
/// # Arguments
/// * `counts` - allowed numbers of micro-batches.
/// * `starts` - plans to begin with; no result is slower than a start with the same number of micro-batches.
/// * `bound` - a lower bound on the seconds of any plan.
///
/// # Complexity
/// Bounded by a fixed amount of search for each number of documents.
fn searched(
    problem: &Problem,
    options: &DynamicCpOptions,
    counts: &[usize],
    starts: &[Best],
    bound: f64,
) -> Result<Vec<Best>> {
    let parts = Parts { problem, slots: Slots::new(problem) };
    let mut walks = Walks::new(&parts, options, counts, bound)?;
    let may_have = |count: usize| counts.contains(&count);
    for start in starts {
        let Some(layout) = Layout::of(&start.draft, &start.order, &parts) else { continue };
        // Empty micro-batches are removed, or else filled: a schedule may be faster with as many micro-batches.
        let [fewer, as_many] = [layout.filled(&parts, may_have), layout.filled(&parts, |_| false)];
        for layout in [fewer, as_many].into_iter().flatten().filter(|layout| may_have(layout.count.into())) {
            walks.start_at(&layout)?;
        }
    }
    let work = WORK[problem.documents.len() - 1] * 1000 * Clock::LEAST;
    let alike = (work as f64 * ALIKE) as usize;
    let far = FAR * (1.0 + ROUGH / (problem.documents.len() as f64).powi(2));
    for &count in counts {
        walks.neighbours.draw = Draw(count as u64);
        walks.neighbours.allow(&[count]);
        if let Some(dealt) = walks.neighbours.dealt(count) {
            walks.walk(dealt, alike / counts.len(), far)?;
        }
    }
    walks.neighbours.allow(counts);
    let mut best = fastest_first(walks.found().copied().collect(), |found| found.price);
    best.truncate(BEST);
    for round in 0..ROUNDS {
        for found in &best {
            let count = usize::from(found.layout.count);
            let dealt = if round % 2 == 0 { walks.neighbours.dealt(count) } else { None };
            let above = if dealt.is_some() { far } else { NEAR };
            if let Some(start) = dealt.or_else(|| walks.best_of(count).map(|found| found.layout)) {
                walks.walk(start, (work - alike) / (ROUNDS * best.len()), above)?;
            }
        }
    }
    let planned = |found: &super::anneal::Found| {
        let num_micro_batches = usize::from(found.layout.count);
        let seconds = found.price / price(options, num_micro_batches, 1.0);
        let order = (0..num_micro_batches).collect();
        Best { num_micro_batches, draft: found.layout.draft(&parts), order, seconds }
    };
    Ok(walks.found().map(planned).collect())
}

/// Sorts by price, fastest first; layouts whose prices are equal up to rounding keep their order.
fn fastest_first<T>(mut all: Vec<T>, price: impl Fn(&T) -> f64) -> Vec<T> {
    let mut sorted = Vec::with_capacity(all.len());
    while !all.is_empty() {
        let least = all.iter().map(&price).fold(f64::INFINITY, f64::min);
        let first = all.iter().position(|one| price(one) * (1.0 - SAME) <= least).unwrap_or(0);
        sorted.push(all.remove(first));
    }
    sorted
}
