//! Latency of attention kernels, and what is chosen by it.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common::check::close;
use crate::common::kernel::{choice_is_the_best, naive_rank_seconds, naive_seconds, profile, works_if_accepted};
use crate::common::strategies::{checked, config, kernel, kernel_model, lengths, mask};
use proptest::prelude::*;
use proptest::sample::{Index, select};
use wlb_core::cost::Passes;
use wlb_core::sharding::kernel::{Generation, KernelModel};
use wlb_core::{CostModel, Error, Mask, ShardOptions, Strategy as Cut, shard};

fn passes() -> impl Strategy<Value = Passes> {
    select(vec![Passes::Forward, Passes::Backward, Passes::ForwardBackward])
}

fn segment() -> impl Strategy<Value = (i32, i32)> {
    let length = || prop_oneof![1..300, 1..20_000, 1..=i32::MAX];
    (length(), length()).prop_map(|(a, b): (i32, i32)| (a.min(b), a.max(b)))
}

fn options(strategy: Cut, cp_size: usize, mask: Mask) -> ShardOptions {
    ShardOptions { cp_size, strategy, mask, hybrid_threshold: None, max_imbalance: 1.01 }
}

/// What a key costs to fetch, in ticks of 2^-44 s: nothing, up to a microsecond.
fn ticks_per_key() -> impl Strategy<Value = i64> {
    (0_u32..25).prop_flat_map(|bits| 0..1_i64 << bits)
}

fn analytic(generation: Generation, mask: Mask) -> KernelModel {
    KernelModel::analytic(generation, 32, 8, 128, mask).unwrap()
}

proptest! {
    #![proptest_config(config(250))]

    /// The formula written out, at any segment.
    #[test]
    fn a_segment_is_the_formula(kernel in kernel(), (queries, keys) in segment(), passes in passes()) {
        let model = KernelModel::new(kernel.clone()).unwrap();
        let seconds = model.segment_seconds(queries, keys, passes);
        prop_assert!(close(seconds, naive_seconds(&kernel, queries, keys, passes)), "{seconds}");
    }

    /// At a grid point the model is the measurement; forward and backward add up.
    #[test]
    fn measurements_are_reproduced(kernel in kernel(), row in any::<Index>(), column in any::<Index>()) {
        let model = KernelModel::new(kernel.clone()).unwrap();
        let (row, column) = (row.index(kernel.query_lengths.len()), column.index(kernel.key_lengths.len()));
        let (queries, keys) = (kernel.query_lengths[row] as i32, kernel.key_lengths[column] as i32);
        if let Some(forward) = kernel.forward.median_seconds[row][column] {
            let backward = kernel.backward.median_seconds[row][column].unwrap();
            let within = |a: f64, b: f64| (a - b).abs() <= 1e-14 * b;
            prop_assert!(within(model.segment_seconds(queries, keys, Passes::Forward), forward));
            prop_assert!(within(model.segment_seconds(queries, keys, Passes::Backward), backward));
            prop_assert!(within(model.segment_seconds(queries, keys, Passes::ForwardBackward), forward + backward));
        }
    }

    /// At a constant rate, a segment takes as long as one more query does until a tile is full, but for the keys that
    /// the query brings; another tile takes longer. Segments within one tile take the same over the same keys.
    #[test]
    fn whole_tiles_are_computed(tile in 1_i64..300, start in 0..1_000_000, queries in 1..10_000, mask in mask()) {
        let mut kernel = analytic(Generation::A100, mask).description().clone();
        (kernel.query_lengths, kernel.key_lengths) = (vec![128], vec![128]);
        for table in [&mut kernel.forward, &mut kernel.backward] {
            (table.tile, table.median_seconds) = (tile, vec![vec![Some(1e-6)]]);
        }
        let model = KernelModel::new(kernel).unwrap();
        let seconds = |queries: i32, keys: i32| model.segment_seconds(queries, keys, Passes::Forward);
        let last_of_tile = ((i64::from(queries) + tile - 1) / tile * tile) as i32;
        let end = start + last_of_tile;
        prop_assert!(seconds(queries, start + queries) <= seconds(last_of_tile, end));
        prop_assert!(seconds(last_of_tile, end) < seconds(last_of_tile + 1, end + 1));
        let one = queries.min(tile as i32);
        prop_assert_eq!(seconds(1, end), seconds(one, end));
    }

    #[test]
    fn a_rank_is_the_sum_of_its_segments(
        kernel in kernel(), lengths in lengths(12, 3000), cp_size in 1_usize..9, passes in passes(), way in 0_usize..2,
    ) {
        let model = KernelModel::new(kernel.clone()).unwrap();
        let strategy = [Cut::PerSequence, Cut::PerDocument][way];
        let shard = shard(&checked(&lengths), &options(strategy, cp_size, model.mask())).unwrap();
        let seconds = model.rank_seconds(&shard, passes).unwrap();
        for (rank, &seconds) in seconds.iter().enumerate() {
            // A segment is rounded to 57 femtoseconds.
            let rounding = 6e-14 * shard.ranks[rank].len() as f64;
            let expected = naive_rank_seconds(&kernel, &shard, rank, passes);
            prop_assert!((seconds - expected).abs() <= rounding + 1e-9 * expected, "{seconds}, not {expected}");
        }
        let other = if model.mask() == Mask::Causal { Mask::Full } else { Mask::Causal };
        let wrong = wlb_core::shard(&checked(&lengths), &options(strategy, cp_size, other)).unwrap();
        prop_assert_eq!(model.rank_seconds(&wrong, passes).unwrap_err().argument(), "shard");
    }

    /// Brute force over every strategy and every threshold that is searched.
    #[test]
    fn the_choice_is_the_best(
        lengths in prop_oneof![lengths(30, 300), lengths(30, 20_000)],
        cp_size in 1_usize..17,
        model in kernel_model(),
        ticks_per_key in ticks_per_key(),
    ) {
        choice_is_the_best(&lengths, cp_size, &model, ticks_per_key);
    }

    #[test]
    fn a_model_survives_json(model in kernel_model(), (queries, keys) in segment(), passes in passes()) {
        let again = KernelModel::from_json(&model.to_json()).unwrap();
        let seconds = |model: &KernelModel| model.segment_seconds(queries, keys, passes).to_bits();
        prop_assert_eq!(seconds(&again), seconds(&model));
        prop_assert_eq!(again, model);
    }

    /// Both models from one file: the kernel's own, and documents on one rank beside what was measured of the rest.
    #[test]
    fn a_profile_makes_both_models(
        kernel in kernel(), mut knots in proptest::collection::vec((1_i64..5000, 1e-6..1e-3, 1e-6..1e-3), 1..5),
        passes in passes(),
    ) {
        for i in 1..knots.len() {
            knots[i].0 += knots[i - 1].0;
            knots[i].1 += knots[i - 1].1;
            knots[i].2 += knots[i - 1].2;
        }
        let tokens: Vec<i64> = knots.iter().map(|knot| knot.0).collect();
        let (forward, backward): (Vec<f64>, Vec<f64>) = knots.iter().map(|knot| (knot.1, knot.2)).unzip();
        let text = profile(&kernel, Some((&tokens, &forward, &backward))).to_string();
        works_if_accepted(&text);
        let mut read = KernelModel::from_profile(&text).unwrap().description().clone();
        prop_assert_eq!(read.source, "measured: Test GPU test kernel");
        read.source = kernel.source.clone();
        prop_assert_eq!(&read, &kernel);

        let cost = CostModel::from_profile(&text, passes).unwrap();
        for (index, &count) in tokens.iter().enumerate() {
            let expected = match passes {
                Passes::Forward => forward[index],
                Passes::Backward => backward[index],
                Passes::ForwardBackward => forward[index] + backward[index],
            };
            prop_assert!(close(cost.linear_cost(count as i32), expected));
        }
        let mut most = 0.0_f64;
        let mut all = [&kernel.query_lengths[..], &kernel.key_lengths[..]].concat();
        all.sort_unstable();
        for length in all.iter().map(|&length| length as i32) {
            most = most.max(naive_seconds(&kernel, length, length, passes));
            prop_assert!(close(cost.attention_cost(length), most));
        }
        let attention_only = profile(&kernel, None).to_string();
        let error = CostModel::from_profile(&attention_only, passes).unwrap_err();
        let refused = matches!(error, Error::Profile { path, .. } if path == "linear");
        prop_assert!(refused);
    }

    /// One damaged number anywhere, or a file cut short: an error that says where, or models that work.
    #[test]
    fn a_damaged_profile_is_refused_or_works(
        kernel in kernel(),
        at in any::<Index>(),
        number in damage(),
        cut in any::<Index>(),
    ) {
        let text = profile(&kernel, Some((&[100, 200], &[1e-5, 2e-5], &[2e-5, 4e-5]))).to_string();
        let spans = crate::common::forge::numbers(&text);
        let mut damaged = text.clone();
        damaged.replace_range(spans[at.index(spans.len())].clone(), &number);
        works_if_accepted(&damaged);
        let short = text.get(..cut.index(text.len())).unwrap_or_default();
        let refused = matches!(KernelModel::from_profile(short), Err(Error::Profile { .. }));
        prop_assert!(refused);
    }
}

proptest! {
    #![proptest_config(config(20))]

    /// More than 64 distinct lengths.
    #[test]
    fn the_choice_among_many_is_the_best_searched(
        lengths in proptest::collection::vec(prop_oneof![1..2000, 1..30_000], 65..300),
        cp_size in 1_usize..9,
        model in kernel_model(),
        ticks_per_key in ticks_per_key(),
    ) {
        choice_is_the_best(&lengths, cp_size, &model, ticks_per_key);
    }

    /// Lengths whose latency no clock of ticks can hold.
    #[test]
    fn long_sequences_have_a_choice(
        lengths in lengths(30, 70_000_000),
        cp_size in 1_usize..40,
        model in kernel_model(),
        ticks_per_key in ticks_per_key(),
    ) {
        choice_is_the_best(&lengths, cp_size, &model, ticks_per_key);
    }
}

fn damage() -> impl Strategy<Value = String> {
    let named = ["0", "-1", "1e-320", "1e308", "2147483648", "9223372036854775808", "0.5", "null", "[]", "\"1\"", "3"];
    prop_oneof![select(named.map(str::to_owned).to_vec()), (0_i64..5000).prop_map(|number| number.to_string())]
}

/// The choice follows the latencies: long documents are cut where they would wait for each other, short ones are not
/// where tiles would be wasted.
#[test]
fn every_strategy_is_chosen_somewhere() {
    let model = analytic(Generation::H100, Mask::Causal);
    let choice = |lengths: &[i32]| {
        let chosen = options(Cut::Adaptive, 8, Mask::Causal).resolve(&checked(lengths), Some(&model), 0.0).unwrap();
        (chosen.strategy, chosen.hybrid_threshold)
    };
    assert_eq!(choice(&[100_000]), (Cut::PerSequence, None), "a tie of all: the simplest");
    assert_eq!(choice(&[]), (Cut::PerSequence, None));
    assert_eq!(choice(&[65_536, 65_536]), (Cut::PerDocument, None));
    let mixed: Vec<i32> = [60_000].into_iter().chain([500; 64]).collect();
    assert_eq!(choice(&mixed), (Cut::Auto, None));
    let few: Vec<i32> = [10_000].into_iter().chain([3000; 8]).collect();
    assert_eq!(choice(&few), (Cut::Hybrid, Some(10_000)), "one short document each, and the long one for all");
}

/// The published rates that the H100 default claims to follow, within the 5 % that it claims.
#[test]
fn the_h100_default_is_near_published_rates() {
    let rate = |mask: Mask, tokens: i32, passes: Passes, work: f64| {
        let seconds = analytic(Generation::H100, mask).segment_seconds(tokens, tokens, passes);
        mask.pairs_f64(tokens) * (4 * 32 * 128) as f64 * work / seconds / 1e12
    };
    for (tokens, published) in [(1024, 423.0), (2048, 521.0), (4096, 579.0), (8192, 602.0)] {
        let ratio = rate(Mask::Causal, tokens, Passes::Forward, 1.0) / published;
        assert!((0.95..1.05).contains(&ratio), "forward, {tokens}: {ratio}");
    }
    for (tokens, published) in [(1024, 424.0), (2048, 501.0), (4096, 542.0), (8192, 559.0)] {
        let ratio = rate(Mask::Full, tokens, Passes::Backward, 2.5) / published;
        assert!((0.95..1.05).contains(&ratio), "backward, {tokens}: {ratio}");
    }
}

#[test]
fn other_heads_scale_the_times() {
    let model = analytic(Generation::B200, Mask::Causal);
    let fewer = model.with_num_heads(4).unwrap();
    let ratio = fewer.segment_seconds(300, 5000, Passes::Forward) / model.segment_seconds(300, 5000, Passes::Forward);
    assert!(close(ratio, 0.125));
    assert_eq!(fewer.description().num_heads, 4);
    assert_eq!(model.with_num_heads(0).unwrap_err().argument(), "num_heads");
    let error = KernelModel::analytic(Generation::A100, 32, 5, 128, Mask::Causal).unwrap_err();
    assert_eq!(error.argument(), "num_kv_heads");
}

#[test]
fn an_idle_rank_takes_no_time() {
    let model = analytic(Generation::H100, Mask::Causal);
    let one = shard(&checked(&[1]), &options(Cut::PerDocument, 4, Mask::Causal)).unwrap();
    let seconds = model.rank_seconds(&one, Passes::Forward).unwrap();
    assert!(seconds[0] > 5e-6 && seconds[1..] == [0.0; 3], "{seconds:?}");
}

#[test]
fn a_kernel_model_is_given_where_it_means_something() {
    let model = analytic(Generation::H100, Mask::Causal);
    let lengths = checked(&[5, 6]);
    let adaptive = options(Cut::Adaptive, 2, Mask::Causal);
    let argument = |options: &ShardOptions| options.resolve(&lengths, Some(&model), 0.0).unwrap_err().argument();
    assert_eq!(argument(&options(Cut::PerDocument, 2, Mask::Causal)), "kernel_model");
    assert_eq!(argument(&options(Cut::Adaptive, 2, Mask::Full)), "kernel_model");
    assert_eq!(
        argument(&ShardOptions { hybrid_threshold: Some(5), ..options(Cut::Hybrid, 2, Mask::Causal) }),
        "kernel_model"
    );
    assert_eq!(argument(&ShardOptions { hybrid_threshold: Some(5), ..adaptive.clone() }), "hybrid_threshold");
    assert_eq!(argument(&ShardOptions { cp_size: 0, ..adaptive.clone() }), "cp_size");
    assert_eq!(argument(&ShardOptions { cp_size: usize::MAX, ..adaptive.clone() }), "cp_size");
    let too_long = adaptive.resolve(&checked(&[i32::MAX, 1]), Some(&model), 0.0).unwrap_err();
    assert_eq!(too_long, Error::TotalTooLong { argument: "lengths", total: 1 << 31 });
    assert_eq!(adaptive.resolve(&lengths, None, 0.0).as_ref(), Ok(&adaptive));
    assert_eq!(shard(&lengths, &adaptive).unwrap_err().argument(), "kernel_model");
}

/// Where some way to cut fetches nothing, a high price finds it.
#[test]
fn dear_keys_are_not_fetched() {
    let lengths = checked(&[[4096; 4], [1024; 4]].concat());
    for mask in [Mask::Causal, Mask::Full] {
        let model = analytic(Generation::H100, mask);
        let most_moved = |options: &ShardOptions| {
            let shard = shard(&lengths, options).unwrap();
            (0..4).map(|rank| shard.keys_moved(rank)).max().unwrap()
        };
        let chosen = |strategy, price| options(strategy, 4, mask).resolve(&lengths, Some(&model), price).unwrap();
        for strategy in [Cut::Adaptive, Cut::Hybrid] {
            assert_eq!(most_moved(&chosen(strategy, 1e-3)), 0, "{strategy:?}");
        }
        assert!(most_moved(&options(Cut::PerDocument, 4, mask)) > 0);
    }
}

#[test]
fn a_price_is_seconds_where_a_kernel_model_decides() {
    let model = analytic(Generation::H100, Mask::Causal);
    let lengths = checked(&[5, 6]);
    let adaptive = options(Cut::Adaptive, 2, Mask::Causal);
    for price in [-1e-9, 1.1e-3, f64::NAN, f64::INFINITY] {
        let error = adaptive.resolve(&lengths, Some(&model), price).unwrap_err();
        assert!(matches!(error, Error::Number { argument: "cp_seconds_per_key", .. }), "{error}");
    }
    let unpriced = options(Cut::PerDocument, 2, Mask::Causal);
    assert_eq!(unpriced.resolve(&lengths, None, 1e-9).unwrap_err().argument(), "cp_seconds_per_key");
    assert_eq!(adaptive.resolve(&lengths, None, 1e-9).as_ref(), Ok(&adaptive));
    // More ticks than sums hold.
    adaptive.resolve(&checked(&[i32::MAX]), Some(&model), 1e-3).unwrap();
}

/// The place in the file is named.
#[test]
fn what_is_wrong_with_a_profile_is_named() {
    let kernel = analytic(Generation::H100, Mask::Causal).description().clone();
    let good = profile(&kernel, Some((&[100, 200], &[1e-5, 2e-5], &[2e-5, 4e-5])));
    let wrong = |edit: &dyn Fn(&mut serde_json::Value)| {
        let mut profile = good.clone();
        edit(&mut profile);
        match CostModel::from_profile(&profile.to_string(), Passes::Forward) {
            Err(Error::Profile { path, .. }) => path,
            other => format!("{other:?}"),
        }
    };
    assert_eq!(wrong(&|p| p["format"] = "wlb.cost_profile".into()), "format");
    assert_eq!(wrong(&|p| p["version"] = 2.into()), "version");
    assert_eq!(wrong(&|p| p["backward"]["tile"] = 0.into()), "backward.tile");
    assert_eq!(wrong(&|p| p["query_lengths"][2] = 256.into()), "query_lengths[2]");
    assert_eq!(wrong(&|p| p["query_lengths"][6] = (1 << 25).into()), "query_lengths[6]");
    assert_eq!(wrong(&|p| p["key_lengths"] = serde_json::json!([])), "key_lengths");
    assert_eq!(wrong(&|p| p["forward"]["median_seconds"][0][3] = (-1.0).into()), "forward.median_seconds[0][3]");
    assert_eq!(wrong(&|p| p["forward"]["median_seconds"][0][3] = ().into()), "forward.median_seconds[0][3]");
    assert_eq!(wrong(&|p| p["backward"]["median_seconds"][6][0] = 1.0.into()), "backward.median_seconds[6][0]");
    assert_eq!(wrong(&|p| p["backward"]["median_seconds"][6][0] = "x".into()), "backward.median_seconds[6][0]");
    assert_eq!(wrong(&|p| p["backward"]["median_seconds"][1] = serde_json::json!([1.0])), "backward.median_seconds[1]");
    assert_eq!(wrong(&|p| p["backward"]["launch_seconds"] = (-1.0).into()), "backward.launch_seconds");
    assert_eq!(wrong(&|p| p["linear"]["tokens"][1] = 100.into()), "linear.tokens[1]");
    assert_eq!(
        wrong(&|p| p["linear"]["backward"]["median_seconds"][1] = 0.into()),
        "linear.backward.median_seconds[1]"
    );
    assert_eq!(wrong(&|p| p["unknown"] = 1.into()), "unknown");
}
