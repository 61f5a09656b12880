//! `pipeline.json`: when every op of a pipeline starts and ends. The orders of the ops are the engine's:
//! `tests/pipeline.rs` and `tests/torch/test_pipeline_order.py` hold these.

use serde::{Deserialize, Serialize};
use wlb_core::pipeline::{Detail, Kind, Op, PipelineOptions, Times};
use wlb_core::{Pipeline, Schedule};

use super::file::{Case, hold};
use crate::common::pipeline as oracle;

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct PipelineCase {
    schedule: Schedule,
    num_stages: usize,
    num_virtual_stages: usize,
    /// Of `costs`: micro-batches, then stages of the model, then the three passes, as far as they are told apart.
    shape: Vec<usize>,
    costs: Vec<f64>,
    /// One for all, or one a micro-batch.
    p2p_seconds: Vec<f64>,
    activation: Vec<f64>,
    #[serde(default)]
    ranks: Vec<Rank>,
}

#[derive(Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
struct Rank {
    /// What, which micro-batch, which stage, start, end.
    ops: Vec<(String, u32, u32, f64, f64)>,
    peak_activation: f64,
}

fn name(kind: Kind) -> String {
    ["forward", "backward", "input_gradient", "weight_gradient"][kind as usize].to_owned()
}

impl PipelineCase {
    fn options(&self) -> PipelineOptions {
        let &Self { schedule, num_stages, num_virtual_stages, .. } = self;
        PipelineOptions { schedule, num_stages, num_virtual_stages, num_micro_batches: self.shape[0] }
    }

    fn detail(&self) -> Detail {
        [Detail::MicroBatch, Detail::Stage, Detail::Pass][self.shape.len() - 1]
    }
}

impl Case for PipelineCase {
    fn answered(self) -> Self {
        let (options, detail) = (self.options(), self.detail());
        let orders = options.orders().unwrap();
        let seconds = |op: Op| oracle::op_seconds(&self.costs, detail, options.total_stages(), op);
        let p2p = |j: u32| self.p2p_seconds[if self.p2p_seconds.len() > 1 { j as usize } else { 0 }];
        let times = oracle::simulate(&orders, options.total_stages(), seconds, p2p).unwrap();
        let rank = |(rank, order): (usize, &Vec<Op>)| {
            let op = |(at, op): (usize, &Op)| {
                let (start, end) = times[&(rank, at)];
                (name(op.kind), op.micro_batch, op.stage, start, end)
            };
            let peak_activation = oracle::peak_activation(order, &self.activation) / self.num_virtual_stages as f64;
            Rank { ops: order.iter().enumerate().map(op).collect(), peak_activation }
        };
        let ranks = orders.iter().enumerate().map(rank).collect();
        Self { ranks, ..self }
    }

    fn check_engine(&self) {
        let times = Times::new(&self.costs, self.detail()).unwrap().with_p2p(&self.p2p_seconds).unwrap();
        let timeline = Pipeline::new(&self.options()).unwrap().simulate(&times, Some(&self.activation)).unwrap();
        let rank = |rank: usize| {
            let mine = timeline.records.iter().filter(|record| record.rank as usize == rank);
            let op = |record: &wlb_core::pipeline::Record| {
                (name(record.op.kind), record.op.micro_batch, record.op.stage, record.start, record.end)
            };
            Rank { ops: mine.map(op).collect(), peak_activation: timeline.summary.peak_activation[rank] }
        };
        assert_eq!((0..self.num_stages).map(rank).collect::<Vec<_>>(), self.ranks);
    }
}

#[test]
fn pipelines() {
    hold::<PipelineCase>("pipeline.json");
}
