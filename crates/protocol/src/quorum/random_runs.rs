//! Random runs of a few replicas under virtual time: what must hold whatever happens, in whatever order.

use std::time::Duration;

use proptest::prelude::*;

use super::fields::MAX_REASON_BYTES;
use super::tests::{CLOCK_MS, SEED, Sim, member, rules};
use super::*;
use crate::member::Member;

/// One step of a random incarnation. Ids are few, so that they meet.
fn step() -> impl Strategy<Value = (u8, usize, u64, u64)> {
    (0u8..10, 0usize..6, 0u64..6, 0u64..4)
}

const IDS: [&str; 6] = ["a:1", "a:2", "b:1", "c:1", "d", "e"];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// INV-7 on every path, whatever happens in whatever order: joins, silence, broken streams, restarts.
    #[test]
    fn every_quorum_is_big_enough_alive_and_of_a_new_or_unchanged_id(
        min_replicas in 1usize..4,
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let mut sim = Sim::new(rules(min_replicas));
        let mut twin = sim.state.clone();
        let mut live: BTreeMap<Ticket, String> = BTreeMap::new();
        let mut last: Option<Arc<Quorum>> = None;
        let mut highest = Epoch(0);
        for (kind, who, n, ms) in steps {
            let id = IDS[who].to_string();
            sim.now += Duration::from_millis(ms * 900);
            let event = match kind {
                0..=2 => {
                    sim.tickets += 1;
                    live.insert(sim.tickets, id.clone());
                    let member = Member { shrink_only: n == 5, commit_failures: i64::from(n == 4), ..member(&id) };
                    Event::Join { member, ticket: sim.tickets }
                }
                3 => {
                    let ticket = live.iter().find(|(_, owner)| **owner == id).map_or(0, |(t, _)| *t);
                    live.remove(&ticket);
                    Event::Withdraw { ticket }
                }
                4 => Event::Attached { replica_id: id, stream: n, last_quorum_id: if n > 3 { highest } else { Epoch(0) } },
                5 => Event::Detached { replica_id: id, stream: n },
                6 if n == 0 => {
                    // A restart: every call is lost, the id and the members are not.
                    live.clear();
                    let record = sim.state.record();
                    sim.state = Sim::started(rules(min_replicas), CLOCK_MS, record, sim.now).state;
                    twin = sim.state.clone();
                    last = None;
                    continue;
                }
                6 => Event::Leave { replica_id: id, reason: String::new() },
                7 => Event::Report { replica_id: id, quorum_id: highest, reason: String::new() },
                8 => Event::Away { time: Duration::from_millis(ms * 900) },
                _ => Event::Heartbeat { replica_id: id },
            };
            let gone = match &event {
                Event::Leave { replica_id, .. } => Some(replica_id.clone()),
                _ => None,
            };
            let members = sim.state.record().map_or(Vec::new(), |r| r.members);
            sim.event(event.clone());
            let twins = twin.apply(event, sim.now);
            prop_assert_eq!(format!("{:?}", sim.actions), format!("{twins:?}"), "the same events, the same actions");
            for action in &sim.actions {
                match action {
                    Action::Reject { ticket, .. } => prop_assert!(live.remove(ticket).is_some(), "answered twice"),
                    Action::Deliver { tickets, quorum } => {
                        prop_assert!(quorum.participants.len() >= min_replicas.max(1));
                        // Those that wait because a member asks for no newcomers are in no other quorum.
                        let shrinks = quorum.participants.iter().any(|m| m.shrink_only && members.contains(&m.replica_id));
                        let waits = |id: &&String| live.values().any(|v| v == *id) && !quorum.contains(id);
                        let kept_out = if shrinks { sim.healthy().iter().filter(waits).count() } else { 0 };
                        prop_assert!(quorum.participants.len() * 2 > sim.healthy().len() - kept_out);
                        prop_assert_eq!(tickets.len(), quorum.participants.len());
                        let ids: Vec<_> = quorum.ids().map(str::to_string).collect();
                        let sorted: BTreeSet<_> = ids.iter().cloned().collect();
                        prop_assert_eq!(&sorted.into_iter().collect::<Vec<_>>(), &ids);
                        for (ticket, id) in tickets.iter().zip(&ids) {
                            let owner = live.remove(ticket);
                            prop_assert_eq!(owner.as_ref(), Some(id), "only through a live call");
                            prop_assert!(sim.is_healthy(id));
                            prop_assert!(gone.as_ref() != Some(id));
                        }
                        prop_assert!(!(ids.contains(&"a:1".into()) && ids.contains(&"a:2".into())));
                        match &last {
                            Some(l) if l.quorum_id == quorum.quorum_id => {
                                prop_assert!(l.ids().eq(quorum.ids()), "one id, one set of members");
                            }
                            _ => prop_assert!(quorum.quorum_id > highest && quorum.quorum_id > SEED),
                        }
                        highest = quorum.quorum_id;
                        last = Some(quorum.clone());
                    }
                    _ => {}
                }
            }
        }
    }

    #[test]
    fn a_peers_text_is_cut_at_a_character(text in "\\PC{0,600}") {
        let short = cut(&text);
        prop_assert!(text.starts_with(short) && short.len() <= MAX_REASON_BYTES);
    }
}
