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

/// What the newest user of a connection knows of it. A port may have one user after another: a lighthouse that leads, follows and leads again.
#[derive(Default)]
struct State {
    user: u64,
    names: Vec<String>,
    told: Option<Told>,
}

/// One connection, given to its requests.
pub(crate) struct Line {
    number: u64,
    /// Who has proved to be at its other end.
    peer: Option<Peer>,
    state: Mutex<State>,
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

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the peer calls itself `name`. True if that is new to `user`; names beyond the most are not noted. A later user, which has a greater
    /// number, knows nothing yet, and an earlier one is not told any more.
    pub(crate) fn is_new(&self, user: u64, name: &str) -> bool {
        let mut state = self.state();
        if user > state.user {
            *state = State {
                user,
                ..State::default()
            };
        }
        let State {
            user: newest, names, ..
        } = &mut *state;
        let new = user == *newest && names.len() < MAX_NAMES && names.iter().all(|n| n != name);
        if new {
            names.push(name.to_string());
        }
        new
    }

    /// What tells the present user what becomes of the connection; the first one stays.
    pub(crate) fn tell(&self, told: impl Fn(Report) + Send + 'static) {
        self.state().told.get_or_insert_with(|| Box::new(told));
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
        if let Some(told) = &self.state().told {
            told(Report::Read);
        }
    }

    pub(super) fn ended(&self, by_peer: bool) {
        let told = self.state().told.take();
        if let Some(told) = told {
            told(Report::Ended { by_peer });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn a_later_user_learns_anew_who_calls_and_is_the_one_that_is_told() {
        let line = Line::new(None);
        let (told, heard) = channel();
        let calls = |user: u64, name: &str| {
            let new = line.is_new(user, name);
            if new {
                let told = told.clone();
                line.tell(move |report| {
                    let _ = told.send((user, report));
                });
            }
            new
        };
        assert_eq!([calls(1, "a"), calls(1, "a"), calls(1, "b")], [true, false, true]);
        line.has_read();
        assert_eq!(heard.try_recv(), Ok((1, Report::Read)));
        assert_eq!([calls(2, "a"), calls(2, "a")], [true, false]);
        assert!(!calls(1, "c"), "a call that the former one still had in hand");
        line.has_read();
        line.ended(true);
        line.ended(true);
        let all: Vec<_> = heard.try_iter().collect();
        assert_eq!(all, [(2, Report::Read), (2, Report::Ended { by_peer: true })]);
    }
}
