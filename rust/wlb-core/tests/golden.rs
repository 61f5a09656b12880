//! The plans that Python's naive oracles wrote down: two oracles, in two languages, by two people, and one engine.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::path::Path;

use common::strategies::checked;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use wlb_core::packing::Piece;
use wlb_core::packing::stream::{Oversize, Packer, PackerConfig, Release, StreamMethod, Waiting};
use wlb_core::sharding::Remainder;
use wlb_core::{CostModel, Leftover, Mask, PackOptions, Packing, ShardOptions, pack, shard};

fn read<T: DeserializeOwned>(name: &str) -> Vec<T> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name);
    let cases: Vec<T> = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert!(!cases.is_empty());
    cases
}

fn mask(causal: bool) -> Mask {
    if causal { Mask::Causal } else { Mask::Full }
}

/// `(id, start, length)`.
type Row = (i64, i32, i32);

fn rows<'a>(pieces: impl IntoIterator<Item = &'a Piece>) -> Vec<Row> {
    pieces.into_iter().map(|piece| (piece.id, piece.start, piece.length)).collect()
}

#[derive(Deserialize)]
struct Cost {
    attention: f64,
    linear: f64,
    causal: bool,
}

impl Cost {
    fn model(&self) -> CostModel {
        CostModel::analytic(self.attention, self.linear, mask(self.causal)).unwrap()
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Plan {
    micro_batches: Vec<Vec<Row>>,
    costs: Vec<f64>,
    assignment: Vec<i32>,
    leftover: Vec<Row>,
    length_fallbacks: usize,
}

impl Plan {
    fn check(&self, packing: &Packing) {
        let micro_batches: Vec<Vec<Row>> =
            (0..packing.num_micro_batches()).map(|j| rows(packing.micro_batch(j))).collect();
        assert_eq!(micro_batches, self.micro_batches);
        assert_eq!(packing.costs, self.costs);
        assert_eq!(packing.assignment, self.assignment);
        assert_eq!(rows(&packing.leftover), self.leftover);
        assert_eq!(packing.length_fallbacks, self.length_fallbacks);
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PackCase {
    lengths: Vec<i32>,
    num_micro_batches: usize,
    max_tokens: i32,
    method: String,
    window: usize,
    cost: Cost,
    plan: Plan,
}

#[test]
fn packings() {
    for PackCase { lengths, num_micro_batches, max_tokens, method, window, cost, plan } in read("pack.json") {
        let options = PackOptions {
            num_micro_batches,
            max_tokens,
            method: method.parse().unwrap(),
            global_batches: window,
            leftover: Leftover::Return,
        };
        plan.check(&pack(&checked(&lengths), &options, &cost.model()).unwrap());
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PackerCase {
    settings: Settings,
    cost: Cost,
    before: Vec<Step>,
    saved: Saved,
    num_micro_batches_after: usize,
    after: Vec<Step>,
    flush: Vec<Plan>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    num_micro_batches: usize,
    max_tokens: i32,
    #[serde(default)]
    outlier_thresholds: Vec<i32>,
    max_delay: Option<u64>,
    max_document_tokens: Option<i32>,
    #[serde(default)]
    oversize: Oversize,
    #[serde(default)]
    method: StreamMethod,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Step {
    lengths: Vec<i32>,
    ids: Option<Vec<i64>>,
    plan: Plan,
}

impl Step {
    fn check(&self, packer: &mut Packer) {
        self.plan.check(&packer.push(&checked(&self.lengths), self.ids.as_deref()).unwrap());
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Saved {
    iteration: u64,
    next_id: i64,
    carried: Columns,
    queues: Vec<Columns>,
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Columns {
    ids: Vec<i64>,
    starts: Vec<i32>,
    lengths: Vec<i32>,
    arrived: Vec<u64>,
}

impl Columns {
    fn of<'a>(waiting: impl IntoIterator<Item = &'a Waiting>) -> Self {
        let waiting: Vec<&Waiting> = waiting.into_iter().collect();
        Self {
            ids: waiting.iter().map(|waiting| waiting.piece.id).collect(),
            starts: waiting.iter().map(|waiting| waiting.piece.start).collect(),
            lengths: waiting.iter().map(|waiting| waiting.piece.length).collect(),
            arrived: waiting.iter().map(|waiting| waiting.arrived).collect(),
        }
    }
}

#[test]
fn streams() {
    for case in read::<PackerCase>("packer.json") {
        let Settings { max_tokens, max_document_tokens, oversize, method, .. } = case.settings;
        let Settings { num_micro_batches, outlier_thresholds, max_delay, .. } = case.settings;
        let config = PackerConfig {
            num_micro_batches,
            max_tokens,
            max_document_tokens: max_document_tokens.unwrap_or(max_tokens),
            oversize,
            outlier_thresholds,
            release: Release::Fifo,
            delay_price: None,
            max_delay,
            method,
            cost_model: case.cost.model(),
        };
        let mut packer = Packer::new(config.clone()).unwrap();
        case.before.iter().for_each(|step| step.check(&mut packer));

        assert_eq!(packer.iteration(), case.saved.iteration);
        assert_eq!(Columns::of(packer.carried()), case.saved.carried);
        assert_eq!(packer.queue().levels().iter().map(Columns::of).collect::<Vec<_>>(), case.saved.queues);
        // The next running id shows in the state.
        let state: serde_json::Value = serde_json::from_str(&packer.save()).unwrap();
        assert_eq!(state["next_id"], case.saved.next_id);

        let mut resumed =
            Packer::new(PackerConfig { num_micro_batches: case.num_micro_batches_after, ..config }).unwrap();
        resumed.restore(&packer.save(), false).unwrap();
        case.after.iter().for_each(|step| step.check(&mut resumed));
        let flushed = resumed.flush();
        assert_eq!(flushed.len(), case.flush.len());
        case.flush.iter().zip(&flushed).for_each(|(plan, packing)| plan.check(packing));
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ShardCase {
    lengths: Vec<i32>,
    cp_size: usize,
    causal: bool,
    strategy: String,
    #[serde(default)]
    remainder: Remainder,
    hybrid_threshold: Option<i64>,
    ranks: Vec<Rank>,
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rank {
    num_tokens: usize,
    num_segments: usize,
    token_indices: Vec<i32>,
    position_ids: Vec<i32>,
    cu_seqlens_q: Vec<i32>,
    cu_seqlens_k: Vec<i32>,
    max_seqlen_q: i32,
    max_seqlen_k: i32,
    k_starts: Vec<i32>,
    documents: Vec<u32>,
    pairs: u64,
}

#[test]
fn shards() {
    for ShardCase { lengths, cp_size, causal, strategy, remainder, hybrid_threshold, ranks } in read("shard.json") {
        let strategy = strategy.parse().unwrap();
        let options =
            ShardOptions { cp_size, strategy, mask: mask(causal), remainder, hybrid_threshold, max_imbalance: 1.01 };
        let shard = shard(&checked(&lengths), &options).unwrap();
        assert_eq!(shard.cp_size(), ranks.len());
        for (rank, expected) in ranks.into_iter().enumerate() {
            let (layout, segments) = (shard.layout(rank).unwrap(), shard.segments(rank).unwrap());
            let found = Rank {
                num_tokens: layout.num_tokens,
                num_segments: segments.len(),
                token_indices: shard.token_indices(rank).unwrap(),
                position_ids: shard.position_ids(rank).unwrap(),
                cu_seqlens_q: layout.cu_seqlens_q,
                cu_seqlens_k: layout.cu_seqlens_k,
                max_seqlen_q: layout.max_seqlen_q,
                max_seqlen_k: layout.max_seqlen_k,
                k_starts: layout.k_starts,
                documents: segments.iter().map(|segment| segment.document).collect(),
                pairs: shard.pairs(rank),
            };
            assert_eq!(found, expected, "rank {rank}");
        }
    }
}
