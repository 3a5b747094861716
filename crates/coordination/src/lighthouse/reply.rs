//! The answers to quorum calls: encoded once for each quorum, and shared by all its members.
//!
//! An answer is one gRPC message with its length in front, ready to be sent; a large quorum is copied neither for a member nor on its way to the socket. A
//! replica that holds the member list gets [`Unchanged`](torchft::Unchanged) where that says everything, and of a large quorum each of our replicas gets
//! its own part.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::body::Bytes;
use ftcore::{Error, ErrorKind, Result, Step};
use prost::Message;

use crate::unchanged;
use crate::wire::{quorum_message, torchft};
use protocol::assignment::Assignment;
use protocol::{Member, Quorum};

/// Whether the message behind it is compressed (never), and its length in bytes.
const HEAD: usize = 5;

/// A message as it stands on the wire.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Reply(Bytes);

impl Reply {
    fn of(message: &torchft::LighthouseQuorumResponse) -> Result<Self> {
        let length = message.encoded_len();
        let too_long = |_| {
            let text = format!("the quorum takes {length} bytes, more than gRPC can carry");
            Error::new(ErrorKind::Unavailable, text)
        };
        let head = u32::try_from(length).map_err(too_long)?.to_be_bytes();
        let mut bytes = Vec::with_capacity(HEAD + length);
        bytes.push(0);
        bytes.extend_from_slice(&head);
        let failed = |e: prost::EncodeError| Error::new(ErrorKind::Internal, e.to_string()).with_source(e);
        message.encode(&mut bytes).map_err(failed)?;
        Ok(Self(bytes.into()))
    }

    /// The message without its head.
    #[cfg(test)]
    pub(crate) fn message(&self) -> Bytes {
        self.0.slice(HEAD.min(self.0.len())..)
    }

    /// The message with its head.
    pub(crate) fn framed(self) -> Bytes {
        self.0
    }
}

/// Of a quorum with more replicas each of ours is told its own part, not the list: that costs the lighthouse n² in every epoch, and 35 GB at 16,384. Names in
/// small jobs are worth that much.
const MAX_TOLD_TO_ALL: usize = 256;
/// The list of members is what a replica with more ranks gets in any case.
const MAX_RANKS_TOLD: u32 = 64;

/// What a caller has and wants.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Caller {
    /// The list or parts that it holds; 0 for none.
    pub(crate) held: u64,
    /// Its own part of a large quorum is enough.
    pub(crate) part: Option<Part>,
}

/// The part that a caller wants.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    pub(crate) init_sync: bool,
    pub(crate) ranks: u32,
}

impl Caller {
    /// How `request` asks.
    pub(crate) fn of(request: &torchft::LighthouseQuorumRequest) -> Self {
        let ranks = request.requester.as_ref().map_or(0, |member| member.world_size);
        let ranks = u32::try_from(ranks)
            .ok()
            .filter(|ranks| (1..=MAX_RANKS_TOLD).contains(ranks));
        let part = request.part.as_ref().zip(ranks).map(|(part, ranks)| Part {
            init_sync: part.init_sync,
            ranks,
        });
        Self {
            held: request.held_list,
            part,
        }
    }
}

/// All parts of one quorum, for replicas without and with the wish for an initial sync; they differ at step 0 only.
#[derive(Debug)]
struct Parts {
    plain: Assignment<Arc<Quorum>>,
    synced: Option<Assignment<Arc<Quorum>>>,
    digest: String,
}

impl Parts {
    fn of(quorum: &Arc<Quorum>) -> Result<Self> {
        let plain = Assignment::new(quorum.clone(), false)?;
        let at_start = quorum.participants.iter().map(|m| m.step).max() == Some(Step(0));
        let synced = at_start.then(|| Assignment::new(quorum.clone(), true));
        Ok(Self {
            digest: plain.digest_of_members(),
            plain,
            synced: synced.transpose()?,
        })
    }

    /// Whether all parts are those of `last` with that progress.
    fn is_advance_of(&self, last: &Self, progress: &Member) -> bool {
        let synced = match (&self.synced, &last.synced) {
            (Some(now), Some(last)) => now.is_advance_of(last, progress),
            (None, None) => true,
            _ => false,
        };
        synced && self.plain.is_advance_of(&last.plain, progress)
    }

    /// The parts of the caller `nth`.
    fn told(&self, nth: usize, part: Part) -> Result<Vec<torchft::ManagerQuorumResponse>> {
        let assignment = self
            .synced
            .as_ref()
            .filter(|_| part.init_sync)
            .unwrap_or(&self.plain);
        let parts = (0..part.ranks).map(|rank| {
            let mut part = assignment.part_of_call(nth, rank)?;
            part.members_digest.clone_from(&self.digest);
            Ok(part.into())
        });
        parts.collect()
    }
}

/// What the last answers were made of.
#[derive(Debug)]
pub(crate) struct Shelf {
    /// The number of the member list, or the parts, that the members of the last quorum hold, and that quorum.
    list: u64,
    last: Quorum,
    parts: Option<Arc<Parts>>,
    /// [`MAX_TOLD_TO_ALL`].
    told_to_all: usize,
}

impl Default for Shelf {
    fn default() -> Self {
        Self {
            list: 0,
            last: Quorum::default(),
            parts: None,
            told_to_all: MAX_TOLD_TO_ALL,
        }
    }
}

impl Shelf {
    /// The answers for `quorum`, which is made now.
    pub(crate) fn replies(&mut self, quorum: &Arc<Quorum>, now: SystemTime) -> Replies {
        let mut progress = unchanged::progress(&mut self.last, quorum);
        let is_large = quorum.participants.len() + quorum.spares.len() > self.told_to_all;
        // Without a place for every member, which cannot be, all get the list.
        let parts = is_large
            .then(|| Parts::of(quorum))
            .and_then(Result::ok)
            .map(Arc::new);
        let before = std::mem::replace(&mut self.parts, parts.clone());
        if let Some(parts) = &parts {
            // Who holds a part must be able to go on from it.
            progress = progress.filter(|p| before.is_some_and(|before| parts.is_advance_of(&before, p)));
        }
        if progress.is_none() {
            // Another lighthouse, and this one after a restart, gives other numbers: they say when the list was made.
            let clock = now.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos());
            let clock = u64::try_from(clock).unwrap_or(u64::MAX);
            self.list = clock.max(self.list.saturating_add(1));
            self.last.clone_from(quorum);
        }
        Replies {
            list: self.list,
            quorum: quorum.clone(),
            parts,
            progress,
            now,
            full: None,
            short: None,
        }
    }
}

/// The answers for one quorum. Those that are shared are made when the first member needs them.
#[derive(Debug)]
pub(crate) struct Replies {
    list: u64,
    quorum: Arc<Quorum>,
    /// Of a large quorum.
    parts: Option<Arc<Parts>>,
    progress: Option<Member>,
    now: SystemTime,
    full: Option<Result<Reply>>,
    short: Option<Result<Reply>>,
}

impl Replies {
    /// The answer for the `nth` call that the quorum answers.
    pub(crate) fn to(&mut self, nth: usize, caller: Caller) -> Result<Reply> {
        if let Some(progress) = self.progress.as_ref().filter(|_| caller.held == self.list) {
            let make = || {
                Reply::of(&torchft::LighthouseQuorumResponse {
                    unchanged: Some(torchft::Unchanged {
                        quorum_id: self.quorum.quorum_id.signed(),
                        progress: Some(progress.clone().into()),
                    }),
                    list: self.list,
                    ..torchft::LighthouseQuorumResponse::default()
                })
            };
            return self.short.get_or_insert_with(make).clone();
        }
        if let Some((parts, part)) = self.parts.as_ref().zip(caller.part) {
            return Reply::of(&torchft::LighthouseQuorumResponse {
                parts: parts.told(nth, part)?,
                list: self.list,
                ..torchft::LighthouseQuorumResponse::default()
            });
        }
        let make = || {
            Reply::of(&torchft::LighthouseQuorumResponse {
                quorum: Some(quorum_message(&self.quorum, self.now)),
                list: self.list,
                ..torchft::LighthouseQuorumResponse::default()
            })
        };
        self.full.get_or_insert_with(make).clone()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use protocol::assignment::assign;
    use protocol::{QuorumResult, Told};

    use super::*;
    use crate::unchanged::Held;
    use ftcore::Epoch;

    impl Shelf {
        /// All quorums count as large.
        fn of_large_quorums() -> Self {
            Self {
                told_to_all: 0,
                ..Self::default()
            }
        }
    }

    fn received(reply: &Reply) -> torchft::LighthouseQuorumResponse {
        Message::decode(reply.message()).unwrap()
    }

    /// Without `..Member::default()`: a new field has to be varied here.
    fn member(i: usize, same: u8, own: u8) -> Member {
        let text = |what: &str, n: u8| {
            if n == 0 {
                String::new()
            } else {
                format!("{what}-{n}")
            }
        };
        Member {
            replica_id: format!("r{i}"),
            address: text("address", own & 1),
            store_address: text("store", own & 2),
            step: Step(i64::from(same) - 1),
            world_size: u64::from(own & 4),
            shrink_only: own & 8 != 0,
            data: text("data", own & 16),
            commit_failures: i64::from(same & 3),
            lineage: text("lineage", same),
            last_quorum_id: Epoch(u64::from(same >> 4)),
            last_world_size: u64::from(same >> 5),
            incarnation: text("incarnation", own & 32),
            healed: own & 64 != 0,
            batches_committed: i64::from(same) * 3,
            joining: crate::wire::joining(u32::from(own & 3)),
            is_last: own & 32 != 0,
        }
    }

    /// One quorum: whether its id is another, and by member what changes from step to step, and what does not.
    fn quorums() -> impl Strategy<Value = Vec<(bool, Vec<(u8, u8)>)>> {
        let uniform = (any::<u8>(), 1usize..5).prop_map(|(same, n)| vec![(same, 0); n]);
        let mixed = prop::collection::vec((0u8..3, prop_oneof![4 => Just(0u8), 1 => any::<u8>()]), 1..5);
        prop::collection::vec(
            (prop::bool::weighted(0.2), prop_oneof![3 => uniform, 1 => mixed]),
            1..40,
        )
    }

    /// The replica `nth` of a quorum, which holds that, wants its part or the list.
    fn asks(held: &Held, own_part: bool) -> Caller {
        Caller {
            held: held.list(true),
            part: own_part.then_some(Part {
                init_sync: true,
                ranks: 2,
            }),
        }
    }

    /// Whether `told` gives both ranks of the replica `nth` the places that the list gives them.
    fn agrees(told: &Told, quorum: &Quorum, nth: usize) -> Result<(), TestCaseError> {
        let id = &quorum
            .participants
            .iter()
            .chain(&quorum.spares)
            .nth(nth)
            .unwrap()
            .replica_id;
        for rank in 0..2 {
            let whole = assign(id, rank, quorum, true).unwrap();
            let place = told.place(id, rank, true).unwrap();
            prop_assert_eq!(place.digest_of_members(), whole.digest_of_members());
            let mut place = QuorumResult {
                members_digest: String::new(),
                ..place
            };
            match told {
                Told::Members(_) => {}
                Told::Parts(_) => place.replica_ids.clone_from(&whole.replica_ids),
            }
            for source in place
                .recover_sources
                .iter_mut()
                .filter(|s| s.replica_id.is_empty())
            {
                source.replica_id = whole.replica_ids[source.replica_rank as usize].clone();
            }
            prop_assert_eq!(place, whole);
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn whoever_gets_a_short_answer_or_its_own_part_knows_exactly_what_the_list_says(
            quorums in quorums(),
            // By call, which of three replicas lose their answer.
            lost in prop::collection::vec(prop::array::uniform3(prop::bool::weighted(0.2)), 40),
            is_large: bool,
        ) {
            let mut shelf = if is_large { Shelf::of_large_quorums() } else { Shelf::default() };
            let mut holders = [Held::default(), Held::default(), Held::default()];
            let mut id = 1;
            for ((another, members), lost) in quorums.into_iter().zip(lost) {
                id += u64::from(another);
                let participants: Vec<Member> = members.into_iter().enumerate().map(|(i, (same, own))| member(i, same, own)).collect();
                let spares = (id % 3 == 0).then(|| member(9, 1, 0)).into_iter().collect();
                let quorum = Arc::new(Quorum { quorum_id: Epoch(id), participants, spares, fetching: id % 2 });
                let mut replies = shelf.replies(&quorum, SystemTime::now());
                let full = received(&replies.to(0, Caller::default()).unwrap());
                prop_assert_eq!(&Quorum::from(full.quorum.unwrap()), &*quorum);
                // The last one is the last that was answered; and one of them wants the list.
                let last = quorum.participants.len() + quorum.spares.len() - 1;
                for (i, (held, lost)) in holders.iter_mut().zip(lost).enumerate() {
                    let (nth, own_part) = (if i == 2 { last } else { 0 }, i != 0);
                    let reply = replies.to(nth, asks(held, own_part)).unwrap();
                    if !lost {
                        let told = held.take_in(received(&reply), true).unwrap();
                        prop_assert_eq!(matches!(told, Told::Parts(_)), is_large && own_part);
                        if let Told::Members(members) = &told {
                            prop_assert_eq!(&**members, &*quorum);
                        }
                        agrees(&told, &quorum, nth)?;
                    }
                }
            }
        }
    }

    fn of_step(n: usize, step: Step) -> Arc<Quorum> {
        let participants = (0..n)
            .map(|i| Member {
                step,
                last_quorum_id: Epoch(7),
                lineage: format!("{:064x}", step.0),
                ..member(i, 1, 0)
            })
            .collect();
        Arc::new(Quorum {
            quorum_id: Epoch(7),
            participants,
            ..Quorum::default()
        })
    }

    #[test]
    fn the_short_answer_is_as_short_for_ten_thousand_members_as_for_two() {
        let length = |n: usize| {
            let (mut shelf, now) = (Shelf::default(), SystemTime::now());
            let full = shelf
                .replies(&of_step(n, Step(1)), now)
                .to(0, Caller::default())
                .unwrap();
            let list = received(&full).list;
            assert!(full.message().len() > n * 8);
            let short = shelf
                .replies(&of_step(n, Step(2)), now)
                .to(
                    0,
                    Caller {
                        held: list,
                        part: None,
                    },
                )
                .unwrap();
            assert!(received(&short).unchanged.is_some(), "{n} members");
            short.message().len()
        };
        assert_eq!(length(2), length(10_000));
        assert!(length(2) < 150, "{}", length(2));
    }

    #[test]
    fn all_members_share_one_encoded_answer() {
        let mut replies = Shelf::default().replies(&of_step(3, Step(1)), SystemTime::now());
        let [a, b] = [0, 9].map(|held| replies.to(0, Caller { held, part: None }).unwrap().0);
        assert_eq!(a.as_ptr(), b.as_ptr());
    }

    #[test]
    fn an_answer_that_builds_on_another_list_is_refused_and_the_next_one_is_asked_for_in_full() {
        let (mut shelf, now) = (Shelf::default(), SystemTime::now());
        let mut held = Held::default();
        let full = shelf
            .replies(&of_step(2, Step(1)), now)
            .to(0, asks(&held, false))
            .unwrap();
        held.take_in(received(&full), true).unwrap();
        let short = shelf
            .replies(&of_step(2, Step(2)), now)
            .to(0, asks(&held, false))
            .unwrap();
        let wrong = torchft::LighthouseQuorumResponse {
            list: held.list(true) + 1,
            ..received(&short)
        };
        assert_eq!(held.take_in(wrong, true).unwrap_err().kind(), ErrorKind::Protocol);
        assert_eq!(held.list(true), 0);
        assert_eq!(
            held.take_in(received(&short), true).unwrap_err().kind(),
            ErrorKind::Protocol,
            "it holds none"
        );
    }

    /// A whole job, as its replicas see it, whose first quorum has one member that heals: what is told for each step, in bytes.
    fn job(n: usize, steps: i64) -> Vec<usize> {
        let mut shelf = Shelf::default();
        let mut holders: Vec<Held> = (0..n).map(|_| Held::default()).collect();
        let mut told = Vec::new();
        for step in 1..=steps {
            let mut quorum = Quorum::clone(&of_step(n, Step(step)));
            if step == 1 {
                quorum.participants[n / 2].step = Step(0);
            }
            quorum
                .participants
                .sort_by(|a, b| a.replica_id.cmp(&b.replica_id));
            let quorum = Arc::new(quorum);
            let mut replies = shelf.replies(&quorum, SystemTime::now());
            let mut bytes = 0;
            for (nth, held) in holders.iter_mut().enumerate() {
                let reply = replies.to(nth, asks(held, true)).unwrap();
                bytes += reply.message().len();
                let told = held.take_in(received(&reply), true).unwrap();
                // Of all of them the test would take minutes.
                if nth % (n / 16) == 0 || nth == n / 2 {
                    agrees(&told, &quorum, nth).unwrap();
                }
            }
            told.push(bytes);
        }
        told
    }

    #[test]
    fn the_first_quorum_of_sixteen_thousand_replicas_costs_each_of_them_its_own_part_only() {
        let small = job(512, 3);
        let large = job(16_384, 3);
        assert!(
            large[0] < 16_384 * 1000,
            "{large:?}: the list would be {} bytes",
            16_384u64 * 16_384 * 100
        );
        for (small, large) in small.iter().zip(&large) {
            assert!(
                *large < small * 40,
                "32 times the replicas: {small} and {large} bytes"
            );
        }
        assert!(large[2] < 16_384 * 150, "{large:?}: a step without a change");
    }

    #[test]
    fn a_part_that_was_lost_is_told_again_and_not_advanced_from_the_one_before() {
        let (mut shelf, now) = (Shelf::of_large_quorums(), SystemTime::now());
        let mut held = Held::default();
        let mut first = Quorum::clone(&of_step(3, Step(1)));
        first.participants[1].step = Step(0);
        let first = Arc::new(first);
        let reply = shelf.replies(&first, now).to(1, asks(&held, true)).unwrap();
        let told = held.take_in(received(&reply), true).unwrap();
        assert!(told.place("r1", 0, true).unwrap().heal);
        // The list is the same but for its progress; this member's place is not, and that answer is lost.
        shelf
            .replies(&of_step(3, Step(2)), now)
            .to(1, asks(&held, true))
            .unwrap();
        let third = shelf
            .replies(&of_step(3, Step(3)), now)
            .to(1, asks(&held, true))
            .unwrap();
        let told = held.take_in(received(&third), true).unwrap();
        assert!(!told.place("r1", 0, true).unwrap().heal, "it healed long ago");
    }

    #[test]
    fn a_replica_of_absurdly_many_ranks_gets_the_list() {
        let request = |world_size| torchft::LighthouseQuorumRequest {
            requester: Some(torchft::QuorumMember {
                world_size,
                ..Default::default()
            }),
            held_list: 0,
            unanswered: false,
            part: Some(torchft::PartRequest::default()),
        };
        assert!(Caller::of(&request(64)).part.is_some());
        for world_size in [0, 65, u64::MAX] {
            assert!(Caller::of(&request(world_size)).part.is_none());
        }
    }
}
