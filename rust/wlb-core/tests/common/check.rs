//! What must hold of every result, whatever the input: asserted by the property tests and by the fuzz targets.
#![allow(dead_code, reason = "each test file uses a part of it")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use wlb_core::packing::{Packing, Padding, Piece, Ranks};
use wlb_core::sharding::{RankShard, Segment, Shard, ShardOptions, Strategy, shard};
use wlb_core::stream::{Metrics, Packer, Release, StepShape};
use wlb_core::{CostModel, Error, Leftover, Lengths, Mask, Method, PackOptions, pack};

use super::{auto, bound, naive, ranks};

/// Equal up to the rounding of sums.
pub(crate) fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * a.abs().max(b.abs())
}

/// The packing is the oracle's plan, bit for bit.
pub(crate) fn same_plan(packing: &Packing, plan: &naive::Plan) {
    let micro_batches: Vec<Vec<Piece>> =
        (0..packing.num_micro_batches()).map(|j| packing.micro_batch(j).to_vec()).collect();
    assert_eq!(micro_batches, plan.micro_batches, "micro-batches");
    assert_eq!(packing.assignment, plan.assignment, "assignment");
    assert_eq!(packing.tokens, plan.tokens, "tokens");
    let bits = |costs: &[f64]| costs.iter().map(|cost| cost.to_bits()).collect::<Vec<u64>>();
    assert_eq!(bits(&packing.costs), bits(&plan.costs), "costs");
    assert_eq!(packing.leftover, plan.leftover, "leftover");
    assert_eq!(packing.length_fallbacks, plan.length_fallbacks, "length fallbacks");
}

/// Legal arrays, sums that are sums, and `max_tokens` never exceeded.
pub(crate) fn packing_is_legal(packing: &Packing, cost: &CostModel) {
    let n = packing.num_micro_batches();
    assert_eq!(packing.offsets.len(), n + 1);
    assert_eq!((packing.offsets[0], packing.offsets[n]), (0, packing.pieces.len()));
    assert!(packing.offsets.is_sorted());
    assert_eq!(packing.costs.len(), n);
    let mut largest = cost.micro_batch();
    for j in 0..n {
        let pieces = packing.micro_batch(j);
        let tokens: i64 = pieces.iter().map(|piece| i64::from(piece.length)).sum();
        assert_eq!(packing.tokens[j], tokens, "tokens of micro-batch {j}");
        assert!(tokens <= i64::from(packing.max_tokens), "micro-batch {j} exceeds max_tokens");
        let costs = pieces.iter().map(|piece| cost.cost(piece.length));
        largest = costs.clone().fold(largest, |most, cost_of| most.max(cost.micro_batch() + cost_of));
        assert!(close(packing.costs[j], cost.micro_batch() + costs.sum::<f64>()), "cost of micro-batch {j}");
    }
    assert!(packing.pieces.iter().chain(&packing.leftover).all(|piece| piece.length >= 1 && piece.start >= 0));
    assert!(close(packing.largest_cost, largest), "{} is not the largest cost, {largest}", packing.largest_cost);
    assert_eq!(packing.num_tokens(), packing.tokens.iter().sum::<i64>());
    if packing.pieces.is_empty() {
        assert_eq!(packing.imbalance(), 1.0);
        assert_eq!(packing.memory_skew(), 1.0);
    } else {
        assert!(packing.imbalance() >= 1.0 - 1e-9 && packing.imbalance() <= n as f64 * (1.0 + 1e-9));
        assert!(packing.memory_skew() >= 1.0 - 1e-9);
    }
    assert!(packing.lower_bound() <= packing.step_cost() * (1.0 + 1e-9), "the bound is above what it bounds");
    // The oracle takes the square of the pieces.
    if packing.pieces.len() <= 100 {
        let documents: Vec<bound::Document> =
            packing.pieces.iter().map(|piece| (i64::from(piece.length), cost.cost(piece.length))).collect();
        let (max_tokens, most) = (i64::from(packing.max_tokens), packing.max_cost());
        let expected = bound::bound(&documents, n, max_tokens, cost.micro_batch(), most).min(most);
        // No rank is lighter than the mean.
        let expected = packing.ranks.map_or(expected, |ranks| {
            expected.max(packing.costs.iter().sum::<f64>() / ranks.dp_size as f64).min(packing.step_cost())
        });
        assert!(close(packing.lower_bound(), expected), "{}, not the bound {expected}", packing.lower_bound());
    }
}

/// The pieces, placed and left over, are the documents, each token once.
pub(crate) fn each_token_once(packing: &Packing, lengths: &[i32]) {
    let mut pieces: Vec<Piece> = packing.pieces.iter().chain(&packing.leftover).copied().collect();
    pieces.sort_by_key(|piece| (piece.id, piece.start));
    let mut pieces = pieces.into_iter().peekable();
    for (index, &length) in lengths.iter().enumerate() {
        let mut end = 0;
        while let Some(piece) = pieces.next_if(|piece| piece.id == index as i64) {
            assert_eq!(piece.start, end, "document {index} overlaps or has a gap");
            end += piece.length;
        }
        assert_eq!(end, length, "document {index}");
    }
    assert_eq!(pieces.next(), None, "a piece of no document");

    assert_eq!(packing.assignment.len(), lengths.len());
    for j in 0..packing.num_micro_batches() {
        let listed = packing.micro_batch(j);
        assert!(listed.is_sorted_by_key(|piece| (piece.id, piece.start)), "micro-batch {j} is not in arrival order");
        for piece in listed {
            let is_whole = piece.length == lengths[piece.id as usize];
            assert_eq!(packing.assignment[piece.id as usize], if is_whole { j as i32 } else { -1 });
        }
    }
    assert!(packing.leftover.iter().all(|piece| packing.assignment[piece.id as usize] == -1));
}

/// When no document went by token count: `W_max <= W/N + (1 - 1/N) * last document put into the heaviest`.
pub(crate) fn certificate_holds(packing: &Packing, cost: &CostModel) {
    if packing.length_fallbacks > 0 || packing.pieces.is_empty() {
        return;
    }
    let n = packing.num_micro_batches() as f64;
    let max = packing.max_cost();
    let heaviest = packing.costs.iter().position(|&cost| cost == max).unwrap();
    // Longest first, so that the last one put there is a shortest.
    let last = packing.micro_batch(heaviest).iter().map(|piece| piece.length).min().unwrap();
    let bound = packing.total_cost() / n + (1.0 - 1.0 / n) * cost.cost(last);
    assert!(max <= bound * (1.0 + 1e-9), "{max} is above {bound}");
}

/// Packs by every method, against the oracles and the guarantees.
pub(crate) fn pack_every_way(
    lengths: &[i32],
    num_micro_batches: usize,
    global_batches: usize,
    max_tokens: i32,
    cost: &CostModel,
) {
    let checked = Lengths::new("lengths", &lengths.iter().map(|&d| i64::from(d)).collect::<Vec<_>>()).unwrap();
    let run = |method, global_batches| {
        let packing = pack(
            &checked,
            &PackOptions { num_micro_batches, max_tokens, method, global_batches, leftover: Leftover::Return },
            cost,
        )?;
        packing_is_legal(&packing, cost);
        each_token_once(&packing, lengths);
        assert_eq!((packing.method, packing.max_tokens), (Some(method), max_tokens));
        Ok::<_, Error>(packing)
    };
    let total = num_micro_batches * global_batches;
    same_plan(&run(Method::Original, 1).unwrap(), &naive::original(lengths, num_micro_batches, max_tokens, cost));
    same_plan(
        &run(Method::FixedLength, global_batches).unwrap(),
        &naive::fixed_length(lengths, total, max_tokens, cost),
    );

    if let Some(index) = lengths.iter().position(|&d| d > max_tokens) {
        for method in [Method::VarLength, Method::Refined] {
            let error = run(method, 1).unwrap_err();
            assert!(matches!(error, Error::TooLong { argument: "lengths", index: at, .. } if at == index));
        }
        return;
    }
    let exact = run(Method::VarLength, 1).unwrap();
    same_plan(&exact, &naive::var_length(lengths, num_micro_batches, max_tokens, cost));
    certificate_holds(&exact, cost);
    scored_alike_elsewhere(&exact, &checked, cost);
    let refined = run(Method::Refined, 1).unwrap();
    refined_is_no_worse(&refined, &exact);
    scored_alike_elsewhere(&refined, &checked, cost);
    // Its oracle tries every exchange.
    if lengths.len() <= 100 {
        same_plan(&refined, &naive::refined(lengths, num_micro_batches, max_tokens, cost));
    }
}

/// `refined`'s promise.
fn refined_is_no_worse(refined: &Packing, exact: &Packing) {
    assert!(refined.max_cost() <= exact.max_cost(), "{} is above {}", refined.max_cost(), exact.max_cost());
    assert!(exact.assignment.iter().zip(&refined.assignment).all(|(&was, &is)| was < 0 || is >= 0), "was placed");
    assert_eq!(refined.length_fallbacks, exact.length_fallbacks);
}

/// The same of a step of a stream, beside what the packer would have done otherwise: the same documents wait, what was
/// placed is placed, and no micro-batch is heavier than the heaviest was.
pub(crate) fn refined_step_is_no_worse(
    packer: &Packer,
    refined: &Packing,
    plain: &naive::Plan,
    unrefined: &naive::Packer,
) {
    let heaviest = plain.costs.iter().copied().fold(0.0, f64::max);
    assert!(refined.max_cost() <= heaviest, "{} is above {heaviest}", refined.max_cost());
    assert!(plain.micro_batches.iter().flatten().all(|piece| refined.pieces.contains(piece)), "was placed");
    assert!(refined.leftover.iter().all(|piece| plain.leftover.contains(piece)), "is carried over, and was not");
    let queue: Vec<Piece> = packer.queue().levels().iter().flatten().map(|waiting| waiting.piece).collect();
    let would_be: Vec<Piece> = unrefined.queues.iter().flatten().map(|waiting| waiting.piece).collect();
    assert_eq!(queue, would_be, "others wait");
    assert_eq!(refined.length_fallbacks, plain.length_fallbacks);
}

/// A plan's assignment, given back, is the same plan.
fn scored_alike_elsewhere(packing: &Packing, lengths: &Lengths, cost: &CostModel) {
    let assignment: Vec<i64> = packing.assignment.iter().map(|&j| i64::from(j)).collect();
    let n = packing.num_micro_batches();
    let again = Packing::from_assignment(lengths, &assignment, n, packing.max_tokens, cost).unwrap();
    packing_is_legal(&again, cost);
    assert_eq!(again.method, None);
    assert_eq!((&again.pieces, &again.offsets, &again.tokens), (&packing.pieces, &packing.offsets, &packing.tokens));
    assert_eq!((&again.assignment, again.largest_cost), (&packing.assignment, packing.largest_cost));
    assert!(again.costs.iter().zip(&packing.costs).all(|(&a, &b)| close(a, b)));
    let mut leftover = packing.leftover.clone();
    leftover.sort_by_key(|piece| piece.id);
    assert_eq!(again.leftover, leftover);
}

/// Equal counts, every micro-batch once, light ones at both ends, and no rank that greedy would have spared.
pub(crate) fn dealt_fairly(packing: &Packing, dp_size: usize) {
    let total = packing.num_micro_batches();
    if dp_size == 0 || !total.is_multiple_of(dp_size) {
        assert!(matches!(packing.deal(dp_size), Err(Error::Indivisible { argument: "dp_size", .. })));
        return;
    }
    let dealt = packing.deal(dp_size).unwrap();
    let mut sorted = dealt.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, (0..total).collect::<Vec<_>>(), "not a permutation");
    let rows: Vec<Vec<f64>> =
        dealt.chunks(total / dp_size).map(|row| row.iter().map(|&j| packing.costs[j]).collect()).collect();
    for row in &rows {
        let top = row.iter().copied().fold(0.0, f64::max);
        let peak = row.iter().position(|&cost| cost == top).unwrap();
        assert!(row[..peak].is_sorted() && row[peak..].iter().rev().is_sorted(), "not lightest at both ends: {row:?}");
    }
    // Each deal goes to the least loaded: two ranks never differ by more than the heaviest micro-batch.
    let loads: Vec<f64> = rows.iter().map(|row| row.iter().sum()).collect();
    let (most, least) =
        (loads.iter().copied().fold(0.0, f64::max), loads.iter().copied().fold(f64::INFINITY, f64::min));
    assert!(most - least <= packing.max_cost() * (1.0 + 1e-9), "{loads:?}");
}

/// The packer holds what the oracle holds.
pub(crate) fn same_packer(packer: &Packer, expected: &naive::Packer) {
    let waiting = |piece, arrived, turn| naive::Waiting { piece, arrived, turn };
    let queues: Vec<Vec<naive::Waiting>> = packer
        .queue()
        .levels()
        .iter()
        .map(|level| level.iter().map(|w| waiting(w.piece, w.arrived, w.turn)).collect())
        .collect();
    assert_eq!(queues, expected.queues, "queues");
    let carried: Vec<naive::Waiting> = packer.carried().iter().map(|w| waiting(w.piece, w.arrived, w.turn)).collect();
    assert_eq!(carried, expected.carried, "carried");
    assert_eq!(packer.iteration(), expected.iteration, "iteration");
    assert_eq!(packer.pending(), expected.pending().len(), "pending");
    assert_eq!(packer.config(), &expected.config, "config");
    same_metrics(packer.metrics(), &expected.steps);
    same_work(packer.metrics(), &expected.steps, expected.costed_from);
}

/// What is said of the work of steps, since costs are what they are.
fn same_work(metrics: &Metrics, steps: &[naive::Step], costed_from: usize) {
    let pushed = |step: &&naive::Step| !step.flushed && step.plan.tokens.iter().sum::<i64>() > 0;
    let over = steps.iter().filter(pushed).filter(|step| step.work > step.budget).count();
    assert_eq!(metrics.steps_over_max_cost, over as u64);
    let work: Vec<f64> = steps[costed_from..].iter().filter(pushed).map(|step| step.work).collect();
    let mean = work.iter().sum::<f64>() / work.len() as f64;
    if work.is_empty() || mean == 0.0 {
        assert_eq!((metrics.step_work_cv(), metrics.step_work_heaviest()), (0.0, 1.0));
        return;
    }
    let variance = work.iter().map(|work| (work / mean - 1.0).powi(2)).sum::<f64>() / work.len() as f64;
    let cv = metrics.step_work_cv();
    assert!((cv - variance.sqrt()).abs() < 1e-6 * (1.0 + cv), "{cv} {}", variance.sqrt());
    assert!(close(metrics.step_work_heaviest(), work.iter().copied().fold(0.0, f64::max) / mean));
}

/// The running sums are those of the steps.
fn same_metrics(metrics: &Metrics, steps: &[naive::Step]) {
    let mean = |values: &[f64], of_none: f64| {
        if values.is_empty() { of_none } else { values.iter().sum::<f64>() / values.len() as f64 }
    };
    let tokens = |step: &naive::Step| step.plan.tokens.iter().sum::<i64>() as f64;
    let of_pushes: Vec<&naive::Step> = steps.iter().filter(|step| !step.flushed && tokens(step) > 0.0).collect();
    let over_mean =
        |values: &[f64]| values.iter().copied().fold(0.0, f64::max) * values.len() as f64 / values.iter().sum::<f64>();
    let imbalance = |step: &&naive::Step| {
        let (costs, total) = (&step.plan.costs, step.plan.costs.iter().sum::<f64>());
        match step.shape.ranks {
            Some(Ranks { dp_size, sync }) => ranks::step_cost(costs, dp_size, sync) * dp_size as f64 / total,
            None => over_mean(costs),
        }
    };
    let imbalances: Vec<f64> = of_pushes.iter().map(imbalance).collect();
    let padding = |step: &naive::Step| {
        let of_sizes = step.shape.padding.iter();
        let added =
            |padding: &Padding| step.plan.tokens.iter().map(|&tokens| padding.padded(tokens) - tokens).sum::<i64>();
        of_sizes.map(added).sum::<i64>() as u64
    };
    assert_eq!(metrics.padding, steps.iter().map(padding).sum::<u64>(), "padding");
    let skews: Vec<f64> = of_pushes
        .iter()
        .map(|step| over_mean(&step.plan.tokens.iter().map(|&tokens| tokens as f64).collect::<Vec<_>>()))
        .collect();
    let totals: Vec<f64> = of_pushes.iter().map(|&step| tokens(step)).collect();

    assert_eq!(metrics.steps, of_pushes.len() as u64);
    assert!(close(metrics.imbalance_mean(), mean(&imbalances, 1.0)));
    let worst = imbalances.iter().copied().fold(1.0, f64::max);
    assert!(close(metrics.imbalance_worst(), worst));
    let mut ascending = imbalances.clone();
    ascending.sort_by(f64::total_cmp);
    for percent in [50_u64, 95, 99, 100] {
        let found = metrics.imbalance_percentile(percent as f64 / 100.0);
        // The smallest value that so many per cent of the steps do not exceed, never understated, at most 0.001 more.
        let rank = (percent * ascending.len() as u64).div_ceil(100).max(1) as usize - 1;
        let exact = ascending.get(rank).copied().unwrap_or(1.0).max(1.0);
        assert!(found >= exact * (1.0 - 1e-9) && found <= exact + 0.001 + 1e-9, "p{percent}: {found}, exactly {exact}");
        assert!(found <= worst * (1.0 + 1e-9));
    }
    assert!(close(metrics.memory_skew_mean(), mean(&skews, 1.0)));
    assert!(close(metrics.memory_skew_worst(), skews.iter().copied().fold(1.0, f64::max)));
    let average = mean(&totals, 1.0);
    let variance = mean(&totals.iter().map(|total| (total - average).powi(2)).collect::<Vec<_>>(), 0.0);
    // One pass over squares loses what cancels: compare variances, at the scale of the squares.
    assert!((metrics.tokens_per_step_cv().powi(2) - variance / average.powi(2)).abs() <= 1e-9);

    let moved: Vec<(i64, i64)> = steps.iter().flat_map(|step| step.moved.iter().copied()).collect();
    let delays: Vec<(i64, u64)> = moved.iter().map(|&(tokens, late)| (tokens, late.max(0) as u64)).collect();
    let all_tokens: i64 = delays.iter().map(|&(tokens, _)| tokens).sum();
    assert_eq!((metrics.documents, metrics.tokens), (delays.len() as u64, all_tokens as u64));
    let longest = delays.iter().map(|&(_, delay)| delay).max().unwrap_or(0);
    assert_eq!(metrics.delay_max(), longest);
    let within = |most: u64| delays.iter().filter(|&&(_, delay)| delay <= most).map(|&(tokens, _)| tokens).sum::<i64>();
    let p99 = delays.iter().map(|&(_, delay)| delay).filter(|&delay| within(delay) * 100 >= all_tokens * 99).min();
    assert_eq!(metrics.delay_percentile(0.99), p99.unwrap_or(0));
    let waited: f64 = delays.iter().map(|&(tokens, delay)| tokens as f64 * delay as f64).sum();
    let early: f64 = moved.iter().map(|&(tokens, late)| tokens as f64 * (-late).max(0) as f64).sum();
    assert!(close(metrics.early_mean(), if moved.is_empty() { 0.0 } else { early / all_tokens as f64 }));
    assert!(close(metrics.delay_mean(), if delays.is_empty() { 0.0 } else { waited / all_tokens as f64 }));
    let mut seen = 0;
    for (delay, tokens) in metrics.delays() {
        seen += tokens as i64;
        assert_eq!(seen, within(delay), "delay histogram at {delay}");
    }
    assert_eq!(seen, all_tokens);
    let count = |of: fn(&naive::Plan) -> usize| steps.iter().map(|step| of(&step.plan) as u64).sum::<u64>();
    assert_eq!(metrics.length_fallbacks, count(|plan| plan.length_fallbacks));
    assert_eq!(metrics.carried_over, count(|plan| plan.leftover.len()));
}

/// The documents of a plan, arranged anew: the same wait and are left over, and no step is longer than the plan's,
/// dealt.
pub(crate) fn arranged(packing: &Packing, plan: &naive::Plan, shape: &StepShape) {
    let sorted = |pieces: &[Piece]| {
        let mut sorted = pieces.to_vec();
        sorted.sort_by_key(|piece| (piece.id, piece.start));
        sorted
    };
    assert_eq!(sorted(&packing.pieces), sorted(&plan.micro_batches.concat()), "other documents leave");
    assert_eq!(packing.leftover, plan.leftover, "leftover");
    assert_eq!(packing.length_fallbacks, plan.length_fallbacks, "length fallbacks");
    assert_eq!(packing.assignment.len(), plan.assignment.len());
    for (&is, &was) in packing.assignment.iter().zip(&plan.assignment) {
        assert_eq!(is < 0, was < 0, "another document waits");
    }
    let heaviest = |costs: &[f64]| costs.iter().copied().fold(0.0, f64::max);
    let step = |costs: &[f64]| match shape.ranks {
        Some(Ranks { dp_size, sync }) => ranks::step_cost(costs, dp_size, sync),
        None => heaviest(costs),
    };
    let as_it_was: Vec<f64> = match shape.ranks {
        Some(Ranks { dp_size, .. }) => naive::dealt(&plan.costs, dp_size).into_iter().map(|j| plan.costs[j]).collect(),
        None => plan.costs.clone(),
    };
    let (found, before) = (step(&packing.costs), step(&as_it_was));
    assert!(found <= before * (1.0 + 1e-9), "{found} is above {before}, as it was dealt");
}

/// Numbers of documents, sizes, and the ranks that it is for.
pub(crate) fn shape_is_kept(packing: &Packing, shape: &StepShape) {
    let most = shape.max_documents.unwrap_or(usize::MAX);
    assert!((0..packing.num_micro_batches()).all(|j| packing.micro_batch(j).len() <= most), "too many documents");
    assert_eq!((packing.ranks, &packing.padding), (shape.ranks, &shape.padding));
    if let Some(padding) = &shape.padding {
        let padded = |&tokens: &i64| padding.padded(tokens);
        assert_eq!(packing.padded_tokens(), packing.tokens.iter().map(padded).collect::<Vec<_>>());
        assert!(
            packing.padded_tokens().iter().all(|&tokens| tokens <= i64::from(packing.max_tokens)),
            "padded too far"
        );
    }
    if let Some(Ranks { dp_size, .. }) = shape.ranks {
        assert_eq!(
            packing.deal(dp_size).unwrap(),
            (0..packing.num_micro_batches()).collect::<Vec<_>>(),
            "rank by rank"
        );
    }
    assert_eq!(Packing::from_json(&packing.to_json()).as_ref(), Ok(packing));
}

/// What the queues promise after a push.
pub(crate) fn queues_keep_their_word(packer: &Packer) {
    let config = packer.config();
    for (level, waiting) in packer.queue().levels().iter().enumerate() {
        let adaptive = config.release == Release::Adaptive;
        let company = config.shape.ranks.map_or(config.num_micro_batches, |ranks| ranks.dp_size);
        assert!(adaptive || waiting.len() < company, "level {level} holds a full batch");
        assert!(waiting.iter().is_sorted_by_key(|waiting| waiting.arrived), "level {level} is not in order of arrival");
        let top = config.outlier_thresholds.get(level + 1).copied().unwrap_or(i32::MAX);
        for waiting in waiting {
            assert!(adaptive || waiting.piece.length >= config.outlier_thresholds[level]);
            assert!(adaptive || waiting.piece.length < top || level + 1 == config.outlier_thresholds.len());
            let age = packer.iteration() - 1 - waiting.arrived;
            assert!(config.max_delay.is_none_or(|most| age < most), "waits for {age} iterations");
        }
    }
}

/// Every rank's segments: a cover of the documents, in packed order, tokens within one.
pub(crate) fn shard_is_legal(shard: &Shard, lengths: &[i32]) {
    assert_eq!(shard.lengths, lengths);
    let total: i64 = lengths.iter().map(|&d| i64::from(d)).sum();
    assert_eq!(i64::from(shard.num_tokens()), total);
    let mut all: Vec<Segment> = shard.ranks.concat();
    all.sort_by_key(|segment| (segment.document, segment.start));
    let mut all = all.into_iter().peekable();
    for (document, &length) in lengths.iter().enumerate() {
        let mut end = 0;
        while let Some(segment) = all.next_if(|segment| segment.document as usize == document) {
            assert_eq!(segment.start, end, "document {document} overlaps or has a gap");
            assert!(segment.length >= 1);
            end = segment.end();
        }
        assert_eq!(end, length, "document {document}");
    }
    assert_eq!(all.next(), None, "a segment of no document");

    for segments in &shard.ranks {
        for pair in segments.windows(2) {
            let ascend = (pair[0].document, pair[0].end()) < (pair[1].document, pair[1].start)
                || pair[0].document < pair[1].document;
            assert!(ascend, "segments overlap, touch or are out of order: {pair:?}");
        }
    }
    let cp = shard.cp_size() as i64;
    let within_one = [total / cp, total / cp + i64::from(total % cp > 0)];
    assert!(
        (0..shard.cp_size()).all(|rank| within_one.contains(&shard.tokens(rank))),
        "tokens differ by more than one"
    );

    let pairs: i128 = (0..shard.cp_size()).map(|rank| i128::from(shard.pairs(rank))).sum();
    assert_eq!(pairs, lengths.iter().map(|&d| naive::naive_pairs(shard.mask, d)).sum::<i128>());
}

/// Bounds on how far `per_document` leaves ranks apart, under a causal mask.
pub(crate) fn per_document_is_balanced(shard: &Shard) {
    let cp = shard.cp_size();
    for segments in &shard.ranks {
        assert!(segments.windows(3).all(|three| three[0].document != three[2].document), "more than two segments");
    }
    let pairs = || (0..cp).map(|rank| i128::from(shard.pairs(rank)));
    let gap = pairs().max().unwrap_or(0) - pairs().min().unwrap_or(0);
    let slots = 2 * cp as i128;
    let uneven = || shard.lengths.iter().map(|&d| i128::from(d)).filter(|d| d % slots != 0);
    assert!(gap <= 2 * uneven().sum::<i128>(), "gap of {gap} pairs");
    // Each time the cursor goes round, the gap can grow: `2 * d_max` alone is too little, as `[5, 4, 4, 4, ...]` at
    // `cp = 6` shows, where it grows by 4 with every third document.
    let rounds = (uneven().map(|d| d % slots).sum::<i128>() + slots - 1) / slots;
    assert!(gap <= 2 * uneven().max().unwrap_or(0) * rounds, "gap of {gap} pairs in {rounds} rounds");
}

/// Long documents in at most two segments a rank; short ones cut at most `cp - 1` times in all.
pub(crate) fn hybrid_cuts_little(shard: &Shard, threshold: i64) {
    let mut cuts = 0;
    for document in 0..shard.lengths.len() {
        let of_rank = |segments: &Vec<Segment>| segments.iter().filter(|s| s.document as usize == document).count();
        let segments: Vec<usize> = shard.ranks.iter().map(of_rank).collect();
        if i64::from(shard.lengths[document]) >= threshold {
            assert!(segments.iter().all(|&count| count <= 2));
        } else {
            cuts += segments.iter().sum::<usize>() - 1;
        }
    }
    assert!(cuts < shard.cp_size(), "{cuts} cuts");
}

/// The arrays that a kernel is fed. Writes every token out: for sequences that fit in memory.
pub(crate) fn ranks_are_legal(shard: &Shard) {
    let total = shard.num_tokens() as usize;
    let mut rank_major = Vec::with_capacity(total);
    let mut position_of = Vec::with_capacity(total);
    for &length in &shard.lengths {
        position_of.extend(0..length);
    }
    for rank in 0..shard.cp_size() {
        let held = shard.rank(rank).unwrap();
        let (indices, positions) = (held.token_indices(), held.position_ids());
        let RankShard {
            num_tokens,
            segments,
            cu_seqlens_q,
            cu_seqlens_k,
            k_starts,
            positions: firsts,
            max_seqlen_q,
            max_seqlen_k,
        } = held;
        assert_eq!(segments, shard.segments(rank).unwrap());
        let mut packed = segments.clone();
        packed.sort_by_key(|segment| (segment.document, segment.start));
        assert_eq!(packed, shard.ranks[rank]);
        if shard.strategy == Strategy::Contiguous || shard.cp_size() == 1 {
            assert_eq!(segments, packed);
        }
        assert_eq!(num_tokens as i64, shard.tokens(rank));
        assert_eq!((indices.len(), positions.len()), (num_tokens, num_tokens));
        assert!(indices.iter().zip(&positions).all(|(&token, &at)| position_of[token as usize] == at));
        assert_eq!([cu_seqlens_q.len(), cu_seqlens_k.len(), k_starts.len() + 1], [segments.len() + 1; 3]);
        assert_eq!((cu_seqlens_q[0], cu_seqlens_k[0]), (0, 0));
        assert_eq!(*cu_seqlens_q.last().unwrap() as usize, num_tokens);
        let (mut longest_q, mut longest_k) = (0, 0);
        for (i, segment) in segments.iter().enumerate() {
            let (queries, keys) =
                (cu_seqlens_q[i + 1] - cu_seqlens_q[i], (cu_seqlens_k[i + 1] - cu_seqlens_k[i]) as i32);
            let length = shard.lengths[segment.document as usize];
            let document_start: i32 = shard.lengths[..segment.document as usize].iter().sum();
            let seen = if shard.mask == Mask::Causal { segment.start + segment.length } else { length };
            assert_eq!((queries, keys, k_starts[i], firsts[i]), (segment.length, seen, document_start, segment.start));
            assert_eq!(shard.intervals(segment), [(document_start, document_start + seen)]);
            // The queries are where the arrays say, and the last one sees exactly its document so far.
            let first = cu_seqlens_q[i] as usize;
            assert_eq!((indices[first], positions[first]), (document_start + segment.start, segment.start));
            let last = cu_seqlens_q[i + 1] as usize - 1;
            assert!(shard.mask == Mask::Full || positions[last] + 1 == keys);
            (longest_q, longest_k) = (longest_q.max(queries), longest_k.max(keys));
        }
        assert_eq!((max_seqlen_q, max_seqlen_k), (longest_q, longest_k));
        rank_major.extend(indices);
    }
    let restore = shard.restore_indices();
    assert_eq!(restore.len(), total);
    let restored = restore.iter().map(|&at| rank_major[at as usize]);
    assert!(restored.eq(0..total as i32), "restore_indices is not the inverse");
}

/// `cu_seqlens_k` are int32: more keys than that are an error, not an overflow.
fn keys_are_counted_or_refused(shard: &Shard) {
    for (rank, segments) in shard.ranks.iter().enumerate() {
        let keys_of = |segment: &Segment| match shard.mask {
            Mask::Causal => i64::from(segment.end()),
            Mask::Full => i64::from(shard.lengths[segment.document as usize]),
        };
        let keys: i64 = segments.iter().map(keys_of).sum();
        match shard.rank(rank) {
            Ok(held) => assert_eq!(held.cu_seqlens_k.last().copied(), Some(keys)),
            Err(error) => {
                assert_eq!(error, Error::TotalTooLong { argument: "cu_seqlens_k", total: keys });
                assert!(keys > i64::from(i32::MAX));
            }
        }
    }
}

/// No rank has more pairs than `max_imbalance` allows, where cutting every document for all ranks keeps to that; where
/// it does not, none has more than that gives it.
fn auto_is_even(shard: &Shard, options: &ShardOptions, lengths: &Lengths) {
    let heaviest = |shard: &Shard| (0..shard.cp_size()).map(|rank| shard.pairs(rank)).max().unwrap_or(0);
    let on_all = ShardOptions { strategy: Strategy::PerDocument, ..options.clone() };
    let on_all = wlb_core::shard(lengths, &on_all).unwrap();
    let mean = lengths.iter().map(|&d| options.mask.pairs(d)).sum::<u64>() as f64 / options.cp_size as f64;
    let allowed = ((mean * options.max_imbalance) as u64).max(heaviest(&on_all));
    assert!(heaviest(shard) <= allowed, "{} pairs, {allowed} allowed", heaviest(shard));
}

/// Shards by every strategy against the guarantees; against the oracles and written out when `exact`.
pub(crate) fn shard_every_way(lengths: &[i32], cp_size: usize, mask: Mask, threshold: i64, exact: bool) {
    let checked = Lengths::new("lengths", &lengths.iter().map(|&d| i64::from(d)).collect::<Vec<_>>()).unwrap();
    let ways = [Strategy::Auto, Strategy::PerSequence, Strategy::Contiguous, Strategy::PerDocument, Strategy::Hybrid];
    for strategy in ways {
        let hybrid_threshold = (strategy == Strategy::Hybrid).then_some(threshold);
        let options = ShardOptions { cp_size, strategy, mask, hybrid_threshold, max_imbalance: 1.01 };
        let shard = shard(&checked, &options).unwrap();
        assert_eq!((shard.strategy, shard.mask, shard.cp_size()), (strategy, mask, cp_size));
        shard_is_legal(&shard, lengths);
        match strategy {
            Strategy::PerDocument if mask == Mask::Causal => per_document_is_balanced(&shard),
            Strategy::Hybrid => hybrid_cuts_little(&shard, threshold),
            Strategy::Auto => auto_is_even(&shard, &options, &checked),
            _ => {}
        }
        if exact {
            let owners = match strategy {
                Strategy::Auto => auto::auto(lengths, cp_size, mask, options.max_imbalance),
                Strategy::PerSequence => naive::per_sequence(lengths, cp_size),
                Strategy::Contiguous => naive::contiguous(lengths, cp_size),
                Strategy::PerDocument => naive::per_document(lengths, cp_size, 1),
                _ => naive::hybrid(lengths, cp_size, threshold),
            };
            assert_eq!(shard.ranks, naive::segments(&owners, cp_size), "{strategy:?}");
            for rank in (0..cp_size).filter(|_| strategy != Strategy::Contiguous && cp_size > 1) {
                assert_eq!(shard.rank_rows(rank), naive::rows(&owners, cp_size, mask, rank), "{strategy:?}");
            }
            let moved: Vec<i64> = (0..cp_size).map(|rank| shard.keys_moved(rank)).collect();
            assert_eq!(moved, auto::keys_moved(&owners, cp_size, mask), "{strategy:?}");
            let gathered = auto::keys_gathered(&owners, cp_size, mask);
            assert_eq!(shard.keys_gathered(), gathered, "{strategy:?}");
            let copied: Vec<(i64, i64)> =
                (0..cp_size).map(|rank| (shard.tokens_split(rank), shard.keys_picked(rank))).collect();
            let expected = auto::tokens_split_and_keys_picked(&owners, cp_size, mask);
            assert_eq!(copied, expected, "{strategy:?}");
            ranks_are_legal(&shard);
        } else {
            keys_are_counted_or_refused(&shard);
        }
    }
}
