//! Pipelines: every schedule against the closed forms and a naive simulation, and what must hold of any.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common::pipeline as oracle;
use crate::common::strategies::config;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use wlb_core::pipeline::{Buffers, Detail, Kind, Op, PipelineOptions, StepTotals, Timeline, Times};
use wlb_core::{Error, Pipeline, Schedule};

const SCHEDULES: [Schedule; 8] = [
    Schedule::GPipe,
    Schedule::OneForwardOneBackward,
    Schedule::Interleaved,
    Schedule::ZbH1,
    Schedule::ZbH2,
    Schedule::InterleavedZeroBubble,
    Schedule::ZbV,
    Schedule::DualPipeV,
];

fn options(
    schedule: Schedule,
    num_stages: usize,
    num_virtual_stages: usize,
    num_micro_batches: usize,
) -> PipelineOptions {
    PipelineOptions { schedule, num_stages, num_virtual_stages, num_micro_batches }
}

/// Equal micro-batches whose every pass through a stage takes one second.
fn equal(options: PipelineOptions) -> Timeline {
    let costs = vec![3.0 * options.total_stages() as f64; options.num_micro_batches];
    let pipeline = Pipeline::new(&options).unwrap();
    pipeline.simulate(&Times::per_micro_batch(&costs).unwrap(), None).unwrap()
}

/// Idle seconds of every rank: in seconds of one pass through one stage.
fn bubble(options: PipelineOptions) -> f64 {
    equal(options).summary.seconds - (3 * options.num_virtual_stages * options.num_micro_batches) as f64
}

#[test]
fn bubbles_are_those_of_the_closed_forms() {
    for p in 1..9 {
        for m in [1, 2, 3, p, p + 1, 2 * p, 4 * p, 31] {
            let hops = (p - 1) as f64;
            assert_eq!(bubble(options(Schedule::GPipe, p, 1, m)), 3.0 * hops);
            assert_eq!(bubble(options(Schedule::OneForwardOneBackward, p, 1, m)), 3.0 * hops);
            if m >= p {
                assert_eq!(bubble(options(Schedule::ZbH1, p, 1, m)), hops, "{p} {m}");
            }
            for v in 1..5 {
                if m % p == 0 {
                    assert_eq!(bubble(options(Schedule::Interleaved, p, v, m)), 3.0 * hops, "{p} {v} {m}");
                }
            }
            let ratio = equal(options(Schedule::OneForwardOneBackward, p, 1, m)).summary.bubble_ratio();
            assert_eq!(ratio, (p - 1) as f64 / m as f64);
        }
    }
}

/// ZB-H2 and ZB-V never pause: the ranks' steps are shifted by a forward each, and nothing else.
#[test]
fn zero_bubble_schedules_have_none_inside_the_step() {
    for p in 1..9 {
        for m in [2 * p - 1, 2 * p, 4 * p, 31] {
            for (schedule, v) in [(Schedule::ZbH2, 1), (Schedule::ZbV, 2)] {
                let summary = equal(options(schedule, p, v, m)).summary;
                assert_eq!(summary.spans, vec![(3 * v * m) as f64; p], "{schedule:?} {p} {m}");
                assert_eq!(summary.period(), (3 * v * m) as f64);
                assert_eq!(summary.seconds, (3 * v * m + p - 1) as f64);
            }
        }
    }
}

/// Of the schedules that can be said in a sentence; `tests/torch` compares the others with torch's own.
#[test]
fn plain_orders_are_the_oracles() {
    for p in 1..7 {
        for m in 1..12 {
            let orders = |schedule| options(schedule, p, 1, m).orders().unwrap();
            assert_eq!(orders(Schedule::GPipe), oracle::gpipe(p, m));
            assert_eq!(orders(Schedule::OneForwardOneBackward), oracle::one_forward_one_backward(p, m));
        }
    }
}

#[test]
fn peak_activation_is_that_of_the_closed_forms() {
    for p in 1..9 {
        for m in [1, 2 * p, 4 * p] {
            let peaks = |schedule, v| equal(options(schedule, p, v, m)).summary.peak_activation;
            let per_rank = |at: fn(usize, usize, usize) -> usize| -> Vec<f64> {
                (0..p).map(|rank| at(p, m, rank).min(m) as f64).collect()
            };
            assert_eq!(peaks(Schedule::GPipe, 1), per_rank(|_, m, _| m));
            assert_eq!(peaks(Schedule::OneForwardOneBackward, 1), per_rank(|p, _, rank| p - rank));
            assert_eq!(peaks(Schedule::ZbH1, 1), per_rank(|p, _, _| p));
            assert_eq!(peaks(Schedule::ZbH2, 1), per_rank(|p, _, _| 2 * p - 1));
            if m > 1 {
                assert_eq!(peaks(Schedule::ZbV, 2), per_rank(|p, _, _| p));
                // Of the first round all but the last stage, two for every hop to the last rank, and one in work.
                let chunks = |rank: usize| (p + 2 * (p - 1 - rank) + 1) as f64;
                let interleaved: Vec<f64> = (0..p).map(|rank| chunks(rank) / 2.0).collect();
                assert_eq!(peaks(Schedule::Interleaved, 2), interleaved);
            }
        }
    }
}

/// A schedule that takes its sizes.
fn any_options() -> impl Strategy<Value = PipelineOptions> {
    (select(SCHEDULES.to_vec()), 1_usize..5, 1_usize..4, 1_usize..9).prop_map(|(schedule, p, v, m)| {
        let v = match schedule {
            Schedule::Interleaved | Schedule::InterleavedZeroBubble => v,
            Schedule::ZbV | Schedule::DualPipeV => 2,
            _ => 1,
        };
        let m = if schedule == Schedule::DualPipeV { m + 2 * p - 1 } else { m };
        let rounds = (m / p).max(1);
        options(schedule, p, v, if schedule == Schedule::DualPipeV { m } else { m / rounds * rounds })
    })
}

/// Costs with their detail, latencies, activations: whole numbers such that every pass takes whole seconds, mostly
/// small.
#[derive(Clone, Debug)]
struct Work {
    options: PipelineOptions,
    detail: Detail,
    costs: Vec<f64>,
    exposed: Vec<f64>,
    p2p: Vec<f64>,
    activation: Vec<f64>,
}

impl Work {
    fn op_seconds(&self, op: Op) -> f64 {
        oracle::op_seconds(&self.costs, self.detail, self.options.total_stages(), op)
    }

    fn times(&self) -> Times<'_> {
        Times::new(&self.costs, self.detail).unwrap().with_p2p(&self.p2p).unwrap().with_exposed(&self.exposed).unwrap()
    }
}

fn work() -> impl Strategy<Value = Work> {
    let details = select(vec![Detail::MicroBatch, Detail::Stage, Detail::Pass]);
    (any_options(), details).prop_flat_map(|(options, detail)| {
        let (m, stages) = (options.num_micro_batches, options.total_stages());
        let entries = detail.entries(m, stages);
        let unit = match detail {
            Detail::MicroBatch => 3 * stages,
            Detail::Stage => 3,
            Detail::Pass => 1,
        } as f64;
        let seconds = move || prop_oneof![4 => 0_u32..6, 1 => 0_u32..60].prop_map(move |s| f64::from(s) * unit);
        let latency = || select(vec![0.0, 0.0, 1.0, 2.0, 7.0]);
        let p2p = prop_oneof![vec(latency(), 1), vec(latency(), m)];
        let tokens = vec((0_u32..9).prop_map(f64::from), m);
        (vec((seconds(), seconds()), entries), p2p, tokens).prop_map(move |(costs, p2p, activation)| {
            let exposed = costs.iter().map(|&(a, b)| f64::min(a, b)).collect();
            let costs = costs.iter().map(|&(a, b)| f64::max(a, b)).collect();
            Work { options, detail, costs, exposed, p2p, activation }
        })
    })
}

proptest! {
    #![proptest_config(config(200))]

    /// Starts, ends, busy time and memory are those of the definition; the ways to ask agree.
    #[test]
    fn timelines_are_the_oracles(work in work()) {
        let orders = work.options.orders().unwrap();
        let pipeline = Pipeline::new(&work.options).unwrap();
        let Timeline { summary, records, .. } = pipeline.simulate(&work.times(), Some(&work.activation)).unwrap();
        let p2p = |j: u32| work.p2p[if work.p2p.len() > 1 { j as usize } else { 0 }];
        let expected = oracle::simulate(&orders, work.options.total_stages(), |op| work.op_seconds(op), p2p).unwrap();

        for (rank, order) in orders.iter().enumerate() {
            let mine: Vec<_> = records.iter().filter(|record| record.rank as usize == rank).collect();
            prop_assert_eq!(mine.iter().map(|record| record.op).collect::<Vec<_>>(), order.clone());
            for (at, record) in mine.iter().enumerate() {
                prop_assert_eq!((record.start, record.end), expected[&(rank, at)]);
            }
            prop_assert_eq!(summary.busy[rank], order.iter().map(|&op| work.op_seconds(op)).sum::<f64>());
            let end = mine.last().unwrap().end;
            prop_assert_eq!(summary.spans[rank], end - mine[0].start);

            let peak = oracle::peak_activation(order, &work.activation);
            prop_assert_eq!(summary.peak_activation[rank], peak / work.options.num_virtual_stages as f64);
        }
        prop_assert_eq!(summary.seconds, expected.values().map(|&(_, end)| end).fold(0.0, f64::max));
        let mut buffers = Buffers::default();
        prop_assert_eq!(pipeline.makespan(&work.times(), &mut buffers).unwrap(), summary.seconds);
        // Also from buffers that were used.
        prop_assert_eq!(pipeline.summarize(&work.times(), Some(&work.activation), &mut buffers).unwrap(), summary);
    }

    /// No step is shorter than its busiest rank, or than the way of a micro-batch there and back; the critical path
    /// explains the whole of it; and nothing gets faster when something gets slower.
    #[test]
    fn bounds_hold(work in work(), at in any::<prop::sample::Index>(), more in 1_u32..9) {
        let pipeline = Pipeline::new(&work.options).unwrap();
        let timeline = pipeline.simulate(&work.times(), None).unwrap();
        let seconds = timeline.summary.seconds;
        for &busy in &timeline.summary.busy {
            prop_assert!(busy <= seconds);
        }
        for j in 0..work.options.num_micro_batches as u32 {
            let way = timeline.records.iter().filter(|record| record.op.micro_batch == j);
            let way = way.filter(|r| matches!(r.op.kind, Kind::Forward | Kind::InputGradient));
            let way: f64 = way.map(|r| r.end - r.start).sum();
            prop_assert!(way <= seconds);
        }

        let path: Vec<_> = timeline.critical_path().into_iter().map(|index| timeline.records[index]).collect();
        prop_assert_eq!((path[0].start, path[path.len() - 1].end), (0.0, seconds));
        for pair in path.windows(2) {
            let j = pair[1].op.micro_batch as usize;
            let latency = work.p2p[if work.p2p.len() > 1 { j } else { 0 }];
            let sent = if pair[0].rank == pair[1].rank { 0.0 } else { latency };
            prop_assert_eq!(pair[0].end + sent, pair[1].start);
        }

        let mut slower = work.clone();
        *at.get_mut(&mut slower.costs) += f64::from(3 * more * work.options.total_stages() as u32);
        prop_assert!(pipeline.makespan(&slower.times(), &mut Buffers::default()).unwrap() >= seconds);
    }

    /// Every second of every rank is accounted for, exactly.
    #[test]
    fn a_step_is_attributed_whole(work in work(), scales in vec(1_u32..5, 1..5)) {
        let pipeline = Pipeline::new(&work.options).unwrap();
        let scaled = |values: &[f64], scale| values.iter().map(|value| value * f64::from(scale)).collect::<Vec<_>>();
        let replicas: Vec<_> = scales.iter().map(|&scale| {
            let work = Work {
                costs: scaled(&work.costs, scale),
                exposed: scaled(&work.exposed, scale),
                ..work.clone()
            };
            pipeline.summarize(&work.times(), None, &mut Buffers::default()).unwrap()
        }).collect();
        let totals = StepTotals::new(&replicas);
        let ranks = (work.options.num_stages * scales.len()) as f64;
        let idle = totals.exposed + totals.bubble + totals.dp_wait;
        prop_assert_eq!(idle, ranks * totals.seconds - totals.compute);
        prop_assert!(totals.compute >= 0.0 && totals.exposed >= 0.0 && totals.bubble >= 0.0 && totals.dp_wait >= 0.0);
        let of_costs: f64 = work.costs.iter().sum::<f64>() * f64::from(scales.iter().sum::<u32>());
        prop_assert_eq!(totals.compute + totals.exposed, of_costs);
    }

    /// Any order runs as the definition has it, or is refused where that never ends.
    #[test]
    fn shuffled_orders_run_or_deadlock(
        work in work(), swaps in vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), 1_usize..3), 0..4),
    ) {
        let mut orders = work.options.orders().unwrap();
        for (rank, at, by) in swaps {
            let rank = rank.index(orders.len());
            let order = &mut orders[rank];
            let at = at.index(order.len());
            let to = (at + by).min(order.len() - 1);
            order.swap(at, to);
        }
        let stages = work.options.total_stages();
        let built = Pipeline::from_orders(&orders, stages, work.options.num_micro_batches);
        // Every pass takes a second: what waits for itself is put off for ever.
        match oracle::simulate(&orders, stages, |op| if op.kind == Kind::Backward { 2.0 } else { 1.0 }, |_| 0.0) {
            None => {
                let refused = matches!(built, Err(Error::Order { .. }));
                prop_assert!(refused);
            }
            Some(expected) => {
                let ones = vec![1.0; Detail::Pass.entries(work.options.num_micro_batches, stages)];
                let timeline = built.unwrap().simulate(&Times::new(&ones, Detail::Pass).unwrap(), None).unwrap();
                let end = expected.values().map(|&(_, end)| end).fold(0.0, f64::max);
                prop_assert_eq!(timeline.summary.seconds, end);
            }
        }
    }
}

#[test]
fn bad_orders_are_refused() {
    let good = options(Schedule::OneForwardOneBackward, 2, 1, 3).orders().unwrap();
    let refused = |orders: &[Vec<Op>]| {
        let error = Pipeline::from_orders(orders, 2, 3).unwrap_err();
        let Error::Order { rank, position, .. } = error else { unreachable!("{error}") };
        (rank, position)
    };
    let mut twice = good.clone();
    let again = twice[1][2];
    twice[1].push(again);
    assert_eq!(refused(&twice), (1, 6));
    let mut missing = good.clone();
    missing[1].pop();
    assert_eq!(refused(&missing), (1, 5));
    let mut elsewhere = good.clone();
    elsewhere[0][0].stage = 1;
    assert_eq!(refused(&elsewhere), (1, 0));
    elsewhere[0][0].stage = 2;
    assert_eq!(refused(&elsewhere), (0, 0));
    let mut both = good.clone();
    both[1].push(Op { kind: Kind::WeightGradient, micro_batch: 0, stage: 1 });
    assert_eq!(refused(&both), (1, 6));
    let mut backwards_first = good.clone();
    backwards_first[1].rotate_left(1);
    assert_eq!(refused(&backwards_first), (1, 0));
    assert_eq!(refused(&[good[0].clone(), Vec::new()]), (1, 0));
    // Each waits for what the other has behind: rank 0 for a backward, rank 1 for a forward.
    let mut crossed = good;
    crossed[0].swap(1, 2);
    crossed[1].swap(1, 2);
    assert_eq!(refused(&crossed), (0, 1));
}

#[test]
fn bad_layouts_and_times_are_refused() {
    let error = |schedule, p, v, m| options(schedule, p, v, m).orders().unwrap_err();
    let is_of_schedule = |error, name| matches!(error, Error::Schedule { argument, .. } if argument == name);
    let is_range = |error, name| matches!(error, Error::OutOfRange { argument, .. } if argument == name);
    assert!(is_of_schedule(error(Schedule::GPipe, 4, 2, 8), "num_virtual_stages"));
    assert!(is_of_schedule(error(Schedule::ZbV, 4, 1, 8), "num_virtual_stages"));
    assert!(is_of_schedule(error(Schedule::DualPipeV, 4, 1, 8), "num_virtual_stages"));
    assert!(is_of_schedule(error(Schedule::DualPipeV, 4, 2, 7), "num_micro_batches"));
    assert!(is_of_schedule(error(Schedule::Interleaved, 4, 2, 9), "num_micro_batches"));
    assert!(is_range(error(Schedule::Interleaved, 0, 2, 8), "num_stages"));
    assert!(is_range(error(Schedule::Interleaved, 4, 0, 8), "num_virtual_stages"));
    assert!(is_range(error(Schedule::Interleaved, 4, 2, 0), "num_micro_batches"));
    assert!(is_range(error(Schedule::Interleaved, usize::MAX, 2, 8), "num_stages"));
    assert!(is_range(error(Schedule::Interleaved, 4, usize::MAX, 8), "num_virtual_stages"));
    assert!(is_range(error(Schedule::Interleaved, 4, 2, 1 << 20), "num_micro_batches"));
    // Ten micro-batches in two rounds of five, three in one: torch takes them too.
    assert!(options(Schedule::Interleaved, 4, 2, 10).orders().is_ok());
    assert!(options(Schedule::Interleaved, 4, 2, 3).orders().is_ok());

    for bad in [-1.0, f64::NAN, f64::INFINITY] {
        assert!(matches!(Times::per_micro_batch(&[1.0, bad]), Err(Error::Entry { argument: "costs", index: 1, .. })));
        let times = Times::per_micro_batch(&[1.0]).unwrap();
        assert!(matches!(times.with_p2p(&[bad]), Err(Error::Entry { argument: "p2p_seconds", .. })));
        assert!(matches!(times.with_exposed(&[bad]), Err(Error::Entry { argument: "exposed", .. })));
    }
    let times = Times::per_micro_batch(&[1.0, 2.0]).unwrap();
    assert!(matches!(times.with_exposed(&[1.0, 2.5]), Err(Error::Entry { argument: "exposed", index: 1, .. })));
    assert!(matches!(times.with_exposed(&[1.0]), Err(Error::Mismatch { argument: "exposed", .. })));
    let pipeline = Pipeline::new(&options(Schedule::GPipe, 2, 1, 3)).unwrap();
    assert!(matches!(
        pipeline.simulate(&times, None),
        Err(Error::Mismatch { argument: "costs", found: 2, expected: 3, .. })
    ));
    let times = Times::per_micro_batch(&[f64::MAX; 3]).unwrap();
    assert!(matches!(pipeline.simulate(&times, None), Err(Error::Number { argument: "costs", .. })));
    assert!(matches!(pipeline.simulate(&times, Some(&[1.0])), Err(Error::Mismatch { argument: "activation", .. })));
}
