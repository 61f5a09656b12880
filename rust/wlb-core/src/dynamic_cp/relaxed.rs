//! What each micro-batch should take: the best of all plans whose short documents can be divided at will.

use crate::pipeline::{Buffers, Pipeline};

use super::problem::Problem;

/// How much faster it first hopes to become in one step, and what is left of that hope after a step in vain.
const HOPE: f64 = 0.02;
const DOUBT: f64 = 0.85;

/// Seconds of each micro-batch, on its way to the best.
pub(super) struct Relaxed {
    /// What none can be below: the longest documents.
    floors: Vec<f64>,
    /// What each takes beyond that: the documents that can go anywhere.
    movable: Vec<f64>,
    total: f64,
    hope: f64,
    /// Where it began.
    pub(super) start: Vec<f64>,
    /// The best so far, and the time of the step with it.
    pub(super) targets: Vec<f64>,
    pub(super) seconds: f64,
}

impl Relaxed {
    /// From `work`, spread evenly over the ranks, in that shape.
    pub(super) fn new(problem: &Problem, shape: &[f64], work: f64) -> Self {
        let floors = problem.floors(shape, work);
        let movable = problem.above(&floors, shape, work);
        let total = movable.iter().sum();
        let start: Vec<f64> = floors.iter().zip(&movable).map(|(floor, more)| floor + more).collect();
        Self { floors, movable, total, hope: HOPE, targets: start.clone(), start, seconds: f64::INFINITY }
    }

    /// Goes on for a number of steps.
    ///
    /// The time of a step is the greatest of sums over micro-batches, one for each path through the schedule. So of
    /// what is not the best, work has to move from micro-batches that have more of the critical path than the average
    /// second has to those that have less; each loses or gains in proportion to that difference and to what it has. (A
    /// subgradient step in the geometry of proportions, of Polyak's length for the time that is hoped for.)
    ///
    /// # Complexity
    /// O(ops) a step.
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
