//! All-reduce of 64 MiB over links that are slower than the machine: how much of the link it uses, and that it is right.
//!
//! Network namespaces of this machine with 1 Gbit/s for each (`tc tbf`), or with 50 ms between two (`wan_link`). The share
//! is 2(n−1)/n·S / rate over the time, so headers count against it: a plain TCP stream has at most 95.7 % on the switch. Plain
//! streams of as many bytes, round the ring of ranks, are measured beside it: what the link and this machine can do. Where
//! namespaces cannot be made the tests are ignored and say why. The asserted share is far below the goal, because the
//! machine may be busy; the ignored trials (`cargo xtask test --long`) measure longer. Each prints its share.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use oxccl_tests::links::{self, Line, Network};

const RANK: &str = env!("CARGO_BIN_EXE_link_rank");
const LINE: &str = env!("CARGO_BIN_EXE_wan_link");

const BYTES: usize = 64 << 20;
const GIGABIT: f64 = 1e9;
/// A rank that has not ended by then is killed, and the test has failed.
const TIME_LIMIT: Duration = Duration::from_secs(180);
/// What must be reached on any machine, busy or not.
const ASSERTED: f64 = 0.60;

/// The same where a line loses packets, of what a plain stream has there.
const LOSSY_ASSERTED: f64 = 0.35;

/// The median over the calls of the slowest rank's time, in seconds.
fn time(network: &Network, calls: usize, how: &str) -> Result<f64, Failed> {
    let arguments = [&BYTES.to_string(), &calls.to_string(), how].map(str::to_string);
    let texts = network.run(RANK, &arguments, Instant::now() + TIME_LIMIT)?;
    let mut slowest = vec![0u64; calls];
    for (rank, text) in texts.iter().enumerate() {
        let times: Vec<u64> = text.lines().map(str::parse).collect::<Result<_, _>>()?;
        if times.len() != calls {
            return Err(format!("rank {rank} measured {} of {calls} calls", times.len()).into());
        }
        for (slowest, time) in slowest.iter_mut().zip(times) {
            *slowest = time.max(*slowest);
        }
    }
    slowest.sort_unstable();
    Ok(slowest[calls / 2] as f64 / 1e6)
}

/// The least time in which the link could carry it, in seconds.
fn best(network: &Network) -> f64 {
    let ranks = network.hosts().len() as f64;
    2.0 * (ranks - 1.0) / ranks * BYTES as f64 * 8.0 / GIGABIT
}

fn check(name: &str, network: &Network, calls: usize, goal: f64) -> Result<(), Failed> {
    let time_taken = time(network, calls, "connections=1")?;
    let share = best(network) / time_taken;
    println!(
        "{name}: 64 MiB in {:.1} ms, {:.1} % of the link (goal {:.0} %, plain streams {:.1} %)",
        time_taken * 1e3,
        100.0 * share,
        100.0 * goal,
        100.0 * best(network) / time(network, calls, "raw")?
    );
    // More than the link carries means that the bytes took another way.
    if !(ASSERTED..=1.02).contains(&share) {
        return Err(format!("{:.1} % of the link", 100.0 * share).into());
    }
    Ok(())
}

fn gigabit(name: &str, world: usize, calls: usize) -> Result<(), Failed> {
    check(name, &Network::switch(world, "1gbit")?, calls, 0.95)
}

fn far_away(name: &str, calls: usize) -> Result<(), Failed> {
    let line = Network::line(Path::new(LINE), Duration::from_millis(25), GIGABIT, true)?;
    check(name, &line, calls, 0.85)
}

/// At that distance one connection does not fill the line with what Linux allows by itself; several do.
fn several_connections(name: &str, calls: usize) -> Result<(), Failed> {
    let line = Network::line(Path::new(LINE), Duration::from_millis(25), GIGABIT, false)?;
    let mut shares = Vec::new();
    for connections in [1, 2, 4, 8] {
        let time_taken = time(&line, calls, &format!("connections={connections}"))?;
        let share = best(&line) / time_taken;
        println!(
            "{name}: {connections} connections with default windows: 64 MiB in {:.1} ms, {:.1} % of the link",
            time_taken * 1e3,
            100.0 * share
        );
        shares.push(share);
    }
    match shares.as_slice() {
        [one, _, four, _] if *four >= 1.3 * one && *four <= 1.02 => Ok(()),
        _ => Err("four connections are hardly faster than one, or faster than the line".into()),
    }
}

/// Eight hosts from 1 Gbit/s to 100 Mbit/s, 5 to 80 ms from each other (both ways), the slowest the farthest.
const UNEQUAL: [(f64, f64); 8] = [
    (1000.0, 1.25),
    (1000.0, 1.25),
    (700.0, 2.5),
    (500.0, 5.0),
    (400.0, 7.5),
    (300.0, 10.0),
    (200.0, 15.0),
    (100.0, 25.0),
];

/// Four of them: the rest says nothing else, and each is measured for two seconds.
const FOUR: [(f64, f64); 4] = [UNEQUAL[0], UNEQUAL[3], UNEQUAL[6], UNEQUAL[7]];

/// Eight hosts none of which is so slow that it decides alone: all lines are full in the optimum.
const CLOSE: [(f64, f64); 8] = [
    (1000.0, 1.25),
    (900.0, 1.25),
    (800.0, 2.5),
    (700.0, 5.0),
    (600.0, 7.5),
    (500.0, 10.0),
    (500.0, 15.0),
    (400.0, 25.0),
];

fn unequal_lines(lines: &[(f64, f64)]) -> Vec<Line> {
    let line = |&(rate, delay): &(f64, f64)| Line {
        rate: rate * 1e6,
        delay: Duration::from_secs_f64(delay / 1e3),
        loss: 0,
    };
    lines.iter().map(line).collect()
}

/// The least time of an all-reduce of `bytes` bytes: each rank sends and receives as much once at the least, all together
/// 2(n - 1) times as much.
fn optimum(lines: &[Line], bytes: usize) -> f64 {
    let (n, bits) = (lines.len() as f64, bytes as f64 * 8.0);
    let slowest = lines.iter().map(|line| line.rate).fold(f64::INFINITY, f64::min);
    let all: f64 = lines.iter().map(|line| line.rate).sum();
    (bits / slowest).max(2.0 * (n - 1.0) * bits / all)
}

/// The median over the calls of the slowest rank's time, in seconds, and by rank how many bytes it sent in the last one.
fn unequal(network: &Network, bytes: usize, calls: usize, links: &str) -> Result<(f64, Vec<u64>), Failed> {
    let arguments = [&bytes.to_string(), &calls.to_string(), links, "sent"].map(str::to_string);
    let texts = network.run(RANK, &arguments, Instant::now() + TIME_LIMIT)?;
    let (mut slowest, mut sent) = (vec![0u64; calls], Vec::new());
    for (rank, text) in texts.iter().enumerate() {
        let mut numbers: Vec<u64> = text.lines().map(str::parse).collect::<Result<_, _>>()?;
        sent.extend(numbers.pop());
        if numbers.len() != calls {
            return Err(format!("rank {rank} measured {} of {calls} calls", numbers.len()).into());
        }
        for (slowest, time) in slowest.iter_mut().zip(numbers) {
            *slowest = time.max(*slowest);
        }
    }
    slowest.sort_unstable();
    Ok((slowest[calls / 2] as f64 / 1e6, sent))
}

/// A slow host sends its values once and little more when links are measured; a ring sends nearly twice as much over it.
fn measured_links(
    name: &str,
    lines: &[(f64, f64)],
    bytes: usize,
    calls: usize,
    turns: usize,
) -> Result<(), Failed> {
    // In reduce-scatter and in all-gather, all but one part of the tensor each.
    let even = 2.0 * (lines.len() - 1) as f64 / lines.len() as f64;
    for (links, sent) in both_ways(name, &unequal_lines(lines), bytes, calls, turns)? {
        let slow = *sent.last().unwrap_or(&0) as f64 / bytes as f64;
        let right = match links {
            "links=even" => (even - 0.05..even + 0.05).contains(&slow),
            _ => (1.0..even - 0.15).contains(&slow),
        };
        if !right {
            return Err(format!("{links}: the slow rank sent {slow:.2} times the tensor").into());
        }
    }
    Ok(())
}

fn close_links(name: &str, bytes: usize, calls: usize, turns: usize) -> Result<(), Failed> {
    for (links, sent) in both_ways(name, &unequal_lines(&CLOSE), bytes, calls, turns)? {
        let (first, last) = (sent.first().copied(), sent.last().copied());
        if links != "links=even" && first <= last {
            return Err(format!("{links}: the slowest rank sent as much as the fastest: {sent:?}").into());
        }
    }
    Ok(())
}

/// Links taken for even, and measured, in turns: how many bytes each rank sent each time.
fn both_ways(
    name: &str,
    lines: &[Line],
    bytes: usize,
    calls: usize,
    turns: usize,
) -> Result<Vec<(&'static str, Vec<u64>)>, Failed> {
    let mut all = Vec::new();
    let network = Network::star(Path::new(LINE), lines)?;
    let best = optimum(lines, bytes);
    for _ in 0..turns {
        for links in ["links=even", "links=measured"] {
            let (time, sent) = unequal(&network, bytes, calls, links)?;
            let times: Vec<String> = sent
                .iter()
                .map(|s| format!("{:.2}", *s as f64 / bytes as f64))
                .collect();
            println!(
                "{name}: {links}: {} MiB in {:.0} ms, {:.1} % of the optimum of {:.0} ms; each rank sent {} times as much",
                bytes >> 20,
                time * 1e3,
                100.0 * best / time,
                best * 1e3,
                times.join(" ")
            );
            // Each element goes to its owner and from there to all.
            let (total, expected) = (
                sent.iter().sum::<u64>(),
                2 * (lines.len() as u64 - 1) * bytes as u64,
            );
            if total.abs_diff(expected) > expected / 100 {
                return Err(format!("{links}: {total} bytes sent in all, not {expected}").into());
            }
            all.push((links, sent));
        }
    }
    Ok(all)
}

/// What plain streams round the ring carry, one over each line: the slowest, in bit/s.
fn stream_rate(network: &Network, bytes: usize) -> Result<f64, Failed> {
    let arguments = [&bytes.to_string(), "1", "raw"].map(str::to_string);
    let texts = network.run(RANK, &arguments, Instant::now() + TIME_LIMIT)?;
    let times: Vec<u64> = texts
        .iter()
        .map(|text| text.trim().parse())
        .collect::<Result<_, _>>()?;
    let slowest = times.into_iter().max().unwrap_or(0).max(1) as f64 / 1e6;
    let ranks = network.hosts().len() as f64;
    Ok(2.0 * (ranks - 1.0) / ranks * bytes as f64 * 8.0 / slowest)
}

/// Eight equal hosts, and the same with the last one's line losing one packet of a hundred each way: what it carries then is what counts. With the
/// host's own congestion control, and with one that takes each loss for a full line.
fn lossy(name: &str, bytes: usize, calls: usize, turns: usize) -> Result<(), Failed> {
    for (control, turn) in [None, Some("reno")]
        .into_iter()
        .flat_map(|control| (0..turns).map(move |turn| (control, turn)))
    {
        // So rare that none is lost here, but packets are as long as with loss.
        for loss in [u32::MAX, 100] {
            let mut lines = unequal_lines(&[(100.0, 5.0); 8]);
            if let Some(last) = lines.last_mut() {
                last.loss = loss;
            }
            let network = Network::star(Path::new(LINE), &lines)?;
            if let Some(control) = control {
                network.set("tcp_congestion_control", control)?;
            }
            // One loss of a hundred leaves a stream that takes it for a full line so little that a call takes half a minute.
            let (bytes, calls) = match control {
                Some(_) => (bytes / 2, 1),
                None => (bytes, calls),
            };
            let stream = stream_rate(&network, bytes / 4)?;
            if let Some(last) = lines.last_mut() {
                last.rate = last.rate.min(stream);
            }
            for links in ["links=even", "links=measured"] {
                let (time, sent) = unequal(&network, bytes, calls, links)?;
                let share = optimum(&lines, bytes) / time;
                println!(
                    "{name}: {}, turn {turn}, {links}, one of {loss} lost: {} MiB in {:.0} ms, {:.1} % of the optimum for the {:.1} Mbit/s that a plain stream has on the last line; the last rank sent {:.2} times as much",
                    control.unwrap_or("the host's control"),
                    bytes >> 20,
                    time * 1e3,
                    100.0 * share,
                    stream / 1e6,
                    *sent.last().unwrap_or(&0) as f64 / bytes as f64
                );
                if links == "links=measured" && share < LOSSY_ASSERTED {
                    return Err(format!("{:.1} % of what the lossy line allows", 100.0 * share).into());
                }
            }
        }
    }
    Ok(())
}

/// Namespaces end with the processes that hold them.
fn nothing_stays() -> Result<(), Failed> {
    let network = Network::switch(3, "1gbit")?;
    let namespaces: Vec<_> = network
        .hosts()
        .iter()
        .map(|h| std::fs::read_link(format!("/proc/{}/ns/net", h.pid())))
        .collect::<Result<_, _>>()?;
    drop(network);
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let held = std::fs::read_link(entry.path().join("ns/net"));
        if held.is_ok_and(|ns| namespaces.contains(&ns)) {
            return Err(format!("{} is still in a namespace of the test", entry.path().display()).into());
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // Two at a time would share the cores, and measure each other.
    arguments.test_threads = Some(1);
    let (no_switch, no_line) = (links::missing(), links::missing_for_a_line());
    type Test = Box<dyn Fn(&str) -> Result<(), Failed> + Send>;
    let trial = |name: &'static str, missing: &Option<String>, test: Test| {
        let missing = missing.clone();
        Trial::ignorable_test(name, move || match missing {
            Some(why) => Ok(Completion::ignored_with(why)),
            None => test(name).map(|()| Completion::Completed),
        })
    };
    let mut trials = vec![trial(
        "links::namespaces_leave_nothing",
        &no_switch,
        Box::new(|_| nothing_stays()),
    )];
    trials.push(trial(
        "links::unequal::world4",
        &no_line,
        Box::new(|name| measured_links(name, &FOUR, 16 << 20, 1, 1)),
    ));
    let long = trial(
        "links::unequal::world8_long",
        &no_line,
        Box::new(|name| measured_links(name, &UNEQUAL, 64 << 20, 3, 3)),
    );
    trials.push(long.with_ignored_flag(true));
    let close = trial(
        "links::unequal::close_long",
        &no_line,
        Box::new(|name| close_links(name, 64 << 20, 3, 3)),
    );
    trials.push(close.with_ignored_flag(true));
    let lossy = trial(
        "links::unequal::lossy_long",
        &no_line,
        Box::new(|name| lossy(name, 16 << 20, 3, 2)),
    );
    trials.push(lossy.with_ignored_flag(true));
    for (calls, names) in [
        (
            3,
            [
                "links::gigabit::world2",
                "links::gigabit::world4",
                "links::round_trip_50ms::world2",
                "links::round_trip_50ms::several_connections",
            ],
        ),
        (
            15,
            [
                "links::gigabit::world2_long",
                "links::gigabit::world4_long",
                "links::round_trip_50ms::world2_long",
                "links::round_trip_50ms::several_connections_long",
            ],
        ),
    ] {
        let [two, four, far, several] = names;
        let tests: [(&str, &Option<String>, Test); 4] = [
            (two, &no_switch, Box::new(move |name| gigabit(name, 2, calls))),
            (four, &no_switch, Box::new(move |name| gigabit(name, 4, calls))),
            (far, &no_line, Box::new(move |name| far_away(name, calls))),
            (
                several,
                &no_line,
                Box::new(move |name| several_connections(name, calls)),
            ),
        ];
        for (name, missing, test) in tests {
            trials.push(trial(name, missing, test).with_ignored_flag(calls > 3));
        }
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}
