//! What a document costs: attention is quadratic in its length, everything else is linear.
//!
//! `W(d) = W_a(d) + W_l(d)`, in seconds or any one unit, `W(0) = 0`. Both parts are a `Curve` over an amount
//! of work: pairs for attention, tokens for the rest. A constant per micro-batch is left out, because it cannot
//! change which packing is best.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, check_range, named_choices};
use crate::interrupt::{Meter, check};
use crate::lengths::Lengths;
use crate::limits::MAX_TOKENS;

/// Which keys a query attends to, inside its own document.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mask {
    /// Itself and all before it (language models).
    #[default]
    Causal,
    /// All of them (encoders, video models).
    Full,
}

impl Mask {
    /// (query, key) pairs of a whole document of `length` tokens: `d(d+1)/2` or `d*d`.
    #[inline]
    pub fn pairs(self, length: i32) -> u64 {
        let d = length as u64;
        match self {
            Self::Causal => d * (d + 1) / 2,
            Self::Full => d * d,
        }
    }

    /// [`Mask::pairs`] rounded to a float, without the detour that keeps a loop from vectorising. The same to the last
    /// bit: the product is rounded once, and halving is exact.
    #[inline]
    pub fn pairs_f64(self, length: i32) -> f64 {
        let d = f64::from(length);
        match self {
            Self::Causal => d * (d + 1.0) * 0.5,
            Self::Full => d * d,
        }
    }

    /// Pairs of the `length` queries from `start` on, in a document of `document_length` tokens.
    ///
    /// Causal: `l*s + l(l+1)/2`. Exact: at most 2^62.
    #[inline]
    pub fn segment_pairs(self, start: i32, length: i32, document_length: i32) -> u64 {
        let (s, l) = (start as u64, length as u64);
        match self {
            Self::Causal => l * s + l * (l + 1) / 2,
            Self::Full => l * document_length as u64,
        }
    }
}

/// Cost as a function of an amount of work, zero at zero, never decreasing.
///
/// Only `+ - * /`, which round alike on every machine; a logarithm would not.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Curve {
    /// Cost per unit of work.
    Rate(f64),
    /// Measured `(work, cost)` knots, ascending: linear between them (and from the origin to the first),
    /// proportional beyond the last. Attention is exact between knots wherever it is quadratic in the length,
    /// because the work is counted in pairs.
    Table(Vec<(f64, f64)>),
}

impl Curve {
    #[inline]
    fn at(&self, work: f64) -> f64 {
        match self {
            Self::Rate(rate) => rate * work,
            Self::Table(knots) => interpolate(knots, work),
        }
    }

    /// What the constructors guarantee, checked again on what comes from a file.
    fn check(&self, argument: &'static str) -> Result<()> {
        match self {
            Self::Rate(rate) => check_rate(argument, *rate),
            Self::Table(knots) => {
                let Some(first) = knots.first() else {
                    return Err(Error::Combination { argument, requirement: "a table needs at least one knot" });
                };
                let entry = |index, value, requirement| Err(Error::Entry { argument, index, value, requirement });
                let (mut work, mut cost) = (0.0, first.1);
                for (index, &(next_work, next_cost)) in knots.iter().enumerate() {
                    if !(next_work.is_finite() && next_work > work) {
                        return entry(index, next_work, "knots must ascend");
                    }
                    if !(next_cost.is_finite() && next_cost > 0.0) {
                        return entry(index, next_cost, "must be a finite number above 0");
                    }
                    if next_cost < cost {
                        return entry(index, next_cost, "must not be below the entry before it");
                    }
                    (work, cost) = (next_work, next_cost);
                }
                Ok(())
            }
        }
    }
}

fn interpolate(knots: &[(f64, f64)], work: f64) -> f64 {
    let above = knots.partition_point(|&(knot, _)| knot < work);
    let (x0, y0) = if above == 0 { (0.0, 0.0) } else { knots[above - 1] };
    match knots.get(above) {
        Some(&(x1, y1)) => y0 + (y1 - y0) * ((work - x0) / (x1 - x0)),
        None => y0 * (work / x0),
    }
}

fn check_rate(argument: &'static str, rate: f64) -> Result<()> {
    if rate.is_finite() && rate >= 0.0 {
        Ok(())
    } else {
        Err(Error::Number { argument, value: rate, requirement: "must be a finite number, 0 or above" })
    }
}

named_choices! {
    /// Which passes of training a cost counts. They weigh differently: attention's backward is 2.5 times its
    /// forward, a GEMM's twice.
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
    /// FLOP rate that attention reaches, relative to the GEMMs' (0.55: just over half).
    pub attention_efficiency: f64,
    /// FLOP rate of the GEMMs; with 1 the unit of cost is a GEMM FLOP.
    pub flops_per_second: f64,
    /// Passes counted.
    pub passes: Passes,
    /// Activation recomputation: the backward pass runs the forward once more.
    pub recompute: bool,
    /// Which keys a query attends to.
    pub mask: Mask,
}

/// Cost of documents: `W(d) = W_a(pairs(d)) + W_l(d)`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CostModel {
    attention: Curve,
    linear: Curve,
    mask: Mask,
}

impl CostModel {
    /// `attention * pairs(d) + linear * d`.
    ///
    /// # Arguments
    /// * `attention`, `linear` - cost of a (query, key) pair and of a token, in seconds or any one unit.
    ///
    /// # Errors
    /// [`Error::Number`] when a rate is negative or not finite, or both are zero.
    ///
    /// # Example
    /// ```
    /// use wlb_core::{CostModel, Mask};
    ///
    /// let cost = CostModel::analytic(1.0, 100.0, Mask::Causal)?;
    /// // Ten tokens attend to 10 * 11 / 2 pairs.
    /// assert_eq!(cost.cost(10), 55.0 + 1000.0);
    /// # Ok::<(), wlb_core::Error>(())
    /// ```
    pub fn analytic(attention: f64, linear: f64, mask: Mask) -> Result<Self> {
        // Adding zero makes -0.0 the 0.0 that it equals: equal models have equal hashes and fingerprints.
        let model = Self { attention: Curve::Rate(attention + 0.0), linear: Curve::Rate(linear + 0.0), mask };
        model.check()?;
        Ok(model)
    }

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
        let [hidden, ffn, layers, heads, kv_heads, head_dim, vocabulary, experts] = sizes.map(|(_, size)| size as f64);
        let ffn_matrices = if options.gated_ffn { 3.0 } else { 2.0 };
        let attention_parameters = 2.0 * hidden * heads * head_dim + 2.0 * hidden * kv_heads * head_dim;
        let layer_parameters = attention_parameters + ffn_matrices * hidden * ffn * experts;
        let forward_per_pair = 4.0 * heads * head_dim * layers;
        let forward_per_token = 2.0 * (layers * layer_parameters + hidden * vocabulary);

        let forward = if options.passes == Passes::Backward { 0.0 } else { 1.0 };
        let backward = if options.passes == Passes::Forward { 0.0 } else { 1.0 };
        let again = if options.recompute { backward } else { 0.0 };
        // Flash attention's backward runs five matrix products to the forward's two, since it recomputes the scores.
        let attention = forward_per_pair * (forward + again + 2.5 * backward) / options.attention_efficiency;
        let linear = forward_per_token * (forward + again + 2.0 * backward);
        Self::analytic(attention / options.flops_per_second, linear / options.flops_per_second, options.mask)
    }

    /// Cost from times measured at some document lengths.
    ///
    /// # Arguments
    /// * `lengths` - tokens, strictly ascending.
    /// * `attention`, `linear` - cost of one document of that length, above zero and never decreasing.
    ///
    /// # Errors
    /// [`Error::Mismatch`], [`Error::Entry`] or [`Error::Combination`] naming what does not fit.
    pub fn from_tables(lengths: &Lengths, attention: &[f64], linear: &[f64], mask: Mask) -> Result<Self> {
        for (argument, table) in [("attention_seconds", attention), ("linear_seconds", linear)] {
            if table.len() != lengths.len() {
                let (found, expected) = (table.len(), lengths.len());
                return Err(Error::Mismatch { argument, found, other: "lengths", expected });
            }
        }
        if let Some(index) = (1..lengths.len()).find(|&index| lengths[index] <= lengths[index - 1]) {
            let value = f64::from(lengths[index]);
            return Err(Error::Entry { argument: "lengths", index, value, requirement: "must ascend" });
        }
        let attention = lengths.iter().map(|&d| mask.pairs_f64(d)).zip(attention.iter().copied()).collect();
        let linear = lengths.iter().map(|&d| f64::from(d)).zip(linear.iter().copied()).collect();
        let model = Self { attention: Curve::Table(attention), linear: Curve::Table(linear), mask };
        model.attention.check("attention_seconds")?;
        model.linear.check("linear_seconds")?;
        Ok(model)
    }

    /// Cost from two curves; never an infinite or negative one.
    pub(crate) fn from_curves(attention: Curve, linear: Curve, mask: Mask) -> Result<Self> {
        let model = Self { attention, linear, mask };
        model.check()?;
        Ok(model)
    }

    /// The model as JSON, for pickles and checkpoints.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// The model that [`CostModel::to_json`] wrote.
    ///
    /// # Errors
    /// [`Error::Profile`] for anything else.
    pub fn from_json(json: &str) -> Result<Self> {
        let model: Self = crate::error::from_json(json).map_err(|(path, problem)| Error::Profile { path, problem })?;
        model.check()?;
        Ok(model)
    }

    /// Which keys a query attends to.
    pub fn mask(&self) -> Mask {
        self.mask
    }

    /// Cost of one document.
    #[inline]
    pub fn cost(&self, length: i32) -> f64 {
        if let (Curve::Rate(attention), Curve::Rate(linear)) = (&self.attention, &self.linear) {
            return attention * self.mask.pairs_f64(length) + linear * f64::from(length);
        }
        self.attention_cost(length) + self.linear_cost(length)
    }

    /// The part of [`CostModel::cost`] that grows with the pairs.
    #[inline]
    pub fn attention_cost(&self, length: i32) -> f64 {
        self.attention.at(self.mask.pairs_f64(length))
    }

    /// The part of [`CostModel::cost`] that grows with the tokens.
    #[inline]
    pub fn linear_cost(&self, length: i32) -> f64 {
        self.linear.at(f64::from(length))
    }

    /// Cost of each document.
    ///
    /// # Complexity
    /// O(n), vectorised for rates; O(n log k) for a table of `k` knots.
    pub fn costs(&self, lengths: &[i32]) -> Vec<f64> {
        check();
        match (&self.attention, &self.linear, self.mask) {
            // The choices hoisted out of the loop.
            (Curve::Rate(a), Curve::Rate(b), Mask::Causal) => {
                lengths.iter().map(|&d| a * Mask::Causal.pairs_f64(d) + b * f64::from(d)).collect()
            }
            _ => {
                let mut meter = Meter::default();
                let cost = |&length| {
                    // Two searches of a table.
                    meter.spend(8);
                    self.cost(length)
                };
                lengths.iter().map(cost).collect()
            }
        }
    }

    /// Checks that any sum of costs of these documents is finite; errors name `lengths`.
    ///
    /// # Errors
    /// [`Error::InfiniteCost`] naming a longest document when it is not.
    pub fn check_finite(&self, lengths: &[i32]) -> Result<()> {
        // Cost never decreases with length, so the longest document bounds them all.
        let longest = lengths.iter().copied().max().unwrap_or(0);
        if (self.cost(longest) * lengths.len() as f64).is_finite() {
            return Ok(());
        }
        let index = lengths.iter().position(|&length| length == longest).unwrap_or(0);
        Err(Error::InfiniteCost { argument: "lengths", index, value: i64::from(longest) })
    }

    /// What the constructors guarantee; for a model that was read from a file.
    pub(crate) fn check(&self) -> Result<()> {
        self.attention.check("attention")?;
        self.linear.check("linear")?;
        if self.attention == Curve::Rate(0.0) && self.linear == Curve::Rate(0.0) {
            let requirement = "attention and linear must not both be 0";
            return Err(Error::Number { argument: "linear", value: 0.0, requirement });
        }
        Ok(())
    }
}
