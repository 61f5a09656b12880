//! When the ops of a pipeline start and end, found without an order of events.
#![allow(dead_code, reason = "each test file uses a part of it")]

use std::collections::BTreeMap;

use wlb_core::pipeline::{Detail, Kind, Op};

/// Start and end of the op at each place: (rank, number in the rank's order). `None` if the orders wait for each other.
///
/// An op starts when its rank has finished the one before it and its inputs are there. A forward needs the forward of
/// the stage before, a backward (or the gradient of the input) the forward of its own stage and the backward of the
/// stage behind, the gradient of the weights that of the input. What comes from another rank arrives `p2p` later.
///
/// Everything starts at 0, and what started before it could is pushed back until nothing has to be.
///
/// Two stages, one micro-batch, 1 second a forward, 2 a backward, 0.5 between ranks: forwards start at 0 and 1.5,
/// backwards at 2.5 (on the last rank) and 5.
pub(crate) fn simulate(
    orders: &[Vec<Op>],
    stages: usize,
    times: impl Fn(Op) -> f64,
    p2p: impl Fn(u32) -> f64,
) -> Option<BTreeMap<(usize, usize), (f64, f64)>> {
    let places: Vec<(usize, usize)> =
        orders.iter().enumerate().flat_map(|(rank, ops)| (0..ops.len()).map(move |at| (rank, at))).collect();
    let whole = |kind| if kind == Kind::Backward { Kind::InputGradient } else { kind } as usize;
    let found: BTreeMap<_, _> = places
        .iter()
        .map(|&(rank, at)| (orders[rank][at], (rank, at)))
        .map(|(op, place)| ((whole(op.kind), op.micro_batch, op.stage), place))
        .collect();
    let find = |kind: Kind, micro_batch: u32, stage: u32| found[&(whole(kind), micro_batch, stage)];
    let mut starts: BTreeMap<_, _> = places.iter().map(|&place| (place, 0.0_f64)).collect();
    for _ in 0..=places.len() {
        let mut changed = false;
        for &(rank, at) in &places {
            let op @ Op { kind, micro_batch, stage } = orders[rank][at];
            let mut waits = Vec::new();
            if at > 0 {
                waits.push((rank, at - 1));
            }
            match kind {
                Kind::Forward if stage > 0 => waits.push(find(Kind::Forward, micro_batch, stage - 1)),
                Kind::Forward => {}
                Kind::WeightGradient => waits.push(find(Kind::Backward, micro_batch, stage)),
                Kind::Backward | Kind::InputGradient => {
                    waits.push(find(Kind::Forward, micro_batch, stage));
                    if (stage as usize) < stages - 1 {
                        waits.push(find(Kind::Backward, micro_batch, stage + 1));
                    }
                }
            }
            for (from, before) in waits {
                let other = orders[from][before];
                let ready =
                    starts[&(from, before)] + times(other) + if from == rank { 0.0 } else { p2p(op.micro_batch) };
                if ready > starts[&(rank, at)] {
                    starts.insert((rank, at), ready);
                    changed = true;
                }
            }
        }
        if !changed {
            let ends = starts.into_iter().map(|((rank, at), start)| (rank, at, start, times(orders[rank][at])));
            return Some(ends.map(|(rank, at, start, seconds)| ((rank, at), (start, start + seconds))).collect());
        }
    }
    None
}

/// 1F1B as its inventors describe it: a rank runs as many forwards ahead as there are ranks behind it, then one forward
/// and one backward in turn, then the backwards that are left.
///
/// Two ranks, three micro-batches: the first runs F0 F1 B0 F2 B1 B2, the second F0 B0 F1 B1 F2 B2.
pub(crate) fn one_forward_one_backward(num_stages: usize, num_micro_batches: usize) -> Vec<Vec<Op>> {
    let of_rank = |rank: usize| {
        let ahead = (num_stages - 1 - rank).min(num_micro_batches);
        let op = |kind, micro_batch: usize| Op { kind, micro_batch: micro_batch as u32, stage: rank as u32 };
        let mut order: Vec<Op> = (0..ahead).map(|j| op(Kind::Forward, j)).collect();
        for j in 0..num_micro_batches {
            if j + ahead < num_micro_batches {
                order.push(op(Kind::Forward, j + ahead));
            }
            order.push(op(Kind::Backward, j));
        }
        order
    };
    (0..num_stages).map(of_rank).collect()
}

/// GPipe: all forwards, then all backwards, both in the order of micro-batches.
pub(crate) fn gpipe(num_stages: usize, num_micro_batches: usize) -> Vec<Vec<Op>> {
    let passes = [Kind::Forward, Kind::Backward].into_iter();
    let order = passes.flat_map(|kind| (0..num_micro_batches as u32).map(move |j| (kind, j)));
    let order: Vec<(Kind, u32)> = order.collect();
    let of_rank =
        |stage: usize| order.iter().map(|&(kind, micro_batch)| Op { kind, micro_batch, stage: stage as u32 }).collect();
    (0..num_stages).map(of_rank).collect()
}

/// Seconds of an op: a third of its micro-batch's cost on each of the stages for a forward and for either half of a
/// backward, or what was given for the stage, or for the pass.
pub(crate) fn op_seconds(costs: &[f64], detail: Detail, stages: usize, op: Op) -> f64 {
    let (j, s) = (op.micro_batch as usize, op.stage as usize);
    let passes = match detail {
        Detail::MicroBatch => [costs[j] / (3 * stages) as f64; 3],
        Detail::Stage => [costs[j * stages + s] / 3.0; 3],
        Detail::Pass => [0, 1, 2].map(|pass| costs[(j * stages + s) * 3 + pass]),
    };
    match op.kind {
        Kind::Forward => passes[0],
        Kind::Backward => passes[1] + passes[2],
        Kind::InputGradient => passes[1],
        Kind::WeightGradient => passes[2],
    }
}

/// Most that a rank holds at a time: of each forward that ran, what its micro-batch keeps, until its last backward
/// there has ended.
pub(crate) fn peak_activation(order: &[Op], activation: &[f64]) -> f64 {
    let mut peak = 0.0_f64;
    for at in 0..order.len() {
        let held = |op: &&Op| {
            let last = |other: &Op| {
                matches!(other.kind, Kind::Backward | Kind::WeightGradient)
                    && (other.micro_batch, other.stage) == (op.micro_batch, op.stage)
            };
            op.kind == Kind::Forward && !order[..at].iter().any(last)
        };
        peak = peak.max(order[..=at].iter().filter(held).map(|op| activation[op.micro_batch as usize]).sum());
    }
    peak
}
