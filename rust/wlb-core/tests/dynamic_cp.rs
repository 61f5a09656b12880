//! Dynamic-CP plans: legal whatever the input, as long as they say, and close to the optimum where that is known.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common::dynamic_cp::{
    Works, group_seconds, in_equal_rounds, in_one_round, is_held, is_legal, optimum, planned,
};
use crate::common::machines::{is_small, options, shapes, steps};
use crate::common::strategies::{checked, config, cost_model, lengths, llama_7b};
use proptest::prelude::*;
use proptest::sample::select;
use wlb_core::cost::DocumentCosts;
use wlb_core::dynamic_cp::{Costs, DynamicCpOptions, DynamicCpPlan, Exchange, GroupSizes, Node, plan_dynamic_cp};
use wlb_core::packing::Padding;
use wlb_core::pipeline::{Buffers, PipelineOptions, Times};
use wlb_core::{CostModel, Error, Lengths, Mask, Pipeline, Schedule};

fn of(lengths: &[i64]) -> Lengths {
    Lengths::new("lengths", lengths).unwrap()
}

proptest! {
    #![proptest_config(config(400))]

    /// Every document once, groups aligned, memory kept, times those of the naive simulation, bounds that bound.
    #[test]
    fn plans_are_legal(
        (lengths, options) in steps(),
        cost in cost_model(),
    ) {
        let small = is_small(&lengths, &options);
        planned(&lengths, &options, &cost, small);
    }
}

proptest! {
    #![proptest_config(config(150))]

    /// The same for many documents, where groups are halved often.
    #[test]
    fn large_plans_are_legal(
        (lengths, options) in (1_i32..200_000).prop_flat_map(|longest| (lengths(400, longest), options(longest))),
        cost in cost_model(),
    ) {
        planned(&lengths, &options, &cost, false);
    }
}

/// Sizes of groups that some attention runs: those that 28 heads with 4 key heads can be shared by, or any, with 1.
fn some_sizes() -> impl Strategy<Value = Vec<i64>> {
    let any =
        proptest::collection::btree_set(2_i64..40, 0..6).prop_map(|others| [1].into_iter().chain(others).collect());
    prop_oneof![1 => Just(vec![1, 2, 4, 28]), 1 => Just(vec![1, 2, 4]), 4 => any]
}

proptest! {
    #![proptest_config(config(300))]

    /// Groups have just the sizes that were asked for; the rest is as ever.
    #[test]
    fn plans_have_the_sizes_that_were_asked_for(
        (lengths, options) in steps(), many in lengths(300, 100_000), long in any::<bool>(), cost in cost_model(),
        sizes in some_sizes(),
    ) {
        let options = options.of_sizes(&sizes).unwrap();
        let small = is_small(&lengths, &options);
        planned(&lengths, &options, &cost, small);
        if long {
            planned(&many, &options, &cost, false);
        }
    }

    /// Powers of two without a gap are what they have always been.
    #[test]
    fn sizes_that_are_powers_of_two_give_the_plans_of_these(
        (lengths, options) in steps(), cost in cost_model(), bits in 0_u32..6,
    ) {
        let sizes: Vec<i64> = (0..=bits).map(|bit| 1 << bit).collect();
        let most = options.max_cp_size.unwrap_or(options.world_size).min(1 << bits);
        let powers = DynamicCpOptions {
            group_sizes: GroupSizes::PowersOfTwo, max_cp_size: Some(most), ..options.clone()
        };
        let of_sizes = plan_dynamic_cp(&checked(&lengths), None, &options.of_sizes(&sizes).unwrap(), &cost);
        prop_assert_eq!(of_sizes, plan_dynamic_cp(&checked(&lengths), None, &powers, &cost));
    }
}

#[test]
fn sizes_begin_with_one_and_ascend() {
    let error = |sizes: &[i64]| DynamicCpOptions::new(8, 1, 100).of_sizes(sizes).unwrap_err();
    for (sizes, index) in [(&[][..], 0), (&[2, 4], 0), (&[1, 4, 4], 2), (&[1, 4, 2], 2), (&[0, 1], 0)] {
        let error = error(sizes);
        assert!(matches!(error, Error::Entry { argument: "group_sizes", index: at, .. } if at == index), "{error}");
    }
    // Documents of 28 heads with 4 key heads: on 8 ranks in groups of 4, 2 and 1 only.
    let options = DynamicCpOptions::new(8, 1, 1000).of_sizes(&[1, 2, 4, 28]).unwrap();
    let plan = plan_dynamic_cp(&of(&[2500, 2500, 900]), None, &options, &llama_7b()).unwrap();
    assert!(plan.groups.iter().all(|group| [1, 2, 4].contains(&group.cp_size)));
    let error = plan_dynamic_cp(&of(&[4001]), None, &options, &llama_7b()).unwrap_err();
    assert!(matches!(error, Error::TooLong { limit: 4000, .. }), "{error}");
}

/// Costs of their own for some documents, whatever their lengths, and the part of each that is attention.
fn given(documents: usize) -> impl Strategy<Value = (Vec<f64>, Vec<f64>)> {
    let cost = prop_oneof![1 => Just(0.0), 2 => 1.0..1e3, 1 => 1e3..1e6];
    let document = (cost, prop_oneof![Just(0.0), Just(1.0), 0.0..1.0]);
    proptest::collection::vec(document, documents)
        .prop_filter("a column of zeros is refused", |costs| costs.is_empty() || costs.iter().any(|cost| cost.0 > 0.0))
        .prop_map(|costs| costs.into_iter().map(|(cost, part)| (cost, cost * part)).unzip())
}

fn column(costs: &[f64]) -> DocumentCosts {
    DocumentCosts::new(costs.to_vec(), costs.len(), 1, &[]).unwrap()
}

proptest! {
    #![proptest_config(config(300))]

    /// Documents whose costs their lengths do not tell: legal as ever, memory by tokens, bounds that bound.
    #[test]
    fn plans_of_given_costs_are_legal(
        (lengths, options, (costs, attention)) in steps().prop_flat_map(|(lengths, options)| {
            let costs = given(lengths.len());
            (Just(lengths), Just(options), costs)
        }),
    ) {
        let small = is_small(&lengths, &options);
        let costs = column(&costs);
        planned(&lengths, &options, Costs::Given { costs: &costs, attention: Some(&attention) }, small);
    }

    /// Where the costs are those of a model without constants, so is the plan.
    #[test]
    fn costs_of_a_model_give_its_plan(lengths in lengths(100, 20_000), world_size in 1_usize..33, stages in 1_usize..5) {
        let model = CostModel::analytic(0.5, 3000.0, Mask::Causal).unwrap();
        let costs = column(&lengths.iter().map(|&length| model.cost(length)).collect::<Vec<_>>());
        let options = DynamicCpOptions::new(world_size, stages, 20_000);
        let by_model = planned(&lengths, &options, &model, false).unwrap();
        let given = planned(&lengths, &options, &costs, false).unwrap();
        prop_assert_eq!(by_model.digest(), given.digest());
    }
}

proptest! {
    #![proptest_config(config(100))]

    /// Every document once, groups aligned, memory kept, and nothing else: for millions of cases
    /// (`benches/records/fuzz.md`).
    #[test]
    fn nothing_is_lost_or_misaligned_or_too_large(
        (lengths, options) in (1_i32..200_000).prop_flat_map(|longest| (lengths(60, longest), options(longest))),
        cost in cost_model(),
    ) {
        if let Ok(plan) = plan_dynamic_cp(&checked(&lengths), None, &options, &cost) {
            is_legal(&plan, &lengths, &options);
            prop_assert!(plan.lower_bound <= plan.seconds * (1.0 + 1e-9));
        }
    }
}

proptest! {
    #![proptest_config(config(60))]

    /// Against all plans there are: never better than the best, and the bound never above it.
    #[test]
    fn tiny_plans_are_close_to_the_optimum(
        lengths in proptest::collection::vec(1_i32..40, 1..4),
        shape in select(vec![
            (2_usize, 1_usize, 2_usize), (2, 2, 2), (3, 1, 1), (4, 1, 1), (3, 2, 1), (1, 2, 3), (1, 3, 4), (1, 4, 3),
            (2, 3, 2),
        ]),
        max_tokens in 20_i32..60, free in any::<bool>(), p2p_seconds in select(vec![0.0, 40.0]),
        (padding, max_documents) in shapes(40),
        group_sizes in select(vec![GroupSizes::PowersOfTwo, GroupSizes::Any]), node in 0_usize..4, few in any::<bool>(),
        v_shaped in proptest::option::weighted(0.3, select(vec![Schedule::ZbV, Schedule::DualPipeV])),
    ) {
        let (world_size, num_stages, m) = shape;
        let mut options =
            DynamicCpOptions { num_micro_batches: Some(m), p2p_seconds, ..DynamicCpOptions::new(world_size, num_stages, max_tokens) };
        if !free {
            options.exchange = Exchange { seconds_per_exchange: 5.0, seconds_per_token: 2.0, overlap: 0.5 };
            options.micro_batch_seconds = 3.0;
            let inside = |ranks| Node { ranks, seconds_per_exchange: 1.0, seconds_per_token: 0.5 };
            options.node = Some(node).filter(|&ranks| ranks > 0).map(inside);
        }
        options.group_sizes = group_sizes;
        options.only_sizes = Some(vec![1, 3]).filter(|_| few && group_sizes == GroupSizes::Any);
        (options.padding, options.max_documents) = (padding, max_documents);
        if let Some(schedule) = v_shaped.filter(|&schedule| schedule == Schedule::ZbV || m >= 2 * num_stages) {
            (options.num_virtual_stages, options.schedule) = (2, Some(schedule));
        }
        let cost = CostModel::analytic(1.0, 10.0, Mask::Causal).unwrap();
        let best = optimum(&lengths, &options, &cost, m);
        if let Some(plan) = planned(&lengths, &options, &cost, true) {
            let best = best.unwrap();
            prop_assert!(plan.lower_bound <= best * (1.0 + 1e-9), "{} is above the optimum {best}", plan.lower_bound);
            prop_assert!(plan.seconds >= best * (1.0 - 1e-9));
            // Three documents cannot be balanced by a heuristic made for thousands; it must not be absurd.
            prop_assert!(plan.seconds <= best * 3.0, "{} is far above the optimum {best}", plan.seconds);
        }
    }
}

proptest! {
    #![proptest_config(config(60))]

    /// Against all plans there are, where a short document may cost more than a long one.
    #[test]
    fn tiny_plans_of_given_costs_are_close_to_the_optimum(
        documents in proptest::collection::vec((1_i32..40, 0.0..100.0, 0.0..1.0), 1..4),
        shape in select(vec![(2_usize, 1_usize, 2_usize), (2, 2, 2), (3, 1, 1), (4, 1, 1), (3, 2, 1), (1, 3, 4)]),
        max_tokens in 20_i32..60, free in any::<bool>(),
    ) {
        let (world_size, num_stages, m) = shape;
        let mut options = DynamicCpOptions { num_micro_batches: Some(m), ..DynamicCpOptions::new(world_size, num_stages, max_tokens) };
        if !free {
            options.exchange = Exchange { seconds_per_exchange: 5.0, seconds_per_token: 2.0, overlap: 0.5 };
            options.micro_batch_seconds = 3.0;
        }
        let lengths: Vec<i32> = documents.iter().map(|document| document.0).collect();
        let costs = column(&documents.iter().map(|document| document.1 + 1.0).collect::<Vec<_>>());
        let attention: Vec<f64> = documents.iter().map(|document| document.1 * document.2).collect();
        let costs = Costs::Given { costs: &costs, attention: Some(&attention) };
        let best = optimum(&lengths, &options, costs, m);
        if let Some(plan) = planned(&lengths, &options, costs, true) {
            let best = best.unwrap();
            prop_assert!(plan.lower_bound <= best * (1.0 + 1e-9), "{} is above the optimum {best}", plan.lower_bound);
            prop_assert!(plan.seconds >= best * (1.0 - 1e-9));
            prop_assert!(plan.seconds <= best * 3.0, "{} is far above the optimum {best}", plan.seconds);
        }
    }
}

/// The mean and worst distance from the optimum of tiny instances.
#[test]
fn regret_of_tiny_plans() {
    let cost = CostModel::analytic(1.0, 10.0, Mask::Causal).unwrap();
    let mut regrets = Vec::new();
    for seed in 0..40_i64 {
        let lengths: Vec<i32> = (0..4).map(|i| (1 + (seed * 37 + i * i * 101 + i * 17) % 40) as i32).collect();
        let options = DynamicCpOptions { num_micro_batches: Some(2), ..DynamicCpOptions::new(2, 2, 60) };
        let plan = planned(&lengths, &options, &cost, true).unwrap();
        regrets.push(plan.seconds / optimum(&lengths, &options, &cost, 2).unwrap() - 1.0);
    }
    let mean = regrets.iter().sum::<f64>() / regrets.len() as f64;
    let worst = regrets.iter().copied().fold(0.0, f64::max);
    assert!(mean < 0.001 && worst < 0.003, "mean {mean}, worst {worst}");
}

/// Log-normal lengths with documents of 128K: what every rank of a stage does is the same to a fraction of a per cent.
#[test]
fn heavy_tails_are_balanced() {
    let lengths: Vec<i32> = (0..1024_i32).map(|i| if i % 128 == 0 { 131_072 } else { 128 + i * i % 40_009 }).collect();
    let options = DynamicCpOptions::new(64, 8, 8192);
    let plan = planned(&lengths, &options, &llama_7b(), false).unwrap();
    assert!(plan.seconds < plan.balanced_seconds * 1.15, "{}", plan.seconds / plan.balanced_seconds);
    for j in 0..plan.num_micro_batches() {
        let seconds = || plan.groups[plan.groups_of(j)].iter().map(|group| group.seconds);
        let (most, least) = (seconds().fold(0.0, f64::max), seconds().fold(f64::INFINITY, f64::min));
        assert!(least > 0.9 * most, "micro-batch {j}: from {least} to {most}");
    }
}

/// A few documents of 128K before a long tail: how long the step takes is up to them, and the bound knows it.
#[test]
fn long_documents_are_planned_close_to_the_bound() {
    for (typical, longest) in [(1000, 0), (1000, 4), (1500, 0), (1500, 4), (2000, 0), (2000, 4)] {
        let of_tail = |i: i32| if i < longest { 131_072 } else { (typical * 256 / (i - longest + 1)).min(131_072) };
        let lengths: Vec<i32> = (0..256).map(of_tail).collect();
        let plan = planned(&lengths, &DynamicCpOptions::new(64, 8, 8192), &llama_7b(), false).unwrap();
        assert!(plan.lower_bound > 1.3 * plan.balanced_seconds, "{}", plan.lower_bound / plan.balanced_seconds);
        assert!(plan.seconds < 1.001 * plan.lower_bound, "{}", plan.seconds / plan.lower_bound);
    }
}

/// Short documents only: what filling and draining takes with 4 micro-batches a stage is most of what a step is above
/// even work, and the bound knows it.
#[test]
fn short_documents_leave_filling_and_draining() {
    let plan = planned(&[100; 2000], &DynamicCpOptions::new(8, 8, 8192), &llama_7b(), false).unwrap();
    assert!(plan.lower_bound > 1.07 * plan.balanced_seconds, "{}", plan.lower_bound / plan.balanced_seconds);
    assert!(plan.seconds < 1.06 * plan.lower_bound, "{}", plan.seconds / plan.lower_bound);
}

/// Where exchange costs, short documents stay on few ranks.
#[test]
fn exchange_makes_groups_small() {
    let lengths: Vec<i32> = (0..512_i32).map(|i| 500 + i * 7 % 3000).collect();
    let mean = |options: &DynamicCpOptions| {
        let plan = planned(&lengths, options, &llama_7b(), false).unwrap();
        let sizes: f64 = plan.groups.iter().map(|group| f64::from(group.cp_size).powi(2)).sum();
        sizes / (plan.num_micro_batches() * options.world_size) as f64
    };
    let mut options = DynamicCpOptions::new(64, 4, 8192);
    let free = mean(&options);
    options.exchange.seconds_per_token = llama_7b().linear_cost(1);
    let dear = mean(&options);
    assert!(dear <= 2.0 && dear < free, "mean group of {dear} ranks, {free} where exchange is free");
}

/// Where exchange costs, no number of micro-batches that anybody fixes gives much less than the one that was found: it
/// is solved for with every size of blocks then, which the sweep has no time for.
#[test]
fn the_number_of_micro_batches_suits_what_exchange_costs() {
    let lengths: Vec<i32> = (0..512_i32).map(|i| if i % 128 == 0 { 131_072 } else { 128 + i * i % 40_009 }).collect();
    let mut regrets = Vec::new();
    for (seconds_per_token, overlap) in [(0.1, 1.0), (0.3, 1.0), (0.3, 0.0), (1.0, 0.5)] {
        let mut options = DynamicCpOptions::new(64, 8, 8192);
        let seconds_per_token = seconds_per_token * llama_7b().linear_cost(1);
        options.exchange = Exchange { seconds_per_exchange: 256.0 * seconds_per_token, seconds_per_token, overlap };
        let plan = planned(&lengths, &options, &llama_7b(), false).unwrap();
        let most = plan.sweep.iter().map(|&(m, _)| m).max().unwrap();
        let fixed = |m: usize| {
            let options = DynamicCpOptions { num_micro_batches: Some(m), ..options.clone() };
            planned(&lengths, &options, &llama_7b(), false).map_or(f64::INFINITY, |plan| plan.seconds)
        };
        let best = (plan.sweep[0].0..=most).step_by(2).map(fixed).fold(f64::INFINITY, f64::min);
        regrets.push(plan.seconds / best - 1.0);
    }
    let mean = regrets.iter().sum::<f64>() / regrets.len() as f64;
    assert!(mean < 0.01 && regrets.iter().all(|&regret| regret < 0.02), "{regrets:?}");
}

/// Groups of one size in all micro-batches, the longest document first, each where it is done first: the shortest step
/// of all sizes and numbers of micro-batches. Groups of the same ranks are a pipeline each, and wait for no other.
fn longest_first(
    lengths: &[i32],
    options: &DynamicCpOptions,
    cost: &CostModel,
    counts: std::ops::RangeInclusive<usize>,
) -> f64 {
    let works = Works::of(lengths, cost.into());
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    order.sort_by_key(|&document| std::cmp::Reverse(lengths[document]));
    let mut best = f64::INFINITY;
    for (m, size) in counts.flat_map(|m| (1..=options.world_size).map(move |size| (m, size))) {
        if options.group_sizes == GroupSizes::PowersOfTwo && !size.is_power_of_two() {
            continue;
        }
        let groups_of_one = options.world_size / size;
        let mut groups = vec![Vec::new(); m * groups_of_one];
        let seconds = |group: usize, documents: &[usize]| {
            let first = group % groups_of_one * size;
            group_seconds(documents, lengths, first..first + size, options, &works)
        };
        let placed = order.iter().all(|&document| {
            let with = |group: usize| [groups[group].as_slice(), &[document]].concat();
            let fits = |&group: &usize| {
                let tokens: i64 = with(group).iter().map(|&document| i64::from(lengths[document])).sum();
                tokens <= size as i64 * i64::from(options.max_tokens_per_rank)
            };
            let done = |group: &usize| seconds(*group, &with(*group));
            // Of those that are empty, the first.
            let opened = groups.iter().take_while(|group| !group.is_empty()).count();
            let looked_at = 0..groups.len().min(opened + 1);
            let first = looked_at.filter(fits).min_by(|a, b| done(a).total_cmp(&done(b)));
            first.inspect(|&group| groups[group].push(document)).is_some()
        });
        // Plans of few documents leave no micro-batch empty, though that may be faster.
        let are_few = lengths.len() <= 16 && options.world_size <= 64 && lengths.len() >= m;
        let leaves_empty = groups.chunks(groups_of_one).any(|groups| groups.iter().all(Vec::is_empty));
        if placed && !(are_few && leaves_empty) {
            let of_group = |group: usize| seconds(group, &groups[group]);
            let of_micro_batch = |j: usize| (0..groups_of_one).map(|k| of_group(j * groups_of_one + k)).collect();
            let mut costs: Vec<Vec<f64>> = (0..m).map(of_micro_batch).collect();
            let &DynamicCpOptions { num_stages, num_virtual_stages, .. } = options;
            let layout =
                PipelineOptions { schedule: options.schedule(), num_stages, num_virtual_stages, num_micro_batches: m };
            let pipeline = Pipeline::new(&layout).unwrap();
            for _ in 0..2 {
                let step = |k: usize| {
                    let of_ranks: Vec<f64> = costs.iter().map(|groups| groups[k]).collect();
                    let times = Times::per_micro_batch(&of_ranks).unwrap();
                    pipeline.makespan(&times, &mut Buffers::default()).unwrap()
                };
                best = best.min((0..groups_of_one).map(step).fold(0.0, f64::max));
                let slowest = |groups: &[f64]| groups.iter().copied().fold(0.0, f64::max);
                costs.sort_by(|a, b| slowest(a).total_cmp(&slowest(b)));
            }
        }
    }
    best
}

/// How much longer a step is than that of whoever tries up to twice as many micro-batches as are needed.
fn over_longest_first(lengths: &[i32], options: &DynamicCpOptions) -> f64 {
    let cost = CostModel::analytic(1.0, 3000.0, Mask::Causal).unwrap();
    let total: i64 = lengths.iter().map(|&length| i64::from(length)).sum();
    let cells = options.world_size * options.max_tokens_per_rank as usize;
    let least = options.num_stages.max((total as usize).div_ceil(cells));
    let plan = plan_dynamic_cp(&checked(lengths), None, options, &cost).unwrap();
    is_legal(&plan, lengths, options);
    let first = longest_first(lengths, options, &cost, least..=(2 * least).min(lengths.len().max(least)));
    plan.seconds / first.max(plan.lower_bound * CLOSE) - 1.0
}

/// The search of few documents ends where it is so close to the lower bound.
const CLOSE: f64 = 1.002;

/// Where all ranks are one group, light micro-batches are not made longer by halving it; and where there are three
/// groups of seven, they do not wait for one another, as the estimate says.
#[test]
fn few_documents_are_planned_by_the_clock() {
    let any = |num_stages, max_tokens, seconds_per_token| DynamicCpOptions {
        group_sizes: GroupSizes::Any,
        exchange: Exchange { seconds_per_token, ..Exchange::default() },
        ..DynamicCpOptions::new(21, num_stages, max_tokens)
    };
    let halved = [
        5661, 31579, 4652, 4378, 1117, 5945, 4464, 879, 1656, 1521, 887, 243, 1217, 32710, 1469, 3734, 2265, 2149, 814,
    ];
    let waiting = [
        1357, 4354, 3123, 1718, 2087, 5834, 4068, 41731, 1842, 48862, 80833, 112_108, 906, 117_791, 4585, 588, 80419,
        4974, 118_783, 1286, 4034, 4678, 180, 3422, 1128, 2074, 3466, 57298, 1327, 4317,
    ];
    let over = [over_longest_first(&halved, &any(2, 8192, 0.0)), over_longest_first(&waiting, &any(1, 32768, 900.0))];
    assert!(over.iter().all(|&over| over <= 1e-9), "{over:?}");
}

proptest! {
    #![proptest_config(config(300))]

    /// Few documents, in worlds of any size: what anybody would do first is never faster.
    #[test]
    fn few_documents_take_no_longer_than_longest_first(
        lengths in proptest::collection::vec(prop_oneof![1 => 20_000_i32..131_073, 4 => 100_i32..6000], 4..31),
        world_size in 1_usize..25, num_stages in select(vec![1_usize, 2, 4]),
        max_tokens in select(vec![8192_i32, 16384, 32768]),
        group_sizes in select(vec![GroupSizes::PowersOfTwo, GroupSizes::Any]),
        priced in proptest::bool::weighted(0.67), overlap in select(vec![0.0, 1.0]),
    ) {
        let seconds_per_token = if priced { 900.0 } else { 0.0 };
        let exchange = Exchange { seconds_per_token, overlap, ..Exchange::default() };
        let options =
            DynamicCpOptions { exchange, group_sizes, ..DynamicCpOptions::new(world_size, num_stages, max_tokens) };
        let longest = (1 << world_size.ilog2()) * max_tokens;
        let lengths: Vec<i32> = lengths.into_iter().map(|length| length.min(longest)).collect();
        let over = over_longest_first(&lengths, &options);
        prop_assert!(over <= 1e-9, "{over} longer");
    }
}

proptest! {
    #![proptest_config(config(60))]

    /// Groups of any size are no slower than powers of two, which are among them.
    #[test]
    fn more_groups_are_no_slower(
        lengths in lengths(60, 9000), world_size in 2_usize..49, num_stages in 1_usize..5,
        seconds_per_token in prop_oneof![Just(0.0), 0.0..5e3], overlap in 0.0..=1.0,
    ) {
        let exchange = Exchange { seconds_per_exchange: 0.0, seconds_per_token, overlap };
        let options = DynamicCpOptions { exchange, ..DynamicCpOptions::new(world_size, num_stages, 8192) };
        let any = DynamicCpOptions { group_sizes: GroupSizes::Any, ..options.clone() };
        let [powers, any] = [options, any].map(|options| planned(&lengths, &options, &llama_7b(), false));
        if let (Some(powers), Some(any)) = (powers, any) {
            prop_assert!(any.seconds <= powers.seconds, "{} is above {}", any.seconds, powers.seconds);
        }
    }

    /// Short documents of much work, and a long one of less, which takes more, since it has to be exchanged: the bound
    /// of the `k` costliest goes by the one of them that is done first, and that is not the last.
    #[test]
    fn a_long_document_of_little_work_bounds_no_others(
        short in proptest::collection::vec((1_i32..4, 95.0..110.0), 1..6), long in (31_i32..61, 80.0..95.0),
        num_stages in 6_usize..12, seconds_per_token in 0.0..2.0,
    ) {
        let mut options = DynamicCpOptions::new(2, num_stages, 30);
        options.exchange.seconds_per_token = seconds_per_token;
        let documents = [short, vec![long]].concat();
        let lengths: Vec<i32> = documents.iter().map(|document| document.0).collect();
        let costs = column(&documents.iter().map(|document| document.1).collect::<Vec<_>>());
        planned(&lengths, &options, &costs, false);
    }
}

/// Documents that no rank can hold alone have to exchange, whatever the plan, and the bound knows it.
#[test]
fn exchange_that_nothing_hides_is_in_the_bound() {
    let lengths = [8000; 64];
    let mut options = DynamicCpOptions::new(8, 1, 1000);
    let free = planned(&lengths, &options, &llama_7b(), false).unwrap();
    options.exchange.seconds_per_token = llama_7b().linear_cost(1);
    let dear = planned(&lengths, &options, &llama_7b(), false).unwrap();
    // Seven tokens come in for each that a rank computes.
    let exchanged = 7.0 / 8.0 * 8000.0 * 64.0 * llama_7b().linear_cost(1);
    assert!((dear.lower_bound - free.lower_bound - exchanged).abs() < 1e-9 * exchanged);
    assert!(dear.seconds < 1.001 * dear.lower_bound);
    options.exchange.overlap = 1.0;
    assert!(planned(&lengths, &options, &llama_7b(), false).unwrap().lower_bound < dear.lower_bound);
}

#[test]
fn a_world_that_is_no_power_of_two_is_used_to_the_last_rank() {
    let lengths: Vec<i32> = (0..200).map(|i| 100 + i * 13 % 900).collect();
    for world_size in [3, 6, 12, 24, 63] {
        let plan = planned(&lengths, &DynamicCpOptions::new(world_size, 2, 4096), &llama_7b(), false).unwrap();
        let ratio = plan.seconds / plan.balanced_seconds;
        assert!(ratio < 1.35, "{world_size} ranks: {ratio}");
    }
}

#[test]
fn no_documents_are_a_plan() {
    let plan = planned(&[], &DynamicCpOptions::new(6, 4, 10), &llama_7b(), true).unwrap();
    assert_eq!((plan.num_micro_batches(), plan.seconds, plan.lower_bound), (4, 0.0, 0.0));
}

#[test]
fn names_are_the_callers() {
    let plan = plan_dynamic_cp(&of(&[5, 6]), Some(&[-7, 9]), &DynamicCpOptions::new(2, 1, 10), &llama_7b()).unwrap();
    let mut ids = plan.documents.clone();
    ids.sort_unstable();
    assert_eq!(ids, [-7, 9]);
}

#[test]
fn errors_name_the_culprit() {
    let plan = |lengths: &[i64], options: &DynamicCpOptions| plan_dynamic_cp(&of(lengths), None, options, &llama_7b());
    let fails = |change: fn(&mut DynamicCpOptions), argument: &str| {
        let mut options = DynamicCpOptions::new(12, 4, 100);
        change(&mut options);
        assert_eq!(plan(&[50, 60], &options).unwrap_err().argument(), argument);
    };
    fails(|options| options.world_size = 0, "world_size");
    fails(|options| options.num_stages = 0, "num_stages");
    fails(|options| options.num_virtual_stages = 0, "num_virtual_stages");
    fails(|options| options.max_tokens_per_rank = 0, "max_tokens_per_rank");
    fails(|options| options.max_cp_size = Some(13), "max_cp_size");
    fails(|options| options.num_micro_batches = Some(1 << 30), "num_micro_batches");
    fails(|options| options.min_micro_batches = Some(0), "min_micro_batches");
    fails(|options| options.max_micro_batches = Some(0), "max_micro_batches");
    fails(|options| (options.num_micro_batches, options.min_micro_batches) = (Some(4), Some(4)), "min_micro_batches");
    fails(|options| (options.min_micro_batches, options.max_micro_batches) = (Some(5), Some(4)), "min_micro_batches");
    // Three rounds, which divide neither.
    fails(
        |options| {
            options.num_virtual_stages = 2;
            (options.min_micro_batches, options.max_micro_batches) = (Some(13), Some(14));
        },
        "min_micro_batches",
    );
    fails(|options| (options.num_micro_batches, options.max_micro_batches) = (Some(4), Some(4)), "max_micro_batches");
    fails(|options| options.exchange.seconds_per_token = -1.0, "seconds_per_token");
    fails(|options| options.exchange.seconds_per_exchange = f64::NAN, "seconds_per_exchange");
    fails(|options| options.exchange.overlap = 1.5, "overlap");
    fails(|options| options.p2p_seconds = f64::INFINITY, "p2p_seconds");
    fails(|options| options.micro_batch_seconds = -0.5, "micro_batch_seconds");
    fails(|options| options.schedule = Some(Schedule::GPipe), "schedule");
    fails(|options| options.schedule = Some(Schedule::ZbV), "num_virtual_stages");
    fails(
        |options| {
            (options.schedule, options.num_virtual_stages) = (Some(Schedule::DualPipeV), 2);
            options.num_micro_batches = Some(7);
        },
        "num_micro_batches",
    );
    fails(
        |options| {
            (options.schedule, options.num_virtual_stages) = (Some(Schedule::DualPipeV), 2);
            options.max_micro_batches = Some(7);
        },
        "max_micro_batches",
    );
    fails(|options| options.max_documents = Some(0), "max_documents");
    fails(|options| options.padding = Some(Padding::new(128, 1, &[]).unwrap()), "max_tokens_per_rank");
    fails(
        |options| {
            options.padding = Some(Padding::new(128, 1, &[]).unwrap());
            options.max_tokens_per_rank = i32::MAX;
        },
        "max_cp_size",
    );
    // Finite, but not what they add up to.
    fails(|options| options.exchange.seconds_per_token = 1.7e308, "seconds_per_token");
    fails(|options| options.exchange.seconds_per_exchange = 1.7e308, "seconds_per_exchange");
    fails(|options| options.p2p_seconds = 1.7e308, "p2p_seconds");
    fails(|options| options.micro_batch_seconds = 1.7e308, "micro_batch_seconds");
    let most = Exchange { seconds_per_exchange: 1e200, seconds_per_token: 1e200, overlap: 0.0 };
    let options = DynamicCpOptions {
        exchange: most,
        p2p_seconds: 1e200,
        micro_batch_seconds: 1e200,
        ..DynamicCpOptions::new(12, 4, 10)
    };
    assert!(plan(&[50, 60], &options).unwrap().seconds.is_finite());
    // 12 ranks have groups of 8.
    let error = plan(&[50, 801, 900], &DynamicCpOptions::new(12, 4, 100)).unwrap_err();
    assert!(matches!(error, Error::TooLong { index: 1, value: 801, limit: 800, .. }), "{error}");
    let told = error.to_string();
    assert!(told.starts_with("lengths[1] = 801 exceeds max_tokens_per_rank on the largest group = 800;"), "{told}");
    let padding = Some(Padding::new(1, 1, &[60, 90, 120]).unwrap());
    let error = plan(&[50, 801], &DynamicCpOptions { padding, ..DynamicCpOptions::new(12, 4, 100) }).unwrap_err();
    assert!(matches!(error, Error::TooLong { index: 1, value: 801, limit: 720, .. }), "{error}");
    let told = error.to_string();
    let given = "720 tokens on the largest group: 8 ranks of 90 tokens, the largest of token_buckets within \
                 max_tokens_per_rank = 100;";
    assert!(told.starts_with(&format!("lengths[1] = 801 exceeds {given}")), "{told}");
    let error =
        plan(&[800, 800], &DynamicCpOptions { num_micro_batches: Some(1), ..DynamicCpOptions::new(12, 4, 100) })
            .unwrap_err();
    assert!(matches!(error, Error::Combination { argument: "num_micro_batches", .. }), "{error}");
    let error = plan_dynamic_cp(&of(&[5]), Some(&[1, 2]), &DynamicCpOptions::new(1, 1, 10), &llama_7b()).unwrap_err();
    assert!(matches!(error, Error::Mismatch { argument: "ids", found: 2, expected: 1, .. }), "{error}");
}

/// A V has no bubble but at its ends: its plans are shorter than 1F1B's, and close to even work where there are many.
#[test]
fn v_schedules_are_planned_for() {
    let lengths: Vec<i32> = (0..1024_i32).map(|i| 128 + i * i % 20_011).collect();
    let plan = |schedule: Option<Schedule>| {
        let num_virtual_stages = if schedule.is_some() { 2 } else { 1 };
        let options = DynamicCpOptions { num_virtual_stages, schedule, ..DynamicCpOptions::new(16, 4, 8192) };
        planned(&lengths, &options, &llama_7b(), false).unwrap()
    };
    let [one, zbv, dual] = [None, Some(Schedule::ZbV), Some(Schedule::DualPipeV)].map(plan);
    assert!(
        zbv.seconds < one.seconds && dual.seconds < one.seconds,
        "{} {} {}",
        one.seconds,
        zbv.seconds,
        dual.seconds
    );
    assert!(zbv.seconds < 1.02 * zbv.lower_bound, "{}", zbv.seconds / zbv.lower_bound);
    assert!(dual.num_micro_batches() >= 8);
    assert_ne!(zbv.digest(), DynamicCpPlan { schedule: Schedule::DualPipeV, ..zbv.clone() }.digest());
}

/// Few documents a group cost little: more and smaller groups have as many in all.
#[test]
fn few_documents_a_group_are_balanced() {
    let lengths: Vec<i32> = (0..1024_i32).map(|i| if i % 128 == 0 { 131_072 } else { 128 + i * i % 40_009 }).collect();
    let seconds = |max_documents| {
        let options = DynamicCpOptions { max_documents, ..DynamicCpOptions::new(64, 8, 8192) };
        planned(&lengths, &options, &llama_7b(), false).unwrap().seconds
    };
    let [any, sixteen, four, one] = [None, Some(16), Some(4), Some(1)].map(seconds);
    assert!(sixteen < 1.02 * any && four < 1.05 * any && one < 1.3 * any, "{sixteen}, {four}, {one} against {any}");
}

/// More micro-batches than memory asks for, where a group may have few documents; and no more than a plan may have.
#[test]
fn documents_that_need_many_groups_get_them() {
    let plan = |documents: usize, options: &DynamicCpOptions| {
        plan_dynamic_cp(&of(&vec![10; documents]), None, options, &llama_7b())
    };
    let options = DynamicCpOptions { max_documents: Some(2), ..DynamicCpOptions::new(4, 1, 1000) };
    assert_eq!(plan(80, &options).unwrap().num_micro_batches(), 10);
    let few = DynamicCpOptions { num_micro_batches: Some(9), ..options.clone() };
    assert!(matches!(plan(80, &few).unwrap_err(), Error::Combination { argument: "num_micro_batches", .. }));
    let many = DynamicCpOptions { world_size: 4096, max_documents: Some(1), ..options };
    assert_eq!(plan(5_000_000, &many).unwrap_err().argument(), "max_documents");
}

/// Where memory does not bind, costs make the plan, and the longest documents may be the cheapest.
#[test]
fn costs_are_even_whatever_the_lengths() {
    let lengths: Vec<i32> = (0..400_i32).map(|i| 100 + i * i % 4001).collect();
    let costs: Vec<f64> = lengths.iter().map(|&length| f64::from(length).powi(2)).collect();
    let seconds = |lengths: &[i32]| {
        planned(lengths, &DynamicCpOptions::new(8, 4, 1 << 20), &column(&costs), false).unwrap().seconds
    };
    let others: Vec<i32> = lengths.iter().map(|&length| 5000 - length).collect();
    assert_eq!(seconds(&lengths), seconds(&others));
}

#[test]
fn errors_name_the_wrong_cost() {
    let lengths = of(&[50, 60]);
    let plan = |costs: &[f64], attention: Option<&[f64]>, exchange: Exchange| {
        let costs = column(costs);
        let options = DynamicCpOptions { exchange, ..DynamicCpOptions::new(12, 4, 100) };
        plan_dynamic_cp(&lengths, None, &options, Costs::Given { costs: &costs, attention })
    };
    let free = Exchange::default();
    let hidden = Exchange { seconds_per_token: 1.0, overlap: 0.5, ..free };
    let error = plan(&[1.0; 3], None, free).unwrap_err();
    assert!(matches!(error, Error::Mismatch { argument: "costs", found: 3, expected: 2, .. }), "{error}");
    // One step of a stream may have nothing to do: as in a packer's push, that is no mistake.
    for (attention, exchange) in [(None, free), (Some(&[0.0; 2][..]), hidden)] {
        let idle = plan(&[0.0; 2], attention, exchange).unwrap();
        assert_eq!((idle.seconds, idle.lower_bound, idle.balanced_seconds), (0.0, 0.0, 0.0));
    }
    let error = plan(&[1e300; 2], None, free).unwrap_err();
    assert!(matches!(error, Error::Cell { argument: "costs", row: 0, .. }), "{error}");
    let error = plan(&[1.0; 2], None, hidden).unwrap_err();
    assert!(matches!(error, Error::Combination { argument: "attention_costs", .. }), "{error}");
    let error = plan(&[1.0; 2], Some(&[1.0]), hidden).unwrap_err();
    assert!(matches!(error, Error::Mismatch { argument: "attention_costs", found: 1, .. }), "{error}");
    for wrong in [1.5, -0.5, f64::NAN] {
        let error = plan(&[1.0; 2], Some(&[1.0, wrong]), hidden).unwrap_err();
        assert!(matches!(error, Error::Entry { argument: "attention_costs", index: 1, .. }), "{error}");
    }
    assert!(plan(&[1.0; 2], None, Exchange { overlap: 0.0, ..hidden }).is_ok());
    assert!(plan(&[1.0; 2], Some(&[1.0, 0.0]), hidden).is_ok());
}

/// Where every micro-batch costs something, fewer than there are stages can be faster.
#[test]
fn few_micro_batches_are_tried_where_each_costs() {
    let lengths = [100; 8];
    let mut options = DynamicCpOptions::new(8, 8, 1000);
    let counts = |options: &DynamicCpOptions| {
        let plan = planned(&lengths, options, &llama_7b(), true).unwrap();
        (plan.num_micro_batches(), plan.sweep[0].0, plan.seconds)
    };
    assert_eq!(counts(&options).1, 8);
    options.micro_batch_seconds = 100.0 * llama_7b().cost(100);
    let (best, first, seconds) = counts(&options);
    assert_eq!((best, first), (1, 1));
    let (_, _, as_many_as_stages) = counts(&DynamicCpOptions { num_micro_batches: Some(8), ..options.clone() });
    assert!(seconds < 0.6 * as_many_as_stages, "{seconds} is not far below {as_many_as_stages}");
    // Memory for a quarter of the tokens.
    options.max_tokens_per_rank = 25;
    assert_eq!(counts(&options).1, 4);
}

/// As a schedule may want, even without documents for all of them.
#[test]
fn no_fewer_micro_batches_than_wanted() {
    for (num_virtual_stages, wanted, expected) in [(1, 9, 9), (2, 9, 10), (2, 5, 5), (2, 3, 3)] {
        for micro_batch_seconds in [0.0, 1e3] {
            let options = DynamicCpOptions {
                num_virtual_stages,
                min_micro_batches: Some(wanted),
                micro_batch_seconds,
                ..DynamicCpOptions::new(4, 4, 100)
            };
            let plan = planned(&[100, 7], &options, &llama_7b(), true).unwrap();
            assert!(plan.num_micro_batches() >= expected);
            assert!(plan.sweep[0].0 >= expected, "{:?}", plan.sweep);
        }
    }
}

/// Where the pipeline is interleaved, whatever number it takes: no plan of any is below the bound, nor far below the
/// best that was found.
#[test]
fn interleaved_pipelines_take_any_number_in_equal_rounds() {
    let cost = CostModel::analytic(0.0, 1e-6, Mask::Causal).unwrap();
    for (num_stages, documents, least) in [(4, 20, Some(5)), (4, 10, None), (3, 12, Some(7)), (5, 14, Some(19))] {
        let options = DynamicCpOptions {
            num_virtual_stages: 2,
            min_micro_batches: least,
            micro_batch_seconds: 1.0,
            ..DynamicCpOptions::new(2, num_stages, 1000)
        };
        let lengths = vec![1000; documents];
        let plan = planned(&lengths, &options, &cost, true).unwrap();
        let most = plan.sweep.iter().map(|&(m, _)| m).max().unwrap();
        for m in (least.unwrap_or(1)..=most).filter(|&m| in_equal_rounds(m, &options)) {
            let options = DynamicCpOptions { num_micro_batches: Some(m), min_micro_batches: None, ..options.clone() };
            // Fewer may be too few for the memory.
            if let Some(fixed) = planned(&lengths, &options, &cost, true) {
                assert!(plan.lower_bound <= fixed.seconds, "{m}: {} is above {}", plan.lower_bound, fixed.seconds);
                assert!(
                    !is_held(&fixed, &options) || plan.seconds <= fixed.seconds,
                    "{m}: {} is above {}",
                    plan.seconds,
                    fixed.seconds
                );
            }
        }
    }
}

/// Seven full micro-batches would be seven under way, where rounds of four have five and a half at most; light ones may
/// be so many.
#[test]
fn larger_rounds_have_no_more_under_way() {
    let cost = CostModel::analytic(0.0, 1e-6, Mask::Causal).unwrap();
    let plan = |lengths: &[i32], least| {
        let options =
            DynamicCpOptions { num_virtual_stages: 2, micro_batch_seconds: 1.0, ..DynamicCpOptions::new(1, 4, 1000) };
        let options = DynamicCpOptions { min_micro_batches: Some(least), ..options };
        planned(lengths, &options, &cost, true).unwrap().num_micro_batches()
    };
    assert_eq!((plan(&[1000; 7], 7), plan(&[700; 7], 7)), (8, 7));
    assert_eq!(plan(&[1000; 8], 9), 12, "ten, in rounds of five, hold too much");
}

/// Micro-batches of one size are all full, those without documents, too: where rounds of as many as there are stages
/// are allowed they are found, and where none are the error says so.
#[test]
fn rounds_of_one_for_each_stage_are_found_or_asked_for() {
    let cost = CostModel::analytic(0.0, 1e-6, Mask::Causal).unwrap();
    let plan = |documents, num_stages, least, most| {
        let lengths = vec![20; documents];
        let options = DynamicCpOptions {
            num_virtual_stages: 2,
            padding: Some(Padding::new(1, 1, &[1000]).unwrap()),
            min_micro_batches: Some(least),
            max_micro_batches: Some(most),
            ..DynamicCpOptions::new(1, num_stages, 1000)
        };
        let found = planned(&lengths, &options, &cost, documents == 1).map(|plan| plan.num_micro_batches());
        let error = || plan_dynamic_cp(&checked(&lengths), None, &options, &cost).unwrap_err().to_string();
        found.ok_or_else(error)
    };
    for (documents, num_stages, least, most) in [(1, 16, 31, 36), (1, 8, 23, 25), (1, 4, 2, 7), (500, 16, 31, 36)] {
        let found = plan(documents, num_stages, least, most).unwrap();
        assert!(found <= num_stages || found % num_stages == 0, "{found} for {num_stages} stages");
    }
    let error = plan(1, 8, 18, 19).unwrap_err();
    assert!(error.starts_with("max_micro_batches: leaves no multiple of num_stages"), "{error}");
    // Where so many do not hold the documents either, that is the reason: rounds of another size would not help.
    let error = plan(1000, 8, 18, 19).unwrap_err();
    assert!(error.starts_with("max_micro_batches: no way was found to fit the documents"), "{error}");
}

/// A single round of more micro-batches than stages has nearly all of them under way: not for a gain of less than 1 %.
#[test]
fn one_round_has_to_be_worth_its_memory() {
    let lengths = [11000, 11000, 20000, 4000, 20000, 15000, 9000];
    let options = DynamicCpOptions { num_virtual_stages: 2, ..DynamicCpOptions::new(2, 4, 200_000) };
    let plan = planned(&lengths, &options, &llama_7b(), true).unwrap();
    let fastest = plan.sweep.iter().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
    assert!(in_one_round(fastest.0, &options), "{:?}", plan.sweep);
    assert!(!in_one_round(plan.num_micro_batches(), &options));
}

/// No number of micro-batches was given, and the documents need more of them than a plan may have.
#[test]
fn memory_that_forces_too_many_micro_batches_is_an_error() {
    let plan = |lengths: &[i64], options: &DynamicCpOptions| plan_dynamic_cp(&of(lengths), None, options, &llama_7b());
    let error = plan(&[4096; 5000], &DynamicCpOptions::new(4096, 1, 1)).unwrap_err();
    let expected = Error::OutOfRange { argument: "max_tokens_per_rank", value: 1, minimum: 5, maximum: 2_147_483_647 };
    assert_eq!(error, expected);
    // 512 micro-batches would hold all tokens, but no two of these documents; a plan has at most 1024.
    let error = plan(&[4098; 1025], &DynamicCpOptions::new(4096, 1, 2)).unwrap_err();
    assert!(matches!(error, Error::Combination { argument: "max_tokens_per_rank", .. }), "{error}");
}
