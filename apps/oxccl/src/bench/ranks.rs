//! The ranks of a benchmark, as threads of this process or as processes of their own, and how they end.
//!
//! A process rank is this program started again as `bench-rank`; it meets the others at a store of the parent and
//! cannot outlive it. Whichever rank fails first, the others are given a moment to say what they saw, then ended.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use oxccl::backend;
use oxccl::core::{
    Cancel, Error, ErrorKind, GroupOptions, InMemoryStore, ProcessGroup, Registry, Result, Store, TcpStore,
    TcpStoreServer, deadline_in,
};
use oxccl::isolate::{self, IsolateOptions};
use oxccl_launch::BoundChild;

use super::measure::{self, MEET};
use super::plan::Plan;
use crate::again;
use crate::scratch::Scratch;

/// How long ranks may take to end once they must.
const END: Duration = Duration::from_secs(10);
/// After a failure: how long the other ranks may take to say what they saw of it.
const REPORTING: Duration = Duration::from_secs(2);

/// One rank, until it has ended.
enum Rank {
    Thread {
        group: Arc<dyn ProcessGroup>,
        /// Ends it before its group is configured.
        cancel: Cancel,
        thread: Option<JoinHandle<Result<()>>>,
    },
    Process(BoundChild),
}

/// How a rank ended that did not end well.
#[derive(Debug)]
struct Failure {
    rank: u32,
    /// Ended by a signal: the likely cause of the other failures.
    killed: bool,
    text: String,
}

/// All ranks of one benchmark. Dropping them kills processes and aborts the groups of threads.
pub(super) struct Ranks {
    /// Where they meet and leave their results.
    pub(super) store: Arc<dyn Store>,
    ranks: Vec<(u32, Rank)>,
    failures: Vec<Failure>,
    /// Ranks that have ended without saying that they failed.
    ended: Vec<u32>,
    // Held for their ends: the server of the store and the logs, after the ranks.
    _server: Option<TcpStoreServer>,
    _scratch: Option<Scratch>,
}

/// A new group of the plan's backend, on the device of `rank`.
pub(super) fn group(plan: &Plan, rank: u32) -> Result<Arc<dyn ProcessGroup>> {
    let device = plan.device(rank)?;
    let options = GroupOptions::from_texts(&plan.options)?;
    let group = if plan.isolated {
        let found = backend::find(Some(&plan.backend), &device)?;
        let template = IsolateOptions::new(plan.backend.clone(), device.clone());
        isolate::wrap(&found, template).create(&device, &options)?
    } else {
        Registry::global().create(&plan.backend, &device, &options)?
    };
    Ok(Arc::from(group))
}

impl Ranks {
    /// Starts every rank as a thread named `ox-bench-N`.
    pub(super) fn threads(plan: &Plan) -> Result<Self> {
        let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
        let mut this = Self {
            store: store.clone(),
            ranks: Vec::new(),
            failures: Vec::new(),
            ended: Vec::new(),
            _server: None,
            _scratch: None,
        };
        for rank in 0..plan.ranks {
            let group = group(plan, rank)?;
            let cancel = Cancel::default();
            let (plan, store, its_group) = (plan.clone(), store.clone(), group.clone());
            let its_cancel = cancel.clone();
            let thread = std::thread::Builder::new()
                .name(format!("ox-bench-{rank}"))
                .spawn(move || {
                    measure::run(&plan, its_group.as_ref(), &store, rank, its_cancel).inspect_err(|e| {
                        // The others are not left waiting for it.
                        its_group.abort(&e.to_string());
                    })
                })
                .map_err(|e| Error::io(format!("start the thread of rank {rank}"), e))?;
            let thread = Some(thread);
            let started = Rank::Thread {
                group,
                cancel,
                thread,
            };
            this.ranks.push((rank, started));
        }
        Ok(this)
    }

    /// Starts every rank as a process of its own. The calling thread must outlive them.
    pub(super) fn processes(plan: &Plan) -> Result<Self> {
        let plan_text =
            serde_json::to_string(plan).map_err(|e| Error::invalid(format!("write the plan: {e}")))?;
        let scratch = Scratch::new("bench")?;
        let server = TcpStoreServer::bind("127.0.0.1:0")?;
        let address = format!("127.0.0.1:{}", server.port());
        let store = TcpStore::connect(&address, deadline_in(MEET))?;
        let verdicts = oxccl::plugin::verdicts_for_job();
        let mut ranks = Vec::new();
        for rank in 0..plan.ranks {
            let mut command = again()?;
            command
                .envs(verdicts.clone())
                .args(["bench-rank", "--rank", &rank.to_string()])
                .args(["--store", &address, "--plan", &plan_text]);
            let log = scratch.path().join(format!("rank-{rank}.log"));
            ranks.push((rank, Rank::Process(BoundChild::spawn(command, &log)?)));
        }
        Ok(Self {
            store: Arc::new(store),
            ranks,
            failures: Vec::new(),
            ended: Vec::new(),
            _server: Some(server),
            _scratch: Some(scratch),
        })
    }

    /// Takes the ranks that have ended off the list, and notes those that failed.
    fn collect(&mut self) {
        let (failures, done) = (&mut self.failures, &mut self.ended);
        self.ranks.retain_mut(|(rank, state)| {
            let (ended, failure) = look(state);
            match failure {
                Some((killed, text)) => failures.push(Failure {
                    rank: *rank,
                    killed,
                    text,
                }),
                None if ended => done.push(*rank),
                None => {}
            }
            !ended
        });
    }

    /// What went wrong, if a rank failed: all failures in words, the likely cause first.
    pub(super) fn failure(&mut self) -> Option<String> {
        self.collect();
        if self.failures.is_empty() {
            return None;
        }
        self.wait_all(deadline_in(REPORTING));
        self.stop("another rank failed");
        self.failures.sort_by_key(|f| (!f.killed, f.rank));
        let lines: Vec<String> = self
            .failures
            .iter()
            .map(|f| format!("rank {} failed: {}", f.rank, f.text))
            .collect();
        Some(lines.join("\n"))
    }

    /// The ranks that have ended, in words for the case that they should not have; none if all run.
    pub(super) fn ended(&mut self) -> Option<String> {
        self.collect();
        let ranks: Vec<String> = self.ended.iter().map(u32::to_string).collect();
        let plural = if ranks.len() == 1 { "rank" } else { "ranks" };
        (!ranks.is_empty()).then(|| {
            format!(
                "{plural} {} ended with exit code 0 before the measurement was over; look for what ends the process in the backend or its library",
                ranks.join(", ")
            )
        })
    }

    /// True if all have ended before the deadline. The failures among them are noted.
    fn wait_all(&mut self, deadline: Instant) -> bool {
        loop {
            self.collect();
            if self.ranks.is_empty() || Instant::now() >= deadline {
                return self.ranks.is_empty();
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits for the ranks' own end after the last line; the error says which failed or did not end.
    pub(super) fn finish(&mut self) -> Result<(), String> {
        let deadline = deadline_in(MEET);
        loop {
            if let Some(text) = self.failure() {
                return Err(text);
            }
            if self.ranks.is_empty() {
                return Ok(());
            }
            if Instant::now() >= deadline {
                break;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let left: Vec<String> = self.ranks.iter().map(|(rank, _)| rank.to_string()).collect();
        self.stop("the benchmark is over");
        Err(format!("ranks {} did not end", left.join(", ")))
    }

    /// Ends whatever still runs.
    pub(super) fn stop(&mut self, why: &str) {
        for (_, rank) in &mut self.ranks {
            rank.end(why);
        }
        // What they say now is of our own making.
        let noted = self.failures.len();
        if !self.wait_all(deadline_in(END)) {
            tracing::warn!(ranks = self.ranks.len(), "ranks did not end when told to");
        }
        self.failures.truncate(noted);
    }
}

impl Rank {
    fn end(&mut self, why: &str) {
        match self {
            Self::Thread { group, cancel, .. } => {
                cancel.cancel(Error::new(ErrorKind::Aborted, why));
                group.abort(why);
            }
            Self::Process(child) => {
                if let Err(error) = child.kill() {
                    tracing::warn!(%error, "a rank could not be ended");
                }
            }
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for (_, rank) in &mut self.ranks {
            rank.end("the benchmark was given up");
        }
    }
}

/// Whether the rank has ended, and if not well: (by a signal, what it said).
fn look(rank: &mut Rank) -> (bool, Option<(bool, String)>) {
    match rank {
        Rank::Thread { thread, .. } => {
            if thread.as_ref().is_some_and(|t| !t.is_finished()) {
                return (false, None);
            }
            match thread.take().map(JoinHandle::join) {
                Some(Ok(Ok(()))) | None => (true, None),
                Some(Ok(Err(e))) => (true, Some((false, e.to_string()))),
                Some(Err(_)) => (true, Some((true, "it panicked".to_string()))),
            }
        }
        Rank::Process(child) => match child.poll() {
            Ok(None) => (false, None),
            Ok(Some(exit)) if exit.success() => (true, None),
            Ok(Some(exit)) => {
                let mut text = exit.to_string();
                for line in child.tail().lines() {
                    text.push_str("\n  | ");
                    text.push_str(line);
                }
                (true, Some((exit.signal.is_some(), text)))
            }
            Err(e) => (true, Some((false, e.to_string()))),
        },
    }
}
