//! Measured profiles: one JSON file for a GPU and attention kernel. It gives a kernel model and a cost model.
//!
//! The format is described in `docs/semantics.md`. Every entry that a model reads is checked here; entries for people
//! (versions, clocks, spreads, held-out shapes) may hold anything.

use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::cost::{CostModel, Curve, Passes};
use crate::error::{Error, Result};
use crate::sharding::kernel::{
    KernelDescription, KernelModel, PassTable, ascending, check_count, check_seconds, wrong,
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Profile {
    format: String,
    version: u32,
    gpu: String,
    kernel: String,
    causal: bool,
    num_heads: i64,
    num_kv_heads: i64,
    head_dim: i64,
    query_lengths: Vec<i64>,
    key_lengths: Vec<i64>,
    forward: AttentionPass,
    backward: AttentionPass,
    linear: Option<Linear>,
    #[serde(default, rename = "description")]
    _description: IgnoredAny,
    #[serde(default, rename = "dtype")]
    _dtype: IgnoredAny,
    #[serde(default, rename = "versions")]
    _versions: IgnoredAny,
    #[serde(default, rename = "clocks")]
    _clocks: IgnoredAny,
    #[serde(default, rename = "held_out")]
    _held_out: IgnoredAny,
}

/// Times of attention calls.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AttentionPass {
    tile: i64,
    #[serde(default)]
    launch_seconds: f64,
    /// Seconds of one segment: a row per query length, a column per key length, null where there is no such segment.
    median_seconds: Vec<Vec<Option<f64>>>,
    #[serde(default, rename = "p10_seconds")]
    _p10: IgnoredAny,
    #[serde(default, rename = "p90_seconds")]
    _p90: IgnoredAny,
    #[serde(default, rename = "segments_per_call")]
    _segments_per_call: IgnoredAny,
}

/// Times of the parts of a transformer layer other than attention.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Linear {
    tokens: Vec<i64>,
    forward: LinearPass,
    backward: LinearPass,
    #[serde(default, rename = "layer")]
    _layer: IgnoredAny,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LinearPass {
    median_seconds: Vec<f64>,
    #[serde(default, rename = "p10_seconds")]
    _p10: IgnoredAny,
    #[serde(default, rename = "p90_seconds")]
    _p90: IgnoredAny,
}

impl Profile {
    const FORMAT: &str = "wlb.profile";
    const VERSION: u32 = 1;

    fn read(json: &str) -> Result<Self> {
        let profile: Self =
            crate::error::from_json(json).map_err(|(path, problem)| Error::Profile { path, problem })?;
        if profile.format != Self::FORMAT {
            return wrong("format", format!("{:?} is not {:?}", profile.format, Self::FORMAT));
        }
        if profile.version != Self::VERSION {
            return wrong("version", format!("{} is not {}", profile.version, Self::VERSION));
        }
        Ok(profile)
    }

    fn kernel_model(self) -> Result<(KernelModel, Option<Linear>)> {
        let pass = |pass: AttentionPass| PassTable {
            tile: pass.tile,
            launch_seconds: pass.launch_seconds,
            median_seconds: pass.median_seconds,
        };
        let model = KernelModel::new(KernelDescription {
            source: format!("measured: {} {}", self.gpu, self.kernel),
            causal: self.causal,
            num_heads: self.num_heads,
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            query_lengths: self.query_lengths,
            key_lengths: self.key_lengths,
            forward: pass(self.forward),
            backward: pass(self.backward),
        })?;
        Ok((model, self.linear))
    }
}

impl KernelModel {
    /// The kernel model of a measured profile, exact at every entry of its tables. `json` is the text of the profile's
    /// file.
    ///
    /// # Errors
    /// [`Error::Profile`] naming the place in the file.
    pub fn from_profile(json: &str) -> Result<Self> {
        Ok(Profile::read(json)?.kernel_model()?.0)
    }
}

impl CostModel {
    /// The cost of documents on the GPU of a measured profile. `json` is the text of a profile with a `linear` part.
    ///
    /// Costs are for one transformer layer. Attention is the time of a document on one rank by the profile's
    /// [`KernelModel`], at all lengths of the profile; a longer document that was measured faster than a shorter one
    /// costs as much as the shorter.
    ///
    /// # Errors
    /// [`Error::Profile`] naming the place in the file.
    pub fn from_profile(json: &str, passes: Passes) -> Result<Self> {
        let (kernel, linear) = Profile::read(json)?.kernel_model()?;
        let Some(linear) = linear else {
            return wrong("linear", "is missing: this profile holds attention only");
        };
        ascending("linear.tokens", &linear.tokens)?;
        let mut knots: Vec<(f64, f64)> = linear.tokens.iter().map(|&tokens| (tokens as f64, 0.0)).collect();
        let parts = [("forward", &linear.forward, Passes::Backward), ("backward", &linear.backward, Passes::Forward)];
        for (pass, part, other) in parts {
            let name = format!("linear.{pass}.median_seconds");
            check_count(&name, part.median_seconds.len(), "linear.tokens", knots.len())?;
            // Each part is checked by itself: the sum could hide a negative time.
            for (index, (&seconds, knot)) in part.median_seconds.iter().zip(&mut knots).enumerate() {
                check_seconds(|| format!("{name}[{index}]"), seconds)?;
                knot.1 += if passes == other { 0.0 } else { seconds };
            }
        }
        let attention = kernel.lengths().map(|d| (kernel.mask().pairs_f64(d), kernel.segment_seconds(d, d, passes)));
        Self::from_curves(never_decreasing(attention.collect()), never_decreasing(knots), kernel.mask())
    }
}

/// Raises each cost to the greatest before it. Noise may measure more work in less time, but a cost must never
/// decrease.
fn never_decreasing(mut knots: Vec<(f64, f64)>) -> Curve {
    let mut most = 0.0_f64;
    for (_, seconds) in &mut knots {
        most = most.max(*seconds);
        *seconds = most;
    }
    Curve::Table(knots)
}
