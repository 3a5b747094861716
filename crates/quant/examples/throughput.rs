//! Prints how fast one core encodes and decodes each format, in GB/s of f32, beside memcpy and an f32 addition in the same run.
//!
//! `cargo run --release -p oxccl-quant --example throughput [--all] [FORMAT …]`; `--all` shows every instruction set that the machine has. Data
//! is in memory (64 MiB of f32, larger than any cache of one core). Time is this thread's processor time, so that other programs count
//! only by what they take of caches and memory; the figure is the best of the repetitions.

use std::hint::black_box;

use oxccl_quant::{Codec, Encoding, Simd};

const COUNT: usize = 16 << 20;
const REPETITIONS: usize = 9;

/// This thread's processor time in seconds.
fn now() -> f64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    t.tv_sec as f64 + t.tv_nsec as f64 / 1e9
}

/// GB/s of `COUNT` f32, in the best repetition.
fn rate(mut work: impl FnMut()) -> f64 {
    work();
    let seconds = (0..REPETITIONS).map(|_| {
        let begun = now();
        work();
        now() - begun
    });
    (COUNT * 4) as f64 / seconds.fold(f64::INFINITY, f64::min) / 1e9
}

fn main() -> ftcore::Result<()> {
    let (flags, names): (Vec<_>, Vec<_>) = std::env::args().skip(1).partition(|a| a.starts_with('-'));
    let all = flags.iter().any(|f| f == "--all");
    let mut codecs = names
        .iter()
        .map(|n| n.parse())
        .collect::<ftcore::Result<Vec<Codec>>>()?;
    if codecs.is_empty() {
        codecs.extend(Codec::ALL);
    }
    let values: Vec<f32> = (0..COUNT)
        .map(|i| {
            let bits = (i as u32).wrapping_mul(0x9E37_79B9) ^ 0x5bd1_e995;
            (bits as f32 / u32::MAX as f32 - 0.5) * 4.0
        })
        .collect();
    let mut out = vec![0.0f32; COUNT];
    let copy = rate(|| black_box(&mut out).copy_from_slice(black_box(&values)));
    let add = rate(|| {
        for (to, v) in black_box(&mut out).iter_mut().zip(black_box(&values)) {
            *to += v;
        }
    });
    println!(
        "one core, {} MiB of f32 in memory, GB/s of f32",
        (COUNT * 4) >> 20
    );
    println!("memcpy {copy:.1} (the limit of anything that writes as much as it reads), f32 add {add:.1}");
    println!("| format | instructions | encode | decode | decode and add |");
    println!("|---|---|---|---|---|");
    let levels = if all {
        Simd::available()
    } else {
        vec![Simd::best()]
    };
    for codec in codecs {
        for &simd in &levels {
            let how = Encoding {
                simd,
                ..Encoding::default()
            };
            let mut bytes = Vec::with_capacity(codec.encoded_len(COUNT));
            let encode = rate(|| {
                bytes.clear();
                codec.encode_with(how, black_box(&values), &mut bytes);
            });
            let mut failed = None;
            let mut timed = |add| {
                rate(|| {
                    if let Err(e) = codec.decode_with(simd, add, black_box(&bytes), black_box(&mut out)) {
                        failed = Some(e);
                    }
                })
            };
            let (decode, decode_add) = (timed(false), timed(true));
            if let Some(e) = failed {
                return Err(e);
            }
            println!(
                "| {} | {simd} | {encode:.1} | {decode:.1} | {decode_add:.1} |",
                codec.name()
            );
        }
    }
    Ok(())
}
