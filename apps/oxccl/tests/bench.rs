//! `oxccl bench` as its user meets it: right results on ranks as processes and as threads, wrong flags, and that a
//! failure or an interrupt ends all of it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use breach::breach;
use oxccl::core::deadline_in;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};

mod breach;

const OPS: [&str; 9] = [
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather_into",
    "reduce_scatter_into",
    "all_to_all_into",
    "send_recv",
    "ping_pong",
    "barrier",
];

fn bench(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oxccl"));
    command
        .arg("bench")
        .args(arguments)
        .env_remove("OXCCL_LOG")
        .env_remove("OXCCL_DEFAULT_BACKEND")
        // What a killed benchmark cannot clear away stays in the build folder.
        .env("TMPDIR", env!("CARGO_TARGET_TMPDIR"));
    command
}

fn text(mut command: Command) -> (Option<i32>, String, String) {
    let output = command.output().unwrap();
    let lossy = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), lossy(&output.stdout), lossy(&output.stderr))
}

fn json(arguments: &[&str]) -> serde_json::Value {
    let (code, out, err) = text(bench(arguments));
    assert_eq!(code, Some(0), "{arguments:?}: {err}");
    assert_eq!(err, "", "{arguments:?}");
    serde_json::from_str(&out).unwrap()
}

#[test]
fn every_operation_is_right_on_processes_and_on_threads_and_the_figures_fit_each_other() {
    for (mode, ranks) in [("processes", "2"), ("threads", "2"), ("threads", "3")] {
        let arguments = [
            "--backend",
            "GLOO",
            "--op",
            "all",
            "--sizes",
            "4,1K,10K",
            "--ranks",
            ranks,
            "--mode",
            mode,
            "--warmup",
            "1",
            "--iters",
            "3",
            "--check",
            "--json",
        ];
        let report = json(&arguments);
        assert_eq!(report["backend"], "gloo");
        assert_eq!(report["mode"], mode);
        let results = report["results"].as_array().unwrap();
        for op in OPS {
            let lines: Vec<_> = results.iter().filter(|l| l["op"] == op).collect();
            assert_eq!(
                lines.len(),
                if op == "barrier" { 1 } else { 3 },
                "{op}: {results:?}"
            );
            for line in lines {
                assert_eq!(line["wrong"], 0, "{mode} {ranks}: {line}");
                let figure = |name: &str| line[name].as_f64().unwrap();
                let (time, algbw) = (figure("time_us"), figure("algbw"));
                assert!(
                    figure("min_us") > 0.0 && figure("min_us") <= time && time <= figure("max_us"),
                    "{line}"
                );
                assert!((algbw - figure("bytes") / time / 1000.0).abs() < 1e-9, "{line}");
                let n: f64 = ranks.parse().unwrap();
                let factor = match op {
                    "all_reduce" => 2.0 * (n - 1.0) / n,
                    "all_gather_into" | "reduce_scatter_into" | "all_to_all_into" => (n - 1.0) / n,
                    _ => 1.0,
                };
                assert!((figure("busbw") - algbw * factor).abs() < 1e-9, "{line}");
            }
        }
    }
}

#[test]
fn submitted_calls_are_right_too_and_warm_ups_go_by_the_bytes_unless_they_are_given() {
    let arguments = [
        "--op", "all", "--sizes", "16K,1M", "--iters", "3", "--check", "--json",
    ];
    let warm_ups = |report: &serde_json::Value| -> Vec<u64> {
        let lines = report["results"].as_array().unwrap();
        assert!(lines.iter().all(|l| l["wrong"] == 0), "{lines:?}");
        let all_reduce = lines.iter().filter(|l| l["op"] == "all_reduce");
        all_reduce.map(|l| l["warmup"].as_u64().unwrap()).collect()
    };
    let report = json(&[&arguments[..], &["--submit"]].concat());
    assert_eq!(report["submitted"], true);
    assert_eq!(report["warmup"], serde_json::Value::Null);
    assert_eq!(warm_ups(&report), [256, 5]);
    let report = json(&[&arguments[..], &["--warmup", "2"]].concat());
    assert_eq!(report["submitted"], false);
    assert_eq!(warm_ups(&report), [2, 2]);
}

#[test]
fn every_dtype_is_right_where_it_is_offered() {
    for dtype in [
        "f64", "f16", "bf16", "f8e4m3", "i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8", "bool",
    ] {
        let arguments = [
            "--op", "all", "--min", "7", "--max", "700", "--factor", "10", "--dtype", dtype, "--ranks", "3",
            "--mode", "threads", "--warmup", "0", "--iters", "1", "--check", "--json",
        ];
        let report = json(&arguments);
        let results = report["results"].as_array().unwrap();
        assert!(results.iter().all(|l| l["wrong"] == 0), "{dtype}: {results:?}");
        // f8 is moved, not reduced: `all` leaves the three reductions out.
        let reduced = results.iter().any(|l| l["op"] == "all_reduce");
        assert_eq!(reduced, dtype != "f8e4m3");
        assert!(
            results
                .iter()
                .any(|l| l["op"] == "broadcast" && l["bytes"].as_u64() >= Some(700))
        );
    }
}

#[test]
fn the_table_has_a_head_with_units_and_one_line_per_size() {
    let (code, out, err) = text(bench(&["--sizes", "4,1K", "--warmup", "1", "--iters", "2"]));
    assert_eq!(code, Some(0), "{err}");
    assert!(out.starts_with("# oxccl bench: gloo from backend-gloo"), "{out}");
    assert!(out.contains("busbw") && out.contains("(GB/s)"), "{out}");
    let lines: Vec<_> = out.lines().filter(|l| !l.starts_with('#')).collect();
    assert_eq!(lines.len(), 2, "{out}");
    let cells: Vec<_> = lines[1].split_whitespace().collect();
    assert_eq!(cells[..3], ["all_reduce", "1024", "256"]);
    assert_eq!(cells.last(), Some(&"-"), "nothing was checked");
}

#[test]
fn a_picture_has_a_curve_per_operation_and_goes_with_the_table_or_with_json() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bench.svg");
    let plot = [
        "--op",
        "all_reduce,broadcast",
        "--sizes",
        "1K,64K",
        "--iters",
        "2",
        "--json",
        "--plot",
    ];
    let report = json(&[&plot[..], &[path.to_str().unwrap()]].concat());
    assert_eq!(report["results"].as_array().unwrap().len(), 4);
    let svg = std::fs::read_to_string(&path).unwrap();
    for text in [
        "oxccl bench: gloo on cpu, 2 ranks",
        ">broadcast<",
        ">64 KiB<",
        "bus bandwidth",
    ] {
        assert!(svg.contains(text), "{text}: {svg}");
    }
    // A point per operation and size in each panel.
    assert_eq!(svg.matches("<circle").count(), 8);
}

#[test]
fn a_wrong_command_line_is_refused_before_anything_starts_and_says_what_is_known() {
    for (arguments, code, needle) in [
        (&["--backend", "glo"][..], 2, "Did you mean 'gloo'?"),
        (&["--op", "all_reduced"], 2, "reduce_scatter_into"),
        (&["--op", "all_reduce,"], 2, "unknown operation ''"),
        (&["--op", "send_recv", "--ranks", "1"], 2, "at least 2 ranks"),
        (&["--dtype", "f8e4m3"], 2, "does not sum f8e4m3"),
        (&["--dtype", "float"], 2, "bf16"),
        (&["--sizes", "4,x"], 2, "'x' is not a size"),
        (&["--sizes", "0"], 2, "'0' is not a size"),
        (&["--min", "4"], 2, "--max"),
        (&["--min", "8", "--max", "4"], 2, "from 8 to 4"),
        (
            &["--min", "4", "--max", "8", "--sizes", "4"],
            2,
            "cannot be used with",
        ),
        (&["--sizes", "4", "--factor", "3"], 2, "cannot be used with"),
        (&["--factor", "3"], 2, "--min"),
        (&["--ranks", "0"], 2, "1..=64"),
        (&["--ranks", "65"], 2, "1..=64"),
        (&["--iters", "0"], 2, "--iters"),
        (&["--mode", "fibres"], 2, "threads"),
        (&["--plot", "bench.png"], 2, "ending .svg"),
        (&["--plot", "no.svg", "--op", "barrier"], 2, "barrier has none"),
        (&["--plot", "/nowhere-at-all/bench.svg"], 2, "lies in none"),
    ] {
        let (got, out, err) = text(bench(arguments));
        assert_eq!(got, Some(code), "{arguments:?}: {err}");
        assert!(
            out.is_empty() && err.contains(needle),
            "{arguments:?}: {out}{err}"
        );
    }
    let mut command = bench(&[]);
    command.env("OXCCL_DEFAULT_BACKEND", "cpu:nothing");
    let (code, _, err) = text(command);
    assert_eq!(code, Some(2), "{err}");
    assert!(err.contains("no backend 'nothing'"), "{err}");
}

#[test]
fn options_and_variables_reach_the_backend_of_every_rank_the_options_first() {
    let transport = |options: &[&str], variables: &[(&str, &str)]| {
        let mut arguments = vec!["--sizes", "4", "--iters", "1", "--warmup", "0", "--json"];
        options.iter().for_each(|o| arguments.extend(["--option", o]));
        let mut command = bench(&arguments);
        command.envs(variables.iter().copied());
        let (code, out, err) = text(command);
        assert_eq!(code, Some(0), "{options:?} {variables:?}: {err}");
        let report: serde_json::Value = serde_json::from_str(&out).unwrap();
        (report["transport"].clone(), report["dropped_options"].clone())
    };
    let none = serde_json::json!([]);
    let variable = ("OXCCL_GLOO_TRANSPORT", "tcp");
    assert_eq!(transport(&[], &[]), ("shm".into(), none.clone()));
    assert_eq!(transport(&[], &[variable]), ("tcp".into(), none.clone()));
    assert_eq!(transport(&["transport=tcp"], &[]), ("tcp".into(), none.clone()));
    assert_eq!(transport(&["Transport=shm"], &[variable]), ("shm".into(), none));
    let dropped = transport(&["minCtas=4", "lenient=1"], &[("OXCCL_GLOO_SPEED", "9")]);
    assert_eq!(dropped.1, serde_json::json!(["OXCCL_GLOO_SPEED", "min_ctas"]));
    for (options, variable, says) in [
        (
            &["min_ctas=4"][..],
            None,
            "does not honour min_ctas; it honours: net_name, hint:transport",
        ),
        (
            &["min_ctas=many"],
            None,
            "option min_ctas is 'many'; it can be a whole number",
        ),
        (
            &["transprot=tcp"],
            None,
            "hint:transprot (do you mean hint:transport?)",
        ),
        (&["transport"], None, "'transport' is not NAME=VALUE"),
        (
            &[],
            Some("OXCCL_GLOO_CONNECTION"),
            "OXCCL_GLOO_CONNECTION (do you mean hint:connections?)",
        ),
    ] {
        let mut command = bench(&options.iter().flat_map(|o| ["--option", o]).collect::<Vec<_>>());
        command.envs(variable.map(|name| (name, "2")));
        let (code, out, err) = text(command);
        assert_eq!((code, out.as_str()), (Some(2), ""), "{options:?}: {err}");
        assert!(err.contains(says), "{options:?}: {err}");
    }
}

#[test]
fn a_rank_that_ends_too_early_or_is_another_one_than_it_should_be_ends_the_benchmark() {
    for (breach_of, needles) in [
        (
            "exits",
            ["rank", "ended with exit code 0 before the measurement was over"],
        ),
        ("other_rank", ["broke the ABI", "configured as rank"]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let library = breach(folder.path(), &[&format!("-DBREACH=\"{breach_of}\"")]);
        let mut command = bench(&["--backend", "breach", "--sizes", "4", "--iters", "1"]);
        command.env("OXCCL_PLUGIN_PATH", library);
        let (code, _, err) = text(command);
        assert_eq!(code, Some(1), "{breach_of}: {err}");
        for needle in needles {
            assert!(err.contains(needle), "{breach_of}: {err}");
        }
        assert!(
            !err.contains("defect in oxccl") && !err.contains("port is the right one"),
            "{err}"
        );
    }
}

/// Process ids of the children of `parent`.
fn children(parent: u32) -> Vec<Pid> {
    let is_child = |pid: &i32| {
        // pid (name) state ppid …; the name may hold anything, but the last ')' ends it.
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
        rest.split_whitespace().nth(1) == Some(&parent.to_string())
    };
    let entries = std::fs::read_dir("/proc").unwrap();
    let pids = entries.filter_map(|e| e.unwrap().file_name().to_str()?.parse::<i32>().ok());
    let mut pids: Vec<i32> = pids.filter(is_child).collect();
    pids.sort_unstable();
    pids.into_iter().filter_map(Pid::from_raw).collect()
}

/// A benchmark that would run for minutes, in the middle of its second line, with handles on its two ranks.
fn long_run() -> (Child, Vec<OwnedFd>) {
    let mut child = bench(&[
        "--sizes",
        "4,1M",
        "--iters",
        "100000",
        "--warmup",
        "0",
        "--op",
        "barrier,all_reduce",
    ])
    .stdout(Stdio::piped())
    .stderr(Stdio::piped())
    .spawn()
    .unwrap();
    let deadline = deadline_in(Duration::from_secs(60));
    let ranks = loop {
        let ranks = children(child.id());
        if ranks.len() == 2 {
            break ranks;
        }
        assert!(Instant::now() < deadline, "two ranks did not start");
        std::thread::sleep(Duration::from_millis(2));
    };
    let ranks = ranks
        .iter()
        .map(|&pid| pidfd_open(pid, PidfdFlags::empty()).unwrap())
        .collect();
    // The head of the table is out before the ranks start.
    let mut head = String::new();
    BufReader::new(child.stdout.as_mut().unwrap())
        .read_line(&mut head)
        .unwrap();
    assert!(head.starts_with("# oxccl bench"), "{head}");
    (child, ranks)
}

fn assert_ends(process: &OwnedFd) {
    let timeout = Timespec {
        tv_sec: 60,
        tv_nsec: 0,
    };
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    assert_eq!(poll(&mut fds, Some(&timeout)).unwrap(), 1, "a rank did not end");
}

fn end(mut child: Child) -> (Option<i32>, String) {
    let mut err = String::new();
    child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    (child.wait().unwrap().code(), err)
}

#[test]
fn a_killed_rank_ends_the_benchmark_and_is_named_first() {
    let (child, ranks) = long_run();
    pidfd_send_signal(&ranks[1], Signal::KILL).unwrap();
    let (code, err) = end(child);
    assert_eq!(code, Some(1), "{err}");
    assert!(
        err.starts_with("oxccl bench: ") && err.lines().next().unwrap().contains("rank 1 failed: SIGKILL"),
        "{err}"
    );
    ranks.iter().for_each(assert_ends);
}

#[test]
fn an_interrupt_ends_all_ranks_and_is_exit_code_130() {
    let (child, ranks) = long_run();
    kill_process(Pid::from_raw(child.id().cast_signed()).unwrap(), Signal::INT).unwrap();
    ranks.iter().for_each(assert_ends);
    let (code, err) = end(child);
    assert_eq!(code, Some(130), "{err}");
    assert_eq!(err, "oxccl bench: interrupted\n");
}

#[test]
fn an_interrupt_ends_ranks_that_are_threads() {
    let mut child = bench(&["--sizes", "1M", "--iters", "100000", "--mode", "threads"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut head = String::new();
    BufReader::new(child.stdout.as_mut().unwrap())
        .read_line(&mut head)
        .unwrap();
    kill_process(Pid::from_raw(child.id().cast_signed()).unwrap(), Signal::INT).unwrap();
    let (code, err) = end(child);
    assert_eq!(code, Some(130), "{err}");
    // Most likely before the ranks have met: that they are told is not lost.
    assert!(
        err.ends_with("oxccl bench: interrupted\n") && !err.contains("did not end"),
        "{err}"
    );
}

#[test]
fn no_rank_outlives_a_benchmark_that_was_killed() {
    let (mut child, ranks) = long_run();
    child.kill().unwrap();
    child.wait().unwrap();
    ranks.iter().for_each(assert_ends);
}
