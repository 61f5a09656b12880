//! Measured or assumed times of an attention kernel.

use serde::{Deserialize, Serialize};

/// The data of a [`KernelModel`](super::model::KernelModel).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelDescription {
    /// "measured: (GPU) (kernel)" or "analytic: (generation)".
    pub source: String,
    /// Whether the kernel was measured under a causal mask.
    pub causal: bool,
    /// Query heads on one GPU.
    pub num_heads: i64,
    /// Key and value heads on one GPU.
    pub num_kv_heads: i64,
    /// Width of one head.
    pub head_dim: i64,
    /// Numbers of queries of a segment: the rows of the tables. Ascending.
    pub query_lengths: Vec<i64>,
    /// Numbers of keys of a segment: the columns of the tables. Ascending.
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
    /// Seconds of a call besides its segments.
    pub launch_seconds: f64,
    /// Seconds of one segment of a call that fills the GPU: a row for each query length, a column for each key length;
    /// null if there are more queries than keys.
    pub median_seconds: Vec<Vec<Option<f64>>>,
}
