//! How fast the kernels are here: `cargo test --release -p backend-gloo kernels::rates -- --ignored --nocapture`.
//!
//! Prints the tables of docs/benchmarks/kernels.md; asserts nothing, because a figure of a busy machine says nothing.

use std::hint::black_box;
use std::time::Instant;

use super::*;

/// `f(out, a, b)`.
type Call<'a> = &'a dyn Fn(&mut [u8], &[u8], &[u8]);

/// GB/s of `bytes` per call: the best of several rounds, which is what the machine can do.
fn rate(bytes: usize, mut f: impl FnMut()) -> f64 {
    let calls = ((64 << 20) / bytes).max(2);
    let best = (0..7)
        .map(|_| {
            let start = Instant::now();
            (0..calls).for_each(|_| f());
            start.elapsed().as_secs_f64() / calls as f64
        })
        .fold(f64::MAX, f64::min);
    bytes as f64 / best / 1e9
}

#[test]
#[ignore = "measures; minutes of a quiet machine"]
fn widths_by_type_operation_and_size() {
    let widths = Width::available();
    println!("GB/s of the result, in place; {widths:?}");
    for (dtype, op) in [
        (DType::F32, ReduceOp::Sum),
        (DType::F32, ReduceOp::Max),
        (DType::F64, ReduceOp::Sum),
        (DType::BF16, ReduceOp::Sum),
        (DType::BF16, ReduceOp::Max),
        (DType::F16, ReduceOp::Sum),
        (DType::F16, ReduceOp::Max),
        (DType::I32, ReduceOp::Sum),
        (DType::I64, ReduceOp::Product),
        (DType::I8, ReduceOp::Min),
        (DType::U8, ReduceOp::Bor),
        (DType::Bool, ReduceOp::Sum),
    ] {
        print!("| {dtype} {op} |");
        for bytes in [64 << 10, 64 << 20] {
            let (mut into, from) = (vec![0u8; bytes], vec![0u8; bytes]);
            for width in &widths {
                let gbs = rate(bytes, || {
                    let (into, from) = (black_box(&mut into[..]), black_box(&from[..]));
                    width.reduce(dtype, op, Operands::InPlace { into, from }).unwrap();
                });
                print!(" {gbs:.1} |");
            }
        }
        println!();
    }
}

#[test]
#[ignore = "measures; minutes of a quiet machine"]
fn streamed_stores_by_size() {
    // In pieces, as a pipelined collective writes them; `b` is always the same piece, as if it had just come from a peer.
    const PIECE: usize = 256 << 10;
    println!("GB/s of the result, pieces of 256 KiB, second operand in cache");
    println!("| bytes | memcpy | copy | streamed | sum |");
    for bytes in [1 << 20, 2 << 20, 4 << 20, 8 << 20, 16 << 20, 64 << 20] {
        let (mut out, a, b) = (vec![1u8; bytes], vec![1u8; bytes], vec![1u8; PIECE]);
        let mut run = |f: Call<'_>| {
            rate(bytes, || {
                for (out, a) in out.chunks_mut(PIECE).zip(a.chunks(PIECE)) {
                    f(black_box(out), black_box(a), black_box(&b));
                }
            })
        };
        let sum = |out: &mut [u8], a: &[u8], b: &[u8]| {
            reduce_into(DType::F32, ReduceOp::Sum, out, a, b).unwrap();
        };
        println!(
            "| {} MiB | {:.1} | {:.1} | {:.1} | {:.1} |",
            bytes >> 20,
            run(&|out, _, b| out.copy_from_slice(b)),
            run(&|out, _, b| copy_bytes(out, b)),
            run(&|out, _, b| copy_stream(out, b)),
            run(&sum),
        );
    }
}
