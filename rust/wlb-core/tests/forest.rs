//! Prefix forests: what is shared, what plans keep, and how far from the best of all they are.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::common::ranks::{divides_equally, members};
use crate::common::strategies::config;
use proptest::prelude::*;
use wlb_core::cost::Rates;
use wlb_core::forest::PrefixForest;
use wlb_core::packing::{Leftover, Method, PackOptions, Packing, Ranks, Sync, Together};
use wlb_core::ranks::{ForestOptions, RankOptions, pack_for_ranks, pack_forest};
use wlb_core::sharding::execution::Layout;
use wlb_core::sharding::shard_forest;
use wlb_core::{CostModel, Error, Lengths, Mask, pack, pack_whole};

type Samples = Vec<Vec<i64>>;

/// Samples of few different tokens, some of them with a long beginning in common.
fn samples(most: usize, longest: usize) -> impl Strategy<Value = Samples> {
    let sample = prop_oneof![
        3 => prop::collection::vec(0_i64..3, 1..longest),
        2 => (1..longest, prop::collection::vec(0_i64..3, 1..5)).prop_map(|(shared, rest)| {
            (0..shared as i64).map(|at| at % 2).chain(rest).collect()
        }),
        1 => Just(vec![0, 1, 0, 1]),
    ];
    prop::collection::vec(sample, 1..most)
}

fn costs() -> impl Strategy<Value = CostModel> {
    let rates = (0.0..3.0, 0.1..9.0, prop::option::of(1_i32..9), prop::option::of(1_i32..9), 0.0..9.0, 0.0..9.0);
    let model = rates.prop_map(|(attention, linear, window, chunk, document, micro_batch)| {
        let windows = window.map(|size| (size, 1.5)).into_iter().collect();
        let chunks = chunk.map(|size| (size, 0.5)).into_iter().collect();
        CostModel::from_rates(&Rates { attention, linear, windows, chunks, document, micro_batch, ..Rates::default() })
            .unwrap()
    });
    let lengths = Lengths::new("lengths", &[2, 5, 9]).unwrap();
    let table = CostModel::from_tables(&lengths, &[3.0, 4.0, 30.0], &[1.0, 5.0, 6.0], Mask::Causal).unwrap();
    prop_oneof![4 => model, 1 => Just(table)]
}

fn found(samples: &Samples, groups: &[i64], key: &[i64]) -> Arc<PrefixForest> {
    let tokens: Vec<i64> = samples.iter().flatten().copied().collect();
    let mut offsets = vec![0];
    samples.iter().for_each(|sample| offsets.push(offsets[offsets.len() - 1] + sample.len() as i64));
    let forest = PrefixForest::from_tokens(&tokens, &offsets, groups, key).unwrap();
    forest.check_tokens(&tokens, &offsets).unwrap();
    Arc::new(forest)
}

/// All beginnings of some samples, of each class by itself: every one is the node of a single token.
fn beginnings<'a>(samples: &'a Samples, chosen: &[u32], class: &[i64]) -> BTreeSet<(i64, &'a [i64])> {
    let of = |&sample: &u32| {
        let tokens = &samples[sample as usize];
        let class = class.get(sample as usize).copied().unwrap_or(0);
        (1..=tokens.len()).map(move |end| (class, &tokens[..end]))
    };
    chosen.iter().flat_map(of).collect()
}

/// Tokens and cost of a micro-batch, token by token.
fn naive(samples: &Samples, chosen: &[u32], class: &[i64], model: &CostModel) -> (i64, f64) {
    let of = |tokens: usize| model.attention_cost(tokens as i32) + model.linear_cost(tokens as i32);
    let nodes = beginnings(samples, chosen, class);
    let cost: f64 = nodes.iter().map(|(_, tokens)| of(tokens.len()) - of(tokens.len() - 1)).sum();
    (nodes.len() as i64, cost + model.document() * chosen.len() as f64 + model.micro_batch())
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * (1.0 + a.abs() + b.abs())
}

fn check(plan: &Packing, samples: &Samples, class: &[i64], options: &ForestOptions, model: &CostModel) {
    let forest = plan.forest.as_ref().unwrap();
    let mut placed: Vec<i64> = plan.pieces.iter().map(|piece| piece.id).collect();
    placed.sort_unstable();
    assert_eq!(placed, (0..samples.len() as i64).collect::<Vec<i64>>());
    assert!(
        plan.pieces.iter().all(|piece| piece.start == 0 && piece.length == forest.sample_length(piece.id as usize))
    );
    let most = options.max_documents.unwrap_or(usize::MAX);
    for j in 0..plan.num_micro_batches() {
        let held = &plan.samples(j)[..];
        let (tokens, cost) = naive(samples, held, class, model);
        assert_eq!(plan.tokens[j], tokens);
        assert!(held.is_sorted() && held.iter().all(|&sample| plan.assignment[sample as usize] == j as i32));
        assert!(close(plan.costs[j], cost), "{} is not {cost}", plan.costs[j]);
        assert!(tokens <= i64::from(options.max_tokens) && held.len() <= most);
        let own = forest.of_samples(held, &forest.nodes_of(held));
        assert_eq!((own.unique_tokens(), forest.tokens_of(held)), (tokens, tokens));
        assert!(
            own.sample_lengths().iter().zip(held).all(|(&length, &at)| length as usize == samples[at as usize].len())
        );
    }
    assert!(plan.lower_bound() <= plan.step_cost() * (1.0 + 1e-12));
    assert_eq!(Packing::from_json(&plan.to_json()).unwrap(), *plan);
    let Some(ranks) = options.ranks else { return };
    let rounds = plan.num_micro_batches() / ranks.dp_size;
    let of_rank = |rank: usize| (rank * rounds..(rank + 1) * rounds).flat_map(|j| plan.samples(j));
    if !options.groups.is_empty() {
        let groups = |rank: usize| of_rank(rank).map(|at| options.groups[at as usize]).collect::<BTreeSet<i64>>();
        let all: usize = (0..ranks.dp_size).map(|rank| groups(rank).len()).sum();
        assert_eq!(all, options.groups.iter().collect::<BTreeSet<_>>().len());
    }
    if options.equal_documents {
        let counts: Vec<usize> = (0..ranks.dp_size).map(|rank| of_rank(rank).count()).collect();
        assert!(counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 1);
    }
    if options.groups.is_empty() && !options.equal_documents {
        let empty = (0..plan.num_micro_batches()).any(|j| plan.micro_batch(j).is_empty());
        assert!(!empty || samples.len() < plan.num_micro_batches());
    }
}

fn ranks() -> impl Strategy<Value = Option<Ranks>> {
    let sync = prop_oneof![Just(Sync::Step), Just(Sync::MicroBatch)];
    prop_oneof![3 => (1_usize..5, sync).prop_map(|(dp_size, sync)| Some(Ranks { dp_size, sync })), 1 => Just(None)]
}

proptest! {
    #![proptest_config(config(2000))]

    /// Every beginning that samples of a class have in common is there once; nodes are as long as can be, depth-first.
    #[test]
    fn a_forest_is_the_set_of_all_beginnings(
        samples in samples(20, 12), groups in prop::option::of(prop::collection::vec(0_i64..3, 20)), keyed in any::<bool>(),
    ) {
        let class = groups.map_or_else(Vec::new, |groups| groups[..samples.len()].to_vec());
        let none: &[i64] = &[];
        let forest = if keyed { found(&samples, none, &class) } else { found(&samples, &class, none) };
        let all: Vec<u32> = (0..samples.len() as u32).collect();
        prop_assert_eq!(forest.unique_tokens(), beginnings(&samples, &all, &class).len() as i64);
        prop_assert_eq!(forest.raw_tokens() as usize, samples.iter().map(Vec::len).sum::<usize>());
        let mut children = vec![0; forest.num_nodes()];
        for (node, &parent) in forest.parents().iter().enumerate() {
            prop_assert!(parent < node as i32);
            if parent >= 0 { children[parent as usize] += 1 }
        }
        for (node, &children) in children.iter().enumerate() {
            prop_assert!(children > 1 || forest.ends().contains(&(node as i32)));
        }
        // The order in which nodes lie in memory: parents first, then the longest child.
        let order = forest.order();
        for pair in order.windows(2) {
            let (before, node) = (pair[0] as i32, pair[1] as usize);
            let longest = forest.parents().iter().zip(forest.lengths()).filter(|pair| *pair.0 == before).map(|pair| *pair.1).max();
            prop_assert!(longest.is_none_or(|longest| forest.parents()[node] == before && forest.lengths()[node] == longest));
        }
        let parents: Vec<i64> = forest.parents().iter().map(|&parent| i64::from(parent)).collect();
        let lengths: Vec<i64> = forest.lengths().iter().map(|&length| i64::from(length)).collect();
        let ends: Vec<i64> = forest.ends().iter().map(|&end| i64::from(end)).collect();
        let again = PrefixForest::from_parents(&parents, &Lengths::new("lengths", &lengths).unwrap(), &ends).unwrap();
        prop_assert_eq!(again.digest(), forest.digest());
        prop_assert_eq!(PrefixForest::from_json(&forest.to_json()).unwrap(), (*forest).clone());
    }

    /// Each sample once, exact tokens and costs, limits, groups, equal counts, the bound, one plan.
    #[test]
    fn plans_keep_what_they_promise(
        samples in samples(40, 24), room in 0_i32..60, model in costs(), ranks in ranks(), size in 0_usize..6,
        equal_documents in any::<bool>(), max_documents in prop::option::weighted(0.3, 1_usize..9),
        given in prop::option::weighted(0.2, 1_usize..6),
    ) {
        let longest = samples.iter().map(Vec::len).max().unwrap() as i32;
        let groups = if size == 0 || ranks.is_none() { vec![] } else {
            (0..samples.len()).map(|sample| (sample / size) as i64).collect()
        };
        let num_micro_batches = given.map(|rounds| rounds * ranks.map_or(1, |ranks| ranks.dp_size));
        let equal_documents = equal_documents && ranks.is_some();
        let max_tokens = longest + room;
        let options = ForestOptions { num_micro_batches, fewest: false, max_tokens, ranks, groups, equal_documents, max_documents };
        let forest = found(&samples, &[], &[]);
        match pack_forest(&forest, &options, &model) {
            Ok(plan) => {
                prop_assert_eq!(&pack_forest(&forest, &options, &model).unwrap(), &plan);
                check(&plan, &samples, &[], &options, &model);
            }
            Err(Error::Combination { argument: "equal_documents", .. }) => {
                let sizes: Vec<usize> = members(&options.groups).map(|group| group.len()).collect();
                prop_assert!(!sizes.is_empty() && !divides_equally(&sizes, options.ranks.unwrap().dp_size));
            }
            Err(Error::Combination { argument: "num_micro_batches", .. } | Error::LeftOver { .. }) => {
                prop_assert!(given.is_some());
            }
            Err(error) => return Err(TestCaseError::fail(format!("{error:?}"))),
        }
    }

    /// No partition has a shorter step than the bound, and the plan is the best of those that leave no micro-batch
    /// empty if there are samples enough, but for what is good enough: half a percent over the bound.
    #[test]
    fn few_samples_are_packed_best(
        samples in samples(7, 16), room in 0_i32..30, model in costs(), sync in prop_oneof![Just(Sync::Step), Just(Sync::MicroBatch)],
        (dp_size, rounds) in prop_oneof![Just((1_usize, 2_usize)), Just((2, 1)), Just((2, 2)), Just((3, 1))],
    ) {
        let longest = samples.iter().map(Vec::len).max().unwrap() as i32;
        let ranks = Some(Ranks { dp_size, sync });
        let bins = dp_size * rounds;
        let max_tokens = longest + room;
        let (groups, equal_documents, max_documents) = (vec![], false, None);
        let options = ForestOptions { num_micro_batches: Some(bins), fewest: false, max_tokens, ranks, groups, equal_documents, max_documents };
        let (mut best, mut best_filled) = (f64::INFINITY, f64::INFINITY);
        for code in 0..bins.pow(samples.len() as u32) {
            let mut held = vec![Vec::new(); bins];
            (0..samples.len()).fold(code, |code, sample| { held[code % bins].push(sample as u32); code / bins });
            let loads: Vec<(i64, f64)> = held.iter().map(|held| naive(&samples, held, &[], &model)).collect();
            if loads.iter().all(|load| load.0 <= i64::from(max_tokens)) {
                let costs: Vec<f64> = loads.iter().map(|load| load.1).collect();
                let cost = Ranks { dp_size, sync }.step_cost(&costs);
                best = best.min(cost);
                if held.iter().filter(|held| !held.is_empty()).count() == bins.min(samples.len()) {
                    best_filled = best_filled.min(cost);
                }
            }
        }
        match pack_forest(&found(&samples, &[], &[]), &options, &model) {
            Ok(plan) => {
                prop_assert!(plan.lower_bound() <= best * (1.0 + 1e-9), "bound {} above {best}", plan.lower_bound());
                prop_assert!(plan.step_cost() >= best * (1.0 - 1e-9));
                // Samples that share all of their tokens cost nothing more together; but no micro-batch stays empty.
                let enough = best_filled.max(1.005 * plan.lower_bound()) * (1.0 + 1e-9);
                prop_assert!(plan.step_cost() <= enough, "{} is not {best_filled}", plan.step_cost());
            }
            Err(error) => prop_assert!(best_filled.is_infinite(), "{error:?}"),
        }
    }

    /// Each token lies on one rank, ranks have equally many, and each query sees the tokens before it on its path, as
    /// in a dense mask.
    #[test]
    fn shards_see_what_a_dense_mask_shows(samples in samples(16, 24), cp_size in 1_usize..6) {
        let all: Vec<u32> = (0..samples.len() as u32).collect();
        let whole = found(&samples, &[], &[]);
        let shard = shard_forest(&whole, cp_size, 1.01).unwrap();
        prop_assert_eq!(shard.digest(), shard_forest(&whole, cp_size, 1.01).unwrap().digest());
        let forest = shard.forest.as_ref().unwrap();
        let total = forest.unique_tokens() as usize;
        // The place of each token before, token by token.
        let mut before = vec![None; total];
        let mut lies_at = vec![0; total];
        for node in 0..forest.num_nodes() {
            let start = shard.document_starts[node] as usize;
            let above = usize::try_from(forest.parents()[node]).ok();
            before[start] = above.map(|above| shard.document_starts[above + 1] as usize - 1);
            for at in 0..forest.lengths()[node] as usize {
                if at > 0 { before[start + at] = Some(start + at - 1) }
                lies_at[start + at] = forest.starts()[node] + at as i32;
            }
        }
        let sees = |token: usize| std::iter::successors(Some(token), |&token| before[token]).collect::<BTreeSet<usize>>();
        prop_assert_eq!(total, beginnings(&samples, &all, &[]).len());
        let mut at = whole.token_indices().into_iter();
        for sample in &samples {
            let path: Vec<usize> = at.by_ref().take(sample.len()).map(|place| place as usize).collect();
            prop_assert_eq!(sees(*path.last().unwrap()), path.iter().copied().collect());
            prop_assert!(path.is_sorted());
        }
        prop_assert_eq!(at.next(), None);
        let mut owned = BTreeSet::new();
        let (mut of_ranks, mut seen_by) = (Vec::new(), Vec::new());
        for rank in 0..cp_size {
            let (mut keys, mut pairs, mut own) = (BTreeSet::new(), 0, 0);
            let held = shard.rank(rank).unwrap();
            prop_assert_eq!(&held.segments, &shard.ranks[rank]);
            for (at, segment) in shard.ranks[rank].iter().enumerate() {
                let first = shard.packed_start(segment) as usize;
                prop_assert_eq!(shard.position(segment), lies_at[first]);
                let listed: Vec<usize> =
                    shard.intervals(segment).iter().flat_map(|&(start, end)| start as usize..end as usize).collect();
                prop_assert_eq!(held.cu_seqlens_k[at + 1] - held.cu_seqlens_k[at], listed.len() as i64);
                for token in first..first + segment.length as usize {
                    // The last query sees all keys of the segment, each one before it one less.
                    let behind = first + segment.length as usize - 1 - token;
                    let expected = sees(token);
                    prop_assert!(listed.is_sorted() && listed[..listed.len() - behind].iter().copied().eq(expected.iter().copied()));
                    pairs += expected.len() as u64;
                    keys.extend(expected);
                    prop_assert!(owned.insert(token));
                    own += 1;
                }
            }
            let rows: Vec<usize> = held.token_indices().into_iter().map(|token| token as usize).collect();
            prop_assert!(rows.iter().zip(held.position_ids()).all(|(&token, position)| lies_at[token] == position));
            of_ranks.push(rows);
            seen_by.push(keys.clone());
            prop_assert_eq!(shard.pairs(rank), pairs);
            prop_assert_eq!(shard.keys_moved(rank), keys.len() as i64 - own);
            prop_assert!((own - (total / cp_size) as i64) <= 1);
        }
        prop_assert_eq!(owned.len(), total);
        let gathered = |rank: usize| {
            let wanted = |token: &&usize| (0..cp_size).any(|other| other != rank && seen_by[other].contains(*token));
            of_ranks[rank].iter().filter(wanted).count() as i64
        };
        prop_assert_eq!(shard.keys_gathered(), (0..cp_size).map(gathered).collect::<Vec<i64>>());
        let restored = shard.restore_indices();
        let rank_major: Vec<usize> = of_ranks.concat();
        prop_assert!(restored.iter().map(|&at| rank_major[at as usize]).eq(0..total));
    }

    /// From 100,000 unique tokens on the busiest of 8 ranks has no more than 1.01 of the mean pairs.
    #[test]
    fn shards_of_long_forests_are_level(
        prompts in prop::collection::vec((1_i64..20000, prop::collection::vec(1_i64..9000, 1..17)), 1..9),
    ) {
        let lengths: Vec<i64> = prompts.iter().map(|prompt| prompt.0).collect();
        let counts: Vec<i64> = prompts.iter().map(|prompt| prompt.1.len() as i64).collect();
        let completions: Vec<i64> = prompts.iter().flat_map(|prompt| prompt.1.iter().copied()).collect();
        let forest = PrefixForest::from_prompts(&Lengths::new("prompts", &lengths).unwrap(), &counts, &completions).unwrap();
        let shard = shard_forest(&forest, 8, 1.01).unwrap();
        let pairs: Vec<u64> = (0..8).map(|rank| shard.pairs(rank)).collect();
        let imbalance = *pairs.iter().max().unwrap() as f64 * 8.0 / pairs.iter().sum::<u64>() as f64;
        prop_assert!(forest.unique_tokens() < 100_000 || imbalance <= 1.01, "{imbalance}");
    }

    /// Where nothing is shared the plan is that of documents.
    #[test]
    fn with_nothing_to_share_it_is_the_plan_of_documents(
        lengths in prop::collection::vec(1_i64..60, 0..40), room in 0_i32..60, model in costs(), ranks in ranks(),
        given in prop::option::of(1_usize..6), max_documents in prop::option::weighted(0.3, 1_usize..9),
    ) {
        let parents = vec![-1; lengths.len()];
        let ends: Vec<i64> = (0..lengths.len() as i64).collect();
        let lengths = Lengths::new("lengths", &lengths).unwrap();
        let forest = Arc::new(PrefixForest::from_parents(&parents, &lengths, &ends).unwrap());
        let max_tokens = lengths.iter().copied().max().unwrap_or(1) + room;
        let num_micro_batches = given.map(|rounds| rounds * ranks.map_or(1, |ranks| ranks.dp_size));
        let (groups, equal_documents, method) = (vec![], false, Method::VarLength);
        let options = ForestOptions { num_micro_batches, fewest: false, max_tokens, ranks, groups: groups.clone(), equal_documents, max_documents };
        let documents = if ranks.is_some() || max_documents.is_some() {
            let options = RankOptions {
                num_micro_batches, fewest: false, multiple_of: 1, max_tokens, method, ranks, groups,
                together: Together::Rank, equal_documents, max_documents,
            };
            pack_for_ranks(&lengths, &options, &model)
        } else {
            let options = PackOptions {
                num_micro_batches: num_micro_batches.unwrap_or(1), max_tokens, method, global_batches: 1,
                leftover: Leftover::Error,
            };
            if given.is_some() { pack(&lengths, &options, &model) } else { pack_whole(&lengths, 1, &options, &model) }
        };
        match (pack_forest(&forest, &options, &model), documents) {
            (Ok(plan), Ok(packing)) => {
                prop_assert_eq!(plan.digest(), packing.digest());
                prop_assert_eq!(plan.costs, packing.costs);
            }
            (Err(_), Err(_)) => {}
            (plan, packing) => return Err(TestCaseError::fail(format!("{plan:?} is not {packing:?}"))),
        }
    }
}

/// What is said to be shared and is not is found: which sample, and at which token.
#[test]
fn tokens_that_differ_are_named() {
    let forest = PrefixForest::from_prompts(&Lengths::new("prompts", &[3]).unwrap(), &[2], &[1, 2]).unwrap();
    let tokens = [5, 6, 7, 1, 5, 6, 8, 2, 3];
    let error = forest.check_tokens(&tokens, &[0, 4, 9]).unwrap_err();
    let (argument, value) = ("tokens", 8);
    assert_eq!(error, Error::Unlike { argument, index: 6, value, sample: 1, position: 2, other: 0, expected: 7 });
    forest.check_tokens(&[5, 6, 7, 1, 5, 6, 7, 2, 3], &[0, 4, 9]).unwrap();
    assert!(forest.check_tokens(&tokens, &[0, 3, 9]).is_err());
}

/// 3,000 samples that are each a beginning of the next.
#[test]
fn deep_trees_need_no_stack() {
    let count = 3000;
    let samples: Samples = (1..=count).map(|length| vec![7; length]).collect();
    let forest = found(&samples, &[], &[]);
    assert_eq!((forest.num_nodes(), forest.unique_tokens()), (count, count as i64));
    let cost = CostModel::analytic(1.0, 1.0, Mask::Causal).unwrap();
    let options = ForestOptions { num_micro_batches: None, ..ForestOptions::new(count as i32) };
    assert_eq!(pack_forest(&forest, &options, &cost).unwrap().num_micro_batches(), 1);
}

/// A full mask has no prefixes to share.
#[test]
fn full_masks_are_refused() {
    let forest = found(&vec![vec![1, 2], vec![1, 3]], &[], &[]);
    let cost = CostModel::analytic(1.0, 1.0, Mask::Full).unwrap();
    let options = ForestOptions { num_micro_batches: Some(1), ..ForestOptions::new(9) };
    assert_eq!(pack_forest(&forest, &options, &cost).unwrap_err().argument(), "cost_model");
}

/// A forest of random nodes, each behind a random earlier one.
fn trees() -> impl Strategy<Value = PrefixForest> {
    prop::collection::vec((any::<u32>(), 1_i64..9, any::<bool>()), 1..12).prop_map(|nodes| {
        let behind = |(at, &(dice, ..)): (usize, &(u32, i64, bool))| i64::from(dice) % (at as i64 + 1) - 1;
        let parents: Vec<i64> = nodes.iter().enumerate().map(behind).collect();
        let lengths: Vec<i64> = nodes.iter().map(|node| node.1).collect();
        let is_leaf = |node: i64| !parents.contains(&node);
        let ends: Vec<i64> =
            (0..parents.len() as i64).filter(|&node| nodes[node as usize].2 || is_leaf(node)).collect();
        PrefixForest::from_parents(&parents, &Lengths::new("lengths", &lengths).unwrap(), &ends).unwrap()
    })
}

proptest! {
    #![proptest_config(config(2000))]

    #[test]
    fn layouts_give_every_token_its_path(forest in trees(), cp_size in 1_usize..6) {
        let shard = shard_forest(&forest, cp_size, 1.01).unwrap();
        let layout = Layout::of(&shard);
        // Of each token in memory those before it on its path, and itself, node by node.
        let parents = shard.forest.as_ref().unwrap().parents();
        let node_of = |token: i64| shard.document_starts.partition_point(|&start| i64::from(start) <= token) - 1;
        let path = |token: i64| {
            let mut node = node_of(token);
            let mut tokens: Vec<i64> = (i64::from(shard.document_starts[node])..=token).rev().collect();
            while let Ok(above) = usize::try_from(parents[node]) {
                tokens.extend((shard.document_starts[above]..shard.document_starts[above + 1]).rev().map(i64::from));
                node = above;
            }
            tokens.reverse();
            tokens
        };
        let mut held: Vec<i64> = Vec::new();
        for (rank, runs) in layout.held.iter().enumerate() {
            let mut row = 0;
            for run in runs {
                prop_assert_eq!(run.row, row);
                row += run.length;
                for at in 0..run.length {
                    let seen = layout.paths.cut(run.path, 0, run.position + at + 1);
                    let seen: Vec<i64> = seen.flat_map(|piece| piece.token..piece.token + piece.length).collect();
                    prop_assert_eq!(seen, path(run.token + at));
                    held.push(run.token + at);
                }
            }
            prop_assert_eq!(row, shard.tokens(rank));
        }
        held.sort_unstable();
        prop_assert!(held.into_iter().eq(0..forest.unique_tokens()));
    }
}
