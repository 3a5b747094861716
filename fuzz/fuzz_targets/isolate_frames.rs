//! `cargo +nightly fuzz run isolate_frames`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| oxccl_fuzz::isolate::frames(data));
