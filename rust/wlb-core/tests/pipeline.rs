//! The pipeline engine: closed forms, exactly.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use wlb_core::schedule::{Buffers, Layout, Times};
use wlb_core::{Pipeline, Schedule};

fn layout(schedule: Schedule, num_stages: usize, num_virtual_stages: usize, num_micro_batches: usize) -> Layout {
    Layout { schedule, num_stages, num_virtual_stages, num_micro_batches }
}

/// The bubble of equal micro-batches over the time of all work, times `m`, in `1 / (3 v)`: exact.
fn bubble(layout: Layout) -> f64 {
    let Layout { num_stages: p, num_virtual_stages: v, num_micro_batches: m, .. } = layout;
    // Every forward, input gradient and weight gradient takes one second.
    let costs = vec![3.0 * (p * v) as f64; m];
    let pipeline = Pipeline::new(&layout).unwrap();
    let makespan = pipeline.makespan(&Times::per_micro_batch(&costs).unwrap(), &mut Buffers::default()).unwrap();
    makespan - (3 * v * m) as f64
}

#[test]
fn bubbles_are_those_of_the_closed_forms() {
    for p in 1..9 {
        for m in [1, 2, 3, p, p + 1, 2 * p, 4 * p, 31] {
            let hops = (p - 1) as f64;
            assert_eq!(bubble(layout(Schedule::GPipe, p, 1, m)), 3.0 * hops);
            assert_eq!(bubble(layout(Schedule::OneForwardOneBackward, p, 1, m)), 3.0 * hops);
            if m >= p {
                assert_eq!(bubble(layout(Schedule::ZbH1, p, 1, m)), hops, "{p} {m}");
            }
            if m >= 2 * p - 1 {
                assert_eq!(bubble(layout(Schedule::ZbH2, p, 1, m)), hops, "{p} {m}");
            }
            for v in 1..5 {
                if m % p == 0 {
                    assert_eq!(bubble(layout(Schedule::Interleaved, p, v, m)), 3.0 * hops, "{p} {v} {m}");
                }
            }
        }
    }
}
