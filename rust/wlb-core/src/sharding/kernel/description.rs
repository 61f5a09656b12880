//! Measured or assumed times of an attention kernel.

use serde::{Deserialize, Serialize};

/// All that makes a [`KernelModel`](super::model::KernelModel): plain data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelDescription {
    /// "measured: (GPU) (kernel)" or "analytic: (generation)".
    pub source: String,
    /// Whether the kernel was measured under a causal mask.
    pub causal: bool,
    /// Query heads of one GPU.
    pub num_heads: i64,
    /// Key and value heads of one GPU.
    pub num_kv_heads: i64,
    /// Width of one head.
    pub head_dim: i64,
    /// Queries of a segment: the rows of the tables. Ascending.
    pub query_lengths: Vec<i64>,
    /// Keys of a segment: the columns of the tables. Ascending.
    pub key_lengths: Vec<i64>,
    /// Times of the forward pass.
    pub forward: PassTable,
    /// Times of the backward pass.
    pub backward: PassTable,
}

/// Times of one pass.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PassTable {
    /// Queries that a thread block computes at a time.
    pub tile: i64,
    /// Seconds of a call, whatever its segments.
    pub launch_seconds: f64,
    /// Seconds of one segment of a call that fills the GPU: a row per query length, a column per key length; nothing
    /// where there are more queries than keys.
    pub median_seconds: Vec<Vec<Option<f64>>>,
}
