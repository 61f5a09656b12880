//! Result of tuning.

/// Figures of one choice on the whole sample.
#[derive(Clone, Debug, PartialEq)]
pub struct TunedPoint {
    /// Thresholds of the queues; empty under [`Release::Adaptive`](crate::stream::Release::Adaptive).
    pub thresholds: Vec<i32>,
    /// Price of delay under [`Release::Adaptive`](crate::stream::Release::Adaptive).
    pub delay_price: Option<f64>,
    /// Mean imbalance over steps.
    pub imbalance_mean: f64,
    /// 95th percentile of the imbalance.
    pub imbalance_p95: f64,
    /// Imbalance of the worst step.
    pub imbalance_worst: f64,
    /// Mean delay of a token, in iterations, over all documents, including those flushed at the end; if documents come
    /// early, the iterations before their turn count, too.
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

/// Figures of a choice on orders of the sample on which it was not found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeldOut {
    /// Lost time: mean over the orders.
    pub lost_time: f64,
    /// Imbalance of the worst step of any order.
    pub imbalance_worst: f64,
    /// Mean delay of a token, in iterations, including those before its turn: mean over the orders.
    pub delay_mean: f64,
}

/// The best choice, and the alternatives.
#[derive(Clone, Debug, PartialEq)]
pub struct Tuned {
    /// The chosen one.
    pub best: TunedPoint,
    /// Choices that no other beats in both mean imbalance and mean delay, by ascending delay.
    pub pareto: Vec<TunedPoint>,
    /// The judged prices, the default first; empty if thresholds were tuned.
    pub judged: Vec<TunedPoint>,
    /// Number of choices tried.
    pub evaluated: usize,
}
