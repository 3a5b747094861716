//! The messages on the wire, and their translation into our plain types and errors.
//!
//! Numbers from the wire are checked here once; the logic behind sees valid ranks and texts of bounded length.

use std::time::{Duration, Instant, SystemTime};

use ftcore::{Credentials, Epoch, Error, ErrorKind, Result, Step};
use tonic::codegen::http::HeaderMap;
use tonic::{Code, Status};

use protocol::QuorumResult;
use protocol::assignment::RecoverySource;
use protocol::quorum::{Order, OrderKind};
use protocol::{AbortEpoch, Joining, Member, Quorum};

use crate::clock;

#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic)]
pub(crate) mod torchft {
    tonic::include_proto!("torchft");
}

#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic)]
pub(crate) mod oxccl {
    tonic::include_proto!("oxccl");
}

/// The largest message that either side accepts, in bytes.
pub(crate) const MAX_MESSAGE_BYTES: usize = 1 << 20;
/// The largest answer with a quorum in it that a client accepts, in bytes: some 4 KiB for each of 16,384 members.
pub(crate) const MAX_QUORUM_BYTES: usize = 64 << 20;

impl From<torchft::QuorumMember> for Member {
    fn from(m: torchft::QuorumMember) -> Self {
        Self {
            replica_id: m.replica_id,
            address: m.address,
            store_address: m.store_address,
            step: Step(m.step),
            world_size: m.world_size,
            shrink_only: m.shrink_only,
            data: m.data,
            commit_failures: m.commit_failures,
            lineage: m.lineage,
            last_quorum_id: Epoch::of_signed(m.last_quorum_id),
            last_world_size: m.last_world_size,
            incarnation: m.incarnation.unwrap_or_default(),
            healed: m.healed,
            batches_committed: m.batches_committed,
            joining: joining(m.joining),
            is_last: m.is_last,
        }
    }
}

impl From<Member> for torchft::QuorumMember {
    fn from(m: Member) -> Self {
        Self {
            replica_id: m.replica_id,
            address: m.address,
            store_address: m.store_address,
            step: m.step.0,
            world_size: m.world_size,
            shrink_only: m.shrink_only,
            data: m.data,
            commit_failures: m.commit_failures,
            lineage: m.lineage,
            last_quorum_id: m.last_quorum_id.signed(),
            last_world_size: m.last_world_size,
            incarnation: Some(m.incarnation).filter(|l| !l.is_empty()),
            healed: m.healed,
            batches_committed: m.batches_committed,
            joining: joining_code(m.joining),
            is_last: m.is_last,
        }
    }
}

/// What an unknown code says is not known here: such a replica joins at once.
pub(crate) fn joining(code: u32) -> Joining {
    match code {
        1 => Joining::Outside,
        2 => Joining::Now,
        _ => Joining::Untold,
    }
}

pub(crate) fn joining_code(joining: Joining) -> u32 {
    match joining {
        Joining::Untold => 0,
        Joining::Outside => 1,
        Joining::Now => 2,
    }
}

impl From<torchft::Quorum> for Quorum {
    fn from(q: torchft::Quorum) -> Self {
        Self {
            quorum_id: Epoch::of_signed(q.quorum_id),
            participants: q.participants.into_iter().map(Into::into).collect(),
            spares: q.spares.into_iter().map(Into::into).collect(),
            fetching: q.fetching,
        }
    }
}

/// The quorum as a message, made at `created`.
pub(crate) fn quorum_message(quorum: &Quorum, created: SystemTime) -> torchft::Quorum {
    torchft::Quorum {
        quorum_id: quorum.quorum_id.signed(),
        participants: quorum.participants.iter().cloned().map(Into::into).collect(),
        created: Some(created.into()),
        spares: quorum.spares.iter().cloned().map(Into::into).collect(),
        fetching: quorum.fetching,
    }
}

/// The epoch that a notice, a report or a vote names. One below 0 is none: nothing is over by it.
pub(crate) fn epoch_of(number: i64) -> Epoch {
    Epoch(u64::try_from(number).unwrap_or(0))
}

impl From<oxccl::AbortEpoch> for AbortEpoch {
    fn from(a: oxccl::AbortEpoch) -> Self {
        Self {
            quorum_id: epoch_of(a.quorum_id),
            reason: a.reason,
            departed: a.departed,
        }
    }
}

impl From<AbortEpoch> for oxccl::AbortEpoch {
    fn from(a: AbortEpoch) -> Self {
        Self {
            quorum_id: a.quorum_id.signed(),
            reason: a.reason,
            departed: a.departed,
        }
    }
}

impl From<Order> for oxccl::Order {
    fn from(order: Order) -> Self {
        let kind = match order.kind {
            OrderKind::Drain => oxccl::OrderKind::Drain,
            OrderKind::Evict => oxccl::OrderKind::Evict,
            OrderKind::Kill => oxccl::OrderKind::Kill,
        };
        Self {
            kind: kind.into(),
            reason: order.reason,
        }
    }
}

/// `None` for a kind that this version does not know.
pub(crate) fn order_of(order: oxccl::Order) -> Option<Order> {
    let kind = match order.kind() {
        oxccl::OrderKind::Drain => OrderKind::Drain,
        oxccl::OrderKind::Evict => OrderKind::Evict,
        oxccl::OrderKind::Kill => OrderKind::Kill,
        oxccl::OrderKind::Unknown => return None,
    };
    Some(Order {
        kind,
        reason: order.reason,
    })
}

impl From<QuorumResult> for torchft::ManagerQuorumResponse {
    fn from(r: QuorumResult) -> Self {
        Self {
            quorum_id: r.quorum_id.signed(),
            recover_src_manager_address: r.recover_src_manager_address,
            recover_src_replica_rank: r.recover_src_replica_rank.map(i64::from),
            recover_dst_replica_ranks: r.recover_dst_replica_ranks.into_iter().map(i64::from).collect(),
            store_address: r.store_address,
            max_step: r.max_step.0,
            max_replica_rank: r.max_replica_rank.map(i64::from),
            max_world_size: i64::from(r.max_world_size),
            replica_rank: i64::from(r.replica_rank),
            replica_world_size: i64::from(r.replica_world_size),
            heal: r.heal,
            commit_failures: r.commit_failures,
            batches_committed: r.batches_committed,
            draining: r.draining,
            replica_ids: r.replica_ids,
            members_digest: r.members_digest,
            lineage: r.lineage,
            contributor_rank: r.contributor_rank.map(i64::from),
            contributor_world_size: i64::from(r.contributor_world_size),
            recover_sources: r
                .recover_sources
                .into_iter()
                .map(|s| torchft::RecoverySource {
                    replica_rank: i64::from(s.replica_rank),
                    manager_address: s.manager_address,
                    replica_id: s.replica_id,
                })
                .collect(),
            serves_replica_ranks: r.serves_replica_ranks.into_iter().map(i64::from).collect(),
            spare: r.spare,
            serves_spares: r.serves_spares,
            keeps_snapshot: r.keeps_snapshot,
            closes: r.closes,
        }
    }
}

impl TryFrom<torchft::ManagerQuorumResponse> for QuorumResult {
    type Error = Error;

    fn try_from(r: torchft::ManagerQuorumResponse) -> Result<Self> {
        let wrong = |what: &str, n: i64| {
            Error::new(
                ErrorKind::Protocol,
                format!("the manager server sent {what} = {n}"),
            )
        };
        let number = |what: &str, n: i64| u32::try_from(n).map_err(|_| wrong(what, n));
        let epoch = u64::try_from(r.quorum_id).map(Epoch);
        let epoch = epoch.map_err(|_| wrong("quorum_id", r.quorum_id))?;
        let sources = r.recover_sources.into_iter().map(|s| {
            Ok(RecoverySource {
                replica_rank: number("recover_sources", s.replica_rank)?,
                manager_address: s.manager_address,
                replica_id: s.replica_id,
            })
        });
        let mut result = Self {
            quorum_id: epoch,
            replica_rank: number("replica_rank", r.replica_rank)?,
            replica_world_size: number("replica_world_size", r.replica_world_size)?,
            store_address: r.store_address,
            max_step: Step(r.max_step),
            max_replica_rank: r
                .max_replica_rank
                .map(|n| number("max_replica_rank", n))
                .transpose()?,
            max_world_size: number("max_world_size", r.max_world_size)?,
            heal: r.heal,
            recover_src_manager_address: r.recover_src_manager_address,
            recover_src_replica_rank: r
                .recover_src_replica_rank
                .map(|n| number("recover_src_replica_rank", n))
                .transpose()?,
            recover_dst_replica_ranks: r
                .recover_dst_replica_ranks
                .into_iter()
                .map(|n| number("recover_dst_replica_ranks", n))
                .collect::<Result<_>>()?,
            commit_failures: r.commit_failures,
            batches_committed: r.batches_committed,
            draining: r.draining,
            replica_ids: r.replica_ids,
            members_digest: r.members_digest,
            lineage: r.lineage,
            contributor_rank: r
                .contributor_rank
                .map(|n| number("contributor_rank", n))
                .transpose()?,
            contributor_world_size: number("contributor_world_size", r.contributor_world_size)?,
            recover_sources: sources.collect::<Result<_>>()?,
            serves_replica_ranks: r
                .serves_replica_ranks
                .into_iter()
                .map(|n| number("serves_replica_ranks", n))
                .collect::<Result<_>>()?,
            spare: r.spare,
            serves_spares: r.serves_spares,
            keeps_snapshot: r.keeps_snapshot,
            closes: r.closes,
        };
        // A server that tells one source and its readers only, such as torchft's.
        if result.heal
            && result.recover_sources.is_empty()
            && let Some(replica_rank) = result.recover_src_replica_rank
        {
            result.recover_sources.push(RecoverySource {
                replica_rank,
                manager_address: result.recover_src_manager_address.clone(),
                replica_id: String::new(),
            });
        }
        if result.serves_replica_ranks.is_empty() {
            result
                .serves_replica_ranks
                .clone_from(&result.recover_dst_replica_ranks);
        }
        if result.replica_rank >= result.replica_world_size {
            let text = format!(
                "the manager server sent rank {} of {}",
                result.replica_rank, result.replica_world_size
            );
            return Err(Error::new(ErrorKind::Protocol, text));
        }
        Ok(result)
    }
}

/// A rank from the wire.
pub(crate) fn rank(what: &str, n: i64) -> Result<u32, Status> {
    u32::try_from(n).map_err(|_| Status::invalid_argument(format!("{what} = {n} is not a rank")))
}

/// Refuses a text that is longer than `limit` bytes.
pub(crate) fn bounded(what: &str, text: &str, limit: usize) -> Result<(), Status> {
    if text.len() <= limit {
        return Ok(());
    }
    Err(Status::invalid_argument(format!(
        "{what} has {} bytes, at most {limit} are accepted",
        text.len()
    )))
}

/// An error as gRPC tells it.
pub(crate) fn status_of(error: &Error) -> Status {
    let code = match error.kind() {
        ErrorKind::InvalidArgument => Code::InvalidArgument,
        ErrorKind::Timeout => Code::DeadlineExceeded,
        ErrorKind::NotFound => Code::NotFound,
        ErrorKind::Conflict => Code::AlreadyExists,
        ErrorKind::Mismatch => Code::FailedPrecondition,
        ErrorKind::Aborted => Code::Aborted,
        ErrorKind::Unsupported => Code::Unimplemented,
        ErrorKind::PeerLost => Code::DataLoss,
        ErrorKind::Unavailable | ErrorKind::Io => Code::Unavailable,
        _ => Code::Internal,
    };
    Status::new(code, cut(error.message()))
}

/// On a refusal by a lighthouse that does not lead its job.
const ELSEWHERE: &str = "oxccl-elsewhere";

/// The refusal of a lighthouse that does not lead, or leads no more: another one may answer.
pub(crate) fn elsewhere(error: &Error) -> Status {
    let mut status = status_of(error);
    let yes = tonic::metadata::MetadataValue::from_static("1");
    status.metadata_mut().insert(ELSEWHERE, yes);
    status
}

/// Whether another lighthouse may answer what this one did not: it was not reached, or said so.
pub(crate) fn is_elsewhere(status: &Status) -> bool {
    std::error::Error::source(status).is_some() || status.metadata().contains_key(ELSEWHERE)
}

/// A status message travels in a header, where each byte may take three, and the headers of an answer are limited to 16 KiB.
const MAX_STATUS_BYTES: usize = 4096;

/// The text, or as much of its beginning as an answer can carry.
fn cut(text: &str) -> std::borrow::Cow<'_, str> {
    if text.len() <= MAX_STATUS_BYTES {
        return text.into();
    }
    let (kept, _) = text.split_at(text.floor_char_boundary(MAX_STATUS_BYTES));
    format!("{kept}… ({} bytes in all)", text.len()).into()
}

/// What a failed call to `url` means. `deadline` tells a time-out of ours from a call that was cut.
pub(crate) fn error_of(status: &Status, op: &'static str, url: &str, deadline: Instant) -> Error {
    let local = std::error::Error::source(status).is_some();
    let expired = deadline.saturating_duration_since(clock::now()) < Duration::from_millis(5);
    let kind = match status.code() {
        Code::DeadlineExceeded => ErrorKind::Timeout,
        Code::Cancelled if !local || expired => ErrorKind::Timeout,
        // A failure of the connection, whatever code it was given on the way.
        Code::Cancelled | Code::Unavailable => ErrorKind::Unavailable,
        Code::Unknown | Code::Internal if local => ErrorKind::Unavailable,
        // HTTP/2's INADEQUATE_SECURITY, which a server with credentials tells a caller that speaks no TLS: no later attempt fares better.
        Code::PermissionDenied if local => ErrorKind::InvalidArgument,
        Code::InvalidArgument | Code::OutOfRange => ErrorKind::InvalidArgument,
        Code::NotFound => ErrorKind::NotFound,
        Code::AlreadyExists => ErrorKind::Conflict,
        Code::FailedPrecondition => ErrorKind::Mismatch,
        Code::Aborted => ErrorKind::Aborted,
        Code::DataLoss => ErrorKind::PeerLost,
        Code::Unimplemented | Code::PermissionDenied => ErrorKind::Unsupported,
        Code::ResourceExhausted => ErrorKind::Unavailable,
        _ => ErrorKind::Protocol,
    };
    let mut text = status.message().to_string();
    let mut refused = false;
    let mut cause = std::error::Error::source(status);
    while let Some(c) = cause {
        refused |= c.downcast_ref().is_some_and(is_refusal);
        let more = c.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = c.source();
    }
    if local && status.code() == Code::PermissionDenied {
        text = format!("{}; {}", quoted(&text), without_credentials());
    }
    let error = Error::new(kind, text)
        .with_op(op)
        .with_peer_address(url)
        .with_code(i64::from(i32::from(status.code())));
    if refused {
        error.with_source(std::io::Error::from(std::io::ErrorKind::ConnectionRefused))
    } else {
        error
    }
}

/// Of what HTTP/2 tells in five layers about a connection that the server ended: the words of the server, which stand in quotes.
fn quoted(text: &str) -> &str {
    let found = text.split_once("b\"").and_then(|(_, rest)| rest.split_once('"'));
    found.map_or(text, |(words, _)| words)
}

/// What to do about a server that asks for credentials, where this process speaks to it without.
pub(crate) fn without_credentials() -> String {
    format!(
        "set {} to the folder of this job's credentials, and use the server's https:// URL",
        Credentials::VARIABLE
    )
}

fn is_refusal(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::ConnectionRefused
}

/// True if a call failed because nothing listens at the server's address: its process has ended, or has not begun.
pub fn is_refused(error: &Error) -> bool {
    let source = std::error::Error::source(error);
    source.and_then(|e| e.downcast_ref()).is_some_and(is_refusal)
}

/// The time that the caller allows, from the `grpc-timeout` header: at most 8 digits and a unit.
pub(crate) fn grpc_timeout(metadata: &HeaderMap) -> Result<Option<Duration>, Status> {
    let Some(value) = metadata.get("grpc-timeout") else {
        return Ok(None);
    };
    let parsed = value.to_str().ok().and_then(|text| {
        let unit = text.chars().last()?;
        let digits = text.strip_suffix(unit)?;
        if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|b| b.is_ascii_digit()) {
            return None;
        }
        let n: u64 = digits.parse().ok()?;
        Some(match unit {
            'H' => Duration::from_secs(n * 3600),
            'M' => Duration::from_secs(n * 60),
            'S' => Duration::from_secs(n),
            'm' => Duration::from_millis(n),
            'u' => Duration::from_micros(n),
            'n' => Duration::from_nanos(n),
            _ => return None,
        })
    });
    parsed
        .map(Some)
        .ok_or_else(|| Status::invalid_argument("the grpc-timeout header is not a number with a unit"))
}

/// When a server answers a caller that allows `timeout`: a little earlier than the caller gives up, so that the answer,
/// which says what is missing, arrives.
pub(crate) fn answer_by(timeout: Duration) -> Instant {
    let margin = (timeout / 5).min(Duration::from_millis(400));
    clock::deadline_in(timeout.saturating_sub(margin))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn timeout_of(text: &str) -> Result<Option<Duration>, Status> {
        let mut m = HeaderMap::new();
        m.insert("grpc-timeout", text.parse().unwrap());
        grpc_timeout(&m)
    }

    #[test]
    fn every_unit_of_the_timeout_header_is_understood_and_anything_else_is_an_error() {
        for (text, ms) in [
            ("2H", 7_200_000),
            ("3M", 180_000),
            ("4S", 4000),
            ("5m", 5),
            ("6000u", 6),
            ("7000000n", 7),
        ] {
            assert_eq!(
                timeout_of(text).unwrap(),
                Some(Duration::from_millis(ms)),
                "{text}"
            );
        }
        assert_eq!(grpc_timeout(&HeaderMap::new()).unwrap(), None);
        for bad in ["", "S", "1", "1x", "-1S", "+1S", "123456789S", "1.5S", " 1S"] {
            assert_eq!(
                timeout_of(bad).unwrap_err().code(),
                Code::InvalidArgument,
                "{bad:?}"
            );
        }
    }

    #[test]
    fn errors_keep_their_kind_over_the_wire() {
        let kinds = [
            ErrorKind::InvalidArgument,
            ErrorKind::Timeout,
            ErrorKind::NotFound,
            ErrorKind::Conflict,
            ErrorKind::Mismatch,
            ErrorKind::Aborted,
            ErrorKind::Unavailable,
            ErrorKind::PeerLost,
        ];
        for kind in kinds {
            let e = error_of(
                &status_of(&Error::new(kind, "why")),
                "op",
                "url",
                ftcore::deadline_in(Duration::ZERO),
            );
            assert_eq!((e.kind(), e.message()), (kind, "why"));
        }
    }

    #[test]
    fn a_long_message_is_cut_at_a_character_and_says_so() {
        for (text, kept) in [("é".repeat(4096), 4096), (format!("x{}", "é".repeat(9999)), 4095)] {
            let status = status_of(&Error::timeout(text.clone()));
            let message = status.message();
            assert!(message.len() < 4200, "{}", message.len());
            assert!(message.starts_with(&text[..kept]) && !message.starts_with(&text[..kept + 2]));
            assert!(
                message.ends_with(&format!("({} bytes in all)", text.len())),
                "{message}"
            );
        }
        assert_eq!(status_of(&Error::timeout("x".repeat(4096))).message().len(), 4096);
    }

    #[test]
    fn ranks_and_epochs_outside_their_range_are_protocol_errors() {
        let r = torchft::ManagerQuorumResponse {
            quorum_id: -1,
            replica_world_size: 1,
            ..torchft::ManagerQuorumResponse::default()
        };
        assert_eq!(QuorumResult::try_from(r).unwrap_err().kind(), ErrorKind::Protocol);
        let over = |quorum_id| {
            let notice = oxccl::AbortEpoch {
                quorum_id,
                ..oxccl::AbortEpoch::default()
            };
            AbortEpoch::from(notice).quorum_id
        };
        assert_eq!(
            [-1, 7].map(over),
            [Epoch(0), Epoch(7)],
            "a notice of none ends nothing"
        );
        for (replica_rank, world) in [(-1, 2), (2, 2), (1 << 40, 2), (0, -1)] {
            let r = torchft::ManagerQuorumResponse {
                replica_rank,
                replica_world_size: world,
                ..torchft::ManagerQuorumResponse::default()
            };
            assert_eq!(QuorumResult::try_from(r).unwrap_err().kind(), ErrorKind::Protocol);
        }
    }

    #[test]
    fn a_server_that_knows_one_source_only_is_understood() {
        let r = torchft::ManagerQuorumResponse {
            replica_world_size: 2,
            heal: true,
            recover_src_replica_rank: Some(1),
            recover_src_manager_address: "m".into(),
            recover_dst_replica_ranks: vec![3],
            ..torchft::ManagerQuorumResponse::default()
        };
        let result = QuorumResult::try_from(r).unwrap();
        let source = RecoverySource {
            replica_rank: 1,
            manager_address: "m".into(),
            replica_id: String::new(),
        };
        assert_eq!(result.recover_sources, [source]);
        assert_eq!(result.serves_replica_ranks, [3]);
    }

    proptest! {
        #[test]
        fn a_member_and_a_result_survive_the_wire(
            ids in prop::collection::vec("[a-z:]{1,8}", 1..4), step: i64, last in 0..=i64::MAX, lineage in "[a-z]{0,4}",
            rank in 0u32..4, optional in prop::option::of(0u32..9), incarnation in "[a-z]{0,3}", flag: bool,
        ) {
            let member = Member {
                replica_id: ids[0].clone(), address: "a".into(), store_address: "s".into(), step: Step(step), world_size: 3,
                shrink_only: flag, data: "{}".into(), commit_failures: 2, lineage: lineage.clone(),
                last_quorum_id: Epoch::of_signed(last), last_world_size: 4, incarnation, healed: flag, batches_committed: 9, joining: joining(rank), is_last: flag,
            };
            prop_assert_eq!(&Member::from(torchft::QuorumMember::from(member.clone())), &member);
            let result = QuorumResult {
                quorum_id: Epoch::of_signed(last), replica_rank: rank, replica_world_size: rank + 1, store_address: "s".into(),
                max_step: Step(step), max_replica_rank: optional, max_world_size: 2, heal: flag,
                recover_src_manager_address: "m".into(), recover_src_replica_rank: optional,
                recover_dst_replica_ranks: vec![rank], commit_failures: 1, replica_ids: ids, members_digest: "d".into(), lineage,
                contributor_rank: optional, contributor_world_size: rank,
                recover_sources: vec![
                    RecoverySource { replica_rank: rank, manager_address: "m".into(), replica_id: "x".into() },
                    RecoverySource { replica_rank: 7, manager_address: "n".into(), replica_id: String::new() },
                ],
                serves_replica_ranks: vec![rank, 5], batches_committed: 8, draining: flag,
                spare: flag, serves_spares: !flag, keeps_snapshot: rank > 1, closes: flag,
            };
            let wire = torchft::ManagerQuorumResponse::from(result.clone());
            prop_assert_eq!(QuorumResult::try_from(wire).unwrap(), result);
        }
    }
}
