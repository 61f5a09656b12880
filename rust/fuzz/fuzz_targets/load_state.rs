//! Texts and edited states: refused, or a packer that works.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| wlb_fuzz::load_state(data));
