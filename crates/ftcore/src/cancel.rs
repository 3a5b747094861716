//! Cancellation of a `configure`: one token with a reason, which every wait below sees.
//!
//! A [`Configuration`](crate::Configuration) carries a [`Cancel`] down through wrappers and backends. A wrapper that has notice of its own
//! passes on a token that watches for them, too; [`Lifecycle`](crate::lifecycle::Lifecycle) cancels its own on `abort`. Waits look at it each
//! [`Cancel::TURN`]: nothing has to be woken, and no thread repeats an abort until it is heard. A TCP store looks while it waits
//! ([`Store::cancelled_by`]), so that no look costs a call what it has reached; other stores are asked in turns.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::{Error, ErrorKind, Result, Store, deadline_in, time_left};

mod store;

type Source = Box<dyn Fn() -> Option<Error> + Send + Sync>;

/// A token that says why a wait is in vain, once it is. Clones are the same token.
#[derive(Clone, Default)]
pub struct Cancel(Arc<Node>);

#[derive(Default)]
struct Node {
    reason: OnceLock<Error>,
    /// Held while it is asked, so that [`Cancel::settle`] returns only when it is not asked any more.
    source: Mutex<Option<Source>>,
    settled: AtomicBool,
}

impl Cancel {
    /// How long a wait lasts before it looks at its token again.
    pub const TURN: Duration = Duration::from_millis(50);
    /// Turns of the same wait grow up to this, for a store that cannot look at a token and begins anew with each call: over a link with a long
    /// round trip a call must be able to end within one turn.
    pub const LONGEST_TURN: Duration = Duration::from_millis(500);

    /// A token that is cancelled once `source` says why. It is asked by every wait, often, and must not block.
    pub fn watching(source: impl Fn() -> Option<Error> + Send + Sync + 'static) -> Self {
        Self(Arc::new(Node {
            source: Mutex::new(Some(Box::new(source))),
            ..Node::default()
        }))
    }

    /// A token below this one: cancelled with it, or alone.
    #[must_use]
    pub fn child(&self) -> Self {
        self.or(|| None)
    }

    /// A token below this one that is also cancelled once `source` says why.
    #[must_use]
    pub fn or(&self, source: impl Fn() -> Option<Error> + Send + Sync + 'static) -> Self {
        let above = self.clone();
        Self::watching(move || above.reason().or_else(&source))
    }

    /// Cancels with `reason`; the first one counts.
    pub fn cancel(&self, reason: Error) {
        let _ = self.0.reason.set(reason);
    }

    /// Why it was cancelled.
    pub fn reason(&self) -> Option<Error> {
        if let Some(reason) = self.0.reason.get() {
            return Some(reason.clone());
        }
        let source = self.0.source.lock().unwrap_or_else(PoisonError::into_inner);
        let found = source.as_ref()?()?;
        Some(self.0.reason.get_or_init(|| found).clone())
    }

    /// The reason as the error of a wait.
    pub fn check(&self) -> Result<()> {
        self.reason().map_or(Ok(()), Err)
    }

    /// The configuration has ended: what it was for asks no source any more, which may own the group itself, and waits of the group's
    /// life go on undisturbed.
    pub fn settle(&self) {
        let source = self
            .0
            .source
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        self.0.settled.store(true, Ordering::Release);
        // Outside the lock: it may own the last handle of a group.
        drop(source);
    }

    /// Repeats `call`, which waits until the instant that it is given, until it ends in something else than `Timeout`, the token is
    /// cancelled (its reason), or `deadline` passes (`Timeout`, with the time waited in all).
    pub fn in_turns<T>(&self, deadline: Instant, mut call: impl FnMut(Instant) -> Result<T>) -> Result<T> {
        let began = Instant::now();
        let mut turn = Self::TURN;
        loop {
            if self.is_settled() {
                return call(deadline);
            }
            let error = match call(deadline_in(turn).min(deadline)) {
                Err(error) if error.kind() == ErrorKind::Timeout => error,
                ended => return ended,
            };
            turn = (turn * 2).min(Self::LONGEST_TURN);
            // What is there is given, cancelled or not.
            self.check()?;
            if time_left(deadline).is_zero() {
                let waited = began.elapsed().as_secs_f64();
                return Err(error.with_more(&format!(" ({waited:.1} s in all)")));
            }
        }
    }

    /// Waits for what comes through `channel` until `deadline` (`None`; also if the other end is gone).
    ///
    /// Errors: the reason, once it is cancelled.
    pub fn receive<T>(&self, channel: &Receiver<T>, deadline: Instant) -> Result<Option<T>> {
        loop {
            match channel.recv_timeout(Self::TURN.min(time_left(deadline))) {
                Ok(value) => return Ok(Some(value)),
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout) if time_left(deadline).is_zero() => return Ok(None),
                Err(RecvTimeoutError::Timeout) => self.check()?,
            }
        }
    }

    /// `store`, with waits that end when this token is cancelled; over a TCP store all calls do.
    pub fn over(&self, store: &Arc<dyn Store>) -> Arc<dyn Store> {
        store
            .cancelled_by(self)
            .unwrap_or_else(|| Arc::new(store::CancelStore::new(store.clone(), self.clone())))
    }

    /// Nothing that watches it is ended any more.
    pub(crate) fn is_settled(&self) -> bool {
        self.0.settled.load(Ordering::Acquire)
    }
}

impl fmt::Debug for Cancel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Cancel").field(&self.0.reason.get()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::InMemoryStore;

    const LONG: Duration = Duration::from_secs(60);

    fn over(text: &str) -> Error {
        Error::new(ErrorKind::Aborted, text)
    }

    fn said(cancel: &Cancel) -> Option<String> {
        cancel.reason().map(|e| e.message().to_string())
    }

    #[test]
    fn a_child_is_cancelled_with_its_parent_or_alone_and_the_first_reason_counts() {
        let parent = Cancel::default();
        let (child, other) = (parent.child(), parent.child());
        child.cancel(over("alone"));
        assert_eq!((said(&child).as_deref(), said(&parent)), (Some("alone"), None));
        parent.cancel(over("all"));
        parent.cancel(over("again"));
        assert_eq!(said(&child).as_deref(), Some("alone"));
        assert_eq!(said(&other).as_deref(), Some("all"));
        assert_eq!(other.clone().check().unwrap_err().message(), "all");
    }

    #[test]
    fn a_token_that_is_settled_asks_nothing_and_lets_go_of_what_it_asked() {
        let owned = Arc::new(());
        let held = owned.clone();
        let parent = Cancel::default();
        let child = parent.or(move || {
            let _ = &held;
            None
        });
        assert!(child.reason().is_none());
        child.settle();
        assert_eq!(Arc::strong_count(&owned), 1);
        parent.cancel(over("too late"));
        assert!(child.reason().is_none());
        // A wait of the group's life is not ended by what its configuration was told.
        child.cancel(over("later still"));
        let store = child.over(&(Arc::new(InMemoryStore::new()) as Arc<dyn Store>));
        let error = store.get("missing", deadline_in(Cancel::TURN * 2)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
    }

    #[test]
    fn every_wait_of_a_store_ends_with_the_reason_and_what_is_there_is_given_all_the_same() {
        let inner: Arc<dyn Store> = Arc::new(InMemoryStore::new());
        inner.set("there", b"1", deadline_in(LONG)).unwrap();
        type Wait = fn(&dyn Store) -> Result<()>;
        let waits: [(&str, Wait); 3] = [
            ("get", |s| s.get("missing", deadline_in(LONG)).map(drop)),
            ("wait", |s| s.wait(&["there", "missing"], deadline_in(LONG))),
            ("multi_get", |s| {
                s.multi_get(&["missing"], deadline_in(LONG)).map(drop)
            }),
        ];
        for (name, wait) in waits {
            let cancel = Cancel::default();
            let store = cancel.over(&inner);
            let begun = Instant::now();
            let error = std::thread::scope(|scope| {
                let waiting = scope.spawn(|| wait(&*store).unwrap_err());
                cancel.cancel(over("enough"));
                waiting.join().unwrap()
            });
            assert_eq!(
                (error.kind(), error.message()),
                (ErrorKind::Aborted, "enough"),
                "{name}"
            );
            assert!(begun.elapsed() < LONG / 2, "{name} waited for its deadline");
            assert_eq!(store.get("there", deadline_in(LONG)).unwrap(), b"1");
        }
    }

    #[test]
    fn a_wait_that_is_not_cancelled_ends_at_its_deadline_and_names_the_whole_time() {
        let inner: Arc<dyn Store> = Arc::new(InMemoryStore::new());
        let store = Cancel::default().over(&inner);
        let error = store.get("missing", deadline_in(Cancel::TURN * 5)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        let text = error.to_string();
        assert!(text.contains("missing") && text.contains(" s in all)"), "{text}");
    }
}
