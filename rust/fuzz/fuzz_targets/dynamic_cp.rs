//! A Dynamic-CP plan, against the naive validator and simulation.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| wlb_fuzz::dynamic_cp(data));
