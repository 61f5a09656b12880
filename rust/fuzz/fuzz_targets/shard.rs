//! A micro-batch by every strategy, against oracles and guarantees.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| wlb_fuzz::shard(data));
