//! The error of every format on four distributions, against the figures that the formats are chosen for.

#[path = "../examples/nmse/data.rs"]
mod data;

use data::{Distribution, Random, nmse};
use quant::Codec;

fn error(codec: Codec, distribution: Distribution) -> ftcore::Result<f64> {
    let values = distribution.values(1 << 20, &mut Random::new(20));
    let mut bytes = Vec::new();
    assert_eq!(codec.encode(&values, &mut bytes), 0);
    let mut back = vec![0.0; values.len()];
    codec.decode(&bytes, &mut back)?;
    Ok(nmse(values.iter().map(|&v| f64::from(v)), &back))
}

#[test]
fn l20_int8_in_small_blocks_keeps_rows_of_mixed_magnitude() {
    for codec in [Codec::Int8B64, Codec::Int8B32] {
        let (gauss, mixed) = (
            error(codec, Distribution::Gauss).unwrap(),
            error(codec, Distribution::Mixed).unwrap(),
        );
        assert!(gauss <= 4e-5 && gauss > 1e-6, "{codec} gauss {gauss:e}");
        assert!(mixed <= 1.5e-4 && mixed > 1e-6, "{codec} mixed {mixed:e}");
    }
}

#[test]
fn rotated_int4_is_level_on_all_distributions() {
    for distribution in Distribution::ALL {
        let e = error(Codec::Int4Hadamard { seed: 1 }, distribution).unwrap();
        assert!(e <= 1.2e-2 && e > 1e-3, "{distribution:?} {e:e}");
    }
}

#[test]
fn floats_are_within_what_their_mantissas_allow() {
    for distribution in Distribution::ALL {
        for (codec, bound) in [
            (Codec::MxE4M3, 1.3e-3),
            (Codec::MxE5M2, 3.5e-3),
            (Codec::Bf16, 3e-6),
            (Codec::F16, 1e-7),
        ] {
            let e = error(codec, distribution).unwrap();
            assert!(e <= bound, "{codec} {distribution:?} {e:e}");
        }
    }
}
