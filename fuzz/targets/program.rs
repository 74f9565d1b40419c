//! The target `program` under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ithaca_fuzz::program(data));
