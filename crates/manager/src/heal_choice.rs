//! Where the ranks of a replica agree which source they heal from: [`protocol::source::Choice`] under one key of the store in which they meet.
//!
//! A rank reads what stands, lets the choice say what follows from it, and writes that down if nothing else was written meanwhile. It does not
//! wait for another rank.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use checkpoint::{Reach, SourceChoice};
use ftcore::{Epoch, Error, ErrorKind, Result, Step, Store};
use protocol::source::{Choice, Told, Within};

/// What stands if no rank has healed yet, and what no [`Choice`] writes.
const NONE: &[u8] = b"none";

/// The choice of one replica, as one of its ranks asks for it.
pub(crate) struct RanksChoice {
    pub(crate) store: Arc<dyn Store>,
    /// One for each incarnation of the replica.
    pub(crate) key: String,
    pub(crate) quorum_id: Epoch,
    pub(crate) step: Step,
    /// The ids of the replicas that are the sources, in the order of the fetch.
    pub(crate) sources: Vec<String>,
}

impl fmt::Debug for RanksChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RanksChoice").field("key", &self.key).finish()
    }
}

impl RanksChoice {
    pub(crate) fn key(replica_id: &str) -> String {
        format!("oxccl/heal/{replica_id}")
    }

    fn ids(&self, places: &[usize]) -> Vec<String> {
        places
            .iter()
            .filter_map(|i| self.sources.get(*i))
            .cloned()
            .collect()
    }

    /// Lets `f` make something of what stands until what it wants written is. `Ok(None)` from it writes nothing.
    fn change<T>(
        &self,
        deadline: Instant,
        f: impl Fn(Option<&Choice>) -> Result<(T, Option<Choice>)>,
    ) -> Result<T> {
        let failed = |e: Error| {
            let text = format!(
                "the ranks of this replica cannot agree on a source in their replica_store, which has to be there for the whole run: {}",
                e.message()
            );
            Error::new(ErrorKind::Unavailable, text).with_source(e)
        };
        // What stands, or `NONE` from now on.
        let begin = || {
            let standing = self.store.compare_set(&self.key, b"", NONE, deadline);
            standing.map_err(failed)
        };
        let mut standing = begin()?;
        loop {
            let choice = if standing == NONE {
                None
            } else {
                let text = std::str::from_utf8(&standing).ok();
                let read = text.and_then(Choice::read);
                Some(read.ok_or_else(|| {
                    let text = format!(
                        "what stands under '{}' in the replica_store is no choice",
                        self.key
                    );
                    Error::new(ErrorKind::Protocol, text)
                })?)
            };
            let (result, wanted) = f(choice.as_ref())?;
            let Some(wanted) = wanted.map(|c| c.write().into_bytes()) else {
                return Ok(result);
            };
            let now = self
                .store
                .compare_set(&self.key, &standing, &wanted, deadline)
                .map_err(failed)?;
            if now == wanted {
                return Ok(result);
            }
            if Instant::now() >= deadline {
                return Err(Error::timeout(
                    "the choice of a source changed again and again until the deadline",
                ));
            }
            // An absent key is told as if it stood.
            standing = if now == standing { begin()? } else { now };
        }
    }
}

impl SourceChoice for RanksChoice {
    fn follow(&self, reach: &Reach, deadline: Instant) -> Result<Option<usize>> {
        let (have, lost, pending) = (
            self.ids(&reach.have),
            self.ids(&reach.lost),
            self.ids(&reach.pending),
        );
        let within = Within {
            have: &have,
            lost: &lost,
            pending: &pending,
        };
        self.change(deadline, |standing| {
            match Choice::follow(standing, self.quorum_id, self.step, within) {
                Told::Wait => Ok((None, None)),
                Told::Late => {
                    let text = "another rank of this replica heals to a later state already";
                    Err(Error::new(ErrorKind::Aborted, text))
                }
                Told::Follow(choice, is_new) => {
                    let place = self.sources.iter().position(|id| id == choice.source());
                    let place = place.ok_or_else(|| {
                        let text = format!(
                            "another rank of this replica follows {}, which is no source of this rank",
                            choice.source()
                        );
                        Error::new(ErrorKind::Mismatch, text)
                    })?;
                    Ok((Some(place), is_new.then_some(choice)))
                }
            }
        })
    }

    fn settle(&self, followed: &[usize], deadline: Instant) -> Result<bool> {
        let followed = self.ids(followed);
        self.change(deadline, |standing| {
            let settled = standing.and_then(|c| c.settle(self.quorum_id, self.step, &followed));
            Ok((settled.is_some(), settled))
        })
    }
}
