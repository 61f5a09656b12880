//! A micro-batch cut for context-parallel ranks: every strategy against its oracle and its guarantees.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common::check::{shard_every_way, shard_is_legal};
use crate::common::strategies::{checked, config, lengths, mask};
use proptest::prelude::*;
use proptest::sample::{Index, select};
use wlb_core::{Error, Mask, Shard, ShardOptions, Strategy as Cut, shard};

/// Sizes of context-parallel groups: powers of two mostly.
fn cp_size() -> impl Strategy<Value = usize> {
    prop_oneof![3 => select(vec![1_usize, 2, 4, 8, 16, 32]), 2 => 1_usize..13]
}

fn per_document(lengths: &[i32], cp_size: usize) -> Shard {
    let options = ShardOptions {
        cp_size,
        strategy: Cut::PerDocument,
        mask: Mask::Causal,
        hybrid_threshold: None,
        max_imbalance: 1.01,
    };
    shard(&checked(lengths), &options).unwrap()
}

/// Lengthens the last document until `2 * cp` divides the total.
fn round_up(lengths: &mut [i32], cp_size: usize) {
    let slots = 2 * cp_size as i64;
    let total: i64 = lengths.iter().map(|&length| i64::from(length)).sum();
    if let Some(last) = lengths.last_mut() {
        *last += ((slots - total % slots) % slots) as i32;
    }
}

proptest! {
    #![proptest_config(config(250))]

    /// The oracle's segments, a disjoint cover, tokens within one, bounds on the pairs, legal kernel arrays, and
    /// `restore_indices` the inverse permutation.
    #[test]
    fn shards_are_the_oracles(
        mut lengths in prop_oneof![lengths(40, 300), lengths(12, 3000)], cp_size in cp_size(), mask in mask(),
        threshold in prop_oneof![1_i64..400, 1_i64..3500, Just(1 << 31)], at in any::<Option<Index>>(),
        divisible in any::<bool>(),
    ) {
        if divisible {
            round_up(&mut lengths, cp_size);
        }
        // A document of exactly the threshold is long.
        let exact = at.filter(|_| !lengths.is_empty()).map(|at| i64::from(*at.get(&lengths)));
        shard_every_way(&lengths, cp_size, mask, exact.unwrap_or(threshold), true);
    }

    /// The guarantees for sequences that nobody would write out.
    #[test]
    fn long_sequences_keep_the_guarantees(
        lengths in lengths(30, 70_000_000), cp_size in prop_oneof![4 => cp_size(), 1 => 1_usize..300], mask in mask(),
        threshold in 1_i64..70_000_000,
    ) {
        shard_every_way(&lengths, cp_size, mask, threshold, false);
    }

    /// Pairs are equal on all ranks when `2 * cp` divides every document.
    #[test]
    fn divisible_documents_are_balanced_exactly(lengths in lengths(30, 100_000), cp_size in cp_size()) {
        let divisible = lengths.iter().map(|length| length * 2 * cp_size as i32 % 60_000_000);
        let lengths: Vec<i32> = divisible.filter(|&d| d > 0).collect();
        let shard = per_document(&lengths, cp_size);
        prop_assert!((0..cp_size).all(|rank| shard.pairs(rank) == shard.pairs(0)));
    }

    /// One document is balanced, whatever the strategy that cuts it.
    #[test]
    fn one_document_is_cut_alike_by_all(length in prop_oneof![1..200, 1..=i32::MAX], cp_size in cp_size()) {
        let by_document = per_document(&[length], cp_size);
        for (strategy, hybrid_threshold) in [(Cut::PerSequence, None), (Cut::Hybrid, Some(1))] {
            let options = ShardOptions {
                cp_size,
                strategy,
                mask: Mask::Causal,
                        hybrid_threshold, max_imbalance: 1.01,
            };
            prop_assert_eq!(&shard(&checked(&[length]), &options).unwrap().ranks, &by_document.ranks);
        }
    }

    /// Equal digests iff equal shards.
    #[test]
    fn a_digest_tells_shards_apart(
        lengths in lengths(6, 8), a in (1_usize..4, 0_usize..3, mask()), b in (1_usize..4, 0_usize..3, mask()),
    ) {
        let run = |(cp_size, way, mask): (usize, usize, Mask)| {
            let strategy = [Cut::PerSequence, Cut::PerDocument, Cut::Hybrid][way];
            let hybrid_threshold = (strategy == Cut::Hybrid).then_some(4);
            let options = ShardOptions { cp_size, strategy, mask, hybrid_threshold, max_imbalance: 1.01 };
            shard(&checked(&lengths), &options).unwrap()
        };
        let (a, b) = (run(a), run(b));
        prop_assert_eq!(a.digest() == b.digest(), (&a.ranks, a.mask) == (&b.ranks, b.mask));
    }
}

/// The gap bound at its worst: every pattern of small remainders.
#[test]
fn small_documents_are_tried_exhaustively() {
    for cp_size in 1..4 {
        for code in 0..9_i32.pow(4) {
            let digits = [code % 9, code / 9 % 9, code / 81 % 9, code / 729];
            let lengths: Vec<i32> = digits.into_iter().filter(|&d| d > 0).collect();
            if code % 7 == 0 {
                shard_every_way(&lengths, cp_size, Mask::Causal, 4, true);
            } else {
                shard_is_legal(&per_document(&lengths, cp_size), &lengths);
                crate::common::check::per_document_is_balanced(&per_document(&lengths, cp_size));
            }
        }
    }
}

#[test]
fn the_longest_sequence_is_cut() {
    for lengths in [vec![i32::MAX], vec![1, i32::MAX - 1], vec![1 << 30, (1 << 30) - 1], vec![715_827_882; 3]] {
        for cp_size in [1, 2, 7, 64] {
            shard_every_way(&lengths, cp_size, Mask::Causal, 1 << 30, false);
            shard_every_way(&lengths, cp_size, Mask::Full, 1 << 31, false);
        }
    }
}

#[test]
fn nothing_is_shared_out_as_nothing() {
    shard_every_way(&[], 4, Mask::Causal, 5, true);
}

#[test]
fn wrong_options_are_named() {
    let good = ShardOptions {
        cp_size: 2,
        strategy: Cut::PerDocument,
        mask: Mask::Causal,
        hybrid_threshold: None,
        max_imbalance: 1.01,
    };
    let argument = |options: ShardOptions| shard(&checked(&[5]), &options).unwrap_err().argument();
    assert_eq!(argument(ShardOptions { cp_size: 0, ..good.clone() }), "cp_size");
    assert_eq!(argument(ShardOptions { cp_size: usize::MAX, ..good.clone() }), "cp_size");
    assert_eq!(argument(ShardOptions { strategy: Cut::Hybrid, ..good.clone() }), "hybrid_threshold");
    assert_eq!(argument(ShardOptions { hybrid_threshold: Some(5), ..good.clone() }), "hybrid_threshold");
    let hybrid = ShardOptions { strategy: Cut::Hybrid, hybrid_threshold: Some(0), ..good.clone() };
    assert_eq!(argument(hybrid), "hybrid_threshold");
    let too_long = shard(&checked(&[i32::MAX, 1]), &good).unwrap_err();
    assert_eq!(too_long, Error::TotalTooLong { argument: "lengths", total: 1 << 31 });
    assert_eq!(per_document(&[5], 2).rank(2).unwrap_err().argument(), "rank");
    assert_eq!(per_document(&[5], 2).rank(usize::MAX).unwrap_err().argument(), "rank");
}
