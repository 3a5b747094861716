//! What an operator may tell a replica over the lighthouse: to leave after its step, to stay out, to end.
//!
//! An order names a replica by its id, or by the name that all its incarnations share. It travels over the replica's event stream, and again
//! over the next one should that break before the replica has left.

use std::collections::{BTreeMap, VecDeque};

use ftcore::{Error, ErrorKind};

use super::record::Eviction;
use super::{Action, LighthouseState, MAX_REPLACED, Ticket, cut};
use crate::member::{Id, Member, listed, prefix_of};

/// The most evictions in a record: they are typed by hand, and etcd bounds its length.
const MAX_RECORDED: usize = 128;

/// What a replica shall do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OrderKind {
    /// Finish the step that it is in and leave in good order.
    Drain,
    /// Be out of the job now. It is refused until it is started again.
    Evict,
    /// End its processes.
    Kill,
}

/// An operator's order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    /// What to do.
    pub kind: OrderKind,
    /// Why, in the operator's words.
    pub reason: String,
}

impl Order {
    /// What happened to a replica that got it.
    pub fn told(&self) -> String {
        let what = match self.kind {
            OrderKind::Drain => "drained",
            OrderKind::Evict => "evicted",
            OrderKind::Kill => "killed",
        };
        if self.reason.is_empty() {
            format!("it was {what} by the operator")
        } else {
            format!("it was {what} by the operator: {}", self.reason)
        }
    }
}

/// Replicas that were evicted, each with the process that it was then.
#[derive(Debug, Clone, Default)]
pub(super) struct Evicted {
    incarnations: BTreeMap<Id, (String, Order)>,
    oldest_first: VecDeque<Id>,
}

impl Evicted {
    fn remember(&mut self, id: Id, incarnation: String, order: Order) {
        if self
            .incarnations
            .insert(id.clone(), (incarnation, order))
            .is_none()
        {
            self.oldest_first.push_back(id);
        }
        if self.oldest_first.len() > MAX_REPLACED
            && let Some(oldest) = self.oldest_first.pop_front()
        {
            self.incarnations.remove(&oldest);
        }
    }

    /// Those of a record.
    pub(super) fn of(evictions: Vec<Eviction>) -> Self {
        let mut evicted = Self::default();
        for Eviction {
            replica_id,
            incarnation,
            reason,
        } in evictions
        {
            let kind = OrderKind::Evict;
            evicted.remember(replica_id.as_str().into(), incarnation, Order { kind, reason });
        }
        evicted
    }

    /// For the record, the oldest first.
    pub(super) fn recorded(&self) -> Vec<Eviction> {
        let older = self.oldest_first.len().saturating_sub(MAX_RECORDED);
        let known = self.oldest_first.iter().skip(older).filter_map(|id| {
            let (incarnation, order) = self.incarnations.get(id)?;
            Some(Eviction {
                replica_id: id.to_string(),
                incarnation: incarnation.clone(),
                reason: order.reason.clone(),
            })
        });
        known.collect()
    }

    /// Errors: `Conflict` for one that was evicted.
    pub(super) fn check(&self, id: &str) -> Result<(), Error> {
        match self.incarnations.get(id) {
            Some((_, order)) => Err(refusal(id, order)),
            None => Ok(()),
        }
    }

    pub(super) fn contains(&self, id: &str) -> bool {
        self.incarnations.contains_key(id)
    }

    /// Who they are, and what the operator said.
    pub(super) fn list(&self) -> impl Iterator<Item = (String, String)> {
        let one = |(id, (_, order)): (&Id, &(String, Order))| (id.to_string(), order.reason.clone());
        self.incarnations.iter().map(one)
    }

    /// One that was started again under the same id is another one. If the evicted one had not asked by then, the first to ask is taken for it: its
    /// call may have been under way. True if something has changed: a record that still had it would have the next one taken for it.
    pub(super) fn started_again(&mut self, member: &Member) -> bool {
        let id = member.replica_id.as_str();
        let Some((incarnation, _)) = self.incarnations.get_mut(id) else {
            return false;
        };
        if *incarnation == member.incarnation {
            return false;
        }
        if incarnation.is_empty() {
            incarnation.clone_from(&member.incarnation);
        } else {
            self.incarnations.remove(id);
            self.oldest_first.retain(|old| old.as_ref() != id);
        }
        true
    }
}

fn refusal(id: &str, order: &Order) -> Error {
    let text = format!(
        "replica {id} takes no part in this job: {}. Start it again",
        order.told()
    );
    Error::new(ErrorKind::Conflict, text)
}

impl LighthouseState {
    pub(super) fn operate(
        &mut self,
        replica: &str,
        mut order: Order,
        ticket: Ticket,
        actions: &mut Vec<Action>,
    ) {
        order.reason = cut(&order.reason).to_string();
        let outcome = self.addressed(replica).and_then(|ids| {
            let deaf = ids.iter().find(|id| order.kind != OrderKind::Evict && !self.is_attached(id));
            match deaf {
                Some(id) => Err(Error::new(
                    ErrorKind::Unsupported,
                    format!("replica {id} has no event stream, over which it could be told (torchft's managers have none): evict it"),
                )),
                None => Ok(ids),
            }
        });
        for id in outcome.iter().flatten() {
            let to = id.to_string();
            let order = order.clone();
            match order.kind {
                OrderKind::Drain => {
                    self.roster.update(id, |entry| entry.order = Some(order.clone()));
                    actions.push(Action::Order { to, order });
                }
                OrderKind::Kill => actions.push(Action::Order { to, order }),
                OrderKind::Evict => {
                    actions.push(Action::Order {
                        to,
                        order: order.clone(),
                    });
                    self.evict(id, order, actions);
                }
            }
        }
        // What the operator is told holds after a restart of this lighthouse, too.
        if order.kind == OrderKind::Evict && outcome.is_ok() {
            self.unsaved = false;
            actions.extend(self.record().map(Action::Save));
        }
        let outcome = outcome.map(|ids| ids.iter().map(ToString::to_string).collect());
        actions.push(Action::Operated { ticket, outcome });
    }

    fn evict(&mut self, id: &Id, order: Order, actions: &mut Vec<Action>) {
        let present = self.previous.as_ref();
        let known = present.and_then(|q| q.participants.iter().find(|m| m.replica_id == id.as_ref()));
        let known = known.map(|m| m.incarnation.clone());
        let waiting = self.roster.update(id, |entry| {
            (entry.stream, entry.coming) = (None, None);
            entry.waiting.take()
        });
        let incarnation = waiting.as_ref().map(|w| w.member.incarnation.clone()).or(known);
        if let Some(w) = waiting {
            let error = refusal(id, &order);
            actions.push(Action::Reject {
                ticket: w.ticket,
                error,
            });
        }
        self.depart(id, &order.told(), actions);
        self.evicted
            .remember(id.clone(), incarnation.unwrap_or_default(), order);
    }

    /// The ids of those that `replica` names and that are not known to be gone. Errors: `NotFound`.
    fn addressed(&self, replica: &str) -> Result<Vec<Id>, Error> {
        let is_there = |id: &str| {
            self.roster.get(id).is_some_and(|e| {
                e.seen.is_some() || e.stream.is_some() || e.waiting.is_some() || (e.member && !e.departed)
            })
        };
        let named = |id: &str| {
            id == replica || prefix_of(id).is_some_and(|prefix| prefix.strip_suffix(':') == Some(replica))
        };
        let there = || self.roster.iter().map(|(id, _)| id).filter(|id| is_there(id));
        let ids: Vec<Id> = there().filter(|id| named(id)).cloned().collect();
        if ids.is_empty() {
            let text = format!(
                "there is no replica '{}' here; there are: {}",
                cut(replica),
                listed(there().map(AsRef::as_ref))
            );
            return Err(Error::new(ErrorKind::NotFound, text));
        }
        Ok(ids)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::tests::{Sim, member, rules};
    use super::super::{Event, QuorumRules};
    use super::*;

    fn operate(sim: &mut Sim, kind: OrderKind, replica: &str) {
        let order = Order {
            kind,
            reason: "the host is repaired".into(),
        };
        sim.event(Event::Operate {
            replica: replica.into(),
            order,
            ticket: 900,
        });
    }

    type Told = Result<Vec<String>, ErrorKind>;

    /// To whom orders went, and what the operator was told.
    fn orders(sim: &Sim) -> (Vec<(String, OrderKind)>, Option<Told>) {
        let sent = sim.actions.iter().filter_map(|a| match a {
            Action::Order { to, order } => Some((to.clone(), order.kind)),
            _ => None,
        });
        let told = sim.actions.iter().find_map(|a| match a {
            Action::Operated { ticket: 900, outcome } => Some(outcome.clone().map_err(|e| e.kind())),
            _ => None,
        });
        (sent.collect(), told)
    }

    #[test]
    fn a_drain_is_told_over_the_stream_and_over_the_next_one_and_changes_nothing_else() {
        let mut sim = Sim::quorum_of(rules(1), &["a:1", "b:1"]);
        operate(&mut sim, OrderKind::Drain, "b");
        let told = [("b:1".to_string(), OrderKind::Drain)];
        assert_eq!(orders(&sim), (told.to_vec(), Some(Ok(vec!["b:1".into()]))));
        assert_eq!(sim.pushes(), []);
        sim.attach("b:1", 12);
        assert_eq!(orders(&sim).0, told);
        sim.join("a:1");
        sim.join("b:1");
        assert_eq!(sim.ids().unwrap(), ["a:1", "b:1"], "it does its step");
        sim.event(Event::Leave {
            replica_id: "b:1".into(),
            reason: String::new(),
        });
        sim.join("a:1");
        assert_eq!(sim.ids().unwrap(), ["a:1"]);
        sim.attach("b:1", 13);
        assert_eq!(orders(&sim).0, [], "it has left");
    }

    #[test]
    fn an_evicted_replica_is_out_at_once_and_refused_until_it_is_started_again() {
        let mut sim = Sim::quorum_of(rules(1), &["a:1", "b:1"]);
        let call = sim.join("b:1");
        operate(&mut sim, OrderKind::Evict, "b:1");
        assert_eq!(orders(&sim).0, [("b:1".to_string(), OrderKind::Evict)]);
        assert_eq!(sim.rejected(), [(call, ErrorKind::Conflict)]);
        let (_, event) = sim.pushes()[0].clone();
        assert_eq!(event.departed, ["b:1"]);
        assert!(
            event
                .reason
                .contains("evicted by the operator: the host is repaired"),
            "{event:?}"
        );
        sim.join("a:1");
        assert_eq!(sim.ids().unwrap(), ["a:1"]);
        // Whatever it says now.
        let call = sim.join("b:1");
        assert_eq!(sim.rejected(), [(call, ErrorKind::Conflict)]);
        sim.attach("b:1", 12);
        assert!(
            matches!(sim.actions[..], [Action::Refuse { .. }]),
            "{:?}",
            sim.actions
        );
        sim.pass(Duration::from_secs(1), &["b:1"]);
        assert_eq!(sim.healthy(), ["a:1"]);
        sim.join("b:2");
        sim.join("a:1");
        assert_eq!(sim.ids().unwrap(), ["a:1", "b:2"]);
    }

    #[test]
    fn an_eviction_outlives_a_restart_of_the_lighthouse_and_is_saved_before_the_operator_hears_of_it() {
        let of = |incarnation: &str| Member {
            incarnation: incarnation.into(),
            ..member("b")
        };
        let mut sim = Sim::new(rules(1));
        sim.join_as(of("first"));
        operate(&mut sim, OrderKind::Evict, "b");
        let saved = sim
            .actions
            .iter()
            .position(|a| matches!(a, Action::Save(r) if r.evicted.len() == 1));
        let told = sim
            .actions
            .iter()
            .position(|a| matches!(a, Action::Operated { .. }));
        assert!(saved.is_some() && saved < told, "{:?}", sim.actions);
        let mut sim = Sim::started(rules(1), 7, sim.state.record(), sim.now);
        let call = sim.join_as(of("first"));
        assert_eq!(sim.rejected(), [(call, ErrorKind::Conflict)]);
        assert!(
            format!("{:?}", sim.actions).contains("the host is repaired"),
            "{:?}",
            sim.actions
        );
        // Nor by the next one, and a new process is not the one that was evicted.
        let mut sim = Sim::started(rules(1), 7, sim.state.record(), sim.now);
        let call = sim.join_as(of("first"));
        assert_eq!(sim.rejected(), [(call, ErrorKind::Conflict)]);
        sim.join_as(of("second"));
        sim.pass(Duration::from_secs(90), &["b"]);
        assert_eq!(sim.rejected(), []);
        assert_eq!(sim.state.record().unwrap().evicted, []);
    }

    #[test]
    fn an_eviction_before_the_first_quorum_outlives_a_restart_of_the_lighthouse_and_binds_no_other_replica() {
        let of = |id: &str, incarnation: &str| Member {
            incarnation: incarnation.into(),
            ..member(id)
        };
        let rules = QuorumRules {
            initial_replicas: Some(2),
            ..rules(1)
        };
        let mut sim = Sim::new(rules.clone());
        assert_eq!(sim.state.record(), None, "there is nothing to record");
        sim.join_as(of("b", "first"));
        assert_eq!(sim.ids(), None);
        operate(&mut sim, OrderKind::Evict, "b");
        let saved = |a: &Action| match a {
            Action::Save(record) => Some(record.clone()),
            _ => None,
        };
        let record = sim.actions.iter().find_map(saved).unwrap();
        // A later one, so that its ids are greater by its clock as well.
        let mut sim = Sim::started(rules.clone(), 2000, Some(record), sim.now);
        let call = sim.join_as(of("b", "first"));
        assert_eq!(sim.rejected(), [(call, ErrorKind::Conflict)]);
        assert!(!sim.state.status(sim.now).evicted.is_empty());
        // Nothing is known of the job: whatever state its replicas have is its own, and no majority is waited for.
        let ahead = |id: &str| Member {
            step: ftcore::Step(500),
            lineage: "ff".into(),
            last_quorum_id: ftcore::Epoch(2000 - 1),
            last_world_size: 2,
            ..of(id, "any")
        };
        sim.join_as(ahead("a"));
        sim.join_as(ahead("c"));
        assert_eq!(sim.rejected(), []);
        let quorum = sim.delivered().unwrap();
        assert_eq!((quorum.participants.len(), quorum.quorum_id.0), (2, 2001));
        assert_eq!(sim.state.record().unwrap().evicted.len(), 1);
        // The other way: it is started again, and nothing is left to record.
        let mut sim = Sim::new(rules);
        sim.attach("b", 1);
        operate(&mut sim, OrderKind::Evict, "b");
        sim.join_as(of("b", "first"));
        sim.join_as(of("b", "second"));
        assert_eq!(sim.state.record(), None);
    }

    #[test]
    fn which_process_was_evicted_is_recorded_once_it_has_asked() {
        let of = |incarnation: &str| Member {
            incarnation: incarnation.into(),
            ..member("b")
        };
        let rules = QuorumRules {
            initial_replicas: Some(2),
            ..rules(1)
        };
        let mut sim = Sim::new(rules.clone());
        sim.attach("b", 1);
        operate(&mut sim, OrderKind::Evict, "b");
        sim.join_as(of("first"));
        sim.event(Event::Tick);
        let saved = |a: &Action| match a {
            Action::Save(record) => Some(record.clone()),
            _ => None,
        };
        let record = sim.actions.iter().find_map(saved).unwrap();
        let mut sim = Sim::started(rules, 7, Some(record), sim.now);
        // The first to ask is not taken for the one that had asked before.
        sim.join_as(of("second"));
        assert_eq!(sim.rejected(), []);
    }

    #[test]
    fn a_replica_that_is_evicted_before_it_asks_is_refused_when_its_call_comes() {
        let mut sim = Sim::new(rules(1));
        sim.attach("a:1", 1);
        operate(&mut sim, OrderKind::Evict, "a");
        let of = |incarnation: &str| Member {
            incarnation: incarnation.into(),
            ..member("a:1")
        };
        for _ in 0..2 {
            sim.join_as(of("first"));
            assert_eq!(sim.ids(), None);
            assert!(sim.state.status(sim.now).healthy.is_empty());
        }
        sim.join_as(of("second"));
        assert_eq!(sim.ids().unwrap(), ["a:1"], "it was started again");
    }

    #[test]
    fn a_replica_that_is_started_again_under_the_same_id_is_not_the_one_that_was_evicted() {
        let of = |incarnation: &str| Member {
            incarnation: incarnation.into(),
            ..member("b")
        };
        let mut sim = Sim::new(rules(1));
        sim.join_as(of("first"));
        operate(&mut sim, OrderKind::Evict, "b");
        let call = sim.join_as(of("first"));
        assert_eq!(sim.rejected(), [(call, ErrorKind::Conflict)]);
        sim.join_as(of("second"));
        assert_eq!(sim.ids().unwrap(), ["b"]);
    }

    #[test]
    fn who_cannot_be_told_is_not_drained_or_killed_and_who_is_not_there_is_named_with_who_is() {
        let mut sim = Sim::unattached(rules(1), &["a", "b"]);
        for kind in [OrderKind::Drain, OrderKind::Kill] {
            operate(&mut sim, kind, "a");
            assert_eq!(orders(&sim), (vec![], Some(Err(ErrorKind::Unsupported))));
        }
        operate(&mut sim, OrderKind::Evict, "c");
        let text = format!("{:?}", sim.actions);
        assert!(
            text.contains("there is no replica 'c' here; there are: a, b"),
            "{text}"
        );
        operate(&mut sim, OrderKind::Evict, "a");
        assert_eq!(orders(&sim).1, Some(Ok(vec!["a".into()])));
        assert_eq!(sim.healthy(), ["b"]);
    }

    #[test]
    fn a_kill_is_told_and_the_end_of_the_stream_does_the_rest() {
        let mut sim = Sim::quorum_of(rules(1), &["a:1", "b:1"]);
        operate(&mut sim, OrderKind::Kill, "b");
        assert_eq!(orders(&sim).0, [("b:1".to_string(), OrderKind::Kill)]);
        assert_eq!(sim.pushes(), []);
        sim.detach("b:1", 2);
        assert_eq!(sim.pushes()[0].1.departed, ["b:1"]);
    }
}
