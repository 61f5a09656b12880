//! Plans for ranks: what they keep, whatever the input, and the best there is, by trying all.
#![allow(dead_code, reason = "each test file uses a part of it")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::collections::{BTreeMap, BTreeSet};

use wlb_core::packing::{Packing, Sync, Together};
use wlb_core::ranks::{RankOptions, pack_for_ranks};
use wlb_core::{CostModel, Error, Lengths};

use super::check;

/// The documents of each group.
pub(crate) fn members(groups: &[i64]) -> impl Iterator<Item = Vec<usize>> {
    let mut members: BTreeMap<i64, Vec<usize>> = BTreeMap::new();
    groups.iter().enumerate().for_each(|(document, &group)| members.entry(group).or_default().push(document));
    members.into_values()
}

/// Whether groups of these sizes can be shared out so that numbers of documents differ by at most one: all sums that
/// ranks can have, group by group.
pub(crate) fn divides_equally(sizes: &[usize], ranks: usize) -> bool {
    let most = sizes.iter().sum::<usize>().div_ceil(ranks);
    let mut reached = BTreeSet::from([vec![0; ranks]]);
    for &size in sizes {
        let mut next = BTreeSet::new();
        for held in reached {
            for rank in (0..ranks).filter(|&rank| held[rank] + size <= most) {
                let mut held = held.clone();
                held[rank] += size;
                held.sort_unstable();
                next.insert(held);
            }
        }
        reached = next;
    }
    reached.iter().any(|held| held[ranks - 1] - held[0] <= 1)
}

/// A plan that keeps all that it promises; none where documents cannot be shared out equally.
pub(crate) fn planned(lengths: &[i32], options: &RankOptions, cost: &CostModel) -> Option<Packing> {
    let checked =
        Lengths::new("lengths", &lengths.iter().map(|&length| i64::from(length)).collect::<Vec<_>>()).unwrap();
    let packing = match pack_for_ranks(&checked, options, cost) {
        Err(Error::Combination { argument: "equal_documents", .. }) => {
            assert!(options.equal_documents && !options.groups.is_empty(), "documents alone can always be counted out");
            let sizes: Vec<usize> = members(&options.groups).map(|group| group.len()).collect();
            assert!(!divides_equally(&sizes, options.ranks.unwrap().dp_size), "{sizes:?}");
            return None;
        }
        Err(Error::GroupTooLarge { index, value, size, of, .. }) => {
            assert!(options.together == Together::MicroBatch);
            let group = members(&options.groups).find(|group| group[0] == index).unwrap();
            let tokens: i64 = group.iter().map(|&document| i64::from(lengths[document])).sum();
            assert_eq!(options.groups[index], value);
            assert_eq!(size, if of == "tokens" { tokens } else { group.len() as i64 });
            let many = options.max_documents.is_some_and(|most| group.len() > most);
            assert!(many || tokens > i64::from(options.max_tokens));
            return None;
        }
        Err(Error::Combination { argument: "num_micro_batches", .. }) => {
            assert!(options.num_micro_batches.is_some(), "some number always holds all");
            return None;
        }
        planned => planned.unwrap(),
    };
    check::packing_is_legal(&packing, cost);
    check::each_token_once(&packing, lengths);
    assert!(packing.leftover.is_empty());
    assert_eq!(packing.max_tokens, options.max_tokens);
    let most = options.max_documents.unwrap_or(usize::MAX);
    assert!((0..packing.num_micro_batches()).all(|j| packing.micro_batch(j).len() <= most), "too many documents");
    assert_eq!(pack_for_ranks(&checked, options, cost).as_ref(), Ok(&packing), "the same input, the same plan");
    assert_eq!(Packing::from_json(&packing.to_json()).as_ref(), Ok(&packing));
    let total = packing.num_micro_batches();
    match options.num_micro_batches {
        Some(asked) => assert_eq!(total, asked),
        None => assert!(total.is_multiple_of(options.multiple_of)),
    }

    let home = |document: usize| match options.together {
        Together::Rank => {
            packing.assignment[document] as usize * options.ranks.map_or(1, |ranks| ranks.dp_size) / total
        }
        Together::MicroBatch => packing.assignment[document] as usize,
    };
    for group in members(&options.groups) {
        assert!(group.iter().all(|&document| home(document) == home(group[0])), "a group is torn apart: {group:?}");
    }
    let Some(ranks) = options.ranks else { return Some(packing) };
    let rounds = total / ranks.dp_size;
    let dealt = packing.deal(ranks.dp_size).unwrap();
    assert_eq!(dealt, (0..total).collect::<Vec<_>>(), "rank by rank");
    assert!(packing.deal(ranks.dp_size + 1).is_err());
    let rank_of = |document: usize| packing.assignment[document] as usize / rounds;
    let mut held = vec![0; ranks.dp_size];
    (0..lengths.len()).for_each(|document| held[rank_of(document)] += 1);
    for (rank, &documents) in held.iter().enumerate() {
        let empty = (rank * rounds..(rank + 1) * rounds).filter(|&j| packing.micro_batch(j).is_empty()).count();
        let items = match options.together {
            Together::MicroBatch if !options.groups.is_empty() => {
                members(&options.groups).filter(|group| rank_of(group[0]) == rank).count()
            }
            _ => documents,
        };
        assert_eq!(empty, usize::saturating_sub(rounds, items), "empty micro-batches of {items} items");
    }
    if options.groups.is_empty() {
        // Somebody has two before anybody has none.
        assert!(held.contains(&0) <= (lengths.len() < ranks.dp_size));
    }
    if options.equal_documents {
        assert!(held.iter().max().unwrap() - held.iter().min().unwrap() <= 1, "{held:?} documents");
    }
    let mean = packing.costs.iter().sum::<f64>() / ranks.dp_size as f64;
    if mean > 0.0 {
        let step = step_cost(&packing.costs, ranks.dp_size, ranks.sync);
        assert!(check::close(packing.rank_imbalance(), (step / mean).max(1.0)), "{}", packing.rank_imbalance());
    }
    Some(packing)
}

/// How long ranks take for micro-batches of these costs, which stand rank by rank.
pub(crate) fn step_cost(costs: &[f64], dp_size: usize, sync: Sync) -> f64 {
    let rounds = costs.len() / dp_size;
    let of = |rank: usize, round: usize| costs[rank * rounds + round];
    match sync {
        Sync::Step => {
            (0..dp_size).map(|rank| (0..rounds).map(|round| of(rank, round)).sum::<f64>()).fold(0.0, f64::max)
        }
        Sync::MicroBatch => (0..rounds).map(|round| (0..dp_size).map(|rank| of(rank, round)).fold(0.0, f64::max)).sum(),
    }
}

/// The shortest step of any legal plan of so many rounds, by trying every assignment; none where there is no plan.
pub(crate) fn optimum(lengths: &[i32], options: &RankOptions, rounds: usize, cost: &CostModel) -> Option<f64> {
    let ranks = options.ranks.unwrap();
    let total = rounds * ranks.dp_size;
    let mut best = None;
    for number in 0..total.pow(lengths.len() as u32) {
        let assignment: Vec<usize> =
            (0..lengths.len()).map(|document| number / total.pow(document as u32) % total).collect();
        let rank_of = |document: usize| assignment[document] / rounds;
        let mut held = vec![0; ranks.dp_size];
        let (mut tokens, mut documents) = (vec![0_i64; total], vec![0_usize; total]);
        let mut costs = vec![cost.micro_batch(); total];
        for (document, &j) in assignment.iter().enumerate() {
            tokens[j] += i64::from(lengths[document]);
            documents[j] += 1;
            costs[j] += cost.cost(lengths[document]);
            held[rank_of(document)] += 1;
        }
        let together = |(a, group): (usize, &i64)| {
            let home = |document| match options.together {
                Together::Rank => rank_of(document),
                Together::MicroBatch => assignment[document],
            };
            options.groups.iter().enumerate().all(|(b, other)| other != group || home(a) == home(b))
        };
        let legal = tokens.iter().all(|&tokens| tokens <= i64::from(options.max_tokens))
            && documents.iter().all(|&documents| documents <= options.max_documents.unwrap_or(usize::MAX))
            && options.groups.iter().enumerate().all(together)
            && (!options.equal_documents || held.iter().max().unwrap() - held.iter().min().unwrap() <= 1);
        if legal {
            let step = step_cost(&costs, ranks.dp_size, ranks.sync);
            best = Some(best.map_or(step, |best: f64| best.min(step)));
        }
    }
    best
}
