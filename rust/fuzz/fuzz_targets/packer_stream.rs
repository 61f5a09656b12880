//! A packer driven, saved, resumed and flushed beside its oracle.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| wlb_fuzz::packer_stream(data));
