//! What ranks do in a layer of attention: every plan run token by token, against the dense mask.
//!
//! `WLB_EXECUTION_CASES` says how many layouts are tried.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed unwrap is a failed test")]

use std::collections::BTreeMap;

use wlb_core::sharding::execution::{
    Buckets, Call, HeadsPlan, Indices, KeysPlan, LEVELS, Layout, MovesPlan, Paths, Piece, Reach, RingPlan, Rows, Run,
    Sum, Transport,
};
use wlb_core::{Lengths, Mask, ShardOptions, Strategy, shard};

/// Of a few million, evenly spread: splitmix64.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % limit as u64) as usize
    }
}

const STRATEGIES: [Strategy; 5] =
    [Strategy::Auto, Strategy::PerSequence, Strategy::Contiguous, Strategy::PerDocument, Strategy::Hybrid];

/// A shard of a few documents.
fn documents(dice: &mut Dice, cp_size: usize) -> Layout {
    let longest = [3, 9, 40][dice.below(3)];
    let lengths: Vec<i64> = (0..1 + dice.below(5)).map(|_| 1 + dice.below(longest) as i64).collect();
    let strategy = STRATEGIES[dice.below(5)];
    let options = ShardOptions {
        cp_size,
        strategy,
        mask: if dice.below(3) == 0 { Mask::Full } else { Mask::Causal },
        hybrid_threshold: (strategy == Strategy::Hybrid).then(|| 1 + dice.below(30) as i64),
        max_imbalance: 1.01,
    };
    Layout::of(&shard(&Lengths::new("lengths", &lengths).unwrap(), &options).unwrap())
}

/// Prefix trees whose nodes lie in packed order, each cut into runs for ranks at random: several key intervals a run.
fn forest(dice: &mut Dice, cp_size: usize) -> Layout {
    let mut layout = Layout { paths: Paths::default(), held: vec![Vec::new(); cp_size], causal: true };
    let mut nodes: Vec<Vec<Piece>> = Vec::new();
    let mut token = 0;
    for node in 0..1 + dice.below(10) {
        let longest = if dice.below(6) == 0 { 150 } else { 8 }; // some so long that their keys are not copied
        let length = 1 + dice.below(longest) as i64;
        let mut path = if node > 0 && dice.below(4) > 0 { nodes[dice.below(node)].clone() } else { Vec::new() };
        let position = path.last().map_or(0, |last| last.position + last.length);
        path.push(Piece { position, token, length });
        layout.paths.push(path.iter().copied());
        nodes.push(path);
        let mut from = 0;
        while from < length {
            let run = 1 + dice.below((length - from) as usize) as i64;
            let rank = dice.below(cp_size);
            let row = layout.held[rank].iter().map(|run| run.length).sum();
            layout.held[rank].push(Run {
                path: node,
                position: position + from,
                token: token + from,
                row,
                length: run,
            });
            from += run;
        }
        token += length;
    }
    layout
}

/// Of a rank, by row: path and position, and the token.
fn rows_of(layout: &Layout, rank: usize) -> Vec<(usize, i64, i64)> {
    let of_run = |run: &Run| {
        let (path, position, token) = (run.path, run.position, run.token);
        (0..run.length).map(move |at| (path, position + at, token + at))
    };
    layout.held[rank].iter().flat_map(of_run).collect()
}

/// The token at a position.
fn token_at(layout: &Layout, path: usize, position: i64) -> i64 {
    layout.paths.cut(path, position, position + 1).next().unwrap().token
}

/// Rows written out.
fn listed(rows: &Rows, indices: &Indices) -> Vec<usize> {
    let (first, count) = (rows.first as usize, rows.count as usize);
    if rows.listed {
        return indices.rows[first..first + count].iter().map(|&row| row as usize).collect();
    }
    (first..first + count).collect()
}

/// The (query's row, key's row in its tensor, distance, index of the key among the call's) that a kernel computes.
fn computed(call: &Call, indices: &Indices) -> Vec<(usize, usize, i64, usize)> {
    let bounds = |at: usize| i64::from(indices.bounds[call.bounds + at]);
    let (queries, keys) = (listed(&call.queries, indices), listed(&call.keys, indices));
    // Queries that are neighbours are counted through the rank's rows.
    let first = if call.queries.listed { 0 } else { call.queries.first };
    assert_eq!((bounds(0), bounds(call.spans)), (first, first + queries.len() as i64));
    assert_eq!(bounds(2 * call.spans + 1), keys.len() as i64);
    let mut found = Vec::new();
    let (mut max_queries, mut max_keys) = (0, 0);
    for span in 0..call.spans {
        let (q_from, q_to) = (bounds(span) - first, bounds(span + 1) - first);
        let (k_from, k_to) = (bounds(call.spans + 1 + span), bounds(call.spans + 2 + span));
        let shift = bounds(2 * (call.spans + 1) + span);
        assert!(q_from < q_to && k_from < k_to);
        max_queries = max_queries.max(q_to - q_from);
        max_keys = max_keys.max(k_to - k_from);
        for q in 0..q_to - q_from {
            for k in 0..k_to - k_from {
                let distance = q + (k_to - k_from) - (q_to - q_from) - k;
                if (call.left < 0 || distance <= call.left) && (call.right < 0 || distance >= -call.right) {
                    let (q, k) = ((q_from + q) as usize, (k_from + k) as usize);
                    found.push((queries[q], keys[k], distance + shift, k));
                }
            }
        }
    }
    assert_eq!((max_queries, max_keys), (call.max_queries, call.max_keys));
    found
}

/// Checks pairs against the mask as they come, and that nothing is missing.
struct Seen<'a> {
    layout: &'a Layout,
    reach: Reach,
    biased: bool,
    rows: Vec<(usize, i64, i64)>,
    pairs: BTreeMap<(usize, i64), ()>,
    called: Vec<bool>,
}

impl<'a> Seen<'a> {
    fn of(layout: &'a Layout, rows: Vec<(usize, i64, i64)>, reach: Reach, biased: bool) -> Self {
        let called = vec![false; rows.len()];
        Self { layout, reach, biased, rows, pairs: BTreeMap::new(), called }
    }

    fn add(&mut self, call: &Call, indices: &Indices, token_of: impl Fn(usize) -> i64) {
        let queries = listed(&call.queries, indices);
        assert_eq!(call.fresh, queries.iter().all(|&row| !self.called[row]));
        let mut sorted = queries.clone();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(sorted.len(), queries.len(), "a query stands twice in a call");
        queries.iter().for_each(|&row| self.called[row] = true);
        for (query, key, distance, _) in computed(call, indices) {
            let (path, position, _) = self.rows[query];
            let key = token_of(key);
            assert_eq!(self.pairs.insert((query, key), ()), None, "a pair is computed twice");
            if self.biased {
                assert_eq!(token_at(self.layout, path, position - distance), key, "of another distance");
            }
        }
    }

    fn is_whole(&self) {
        let mut count = 0;
        for (row, &(path, position, _)) in self.rows.iter().enumerate() {
            let end = self.layout.paths.length(path);
            let from = (position - self.reach.left).max(0);
            for key in from..(position + self.reach.right + 1).min(end) {
                count += 1;
                assert!(self.pairs.contains_key(&(row, token_at(self.layout, path, key))), "a pair is missing");
            }
        }
        assert_eq!(count, self.pairs.len());
    }
}

const NOTHING: i64 = -1;

/// What a sum makes of numbers of rows.
fn summed(sum: &Sum, indices: &Indices, of: &[i64]) -> Vec<i64> {
    let rows = listed(&sum.rows, indices);
    if sum.begins.count == 0 {
        assert_eq!(rows.len() as i64, sum.count);
        return rows.iter().map(|&row| of[row]).collect();
    }
    let mut ends = listed(&sum.begins, indices);
    assert_eq!((ends.len() as i64, ends[0]), (sum.count, 0));
    ends.push(rows.len());
    assert!(ends.windows(2).all(|pair| pair[0] < pair[1]), "a row gets nothing");
    ends.windows(2).map(|pair| rows[pair[0]..pair[1]].iter().map(|&row| of[row]).sum()).collect()
}

/// Whether the parts of some query are merged.
fn keys_transports_are_the_mask(
    layout: &Layout,
    transport: Transport,
    reach: Reach,
    biased: bool,
    buckets: Option<Buckets>,
) -> bool {
    let size = layout.held.len();
    let is_tree = layout.held.iter().flatten().any(|run| layout.paths.pieces(run.path).len() > 1);
    let merges = is_tree && !biased && reach.left == Reach::UNLIMITED;
    let mut merged = false;
    let plans: Vec<KeysPlan> =
        (0..size).map(|rank| KeysPlan::of(layout, rank, transport, reach, biased, buckets).unwrap()).collect();
    // What is in every rank's buffer, by tokens.
    let own = |rank: usize| rows_of(layout, rank);
    let mut buffers: Vec<Vec<i64>> = Vec::new();
    for (rank, plan) in plans.iter().enumerate() {
        let mut buffer: Vec<i64> = own(rank)[plan.first as usize..].iter().map(|row| row.2).collect();
        assert!(plan.own_rows as usize >= buffer.len());
        buffer.resize(plan.own_rows as usize, NOTHING);
        buffers.push(buffer);
    }
    let sent: Vec<Vec<i64>> = plans
        .iter()
        .zip(&buffers)
        .map(|(plan, buffer)| listed(&plan.sent, &plan.indices).iter().map(|&row| buffer[row]).collect())
        .collect();
    let moves = plans.iter().any(|plan| plan.arriving_rows.iter().any(|&rows| rows > 0));
    for rank in 0..size {
        assert_eq!(plans[rank].moves, moves);
        for source in 0..size {
            let arrives = plans[rank].arriving_rows[source] as usize;
            let from: i64 = match transport {
                Transport::AllGather => 0,
                Transport::Fetch => plans[source].sent_rows[..rank].iter().sum(),
            };
            match transport {
                Transport::AllGather => assert_eq!(sent[source].len(), arrives),
                Transport::Fetch => assert_eq!(plans[source].sent_rows[rank] as usize, arrives),
            }
            let part = sent[source][from as usize..from as usize + arrives].to_vec();
            // What a rank's own rows bring back is not read.
            let read = if transport == Transport::AllGather && source == rank { vec![NOTHING; arrives] } else { part };
            buffers[rank].extend(read);
        }
    }
    // Of every rank the queries that see each key of its calls: they are its gradients. And of each token, of all.
    let mut of_calls: Vec<Vec<i64>> = Vec::new();
    let mut right: BTreeMap<i64, i64> = BTreeMap::new();
    for (rank, plan) in plans.iter().enumerate() {
        let mut seen = Seen::of(layout, own(rank), reach, biased);
        let mut gradients: Vec<i64> = Vec::new();
        for (place, call) in plan.local.iter().chain(&plan.remote).enumerate() {
            assert!(call.fresh || merges, "a query is in two calls");
            merged |= !call.fresh;
            let of_call = gradients.len();
            gradients.resize(of_call + call.keys.count as usize, 0);
            let token = |row: usize| if place < plan.local.len() { own(rank)[row].2 } else { buffers[rank][row] };
            seen.add(call, &plan.indices, |row| {
                assert_ne!(token(row), NOTHING);
                token(row)
            });
            for (_, row, _, key) in computed(call, &plan.indices) {
                gradients[of_call + key] += 1;
                *right.entry(token(row)).or_default() += 1;
            }
        }
        seen.is_whole();
        of_calls.push(gradients);
    }
    // Every gradient goes home.
    let going: Vec<Vec<i64>> =
        plans.iter().zip(&of_calls).map(|(plan, gradients)| summed(&plan.going, &plan.indices, gradients)).collect();
    for (rank, plan) in plans.iter().enumerate() {
        let mut gradients = of_calls[rank].clone();
        for (other, going) in going.iter().enumerate() {
            let rows = plans[other].going_rows[rank];
            assert_eq!(plan.coming_rows[other], rows);
            let from = plans[other].going_rows[..rank].iter().sum::<i64>() as usize;
            gradients.extend(&going[from..from + rows as usize]);
        }
        let found = summed(&plan.own, &plan.indices, &gradients);
        let expected: Vec<i64> = own(rank).iter().map(|row| right.get(&row.2).copied().unwrap_or(0)).collect();
        assert_eq!(found, expected);
    }
    merged
}

fn rings_are_the_mask(layout: &Layout, degree: usize, reach: Reach, biased: bool, buckets: Option<Buckets>) {
    let size = layout.held.len();
    let made: Vec<(Option<HeadsPlan>, RingPlan)> =
        (0..size).map(|rank| RingPlan::of(layout, rank, degree, reach, biased, buckets).unwrap()).collect();
    // The rows of each position.
    let mut positions: Vec<Vec<(usize, i64, i64)>> = Vec::new();
    for block in (0..size).collect::<Vec<_>>().chunks(degree) {
        let by_rank: Vec<_> = block.iter().flat_map(|&rank| rows_of(layout, rank)).collect();
        let mut rows = by_rank.clone();
        if degree > 1 {
            rows.sort_by_key(|row| row.2);
            for (place, &rank) in block.iter().enumerate() {
                let heads = made[rank].0.as_ref().unwrap();
                let (ascending, inverse) = heads.indices.rows.split_at(rows.len());
                assert_eq!(heads.place, place);
                assert!(rows.iter().zip(ascending).all(|(row, &from)| *row == by_rank[from as usize]));
                assert!(by_rank.iter().zip(inverse).all(|(row, &from)| *row == rows[from as usize]));
                let counts: Vec<i64> = block.iter().map(|&rank| rows_of(layout, rank).len() as i64).collect();
                assert_eq!(heads.counts, counts);
            }
        }
        positions.push(rows);
    }
    let count = positions.len();
    let mut last = vec![0; count];
    for (rank, (heads, plan)) in made.iter().enumerate() {
        assert_eq!(heads.is_some(), degree > 1);
        let position = rank / degree;
        let mut seen = Seen::of(layout, positions[position].clone(), reach, biased);
        assert_eq!(plan.steps.len(), count);
        for (step, calls) in plan.steps.iter().enumerate() {
            let of = (position + count - step) % count;
            assert_eq!(plan.rows[of] as usize, positions[of].len());
            calls.iter().for_each(|call| seen.add(call, &plan.indices, |row| positions[of][row].2));
            if !calls.is_empty() {
                last[of] = last[of].max(step);
            }
        }
        seen.is_whole();
    }
    assert!(made.iter().all(|(_, plan)| plan.last == last), "a hop serves nobody, or one is missing");
}

fn tokens_move_to_their_place(before: &Layout, after: &Layout) {
    let size = before.held.len();
    let plans: Vec<MovesPlan> = (0..size).map(|rank| MovesPlan::of(before, after, rank)).collect();
    let sent: Vec<Vec<i64>> = plans
        .iter()
        .enumerate()
        .map(|(rank, plan)| {
            let rows = rows_of(before, rank);
            listed(&plan.sent, &plan.indices).iter().map(|&row| rows[row].2).collect()
        })
        .collect();
    for (rank, plan) in plans.iter().enumerate() {
        let mut arrived: Vec<i64> = Vec::new();
        for (source, sent) in sent.iter().enumerate() {
            let from = plans[source].sent_rows[..rank].iter().sum::<i64>() as usize;
            assert_eq!(plans[source].sent_rows[rank], plan.arriving_rows[source]);
            arrived.extend(&sent[from..from + plan.arriving_rows[source] as usize]);
        }
        let placed: Vec<i64> = listed(&plan.placed, &plan.indices).iter().map(|&row| arrived[row]).collect();
        assert_eq!(placed, rows_of(after, rank).iter().map(|row| row.2).collect::<Vec<_>>());
    }
}

#[test]
fn plans_compute_every_pair_of_the_mask_once_and_bring_every_gradient_home() {
    let cases = std::env::var("WLB_EXECUTION_CASES").map_or(3000, |cases| cases.parse().unwrap());
    let mut merged = 0;
    for case in 0..cases {
        let dice = &mut Dice(case);
        let cp_size = 1 + dice.below(6);
        let layout = if dice.below(3) == 0 { forest(dice, cp_size) } else { documents(dice, cp_size) };
        let window = (dice.below(2) == 0).then(|| 1 + dice.below(12) as i64);
        let (reach, biased) = (layout.reach(window), dice.below(3) == 0);
        let buckets =
            (dice.below(2) == 0).then(|| Buckets { block: 1 + dice.below(3) as i64, call: dice.below(8) as i64 });
        match dice.below(4) {
            0 | 1 => {
                let transport = if dice.below(2) == 0 { Transport::AllGather } else { Transport::Fetch };
                merged += u64::from(keys_transports_are_the_mask(&layout, transport, reach, biased, buckets));
            }
            2 => {
                let degrees: Vec<usize> = (1..=cp_size).filter(|&degree| cp_size.is_multiple_of(degree)).collect();
                rings_are_the_mask(&layout, degrees[dice.below(degrees.len())], reach, biased, buckets);
            }
            _ => {
                let lengths = Lengths::new("lengths", &[1 + dice.below(30) as i64, 1 + dice.below(9) as i64]).unwrap();
                let mut cut = || {
                    let strategy = STRATEGIES[dice.below(4)];
                    let mask = Mask::Causal;
                    let options = ShardOptions { cp_size, strategy, mask, hybrid_threshold: None, max_imbalance: 1.01 };
                    Layout::of(&shard(&lengths, &options).unwrap())
                };
                tokens_move_to_their_place(&cut(), &cut());
            }
        }
    }
    assert!(merged > 0 || cases < 3000, "no case has a prefix");
}

/// Thread blocks that the calls start, another call counting as some: counted one by one.
fn started(buckets: Buckets, keys: &[i64], ends: &[usize]) -> i64 {
    let mut begin = 0;
    let mut total = 0;
    for &end in ends {
        let blocks = |keys: i64| (0..keys).step_by(buckets.block as usize).count() as i64;
        let longest = keys[begin..end].iter().map(|&keys| blocks(keys)).max().unwrap();
        total += buckets.call + longest * (end - begin) as i64;
        begin = end;
    }
    assert_eq!(begin, keys.len());
    total
}

#[test]
fn buckets_are_the_best_of_all_partitions() {
    for case in 0..3000 {
        let dice = &mut Dice(case);
        let buckets = Buckets { block: 1 + dice.below(4) as i64, call: dice.below(30) as i64 };
        let largest = 1 + dice.below(40);
        let keys: Vec<i64> = (0..1 + dice.below(9)).map(|_| 1 + dice.below(largest) as i64).collect();
        let all = (0..1_usize << (keys.len() - 1)).map(|cuts| {
            let inner = (1..keys.len()).filter(|at| cuts >> (at - 1) & 1 == 1);
            let ends: Vec<usize> = inner.chain([keys.len()]).collect();
            started(buckets, &keys, &ends)
        });
        let found = buckets.ends(&keys);
        let cost = started(buckets, &keys, &found);
        assert_eq!(cost, all.min().unwrap(), "{buckets:?} {keys:?} {found:?}");
    }
}

#[test]
fn buckets_of_many_lengths_are_near_the_best() {
    for case in 0..20 {
        let dice = &mut Dice(case);
        let buckets = Buckets { block: 128, call: 1024 };
        let keys: Vec<i64> = (0..1000)
            .map(|_| {
                let most = 1 << dice.below(17);
                1 + dice.below(most) as i64
            })
            .collect();
        let ends = buckets.ends(&keys);
        // The least cost of all partitions in order, by the plain recursion.
        let mut best = vec![0; keys.len() + 1];
        for end in 1..=keys.len() {
            let mut longest = 0;
            best[end] = i64::MAX;
            for begin in (0..end).rev() {
                longest = longest.max((keys[begin] + 127) / 128);
                best[end] = best[end].min(best[begin] + 1024 + longest * (end - begin) as i64);
            }
        }
        let cost = started(buckets, &keys, &ends);
        assert!(cost <= best[keys.len()] * 102 / 100, "{cost} for {}, {LEVELS} levels", best[keys.len()]);
    }
}
