//! Cost from the shape of a transformer.

use crate::error::{Error, Result, check_range, named_choices};
use crate::limits::MAX_TOKENS;

use super::mask::Mask;
use super::model::CostModel;

named_choices! {
    /// The passes of training that a cost counts. They weigh differently: attention's backward takes 2.5 times its
    /// forward, a matrix product's twice.
    #[derive(Default)]
    Passes, "passes" {
        /// Forward only.
        Forward = "forward",
        /// Backward only.
        Backward = "backward",
        /// A training step.
        #[default]
        ForwardBackward = "forward_backward",
    }
}

impl Passes {
    /// FLOPs run in a step as multiples of the forward FLOPs: for a pair of attention, and for a token in matrix
    /// products. With `recompute` the backward pass runs the forward pass once more.
    ///
    /// Flash attention's backward runs five matrix products to the forward's two, since it recomputes the scores.
    pub fn weights(self, recompute: bool) -> (f64, f64) {
        let forward = if self == Self::Backward { 0.0 } else { 1.0 };
        let backward = if self == Self::Forward { 0.0 } else { 1.0 };
        let again = if recompute { backward } else { 0.0 };
        (forward + again + 2.5 * backward, forward + again + 2.0 * backward)
    }
}

/// The shape of a transformer and how its FLOPs become a cost.
#[derive(Clone, Debug, PartialEq)]
pub struct FlopsOptions {
    /// Width of the residual stream.
    pub hidden_size: i64,
    /// Width of the feed-forward block (of one expert).
    pub ffn_hidden_size: i64,
    /// Number of layers.
    pub num_layers: i64,
    /// Query heads.
    pub num_heads: i64,
    /// Key and value heads; below `num_heads` with GQA and MQA.
    pub num_kv_heads: i64,
    /// Width of one head.
    pub head_dim: i64,
    /// Size of the vocabulary, for the output projection.
    pub vocab_size: i64,
    /// Gated feed-forward (SwiGLU) has three matrices, plain has two.
    pub gated_ffn: bool,
    /// Experts that one token visits; 1 for a dense model.
    pub experts_per_token: i64,
    /// FLOP rate that attention reaches, relative to the GEMMs' rate (for example 0.55).
    pub attention_efficiency: f64,
    /// FLOP rate of the GEMMs; if it is 1, costs are in GEMM FLOPs.
    pub flops_per_second: f64,
    /// Passes counted.
    pub passes: Passes,
    /// Activation recomputation: the backward pass runs the forward once more.
    pub recompute: bool,
    /// The mask: the keys that a query attends to.
    pub mask: Mask,
}

impl CostModel {
    /// Cost from the model's FLOPs: `4 * heads * head_dim` per pair and layer (QK' and PV), twice the
    /// parameters per token.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] or [`Error::Number`] naming the first option that makes no sense.
    pub fn from_flops(options: &FlopsOptions) -> Result<Self> {
        let sizes = [
            ("hidden_size", options.hidden_size),
            ("ffn_hidden_size", options.ffn_hidden_size),
            ("num_layers", options.num_layers),
            ("num_heads", options.num_heads),
            ("num_kv_heads", options.num_kv_heads),
            ("head_dim", options.head_dim),
            ("vocab_size", options.vocab_size),
            ("experts_per_token", options.experts_per_token),
        ];
        for (argument, value) in sizes {
            check_range(argument, value, 1, MAX_TOKENS)?;
        }
        for (argument, value) in
            [("attention_efficiency", options.attention_efficiency), ("flops_per_second", options.flops_per_second)]
        {
            if !(value.is_finite() && value > 0.0) {
                return Err(Error::Number { argument, value, requirement: "must be a finite number above 0" });
            }
        }
        if options.attention_efficiency > 10.0 {
            let requirement = "must be at most 10: it is a ratio of two rates, such as 0.55, not a percentage";
            return Err(Error::Number {
                argument: "attention_efficiency",
                value: options.attention_efficiency,
                requirement,
            });
        }
        let [hidden, ffn, layers, heads, kv_heads, head_dim, vocabulary, experts] = sizes.map(|(_, size)| size as f64);
        let ffn_matrices = if options.gated_ffn { 3.0 } else { 2.0 };
        let attention_parameters = 2.0 * hidden * heads * head_dim + 2.0 * hidden * kv_heads * head_dim;
        let layer_parameters = attention_parameters + ffn_matrices * hidden * ffn * experts;
        let forward_per_pair = 4.0 * heads * head_dim * layers;
        let forward_per_token = 2.0 * (layers * layer_parameters + hidden * vocabulary);

        let (pair, token) = options.passes.weights(options.recompute);
        let attention = forward_per_pair * pair / options.attention_efficiency;
        let linear = forward_per_token * token;
        Self::analytic(attention / options.flops_per_second, linear / options.flops_per_second, options.mask)
    }
}
