//! The rules once more, in the plainest form: linear scans over what the entries say. The counters and indexes must
//! never say anything else, whatever happens in whatever order.

use std::time::Duration;

use proptest::prelude::*;

use super::roster::Tally;
use super::roster::{Coming, Waiting};
use super::tests::{CLOCK_MS, SEED, Sim, member, rules};
use super::verdict::Verdict;
use super::*;
use crate::member::Member;

/// The ids of the quorum that forms now, or which rule holds it up.
fn compute(state: &LighthouseState, now: Instant) -> Result<Vec<Id>, Verdict> {
    let rules = &state.rules;
    let known: Vec<(&Id, &Entry)> = state.roster.iter().filter(|(_, e)| e.seen.is_some()).collect();
    let asking: Vec<(&Id, &Waiting)> = known
        .iter()
        .filter_map(|(id, e)| e.waiting.as_ref().map(|w| (*id, w)))
        .collect();
    if asking.is_empty() {
        return Err(Verdict::Idle);
    }
    let record = state.record();
    let members = record.iter().flat_map(|r| &r.members).collect::<Vec<_>>();
    let previous = |id: &str| members.iter().any(|m| m.as_str() == id);
    let shrinks = record.is_some() && asking.iter().any(|(id, w)| w.member.shrink_only && previous(id));
    let candidates: Vec<Id> = asking
        .iter()
        .filter(|(id, _)| !shrinks || previous(id))
        .map(|(id, _)| (*id).clone())
        .collect();
    let missing: Vec<&Id> = known
        .iter()
        .filter(|(id, _)| asking.iter().all(|(a, _)| a != id))
        .map(|(id, _)| *id)
        .collect();
    if candidates.len() < rules.min_replicas.max(1) {
        return Err(Verdict::TooFew);
    }
    // Those that a shrinking quorum leaves waiting are in no other.
    let kept_out = asking.len() - candidates.len();
    if candidates.len() * 2 <= known.len() - kept_out {
        return Err(Verdict::NoMajority);
    }
    let goes_on = state.previous.is_some()
        || asking
            .iter()
            .any(|(id, w)| w.member.last_quorum_id > Epoch(0) || previous(id));
    if rules
        .initial_replicas
        .is_some_and(|initial| !goes_on && candidates.len() < initial)
    {
        return Err(Verdict::Initial);
    }
    let overlaps = candidates.iter().any(|id| previous(id));
    let busy = missing.iter().filter(|id| previous(id)).count();
    if !overlaps && busy > 0 {
        return Err(Verdict::Newcomers);
    }
    let name = |id: &str| id.split(':').next().unwrap_or(id).to_string();
    let binding = record.filter(|r| r.left.len() < r.members.len());
    if let Some(r) = &binding {
        let named = |ids: &[Id]| {
            let known = |id: &&Id| r.members.iter().any(|m| name(m) == name(id));
            ids.iter().filter(known).count()
        };
        let step_of = |id: &Id| {
            asking
                .iter()
                .find(|(a, _)| *a == id)
                .map_or(Step(0), |(_, w)| w.member.step)
        };
        if candidates.iter().all(|id| step_of(id) < r.step) && named(&candidates) * 2 <= r.members.len() {
            return Err(Verdict::GoesBack);
        }
        let first = state
            .first_asked
            .map(|first| now.saturating_duration_since(first));
        let in_time = first.is_none_or(|time| time < rules.heartbeat_timeout + rules.join_timeout);
        let all: Vec<Id> = asking.iter().map(|(id, _)| (*id).clone()).collect();
        let is_back = |gone: &String| all.iter().any(|id| name(id) == name(gone));
        let beats = |id: &str| state.roster.get(id).is_some_and(|e| e.coming.is_some());
        let is_gone = |id: &&String| !is_back(id) && !beats(id);
        let left = r.members.len() - r.departed.iter().filter(is_gone).count();
        if state.previous.is_none() && in_time && left > 0 && named(&all) * 2 <= left {
            return Err(Verdict::Recovers);
        }
    }
    let coming = state
        .roster
        .iter()
        .filter(|(_, e)| e.coming.is_some_and(|c| c.counts))
        .count();
    let over = |since: Instant| now.saturating_duration_since(since) >= rules.join_timeout;
    if (missing.is_empty() && (overlaps || coming == 0))
        || (overlaps && busy == 0)
        || state.able_since.is_some_and(over)
    {
        return Ok(candidates);
    }
    Err(Verdict::Wait)
}

/// Everything that is derived, derived again.
fn verify(state: &LighthouseState, now: Instant) -> Result<(), TestCaseError> {
    let mut tally = Tally::default();
    for (id, entry) in state.roster.iter() {
        if let Some(previous) = &state.previous {
            prop_assert_eq!(entry.member, previous.contains(id), "{}", id);
        }
        prop_assert!(entry.member || !(entry.departed || entry.left), "{id}");
        prop_assert!(!entry.gone_before || (entry.departed && !entry.left), "{id}");
        prop_assert!(
            entry.coming.is_none() || (entry.waiting.is_none() && (!entry.member || entry.gone_before)),
            "{id}"
        );
        let silent = |c: Coming| now.saturating_duration_since(c.last) >= state.rules.heartbeat_timeout;
        let overdue =
            |c: Coming| c.counts && now.saturating_duration_since(c.first) >= state.rules.join_timeout;
        prop_assert!(
            !entry.coming.is_some_and(|c| silent(c) || overdue(c)),
            "{id} was not expired"
        );
        tally += &entry.tally();
        if let Some(w) = &entry.waiting {
            prop_assert_eq!(state.roster.caller(w.ticket), Some(id.clone()));
        }
        let late = |seen: Instant| now.saturating_duration_since(seen) >= state.rules.heartbeat_timeout;
        prop_assert!(!entry.seen.is_some_and(late), "{id} was not expired");
    }
    prop_assert_eq!(&tally, state.roster.tally());
    let open = state.roster.iter().filter(|(_, e)| e.waiting.is_some()).count();
    prop_assert_eq!(open, state.roster.calls(), "no call is indexed that is over");
    Ok(())
}

const IDS: [&str; 6] = ["a:1", "a:2", "b:1", "b:2", "c", "d"];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn the_indexed_state_says_what_a_linear_scan_says(
        min_replicas in 1usize..4,
        initial in prop::option::of(1usize..4),
        steps in prop::collection::vec((0u8..10, 0usize..6, 0u64..6, 0u64..5), 1..150),
    ) {
        let rules = QuorumRules { initial_replicas: initial, ..rules(min_replicas) };
        let mut sim = Sim::new(rules);
        let mut tickets = 0;
        for (kind, who, n, ms) in steps {
            let replica_id = IDS[who].to_string();
            sim.now += Duration::from_millis(ms * 1100);
            let event = match kind {
                0..=2 => {
                    tickets += 1;
                    let known = if n > 3 { sim.state.quorum_id() } else { Epoch(0) };
                    let member = Member { shrink_only: n == 1, step: Step((ms % 4).cast_signed()), last_quorum_id: known, ..member(&replica_id) };
                    Event::Join { member, ticket: tickets }
                }
                3 => Event::Withdraw { ticket: tickets.saturating_sub(n) },
                4 => Event::Attached { replica_id, stream: n, last_quorum_id: if n > 3 { SEED } else { Epoch(0) } },
                5 => Event::Detached { replica_id, stream: n },
                6 => Event::Leave { replica_id, reason: String::new() },
                7 if n == 0 => {
                    let record = sim.state.record();
                    sim.state = Sim::started(sim.state.rules.clone(), CLOCK_MS, record, sim.now).state;
                    continue;
                }
                8 if n == 0 => Event::Failed { replica_id, reason: String::new() },
                7 => Event::Away { time: Duration::from_millis(ms * 1100) },
                _ => Event::Heartbeat { replica_id },
            };
            // What the plain rules say of the state as it is when the decision is made.
            let mut before = sim.state.clone();
            before.take(event.clone(), sim.now, &mut Vec::new());
            before.turn_away_stragglers(&mut Vec::new());
            let expected = compute(&before, sim.now);
            sim.event(event);
            match (expected, sim.delivered()) {
                (Ok(ids), Some(quorum)) => prop_assert!(quorum.ids().eq(ids.iter().map(AsRef::as_ref))),
                (Err(verdict), None) => prop_assert_eq!(sim.state.judge(sim.now), verdict),
                (expected, got) => prop_assert!(false, "{expected:?}, but {got:?}"),
            }
            verify(&sim.state, sim.now)?;
        }
    }
}
