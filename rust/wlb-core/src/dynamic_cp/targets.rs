//! Target times of micro-batches. The search begins with a shape that is light at both ends ([`shape`]). [`Relaxed`]
//! improves the targets under the assumption that short documents can be divided freely. [`Demand`] says how much work
//! the documents are if exchange costs.

use crate::pipeline::{Buffers, Pipeline, PipelineOptions};

use super::problem::Problem;

/// Size of the first micro-batch, relative to the full ones, times the square root of the micro-batches per stage.
const FIRST: f64 = 0.2;
/// Size of the last micro-batch, relative to the full ones.
const LAST: f64 = 0.5;
/// Factor by which the ends may get lighter, so that the full micro-batches are as heavy as the heaviest documents.
const LIGHTEST: f64 = 1.0 / 16.0;
/// Least size of a micro-batch at the start, as a part of the longest document: one of size 0 would stay at 0.
const LEAST_OF_LONGEST: f64 = 1.0 / 64.0;

/// Relative work of each micro-batch, 1 for the full ones: light at both ends.
///
/// A pipeline fills at the speed of its first micro-batches and drains at the speed of its last, and meanwhile ranks
/// idle. A micro-batch finds the last stage still busy if its way there, `(p - 1) f` for a forward of `f`, takes no
/// longer than the backwards of the micro-batches before it. So sizes may rise by `1 + b / ((p - 1) f)` from one to the
/// next, and fall by `1 + f / ((p - 1) b)`, with a backward of `b = 2 f`. The stages in between work on other
/// micro-batches than the last stage, so a slower rise is better, and a faster fall makes the full ones lighter: the
/// constants were found by a search over shapes in the simulator. Virtual stages shorten the way.
///
/// # Arguments
/// * `ends` - weight of the ends relative to what suits a long step; a value above 1 changes only the first end.
/// * `heaviest` - time of the heaviest document relative to all work of a rank; the ends get lighter until the full
///   micro-batches reach it.
pub(super) fn shape(options: &PipelineOptions, mut ends: f64, heaviest: f64) -> Vec<f64> {
    let &PipelineOptions { num_micro_batches, num_stages, num_virtual_stages, .. } = options;
    loop {
        let shape = with_ends(num_micro_batches, num_stages, num_virtual_stages, ends);
        if ends <= LIGHTEST || heaviest * shape.iter().sum::<f64>() <= 1.0 {
            return shape;
        }
        ends /= 2.0;
    }
}

/// A larger weight of the first micro-batches, as an alternative: with few micro-batches per stage, light ones leave
/// too much work to the others.
pub(super) fn heavier_first(options: &PipelineOptions) -> Option<f64> {
    (options.num_stages > 1 && options.num_micro_batches <= 4 * options.num_stages).then_some(3.0)
}

/// A shape for documents so long that the pipeline fills and drains at their speed, in seconds. `None` if they are not.
///
/// The longest document is in micro-batch `p`. The micro-batches before it are chosen such that three kinds of paths
/// take the same time (`x` are the sizes, `w = p - 1`):
///
/// - forwards on the first stage up to one of the `w` micro-batches before `p`, then this one up to the last stage,
///   then everything there up to `p`. Each of these is then `g = 1 + 2/w` times the one before: `x_j = g^(j-1) x_1`;
/// - the same with `p` itself, after the backward of the first: `x_p = g^w x_1 - 2/w x_0`;
/// - forwards on the first stage up to `w`; then on the second stage this one, the backward after it, and `p`; then up
///   to the last stage: `x_p = x_w + 2 (x_1 - x_0)`. The last two give `x_0 = x_1 (w - g^(w-1)) / (w - 1)`.
///
/// In the lower bound for these documents, the remaining work counts equally wherever it is. So after them sizes fall,
/// at a rate that was found by search, until no work remains.
///
/// # Arguments
/// * `longest` - seconds of documents, longest first.
/// * `work` - work of all documents, spread evenly over the ranks.
pub(super) fn around(options: &PipelineOptions, mut longest: impl Iterator<Item = f64>, work: f64) -> Option<Vec<f64>> {
    let &PipelineOptions { num_micro_batches, num_stages, num_virtual_stages, .. } = options;
    if num_virtual_stages > 1 || num_stages == 1 || num_micro_batches <= num_stages {
        return None;
    }
    let full = longest.next().filter(|&seconds| seconds > 0.0)?;
    let way = (num_stages - 1) as f64;
    let growth = 1.0 + 2.0 / way;
    let grown = (2..num_stages).fold(1.0, |size, _| size * growth);
    // With two stages any size of the first micro-batch will do.
    let first = if num_stages == 2 { 0.0 } else { (way - grown) / (way - 1.0) };
    let mut size = full / (grown * growth - 2.0 / way * first);
    let mut shape = vec![size * first];
    for _ in 1..num_stages {
        shape.push(size);
        size *= growth;
    }
    let mut left = work - shape.iter().sum::<f64>();
    let mut documents = std::iter::once(full).chain(longest);
    size = full;
    for _ in num_stages..num_micro_batches {
        let document = documents.next().unwrap_or(0.0);
        let seconds = if document >= size { document } else { size.min(left.max(0.0)) };
        shape.push(seconds);
        left -= seconds;
        size = size.max(document) / (1.0 + 1.0 / way);
    }
    shape.iter_mut().for_each(|size| *size = size.max(full * LEAST_OF_LONGEST));
    (left <= 0.0).then_some(shape)
}

fn with_ends(num_micro_batches: usize, num_stages: usize, num_virtual_stages: usize, ends: f64) -> Vec<f64> {
    let mut shape = vec![1.0; num_micro_batches];
    if num_stages > 1 {
        let way = (num_stages - 1) as f64 / num_virtual_stages as f64;
        let depth = num_micro_batches as f64 / num_stages as f64;
        ramp(shape.iter_mut(), ends * FIRST / depth.sqrt(), 1.0 + 1.6 / way);
        ramp(shape.iter_mut().rev(), ends.min(1.0) * LAST, 1.0 + 2.0 / (3.0 * way));
    }
    shape
}

fn ramp<'a>(shape: impl Iterator<Item = &'a mut f64>, mut size: f64, growth: f64) {
    for micro_batch in shape {
        if size >= *micro_batch {
            break;
        }
        *micro_batch = size;
        size *= growth;
    }
}

/// Orders micro-batches: the longest where the shape is largest, and so on; equal ones stay in order.
pub(super) fn arrange(costs: &[f64], shape: &[f64]) -> Vec<usize> {
    let falling = |values: &[f64]| {
        let mut order: Vec<usize> = (0..values.len()).collect();
        order.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
        order
    };
    let mut order = vec![0; costs.len()];
    for (place, micro_batch) in falling(shape).into_iter().zip(falling(costs)) {
        order[place] = micro_batch;
    }
    order
}

/// Relative gain that the first step aims at, and the factor on it after a step without a gain.
const HOPE: f64 = 0.02;
const DOUBT: f64 = 0.85;

/// Seconds of each micro-batch, on the way to the best.
pub(super) struct Relaxed {
    /// Floor of each target, set by the longest documents.
    floors: Vec<f64>,
    /// Work of each micro-batch above its floor, from documents that can go anywhere.
    movable: Vec<f64>,
    total: f64,
    hope: f64,
    /// Starting targets.
    pub(super) start: Vec<f64>,
    /// The best targets so far, and the time of the step with them.
    pub(super) targets: Vec<f64>,
    pub(super) seconds: f64,
}

impl Relaxed {
    /// Targets of this shape for `work`, which is spread evenly over the ranks.
    pub(super) fn new(problem: &Problem, shape: &[f64], work: f64) -> Self {
        let floors = problem.floors(shape, work);
        let movable = problem.above(&floors, shape, work);
        let total = movable.iter().sum();
        let start: Vec<f64> = floors.iter().zip(&movable).map(|(floor, more)| floor + more).collect();
        Self { floors, movable, total, hope: HOPE, targets: start.clone(), start, seconds: f64::INFINITY }
    }

    /// Improves the targets by a number of steps.
    ///
    /// The time of a step is the greatest of many sums over micro-batches, one for each path through the schedule. If
    /// targets are not the best, work must move from micro-batches that have more of the critical path than average
    /// (per second of their own) to those that have less. Each loses or gains in proportion to that difference and to
    /// its size. (This is a subgradient step in the geometry of proportions; its length is Polyak's for the time that
    /// is hoped for.)
    ///
    /// # Complexity
    /// O(ops) for each step.
    pub(super) fn descend(&mut self, steps: usize, pipeline: &Pipeline, p2p_seconds: f64, buffers: &mut Buffers) {
        let Self { floors, movable, total, hope, targets, seconds: best, .. } = self;
        let mut current = vec![0.0; floors.len()];
        let mut parts = Vec::new();
        for _ in 0..steps {
            current.iter_mut().zip(&*floors).zip(&*movable).for_each(|((now, floor), more)| *now = floor + more);
            let seconds = pipeline.critical_path(&current, p2p_seconds, buffers, &mut parts);
            if seconds < *best {
                *best = seconds;
                targets.clone_from(&current);
            } else {
                *hope *= DOUBT;
            }
            let pairs = || movable.iter().zip(&parts);
            let mean = pairs().map(|(more, part)| more * part).sum::<f64>() / *total;
            let variance: f64 = pairs().map(|(more, part)| more * (part - mean) * (part - mean)).sum();
            let length = (seconds - *best * (1.0 - *hope)) / variance;
            if !length.is_finite() {
                break;
            }
            for (more, part) in movable.iter_mut().zip(&parts) {
                *more *= (1.0 - length * (part - mean)).clamp(0.5, 2.0);
            }
            let scale = *total / movable.iter().sum::<f64>();
            movable.iter_mut().for_each(|more| *more *= scale);
        }
    }
}

/// Ratio of neighbouring levels: the fourth root of 2.
const STEP: f64 = 1.189_207_115_002_721;
/// Most levels of a micro-batch's time: from the shortest up to 2^16 times the shortest.
const MOST_LEVELS: usize = 64;

/// Work of all documents as a function of the time of a micro-batch.
///
/// With more time, fewer ranks share a document and less is exchanged. Each document is on the smallest group where it
/// finishes in time, or else where it is fastest.
pub(super) struct Demand {
    /// Seconds of a full micro-batch, ascending, each with the work of all documents then, spread evenly over the
    /// ranks.
    levels: Vec<(f64, f64)>,
}

impl Demand {
    /// Begins at a time so short that `most` such micro-batches hold all work if exchange is free.
    ///
    /// # Complexity
    /// O(documents * log world_size), each step a search among about sixty levels.
    pub(super) fn new(problem: &Problem, most: usize) -> Self {
        let world = problem.world_size as f64;
        let constant = problem.cost.micro_batch_seconds;
        let work = problem.total_work / world;
        let mut levels: Vec<(f64, f64)> = vec![(work / most as f64, 0.0)];
        while levels.len() < MOST_LEVELS && problem.total_work > 0.0 {
            levels.push((levels[levels.len() - 1].0 * STEP, 0.0));
        }
        // Work that is added from each level on; summed up at the end.
        let mut more = vec![0.0; levels.len() + 1];
        for document in &problem.documents {
            // Most documents are so short that they finish in time on their smallest group at every level.
            let smallest = problem.smallest(&document.load);
            let seconds = problem.cost.seconds(&document.load, smallest) - constant;
            if seconds <= levels[0].0 {
                more[0] += seconds * smallest as f64 / world;
                continue;
            }
            let mut from = levels.len();
            let fastest = problem.fastest(&document.load);
            for cp_size in problem.sizes_for(&document.load) {
                let seconds = problem.cost.seconds(&document.load, cp_size) - constant;
                let work = seconds * cp_size as f64 / world;
                let level = levels.partition_point(|level| level.0 < seconds);
                if level < from {
                    more[level] += work;
                    more[from] -= work;
                    from = level;
                }
                if cp_size >= fastest.0 {
                    break;
                }
            }
            let work = fastest.1 * fastest.0 as f64 / world;
            more[0] += work;
            more[from] -= work;
        }
        let mut sum = 0.0;
        for (level, more) in levels.iter_mut().zip(more) {
            sum += more;
            level.1 = sum;
        }
        Self { levels }
    }

    /// Work, spread evenly over the ranks, if it is divided among `full` micro-batches (a real number).
    pub(super) fn work(&self, full: f64) -> f64 {
        let at = self.levels.partition_point(|&(seconds, work)| work > seconds * full);
        let Some(&(seconds, work)) = self.levels.get(at) else { return self.levels[self.levels.len() - 1].1 };
        let Some(&(below, more)) = at.checked_sub(1).map(|at| &self.levels[at]) else { return work };
        // The point between the two levels where the work equals what the micro-batches hold.
        let (short, long) = (more - below * full, seconds * full - work);
        if short + long > 0.0 { work + (more - work) * (long / (short + long)) } else { work }
    }
}
