//! The target `frames` under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ithaca_fuzz::frames(data));
