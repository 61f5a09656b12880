//! Machines that Dynamic-CP may be asked to plan for.
#![allow(dead_code, reason = "each test file uses a part of it")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use proptest::prelude::*;
use proptest::sample::select;
use wlb_core::Schedule;
use wlb_core::dynamic_cp::{DynamicCpOptions, Exchange, GroupSizes, Node};
use wlb_core::packing::{Padding, Sync};

use super::strategies::lengths;

/// The documents of a step of at most 60, and a machine for them.
pub(crate) fn steps() -> impl Strategy<Value = (Vec<i32>, DynamicCpOptions)> {
    (1_i32..4000).prop_flat_map(|longest| (lengths(60, longest), options(longest)))
}

/// Whether so small a step can be simulated naively.
pub(crate) fn is_small(lengths: &[i32], options: &DynamicCpOptions) -> bool {
    lengths.len() < 20 && options.world_size <= 16 && options.num_stages * options.num_virtual_stages <= 6
}

fn exchange() -> impl Strategy<Value = Exchange> {
    let seconds = || prop_oneof![2 => Just(0.0), 1 => 1e-9..1e3, 1 => 1e3..1e8];
    let overlap = prop_oneof![1 => Just(0.0), 2 => Just(1.0), 1 => 0.0..1.0];
    (seconds(), seconds(), overlap).prop_map(|(seconds_per_exchange, seconds_per_token, overlap)| Exchange {
        seconds_per_exchange,
        seconds_per_token,
        overlap,
    })
}

/// Machines of any size, memory that mostly binds for documents of up to `longest` tokens.
pub(crate) fn options(longest: i32) -> impl Strategy<Value = DynamicCpOptions> {
    let world_size = prop_oneof![3 => 1_usize..9, 2 => select(vec![8_usize, 12, 16, 24, 32, 64]), 1 => 9_usize..70];
    let stages = prop_oneof![2 => Just(1_usize), 3 => 2_usize..9];
    let v_shaped = select(vec![Schedule::ZbV, Schedule::DualPipeV]).prop_map(|schedule| (2, Some(schedule)));
    let virtual_stages =
        prop_oneof![3 => Just((1_usize, None)), 1 => (2_usize..4).prop_map(|v| (v, None)), 1 => v_shaped];
    let max_tokens = prop_oneof![4 => 1..=longest, 1 => Just(longest), 1 => Just(i32::MAX)];
    let least = || prop_oneof![2 => Just(None), 1 => (1_usize..20).prop_map(Some)];
    let count = prop_oneof![
        4 => least().prop_map(|least| (None, least, None)),
        1 => (1_usize..20).prop_map(|m| (Some(m), None, None)),
        1 => (least(), 0_usize..20).prop_map(|(least, more)| (None, least, Some(least.unwrap_or(1) + more)))
    ];
    let part = prop_oneof![3 => Just(None), 1 => (0.0..=1.0).prop_map(Some)];
    let seconds = || prop_oneof![2 => Just(0.0), 1 => 1e-9..1e6];
    let sizes = select(vec![GroupSizes::PowersOfTwo, GroupSizes::Any]);
    // Ranks of a node, and what part of the price is left inside.
    let node = (1_usize..10, prop_oneof![Just(0.0), Just(1.0), 0.0..1.0]);
    let sync = prop_oneof![3 => Just(Sync::Step), 1 => Just(Sync::MicroBatch)];
    let groups = (part, sizes, proptest::option::weighted(0.3, node), shapes(longest), sync);
    (world_size, stages, virtual_stages, max_tokens, count, groups, exchange(), seconds(), seconds()).prop_map(
        |(
            world_size,
            num_stages,
            (num_virtual_stages, schedule),
            max_tokens_per_rank,
            count,
            (part, sizes, node, (padding, max_documents), sync),
            exchange,
            p2p,
            constant,
        )| {
            DynamicCpOptions {
                world_size,
                num_stages,
                num_virtual_stages,
                schedule,
                sync,
                max_tokens_per_rank,
                only_sizes: None,
                padding,
                max_documents,
                max_cp_size: part.map(|part: f64| 1 + (part * (world_size - 1) as f64) as usize),
                group_sizes: sizes,
                num_micro_batches: count.0,
                min_micro_batches: count.1,
                max_micro_batches: count.2,
                exchange,
                node: node.map(|(ranks, part)| Node {
                    ranks,
                    seconds_per_exchange: part * exchange.seconds_per_exchange,
                    seconds_per_token: part * exchange.seconds_per_token,
                }),
                p2p_seconds: p2p,
                micro_batch_seconds: constant,
            }
        },
    )
}

/// What micro-batches are padded to, and how many documents a group has at most.
pub(crate) fn shapes(longest: i32) -> impl Strategy<Value = (Option<Padding>, Option<usize>)> {
    let multiple = prop_oneof![Just(1), 2..=64_i32];
    let buckets = proptest::collection::btree_set(1..=longest, 0..4);
    let padding = (multiple, buckets).prop_map(|(multiple, buckets)| {
        let buckets: std::collections::BTreeSet<i32> =
            buckets.into_iter().map(|bucket| (bucket + multiple - 1) / multiple * multiple).collect();
        Some(Padding::new(multiple, 1, &buckets.into_iter().collect::<Vec<_>>()).unwrap()).filter(|p| !p.is_none())
    });
    let padding = prop_oneof![2 => Just(None), 1 => padding];
    (padding, prop_oneof![2 => Just(None), 1 => (1_usize..6).prop_map(Some)])
}
