//! The answers to quorum calls: encoded once for each quorum, and shared by all its members.
//!
//! An answer is one gRPC message with its length in front, ready to be sent; a large quorum is copied neither for a member nor on its way to the socket. A
//! replica that holds the member list gets [`Unchanged`](torchft::Unchanged) where that says everything.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::Response;
use ftcore::{Error, ErrorKind, Result};
use http_body_util::{BodyExt, Full};
use prost::Message;

use crate::unchanged;
use crate::wire::{quorum_message, torchft};
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
    pub(crate) fn message(&self) -> Bytes {
        self.0.slice(HEAD.min(self.0.len())..)
    }

    /// As the whole answer to a call.
    pub(crate) fn into_response(self) -> Response {
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", HeaderValue::from_static("0"));
        let body = Full::new(self.0).with_trailers(std::future::ready(Some(Ok(trailers))));
        let mut response = Response::new(Body::new(body));
        let kind = HeaderValue::from_static("application/grpc");
        response.headers_mut().insert(header::CONTENT_TYPE, kind);
        response
    }
}

/// What the last answers were made of.
#[derive(Debug, Default)]
pub(crate) struct Shelf {
    /// The number of the member list that the members of the last quorum hold, and that quorum.
    list: u64,
    last: Quorum,
}

impl Shelf {
    /// The answers for `quorum`, which is made now.
    pub(crate) fn replies(&mut self, quorum: &Arc<Quorum>, now: SystemTime) -> Replies {
        let progress = unchanged::progress(&mut self.last, quorum);
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
            progress,
            now,
            full: None,
            short: None,
        }
    }
}

/// The answers for one quorum, each made when the first member needs it.
#[derive(Debug)]
pub(crate) struct Replies {
    list: u64,
    quorum: Arc<Quorum>,
    progress: Option<Member>,
    now: SystemTime,
    full: Option<Result<Reply>>,
    short: Option<Result<Reply>>,
}

impl Replies {
    /// The answer for a member that holds the list `held` (0: none).
    pub(crate) fn holding(&mut self, held: u64) -> Result<Reply> {
        match &self.progress {
            Some(progress) if held == self.list => {
                let make = || {
                    Reply::of(&torchft::LighthouseQuorumResponse {
                        quorum: None,
                        unchanged: Some(torchft::Unchanged {
                            quorum_id: self.quorum.quorum_id,
                            progress: Some(progress.clone().into()),
                        }),
                        list: self.list,
                    })
                };
                self.short.get_or_insert_with(make).clone()
            }
            _ => {
                let make = || {
                    Reply::of(&torchft::LighthouseQuorumResponse {
                        quorum: Some(quorum_message(&self.quorum, self.now)),
                        unchanged: None,
                        list: self.list,
                    })
                };
                self.full.get_or_insert_with(make).clone()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::unchanged::Held;

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
            step: i64::from(same) - 1,
            world_size: u64::from(own & 4),
            shrink_only: own & 8 != 0,
            data: text("data", own & 16),
            commit_failures: i64::from(same & 3),
            lineage: text("lineage", same),
            last_quorum_id: i64::from(same >> 4),
            last_world_size: u64::from(same >> 5),
            life: text("life", own & 32),
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

    proptest! {
        #[test]
        fn whoever_gets_the_short_answer_rebuilds_exactly_the_quorum_that_the_others_get_in_full(
            quorums in quorums(),
            // By call, which of three replicas lose their answer.
            lost in prop::collection::vec(prop::array::uniform3(prop::bool::weighted(0.2)), 40),
        ) {
            let mut shelf = Shelf::default();
            let mut holders = [Held::default(), Held::default(), Held::default()];
            let mut id = 1;
            for ((another, members), lost) in quorums.into_iter().zip(lost) {
                id += i64::from(another);
                let participants = members.into_iter().enumerate().map(|(i, (same, own))| member(i, same, own)).collect();
                let spares = (id % 3 == 0).then(|| member(9, 1, 0)).into_iter().collect();
                let quorum = Arc::new(Quorum { quorum_id: id, participants, spares, fetching: (id % 2).unsigned_abs() });
                let mut replies = shelf.replies(&quorum, SystemTime::now());
                let full = received(&replies.holding(0).unwrap());
                prop_assert_eq!(&Quorum::from(full.quorum.unwrap()), &*quorum);
                for (held, lost) in holders.iter_mut().zip(lost) {
                    let reply = replies.holding(held.list()).unwrap();
                    if !lost {
                        prop_assert_eq!(&held.take_in(received(&reply)).unwrap(), &*quorum);
                    }
                }
            }
        }
    }

    fn of_step(n: usize, step: i64) -> Arc<Quorum> {
        let participants = (0..n)
            .map(|i| Member {
                step,
                last_quorum_id: 7,
                lineage: format!("{step:064x}"),
                ..member(i, 1, 0)
            })
            .collect();
        Arc::new(Quorum {
            quorum_id: 7,
            participants,
            ..Quorum::default()
        })
    }

    #[test]
    fn the_short_answer_is_as_short_for_ten_thousand_members_as_for_two() {
        let length = |n: usize| {
            let (mut shelf, now) = (Shelf::default(), SystemTime::now());
            let full = shelf.replies(&of_step(n, 1), now).holding(0).unwrap();
            let list = received(&full).list;
            assert!(full.message().len() > n * 8);
            let short = shelf.replies(&of_step(n, 2), now).holding(list).unwrap();
            assert!(received(&short).unchanged.is_some(), "{n} members");
            short.message().len()
        };
        assert_eq!(length(2), length(10_000));
        assert!(length(2) < 150, "{}", length(2));
    }

    #[test]
    fn all_members_share_one_encoded_answer() {
        let mut replies = Shelf::default().replies(&of_step(3, 1), SystemTime::now());
        let [a, b] = [0, 9].map(|held| replies.holding(held).unwrap().0);
        assert_eq!(a.as_ptr(), b.as_ptr());
    }

    #[test]
    fn an_answer_that_builds_on_another_list_is_refused_and_the_next_one_is_asked_for_in_full() {
        let (mut shelf, now) = (Shelf::default(), SystemTime::now());
        let mut held = Held::default();
        let full = shelf.replies(&of_step(2, 1), now).holding(0).unwrap();
        held.take_in(received(&full)).unwrap();
        let short = shelf.replies(&of_step(2, 2), now).holding(held.list()).unwrap();
        let wrong = torchft::LighthouseQuorumResponse {
            list: held.list() + 1,
            ..received(&short)
        };
        assert_eq!(held.take_in(wrong).unwrap_err().kind(), ErrorKind::Protocol);
        assert_eq!(held.list(), 0);
        assert_eq!(
            held.take_in(received(&short)).unwrap_err().kind(),
            ErrorKind::Protocol,
            "it holds none"
        );
    }
}
