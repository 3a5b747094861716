//! The error of every format on four distributions, and through the two shapes of an all-reduce at 16 ranks, against the figures that the
//! formats are chosen for.

#[path = "../examples/nmse/data.rs"]
mod data;

use data::{Distribution, Random, nmse, reduced, through};
use oxccl_quant::Codec;

const RANKS: u64 = 16;

fn error(codec: Codec, distribution: Distribution) -> ftcore::Result<f64> {
    let values = distribution.values(1 << 20, &mut Random::new(20));
    let back = through(codec, &values)?;
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
fn l20_two_shots_at_sixteen_ranks_cost_twice_the_error_of_one_not_sixteen_times() {
    let bounds = [
        (Codec::Int8B64, Distribution::Gauss, 1e-4),
        (Codec::Int8B64, Distribution::Mixed, 3e-4),
        (Codec::Int4Hadamard { seed: 0 }, Distribution::Gauss, 2.4e-2),
        (Codec::Int4Hadamard { seed: 0 }, Distribution::Mixed, 2.4e-2),
    ];
    for (codec, distribution, bound) in bounds {
        // 2¹⁷ values are 64 rows of mixed magnitude.
        let (once, two) = reduced(codec, distribution, 1 << 17, RANKS).unwrap();
        assert!(two <= bound, "{codec} {distribution:?} {two:e}");
        assert!(
            two >= once && two <= 3.0 * once,
            "{codec} {distribution:?} {once:e} {two:e}"
        );
    }
}

#[test]
fn every_other_format_is_within_what_its_bits_allow() {
    for distribution in Distribution::ALL {
        let heavy = matches!(distribution, Distribution::Student3 | Distribution::Mixed);
        for (codec, bound) in [
            (Codec::MxE4M3, 1.3e-3),
            (Codec::Bf16, 3e-6),
            (Codec::F16, 1e-7),
            (Codec::Int4B64, if heavy { 3.6e-2 } else { 2.1e-2 }),
            (Codec::Int2B64, if heavy { 0.5 } else { 0.4 }),
        ] {
            let e = error(codec, distribution).unwrap();
            assert!(e <= bound && e > bound / 30.0, "{codec} {distribution:?} {e:e}");
        }
    }
}
