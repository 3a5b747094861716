//! Prints the table of docs/quantisation.md: the error of every format once, and through the two shapes of all-reduce.
//!
//! `cargo run --release -p quant --example nmse`

mod data;

use data::{Distribution, Random, nmse};
use quant::Codec;

const COUNT: usize = 1 << 20;
const RANKS: u64 = 16;

/// What one rank's values become on the way to another.
fn through(codec: Codec, values: &[f32]) -> ftcore::Result<Vec<f32>> {
    let mut bytes = Vec::new();
    codec.encode(values, &mut bytes);
    let mut back = vec![0.0; values.len()];
    codec.decode(&bytes, &mut back)?;
    Ok(back)
}

/// (quantised once, two-shot) for the sum over `RANKS` ranks.
fn reduced(codec: Codec, distribution: Distribution) -> ftcore::Result<(f64, f64)> {
    let (mut exact, mut sum) = (vec![0.0f64; COUNT], vec![0.0f32; COUNT]);
    for rank in 0..RANKS {
        let values = distribution.values(COUNT, &mut Random::new(1000 + rank));
        for (to, v) in exact.iter_mut().zip(&values) {
            *to += f64::from(*v);
        }
        for (to, v) in sum.iter_mut().zip(through(codec, &values)?) {
            *to += v;
        }
    }
    let two_shot = through(codec, &sum)?;
    Ok((
        nmse(exact.iter().copied(), &sum),
        nmse(exact.iter().copied(), &two_shot),
    ))
}

fn main() -> ftcore::Result<()> {
    println!("| format | bits | shape | gauss | laplace | t3 | mixed |");
    println!("|---|---|---|---|---|---|---|");
    for codec in Codec::ALL {
        let (mut single, mut once, mut two) = (String::new(), String::new(), String::new());
        for distribution in Distribution::ALL {
            let values = distribution.values(COUNT, &mut Random::new(20));
            let e = nmse(values.iter().map(|&v| f64::from(v)), &through(codec, &values)?);
            let (a, b) = reduced(codec, distribution)?;
            single += &format!(" {e:.2e} |");
            once += &format!(" {a:.2e} |");
            two += &format!(" {b:.2e} |");
        }
        let name = format!("| {} | {} |", codec.name(), codec.bits());
        println!("{name} single shot |{single}");
        println!("{name} once, {RANKS} ranks |{once}");
        println!("{name} two-shot, {RANKS} ranks |{two}");
    }
    Ok(())
}
