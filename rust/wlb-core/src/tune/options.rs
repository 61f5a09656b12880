//! Options of tuning and its limits.

use crate::stream::PackerConfig;

/// Default limit on the mean delay of a token, in iterations.
pub const MAX_MEAN_DELAY: f64 = 0.6;

/// Options of tuning.
#[derive(Clone, Debug, PartialEq)]
pub struct TuneOptions {
    /// The packer to tune; `release`, `outlier_thresholds` and `delay_price` are ignored. It defines the size of a
    /// global batch.
    pub packer: PackerConfig,
    /// Most thresholds to tune, 0 to 4; `None` tunes the price of delay of the adaptive rule instead.
    pub num_queues: Option<usize>,
    /// Most mean delay of a token, in iterations; if documents come early, iterations before the turn count, too.
    pub max_mean_delay: f64,
    /// Most iterations by which a document may come before its turn ([`Packer::leads`](crate::stream::Packer::leads));
    /// above 0 only for tuning a price of a packer with a cost model.
    pub max_early: i64,
}
