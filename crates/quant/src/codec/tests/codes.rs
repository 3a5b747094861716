//! Every code of every format, and every rounding, against the definitions.

use super::super::small::{self, E4M3, Small};
use super::super::{mx, rounding::Nearest};
use super::*;

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

/// The value of an E4M3 code by its definition.
fn by_definition(code: u8) -> f64 {
    let (e, m) = ((code & 0x7f) >> 3, f64::from(code & 7) / 8.0);
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    match e {
        0 => sign * m * 2f64.powi(-6),
        e => sign * (1.0 + m) * 2f64.powi(i32::from(e) - 7),
    }
}

#[test]
fn every_e4m3_code_and_rounding_is_by_the_definition() {
    let finite: Vec<f64> = (0..=E4M3::LARGEST).map(|c| by_definition(c as u8)).collect();
    for code in 0..=255u8 {
        let v = small::value::<E4M3>(u32::from(code));
        if u32::from(code & 0x7f) <= E4M3::LARGEST {
            assert_eq!(f64::from(v), by_definition(code), "{code:#x}");
            assert_eq!(small::encode_finite::<E4M3, _>(v, Nearest, 0), u32::from(code));
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
            assert_eq!(
                small::encode_finite::<E4M3, _>(v, Nearest, 0) as usize,
                expected,
                "{v:e}"
            );
            assert_eq!(
                small::encode_finite::<E4M3, _>(-v, Nearest, 0) as usize,
                expected | 0x80,
                "-{v:e}"
            );
        }
    }
}

#[test]
fn the_mx_scale_is_the_standards_for_every_exponent() {
    for exponent in -149..=127 {
        let amax = 2f64.powi(exponent) as f32;
        let bytes = encode(Codec::MxE4M3, &[amax]);
        assert_eq!(i32::from(bytes[0]) - 127, (exponent - 8).max(-127));
        let scale = mx::scale_value(bytes[0]);
        assert_eq!(f64::from(scale), 2f64.powi((exponent - 8).max(-127)));
        if exponent >= -136 {
            assert_eq!(decode(Codec::MxE4M3, &bytes, 1), [amax], "2^{exponent}");
        }
    }
    assert!(decode(Codec::MxE4M3, &[255, 0x38], 1)[0].is_nan());
}

#[test]
fn every_code_of_the_packed_formats_decodes_to_its_value() {
    // Scale 1 (0x3f80), and the same marked.
    for marked in [false, true] {
        let top = if marked { 0xbf } else { 0x3f };
        for code in 0..16u8 {
            let got = decode(Codec::Int4B64, &[0x80, top, code], 1)[0];
            let int = ((code << 4) as i8) >> 4;
            match (marked, int) {
                (true, 7) => assert_eq!(got, INF),
                (true, -7) => assert_eq!(got, -INF),
                (true, -8) => assert!(got.is_nan()),
                _ => assert_eq!(got, f32::from(int)),
            }
        }
        for code in 0..4u8 {
            let got = decode(Codec::Int2B64, &[0x80, top, code], 1)[0];
            match (marked, code) {
                (true, 1) => assert_eq!(got, INF),
                (true, 3) => assert_eq!(got, -INF),
                (true, 2) => assert!(got.is_nan()),
                _ => assert_eq!(got, [0.0, 1.0, -2.0, -1.0][usize::from(code)]),
            }
        }
    }
}

#[test]
fn every_16_bit_code_decodes_as_ieee_and_encodes_to_itself() {
    for code in 0..=u16::MAX {
        for (codec, expected) in [
            (Codec::F16, half::f16::from_bits(code).to_f32()),
            (Codec::Bf16, half::bf16::from_bits(code).to_f32()),
        ] {
            let got = decode(codec, &code.to_le_bytes(), 1)[0];
            if expected.is_nan() {
                assert!(got.is_nan());
            } else {
                assert_eq!(got.to_bits(), expected.to_bits(), "{codec} {code:#x}");
                assert_eq!(encode(codec, &[got]), code.to_le_bytes());
            }
        }
    }
    // Every upper half of an f32, with lower halves around the ties of both types.
    let lows = [0u32, 1, 0x0fff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001, 0xffff];
    for high in 0..=0xffffu32 {
        let values: Vec<f32> = lows.iter().map(|low| f32::from_bits(high << 16 | low)).collect();
        let (short, brain) = (encode(Codec::F16, &values), encode(Codec::Bf16, &values));
        for (i, v) in values.iter().enumerate().filter(|(_, v)| !v.is_nan()) {
            assert_eq!(
                short[2 * i..][..2],
                half::f16::from_f32(*v).to_le_bytes(),
                "{v:e}"
            );
            assert_eq!(
                brain[2 * i..][..2],
                half::bf16::from_f32(*v).to_le_bytes(),
                "{v:e}"
            );
        }
    }
}

#[test]
fn every_code_in_blocks_of_32_is_exact_and_encodes_to_itself() {
    for bits in (0x0080u16..0x7b00).step_by(5) {
        let s = f32::from_bits(u32::from(bits) << 16);
        for first in (-127i32..=127).step_by(31) {
            let codes: Vec<i8> = std::iter::once(-127)
                .chain((first..first + 31).map(|c| c.min(127) as i8))
                .collect();
            let low = bits.to_le_bytes().into_iter();
            let bytes: Vec<u8> = low.chain(codes.iter().map(|&c| c as u8)).collect();
            let values = decode(Codec::Int8B32, &bytes, 32);
            for (v, c) in values.iter().zip(&codes) {
                assert_eq!(f64::from(*v), f64::from(*c) * f64::from(s));
            }
            assert_eq!(encode(Codec::Int8B32, &values), bytes, "scale {s}");
        }
    }
}
