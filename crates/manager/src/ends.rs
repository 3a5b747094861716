//! Epochs that are over, as the lighthouse says: what the group has in hand may finish first.
//!
//! The notice of a death travels over the lighthouse, and often overtakes data that the dead replica had sent: its last step may be
//! whole. So a reduction in hand gets [`GRACE`] to end by itself, in whatever way, before the group is aborted; a group that has
//! nothing in hand is left alone, because its abort would end what the other members have in hand. The next quorum is a new epoch.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use coordination::{Cancel, PushEvent};
use ftcore::{Credentials, Epoch, Error, ErrorKind, ProcessGroup, Result, TcpStore, deadline_in, time_left};
use protocol::rank::blame_peer;

use replica::Pending;

/// The first try to reach the rendezvous store ends after this time, each later one after twice as long: in between this rank hears
/// whether the member that has the store is still there.
const FIRST_TRY: Duration = Duration::from_millis(100);

/// No quorum yet, or none any more.
pub(crate) const NO_EPOCH: Epoch = Epoch(0);

/// What this rank has heard of the ends of epochs.
pub(crate) struct Ends {
    group: Arc<dyn ProcessGroup>,
    /// What this rank proves to the members' stores.
    credentials: Option<Arc<Credentials>>,
    /// The epoch that the notice is compared with.
    live: AtomicU64,
    /// Which epochs were ended from elsewhere, and why.
    over: Mutex<protocol::ends::Ends>,
    /// The reductions of the present step.
    step: Mutex<Pending>,
}

impl Ends {
    pub(crate) fn new(group: Arc<dyn ProcessGroup>, credentials: Option<Arc<Credentials>>) -> Arc<Self> {
        Arc::new(Self {
            group,
            credentials,
            live: AtomicU64::new(NO_EPOCH.0),
            over: Mutex::default(),
            step: Mutex::default(),
        })
    }

    /// The group belongs to this epoch from now on.
    pub(crate) fn set_live(&self, epoch: Epoch) {
        self.live.store(epoch.0, Ordering::Release);
    }

    /// A step begins: its reductions are `pending`.
    pub(crate) fn begin(&self, pending: Pending) {
        *self.step.lock().unwrap_or_else(PoisonError::into_inner) = pending;
    }

    /// Why `epoch` is over, once it was said.
    pub(crate) fn why_over(&self, epoch: Epoch) -> Option<String> {
        let over = self.over.lock().unwrap_or_else(PoisonError::into_inner);
        over.why_over(epoch).map(str::to_string)
    }

    /// [`why_over`](Self::why_over) as an error of what cannot begin because of it. Nor does it begin once it was given up here.
    pub(crate) fn check(&self, epoch: Epoch, cancel: &Cancel) -> Result<()> {
        if cancel.is_cancelled() {
            return Err(Error::new(ErrorKind::Aborted, "the quorum was given up here"));
        }
        match self.why_over(epoch) {
            None => Ok(()),
            Some(why) => Err(Error::new(
                ErrorKind::Aborted,
                format!("the epoch was over before the group connected: {why}"),
            )),
        }
    }

    /// The lighthouse's notice. Does not block.
    pub(crate) fn hear(self: &Arc<Self>, event: PushEvent) {
        let PushEvent::AbortEpoch {
            quorum_id,
            reason,
            departed,
        } = event
        else {
            return;
        };
        let who = if departed.is_empty() {
            String::new()
        } else {
            format!(" (gone: {})", departed.join(", "))
        };
        let text = format!("epoch {quorum_id} was aborted: {reason}{who}");
        tracing::info!("{text}");
        let mut over = self.over.lock().unwrap_or_else(PoisonError::into_inner);
        over.hear(quorum_id, text);
        drop(over);
        self.settle();
    }

    /// If the live epoch is over: what the group has in hand ends within the time that it gets. Called again with each new reduction.
    pub(crate) fn settle(self: &Arc<Self>) {
        let epoch = Epoch(self.live.load(Ordering::Acquire));
        if epoch == NO_EPOCH {
            return;
        }
        let step = self.step.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let is_in_hand = step.is_running();
        let over = self.over.lock().unwrap_or_else(PoisonError::into_inner);
        let (why, grace) = (
            over.why_over(epoch).map(str::to_string),
            over.settle(epoch, is_in_hand),
        );
        drop(over);
        let (Some(why), Some(grace)) = (why, grace) else {
            return;
        };
        let this = self.clone();
        let watch = move || {
            if step.drain(deadline_in(grace)).is_err() && this.live.load(Ordering::Acquire) == epoch.0 {
                this.group.abort(&why);
            }
        };
        let thread = std::thread::Builder::new().name("ox-settle".into());
        if let Err(error) = thread.spawn(watch) {
            tracing::warn!(%error, "no thread to wait for what is in hand: it is aborted");
            self.group.abort("its epoch is over");
        }
    }

    /// Connects to the store in which the members of `epoch` meet. A member that died after the quorum had formed took its store with
    /// it: `Aborted` once the lighthouse says so, long before the deadline.
    pub(crate) fn reach_store(
        &self,
        epoch: Epoch,
        address: &str,
        deadline: Instant,
        cancel: &Cancel,
    ) -> Result<TcpStore> {
        let mut time = FIRST_TRY;
        loop {
            self.check(epoch, cancel)?;
            let until = deadline_in(time).min(deadline);
            match TcpStore::connect_with(address, self.credentials.clone(), until) {
                Err(e)
                    if matches!(e.kind(), ErrorKind::Unavailable | ErrorKind::Timeout)
                        && !time_left(deadline).is_zero() =>
                {
                    time = time.saturating_mul(2);
                }
                connected => return connected.map_err(|e| blame_peer(e, "with the rendezvous store")),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use backend_gloo::GlooGroup;
    use ftcore::{Completion, Configuration, Epoch, GroupOptions, OpKind, TcpStoreServer, work_pair};
    use protocol::ends::GRACE;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn over(quorum_id: Epoch) -> PushEvent {
        PushEvent::AbortEpoch {
            quorum_id,
            reason: "r1 is gone".into(),
            departed: vec!["r1".into()],
        }
    }

    /// A group of one at epoch 7, and what its rank hears.
    fn at_epoch_7() -> (Arc<GlooGroup>, Arc<Ends>) {
        let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
        let group = Arc::new(GlooGroup::new("ends", GroupOptions::default()).unwrap());
        let configuration = Configuration {
            store: Arc::new(TcpStore::connect(&server.local_addr().to_string(), deadline_in(LONG)).unwrap()),
            prefix: "ends".into(),
            name: "ends".into(),
            epoch: Epoch(7),
            rank: 0,
            world_size: 1,
            deadline: deadline_in(LONG),
            cancel: Default::default(),
        };
        group.configure(configuration).unwrap();
        let ends = Ends::new(group.clone(), None);
        ends.set_live(Epoch(7));
        (group, ends)
    }

    fn is_aborted_by(group: &GlooGroup, deadline: Instant) -> bool {
        while group.error().is_none() {
            if time_left(deadline).is_zero() {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }

    #[test]
    fn a_reduction_that_finishes_although_its_epoch_is_over_counts_and_the_group_is_left_alone() {
        let (group, ends) = at_epoch_7();
        ends.hear(over(Epoch(7)));
        let (work, completer) = work_pair(OpKind::AllReduce, deadline_in(LONG), |_| {});
        let step = Pending::default();
        step.track(&work, |_| {});
        ends.begin(step.clone());
        ends.settle();
        completer.succeed(Completion {
            tensors: Vec::new(),
            source: None,
            contributors: 2,
        });
        step.drain(deadline_in(LONG)).unwrap();
        assert!(!is_aborted_by(&group, deadline_in(GRACE * 2)));
        assert_eq!(
            (step.error().is_none(), step.least_contributors()),
            (true, Some(2))
        );
        assert!(
            ends.why_over(Epoch(7)).unwrap().contains("gone: r1"),
            "the next step is a new epoch"
        );
    }

    #[test]
    fn a_reduction_that_does_not_end_by_itself_is_aborted_soon_after_its_epoch() {
        let (group, ends) = at_epoch_7();
        let (work, _completer) = work_pair(OpKind::AllReduce, deadline_in(LONG), |_| {});
        let step = Pending::default();
        step.track(&work, |_| {});
        ends.begin(step);
        ends.hear(over(Epoch(6)));
        assert!(
            !is_aborted_by(&group, deadline_in(GRACE * 2)),
            "an earlier epoch is no notice"
        );
        ends.hear(over(Epoch(7)));
        assert!(is_aborted_by(&group, deadline_in(LONG)));
    }

    #[test]
    fn the_store_of_a_member_that_died_after_the_quorum_is_not_waited_for() {
        let (_group, ends) = at_epoch_7();
        let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
        let address = server.local_addr().to_string();
        server.shutdown();
        drop(server);
        let begun = Instant::now();
        let reached = std::thread::scope(|scope| {
            let reaching =
                scope.spawn(|| ends.reach_store(Epoch(7), &address, deadline_in(LONG), &Cancel::default()));
            while begun.elapsed() < FIRST_TRY * 2 {
                std::thread::yield_now();
            }
            ends.hear(over(Epoch(7)));
            reaching.join().unwrap()
        });
        let error = reached.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Aborted, "{error}");
        assert!(error.message().contains("r1 is gone"), "{error}");
        assert!(begun.elapsed() < LONG / 2, "{:?}", begun.elapsed());
    }
}
