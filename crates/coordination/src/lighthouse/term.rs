//! A term: the time for which this lighthouse leads its job, as etcd has it.
//!
//! The leader key names the leading lighthouse and is bound to its lease. The revision of the write that made it so is the term's token: every
//! write of the record compares it, and every answer to a replica is given after a read that finds it still in place. So what a lighthouse
//! does after another one has replaced the key changes nothing and tells no member anything, however long it was stopped or cut off, and whatever
//! its clock says.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{Error, ErrorKind, Result};
use protocol::quorum::Record;
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;

use super::saved;
use crate::clock::{self, time_left};
use crate::etcd::{Entry, Etcd, Expected, Lease, Put};

/// The lease that is asked for. Only a leading lighthouse that hangs or is cut off is found by its end; a dead one is found by its connection.
pub(super) const TTL: Duration = Duration::from_secs(3);
/// Keep-alives are sent, and the key is looked at, so often.
const BEAT: Duration = Duration::from_millis(500);

/// The keys of a job in etcd.
#[derive(Debug, Clone)]
pub(super) struct Keys {
    pub(super) leader: String,
    pub(super) record: String,
}

impl Keys {
    pub(super) fn of(job: &str) -> Self {
        Self {
            leader: format!("/oxccl/{job}/leader"),
            record: format!("/oxccl/{job}/record"),
        }
    }
}

/// What the leader key holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Leader {
    /// Where it is reached, `http://host:port`.
    pub(super) address: String,
    /// Another one in each run of the process.
    pub(super) incarnation: String,
}

impl Leader {
    /// Errors: `Corrupt` if the key is not ours.
    pub(super) fn decode(entry: &Entry, key: &str) -> Result<Self> {
        serde_json::from_slice(&entry.value)
            .map_err(|e| Error::new(ErrorKind::Corrupt, format!("etcd key {key}: {e}")).with_source(e))
    }
}

/// This lighthouse leads.
#[derive(Debug)]
pub(crate) struct Term {
    etcd: Arc<Etcd>,
    keys: Keys,
    lease: Lease,
    /// The revision of the leader key.
    token: i64,
    /// The revision of the record. A late write of this very lighthouse must not replace a newer one.
    record: Mutex<i64>,
}

impl Term {
    /// The term that began with the write of revision `token`, and the record as the last term left it.
    pub(super) async fn begin(
        etcd: Arc<Etcd>,
        keys: Keys,
        lease: Lease,
        token: i64,
    ) -> Result<(Self, Option<Record>)> {
        let place = format!("etcd key {}", keys.record);
        // No other lighthouse can write it any more: what is read now is final.
        let entry = etcd.read(&keys.record, clock::now() + lease.ttl).await?;
        let record = entry.as_ref().map(|e| saved::decode(&e.value, &place));
        let term = Self {
            etcd,
            keys,
            lease,
            token,
            record: Mutex::new(entry.as_ref().map_or(0, |e| e.revision)),
        };
        Ok((term, record.transpose()?))
    }

    pub(super) fn token(&self) -> i64 {
        self.token
    }

    /// Writes the record if this lighthouse still leads.
    pub(super) async fn save(&self, record: &Record) -> Result<()> {
        let place = format!("etcd key {}", self.keys.record);
        let text = saved::encode(record, &place)?;
        let mut revision = self.record.lock().await;
        let expected = [
            Expected {
                key: &self.keys.leader,
                revision: self.token,
            },
            Expected {
                key: &self.keys.record,
                revision: *revision,
            },
        ];
        let deadline = clock::now() + self.lease.ttl;
        let put = self
            .etcd
            .put(&self.keys.record, text.clone(), None, &expected, deadline)
            .await?;
        let found = match put {
            Put::Done(new) => {
                *revision = new;
                return Ok(());
            }
            Put::Refused(found) => found,
        };
        let mut found = found.into_iter();
        self.is_own(found.next().flatten().as_ref())?;
        match found.next().flatten() {
            // The answer to the first attempt was lost.
            Some(entry) if entry.value == text && entry.revision > *revision => {
                *revision = entry.revision;
                Ok(())
            }
            _ => {
                let text = format!(
                    "{place} was changed by another program while this lighthouse leads; the job's keys are its alone"
                );
                Err(Error::new(ErrorKind::Conflict, text))
            }
        }
    }

    /// Whether this lighthouse leads now.
    pub(super) async fn confirm(&self) -> Result<()> {
        let deadline = clock::now() + self.lease.ttl;
        let entry = self.etcd.read(&self.keys.leader, deadline).await?;
        self.is_own(entry.as_ref())
    }

    /// Errors: `Conflict` if the leader key is no longer this term's.
    fn is_own(&self, entry: Option<&Entry>) -> Result<()> {
        let who = match entry {
            Some(entry) if entry.revision == self.token => return Ok(()),
            Some(entry) => Leader::decode(entry, &self.keys.leader)?.address,
            None => {
                let text =
                    "the lease of this lighthouse has ended: it did not reach etcd in time, or was stopped";
                return Err(Error::new(ErrorKind::Conflict, text));
            }
        };
        let text = format!("another lighthouse leads the job: {who}");
        Err(Error::new(ErrorKind::Conflict, text))
    }

    /// Keeps the lease until it is lost; gives back why.
    pub(super) async fn keep(&self) -> Error {
        let mut until = clock::now() + self.lease.ttl;
        loop {
            tokio::time::sleep(BEAT).await;
            if time_left(until).is_zero() {
                let text = "this lighthouse did not run for longer than its lease";
                return Error::new(ErrorKind::Conflict, text);
            }
            let begun = clock::now();
            match self.etcd.keep_alive(self.lease, until).await {
                Ok(true) => until = begun + self.lease.ttl,
                Ok(false) => {
                    return Error::new(ErrorKind::Conflict, "the lease of this lighthouse has ended");
                }
                Err(error) if time_left(until).is_zero() => return error,
                Err(error) => tracing::warn!(%error, "the lease was not extended; trying again"),
            }
            match self.confirm().await {
                Err(error) if error.kind() != ErrorKind::Unavailable => return error,
                // The lease tells how long this may go on.
                _ => {}
            }
        }
    }

    /// Gives the lead up, so that another lighthouse takes it at once.
    pub(super) async fn resign(&self, deadline: Instant) -> Result<()> {
        self.etcd.revoke(self.lease, deadline).await
    }
}
