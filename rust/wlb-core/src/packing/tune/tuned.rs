//! What tuning found.

/// What one choice gives on the sample.
#[derive(Clone, Debug, PartialEq)]
pub struct TunedPoint {
    /// The thresholds of the queues; none under [`Release::Adaptive`](crate::packing::stream::Release::Adaptive).
    pub thresholds: Vec<i32>,
    /// The price of delay, under [`Release::Adaptive`](crate::packing::stream::Release::Adaptive).
    pub delay_price: Option<f64>,
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

/// The best choice and what else could be had.
#[derive(Clone, Debug, PartialEq)]
pub struct Tuned {
    /// Best balance within the delay limit.
    pub best: TunedPoint,
    /// Choices that no other beats in both mean imbalance and mean delay, by ascending delay.
    pub pareto: Vec<TunedPoint>,
    /// Number of choices tried.
    pub evaluated: usize,
}
