//! Both ends of healing: the snapshot that a source publishes, and the replica that takes a state over.
//!
//! The rule for errors: what a source sends (its address, its URL, its manifest, its bytes) is never this replica's wrong argument.
//! Such an error costs the vote, and the next quorum names other sources or none. Only the state's own refusal to load what
//! arrived can end the run, and only if this replica is the odd one: it has committed nothing yet, or two sources vouch for the
//! same bytes. A replica with commits of its own does not end because of what one peer holds.
//!
//! The ranks of one replica follow one source (`heal_choice.rs`), since sources may differ in parts of their own.
//!
//! A member's state may travel over the group of the new epoch instead of HTTP (`ManagerConfig::heal_over`). A spare's never does: it is in no group.

use std::sync::Arc;
use std::time::Instant;

use checkpoint::{
    CheckpointSource, DEFAULT_CHUNK_BYTES, Distrusted, Fetch, FetchOptions, Fetched, GroupFetch, GroupSource,
    HttpTransport, Kept, Snapshot, SnapshotId, SourceChoice, StateDict,
};
use coordination::{ManagerClient, QuorumResult};
use ftcore::{Error, ErrorKind, ProcessGroup, Result, Step, Store};
use identity::Party;
use protocol::Lineage;

use crate::config::HealOver;
use crate::heal_choice::RanksChoice;
use replica::{Healed, State};

/// Offers the state of this step to the replicas that heal from here. Costs the copy that `save` makes; the hashes are computed
/// on other threads once a peer asks. Over HTTP to all of them, or to spares only; what comes back is for the members that take it over
/// the group.
pub(crate) fn publish(
    transport: &HttpTransport,
    heal_over: HealOver,
    lineage: &Lineage,
    answer: &QuorumResult,
    state: &dyn State,
) -> Result<Arc<Snapshot>> {
    let mut dict = StateDict::new();
    state.save(&mut dict)?;
    let id = SnapshotId {
        step: answer.max_step,
        epoch: answer.quorum_id,
        lineage: lineage.as_str().to_owned(),
    };
    let snapshot = Snapshot::of(id, dict, DEFAULT_CHUNK_BYTES)?;
    if heal_over == HealOver::Http || answer.serves_spares {
        transport.publish(Arc::clone(&snapshot));
    }
    Ok(snapshot)
}

/// What a heal over the group works with.
pub(crate) struct OverGroup<'a> {
    pub(crate) group: &'a dyn ProcessGroup,
    /// Sources that sent wrong bytes in a heal that failed.
    pub(crate) distrusted: &'a Distrusted,
    /// Why the epoch is over, if it is.
    pub(crate) watch: &'a dyn Fn() -> Result<()>,
}

/// The replica that heals, as it stands before.
pub(crate) struct Behind<'a> {
    pub(crate) replica_id: &'a str,
    pub(crate) group_rank: u32,
    pub(crate) step: Step,
    pub(crate) lineage: &'a Lineage,
    /// Where the ranks of the replica agree on a source, if there are several.
    pub(crate) ranks_store: Option<&'a Arc<dyn Store>>,
    /// What came in a heal that failed.
    pub(crate) kept: &'a Kept,
    /// As whom it calls the sources, with credentials.
    pub(crate) party: Option<&'a Arc<Party>>,
    /// The largest state that it takes over; `None`: [`FetchOptions`]' own limit.
    pub(crate) max_state_bytes: Option<u64>,
    /// `None`: over HTTP.
    pub(crate) over_group: Option<OverGroup<'a>>,
    /// Called once the state is here: to load it may take long as well.
    pub(crate) progress: &'a dyn Fn(),
}

impl Behind<'_> {
    /// True if nothing would be lost with this replica's state.
    fn is_new(&self) -> bool {
        self.step == Step(0) && self.lineage.as_str().is_empty()
    }

    /// For either way.
    fn limits(&self) -> FetchOptions {
        let usual = FetchOptions::default();
        FetchOptions {
            max_state_bytes: self.max_state_bytes.unwrap_or(usual.max_state_bytes),
            party: self.party.cloned(),
            ..usual
        }
    }
}

/// Takes the state over from the sources that `answer` names, and says which history it has. Nothing else of the replica changes.
pub(crate) fn heal(
    me: &Behind<'_>,
    answer: &QuorumResult,
    state: &mut dyn State,
    deadline: Instant,
) -> Result<(Healed, Lineage)> {
    let begun = Instant::now();
    let fetched = fetch(me, answer, state, deadline).map_err(|e| {
        let text = format!(
            "replica '{}' cannot take over the state of {}: {e}",
            me.replica_id,
            named(answer)
        );
        Error::new(of_peer(e.kind()), text).with_op("heal").with_source(e)
    })?;
    tracing::info!(
        id = %fetched.id,
        bytes = fetched.state.total_bytes(),
        reused = fetched.reused_bytes,
        followed = ?fetched.followed,
        received = ?fetched.received,
        "fetched the state"
    );
    (me.progress)();
    state
        .load(&fetched.state)
        .map_err(|e| refused(me, answer, &fetched, state, &e))?;
    let healed = Healed {
        source: fetched
            .followed
            .first()
            .and_then(|i| Some(answer.recover_sources.get(*i)?.replica_rank)),
        bytes: fetched.state.total_bytes(),
        took: begun.elapsed(),
    };
    Ok((healed, Lineage::from_peer(fetched.id.lineage)))
}

fn fetch(me: &Behind<'_>, answer: &QuorumResult, state: &dyn State, deadline: Instant) -> Result<Fetched> {
    if answer.recover_sources.is_empty() {
        let text = "the quorum says that this replica is behind, and names no source";
        return Err(Error::new(ErrorKind::Protocol, text));
    }
    if let Some(over) = &me.over_group {
        return fetch_over_group(me, over, answer, deadline);
    }
    let group_rank = me.group_rank;
    let source = |(rank, address): (u32, String)| {
        let id = answer.id_of(rank).map(str::to_string);
        let (party, of) = (me.party.cloned(), id.clone());
        let source = CheckpointSource::found_by(replica(answer, rank), move |deadline| {
            ManagerClient::connect_as(party, of.as_deref(), &address, deadline)?
                .checkpoint_metadata(group_rank, deadline)
        });
        match id {
            Some(id) => source.of_replica(&id),
            None => source,
        }
    };
    let fetch = Fetch {
        sources: answer
            .recover_sources
            .iter()
            .map(|s| source((s.replica_rank, s.manager_address.clone())))
            .collect(),
        step: answer.max_step,
        epoch: Some(answer.quorum_id),
        lineage: Some(answer.lineage.clone()).filter(|l| !l.is_empty()),
        own: older_state(me, state),
        kept: me.kept.clone(),
        choice: choice(me, answer),
    };
    fetch.run(deadline, &me.limits())
}

/// From the rank of this rank's number in one of the sources: the group has one of each member.
fn fetch_over_group(
    me: &Behind<'_>,
    over: &OverGroup<'_>,
    answer: &QuorumResult,
    deadline: Instant,
) -> Result<Fetched> {
    let source = |rank: u32| GroupSource {
        rank,
        name: replica(answer, rank),
    };
    let fetch = GroupFetch {
        group: over.group,
        sources: answer
            .recover_sources
            .iter()
            .map(|s| source(s.replica_rank))
            .collect(),
        step: answer.max_step,
        epoch: answer.quorum_id,
        lineage: Some(answer.lineage.clone()).filter(|l| !l.is_empty()),
        choice: choice(me, answer),
        distrusted: over.distrusted.clone(),
        watch: over.watch,
    };
    fetch.run(deadline, &me.limits())
}

/// What makes this rank follow the source that the other ranks of its replica follow.
fn choice(me: &Behind<'_>, answer: &QuorumResult) -> Option<Arc<dyn SourceChoice>> {
    let store = me.ranks_store?;
    // Ids from peers go into the store, one a line.
    let id = |rank: u32| replica(answer, rank).escape_debug().to_string();
    Some(Arc::new(RanksChoice {
        store: Arc::clone(store),
        key: RanksChoice::key(me.replica_id),
        quorum_id: answer.quorum_id,
        step: answer.max_step,
        sources: answer
            .recover_sources
            .iter()
            .map(|s| id(s.replica_rank))
            .collect(),
    }))
}

/// What this replica has already, if it has committed anything: parts of it may still be right.
fn older_state(me: &Behind<'_>, state: &dyn State) -> Option<StateDict> {
    if me.is_new() {
        return None;
    }
    let mut own = StateDict::new();
    // One that was written in part cannot be saved (INV-5), and need not.
    state.save(&mut own).ok().map(|()| own)
}

/// The state that arrived is not one for this replica. Who is the odd one decides what that means.
fn refused(me: &Behind<'_>, answer: &QuorumResult, fetched: &Fetched, state: &dyn State, e: &Error) -> Error {
    let permanent = me.is_new() || fetched.followed.len() > 1;
    let kind = if permanent { e.kind() } else { of_peer(e.kind()) };
    let (rule, vouched) = if permanent {
        ("this replica is the odd one", fetched.followed.len())
    } else {
        (
            "which of the two is the odd one is open: the next quorum may decide",
            fetched.followed.len(),
        )
    };
    let mut own = StateDict::new();
    let difference = match state.save(&mut own) {
        Ok(()) => own.first_difference(&fetched.state),
        Err(_) => None,
    };
    let difference = difference.map_or(String::new(), |d| format!("; the two differ first in {d}"));
    let text = format!(
        "replica '{}' (step {}) cannot take over the state of {} ({}, {} tensors, {} bytes, vouched for by {vouched} of {} \
         sources): {e}{difference}; {rule}",
        me.replica_id,
        me.step,
        named(answer),
        fetched.id,
        fetched.state.len(),
        fetched.state.total_bytes(),
        answer.recover_sources.len(),
    );
    Error::new(kind, text).with_op("heal").with_source(e.clone())
}

/// The member of that rank, for errors.
pub(crate) fn replica(answer: &QuorumResult, rank: u32) -> String {
    answer
        .id_of(rank)
        .map_or_else(|| format!("replica rank {rank}"), |id| format!("replica '{id}'"))
}

fn named(answer: &QuorumResult) -> String {
    let all: Vec<String> = answer
        .recover_sources
        .iter()
        .map(|s| replica(answer, s.replica_rank))
        .collect();
    if all.is_empty() {
        "another replica".into()
    } else {
        all.join(", ")
    }
}

/// See the rule above: these two kinds would end the run.
fn of_peer(kind: ErrorKind) -> ErrorKind {
    match kind {
        ErrorKind::InvalidArgument | ErrorKind::Unsupported => ErrorKind::Protocol,
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use std::sync::Barrier;
    use std::sync::atomic::{AtomicBool, Ordering};

    use coordination::{LighthouseConfig, LighthouseServer, ManagerServer, ManagerServerConfig};
    use ftcore::{Epoch, InMemoryStore, deadline_in};
    use protocol::assignment::RecoverySource;

    use super::*;

    struct Weights {
        shape: Vec<usize>,
        values: Vec<f32>,
    }

    impl Weights {
        fn of(values: &[f32]) -> Self {
            Self {
                shape: vec![values.len()],
                values: values.to_vec(),
            }
        }
    }

    impl State for Weights {
        fn save(&self, out: &mut StateDict) -> Result<()> {
            out.insert_f32("w", &self.shape, &self.values)
        }
        fn load(&mut self, from: &StateDict) -> Result<()> {
            self.values = from.get_f32_shaped("w", &self.shape)?;
            Ok(())
        }
    }

    /// The manager servers of the sources, each with a lighthouse of its own: none waits for another.
    #[derive(Default)]
    struct Sources {
        lighthouses: Vec<LighthouseServer>,
        servers: Vec<ManagerServer>,
        transports: Vec<HttpTransport>,
    }

    fn soon() -> Instant {
        deadline_in(Duration::from_secs(30))
    }

    impl Sources {
        /// A replica whose rank has not asked for a quorum yet.
        fn add(&mut self) -> &mut Self {
            self.add_of(1)
        }

        /// A replica of `ranks` ranks, none of which has asked for a quorum yet.
        fn add_of(&mut self, world_size: u32) -> &mut Self {
            let lighthouse = LighthouseServer::start(LighthouseConfig {
                bind: "127.0.0.1:0".into(),
                min_replicas: 1,
                initial_replicas: Some(1),
                ..LighthouseConfig::default()
            })
            .unwrap();
            let server = ManagerServer::start(ManagerServerConfig {
                replica_id: format!("r{}:x", self.servers.len()),
                lighthouse: lighthouse.address(),
                bind: "127.0.0.1:0".into(),
                store_address: "127.0.0.1:1".into(),
                world_size,
                ..ManagerServerConfig::default()
            });
            self.servers.push(server.unwrap());
            self.lighthouses.push(lighthouse);
            self
        }

        /// A replica that publishes `state` as `step` of epoch 9.
        fn publishing(&mut self, step: i64, state: &Weights) -> &mut Self {
            let transport = HttpTransport::start("127.0.0.1:0", None).unwrap();
            let answer = QuorumResult {
                max_step: Step(step),
                quorum_id: Epoch(9),
                ..QuorumResult::default()
            };
            publish(&transport, HealOver::Http, &Lineage::default(), &answer, state).unwrap();
            self.add();
            let address = self.servers.last().unwrap().address();
            let client = ManagerClient::connect(&address, soon()).unwrap();
            let request = coordination::QuorumRequest {
                checkpoint_metadata: transport.metadata(),
                ..coordination::QuorumRequest::default()
            };
            client.quorum(&request, soon()).unwrap();
            self.transports.push(transport);
            self
        }

        /// A replica whose two ranks serve what is published at the transports that come back.
        fn of_two_ranks(&mut self) -> [HttpTransport; 2] {
            let transports = [(), ()].map(|()| HttpTransport::start("127.0.0.1:0", None).unwrap());
            let address = self.add_of(2).servers.last().unwrap().address();
            std::thread::scope(|scope| {
                for (group_rank, transport) in (0..).zip(&transports) {
                    let address = &address;
                    scope.spawn(move || {
                        let request = coordination::QuorumRequest {
                            group_rank,
                            checkpoint_metadata: transport.metadata(),
                            ..coordination::QuorumRequest::default()
                        };
                        let client = ManagerClient::connect(address, soon()).unwrap();
                        client.quorum(&request, soon()).unwrap();
                    });
                }
            });
            transports
        }

        fn answer(&self) -> QuorumResult {
            answer(self.servers.iter().map(ManagerServer::address).collect())
        }
    }

    /// Told to heal step 5 of epoch 9 from the managers at these addresses.
    fn answer(addresses: Vec<String>) -> QuorumResult {
        QuorumResult {
            quorum_id: Epoch(9),
            max_step: Step(5),
            heal: true,
            recover_src_replica_rank: Some(0),
            replica_ids: (0..addresses.len()).map(|i| format!("r{i}:x")).collect(),
            recover_sources: (0..)
                .zip(addresses)
                .map(|(replica_rank, manager_address)| RecoverySource {
                    replica_rank,
                    manager_address,
                    replica_id: String::new(),
                })
                .collect(),
            ..QuorumResult::default()
        }
    }

    fn heal_at(step: i64, answer: &QuorumResult, state: &mut Weights, deadline: Instant) -> Result<Healed> {
        let lineage = if step == 0 {
            Lineage::default()
        } else {
            Lineage::default().after(Epoch(1), Step(step))
        };
        let me = Behind {
            replica_id: "me:y",
            group_rank: 0,
            step: Step(step),
            lineage: &lineage,
            ranks_store: None,
            kept: &Kept::default(),
            party: None,
            max_state_bytes: None,
            over_group: None,
            progress: &|| (),
        };
        heal(&me, answer, state, deadline).map(|(healed, _)| healed)
    }

    #[test]
    fn what_a_source_says_of_itself_is_never_this_replicas_wrong_argument() {
        let mut unasked = Sources::default();
        unasked.add();
        let known = unasked.servers[0].address();
        for address in ["", "n/a", "ftp://a:1", "http://", &known] {
            let mut state = Weights::of(&[1.0]);
            let e = heal_at(3, &answer(vec![address.into()]), &mut state, soon()).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Protocol, "{address}: {e}");
            let text = e.to_string();
            assert!(
                text.contains("replica 'r0:x'") && text.contains("'me:y'"),
                "{text}"
            );
            if address == known {
                assert!(text.contains("rank 0 has not asked"), "{text}");
            }
            assert_eq!(state.values, [1.0]);
        }
        let e = heal_at(3, &answer(vec![]), &mut Weights::of(&[1.0]), soon()).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Protocol, "{e}");
    }

    #[test]
    fn the_largest_state_that_is_taken_over_is_the_configured_one() {
        let mut sources = Sources::default();
        sources.publishing(5, &Weights::of(&[2.0; 64]));
        for (max_state_bytes, is_taken) in [(Some(256), false), (Some(1 << 20), true), (None, true)] {
            let me = Behind {
                replica_id: "me:y",
                group_rank: 0,
                step: Step(0),
                lineage: &Lineage::default(),
                ranks_store: None,
                kept: &Kept::default(),
                party: None,
                max_state_bytes,
                over_group: None,
                progress: &|| (),
            };
            let outcome = heal(&me, &sources.answer(), &mut Weights::of(&[0.0; 64]), soon());
            let said = outcome.err().map(|e| e.to_string()).unwrap_or_default();
            assert_eq!(said.is_empty(), is_taken, "{max_state_bytes:?}: {said}");
            assert!(
                is_taken || said.contains("limit of 256 (max_state_bytes)"),
                "{said}"
            );
        }
    }

    #[test]
    fn a_source_that_cannot_be_found_does_not_hold_up_healing_from_another() {
        let mut sources = Sources::default();
        sources.publishing(5, &Weights::of(&[2.0, 3.0]));
        let mut named = vec![String::new(), "http://127.0.0.1:1".into()];
        named.push(sources.servers[0].address());
        let mut state = Weights::of(&[0.0, 0.0]);
        let begun = Instant::now();
        heal_at(
            3,
            &answer(named),
            &mut state,
            deadline_in(Duration::from_secs(120)),
        )
        .unwrap();
        assert_eq!(state.values, [2.0, 3.0]);
        assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
    }

    #[test]
    fn of_sources_whose_states_have_parts_of_their_own_one_is_followed_and_none_are_mixed() {
        let mut sources = Sources::default();
        sources
            .publishing(5, &Weights::of(&[2.0, 2.5]))
            .publishing(5, &Weights::of(&[2.0, 3.5]));
        let mut state = Weights::of(&[0.0, 0.0]);
        heal_at(0, &sources.answer(), &mut state, soon()).unwrap();
        assert!(
            [[2.0, 2.5], [2.0, 3.5]].iter().any(|s| state.values == s),
            "{:?}",
            state.values
        );
    }

    #[test]
    fn only_the_odd_replica_ends_because_of_a_state_that_does_not_fit_and_both_sides_are_told() {
        let other_model = Weights::of(&[2.0, 3.0]);
        let mut one = Sources::default();
        one.publishing(5, &other_model);
        let mut two = Sources::default();
        two.publishing(5, &other_model).publishing(5, &other_model);
        for (own_step, sources, kind) in [
            // It joins, and has nothing to lose.
            (0, &one, ErrorKind::InvalidArgument),
            // It has commits of its own, and the other side is a single peer.
            (3, &one, ErrorKind::Protocol),
            // Two vouch for the same bytes.
            (3, &two, ErrorKind::InvalidArgument),
        ] {
            let mut state = Weights::of(&[7.0]);
            let e = heal_at(own_step, &sources.answer(), &mut state, soon()).unwrap_err();
            assert_eq!(e.kind(), kind, "{e}");
            let text = e.to_string();
            for part in [
                "'me:y'",
                "'r0:x'",
                "expected shape [1], found [2]",
                "tensor 'w': f32 of shape [1] here",
            ] {
                assert!(text.contains(part), "{part} is not in: {text}");
            }
        }
    }

    #[test]
    fn a_source_of_an_earlier_epoch_is_named_with_what_it_serves_and_what_was_waited_for() {
        let mut sources = Sources::default();
        sources.publishing(5, &Weights::of(&[2.0]));
        let mut answer = sources.answer();
        answer.quorum_id = Epoch(11);
        let deadline = deadline_in(Duration::from_secs(1));
        let e = heal_at(3, &answer, &mut Weights::of(&[0.0]), deadline).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Timeout, "{e}");
        assert!(
            e.to_string()
                .contains("serving step 5 of epoch 9, asked for 5 of epoch 11"),
            "{e}"
        );
    }

    /// Two ranks heal at the same time, in quorum after quorum until both have, and end with these states. `ended` hears of each rank's
    /// end in the first quorum, and `publish` makes the sources publish for each later one.
    fn both_ranks_heal(
        store: &Arc<dyn Store>,
        answer: &QuorumResult,
        ended: impl Fn(u32) + Sync,
        publish: impl Fn(Epoch) + Sync,
    ) -> [Vec<f32>; 2] {
        let (together, healed) = (Barrier::new(2), [(); 2].map(|()| AtomicBool::new(false)));
        let as_rank = |group_rank: u32| {
            let mut state = Weights::of(&[0.0, 0.0]);
            for quorum_id in 9..14 {
                let answer = QuorumResult {
                    quorum_id: Epoch(quorum_id),
                    ..answer.clone()
                };
                let me = Behind {
                    replica_id: "me:y",
                    group_rank,
                    step: Step(0),
                    lineage: &Lineage::default(),
                    ranks_store: Some(store),
                    kept: &Kept::default(),
                    party: None,
                    max_state_bytes: None,
                    over_group: None,
                    progress: &|| (),
                };
                together.wait();
                let result = heal(&me, &answer, &mut state, soon());
                healed[group_rank as usize].store(result.is_ok(), Ordering::SeqCst);
                if quorum_id == 9 {
                    ended(group_rank);
                }
                if together.wait().is_leader() {
                    publish(Epoch(quorum_id + 1));
                }
                if healed.iter().all(|h| h.load(Ordering::SeqCst)) {
                    return state.values;
                }
                if let Err(e) = result {
                    assert!(
                        !matches!(e.kind(), ErrorKind::InvalidArgument | ErrorKind::Unsupported),
                        "{e}"
                    );
                }
            }
            panic!("rank {group_rank} found no source that the other one could get, too");
        };
        std::thread::scope(|scope| {
            let other = scope.spawn(|| as_rank(1));
            [as_rank(0), other.join().unwrap()]
        })
    }

    fn in_memory() -> Arc<dyn Store> {
        Arc::new(InMemoryStore::new())
    }

    fn publish_as(transport: &HttpTransport, quorum_id: Epoch, state: [f32; 2]) {
        let answer = QuorumResult {
            quorum_id,
            max_step: Step(5),
            ..QuorumResult::default()
        };
        publish(
            transport,
            HealOver::Http,
            &Lineage::default(),
            &answer,
            &Weights::of(&state),
        )
        .unwrap();
    }

    #[test]
    fn ranks_of_one_replica_heal_from_one_source_where_another_refuses_one_of_them() {
        let mut sources = Sources::default();
        let [a0, a1] = sources.of_two_ranks();
        let [b0, b1] = sources.of_two_ranks();
        // The first source serves rank 0 only; the second serves rank 1 at once, and rank 0 after that.
        drop(a1);
        publish_as(&a0, Epoch(9), [1.0, 0.0]);
        publish_as(&b1, Epoch(9), [2.0, 1.0]);
        let states = both_ranks_heal(
            &in_memory(),
            &sources.answer(),
            |rank| {
                if rank == 1 {
                    publish_as(&b0, Epoch(9), [2.0, 0.0]);
                }
            },
            |quorum_id| {
                publish_as(&a0, quorum_id, [1.0, 0.0]);
                publish_as(&b0, quorum_id, [2.0, 0.0]);
                publish_as(&b1, quorum_id, [2.0, 1.0]);
            },
        );
        assert_eq!(states, [[2.0, 0.0], [2.0, 1.0]]);
    }

    #[test]
    fn ranks_of_one_replica_heal_from_one_source_where_each_finds_another_one_first() {
        let mut sources = Sources::default();
        let [a0, a1] = sources.of_two_ranks();
        let [b0, b1] = sources.of_two_ranks();
        // Each source is slow for one rank: it publishes for it once the ranks have chosen, or one has healed without a choice.
        publish_as(&a0, Epoch(9), [1.0, 0.0]);
        publish_as(&b1, Epoch(9), [2.0, 1.0]);
        let (store, has_ended) = (in_memory(), AtomicBool::new(false));
        let states = std::thread::scope(|scope| {
            scope.spawn(|| {
                let key = RanksChoice::key("me:y");
                while !store.check(&[&key], soon()).unwrap() && !has_ended.load(Ordering::SeqCst) {
                    std::thread::yield_now();
                }
                publish_as(&b0, Epoch(9), [2.0, 0.0]);
                publish_as(&a1, Epoch(9), [1.0, 1.0]);
            });
            let ended = |_| has_ended.store(true, Ordering::SeqCst);
            both_ranks_heal(&store, &sources.answer(), ended, |_| ())
        });
        assert_eq!(states[0][0], states[1][0], "{states:?}");
    }
}
