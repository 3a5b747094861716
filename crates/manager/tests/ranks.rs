//! Replicas of several ranks, each rank a process: one that dies or hangs takes its replica out, by name, and no other.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::cell::Cell;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use checkpoint::StateDict;
use coordination::{LighthouseClient, LighthouseConfig, LighthouseServer, LighthouseStatus};
use ftcore::{
    Error, ErrorKind, GroupOptions, ReduceOp, Result, Step, TcpStore, TcpStoreServer, Tensor, deadline_in,
    time_left,
};
use oxccl_manager::{Manager, ManagerConfig, Participation, Replica, State};

/// Tells [`a_process_of_a_rank`] what it is: lighthouse, store, replica, rank, time-out in seconds, what it does at [`PAUSE`].
const RANK: &str = "OXCCL_TEST_RANK";
/// The step before which a process stands still, if it is to.
const PAUSE: i64 = 3;
/// For what is not measured.
const TIME_LIMIT: Duration = Duration::from_secs(60);

fn lighthouse() -> LighthouseServer {
    LighthouseServer::start(LighthouseConfig {
        bind: "127.0.0.1:0".into(),
        min_replicas: 1,
        initial_replicas: Some(2),
        join_timeout: Duration::from_secs(30),
        heartbeat_timeout: Duration::from_secs(60),
        ..LighthouseConfig::default()
    })
    .unwrap()
}

fn soon() -> Instant {
    deadline_in(TIME_LIMIT)
}

struct Number(f32);

impl State for Number {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        out.insert_f32("value", &[1], &[self.0])
    }
    fn load(&mut self, from: &StateDict) -> Result<()> {
        self.0 = from.get_f32_shaped("value", &[1])?[0];
        Ok(())
    }
}

/// One attempt at a step: its contributors if it committed.
fn attempt(m: &mut Manager, state: &mut Number) -> Result<Option<u32>> {
    m.start_quorum(state, soon())?;
    let work = m.all_reduce(vec![Tensor::from_vec(vec![1.0f32])], ReduceOp::Avg);
    let sum = work.take();
    if !m.should_commit(soon())? {
        return Ok(None);
    }
    let done = sum?;
    let contributors = done.contributors;
    state.0 += done.into_tensor()?.as_slice::<f32>()?[0];
    Ok(Some(contributors))
}

/// Not a test: the process of a rank, which another test starts and kills.
#[test]
#[ignore = "a process for another test"]
fn a_process_of_a_rank() {
    let Ok(told) = std::env::var(RANK) else {
        return;
    };
    let told: Vec<&str> = told.split(' ').collect();
    let [lighthouse, store, replica, rank, timeout, at_pause] = told[..] else {
        panic!("{told:?}");
    };
    // The line of the test harness has no end yet.
    println!();
    let (tell, lines) = channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines() {
            tell.send(line.unwrap()).unwrap();
        }
        // The process that started this one is gone.
        std::process::exit(1);
    });
    let group = backend_gloo::GlooGroup::new("g", GroupOptions::default()).unwrap();
    let mut config = ManagerConfig::new(replica, lighthouse);
    (config.group_rank, config.group_world_size) = (rank.parse().unwrap(), 2);
    config.replica_store = Some(Arc::new(TcpStore::connect(store, soon()).unwrap()));
    config.timeout = Duration::from_secs(timeout.parse().unwrap());
    config.progress_timeout = config.timeout * 2;
    let mut m = Manager::new(Arc::new(group), config).unwrap();
    let mut state = Number(0.0);
    let mut paused = false;
    let error = loop {
        if m.current_step() >= Step(PAUSE) && !paused {
            paused = true;
            match at_pause {
                "hang" => {
                    println!("stands");
                    lines.recv().unwrap();
                }
                "compute" => {
                    println!("stands");
                    while lines.recv_timeout(Duration::from_millis(100)).is_err() {
                        m.progress();
                    }
                }
                _ => {}
            }
        }
        let step = m.current_step();
        match attempt(&mut m, &mut state) {
            Ok(Some(contributors)) => println!("step {rank} {} {contributors}", m.current_step()),
            Ok(None) => println!("lost {rank} {step}"),
            Err(e) => break e,
        }
    };
    println!("end {:?} {}", error.kind(), error.to_string().replace('\n', " "));
}

/// A process; it does not outlive the test.
struct Rank {
    name: String,
    process: Child,
    input: ChildStdin,
    lines: Receiver<String>,
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Rank {
    fn go_on(&mut self) {
        self.input.write_all(b"go on\n").unwrap();
    }

    /// The first line that `wanted` makes something of.
    fn until<T>(&self, what: &str, deadline: Instant, wanted: impl Fn(&str) -> Option<T>) -> T {
        let mut last = String::new();
        loop {
            match self.lines.recv_timeout(time_left(deadline)) {
                Ok(line) => {
                    if let Some(found) = wanted(&line) {
                        return found;
                    }
                    last = line;
                }
                Err(RecvTimeoutError::Timeout) => panic!("{}: not {what} in time; last: {last}", self.name),
                Err(RecvTimeoutError::Disconnected) => {
                    panic!("{}: ended, and not {what}; last: {last}", self.name)
                }
            }
        }
    }

    /// Until it has committed `n` steps with so many contributors.
    fn commits(&self, n: usize, contributors: u32, deadline: Instant) {
        for _ in 0..n {
            self.until(&format!("a step of {contributors}"), deadline, |line| {
                let parts: Vec<&str> = line.split(' ').collect();
                let n = matches!(parts[..], ["step", _, _, n] if n == contributors.to_string());
                n.then_some(())
            });
        }
    }

    fn stands(&self) {
        self.until("stands", soon(), |line| (line == "stands").then_some(()));
    }
}

/// Replicas a and b of two ranks each, and where the ranks of each meet.
struct Job {
    a: [Rank; 2],
    b: [Rank; 2],
    client: LighthouseClient,
    _stores: [TcpStoreServer; 2],
    _lighthouse: LighthouseServer,
}

impl Job {
    /// `at_pause`: what the ranks 1 of a and b do before step [`PAUSE`].
    fn start(timeout_s: u32, at_pause: [&str; 2]) -> Self {
        let lighthouse = lighthouse();
        let stores = [(), ()].map(|()| TcpStoreServer::bind("127.0.0.1:0").unwrap());
        let rank = |replica: &str, store: &TcpStoreServer, rank: u32, at_pause: &str| {
            let told = format!(
                "{} 127.0.0.1:{} {replica} {rank} {timeout_s} {at_pause}",
                lighthouse.address(),
                store.port(),
            );
            let mut process = Command::new(std::env::current_exe().unwrap())
                .args([
                    "--exact",
                    "ranks::a_process_of_a_rank",
                    "--ignored",
                    "--nocapture",
                ])
                .env(RANK, told)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let input = process.stdin.take().unwrap();
            let output = BufReader::new(process.stdout.take().unwrap());
            let (tell, lines) = channel();
            std::thread::spawn(move || {
                let lines = output.lines().map_while(std::result::Result::ok);
                let _ = lines.map(|line| tell.send(line)).find(|sent| sent.is_err());
            });
            Rank {
                name: format!("{replica}{rank}"),
                process,
                input,
                lines,
            }
        };
        let replica = |name, store, at_pause| [rank(name, store, 0, "run"), rank(name, store, 1, at_pause)];
        Self {
            a: replica("a", &stores[0], at_pause[0]),
            b: replica("b", &stores[1], at_pause[1]),
            client: LighthouseClient::connect(&lighthouse.address(), soon()).unwrap(),
            _stores: stores,
            _lighthouse: lighthouse,
        }
    }

    fn until(&self, what: &str, deadline: Instant, found: impl Fn(&LighthouseStatus) -> bool) {
        loop {
            let status = self.client.status(soon()).unwrap();
            if found(&status) {
                return;
            }
            assert!(Instant::now() < deadline, "not {what} in time: {status:?}");
            std::thread::park_timeout(Duration::from_millis(10));
        }
    }

    /// The lighthouse has ended the epoch with a reason that names b and has all of `parts`.
    fn until_aborted(&self, deadline: Instant, parts: &[&str]) {
        self.until("aborted", deadline, |s| {
            let why = s.aborted.as_deref().unwrap_or_default();
            why.contains("b:") && parts.iter().all(|part| why.contains(part))
        });
    }
}

/// The end of rank 0, whose rank 1 was killed.
fn ends_because_of_rank_1(rank_0: &Rank, deadline: Instant) {
    let end = rank_0.until("over", deadline, |line| {
        line.strip_prefix("end ").map(str::to_string)
    });
    for part in [
        "PeerLost",
        "rank 1 of this replica is gone",
        "start the replica again",
    ] {
        assert!(end.contains(part), "{end}");
    }
}

#[test]
fn a_rank_that_is_killed_takes_its_replica_out_at_once_and_the_others_go_on() {
    let mut job = Job::start(60, ["run", "run"]);
    for rank in job.a.iter().chain(&job.b) {
        rank.commits(3, 2, soon());
    }
    job.b[1].process.kill().unwrap();
    // The time-outs are 60 s and 120 s, and others are waited for as long as 30 s.
    let at_once = deadline_in(Duration::from_secs(15));
    for rank in &job.a {
        rank.commits(5, 1, at_once);
    }
    ends_because_of_rank_1(&job.b[0], at_once);
    job.until("without b", at_once, |s| {
        s.healthy.iter().all(|h| h.replica_id.starts_with("a:"))
    });
}

#[test]
fn the_lighthouse_names_a_rank_that_was_killed() {
    // Replica a is not in a reduction, so only b's own rank 0 has something to report; and no replica asks for the next epoch.
    let mut job = Job::start(60, ["compute", "run"]);
    job.a[1].stands();
    job.b[1].process.kill().unwrap();
    let at_once = deadline_in(Duration::from_secs(15));
    job.until_aborted(at_once, &["rank 1 of this replica is gone"]);
    ends_because_of_rank_1(&job.b[0], at_once);
    job.a[1].go_on();
    for rank in &job.a {
        rank.until("alone", at_once, |line| {
            let alone = line.ends_with(&format!(" {} 1", PAUSE + 1));
            alone.then_some(())
        });
    }
}

#[test]
fn a_rank_whose_training_thread_hangs_takes_its_replica_out_by_name_and_comes_back() {
    let mut job = Job::start(2, ["compute", "hang"]);
    job.b[1].stands();
    job.a[1].stands();
    let hung = deadline_in(Duration::from_secs(20));
    job.until_aborted(hung, &["rank 1 made no progress"]);
    job.a[1].go_on();
    for rank in &job.a {
        // The first step of all has one contributor, too.
        rank.until("alone", hung, |line| {
            line.ends_with(&format!(" {} 1", PAUSE + 1)).then_some(())
        });
        rank.commits(5, 1, hung);
    }
    job.b[1].go_on();
    let back = deadline_in(Duration::from_secs(30));
    for rank in job.b.iter().chain(&job.a) {
        rank.until("with the other again", back, |line| {
            let mut parts = line.strip_prefix("step ")?.split(' ').skip(1);
            let step: i64 = parts.next()?.parse().ok()?;
            (step > PAUSE + 5 && parts.next() == Some("2")).then_some(())
        });
    }
}

/// What a replica saw of one attempt.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Attempt {
    step: Step,
    members: usize,
    contributors: u32,
    committed: bool,
    value: f32,
}

/// Attempts until three have contributed. `spoils`: this replica fails the first attempt of three.
fn attempts(name: &str, url: &str, input: f32, spoils: bool, begun: impl Fn(&Participation)) -> Vec<Attempt> {
    let group = backend_gloo::GlooGroup::new(name, GroupOptions::default()).unwrap();
    let mut m = Manager::new(Arc::new(group), ManagerConfig::new(name, url)).unwrap();
    let mut state = Number(0.0);
    let mut seen: Vec<Attempt> = Vec::new();
    loop {
        let p = m.start_quorum(&mut state, soon()).unwrap();
        begun(&p);
        let spoilt = spoils && p.members.len() == 3 && seen.iter().all(|a| a.members < 3);
        let sum = if spoilt {
            // Before the reduction, so that no rank can have its result.
            m.report_error(Error::new(ErrorKind::Backend, "something local"));
            None
        } else {
            let work = m.all_reduce(vec![Tensor::from_vec(vec![input])], ReduceOp::Avg);
            Some(work.take())
        };
        let committed = m.should_commit(soon()).unwrap();
        if committed {
            let sum = sum.unwrap().unwrap().into_tensor().unwrap();
            state.0 += sum.as_slice::<f32>().unwrap()[0];
        }
        seen.push(Attempt {
            step: p.step,
            members: p.members.len(),
            contributors: p.contributors,
            committed,
            value: state.0,
        });
        if committed && p.contributors == 3 {
            m.leave(soon()).unwrap();
            return seen;
        }
    }
}

#[test]
fn a_replica_that_healed_into_a_lost_step_does_not_weigh_in() {
    let lighthouse = lighthouse();
    let url = &lighthouse.address();
    let members_before = Cell::new(2);
    let ((running, late), (healed, has_healed)) = (channel(), channel());
    let (a, b, c) = std::thread::scope(|scope| {
        // The attempt is lost only once c has healed in it: an epoch that ends before that leaves c where it was.
        let until_healed = move |p: &Participation| {
            if p.members.len() == 3 && members_before.replace(3) < 3 {
                has_healed.recv_timeout(TIME_LIMIT).unwrap();
            } else if p.step > Step(2) {
                let _ = running.send(());
            }
        };
        let a = scope.spawn(move || attempts("a", url, 2.0, true, until_healed));
        let b = scope.spawn(move || attempts("b", url, 4.0, false, |_| ()));
        late.recv_timeout(TIME_LIMIT).unwrap();
        let c = attempts("c", url, 99.0, false, |p| {
            if p.healed.is_some() {
                let _ = healed.send(());
            }
        });
        (a.join().unwrap(), b.join().unwrap(), c)
    });
    let step = c[0].step;
    assert!(step > Step(2) && !c[0].committed, "{c:?}");
    // Also in the second attempt c only has what the others gave it.
    for attempt in c.iter().filter(|attempt| attempt.step == step) {
        assert_eq!((attempt.members, attempt.contributors), (3, 2), "{c:?}");
    }
    // In the step after it, it counts: (2 + 4 + 99) / 3.
    let last = c.last().unwrap();
    assert_eq!((last.step, last.contributors), (step + 1, 3), "{c:?}");
    let lost = c
        .iter()
        .rfind(|attempt| attempt.step == step && attempt.committed);
    assert_eq!(last.value - lost.unwrap().value, 35.0, "{c:?}");
    assert_eq!(lost.unwrap().value - c[0].value, 3.0, "{c:?}");
    for other in [a, b] {
        let tail = &other[other.len() - c.len()..];
        assert_eq!(tail, c, "{other:?}");
    }
}
