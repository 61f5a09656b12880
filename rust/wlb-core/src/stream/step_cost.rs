//! A bound on the work of a step.
//!
//! What makes the micro-batches of a step even makes steps uneven: documents that wait for others of their kind leave
//! with them. Who wants steps of like work says how many times the mean global batch's a step may have at most. What
//! would be more waits, until it is due.

use serde::{Deserialize, Serialize};

use super::config::PackerConfig;

/// Global batches after which the documents of the mean count for half. So it is that of the last 128 to 256, also of a
/// stream whose documents get longer.
const REMEMBERED: f64 = 256.0;

/// Costs of the documents that arrived lately.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Arrived {
    cost: f64,
    tokens: f64,
}

impl Arrived {
    /// Problem of numbers that were read from a file.
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

    /// Counts new documents, their lengths with their costs.
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

    /// Most that the documents of a step may cost: a multiple of the mean cost of a global batch.
    /// Infinite without a bound, and before the first document.
    pub(super) fn budget(&self, config: &PackerConfig) -> f64 {
        match config.shape.max_cost {
            Some(times) if self.tokens > 0.0 => times * (self.cost / self.tokens) * config.tokens_per_batch() as f64,
            _ => f64::INFINITY,
        }
    }
}
