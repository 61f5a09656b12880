//! How much work documents are where sharing them among more ranks makes them more.

use super::problem::Problem;

/// A level is this many times the one below: the fourth root of 2.
const STEP: f64 = 1.189_207_115_002_721;
/// Levels of a micro-batch's time that are looked at, at most: from the shortest up to 2^16 times that.
const MOST_LEVELS: usize = 64;

/// Work of all documents by how long a micro-batch may take.
///
/// The longer, the fewer ranks share a document, and the less they exchange. Each document is on the smallest group
/// where it is done in time, or where it is fastest.
pub(super) struct Demand {
    /// Seconds of a full micro-batch, ascending, and the work of all documents then, spread evenly over the ranks.
    levels: Vec<(f64, f64)>,
}

impl Demand {
    /// From micro-batches so short that as many as `most` of them hold all work as if exchange were free.
    ///
    /// # Complexity
    /// O(documents * log world_size), each a search among some sixty levels.
    pub(super) fn new(problem: &Problem, most: usize) -> Self {
        let world = problem.world_size as f64;
        let constant = problem.cost.micro_batch_seconds;
        let work = problem.total_work / world;
        let mut levels: Vec<(f64, f64)> = vec![(work / most as f64, 0.0)];
        while levels.len() < MOST_LEVELS && problem.total_work > 0.0 {
            levels.push((levels[levels.len() - 1].0 * STEP, 0.0));
        }
        // What is added from a level on: nothing but differences, which are summed up at the end.
        let mut more = vec![0.0; levels.len() + 1];
        for document in &problem.documents {
            // Most are so short that they are done in time on their smallest group, however short micro-batches are.
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

    /// Work spread evenly over the ranks, where `full` micro-batches, and parts of one, share it.
    pub(super) fn work(&self, full: f64) -> f64 {
        let at = self.levels.partition_point(|&(seconds, work)| work > seconds * full);
        let Some(&(seconds, work)) = self.levels.get(at) else { return self.levels[self.levels.len() - 1].1 };
        let Some(&(below, more)) = at.checked_sub(1).map(|at| &self.levels[at]) else { return work };
        // Where the line between the two levels is what the micro-batches hold.
        let (short, long) = (more - below * full, seconds * full - work);
        if short + long > 0.0 { work + (more - work) * (long / (short + long)) } else { work }
    }
}
