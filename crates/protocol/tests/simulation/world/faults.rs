//! What goes wrong in the simulation, and what a process leaves behind when it ends.

use super::*;
use crate::ends::Leave;
use ftcore::{Epoch, Step};

impl World {
    pub(super) fn world_event(&mut self, what: Happening) {
        match what {
            Happening::Start(slot) => self.start_replica(slot),
            Happening::LighthouseStarts if self.lighthouse.is_none() => self.start_lighthouse(),
            Happening::Fault(i) => {
                let Some((_, fault)) = self.scenario.faults.get(i).cloned() else {
                    return;
                };
                self.note(|| format!("FAULT {fault:?}"));
                self.fault(fault);
            }
            Happening::Grows(slot) => self.shrink(slot, false),
            Happening::IsKnown(death) => self.is_known(&death),
            Happening::IsOut(who, since) => self.is_out(who, since),
            Happening::HasHeard(who, question) => self.has_heard(who, question),
            _ => {}
        }
    }

    pub(super) fn start_replica(&mut self, slot: usize) {
        self.incarnations[slot] += 1;
        let incarnation = self.incarnations[slot];
        let id = format!("r{slot}:{incarnation}");
        self.note(|| format!("{id} starts"));
        // One that is drained makes a step first, for which it may have to heal, or hangs before.
        if std::mem::take(&mut self.operated[slot]) {
            self.quiet_from = self.quiet_from.max(self.now);
        }
        let rules = ReplicaRules {
            replica_id: id.clone(),
            world_size: self.scenario.ranks,
            progress_timeout: PROGRESS_TIMEOUT,
            grace: GRACE,
        };
        let ranks = self.scenario.ranks;
        let processes = (0..ranks).map(|rank| {
            let value = self.random.next();
            Some(Process {
                trainer: Trainer::new(rank, &self.scenario, value),
                stopped_until: Duration::ZERO,
                hung_until: Duration::ZERO,
                stuck_since: None,
                shown: 0,
            })
        });
        self.replicas[slot] = Some(Replica {
            incarnation,
            id,
            processes: processes.collect(),
            server: ReplicaState::new(rules),
            stream: None,
            calls: BTreeMap::new(),
            last_arrival: self.now,
            restart: Duration::from_millis(500),
            tick: None,
        });
        let server = Who {
            slot,
            incarnation,
            rank: 0,
        };
        self.later(Duration::ZERO, server, Happening::Attach);
        let first_beat = if self.scenario.asks_late {
            Duration::ZERO
        } else {
            BEAT
        };
        self.later(first_beat, server, Happening::Beat);
        for rank in 0..ranks {
            let who = Who {
                slot,
                incarnation,
                rank,
            };
            let watch = u64::from(rank) + 1;
            self.server_hears(who, ReplicaEvent::Watched { rank, watch });
            let latest = if self.scenario.asks_late { 3_000 } else { 100 };
            let delay = self.random.millis(1, latest);
            self.later(delay, who, Happening::Calls);
            self.later(Duration::from_secs(1), who, Happening::ShowProgress);
        }
    }

    pub(super) fn fault(&mut self, fault: Fault) {
        let now = self.now;
        match fault {
            Fault::Kill { slot, rank, restart } => {
                let Some(replica) = &mut self.replicas[slot] else {
                    return;
                };
                replica.restart = restart;
                let who = Who {
                    slot,
                    incarnation: replica.incarnation,
                    rank,
                };
                self.ends(who, "it is killed");
            }
            Fault::Pause { slot, rank, time } => {
                let process = self.replicas[slot]
                    .as_mut()
                    .and_then(|r| r.processes[rank as usize].as_mut());
                if let Some(process) = process {
                    process.stopped_until = process.stopped_until.max(now + time);
                }
            }
            Fault::Hang { slot, rank, time } => {
                let process = self.replicas[slot]
                    .as_mut()
                    .and_then(|r| r.processes[rank as usize].as_mut());
                if let Some(process) = process {
                    process.hung_until = process.hung_until.max(time.map_or(Duration::MAX, |t| now + t));
                }
            }
            Fault::KillAtCommit { slot, rank, restart } => {
                let Some(replica) = &mut self.replicas[slot] else {
                    return;
                };
                replica.restart = restart;
                if let Some(process) = &mut replica.processes[rank as usize] {
                    process.trainer.dies_at_commit = true;
                }
            }
            Fault::Tear { slot, rank } => {
                let process = self.replicas[slot]
                    .as_mut()
                    .and_then(|r| r.processes[rank as usize].as_mut());
                if let Some(process) = process {
                    process.trainer.program.tear();
                }
            }
            Fault::KillLighthouse { down } => {
                self.lighthouse = None;
                if self.scenario.forgets || self.scenario.counts_back {
                    self.record = None;
                }
                self.at(now + down, Owner::World, Happening::LighthouseStarts);
                for slot in 0..self.replicas.len() {
                    let Some(incarnation) = self.replicas[slot].as_ref().map(|r| r.incarnation) else {
                        continue;
                    };
                    self.connection_breaks(Who {
                        slot,
                        incarnation,
                        rank: 0,
                    });
                }
            }
            Fault::PauseLighthouse { time } => {
                if let Some(lighthouse) = &mut self.lighthouse {
                    lighthouse.stopped_until = now + time;
                }
            }
            Fault::Cut { slot, time } => {
                self.cut_until[slot] = now + time;
                if let Some(incarnation) = self.replicas[slot].as_ref().map(|r| r.incarnation) {
                    self.connection_breaks(Who {
                        slot,
                        incarnation,
                        rank: 0,
                    });
                }
            }
            Fault::Split { side, time } => self.split = (side, now + time),
            Fault::Shrink { slot, time } => {
                self.shrink(slot, true);
                self.at(now + time, Owner::World, Happening::Grows(slot));
            }
            Fault::Operate { slot, kind, restart } => {
                let Some(replica) = &mut self.replicas[slot] else {
                    return;
                };
                replica.restart = restart;
                self.operated[slot] = true;
                let order = Order {
                    kind,
                    reason: "so it is".into(),
                };
                let ticket = self.number();
                let replica = format!("r{slot}");
                self.lighthouse_later(
                    Duration::ZERO,
                    Event::Operate {
                        replica,
                        order,
                        ticket,
                    },
                );
            }
            Fault::Stranger { claim } => self.stranger(claim),
            Fault::Impostor { claim } => self.impostor(claim),
            Fault::Garble { slot, time } => self.garbles_until[slot] = now + time,
        }
    }

    /// A replica of another job, or one that makes its quorum id up: it is refused.
    fn impostor(&mut self, claim: u64) {
        let job = self.lighthouse.as_ref().filter(|l| l.state.record().is_some());
        let last_quorum_id = match (job, claim & 3) {
            (Some(job), 0 | 1) => job.state.quorum_id() + 1 + (claim >> 8 & 0xff),
            (_, 2) => Epoch(i64::MAX.cast_unsigned()),
            _ => Epoch(1 << 59),
        };
        let (replica_id, ticket) = (format!("x{}:2", claim >> 16 & 3), self.number());
        let event = match claim >> 20 & 3 {
            0 => Event::Attached {
                replica_id,
                stream: ticket,
                last_quorum_id,
            },
            _ => Event::Join {
                member: Member {
                    replica_id,
                    address: "http://10.0.0.9:1".into(),
                    store_address: "10.0.0.9:2".into(),
                    world_size: 1,
                    last_quorum_id,
                    ..Member::default()
                },
                ticket,
            },
        };
        self.lighthouse_later(Duration::ZERO, event);
    }

    /// The program of a replica asks for quorums without newcomers, or for any.
    fn shrink(&mut self, slot: usize, on: bool) {
        let processes = self.replicas[slot].iter_mut().flat_map(|r| &mut r.processes);
        for process in processes.flatten() {
            process.trainer.set_shrink_only(on);
        }
    }

    /// What a stranger, who is no replica of the job, may say; it must cost the job nothing.
    pub(super) fn stranger(&mut self, claim: u64) {
        let id = format!("x{}:1", claim % 3);
        let ticket = self.number();
        let absurd = [0, 1, -1, i64::MAX, 1 << 59][(claim >> 8) as usize % 5];
        // Before there is a record, a stranger that says the right things is a replica: who may speak is for credentials to say.
        // Nor does a record bind any replica once all members have left, or one has after the last step and the others are gone.
        let binds = self
            .record
            .as_ref()
            .is_some_and(|r| !r.closes && r.left.len() < r.members.len());
        let is_well_formed = binds && claim >> 12 & 1 == 1;
        let (address, store_address) = if is_well_formed {
            ("http://10.0.0.9:1", "10.0.0.9:2")
        } else {
            let addresses = ["", "x", "http://", "http://10.0.0.9:0"];
            let stores = ["", "10.0.0.9", "10.0.0.9:x", ":1"];
            (
                addresses[(claim >> 16) as usize % 4],
                stores[(claim >> 20) as usize % 4],
            )
        };
        let member = Member {
            replica_id: id.clone(),
            address: address.into(),
            store_address: store_address.into(),
            // At or below the recorded step it would be a newcomer like any other.
            step: Step(if is_well_formed {
                absurd.max(1 << 40)
            } else {
                absurd
            }),
            world_size: 1,
            lineage: ["", "made up"][(claim >> 24) as usize % 2].into(),
            last_quorum_id: Epoch(absurd.max(0).cast_unsigned()),
            ..Member::default()
        };
        let event = match (claim >> 32) % 5 {
            0 | 1 => Event::Join { member, ticket },
            2 => Event::Heartbeat { replica_id: id },
            3 => Event::Attached {
                replica_id: id,
                stream: ticket,
                last_quorum_id: Epoch(absurd.max(1).cast_unsigned()),
            },
            _ => Event::Report {
                replica_id: id,
                quorum_id: self.record.as_ref().map_or(Epoch(0), |r| r.quorum_id),
                reason: "I say so".into(),
            },
        };
        self.lighthouse_later(Duration::ZERO, event);
    }

    /// A process ends: its kernel closes what it had open.
    pub(super) fn ends(&mut self, who: Who, why: &str) {
        self.will_be_known(who);
        let Some(replica) = self.replica(who) else { return };
        let Some(process) = replica.processes[who.rank as usize].take() else {
            return;
        };
        let all_gone = replica.processes.iter().all(Option::is_none);
        let restart = replica.restart;
        self.note(|| format!("{who:?} ends: {why}"));
        // Who leaves in good order breaks nothing that it has sent.
        let after = if process.trainer.leaves { 20 } else { 0 };
        let leave = Leave::Closes { after };
        for epoch in process.trainer.epochs() {
            self.leave_group(epoch, who, leave);
        }
        if self.scenario.foreign && who.rank == 0 {
            let id = format!("r{}:{}", who.slot, who.incarnation);
            self.foreign_ends(id);
        }
        if who.rank == 0 {
            // Its servers are gone: the lighthouse sees the stream break, the ranks see refused connections for a while.
            self.connection_breaks(who);
            for rank in 1..self.scenario.ranks {
                let delay = Duration::from_secs(1) + self.random.millis(0, 200);
                self.later(delay, Who { rank, ..who }, Happening::Exit);
            }
        } else {
            let (rank, watch) = (who.rank, u64::from(who.rank) + 1);
            self.server_hears(who, ReplicaEvent::Unwatched { rank, watch });
            let delay = self.random.millis(1, 20);
            self.later(
                delay,
                Self::server_of(who),
                Happening::Server(ReplicaEvent::Ended { rank, watch }),
            );
        }
        if all_gone {
            self.replicas[who.slot] = None;
            // One that has come to the end of the run is done; any other one belongs to the run, or to the next one.
            if self.ended[who.slot] {
                return;
            }
            self.at(self.now + restart, Owner::World, Happening::Start(who.slot));
        }
    }
}

/// How long a fault lasts.
pub(super) fn lasts(fault: &Fault) -> Duration {
    match fault {
        Fault::Kill { restart, .. } => *restart,
        Fault::KillAtCommit { restart, .. } => *restart + CALL,
        Fault::Garble { time, .. } => *time + CALL,
        Fault::Pause { time, .. }
        | Fault::PauseLighthouse { time }
        | Fault::Cut { time, .. }
        | Fault::Split { time, .. } => *time,
        // Its last call with that wish ends by then.
        Fault::Shrink { time, .. } => *time + CALL,
        // A replica that is drained makes one more step.
        Fault::Operate { restart, .. } => *restart + CALL,
        Fault::Hang { time, .. } => time.unwrap_or(Duration::ZERO),
        Fault::KillLighthouse { down } => *down,
        // The write may be a while away: at the latest it is that of the next step, and the replica starts again then.
        Fault::Tear { .. } => CALL,
        Fault::Stranger { .. } | Fault::Impostor { .. } => Duration::ZERO,
    }
}
