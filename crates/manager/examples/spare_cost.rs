//! What a replica that heals as a spare costs the others: three processes commit steps, while another one fetches their state again and
//! again. It tells the times of the steps with and without a transfer, in turns, their ratio on one line, and the processor time that the
//! training threads and the processes of the sources spend.
//!
//! `cargo run --release -p oxccl-manager --example spare_cost -- [MIB] [TRANSFERS] [STEP_MS] [--changes MIB] [--copies] [--pin] [--members N]` (256 MiB, 8
//! transfers and 20 ms unless told otherwise)
//!
//! - A step sleeps as long as a device would compute, reduces 1 MiB, and writes to `--changes` MiB of the state (1 unless told otherwise: what was reduced).
//! - The state is shared with its snapshots, so that the training thread copies a tensor when it writes to it while it is read;
//!   `--copies` copies all of it into each snapshot instead.
//! - `--pin` keeps the sources and the lighthouse on the first core and the spare on the second one.
//! - `--members 1`: one source, as if each had a machine of its own (3 unless told otherwise).
//!
//! The process that fetches ends with its first load, so that it is never a member and the members' epoch stays the same.

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

use checkpoint::{StateDict, writable};
use coordination::{LighthouseConfig, LighthouseServer};
use ftcore::{GroupOptions, ReduceOp, Result, Tensor, deadline_in};
use oxccl_manager::{Manager, ManagerConfig, Replica, State};
use rustix::time::{ClockId, clock_gettime};

/// The size of each tensor of the state.
const TENSOR_MIB: usize = 1;
/// Undisturbed steps are counted for so long between two transfers.
const QUIET: Duration = Duration::from_secs(3);
/// What a transfer leaves behind (freed memory) is not counted to either side.
const SETTLE: Duration = Duration::from_millis(500);

/// Microseconds on the clock that all processes share.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros() as u64
}

/// Processor time of this thread or process, in seconds.
fn cpu_seconds(clock: ClockId) -> f64 {
    let time = clock_gettime(clock);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// This thread and those that it starts run on that core only.
fn pin(core: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(core);
    rustix::thread::sched_setaffinity(None, &set).unwrap();
}

/// What the processes are told.
#[derive(Debug, Clone)]
struct Told {
    mib: usize,
    step_ms: usize,
    changes_mib: usize,
    copies: bool,
    pins: bool,
}

impl Told {
    fn words(&self) -> Vec<String> {
        let flag = |on: bool| usize::from(on);
        let numbers = [
            self.mib,
            self.step_ms,
            self.changes_mib,
            flag(self.copies),
            flag(self.pins),
        ];
        numbers.map(|n| n.to_string()).to_vec()
    }

    fn read(words: &[String]) -> Self {
        let numbers: Vec<usize> = words.iter().map(|w| w.parse().unwrap()).collect();
        Self {
            mib: numbers[0],
            step_ms: numbers[1],
            changes_mib: numbers[2],
            copies: numbers[3] == 1,
            pins: numbers[4] == 1,
        }
    }
}

struct Model {
    weights: Vec<Arc<Tensor>>,
    steps: f32,
    copies: bool,
    ends_when_loaded: bool,
}

impl Model {
    fn new(told: &Told, ends_when_loaded: bool) -> Self {
        let tensors = told.mib / TENSOR_MIB;
        let weights = |seed: usize| {
            let values: Vec<f32> = (0..TENSOR_MIB << 18).map(|e| (e * (seed + 1)) as f32).collect();
            Arc::new(Tensor::from_vec(values))
        };
        Self {
            weights: (0..tensors).map(weights).collect(),
            steps: 0.0,
            copies: told.copies,
            ends_when_loaded,
        }
    }

    /// A step of the optimiser on so many tensors.
    fn apply(&mut self, tensors: usize, by: f32) {
        for tensor in self.weights.iter_mut().take(tensors) {
            for value in writable(tensor).unwrap().as_mut_slice::<f32>().unwrap() {
                *value += by;
            }
        }
        self.steps += by;
    }
}

impl State for Model {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        for (i, tensor) in self.weights.iter().enumerate() {
            let name = format!("layer{i:04}");
            if self.copies {
                out.insert_f32(name, tensor.shape(), tensor.as_slice()?)?;
            } else {
                out.insert_shared(name, tensor)?;
            }
        }
        out.insert_f32("steps", &[1], &[self.steps])
    }
    fn load(&mut self, from: &StateDict) -> Result<()> {
        self.steps = from.get_f32_shaped("steps", &[1])?[0];
        if self.ends_when_loaded && self.steps > 0.0 {
            println!("loaded {}", now());
            std::process::exit(0);
        }
        for (i, tensor) in self.weights.iter_mut().enumerate() {
            *tensor = Arc::new(Tensor::from_vec(from.get_f32(&format!("layer{i:04}"))?));
        }
        Ok(())
    }
}

/// The process of a replica: one line for each step.
fn replica(name: &str, lighthouse: &str, told: &Told) {
    let is_spare = name == "joiner";
    if told.pins {
        pin(usize::from(is_spare));
    }
    let group = backend_gloo::GlooGroup::new(name, GroupOptions::default()).unwrap();
    let mut m = Manager::new(Arc::new(group), ManagerConfig::new(name, lighthouse)).unwrap();
    let mut state = Model::new(told, is_spare);
    let soon = || deadline_in(Duration::from_secs(120));
    println!("begins {}", now());
    let mut begun = Instant::now();
    loop {
        m.start_quorum(&mut state, soon()).unwrap();
        std::thread::sleep(Duration::from_millis(told.step_ms as u64));
        let work = m.all_reduce(vec![Tensor::from_vec(vec![1.0f32; 1 << 18])], ReduceOp::Avg);
        let sum = work.take();
        if m.should_commit(soon()).unwrap() {
            let by = sum.unwrap().into_tensor().unwrap().as_slice::<f32>().unwrap()[0];
            state.apply(told.changes_mib / TENSOR_MIB, by);
            let took = begun.elapsed().as_micros();
            begun = Instant::now();
            let [thread, process] = [ClockId::ThreadCPUTime, ClockId::ProcessCPUTime].map(cpu_seconds);
            println!("step {} {took} {thread} {process}", now());
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
        .args(["replica", name])
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

/// When a step ended, how long it took, and the processor time of its thread and process by then.
#[derive(Clone, Copy)]
struct Step {
    at: u64,
    micros: u64,
    thread: f64,
    process: f64,
}

/// The steps that lie wholly in the window.
fn within(steps: &[Step], (from, to): (u64, u64)) -> impl Iterator<Item = &Step> {
    steps
        .iter()
        .filter(move |s| s.at - s.micros >= from && s.at <= to)
}

/// The times of steps in milliseconds.
struct Times {
    mean: f64,
    p50: f64,
    p99: f64,
    longest: f64,
    steps: usize,
}

impl Times {
    fn of(mut micros: Vec<u64>) -> Self {
        micros.sort_unstable();
        let at = |p: f64| micros[((micros.len() - 1) as f64 * p) as usize] as f64 / 1e3;
        Self {
            mean: micros.iter().sum::<u64>() as f64 / micros.len() as f64 / 1e3,
            p50: at(0.5),
            p99: at(0.99),
            longest: at(1.0),
            steps: micros.len(),
        }
    }

    fn tell(&self, what: &str) {
        println!(
            "{what:22} {:6} steps   mean {:7.2} ms   p50 {:7.2}   p99 {:7.2}   longest {:7.2}",
            self.steps, self.mean, self.p50, self.p99, self.longest
        );
    }
}

/// The words of the command line: numbers first. What the processes are told, the number of transfers, and that of members.
fn asked(words: &[String]) -> (Told, usize, usize) {
    let mut words = words.iter();
    let (mut numbers, mut changes_mib, mut copies, mut pins) = (Vec::new(), 1, false, false);
    let mut members = 3;
    while let Some(word) = words.next() {
        match word.as_str() {
            "--changes" => changes_mib = words.next().unwrap().parse().unwrap(),
            "--members" => members = words.next().unwrap().parse().unwrap(),
            "--copies" => copies = true,
            "--pin" => pins = true,
            number => numbers.push(number.parse::<usize>().unwrap()),
        }
    }
    let mut numbers = numbers.into_iter();
    let mib = numbers.next().unwrap_or(256);
    let transfers = numbers.next().unwrap_or(8);
    let step_ms = numbers.next().unwrap_or(20);
    let told = Told {
        mib,
        step_ms,
        changes_mib,
        copies,
        pins,
    };
    (told, transfers, members)
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let [role, name, lighthouse, told @ ..] = &words[..]
        && role == "replica"
    {
        return replica(name, lighthouse, &Told::read(told));
    }
    let (told, transfers, count) = asked(&words);
    if told.pins {
        pin(0);
    }
    let lighthouse = LighthouseServer::start(LighthouseConfig {
        bind: "127.0.0.1:0".into(),
        min_replicas: 1,
        initial_replicas: Some(count),
        ..LighthouseConfig::default()
    })
    .unwrap();
    let arguments = [vec![lighthouse.address()], told.words()].concat();
    let all: Vec<Arc<Mutex<Vec<Step>>>> = (0..count).map(|_| Arc::default()).collect();
    let mut members = Vec::new();
    for (i, steps) in all.iter().enumerate() {
        let (process, lines) = start(&arguments, &format!("member{i}"));
        members.push(process);
        let steps = Arc::clone(steps);
        let listen = move || {
            for line in lines {
                let words: Vec<&str> = line.split(' ').collect();
                if let ["step", at, micros, thread, process] = words[..] {
                    steps.lock().unwrap().push(Step {
                        at: at.parse().unwrap(),
                        micros: micros.parse().unwrap(),
                        thread: thread.parse().unwrap(),
                        process: process.parse().unwrap(),
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
    let all: Vec<Vec<Step>> = all.iter().map(|steps| steps.lock().unwrap().clone()).collect();
    let times = |windows: &[(u64, u64)]| {
        let of = |steps: &Vec<Step>| -> Vec<u64> {
            let windows = windows.iter();
            windows
                .flat_map(|w| within(steps, *w).map(|s| s.micros))
                .collect()
        };
        Times::of(all.iter().flat_map(of).collect())
    };
    println!("{count} processes, {told:?}, {transfers} transfers in turns");
    for (round, (quiet, beside)) in without.iter().zip(&with).enumerate() {
        let (quiet, beside) = (times(&[*quiet]), times(&[*beside]));
        println!(
            "round {round}: mean {:.3}, p50 {:.3} of the steps without",
            beside.mean / quiet.mean,
            beside.p50 / quiet.p50
        );
    }
    let (before, beside) = (times(&without), times(&with));
    before.tell("without a transfer");
    beside.tell("with a transfer");
    println!(
        "slower with a transfer: mean {:+.1} %, p50 {:+.1} %",
        100.0 * (beside.mean / before.mean - 1.0),
        100.0 * (beside.p50 / before.p50 - 1.0)
    );
    let seconds = |(from, to): &(u64, u64)| (to - from) as f64 / 1e6;
    let took: f64 = with.iter().map(seconds).sum();
    println!("a transfer took {:.2} s on average", took / transfers as f64);
    // Seconds of training threads, of processes, and by the clock, of all members together, between the last step before a window and the first
    // one after it.
    let spent = |windows: &[(u64, u64)]| {
        let of = |steps: &[Step], (from, to): (u64, u64)| {
            let before = steps.iter().rfind(|s| s.at <= from)?;
            let after = steps.iter().find(|s| s.at >= to)?;
            let clock = seconds(&(before.at, after.at));
            Some([
                after.thread - before.thread,
                after.process - before.process,
                clock,
            ])
        };
        let all = all
            .iter()
            .flat_map(|steps| windows.iter().filter_map(|w| of(steps, *w)));
        all.fold([0.0; 3], |sum, one| {
            [sum[0] + one[0], sum[1] + one[1], sum[2] + one[2]]
        })
    };
    let (quiet, beside) = (spent(&without), spent(&with));
    let each = (transfers * count) as f64;
    let extra = |what: usize| 1e3 * (beside[what] - beside[2] * quiet[what] / quiet[2]) / each;
    println!(
        "processor time of a source for a transfer: {:.1} ms on its training thread, {:.1} ms on all its threads",
        extra(0),
        extra(1)
    );
    drop(members);
}
