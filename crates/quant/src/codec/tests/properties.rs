//! What holds for all formats and values: lengths, errors, visibility of what is not finite, instruction sets, random rounding.

use proptest::prelude::*;

use super::super::rounding;
use super::*;

#[test]
fn l21_one_dimension_or_one_value_never_takes_more_than_f32() {
    for codec in Codec::ALL {
        for count in 1..300 {
            assert!(codec.encoded_len(count) <= 4 * count, "{codec} {count}");
        }
        assert_eq!(codec.encoded_len(0), 0);
        let n = 1_000_001;
        let over = codec.encoded_len(n) as f64 * 8.0 / (codec.bits() * n as f64) - 1.0;
        assert!((-0.001..=0.01).contains(&over), "{codec}: {over}");
    }
}

#[test]
fn l21_int8_rounds_to_nearest_even_and_an_infinity_keeps_its_row() {
    let mut values: Vec<f32> = (0..64).map(|i| i as f32 + 0.6).collect();
    values[5] = INF;
    let back = decode(Codec::Int8B64, &encode(Codec::Int8B64, &values), 64);
    assert_eq!(back[5], INF);
    for (i, (a, b)) in values.iter().zip(&back).enumerate() {
        assert!(i == 5 || (a - b).abs() < 0.3, "{i}: {a} {b}");
    }
    assert_eq!(encode(Codec::Int8B64, &[127.0, 1.9, -1.9])[3..], [2, 0xfe]);
}

#[test]
fn l22_values_that_are_not_finite_stay_visible_and_are_counted() {
    for codec in Codec::ALL {
        for count in [1usize, 31, 64, 128, 129, 300] {
            let mut values: Vec<f32> = (0..count).map(|i| (i as f32 * 0.7).sin()).collect();
            let odd = [(0, f32::NAN), (count / 2, INF), (count - 1, -INF)];
            for (i, v) in odd {
                values[i] = v;
            }
            let expected = values.iter().filter(|v| !v.is_finite()).count();
            let mut bytes = Vec::new();
            assert_eq!(codec.encode(&values, &mut bytes), expected, "{codec} {count}");
            for (a, b) in values.iter().zip(decode(codec, &bytes, count)) {
                assert_eq!(a.is_finite(), b.is_finite(), "{codec}: {a} became {b}");
                if codec != Codec::MxE4M3 && !a.is_finite() {
                    assert!(*a == b || (a.is_nan() && b.is_nan()), "{codec}: {a} became {b}");
                }
            }
        }
    }
}

#[test]
fn extreme_but_finite_values_stay_finite() {
    for codec in Codec::ALL
        .into_iter()
        .filter(|c| *c != Codec::F16 && *c != Codec::Bf16)
    {
        let bound = if codec == Codec::Int2B64 { 0.51 } else { 0.3 };
        for peak in [f32::MAX, 3.0e38, 1.5e36, 1e-38, f32::from_bits(1), 0.0] {
            for count in [1usize, 64, 128, 200] {
                let values: Vec<f32> = (0..count)
                    .map(|i| if i % 3 == 0 { -peak } else { peak })
                    .collect();
                for (a, b) in values.iter().zip(decode(codec, &encode(codec, &values), count)) {
                    assert!(
                        b.is_finite() && (a - b).abs() <= bound * peak + 1e-35,
                        "{codec}: {a:e} {b:e}"
                    );
                }
            }
        }
    }
}

fn codecs() -> impl Strategy<Value = Codec> {
    (0..Codec::ALL.len(), any::<u64>()).prop_map(|(i, seed)| match Codec::ALL[i] {
        Codec::Int4Hadamard { .. } => Codec::Int4Hadamard { seed },
        codec => codec,
    })
}

proptest! {
    #[test]
    fn any_values_encode_and_what_is_not_finite_shows(
        codec in codecs(), bits in prop::collection::vec(any::<u32>(), 0..400)
    ) {
        let values: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
        let mut bytes = Vec::new();
        let counted = codec.encode(&values, &mut bytes);
        let back = decode(codec, &bytes, values.len());
        prop_assert_eq!(counted, back.iter().filter(|v| !v.is_finite()).count());
        for (a, b) in values.iter().zip(&back) {
            prop_assert!(a.is_finite() || !b.is_finite(), "{codec}: {a} became {b}");
        }
    }

    #[test]
    fn any_bytes_decode_and_adding_is_decoding_then_adding(
        codec in codecs(), count in 0usize..400, seed in any::<u64>()
    ) {
        let mut state = seed;
        let bytes: Vec<u8> = (0..codec.encoded_len(count)).map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        }).collect();
        let plain = decode(codec, &bytes, count);
        let mut added = vec![0.75f32; count];
        codec.decode_add(&bytes, &mut added).unwrap();
        for (p, a) in plain.iter().zip(&added) {
            prop_assert!((0.75 + p).to_bits() == a.to_bits() || a.is_nan());
        }
    }

    #[test]
    fn integer_and_mx_errors_are_within_half_a_step(
        codec in codecs(), values in prop::collection::vec(-1e6f32..1e6, 1..300)
    ) {
        // The step at the peak relative to the peak, halved, with room for the rounding of the scale.
        let (block, bound) = match codec {
            Codec::Int8B64 => (64, 0.5 / 127.0 * 1.01),
            Codec::Int8B32 => (32, 0.5 / 127.0 * 1.01),
            // Saturation from 512 to 448 costs most.
            Codec::MxE4M3 => (32, 0.125),
            Codec::F16 | Codec::Bf16 => (1, f32::INFINITY),
            Codec::Int4B64 => (64, 0.5 / 7.0 * 1.01),
            Codec::Int2B64 => (64, 0.51),
            _ => (128, 1.0),
        };
        let back = decode(codec, &encode(codec, &values), values.len());
        for (a, b) in values.chunks(block).zip(back.chunks(block)) {
            let peak = a.iter().fold(0f32, |m, v| m.max(v.abs()));
            for (a, b) in a.iter().zip(b) {
                prop_assert!((a - b).abs() <= bound * peak, "{codec}: {a} {b} peak {peak}");
            }
        }
    }

    #[test]
    fn whole_tiles_can_be_encoded_one_after_the_other(codec in codecs(), tail in 0usize..300) {
        let values: Vec<f32> = (0..2 * codec.grain() + tail).map(|i| (i as f32 * 0.37).sin() * 8.0).collect();
        let whole = encode(codec, &values);
        let mut parts = Vec::new();
        for part in values.chunks(codec.grain()) {
            codec.encode(part, &mut parts);
        }
        prop_assert!(whole == parts);
    }
}

/// Values of every kind: ordinary, tiny, huge, not finite, negative zero.
fn motley(count: usize, seed: u64) -> Vec<f32> {
    (0..count as u64)
        .map(|i| {
            let r = rounding::splitmix64(seed, i);
            let ordinary = ((r >> 40) as f32 / 1e7).sin() * 3.0;
            match r % 97 {
                0 => f32::from_bits((r >> 32) as u32),
                1 => -0.0,
                2 => ordinary * 1e-39,
                3 => ordinary * 1e37,
                _ => ordinary,
            }
        })
        .collect()
}

#[test]
fn every_instruction_set_gives_the_bytes_and_values_of_the_reference() {
    let counts = [
        0, 1, 31, 32, 63, 64, 65, 127, 128, 129, 1000, 2047, 2048, 2049, 8191, 8192, 8193, 20_000,
    ];
    for codec in Codec::ALL {
        for rounding in [Rounding::Nearest, Rounding::Stochastic { key: 9 }] {
            for (seed, count) in (0u64..).zip(counts).chain([(100, 8192), (101, 16_384)]) {
                let mut values = motley(count, seed);
                if seed >= 100 {
                    // Tiles without anything special take the short way.
                    values
                        .iter_mut()
                        .for_each(|v| *v = if v.abs() < 4.0 { *v } else { 1.0 });
                }
                let how = |simd| Encoding {
                    rounding,
                    first: 5,
                    simd,
                };
                let mut expected = Vec::new();
                let counted = codec.encode_with(how(Simd::Portable), &values, &mut expected);
                let decoded = |simd, add| {
                    let mut out = vec![0.3f32; count];
                    codec.decode_with(simd, add, &expected, &mut out).unwrap();
                    out.iter().map(|v| v.to_bits()).collect::<Vec<_>>()
                };
                for simd in Simd::available() {
                    let mut got = Vec::new();
                    assert_eq!(codec.encode_with(how(simd), &values, &mut got), counted);
                    assert!(got == expected, "{codec} {simd} {count} {rounding:?}");
                    for add in [false, true] {
                        assert!(
                            decoded(simd, add) == decoded(Simd::Portable, add),
                            "{codec} {simd} {count}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn parts_that_are_encoded_together_give_the_bytes_of_their_groups_alone() {
    // Parts of 2048 values have a way of their own, groups of 128 go block by block. The third part has values that send it that way too.
    let mut values = motley(4 * tiles::PART, 5);
    let special = 2 * tiles::PART..3 * tiles::PART;
    for (i, v) in values.iter_mut().enumerate() {
        if !special.contains(&i) && (!v.is_finite() || v.abs() > 1e30) {
            *v = 0.25;
        }
    }
    for codec in Codec::ALL {
        // Bytes of scales of 128 values.
        let scales = match codec {
            Codec::Int8B32 => 8,
            Codec::F16 | Codec::Bf16 => continue,
            _ => 4,
        };
        for simd in Simd::available() {
            for rounding in [Rounding::Nearest, Rounding::Stochastic { key: 4 }] {
                let how = |first| Encoding {
                    rounding,
                    first,
                    simd,
                };
                let mut whole = Vec::new();
                codec.encode_with(how(0), &values, &mut whole);
                let (all_scales, all_codes) = whole.split_at(scales * values.len() / 128);
                let codes = all_codes.len() / (values.len() / 128);
                for (k, group) in values.chunks(128).enumerate() {
                    let mut alone = Vec::new();
                    codec.encode_with(how(128 * k as u64), group, &mut alone);
                    let parts = (
                        &all_scales[scales * k..][..scales],
                        &all_codes[codes * k..][..codes],
                    );
                    assert!(
                        alone.split_at(scales) == parts,
                        "{codec} {simd} {rounding:?}: group {k}"
                    );
                }
            }
        }
    }
}

#[test]
fn stochastic_rounding_repeats_itself_and_is_right_on_average() {
    let values: Vec<f32> = (0..512).map(|i| ((i * 37 % 512) as f32 - 255.5) / 64.0).collect();
    for codec in Codec::ALL {
        let mut mean = vec![0.0f64; values.len()];
        let rounds = 400;
        for key in 0..rounds {
            let how = Encoding {
                rounding: Rounding::Stochastic { key },
                ..Encoding::default()
            };
            let (mut bytes, mut again) = (Vec::new(), Vec::new());
            codec.encode_with(how, &values, &mut bytes);
            codec.encode_with(how, &values, &mut again);
            assert_eq!(bytes, again, "{codec}");
            for (to, v) in mean.iter_mut().zip(decode(codec, &bytes, values.len())) {
                *to += f64::from(v) / rounds as f64;
            }
        }
        // Int2B64 cuts its largest values and MX saturates: no rounding makes up for that.
        let biased = matches!(codec, Codec::Int2B64 | Codec::MxE4M3);
        let nearest = decode(codec, &encode(codec, &values), values.len());
        let square = |got: &dyn Fn(usize) -> f64| -> f64 {
            values
                .iter()
                .enumerate()
                .map(|(i, v)| (f64::from(*v) - got(i)).powi(2))
                .sum()
        };
        let (averaged, once) = (square(&|i| mean[i]), square(&|i| f64::from(nearest[i])));
        assert!(
            biased || averaged <= once * 0.05 + 1e-9,
            "{codec}: {averaged} {once}"
        );
    }
}

#[test]
fn the_number_of_the_first_value_continues_the_random_sequence() {
    let values: Vec<f32> = (0..20_000).map(|i| (i as f32 * 0.37).sin()).collect();
    for codec in Codec::ALL {
        let how = |first| Encoding {
            rounding: Rounding::Stochastic { key: 3 },
            first,
            ..Encoding::default()
        };
        let (mut whole, mut parts) = (Vec::new(), Vec::new());
        codec.encode_with(how(0), &values, &mut whole);
        for (part, first) in values.chunks(codec.grain()).zip((0..).step_by(codec.grain())) {
            codec.encode_with(how(first), part, &mut parts);
        }
        assert!(whole == parts, "{codec}");
    }
}

#[test]
fn two_bits_never_err_by_more_than_the_value_so_that_error_feedback_converges() {
    let values = motley(4096, 77);
    let back = decode(Codec::Int2B64, &encode(Codec::Int2B64, &values), values.len());
    for (block, got) in values.chunks(64).zip(back.chunks(64)) {
        if block.iter().all(|v| v.is_finite()) {
            for (a, b) in block.iter().zip(got) {
                assert!((a - b).abs() <= a.abs() * 1.004, "{a} {b}");
            }
        }
    }
}

#[test]
fn codes_of_4_bits_need_no_limit_wherever_the_scale_is_rounded() {
    // A peak on each side of every place where its seventh is rounded to bf16, and every kind of neighbour, in parts that are encoded
    // together. AVX2 does not limit its codes to ±7.
    for seventh in (0u32..0x7e40).step_by(3) {
        let mut part = vec![0f32; 2048];
        for (k, block) in part.chunks_mut(64).enumerate() {
            let low = [0u32, 1, 0x7ffe, 0x7fff, 0x8000, 0x8001, 0xfffe, 0xffff][k % 8];
            let peak = f32::from_bits(seventh << 16 | low) * 7.0;
            let peak = if peak.is_finite() { peak } else { f32::MAX };
            let peak = if k % 16 < 8 { peak } else { -peak };
            for (i, v) in block.iter_mut().enumerate() {
                *v = peak * (1.0 - (i as f32) / 32.0);
            }
        }
        for codec in [Codec::Int4B64, ROTATED] {
            let mut expected = Vec::new();
            let how = |simd| Encoding {
                simd,
                ..Encoding::default()
            };
            codec.encode_with(how(Simd::Portable), &part, &mut expected);
            for simd in Simd::available() {
                let mut got = Vec::new();
                codec.encode_with(how(simd), &part, &mut got);
                assert!(got == expected, "{codec} {simd} {seventh:#x}");
            }
        }
    }
}
