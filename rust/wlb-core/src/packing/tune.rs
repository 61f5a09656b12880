//! Thresholds for the outlier queues, found on a sample of lengths.

use std::cmp::Ordering;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, check_range};
use crate::lengths::Lengths;

use super::packer::{Packer, PackerConfig};
use super::stream::{batch_offsets, split_documents};

/// Candidate thresholds of the first, coarse search.
const COARSE_CANDIDATES: usize = 12;
/// Ratio of neighbouring coarse candidates: twelve of them reach down to a 23rd of the longest document.
const COARSE_STEP: f64 = 1.3;
/// Rounds of refinement; each halves the step between neighbouring candidates.
const REFINEMENTS: u32 = 3;

/// How to tune.
#[derive(Clone, Debug, PartialEq)]
pub struct TuneOptions {
    /// The packer to tune; its `outlier_thresholds` are ignored.
    pub packer: PackerConfig,
    /// Most levels.
    pub num_queues: usize,
    /// Most mean token delay, in iterations.
    pub max_mean_delay: f64,
    /// Tokens of a global batch.
    pub tokens_per_batch: i64,
}

/// What one choice of thresholds gives on the sample.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TunedPoint {
    /// The thresholds.
    pub thresholds: Vec<i32>,
    /// Mean imbalance over steps.
    pub imbalance_mean: f64,
    /// 95th percentile of the imbalance.
    pub imbalance_p95: f64,
    /// Worst step.
    pub imbalance_worst: f64,
    /// Mean token delay, in iterations, of all documents, those flushed at the end of the sample included.
    pub delay_mean: f64,
    /// Longest wait of a document, in iterations.
    pub delay_max: u64,
    /// Mean memory skew.
    pub memory_skew_mean: f64,
}

/// The best thresholds and what else could be had.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tuned {
    /// Best balance within the delay limit.
    pub best: TunedPoint,
    /// Choices that no other beats in both mean imbalance and mean delay, by ascending delay.
    pub pareto: Vec<TunedPoint>,
    /// Number of choices tried.
    pub evaluated: usize,
}

crate::error::pickled_as_json!(TunedPoint);
crate::error::pickled_as_json!(Tuned);

/// Runs the packer over the sample under many choices of thresholds.
///
/// First every combination of up to `num_queues` geometrically spaced thresholds, then, for each number of levels, the
/// neighbourhood of the best at halved steps. Deterministic. Without queues is always among the choices, so that there is always an answer; it is
/// the one with the least delay if none keeps the limit.
///
/// # Errors
/// Those of [`PackerConfig::check`], [`Error::OutOfRange`] for `num_queues` (0 to 4) and `tokens_per_batch`,
/// [`Error::Number`] for `max_mean_delay`, and [`Error::Combination`] for a sample without documents.
///
/// # Complexity
/// One run of the packer per choice: 79 coarse choices for two queues, 299 for three.
pub fn tune_outlier_thresholds(lengths: &Lengths, options: &TuneOptions) -> Result<Tuned> {
    check_range("num_queues", i64::try_from(options.num_queues).unwrap_or(i64::MAX), 0, 4)?;
    if options.max_mean_delay.is_nan() || options.max_mean_delay < 0.0 {
        let requirement = "must be a number, 0 or above";
        return Err(Error::Number { argument: "max_mean_delay", value: options.max_mean_delay, requirement });
    }
    let config = PackerConfig { outlier_thresholds: Vec::new(), ..options.packer.clone() };
    config.check()?;
    config.cost_model.check_finite(lengths)?;
    if lengths.is_empty() {
        return Err(Error::Combination { argument: "lengths", requirement: "a sample needs at least one document" });
    }
    // Cut beforehand: a batch is then never heavier than its tokens allow.
    let pieces = split_documents(lengths, i64::from(config.max_document_tokens))?;
    let pieces: Vec<i64> = pieces.iter().map(|piece| i64::from(piece.length)).collect();
    let sample = Lengths::new("lengths", &pieces)?;
    let batches: Vec<Lengths> = batch_offsets(&sample, options.tokens_per_batch)?
        .windows(2)
        .map(|span| Lengths::new("lengths", &pieces[span[0]..span[1]]))
        .collect::<Result<_>>()?;

    let mut search = Search { config, batches, points: Vec::new() };
    let longest = sample.iter().copied().max().unwrap_or(1);
    // Below the longest, since a threshold at it would hold a single length. Successive division rounds alike on
    // every machine; a power does not.
    let descending = std::iter::successors(Some(f64::from(longest)), |threshold| Some(threshold / COARSE_STEP));
    let mut candidates: Vec<i32> =
        descending.skip(1).take(COARSE_CANDIDATES).map(|threshold| threshold as i32).filter(|&t| t > 0).collect();
    candidates.sort_unstable();
    candidates.dedup();
    for thresholds in combinations(&candidates, options.num_queues) {
        search.evaluate(thresholds)?;
    }
    // Each number of levels by itself: the best of two may lie where no coarse choice of three does.
    for levels in 1..=options.num_queues {
        let mut step = COARSE_STEP;
        for _ in 0..REFINEMENTS {
            step = step.sqrt();
            let Some(around) = search.best(options.max_mean_delay, levels) else { break };
            for thresholds in neighbours(&around.thresholds.clone(), step, longest) {
                search.evaluate(thresholds)?;
            }
        }
    }
    // The search has tried "no queues": there is always a best.
    let best = (0..=options.num_queues)
        .filter_map(|levels| search.best(options.max_mean_delay, levels))
        .min_by(|a, b| better(a, b, options.max_mean_delay))
        .unwrap_or(&search.points[0]);
    Ok(Tuned { best: best.clone(), pareto: search.pareto(), evaluated: search.points.len() })
}

struct Search {
    config: PackerConfig,
    batches: Vec<Lengths>,
    points: Vec<TunedPoint>,
}

impl Search {
    fn evaluate(&mut self, thresholds: Vec<i32>) -> Result<()> {
        if self.points.iter().any(|point| point.thresholds == thresholds) {
            return Ok(());
        }
        let mut packer = Packer::new(PackerConfig { outlier_thresholds: thresholds.clone(), ..self.config.clone() })?;
        for batch in &self.batches {
            packer.push(batch, None)?;
        }
        packer.flush();
        let metrics = packer.metrics();
        self.points.push(TunedPoint {
            thresholds,
            imbalance_mean: metrics.imbalance_mean(),
            imbalance_p95: metrics.imbalance_percentile(0.95),
            imbalance_worst: metrics.imbalance_worst(),
            delay_mean: metrics.delay_mean(),
            delay_max: metrics.delay_max(),
            memory_skew_mean: metrics.memory_skew_mean(),
        });
        Ok(())
    }

    /// The best choice of that many levels; the first tried of equals.
    fn best(&self, max_mean_delay: f64, levels: usize) -> Option<&TunedPoint> {
        self.points.iter().filter(|point| point.thresholds.len() == levels).min_by(|a, b| better(a, b, max_mean_delay))
    }

    fn pareto(&self) -> Vec<TunedPoint> {
        let mut points: Vec<&TunedPoint> = self.points.iter().collect();
        points
            .sort_by(|a, b| a.delay_mean.total_cmp(&b.delay_mean).then(a.imbalance_mean.total_cmp(&b.imbalance_mean)));
        let mut least = f64::INFINITY;
        points.retain(|point| {
            let better = point.imbalance_mean < least;
            least = least.min(point.imbalance_mean);
            better
        });
        points.into_iter().cloned().collect()
    }
}

/// The less, the better: the least mean imbalance within the delay limit, else the least delay.
fn better(a: &TunedPoint, b: &TunedPoint, max_mean_delay: f64) -> Ordering {
    let rank = |point: &TunedPoint| {
        let late = point.delay_mean > max_mean_delay;
        (late, if late { point.delay_mean } else { point.imbalance_mean })
    };
    let ((late_a, value_a), (late_b, value_b)) = (rank(a), rank(b));
    late_a.cmp(&late_b).then(value_a.total_cmp(&value_b))
}

/// Every ascending choice of up to `most` candidates, the empty one first.
fn combinations(candidates: &[i32], most: usize) -> Vec<Vec<i32>> {
    let mut all = vec![Vec::new()];
    let mut grown_from = 0;
    for _ in 0..most {
        let grow_until = all.len();
        for index in grown_from..grow_until {
            let above = all[index].last().copied().unwrap_or(0);
            for &candidate in candidates.iter().filter(|&&candidate| candidate > above) {
                let mut longer: Vec<i32> = all[index].clone();
                longer.push(candidate);
                all.push(longer);
            }
        }
        grown_from = grow_until;
    }
    all
}

/// Each threshold one step down, kept, or one step up, in every combination that still ascends.
fn neighbours(thresholds: &[i32], step: f64, longest: i32) -> Vec<Vec<i32>> {
    let mut all: Vec<Vec<i32>> = vec![Vec::new()];
    for &threshold in thresholds {
        let moves = [f64::from(threshold) / step, f64::from(threshold), f64::from(threshold) * step];
        all = all
            .iter()
            .flat_map(|prefix| moves.map(|moved| [prefix.as_slice(), &[moved as i32]].concat()))
            .filter(|choice| {
                let last = choice.len() - 1;
                choice[last] <= longest && choice[last] > choice[..last].last().copied().unwrap_or(0)
            })
            .collect();
    }
    all
}
