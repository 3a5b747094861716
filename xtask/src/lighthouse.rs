//! `cargo xtask bench-lighthouse`: the time of a step at our lighthouse and at torchft's, with N replicas from one load generator.
//!
//! The lighthouse is a process of its own (the release build of `oxccl lighthouse`; for the peer torchft's extension module in Python), the generator
//! another (`crates/coordination/examples/lighthouse_load/`). They take turns, round after round, so that a noisy minute hits all. A run in which a
//! replica was falsely taken for dead fails: all replicas must stay in one quorum.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use serde::Deserialize;

use crate::metadata::Metadata;
use crate::torchft;

/// How long a lighthouse may take to say where it listens.
const START: Duration = Duration::from_secs(20);

/// Options of `cargo xtask bench-lighthouse`.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Numbers of replicas.
    #[arg(long, value_delimiter = ',', value_name = "N,…", default_value = "64,256,1024",
          value_parser = clap::value_parser!(u32).range(1..=32_768))]
    replicas: Vec<u32>,
    /// Measured steps of a run.
    #[arg(long, default_value_t = 20, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    steps: u32,
    /// How often each is run.
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Only replicas of this kind: ours (an open stream, short answers) or torchft's (heartbeats, full answers).
    #[arg(long, value_name = "KIND")]
    clients: Option<Clients>,
    /// Measure torchft's lighthouse too, with torchft's kind of replicas.
    #[arg(long)]
    peer: bool,
    /// How long a run may take, in seconds.
    #[arg(long, default_value_t = 120, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=3600))]
    limit: u32,
    /// Cargo's profile for our programs. With `dev` they are built in a tenth of the time, and the figures mean nothing.
    #[arg(long, default_value = "release", value_name = "NAME")]
    profile: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Clients {
    Ours,
    Torchft,
}

impl Clients {
    fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::Torchft => "torchft",
        }
    }
}

/// One lighthouse with one kind of replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Pair {
    peer: bool,
    clients: Clients,
}

/// What the generator prints.
#[derive(Debug, Deserialize)]
struct Seen {
    replicas: usize,
    steps: usize,
    asked: usize,
    times_ns: Vec<u64>,
    quorum_ids: usize,
    incomplete_replies: usize,
    failed: usize,
    errors: Vec<String>,
}

impl Seen {
    /// Why the run does not count.
    fn fault(&self) -> Option<String> {
        if self.failed > 0 {
            Some(format!(
                "{} calls or streams failed: {}",
                self.failed,
                self.errors.join("; ")
            ))
        } else if self.quorum_ids != 1 || self.incomplete_replies > 0 {
            Some(format!(
                "live replicas were left out: {} quorum ids, {} incomplete answers",
                self.quorum_ids, self.incomplete_replies
            ))
        } else if self.steps < self.asked {
            Some(format!(
                "{} of {} steps of {} replicas within the limit",
                self.steps, self.asked, self.replicas
            ))
        } else {
            None
        }
    }
}

/// The figures of one run.
#[derive(Debug)]
struct Figures {
    times_ns: Vec<u64>,
    /// Processor time for a step, in milliseconds: the lighthouse's, and that of the process which plays the replicas.
    cpu_ms: f64,
    generator_cpu_ms: f64,
    peak_bytes: u64,
    idle_cpu: f64,
    logged: u64,
}

/// Runs the comparison. True unless a run of ours failed.
pub(crate) fn run(arguments: &Arguments) -> Result<bool> {
    let metadata = Metadata::read()?;
    let programs = Programs::build(&metadata, &arguments.profile, arguments.peer)?;
    let kinds = [Clients::Ours, Clients::Torchft];
    let mut pairs: Vec<Pair> = kinds
        .into_iter()
        .filter(|k| arguments.clients.is_none_or(|only| only == *k))
        .map(|clients| Pair { peer: false, clients })
        .collect();
    if arguments.peer {
        pairs.push(Pair {
            peer: true,
            clients: Clients::Torchft,
        });
    }
    println!(
        "| replicas | lighthouse | clients | p50 ms | p99 ms | lighthouse CPU ms | generator CPU ms | peak RSS MiB | idle CPU % | log bytes |\n|---:|---|---|---:|---:|---:|---:|---:|---:|---:|"
    );
    let mut all_ran = true;
    for &replicas in &arguments.replicas {
        let mut runs: Vec<(Pair, Vec<Figures>)> = pairs.iter().map(|p| (*p, Vec::new())).collect();
        for round in 1..=arguments.rounds {
            for (pair, figures) in &mut runs {
                eprintln!(
                    "bench-lighthouse: {replicas} replicas, {pair:?}, round {round} of {}",
                    arguments.rounds
                );
                match programs.measure(*pair, replicas, arguments) {
                    Ok(one) => figures.push(one),
                    Err(error) => {
                        println!(
                            "| {replicas} | {} | {} | failed: {error:#} |",
                            lighthouse_of(*pair),
                            pair.clients.name()
                        );
                        all_ran &= pair.peer;
                    }
                }
            }
        }
        for (pair, figures) in runs.iter().filter(|(_, f)| !f.is_empty()) {
            println!("{}", row(replicas, *pair, figures));
        }
    }
    Ok(all_ran)
}

fn lighthouse_of(pair: Pair) -> &'static str {
    if pair.peer { "torchft" } else { "ours" }
}

/// The steps of all rounds together; of the rest the worst.
fn row(replicas: u32, pair: Pair, runs: &[Figures]) -> String {
    let mut times: Vec<u64> = runs.iter().flat_map(|r| r.times_ns.iter().copied()).collect();
    times.sort_unstable();
    let at = |part: f64| {
        let last = times.len().saturating_sub(1);
        times
            .get((last as f64 * part).round() as usize)
            .map_or(f64::NAN, |ns| *ns as f64 / 1e6)
    };
    let mean = |of: fn(&Figures) -> f64| runs.iter().map(of).sum::<f64>() / runs.len().max(1) as f64;
    let (cpu, generator_cpu) = (mean(|r| r.cpu_ms), mean(|r| r.generator_cpu_ms));
    let peak = runs.iter().map(|r| r.peak_bytes).max().unwrap_or(0) >> 20;
    let idle = runs.iter().map(|r| r.idle_cpu).fold(0.0, f64::max);
    let logged = runs.iter().map(|r| r.logged).max().unwrap_or(0);
    format!(
        "| {replicas} | {} | {} | {:.1} | {:.1} | {cpu:.1} | {generator_cpu:.1} | {peak} | {idle:.1} | {logged} |",
        lighthouse_of(pair),
        pair.clients.name(),
        at(0.5),
        at(0.99)
    )
}

struct Programs {
    lighthouse: PathBuf,
    generator: PathBuf,
    /// torchft's folder and the script that serves its classes.
    peer: Option<(PathBuf, PathBuf)>,
    log: PathBuf,
}

impl Programs {
    fn build(metadata: &Metadata, profile: &str, peer: bool) -> Result<Self> {
        let load = ["--package", "oxccl-coordination", "--example", "lighthouse_load"];
        metadata.build(&load, profile)?;
        let built = metadata.build(&["--package", "oxccl-cli", "--bin", "oxccl"], profile)?;
        let peer = match peer {
            true => {
                let folder = torchft::prepare()?;
                let script = metadata
                    .workspace_root
                    .join("crates/coordination/tests/torchft/serve.py");
                Some((folder, script))
            }
            false => None,
        };
        let scratch = metadata.target_directory.join("xtask");
        fs::create_dir_all(&scratch).with_context(|| format!("cannot make {}", scratch.display()))?;
        Ok(Self {
            lighthouse: built.join("oxccl"),
            generator: built.join("examples/lighthouse_load"),
            peer,
            log: scratch.join("bench-lighthouse.log"),
        })
    }

    fn measure(&self, pair: Pair, replicas: u32, arguments: &Arguments) -> Result<Figures> {
        let lighthouse = match (&self.peer, pair.peer) {
            (Some((folder, script)), true) => Lighthouse::start_peer(folder, script, replicas, &self.log)?,
            _ => Lighthouse::start(&self.lighthouse, replicas, &self.log)?,
        };
        let mut generator = Command::new(&self.generator)
            .args(["--url", &lighthouse.url, "--clients", pair.clients.name()])
            .args([
                "--replicas",
                &replicas.to_string(),
                "--steps",
                &arguments.steps.to_string(),
            ])
            .args(["--limit-s", &arguments.limit.to_string(), "--idle-s", "5"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map(Ended)
            .context("cannot start the load generator")?;
        let (mut idle, mut cpu) = (Duration::ZERO, 0.0);
        let mut begun: Option<(Instant, f64)> = None;
        let mut measured: Option<(f64, f64)> = None;
        let mut cpu_ms = (0.0, 0.0);
        let pid = generator.0.id();
        let both = || Ok::<_, anyhow::Error>((lighthouse.cpu_seconds()?, cpu_seconds(pid)?));
        let mut said = Vec::new();
        // It ends by itself: its limit is an argument.
        let result = heard(&mut generator.0, |line| {
            match (line.as_str(), begun) {
                ("measured", _) => measured = Some(both()?),
                ("done", _) => {
                    if let Some((before, generator_before)) = measured {
                        let (now, generator_now) = both()?;
                        let each = |seconds: f64| 1000.0 * seconds / f64::from(arguments.steps);
                        cpu_ms = (each(now - before), each(generator_now - generator_before));
                    }
                }
                ("idle", _) => begun = Some((Instant::now(), lighthouse.cpu_seconds()?)),
                ("over", Some((start, before))) => {
                    (idle, cpu) = (start.elapsed(), lighthouse.cpu_seconds()? - before)
                }
                _ => said.push(line),
            }
            Ok(())
        })?;
        let status = generator.0.wait().context("waiting for the generator")?;
        if !status.success() {
            bail!("the load generator failed ({status}): {}", said.join("; "));
        }
        let seen: Seen =
            serde_json::from_str(&result).with_context(|| format!("the generator said {result:?}"))?;
        if let Some(fault) = seen.fault() {
            bail!("{fault}");
        }
        Ok(Figures {
            times_ns: seen.times_ns,
            cpu_ms: cpu_ms.0,
            generator_cpu_ms: cpu_ms.1,
            peak_bytes: lighthouse.peak_bytes()?,
            idle_cpu: 100.0 * cpu / idle.as_secs_f64().max(0.001),
            logged: fs::metadata(&self.log).map_or(0, |m| m.len()),
        })
    }
}

/// Hands on each line of the generator's standard error as it comes; what it wrote to standard output. Both are read at once: it writes its result, which
/// may be longer than a pipe holds, before the other one ends.
fn heard(generator: &mut Child, mut line: impl FnMut(String) -> Result<()>) -> Result<String> {
    let errors = generator.stderr.take();
    let errors = errors.context("the generator has no standard error")?;
    let output = generator.stdout.take();
    let output = output.context("the generator has no standard output")?;
    let result = thread::Builder::new()
        .name("ox-result".into())
        .spawn(move || std::io::read_to_string(output))
        .context("cannot start a thread")?;
    for said in BufReader::new(errors).lines() {
        line(said.context("reading from the generator")?)?;
    }
    match result.join() {
        Ok(text) => text.context("reading the generator's result"),
        Err(_) => bail!("the thread that reads the generator's result has panicked"),
    }
}

/// A process that is killed when this is dropped.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A running lighthouse.
struct Lighthouse {
    process: Ended,
    /// The peer ends when it is closed.
    _input: Option<ChildStdin>,
    url: String,
}

impl Lighthouse {
    fn start(program: &Path, replicas: u32, log: &Path) -> Result<Self> {
        let mut command = Command::new(program);
        command.args([
            "lighthouse",
            "--bind",
            "127.0.0.1:0",
            "--min-replicas",
            &replicas.to_string(),
        ]);
        let mut process = spawn(&mut command, log)?;
        let text = wait_for(log, "lighthouse at http://", &mut process)?;
        Ok(Self {
            process,
            _input: None,
            url: url_in(&text)?,
        })
    }

    /// torchft's, with the settings of its own command.
    fn start_peer(folder: &Path, script: &Path, replicas: u32, log: &Path) -> Result<Self> {
        let mut command = Command::new("python3");
        command.arg(script).arg(folder).stdin(Stdio::piped());
        let mut process = spawn(&mut command, log)?;
        let mut input = process.0.stdin.take().context("python3 has no standard input")?;
        let new = serde_json::json!({"id": 1, "new": "LighthouseServer", "as": "lighthouse", "with": {
            "bind": "127.0.0.1:0", "min_replicas": replicas, "join_timeout_ms": 60_000, "quorum_tick_ms": 100, "heartbeat_timeout_ms": 5000}});
        writeln!(input, "{new}").context("python3 does not read")?;
        wait_for(log, "\"id\": 1", &mut process)?;
        writeln!(
            input,
            "{}",
            serde_json::json!({"id": 2, "on": "lighthouse", "call": "address", "with": {}})
        )
        .context("python3 does not read")?;
        let text = wait_for(log, "\"id\": 2", &mut process)?;
        Ok(Self {
            process,
            _input: Some(input),
            url: url_in(&text)?,
        })
    }

    /// Processor time so far.
    fn cpu_seconds(&self) -> Result<f64> {
        cpu_seconds(self.process.0.id())
    }

    fn peak_bytes(&self) -> Result<u64> {
        let text = fs::read_to_string(format!("/proc/{}/status", self.process.0.id()))
            .context("the lighthouse ended")?;
        let line = text
            .lines()
            .find_map(|l| l.strip_prefix("VmHWM:"))
            .unwrap_or_default();
        let kib: u64 = line.trim().trim_end_matches(" kB").parse().unwrap_or(0);
        Ok(kib << 10)
    }
}

/// The processor time of all threads of a process so far. The kernel counts it in nanoseconds here; in /proc/PID/stat its unit is as long as some steps.
fn cpu_seconds(process: u32) -> Result<f64> {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).context("the process ended")?;
    let mut nanoseconds = 0.0;
    for task in tasks {
        let path = task
            .context("reading the threads of a process")?
            .path()
            .join("schedstat");
        // A thread may end meanwhile.
        let text = fs::read_to_string(path).unwrap_or_default();
        let first = text.split_whitespace().next();
        nanoseconds += first.and_then(|n| n.parse::<f64>().ok()).unwrap_or(0.0);
    }
    Ok(nanoseconds / 1e9)
}

fn spawn(command: &mut Command, log: &Path) -> Result<Ended> {
    let file = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
    let same = file.try_clone().context("cannot share the log file")?;
    let what = command.get_program().to_string_lossy().into_owned();
    command
        .stdout(file)
        .stderr(same)
        .spawn()
        .map(Ended)
        .with_context(|| format!("{what} could not be started"))
}

/// What the log says once `text` is in it.
fn wait_for(log: &Path, text: &str, process: &mut Ended) -> Result<String> {
    let end = Instant::now() + START;
    loop {
        let said = fs::read(log)
            .map(|b| String::from_utf8_lossy(&b).into_owned())
            .unwrap_or_default();
        if let Some(at) = said.find(text) {
            // Its line may be on its way still.
            let rest = said.get(at..).unwrap_or_default();
            if rest.contains('\n') {
                return Ok(said);
            }
        }
        if process.0.try_wait().is_ok_and(|ended| ended.is_some()) || Instant::now() >= end {
            bail!("the lighthouse did not start: {said}");
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// The address that a lighthouse says it has, on loopback: torchft's names the machine.
fn url_in(said: &str) -> Result<String> {
    let url = said
        .split("http://")
        .filter(|rest| !rest.starts_with('['))
        .skip(1)
        .last()
        .unwrap_or_default();
    let address = url
        .split(|c: char| c.is_whitespace() || c == '"')
        .next()
        .unwrap_or_default();
    let port = address
        .rsplit(':')
        .next()
        .unwrap_or_default()
        .trim_end_matches('/');
    let port: u16 = port.parse().with_context(|| format!("no address in {said:?}"))?;
    Ok(format!("http://127.0.0.1:{port}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_that_is_longer_than_a_pipe_holds_does_not_stop_the_generator() {
        let mut generator = Command::new("sh")
            .args(["-c", "head -c 300000 /dev/zero | tr '\\0' x; echo done >&2"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        let heard = thread::spawn(move || {
            let mut said = Vec::new();
            let result = heard(&mut generator, |line| {
                said.push(line);
                Ok(())
            });
            let _ = tell.send((said, result.map(|text| text.len())));
            generator.wait().unwrap()
        });
        let (said, length) = told.recv_timeout(Duration::from_secs(60)).unwrap();
        assert_eq!((said, length.unwrap()), (vec!["done".to_owned()], 300_000));
        assert!(heard.join().unwrap().success());
    }

    #[test]
    fn the_address_of_either_lighthouse_is_found_in_what_it_says() {
        let ours = "INFO listens address=\"http://127.0.0.1:1\"\noxccl: lighthouse at http://127.0.0.1:4711 (dashboard: the same address)\n";
        assert_eq!(url_in(ours).unwrap(), "http://127.0.0.1:4711");
        let theirs = "[INFO] Lighthouse listening on: http://vm:42\n\n{\"id\": 1, \"ok\": null}\n{\"id\": 2, \"ok\": \"http://vm:42809\"}\n";
        assert_eq!(url_in(theirs).unwrap(), "http://127.0.0.1:42809");
        assert!(url_in("nothing").is_err());
    }

    #[test]
    fn a_run_with_a_falsely_dead_replica_does_not_count() {
        let good = || Seen {
            replicas: 2,
            steps: 5,
            asked: 5,
            times_ns: vec![1],
            quorum_ids: 1,
            incomplete_replies: 0,
            failed: 0,
            errors: Vec::new(),
        };
        assert_eq!(good().fault(), None);
        assert!(
            Seen {
                quorum_ids: 2,
                ..good()
            }
            .fault()
            .unwrap()
            .contains("left out")
        );
        assert!(
            Seen {
                incomplete_replies: 1,
                ..good()
            }
            .fault()
            .is_some()
        );
        assert!(Seen { failed: 1, ..good() }.fault().is_some());
        assert!(Seen { steps: 4, ..good() }.fault().unwrap().contains("4 of 5"));
    }
}
