//! What a replica that heals as a spare costs the others: three processes commit steps, while a fourth fetches their state again and
//! again. It tells the times of the steps with and without a transfer, in turns, and the CPU time that a source spends for each byte.
//!
//! `cargo run --release -p oxccl-manager --example spare_cost [MIB] [TRANSFERS] [STEP_MS]` (256 MiB, 8 transfers and 20 ms unless told otherwise)
//!
//! A step sleeps as long as a device would compute, then reduces 1 MiB. The fourth process ends with its first load, so that it is never a member
//! and the members' epoch stays the same.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::indexing_slicing,
    reason = "a measuring program: a failure is the end of it"
)]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use checkpoint::StateDict;
use coordination::{LighthouseConfig, LighthouseServer};
use ftcore::{GroupOptions, ReduceOp, Result, Tensor, deadline_in};
use oxccl_manager::{Manager, ManagerConfig, Replica, State};

const MEMBERS: usize = 3;
const TENSORS: usize = 32;
/// Undisturbed steps are counted for so long between two transfers.
const QUIET: Duration = Duration::from_secs(3);
/// What a transfer leaves behind (freed memory) is not counted to either side.
const SETTLE: Duration = Duration::from_millis(500);

/// Microseconds on the clock that all processes share.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros() as u64
}

/// User and system time of this process in seconds, of all its threads.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    let ticks: f64 = fields[11..13].iter().map(|f| f.parse::<f64>().unwrap()).sum();
    // USER_HZ is 100 on Linux.
    ticks / 100.0
}

struct Model {
    weights: Vec<Vec<f32>>,
    steps: f32,
    ends_when_loaded: bool,
}

impl Model {
    fn new(mib: usize, ends_when_loaded: bool) -> Self {
        let elements = (mib << 20) / 4 / TENSORS;
        let weights = |seed: usize| (0..elements).map(|e| (e * (seed + 1)) as f32).collect();
        Self {
            weights: (0..TENSORS).map(weights).collect(),
            steps: 0.0,
            ends_when_loaded,
        }
    }
}

impl State for Model {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        for (i, values) in self.weights.iter().enumerate() {
            out.insert_f32(format!("layer{i:02}"), &[values.len()], values)?;
        }
        out.insert_f32("steps", &[1], &[self.steps])
    }
    fn load(&mut self, from: &StateDict) -> Result<()> {
        self.steps = from.get_f32_shaped("steps", &[1])?[0];
        if self.ends_when_loaded && self.steps > 0.0 {
            println!("loaded {}", now());
            std::process::exit(0);
        }
        for (i, values) in self.weights.iter_mut().enumerate() {
            *values = from.get_f32_shaped(&format!("layer{i:02}"), &[values.len()])?;
        }
        Ok(())
    }
}

/// The process of a replica: one line for each step.
fn replica(lighthouse: &str, name: &str, mib: usize, step: Duration) {
    let group = backend_gloo::GlooGroup::new(name, GroupOptions::default()).unwrap();
    let mut m = Manager::new(Arc::new(group), ManagerConfig::new(name, lighthouse)).unwrap();
    let mut state = Model::new(mib, name == "joiner");
    let soon = || deadline_in(Duration::from_secs(120));
    println!("begins {}", now());
    let mut begun = Instant::now();
    loop {
        m.start_quorum(&mut state, soon()).unwrap();
        std::thread::sleep(step);
        let work = m.all_reduce(vec![Tensor::from_vec(vec![1.0f32; 1 << 18])], ReduceOp::Avg);
        let sum = work.take();
        if m.should_commit(soon()).unwrap() {
            state.steps += sum.unwrap().into_tensor().unwrap().as_slice::<f32>().unwrap()[0];
            let took = begun.elapsed().as_micros();
            begun = Instant::now();
            println!("step {} {took} {}", now(), cpu_seconds());
        }
    }
}

struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(arguments: &[String], name: &str) -> (Process, Receiver<String>) {
    let mut process = Command::new(std::env::current_exe().unwrap())
        .arg(name)
        .args(arguments)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let output = BufReader::new(process.stdout.take().unwrap());
    let (tell, lines) = channel();
    let read = move || {
        let lines = output.lines().map_while(std::result::Result::ok);
        let _ = lines.map(|line| tell.send(line)).find(|sent| sent.is_err());
    };
    std::thread::Builder::new()
        .name("ox-lines".into())
        .spawn(read)
        .unwrap();
    (Process(process), lines)
}

/// When a step ended, how long it took, and the CPU time of its process by then.
#[derive(Clone, Copy)]
struct Step {
    at: u64,
    micros: u64,
    cpu: f64,
}

/// The steps that lie wholly in the window.
fn within(steps: &[Step], (from, to): (u64, u64)) -> impl Iterator<Item = &Step> {
    steps
        .iter()
        .filter(move |s| s.at - s.micros >= from && s.at <= to)
}

fn told(what: &str, mut times: Vec<u64>) -> f64 {
    times.sort_unstable();
    let at = |p: f64| times[((times.len() - 1) as f64 * p) as usize] as f64 / 1e3;
    let mean = times.iter().sum::<u64>() as f64 / times.len() as f64 / 1e3;
    println!(
        "{what:22} {:6} steps   mean {mean:7.2} ms   p50 {:7.2}   p99 {:7.2}   longest {:7.2}",
        times.len(),
        at(0.5),
        at(0.99),
        at(1.0)
    );
    mean
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let [name, lighthouse, mib, step] = &words[..] {
        let step = Duration::from_millis(step.parse().unwrap());
        return replica(lighthouse, name, mib.parse().unwrap(), step);
    }
    let mut numbers = words.iter().map(|a| a.parse::<usize>().unwrap());
    let mib = numbers.next().unwrap_or(256);
    let transfers = numbers.next().unwrap_or(8);
    let step_ms = numbers.next().unwrap_or(20);
    let lighthouse = LighthouseServer::start(LighthouseConfig {
        bind: "127.0.0.1:0".into(),
        min_replicas: 1,
        initial_replicas: Some(MEMBERS),
        ..LighthouseConfig::default()
    })
    .unwrap();
    let arguments = [lighthouse.address(), mib.to_string(), step_ms.to_string()];
    let all: [Arc<Mutex<Vec<Step>>>; MEMBERS] = Default::default();
    let mut members = Vec::new();
    for (i, steps) in all.iter().enumerate() {
        let (process, lines) = start(&arguments, &format!("member{i}"));
        members.push(process);
        let steps = Arc::clone(steps);
        let listen = move || {
            for line in lines {
                let words: Vec<&str> = line.split(' ').collect();
                if let ["step", at, micros, cpu] = words[..] {
                    steps.lock().unwrap().push(Step {
                        at: at.parse().unwrap(),
                        micros: micros.parse().unwrap(),
                        cpu: cpu.parse().unwrap(),
                    });
                }
            }
        };
        std::thread::Builder::new()
            .name("ox-steps".into())
            .spawn(listen)
            .unwrap();
    }
    while all.iter().any(|steps| steps.lock().unwrap().len() < 50) {
        std::thread::sleep(Duration::from_millis(20));
    }
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for _ in 0..transfers {
        let quiet = now();
        std::thread::sleep(QUIET);
        without.push((quiet, now()));
        let (process, lines) = start(&arguments, "joiner");
        let told = |what: &str| {
            let line = lines.iter().find(|line| line.starts_with(what)).unwrap();
            line.split(' ').nth(1).unwrap().parse::<u64>().unwrap()
        };
        with.push((told("begins"), told("loaded")));
        drop(process);
        std::thread::sleep(SETTLE);
    }
    let all = all.map(|steps| steps.lock().unwrap().clone());
    let times = |windows: &[(u64, u64)]| -> Vec<u64> {
        let of = |steps: &[Step]| -> Vec<u64> {
            let windows = windows.iter();
            windows
                .flat_map(|w| within(steps, *w).map(|s| s.micros))
                .collect()
        };
        all.iter().flat_map(|steps| of(steps)).collect()
    };
    let seconds = |(from, to): &(u64, u64)| (to - from) as f64 / 1e6;
    println!(
        "{MEMBERS} processes, steps of {step_ms} ms + 1 MiB, a state of {mib} MiB, {transfers} transfers in turns"
    );
    let before = told("without a transfer", times(&without));
    let beside = told("with a transfer", times(&with));
    println!("slower by {:.1} %", 100.0 * (beside / before - 1.0));
    let took: f64 = with.iter().map(seconds).sum();
    println!("a transfer took {:.2} s on average", took / transfers as f64);
    // CPU seconds and seconds, of all members together, between the last step before a window and the first one after it.
    let spent = |windows: &[(u64, u64)]| {
        let of = |steps: &[Step], (from, to): (u64, u64)| {
            let before = steps.iter().rfind(|s| s.at <= from)?;
            let after = steps.iter().find(|s| s.at >= to)?;
            Some((after.cpu - before.cpu, seconds(&(before.at, after.at))))
        };
        let all = all
            .iter()
            .flat_map(|steps| windows.iter().filter_map(|w| of(steps, *w)));
        all.fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
    };
    let ((quiet_cpu, quiet_time), (cpu, time)) = (spent(&without), spent(&with));
    let extra = cpu - time * quiet_cpu / quiet_time;
    let gigabytes = ((transfers * mib) << 20) as f64 / 1e9;
    println!(
        "CPU time for each GB of state: {:.2} s of each source, of which there are {MEMBERS}: its copy, hashes and what it sends",
        extra / gigabytes / MEMBERS as f64
    );
    drop(members);
}
