//! Plans for data-parallel ranks: what they keep, and how far from the best they are.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common::ranks::{divides_equally, members, optimum, planned, step_cost};
use crate::common::strategies::{config, cost_model, lengths};
use proptest::prelude::*;
use wlb_core::cost::Rates;
use wlb_core::packing::{Packing, Ranks, Sync, Together};
use wlb_core::ranks::RankOptions;
use wlb_core::{CostModel, Error, Mask, Method};

fn sync() -> impl Strategy<Value = Sync> {
    prop_oneof![Just(Sync::Step), Just(Sync::MicroBatch)]
}

/// Options that any documents may have, up to those that are filled in by `fitted`.
fn options() -> impl Strategy<Value = RankOptions> {
    let ranks = prop_oneof![
        6 => (1_usize..9, sync()).prop_map(|(dp_size, sync)| Some(Ranks { dp_size, sync })),
        1 => Just(None),
    ];
    let max_documents = prop_oneof![2 => Just(None), 1 => (1_usize..9).prop_map(Some)];
    let together = prop_oneof![2 => Just(Together::Rank), 1 => Just(Together::MicroBatch)];
    let parts = (ranks, any::<bool>(), max_documents, 1_usize..7, any::<bool>(), any::<bool>(), together);
    parts.prop_map(|(ranks, equal_documents, max_documents, multiple_of, refined, fewest, together)| RankOptions {
        num_micro_batches: None,
        fewest,
        multiple_of,
        max_tokens: 1,
        method: if refined { Method::Refined } else { Method::VarLength },
        ranks,
        groups: vec![],
        together,
        equal_documents: equal_documents && ranks.is_some(),
        max_documents,
    })
}

/// Groups: none, of one size, of any.
fn groups(documents: usize, wild: &[i64], size: usize) -> Vec<i64> {
    match size {
        0 => vec![],
        1..5 => (0..documents).map(|document| -((document / size) as i64)).collect(),
        _ => wild.iter().copied().cycle().take(documents).collect(),
    }
}

/// Tokens of the longest item: a document, or a group that stays in one micro-batch.
fn longest(lengths: &[i32], groups: &[i64], together: Together) -> i32 {
    if together == Together::Rank || groups.is_empty() {
        return lengths.iter().copied().max().unwrap_or(1);
    }
    let of =
        |group: &i64| groups.iter().zip(lengths).filter(|&(other, _)| other == group).map(|(_, length)| length).sum();
    groups.iter().map(of).max().unwrap_or(1)
}

/// Whole groups, longest first, each to the micro-batch with the least cost among those with room; a rank's
/// micro-batches are then those that dealing gives it. None if a group finds no room.
fn longest_first(lengths: &[i32], options: &RankOptions, total: usize, cost: &CostModel) -> Option<f64> {
    let sum = |held: &[i32]| held.iter().map(|&length| cost.cost(length)).sum::<f64>();
    let mut members: Vec<Vec<usize>> = members(&options.groups).collect();
    members.sort();
    let of = |members: &Vec<usize>| members.iter().map(|&document| lengths[document]).collect::<Vec<i32>>();
    let mut groups: Vec<Vec<i32>> = members.iter().map(of).collect();
    groups.sort_by(|a, b| sum(b).total_cmp(&sum(a)));
    groups.sort_by_key(|group| -group.iter().sum::<i32>());
    let mut held: Vec<Vec<i32>> = vec![vec![]; total];
    for group in groups {
        let fits = |held: &&mut Vec<i32>| {
            held.iter().chain(&group).sum::<i32>() <= options.max_tokens
                && held.len() + group.len() <= options.max_documents.unwrap_or(usize::MAX)
        };
        held.iter_mut().filter(fits).min_by(|a, b| sum(a).total_cmp(&sum(b)))?.extend(group);
    }
    let mut costs: Vec<f64> = held.iter().map(|held| sum(held)).collect();
    costs.sort_by(|a, b| b.total_cmp(a));
    let Some(ranks) = options.ranks else { return costs.first().copied() };
    let mut dealt: Vec<Vec<f64>> = vec![vec![]; ranks.dp_size];
    for cost in costs {
        let open = dealt.iter_mut().filter(|rank| rank.len() < total / ranks.dp_size);
        open.min_by(|a, b| a.iter().sum::<f64>().total_cmp(&b.iter().sum())).unwrap().push(cost);
    }
    Some(step_cost(&dealt.concat(), ranks.dp_size, ranks.sync))
}

proptest! {
    #![proptest_config(config(1500))]

    /// Groups in one micro-batch: no longer than the step of longest first with whole groups, in as many micro-batches.
    #[test]
    fn whole_groups_are_never_worse_than_longest_first(
        lengths in lengths(160, 3000), options in options(), room in 0_i32..4000, linear in 0_i32..3000,
        wild in prop::collection::vec(-3_i64..30, 1..60), size in 1_usize..8, rounds in 1_usize..6,
    ) {
        let groups = groups(lengths.len(), &wild, size);
        let together = Together::MicroBatch;
        let total = rounds * options.ranks.map_or(1, |ranks| ranks.dp_size);
        let max_tokens = longest(&lengths, &groups, together) + room;
        let options = RankOptions {
            num_micro_batches: Some(total), max_tokens, groups, together, equal_documents: false, ..options
        };
        let cost = CostModel::analytic(1.0, linear.into(), Mask::Causal).unwrap();
        let fits = options.max_documents.is_none_or(|most| members(&options.groups).all(|group| group.len() <= most));
        if let Some(naive) = longest_first(&lengths, &options, total, &cost).filter(|_| fits) {
            let packing = planned(&lengths, &options, &cost);
            prop_assert!(packing.is_some(), "longest first finds a plan");
            let costs = packing.unwrap().costs;
            let step = options.ranks.map_or_else(
                || costs.iter().copied().fold(0.0, f64::max), |ranks| step_cost(&costs, ranks.dp_size, ranks.sync)
            );
            prop_assert!(step <= naive * (1.0 + 1e-9), "{step} for {naive}");
        }
    }

    /// A plan for ranks that wait in every micro-batch is never longer than a plan for ranks that wait once a step,
    /// with the heaviest micro-batches of all ranks together.
    #[test]
    fn waiting_more_often_is_planned_for(
        lengths in lengths(160, 3000), options in options(), room in 0_i32..4000, cost in cost_model(),
        wild in prop::collection::vec(-3_i64..30, 1..60), size in 0_usize..8, given in prop::option::weighted(0.3, 1_usize..9),
    ) {
        let groups = groups(lengths.len(), &wild, size);
        let longest = longest(&lengths, &groups, options.together);
        let dp_size = options.ranks.map_or(2, |ranks| ranks.dp_size);
        let planned_for = |sync| {
            let options = RankOptions {
                max_tokens: longest + room,
                groups: groups.clone(),
                num_micro_batches: given.map(|rounds| rounds * dp_size),
                ranks: Some(Ranks { dp_size, sync }),
                ..options.clone()
            };
            planned(&lengths, &options, &cost)
        };
        if let Some(mut once) = planned_for(Sync::Step) {
            let every = planned_for(Sync::MicroBatch);
            prop_assert!(every.is_some(), "a plan for ranks that wait once a step is one for all");
            let rounds = once.num_micro_batches() / dp_size;
            once.costs.chunks_mut(rounds).for_each(|rank| rank.sort_by(f64::total_cmp));
            let every = every.unwrap();
            let steps = [&every, &once].map(|plan| step_cost(&plan.costs, dp_size, Sync::MicroBatch));
            let fewer = options.fewest && every.num_micro_batches() < once.num_micro_batches();
            prop_assert!(fewer || steps[0] <= steps[1] * (1.0 + 1e-9), "{steps:?}");
        }
    }

    /// Where ranks wait once a step: the fewest micro-batches, or up to two more on each rank, if each makes the step
    /// shorter (by 1 %, if nobody says what a micro-batch costs to begin). The same number, given, makes the same plan.
    #[test]
    fn the_number_of_micro_batches_is_chosen(
        lengths in lengths(160, 3000), options in options(), room in 0_i32..4000, cost in cost_model(),
        wild in prop::collection::vec(-3_i64..30, 1..60), size in 0_usize..8,
    ) {
        let groups = groups(lengths.len(), &wild, size);
        let longest = longest(&lengths, &groups, options.together);
        let dp_size = options.ranks.map_or(2, |ranks| ranks.dp_size);
        let planned_with = |fewest, num_micro_batches| {
            let options = RankOptions {
                max_tokens: longest + room,
                groups: groups.clone(),
                multiple_of: 1,
                ranks: Some(Ranks { dp_size, sync: Sync::Step }),
                fewest,
                num_micro_batches,
                ..options.clone()
            };
            planned(&lengths, &options, &cost)
        };
        if let Some((fewest, chosen)) = planned_with(true, None).zip(planned_with(false, None)) {
            let step = |plan: &Packing| step_cost(&plan.costs, dp_size, Sync::Step);
            let more = (chosen.num_micro_batches() - fewest.num_micro_batches()) / dp_size;
            prop_assert!(more <= 2, "{more} more");
            let shorter = if cost.micro_batch() > 0.0 || more == 0 { 1.0 } else { 0.99 };
            prop_assert!(step(&chosen) <= step(&fewest) * shorter * (1.0 + 1e-9));
            let given = planned_with(false, Some(chosen.num_micro_batches()));
            prop_assert_eq!(given.map(|plan| plan.assignment), Some(chosen.assignment));
        }
    }

    /// With few groups on a rank, and room for each rank's in one micro-batch, ranks that wait once a step have at most
    /// 1 % to gain by longest first and swaps of whole groups, and by the tightest load at which all groups find room.
    #[test]
    fn few_groups_are_as_even_as_by_swaps_and_by_bisection(
        lengths in prop::collection::vec(100_i32..30_000, 8..90), size in 1_usize..5, dp_size in 2_usize..7,
        linear in prop_oneof![Just(0.0), Just(24_576.0)],
    ) {
        let cost = CostModel::analytic(1.0, linear, Mask::Causal).unwrap();
        let options = RankOptions {
            num_micro_batches: None,
            fewest: false,
            multiple_of: 1,
            max_tokens: 3_000_000,
            method: Method::VarLength,
            ranks: Some(Ranks { dp_size, sync: Sync::Step }),
            groups: (0..lengths.len()).map(|document| (document / size) as i64).collect(),
            together: Together::Rank,
            equal_documents: false,
            max_documents: None,
        };
        let packing = planned(&lengths, &options, &cost).unwrap();
        let of_group = |group: &[i32]| group.iter().map(|&length| cost.cost(length)).sum();
        let groups: Vec<f64> = lengths.chunks(size).map(of_group).collect();
        let least = by_swaps(groups.clone(), dp_size).min(by_bisection(groups, dp_size));
        let step = step_cost(&packing.costs, dp_size, Sync::Step);
        prop_assert!(step <= least * 1.01, "{step} for {least}");
    }

    /// Each document once, `max_tokens`, `max_documents`, groups, equal counts, no needless empty micro-batch, one
    /// plan.
    #[test]
    fn plans_keep_what_they_promise(
        lengths in lengths(160, 3000), options in options(), room in 0_i32..4000, cost in cost_model(),
        wild in prop::collection::vec(-3_i64..30, 1..60), size in 0_usize..8, given in prop::option::weighted(0.1, 1_usize..9),
    ) {
        let grouped = options.ranks.is_some() || options.together == Together::MicroBatch;
        let groups = if grouped { groups(lengths.len(), &wild, size) } else { vec![] };
        let longest = longest(&lengths, &groups, options.together);
        let dp_size = options.ranks.map_or(1, |ranks| ranks.dp_size);
        let num_micro_batches = given.map(|rounds| rounds * dp_size);
        planned(&lengths, &RankOptions { max_tokens: longest + room, groups, num_micro_batches, ..options }, &cost);
    }

    /// Where tokens do not run out, sums of ranks and rounds are even.
    #[test]
    fn many_light_documents_are_even(
        lengths in prop::collection::vec(50_i32..400, 200..400), dp_size in 2_usize..9, sync in sync(),
        equal_documents in any::<bool>(),
    ) {
        let cost = CostModel::analytic(1.0, 300.0, Mask::Causal).unwrap();
        let options = RankOptions {
            num_micro_batches: Some(3 * dp_size),
            fewest: false,
            multiple_of: 1,
            max_tokens: 100_000,
            method: Method::VarLength,
            ranks: Some(Ranks { dp_size, sync }),
            groups: vec![],
            together: Together::Rank,
            equal_documents,
            max_documents: None,
        };
        let packing = planned(&lengths, &options, &cost).unwrap();
        let most = match sync { Sync::Step => 1.001, Sync::MicroBatch => 1.01 };
        prop_assert!(packing.rank_imbalance() <= most, "{}", packing.rank_imbalance());
    }
}

/// Groups of few sizes: refused if and only if no way of sharing them out gives equal numbers, whatever else is asked.
#[test]
fn equal_numbers_are_found_wherever_there_are_any() {
    let cost = CostModel::analytic(1.0, 40.0, Mask::Causal).unwrap();
    let (mut seed, mut found, mut refused) = (3, 0, 0);
    for number in 0..1200 {
        let dp_size = 2 + pseudo_random(&mut seed, 4) as usize;
        let sizes: Vec<usize> =
            (0..2 + pseudo_random(&mut seed, 9)).map(|_| 1 + pseudo_random(&mut seed, 7) as usize).collect();
        let groups: Vec<i64> = sizes.iter().zip(0..).flat_map(|(&size, group)| vec![group; size]).collect();
        let lengths: Vec<i32> = groups.iter().map(|_| 1 + pseudo_random(&mut seed, 100) as i32).collect();
        let options = RankOptions {
            num_micro_batches: None,
            fewest: number % 2 == 0,
            multiple_of: 1 + number % 3,
            max_tokens: 700,
            method: Method::VarLength,
            ranks: Some(Ranks { dp_size, sync: if number % 4 < 2 { Sync::Step } else { Sync::MicroBatch } }),
            groups,
            together: if number % 5 < 3 { Together::Rank } else { Together::MicroBatch },
            equal_documents: true,
            max_documents: (number % 7 < 3).then_some(7 + number % 4),
        };
        let packing = planned(&lengths, &options, &cost);
        assert_eq!(packing.is_some(), divides_equally(&sizes, dp_size), "{sizes:?} on {dp_size} ranks");
        (found, refused) = if packing.is_some() { (found + 1, refused) } else { (found, refused + 1) };
    }
    assert!(found > 300 && refused > 100, "{found} {refused}");
}

/// The heaviest rank: longest first to the lightest rank, then the best swap of whole groups between the heaviest rank
/// and another, again and again.
fn by_swaps(mut groups: Vec<f64>, dp_size: usize) -> f64 {
    groups.sort_by(|a, b| b.total_cmp(a));
    let mut held = vec![Vec::new(); dp_size];
    let sum = |held: &[f64]| held.iter().sum::<f64>();
    for group in groups {
        held.iter_mut().min_by(|a, b| sum(a).total_cmp(&sum(b))).unwrap().push(group);
    }
    loop {
        let heavy = (0..dp_size).max_by(|&a, &b| sum(&held[a]).total_cmp(&sum(&held[b]))).unwrap();
        let (mut best, mut least) = (None, sum(&held[heavy]) * (1.0 - 1e-9));
        for light in (0..dp_size).filter(|&light| light != heavy) {
            for given in 0..held[heavy].len() {
                for taken in 0..=held[light].len() {
                    let moved = held[heavy][given] - held[light].get(taken).copied().unwrap_or(0.0);
                    let most = (sum(&held[heavy]) - moved).max(sum(&held[light]) + moved);
                    (best, least) = if most < least { (Some((light, given, taken)), most) } else { (best, least) };
                }
            }
        }
        let Some((light, given, taken)) = best else { return sum(&held[heavy]) };
        let back = (taken < held[light].len()).then(|| held[light].remove(taken));
        let group = held[heavy].remove(given);
        held[light].push(group);
        held[heavy].extend(back);
    }
}

/// The least load, found by bisection, at which all groups find room, longest first to the fullest rank.
fn by_bisection(mut groups: Vec<f64>, dp_size: usize) -> f64 {
    groups.sort_by(|a, b| b.total_cmp(a));
    let total = groups.iter().sum::<f64>();
    let (mut low, mut high) = (groups[0].max(total / dp_size as f64), total);
    for _ in 0..40 {
        let most = f64::midpoint(low, high);
        let mut ranks = vec![0.0; dp_size];
        let fit = groups.iter().all(|group| {
            let with_room = ranks.iter_mut().filter(|load| **load + group <= most);
            with_room.max_by(|a, b| a.total_cmp(b)).map(|load| *load += group).is_some()
        });
        (low, high) = if fit { (low, most) } else { (most, high) };
    }
    high
}

/// A few numbers, the same on every machine.
fn pseudo_random(seed: &mut u64, below: u64) -> u64 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 33) % below
}

/// Tiny batches, against the best of all plans: never shorter, on average within 2 %, and as few rounds but for a few.
#[test]
fn tiny_plans_are_near_the_optimum() {
    let cost = CostModel::analytic(1.0, 40.0, Mask::Causal).unwrap();
    let (mut seed, mut excess, mut compared, mut more_rounds) = (7, 0.0, 0, 0);
    for number in 0..240 {
        let documents = 3 + pseudo_random(&mut seed, 4) as usize;
        let lengths: Vec<i32> = (0..documents).map(|_| 1 + pseudo_random(&mut seed, 100) as i32).collect();
        let groups: Vec<i64> =
            if number % 3 == 0 { (0..documents as i64).map(|document| document / 2).collect() } else { vec![] };
        let together = if number % 2 == 0 { Together::Rank } else { Together::MicroBatch };
        let options = RankOptions {
            num_micro_batches: None,
            fewest: true,
            multiple_of: 1,
            max_tokens: longest(&lengths, &groups, together) + pseudo_random(&mut seed, 150) as i32,
            method: Method::VarLength,
            ranks: Some(Ranks { dp_size: 2, sync: if number % 2 == 0 { Sync::Step } else { Sync::MicroBatch } }),
            groups,
            together,
            equal_documents: number % 4 == 1 && number % 3 != 0,
            max_documents: (number % 5 == 0).then_some(2),
        };
        let packing = planned(&lengths, &options, &cost).unwrap();
        let rounds = packing.num_micro_batches() / 2;
        let fewest = (1..=rounds).find(|&rounds| optimum(&lengths, &options, rounds, &cost).is_some()).unwrap();
        more_rounds += rounds - fewest;
        if rounds <= 2 {
            let best = optimum(&lengths, &options, rounds, &cost).unwrap();
            let sync = options.ranks.unwrap().sync;
            let found = step_cost(&packing.costs, 2, sync);
            assert!(found >= best * (1.0 - 1e-12), "shorter than the best of all");
            excess += found / best - 1.0;
            compared += 1;
        }
    }
    assert!(compared > 150, "{compared}");
    assert!(excess / f64::from(compared) < 0.02, "{}", excess / f64::from(compared));
    assert!(more_rounds <= 4, "{more_rounds}");
}

/// Full micro-batches leave little choice: a second round is worth it.
#[test]
fn one_round_more_has_to_pay() {
    let lengths = [60, 40, 30, 30, 20, 20];
    let rounds = |sync, num_micro_batches, multiple_of, micro_batch| {
        let rates = Rates { attention: 1.0, micro_batch, ..Rates::default() };
        let options = RankOptions {
            num_micro_batches,
            fewest: false,
            multiple_of,
            max_tokens: 100,
            method: Method::VarLength,
            ranks: Some(Ranks { dp_size: 2, sync }),
            groups: vec![],
            together: Together::Rank,
            equal_documents: false,
            max_documents: None,
        };
        let packing = planned(&lengths, &options, &CostModel::from_rates(&rates).unwrap()).unwrap();
        (packing.num_micro_batches() / 2, step_cost(&packing.costs, 2, sync))
    };
    // 1,830, 820, 465 and 210 pairs: a full micro-batch of 60, 20 and 20 tokens has 2,250 of all 4,000.
    assert_eq!(rounds(Sync::Step, Some(2), 1, 0.0), (1, 2250.0));
    let (taken, step) = rounds(Sync::Step, None, 1, 0.0);
    assert_eq!(taken, 2);
    assert!(step <= 2250.0 * 0.95, "{step}");
    assert_eq!(rounds(Sync::MicroBatch, None, 1, 0.0), (2, 2040.0));
    // Four micro-batches are a multiple of four, and six are none.
    assert_eq!(rounds(Sync::Step, None, 4, 0.0).0, 2);
    // At least 210 pairs are saved. That pays for a micro-batch that costs 100 to begin, not for one that costs 300.
    assert_eq!(rounds(Sync::Step, None, 1, 100.0).0, 2);
    assert_eq!(rounds(Sync::Step, None, 1, 300.0), (1, 2550.0));
}

#[test]
fn what_cannot_hold_is_refused_by_name() {
    let cost = CostModel::analytic(1.0, 40.0, Mask::Causal).unwrap();
    let lengths = crate::common::strategies::checked(&[10, 20, 30, 40]);
    let good = RankOptions {
        num_micro_batches: None,
        fewest: false,
        multiple_of: 1,
        max_tokens: 60,
        method: Method::VarLength,
        ranks: Some(Ranks { dp_size: 2, sync: Sync::Step }),
        groups: vec![],
        together: Together::Rank,
        equal_documents: false,
        max_documents: None,
    };
    let refused =
        |options: RankOptions| wlb_core::ranks::pack_for_ranks(&lengths, &options, &cost).map(|_| ()).unwrap_err();
    let of_ranks = |dp_size| Some(Ranks { dp_size, sync: Sync::Step });
    let cases = [
        (RankOptions { ranks: of_ranks(0), ..good.clone() }, "dp_size"),
        (RankOptions { num_micro_batches: Some(3), ..good.clone() }, "dp_size"),
        (RankOptions { num_micro_batches: Some(2), max_tokens: 45, ..good.clone() }, "num_micro_batches"),
        (RankOptions { method: Method::Original, ..good.clone() }, "method"),
        (RankOptions { ranks: None, groups: vec![1, 1, 2, 2], ..good.clone() }, "groups"),
        (RankOptions { groups: vec![1, 1, 2], ..good.clone() }, "groups"),
        (RankOptions { ranks: None, equal_documents: true, ..good.clone() }, "equal_documents"),
        (RankOptions { groups: vec![1, 1, 1, 2], equal_documents: true, ..good.clone() }, "equal_documents"),
        (RankOptions { max_documents: Some(0), ..good.clone() }, "max_documents"),
        (RankOptions { multiple_of: 1 << 22, ..good.clone() }, "multiple_of"),
        (RankOptions { max_tokens: 39, ..good.clone() }, "lengths"),
        (RankOptions { groups: vec![1, 1, 2, 2], together: Together::MicroBatch, ..good.clone() }, "groups"),
        (RankOptions { groups: vec![1, 1], together: Together::MicroBatch, ..good.clone() }, "groups"),
    ];
    for (options, argument) in cases {
        assert_eq!(refused(options.clone()).argument(), argument, "{options:?}");
    }
    let longer = refused(RankOptions { max_tokens: 39, ..good.clone() });
    assert!(matches!(longer, Error::TooLong { index: 3, value: 40, .. }));
    let pairs = RankOptions { groups: vec![7, 7, 8, 8], together: Together::MicroBatch, ..good };
    let told = "groups[2] = 8: the 70 tokens of this group exceed max_tokens = 60;";
    assert!(refused(pairs.clone()).to_string().starts_with(told));
    let told = "groups[0] = 7: the 2 documents of this group exceed max_documents = 1;";
    assert!(refused(RankOptions { max_tokens: 70, max_documents: Some(1), ..pairs }).to_string().starts_with(told));
}
