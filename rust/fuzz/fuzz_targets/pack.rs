//! One global batch by every method, against oracles and guarantees.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| wlb_fuzz::pack(data));
