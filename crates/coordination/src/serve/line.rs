//! What a service remembers of a connection: who its peer is, under which names it called, what is to happen when the connection ends, and who wants to
//! know that all that has come over it is read.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use identity::Peer;
use tokio::sync::Notify;

/// The most names for one connection. A replica has one; a connection with more is some tool's.
const MAX_NAMES: usize = 16;

static NEXT: AtomicU64 = AtomicU64::new(1);

/// What becomes of a connection, as its user is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Report {
    /// All that had come when it was [asked for](Line::read) is with its handlers.
    Read,
    /// It has ended, by its peer unasked (as the kernel of a killed process does it) or not. Not told when the whole server closes.
    Ended {
        /// By its peer.
        by_peer: bool,
    },
}

type Told = Box<dyn Fn(Report) + Send>;

/// One connection, given to its requests.
pub(crate) struct Line {
    number: u64,
    /// Who has proved to be at its other end.
    peer: Option<Peer>,
    state: Mutex<(Vec<String>, Option<Told>)>,
    asked: Notify,
}

impl Line {
    pub(crate) fn new(peer: Option<Peer>) -> Self {
        Self {
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            peer,
            state: Mutex::default(),
            asked: Notify::new(),
        }
    }

    /// Differs from that of every other connection of this process.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Who calls; `None` without credentials.
    pub(crate) fn peer(&self) -> Option<&Peer> {
        self.peer.as_ref()
    }

    fn state(&self) -> MutexGuard<'_, (Vec<String>, Option<Told>)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the peer calls itself `name`. True if that is new; names beyond the most are not noted.
    pub(crate) fn is_new(&self, name: &str) -> bool {
        let names = &mut self.state().0;
        let new = names.len() < MAX_NAMES && names.iter().all(|n| n != name);
        if new {
            names.push(name.to_string());
        }
        new
    }

    /// Who is told what becomes of the connection; the first one stays.
    pub(crate) fn tell(&self, told: impl Fn(Report) + Send + 'static) {
        self.state().1.get_or_insert_with(|| Box::new(told));
    }

    /// Asks for [`Report::Read`].
    pub(crate) fn read(&self) {
        self.asked.notify_one();
    }

    /// Until a caller [asks](Self::read).
    pub(crate) async fn is_asked(&self) {
        self.asked.notified().await;
    }

    pub(super) fn has_read(&self) {
        if let Some(told) = &self.state().1 {
            told(Report::Read);
        }
    }

    pub(super) fn ended(&self, by_peer: bool) {
        let told = self.state().1.take();
        if let Some(told) = told {
            told(Report::Ended { by_peer });
        }
    }
}
