//! What `oxccl plan` foresees against real runs: data parallel and DiLoCo with manager and lighthouse over links that are slower than the machine.
//!
//! Network namespaces with a rate for each (`tc tbf`), or a long line between two (`wan_link`); computing is slept, all else is the product. Only
//! by `--ignored`: minutes, and a busy machine makes links slower. Each trial prints what was measured and foreseen; it fails beyond a margin far
//! wider than the goal of 5 points.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use fleet::{Costs, Format, Group, Link, Links, Method, Rate, Seconds, Workload, lighthouse_call, rounds};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use oxccl_tests::links::{self, Network};

const RANK: &str = env!("CARGO_BIN_EXE_plan_rank");
const LINE: &str = env!("CARGO_BIN_EXE_wan_link");
/// A replica that has not ended by then is killed, and the trial has failed.
const TIME_LIMIT: Duration = Duration::from_secs(180);
/// Points of efficiency; any machine, busy or not.
const MARGIN: f64 = 20.0;
/// From one namespace to another.
const SWITCH: Duration = Duration::from_micros(100);
const LAYERS: u32 = 8;

/// A run: replicas, Mbit/s, milliseconds one way (0: at a switch), milliseconds of a step, millions of values, method.
type Setting = (u32, u32, u64, u64, u64, &'static str);

const SETTINGS: [Setting; 18] = [
    (2, 200, 0, 100, 1, "ddp"),
    (2, 500, 0, 200, 2, "ddp"),
    (2, 1000, 0, 100, 4, "ddp"),
    (4, 500, 0, 200, 1, "ddp"),
    (4, 1000, 0, 200, 2, "ddp"),
    (2, 500, 25, 200, 1, "ddp"),
    (2, 200, 0, 200, 1, "ddp-overlap"),
    (4, 500, 0, 200, 1, "ddp-overlap"),
    (2, 200, 0, 50, 4, "diloco:10:1:0:f32"),
    (4, 500, 0, 50, 4, "diloco:20:1:0:f32"),
    (2, 500, 0, 50, 4, "diloco:20:2:0:f32"),
    (2, 200, 0, 50, 4, "diloco:20:2:2:f32"),
    (4, 500, 0, 50, 4, "diloco:20:4:2:f32"),
    (4, 500, 0, 50, 2, "diloco:10:1:4:f32"),
    (2, 200, 25, 50, 2, "diloco:20:2:1:f32"),
    (2, 500, 25, 50, 4, "diloco:10:1:0:f32"),
    (2, 100, 0, 50, 4, "diloco:20:2:0:int8"),
    (4, 200, 0, 50, 4, "diloco:20:1:0:int8"),
];

fn seconds(time: Duration) -> Seconds {
    Seconds::new(time.as_secs_f64()).unwrap()
}

/// What the plan foresees of inner steps, where a value costs a rank so much itself: their number and seconds, and the efficiency.
fn foreseen(setting: &Setting, per_value: Seconds) -> (f64, f64, f64) {
    let (world, mbits, delay, step, millions, method) = *setting;
    let delay = if delay == 0 {
        SWITCH
    } else {
        Duration::from_millis(delay)
    };
    let between = Link::new(Rate::new(f64::from(mbits) * 1e6).unwrap(), seconds(delay));
    let links = Links::uniform(world, 1, between, between).unwrap();
    let (method, format) = match method.split(':').collect::<Vec<_>>().as_slice() {
        ["diloco", h, p, tau, format] => {
            let number = |n: &str| n.parse().unwrap();
            let method = Method::Diloco {
                sync_every: number(h),
                fragments: number(p),
                delay: number(tau),
            };
            (method, format.parse().unwrap())
        }
        [name] => (
            Method::Ddp {
                overlap: *name == "ddp-overlap",
            },
            Format::F32,
        ),
        _ => panic!("no method"),
    };
    let work = Workload {
        parameters: millions << 20,
        layers: LAYERS,
        step: seconds(Duration::from_millis(step)),
        // The replica asks its manager server, that the lighthouse; the vote stays within the replica.
        quorum: lighthouse_call(world) * f64::from(world) + seconds(delay * 2),
        vote: seconds(Duration::from_micros(500)),
        per_value,
    };
    let (costs, group) = (Costs::new(&links), Group::all(&links));
    let average = |values| match method {
        Method::Ddp { .. } => format.average(&costs, &group, values),
        Method::Diloco { .. } => format.in_buckets(&costs, &group, values, 1 << 18),
    };
    let round = rounds(method, &work, average).unwrap();
    (round.steps as f64, round.time.get(), round.efficiency())
}

/// The efficiency of a real run.
fn measured(setting: &Setting) -> Result<f64, Failed> {
    let (world, mbits, delay, step, millions, method) = *setting;
    let network = match delay {
        0 => Network::switch(world as usize, &format!("{mbits}mbit"))?,
        ms => Network::line(
            Path::new(LINE),
            Duration::from_millis(ms),
            f64::from(mbits) * 1e6,
            true,
        )?,
    };
    let arguments = [
        step.to_string(),
        (millions << 20).to_string(),
        LAYERS.to_string(),
        method.to_string(),
    ];
    let texts = network.run(RANK, &arguments, Instant::now() + TIME_LIMIT)?;
    let mut least = f64::INFINITY;
    for text in texts {
        let (steps, micros) = text.trim().split_once(' ').ok_or("no figures")?;
        let (steps, micros): (f64, f64) = (steps.parse()?, micros.parse()?);
        least = least.min(steps * step as f64 * 1e3 / micros);
    }
    Ok(least)
}

/// What a value costs a rank itself on this machine, with as many ranks on its cores: what a run over a quick link takes longer than its links
/// let it. The sizes and rates of the settings are others.
fn per_value(setting: &Setting) -> Result<Seconds, Failed> {
    static KNOWN: Mutex<BTreeMap<(u32, &str), f64>> = Mutex::new(BTreeMap::new());
    let method = match setting.5 {
        "ddp" | "ddp-overlap" => "ddp",
        int8 if int8.ends_with("int8") => "diloco:4:1:0:int8",
        _ => "diloco:4:1:0:f32",
    };
    let kind = (setting.0, method);
    let known = KNOWN.lock().unwrap().get(&kind).copied();
    let per_value = match known {
        Some(known) => known,
        None => {
            let quick = (setting.0, 2_000, 0, 50, 3, method);
            let (steps, plan, _) = foreseen(&quick, Seconds::ZERO);
            let real = steps * 0.05 / measured(&quick)?;
            let found = ((real - plan) / f64::from(3 << 20)).max(0.0);
            println!(
                "{} replicas, {method}: {:.1} ns for a value",
                setting.0,
                found * 1e9
            );
            KNOWN.lock().unwrap().insert(kind, found);
            found
        }
    };
    Ok(Seconds::new(per_value)?)
}

fn check(setting: &Setting) -> Result<(), Failed> {
    let (world, mbits, delay, step, millions, method) = *setting;
    let per_value = per_value(setting)?;
    let (real, plan) = (100.0 * measured(setting)?, 100.0 * foreseen(setting, per_value).2);
    println!(
        "| {world} | {mbits} Mbit/s | {delay} ms | {step} ms | {millions} Mi | {method} | {real:.1} % | {plan:.1} % | {:+.1} |",
        plan - real
    );
    if (plan - real).abs() > MARGIN {
        return Err(format!("{method}: {real:.1} % measured, {plan:.1} % foreseen").into());
    }
    Ok(())
}

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // Two at a time would measure each other.
    arguments.test_threads = Some(1);
    let (no_switch, no_line) = (links::missing(), links::missing_for_a_line());
    let trial = |setting: &'static Setting| {
        let (world, mbits, delay, _, _, method) = setting;
        let name = format!(
            "plan::world{world}_{mbits}mbit_{delay}ms_{}_long",
            method.replace([':', '-'], "_")
        );
        let missing = if *delay == 0 { &no_switch } else { &no_line };
        let missing = missing.clone();
        Trial::ignorable_test(name, move || match missing {
            Some(why) => Ok(Completion::ignored_with(why)),
            None => check(setting).map(|()| Completion::Completed),
        })
        .with_ignored_flag(true)
    };
    let trials = SETTINGS.iter().map(trial).collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}
