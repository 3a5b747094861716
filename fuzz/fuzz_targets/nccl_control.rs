//! `cargo +nightly fuzz run nccl_control`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| oxccl_fuzz::nccl::control(data));
