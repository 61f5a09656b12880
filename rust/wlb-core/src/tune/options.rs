//! Options of tuning and its limits.

use crate::stream::PackerConfig;

/// Most mean token delay, in iterations, unless the user says otherwise.
pub const MAX_MEAN_DELAY: f64 = 0.6;

/// Options of tuning.
#[derive(Clone, Debug, PartialEq)]
pub struct TuneOptions {
    /// The packer to tune; its `release`, `outlier_thresholds` and `delay_price` are ignored. It says what a global
    /// batch is.
    pub packer: PackerConfig,
    /// Most mean token delay, in iterations; where documents come early, with those before the turn.
    pub max_mean_delay: f64,
    /// Iterations that a document comes before its turn, at most
    /// ([`Packer::leads`](crate::stream::Packer::leads)): above 0 for a price and a packer with a cost model
    /// only.
    pub max_early: i64,
}
