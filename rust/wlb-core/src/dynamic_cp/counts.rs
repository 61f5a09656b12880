//! The numbers of micro-batches that a search tries.

use crate::error::{Result, check_range};
use crate::lengths::Lengths;
use crate::limits::{MAX_CELLS, MAX_MICRO_BATCHES, MAX_TOKENS};

use super::options::DynamicCpOptions;
use super::problem::Problem;

/// The largest number tried is this multiple of the first.
const SWEEP: usize = 4;

/// With more micro-batches than stages in a single round, nearly all micro-batches are under way at once. Such a number
/// must be faster by this factor than one with fewer under way.
const ONE_ROUND: f64 = 1.01;

/// Most micro-batches of any plan with these options.
pub(super) fn limit(options: &DynamicCpOptions) -> usize {
    let &DynamicCpOptions { world_size, num_stages, num_virtual_stages, .. } = options;
    (MAX_CELLS / world_size.max(num_stages * num_virtual_stages)).clamp(1, MAX_MICRO_BATCHES)
}

/// Numbers of micro-batches to try.
pub(super) struct Counts {
    /// Least number to try; equal to `start` unless micro-batches have a constant cost. Without a constant, fewer
    /// micro-batches than stages are faster only for a handful of documents with costly exchange, and torch's schedules
    /// refuse them.
    pub(super) least: usize,
    /// Number that memory needs, and at least one for every stage.
    pub(super) start: usize,
    pub(super) most: usize,
}

impl Counts {
    pub(super) fn new(lengths: &Lengths, options: &DynamicCpOptions) -> Result<Self> {
        if let Some(fixed) = options.num_micro_batches {
            return Ok(Self { least: fixed, start: fixed, most: fixed });
        }
        let &DynamicCpOptions { world_size, num_stages, max_tokens_per_rank, .. } = options;
        let tokens = lengths.total() as u64;
        let memory = tokens.div_ceil(world_size as u64 * max_tokens_per_rank as u64) as usize;
        // If every rank is a group of its own.
        let documents = |micro_batches: usize| lengths.len().div_ceil(world_size.saturating_mul(micro_batches));
        let apart = options.max_documents.map_or(0, documents);
        let limit = limit(options);
        let useful = lengths.len().max(num_stages);
        let most = options.max_micro_batches;
        if most.is_none() && memory > limit {
            let minimum = tokens.div_ceil((world_size * limit) as u64) as i64;
            check_range("max_tokens_per_rank", i64::from(max_tokens_per_rank), minimum, MAX_TOKENS)?;
        }
        if let Some(max_documents) = options.max_documents.filter(|_| most.is_none() && apart > limit) {
            check_range("max_documents", max_documents as i64, documents(limit) as i64, MAX_TOKENS)?;
        }
        let memory = memory.max(apart);
        let fewest = options.least_micro_batches();
        let forced = memory.max(fewest);
        let wanted = whole(options, fewest, limit).unwrap_or(1);
        let start = memory.max(wanted).max(num_stages.min(most.unwrap_or(limit)));
        let least = if options.micro_batch_seconds > 0.0 { forced } else { start };
        Ok(Self { least, start, most: most.unwrap_or((SWEEP * start).min(useful.max(start)).min(limit)) })
    }

    /// All numbers that are tried at first, ascending.
    pub(super) fn tried(&self, options: &DynamicCpOptions) -> Vec<usize> {
        let mut counts = candidates(options, self.least, self.start - 1);
        counts.extend(candidates(options, self.start, self.most));
        counts.dedup();
        counts
    }

    /// Whether few documents may have this number of micro-batches: if no maximum is given, up to one for each
    /// document.
    pub(super) fn allow(&self, problem: &Problem, options: &DynamicCpOptions, count: usize) -> bool {
        let given = options.num_micro_batches.or(options.max_micro_batches);
        let most = if given.is_some() { self.most } else { self.least.max(problem.documents.len()) };
        let is_whole = options.num_micro_batches.is_some() || whole(options, count, most) == Some(count);
        (self.least..=most).contains(&count) && is_whole
    }

    /// The largest number that never exceeds the planned memory, whatever the micro-batches hold.
    pub(super) fn safe(&self, options: &DynamicCpOptions) -> Option<usize> {
        (self.least..=self.most).rfind(|&count| !limits_rounds(options, count))
    }
}

/// Numbers of micro-batches from `least` to `most`, denser where they are small. An interleaved pipeline needs equal
/// rounds.
fn candidates(options: &DynamicCpOptions, least: usize, most: usize) -> Vec<usize> {
    let mut counts: Vec<usize> = Vec::new();
    let mut count = least;
    while count < most {
        counts.push(count);
        count += (count / 6).max(1);
    }
    counts.extend((least <= most).then_some(most));
    if options.num_micro_batches.is_none() {
        let near = |count: usize| {
            let (below, above) = (whole(options, count, most), whole_above(options, count));
            let nearer = below.is_some_and(|below| above <= most && above + below < 2 * count);
            below.into_iter().chain(nearer.then_some(above))
        };
        counts = counts.into_iter().flat_map(near).collect();
        counts.sort_unstable();
    }
    counts
}

/// `count`, rounded to equal rounds if the pipeline is interleaved: down, or up if the schedule needs more. `None` if
/// the result exceeds `most`.
pub(super) fn whole(options: &DynamicCpOptions, count: usize, most: usize) -> Option<usize> {
    let below = if options.is_interleaved() { count - count % rounds(options, count) } else { count };
    let enough = below >= options.least_micro_batches();
    Some(if enough { below } else { whole_above(options, count) }).filter(|&whole| whole <= most)
}

/// The next number of micro-batches, at least `count`, that equal rounds allow.
fn whole_above(options: &DynamicCpOptions, count: usize) -> usize {
    if !options.is_interleaved() {
        return count;
    }
    // Up to `(rounds + 1) * num_stages` the number of rounds stays; from there on there is one more, of `num_stages`
    // each.
    let rounds = rounds(options, count);
    count.next_multiple_of(rounds).min((rounds + 1) * options.num_stages)
}

fn rounds(options: &DynamicCpOptions, count: usize) -> usize {
    (count / options.num_stages).max(1)
}

/// Price of a plan: its seconds, raised a little if an interleaved pipeline has nearly all micro-batches under way.
pub(super) fn price(options: &DynamicCpOptions, count: usize, seconds: f64) -> f64 {
    let one_round = options.is_interleaved() && count > options.num_stages && rounds(options, count) == 1;
    if one_round { seconds * ONE_ROUND } else { seconds }
}

/// Notes the seconds (found or promised) for a number of micro-batches; the least of several stays.
pub(super) fn note(sweep: &mut Vec<(usize, f64)>, num_micro_batches: usize, seconds: f64) {
    match sweep.iter_mut().find(|(count, _)| *count == num_micro_batches) {
        Some((_, least)) => *least = least.min(seconds),
        None => sweep.push((num_micro_batches, seconds)),
    }
}

/// Whether a plan with this number must be checked for memory: an interleaved pipeline whose rounds have more
/// micro-batches than stages may exceed the planned memory. A number that the user gives is not checked.
pub(super) fn limits_rounds(options: &DynamicCpOptions, num_micro_batches: usize) -> bool {
    let num_stages = options.num_stages;
    let whole = num_micro_batches <= num_stages || num_micro_batches.is_multiple_of(num_stages);
    options.is_interleaved() && !whole && options.num_micro_batches.is_none()
}
