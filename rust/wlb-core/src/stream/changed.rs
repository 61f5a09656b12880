//! Bounds for documents that wait while the rules change.
//!
//! The proof of [`Bounds`](super::Bounds) begins with an empty packer. Documents that came under other rules (another
//! number of micro-batches or ranks, other limits or thresholds), or in a push that brought more than was admitted, may
//! wait longer. How long follows from the waiting load: see "After a change" in `docs/semantics.md`.

use serde::{Deserialize, Serialize};

use crate::limits::MAX_ITERATION;

use super::config::{PackerConfig, StreamMethod};

/// Facts about a change, kept until all documents that came before it have left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Changed {
    /// First iteration after the change: documents that arrived before it came under other rules.
    pub(super) at: u64,
    /// Most iterations that such a document waits.
    pub(super) delay: u64,
    /// Iteration before which all such documents have left.
    pub(super) until: u64,
}

impl Changed {
    /// What is wrong with numbers that were read from a file, if anything.
    pub(super) fn problem(&self, iteration: u64) -> Option<&'static str> {
        let most = 4 * MAX_ITERATION;
        (self.at > iteration || self.delay > most || self.until > iteration.saturating_add(most))
            .then_some("is out of range")
    }
}

/// Whether a packer that continues under `after` may break bounds promised under `before`. Costs and the method of
/// placing are not compared: no proof depends on them.
pub(super) fn is_other(before: &PackerConfig, after: &PackerConfig) -> bool {
    let promised = |config: &PackerConfig| {
        let mut config = config.clone();
        (config.cost_model, config.delay_price, config.method) = (None, None, StreamMethod::default());
        (config.shape.max_cost, config.shape.tokens_per_batch) = (None, None);
        config
    };
    promised(before) != promised(after)
}
