//! Plans for few documents in groups of one size: longest document first, each where it finishes first.
//!
//! Solutions by targets are compared by an estimate, in which all ranks wait for the slowest group, and halving their
//! blocks lets light micro-batches take the full time. With few documents both may lose more than they gain. The plans
//! of this file are not changed any more and are timed exactly, so the final plan is never slower than the fastest of
//! them.

use std::iter::Peekable;
use std::rc::Rc;

use crate::error::Result;
use crate::pipeline::Pipeline;

use super::cost::Load;
use super::counts::{Counts, price, whole};
use super::options::{DynamicCpOptions, GroupSizes};
use super::plan::{Best, Draft, DraftGroup, Group};
use super::problem::{Problem, at_most};
use super::simulate::{self, fits_memory};

/// Most documents for which these plans are made and documents are moved one by one.
pub(super) const SMALL: usize = 64;
/// Largest number of micro-batches tried, as a multiple of the number that memory or the pipeline needs.
const COUNTS: usize = 2;
/// Factor below which a time counts as faster; a smaller difference is rounding.
const FASTER: f64 = 1.0 - 1e-12;

/// Plans few documents in groups of one size, for each size and number of micro-batches. Each plan is timed in the
/// order in which it was made, and with the longest micro-batch last.
///
/// # Arguments
/// * `counts` - numbers of micro-batches.
/// * `may_be_empty` - whether a micro-batch may be empty although there are as many documents as micro-batches.
/// * `limit` - exact price of the best plan so far.
/// * `pipeline` - returns the pipeline for a number of micro-batches.
///
/// # Returns
/// The fastest of these plans, if its price is below `limit`.
pub(super) fn in_one_size(
    problem: &Problem,
    options: &DynamicCpOptions,
    counts: &Counts,
    may_be_empty: bool,
    mut limit: f64,
    mut pipeline: impl FnMut(usize) -> Result<Rc<Pipeline>>,
) -> Result<Option<Best>> {
    let mut best = None;
    let sizes = problem.single_sizes();
    for count in counts.least..=counts.most.min(COUNTS * counts.start) {
        if options.num_micro_batches.is_none() && whole(options, count, counts.most) != Some(count) {
            continue;
        }
        let pipeline = pipeline(count)?;
        for &size in &sizes {
            if price(options, count, bound(problem, options, count, size)) >= limit {
                continue;
            }
            let Some(placed) = Placed::new(problem, count, size) else { continue };
            if !may_be_empty && placed.leaves_empty() {
                continue;
            }
            for order in [(0..count).collect(), placed.longest_last()] {
                let seconds = placed.seconds(&order, &pipeline, options);
                if price(options, count, seconds) >= limit * FASTER {
                    continue;
                }
                let draft = placed.draft();
                if fits_memory(problem, options, &pipeline, &draft, &order)? {
                    limit = price(options, count, seconds);
                    best = Some(Best { num_micro_batches: count, draft, order, seconds });
                }
            }
        }
    }
    Ok(best)
}

/// A lower bound on steps in groups of one size: the ranks do all work, and the costliest document passes all stages in
/// turn. If weight gradients are separate ops, no stage waits for them, which is a third of the time.
fn bound(problem: &Problem, options: &DynamicCpOptions, count: usize, size: usize) -> f64 {
    let groups = (problem.world_size / size).min(problem.documents.len().max(1));
    let constant = problem.cost.micro_batch_seconds;
    let work: f64 = problem.documents.iter().map(|document| document.load.on(size as f64)).sum();
    let level = (work / groups as f64 + count as f64 * constant) / options.num_stages as f64;
    let costliest = problem.documents.first().map_or(0.0, |document| problem.cost.computing(&document.load, size));
    let waited_for = if options.schedule().is_v_shaped() { 2.0 / 3.0 } else { 1.0 };
    // A little less, because of rounding.
    level.max(waited_for * costliest) * (1.0 - 1e-12)
}

/// Documents placed in groups of one size.
struct Placed<'a> {
    problem: &'a Problem,
    count: usize,
    size: usize,
    /// Number of groups in a micro-batch.
    groups: usize,
    /// Group of each document; groups are numbered micro-batch by micro-batch.
    group_of: Vec<usize>,
    seconds: Vec<f64>,
}

impl<'a> Placed<'a> {
    /// `None` if a document finds no room.
    fn new(problem: &'a Problem, count: usize, size: usize) -> Option<Self> {
        let groups = problem.world_size / size;
        let first_rank = |group: usize| group % groups * size;
        let node = problem.cost.ranks_of_node();
        let is_inside = |group: usize| first_rank(group) % node + size <= node;
        // All empty groups inside a node are alike, and so are all across nodes: only the first of each is tried.
        let empty = |inside: bool| (0..count * groups).filter(move |&group| is_inside(group) == inside).peekable();
        let mut empty: [Peekable<_>; 2] = [empty(true), empty(false)];
        let mut opened: Vec<(usize, Load)> = Vec::new();
        let mut seconds = vec![problem.cost.micro_batch_seconds; count * groups];
        let mut group_of = Vec::with_capacity(problem.documents.len());
        for document in &problem.documents {
            let fresh = empty.iter_mut().filter_map(|groups| groups.peek().map(|&group| (group, Load::default())));
            let all = opened.iter().copied().chain(fresh).enumerate();
            let with = all.filter_map(|(at, (group, load))| {
                let load = load + document.load;
                let done = || problem.cost.at(first_rank(group) as u32, &load, size);
                problem.fits(&load, size).then(|| (done(), group, load, at))
            });
            let (done, group, load, at) = with.min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)))?;
            match opened.get_mut(at) {
                Some(opened) => opened.1 = load,
                None => {
                    opened.push((group, load));
                    empty.iter_mut().for_each(|groups| _ = groups.next_if_eq(&group));
                }
            }
            seconds[group] = done;
            group_of.push(group);
        }
        Some(Self { problem, count, size, groups, group_of, seconds })
    }

    /// Whether a micro-batch has no document although there are as many documents as micro-batches.
    fn leaves_empty(&self) -> bool {
        let mut is_empty = vec![true; self.count];
        self.group_of.iter().for_each(|group| is_empty[group / self.groups] = false);
        self.group_of.len() >= self.count && is_empty.contains(&true)
    }

    /// Micro-batches in ascending order of their time.
    fn longest_last(&self) -> Vec<usize> {
        let of = |j: usize| &self.seconds[j * self.groups..(j + 1) * self.groups];
        let slowest: Vec<f64> = (0..self.count).map(|j| of(j).iter().copied().fold(0.0, f64::max)).collect();
        let mut order: Vec<usize> = (0..self.count).collect();
        order.sort_by(|&a, &b| slowest[a].total_cmp(&slowest[b]));
        order
    }

    /// Seconds of the step. The ranks of a group do the same work in every micro-batch, so one rank stands for all of
    /// them. Groups that are always empty never finish last and are left out.
    fn seconds(&self, order: &[usize], pipeline: &Pipeline, options: &DynamicCpOptions) -> f64 {
        let used = 1 + self.group_of.iter().map(|group| group % self.groups).max().unwrap_or(0);
        let group = |j: usize, rank: usize| {
            let seconds = self.seconds[j * self.groups + rank];
            Group { first_rank: rank as u32, cp_size: 1, seconds }
        };
        let groups: Vec<Group> = order.iter().flat_map(|&j| (0..used).map(move |rank| group(j, rank))).collect();
        let offsets: Vec<usize> = (0..=self.count).map(|j| j * used).collect();
        simulate::of_groups(pipeline, &groups, &offsets, &DynamicCpOptions { world_size: used, ..options.clone() })
    }

    /// The plan as a draft; ranks without a group are idle.
    fn draft(&self) -> Draft {
        let Self { problem, size, .. } = self;
        let constant = problem.cost.micro_batch_seconds;
        let mut draft = Draft { offsets: vec![0], ..Draft::default() };
        for j in 0..self.count {
            for place in 0..self.groups {
                let group = j * self.groups + place;
                let inside = self.group_of.iter().enumerate().filter(|&(_, &other)| other == group);
                draft.documents.extend(inside.map(|(document, _)| document as u32));
                let (first_rank, cp_size, seconds) = ((place * size) as u32, *size as u32, self.seconds[group]);
                draft.groups.push(DraftGroup { first_rank, cp_size, seconds, end: draft.documents.len() as u32 });
            }
            let mut first = self.groups * size;
            while first < problem.world_size {
                let left = problem.world_size - first;
                let ranks = match problem.group_sizes {
                    GroupSizes::Any => problem.only().map_or(left, |sizes| at_most(sizes, left)),
                    GroupSizes::PowersOfTwo => 1 << left.ilog2(),
                };
                let (first_rank, cp_size, end) = (first as u32, ranks as u32, draft.documents.len() as u32);
                draft.groups.push(DraftGroup { first_rank, cp_size, seconds: constant, end });
                first += ranks;
            }
            draft.offsets.push(draft.groups.len());
        }
        draft
    }
}

impl Problem {
    /// Sizes for groups of one size: all allowed sizes, or, if any size is allowed in a large world, those that give a
    /// micro-batch one, two, three groups and so on, up to one for each document.
    fn single_sizes(&self) -> Vec<usize> {
        match self.group_sizes {
            GroupSizes::PowersOfTwo => self.base_sizes(),
            GroupSizes::Any if self.only().is_some() => self.base_sizes(),
            GroupSizes::Any if self.world_size <= SMALL => (1..=self.largest_group).collect(),
            GroupSizes::Any => self.plain_sizes(),
        }
    }
}
