//! The thread that starts, restarts and ends the processes (`ox-launch`).
//!
//! It alone starts and collects children, which it outlives: Linux ties a child's parent-death signal to the starting
//! *thread*. One thread per child (`ox-wait-…`) waits for its end, sees to it that its last events are read, and
//! tells this one; between such messages this thread sleeps until the next restart or deadline that is due.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::sync::PoisonError;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use ftcore::{
    Credentials, Error, ErrorKind, Result, TcpStoreServer, deadline_in, join_address, split_address,
    split_url, time_left,
};
use oxccl::launch::{ENV_EVENTS, LighthouseReady, now_us};
use rustix::process::Signal;

use super::child;
use super::earlier;
use super::environment::{ReplicaLaunch, tell};
use super::events::SupervisorEvent;
use super::listener::EventListener;
use super::outcome::{ExitSummary, Outcome, ReplicaOutcome, StopReason};
use super::output::Reader;
use super::queue::EventQueue;
use super::slot::{RANK_GRACE, Slot, Who};
use super::supervisor::{
    GiveUp, LighthouseLaunch, LighthouseSource, Running, SupervisorConfig, restart_deadline,
};

/// How long the last events and lines of an ended process may take to be read.
const DRAIN: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) enum Control {
    Ended {
        who: Who,
        rank: u32,
        incarnation: u32,
        t_us: u64,
    },
    LighthouseReady(LighthouseReady),
    /// The end of the run: `signal` to all processes, SIGKILL after the grace time.
    Stop {
        reason: StopReason,
        signal: Signal,
    },
    /// A signal for the replicas' processes.
    PassOn(Signal),
    /// Whether the lighthouse outlives the replicas of this machine.
    Hold(bool),
}

pub(super) struct Run {
    pub(super) config: SupervisorConfig,
    pub(super) command: Box<dyn Fn(&ReplicaLaunch) -> Command + Send>,
    pub(super) events: EventQueue,
    pub(super) to_self: Sender<Control>,
    pub(super) inbox: Receiver<Control>,
    pub(super) running: Running,
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
    /// It was not said yet that the lighthouse outlives the replicas.
    says_held: bool,
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
            c.ranks_per_replica,
            run.events.clone(),
            run.to_self.clone(),
        )?;
        let spawns = matches!(c.lighthouse, LighthouseSource::Spawn { .. });
        earlier::forget_logs(&c.run_dir, &replicas, spawns)?;
        if spawns && !c.may_have_others() {
            let own = match &c.credentials {
                Some(credentials) => Some(credentials.clone()),
                None => Credentials::from_env()?,
            };
            let job = own.as_deref().map(Credentials::job);
            earlier::forget_record(&c.run_dir, job, deadline_in(earlier::DIES))?;
        }
        let mut slots: BTreeMap<Who, Slot> = replicas
            .map(|r| (Who::Replica(r), Slot::new(c.ranks_per_replica)))
            .collect();
        let lighthouse = match &c.lighthouse {
            LighthouseSource::External(url) => url.clone(),
            LighthouseSource::Spawn { .. } => {
                slots.insert(Who::Lighthouse, Slot::new(1));
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
            says_held: true,
        })
    }

    /// The lighthouse first, then the replicas. An error leaves what was started for the caller to stop.
    fn start(&mut self, start_by: Instant) -> Result<()> {
        if self.slots.contains_key(&Who::Lighthouse) {
            self.spawn(Who::Lighthouse).map_err(|(_, e)| e)?;
            self.lighthouse_due = Some(start_by);
            while self.lighthouse_due.is_some() {
                match self.run.inbox.recv_timeout(time_left(start_by)) {
                    Ok(Control::Ended {
                        who: Who::Lighthouse, ..
                    }) => {
                        let (exit, tail) = self
                            .collect(Who::Lighthouse, 0)
                            .map_or_else(Default::default, |(exit, tail)| (format!(" ({exit})"), tail));
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
            self.spawn(who).map_err(|(_, e)| e)?;
        }
        Ok(())
    }

    fn is_over(&self) -> bool {
        self.slots.values().all(|slot| slot.over && !slot.is_running())
    }

    /// Waits for one message or for the next moment at which something is due, and does it.
    fn turn(&mut self) {
        let due = self
            .slots
            .values()
            .flat_map(|slot| [slot.next_start, slot.kill_at])
            .flatten()
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
            let Some(slot) = self.slots.get_mut(&who) else {
                continue;
            };
            if slot.kill_at.take_if(|at| now >= *at).is_some() {
                self.signal(who, Signal::KILL);
            }
            let due = self.slots.get(&who).and_then(|slot| slot.next_start);
            if due.is_some_and(|at| now >= at)
                && let Err((rank, e)) = self.spawn(who)
            {
                self.not_started(who, rank, &e);
            }
        }
        // When the last replica is done, so is the lighthouse.
        let replicas_over = self
            .slots
            .iter()
            .all(|(who, slot)| *who == Who::Lighthouse || slot.over);
        if replicas_over && self.slots.contains_key(&Who::Lighthouse) && self.stopping.is_none() {
            match self.run.config.hold_lighthouse {
                false => self.stop(StopReason::Completed),
                true if std::mem::take(&mut self.says_held) => {
                    tracing::info!(
                        "the replicas of this machine have ended; the lighthouse stays for the others"
                    );
                }
                true => {}
            }
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
                    .and_then(|slot| slot.running().next())
                    .map(|(_, child)| child.id());
                // A wrapper script may be the child and the lighthouse its child: ids then differ, and that is fine as
                // long as an answer is due.
                if self.lighthouse_due.take().is_none() {
                    tracing::warn!(
                        "process {} says that it is a lighthouse at {}; this run does not wait for one (ours is process {:?})",
                        ready.pid,
                        ready.url,
                        current
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
            Control::Ended {
                who,
                rank,
                incarnation,
                t_us,
            } => {
                let current = self
                    .slots
                    .get(&who)
                    .is_some_and(|s| s.incarnations == incarnation + 1);
                if current && let Some((exit, tail)) = self.collect(who, rank) {
                    self.rank_ended(who, rank, incarnation, t_us, exit, tail);
                }
            }
            // Asked twice: now.
            Control::Stop { .. } if self.stopping.is_some() => self.kill_at = Some(Instant::now()),
            Control::Stop { reason, signal } => self.stop_with(reason, signal),
            Control::Hold(held) => self.run.config.hold_lighthouse = held,
            Control::PassOn(signal) => {
                for who in self.who().into_iter().filter(|who| *who != Who::Lighthouse) {
                    self.signal(who, signal);
                }
            }
        }
    }

    fn stop(&mut self, reason: StopReason) {
        self.stop_with(reason, Signal::TERM);
    }

    /// No more restarts; `signal` now, SIGKILL after the grace time.
    fn stop_with(&mut self, reason: StopReason, signal: Signal) {
        self.stopping = Some(reason);
        self.lighthouse_due = None;
        for slot in self.slots.values_mut() {
            slot.next_start = None;
            slot.over = true;
        }
        for who in self.who() {
            self.signal(who, signal);
        }
        self.kill_at = Some(deadline_in(self.run.config.grace));
    }

    fn signal(&mut self, who: Who, signal: Signal) {
        if let Some(slot) = self.slots.get_mut(&who) {
            slot.sent.push(signal.as_raw());
        }
        for (_, child) in self.slots.get(&who).into_iter().flat_map(Slot::running) {
            let sent = child::pid(child).and_then(|pid| child::signal_group(pid, signal));
            if let Err(e) = sent {
                tracing::warn!("{who}: {e}");
            }
        }
    }

    fn log(&self, who: Who, rank: u32, incarnation: u32) -> PathBuf {
        let config = &self.run.config;
        let name = match who {
            Who::Lighthouse => "lighthouse.log".to_owned(),
            Who::Replica(replica) if config.ranks_per_replica == 1 => {
                format!("replica-{replica}.incarnation-{incarnation}.log")
            }
            Who::Replica(replica) => format!("replica-{replica}.rank-{rank}.incarnation-{incarnation}.log"),
        };
        config.run_dir.join(name)
    }

    /// The command of a rank in `who`'s next incarnation with its environment.
    fn prepare(&self, who: Who, rank: u32, incarnation: u32) -> Command {
        let config = &self.run.config;
        let mut command = match (who, &config.lighthouse) {
            (Who::Replica(replica), _) => self.prepare_rank(replica, rank, incarnation),
            (Who::Lighthouse, LighthouseSource::Spawn { bind, command }) => command(&LighthouseLaunch {
                bind: same_port(bind, &self.lighthouse),
                state_file: earlier::state_file(&config.run_dir),
            }),
            // No such slot is ever made; a command that fails by name is the least bad answer.
            (Who::Lighthouse, LighthouseSource::External(url)) => {
                Command::new(format!("lighthouse at {url}"))
            }
        };
        command.env(ENV_EVENTS, self.listener.path());
        if let Some(credentials) = &config.credentials {
            command.env(Credentials::VARIABLE, credentials.folder());
        }
        command
    }

    fn prepare_rank(&self, replica: u32, rank: u32, incarnation: u32) -> Command {
        let config = &self.run.config;
        let launch = ReplicaLaunch {
            replica,
            replicas: config.total_replicas,
            rank,
            ranks: config.ranks_per_replica,
            incarnation,
            lighthouse: self.lighthouse.clone(),
        };
        let mut command = (self.run.command)(&launch);
        let before = replica.saturating_sub(config.first_replica);
        let local_rank = before
            .saturating_mul(config.ranks_per_replica)
            .saturating_add(rank);
        let slot = self.slots.get(&Who::Replica(replica));
        // Every incarnation of a replica has one: it is made before the first rank is started.
        if let Some(store) = slot.and_then(|slot| slot.store.as_ref()) {
            tell(&mut command, &launch, local_rank, store.local_addr());
        }
        if !command.get_envs().any(|(name, _)| name == "RAYON_NUM_THREADS") {
            command.env("RAYON_NUM_THREADS", "1");
        }
        command
    }

    /// The store in which the ranks of one incarnation of a replica meet, so that nothing of an earlier one is in it. They are all on this machine.
    fn store(&self) -> Result<TcpStoreServer> {
        const BIND: &str = "127.0.0.1:0";
        match &self.run.config.credentials {
            Some(credentials) => TcpStoreServer::bind_with(BIND, Some(credentials.clone())),
            None => TcpStoreServer::bind(BIND),
        }
    }

    /// Starts the next incarnation of `who`, all its ranks. An error names the rank that could not be started; those before it run.
    fn spawn(&mut self, who: Who) -> Result<(), (u32, Error)> {
        let Some(slot) = self.slots.get_mut(&who) else {
            return Ok(());
        };
        let ranks = u32::try_from(slot.ranks.len()).unwrap_or(u32::MAX);
        let incarnation = slot.begin();
        if who != Who::Lighthouse {
            let store = self.store().map_err(|e| (0, e))?;
            if let Some(slot) = self.slots.get_mut(&who) {
                slot.store = Some(store);
            }
        }
        for rank in 0..ranks {
            self.spawn_rank(who, rank, incarnation).map_err(|e| (rank, e))?;
        }
        if who == Who::Lighthouse && self.lighthouse_due.is_none() {
            self.lighthouse_due = Some(restart_deadline());
        }
        Ok(())
    }

    fn spawn_rank(&mut self, who: Who, rank: u32, incarnation: u32) -> Result<()> {
        let command = self.prepare(who, rank, incarnation);
        let t_us = now_us();
        let reader = match (who, &self.run.config.output) {
            (Who::Replica(replica), Some(sink)) => Some(Reader {
                sink: sink.clone(),
                replica,
                rank,
            }),
            _ => None,
        };
        let (mut child, output) = child::spawn(command, &self.log(who, rank, incarnation), reader)?;
        let pid = child::pid(&child)?;
        // Before the waiting thread exists: a process that ends at once is removed again after it was entered.
        self.run
            .running
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert((who, rank), (incarnation, pid));
        if let Who::Replica(replica) = who {
            self.run.events.push(SupervisorEvent::Spawned {
                replica,
                rank,
                incarnation,
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
            let deadline = deadline_in(DRAIN);
            drain.wait(pid, deadline);
            if let Some(output) = output {
                output.wait(deadline);
            }
            let _ = to_self.send(Control::Ended {
                who,
                rank,
                incarnation,
                t_us,
            });
        });
        if let Err(e) = waiting {
            // Without a waiter the child would be forgotten.
            let _ = child::signal_group(pid, Signal::KILL);
            self.forget(who, rank);
            let _ = child.wait();
            return Err(Error::io(format!("start a thread for {who}"), e));
        }
        if let Some(process) = self.slots.get_mut(&who).and_then(|slot| slot.rank_mut(rank)) {
            process.child = Some(child);
        }
        Ok(())
    }

    /// A restart failed at `rank`: that is how this incarnation ended. The ranks before it are ended first.
    fn not_started(&mut self, who: Who, rank: u32, error: &Error) {
        let Some(slot) = self.slots.get_mut(&who) else {
            return;
        };
        let incarnation = slot.incarnations.saturating_sub(1);
        let (exit, tail) = (ExitSummary::default(), error.to_string());
        if let Some(process) = slot.rank_mut(rank) {
            process.exit = Some(exit);
            process.tail.clone_from(&tail);
        }
        self.rank_ended(who, rank, incarnation, now_us(), exit, tail);
    }

    fn forget(&self, who: Who, rank: u32) {
        self.run
            .running
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&(who, rank));
    }

    /// Collects the ended process of a rank: how it ended, and the end of its output unless that was a success. `None` if there is none.
    fn collect(&mut self, who: Who, rank: u32) -> Option<(ExitSummary, String)> {
        self.forget(who, rank);
        let log = self.log(who, rank, self.slots.get(&who)?.incarnations.saturating_sub(1));
        let process = self.slots.get_mut(&who)?.rank_mut(rank)?;
        let mut child = process.child.take()?;
        let exit = match child.wait() {
            Ok(status) => ExitSummary::from(status),
            Err(e) => {
                tracing::warn!("{who}: its exit status is lost: {e}");
                ExitSummary::default()
            }
        };
        let tail = if exit.success() {
            String::new()
        } else {
            child::tail(&log)
        };
        process.exit = Some(exit);
        process.tail.clone_from(&tail);
        Some((exit, tail))
    }

    /// What follows the end of one rank: a replica goes on, and ends, as a whole.
    fn rank_ended(
        &mut self,
        who: Who,
        rank: u32,
        incarnation: u32,
        t_us: u64,
        exit: ExitSummary,
        tail: String,
    ) {
        let Some(slot) = self.slots.get_mut(&who) else {
            return;
        };
        let is_first_failure = !exit.success() && slot.failed.is_none();
        if !exit.success() {
            slot.fail(rank, exit, t_us);
        }
        let others_run = slot.is_running();
        let cause = match others_run {
            true => None,
            false => slot.cause(&self.run.config.restart.fatal_codes),
        };
        if others_run && is_first_failure && !slot.over {
            slot.kill_at = Some(deadline_in(RANK_GRACE));
            self.signal(who, Signal::TERM);
        }
        let restart_in_ms = if others_run { None } else { self.ended(who) };
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
                rank,
                incarnation,
                status: exit.status,
                signal: exit.signal,
                tail,
                restart_in_ms,
                cause,
                t_us,
            }),
        };
        if let Some(event) = event {
            self.run.events.push(event);
        }
        // After the event, so that a driver sees the cause before what follows from it.
        let gave_up = self.slots.get(&who).is_some_and(|s| s.gave_up);
        match who {
            _ if !gave_up || self.stopping.is_some() => {}
            Who::Lighthouse => self.stop(StopReason::LighthouseFailed),
            Who::Replica(replica) if self.run.config.give_up == GiveUp::StopAll => {
                self.stop(StopReason::ReplicaFailed { replica });
            }
            Who::Replica(_) => {}
        }
    }

    /// All processes of an incarnation have ended: decides what follows. The pause before the next incarnation, if there is to be one.
    fn ended(&mut self, who: Who) -> Option<u64> {
        let policy = &self.run.config.restart;
        let slot = self.slots.get_mut(&who)?;
        slot.store = None;
        slot.kill_at = None;
        let (exit, _) = slot.end(&policy.fatal_codes);
        let finished = who != Who::Lighthouse && slot.failed.is_none();
        let is_fatal = exit
            .and_then(|exit| exit.status)
            .is_some_and(|code| policy.fatal_codes.contains(&code));
        if slot.over || finished || is_fatal || slot.incarnations > policy.max_restarts {
            slot.gave_up = !slot.over && !finished;
            slot.over = true;
            return None;
        }
        if slot.started.elapsed() >= policy.stable_after {
            slot.in_a_row = 0;
        }
        let pause = policy.pause(slot.in_a_row);
        slot.in_a_row += 1;
        slot.next_start = Some(deadline_in(pause));
        Some(u64::try_from(pause.as_millis()).unwrap_or(u64::MAX))
    }

    fn outcome(&self) -> Outcome {
        let replicas = self.slots.iter().filter_map(|(who, slot)| match who {
            Who::Lighthouse => None,
            Who::Replica(replica) => {
                let (exit, tail) = slot.end(&self.run.config.restart.fatal_codes);
                Some(ReplicaOutcome {
                    replica: *replica,
                    incarnations: slot.incarnations,
                    exit,
                    tail,
                })
            }
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
