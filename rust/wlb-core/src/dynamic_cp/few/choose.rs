//! The best plan of few documents, from walks of every number of micro-batches.

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

/// Work of all walks of a document, of two and so on, in thousands of [`Clock::LEAST`].
const WORK: [usize; MOST] = [0, 4, 20, 22, 24, 26, 28, 32, 34, 38, 42, 48, 56, 64, 64, 64];
/// Part of the work that all numbers of micro-batches share equally; the rest is for the best of them.
const ALIKE: f64 = 0.3;
/// Number of best numbers of micro-batches that are searched on.
const BEST: usize = 3;
/// Walks from each of them.
const ROUNDS: usize = 8;
/// Part by which a step of a walk may be slower at the beginning: `FAR` in a walk from documents that were dealt out,
/// `NEAR` in one from the best layout.
const FAR: f64 = 0.03;
const NEAR: f64 = 0.01;
/// `FAR` is multiplied by 1 plus this over the square of the number of documents: with few documents each is a large
/// part of a step, and nearly every neighbour of a layout is much slower.
const ROUGH: f64 = 80.0;

/// Whether the problem has few enough documents and ranks for this search.
pub(in crate::dynamic_cp) fn are_few(problem: &Problem) -> bool {
    (1..=MOST).contains(&problem.documents.len()) && problem.world_size <= MOST_RANKS
}

/// The best plan of each number of micro-batches, whatever number is asked for.
///
/// # Arguments
/// * `problems` - the problem with each gain.
/// * `starts` - plans where the search goes on, beside those that the other ways find.
/// * `found` - what these found with the numbers that are asked for.
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
    // A faster plan may have kept the best of these from being found, and have micro-batches without documents.
    let pipeline = |count: usize| Ok(Rc::new(Pipeline::new(&free.pipeline(count))?));
    starts.extend(in_one_size(problem, &free, &counts, false, f64::INFINITY, pipeline)?);
    let most = counts.least.max(problem.documents.len());
    let counts: Vec<usize> = (counts.least..=most).filter(|&count| counts.allow(problem, &free, count)).collect();
    let (Some(&least), Some(&most)) = (counts.first(), counts.last()) else { return Ok(Vec::new()) };
    searched(problem, &free, &counts, &starts, bound::lower_bound(problem, &free, least, most))
}

/// Makes `found` the best of those plans that has as many micro-batches as are asked for; where there is none, the
/// search goes on from what was found, with as many.
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
        // What is found with a number that is asked for is not faster than the free choice.
        let any = plans.is_empty();
        plans.extend(own.into_iter().filter(|own| any || own.price(options) >= fastest));
    }
    plans.sort_by_key(|plan| plan.num_micro_batches);
    found.sweep.clear();
    let plans = fastest_first(plans, |plan| plan.price(options));
    let least = plans.first().map_or(0.0, |best| best.price(options));
    for plan in &plans {
        // Less than the best is rounding.
        let seconds = plan.seconds.max(least / price(options, plan.num_micro_batches, 1.0));
        note(&mut found.sweep, plan.num_micro_batches, seconds);
    }
    found.best = plans.into_iter().next();
    Ok(())
}

/// The best plans that were found, one for each number of micro-batches that any was found for; in none of them is a
/// micro-batch without documents, where there are as many.
///
/// # Arguments
/// * `counts` - numbers of micro-batches that they may have.
/// * `starts` - plans that none of as many micro-batches is slower than.
/// * `bound` - seconds that no plan is below.
///
/// # Complexity
/// Amount of search for a number of documents: it depends on nothing else.
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
        // Micro-batches without documents go, or get some: a schedule may be faster with as many.
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

/// Sorts by price, fastest first; layouts whose prices differ by rounding only keep their order.
fn fastest_first<T>(mut all: Vec<T>, price: impl Fn(&T) -> f64) -> Vec<T> {
    let mut sorted = Vec::with_capacity(all.len());
    while !all.is_empty() {
        let least = all.iter().map(&price).fold(f64::INFINITY, f64::min);
        let first = all.iter().position(|one| price(one) * (1.0 - SAME) <= least).unwrap_or(0);
        sorted.push(all.remove(first));
    }
    sorted
}
