//! What a packer remembers of the cost models that it had.
//!
//! Two streams that were packed by the same costs from the same step on, and by others before, hold other documents. So
//! what a packer was told belongs to what it is: to its state, and to its fingerprint.

use serde::{Deserialize, Serialize};

use crate::cost::CostModel;

use super::config::PackerConfig;

/// The cost models that a packer has had, in little space however often they changed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CostHistory {
    /// What the packer was made with: what a state and the packer that loads it have to agree on.
    pub first: CostModel,
    /// Changes so far.
    pub changes: u64,
    /// The first iteration under the present one.
    pub since: u64,
    /// A hash of every change: its iteration and its cost model.
    pub digest: String,
}

impl CostHistory {
    /// What is wrong with a history that was read from a file, of a packer at `iteration`.
    pub(super) fn problem(&self, iteration: u64) -> Option<&'static str> {
        if self.first.check().is_err() {
            Some("its first cost model makes no sense")
        } else if self.changes == 0 {
            Some("has no change")
        } else if self.since > iteration {
            Some("its last change is of a later iteration")
        } else {
            None
        }
    }
}

/// A hash of what must be the same for the same documents to give the same plans: the configuration but for the number
/// of micro-batches, and the cost models before.
pub(super) fn fingerprint(config: &PackerConfig, history: Option<&CostHistory>) -> String {
    match history {
        None => config.fingerprint(),
        Some(history) => hash(&(config.fingerprint(), history)),
    }
}

/// Of anything that can be written as JSON.
pub(super) fn hash(value: &impl Serialize) -> String {
    blake3::hash(&serde_json::to_vec(value).unwrap_or_default()).to_hex().to_string()
}
