//! The data plane, played: groups that connect once all members have come, reductions that each member finishes or not, and the states that are
//! offered to those that heal. What the real groups promise, and no more: of a reduction that all members began, any part may see it fail.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ftcore::{Epoch, Error, ErrorKind, Result, Step};
use protocol::Lineage;
use tokio::sync::Notify;

use super::net::Net;
use super::random::{Random, mix};

/// How often a path that was cut is looked at again.
const LOOK: Duration = Duration::from_millis(200);

/// A rank's place in the group of its epoch.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub(super) epoch: Epoch,
    pub(super) group_rank: u32,
    pub(super) rank: u32,
    pub(super) world: u32,
    pub(super) host: String,
}

/// What a member brings to a reduction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Share {
    pub(super) contributes: bool,
    /// The state that the work is of, and the work.
    pub(super) state: u64,
    pub(super) work: u64,
}

/// What others may heal from.
#[derive(Debug, Clone)]
pub(super) struct Offer {
    pub(super) epoch: Epoch,
    pub(super) step: Step,
    pub(super) value: u64,
    pub(super) lineage: Lineage,
    pub(super) host: String,
}

#[derive(Debug, Default)]
struct Group {
    world: u32,
    members: BTreeMap<u32, String>,
    broken: Option<String>,
    rounds: BTreeMap<Step, BTreeMap<u32, Share>>,
}

#[derive(Debug)]
struct State {
    groups: BTreeMap<(Epoch, u32), Group>,
    /// By replica and group rank.
    offers: BTreeMap<(String, u32), Vec<Offer>>,
    random: Random,
    /// Of a hundred complete reductions so many fail for one member.
    failing: u64,
}

#[derive(Debug)]
pub(super) struct Groups {
    net: Arc<Net>,
    state: Mutex<State>,
    changed: Notify,
}

fn lost(why: &str) -> Error {
    Error::new(ErrorKind::PeerLost, why)
}

impl Groups {
    pub(super) fn new(net: Arc<Net>, random: Random) -> Self {
        Self {
            net,
            state: Mutex::new(State {
                groups: BTreeMap::new(),
                offers: BTreeMap::new(),
                random,
                failing: 3,
            }),
            changed: Notify::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on no reduction fails without a reason.
    pub(super) fn settle(&self) {
        self.state().failing = 0;
    }

    /// Looks whenever something has changed, until there is something to say.
    async fn until<T>(
        &self,
        what: &str,
        deadline: Instant,
        mut look: impl FnMut(&mut State) -> Option<Result<T>>,
    ) -> Result<T> {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            if let Some(outcome) = look(&mut self.state()) {
                return outcome;
            }
            tokio::select! {
                biased;
                () = changed => {}
                () = tokio::time::sleep(LOOK) => {}
                () = tokio::time::sleep_until(deadline.into()) => {
                    return Err(Error::timeout(format!("{what} did not end in time")));
                }
            }
        }
    }

    fn all_reached(&self, group: &Group, host: &str) -> bool {
        group.members.values().all(|other| self.net.passes(host, other))
    }

    /// Connects the group. Errors: a member is gone, or the time is over.
    pub(super) async fn connect(&self, at: &Place, deadline: Instant) -> Result<()> {
        let key = (at.epoch, at.group_rank);
        {
            let mut state = self.state();
            let group = state.groups.entry(key).or_default();
            group.world = at.world;
            group.members.insert(at.rank, at.host.clone());
        }
        self.changed.notify_waiters();
        self.until("connecting", deadline, |state| {
            let group = state.groups.get(&key)?;
            if let Some(why) = &group.broken {
                return Some(Err(lost(why)));
            }
            let all = group.members.len() == group.world as usize;
            (all && self.all_reached(group, &at.host)).then_some(Ok(()))
        })
        .await
    }

    /// Reduces: a hash of what the contributors brought, and their number. The second error is a broken promise.
    pub(super) async fn reduce(
        &self,
        at: &Place,
        step: Step,
        share: Share,
        deadline: Instant,
    ) -> Result<std::result::Result<(u64, u32), String>> {
        let key = (at.epoch, at.group_rank);
        if let Some(group) = self.state().groups.get_mut(&key) {
            group.rounds.entry(step).or_default().insert(at.rank, share);
        }
        self.changed.notify_waiters();
        self.until("the reduction", deadline, |state| {
            let group = state.groups.get_mut(&key)?;
            let complete = group.rounds.get(&step).map_or(0, BTreeMap::len) == group.world as usize;
            if !complete || !self.all_reached(group, &at.host) {
                return group.broken.as_ref().map(|why| Err(lost(why)));
            }
            if state.random.percent(state.failing) {
                group.broken.get_or_insert_with(|| "a connection broke".into());
                return Some(Err(lost("a connection broke")));
            }
            let shares = group.rounds.get(&step)?;
            let who = || shares.values().filter(|s| s.contributes);
            let first = who().next().map(|s| s.state);
            if who().any(|s| Some(s.state) != first) {
                let text = format!(
                    "INV-4, INV-6: in epoch {} of step {step} states differ: {shares:?}",
                    at.epoch
                );
                return Some(Ok(Err(text)));
            }
            let result = who().fold(0, |hash, s| mix(hash ^ s.work));
            Some(Ok(Ok((result, who().count() as u32))))
        })
        .await
    }

    /// A member gives its group up, or all groups of a host that ended.
    pub(super) fn leave(&self, host: &str, epoch: Option<Epoch>, why: &str) {
        for ((of, _), group) in &mut self.state().groups {
            if epoch.is_none_or(|e| e == *of) && group.members.values().any(|member| member == host) {
                group.broken.get_or_insert_with(|| format!("{host}: {why}"));
            }
        }
        self.changed.notify_waiters();
    }

    /// What a host offered is gone with it.
    pub(super) fn withdraw(&self, replica: &str, group_rank: u32) {
        self.state().offers.remove(&(replica.to_string(), group_rank));
    }

    pub(super) fn offer(&self, replica: &str, group_rank: u32, offer: Offer) {
        let mut state = self.state();
        let offers = state.offers.entry((replica.to_string(), group_rank)).or_default();
        offers.push(offer);
        let old = offers.len().saturating_sub(2);
        offers.drain(..old);
        drop(state);
        self.changed.notify_waiters();
    }

    /// The state of a step from one of the sources.
    pub(super) async fn fetch(
        &self,
        host: &str,
        sources: &[String],
        group_rank: u32,
        (epoch, step): (Epoch, Step),
        deadline: Instant,
    ) -> Result<Offer> {
        self.until("the transfer", deadline, |state| {
            sources.iter().find_map(|source| {
                let offers = state.offers.get(&(source.clone(), group_rank))?;
                let offer = offers.iter().find(|o| o.epoch == epoch && o.step == step)?;
                self.net.passes(host, &offer.host).then(|| Ok(offer.clone()))
            })
        })
        .await
    }
}
