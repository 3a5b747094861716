//! The thread that starts, restarts and ends the processes (`ox-launch`).
//!
//! It alone starts and collects children, which it outlives: Linux ties a child's parent-death signal to the starting
//! *thread*. One thread per child (`ox-wait-…`) waits for its end, sees to it that its last events are read, and
//! tells this one; between such messages this thread sleeps until the next restart or deadline that is due.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::PoisonError;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use ftcore::{Error, ErrorKind, Result, deadline_in, join_address, split_address, split_url, time_left};
use rustix::process::Signal;

use super::child;
use super::env::{ENV_EVENTS, ENV_LIFE, ENV_LIGHTHOUSE, ENV_REPLICA, ENV_REPLICAS};
use super::events::{LighthouseReady, SupervisorEvent, now_us};
use super::listener::EventListener;
use super::outcome::{ExitSummary, Outcome, ReplicaOutcome, StopReason};
use super::queue::EventQueue;
use super::supervisor::{
    GiveUp, LighthouseLaunch, LighthouseSource, ReplicaLaunch, Running, SupervisorConfig, restart_deadline,
};

/// How long the last events of an ended process may take to be read.
const DRAIN: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Who {
    Lighthouse,
    Replica(u32),
}

impl std::fmt::Display for Who {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Lighthouse => f.write_str("lighthouse"),
            Self::Replica(replica) => write!(f, "replica {replica}"),
        }
    }
}

#[derive(Debug)]
pub(super) enum Control {
    Ended { who: Who, life: u32, t_us: u64 },
    LighthouseReady(LighthouseReady),
    Stop(StopReason),
}

pub(super) struct Run {
    pub(super) config: SupervisorConfig,
    pub(super) command: Box<dyn Fn(&ReplicaLaunch) -> Command + Send>,
    pub(super) events: EventQueue,
    pub(super) to_self: Sender<Control>,
    pub(super) inbox: Receiver<Control>,
    pub(super) running: Running,
}

/// One process of the run over its lives.
#[derive(Debug)]
struct Slot {
    child: Option<Child>,
    lives: u32,
    /// Short lives in a row, for the pause before the next.
    in_a_row: u32,
    started: Instant,
    next_start: Option<Instant>,
    exit: Option<ExitSummary>,
    tail: String,
    /// It will not be started again.
    over: bool,
}

impl Slot {
    fn new() -> Self {
        Self {
            child: None,
            lives: 0,
            in_a_row: 0,
            started: Instant::now(),
            next_start: None,
            exit: None,
            tail: String::new(),
            over: false,
        }
    }
}

struct Machine {
    run: Run,
    listener: EventListener,
    slots: BTreeMap<Who, Slot>,
    lighthouse: String,
    /// Set from the (re)start of the lighthouse until it says that it listens.
    lighthouse_due: Option<Instant>,
    stopping: Option<StopReason>,
    /// When those that still run are killed.
    kill_at: Option<Instant>,
}

pub(super) fn run(run: Run, start_by: Instant, started: &Sender<Result<String>>, outcome: &Sender<Outcome>) {
    let events = run.events.clone();
    let mut machine = match Machine::new(run) {
        Ok(machine) => machine,
        Err(e) => {
            let _ = started.send(Err(e));
            return;
        }
    };
    let failed = machine.start(start_by).err();
    if failed.is_some() {
        machine.stop(StopReason::Stopped {
            why: "the start failed".into(),
        });
        machine.kill_at = Some(Instant::now());
    } else {
        let _ = started.send(Ok(machine.lighthouse.clone()));
    }
    while !machine.is_over() {
        machine.turn();
    }
    let result = machine.outcome();
    // The socket goes before the end is told, so that a driver may remove the run directory then.
    drop(machine);
    if let Some(e) = failed {
        let _ = started.send(Err(e));
    }
    let _ = outcome.send(result.clone());
    events.push(SupervisorEvent::Finished(result));
}

impl Machine {
    fn new(run: Run) -> Result<Self> {
        let c = &run.config;
        let replicas = c.first_replica..c.first_replica + c.replicas;
        let listener = EventListener::start(
            &c.run_dir,
            replicas.clone(),
            run.events.clone(),
            run.to_self.clone(),
        )?;
        let mut slots: BTreeMap<Who, Slot> = replicas.map(|r| (Who::Replica(r), Slot::new())).collect();
        let lighthouse = match &c.lighthouse {
            LighthouseSource::External(url) => url.clone(),
            LighthouseSource::Spawn { .. } => {
                slots.insert(Who::Lighthouse, Slot::new());
                String::new()
            }
        };
        Ok(Self {
            run,
            listener,
            slots,
            lighthouse,
            lighthouse_due: None,
            stopping: None,
            kill_at: None,
        })
    }

    /// The lighthouse first, then the replicas. An error leaves what was started for the caller to stop.
    fn start(&mut self, start_by: Instant) -> Result<()> {
        if self.slots.contains_key(&Who::Lighthouse) {
            self.spawn(Who::Lighthouse)?;
            self.lighthouse_due = Some(start_by);
            while self.lighthouse_due.is_some() {
                match self.run.inbox.recv_timeout(time_left(start_by)) {
                    Ok(Control::Ended {
                        who: Who::Lighthouse, ..
                    }) => {
                        self.collect(Who::Lighthouse);
                        let slot = self.slots.get(&Who::Lighthouse);
                        let (exit, tail) = slot.map(|s| (s.exit, s.tail.clone())).unwrap_or_default();
                        let exit = exit.map_or_else(String::new, |e| format!(" ({e})"));
                        return Err(Error::new(
                            ErrorKind::Unavailable,
                            format!("the lighthouse ended before it was ready{exit}:\n{}", tail.trim()),
                        ));
                    }
                    Ok(message) => self.handle(message),
                    Err(_) => {
                        return Err(Error::timeout(
                            "the lighthouse was started but did not say that it listens; see lighthouse.log in the \
                             run directory",
                        ));
                    }
                }
                if let Some(reason) = &self.stopping {
                    return Err(Error::new(
                        ErrorKind::Aborted,
                        format!("the start was ended: {reason}"),
                    ));
                }
            }
        }
        let replicas: Vec<Who> = self
            .slots
            .keys()
            .copied()
            .filter(|who| *who != Who::Lighthouse)
            .collect();
        for who in replicas {
            self.spawn(who)?;
        }
        Ok(())
    }

    fn is_over(&self) -> bool {
        self.slots.values().all(|slot| slot.over && slot.child.is_none())
    }

    /// Waits for one message or for the next moment at which something is due, and does it.
    fn turn(&mut self) {
        let due = self
            .slots
            .values()
            .filter_map(|slot| slot.next_start)
            .chain(self.run.config.deadline.filter(|_| self.stopping.is_none()))
            .chain(self.kill_at)
            .chain(self.lighthouse_due)
            .min();
        let message = match due {
            Some(due) => self.run.inbox.recv_timeout(time_left(due)),
            None => self.run.inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        // Never disconnected: this thread holds a sender itself.
        if let Ok(message) = message {
            self.handle(message);
        }
        let now = Instant::now();
        if self.stopping.is_none() && self.run.config.deadline.is_some_and(|deadline| now >= deadline) {
            self.stop(StopReason::Deadline);
        }
        if self.lighthouse_due.is_some_and(|due| now >= due) {
            tracing::warn!("the restarted lighthouse does not listen; it is ended");
            self.lighthouse_due = None;
            self.signal(Who::Lighthouse, Signal::KILL);
        }
        if self.kill_at.is_some_and(|at| now >= at) {
            self.kill_at = None;
            for who in self.who() {
                self.signal(who, Signal::KILL);
            }
        }
        for who in self.who() {
            let due = self
                .slots
                .get(&who)
                .and_then(|slot| slot.next_start)
                .is_some_and(|at| now >= at);
            if due && let Err(e) = self.spawn(who) {
                let (life, t_us) = (
                    self.slots
                        .get(&who)
                        .map_or(0, |slot| slot.lives.saturating_sub(1)),
                    now_us(),
                );
                self.ended(
                    who,
                    life,
                    t_us,
                    ExitSummary {
                        status: None,
                        signal: None,
                    },
                    e.to_string(),
                );
            }
        }
        // When the last replica is done, so is the lighthouse.
        let replicas_over = self
            .slots
            .iter()
            .all(|(who, slot)| *who == Who::Lighthouse || slot.over);
        if replicas_over && self.slots.contains_key(&Who::Lighthouse) && self.stopping.is_none() {
            self.stop(StopReason::Completed);
        }
    }

    fn who(&self) -> Vec<Who> {
        self.slots.keys().copied().collect()
    }

    fn handle(&mut self, message: Control) {
        match message {
            Control::LighthouseReady(ready) => {
                let current = self
                    .slots
                    .get(&Who::Lighthouse)
                    .and_then(|slot| slot.child.as_ref());
                // A wrapper script may be the child and the lighthouse its child: ids then differ, and that is fine as
                // long as an answer is due.
                if self.lighthouse_due.take().is_none() {
                    tracing::warn!(
                        "process {} says that it is a lighthouse at {}; nobody waits for that (ours is process {:?})",
                        ready.pid,
                        ready.url,
                        current.map(Child::id)
                    );
                    return;
                }
                if self.lighthouse.is_empty() {
                    self.lighthouse.clone_from(&ready.url);
                } else if self.lighthouse != ready.url {
                    tracing::warn!(
                        "the lighthouse came back at {}, not at {}",
                        ready.url,
                        self.lighthouse
                    );
                }
                self.run.events.push(SupervisorEvent::LighthouseUp {
                    url: ready.url,
                    t_us: now_us(),
                });
            }
            Control::Ended { who, life, t_us } => {
                let current = self
                    .slots
                    .get(&who)
                    .is_some_and(|s| s.child.is_some() && s.lives == life + 1);
                if current && let Some((exit, tail)) = self.collect(who) {
                    self.ended(who, life, t_us, exit, tail);
                }
            }
            Control::Stop(reason) => {
                if self.stopping.is_some() {
                    // Asked twice: now.
                    self.kill_at = Some(Instant::now());
                } else {
                    self.stop(reason);
                }
            }
        }
    }

    /// No more restarts; SIGTERM now, SIGKILL after the grace time.
    fn stop(&mut self, reason: StopReason) {
        self.stopping = Some(reason);
        self.lighthouse_due = None;
        for slot in self.slots.values_mut() {
            slot.next_start = None;
            slot.over = true;
        }
        for who in self.who() {
            self.signal(who, Signal::TERM);
        }
        self.kill_at = Some(deadline_in(self.run.config.grace));
    }

    fn signal(&self, who: Who, signal: Signal) {
        if let Some(child) = self.slots.get(&who).and_then(|slot| slot.child.as_ref()) {
            let sent = child::pid(child).and_then(|pid| child::signal_group(pid, signal));
            if let Err(e) = sent {
                tracing::warn!("{who}: {e}");
            }
        }
    }

    fn log(&self, who: Who, life: u32) -> PathBuf {
        match who {
            Who::Lighthouse => self.run.config.run_dir.join("lighthouse.log"),
            Who::Replica(replica) => self
                .run
                .config
                .run_dir
                .join(format!("replica-{replica}.life-{life}.log")),
        }
    }

    /// The command of `who`'s next life with its environment.
    fn prepare(&self, who: Who, life: u32) -> Command {
        let config = &self.run.config;
        let mut command = match (who, &config.lighthouse) {
            (Who::Replica(replica), _) => (self.run.command)(&ReplicaLaunch {
                replica,
                replicas: config.total_replicas,
                life,
                lighthouse: self.lighthouse.clone(),
            }),
            (Who::Lighthouse, LighthouseSource::Spawn { bind, command }) => command(&LighthouseLaunch {
                bind: same_port(bind, &self.lighthouse),
                state_file: config.run_dir.join("lighthouse.state"),
            }),
            // No such slot is ever made; a command that fails by name is the least bad answer.
            (Who::Lighthouse, LighthouseSource::External(url)) => {
                Command::new(format!("lighthouse at {url}"))
            }
        };
        command.env(ENV_EVENTS, self.listener.path());
        if let Who::Replica(replica) = who {
            command
                .env(ENV_LIGHTHOUSE, &self.lighthouse)
                .env(ENV_REPLICA, replica.to_string())
                .env(ENV_REPLICAS, config.total_replicas.to_string())
                .env(ENV_LIFE, life.to_string());
            if !command.get_envs().any(|(name, _)| name == "RAYON_NUM_THREADS") {
                command.env("RAYON_NUM_THREADS", "1");
            }
        }
        command
    }

    fn spawn(&mut self, who: Who) -> Result<()> {
        let Some(slot) = self.slots.get_mut(&who) else {
            return Ok(());
        };
        let life = slot.lives;
        slot.lives += 1;
        slot.next_start = None;
        slot.started = Instant::now();
        let command = self.prepare(who, life);
        let t_us = now_us();
        let mut child = child::spawn(command, &self.log(who, life))?;
        let pid = child::pid(&child)?;
        if let Who::Replica(replica) = who {
            // Before the waiting thread exists: a process that ends at once is removed again after it was entered.
            self.run
                .running
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .insert(replica, (life, pid));
            self.run.events.push(SupervisorEvent::Spawned {
                replica,
                life,
                pid: child.id(),
                t_us,
            });
        }
        let (to_self, drain) = (self.run.to_self.clone(), self.listener.drain());
        let name = match who {
            Who::Lighthouse => "ox-wait-lh".to_owned(),
            Who::Replica(replica) => format!("ox-wait-{replica}"),
        };
        let waiting = std::thread::Builder::new().name(name).spawn(move || {
            child::wait_for_end(pid);
            let t_us = now_us();
            // What the process leaves behind would hold its event connection (and its ports) open.
            let _ = child::signal_group(pid, Signal::KILL);
            drain.wait(pid, deadline_in(DRAIN));
            let _ = to_self.send(Control::Ended { who, life, t_us });
        });
        if let Err(e) = waiting {
            // Without somebody to wait for it the child would be forgotten.
            let _ = child::signal_group(pid, Signal::KILL);
            self.forget(who);
            let _ = child.wait();
            return Err(Error::io(format!("start a thread for {who}"), e));
        }
        if who == Who::Lighthouse && self.lighthouse_due.is_none() {
            self.lighthouse_due = Some(restart_deadline());
        }
        if let Some(slot) = self.slots.get_mut(&who) {
            slot.child = Some(child);
        }
        Ok(())
    }

    fn forget(&self, who: Who) {
        if let Who::Replica(replica) = who {
            self.run
                .running
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .remove(&replica);
        }
    }

    /// Collects the ended process of `who`: how it ended, and the end of its output unless that was a success.
    fn collect(&mut self, who: Who) -> Option<(ExitSummary, String)> {
        self.forget(who);
        let log = self.log(who, self.slots.get(&who)?.lives.saturating_sub(1));
        let slot = self.slots.get_mut(&who)?;
        let mut child = slot.child.take()?;
        let exit = match child.wait() {
            Ok(status) => ExitSummary::from(status),
            Err(e) => {
                tracing::warn!("{who}: its exit status is lost: {e}");
                ExitSummary {
                    status: None,
                    signal: None,
                }
            }
        };
        let tail = if exit.success() {
            String::new()
        } else {
            child::tail(&log)
        };
        slot.exit = Some(exit);
        slot.tail.clone_from(&tail);
        Some((exit, tail))
    }

    /// Decides what follows the end of a process, and tells the driver.
    fn ended(&mut self, who: Who, life: u32, t_us: u64, exit: ExitSummary, tail: String) {
        let policy = &self.run.config.restart;
        let Some(slot) = self.slots.get_mut(&who) else {
            return;
        };
        slot.exit = Some(exit);
        slot.tail.clone_from(&tail);
        let finished = who != Who::Lighthouse && exit.success();
        let may_restart = !slot.over
            && !finished
            && slot.lives <= policy.max_restarts
            && !exit.status.is_some_and(|code| policy.fatal_codes.contains(&code));
        let mut restart_in_ms = None;
        let stops = !slot.over && !finished && !may_restart;
        if may_restart {
            slot.in_a_row = if slot.started.elapsed() >= policy.stable_after {
                0
            } else {
                slot.in_a_row
            };
            let pause = policy.pause(slot.in_a_row);
            slot.in_a_row += 1;
            slot.next_start = Some(deadline_in(pause));
            restart_in_ms = Some(u64::try_from(pause.as_millis()).unwrap_or(u64::MAX));
        } else {
            slot.over = true;
        }
        let event = match who {
            Who::Lighthouse if self.stopping.is_some() => None,
            Who::Lighthouse => {
                self.lighthouse_due = None;
                Some(SupervisorEvent::LighthouseExited {
                    exit,
                    tail,
                    restart_in_ms,
                    t_us,
                })
            }
            Who::Replica(replica) => Some(SupervisorEvent::Exited {
                replica,
                life,
                status: exit.status,
                signal: exit.signal,
                tail,
                restart_in_ms,
                t_us,
            }),
        };
        if let Some(event) = event {
            self.run.events.push(event);
        }
        match who {
            Who::Lighthouse if stops => self.stop(StopReason::LighthouseFailed),
            Who::Replica(replica) if stops && self.run.config.give_up == GiveUp::StopAll => {
                self.stop(StopReason::ReplicaFailed { replica });
            }
            _ => {}
        }
    }

    fn outcome(&self) -> Outcome {
        let replicas = self.slots.iter().filter_map(|(who, slot)| match who {
            Who::Lighthouse => None,
            Who::Replica(replica) => Some(ReplicaOutcome {
                replica: *replica,
                lives: slot.lives,
                exit: slot.exit,
                tail: slot.tail.clone(),
            }),
        });
        Outcome {
            stop: self.stopping.clone().unwrap_or(StopReason::Completed),
            replicas: replicas.collect(),
        }
    }
}

/// `bind` with the port of `url`, so that a restarted lighthouse is found where the first one was; `bind` itself while
/// there is no url yet.
fn same_port(bind: &str, url: &str) -> String {
    match (split_address(bind), split_url(url)) {
        (Ok((host, _)), Ok((_, port))) => join_address(host, port),
        _ => bind.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::same_port;

    #[test]
    fn a_restarted_lighthouse_gets_the_port_that_it_had() {
        for (bind, url, expected) in [
            ("127.0.0.1:0", "", "127.0.0.1:0"),
            ("0.0.0.0:0", "http://host-7:4321", "0.0.0.0:4321"),
            ("[::]:0", "http://[::1]:4321/", "[::]:4321"),
            ("127.0.0.1:29510", "http://127.0.0.1:29510", "127.0.0.1:29510"),
        ] {
            assert_eq!(same_port(bind, url), expected);
        }
    }
}
