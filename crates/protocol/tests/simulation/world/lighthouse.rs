//! The lighthouse of the simulation: the real state machine, its calls and streams, and the connections that break.

use super::*;
use ftcore::Epoch;

/// So long a leave is sent again where the connection broke.
const SAY_AGAIN: Duration = Duration::from_secs(1);

impl World {
    pub(super) fn start_lighthouse(&mut self) {
        let rules = QuorumRules {
            min_replicas: self.scenario.min_replicas as usize,
            initial_replicas: self.scenario.initial.then_some(self.scenario.replicas),
            join_timeout: JOIN_TIMEOUT,
            heartbeat_timeout: HEARTBEAT_TIMEOUT,
        };
        self.lighthouse_incarnations += 1;
        let incarnation = self.lighthouse_incarnations;
        let hour = 3_600_000;
        let jumps = [0, hour, -hour, 24 * 400 * hour, -24 * 400 * hour, -i64::MAX / 2];
        let jump = match self.scenario.clock_jumps {
            true => jumps[self.random.below(jumps.len() as u64) as usize],
            false => 0,
        };
        let clock = match self.checks.newest_epoch() {
            Some(newest) if self.scenario.counts_back => newest.0.cast_signed() - 1 - incarnation as i64 % 3,
            _ => START_OF_DAY + jump + self.now.as_millis() as i64,
        };
        let start = Start {
            clock_ms: clock,
            record: self.record.clone(),
            accept_rollback: false,
        };
        let recorded = self.record.as_ref().filter(|r| !r.members.is_empty());
        self.checks.lighthouse_starts(recorded.map(|r| r.quorum_id));
        let heard = formed::Heard::new(self.record.as_ref(), self.now);
        let state = LighthouseState::new(rules, start, self.instant());
        self.lighthouse = Some(Lighthouse {
            state,
            incarnation,
            stopped_until: Duration::ZERO,
            awake: self.now,
            discounts_until: Duration::ZERO,
            heard,
            calls: BTreeMap::new(),
            streams: BTreeMap::new(),
        });
        self.at(
            self.now,
            Owner::Lighthouse(incarnation),
            Happening::LighthouseTick,
        );
    }

    pub(super) fn tell_lighthouse(&mut self, event: Event) {
        let (now, instant) = (self.now, self.instant());
        let Some(lighthouse) = &mut self.lighthouse else {
            return;
        };
        lighthouse.heard.hears(&event, now);
        let mut all = Vec::new();
        let away = now.saturating_sub(lighthouse.awake);
        if away > Duration::from_secs(2) {
            all.extend(lighthouse.state.apply(Event::Away { time: away }, instant));
            lighthouse.discounts_until = now + HEARTBEAT_TIMEOUT;
        }
        lighthouse.awake = now;
        if let Event::Withdraw { ticket } = &event {
            lighthouse.calls.remove(ticket);
        }
        if let Event::Detached { replica_id, stream } = &event
            && lighthouse
                .streams
                .get(replica_id)
                .is_some_and(|(_, s)| s == stream)
        {
            lighthouse.streams.remove(replica_id);
        }
        let text = if self.trace.is_some() && !matches!(event, Event::Tick | Event::Heartbeat { .. }) {
            format!("lighthouse hears {event:?}")
        } else {
            String::new()
        };
        all.extend(lighthouse.state.apply(event, instant));
        if !text.is_empty() {
            self.note(|| text);
        }
        for action in all {
            self.lighthouse_acts(action);
        }
    }

    pub(super) fn lighthouse_acts(&mut self, action: Action) {
        let now = self.now;
        let Some(lighthouse) = &mut self.lighthouse else {
            return;
        };
        match action {
            Action::Deliver { tickets, quorum } => {
                let ids: Vec<String> = quorum.ids().map(str::to_string).collect();
                let calls: Vec<_> = tickets
                    .iter()
                    .filter_map(|t| lighthouse.calls.remove(t))
                    .collect();
                self.formed(&quorum);
                self.checks.goes_on(&quorum);
                let checked = self
                    .checks
                    .quorum(quorum.quorum_id, &ids, self.scenario.min_replicas as usize);
                self.check(checked);
                let least = self.scenario.min_replicas as usize;
                let checked = self.checks.spares(&quorum, least, now, JOIN_TIMEOUT);
                self.check(checked);
                self.note(|| format!("quorum {} of {ids:?}", quorum.quorum_id));
                for (who, call) in calls {
                    self.send_server(who, Happening::Answered(call, Ok(quorum.clone())));
                }
            }
            Action::Reject { ticket, error } => {
                if let Some((who, call)) = lighthouse.calls.remove(&ticket) {
                    self.send_server(who, Happening::Answered(call, Err(error)));
                }
            }
            Action::Push { to, event } => {
                let streams: Vec<_> = to
                    .iter()
                    .filter_map(|id| lighthouse.streams.get(id).copied())
                    .collect();
                for (who, _) in streams {
                    self.send_server(who, Happening::Server(ReplicaEvent::Aborted(event.clone())));
                }
            }
            Action::Order { to, order } => {
                if let Some((who, _)) = lighthouse.streams.get(&to).copied() {
                    self.send_server(who, Happening::Server(ReplicaEvent::Ordered(order)));
                }
            }
            Action::Operated { .. } => {}
            Action::Save(record) => self.record = Some(record),
            Action::Refuse { stream, .. } => {
                lighthouse.streams.retain(|_, (_, s)| *s != stream);
            }
        }
    }

    /// A message from the lighthouse; a broken connection costs it.
    pub(super) fn send_server(&mut self, who: Who, what: Happening) {
        if self.is_cut(who.slot) || self.random.chance(self.scenario.loss) {
            self.connection_breaks(who);
            return;
        }
        if let Happening::Server(event @ (ReplicaEvent::Aborted(_) | ReplicaEvent::Ordered(_))) = &what
            && self.random.chance(self.scenario.disorder)
        {
            // Told again over a stream that was opened again.
            let (event, delay) = (event.clone(), self.random.millis(0, 2_000));
            self.later(delay, who, Happening::Server(event));
        }
        let delay = self.random.millis(0, 3);
        self.later(delay, who, what);
    }

    /// An event that a replica's server sends to the lighthouse. False if its connection broke.
    pub(super) fn send_lighthouse(&mut self, who: Who, event: Event) -> bool {
        if self.lighthouse.is_none() || self.is_cut(who.slot) || self.random.chance(self.scenario.loss) {
            self.connection_breaks(who);
            return false;
        }
        if self.scenario.foreign && Self::is_beyond_foreign(&event) {
            return true;
        }
        let at = self.now + self.random.millis(0, 3);
        let incarnation = self.lighthouse_incarnations;
        // A connection keeps the order of its bytes; the calls in it are served side by side, and one whose answer was lost is made again.
        // What a call or a stream says of itself stays in order: one task of the server tells it.
        let alone = matches!(
            event,
            Event::Heartbeat { .. } | Event::Report { .. } | Event::Failed { .. } | Event::Leave { .. }
        );
        let late = alone && self.random.chance(self.scenario.disorder);
        let twice = alone && self.random.chance(self.scenario.disorder);
        if late || twice {
            let delay = self.random.millis(0, 2_000);
            let happening = Happening::ToLighthouse(event.clone());
            self.at(at + delay, Owner::Lighthouse(incarnation), happening);
        }
        if late {
            return true;
        }
        let Some(replica) = self.replica(who) else {
            return true;
        };
        let at = at.max(replica.last_arrival);
        replica.last_arrival = at;
        self.at(at, Owner::Lighthouse(incarnation), Happening::ToLighthouse(event));
        true
    }

    /// A replica opens its event stream.
    pub(super) fn attach(&mut self, who: Who) {
        if self.scenario.foreign {
            return;
        }
        let stream = self.number();
        let refused = self.lighthouse.is_none() || self.is_cut(who.slot);
        let Some(replica) = self.replica(who) else { return };
        let out = replica.server.is_out();
        if refused || out || replica.stream.is_some() {
            if refused || out {
                let delay = self.random.millis(200, 1_000);
                self.later(delay, who, Happening::Attach);
            }
            return;
        }
        replica.stream = Some(stream);
        let (replica_id, last_quorum_id) = (replica.id.clone(), replica.server.last_quorum().0);
        if let Some(lighthouse) = &mut self.lighthouse {
            lighthouse.streams.insert(replica_id.clone(), (who, stream));
        }
        let event = Event::Attached {
            replica_id,
            stream,
            last_quorum_id,
        };
        self.send_lighthouse(who, event);
    }

    /// A rank leaves in good order, as it was told with the quorum. Its server answers the others first.
    pub(crate) fn leaves(&mut self, who: Who) {
        let rank = who.rank;
        self.note(|| format!("{who:?} leaves"));
        if let Some(trainer) = self.trainer(who) {
            trainer.leaves = true;
        }
        if rank > 0 {
            self.server_hears(who, ReplicaEvent::Left { rank });
            return self.later(Duration::from_millis(5), who, Happening::Exit);
        }
        let until = self.now + SAY_AGAIN;
        self.tells_that_it_leaves(who, until);
        self.later(SAY_AGAIN, who, Happening::Exit);
    }

    pub(super) fn tells_that_it_leaves(&mut self, who: Who, until: Duration) {
        let Some(replica_id) = self.replica(who).map(|r| r.id.clone()) else {
            return;
        };
        let reason = String::new();
        let is_told = self.send_lighthouse(who, Event::Leave { replica_id, reason });
        let pause = self.random.millis(20, 200);
        if !is_told && self.now + pause < until {
            self.later(pause, who, Happening::Leave { until });
        }
    }

    pub(super) fn is_cut(&self, slot: usize) -> bool {
        self.cut_until[slot] > self.now
    }

    /// The connection between a replica's server and the lighthouse is gone: both ends learn it, each in its time.
    pub(super) fn connection_breaks(&mut self, who: Who) {
        let slow = if self.is_cut(who.slot) { 5_000 } else { 50 };
        let Some(replica) = self.replica(who) else { return };
        let id = replica.id.clone();
        let calls = std::mem::take(&mut replica.calls);
        let stream = replica.stream.take();
        for (call, ticket) in calls {
            let delay = self.random.millis(0, slow);
            self.lighthouse_later(delay, Event::Withdraw { ticket });
            let error = Error::new(ErrorKind::Unavailable, "the connection broke");
            let delay = self.random.millis(1, slow);
            self.later(delay, who, Happening::Answered(call, Err(error)));
        }
        if let Some(stream) = stream {
            let delay = self.random.millis(0, slow);
            self.lighthouse_later(
                delay,
                Event::Detached {
                    replica_id: id,
                    stream,
                },
            );
            let delay = self.random.millis(1, slow);
            self.later(delay, who, Happening::AttachBroke(stream));
        }
    }

    pub(super) fn lighthouse_later(&mut self, delay: Duration, event: Event) {
        let incarnation = self.lighthouse_incarnations;
        self.at(
            self.now + delay,
            Owner::Lighthouse(incarnation),
            Happening::ToLighthouse(event),
        );
    }

    /// What the reporter of a rank sends over the manager server.
    pub(crate) fn report_to_lighthouse(&mut self, who: Who, quorum_id: Epoch, reason: String) {
        let server = Self::server_of(who);
        let Some(replica_id) = self.replica(server).map(|r| r.id.clone()) else {
            return;
        };
        self.send_lighthouse(
            server,
            Event::Report {
                replica_id,
                quorum_id,
                reason,
            },
        );
    }
}
