//! A small client of etcd: read a key, compare and put, leases.
//!
//! Every call goes to one member of the cluster and, while that gives no answer, to the next one, until its deadline. So each call must be one
//! that may be carried out twice: reads, keep-alives and revocations are, a lease granted twice ends by itself, and a put is always compared with
//! the revision that its key has before.

use std::future::Future;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ftcore::{Error, ErrorKind, Result, split_address};
use tokio::runtime::Handle;
use tonic::Request;
use tonic::transport::{Channel, Endpoint};

use crate::channel::call;
use crate::clock::{self, time_left};
use crate::serve::{PING_INTERVAL, PING_TIMEOUT};
use proto::compare::{CompareResult, CompareTarget, TargetUnion};
use proto::kv_client::KvClient;
use proto::lease_client::LeaseClient;
use proto::request_op::Request as Operation;
use proto::response_op::Response as Outcome;

#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic)]
mod proto {
    tonic::include_proto!("etcdserverpb");
}

/// How long one member may take. A healthy one answers within milliseconds; one that has lost its leader holds the call until there is another.
const ATTEMPT: Duration = Duration::from_millis(1000);
const CONNECT: Duration = Duration::from_millis(500);
/// After all members were tried in vain.
const PAUSE: Duration = Duration::from_millis(20);
/// The largest answer that is accepted, in bytes.
const MAX_ANSWER_BYTES: usize = 64 << 20;

/// What a key holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) value: Vec<u8>,
    /// Of the last write. No two writes share one.
    pub(crate) revision: i64,
}

/// The present revision of a key, 0 for a key that must not be there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Expected<'a> {
    pub(crate) key: &'a str,
    pub(crate) revision: i64,
}

/// How a transaction ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Put {
    /// The write has this revision.
    Done(i64),
    /// A key had another revision. What the compared keys hold now, in their order.
    Refused(Vec<Option<Entry>>),
}

/// A lease and the time that it lasts from its last keep-alive on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lease {
    pub(crate) id: i64,
    pub(crate) ttl: Duration,
}

#[derive(Debug)]
struct Member {
    url: String,
    channel: Channel,
}

/// A client of one cluster.
#[derive(Debug)]
pub(crate) struct Etcd {
    members: Vec<Member>,
    /// The member that answered last.
    preferred: AtomicUsize,
}

impl Etcd {
    /// A client of the cluster with members at these `host:port`. Connects when it is used. Errors: `InvalidArgument`.
    pub(crate) fn new(addresses: &[String], handle: &Handle) -> Result<Self> {
        let _guard = handle.enter();
        let member = |address: &String| {
            let bad = |why: &str| {
                Error::invalid(format!(
                    "etcd address '{address}': {why}; name members by host:port, without http://"
                ))
            };
            split_address(address).map_err(|e| bad(e.message()))?;
            let url = format!("http://{address}");
            let endpoint = Endpoint::from_shared(url.clone()).map_err(|e| bad(&e.to_string()))?;
            let channel = endpoint
                .tcp_nodelay(true)
                .http2_keep_alive_interval(PING_INTERVAL)
                .keep_alive_timeout(PING_TIMEOUT)
                .connect_timeout(CONNECT)
                .connect_lazy();
            Ok(Member { url, channel })
        };
        let members = addresses.iter().map(member).collect::<Result<Vec<_>>>()?;
        if members.is_empty() {
            return Err(Error::invalid(
                "etcd: there is no address; name its members by host:port",
            ));
        }
        Ok(Self {
            members,
            preferred: AtomicUsize::new(0),
        })
    }

    /// Asks one member after another until one answers or the deadline passes.
    async fn ask<T, R, F>(
        &self,
        op: &'static str,
        message: T,
        deadline: Instant,
        rpc: impl Fn(Channel, Request<T>) -> F,
    ) -> Result<R>
    where
        T: Clone,
        F: Future<Output = Result<tonic::Response<R>, tonic::Status>>,
    {
        let mut failures: Vec<Option<Error>> = vec![None; self.members.len()];
        let mut tries = 0;
        loop {
            let at = self.preferred.load(Ordering::Relaxed) % self.members.len();
            let Some(member) = self.members.get(at) else {
                return Err(Error::new(ErrorKind::Internal, "etcd: no member"));
            };
            let until = deadline.min(clock::now() + ATTEMPT);
            let answer = call(op, &member.url, until, message.clone(), |request| {
                rpc(member.channel.clone(), request)
            })
            .await;
            let error = match answer {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            // What the cluster refuses, each of its members does. What is not known to be a refusal is tried elsewhere.
            let refused = matches!(
                error.kind(),
                ErrorKind::InvalidArgument
                    | ErrorKind::NotFound
                    | ErrorKind::Unsupported
                    | ErrorKind::Mismatch
                    | ErrorKind::Conflict
            );
            if refused {
                let kind = match error.kind() {
                    ErrorKind::InvalidArgument => ErrorKind::Protocol,
                    kind => kind,
                };
                let text = format!("etcd refused the call: {error}");
                return Err(Error::new(kind, text).with_source(error));
            }
            let next = (at + 1) % self.members.len();
            let _ = self
                .preferred
                .compare_exchange(at, next, Ordering::Relaxed, Ordering::Relaxed);
            if let Some(failure) = failures.get_mut(at) {
                *failure = Some(error);
            }
            tries += 1;
            if time_left(deadline).is_zero() {
                return Err(self.unanswered(op, &failures));
            }
            if tries % self.members.len() == 0 {
                tokio::time::sleep(PAUSE.min(time_left(deadline))).await;
            }
        }
    }

    /// No member has answered `op`: says why, for each.
    fn unanswered(&self, op: &'static str, failures: &[Option<Error>]) -> Error {
        let each = self.members.iter().zip(failures).map(|(member, failure)| {
            let why = failure.as_ref().map_or("not asked", Error::message);
            format!("{}: {why}", member.url)
        });
        let text = format!(
            "etcd did not answer ({}); do a majority of its members run, and are these the addresses of their client ports?",
            each.collect::<Vec<_>>().join("; ")
        );
        Error::new(ErrorKind::Unavailable, text).with_op(op)
    }

    /// What `key` holds, as the majority of the members has it.
    pub(crate) async fn read(&self, key: &str, deadline: Instant) -> Result<Option<Entry>> {
        let message = range(key);
        let answer = self
            .ask("etcd.range", message, deadline, |channel, request| async move {
                let mut client = KvClient::new(channel).max_decoding_message_size(MAX_ANSWER_BYTES);
                client.range(request).await
            })
            .await?;
        Ok(entry(answer))
    }

    /// Writes `value` to `key`, bound to `lease` if one is given, if all `expected` hold.
    pub(crate) async fn put(
        &self,
        key: &str,
        value: Vec<u8>,
        lease: Option<Lease>,
        expected: &[Expected<'_>],
        deadline: Instant,
    ) -> Result<Put> {
        let compare = expected.iter().map(|e| proto::Compare {
            result: CompareResult::Equal.into(),
            target: CompareTarget::Mod.into(),
            key: e.key.into(),
            target_union: Some(TargetUnion::ModRevision(e.revision)),
        });
        let look = expected.iter().map(|e| proto::RequestOp {
            request: Some(Operation::RequestRange(range(e.key))),
        });
        let write = proto::PutRequest {
            key: key.into(),
            value,
            lease: lease.map_or(0, |l| l.id),
        };
        let message = proto::TxnRequest {
            compare: compare.collect(),
            success: vec![proto::RequestOp {
                request: Some(Operation::RequestPut(write)),
            }],
            failure: look.collect(),
        };
        let answer = self
            .ask("etcd.txn", message, deadline, |channel, request| async move {
                let mut client = KvClient::new(channel).max_decoding_message_size(MAX_ANSWER_BYTES);
                client.txn(request).await
            })
            .await?;
        if answer.succeeded {
            let none = || Error::new(ErrorKind::Protocol, "etcd answered a write without its revision");
            return Ok(Put::Done(answer.header.ok_or_else(none)?.revision));
        }
        let found = answer.responses.into_iter().map(|r| match r.response {
            Some(Outcome::ResponseRange(range)) => entry(range),
            _ => None,
        });
        let found: Vec<Option<Entry>> = found.collect();
        if found.len() != expected.len() {
            let text = format!("etcd answered {} reads with {}", expected.len(), found.len());
            return Err(Error::new(ErrorKind::Protocol, text));
        }
        Ok(Put::Refused(found))
    }

    /// A lease of at least `ttl`, in whole seconds; the cluster may give a longer one.
    pub(crate) async fn grant(&self, ttl: Duration, deadline: Instant) -> Result<Lease> {
        let message = proto::LeaseGrantRequest {
            ttl: i64::try_from(ttl.as_secs().max(1)).unwrap_or(i64::MAX),
            id: 0,
        };
        let answer = self
            .ask("etcd.lease", message, deadline, |channel, request| async move {
                LeaseClient::new(channel).lease_grant(request).await
            })
            .await?;
        if !answer.error.is_empty() || answer.ttl <= 0 {
            let text = format!("etcd gave no lease: {} (ttl {})", answer.error, answer.ttl);
            return Err(Error::new(ErrorKind::Protocol, text));
        }
        Ok(Lease {
            id: answer.id,
            ttl: Duration::from_secs(answer.ttl.unsigned_abs()),
        })
    }

    /// Extends `lease` by its time. False: there is no such lease any more.
    pub(crate) async fn keep_alive(&self, lease: Lease, deadline: Instant) -> Result<bool> {
        let message = proto::LeaseKeepAliveRequest { id: lease.id };
        let rpc = |channel, request: Request<proto::LeaseKeepAliveRequest>| async move {
            let once = tokio_stream::once(request.into_inner());
            let mut answers = LeaseClient::new(channel)
                .lease_keep_alive(once)
                .await?
                .into_inner();
            let none = || tonic::Status::unavailable("the stream of keep-alives ended");
            let answer = answers.message().await?.ok_or_else(none)?;
            Ok(tonic::Response::new(answer))
        };
        match self.ask("etcd.keep-alive", message, deadline, rpc).await {
            Ok(answer) => Ok(answer.ttl > 0),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Ends `lease`: the keys that are bound to it go at once. One that is gone already is no error.
    pub(crate) async fn revoke(&self, lease: Lease, deadline: Instant) -> Result<()> {
        let message = proto::LeaseRevokeRequest { id: lease.id };
        let answer = self
            .ask("etcd.revoke", message, deadline, |channel, request| async move {
                LeaseClient::new(channel).lease_revoke(request).await
            })
            .await;
        match answer {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

fn range(key: &str) -> proto::RangeRequest {
    proto::RangeRequest { key: key.into() }
}

fn entry(answer: proto::RangeResponse) -> Option<Entry> {
    let first = answer.kvs.into_iter().next();
    first.map(|kv| Entry {
        value: kv.value,
        revision: kv.mod_revision,
    })
}

#[cfg(test)]
mod tests {
    use ftcore::deadline_in;

    use super::*;

    #[test]
    fn an_address_that_cannot_be_one_is_named() {
        let runtime = crate::serve::runtime("ox-test", 1).unwrap();
        for bad in ["http://a:2379", "a", "a:b", ""] {
            let error = Etcd::new(&[bad.into()], runtime.handle()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{bad}");
            assert!(error.to_string().contains(&format!("'{bad}'")), "{error}");
        }
        let error = Etcd::new(&[], runtime.handle()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    }

    #[test]
    fn a_cluster_that_does_not_answer_is_an_error_with_every_address_and_what_to_do() {
        let runtime = crate::serve::runtime("ox-test", 1).unwrap();
        let closed = || {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            listener.local_addr().unwrap().to_string()
        };
        let addresses = [closed(), closed()];
        let etcd = Etcd::new(&addresses, runtime.handle()).unwrap();
        let begun = Instant::now();
        let error = runtime
            .block_on(etcd.read("key", deadline_in(Duration::from_millis(300))))
            .unwrap_err();
        assert!(begun.elapsed() < Duration::from_secs(20));
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        let text = error.to_string();
        assert!(addresses.iter().all(|a| text.contains(a)), "{text}");
        assert!(text.contains("client ports"), "{text}");
    }
}
