//! `kernel.json`: latencies of a measured kernel, and what is chosen by them.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use wlb_core::Strategy;
use wlb_core::cost::Passes;
use wlb_core::sharding::kernel::{KernelDescription, KernelModel};
use wlb_core::{ShardOptions, shard};

use super::file::{Case, hold};
use crate::common::check::close;
use crate::common::kernel::{best_choice, naive_rank_seconds, naive_seconds};
use crate::common::strategies::checked;

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct KernelCase {
    /// As `wlb profile` writes it.
    profile: Value,
    /// Queries and keys.
    segments: Vec<(i32, i32)>,
    #[serde(default)]
    segment_seconds: Vec<Seconds>,
    micro_batches: Vec<MicroBatch>,
}

#[derive(Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Seconds {
    forward: f64,
    backward: f64,
    forward_backward: f64,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct MicroBatch {
    lengths: Vec<i32>,
    cp_size: usize,
    #[serde(default)]
    adaptive: Choice,
    #[serde(default)]
    hybrid: Choice,
}

#[derive(Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Choice {
    strategy: String,
    hybrid_threshold: Option<i64>,
    /// Of every rank, forward and backward.
    rank_seconds: Vec<f64>,
}

impl Seconds {
    /// To 12 digits: the engine adds and divides in another order.
    fn of(seconds: impl Fn(Passes) -> f64) -> Self {
        let [forward, backward, forward_backward] =
            [Passes::Forward, Passes::Backward, Passes::ForwardBackward].map(|passes| rounded(seconds(passes)));
        Self { forward, backward, forward_backward }
    }
}

fn rounded(seconds: f64) -> f64 {
    format!("{seconds:.11e}").parse().unwrap()
}

impl Choice {
    fn new(lengths: &[i32], cp_size: usize, strategy: Strategy, model: &KernelModel) -> Self {
        let (options, _) = best_choice(&checked(lengths), cp_size, model, strategy, 0);
        let shard = shard(&checked(lengths), &options).unwrap();
        let seconds = |rank| naive_rank_seconds(model.description(), &shard, rank, Passes::ForwardBackward);
        Self {
            strategy: options.strategy.as_str().to_owned(),
            hybrid_threshold: options.hybrid_threshold,
            rank_seconds: (0..cp_size).map(seconds).map(rounded).collect(),
        }
    }

    fn check_engine(&self, lengths: &[i32], cp_size: usize, strategy: Strategy, model: &KernelModel) {
        let asked_for =
            ShardOptions { cp_size, strategy, mask: model.mask(), hybrid_threshold: None, max_imbalance: 1.01 };
        let chosen = asked_for.resolve(&checked(lengths), Some(model), 0.0).unwrap();
        assert_eq!((chosen.strategy.as_str(), chosen.hybrid_threshold), (&*self.strategy, self.hybrid_threshold));
        let seconds = model.rank_seconds(&shard(&checked(lengths), &chosen).unwrap(), Passes::ForwardBackward).unwrap();
        assert_eq!(seconds.len(), self.rank_seconds.len());
        assert!(seconds.iter().zip(&self.rank_seconds).all(|(&a, &b)| close(a, b) || (a - b).abs() < 1e-11));
    }
}

impl KernelCase {
    fn model(&self) -> KernelModel {
        KernelModel::from_profile(&self.profile.to_string()).unwrap()
    }
}

impl Case for KernelCase {
    fn answered(mut self) -> Self {
        let model = self.model();
        let kernel: &KernelDescription = model.description();
        let seconds =
            |&(queries, keys): &(i32, i32)| Seconds::of(|passes| naive_seconds(kernel, queries, keys, passes));
        self.segment_seconds = self.segments.iter().map(seconds).collect();
        for MicroBatch { lengths, cp_size, adaptive, hybrid } in &mut self.micro_batches {
            *adaptive = Choice::new(lengths, *cp_size, Strategy::Adaptive, &model);
            *hybrid = Choice::new(lengths, *cp_size, Strategy::Hybrid, &model);
        }
        self
    }

    fn check_engine(&self) {
        let model = self.model();
        for (&(queries, keys), expected) in self.segments.iter().zip(&self.segment_seconds) {
            let found = Seconds::of(|passes| model.segment_seconds(queries, keys, passes));
            assert!(close(found.forward, expected.forward) && close(found.backward, expected.backward));
            assert!(close(found.forward_backward, expected.forward_backward));
        }
        for MicroBatch { lengths, cp_size, adaptive, hybrid } in &self.micro_batches {
            adaptive.check_engine(lengths, *cp_size, Strategy::Adaptive, &model);
            hybrid.check_engine(lengths, *cp_size, Strategy::Hybrid, &model);
        }
    }
}

#[test]
fn kernels() {
    hold::<KernelCase>("kernel.json");
}
