//! Prints the table of docs/quantisation.md: the error of every format once, and through the two shapes of all-reduce.
//!
//! `cargo run --release -p oxccl-quant --example nmse`

mod data;

use data::{Distribution, Random, nmse, reduced, through};
use oxccl_quant::Codec;

const COUNT: usize = 1 << 20;
const RANKS: u64 = 16;

fn main() -> ftcore::Result<()> {
    println!("| format | bits | shape | gauss | laplace | t3 | mixed |");
    println!("|---|---|---|---|---|---|---|");
    for codec in Codec::ALL {
        let (mut single, mut once, mut two) = (String::new(), String::new(), String::new());
        for distribution in Distribution::ALL {
            let values = distribution.values(COUNT, &mut Random::new(20));
            let e = nmse(values.iter().map(|&v| f64::from(v)), &through(codec, &values)?);
            let (a, b) = reduced(codec, distribution, COUNT, RANKS)?;
            single += &format!(" {e:.2e} |");
            once += &format!(" {a:.2e} |");
            two += &format!(" {b:.2e} |");
        }
        let name = format!("| {} | {} |", codec.name(), codec.bits());
        println!("{name} one-phase |{single}");
        println!("{name} once, {RANKS} ranks |{once}");
        println!("{name} two-phase, {RANKS} ranks |{two}");
    }
    Ok(())
}
