//! What each micro-batch should take: the best of all plans whose short documents can be divided at will.

use crate::error::Result;
use crate::schedule::pipeline::{Buffers, Pipeline};
use crate::schedule::times::Times;

use super::solver::Problem;

/// Most steps of the search, and most ops that it simulates.
const STEPS: usize = 24;
const MAX_OPS: usize = 1 << 16;
/// How much faster it first hopes to become in one step, and what is left of that hope after a step in vain.
const HOPE: f64 = 0.02;
const DOUBT: f64 = 0.85;

/// Seconds of each micro-batch, and of the step.
pub(super) struct Relaxed {
    pub(super) targets: Vec<f64>,
    pub(super) seconds: f64,
}

impl Relaxed {
    /// From a shape to what no small change makes faster.
    ///
    /// The time of a step is the greatest of sums, one for each path through the schedule: `sum(parts[j] * seconds[j])`. So of a
    /// plan that is not the best, work has to move from micro-batches that have more parts of the critical path than the average second
    /// has to those that have less: each loses or gains in proportion to that difference and to what it has (a
    /// subgradient step in the geometry of proportions; Polyak's length, towards a time that is hoped for).
    ///
    /// # Complexity
    /// O(ops) a step.
    pub(super) fn new(
        problem: &Problem,
        pipeline: &Pipeline,
        shape: &[f64],
        p2p_seconds: f64,
        buffers: &mut Buffers,
    ) -> Result<Self> {
        let floors = problem.floors(shape);
        let mut movable = problem.above(&floors, shape);
        let total: f64 = movable.iter().sum();
        let p2p = [p2p_seconds];
        let mut best = Self { targets: Vec::new(), seconds: f64::INFINITY };
        let mut hope = HOPE;
        let mut parts = Vec::new();
        for _ in 0..=STEPS.min(MAX_OPS / pipeline.num_ops()) {
            let targets: Vec<f64> = floors.iter().zip(&movable).map(|(floor, more)| floor + more).collect();
            let times = Times::per_micro_batch(&targets)?.with_p2p(&p2p)?;
            let seconds = pipeline.critical_path(&times, buffers, &mut parts);
            if seconds < best.seconds {
                best = Self { targets, seconds };
            } else {
                hope *= DOUBT;
            }
            let mean = dot(&movable, &parts) / total;
            parts.iter_mut().for_each(|part| *part -= mean);
            let squares: Vec<f64> = parts.iter().map(|part| part * part).collect();
            let length = (seconds - best.seconds * (1.0 - hope)) / dot(&movable, &squares);
            if !length.is_finite() {
                break;
            }
            for (more, part) in movable.iter_mut().zip(&parts) {
                *more *= (1.0 - length * part).clamp(0.5, 2.0);
            }
            let scale = total / movable.iter().sum::<f64>();
            movable.iter_mut().for_each(|more| *more *= scale);
        }
        Ok(best)
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
