//! Figures of a stream of packings: balance, delay and memory.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::packing::plan::Packing;

/// Bins of the imbalance histogram per unit of imbalance: percentiles are exact to 0.001.
pub const IMBALANCE_RESOLUTION: f64 = 1000.0;

/// Running sums and histograms of constant size, however long the run; they are part of a packer's state.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Metrics {
    /// Push steps with at least one document; the figures of imbalance, tokens and memory are over these steps.
    pub steps: u64,
    /// Number of pieces that left, by push and by flush.
    pub documents: u64,
    /// Number of tokens that left, by push and by flush.
    pub tokens: u64,
    /// Documents that were placed by token count instead of by cost.
    pub length_fallbacks: u64,
    /// Documents that did not fit into a step, counted once for each such step.
    pub carried_over: u64,
    imbalance_sum: f64,
    imbalance_worst: f64,
    imbalance_histogram: BTreeMap<u32, u64>,
    step_tokens_sum: f64,
    step_tokens_square_sum: f64,
    memory_skew_sum: f64,
    memory_skew_worst: f64,
    delay_tokens: BTreeMap<u64, u64>,
    /// Sum over documents: tokens times the iterations by which they were trained before their turn.
    early: u64,
    /// Most tokens that waited after a push.
    pub backlog_max: u64,
    /// Tokens of padding in the micro-batches, by push and by flush.
    pub padding: u64,
    backlog_sum: f64,
    pushes: u64,
    /// Work of the steps' documents since the last change of costs.
    work: Work,
    /// Push steps whose documents cost more than the bound on a step's work.
    pub steps_over_max_cost: u64,
}

/// Running sums of the work of steps, in units of the heaviest step, so that no square overflows.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Work {
    steps: u64,
    most: f64,
    sum: f64,
    square_sum: f64,
}

impl Work {
    fn count(&mut self, work: f64) {
        self.steps += 1;
        if work > self.most {
            let before = self.most / work;
            (self.most, self.sum, self.square_sum) = (work, self.sum * before, self.square_sum * before * before);
        }
        if self.most > 0.0 {
            let share = work / self.most;
            self.sum += share;
            self.square_sum += share * share;
        }
    }

    fn is_sound(&self, steps: u64) -> bool {
        let at_most_one_each = |sum: f64| (0.0..=1.001 * self.steps as f64).contains(&sum);
        self.steps <= steps
            && self.most.is_finite()
            && self.most >= 0.0
            && at_most_one_each(self.sum)
            && at_most_one_each(self.square_sum)
    }
}

impl Metrics {
    /// Counts one step. `moved` gives the tokens of each piece that left and the iterations since its turn (negative
    /// before the turn), `backlog` the tokens that wait now, and `work` the cost of the step's documents and its bound.
    pub(super) fn record(
        &mut self,
        packing: &Packing,
        flushed: bool,
        moved: impl Iterator<Item = (i32, i64)>,
        backlog: i64,
        (work, most_work): (f64, f64),
    ) {
        // Most documents waited as long as the one before, usually not at all: one look-up for a run of them.
        let (mut run, mut run_tokens) = (0, 0);
        for (length, iterations) in moved {
            let delay = iterations.max(0) as u64;
            self.early = self.early.saturating_add((-iterations).max(0) as u64 * length as u64);
            if delay != run {
                self.count_delay(run, run_tokens);
                (run, run_tokens) = (delay, 0);
            }
            run_tokens += length as u64;
        }
        self.count_delay(run, run_tokens);
        let tokens = packing.num_tokens();
        self.documents += packing.pieces.len() as u64;
        self.tokens += tokens as u64;
        self.length_fallbacks += packing.length_fallbacks as u64;
        self.carried_over += packing.leftover.len() as u64;
        self.padding += (packing.padded_tokens().iter().sum::<i64>() - tokens) as u64;
        if !flushed {
            self.pushes += 1;
            self.backlog_sum += backlog as f64;
            self.backlog_max = self.backlog_max.max(backlog as u64);
        }
        if tokens == 0 || flushed {
            return;
        }
        self.steps += 1;
        let imbalance = packing.rank_imbalance();
        self.imbalance_sum += imbalance;
        self.imbalance_worst = self.imbalance_worst.max(imbalance);
        // Each bin is named by its upper edge; the cast saturates.
        *self.imbalance_histogram.entry((imbalance * IMBALANCE_RESOLUTION).ceil() as u32).or_default() += 1;
        self.work.count(work);
        self.steps_over_max_cost += u64::from(work > most_work);
        self.step_tokens_sum += tokens as f64;
        self.step_tokens_square_sum += tokens as f64 * tokens as f64;
        let skew = packing.memory_skew();
        self.memory_skew_sum += skew;
        self.memory_skew_worst = self.memory_skew_worst.max(skew);
    }

    fn count_delay(&mut self, delay: u64, tokens: u64) {
        if tokens > 0 {
            *self.delay_tokens.entry(delay).or_default() += tokens;
        }
    }

    /// Mean imbalance over steps; 1 before the first.
    pub fn imbalance_mean(&self) -> f64 {
        if self.steps == 0 { 1.0 } else { self.imbalance_sum / self.steps as f64 }
    }

    /// Forgets the work of steps: after a change of cost model the sums would be in another unit.
    pub(super) fn forget_work(&mut self) {
        self.work = Work::default();
    }

    /// Worst imbalance of any step; 1 before the first.
    pub fn imbalance_worst(&self) -> f64 {
        self.imbalance_worst.max(1.0)
    }

    /// The imbalance that `fraction` of the steps do not exceed, exact to 0.001.
    pub fn imbalance_percentile(&self, fraction: f64) -> f64 {
        let edge = percentile(&self.imbalance_histogram, fraction).unwrap_or(0);
        (f64::from(edge) / IMBALANCE_RESOLUTION).min(self.imbalance_worst()).max(1.0)
    }

    /// Mean iterations that a token waited since its turn.
    pub fn delay_mean(&self) -> f64 {
        let waited: f64 = self.delay_tokens.iter().map(|(&delay, &tokens)| delay as f64 * tokens as f64).sum();
        if self.tokens == 0 { 0.0 } else { waited / self.tokens as f64 }
    }

    /// Mean iterations by which a token is trained before its turn; 0 unless documents come early. The sum of this and
    /// the mean wait is the mean displacement.
    pub fn early_mean(&self) -> f64 {
        if self.tokens == 0 { 0.0 } else { self.early as f64 / self.tokens as f64 }
    }

    /// Iterations of waiting that `fraction` of the tokens do not exceed.
    pub fn delay_percentile(&self, fraction: f64) -> u64 {
        percentile(&self.delay_tokens, fraction).unwrap_or(0)
    }

    /// Most iterations that any document waited.
    pub fn delay_max(&self) -> u64 {
        self.delay_tokens.last_key_value().map_or(0, |(&delay, _)| delay)
    }

    /// Tokens that left after each wait: `(iterations, tokens)`, ascending.
    pub fn delays(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.delay_tokens.iter().map(|(&delay, &tokens)| (delay, tokens))
    }

    /// Coefficient of variation (standard deviation over mean) of the tokens in a step.
    pub fn tokens_per_step_cv(&self) -> f64 {
        if self.steps == 0 {
            return 0.0;
        }
        let mean = self.step_tokens_sum / self.steps as f64;
        let variance = self.step_tokens_square_sum / self.steps as f64 - mean * mean;
        variance.max(0.0).sqrt() / mean
    }

    /// Coefficient of variation (standard deviation over mean) of the work of a step, since the last change of costs; 0
    /// before the first step.
    pub fn step_work_cv(&self) -> f64 {
        let Work { steps, sum, square_sum, .. } = self.work;
        if sum == 0.0 {
            return 0.0;
        }
        let mean = sum / steps as f64;
        (square_sum / steps as f64 - mean * mean).max(0.0).sqrt() / mean
    }

    /// Work of the heaviest step over the mean step, since the last change of costs; 1 before the first step.
    pub fn step_work_heaviest(&self) -> f64 {
        if self.work.sum == 0.0 { 1.0 } else { self.work.steps as f64 / self.work.sum }
    }

    /// Mean over pushes of the tokens that waited after the push.
    pub fn backlog_mean(&self) -> f64 {
        if self.pushes == 0 { 0.0 } else { self.backlog_sum / self.pushes as f64 }
    }

    /// Mean memory skew (most over mean tokens of a step's micro-batches); 1 before the first step.
    pub fn memory_skew_mean(&self) -> f64 {
        if self.steps == 0 { 1.0 } else { self.memory_skew_sum / self.steps as f64 }
    }

    /// Worst memory skew of any step; 1 before the first.
    pub fn memory_skew_worst(&self) -> f64 {
        self.memory_skew_worst.max(1.0)
    }

    /// What is wrong with the numbers of a saved state, if anything: all must be finite, and counts must agree.
    pub(super) fn problem(&self) -> Option<&'static str> {
        let sums = [
            self.imbalance_sum,
            self.imbalance_worst,
            self.step_tokens_sum,
            self.step_tokens_square_sum,
            self.memory_skew_sum,
            self.memory_skew_worst,
            self.backlog_sum,
        ];
        if !sums.iter().all(|sum| sum.is_finite() && *sum >= 0.0) {
            Some("sums must be finite numbers, 0 or above")
        } else if !self.work.is_sound(self.steps) || self.steps_over_max_cost > self.steps {
            Some("the work of steps is none that steps have")
        } else if total(&self.imbalance_histogram) != Some(self.steps) {
            Some("imbalance_histogram does not count the steps")
        } else if total(&self.delay_tokens) != Some(self.tokens) {
            Some("delay_tokens does not count the tokens")
        } else if [
            self.steps,
            self.documents,
            self.tokens,
            self.length_fallbacks,
            self.carried_over,
            self.backlog_max,
            self.pushes,
            self.padding,
            self.early,
        ]
        .iter()
        .any(|&n| n > 1 << 62)
        {
            Some("counts are out of range")
        } else {
            None
        }
    }
}

/// Total weight of a histogram; `None` if it overflows, or if a bin is empty (no bin ever is).
fn total<K>(histogram: &BTreeMap<K, u64>) -> Option<u64> {
    histogram.values().try_fold(0_u64, |sum, &weight| sum.checked_add(weight).filter(|_| weight > 0))
}

/// The smallest key with at least `fraction` of the weight at or below it.
fn percentile<K: Copy>(histogram: &BTreeMap<K, u64>, fraction: f64) -> Option<K> {
    let needed = histogram.values().sum::<u64>() as f64 * fraction;
    let mut below = 0;
    histogram
        .iter()
        .find(|&(_, &weight)| {
            below += weight;
            below as f64 >= needed
        })
        .map(|(&key, _)| key)
}
