//! The target `rules` under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ithaca_fuzz::rules(data));
