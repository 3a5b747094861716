//! Where the ranks of a replica find the servers of their rank 0: under a key of the store that they share.
//!
//! The store may outlive them, as that of an elastic launcher does, and have in it what an earlier incarnation put there; and a rank may not have come so
//! far in that one. So rank 0 takes back what is there before its own servers listen, and the others go by what answers: they have found the newest
//! incarnation once they are connected to a server that is still the one under the key.

use std::sync::Arc;
use std::time::{Duration, Instant};

use coordination::ManagerClient;
use ftcore::{Error, ErrorKind, Result, Store, deadline_in};
use identity::Party;

/// The address of rank 0's manager server and the replica's id, a line each.
const KEY: &str = "oxccl/manager";

/// How long a rank tries one address before it looks for a newer one. It grows, for servers that are far away.
const FIRST_TRY: Duration = Duration::from_millis(250);
const LONGEST_TRY: Duration = Duration::from_secs(4);
/// Between two tries.
const PAUSE: Duration = Duration::from_millis(20);

/// Rank 0's servers, as the other ranks find them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Servers {
    pub(crate) address: String,
    pub(crate) replica_id: String,
}

impl Servers {
    /// Rank 0 begins: what an earlier incarnation has put there is not found any more.
    pub(crate) fn withdraw(store: &dyn Store, deadline: Instant) -> Result<()> {
        store.delete(KEY, deadline).map(drop)
    }

    /// They listen.
    pub(crate) fn publish(&self, store: &dyn Store, deadline: Instant) -> Result<()> {
        let text = format!("{}\n{}", self.address, self.replica_id);
        store.set(KEY, text.as_bytes(), deadline)
    }

    fn read(store: &dyn Store, deadline: Instant) -> Result<Self> {
        let wrong = || {
            Error::new(
                ErrorKind::Protocol,
                format!("'{KEY}' in the replica's store is no address and id"),
            )
        };
        let text = String::from_utf8(store.get(KEY, deadline)?).map_err(|_| wrong())?;
        let (address, replica_id) = text.split_once('\n').ok_or_else(wrong)?;
        Ok(Self {
            address: address.to_owned(),
            replica_id: replica_id.to_owned(),
        })
    }

    /// Connects to those of the newest incarnation, as `party`. Errors: those of the store; why the last address could not be reached by `deadline`.
    pub(crate) fn find(
        store: &dyn Store,
        party: Option<&Arc<Party>>,
        deadline: Instant,
    ) -> Result<(ManagerClient, Self)> {
        let mut limit = FIRST_TRY;
        loop {
            let found = Self::read(store, deadline)?;
            let until = deadline_in(limit).min(deadline);
            let client =
                ManagerClient::connect_as(party.cloned(), Some(&found.replica_id), &found.address, until);
            match client.and_then(|client| answers(&client, until).map(|()| client)) {
                Ok(client) if Self::read(store, deadline)? == found => return Ok((client, found)),
                Ok(_) => {}
                Err(e) if e.is_retryable() && until < deadline => {
                    limit = (limit * 2).min(LONGEST_TRY);
                    // Where something else listens there by now, it may say no at once.
                    std::thread::park_timeout(PAUSE);
                }
                Err(e) => return Err(e),
            }
        }
    }
}

/// A connection alone is no sign of a manager server: it is made before the other end has said anything. Errors: there was no answer.
fn answers(client: &ManagerClient, deadline: Instant) -> Result<()> {
    match client.checkpoint_metadata(0, deadline) {
        Err(e) if e.is_retryable() => Err(e),
        // Also if rank 0 has not asked for a quorum yet.
        _ => Ok(()),
    }
}
