//! The search: every choice is tried on the sample.

use std::cmp::Ordering;

use crate::error::{Error, Result, check_range};
use crate::stream::{MAX_EARLY, Packer, PackerConfig, Release};

use super::options::TuneOptions;
use super::reading::{Reading, Run};
use super::sample::Sample;
use super::tuned::{Tuned, TunedPoint};

/// The sample, and the choices that were tried on it.
pub(super) struct Trials<'a> {
    /// Called before each candidate is tried; false ends the search.
    keep_going: &'a dyn Fn() -> bool,
    pub(super) config: PackerConfig,
    pub(super) max_mean_delay: f64,
    pub(super) max_early: i64,
    pub(super) longest: i32,
    pub(super) reading: Reading,
    pub(super) points: Vec<TunedPoint>,
}

impl<'a> Trials<'a> {
    /// Checks everything and cuts documents that are too long.
    pub(super) fn new(sample: Sample<'_>, options: &TuneOptions, keep_going: &'a dyn Fn() -> bool) -> Result<Self> {
        let max_mean_delay = options.max_mean_delay;
        if max_mean_delay.is_nan() || max_mean_delay < 0.0 {
            let requirement = "must be a number, 0 or above";
            return Err(Error::Number { argument: "max_mean_delay", value: max_mean_delay, requirement });
        }
        let adaptive = options.num_queues.is_none();
        let delay_price = Release::Adaptive.default_price().filter(|_| adaptive);
        let release = if adaptive { Release::Adaptive } else { Release::Fifo };
        let outlier_thresholds = Vec::new();
        let config = PackerConfig { release, outlier_thresholds, delay_price, ..options.packer.clone() };
        sample.check(&config)?;
        check_range("max_early", options.max_early, 0, MAX_EARLY)?;
        if options.max_early > 0 && config.cost_model.is_none() {
            let requirement = "needs a cost model: documents that bring their costs never come early";
            return Err(Error::Combination { argument: "max_early", requirement });
        }
        if options.max_early > 0 && !adaptive {
            let requirement = "holds for a delay price: leave num_queues out, or max_early at 0";
            return Err(Error::Combination { argument: "max_early", requirement });
        }
        let reading = Reading::new(sample, &config, options.max_early)?;
        Ok(Self {
            keep_going,
            config,
            max_mean_delay,
            max_early: options.max_early,
            longest: reading.longest(),
            reading,
            points: Vec::new(),
        })
    }

    /// Runs the packer over the sample, unless this choice was tried before.
    pub(super) fn evaluate(&mut self, thresholds: Vec<i32>, delay_price: Option<f64>) -> Result<()> {
        if self.points.iter().any(|point| point.thresholds == thresholds && point.delay_price == delay_price) {
            return Ok(());
        }
        let run = self.run(&self.reading, thresholds.clone(), delay_price)?;
        let metrics = run.packer.metrics();
        self.points.push(TunedPoint {
            thresholds,
            delay_price,
            imbalance_mean: metrics.imbalance_mean(),
            imbalance_p95: metrics.imbalance_percentile(0.95),
            imbalance_worst: metrics.imbalance_worst(),
            delay_mean: metrics.delay_mean() + metrics.early_mean(),
            delay_max: metrics.delay_max(),
            memory_skew_mean: metrics.memory_skew_mean(),
            lost_time: run.lost_time,
            held_out: None,
        });
        Ok(())
    }

    /// Runs a new packer with these thresholds or this price over a reading of documents.
    pub(super) fn run(&self, reading: &Reading, outlier_thresholds: Vec<i32>, delay_price: Option<f64>) -> Result<Run> {
        if !(self.keep_going)() {
            return Err(Error::Interrupted);
        }
        let release = if delay_price.is_some() { Release::Adaptive } else { Release::Fifo };
        let config = PackerConfig { release, outlier_thresholds, delay_price, ..self.config.clone() };
        reading.through(Packer::new(config)?)
    }

    /// The best of the choices that satisfy a condition; the first tried if several are equal.
    pub(super) fn best(&self, of: impl Fn(&TunedPoint) -> bool) -> Option<&TunedPoint> {
        self.points.iter().filter(|point| of(point)).min_by(|a, b| self.better(a, b))
    }

    /// The least mean imbalance with this number of thresholds within a mean delay; the first tried if several are
    /// equal.
    pub(super) fn best_within(&self, delay: f64, thresholds: usize) -> Option<&TunedPoint> {
        let within = |point: &&TunedPoint| point.thresholds.len() == thresholds && point.delay_mean <= delay;
        self.points.iter().filter(within).min_by(|a, b| a.imbalance_mean.total_cmp(&b.imbalance_mean))
    }

    /// Less is better: the least mean imbalance within the delay limit, else the least delay; then the fewest
    /// thresholds.
    fn better(&self, a: &TunedPoint, b: &TunedPoint) -> Ordering {
        let rank = |point: &TunedPoint| {
            let late = point.delay_mean > self.max_mean_delay;
            (late, if late { point.delay_mean } else { point.imbalance_mean })
        };
        let ((late_a, value_a), (late_b, value_b)) = (rank(a), rank(b));
        late_a.cmp(&late_b).then(value_a.total_cmp(&value_b)).then(a.thresholds.len().cmp(&b.thresholds.len()))
    }

    /// Result of the trials; at least one was made.
    pub(super) fn finish(self) -> Tuned {
        let best = self.best(|_| true).unwrap_or(&self.points[0]).clone();
        Tuned { best, pareto: self.pareto(), judged: Vec::new(), evaluated: self.points.len() }
    }

    pub(super) fn pareto(&self) -> Vec<TunedPoint> {
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
