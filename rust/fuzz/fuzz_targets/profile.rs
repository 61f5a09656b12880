//! Texts and edited profiles: refused, or models that work, and a choice by them that is the best there is.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| wlb_fuzz::profile(data));
