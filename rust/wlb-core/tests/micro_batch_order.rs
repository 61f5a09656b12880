//! Micro-batches placed for a schedule: every one once, never slower than dealt by cost, close to the best of all
//! orders.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common::strategies::{checked, config, llama_7b, pack_options};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use wlb_core::pipeline::{Buffers, Detail, PipelineOptions, Times, order_micro_batches};
use wlb_core::{Error, Method, Pipeline, Schedule, pack};

/// Seconds of each row of an order.
fn seconds(layout: &PipelineOptions, costs: &[f64], order: &[usize]) -> Vec<f64> {
    let pipeline = Pipeline::new(layout).unwrap();
    let row = |row: &[usize]| {
        let costs: Vec<f64> = row.iter().map(|&j| costs[j]).collect();
        pipeline.makespan(&Times::per_micro_batch(&costs).unwrap(), &mut Buffers::default()).unwrap()
    };
    order.chunks(layout.num_micro_batches).map(row).collect()
}

fn slowest(layout: &PipelineOptions, costs: &[f64], order: &[usize]) -> f64 {
    seconds(layout, costs, order).into_iter().fold(0.0, f64::max)
}

fn layouts() -> impl Strategy<Value = PipelineOptions> {
    let schedules = select(vec![
        (Schedule::GPipe, 1),
        (Schedule::OneForwardOneBackward, 1),
        (Schedule::Interleaved, 2),
        (Schedule::ZbH1, 1),
        (Schedule::ZbV, 2),
    ]);
    (schedules, 1_usize..5, 1_usize..4).prop_map(|((schedule, num_virtual_stages), p, rounds)| PipelineOptions {
        schedule,
        num_stages: p,
        num_virtual_stages,
        num_micro_batches: p * rounds,
    })
}

proptest! {
    #![proptest_config(config(100))]

    #[test]
    fn every_micro_batch_once_and_never_slower_than_dealt(
        layout in layouts(), dp_size in 1_usize..5, lengths in vec(1_i32..100_000, 1..200),
    ) {
        let count = layout.num_micro_batches * dp_size;
        let options = pack_options(count, i32::MAX, Method::VarLength);
        let packing = pack(&checked(&lengths), &options, &llama_7b()).unwrap();
        let times = Times::per_micro_batch(&packing.costs).unwrap();
        let order = order_micro_batches(&layout, &times, dp_size).unwrap();
        let mut sorted = order.clone();
        sorted.sort_unstable();
        prop_assert_eq!(sorted, (0..count).collect::<Vec<_>>());
        let dealt = packing.deal(dp_size).unwrap();
        prop_assert!(slowest(&layout, &packing.costs, &order) <= slowest(&layout, &packing.costs, &dealt));
        prop_assert_eq!(&order, &order_micro_batches(&layout, &times, dp_size).unwrap());
    }

    /// No swap makes the slowest rank faster by what is worth it, neither inside it nor with another rank: where the
    /// search is not cut off. With so few micro-batches it never is.
    #[test]
    fn no_swap_helps(layout in layouts(), dp_size in 1_usize..4, seed in vec(1_u32..1000, 9)) {
        let m = layout.num_micro_batches.min(2 * layout.num_stages);
        let (layout, dp_size) = (PipelineOptions { num_micro_batches: m, ..layout }, dp_size.min((9 / m).max(1)));
        let costs: Vec<f64> = seed[..m * dp_size].iter().map(|&cost| f64::from(cost)).collect();
        let order = order_micro_batches(&layout, &Times::per_micro_batch(&costs).unwrap(), dp_size).unwrap();
        let before = seconds(&layout, &costs, &order);
        // Of ranks that take equally long the first: another one made faster alone makes no step faster.
        let row = (0..dp_size).rev().max_by(|&a, &b| before[a].total_cmp(&before[b])).unwrap();
        for i in row * m..(row + 1) * m {
            for j in (0..order.len()).filter(|&j| j != i) {
                let mut swapped = order.clone();
                swapped.swap(i, j);
                let after = seconds(&layout, &costs, &swapped);
                prop_assert!(after[row].max(after[j / m]) >= before[row] * (1.0 - 2e-6));
            }
        }
    }

    /// Costs by pass are placed by what they add up to.
    #[test]
    fn any_detail_is_taken(layout in layouts(), p2p in 0_u32..3) {
        let (m, stages) = (layout.num_micro_batches, layout.total_stages());
        let p2p = vec![f64::from(p2p); m];
        let whole: Vec<f64> = (0..m).map(|j| ((j * 7 % 5 + 1) * 3 * stages) as f64).collect();
        let apart: Vec<f64> = whole.iter().flat_map(|&cost| vec![cost / (3 * stages) as f64; 3 * stages]).collect();
        let place = |times: Times<'_>| order_micro_batches(&layout, &times.with_p2p(&p2p).unwrap(), 1).unwrap();
        let (apart, whole) = (Times::new(&apart, Detail::Pass), Times::per_micro_batch(&whole));
        prop_assert_eq!(place(apart.unwrap()), place(whole.unwrap()));
    }
}

/// All orders of `0..count`.
fn orders(count: usize) -> Vec<Vec<usize>> {
    let Some(last) = count.checked_sub(1) else { return vec![Vec::new()] };
    let insert = |order: Vec<usize>| (0..=order.len()).map(move |at| [&order[..at], &[last], &order[at..]].concat());
    orders(last).into_iter().flat_map(insert).collect()
}

/// On long-tailed costs, the mean over the best of all orders; a sorted order alone is several per cent above it.
#[test]
fn close_to_the_best_of_all_orders() {
    let all = orders(6);
    let mut state = 1_u64;
    let mut draw = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // 1 / u: a long tail.
        (1.0 / ((state >> 40) as f64 / (1 << 24) as f64 + 0.05)).min(10.0)
    };
    let layout = |schedule, num_stages, num_virtual_stages| PipelineOptions {
        schedule,
        num_stages,
        num_virtual_stages,
        num_micro_batches: 6,
    };
    let layouts = [
        layout(Schedule::OneForwardOneBackward, 4, 1),
        layout(Schedule::Interleaved, 3, 2),
        layout(Schedule::ZbH1, 3, 1),
    ];
    for layout in layouts {
        let (mut placed, mut arrival) = (0.0, 0.0);
        const TRIALS: usize = 20;
        for _ in 0..TRIALS {
            let costs: Vec<f64> = (0..6).map(|_| draw()).collect();
            let best = all.iter().map(|order| slowest(&layout, &costs, order)).fold(f64::INFINITY, f64::min);
            let order = order_micro_batches(&layout, &Times::per_micro_batch(&costs).unwrap(), 1).unwrap();
            placed += slowest(&layout, &costs, &order) / best - 1.0;
            arrival += slowest(&layout, &costs, &[0, 1, 2, 3, 4, 5]) / best - 1.0;
        }
        assert!(placed / (TRIALS as f64) < 0.005);
        assert!(arrival / (TRIALS as f64) > 0.01);
    }
}

#[test]
fn bad_sizes_are_refused() {
    let layout = PipelineOptions {
        schedule: Schedule::OneForwardOneBackward,
        num_stages: 2,
        num_virtual_stages: 1,
        num_micro_batches: 2,
    };
    let times = Times::per_micro_batch(&[1.0, 2.0, 3.0, 4.0]).unwrap();
    for dp_size in [0, usize::MAX] {
        let error = order_micro_batches(&layout, &times, dp_size).unwrap_err();
        assert!(matches!(error, Error::OutOfRange { argument: "dp_size", .. }));
    }
    let error = order_micro_batches(&layout, &times, 3).unwrap_err();
    assert!(matches!(error, Error::Mismatch { argument: "costs", found: 4, expected: 6, .. }));
}
