//! What is long asks whether it shall go on, also where it makes no plan.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::panic::{AssertUnwindSafe, UnwindSafe};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use wlb_core::packing::stream::{Oversize, Packer, PackerConfig, Release, StepShape, StreamMethod};
use wlb_core::packing::{batch_offsets, split_documents};
use wlb_core::sharding::Remainder;
use wlb_core::{
    CostModel, Error, Leftover, Lengths, Mask, Method, PackOptions, Packing, ShardOptions, Strategy, interruptible,
    pack, shard,
};

/// Several times what passes between two checks.
const DOCUMENTS: i64 = 1_000_000;

fn is_ended<T>(work: impl FnOnce() -> T + UnwindSafe) -> bool {
    matches!(interruptible(|| true, work), Err(Error::Interrupted))
}

#[test]
fn long_work_around_a_plan_is_ended() {
    let lengths: Vec<i64> = (0..DOCUMENTS).map(|index| 1 + index * 7919 % 2000).collect();
    let lengths = Lengths::new("lengths", &lengths).unwrap();
    let cost = CostModel::analytic(1.0, 100.0, Mask::Causal).unwrap();
    let (method, leftover) = (Method::VarLength, Leftover::Return);
    let options = PackOptions { num_micro_batches: 1000, max_tokens: 999_000, method, global_batches: 1, leftover };
    let packing = pack(&lengths, &options, &cost).unwrap();
    let assignment: Vec<i64> = packing.assignment.iter().map(|&micro_batch| i64::from(micro_batch)).collect();
    assert!(is_ended(|| packing.digest()));
    assert!(is_ended(|| packing.lower_bound()));
    assert!(is_ended(|| Packing::from_assignment(&lengths, &assignment, 1000, 999_000, &cost)));
    assert!(is_ended(|| split_documents(&lengths, 1000)));
    assert!(is_ended(|| batch_offsets(&lengths, 1 << 20)));
    // Nothing is left half done: what is asked for again is there.
    assert_eq!(packing.digest().len(), 64);
    assert!(packing.lower_bound() <= packing.step_cost());
}

/// A handler of signals may pack: that is its own work, of which the work that it interrupts is not asked.
#[test]
fn what_a_check_does_is_not_ended_by_it() {
    static DEPTH: AtomicU32 = AtomicU32::new(0);
    static ASKED: AtomicU32 = AtomicU32::new(0);
    let work = || {
        let lengths = Lengths::new("lengths", &vec![1; DOCUMENTS as usize]).unwrap();
        split_documents(&lengths, 1).unwrap().len()
    };
    let check = move || {
        assert_eq!(DEPTH.fetch_add(1, Ordering::Relaxed), 0, "asked while it is asked");
        assert_eq!(work(), DOCUMENTS as usize);
        DEPTH.fetch_sub(1, Ordering::Relaxed);
        ASKED.fetch_add(1, Ordering::Relaxed) == 1
    };
    assert!(matches!(interruptible(check, work), Err(Error::Interrupted)));
    assert_eq!(ASKED.load(Ordering::Relaxed), 2);
}

#[test]
fn the_hash_of_a_long_shard_is_ended() {
    let lengths = Lengths::new("lengths", &[2048; 1000]).unwrap();
    let options = ShardOptions {
        cp_size: 512,
        strategy: Strategy::PerDocument,
        mask: Mask::Causal,
        remainder: Remainder::Chunk,
        hybrid_threshold: None,
        max_imbalance: ShardOptions::MAX_IMBALANCE,
    };
    let cut = shard(&lengths, &options).unwrap();
    assert!(is_ended(|| cut.digest()));
}

/// How often some work asks.
fn checks(work: impl FnOnce() + UnwindSafe) -> u32 {
    let asked = Arc::new(AtomicU32::new(0));
    let seen = Arc::clone(&asked);
    let check = move || {
        seen.fetch_add(1, Ordering::Relaxed);
        false
    };
    interruptible(check, work).unwrap();
    asked.load(Ordering::Relaxed)
}

/// A state has four numbers for each document, which are written or read, and hashed as text: a check for 32,768 of
/// them, each time.
#[test]
fn a_state_is_written_and_read_with_checks() {
    let config = PackerConfig {
        num_micro_batches: 1 << 20, // so many in a level leave it together
        max_tokens: 4000,
        max_document_tokens: 4000,
        oversize: Oversize::default(),
        outlier_thresholds: vec![100],
        release: Release::Fifo,
        delay_price: None,
        max_delay: None,
        method: StreamMethod::VarLength,
        cost_model: Some(CostModel::analytic(1.0, 100.0, Mask::Causal).unwrap()),
        limits: None,
        shape: StepShape::default(),
    };
    let mut packer = Packer::new(config.clone()).unwrap();
    let lengths: Vec<i64> = (0..DOCUMENTS).map(|index| 1 + index * 7919 % 2000).collect();
    packer.push(&Lengths::new("lengths", &lengths).unwrap(), None).unwrap();
    let text = packer.save();
    let each_pass = (packer.pending() * 4 / 32_768) as u32;
    assert!(checks(|| drop(packer.save())) >= 2 * each_pass);
    assert!(checks(|| drop(Packer::load(&text).unwrap())) >= 2 * each_pass);
    // Filed anew by other thresholds: sorted twice.
    let mut other = Packer::new(PackerConfig { outlier_thresholds: vec![1000], ..config }).unwrap();
    let changed = checks(AssertUnwindSafe(|| other.restore(&text, true).unwrap()));
    assert!(changed > checks(|| drop(Packer::load(&text).unwrap())));
}
