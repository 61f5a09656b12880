//! A bound on the work of a step.
//!
//! Even micro-batches make steps uneven: documents that wait for others of their kind leave together with them.
//! `max_cost` limits the work of a step to a multiple of the mean global batch's work. Documents beyond it wait until
//! they are due.

use serde::{Deserialize, Serialize};

use super::config::PackerConfig;

/// When the counted documents fill this many global batches, all sums are halved. So the mean is over the last 128 to
/// 256 global batches, and follows a stream whose documents get longer.
const REMEMBERED: f64 = 256.0;

/// Sums over the documents that arrived recently.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Arrived {
    cost: f64,
    tokens: f64,
}

impl Arrived {
    /// What is wrong with numbers that were read from a file, if anything.
    pub(super) fn problem(&self, config: &PackerConfig) -> Option<&'static str> {
        let sound = |sum: f64| sum.is_finite() && sum >= 0.0;
        if !sound(self.cost) || !sound(self.tokens) {
            Some("sums must be finite numbers, 0 or above")
        } else if config.shape.max_cost.is_none() && *self != Self::default() {
            Some("nothing is counted where nothing bounds the work of a step")
        } else {
            None
        }
    }

    /// Counts new documents, given as `(length, cost)`.
    pub(super) fn count(&mut self, new: impl Iterator<Item = (i32, f64)>, config: &PackerConfig) {
        for (length, cost) in new {
            self.cost += cost;
            self.tokens += f64::from(length);
        }
        while self.tokens > REMEMBERED * config.tokens_per_batch() as f64 {
            self.cost *= 0.5;
            self.tokens *= 0.5;
        }
    }

    /// Most work of a step's documents: a multiple of the mean global batch's work. Infinite without a bound, and
    /// before the first document.
    pub(super) fn budget(&self, config: &PackerConfig) -> f64 {
        match config.shape.max_cost {
            Some(times) if self.tokens > 0.0 => times * (self.cost / self.tokens) * config.tokens_per_batch() as f64,
            _ => f64::INFINITY,
        }
    }
}
