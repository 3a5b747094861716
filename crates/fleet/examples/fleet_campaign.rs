//! Tens of thousands of ranks and a death every few seconds: what the plan's documents tell of, on one core.
//!
//! usage: `fleet_campaign REPLICAS RANKS_EACH STEP_S REDUCTION_S DEATH_EVERY_S ROUNDS [H [CALL_US]]`. A death every 0 s is none; H above 1 is DiLoCo with one fragment.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Instant;

use oxccl_fleet::{Fleet, Method, Seconds, Workload, lighthouse_call, simulate};

fn main() {
    let given: Vec<f64> = std::env::args()
        .skip(1)
        .map(|a| a.parse().expect("a number"))
        .collect();
    let [replicas, ranks, step, reduction, every, rounds, rest @ ..] = given.as_slice() else {
        panic!(
            "usage: fleet_campaign REPLICAS RANKS_EACH STEP_S REDUCTION_S DEATH_EVERY_S ROUNDS [H [CALL_US]]"
        );
    };
    let seconds = |s: f64| Seconds::new(s).unwrap();
    let sync_every = rest.first().copied().unwrap_or(1.0) as u64;
    let method = match sync_every {
        0 | 1 => Method::Ddp { overlap: true },
        sync_every => Method::Diloco {
            sync_every,
            fragments: 1,
            delay: 1,
        },
    };
    let replicas = *replicas as u32;
    let fleet = Fleet {
        replicas,
        method,
        work: Workload {
            parameters: 1,
            layers: 100,
            step: seconds(*step),
            quorum: Seconds::ZERO,
            vote: seconds(0.5e-3),
        },
        reductions: vec![seconds(*reduction)],
        death_every: (*every > 0.0).then(|| seconds(*every)),
        restart: seconds(60.0),
        notice: seconds(0.1),
        reconnect: seconds(1.0),
        heal: seconds(10.0),
        call: rest.get(1).map(|us| seconds(us * 1e-6)),
        rounds: *rounds as u64,
        seed: 1,
    };
    let call = fleet.call.unwrap_or_else(|| lighthouse_call(replicas));
    let begins = Instant::now();
    let out = simulate(&fleet);
    let wall = begins.elapsed().as_secs_f64();
    println!(
        "{} ranks in {replicas} replicas, a call of {call}: {wall:.1} s of one core",
        f64::from(replicas) * ranks
    );
    match out {
        Ok(out) => println!(
            "  {} rounds in {} attempts, {:.1} % useful; {} deaths, {} heals, {} epochs in {}; efficiency {:.1} %, {:.0} contributors, lighthouse {:.0} %",
            out.committed,
            out.attempts,
            100.0 * out.useful,
            out.deaths,
            out.heals,
            out.epochs,
            out.time,
            100.0 * out.efficiency,
            out.contributors,
            100.0 * out.lighthouse
        ),
        Err(e) => println!("  {e}"),
    }
}
