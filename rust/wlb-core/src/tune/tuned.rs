//! Result of tuning.

/// Figures of one choice on the whole sample.
#[derive(Clone, Debug, PartialEq)]
pub struct TunedPoint {
    /// The thresholds of the queues; none under [`Release::Adaptive`](crate::stream::Release::Adaptive).
    pub thresholds: Vec<i32>,
    /// The price of delay, under [`Release::Adaptive`](crate::stream::Release::Adaptive).
    pub delay_price: Option<f64>,
    /// Mean imbalance over steps.
    pub imbalance_mean: f64,
    /// 95th percentile of the imbalance.
    pub imbalance_p95: f64,
    /// Worst step.
    pub imbalance_worst: f64,
    /// Mean token delay, in iterations, of all documents, those flushed at the end of the sample included; where
    /// documents come early, with the iterations before their turn.
    pub delay_mean: f64,
    /// Longest wait of a document, in iterations.
    pub delay_max: u64,
    /// Mean memory skew.
    pub memory_skew_mean: f64,
    /// Sum of the steps' heaviest micro-batches over the sum of their means: heavy steps weigh more than in the mean
    /// imbalance.
    pub lost_time: f64,
    /// Figures on the same documents in other orders, for prices that were judged.
    pub held_out: Option<HeldOut>,
}

/// Figures of a choice on orders of the sample that it was not found on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeldOut {
    /// Lost time, mean over the orders.
    pub lost_time: f64,
    /// Worst step of any order.
    pub imbalance_worst: f64,
    /// Mean token delay, in iterations, with those before the turn; mean over the orders.
    pub delay_mean: f64,
}

/// The best choice and what else could be had.
#[derive(Clone, Debug, PartialEq)]
pub struct Tuned {
    /// The choice.
    pub best: TunedPoint,
    /// Choices that no other beats in both mean imbalance and mean delay, by ascending delay.
    pub pareto: Vec<TunedPoint>,
    /// The prices judged, the default's first; none where thresholds were tuned.
    pub judged: Vec<TunedPoint>,
    /// Number of choices tried.
    pub evaluated: usize,
}
