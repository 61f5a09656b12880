//! Assumed kernel times for GPUs that were not measured.

use crate::cost::Mask;
use crate::error::{Error, Result, check_range, named_choices};
use crate::limits::MAX_KERNEL_SIZE;

use super::description::{KernelDescription, PassTable};
use super::model::KernelModel;

named_choices! {
    /// GPUs with documented assumptions.
    Generation, "generation" {
        /// Ampere.
        A100 = "a100",
        /// Hopper.
        H100 = "h100",
        /// Hopper with more memory.
        H200 = "h200",
        /// Blackwell.
        B200 = "b200",
        /// Hopper with a seventh of the FLOP/s.
        H20 = "h20",
        /// Ada, without `NVLink`.
        L40S = "l40s",
        /// CDNA 3.
        MI300X = "mi300x",
    }
}

/// What [`KernelModel::analytic`] assumes about a GPU.
struct Assumption {
    /// Share of the peak rate with unlimited keys, forward and backward.
    efficiency: [f64; 2],
    /// Rate below 256 queries, relative to the rate from 256 queries on.
    without_multicast: f64,
}

impl Generation {
    /// Dense bfloat16 FLOP/s, as the vendor states it.
    pub fn peak_flops(self) -> f64 {
        match self {
            Self::A100 => 312e12,
            Self::H100 | Self::H200 => 989e12,
            Self::B200 => 2250e12,
            Self::H20 => 148e12,
            Self::L40S => 362e12,
            Self::MI300X => 1307e12,
        }
    }

    fn assumption(self) -> Assumption {
        match self {
            Self::A100 | Self::L40S => Assumption { efficiency: [0.70, 0.60], without_multicast: 1.0 },
            Self::MI300X => Assumption { efficiency: [0.40, 0.30], without_multicast: 1.0 },
            Self::H100 | Self::H200 | Self::H20 => Assumption { efficiency: [0.64, 0.575], without_multicast: 0.8 },
            Self::B200 => Assumption { efficiency: [0.70, 0.63], without_multicast: 0.8 },
        }
    }
}

impl KernelModel {
    /// The documented assumptions for a GPU generation that was not measured.
    ///
    /// Rate = peak * efficiency * `m / (m + c)` * multicast. `m` is the mean number of keys of a query. `c` is the
    /// number of keys that a tile's prologue, epilogue and masked corner cost (224 forward, 330 backward). Multicast is
    /// 0.8 below 256 queries on Hopper and Blackwell, where thread blocks then cannot share a tile of keys, and 1
    /// otherwise. The backward pass computes 2.5 times the FLOPs.
    ///
    /// Sources: on H100, `c` and the efficiencies follow FlashAttention-3's published rates (head width 128, 16-bit:
    /// causal forward 423, 579 and 616 TFLOP/s at 1K, 4K and 16K tokens; backward without a mask 424, 542 and 561).
    /// A100: FlashAttention-2's "50 to 73 %" of the peak forward. B200: FlashAttention-4's 71 %, and a backward slower
    /// by the same ratio as on H100. L40S and H20 are assumed to reach the shares of A100 and H100. MI300X: 0.40 and
    /// 0.30, a guess from AMD's reports of FlashAttention-2 on composable kernels. The multicast factor of 0.8 and the
    /// time of a call, 5 us (10 us backward), are guesses.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a size, [`Error::Combination`] if `num_kv_heads` does not divide `num_heads`.
    pub fn analytic(
        generation: Generation,
        num_heads: i64,
        num_kv_heads: i64,
        head_dim: i64,
        mask: Mask,
    ) -> Result<Self> {
        for (argument, size) in [("num_heads", num_heads), ("num_kv_heads", num_kv_heads), ("head_dim", head_dim)] {
            check_range(argument, size, 1, MAX_KERNEL_SIZE)?;
        }
        if num_heads % num_kv_heads != 0 {
            return Err(Error::Combination { argument: "num_kv_heads", requirement: "must divide num_heads" });
        }
        let Assumption { efficiency, without_multicast } = generation.assumption();
        let query_lengths: Vec<i64> = (7..=13).map(|bit| 1 << bit).collect();
        let key_lengths: Vec<i64> = (7..=20).map(|bit| 1 << bit).collect();
        let flops_per_pair = (4 * num_heads * head_dim) as f64;
        let table = |pass: usize| {
            let (overhead, work) = [(224.0, 1.0), (330.0, 2.5)][pass];
            let seconds = |queries: i64, keys: i64| {
                let pairs = mask.segment_pairs((keys - queries) as i32, queries as i32, keys as i32) as f64;
                let mean = pairs / queries as f64;
                let multicast = if queries < 256 { without_multicast } else { 1.0 };
                let rate = generation.peak_flops() * efficiency[pass] * multicast * (mean / (mean + overhead));
                pairs * flops_per_pair * work / rate
            };
            let row = |&queries: &i64| {
                key_lengths.iter().map(|&keys| (queries <= keys).then(|| seconds(queries, keys))).collect()
            };
            PassTable {
                tile: 128,
                launch_seconds: [5e-6, 10e-6][pass],
                median_seconds: query_lengths.iter().map(row).collect(),
            }
        };
        Self::new(KernelDescription {
            source: format!("analytic: {}", generation.as_str()),
            causal: mask == Mask::Causal,
            num_heads,
            num_kv_heads,
            head_dim,
            forward: table(0),
            backward: table(1),
            query_lengths,
            key_lengths,
        })
    }
}
