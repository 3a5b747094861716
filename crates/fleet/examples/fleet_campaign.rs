//! Jobs of tens of thousands of ranks with deaths every few seconds, played on one core: figures of docs/benchmarks/plan.md.
//!
//! usage: `fleet_campaign [NAME=VALUE…]`, names as in [`NAMES`]. Times are in seconds; `every=0` is without deaths, `h` above 1 is DiLoCo.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a measurement ends with its first error"
)]

use std::collections::BTreeMap;
use std::time::Instant;

use oxccl_fleet::{Fleet, Method, Seconds, Workload, lighthouse_call, simulate};

/// With what they are without being given. `call` in microseconds: the lighthouse's for a call; 0 is what was measured.
const NAMES: [(&str, f64); 15] = [
    ("replicas", 2_048.0),
    ("ranks", 12.0),
    ("step", 1.0),
    ("reduction", 0.1),
    ("every", 0.0),
    ("rounds", 1_000.0),
    ("h", 1.0),
    ("p", 1.0),
    ("delay", 0.0),
    ("restart", 60.0),
    ("notice", 0.1),
    ("reconnect", 1.0),
    ("heal", 10.0),
    ("call", 0.0),
    ("seed", 1.0),
];

fn main() {
    let mut given: BTreeMap<&str, f64> = NAMES.into();
    for argument in std::env::args().skip(1) {
        let parsed = argument.split_once('=').and_then(|(name, value)| {
            let place = given.get_mut(name)?;
            *place = value.parse().ok()?;
            Some(())
        });
        if parsed.is_none() {
            let names = NAMES.map(|(name, _)| name).join(", ");
            eprintln!(
                "fleet_campaign: '{argument}' is no NAME=VALUE with a number and one of the names {names}"
            );
            std::process::exit(2);
        }
    }
    let seconds = |name: &str| Seconds::new(given[name]).unwrap();
    let method = match given["h"] as u64 {
        0 | 1 => Method::Ddp { overlap: true },
        sync_every => Method::Diloco {
            sync_every,
            fragments: given["p"] as u64,
            delay: given["delay"] as u64,
        },
    };
    let replicas = given["replicas"] as u32;
    let fleet = Fleet {
        replicas,
        method,
        work: Workload {
            parameters: 1,
            layers: 100,
            step: seconds("step"),
            quorum: Seconds::ZERO,
            vote: Seconds::new(0.5e-3).unwrap(),
            per_value: Seconds::ZERO,
        },
        // Of many buckets all but the last.
        hidden: seconds("reduction") * 0.95,
        reductions: vec![seconds("reduction"); given["p"] as usize],
        death_every: (given["every"] > 0.0).then(|| seconds("every")),
        restart: seconds("restart"),
        notice: seconds("notice"),
        reconnect: seconds("reconnect"),
        heal: seconds("heal"),
        call: (given["call"] > 0.0).then(|| Seconds::new(given["call"] * 1e-6).unwrap()),
        rounds: given["rounds"] as u64,
        seed: given["seed"] as u64,
    };
    let call = fleet.call.unwrap_or_else(|| lighthouse_call(replicas));
    println!(
        "{} ranks in {replicas} replicas, {method}, steps of {}, reductions of {}, a death each {} s, transfers of {}, calls of {call}",
        given["replicas"] * given["ranks"],
        fleet.work.step,
        seconds("reduction"),
        given["every"],
        fleet.heal
    );
    let begins = Instant::now();
    let out = simulate(&fleet);
    let wall = begins.elapsed().as_secs_f64();
    match out {
        Ok(out) => println!(
            "  {} rounds in {} attempts and {}; {:.1} % of the steps computed count; {} deaths, {} heals, {} epochs; {:.1} % of the time is committed work, {:.0} \
             contributors, lighthouse {:.0} %; played in {wall:.1} s",
            out.committed,
            out.attempts,
            out.time,
            100.0 * out.useful,
            out.deaths,
            out.heals,
            out.epochs,
            100.0 * out.efficiency,
            out.contributors,
            100.0 * out.lighthouse
        ),
        Err(e) => println!("  {e}; after {wall:.1} s"),
    }
}
