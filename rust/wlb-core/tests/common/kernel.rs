//! A kernel's latency read off its tables one segment at a time, and the choice of a sharding by trying all of them.
#![allow(dead_code, reason = "each test file uses a part of it")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed unwrap is a failed test")]

use serde_json::{Value, json};
use wlb_core::cost::Passes;
use wlb_core::sharding::kernel::{KernelDescription, KernelModel, PassTable};
use wlb_core::sharding::{Segment, Strategy};
use wlb_core::{Lengths, Mask, Shard, ShardOptions, shard};

use super::check::{close, shard_is_legal};

/// Latencies are added up in whole numbers of these.
const TICKS_PER_SECOND: f64 = (1_u64 << 44) as f64;

/// The file of a measured kernel, with a `linear` part: seconds of these numbers of tokens, forward and backward.
pub(crate) fn profile(kernel: &KernelDescription, linear: Option<(&[i64], &[f64], &[f64])>) -> Value {
    let pass = |table: &PassTable| {
        json!({
            "tile": table.tile, "launch_seconds": table.launch_seconds, "median_seconds": table.median_seconds,
        })
    };
    let mut profile = json!({
        "format": "wlb.profile", "version": 1, "gpu": "Test GPU", "kernel": "test kernel", "causal": kernel.causal,
        "num_heads": kernel.num_heads, "num_kv_heads": kernel.num_kv_heads, "head_dim": kernel.head_dim,
        "query_lengths": kernel.query_lengths, "key_lengths": kernel.key_lengths,
        "forward": pass(&kernel.forward), "backward": pass(&kernel.backward), "versions": {"torch": "0"},
    });
    if let Some((tokens, forward, backward)) = linear {
        let pass = |seconds: &[f64]| json!({"median_seconds": seconds});
        profile["linear"] = json!({"tokens": tokens, "forward": pass(forward), "backward": pass(backward)});
    }
    profile
}

/// Pairs that a kernel computes of a segment: all queries of a tile see as many keys as the last of them.
fn computed_pairs(kernel: &KernelDescription, tile: i64, queries: i64, keys: i64) -> f64 {
    let (whole, rest) = (i128::from(queries / tile), i128::from(queries % tile != 0));
    let (tile, start, keys) = (i128::from(tile), i128::from(keys - queries), i128::from(keys));
    // Keys that the last queries of the whole tiles see: start + tile, start + 2 * tile, ...
    let seen = if kernel.causal { whole * start + tile * whole * (whole + 1) / 2 } else { whole * keys };
    (tile * (seen + rest * keys)) as f64
}

/// Seconds of one segment.
pub(crate) fn naive_seconds(kernel: &KernelDescription, queries: i32, keys: i32, passes: Passes) -> f64 {
    let tables: &[&PassTable] = match passes {
        Passes::Forward => &[&kernel.forward],
        Passes::Backward => &[&kernel.backward],
        Passes::ForwardBackward => &[&kernel.forward, &kernel.backward],
    };
    let (queries, keys) = (i64::from(queries), i64::from(keys));
    let mut sum = 0.0;
    for table in tables {
        let end = (queries + table.tile - 1) / table.tile * table.tile;
        let measured_next = kernel.query_lengths.iter().find(|&&length| length >= queries);
        let read_at = measured_next.map_or(end, |&next| end.min(next));
        for (row, row_weight) in neighbours(read_at, &kernel.query_lengths) {
            for (column, column_weight) in neighbours(keys, &kernel.key_lengths) {
                let measured = (column..).find(|&column| table.median_seconds[row][column].is_some()).unwrap();
                let pairs = computed_pairs(kernel, table.tile, kernel.query_lengths[row], kernel.key_lengths[measured]);
                let rate = table.median_seconds[row][measured].unwrap() / pairs;
                sum += row_weight * column_weight * rate * computed_pairs(kernel, table.tile, queries, keys);
            }
        }
    }
    sum
}

/// The grid points around a length and their weights, linear in one over the length.
fn neighbours(length: i64, grid: &[i64]) -> Vec<(usize, f64)> {
    let last = grid.len() - 1;
    if length <= grid[0] {
        return vec![(0, 1.0)];
    }
    match (1..grid.len()).find(|&above| length < grid[above]) {
        Some(above) => {
            let (low, high) = (grid[above - 1], grid[above]);
            let weight = (high * (length - low)) as f64 / (length * (high - low)) as f64;
            vec![(above - 1, 1.0 - weight), (above, weight)]
        }
        None => vec![(last, 1.0)],
    }
}

fn launch_seconds(kernel: &KernelDescription, passes: Passes) -> f64 {
    match passes {
        Passes::Forward => kernel.forward.launch_seconds,
        Passes::Backward => kernel.backward.launch_seconds,
        Passes::ForwardBackward => kernel.forward.launch_seconds + kernel.backward.launch_seconds,
    }
}

/// Seconds of a rank's segments, summed up naively.
pub(crate) fn naive_rank_seconds(kernel: &KernelDescription, shard: &Shard, rank: usize, passes: Passes) -> f64 {
    let launch = launch_seconds(kernel, passes);
    let of_segment = |segment: &Segment| {
        let keys = if kernel.causal { segment.end() } else { shard.lengths[segment.document as usize] };
        naive_seconds(kernel, segment.length, keys, passes)
    };
    let segments = &shard.ranks[rank];
    segments.iter().map(of_segment).sum::<f64>() + if segments.is_empty() { 0.0 } else { launch }
}

/// Everything that may be chosen, simplest first, with the ticks of its slowest rank.
fn all_choices(
    lengths: &Lengths,
    cp_size: usize,
    model: &KernelModel,
    strategy: Strategy,
    ticks_per_key: i64,
) -> Vec<(ShardOptions, f64)> {
    let mut distinct = lengths.to_vec();
    distinct.sort_unstable_by(|a, b| b.cmp(a));
    distinct.dedup();
    let mut thresholds: Vec<i64> = distinct.iter().map(|&length| i64::from(length)).collect();
    let shortest = thresholds.pop().unwrap_or(1);
    if let Some(&longest) = distinct.first() {
        thresholds.insert(0, i64::from(longest) + 1);
    }
    let searched =
        thresholds.iter().enumerate().filter(|&(number, _)| is_searched(number)).map(|(_, &threshold)| threshold);
    let hybrid = searched.map(|threshold| (Strategy::Hybrid, Some(threshold)));
    let ways: Vec<_> = if strategy == Strategy::Adaptive {
        let others = [Strategy::PerSequence, Strategy::PerDocument, Strategy::Auto];
        others.map(|strategy| (strategy, None)).into_iter().chain(hybrid).collect()
    } else {
        [(Strategy::Hybrid, Some(shortest))].into_iter().chain(hybrid).collect()
    };
    let timed = ways.into_iter().map(|(strategy, hybrid_threshold)| {
        let options = ShardOptions { cp_size, strategy, mask: model.mask(), hybrid_threshold, max_imbalance: 1.01 };
        let ticks = slowest(&shard(lengths, &options).unwrap(), model, ticks_per_key);
        (options, ticks)
    });
    timed.collect()
}

/// The first of those whose slowest rank takes the fewest ticks, and these.
pub(crate) fn best_choice(
    lengths: &Lengths,
    cp_size: usize,
    model: &KernelModel,
    strategy: Strategy,
    ticks_per_key: i64,
) -> (ShardOptions, f64) {
    let mut best: Option<(ShardOptions, f64)> = None;
    for choice in all_choices(lengths, cp_size, model, strategy, ticks_per_key) {
        if best.as_ref().is_none_or(|(_, least)| choice.1 < *least) {
            best = Some(choice);
        }
    }
    best.unwrap()
}

/// All of the first 64 thresholds, every second one up to 128, every third up to 192, and so on.
fn is_searched(number: usize) -> bool {
    let mut searched = 0;
    while searched < number {
        searched += 1 + searched / 64;
    }
    searched == number
}

/// Ticks of the slowest rank: its segments (without the launch, which every busy rank has), and what it fetches.
fn slowest(shard: &Shard, model: &KernelModel, ticks_per_key: i64) -> f64 {
    let launch = launch_seconds(model.description(), Passes::ForwardBackward);
    let of_rank = |(rank, seconds): (usize, f64)| {
        ((seconds - launch) * TICKS_PER_SECOND).round() + ticks_per_key as f64 * shard.keys_moved(rank) as f64
    };
    model.rank_seconds(shard, Passes::ForwardBackward).unwrap().into_iter().enumerate().map(of_rank).fold(0.0, f64::max)
}

/// The choice is the first of the best: exactly where seconds are few enough to tell ticks apart. Of more, where keys
/// are free, the slowest rank is still as fast as that of the best.
pub(crate) fn choice_is_the_best(lengths: &[i32], cp_size: usize, model: &KernelModel, ticks_per_key: i64) {
    let checked = Lengths::new("lengths", &lengths.iter().map(|&d| i64::from(d)).collect::<Vec<_>>()).unwrap();
    for strategy in [Strategy::Adaptive, Strategy::Hybrid] {
        let asked_for =
            ShardOptions { cp_size, strategy, mask: model.mask(), hybrid_threshold: None, max_imbalance: 1.01 };
        let chosen = asked_for.resolve(&checked, Some(model), ticks_per_key as f64 / TICKS_PER_SECOND).unwrap();
        let shard = shard(&checked, &chosen).unwrap();
        shard_is_legal(&shard, lengths);
        let ticks = slowest(&shard, model, ticks_per_key);
        let (first, least) = best_choice(&checked, cp_size, model, strategy, ticks_per_key);
        let seconds = least / TICKS_PER_SECOND + launch_seconds(model.description(), Passes::ForwardBackward);
        if seconds < 100.0 || ticks_per_key == 0 {
            assert_eq!(ticks, least, "{chosen:?}");
        }
        if seconds < 100.0 {
            assert_eq!(chosen, first);
        }
    }
}

/// Whatever a profile said: if it was accepted, the models work.
pub(crate) fn works_if_accepted(text: &str) {
    let Ok(model) = KernelModel::from_profile(text) else { return };
    assert_eq!(KernelModel::from_json(&model.to_json()).as_ref(), Ok(&model));
    let lengths = [1, 2, 127, 128, 129, 1000, 70_000, 1 << 30, i32::MAX];
    for passes in [Passes::Forward, Passes::Backward, Passes::ForwardBackward] {
        for queries in lengths {
            for keys in lengths.into_iter().filter(|&keys| keys >= queries) {
                let seconds = model.segment_seconds(queries, keys, passes);
                assert!(seconds > 0.0, "{queries} queries, {keys} keys: {seconds}");
                let expected = naive_seconds(model.description(), queries, keys, passes);
                assert!(seconds == expected || close(seconds, expected), "{queries} {keys}: {seconds}, not {expected}");
            }
        }
        if let Ok(cost) = wlb_core::CostModel::from_profile(text, passes) {
            let costs = [1, 1000, i32::MAX].map(|length| cost.cost(length));
            assert!(costs[0] > 0.0 && costs.is_sorted(), "{costs:?}");
            assert_eq!(cost.mask(), model.mask());
        }
    }
    let mask = model.mask();
    assert!(matches!(mask, Mask::Causal | Mask::Full));
    choice_is_the_best(&[1, 300, 5000, 300, 127], 3, &model, 1000);
}
