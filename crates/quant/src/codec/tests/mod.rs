//! Golden vectors of every format; `codes` goes through all codes, `properties` through values of every kind.

mod codes;
mod properties;

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
        (Codec::Int4B64, &[7.0, -1.0, 2.0], &[0x80, 0x3f, 0x27, 0x0f]),
        (Codec::Int4B64, &[INF, 6.0, f32::NAN], &[0x80, 0xbf, 0x87, 0x06]),
        // The scale is half of the peak: 1.1 is nearer to 1 than to 0, 0.5 is a tie and goes to the even code.
        (
            Codec::Int2B64,
            &[2.0, -1.1, 0.5, 0.4, -2.0],
            &[0x80, 0x3f, 0b11_00_01, 0b00_11],
        ),
        (
            Codec::Int2B64,
            &[INF, 3.0, f32::NAN, -INF],
            &[0x00, 0x80, 0b11_10_00_01],
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
    let mut values = vec![127.0; tiles::TILE + 1];
    values[tiles::TILE] = 254.0;
    let bytes = encode(Codec::Int8B64, &values);
    assert_eq!(bytes[..4], [0x80, 0x3f, 0x80, 0x3f]);
    assert_eq!(bytes[tiles::TILE / 64 * 2..][..2], [127, 127]);
    assert_eq!(bytes[tiles::TILE / 64 * 66..], [0x00, 0x40, 127]);
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
            .contains("mx-e4m3")
    );
    assert_eq!("int2".parse::<Codec>().unwrap(), Codec::Int2B64);
    for wrong in ["int4-h128:xyz", "int8:1", "int6", "int8-row:7", "f16:", ""] {
        assert!(wrong.parse::<Codec>().is_err(), "{wrong}");
    }
}
