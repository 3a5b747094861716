//! Golden vectors, all codes, and properties of every format.

use proptest::prelude::*;

use super::mx::{self, E4M3, E5M2, Float8};
use super::*;

const INF: f32 = f32::INFINITY;
const ROTATED: Codec = Codec::Int4Hadamard { seed: 0 };

fn encode(codec: Codec, values: &[f32]) -> Vec<u8> {
    let mut out = Vec::new();
    codec.encode(values, &mut out);
    assert_eq!(out.len(), codec.encoded_len(values.len()), "{codec}");
    out
}

fn decode(codec: Codec, bytes: &[u8], count: usize) -> Vec<f32> {
    let mut out = vec![9.0; count];
    codec.decode(bytes, &mut out).unwrap();
    out
}

#[test]
fn golden_vectors_of_every_format() {
    let table: &[(Codec, &[f32], &[u8])] = &[
        (
            Codec::F16,
            &[1.0, -2.0, 65504.0, 1e6],
            &[0x00, 0x3c, 0x00, 0xc0, 0xff, 0x7b, 0x00, 0x7c],
        ),
        (
            Codec::Bf16,
            &[1.0, 1.003_906_3, 1.011_718_8],
            &[0x80, 0x3f, 0x80, 0x3f, 0x82, 0x3f],
        ),
        (
            Codec::Int8B64,
            &[127.0, 1.0, -0.5, 2.5, 3.5, -127.0],
            &[0x80, 0x3f, 127, 1, 0, 2, 4, 0x81],
        ),
        // 1 / 127 is 0x3c010204, which as bf16 is 0x3c01 = 129 / 2^14; 64 steps of it are just above a half.
        (Codec::Int8B32, &[1.0, 0.5, -1.0], &[0x01, 0x3c, 127, 64, 0x81]),
        (
            Codec::Int8B64,
            &[126.0, INF, -INF, f32::NAN, -3.0],
            &[0x80, 0xbf, 126, 127, 0x81, 0x80, 0xfd],
        ),
        (Codec::Int8B64, &[0.0, -0.0], &[0, 0, 0, 0]),
        (ROTATED, &[7.0, -1.0, 2.0], &[0x80, 0x3f, 0x27, 0x0f]),
        (ROTATED, &[INF, 6.0, f32::NAN], &[0x80, 0xbf, 0x87, 0x06]),
        (
            Codec::MxE4M3,
            &[256.0, 448.0, 1.0, -0.5, 511.0],
            &[127, 0x78, 0x7e, 0x38, 0xb0, 0x7e],
        ),
        (Codec::MxE4M3, &[2.0, INF, -INF, 0.0], &[120, 0x78, 0x7f, 0xff, 0]),
        (
            Codec::MxE5M2,
            &[57344.0, 1.0, INF, -INF, f32::NAN, -0.0],
            &[127, 0x7b, 0x3c, 0x7c, 0xfc, 0x7f, 0x80],
        ),
    ];
    for (codec, values, bytes) in table {
        assert_eq!(encode(*codec, values), *bytes, "{codec} {values:?}");
    }
}

#[test]
fn a_rotated_group_is_its_golden_vector() {
    // A group that is its own signs times 7 turns into 7 at the first place and nothing elsewhere.
    let words = [0xE220_A839_7B1D_CDAFu64, 0x6E78_9E6A_A1B9_65F4];
    let values: Vec<f32> = (0..128)
        .map(|i| {
            if words[i / 64] >> (i % 64) & 1 == 1 {
                -7.0
            } else {
                7.0
            }
        })
        .collect();
    let mut expected = vec![0u8; 68];
    (expected[0], expected[1], expected[4]) = (0x80, 0x3f, 0x07);
    assert_eq!(encode(ROTATED, &values), expected);
    assert_eq!(decode(ROTATED, &expected, 128), values);
}

#[test]
fn scales_come_before_codes_in_each_tile() {
    let mut values = vec![127.0; TILE + 1];
    values[TILE] = 254.0;
    let bytes = encode(Codec::Int8B64, &values);
    assert_eq!(bytes[..4], [0x80, 0x3f, 0x80, 0x3f]);
    assert_eq!(bytes[TILE / 64 * 2..][..2], [127, 127]);
    assert_eq!(bytes[TILE / 64 * 66..], [0x00, 0x40, 127]);
}

#[test]
fn every_int8_code_at_every_scale_is_exact_and_encodes_to_itself() {
    let mut scales = 0;
    for bits in 0x0080u16..0x7f80 {
        let s = f32::from_bits(u32::from(bits) << 16);
        if (s * 127.0).is_infinite() {
            break;
        }
        scales += 1;
        for first in (-127i32..=127).step_by(63) {
            let codes: Vec<i8> = std::iter::once(127)
                .chain((first..first + 63).map(|c| c.min(127) as i8))
                .collect();
            let bytes: Vec<u8> = bits
                .to_le_bytes()
                .into_iter()
                .chain(codes.iter().map(|&c| c as u8))
                .collect();
            let values = decode(Codec::Int8B64, &bytes, 64);
            for (v, c) in values.iter().zip(&codes) {
                assert_eq!(f64::from(*v), f64::from(*c) * f64::from(s));
            }
            assert_eq!(encode(Codec::Int8B64, &values), bytes, "scale {s}");
        }
    }
    assert!(scales > 31_000, "{scales}");
}

#[test]
fn every_int4_code_at_every_scale_is_exact_and_encodes_to_itself() {
    for bits in 0x0080u16..0x7e00 {
        let s = f32::from_bits(u32::from(bits) << 16);
        let codes: Vec<i8> = (-7..=7).collect();
        let low = bits.to_le_bytes();
        let packed = (0..8).map(|i| (codes[i] as u8 & 15) | (*codes.get(8 + i).unwrap_or(&0) as u8) << 4);
        let bytes: Vec<u8> = low.into_iter().chain(packed).collect();
        let values = decode(ROTATED, &bytes, 15);
        for (v, c) in values.iter().zip(&codes) {
            assert_eq!(f64::from(*v), f64::from(*c) * f64::from(s));
        }
        assert_eq!(encode(ROTATED, &values), bytes, "scale {s}");
    }
}

/// The value of an 8-bit float by its definition.
fn by_definition(code: u8, exponent_bits: u32, bias: i32) -> f64 {
    let mantissa_bits = 7 - exponent_bits;
    let (e, m) = ((code & 0x7f) >> mantissa_bits, code & ((1 << mantissa_bits) - 1));
    let unit = 2f64.powi(-(mantissa_bits as i32));
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    match e {
        0 => sign * f64::from(m) * unit * 2f64.powi(1 - bias),
        e => sign * (1.0 + f64::from(m) * unit) * 2f64.powi(i32::from(e) - bias),
    }
}

fn all_codes<E: Float8>(exponent_bits: u32, bias: i32) {
    let finite: Vec<f64> = (0..=E::LARGEST)
        .map(|c| by_definition(c, exponent_bits, bias))
        .collect();
    for code in 0..=255u8 {
        let v = mx::value::<E>(code);
        if code & 0x7f <= E::LARGEST {
            assert_eq!(
                f64::from(v),
                by_definition(code, exponent_bits, bias),
                "{code:#x}"
            );
            assert_eq!(mx::encode_finite::<E>(v), code);
        } else {
            assert!(!v.is_finite(), "{code:#x} is {v}");
        }
    }
    // Every upper half of an f32 with some lower halves around the ties, against the nearest value by search.
    for high in 0..=0x7f7fu32 {
        for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
            let v = f32::from_bits(high << 16 | low);
            let at = finite.partition_point(|&f| f < f64::from(v));
            let expected = if at == finite.len() {
                at - 1
            } else if at == 0 {
                0
            } else {
                let (below, above) = (f64::from(v) - finite[at - 1], finite[at] - f64::from(v));
                if below < above || (below == above && at % 2 == 1) {
                    at - 1
                } else {
                    at
                }
            };
            assert_eq!(usize::from(mx::encode_finite::<E>(v)), expected, "{v:e}");
            assert_eq!(usize::from(mx::encode_finite::<E>(-v)), expected | 0x80, "-{v:e}");
        }
    }
}

#[test]
fn every_e4m3_code_and_rounding_is_by_the_definition() {
    all_codes::<E4M3>(4, 7);
    assert!(mx::value::<E4M3>(0x7f).is_nan() && mx::value::<E4M3>(0xff).is_nan());
}

#[test]
fn every_e5m2_code_and_rounding_is_by_the_definition() {
    all_codes::<E5M2>(5, 15);
    assert_eq!(mx::value::<E5M2>(0xfc), -INF);
    assert!((0x7d..=0x7f).all(|c| mx::value::<E5M2>(c).is_nan()));
}

#[test]
fn the_mx_scale_is_the_standards_for_every_exponent() {
    for exponent in -149..=127 {
        let amax = 2f64.powi(exponent) as f32;
        for (codec, emax) in [(Codec::MxE4M3, 8), (Codec::MxE5M2, 15)] {
            let bytes = encode(codec, &[amax]);
            assert_eq!(i32::from(bytes[0]) - 127, (exponent - emax).max(-127));
            let scale = mx::scale_value(bytes[0]);
            assert_eq!(f64::from(scale), 2f64.powi((exponent - emax).max(-127)));
            if exponent >= -136 {
                assert_eq!(decode(codec, &bytes, 1), [amax], "{codec} 2^{exponent}");
            }
        }
    }
    assert!(decode(Codec::MxE4M3, &[255, 0x38], 1)[0].is_nan());
}

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
        for peak in [f32::MAX, 3.0e38, 1.5e36, 1e-38, f32::from_bits(1), 0.0] {
            for count in [1usize, 64, 128, 200] {
                let values: Vec<f32> = (0..count)
                    .map(|i| if i % 3 == 0 { -peak } else { peak })
                    .collect();
                for (a, b) in values.iter().zip(decode(codec, &encode(codec, &values), count)) {
                    assert!(
                        b.is_finite() && (a - b).abs() <= 0.3 * peak + 1e-35,
                        "{codec}: {a:e} {b:e}"
                    );
                }
            }
        }
    }
}

#[test]
fn bytes_of_the_wrong_length_are_refused() {
    for codec in Codec::ALL {
        let len = codec.encoded_len(100);
        for wrong in [0, len - 1, len + 1] {
            let e = codec.decode_add(&vec![0; wrong], &mut [0.0; 100]).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Protocol);
            assert!(e.to_string().contains(codec.name()), "{e}");
        }
    }
}

#[test]
fn names_are_read_back_and_an_unknown_one_lists_the_known() {
    for codec in Codec::ALL {
        assert_eq!(codec.name().parse::<Codec>().unwrap(), codec);
        assert_eq!(codec.to_string().parse::<Codec>().unwrap(), codec);
    }
    let seeded = Codec::Int4Hadamard { seed: 0xfeed };
    assert_eq!(seeded.to_string().parse::<Codec>().unwrap(), seeded);
    assert_eq!("int8".parse::<Codec>().unwrap(), Codec::Int8B64);
    assert!(
        "int9"
            .parse::<Codec>()
            .unwrap_err()
            .to_string()
            .contains("mx-e5m2")
    );
    assert!("int4-h128:xyz".parse::<Codec>().is_err());
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
            Codec::MxE5M2 => (32, 0.125),
            Codec::F16 | Codec::Bf16 => (1, f32::INFINITY),
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
        let values: Vec<f32> = (0..2 * TILE + tail).map(|i| (i as f32 * 0.37).sin() * 8.0).collect();
        let whole = encode(codec, &values);
        let mut parts = Vec::new();
        for part in values.chunks(TILE) {
            codec.encode(part, &mut parts);
        }
        prop_assert!(whole == parts);
    }
}
